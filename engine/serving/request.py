"""`Request`: one generation's options, checked before it starts; `Stream`: its tokens; the logits that are asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, TypedDict

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, CannotCopy
from replaylens.engine.loop.lane import Job, Lane, raise_first
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.passes.runner import LENS_ROWS, Runner
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_bool, as_instance, as_int, as_list, defines, integer, short_repr, token_ids
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import EngineLock, changing, reading

# ---- request ---------------------------------------------------------------------------------------------------------
# `Request`: the options of one generation, checked before anything starts.

SAMPLING = "a Sampling, such as Sampling(temperature=0.7)"


class GenerateKeywords(TypedDict, total=False):
    """How tokens are generated. `Engine.generate` documents it."""

    drafter: str
    window: int | None
    deterministic: bool
    keep_pages: bool
    drafts: dict[int, list[list[int]]] | None
    final: bool


@defines(GenerateKeywords)
@dataclass(frozen=True)
class Request:
    """Generate up to `n` tokens. The fields are the options of `Engine.generate`, which documents them."""

    n: int
    sampling: Sampling = field(default_factory=Sampling)
    drafter: str = "self"
    window: int | None = None
    deterministic: bool = True
    keep_pages: bool = False
    drafts: dict[int, list[list[int]]] | None = None
    final: bool = False

    def __post_init__(self) -> None:
        for name, value in self._plain().items():
            object.__setattr__(self, name, value)
        if self.drafts is not None and self.drafter != "forced":
            raise BadRequest(f"drafts were given with drafter={self.drafter!r}. Use drafter='forced'.")

    def _plain(self) -> dict[str, Any]:
        """The fields as plain Python values; BadRequest names the field that is invalid."""
        return {
            "n": as_int("n", self.n, 1),
            "sampling": as_instance("sampling", self.sampling, Sampling, SAMPLING),
            "drafter": as_instance("drafter", self.drafter, str, "the name of a drafter"),
            "window": None if self.window is None else as_int("window", self.window, 1),
            "deterministic": as_bool("deterministic", self.deterministic),
            "keep_pages": as_bool("keep_pages", self.keep_pages),
            "drafts": None if self.drafts is None else _chains(self.drafts),
            "final": as_bool("final", self.final),
        }

    def job(self, lane: Lane, eos_id: int | None) -> Job:
        """The request as a job on a lane. The tokenizer's end-of-sequence token ends it, unless the sampling ignores it."""
        stop = self.sampling.stop_tokens
        if eos_id is not None and not self.sampling.ignore_eos:
            stop = (*stop, eos_id)
        return Job(
            lane,
            new_tokens=self.n,
            sampling=self.sampling.derived(stop_tokens=tuple(dict.fromkeys(stop))),
            drafter=self.drafter,
            window=self.window,
            exact=self.deterministic,
            final=self.final,
            keep_pages=self.keep_pages,
            forced_drafts=self.drafts or {} if self.drafter == "forced" else None,
        )


def _chains(drafts: Any) -> dict[int, list[list[int]]]:
    """Chains of tokens by position, as plain lists; a position without chains is left out."""
    accepted = "a dict: position -> list of chains of token ids, such as {9: [[5, 7], [6]]}"
    out: dict[int, list[list[int]]] = {}
    for at, chains in as_instance("drafts", drafts, dict, accepted).items():
        if isinstance(chains, list | tuple) and any(integer(each) is not None for each in chains):
            raise BadRequest(
                f"Invalid drafts[{at}]={short_repr(chains)}: one chain where a list of chains goes. Give {accepted}."
            )
        found = [token_ids(f"drafts[{at}]", chain) for chain in as_list(f"drafts[{at}]", chains, accepted)]
        if found:
            out[as_int("position of drafts", at)] = found
    return out


# ---- logits ----------------------------------------------------------------------------------------------------------
# Logits of chosen rows and tokens. Each has the bits that the same row of `unembed.hook_out` has in a capture.


