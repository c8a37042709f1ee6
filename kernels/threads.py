"""The threads of a CPU's kernels, which divide outputs among them: their number moves no bit.

Threads are our own: they set the processor's usual modes when they start, nobody else runs anything in them, and a fork leaves
them behind. Kernels release the interpreter lock, so they run at the same time.
"""

import ctypes
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import length_hint
from typing import Any

WORTH = 1 << 21
"""multiply-adds of a call from which more than one thread pays"""


class _Workers:
    """Threads that wait for pieces of work."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[queue.SimpleQueue[Any]] = []
        self.started = 0

    def run(self, work: Callable[[int, int], object], count: int) -> None:
        """Call work(0, count), ..., work(count - 1, count), the first of them here. Raises what one of them raises."""
        with self.lock:
            helpers = [self.waiting.pop() if self.waiting else self._start() for _ in range(count - 1)]
        ended, news = list[BaseException | None](), queue.SimpleQueue[None]()
        tasks = iter([(work, i + 1, count, ended, news) for i in range(len(helpers))])
        failed: BaseException | None = None
        begun = False
        while True:  # to the end also after an interrupt, wherever it comes: they write to memory that the caller frees
            try:
                if not begun:
                    begun = True
                    deque(map(queue.SimpleQueue.put, helpers, tasks), 0)  # in C: an interrupt comes before or after all
                    work(0, count)
                while len(ended) + length_hint(tasks) < len(helpers):
                    news.get()
                break
            except BaseException as error:
                failed = failed or error
        with self.lock:
            self.waiting.extend(helpers)
        for each in (failed, *ended):
            if each is not None:
                raise each

    def _start(self) -> "queue.SimpleQueue[Any]":
        tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.started += 1
        threading.Thread(target=_work, args=(tasks,), name=f"replaylens-{self.started}", daemon=True).start()
        return tasks


def _work(tasks: "queue.SimpleQueue[Any]") -> None:
    _set_usual_modes()
    while True:
        work, index, count, ended, news = tasks.get()
        try:
            work(index, count)
            ended.append(None)
        except BaseException as error:
            ended.append(error)
        news.put(None)
        del work, ended, news  # what they hold on to must not wait for the next piece


def _set_usual_modes() -> None:
    """Round to nearest, keep denormal numbers: a thread begins with the modes of the one that starts it."""
    import torch

    torch.set_flush_denormal(False)
    with suppress(OSError, AttributeError, TypeError):  # a system without fesetround
        ctypes.CDLL(None).fesetround(0)


_workers = _Workers()
_here = threading.local()


def _forget() -> None:
    global _workers
    _workers = _Workers()


os.register_at_fork(after_in_child=_forget)  # threads do not survive a fork


@contextmanager
def within(count: int) -> Iterator[None]:
    """Use at most `count` threads in calls of this thread within the block, unless an enclosing block says how many."""
    before = getattr(_here, "count", None)
    _here.count = count if before is None else before
    try:
        yield
    finally:
        _here.count = before


def divided(work: Callable[[int, int], object], cost: float, pieces: int) -> None:
    """Run `work(i, n)` for all i < n, on as many threads as allowed and as pay.

    cost    multiply-adds of all of it
    pieces  how many parts it has at most
    """
    count = min(getattr(_here, "count", None) or _of_torch(), pieces) if cost >= WORTH else 1
    if count <= 1:
        work(0, 1)
    else:
        _workers.run(work, count)


def _of_torch() -> int:
    import torch

    return torch.get_num_threads()


def share(index: int, count: int, total: int) -> tuple[int, int]:
    """[first, end) of one thread's share of `total` outputs."""
    return index * total // count, (index + 1) * total // count
