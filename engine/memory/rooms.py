"""`Rooms`: which pages of a hybrid hold their part of the recurrent layers' memory.

A position's entry and a chunk's state are far larger than its keys and values, and later rows need few of them: the entries of
the open chunk, and the state before it. So there are fewer rooms than pages. What has no room is computed again from the last
boundary whose state is still there, as what a preempted branch lost is: `known` says where, and the bits are the same.

    position        0        64       128      192      256   270
    states          |--------S--------.--------S--------S           a state belongs to the page that ends with its chunk
    entries                                             EEEEEE      of the open chunk: all of them, or it begins again

When rooms run out, the one whose loss costs least is taken: of a free page, or of the page that was used least recently, where
the boundary of 2, 4, 8, ... chunks counts as used later. So of an old path every n-th state is kept, and n grows with its age.
What the last step used goes last: its requests go on, and may have their turn after the one that looks for a room.

The last inputs of the convolutions before a boundary go with its state (the `tail`): they are saved when the entries are lost.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaylens.engine.errors import IntegrityError, InternalError, OutOfStates
from replaylens.engine.memory.pages import PageCopy, PagePool, PageTable
from replaylens.kernels.definition import CHUNK

_LATER = 256
"""steps by which a boundary of twice as many chunks counts as used later"""


class Move(NamedTuple):
    """What `KVCache` must copy, in order, before the next pass."""

    kind: str
    """"copy": entries of a room to another; "save": the last inputs of a room to a state's tail; "restore": the other way"""
    source: int
    target: int
    slots: int


