"""The contract of Thinking-States models: three code paths give one result, whatever happens around a prompt.

Every theorem compares KV, S, T, C, Z, thoughts, their distributions and the received states with the slow reference, byte by
byte. The last theorem is the negative control: with a wrong guess accepted, the comparison fails.
"""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import diff, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadConfig, BadEdit, BadRequest, NonFinite
from replaylens.engine.memory.tree import BranchStatus
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving import verbs
from replaylens.replay.run import Run
from replaylens.tasks import WordTokenizer
from replaylens.thinking.core import ThinkingBranch, ThinkingEngine
from replaylens.thinking.prefill import Prefiller
from replaylens.thinking.thoughts import LETTERS
from replaylens.training import embedded_thinking as thinking_zoo
from replaylens.views.thoughts import Thinking
from replaylens.weights.opening import GUESSES, Guess
from tests.devices import DEVICES, swept, with_devices
from tests.engine.coin_engine import PROMPT
from tests.engine.reference import same_bits
from tests.engine.test_machine import some
from tests.thinking.reference import (
    EOS,
    PAD,
    SHAPES,
    ThinkingReference,
    Truth,
    differences,
    random_prompt,
    row_differences,
    thinking_model,
)

CHUNKS = (1, 4, 7, 22)
"""lengths of the prompts; the last one exceeds the first block of keys, for backbones that differ by the keys they see"""
DIFFER = ("rotary", "windows")
OTHERS = tuple(name for name in SHAPES if name not in DIFFER)
KEPT: dict[str, Any] = {"sites": "STCZ", "keep_rejected": True, "full": True}


class Subject:
    """A model under test with its slow reference."""

    def __init__(self, name: str, device: str) -> None:
        self.model, self.chunks = thinking_model(SHAPES[name]).to(device), CHUNKS if name in DIFFER else CHUNKS[:3]
        self.reference = ThinkingReference(self.model)
        self.truth: Callable[[tuple[int, ...]], Truth] = cache(self.reference.run)

    def engine(self, **options: Any) -> ThinkingEngine:
        return ThinkingEngine(self.model, **options)

    def prompts(self) -> list[list[int]]:
        return [random_prompt(n, seed=n) for n in self.chunks]

    def broken(self, branches: list[ThinkingBranch]) -> list[str]:
        return [f"{what}, branch {b.id}" for b in branches for what in differences(b, self.truth(tuple(b.tokens)))]


@cache
def subject_of(name: str, device: str) -> Subject:
    return Subject(name, device)


@pytest.fixture(params=with_devices(tuple(SHAPES), slow=OTHERS))
def subject(request: pytest.FixtureRequest) -> Subject:
    """A subject for each kind of backbone."""
    return subject_of(*request.param)


@pytest.fixture(params=with_devices(tuple(SHAPES), slow=OTHERS))
def fewer(request: pytest.FixtureRequest) -> Subject:
    """The same, where backbones differ by the keys that they see; the others are slow."""
    return subject_of(*request.param)


@pytest.fixture(params=DEVICES)
def plain(request: pytest.FixtureRequest) -> Subject:
    return subject_of("rotary", request.param)


# ---- the theorems ---------------------------------------------------------------------------------------------------


def test_the_subjects_think_here_and_there(subject: Subject) -> None:
    said = [t.empty for path in subject.prompts() for t in subject.truth(tuple(path)).thoughts]
    assert any(said) and not all(said)


@pytest.mark.parametrize("guess", GUESSES)
def test_every_road_has_the_bits_of_one_row_at_a_time(subject: Subject, guess: Guess) -> None:
    engine = subject.engine(guess=guess)
    branches = engine.prompts(subject.prompts(), **KEPT)
    assert subject.broken(branches) == []
    engine.check_integrity()


