"""`Stream`: committed tokens of one branch, as they come."""

from collections.abc import Callable, Iterator

from replaylens.engine.loop.lane import Job
from replaylens.engine.serving.forest import Forest


class Stream(Iterator[int]):
    """Yields every token that its request commits, whoever steps the loop. Closing it cancels what is left.

    closed  called once with the job, when the stream ends
    """

    def __init__(self, forest: Forest, job: Job, closed: Callable[[Job], object]) -> None:
        self.forest, self.job = forest, job
        self._tokens = forest.tree.branch(job.lane.branch).tokens  # a live list: steps append to it
        self._shown = len(self._tokens)
        self._tell, self._closed = closed, False

    def __next__(self) -> int:
        while self._shown >= len(self._tokens):
            if self.job.done or self._closed:
                self.close()
                if self.job.error is not None:
                    raise self.job.error
                raise StopIteration
            self.forest.loop.step()
        self._shown += 1
        return self._tokens[self._shown - 1]

    def close(self) -> None:
        """Stop the request, if it still runs. What was committed stays on the branch."""
        if not self._closed:
            self._closed = True
            if not self.job.done:
                self.forest.cancel(self.job)
            self._tell(self.job)

    def __del__(self) -> None:
        self.close()
