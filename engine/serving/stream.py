"""`Stream`: the committed tokens of one branch, as they come."""

import sys
from collections.abc import Iterator

from replaylens.engine.loop.lane import Job, raise_first
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import EngineLock, changing, reading
from replaylens.engine.serving.uncopied import Uncopied


class Stream(Uncopied, Iterator[int]):
    """Yields every token that its request commits, whichever thread steps the loop.

    The loop runs ahead by as many tokens as a pass happens to gain, so what it has committed depends on the clock. What the
    branch keeps does not: closing the stream cuts the branch back to the tokens that were yielded.
    """

    _instead = "Fork its branch and stream the fork."
    _process_ends = staticmethod(sys.is_finalizing)
    """bound here: at the end of the process, modules lose their names before objects go"""

    def __init__(self, forest: Forest, job: Job) -> None:
        """Precondition: the job is queued, and no step was made since."""
        self.forest, self.job, self.record = forest, job, forest.tree.branch(job.lane.branch)
        self.lock: EngineLock = forest.lock
        self._start = len(self.record.tokens)
        self._pending = self.record.states[-1] is TokenState.PENDING
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
        if self._closed or at >= len(self.record.tokens):
            return None
        self.job.num_yielded += 1
        return self.record.tokens[at]

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
        if end < len(self.record.tokens) or (pending and self.record.states[-1] is not TokenState.PENDING):
            self.forest.rollback(lane, end, pending)

    @changing
    def _leave(self) -> None:
        """The branch forgets the request, which would keep it open."""
        if self.job.lane.streamed is self.job:
            self.job.lane.streamed = None

    def __del__(self) -> None:
        if not self._closed and not self._process_ends():
            self.lock.soon(self.close)
