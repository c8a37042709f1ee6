"""`Stream`: the committed tokens of one branch, as they come."""

from collections.abc import Iterator

from replaylens.engine.loop.lane import Job
from replaylens.engine.memory.tree import BranchRecord
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import EngineLock, reading
from replaylens.engine.serving.uncopied import Uncopied


class Stream(Uncopied, Iterator[int]):
    """Yields every token that its request commits, whichever thread steps the loop. Closing it cancels the rest."""

    _instead = "Fork its branch and stream the fork."

    def __init__(self, forest: Forest, job: Job, record: BranchRecord) -> None:
        self.forest, self.job, self.record = forest, job, record
        self.lock: EngineLock = forest.lock
        self._shown = len(record.tokens)
        self._closed = False

    def __next__(self) -> int:
        while True:
            ended, seen = self.job.done or self._closed, self.job.generated  # read before the tokens: other threads may step
            if (token := self._next_token()) is not None:
                return token
            if ended:
                self.close()
                if self.job.error is not None:
                    raise self.job.error
                raise StopIteration
            self._wait(seen)

    @reading
    def _next_token(self) -> int | None:
        """The next committed token; None: there is none yet."""
        if self._shown >= len(self.record.tokens):
            return None
        self._shown += 1
        return self.record.tokens[self._shown - 1]

    def _wait(self, seen: int) -> None:
        """Wait until the request has generated more than `seen` tokens or ended. An interrupt cancels it."""
        try:
            self.lock.drive(self.forest.loop.step, lambda: self.job.done or self.job.generated > seen)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the request if it still runs. Committed tokens stay on the branch."""
        if not self._closed:
            self._closed = True
            self.forest.cancel(self.job)

    def __del__(self) -> None:
        if not self._closed and not self.job.done:
            self.lock.soon(self.close)
