"""`Stream`: committed tokens of one branch, as they come."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from replaylens.engine.loop.lane import Job

if TYPE_CHECKING:
    from replaylens.engine.serving.branch import Branch


class Stream(Iterator[int]):
    """Yields every token that its request commits, whoever steps the loop. Closing it cancels what is left."""

    def __init__(self, branch: "Branch", job: Job) -> None:
        self.branch, self.job = branch, job
        self._shown = branch.length
        self._closed = False

    def __next__(self) -> int:
        tokens = self.branch.engine.tree.branch(self.branch.id).tokens
        while self._shown >= len(tokens):  # a live list: steps append to it
            if self.job.done or self._closed:
                self.close()
                if self.job.error is not None:
                    raise self.job.error
                raise StopIteration
            self.branch.engine.loop.step()
        self._shown += 1
        return tokens[self._shown - 1]

    def close(self) -> None:
        """Stop the request, if it still runs. What was committed stays on the branch."""
        if not self._closed:
            self._closed = True
            if not self.job.done:
                self.branch.engine.forest.cancel(self.job)
            self.branch._absorb(self.job)

    def __del__(self) -> None:
        self.close()