class Shelf:
    """Rooms 1..count, each of at most one page; room 0 belongs to no page, and what is written there is never read.

    Rooms lie in heaps, so that the next one to be taken is found without a walk over all. What a heap says of a room may be
    old: it is looked up when the room is popped.
    """

    def __init__(self, count: int, pool: PagePool) -> None:
        self.pool, self.count = pool, count
        self.of = np.zeros(pool.num_pages + 1, np.int32)
        """page -> room; 0: it has none"""
        self.page: NDArray[np.int32] = np.zeros(count + 1, np.int32)
        """room -> page; 0: it is free"""
        self.used = np.full(count + 1, -1, np.int64)
        """room -> the step that last used it"""
        self.later = np.zeros(count + 1, np.int64)
        self._next = 1
        """the first room that was never taken"""
        self._idle: list[int] = []
        """a heap of rooms whose page was freed, or dropped"""
        self._taken: list[tuple[int, int]] = []
        """a heap of (when it counts as used, room), some of them no longer in `_listed`"""
        self._going: list[tuple[int, int]] = []
        """likewise, of rooms that the last step used: in this step they go last"""
        self._aside: list[int] = []
        """rooms that this step uses"""
        self._listed: dict[int, int] = {}
        """room -> its rank in a heap; it may have grown since"""
        self._now, self._in_use = -1, set[int]()
        """this step, and the rooms that it uses"""
        self.changed = False
        """whether `of` has changed since a device last got a copy of it"""

    def num_free(self, now: int) -> int:
        """Rooms that may be taken in step `now`: those that it does not use."""
        return self.count - (len(self._in_use) if now == self._now else 0)

    def touch(self, page: int, now: int) -> None:
        """Mutates: the page's room, if it has one, is used."""
        if room := int(self.of[page]):
            self._use(room, now)

    def freed(self, page: int) -> None:
        """Mutates: the page was freed, and its room, if it has one, is the next to be taken."""
        if room := int(self.of[page]):
            heappush(self._idle, room)

    def take(self, page: int, now: int, chunk: int = 0) -> tuple[int, int]:
        """(room, the page that lost it). Mutates: gives the page a room, unless it has one. 0: no page lost one."""
        room, lost = int(self.of[page]), 0
        if not room:
            self._begin(now)
            room = self._idle_room() or self._oldest_room()
            lost = int(self.page[room])
            self.of[lost], self.of[page], self.page[room] = 0, room, page
            self.changed = True
        self._use(room, now)
        self.later[room] = _LATER * ((chunk & -chunk).bit_length() - 1) if chunk else 0
        if self._listed.get(room, self._rank(room) + 1) > self._rank(room):
            self._list(self._taken, room)
        return room, lost

    def _list(self, waiting: list[tuple[int, int]], room: int) -> None:
        self._listed[room] = self._rank(room)
        heappush(waiting, (self._listed[room], room))

    def _begin(self, now: int) -> None:
        """Mutates: step `now` begins, unless it did."""
        if now != self._now:
            self._now = now
            self._in_use.clear()
            for room in (*self._aside, *(room for rank, room in self._going if self._listed.get(room) == rank)):
                self._list(self._taken, room)
            self._aside.clear()
            self._going.clear()

    def _use(self, room: int, now: int) -> None:
        self._begin(now)
        self.used[room] = now
        self._in_use.add(room)

    def _rank(self, room: int) -> int:
        return int(self.used[room] + self.later[room])

    def _idle_room(self) -> int:
        """The first room that belongs to no page, or to a free one, and that this step does not use; 0: there is none."""
        used, found = list[int](), 0
        while self._idle and not found:
            room = heappop(self._idle)
            if self.page[room] and self.pool.refcount(int(self.page[room])):  # it was taken again
                continue
            if self.used[room] == self._now:
                used.append(room)
            else:
                found = room
        for room in used:
            heappush(self._idle, room)
        if not found and self._next <= self.count:
            found, self._next = self._next, self._next + 1
        return found

    def _oldest_room(self) -> int:
        """The room that counts as used longest ago. Precondition: this step does not use all."""
        for waiting in (self._taken, self._going):
            while waiting:
                rank, room = heappop(waiting)
                if self._listed.get(room) != rank:
                    continue
                del self._listed[room]
                if self.used[room] == self._now:
                    self._aside.append(room)
                elif rank != self._rank(room):
                    self._list(waiting, room)
                elif waiting is self._taken and self.used[room] >= self._now - 1:
                    self._list(self._going, room)
                else:
                    return room
        raise InternalError("All rooms are used in this step. Ask `num_free` first.")

    def drop(self, page: int) -> None:
        """Mutates: the page has no room any more."""
        room = int(self.of[page])
        if room:
            self.of[page], self.page[room], self.used[room] = 0, 0, -1
            self._in_use.discard(room)
            heappush(self._idle, room)
            self.changed = True

    def check_integrity(self) -> int:
        """How many pages have rooms. Raises IntegrityError with the first fault."""
        for room, page in enumerate(self.page.tolist()):
            if room and page and self.of[page] != room:
                raise IntegrityError(f"Room {room} is page {page}'s, whose room is {self.of[page]}.")
        held, taken = (int((x[1:] > 0).sum()) for x in (self.of, self.page))
        if held != taken:
            raise IntegrityError(f"{held} pages have rooms, but {taken} rooms have pages.")
        return held


