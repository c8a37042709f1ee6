"""The way of captured rows from the device to the host: a ring of pinned memory, rows that are pending, the copies."""

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import InternalError
from replaylens.engine.request.capture import Place, PlacedRows, RowRun
from replaylens.engine.terminal import defer_interrupt

# ---- ring ------------------------------------------------------------------------------------------------------------
# `RingAllocator`: places in a buffer that is used again and again; `Memory`: ordinary memory that is used again.

_GRAIN = 1 << 21
"""sizes of recycled memory are multiples of this; smaller pieces are not worth it"""


@dataclass(eq=False)
class RingPlace:
    """Bytes [start, end) of a ring."""

    start: int
    end: int
    free: bool = False


class RingAllocator:
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
            raise InternalError(f"A piece of {count} bytes cannot go into a ring of {self.size}.")
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


# ---- pending rows ----------------------------------------------------------------------------------------------------
# `PendingRows`: captured rows that may still be in transfer to the host, and `RowView`: some of them.

SiteGroup = tuple[tuple[str, ...], Tensor]
"""names of sites, and their stacked rows [sites, rows, ...]"""
_counting = threading.Lock()


class PendingRows:
    """Rows of several sites, possibly still in transfer. Reading one waits for it."""

    def __init__(
        self, groups: Iterable[SiteGroup], pieces: int, sparse: Callable[["PendingRows"], object] = lambda block: None
    ) -> None:
        self._groups = list(groups)
        self._at = {name: (x, i) for names, x in self._groups for i, name in enumerate(names)}
        self.num_rows = self._groups[0][1].shape[1] if self._groups else 0
        self._waiting, self._landed = pieces, threading.Event()
        self._error: BaseException | None = None
        self._views: weakref.WeakSet[RowView] = weakref.WeakSet()
        self._live, self._sparse = 0, sparse
        if not pieces:
            self._landed.set()

    def __getitem__(self, site: str) -> Tensor:
        """All rows of a site: [rows, ...]. The caller must not change it."""
        self.wait()
        stacked, i = self._at[site]
        return stacked[i]

    def groups(self) -> list[SiteGroup]:
        """All rows of all sites. The caller must not change them."""
        self.wait()
        return self._groups

    def wait(self) -> None:
        """Return when all rows are there; raises what went wrong in transfer."""
        if self._waiting:
            self._landed.wait()
        if self._error is not None:
            raise self._error

    @property
    def lost(self) -> bool:
        """Whether something went wrong in transfer. Waits for them."""
        self._landed.wait()
        return self._error is not None

    def landed(self, error: BaseException | None = None) -> None:
        """Mutates: one more piece has arrived, or is lost."""
        with _counting:
            self._waiting -= 1
            self._error = self._error or error
            if not self._waiting:
                self._landed.set()

    def view(self, sites: Iterable[str], first: int, end: int) -> "RowView":
        """Rows [first, end) of some sites."""
        view = RowView(self, tuple(sites), first, end)
        self._views.add(view)
        self._live += end - first
        return view

    def dropped(self, count: int) -> None:
        """Mutates: nobody needs `count` of the rows any more. If few are left, they move out, so that the rest can be freed."""
        before, self._live = self._live, self._live - count
        if self._live * 4 < self.num_rows <= before * 4 and self._live:
            self._sparse(self)

    def compact(self) -> None:
        """Mutates: every view takes a copy of its rows and lets go of the block. Lost rows stay for their readers to see."""
        for view in [] if self.lost else list(self._views):
            view.own()