@pytest.mark.parametrize(
    "cut", [(1, 16), *(pytest.param(cut, marks=pytest.mark.slow) for cut in ((4, 16), (16, 17), (1, 512)))]
)
def test_no_chunk_no_page_and_no_neighbour_changes_anything(plain: Subject, cut: tuple[int, int]) -> None:
    page_size, max_rows = cut
    for guess in GUESSES:
        engine = plain.engine(page_size=page_size, max_rows=max_rows, guess=guess, canary=True)
        paths = plain.prompts()[: 4 if guess == "empty" else 3]
        alone = [engine.prompt(path, **KEPT) for path in paths]
        together = engine.prompts(paths[::-1], **KEPT)[::-1]
        assert plain.broken([*alone, *together]) == []
        for one, other in zip(alone, together, strict=True):
            assert one.thoughts.rounds == other.thoughts.rounds
            assert [b.tokens for b in one.rejected] == [b.tokens for b in other.rejected]


@pytest.mark.slow
def test_rounds_are_counted(plain: Subject) -> None:
    (path,) = plain.prompts()[-1:]
    thoughts = plain.truth(tuple(path)).thoughts
    rounds = {guess: len(plain.engine(guess=guess).prompt(path).thoughts.rounds) for guess in GUESSES}
    assert rounds["sequential"] == len(thoughts)
    assert rounds["empty"] == 1 + sum(not t.empty for t in thoughts[:-1])
    assert 1 < rounds["drafted"] <= rounds["sequential"]
    right = plain.engine().prompt(path, guess="drafted", drafts=[t.tokens for t in thoughts])
    assert len(right.thoughts.rounds) == 1
    wrong = plain.engine().prompt(path, guess="drafted", drafts=[(5, EOS)] * len(thoughts), **KEPT)
    assert plain.broken([wrong]) == []


@pytest.mark.parametrize("guess", swept(["empty", "drafted"], "drafted"))
def test_a_dropped_suffix_has_the_rows_of_its_guessed_states(fewer: Subject, guess: Guess) -> None:
    branch = fewer.engine(guess=guess).prompt(random_prompt(7, seed=7), **KEPT)
    suffixes = branch.rejected
    assert suffixes and len(suffixes) == len(branch.thoughts.rounds) - 1
    for suffix, turn in zip(suffixes, branch.thoughts.rounds, strict=False):
        assert suffix.status is BranchStatus.REJECTED and suffix.tokens == branch.tokens
        assert suffix.activations.positions() == list(range(3 * turn.kept, 3 * turn.last))
        received = {i: edit.value for i, edit in suffix.thoughts.states.items() if edit.value is not None}
        assert row_differences(suffix, fewer.reference.run(suffix.tokens, received)) == []


@pytest.mark.slow
def test_what_is_generated_follows_from_prompt_and_states(fewer: Subject) -> None:
    """Greedy tokens with their KV and rows: the first answer chunk receives the last state, later chunks none."""
    path = random_prompt(5, seed=5)
    states = fewer.truth(tuple(path)).states
    for drafter in ("self", "lens", "tree"):
        branch = fewer.engine().prompt(path, **KEPT).generate(8, drafter=drafter, window=4, final=True)
        truth = fewer.reference.run(branch.tokens, states)
        assert branch.generated == truth.logits.argmax(-1)[len(path) - 1 : -1].tolist()
        assert same_bits(branch.kv(), truth.kv)
        assert all(same_bits(branch.activations[site], x) for site, x in truth.sites.items())
        assert not branch.activations["thinking.tokens"][len(path) :].ge(0).any()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_any_past_leaves_the_bits_of_path_and_edits_alone(plain: Subject, seed: int) -> None:
    """Random forks, edits, extensions, answers and rollbacks: each branch equals a prompt on a fresh engine."""
    draw = random.Random(seed)
    engine = plain.engine(page_size=4, cache_tokens=1024)
    live: list[tuple[ThinkingBranch, list[Edit]]] = [(engine.prompt(random_prompt(6, seed=seed), sites="STCZ"), [])]
    for _ in range(10):
        branch, edits = draw.choice(live)
        whole = branch.length == branch._thought_along(branch.length)
        match draw.choice(["fork", "edit", "extend" if whole else "rollback", "answer"]):
            case "fork":
                branch = branch.fork(at=draw.randrange(1, branch.length + 1))[0]
            case "edit":
                edits = [*edits, draw.choice(list(edits_of(engine).values()))]
                branch = branch.fork(edits=edits[-1:])[0]
            case "extend":
                branch = branch.extend(random_prompt(draw.randrange(1, 4), seed=draw.randrange(99)), draw.choice(GUESSES))
            case "answer":
                branch = branch.fork()[0].generate(draw.randrange(1, 6), final=True).force([draw.randrange(29)])
            case "rollback":
                branch.rollback(draw.randrange(branch.root_length, branch.length + 1))
        live.append((branch, edits))
        engine.forest.compute([branch.lane])
        assert_as_fresh(plain, branch, edits)
    engine.check_integrity()


