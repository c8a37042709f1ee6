"""`Ferry`: takes captured rows from the device to the host while the device computes on.

A copy into fresh pageable memory runs at a fortieth of the bus's speed and makes the host wait. So rows leave on a stream of
their own into a ring of pinned memory, and threads carry them from there into ordinary memory. Whoever captures gets a
`Shipment` at once and waits only when somebody looks at it. While the ring is full, `send` waits: memory stays bounded, and
nothing is lost.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import EngineBug
from replaylens.engine.interrupts import held_interrupt
from replaylens.engine.passes.ring import Memory, Ring, RingPlace
from replaylens.engine.passes.shipment import Shipment, SiteGroup

RING_BYTES = 1 << 30
"""default size of the ring"""
SMALLEST_RING = 1 << 16
_SHARE = 32
"""a piece fills at most this part of the ring, so that the device fills one piece while others are carried on"""
_CARRIERS = 12
"""threads that carry pieces; one alone reaches a twentieth of the bus's speed, since fresh memory must be mapped first"""
_ALIGNED = 256
"""ring positions are multiples of this, so that a piece can have any dtype"""
_PATIENCE = 30.0
"""seconds that the end of the process waits for rows under way"""
_SMALL = 1 << 20
"""bytes up to which parts travel as one piece: below, events and threads cost more than copies"""

Copied = tuple[Tensor, Tensor]
"""bytes to copy, and where to"""


@dataclass(frozen=True)
class _Piece:
    """Copies under way: from the device into the ring, then to their targets."""

    block: Shipment
    place: RingPlace
    arrived: Callable[[], object]
    """returns once the rows are in the ring"""
    parts: list[Copied]
    """bytes in the ring, and in ordinary memory"""


_ferries: "weakref.WeakSet[Ferry]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """The interpreter ends threads wherever they are; within a call of the driver, that aborts the process."""
    for ferry in list(_ferries):
        ferry.end(_PATIENCE)


class Ferry:
    """The way of captured rows from one device to the host. Threads: one sends at a time.

    size  bytes of pinned memory; while all are in use, `send` waits. As much ordinary memory is kept for the next rows
    """

    def __init__(self, device: str, size: int = RING_BYTES) -> None:
        self.ring = Ring(size // _ALIGNED * _ALIGNED)
        with torch.inference_mode(False):  # the rows that need it first may come in inference mode, and later ones not
            self._buffer = torch.empty(self.ring.size, dtype=torch.uint8, pin_memory=device == "cuda")
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._memory = Memory(size)
        self._sparse: list[Shipment] = []
        self._ended = False
        # threads must not hold the ferry, or its pinned memory would outlive the engine
        arguments = (self._pieces, self.ring)
        self._threads = [threading.Thread(target=_carry_all, args=arguments, daemon=True) for _ in range(_CARRIERS)]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._pieces.put, None).atexit = False
        _ferries.add(self)

    def end(self, seconds: float) -> None:
        """Carry what was sent and end the threads. Waits at most so long. Nothing can be sent afterwards."""
        self._ended = True
        self._pieces.put(None)
        limit = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))

    def send(self, groups: Iterable[SiteGroup]) -> Shipment:
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
        block = Shipment(targets, len(pieces), self._sparse.append)
        for parts in pieces:
            self._send(block, parts)
        return block

    def wait(self) -> None:
        """Return when all that was sent has arrived."""
        self.ring.wait_empty(self._alive)

    def _parts(self, groups: list[SiteGroup], targets: list[SiteGroup]) -> Iterator[Copied]:
        """Ranges of bytes that fit into a share of the ring."""
        most = self.ring.size // _SHARE // _ALIGNED * _ALIGNED
        for (_, x), (_, target) in zip(groups, targets, strict=True):
            raw, there = _bytes(x), _bytes(target)
            for start in range(0, len(raw), most):
                yield raw[start : start + most], there[start : start + most]

    def _send(self, block: Shipment, parts: list[Copied]) -> None:
        room = sum(_room(source) for source, _ in parts)
        self.ring.wait(room, self._alive)
        with held_interrupt():  # what is taken must be given back
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
            raise EngineBug("The threads that carry captured rows to the host have ended. Load the engine again.")


def _carry_all(pieces: "queue.SimpleQueue[_Piece | None]", ring: Ring) -> None:
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
    """Neighbours of up to `most` bytes in all as one piece, larger ones one by one."""
    piece: list[Copied] = []
    room = 0
    for part in parts:
        if piece and room + _room(part[0]) > most:
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
