"""Hybrids: recurrent states at any position, edits of them, and what they refuse. `test_machine.py` and `test_contract.py` run
random sessions on them, and `tests/kernels/test_recurrent.py` compares their kernels with the definition."""

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import replaylens as rl
from replaylens.engine.engine import Engine
from replaylens.engine.errors import (
    BadEdit,
    BadRequest,
    BadWeights,
    IntegrityError,
    NonFinite,
    OutOfStates,
    UnknownSite,
)
from replaylens.engine.memory.cache import RoomPlan, cache_bytes, kv_bytes, require_memory
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.memory.rooms import Rooms, Shelf
from replaylens.engine.model.config import MixerConfig, ModelConfig
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.kernels.definition import CHUNK
from replaylens.probes.probe import LinearProbe
from replaylens.probes.rows import Cell
from replaylens.weights.loading import load
from tests.devices import covering, swept
from tests.engine.passes.packed import relative, sequences
from tests.engine.reference import decoder
from tests.families import HYBRIDS, hugging_face

SITE = "blocks.0.mixer.hook_state"
LATER = "blocks.1.hook_in"
LENGTH = 140
"""beyond two chunks"""
TOKENS = sequences((LENGTH,), seed=3)[0].tolist()


@cache
def engine(name: str) -> Engine:
    return Engine(decoder(name))


@cache
def other(name: str) -> Branch:
    """Another text, with its states."""
    return engine(name).prompt(sequences((LENGTH,), seed=9)[0].tolist(), sites=[SITE])


