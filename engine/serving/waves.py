"""`Waves`: rollouts of a plan, some at a time, as forks of one branch that are computed together."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol, Self

from torch import Tensor

from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.memory.tree import BranchRecord
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.text import Text
from replaylens.engine.request.capture import CaptureSpec
from replaylens.engine.request.recording import Recording
from replaylens.engine.resampling.answers import Found
from replaylens.engine.resampling.plan import ResamplePlan, offsets_of
from replaylens.engine.resampling.rollout import Rollout, Row
from replaylens.engine.resampling.sentences import sentence_ends
from replaylens.engine.serving.completer import Completer
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.logits import logits_of
from replaylens.engine.serving.request import Request


class Forked(Protocol):
    """What rollouts need from a branch."""

    lane: Lane
    record: BranchRecord

    def fork(self, n: int = 1, at: int | None = None) -> list[Self]: ...

    def force(self, tokens: str | Sequence[int]) -> Self: ...

    def rollback(self, to: int) -> Self: ...

    def release(self) -> None: ...


class Served(Protocol):
    """What rollouts need from the engine."""

    text: Text
    config: ModelConfig
    forest: Forest

    def _job(self, branch: Any, request: Request) -> Job:
        """The request as a job on a branch."""
        ...

    def token_ids_of(self, tokens: Sequence[str | int]) -> list[int]:
        """Ids of single tokens, given as text or ids."""
        ...

    def force_all(self, branches: Sequence[Any], tokens: Sequence[str | Sequence[int]]) -> list[Any]:
        """Append given tokens to each branch."""
        ...


class Waves:
    """Draws rollouts. Which are drawn together changes no bit of them."""

    def __init__(self, engine: Served, branch: Forked, plan: ResamplePlan, capture: CaptureSpec | None) -> None:
        self.engine, self.branch, self.plan, self.capture = engine, branch, plan, capture

    def draw(self, indices: Sequence[int]) -> list[Rollout]:
        """The rollouts with these indices, in this order."""
        with ExitStack() as open_branches, self.engine.forest.quiet():
            forks = self.forked(indices, open_branches)
            reasons = self.generated(forks, indices)
            found = [self._read(fork, index, why) for fork, index, why in zip(forks, indices, reasons, strict=True)]
            if self.plan.answer is not None and self.plan.answer.tokens:
                found = self._with_choices(forks, found)
        return found

    def forked(self, indices: Sequence[int], open_branches: ExitStack) -> list[Forked]:
        """One fork per rollout, which `open_branches` releases. Forks at one place share pages, replaced tokens included."""
        places: dict[int, list[int]] = {}
        for index in indices:
            places.setdefault(self.plan.rollout(index)[0], []).append(index)
        forks: dict[int, Forked] = {}
        for place, own in places.items():
            start, at = self.branch, self.plan.positions[place]
            if self.plan.replace:
                (start,) = self.branch.fork(at=at)
                open_branches.callback(start.release)
                start.force(self.plan.replace[place])
                at = len(start.record.tokens)
            for index, fork in zip(own, start.fork(len(own), at=at), strict=True):
                open_branches.callback(fork.release)
                self._capture(fork.lane, at - 1)
                forks[index] = fork
        return [forks[index] for index in indices]

    def _capture(self, lane: Lane, first: int) -> None:
        """Mutates: the lane records what the plan keeps, from position `first` on, and nothing else."""
        lane.capture, lane.recording, lane.template = self.capture, None, None
        if self.capture is not None:
            lane.recording = Recording(first)
            lane.recording.aliases, lane.recording.twins = self.engine.forest.aliases, self.engine.forest.twins(lane)

    def generated(self, forks: Sequence[Forked], indices: Sequence[int]) -> list[str]:
        """Generate on all forks together. Returns why each stopped."""
        plan, forest = self.plan, self.engine.forest
        if not plan.max_new:
            if plan.sites:
                forest.compute([fork.lane for fork in forks])
            return ["length"] * len(forks)

        def jobs() -> list[Job]:
            made = []
            for fork, index in zip(forks, indices, strict=True):
                job = self.engine._job(fork, Request(plan.max_new, plan.sampling_of(index), final=bool(plan.sites)))
                job.until = self._answered if plan.answer is not None and plan.answer.stop else None
                made.append(job)
            return made

        return [job.finish_reason or "length" for job in forest.serve(jobs)]

    def _answered(self, tokens: Sequence[int]) -> bool:
        assert self.plan.answer is not None
        return self.plan.answer.certain(self.engine.text.decode(tokens))

    def _read(self, fork: Forked, index: int, why: str) -> Rollout:
        plan, text = self.plan, self.engine.text
        place, number = plan.rollout(index)
        start = len(plan.prefix(place))
        tokens = list(fork.record.tokens[start:])
        own = tokens[:-1] if why == "eos" and tokens[-1] == text.eos_id else tokens
        said = text.decode(own) if own else ""
        answer = None if plan.answer is None or plan.answer.tokens else plan.answer.read(said)
        rows, states = self._kept(fork.lane, start, own, answer, len(tokens))
        return Rollout(
            plan.positions[place],
            number,
            plan.sampling_of(index).seed,
            tuple(tokens),
            said,
            None if answer is None else answer.outcome,
            why,
            (),
            rows,
            states,
        )

    def _kept(
        self, lane: Lane, start: int, own: list[int], answer: Found | None, count: int
    ) -> tuple[tuple[Row, ...], dict[str, Tensor]]:
        """The rows of the plan's places on a rollout of `count` tokens from `start` on, and what is captured there."""
        recording = lane.recording
        if recording is None:
            return (), {}
        rows = places(self.plan, self.engine.text, start, own, answer, count)
        return tuple(rows), recording.picked([position for _, position in rows])

    def _with_choices(self, forks: Sequence[Forked], found: list[Rollout]) -> list[Rollout]:
        """The rollouts with the probabilities of the choices as the token after them, and after the forced text."""
        answer, forest = self.plan.answer, self.engine.forest
        assert answer is not None
        for fork, rollout in zip(forks, found, strict=True):
            fork.lane.capture = fork.lane.recording = None
            if rollout.stopped in ("eos", "stop"):  # a finished branch takes no tokens, and the choice comes before the end
                fork.rollback(len(fork.record.tokens) - (rollout.stopped == "eos"))
        if answer.after:
            self.engine.force_all(forks, [answer.after] * len(forks))
        last = f"blocks.{self.engine.config.num_layers - 1}.hook_out"
        tips = [len(fork.record.tokens) - 1 for fork in forks]
        rows = Completer(forest).final_rows([fork.lane for fork in forks], tips, last)
        columns = self.engine.token_ids_of(answer.tokens)
        names = [*map(str, answer.tokens)]
        made = []
        for rollout, row in zip(found, rows, strict=True):
            logits = forest.lock.alone(logits_of, forest.runner, row, None)[0].double()
            shares = logits.softmax(-1)[columns].tolist()
            outcome = names[max(range(len(shares)), key=shares.__getitem__)]
            made.append(_replaced(rollout, outcome, (*shares, max(0.0, 1.0 - sum(shares)))))
        return made


def _replaced(rollout: Rollout, outcome: str, shares: tuple[float, ...]) -> Rollout:
    return Rollout(**{**vars(rollout), "outcome": outcome, "probabilities": shares})


def places(plan: ResamplePlan, text: Text, start: int, own: list[int], answer: Found | None, count: int) -> list[Row]:
    """The kept places of a rollout whose `count` tokens start at `start`, in order. A place that it lacks has no row."""
    found: list[Row] = []
    for place in plan.keep:
        if place == "fork":
            found.append(("fork", start - 1))
        elif place == "sentences":
            said, offsets = offsets_of(text, own) if own else ("", [])
            found += [("sentences", start + token) for token in sentence_ends(said, offsets)]
        elif place == "answer" and answer is not None:
            offsets = offsets_of(text, own)[1]
            token = next((i for i, (_, end) in enumerate(offsets) if end >= answer.end), len(offsets) - 1)
            found.append(("answer", start + token))
        elif place == "last":
            found.append(("last", start + count - 1))
        elif place == "all":
            found += [("all", start + token) for token in range(count)]
        elif isinstance(place, int) and -count <= place < count:
            found.append((str(place), start + place % count))
    return sorted(found, key=lambda row: row[1])
