"""`Ring`: places in a buffer that is used again and again; `Memory`: ordinary memory that is used again."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import EngineBug

_GRAIN = 1 << 21
"""sizes of recycled memory are multiples of this; smaller pieces are not worth it"""


@dataclass(eq=False)
class RingPlace:
    """Bytes [start, end) of a ring."""

    start: int
    end: int
    free: bool = False


class Ring:
    """Places in a buffer that is given out in order. A place is free again when it and all before it were given back.

    Threads: one takes, any give back.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: deque[RingPlace] = deque()
        self._changed = threading.Condition()

    def wait(self, count: int, alive: Callable[[], object] = lambda: None) -> None:
        """Return when `count` bytes in a row are free. `alive` is called meanwhile and may raise."""
        if count > self.size:
            raise EngineBug(f"A piece of {count} bytes cannot go into a ring of {self.size}.")
        with self._changed:
            while self._free(count) is None:
                self._changed.wait(timeout=1.0)
                alive()

    def wait_empty(self, alive: Callable[[], object] = lambda: None) -> None:
        """Return when everything was given back."""
        with self._changed:
            while self._taken:
                self._changed.wait(timeout=1.0)
                alive()

    def take(self, count: int) -> RingPlace:
        """A place of `count` free bytes. Precondition: `wait` has returned for them."""
        with self._changed:
            start = self._free(count)
            assert start is not None
            self._taken.append(RingPlace(start, start + count))
            return self._taken[-1]

    def give_back(self, place: RingPlace) -> None:
        with self._changed:
            place.free = True
            while self._taken and self._taken[0].free:
                self._taken.popleft()
            self._changed.notify_all()

    def _free(self, count: int) -> int | None:
        if not self._taken:
            return 0
        first, last = self._taken[0].start, self._taken[-1].end
        if last > first:  # free: after the last place, and before the first
            return last if last + count <= self.size else 0 if count <= first else None
        return last if last + count <= first else None

    @property
    def in_use(self) -> int:
        """Bytes that are taken."""
        with self._changed:
            return sum(place.end - place.start for place in self._taken)


class Memory:
    """Ordinary memory for rows. What is freed is kept for the next rows, up to a limit: mapping fresh pages takes longer than
    filling them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: dict[int, list[np.ndarray]] = {}
        self._kept, self._lock = 0, threading.RLock()  # memory may come back while it is held

    def like(self, x: Tensor) -> Tensor:
        """Uninitialised memory of the shape and dtype of x. It comes back by itself when nobody refers to it."""
        count = x.numel() * x.element_size()
        size = -(-count // _GRAIN) * _GRAIN if count >= _GRAIN else count
        buffer = self._take(size)
        outer = np.frombuffer(buffer, dtype=np.uint8, count=count)
        if size >= _GRAIN:
            weakref.finalize(outer, self._give_back, buffer).atexit = False
        with torch.inference_mode(False):
            return torch.from_numpy(outer).view(x.dtype).view(x.shape)

    def _take(self, size: int) -> np.ndarray:
        with self._lock:
            if known := self._free.get(size):
                self._kept -= size
                return known.pop()
        return np.empty(size, dtype=np.uint8)  # from numpy, which asks for huge pages: they are mapped several times as fast

    def _give_back(self, buffer: np.ndarray) -> None:
        with self._lock:
            if self._kept + len(buffer) <= self.limit:
                self._kept += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)