def in_pieces(name: str, edits: list[Edit], **options: int) -> Branch:
    """The text in passes of 1, 2, 1 and 17 rows in turn."""
    later = [Edit(e.site, e.op, e.value, positions=slice(e.positions, e.positions + 1)) for e in edits]  # type: ignore[operator]
    branch = Engine(decoder(name), **options).prompt(TOKENS[:1], sites=[SITE, LATER], edits=later)  # type: ignore[arg-type]
    while branch.length < LENGTH:
        for size in (1, 2, 1, 17):
            branch.force(TOKENS[branch.length : branch.length + size])
    return branch


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_over_several_chunks_are_hugging_faces(name: str) -> None:
    """In the engine's own arithmetic, whose chunks are not those of transformers."""
    ours = engine(name).prompt(TOKENS).logits(range(LENGTH))
    with torch.no_grad():
        theirs = hugging_face(name)(torch.tensor([TOKENS])).logits[0]
    assert relative(ours, theirs) < 2e-6 and torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As in transformers. Anything else that is not read is an error."""
    hugging_face("qwen3-next").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert weights_hash(load(tmp_path)) == weights_hash(decoder("qwen3-next"))
    save_file({**tensors, "model.other.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(BadWeights, match=r"model\.other\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["qwen3-next", "mamba2"])
def test_states_are_what_rows_read(name: str) -> None:
    branch = engine(name).prompt(TOKENS, sites=[SITE, "blocks.0.mixer.hook_q", "blocks.0.mixer.hook_read"])
    q, states = branch.activations["blocks.0.mixer.hook_q"].double(), branch.activations[SITE].double()
    by_head = q.repeat_interleave(states.shape[1] // q.shape[1], dim=1)
    found = torch.einsum("thkv,thk->thv", states, by_head)
    assert relative(found, branch.activations["blocks.0.mixer.hook_read"]) < 1e-6
    assert torch.equal(branch.state(0), branch.activations[SITE][-1])
    assert torch.equal(branch.state(0, 63), branch.activations[SITE][63])


@pytest.mark.parametrize("name, at", covering(["qwen3-next", "mamba2"], [10, 63, 64]))
def test_a_state_patched_into_another_branch(name: str, at: int) -> None:
    """In the middle of a chunk, at its end and at its beginning: whole, in small passes, and in other pages."""
    patch = Edit(SITE, "set", other(name).state(0, at), positions=at)
    edits = [Edit(SITE, "add", torch.ones(other(name).state(0).shape), positions=5), patch, Edit(SITE, "zero", positions=70)]
    whole, plain = (engine(name).prompt(TOKENS, sites=[SITE, LATER], edits=some) for some in (edits, []))
    single = in_pieces(name, edits, page_size=4)
    for site in (SITE, LATER):
        assert torch.equal(whole.activations[site], single.activations[site])
    assert torch.equal(whole.activations[LATER][:5], plain.activations[LATER][:5])
    assert torch.equal(whole.activations[SITE][at], other(name).state(0, at))
    assert not torch.equal(whole.activations[LATER][at + 1], plain.activations[LATER][at + 1]), "later rows read it"


def test_the_state_of_one_head() -> None:
    """Given for all heads or for the edited ones, the others keep theirs."""
    subject, state = engine("qwen3-next"), other("qwen3-next").state(0)
    plain = subject.prompt(TOKENS[:30]).state(0)
    for value in (state, state[[1]]):
        patched = subject.prompt(TOKENS[:30], edits=[Edit(SITE, "set", value, positions=29, heads=[1])]).state(0)
        assert torch.equal(patched[1], state[1]) and torch.equal(patched[[0, 2, 3]], plain[[0, 2, 3]])
    with pytest.raises(BadEdit, match=r"must end with \(2, 6, 10\)"):
        subject.prompt(TOKENS, edits=[Edit(SITE, "set", state[[1]], positions=3, heads=[1, 2])])


def test_forks_and_rollbacks_keep_an_edited_state() -> None:
    """A fork with an edit in the open chunk, a rollback across its end, and a fork before the edit."""
    patch = Edit(SITE, "set", other("qwen3-next").state(0), positions=50)
    root = engine("qwen3-next").prompt(TOKENS[:60], sites=[LATER])
    (fork,) = root.fork(edits=[patch])
    fork.force(TOKENS[60:80])
    fork.rollback(61)
    fork.force(TOKENS[61:])
    whole = engine("qwen3-next").prompt(TOKENS, sites=[LATER], edits=[patch])
    assert torch.equal(fork.activations[LATER], whole.activations[LATER])
    (before,) = fork.fork(at=40)
    before.force(TOKENS[40:])
    assert torch.equal(before.activations[LATER], whole.activations[LATER])


@pytest.mark.parametrize(
    "name, seed",
    [("qwen3-next", 1), ("mamba2", 2), pytest.param("falcon-h1", 3, marks=pytest.mark.slow)],
)
def test_random_histories_with_edited_states(name: str, seed: int) -> None:
    """Passes of any size, rejected rows and forks, in pages of any size: the rows of the whole path at once."""
    draw, subject, sites = random.Random(seed), engine(name), [SITE, "blocks.1.hook_out"]
    edits = []
    for _ in range(3):
        at, count, layer = draw.choice([5, 40, 62, 63, 64, 90, 127]), draw.choice([1, 2, 5]), draw.choice(["0", "*"])
        value = torch.randn(other(name).state(0).shape, generator=torch.Generator().manual_seed(at))
        op, value = draw.choice([("add", value), ("set", value), ("zero", None)])
        edits.append(Edit(f"blocks.{layer}.mixer.hook_state", op, value, positions=slice(at, at + count)))
    sizes = {"page_size": draw.choice([1, 4, 16, 32]), "max_rows": draw.choice([16, 17, 64])}
    sizes["state_tokens"] = sizes["max_rows"] + 4 * CHUNK
    branch = Engine(decoder(name), canary=True, **sizes).prompt(TOKENS[:20], sites=sites, edits=edits)
    while branch.length < LENGTH:
        branch.force(TOKENS[branch.length : branch.length + draw.choice([1, 2, 7, 30])])
        if branch.length < LENGTH and draw.random() < 0.5:
            kept = branch.length
            branch.force([draw.randrange(97) for _ in range(draw.choice([1, 9, 40]))])
            branch.rollback(kept)
            (branch,) = branch.fork()
    whole = subject.prompt(TOKENS, sites=sites, edits=edits)
    assert all(torch.equal(branch.activations[site], whole.activations[site]) for site in sites)


def test_states_of_shared_prefixes_and_copied_pages() -> None:
    """A fork copies a page of an open chunk, and a prompt shares the state of a closed one."""
    subject = Engine(decoder("qwen3-next"), page_size=16)
    root = subject.prompt(TOKENS[:70], sites=[LATER])
    (fork,) = root.fork(at=66)
    fork.force(TOKENS[66:])
    again, whole = subject.prompt(TOKENS, sites=[LATER]), engine("qwen3-next").prompt(TOKENS, sites=[LATER])
    assert torch.equal(fork.activations[LATER], whole.activations[LATER])
    assert torch.equal(again.activations[LATER], whole.activations[LATER])


def test_the_canary_watches_states() -> None:
    subject = Engine(decoder("qwen3-next"), canary=True, page_size=16)
    branch = subject.prompt(TOKENS[:70]).generate(2)
    cache = subject.runner.cache
    cache.states[:, int(cache.state_of[branch.lane.table.pages[3]]), 0, 0, 0] += 1
    with pytest.raises(IntegrityError, match="position 63"):
        branch.generate(2)


# ---- rooms ---------------------------------------------------------------------------------------------------------------


def crowded(name: str, page_size: int = 16, **options: bool) -> Engine:
    """An engine that keeps as few entries and states as it can."""
    subject = Engine(decoder(name), page_size=page_size, max_rows=16, state_tokens=16 + 4 * CHUNK, cache_tokens=4096, **options)
    rooms = subject.runner.cache.rooms
    assert rooms is not None
    rooms.states.page, rooms.states.used, rooms.states.later = (  # fewer than tiny states would take of the memory of KV
        x[:4].copy() for x in (rooms.states.page, rooms.states.used, rooms.states.later)
    )
    rooms.states.count = 3
    return subject


@pytest.mark.parametrize(
    "name, page_size",
    swept([("qwen3-next", 64), ("mamba2", 4), ("lfm2", 64), ("nemotron-h", 16)], ("qwen3-next", 64), ("mamba2", 4)),
)
def test_what_is_not_kept_is_computed_again(name: str, page_size: int) -> None:
    """Forks, rollbacks, prompts with shared prefixes and several branches at once: states and entries that were lost."""
    subject, tokens, draw = crowded(name, page_size, canary=name == "lfm2"), (TOKENS * 2)[:240], random.Random(page_size)
    whole = engine(name).prompt(tokens, sites=[LATER]).activations[LATER]
    kv = engine(name).prompt(tokens).kv()
    kept = [subject.prompt(tokens[:2], sites=[LATER]).force(tokens[2:])]
    for _ in range(6):
        branch = draw.choice(kept)
        at = draw.choice([2, 63, 64, 65, 100, 128, 129, 192, 193, 200, 238])
        if draw.random() < 0.5 and len(kept) > 1:
            branch.rollback(min(at, branch.length))
        else:
            (branch,) = branch.fork(at=min(at, branch.length))
            kept.append(branch)
        if branch.length < len(tokens):
            branch.force(tokens[branch.length : branch.length + draw.choice([1, 40, 110])])
        assert torch.equal(branch.activations[LATER], whole[: branch.length])
        if subject.config.layers_with("attn"):
            assert torch.equal(branch.kv(), kv[: branch.length])
        subject.check_integrity()
    again = subject.prompts([tokens[:130], tokens[:230], tokens[:66]])  # may share prefixes
    together = subject.generate(again, 5)
    alone = engine(name).generate(engine(name).prompts([tokens[:130], tokens[:230], tokens[:66]]), 5)
    assert [b.tokens for b in together] == [b.tokens for b in alone]
    assert any("pages have entries" in line for line in subject.check_integrity())
    edits = [Edit("T", "zero", positions=at, layers=[0]) for at in (30, 70, 140)]
    found = subject.logits_under(tokens[:150], [[edit] for edit in edits])
    assert all(
        torch.equal(row, engine(name).logits(tokens[:150], edits=[edit])) for row, edit in zip(found, edits, strict=True)
    )


@pytest.mark.slow
def test_drafts_of_a_crowded_engine() -> None:
    """Windows of the fast path and of other drafters, whose rows may be lost before they are verified."""
    subject, some = crowded("qwen3-next"), [TOKENS[i : i + 70] for i in range(5)]
    for drafter in ("self", "tree"):
        found = subject.generate(subject.prompts(some), 6, drafter=drafter, window=4)
        expected = engine("qwen3-next").generate(engine("qwen3-next").prompts(some), 6)
        assert [b.tokens for b in found] == [b.tokens for b in expected]


def test_control_lost_entries_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a path went on where its entries are gone, its rows would differ."""
    subject, whole = crowded("qwen3-next"), engine("qwen3-next").prompt(TOKENS, sites=[LATER])
    root = subject.prompt(TOKENS[:100], sites=[LATER])
    for seed in range(8):
        subject.prompt(sequences((100,), seed=seed)[0].tolist())
    rooms = subject.runner.cache.rooms
    assert rooms is not None and rooms.known(root.lane.table, 100) < 100
    monkeypatch.setattr(rooms, "known", lambda table, length: length)
    root.force(TOKENS[100:])
    assert not torch.equal(root.activations[LATER], whole.activations[LATER])