def logits_of(runner: Runner, residual: Tensor, tokens: Sequence[int] | None) -> Tensor:
    """Final residual rows [rows, d_model] -> logits [rows, vocab], or of some tokens only, on the CPU.

    All columns are computed, 256 rows at a time, and only the wanted ones are kept: a narrower product could have other bits.
    """
    columns = slice(None) if tokens is None else list(tokens)
    return torch.cat([runner.logits(piece)[:, columns].cpu() for piece in residual.split(LENS_ROWS)])


# ---- not copyable ----------------------------------------------------------------------------------------------------
# `NotCopyable`: the base of objects that cannot be copied or pickled.


class NotCopyable:
    """`copy.copy`, `copy.deepcopy` and `pickle` raise CannotCopy: two owners of the same pages would corrupt each other."""

    _instead: ClassVar[str]
    """what to do instead, for the error message"""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CannotCopy(
            f"{type(self).__name__} cannot be copied or pickled: it owns pages of a live KV cache. {self._instead}"
        )


# ---- stream ----------------------------------------------------------------------------------------------------------
# `Stream`: the committed tokens of one branch, as they come.


class Stream(NotCopyable, Iterator[int]):
    """Yields every token that its request commits, whichever thread steps the loop.

    The loop runs ahead by as many tokens as a pass happens to gain, so what it has committed depends on the clock. What the
    branch keeps does not: closing the stream cuts the branch back to the tokens that were yielded.
    """

    _instead = "Fork its branch and stream the fork."
    _process_ends = staticmethod(sys.is_finalizing)
    """bound here: at the end of the process, modules lose their names before objects go"""

    def __init__(self, forest: Forest, job: Job) -> None:
        """Precondition: the job is queued, and no step was made since."""
        self.forest, self.job = forest, job
        self.lock: EngineLock = forest.lock
        self._start = len(self.job.lane.record.tokens)
        self._pending = self.job.lane.record.states[-1] is TokenState.PENDING
        self._closed = False
        job.lane.streamed = job

    def __next__(self) -> int:
        while True:
            ended, seen = self.job.done or self._closed, self.job.generated  # read before the tokens: other threads may step
            if (token := self._next_token()) is not None:
                return token
            if ended:
                self._closed = True  # it has yielded everything: there is nothing to cut
                self._leave()
                raise_first([self.job])
                raise StopIteration
            self._wait(seen)

    @reading
    def _next_token(self) -> int | None:
        """The next committed token; None: there is none yet."""
        at = self._start + self.job.num_yielded
        if self._closed or at >= len(self.job.lane.record.tokens):
            return None
        self.job.num_yielded += 1
        return self.job.lane.record.tokens[at]

    def _wait(self, seen: int) -> None:
        """Wait until the request has generated more than `seen` tokens or ended. An interrupt closes the stream."""
        try:
            self.lock.drive(self.forest.loop.step, lambda: self.job.done or self.job.generated > seen)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the request, and cut the branch back to the tokens that were yielded. Does nothing if all of them were."""
        if not self._closed:
            self._closed = True
            self._cut()

    @changing
    def _cut(self) -> None:
        job, lane = self.job, self.job.lane
        if job.done and job.num_yielded == job.generated:
            return self._leave()  # the branch may have had other requests since
        self.forest.cancel(job)
        self._leave()
        if lane.branch not in self.forest.loop.lanes:
            return  # released: its record stays as it was
        end, pending = self._start + job.num_yielded, self._pending or job.num_yielded > 0
        if end < len(self.job.lane.record.tokens) or (pending and self.job.lane.record.states[-1] is not TokenState.PENDING):
            self.forest.rollback(lane, end, pending)

    @changing
    def _leave(self) -> None:
        """The branch forgets the request, which would keep it open."""
        if self.job.lane.streamed is self.job:
            self.job.lane.streamed = None

    def __del__(self) -> None:
        if not self._closed and not self._process_ends():
            self.lock.soon(self.close)
