"""A request is refused as a whole, before any change: tokens, KV and rows of all branches stay the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, BadTrace, ClosedBranch, EngineError
from replaylens.engine.loop.lane import Job
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.request import Stream
from tests.toy_model import VOCAB, continuation, engine, toy

SITE = "blocks.1.hook_in"


@dataclass
class Desk:
    """An engine with branches of all kinds. Branches a, b and c are fine."""

    engine: Engine = field(default_factory=lambda: engine(record=True))

    def __post_init__(self) -> None:
        self.a, self.b, self.c = self.engine.prompts([[1, 2, 3], [4, 5], [6, 7, 8]], sites="S", keep_rejected=True)
        self.rejecting = self.engine.prompt([9, 9]).generate(6, drafter="tree", window=4, keep_pages=True)
        self.rejected = self.rejecting.rejected[0]
        self.finished = self.engine.prompt([6, 7]).generate(3, sampling=Sampling(stop_tokens=tuple(range(VOCAB))))
        self.released = self.engine.prompt([5])
        self.released.release()
        self.streamed = self.engine.prompt([3, 1])
        self.stream: Stream = self.streamed.stream(9, window=2)
        next(self.stream)
        self.foreign = engine().prompt([1, 2, 3])

    def look(self) -> list[tuple[list[int], list[Any], Tensor, Tensor | None, str | None]]:
        """Everything visible of every branch."""
        branches = [self.a, self.b, self.c, self.rejecting, self.finished, self.streamed, self.rejected]
        return [(b.tokens, b.states, self.engine.forest.held_kv(b.lane), self._rows(b), b.finish_reason) for b in branches]

    def _rows(self, branch: Branch) -> Tensor | None:
        return branch.activations[SITE] if branch.lane.recording is not None else None

    def numbers(self) -> tuple[Any, ...]:
        """Numbers that must not grow: branches, jobs, pages in use, events of the trace."""
        loop, pool = self.engine.loop, self.engine.runner.pool
        return len(self.engine.tree), list(loop.lanes), list(loop.jobs), pool.num_free, len(self.engine.trace.events)


def same(before: Any, after: Any) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)

    return all(equal(x, y) for one, other in zip(before, after, strict=True) for x, y in zip(one, other, strict=True))


Call = Callable[[Desk], object]
CASES: dict[str, tuple[Call, type[EngineError], str]] = {
    "generate twice": (lambda d: d.engine.generate([d.b, d.b], 3), BadRequest, "given 2 times"),
    "generate twice among others": (lambda d: d.engine.generate([d.a, d.b, d.a], 3), BadRequest, "given 2 times"),
    "generate a streamed one": (lambda d: d.engine.generate([d.a, d.b, d.streamed], 3), BadRequest, "is busy"),
    "generate a released one": (lambda d: d.engine.generate([d.a, d.released], 3), ClosedBranch, "released"),
    "generate a finished one": (lambda d: d.engine.generate([d.a, d.finished], 3), ClosedBranch, "finished"),
    "generate a rejected one": (lambda d: d.engine.generate([d.a, d.rejected], 3), ClosedBranch, "rejected"),
    "generate another engine's": (lambda d: d.engine.generate([d.a, d.foreign], 3), BadRequest, "another engine"),
    "generate beyond the last position": (lambda d: d.engine.generate([d.b, d.a], 254), BadRequest, "exceed"),
    "a sampling that only one can be given": (
        lambda d: d.engine.generate([d.a, d.b], 3, sampling=[Sampling(), Sampling(logit_bias={VOCAB: 1.0})]),
        BadRequest,
        "vocabulary",
    ),
    "a sampling too few": (lambda d: d.engine.generate([d.a, d.b], 3, sampling=[Sampling()]), BadRequest, "1 samplings for 2"),
    "a window too wide": (
        lambda d: d.engine.generate([d.a, d.b], 400, drafter="tree", window=300),
        BadRequest,
        "exceed|does not fit",
    ),
    "stream of a streamed one": (lambda d: d.streamed.stream(3), BadRequest, "is busy"),
    "stream of a rejected one": (lambda d: d.rejected.stream(3), ClosedBranch, "rejected"),
    "stream of another engine's": (lambda d: d.engine.stream(d.foreign, 3), BadRequest, "another engine"),
    "force twice": (lambda d: d.engine.force_all([d.b, d.b], [[1], [2]]), BadRequest, "given 2 times"),
    "force a streamed one": (lambda d: d.engine.force_all([d.a, d.streamed], [[1], [2]]), BadRequest, "is busy"),
    "force a finished one": (lambda d: d.engine.force_all([d.a, d.finished], [[1], [2]]), ClosedBranch, "finished"),
    "force a rejected one": (lambda d: d.engine.force_all([d.a, d.rejected], [[1], [2]]), ClosedBranch, "rejected"),
    "force a released one": (lambda d: d.engine.force_all([d.a, d.released], [[1], [2]]), ClosedBranch, "released"),
    "force another engine's": (lambda d: d.engine.force_all([d.a, d.foreign], [[1], [2]]), BadRequest, "another engine"),
    "force too few": (lambda d: d.engine.force_all([d.a, d.b], [[1]]), BadRequest, "1 texts for 2"),
    "force nothing on one": (lambda d: d.engine.force_all([d.a, d.b], [[1], []]), BadRequest, "at least one"),
    "force an unknown token": (lambda d: d.engine.force_all([d.a, d.b], [[1], [VOCAB]]), BadRequest, "vocabulary"),
    "a prompt that is none": (lambda d: d.engine.prompts([[1, 2], []], sites="S"), BadRequest, "empty"),
    "a prompt out of the vocabulary": (lambda d: d.engine.prompts([[1, 2], [VOCAB]]), BadRequest, "vocabulary"),
    "fork beyond the tip": (lambda d: d.a.fork(3, at=99), EngineError, "Cannot fork it at 99"),
    "rollback into the prompt": (lambda d: d.a.rollback(1), EngineError, "Use 3"),
    "rollback of a streamed one": (lambda d: d.streamed.rollback(2), BadRequest, "is busy"),
    "release twice": (lambda d: d.released.release(), ClosedBranch, "released"),
    "cancel another engine's job": (lambda d: d.engine.cancel(Job(d.foreign.lane, 3)), BadRequest, "not a branch of this"),
    "a drafter that is not there": (lambda d: d.engine.generate([d.a, d.b], 3, drafter="oracle"), BadRequest, "oracle"),
}


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk()


@pytest.mark.parametrize("name", CASES)
def test_a_refused_request_changes_nothing(desk: Desk, name: str) -> None:
    call, error, saying = CASES[name]
    before, numbers = desk.look(), desk.numbers()
    with pytest.raises(error, match=saying):
        call(desk)
    assert same(before, desk.look())
    assert desk.numbers() == numbers
    desk.engine.check_integrity()


def test_afterwards_everything_goes_on() -> None:
    desk = Desk()
    for call, error, _ in CASES.values():
        with pytest.raises(error):
            call(desk)
    desk.engine.generate([desk.a, desk.b, desk.c], 5)
    assert [b.generated for b in (desk.a, desk.b, desk.c)] == [
        continuation(toy(), prompt, 5) for prompt in ([1, 2, 3], [4, 5], [6, 7, 8])
    ]
    list(desk.stream)
    assert desk.streamed.generated == continuation(toy(), [3, 1], 9)
    desk.engine.check_integrity()


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
    with pytest.raises(BadTrace, match="names branch 77"):
        subject.replay_trace(recorded.trace)
    assert list(subject.loop.lanes) == [branch.id] and subject.tree.roots() == [branch.id]
    subject.check_integrity()


@pytest.mark.parametrize("name", ["generate twice", "generate a streamed one", "force twice"])
def test_the_checker_finds_a_request_that_is_half_done(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Negative control: without the check of the whole request, other branches have changed when one is refused."""
    desk = Desk()
    monkeypatch.setattr(Forest, "require", lambda forest, jobs: None)
    before, numbers = desk.look(), desk.numbers()
    with pytest.raises(EngineError):
        CASES[name][0](desk)
    assert not same(before, desk.look()) or desk.numbers() != numbers