def test_variants_whose_entries_are_lost_to_one_another() -> None:
    """Others leave a text only the entries that two variants go on from, and the first takes the second's."""
    subject, tokens = crowded("mamba2"), TOKENS[:134]
    edits = [[Edit("T", "zero", positions=at, layers=[0])] for at in (124, 131)]
    with subject.variants(tokens) as variants:
        others = [subject.prompt([i, *TOKENS[:15]]) for i in range(12)]
        found = variants.read(edits, [133], lambda logits: logits)[:, 0]
    assert len(others) == 12 and torch.equal(found, engine("mamba2").logits_under(tokens, edits))


def taken(rooms: Rooms, table: PageTable, start: int, end: int) -> None:
    rooms.prepare(table, start, end)
    rooms.take(table, start, end, rooms.pool.reserve(table, start, end))


def test_rows_that_are_written_again_need_their_rooms() -> None:
    """Of 10 rooms, this step uses 4 of a path and 4 of another. The path's 4 drafts had the last 2, and need 4."""
    rooms, path = Rooms(PagePool(64, 1), 10, 4, tail=3), PageTable()
    rooms.begin()
    taken(rooms, path, 0, 8)
    for page in path.pages[6:]:
        rooms.entries.drop(page)
    rooms.begin()
    taken(rooms, PageTable(), 0, 4)
    with pytest.raises(OutOfStates, match=r"4 pages of entries .* 2 of 10 free"):
        taken(rooms, path, 4, 8)