class RowView(PlacedRows):
    """Some rows of a block, by site."""

    def __init__(self, block: PendingRows, sites: tuple[str, ...], first: int, end: int) -> None:
        self._block: PendingRows | None = block
        self._sites, self._first, self._end = sites, first, end
        self._rows: dict[str, Tensor] = {}

    def __getitem__(self, site: str) -> Tensor:
        block = self._block  # read once: another thread may be in `own`
        return self._rows[site] if block is None else block[site][self._first : self._end]

    def place(self, number: int) -> Place:
        """Where a row lies, by its number."""
        block = self._block
        return (self._rows, number, None) if block is None else (block, self._first + number, None)

    def runs(self, first: int, count: int) -> list[RowRun]:
        block = self._block
        return [(self._rows, None, first, count) if block is None else (block, None, self._first + first, count)]

    def names(self) -> Collection[str]:
        return self._sites

    def own(self) -> None:
        """Mutates: copies the rows and lets go of the block."""
        if self._block is not None:
            self._rows = {site: self[site].clone() for site in self._sites}
            self._block = None

    def __del__(self) -> None:
        if self._block is not None:
            self._block.dropped(self._end - self._first)


# ---- host copy -------------------------------------------------------------------------------------------------------
# `HostCopy`: takes captured rows from the device to the host while the device computes on.
#
# A copy into fresh pageable memory runs at a fortieth of the bus's speed and makes the host wait. So rows leave on a stream
# of their own into a ring of pinned memory, and threads carry them from there into ordinary memory. Whoever captures gets a
# `PendingRows` at once and waits only when somebody looks at it. While the ring is full, `send` waits: memory stays bounded,
# and nothing is lost.

_SHARE = 32
"""a piece fills at most this part of the ring, so that the device fills one piece while others are carried on"""
_WORTH = 1 << 22
"""bytes of a piece that is worth a thread: rows of more are divided, so that the last ones do not wait for a single thread"""
_CARRIERS = 12
"""threads that carry pieces; one alone reaches a twentieth of the bus's speed, since fresh memory must be mapped first"""
_ALIGNED = 256
"""ring positions are multiples of this, so that a piece can have any dtype"""
_PATIENCE = 30.0
"""seconds that the end of the process waits for rows under way"""
_SMALL = 1 << 20
"""bytes up to which parts travel as one piece: below, events and threads cost more than copies"""
_TINY = 16
"""a part of at most 1 / _TINY of these bytes, such as scores, travels with its neighbour of any size"""

Copied = tuple[Tensor, Tensor]
"""bytes to copy, and where to"""


@dataclass(frozen=True)
class _Piece:
    """Copies under way: from the device into the ring, then to their targets."""

    block: PendingRows
    place: RingPlace
    arrived: Callable[[], object]
    """returns once the rows are in the ring"""
    parts: list[Copied]
    """bytes in the ring, and in ordinary memory"""


_host_copies: "weakref.WeakSet[HostCopy]" = weakref.WeakSet()
_carriers: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
"""also those of an engine that was just dropped, which are about to end"""


@atexit.register
def _end_all() -> None:
    """The interpreter ends threads wherever they are; within a call of the driver, that aborts the process."""
    for host_copy in list(_host_copies):
        host_copy.end(_PATIENCE)
    for thread in list(_carriers):
        thread.join(_PATIENCE)