def assert_as_fresh(plain: Subject, branch: ThinkingBranch, edits: list[Edit]) -> None:
    along = branch._thought_along(branch.length)
    if not along:
        return  # no thought yet: an ordinary branch
    fresh = plain.engine(guess="sequential").prompt(branch.tokens[:along], sites="STCZ", edits=edits)
    if along < branch.length:
        fresh.force(branch.tokens[along:])
    assert same_bits(branch.kv(), fresh.kv())
    assert [t.tokens for t in branch.thoughts.chunks] == [t.tokens for t in fresh.thoughts.chunks]
    end = min(branch.activations.end, fresh.activations.end)
    for site in fresh.activations.sites():
        assert same_bits(branch.activations[site][:end], fresh.activations[site][:end]), site


@pytest.mark.slow
def test_an_extended_prompt_is_the_whole_prompt(plain: Subject) -> None:
    engine, path = plain.engine(), plain.prompts()[-1]
    root = engine.prompt(path[:12], **KEPT)
    for guess in GUESSES:
        whole = root.extend(path[12:], guess)
        assert plain.broken([whole]) == []
    (middle,) = whole.fork(at=30)
    assert plain.broken([middle.extend(path[30:])]) == []
    assert plain.broken([root]) == []


def test_preemption_leaves_no_mark(plain: Subject) -> None:
    """The cache holds one and a half prompts: pages are taken in the middle of rounds, and rows are recomputed."""
    for guess in GUESSES[1:]:
        engine = plain.engine(cache_tokens=112, page_size=4, guess=guess, max_rows=32)
        branches = engine.prompts([*plain.prompts(), *plain.prompts()[::-1]], **KEPT)
        for branch in branches:
            assert row_differences(branch, plain.truth(tuple(branch.tokens))) == []
            assert same_bits(branch.kv(), plain.truth(tuple(branch.tokens)).kv[: branch.lane.computed])
        engine.check_integrity()


class Thinkers(RuleBasedStateMachine):
    """Prompts that think and answer together in a cache that holds one or two of them; `make soak` runs it for hours."""

    known: ClassVar[list[Any]] = []
    operations = preemptions = 0
    sessions, steps = 12, 8

    @initialize(page_size=st.sampled_from([4, 1, 16]), guess=st.sampled_from(GUESSES), max_rows=st.sampled_from([32, 64]))
    def begin(self, page_size: int, guess: Guess, max_rows: int) -> None:
        self.subject = subject_of("rotary", "cpu")
        self.engine = self.subject.engine(cache_tokens=80, page_size=page_size, guess=guess, max_rows=max_rows)
        self.engine.loop.listeners.append(self.count)

    def count(self, event: dict[str, Any]) -> None:
        type(self).preemptions += event["event"] == "preempt"

    @rule(
        chunks=st.lists(st.sampled_from([4, 7, 10]), min_size=3, max_size=5),
        first=st.integers(0, 3),
        n=st.integers(3, 8),
        window=st.sampled_from([1, None, 4]),
    )
    def crowd(self, chunks: list[int], first: int, n: int, window: int | None) -> None:
        type(self).operations += 1
        paths = [random_prompt(count, seed=first + i) for i, count in enumerate(chunks)]
        branches = self.engine.prompts(paths, **KEPT)
        for branch, path in zip(branches, paths, strict=True):
            assert row_differences(branch, self.subject.truth(tuple(path))) == []
        self.engine.generate(branches, n, sampling=Sampling(ignore_eos=True), window=window, final=True)
        for branch in branches:
            assert_as_fresh(self.subject, branch, [])
            branch.release()
        self.engine.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("sessions", [2, 4])