def test_a_page_written_in_part_has_no_entries_that_it_lost() -> None:
    """Rows 0 to 6 of a page of 16 whose room was lost, on a path of 12: the others are not there."""
    rooms, table = Rooms(PagePool(8, 16), 4, 4, tail=3), PageTable()
    taken(rooms, table, 0, 12)
    taken(rooms, table, 0, 6)
    assert rooms.known(table, 12) == 12
    rooms.entries.drop(table.pages[0])
    taken(rooms, table, 0, 6)
    assert rooms.known(table, 12) == 0


class Walk(Shelf):
    """Finds the room to be taken by a look at all, as the docstring of `rooms` says."""

    def take(self, page: int, now: int, chunk: int = 0) -> tuple[int, int]:
        room, lost = int(self.of[page]), 0
        if not room:
            free = lambda room: not self.page[room] or not self.pool.refcount(int(self.page[room]))  # noqa: E731
            cost = lambda room: int(self.used[room] + self.later[room])  # noqa: E731
            rank = lambda room: (-1, 0, room) if free(room) else (int(self.used[room] >= now - 1), cost(room), room)  # noqa: E731
            room = min((room for room in range(1, self.count + 1) if self.used[room] != now), key=rank)
            lost = int(self.page[room])
            self.of[lost], self.of[page], self.page[room] = 0, room, page
        self.used[room], self.later[room] = now, 256 * ((chunk & -chunk).bit_length() - 1) if chunk else 0
        return room, lost

    def touch(self, page: int, now: int) -> None:
        self.used[self.of[page]] = now

    def drop(self, page: int) -> None:
        if room := self.of[page]:
            self.of[page], self.page[room], self.used[room] = 0, 0, -1