class Rooms:
    """Entries and states of pages, and where a path can go on. Precondition: the page size divides a chunk."""

    def __init__(self, pool: PagePool, entries: int, states: int, tail: int) -> None:
        """
        entries, states  numbers of rooms
        tail             inputs of a convolution that a row needs in addition to its own; at most a page
        """
        self.pool, self.size, self.tail = pool, pool.page_size, tail
        self.entries, self.states = Shelf(entries, pool), Shelf(states, pool)
        self.whole = np.zeros(pool.num_pages + 1, bool)
        """page -> whether its room has all entries, not only the restored tail"""
        self.now = 0
        pool.freed = []

    def begin(self) -> None:
        """Mutates: a new step begins, and rooms that the last one used may be taken."""
        self.now += 1

    def _look(self) -> None:
        """Mutates: rooms of pages that were freed are free."""
        for page in self.pool.freed or ():
            self.entries.freed(page)
            self.states.freed(page)
        self.pool.freed = []

    def known(self, table: PageTable, length: int) -> int:
        """The last position up to `length` at which a row of the table can be computed."""
        base = length - length % CHUNK
        open_pages = table.pages[base // self.size : -(-length // self.size)]
        if not all(self.entries.of[page] and self.whole[page] for page in open_pages):
            length = base
        while base and not self.states.of[table.pages[base // self.size - 1]]:
            base -= CHUNK
            length = base
        return length

    def prepare(self, table: PageTable, start: int, end: int) -> None:
        """Check that there are rooms for rows [start, end). Mutates: what they need is marked as used.

        Raises OutOfStates before anything is lost. Precondition: `known(table, start) == start`
        """
        if start == end:
            return
        if self.known(table, start) != start:
            raise InternalError(f"Recurrent states at position {start} are gone. Ask `known` first.")
        base, size, restored = start - start % CHUNK, self.size, 0
        for page in table.pages[base // size : -(-start // size)]:
            self.entries.touch(page, self.now)
        if base:
            self.states.touch(table.pages[base // size - 1], self.now)
            if start - base < self.tail:  # later rows need nothing of the chunk before: its rooms are the first to be taken
                self.entries.touch(table.pages[base // size - 1], self.now)
                restored = int(not self.entries.of[table.pages[base // size - 1]])
        first, beyond, shared = start // size, -(-end // size), set(self.pool._plan(table, start, end)[0])
        kept = (self.entries.of[page] for i, page in enumerate(table.pages[first:beyond], first) if i not in shared)
        in_use = sum(room > 0 and self.entries.used[room] == self.now for room in kept)  # others may be lost to these
        needed = beyond - first - in_use + restored, end // CHUNK - start // CHUNK
        for what, count, shelf in zip(("pages of entries", "states"), needed, (self.entries, self.states), strict=True):
            if count > shelf.num_free(self.now):
                raise OutOfStates(what, count, shelf.num_free(self.now), shelf.count)

    def take(self, table: PageTable, start: int, end: int, copies: Sequence[PageCopy]) -> list[Move]:
        """What must be copied. Mutates: gives rooms to the pages of rows [start, end), after `PagePool.reserve`."""
        self._look()
        moves: list[Move] = []
        base, size, sources = start - start % CHUNK, self.size, {copy.target: copy for copy in copies}
        if start == end:
            return moves
        if base and start - base < self.tail:
            before = table.pages[base // size - 1]
            if not self.entries.of[before]:
                room = self._entry(before, moves, whole=False)
                moves.append(Move("restore", int(self.states.of[before]), room, self.tail))
        for index in range(start // size, -(-end // size)):
            page, copy = table.pages[index], sources.get(table.pages[index])
            source = page if copy is None else copy.source
            held = bool(self.whole[source] and self.entries.of[source])
            room = self._entry(page, moves, whole=held or min(table.length, (index + 1) * size) <= end)
            if copy is not None and self.entries.of[source]:
                moves.append(Move("copy", int(self.entries.of[source]), room, copy.num_slots))
            last = (index + 1) * size
            if last % CHUNK == 0 and last <= end:
                self.states.take(page, self.now, last // CHUNK)
            else:
                self.states.drop(page)
        return moves

    def _entry(self, page: int, moves: list[Move], whole: bool) -> int:
        room, lost = self.entries.take(page, self.now)
        if lost and self.whole[lost] and self.states.of[lost]:
            moves.append(Move("save", room, int(self.states.of[lost]), self.tail))
        self.whole[page] = whole
        return room

    def check_integrity(self) -> str:
        """The counts. Raises IntegrityError with the first fault."""
        counts = (f"{shelf.check_integrity()} of {shelf.count}" for shelf in (self.entries, self.states))
        return "recurrent layers: {} pages have entries, {} states".format(*counts)
