"""`WriteQueue`: writes that run in threads beside the computation, a bounded number of them at a time."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class WriteQueue:
    """At most `threads` writes are under way. The first error of any of them is raised in the caller, at its next call.

    Leaving the block waits for the writes that have started, whether or not it failed: none is cut off in the middle.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dump-writer")
        self._under_way: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True)

    def put(self, write: Callable[..., None], *arguments: Any) -> None:
        """Start a write once fewer than `threads` are under way. What it holds is released when it ends."""
        while len(self._under_way) >= self.threads:
            self._under_way.popleft().result()
        self.check()
        self._under_way.append(self._pool.submit(write, *arguments))

    def check(self) -> None:
        """Raise the error of a write that failed. Does not wait."""
        for write in self._under_way:
            if write.done():
                write.result()

    def wait(self) -> None:
        """Wait until every write is done. Raises the first error among them."""
        while self._under_way:
            self._under_way.popleft().result()