@pytest.mark.parametrize("seed", range(2))
def test_rooms_are_taken_in_the_order_of_their_loss(seed: int) -> None:
    """Pages that come and go, rooms that are used or dropped, and every room that is taken for another page."""
    draw, pool, now = random.Random(seed), PagePool(60, 1), 1
    pool.freed = []
    shelves, tables, lost = (Shelf(24, pool), Walk(24, pool)), list[PageTable](), 0
    for _ in range(900):
        now += draw.random() < 0.3
        if pool.num_free and draw.random() < 0.7:
            tables.append(table := PageTable())
            pool.reserve(table, 0, 1)
        elif tables:
            pool.release(tables.pop(draw.randrange(len(tables))))
        for page in pool.freed:
            shelves[0].freed(page)
        pool.freed.clear()
        for page in {table.pages[0] for table in draw.sample(tables, min(2, len(tables)))}:
            if shelves[0].num_free(now) <= 1:
                now += 1
            what, chunk = draw.choice(["take", "take", "touch", "drop"]), draw.randrange(9)
            found = [getattr(s, what)(page, *([] if what == "drop" else [now]), *([chunk] * (what == "take"))) for s in shelves]
            assert found[0] == found[1]
            lost += what == "take" and found[0][1] > 0
            free = [int((shelf.used[1:] != now).sum()) for shelf in shelves]
            assert free[0] == free[1] == shelves[0].num_free(now)
    assert lost > 50 and shelves[0].check_integrity()


def test_a_room_is_found_without_a_look_at_all() -> None:
    """A path that grows by a page in every step, with rooms for 64 or 512 pages, all taken: looks at ranks per page."""
    looks = list[float]()
    for count in (64, 512):
        shelf, seen = Shelf(count, PagePool(2048, 1)), [0]
        rank = shelf._rank
        shelf._rank = lambda room, rank=rank, seen=seen: seen.__setitem__(0, seen[0] + 1) or rank(room)  # type: ignore[method-assign]
        for page in range(1, 1500):
            shelf.take(page, page)
        looks.append(seen[0] / 1500)
    assert looks[1] <= looks[0] + 1 < 8