def test_thinkers_that_outgrow_the_cache_together(sessions: int) -> None:
    class Counted(Thinkers):
        preemptions = 0

    run_state_machine_as_test(Counted, settings=some(sessions, steps=3))
    assert Counted.preemptions >= 2 * sessions, "control: thinking and answering requests lost their pages to others"


def test_a_replayed_trace_needs_no_thoughts(plain: Subject, tmp_path: Path) -> None:
    """States are edits, so a trace reproduces the bits of every branch without thinking, including dropped suffixes."""
    engine, path = plain.engine(record=True), random_prompt(7, seed=7)
    branch = engine.prompt(path, **KEPT).generate(4, drafter="lens", window=3)
    (child,) = branch.fork(at=10)
    child.force([5, 6, 7, 8])
    (edited,) = branch.fork(at=21, edits=[Edit("thinking.state", "zero", positions=slice(3, 9))])
    engine.trace.save(tmp_path / "trace.jsonl")
    replayed = plain.engine(page_size=8).replay_trace(Trace.load(tmp_path / "trace.jsonl"))
    assert isinstance(replayed, dict)
    told = [event["event"] for event in engine.trace.events if event["branch"] == edited.id]
    assert told[told.index("plant") - 1] == "release", "the fork that thought again is planted with what it thought"
    for old in (branch, child, edited):
        new = replayed[old.id]
        assert new.tokens == old.tokens and same_bits(new.kv(), old.kv())
    for old in branch.rejected:
        new, start = replayed[old.id], old.activations.base
        rows = old.activations["blocks.3.hook_in"]
        assert same_bits(new.activations["blocks.3.hook_in"][start:], rows[: len(new.activations["blocks.3.hook_in"]) - start])


# ---- edits -----------------------------------------------------------------------------------------------------------


def edits_of(engine: ThinkingEngine) -> dict[str, Edit]:
    """One edit each on S, T, C and the backbone, all on chunk 2, which thinks, or on the state made from its thought."""
    generator = torch.Generator().manual_seed(5)
    value = 3 * torch.randn(32, generator=generator)
    steps = [engine.thought_place("thinking.hook_out", 2, step) for step in range(3)]
    places = [engine.thought_place("compress.hook_out", 2, place) for place in range(4)]
    return {
        "S": Edit("thinking.state", "set", value, positions=[9, 10]),
        "T": Edit("thinking.hook_out", "add", value, positions=steps),
        "C": Edit("compress.hook_out", "add", value, positions=places),
        "backbone": Edit("blocks.1.hook_out", "add", value, positions=[7]),
    }


