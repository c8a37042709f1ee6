"""`Stream`: committed tokens of one branch, as they come."""

from collections.abc import Iterator

from replaylens.engine.loop.lane import Job
from replaylens.engine.memory.tree import BranchRecord
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import EngineLock, reading
from replaylens.engine.serving.uncopied import Uncopied


class Stream(Uncopied, Iterator[int]):
    """Yields every token that its request commits, whoever steps the loop. Closing it cancels what is left."""

    _instead = "Fork its branch, and stream the fork"

    def __init__(self, forest: Forest, job: Job, record: BranchRecord) -> None:
        self.forest, self.job, self.record = forest, job, record
        self.lock: EngineLock = forest.lock
        self._shown = len(record.tokens)
        self._closed = False

    def __next__(self) -> int:
        while True:
            ended, seen = self.job.done or self._closed, self.job.generated  # before the tokens: others may step meanwhile
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
        """The next one that is committed; None: there is none yet."""
        if self._shown >= len(self.record.tokens):
            return None
        self._shown += 1
        return self.record.tokens[self._shown - 1]

    def _wait(self, seen: int) -> None:
        """Until the request has generated more than `seen` tokens, or ended. Interrupted, it is cancelled."""
        try:
            self.lock.drive(self.forest.loop.step, lambda: self.job.done or self.job.generated > seen)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the request, if it still runs. What was committed stays on the branch."""
        if not self._closed:
            self._closed = True
            self.forest.cancel(self.job)

    def __del__(self) -> None:
        if not self._closed and not self.job.done:
            self.lock.soon(self.close)