def disturbed(each: int) -> bool:
    """Whether one of eight requests that take 32 rows a step, with rooms for `each` chunks and states each, loses or waits."""
    rooms, tables = Rooms(PagePool(128, CHUNK), 8 * each, 8 * each, tail=3), [PageTable() for _ in range(8)]
    for start in range(0, 8 * CHUNK, CHUNK // 2):
        rooms.begin()
        for table in tables:
            if rooms.known(table, start) < start:
                return True
            try:
                taken(rooms, table, start, start + CHUNK // 2)
            except OutOfStates:
                return True
    return False


def test_requests_that_run_together_leave_one_another_what_they_need() -> None:
    """Two chunks each are enough, as the docstring of `state_tokens` says. Control: one each is not."""
    assert not disturbed(2) and disturbed(1)


def test_old_states_are_kept_at_growing_distances() -> None:
    subject = crowded("mamba2", 64)
    root, rooms = subject.prompt((TOKENS * 10)[: 16 * CHUNK]), subject.runner.cache.rooms
    assert rooms is not None
    kept = [i + 1 for i, page in enumerate(root.lane.table.pages) if rooms.states.of[page]]
    assert kept == [8, 15, 16]  # the last step used 15
    with pytest.raises(OutOfStates, match="larger state_tokens"):  # the rows of a grid are computed in one pass
        subject.logits_under((TOKENS * 10)[: 8 * CHUNK], [[Edit("T", "zero", positions=0, layers=[0])]])


# ---- verbs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h", "falcon-h1"])
def test_cells_of_a_grid_have_the_bits_of_their_edits_alone(name: str) -> None:
    """Variants begin at their first edited layer and position, also within a chunk."""
    subject = engine(name)
    edits = [Edit("S", "zero", positions=at, layers=[layer]) for at in (30, 66, 130) for layer in (0, 1)]
    edits += [
        Edit("blocks.0.mixer.hook_k", "zero", positions=70),
        Edit(SITE, "zero", positions=100),
        Edit("T", "zero", positions=90),
    ]
    found = subject.logits_under(TOKENS, [[edit] for edit in edits])
    assert all(torch.equal(row, subject.logits(TOKENS, edits=[edit])) for row, edit in zip(found, edits, strict=True))


@pytest.mark.parametrize("name", ["nemotron-h", "mamba2", "falcon-h1"])
def test_verbs_of_the_workbench(name: str) -> None:
    """Of layers that lack attention or MLP, or have both kinds of mixers."""
    subject, base, source = engine(name), TOKENS[:12], [*TOKENS[:7], 50, *TOKENS[8:12]]
    layers = subject.config.num_layers
    by_layer = rl.dla(subject, base, (3, 4))
    logits = subject.logits(base)
    assert sum(part.value for part in by_layer.parts) == pytest.approx(float(logits[3] - logits[4]), abs=1e-5)
    grid = rl.patch(subject, base, source, metric=(3, 4), sites="STC" if subject.config.layers_with("mlp") else "ST")
    assert grid.raw["S"].shape[0] == layers + 1 and grid.raw["T"].shape[0] == len(subject.sites.letter("T"))
    if subject.config.layers_with("attn"):
        assert rl.attention(subject, base).pattern.shape[0] == len(subject.config.layers_with("attn"))
    else:
        with pytest.raises(BadRequest, match="No layer of this mamba2 model has attention"):
            rl.attention(subject, base)
    assert len(rl.lens(subject, base).tokens) == 12


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("qwen3-next", {"head": 6, "mixer head": 4}),
        ("falcon-h1", {"head": 12, "mixer head": 16}),
        ("lfm2", {"head": 6, "mixer": 1}),
    ],
)
def test_parts_of_a_logit_by_head(name: str, kinds: dict[str, int]) -> None:
    """Attention heads and those of recurrent layers differ in number. A gated convolution has no heads."""
    found = rl.dla(engine(name), TOKENS[:9], (3, 4), by="head")
    assert {kind: sum(part.kind == kind for part in found.parts) for kind in kinds} == kinds
    assert [grid.values.size for grid in found._grids()] == [number for kind, number in kinds.items() if "head" in kind]
    assert found._repr_html_() and found.plot()
    colours = rl.dla(engine(name), TOKENS[:9], (3, 4)).plot().axes[0].get_legend().get_texts()
    assert [text.get_text() for text in colours] == ["mixer", "attention", "MLP", "others"]


def test_patterns_name_the_layers_that_have_a_site() -> None:
    subject = engine("nemotron-h")
    branch = subject.prompt(TOKENS[:5], sites="blocks.*.mixer.hook_out")
    assert list(branch.activations.sites()) == [
        f"blocks.{layer}.mixer.hook_out" for layer in subject.config.layers_with("mixer")
    ]
    legacy = subject.prompt(TOKENS[:5], sites=["blocks.*.hook_attn_out"]).activations
    assert torch.equal(legacy["blocks.0.hook_attn_out"], branch.activations["blocks.0.mixer.hook_out"])
    with pytest.raises(UnknownSite, match=r"No site matches 'blocks\.\*\.mixer\.hook_beta'"):
        subject.prompt(TOKENS[:5], sites="blocks.*.mixer.hook_beta")


def test_a_probe_of_a_state_does_not_steer_the_residual_stream() -> None:
    subject, means = engine("qwen3-next"), np.eye(2, 240)
    probe = LinearProbe(means[:1], np.zeros(1), means, ("a", "b"), "label", SITE, Cell("S", 0), "last", "ridge", {})
    with pytest.raises(BadRequest, match="direction of 240 numbers, and the residual stream, which is steered, has 36"):
        rl.steer(subject, probe, [TOKENS[:4]], layers=[0], strengths=[1.0])