@pytest.mark.parametrize("where", swept(["S", "T", "C", "backbone"], "S", "backbone"))
def test_edits_change_what_comes_after_them_on_every_road_alike(plain: Subject, where: str) -> None:
    path, engine = random_prompt(7, seed=0), plain.engine()
    edit = edits_of(engine)[where]
    root = engine.prompt(path, **KEPT)
    ways = [plain.engine(guess=guess).prompt(path, edits=[edit], **KEPT) for guess in GUESSES]
    ways += [root.fork(edits=[edit])[0], root.fork(at=12)[0].extend(path[12:]).fork(edits=[edit])[0]]
    first = ways[0]
    for other in ways[1:]:
        assert same_bits(other.kv(), first.kv())
        assert [t.tokens for t in other.thoughts.chunks] == [t.tokens for t in first.thoughts.chunks]
        for site in first.activations.sites():
            assert same_bits(other.activations[site], first.activations[site]), site
    assert not root.thoughts.chunks[2].empty and not same_bits(first.kv(), root.kv())
    assert [t.tokens for t in first.thoughts.chunks[:2]] == [t.tokens for t in root.thoughts.chunks[:2]]
    assert plain.broken([root]) == []


def test_the_state_that_the_answer_receives_can_be_edited(plain: Subject) -> None:
    path = random_prompt(7, seed=0)
    engine = plain.engine()
    edit = Edit("thinking.state", "set", torch.ones(32), positions=[21, 22])
    (early,) = engine.prompt(path).fork(edits=[edit])
    (late,) = engine.prompt(path, sites="STCZ").force([5, 6, 7, 8]).fork(edits=[edit])
    straight = engine.prompt(path, edits=[edit]).force([5, 6, 7, 8])
    assert same_bits(late.kv(), straight.kv()) and same_bits(early.force([5, 6, 7, 8]).kv(), straight.kv())
    assert not same_bits(straight.kv(), engine.prompt(path).force([5, 6, 7, 8]).kv())
    assert late.activations["thinking.state"][21].tolist() == [1.0] * 32


def test_edits_add_up_along_forks(plain: Subject) -> None:
    path, edits = random_prompt(7, seed=0), list(edits_of(plain.engine()).values())
    engine = plain.engine()
    branch = engine.prompt(path, **KEPT)
    for edit in edits:
        (branch,) = branch.fork(edits=[edit])
    assert same_bits(branch.kv(), plain.engine().prompt(path, edits=edits).kv())


def test_a_state_that_is_zeroed_is_as_if_nothing_had_been_thought(plain: Subject) -> None:
    path = random_prompt(7, seed=0)
    branch = plain.engine().prompt(path, edits=[Edit("thinking.state", "zero")], **KEPT)
    assert branch.thoughts.states == {} and len(branch.thoughts.rounds) > 1
    assert same_bits(branch.kv(), plain.reference.run(path, {}).kv)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_prompts_that_are_not_whole_chunks(plain: Subject) -> None:
    engine = plain.engine()
    with pytest.raises(BadRequest, match="not whole chunks of 3"):
        engine.prompt([5, 6, 7, 8])
    branch = engine.prompt([5, 6, 7]).generate(2)
    with pytest.raises(BadRequest, match="Fork it at a chunk border"):
        branch.extend([5, 6, 7])
    assert len(engine.loop.lanes) == 1