class HostCopy:
    """The way of captured rows from one device to the host. Threads: one sends at a time.

    size  bytes of pinned memory; while all are in use, `send` waits. As much ordinary memory is kept for the next rows
    """

    def __init__(self, device: str, size: int) -> None:
        self.ring = RingAllocator(size // _ALIGNED * _ALIGNED)
        with torch.inference_mode(False):  # the rows that need it first may come in inference mode, and later ones not
            self._buffer = torch.empty(self.ring.size, dtype=torch.uint8, pin_memory=device == "cuda")
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._memory = Memory(size)
        self._sparse: list[PendingRows] = []
        self._ended = False
        # threads must not hold the HostCopy, or its pinned memory would outlive the engine
        arguments = (self._pieces, self.ring)
        self._threads = [threading.Thread(target=_carry_all, args=arguments, daemon=True) for _ in range(_CARRIERS)]
        _carriers.update(self._threads)
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._pieces.put, None).atexit = False
        _host_copies.add(self)

    def end(self, seconds: float) -> None:
        """Carry what was sent and end the threads. Waits at most so long. Nothing can be sent afterwards."""
        self._ended = True
        self._pieces.put(None)
        limit = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def send(self, groups: Iterable[SiteGroup]) -> PendingRows:
        """Start the way of stacked rows [sites, rows, ...] and return at once, unless the ring is full.

        Precondition: nobody writes to the tensors later, except work on the current stream that is queued after this call.
        """
        if self._ended:
            self._alive()
        while self._sparse:
            self._sparse.pop().compact()
        groups = [(names, x.contiguous()) for names, x in groups]
        targets = [(names, self._memory.like(x)) for names, x in groups]
        pieces = list(_together(self._parts(groups, targets), min(_SMALL, self.ring.size // _SHARE)))
        block = PendingRows(targets, len(pieces), self._sparse.append)
        for parts in pieces:
            self._send(block, parts)
        return block

    def wait(self) -> None:
        """Return when all that was sent has arrived."""
        self.ring.wait_empty(self._alive)

    def _parts(self, groups: list[SiteGroup], targets: list[SiteGroup]) -> Iterator[Copied]:
        """Ranges of bytes that fit into a share of the ring, for as many threads as they are worth."""
        each = max(_WORTH, sum(x.nbytes for _, x in groups) // _CARRIERS)
        most = min(self.ring.size // _SHARE, each) // _ALIGNED * _ALIGNED
        for (_, x), (_, target) in zip(groups, targets, strict=True):
            raw, there = _bytes(x), _bytes(target)
            for start in range(0, len(raw), most):
                yield raw[start : start + most], there[start : start + most]

    def _send(self, block: PendingRows, parts: list[Copied]) -> None:
        room = sum(_room(source) for source, _ in parts)
        self.ring.wait(room, self._alive)
        with defer_interrupt():  # what is taken must be given back
            place = self.ring.take(room)
            slots, start = [], place.start
            for source, _ in parts:
                slots.append(self._buffer[start : start + len(source)])
                start += _room(source)
            arrived = self._copy([source for source, _ in parts], slots)
            carried = [(slot, target) for slot, (_, target) in zip(slots, parts, strict=True)]
            self._pieces.put(_Piece(block, place, arrived, carried))

    def _copy(self, sources: list[Tensor], slots: list[Tensor]) -> Callable[[], object]:
        """Start copies into the ring. Returns a function that waits for them."""
        if self._stream is None:
            for source, slot in zip(sources, slots, strict=True):
                slot.copy_(source)
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for source, slot in zip(sources, slots, strict=True):
                slot.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            event = torch.cuda.Event(blocking=True)  # threads that poll would hold up the one that launches
            event.record()
        return event.synchronize

    def _alive(self) -> None:
        if not any(thread.is_alive() for thread in self._threads):
            raise InternalError("The threads that carry captured rows to the host have ended. Load the engine again.")


def _carry_all(pieces: "queue.SimpleQueue[_Piece | None]", ring: RingAllocator) -> None:
    """Carry pieces from the ring to their targets until None comes, which is passed on to the next thread."""
    while (piece := pieces.get()) is not None:
        error: BaseException | None = None
        try:
            piece.arrived()
            for source, target in piece.parts:
                _carry(source.numpy(), target.numpy())
        except BaseException as caught:  # whoever looks at the rows gets it
            error = caught
        piece.block.landed(error)
        ring.give_back(piece.place)
        del piece
    pieces.put(None)


def _carry(source: np.ndarray, target: np.ndarray) -> None:
    np.copyto(target, source)  # without the GIL


def _together(parts: Iterable[Copied], most: int) -> Iterator[list[Copied]]:
    """Neighbours of up to `most` bytes in all as one piece, larger ones one by one, each with a tiny one that follows."""
    piece: list[Copied] = []
    room = 0
    for part in parts:
        if piece and room + _room(part[0]) > most and (_room(part[0]) * _TINY > most or len(piece) > 1):
            yield piece
            piece, room = [], 0
        piece.append(part)
        room += _room(part[0])
    if piece:
        yield piece


def _room(x: Tensor) -> int:
    """Bytes that x takes in the ring."""
    return -(-len(x) // _ALIGNED) * _ALIGNED


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