def test_dumps_and_resampling(tmp_path: Path) -> None:
    subject = engine("nemotron-h")
    dump = subject.replay([TOKENS[:70], TOKENS[20:60]], sites=["S", "T", "blocks.0.mixer.hook_read"]).save(tmp_path / "dump")
    site = "blocks.2.attn.hook_out"
    assert dump.manifest.layers("T") == {0: "blocks.0.mixer.hook_out", 2: site}
    assert torch.equal(dump.to_torch(site)[:70], subject.prompt(TOKENS[:70], sites="T").activations[site])
    rollouts = [
        Engine(decoder("nemotron-h"), page_size=size).prompt(TOKENS[:66]).resample(at=[60, 66], n=3, max_new=4, sampling=warm)
        for size, warm in ((16, Sampling(1.0)), (4, Sampling(1.0)))
    ]
    assert rollouts[0].digest == rollouts[1].digest


# ---- refusals ------------------------------------------------------------------------------------------------------------


def change(value: Tensor, hook: object) -> Tensor:
    return value + 1


def test_what_verbs_say_of_layers_without_a_part() -> None:
    """Layer 0 of the one recurs, layer 1 attends; the other has neither attention nor MLPs."""
    mixed, recurrent, pair = engine("qwen3-next"), engine("mamba2"), (TOKENS[:5], TOKENS[5:10])
    for verb in (rl.patch, lambda e, a, b, **more: rl.ablate(e, [a], **more)):
        with pytest.raises(BadRequest, match="Layer 0 is recurrent and has no attention heads"):
            verb(mixed, *pair, metric=(7, 8), heads=[(0, 0)])
    with pytest.raises(BadRequest, match="at least 1"):
        rl.path_patch(mixed, *pair, metric=(7, 8), receivers=[(0, 0)])
    with pytest.raises(BadRequest, match="No layer below 1 has attention heads"):
        rl.path_patch(mixed, *pair, metric=(7, 8), receivers=[(1, 0)])
    assert rl.path_patch(mixed, *pair, metric=(7, 8)).raw["heads"].shape == (1, mixed.config.num_heads)
    with pytest.raises(BadRequest, match="No layer of this mamba2 model has attention heads"):
        rl.path_patch(recurrent, *pair, metric=(7, 8))
    for call in (
        lambda: rl.compare(recurrent, recurrent, [pair[0]], sites="STC"),
        lambda: rl.patch(recurrent, *pair, metric=(7, 8), sites="C"),
    ):
        with pytest.raises(BadRequest, match="No layer of this mamba2 model has C"):
            call()
    with pytest.raises(UnknownSite, match="No layer of this mamba2 model has C"):
        recurrent.prompt(TOKENS[:3], sites="C")
    with pytest.raises(UnknownSite, match="Unknown site"):
        recurrent.prompt(TOKENS[:3], sites=["blocks.1.mlp.hook_pre"])
    assert SITE in list(mixed.sites) and repr(mixed.sites).startswith("SiteTable(")


def test_states_that_overflow_are_not_committed() -> None:
    """Also where no row reads them: k and v of one row make a state of 1e50, and later queries are zero."""
    subject, mixer = engine("mamba2"), "blocks.0.mixer."
    big = {part: torch.full(subject.sites.sites[mixer + part].shape, 1e25) for part in ("hook_k", "hook_v")}
    edits = [Edit(mixer + part, "set", value, positions=slice(10, 11)) for part, value in big.items()]
    edits.append(Edit(mixer + "hook_q", "zero", positions=slice(10, LENGTH)))
    branch = subject.prompt(TOKENS[:63], edits=edits)
    for refused in (lambda: subject.prompt(TOKENS[:64], edits=edits), lambda: branch.state(0, 10), lambda: branch.generate(2)):
        with pytest.raises(NonFinite, match="recurrent states"):
            refused()
    assert branch.tokens[:63] == TOKENS[:63]
    (mended,) = branch.fork(at=63, edits=[Edit(SITE, "zero", positions=slice(63, 64))])
    assert mended.force(TOKENS[63:]).length == LENGTH, "an edit makes the state finite again"


