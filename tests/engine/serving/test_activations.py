"""`Branch.activations`: one row for every committed token, whatever is captured and whatever was computed so far."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadFile, BadRequest, ClosedBranch, OutOfPages
from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.tree import BranchStatus, TokenState
from replaylens.engine.request.capture import Chunk, Recording
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.request import Stream
from tests.devices import covering, swept
from tests.toy_model import Reference, continuation, engine, random_model, toy, watch_passes

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
EDIT = Edit("blocks.0.hook_in", "add", torch.linspace(-1, 1, 32), positions=4)
S = "blocks.1.hook_in"


def num_committed(branch: Branch) -> int:
    return sum(state in (TokenState.PROMPT, TokenState.ACCEPTED) for state in branch.record.states)


def assert_complete(branch: Branch) -> None:
    """All rows, those of a fresh engine that computes the whole path; Z.emitted is known unless no token follows."""
    rows = branch.activations
    assert rows.positions() == list(range(num_committed(branch)))
    fresh = engine().prompt(branch.tokens, sites="STCZ", edits=[EDIT] if branch.lane.edits else [])
    for site, x in rows.items():
        y = fresh.activations[site][: len(x)]
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), site
    unknown = rows["Z.emitted"].isnan().all(-1).tolist()
    assert unknown == [p + 1 == branch.length for p in range(len(unknown))]


STORIES: dict[str, Callable[[Branch], Branch]] = {
    "prompt": lambda b: b,
    "generate": lambda b: b.generate(3),
    "generate, final": lambda b: b.generate(3, final=True),
    "generate twice, final": lambda b: b.generate(3, final=True).generate(2, drafter="lens", window=3),
    "force": lambda b: b.force([5, 6]),
    "force thrice": lambda b: b.force([5]).force([6]).force([7, 8]),
    "rollback": lambda b: b.generate(5).rollback(11),
    "rollback to the prompt": lambda b: b.generate(5).rollback(9),
    "rollback to the tip": lambda b: b.generate(2).rollback(11),
    "rollback of the open row": lambda b: b.force([5, 6]).rollback(10),
    "fork": lambda b: b.fork()[0],
    "fork within": lambda b: b.fork(at=6)[0],
    "fork of a fork": lambda b: b.fork(at=6)[0].fork()[0].force([1]),
    "fork and generate": lambda b: b.fork()[0].generate(2),
    "fork of a generated one": lambda b: b.generate(4).fork(at=11)[0],
    "edited fork": lambda b: b.fork(edits=[EDIT])[0],
    "edited fork of a generated one": lambda b: b.generate(3).fork(edits=[EDIT])[0],
    "edited fork, generated": lambda b: b.fork(edits=[EDIT])[0].generate(2),
}


@pytest.mark.parametrize("story", STORIES)
def test_every_committed_token_has_its_row(story: str) -> None:
    subject = engine(canary=True)
    branch = subject.prompt(PROMPT, sites="STCZ")
    told = STORIES[story](branch)
    states = told.states
    assert_complete(told)
    assert told.states == states, "a pending token stays pending"
    if told is not branch:
        assert_complete(branch)
    subject.check_integrity()
    length = told.length
    assert_complete(told.generate(2))
    if not told.lane.edits:
        assert told.tokens[length:] == continuation(toy(), told.tokens[:length], 2)


def test_a_recording_in_hand_is_completed_with_the_branch() -> None:
    branch = engine().prompt(PROMPT, sites="SZ")
    rows = branch.activations
    (fork,) = branch.fork(edits=[EDIT])
    held = fork.lane.recording
    assert held is not None and held.end == 4, "control: nothing is computed before somebody looks"
    assert fork.activations is held and held.end == 9
    branch.generate(2)
    assert branch.activations is rows and rows.end == 10


def test_rows_that_are_there_are_not_computed_again() -> None:
    subject = engine(cache_tokens=32)
    branch = subject.prompt(PROMPT, sites="SZ")
    crowd_out(subject, branch)
    assert branch.activations.end == 9 and branch.lane.computed == 0


def test_a_released_branch_shows_what_it_had() -> None:
    (fork,) = engine().prompt(PROMPT, sites="S").fork(edits=[EDIT])
    fork.release()
    assert fork.activations.end == 4


def test_chosen_positions() -> None:
    subject = engine()
    (fork,) = subject.prompt(PROMPT, sites="SZ", positions="all[::4]").fork(edits=[EDIT])
    assert fork.activations.positions() == [0, 4, 8] and len(fork.activations["Z.kl"]) == 3


def test_rows_of_a_branch_that_is_streamed() -> None:
    subject = engine()
    (fork,) = subject.prompt(PROMPT, sites="SZ").fork(edits=[EDIT])
    stream = fork.stream(4, window=1)
    assert fork.activations.end == 9, "no step was made yet"
    assert len(list(stream)) == 4 and fork.activations.end == 12
    subject.check_integrity()


# ---- kv --------------------------------------------------------------------------------------------------------------
# `Branch.kv()` is the KV of every committed token, even if other requests have taken the branch's pages.


def crowd_out(subject: Engine, branch: Branch) -> None:
    """Fill the cache until the idle branch loses its pages."""
    for first in range(10, 40, 10):
        subject.prompt([(first + i) % 50 for i in range(24)]).release()
    subject.prompt([(3 * i) % 50 for i in range(subject.runner.pool.num_pages * 4 - 1)]).release()
    assert branch.lane.computed == 0, "it was preempted"


def test_kv_of_a_preempted_branch_is_computed_again() -> None:
    subject = engine(cache_tokens=32, canary=True)
    branch = subject.prompt(PROMPT)
    truth = branch.kv()
    crowd_out(subject, branch)
    assert torch.equal(branch.kv(), truth) and len(truth) == 9
    assert branch.lane.computed == 9, "and it has its pages again"
    subject.check_integrity()
    assert branch.generate(4).tokens == engine().prompt(PROMPT).generate(4).tokens
    subject.check_integrity()


def test_a_pending_token_stays_pending() -> None:
    """The number of rows stays the same: the last generated token has none until another one follows."""
    subject = engine(cache_tokens=32)
    branch = subject.prompt(PROMPT, sites="SZ").generate(5)
    truth, states = branch.kv(), branch.states
    rows = {site: branch.activations[site] for site in branch.activations}
    assert len(truth) == branch.length - 1
    crowd_out(subject, branch)
    assert torch.equal(branch.kv(), truth) and branch.states == states
    assert all(torch.equal(branch.activations[site], x) for site, x in rows.items())
    assert torch.equal(truth, Reference(toy(), branch.tokens).kv[:-1])


def test_kv_of_a_preempted_rejected_draft() -> None:
    subject = engine(cache_tokens=64)
    branch = subject.prompt(PROMPT).generate(8, drafter="tree", window=4, keep_pages=True)
    rejected = branch.rejected[0]
    truth, tokens = rejected.kv(), rejected.tokens
    crowd_out(subject, rejected)
    assert torch.equal(rejected.kv(), truth) and rejected.tokens == tokens and len(truth) == len(tokens)
    assert torch.equal(truth, Reference(toy(), tokens).kv)
    subject.check_integrity()


def test_kv_of_a_preempted_branch_that_is_streamed() -> None:
    subject = engine(cache_tokens=32)
    branch = subject.prompt(PROMPT)
    stream = branch.stream(6, window=1)
    first = next(stream)
    subject.loop.reservations.drop_pages(branch.lane)
    length = branch.length
    kv = branch.kv()
    assert torch.equal(kv, Reference(toy(), branch.tokens).kv[: length - 1])
    assert [first, *stream] == engine().prompt(PROMPT).generate(6).generated
    subject.check_integrity()


def test_kv_that_cannot_be_computed_again_says_so() -> None:
    subject = engine(cache_tokens=32)
    branch = subject.prompt(PROMPT)
    subject.loop.reservations.drop_pages(branch.lane)
    subject.prefix.clear()
    taken = [subject.runner.pool.share([], 0) for _ in range(1)]
    subject.runner.reserve(taken[0], 0, 30)
    with pytest.raises(OutOfPages, match="3 pages"):
        branch.kv()
    subject.runner.pool.release(taken[0])
    assert len(branch.kv()) == 9
    assert subject.loop.jobs == [] and list(subject.loop.lanes) == [branch.id]


# ---- streams ---------------------------------------------------------------------------------------------------------
# A closed or abandoned stream leaves its branch as generating the yielded tokens would, however far the engine was ahead.

PROMPT_OF_STREAMS = [1, 2, 3]
TRUTH = continuation(toy(), PROMPT_OF_STREAMS, 20)


def state(branch: Branch) -> tuple[Any, ...]:
    """Everything that a caller can read of a branch, except its rejected drafts and their counts."""
    rows = {site: x.tolist() for site, x in branch.activations.items() if "emitted" not in site}
    kept = branch.activations.positions()
    return branch.tokens, branch.states, branch.status, branch.finish_reason, branch.kv().tolist(), rows, kept


ENDS: dict[str, Callable[[list[Stream]], object]] = {
    "close": lambda held: held[0].close(),
    "del": lambda held: held.clear(),
    "garbage": lambda held: (held.append(held), held.clear(), gc.collect()),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("how, taken, ahead", covering(ENDS, [(0, 20), (1, 1), (1, 4), (1, 20), (3, 20)]))
def test_the_branch_is_as_after_generating_what_was_yielded(taken: int, ahead: int, how: str) -> None:
    subject = engine(record=True, canary=True)
    branch = subject.prompt(PROMPT_OF_STREAMS, sites="SZ")
    held = [branch.stream(20, window=ahead)]
    assert [next(held[0]) for _ in range(taken)] == TRUTH[:taken]
    ENDS[how](held)
    assert subject.loop.jobs == [] and branch.generated == TRUTH[:taken]
    plain = engine().prompt(PROMPT_OF_STREAMS, sites="SZ")
    assert state(branch) == state(plain.generate(taken) if taken else plain)
    subject.check_integrity()
    (again,) = engine().replay_trace(subject.trace).values()
    assert state(again) == state(branch)
    assert branch.generate(20 - taken).generated == TRUTH, "and it goes on as if nothing had been ahead"


def test_an_interrupt_leaves_what_was_yielded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after a step that gained tokens."""
    subject = engine()
    branch = subject.prompt(PROMPT_OF_STREAMS)
    stream = branch.stream(20, window=4)
    taken = [next(stream), next(stream)]  # the first comes out of the canonical pass, the second with a window
    step, ahead = subject.loop.step, branch.length

    def interrupted() -> None:
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(subject.loop, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        taken += iter(stream)
    assert ahead > 4 and branch.generated == taken == TRUTH[: len(taken)] and subject.loop.jobs == []
    assert list(stream) == []


def test_a_finished_branch_is_open_again_without_its_end() -> None:
    """The last token ended it, but was never yielded."""
    subject = engine()
    branch = subject.prompt(PROMPT_OF_STREAMS)
    at = next(i for i, token in enumerate(TRUTH) if token not in TRUTH[:i] and i > 1)
    stream = branch.stream(20, window=20, sampling=Sampling(stop_tokens=(TRUTH[at],)))
    next(stream)
    while not stream.job.done:
        subject.loop.step()
    assert branch.status is BranchStatus.FINISHED
    stream.close()
    assert branch.status is BranchStatus.OPEN and branch.finish_reason is None and branch.generated == TRUTH[:1]


def test_a_pending_token_before_the_stream_is_pending_again() -> None:
    branch = engine().prompt(PROMPT_OF_STREAMS, sites="S").generate(2)
    before = state(branch)
    stream = branch.stream(9, window=9)
    while not stream.job.done:
        stream.forest.loop.step()
    assert branch.length == 14
    stream.close()
    assert state(branch) == before and branch.record.states[-1] is TokenState.PENDING


def test_a_branch_with_unread_tokens_is_busy() -> None:
    """Whether the request itself has ended is a matter of the clock; whether its stream has is not."""
    subject = engine()
    branch = subject.prompt(PROMPT_OF_STREAMS)
    stream = branch.stream(5, window=5)
    assert next(stream) == TRUTH[0]
    while not stream.job.done:
        subject.loop.step()
    for call in (lambda: branch.rollback(3), lambda: branch.force([1]), lambda: branch.generate(2), lambda: branch.stream(2)):
        with pytest.raises(BadRequest, match="close its stream first"):
            call()
    assert [next(stream) for _ in range(4)] == TRUTH[1:5]
    branch.generate(3)  # every token was read, so the branch is free before the stream says that it ended
    stream.close()
    del stream
    assert branch.generated == TRUTH[:8], "closing a stream that yielded everything cuts nothing"


def test_an_old_stream_does_not_cut_what_came_after_it() -> None:
    branch = engine().prompt(PROMPT_OF_STREAMS)
    old = branch.stream(3)
    assert [next(old) for _ in range(3)] == TRUTH[:3]
    new = branch.stream(9, window=9)
    assert next(new) == TRUTH[3] and branch.length > 7
    old.close()
    assert list(new) == TRUTH[4:12]


def test_rejected_drafts_of_the_cut_part_go_with_it() -> None:
    subject = engine()
    branch = subject.prompt(PROMPT_OF_STREAMS)
    stream = branch.stream(20, drafter="lens", window=5)
    next(stream)
    while not stream.job.done:
        subject.loop.step()
    assert any(other.fork_position > 4 for other in branch.record.cut)
    stream.close()
    assert not any(other.fork_position > 4 for other in branch.record.cut)


def test_finalizers_wait_for_the_end_of_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected anywhere: a stream that ends within another change is cut after it."""
    subject = engine()
    branch, other = subject.prompts([PROMPT_OF_STREAMS, [4, 5]])
    held = [branch.stream(20, window=19)]
    next(held[0])
    next(held[0])  # of a window
    fork = subject.tree.fork
    seen: list[int] = []

    def forked(*args: Any) -> int:
        held.clear()
        gc.collect()
        seen.append(len(branch.record.tokens))
        return fork(*args)

    monkeypatch.setattr(subject.tree, "fork", forked)
    length = branch.length
    other.fork()
    assert seen == [length] and length > 5, "not within the fork"
    assert branch.length == 5, "but before anybody looks"
    subject.check_integrity()


def test_streams_of_an_edited_fork() -> None:
    """Rows of the prompt that are computed within the request stay."""
    edit = Edit("blocks.0.hook_in", "add", torch.linspace(-1, 1, 32), positions=1)
    subject = engine()
    (fork,) = subject.prompt(PROMPT_OF_STREAMS, sites="S").fork(edits=[edit])
    stream = fork.stream(6)
    next(stream)
    stream.close()
    plain: Engine = engine()
    assert state(fork) == state(plain.prompt(PROMPT_OF_STREAMS, sites="S", edits=[edit]).generate(1))


# ---- variants --------------------------------------------------------------------------------------------------------
# Variants and logits: a text under many lists of edits has the bits of each list alone.

PATH = torch.randint(3, 60, (11,), generator=torch.Generator().manual_seed(4)).tolist()
OTHER = torch.randint(3, 60, (11,), generator=torch.Generator().manual_seed(5)).tolist()
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(6))


def grid(rows: dict[str, Tensor]) -> list[list[Edit]]:
    made = [[Edit(site, "set", rows[site][p], positions=p)] for site in rows for p in (0, 4, 10)]
    made += [[Edit("blocks.1.attn.hook_z", "zero", heads=[head], positions=slice(2, None))] for head in range(4)]
    made += [[Edit("embed.hook_out", "add", VECTOR, positions=3)], [], [Edit("S", "add", VECTOR, layers=[2])]]
    return [*made, [*made[1], *made[7]], [Edit("blocks.1.attn.hook_pattern", "mask", positions=9, keys=[1, 2])]]


@pytest.mark.parametrize("max_rows", [16, 512])
def test_a_variant_has_the_bits_of_its_edits_alone(max_rows: int) -> None:
    served, alone = engine(max_rows=max_rows), engine()
    sites = ["blocks.0.hook_in", "blocks.1.hook_in", "blocks.0.mlp.hook_out", "blocks.1.attn.hook_out"]
    source = served.prompt(OTHER, sites=sites).activations
    variants = grid({site: source[site] for site in sites})
    found = served.logits_under(PATH, variants, positions=None)
    for edits, logits in zip(variants, found, strict=True):
        branch = alone.prompt(PATH, sites=["unembed.hook_out"], edits=edits)
        assert torch.equal(logits, branch.activations["unembed.hook_out"])
        assert torch.equal(branch.logits(None), logits)
    plain = found[variants.index([])]
    changed = [not torch.equal(logits, plain) for logits in found]
    assert changed.count(False) == 1, "control: every list of edits but the empty one changes something"
    served.check_integrity()


LAST = ("attn.hook_z", "attn.hook_out", "ln2.hook_out", "mlp.hook_post", "mlp.hook_out", "hook_out")


@pytest.mark.parametrize("positions", swept([[-1], [6, 3], None], [6, 3]))
@pytest.mark.parametrize("family", [{}, {"parallel_residual": True}, {"post_norms": True}], ids=str)
def test_only_the_rows_that_are_read_leave_the_last_block(family: dict[str, Any], positions: list[int] | None) -> None:
    """Edits in the last block, before and after its attention, alone and together; reads of some rows and of all."""
    model = random_model(seed=3, **family)
    served, alone = engine(model), engine(model)
    wanted = list(range(len(PATH))) if positions is None else positions
    made = {name: Edit(f"blocks.1.{name}", "zero", positions=slice(2, None)) for name in LAST}
    made["attn.hook_pattern"] = Edit("blocks.1.attn.hook_pattern", "zero", positions=slice(2, None), keys=[1])
    variants = [[], *([edit] for edit in made.values()), [made["attn.hook_z"], made["mlp.hook_post"]]]
    variants.append([Edit("blocks.0.hook_in", "zero", positions=9)])  # after some of the rows, and after all of [6, 3]
    found = served.logits_under(PATH, variants, positions=positions)
    for edits, logits in zip(variants, found, strict=True):
        branch = alone.prompt(PATH, sites=["unembed.hook_out"], edits=edits)
        assert torch.equal(logits, branch.activations["unembed.hook_out"][wanted])
    changed = [not torch.equal(logits, found[0]) for logits in found[1:]]
    assert all(changed[:-1]) and changed[-1] == (positions != [6, 3]), (
        "control: every edit before a row that is read changes it"
    )
    served.check_integrity()


def test_the_last_block_computes_the_rows_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine()
    rows: list[int] = []
    last = served.model.blocks[-1].mlp
    forward = type(last).forward

    def counted(self: Any, x: Tensor, *rest: Any) -> Tensor:
        rows.extend([len(x)] * (self is last))
        return forward(self, x, *rest)

    monkeypatch.setattr(type(last), "forward", counted)
    variants = [[Edit("blocks.0.attn.hook_z", "zero", heads=[head])] for head in range(4)]
    served.logits_under(PATH, variants, positions=[-1])
    assert rows[1:] == [4], "four rows, after the prompt itself"
    served.logits_under(PATH, [[*edits, Edit("blocks.1.mlp.hook_out", "zero", positions=0)] for edits in variants])
    assert rows[-1] == 44, "control: all of them if one is edited after attention"


@pytest.mark.parametrize("base", ["blocks.1.hook_in", "blocks.0.hook_in", "blocks.0.attn.hook_out", "embed.hook_out"])
def test_edits_of_the_base_are_made_once(base: str) -> None:
    """A base edited at the stream where its variants start: the edit is not added twice."""
    served, first = engine(), Edit(base, "add", VECTOR)
    variants = [[Edit("blocks.1.hook_in", "add", VECTOR, positions=5)], [Edit("blocks.1.mlp.hook_out", "zero", positions=5)]]
    found = served.logits_under(PATH, variants, edits=[first])
    for edits, logits in zip(variants, found, strict=True):
        assert torch.equal(logits, engine().logits(PATH, edits=[first, *edits]))


def test_rows_and_layers_before_an_edit_are_not_computed() -> None:
    served = engine()
    rows: list[int] = []
    resumed = served.runner.resumed

    def watched(segments, entering, layer, tap=None, ends=()):  # type: ignore[no-untyped-def]
        rows.append(sum(len(s.tokens) for s in segments) * (2 - layer))
        return resumed(segments, entering, layer, tap, ends)

    served.runner.resumed = watched  # type: ignore[method-assign]
    passes = watch_passes(served)
    served.logits_under(PATH, [[Edit("blocks.1.hook_in", "zero", positions=p)] for p in range(len(PATH))])
    assert rows == [sum(range(1, len(PATH) + 1))] and len(passes) == 1


def test_variants_fit_into_a_small_cache() -> None:
    served, variants = engine(cache_tokens=24), [[Edit("blocks.0.hook_in", "zero", positions=p)] for p in range(11)]
    assert torch.equal(served.logits_under(PATH, variants), engine().logits_under(PATH, variants))
    crowded = engine(cache_tokens=40)
    others = [crowded.prompt([3 + i] * 9) for i in range(4)]  # idle branches give up their pages
    assert torch.equal(crowded.logits_under(PATH, variants), engine().logits_under(PATH, variants))
    assert torch.equal(others[0].kv(), engine().prompt([3] * 9).kv())
    crowded.check_integrity()
    with pytest.raises(OutOfPages):
        engine(cache_tokens=12).logits_under(PATH, variants)
    served.check_integrity()


def test_a_rollback_keeps_the_drafts_that_left_the_path_where_it_ends() -> None:
    """They were rejected after a token that is still there; those that left it later go with the tokens that they follow."""
    branch = engine().prompt(PATH[:4]).generate(20, drafter="lens", window=4)
    places = sorted({other.fork_position for other in branch.record.cut})
    assert len(places) > 3
    for to in places[::-2]:
        branch.rollback(to)
        assert {other.fork_position for other in branch.record.cut} == {place for place in places if place <= to}


def test_logits_of_a_branch() -> None:
    """Before and after generating, of a fork, of one token or all: always those of a capture."""
    served = engine()
    branch = served.prompt(PATH)
    branch.generate(3)
    whole = served.prompt(branch.tokens, sites=["unembed.hook_out"]).activations["unembed.hook_out"]
    assert torch.equal(branch.logits(), whole[-1]) and torch.equal(branch.logits(None), whole)
    assert torch.equal(branch.logits([5, 2, -1, 2]), whole[[5, 2, -1, 2]])
    assert torch.equal(branch.logits(slice(3, 5)), whole[3:5]) and torch.equal(branch.logits("response[1:]"), whole[-2:])
    assert torch.equal(branch.logits(4, tokens=[7, 9]), whole[4, [7, 9]])
    assert torch.equal(served.logits(PATH, positions=4, tokens=[7]), whole[4, [7]])
    assert branch.logits(10).argmax() == branch.tokens[11]
    (fork,) = branch.fork(edits=[Edit("blocks.0.hook_in", "zero", positions=5)])
    assert not torch.equal(fork.logits(), whole[-1])
    assert len(served.tree.roots()) == 1 and served.check_integrity(), "the other prompt is not held"
    with pytest.raises(BadRequest, match="positions=40"):
        branch.logits(40)


def test_a_bad_variant_leaves_nothing_behind() -> None:
    served = engine(random_model(seed=2))
    before = served.runner.pool.num_free
    with pytest.raises(ArithmeticError):
        served.logits_under(PATH, [[Edit("blocks.0.hook_in", "add", torch.full((32,), 3e38), positions=3)] * 2])
    served.prefix.clear()
    assert served.runner.pool.num_free == before


@pytest.mark.parametrize("variants", [[], 5])
def test_no_variants(variants: Any) -> None:
    with pytest.raises(BadEdit, match="variants"):
        engine().logits_under([1, 2, 3], variants)


# ---- refused and cancelled ---------------------------------------------------------------------------------------------


def test_cancelling_a_job_that_ended_changes_nothing() -> None:
    """A finished job keeps its result and does not end a second time."""
    subject = engine()
    branch = subject.prompt([1, 2, 3])
    stream = branch.stream(4)
    list(stream)
    events: list[dict[str, Any]] = []
    subject.loop.listeners.append(events.append)
    subject.cancel(stream.job)
    assert events == [] and stream.job.finish_reason == "length"


def test_a_replay_that_fails_takes_its_branches_along() -> None:
    """Two branches and a request replay well, then an impossible event follows."""
    recorded, subject = engine(record=True), engine()
    recorded.prompt([1, 2]).generate(3)
    recorded.prompt([3, 4]).fork()
    recorded.trace.events.append({"event": "rollback", "branch": 77, "to": 1})
    branch = subject.prompt([5, 6])
    with pytest.raises(BadFile, match="names branch 77"):
        subject.replay_trace(recorded.trace)
    assert list(subject.loop.lanes) == [branch.id] and subject.tree.roots() == [branch.id]
    subject.check_integrity()


# ---- many branches ---------------------------------------------------------------------------------------------------


def test_all_sites_of_many_branches_in_one_call() -> None:
    """Patterns, whose rows grow with the path, Z, names, rows that a fork with edits lacks; never the branch's own memory."""
    subject = engine()
    asked = ["S", "Z", "blocks.0.attn.hook_pattern", "blocks.1.hook_resid_post"]
    root, other = subject.prompts([PROMPT, PROMPT[:4]], sites=asked)
    branches = [
        root.generate(3),
        other,
        root.fork(at=6, edits=[EDIT])[0],
        subject.prompt(PROMPT[:2], sites="S", positions="last"),
    ]
    for _ in range(2):
        found = subject.activations(branches)
        for rows, branch in zip(found, branches, strict=True):
            assert list(rows) == list(branch.activations.keys())
            for site, x in rows.items():
                assert torch.equal(x.nan_to_num(7.0), branch.activations[site].nan_to_num(7.0)), site
                x.fill_(5)
    assert subject.activations([]) == []
    with pytest.raises(BadRequest, match="another engine"):
        engine().activations(branches)


# ---- rows that are handed over ---------------------------------------------------------------------------------------


def test_a_branch_that_is_left_does_not_keep_the_rows_of_a_whole_pass() -> None:
    """Rows of a pass lie together. When few are wanted any more, they move out at the next pass that captures."""
    subject = engine()
    branches = subject.prompts([PROMPT] + [[(i + j) % 40 for j in range(9)] for i in range(7)], sites="STC")
    expected = branches[0].activations.copied()

    def storage() -> set[int]:
        rows = branches[0].activations
        return {rows.peek(site).untyped_storage().nbytes() for site in expected}

    own = max(x.nbytes for x in expected.values())
    assert min(storage()) > 4 * own, "the control: all rows of the pass are there"
    del branches[1:]
    subject.prompt(PROMPT[::-1], sites="S")
    assert max(storage()) == own
    assert all(torch.equal(branches[0].activations[site], x) for site, x in expected.items())


def test_released_branches_hand_their_rows_over() -> None:
    """The rows themselves, without a copy, if nobody else has them; whatever becomes of them, nobody else's change."""
    subject, prompts = engine(), [PROMPT, PROMPT[:5], PROMPT[::-1]]
    kept = subject.activations(subject.prompts(prompts, sites="STC"))
    branches = subject.prompts(prompts, sites="STC")
    (fork,) = branches[1].fork()
    held, memory = branches[0].activations, {branches[0].activations.peek(site).data_ptr() for site in kept[0]}
    found = subject.activations(branches, release=True)
    assert all(branch.status is BranchStatus.RELEASED for branch in branches) and fork.status is not BranchStatus.RELEASED
    for rows, own in zip(found, kept, strict=True):
        assert list(rows) == list(own) and all(torch.equal(rows[site], own[site]) for site in own)
    assert {x.data_ptr() for x in found[0].values()} == memory, "without a copy"
    for x in (x for rows in found for x in rows.values()):
        x.fill_(7.0)
    for handed in (
        lambda: held["blocks.0.hook_in"],
        lambda: branches[0].activations,
        lambda: subject.activations([branches[0]]),
    ):
        with pytest.raises(ClosedBranch, match="handed over"):
            handed()
    for site, x in kept[1].items():
        assert torch.equal(fork.activations[site], x), "the control: a fork's rows are copied"
    again = subject.activations(subject.prompts(prompts, sites="STC"))
    assert all(torch.equal(rows[site], own[site]) for rows, own in zip(again, kept, strict=True) for site in own)


@pytest.mark.parametrize("release", [False, True])
def test_a_branch_that_keeps_no_row_yet_has_empty_rows(release: bool) -> None:
    subject = engine()
    root = subject.prompt(PROMPT, sites="S", positions="prompt[5:]")
    (fork,) = root.fork(at=3)
    own = {site: rows.shape for site, rows in fork.activations.items()}
    (rows,) = subject.activations([fork], release=release)
    assert {site: x.shape for site, x in rows.items()} == own and all(not len(x) for x in rows.values())


def test_a_suffix_takes_over_its_own_positions_alone() -> None:
    """A rejected branch's rows begin at its base; those that were computed for it begin at 0."""
    whole = Recording(0, [Chunk(0, 5, range(5), {"S": torch.arange(5.0)[:, None]})])
    for base in (0, 2, 5):
        suffix = Recording(base)
        suffix.take_over(whole)
        suffix.check_integrity()
        assert suffix.positions() == list(range(base, 5)) and suffix.end == 5


@pytest.mark.parametrize("story", ["generate, final", "force", "rollback"])
def test_rows_in_several_pieces_are_copied_when_they_are_handed_over(story: str) -> None:
    subject = engine()
    one, other = (STORIES[story](subject.prompt(PROMPT, sites="STC")) for _ in range(2))
    (rows,), own = subject.activations([one], release=True), other.activations.copied()
    assert list(rows) == list(own) and all(torch.equal(rows[site], own[site]) for site in own)
    assert one.status is BranchStatus.RELEASED


def test_nothing_is_handed_over_or_released_if_a_branch_is_refused() -> None:
    """Released branches still have their rows; those whose rows are gone, branches given twice and others' are refused."""
    subject = engine()
    one, other, gone = subject.prompts([PROMPT, PROMPT[::-1], PROMPT[:3]], sites="S")
    bare = subject.prompt(PROMPT)
    kept = subject.activations([one, other])
    subject.activations([gone], release=True)
    foreign = engine().prompt(PROMPT, sites="S")
    for wrong, why in [
        (gone, "handed over"),
        (one, "given twice"),
        (foreign, "another engine"),
        (bare, "Nothing was captured"),
    ]:
        with pytest.raises((BadRequest, ClosedBranch), match=why):
            subject.activations([one, other, wrong], release=True)
    with pytest.raises(BadRequest, match="release"):
        subject.activations([one, other], release="yes")  # type: ignore[arg-type]
    assert one.status is other.status is not BranchStatus.RELEASED and len(subject.activations([one, one])) == 2
    other.release()
    found = subject.activations([one, other], release=True)
    assert one.status is BranchStatus.RELEASED
    for rows, own in zip(found, kept, strict=True):
        assert all(torch.equal(rows[site], own[site]) for site in own)


def test_rows_that_a_failed_call_handed_over_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost: the branches live, and the rows are a function of their path."""
    subject, release = engine(), Forest.release_all
    branch = subject.prompt(PROMPT, sites="STC")
    own = branch.activations.copied()

    def failing(self: Forest, lanes: Sequence[Lane]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Forest, "release_all", failing)
    with pytest.raises(KeyboardInterrupt):
        subject.activations([branch], release=True)
    monkeypatch.setattr(Forest, "release_all", release)
    assert all(torch.equal(branch.activations[site], own[site]) for site in own)
    branch.generate(3)
    assert branch.tokens == subject.prompt(PROMPT).generate(3).tokens and branch.activations.positions() == list(range(11))