def test_only_a_first_prompt_begins_with_special_tokens(plain: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, special = plain.engine(), list[bool]()
    monkeypatch.setattr(verbs, "ids_of", lambda engine, text, **given: (special.append(given["special"]), text)[1])
    branch = engine.prompt([5, 6, 7])
    branch.extend([8, 9, 5])
    assert special == [True, False]


@pytest.mark.parametrize(
    ("thought", "says"),
    [((5, 6, 7, 8, EOS), "max_thought is 4"), ((5, 6), "single <EOS>"), ((99, EOS), "of the vocabulary")],
)
def test_drafts_that_nobody_can_think(plain: Subject, thought: tuple[int, ...], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        plain.engine().prompt([5, 6, 7], guess="drafted", drafts=[thought])


def test_other_requests_that_cannot_be(plain: Subject) -> None:
    engine = plain.engine()
    for error, call, says in (
        (BadRequest, lambda: engine.prompt([5, 6, 7], guess="magic"), "guess='magic'"),
        (BadRequest, lambda: engine.prompt([5, 6, 7], drafts=[(EOS,)]), "guess='drafted'"),
        (BadEdit, lambda: engine.prompt([5, 6, 7], edits=[Edit("thinking.tokens", "zero")]), "captured but not edited"),
        (BadEdit, lambda: engine.prompt([5, 6, 7], hooks=[("thinking.state", lambda value, hook: value)]), "Use an Edit"),
        (BadEdit, lambda: engine.thought_place("thinking.hook_out", 1, 4), "steps 0 to 3"),
    ):
        with pytest.raises(error, match=says):
            call()
    assert engine.loop.lanes == {}


def test_a_prompt_that_fails_leaves_nothing_behind(plain: Subject, tmp_path: Path) -> None:
    engine, path = plain.engine(record=True), random_prompt(7, seed=0)
    root = engine.prompt(path, **KEPT)
    huge = [Edit(f"blocks.{layer}.hook_out", "add", torch.full((32,), 3e38), positions=[7]) for layer in (1, 2)]
    for fails in (lambda: engine.prompts([path, path], edits=huge), lambda: root.fork(edits=huge)):
        with pytest.raises(NonFinite):
            fails()
    assert set(engine.loop.lanes) == {root.id, *(branch.id for branch in root.rejected)}
    assert plain.broken([root]) == []
    engine.check_integrity()
    engine.trace.save(tmp_path / "trace.jsonl")
    replayed = plain.engine().replay_trace(Trace.load(tmp_path / "trace.jsonl"))
    assert isinstance(replayed, dict) and same_bits(replayed[root.id].kv(), root.kv())


class NoEnd:
    """A tokenizer without <EOS>."""

    eos_id, pad_id = None, PAD

    def encode(self, text: str) -> None: ...

    def decode(self, ids: list[int]) -> None: ...

    def encode_with_offsets(self, text: str) -> None: ...


def test_a_tokenizer_without_an_end_mark(plain: Subject) -> None:
    with pytest.raises(BadConfig, match="needs the tokenizer with <EOS>"):
        plain.engine(tokenizer=NoEnd())


def test_a_model_that_does_not_think() -> None:
    with pytest.raises(BadConfig, match="does not think"):
        ThinkingEngine.load("coin-plain")
    assert ThinkingEngine.load("coin-thinking", draft_model="coin-draft").loop.drafters["model"].reproducible


# ---- the negative control ---------------------------------------------------------------------------------------------


def test_with_wrong_guesses_accepted_the_contract_fails(plain: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Prefiller._judge

    def credulous(self: Prefiller, p: Any, guessed: Any, found: Any) -> None:
        honest(self, p, [thought.tokens for thought in found], found)

    monkeypatch.setattr(Prefiller, "_judge", credulous)
    wrong = "\n".join(plain.broken(plain.engine(guess="empty").prompts(plain.prompts()[-1:], **KEPT)))
    for what in ("KV", "blocks.1.hook_in", "Z", "T of chunk", "thought distribution", "states received"):
        assert what in wrong


# ---- dump ------------------------------------------------------------------------------------------------------------
# Dumps, runs and commands of Thinking-States models: thoughts are captured and stored like everything else.

SHAPE = ModelConfig(
    num_layers=3, d_model=32, num_heads=2, num_kv_heads=2, d_head=16, d_mlp=48, vocab_size=106, max_positions=256, rotary_dim=16
)  # fmt: skip
COIN = tasks.get("coin")(flips=(1, 4), seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and the coin's vocabulary."""
    where = tmp_path_factory.mktemp("model")
    thinking_zoo.save(thinking_model(SHAPE, chunk=2), WordTokenizer(tasks.get("coin").vocabulary()), where)
    return where


def engine(folder: Path, **options: str) -> ThinkingEngine:
    loaded = Engine.load(str(folder), **options)
    assert isinstance(loaded, ThinkingEngine)
    return loaded


@pytest.fixture(scope="module")
def dump(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    made = engine(folder)
    written = write_dump(made, make_plan(made, COIN, 6, examples_per_shard=4), tmp_path_factory.mktemp("dump") / "d")
    assert written is not None
    return written


@pytest.mark.slow
def test_thoughts_are_stored_by_chunk_and_step(dump: Dump, folder: Path) -> None:
    content, c = dump.files.content(0), 2
    index = content.index.to_pandas()
    shapes = {name: tuple(x.shape[1:]) for name, x in content.tensors.items() if name.startswith(("thinking", "compress"))}
    assert shapes == {
        "thinking.state": (32,),
        "thinking.hook_out": (4, 32),
        "compress.hook_out": (4, 32),
        "thinking.tokens": (4,),
        "thinking.entropy": (4,),
        "thinking.top_ids": (4, 8),
        "thinking.top_logprobs": (4, 8),
    }
    first = np.flatnonzero((index["example"] == 0) & (index["branch"] == 0))
    result = engine(folder).replay([COIN.example(0)], sites="STCZ", drafter="lens")[0]
    tokens = content.tensors["thinking.tokens"][torch.from_numpy(first)]
    for number, thought in enumerate(result.thoughts.chunks):
        row = tokens[(number + 1) * c - 1].tolist()
        assert row[: len(thought.tokens)] == list(thought.tokens)
        assert (tokens[number * c] == -1).all()
    states = content.tensors["thinking.state"][torch.from_numpy(first)]
    assert same_bits(states, result.activations["thinking.state"])
    assert not any(name in shapes for letter in "STCZ" for name in dump.manifest.letter(letter)), "a letter counts layers"


@pytest.mark.slow
def test_rejected_suffixes_are_stored_and_verified(dump: Dump, folder: Path) -> None:
    rejected = dump.index[dump.index["branch"] > 0]
    assert (rejected["token_state"] == "rejected").all()
    prompts = {e.index: len(engine(folder)._chunks(e.prompt)) for e in COIN.examples(6)}
    assert any(row.fork_position < prompts[row.example] for row in rejected.itertuples())
    verdict = verify(dump.url, engine(folder), sample="all")
    assert verdict, verdict


@pytest.mark.slow
def test_how_thoughts_are_guessed_changes_no_accepted_row(dump: Dump, folder: Path, tmp_path: Path) -> None:
    for guess in GUESSES:
        made = engine(folder, guess=guess)
        other = write_dump(made, make_plan(made, COIN, 6, examples_per_shard=4), tmp_path / guess, batch=3)
        assert other is not None and diff(dump, other, accepted=True)
        assert (guess == "empty") == (other.manifest.digest == dump.manifest.digest)
    with pytest.raises(BadRequest, match="Load the engine with it"):
        verify(dump.url, engine(folder, guess="drafted"), sample="all")


def test_a_run_is_saved_as_it_was(folder: Path, tmp_path: Path) -> None:
    run = engine(folder).replay(COIN.examples(3), sites="STCZ", drafter="lens")
    assert isinstance(run, Run)
    assert verify(run.save(tmp_path / "run").url, engine(folder), sample="all")


def test_the_tree_of_a_run_is_the_picture(folder: Path) -> None:
    run = engine(folder).replay(COIN.examples(2), sites="S", drafter="lens")
    assert isinstance(run, Run)
    picture = run.picture(1)
    assert isinstance(picture, Thinking)
    thoughts = run[1].thoughts
    assert len(picture.chunks) == len(thoughts.chunks) + 1 and len(picture.rounds) == len(thoughts.rounds)
    assert [chunk.thinks for chunk in picture.chunks[:-1]] == [not t.empty for t in thoughts.chunks]
    assert [bool(chunk.state) for chunk in picture.chunks] == [i in thoughts.states for i in range(len(picture.chunks))]
    assert "<EOS>" in str(picture) and "rl-thinking" in picture._repr_html_()


@pytest.mark.slow
def test_the_commands(folder: Path, tmp_path: Path) -> None:
    shell = CliRunner()
    told = shell.invoke(app, ["replay", "--model", str(folder), "--n", "2", "--quiet"])
    assert told.exit_code == 0 and "round 1" in told.output and "<EOS>" in told.output, told.output
    told = shell.invoke(app, ["replay", "--model", str(folder), "--n", "1", "--quiet", "--json"])
    assert {"chunk", "tokens", "thought"} <= set(json.loads(told.output)["examples"][0]["thoughts"][0])
    out = str(tmp_path / "dump")
    assert shell.invoke(app, ["dump", "--model", str(folder), "--n", "3", "--out", out, "--quiet"]).exit_code == 0
    assert shell.invoke(app, ["verify", out, "--model", str(folder), "--all", "--quiet"]).exit_code == 0


# ---- prompts ---------------------------------------------------------------------------------------------------------
# Prompts of Thinking-States models.


def test_thoughts_that_fail_give_their_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    thinker = Engine.load("coin-thinking")
    assert isinstance(thinker, ThinkingEngine)
    blocks = thinker.prefiller.blocks
    monkeypatch.setattr(blocks, "_logits", lambda rows: (_ for _ in ()).throw(NonFinite("planted")))
    with pytest.raises(NonFinite):
        thinker.prompt(PROMPT)
    assert blocks.pool.num_free == blocks.pool.num_pages and thinker.loop.lanes == {}


def test_a_refused_prompt_of_a_thinker_leaves_no_branch() -> None:
    thinker = Engine.load("coin-thinking")
    assert isinstance(thinker, ThinkingEngine)
    with pytest.raises(BadRequest):
        thinker.prompts([PROMPT, PROMPT], guess="drafted", drafts=[[], [(99999,)]])
    assert thinker.loop.lanes == {} and not thinker.tree.roots()


def test_a_thinker_pads_what_is_run_with_a_cache() -> None:
    thinker = Engine.load("coin-thinking")
    text = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
    logits, cache = thinker.run_with_cache(text, names_filter="blocks.0.hook_in", return_cache_object=False)
    assert logits.shape[1] == cache["blocks.0.hook_in"].shape[1] == thinker.prompt(text).length


def test_asking_for_z_drops_no_row() -> None:
    """Also where a prompt is extended, which gives its last row a next token, or forked and thought along again."""
    thinker = Engine.load("coin-thinking")
    root = thinker.prompt(PROMPT, sites="SZ")
    longer, again = root.extend(" Alice flips."), root.fork(at=root.length - 1)[0]
    edited = root.fork(edits=[Edit("thinking.state", "zero", positions=-1)])[0]
    for branch in (root, longer, again, edited, longer.fork(at=root.length)[0]):
        fresh = thinker.prompt(branch.tokens, sites="SZ") if branch in (root, longer) else branch
        for site in ("blocks.0.hook_in", "Z.emitted", "Z.kl"):
            x = branch.activations[site]
            assert len(x) == branch.length
            assert torch.equal(x.nan_to_num(7.0), fresh.activations[site].nan_to_num(7.0)), site
        unknown = branch.activations["Z.emitted"].isnan().all(-1)
        assert unknown.tolist() == [False] * (branch.length - 1) + [True]


def test_letters_select_thoughts_but_whole_distributions_only_by_name() -> None:
    """A distribution takes as many numbers as there are tokens, at every step of every thought."""
    served, text = Engine.load("coin-thinking"), "A coin's state is heads. Alice flips. What's the state? A:"
    found = served.prompt(text, sites="STCZ").activations.sites()
    thoughts = {name for name in found if name.startswith(("thinking.", "compress."))}
    assert thoughts == {*LETTERS} - {"thinking.full"} and "thinking.full" not in served.sites.letter("Z")
    whole = served.prompt(text, sites=["thinking.full"]).activations["thinking.full"]
    assert whole.shape[-1] == served.config.vocab_size and bool((whole != 0).any())