def test_memory_is_counted_with_a_state_per_page() -> None:
    """What fits in pages of 64 positions does not in pages of one, which have 64 times the states."""
    given = torch.float32, {torch.device("cpu")}
    with pytest.raises(BadRequest, match=r"Give at most \d+, or a smaller state_tokens") as refused:
        require_memory(engine("mamba2").config, 10**13, 64, *given)
    most = int(str(refused.value).split("at most ")[1].split(",")[0])
    require_memory(engine("mamba2").config, most, 64, *given)
    with pytest.raises(BadRequest, match="Give at most"):
        require_memory(engine("mamba2").config, most + 64, 64, *given)
    with pytest.raises(BadRequest, match=r"for KV and recurrent states in pages of 1,.*at most \d+, or page_size=64"):
        require_memory(engine("mamba2").config, most, 1, *given)
    require_memory(engine("qwen3-next").config, most, 64, *given, state_tokens=640)


def test_states_take_no_more_memory_than_kv() -> None:
    """Of a model of Qwen3-Next's sizes: beside one state per open chunk."""
    mixer = MixerConfig("delta", taps=4, channels=8192, heads=32, key_heads=16, d_key=128, d_value=128)
    config = ModelConfig(
        num_layers=48, d_model=2048, num_heads=16, num_kv_heads=2, d_head=256, d_mlp=5120, vocab_size=151936,
        max_positions=2**18, norm_eps=1e-6, rotary_dim=64, mixer=mixer, parts=("mixer mlp",) * 3 * 12 + ("attn mlp",) * 12,
    )  # fmt: skip
    tokens, dtype, state_tokens = 2**17, torch.bfloat16, 5120
    plan, kv = RoomPlan.of(config, tokens // 64, 64, dtype, state_tokens), tokens * kv_bytes(config, dtype)
    state = 36 * 32 * 128 * 128 * 4
    assert 0.9 * kv < (plan.states - state_tokens // 64) * state <= kv
    needed = [cache_bytes(config, tokens, 64, dtype, some) / tokens for some in (None, state_tokens)]
    assert needed[0] > 18 * needed[1] and needed[1] < 8 * kv_bytes(config, dtype)


def test_what_hybrids_refuse() -> None:
    subject = engine("qwen3-next")
    with pytest.raises(BadEdit, match="take no tokens"):
        subject.prompt(TOKENS, edits=[Edit(SITE, "zero", tokens=[3])])
    with pytest.raises(BadEdit, match="can be read but not changed"):
        subject.prompt(TOKENS[:3], hooks=[(SITE, change)])
    with pytest.raises(BadRequest, match="Layer 1 has no recurrent state; layers that have: 0"):
        subject.prompt(TOKENS[:3]).state(1)
    with pytest.raises(BadRequest, match="position=99"):
        subject.prompt(TOKENS[:3]).state(0, 99)
    with pytest.raises(BadEdit, match="project_out is for sites with one vector per row"):
        subject.prompt(TOKENS[:3], edits=[Edit(SITE, "project_out", torch.ones(other("qwen3-next").state(0).shape[-1]))])
    for size in (24, 128):
        with pytest.raises(BadRequest, match="Give a divisor of 64"):
            Engine(decoder("qwen3-next"), page_size=size)
    with pytest.raises(BadRequest, match="page_size=24 does not fit a hybrid draft model"):
        Engine(decoder("llama"), draft_model=decoder("qwen3-next"), page_size=24)
    with pytest.raises(BadRequest, match="state_tokens=100"):
        Engine(decoder("qwen3-next"), state_tokens=100)
    with pytest.raises(BadRequest, match="no recurrent layers"):
        Engine(decoder("llama"), state_tokens=1000)
