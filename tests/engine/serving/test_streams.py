"""A closed or abandoned stream leaves its branch as generating the yielded tokens would, however far the engine was ahead."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.memory.tree import BranchStatus, TokenState
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.request import Stream
from tests.toy_model import continuation, engine, toy

PROMPT = [1, 2, 3]
TRUTH = continuation(toy(), PROMPT, 20)


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


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize(("taken", "ahead"), [(0, 20), (1, 1), (1, 4), (1, 20), (3, 20)])
def test_the_branch_is_as_after_generating_what_was_yielded(taken: int, ahead: int, how: str) -> None:
    subject = engine(record=True, canary=True)
    branch = subject.prompt(PROMPT, sites="SZ")
    held = [branch.stream(20, window=ahead)]
    assert [next(held[0]) for _ in range(taken)] == TRUTH[:taken]
    ENDS[how](held)
    assert subject.loop.jobs == [] and branch.generated == TRUTH[:taken]
    plain = engine().prompt(PROMPT, sites="SZ")
    assert state(branch) == state(plain.generate(taken) if taken else plain)
    subject.check_integrity()
    (again,) = engine().replay_trace(subject.trace).values()
    assert state(again) == state(branch)
    assert branch.generate(20 - taken).generated == TRUTH, "and it goes on as if nothing had been ahead"


def test_an_interrupt_leaves_what_was_yielded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after a step that gained tokens."""
    subject = engine()
    branch = subject.prompt(PROMPT)
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
    branch = subject.prompt(PROMPT)
    at = next(i for i, token in enumerate(TRUTH) if token not in TRUTH[:i] and i > 1)
    stream = branch.stream(20, window=20, sampling=Sampling(stop_tokens=(TRUTH[at],)))
    next(stream)
    while not stream.job.done:
        subject.loop.step()
    assert branch.status is BranchStatus.FINISHED
    stream.close()
    assert branch.status is BranchStatus.OPEN and branch.finish_reason is None and branch.generated == TRUTH[:1]


def test_a_pending_token_before_the_stream_is_pending_again() -> None:
    branch = engine().prompt(PROMPT, sites="S").generate(2)
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
    branch = subject.prompt(PROMPT)
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
    branch = engine().prompt(PROMPT)
    old = branch.stream(3)
    assert [next(old) for _ in range(3)] == TRUTH[:3]
    new = branch.stream(9, window=9)
    assert next(new) == TRUTH[3] and branch.length > 7
    old.close()
    assert list(new) == TRUTH[4:12]


def test_rejected_drafts_of_the_cut_part_go_with_it() -> None:
    subject = engine()
    branch = subject.prompt(PROMPT)
    stream = branch.stream(20, drafter="lens", window=5)
    next(stream)
    while not stream.job.done:
        subject.loop.step()
    assert any(other.fork_position > 4 for other in branch.record.cut)
    stream.close()
    assert not any(other.fork_position > 4 for other in branch.record.cut)


def test_a_released_branch_stays_as_it_was() -> None:
    subject = engine()
    branch = subject.prompt(PROMPT)
    stream = branch.stream(20, window=4)
    next(stream)
    branch.release()
    stream.close()
    subject.check_integrity()


def test_finalizers_wait_for_the_end_of_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected anywhere: a stream that ends within another change is cut after it."""
    subject = engine()
    branch, other = subject.prompts([PROMPT, [4, 5]])
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
    (fork,) = subject.prompt(PROMPT, sites="S").fork(edits=[edit])
    stream = fork.stream(6)
    next(stream)
    stream.close()
    plain: Engine = engine()
    assert state(fork) == state(plain.prompt(PROMPT, sites="S", edits=[edit]).generate(1))
