"""KV pages: `PageTable` of a branch, `PagePool`, which counts references, and `check_pages`, which counts them again."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from replaylens.engine.errors import BadRange, BadRequest, IntegrityError, InternalError, OutOfPages

# ---- page runs -------------------------------------------------------------------------------------------------------
# `PageTable`, and `PageRun`: pages that several tables begin with, counted once for all of them.
#
# A fork takes hold of the run that its parent's pages end with, and a release lets go of it: one number changes, however many
# pages the run has. Runs lie on each other like the branches of a tree. Each has one reference to each of its pages, and drops
# them when nobody holds it any more.
#
#     pages of a table:   [0, run.start) of the runs below | [run.start, run.end) of `run` | [run.end, ...) its own


@dataclass(slots=True, eq=False)
class PageRun:
    """Pages [start, end) of every table that holds it. Only `PagePool` changes it."""

    below: "PageRun | None"
    """what it lies on: pages [0, start)"""
    start: int
    pages: list[int]
    """at least one"""
    holders: int = 1
    """tables whose last run it is, and runs that lie on it"""
    parked: dict[int, None] | None = None
    """who ends with it and waits for its other holders; see `PagePool.park`"""

    @property
    def left_to_parked(self) -> bool:
        """Whether nobody else holds it."""
        return self.parked is not None and len(self.parked) >= self.holders

    @property
    def end(self) -> int:
        return self.start + len(self.pages)

    def chain(self) -> "Iterator[PageRun]":
        """This run and those below it, downwards."""
        run: PageRun | None = self
        while run is not None:
            yield run
            run = run.below

    def split(self, at: int) -> "PageRun":
        """Mutates: this run keeps its pages from `at` on. The others become a run below it, which is returned. Nobody's pages
        change. Precondition: start < at < end."""
        count = at - self.start
        lower = PageRun(self.below, self.start, self.pages[:count])
        self.below, self.start, self.pages = lower, at, self.pages[count:]
        return lower

    def hold(self, end: int) -> "PageRun | None":
        """Mutates: one more holder of the first `end` pages, for a table that ends there. None: nothing is left to hold.

        Precondition: `end` is not beyond this run.
        """
        found: PageRun | None = self
        while found is not None and found.start >= end:
            found = found.below
        if found is not None and found.end > end:
            found = found.split(end)
        if found is not None:
            found.holders += 1
        return found


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of positions [0, length) of one branch. Only `PagePool` changes it; its owner releases it."""

    pages: list[int] = field(default_factory=list)
    """all of them, those of its runs included"""
    length: int = 0
    closed: bool = False
    run: PageRun | None = None
    """the last run that it holds"""

    @property
    def num_held(self) -> int:
        """How many of its first pages belong to runs."""
        return self.run.end if self.run is not None else 0

    @property
    def last_run(self) -> PageRun | None:
        """The run of its last page; None: that page is its own."""
        return self.run if self.run is not None and self.run.end == len(self.pages) else None


# ---- check pages -----------------------------------------------------------------------------------------------------
# `check_pages`: every reference to a page counted again, and the faults that this can find.

NULL_PAGE = 0
"""padding of page tables points here; it is never a real page, so that a zeroed entry is recognised as a fault"""


class CountedPool(Protocol):
    """What is counted again: a `PagePool`."""

    num_pages: int
    page_size: int
    _refcounts: list[int]
    _free: list[int]

    @property
    def num_free(self) -> int: ...


@dataclass(frozen=True)
class PoolNumbers:
    """The counts of `PagePool.check_integrity`."""

    num_pages: int
    page_size: int
    num_free: int
    num_shared: int
    num_tables: int
    num_positions: int
    num_table_references: int
    num_retained: int

    def __str__(self) -> str:
        return (
            f"pool: {self.num_pages} pages of {self.page_size} = {self.num_free} free "
            f"+ {self.num_pages - self.num_free} used ({self.num_shared} shared); "
            f"references: {self.num_table_references} from {self.num_tables} tables of {self.num_positions} positions "
            f"+ {self.num_retained} retained"
        )


def check_pages(pool: CountedPool, tables: Sequence[PageTable], retained: Sequence[int]) -> PoolNumbers:
    """`PagePool.check_integrity`."""
    users: Counter[int] = Counter(retained)
    references: Counter[int] = Counter(retained)
    for number, table in enumerate(tables):
        _check_table(pool, number, table)
        users.update(table.pages)
        references.update(table.pages[table.num_held :])
    for run in _check_runs(tables):
        references.update(run.pages)
    _check_free_list(pool)
    if pool._refcounts[NULL_PAGE] or references[NULL_PAGE]:
        owned = max(pool._refcounts[NULL_PAGE], references[NULL_PAGE])
        raise IntegrityError(f"The null page {NULL_PAGE} has {owned} references. It must have none.")
    for page in range(1, max([len(pool._refcounts) - 1, *references]) + 1):
        counted = pool._refcounts[page] if page < len(pool._refcounts) else 0
        if counted != references[page]:
            raise IntegrityError(f"Page {page}: reference count {counted}, but {references[page]} references found.")
    return PoolNumbers(
        num_pages=pool.num_pages,
        page_size=pool.page_size,
        num_free=pool.num_free,
        num_shared=sum(count > 1 for count in users.values()),
        num_tables=len(tables),
        num_positions=sum(table.length for table in tables),
        num_table_references=users.total() - len(retained),
        num_retained=len(retained),
    )


def _check_table(pool: CountedPool, number: int, table: PageTable) -> None:
    pages, length = table.pages, table.length
    if table.closed and (pages or length):
        raise IntegrityError(f"Table {number} is closed but has {len(pages)} pages and length {length}.")
    if length < 0 or len(pages) != -(-length // pool.page_size):
        raise IntegrityError(f"Table {number}: length {length} with {len(pages)} pages of {pool.page_size}.")
    for index, page in enumerate(pages):
        if not 1 <= page <= pool.num_pages:
            raise IntegrityError(f"Table {number}: entry {index} is page {page}, outside 1..{pool.num_pages}.")
    for page, count in Counter(pages).items():
        if count > 1:
            raise IntegrityError(f"Table {number}: page {page} occurs {count} times.")


def _check_runs(tables: Sequence[PageTable]) -> list[PageRun]:
    """All runs of the tables, each once, with the holders that they should have."""
    found: dict[int, PageRun] = {}
    holders: Counter[int] = Counter()
    for number, table in enumerate(tables):
        holders.update([id(table.run)] * (table.run is not None))
        for run in [] if table.run is None else table.run.chain():
            if table.pages[run.start : run.end] != run.pages or (run.below.end if run.below else 0) != run.start:
                raise IntegrityError(
                    f"Table {number}: its pages {run.start} to {run.end - 1} are not those of the run that it holds."
                )
            if id(run) not in found:
                found[id(run)] = run
                holders.update([id(run.below)] * (run.below is not None))
    for run in found.values():
        if run.holders != holders[id(run)]:
            raise IntegrityError(
                f"Run of pages {run.pages[0]} to {run.pages[-1]}: {run.holders} holders counted, {holders[id(run)]} found."
            )
    return list(found.values())


def _check_free_list(pool: CountedPool) -> None:
    for page, count in Counter(pool._free).items():
        if not 1 <= page <= pool.num_pages:
            raise IntegrityError(f"Free list: page {page} is outside 1..{pool.num_pages}.")
        if count > 1:
            raise IntegrityError(f"Free list: page {page} occurs {count} times.")
        if page < len(pool._refcounts) and pool._refcounts[page]:
            raise IntegrityError(f"Free list: page {page} has reference count {pool._refcounts[page]}.")
    lost = set(range(1, len(pool._refcounts))) - set(pool._free)
    for page in sorted(lost):
        if pool._refcounts[page] == 0:
            raise IntegrityError(f"Free list: page {page} has reference count 0 but is not listed (leaked).")


# ---- pages -----------------------------------------------------------------------------------------------------------
# `PagePool`: reference-counted KV pages. It only counts; `KVCache` owns the bytes and makes the copies.
#
# | what                                    | who may write there              | who frees it                        |
# |-----------------------------------------|----------------------------------|-------------------------------------|
# | [0, length), page with one reference    | the table's owner, by `reserve`  | `truncate` / `release` of the table |
# | [0, length), page with more references  | nobody; `reserve` replaces it    | the `drop` of the last reference    |
# | [length, end of the last page)          | nobody before a `reserve`        | freed with its page                 |
# | page 0, the null page                   | nobody: it stays zero            | never owned, never free             |
#
# A table of `length` positions always has exactly ceil(length / page_size) pages. Its first ones may belong to a `PageRun`
# that other tables hold as well; the others have a reference of the table's own.
#
# Who is asked for pages and shares its last ones is parked there, by a number that the caller chooses. Once nobody else holds
# them, `heard` names the parked: who looks for pages asks each of them once, and not whenever it looks.


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Slots [0, num_slots) of page `source` must be copied to page `target` before the next write."""

    source: int
    target: int
    num_slots: int
    first: int
    """position of the pages' first slot"""


def page_matrix(tables: Sequence[PageTable], shape: tuple[int, int] | None = None, rest: int = NULL_PAGE) -> NDArray[np.int32]:
    """The pages of the tables, one row per table, padded with `rest`. shape: at least (tables, pages of the longest)"""
    pages = np.full(shape or (len(tables), max(len(table.pages) for table in tables)), rest, dtype=np.int32)
    for row, table in zip(pages, tables, strict=False):
        row[: len(table.pages)] = table.pages
    return pages


_AT_FIRST = 1024
"""pages that a pool lists when it is made"""


class PagePool:
    """Pages 1..num_pages and their reference counts. The free page with the lowest id is allocated first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise BadRequest(f"num_pages is {num_pages} and page_size is {page_size}. Both must be at least 1.")
        self.num_pages = num_pages
        """usable pages; with the null page, the KV cache needs num_pages + 1"""
        self.page_size = page_size
        self._refcounts = [0]
        self._free: list[int] = []  # a heap: allocation order does not depend on the past
        self._list_more()
        self.indexed: set[int] = set()
        """the pages that `keep` holds"""
        self.left: set[int] = set()
        """those of them that everybody else let go of since the index last looked"""
        self.freed: list[int] | None = None
        """pages that became free since `Rooms` last looked; None: nobody looks"""
        self._parked: dict[int, dict[int | PageRun, None]] = {}
        """page -> who ends with it and waits for its other owners"""
        self.heard: list[int] = []
        """who was parked and has nobody left to wait for"""

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_pages + 1 - len(self._refcounts)

    def _list_more(self) -> None:
        """Mutates: lists further free pages, all after those that are listed. A large pool takes no time before it is used."""
        listed = len(self._refcounts)
        more = min(max(_AT_FIRST, listed), self.num_pages + 1 - listed)
        self._free += range(listed, listed + more)
        self._refcounts += [0] * more

    def refcount(self, page: int) -> int:
        """How many references `page` has: of tables, runs and `retain`. 0 for a free page and for the null page."""
        if not 0 <= page <= self.num_pages:
            raise InternalError(f"Page {page} does not exist. Pages are {NULL_PAGE} to {self.num_pages}.")
        return self._refcounts[page] if page < len(self._refcounts) else 0

    def sharers(self, table: PageTable, index: int) -> int:
        """How many references the page at `index` has, those of the tables that hold its run counted one by one. Where forks
        of forks hold it, it may be more."""
        runs = [] if table.run is None else [run for run in table.run.chain() if run.end > index]
        return self.refcount(table.pages[index]) + sum(run.holders - 1 for run in runs)

    def alone(self, table: PageTable) -> bool:
        """Whether only this table, and perhaps the index, has its last page. Precondition: it has one."""
        run = table.last_run
        return (run is None or run.holders == 1) and self._num_owners(table.pages[-1]) == 1

    def tail(self, table: PageTable, most: int) -> int:
        """The index of the first of the table's last pages, `most` of them at most: those with no more sharers than the very
        last, since dropping those before would free none. Takes a step for each of them."""
        first, run, above, fewest, entered = len(table.pages), table.run, 0, 0, None
        while first and len(table.pages) - first < most:
            while run is not None and run.start >= first:
                run = run.below
            if run is not None and run.end >= first and run is not entered:
                above, entered = above + run.holders - 1, run
            sharers = self._num_owners(table.pages[first - 1]) + above
            if fewest and sharers > fewest:
                break
            fewest, first = fewest or sharers, first - 1
        return first

    def park(self, table: PageTable, who: int) -> dict[Any, None]:
        """Mutates: `who`, the owner of the table, waits for others to let go of its last page. Returns the place to take it out
        of if it no longer does. Precondition: the table has pages."""
        run = table.last_run
        place: dict[Any, None]
        if run is None:
            place = self._parked.setdefault(table.pages[-1], {})
        else:
            place = run.parked = {} if run.parked is None else run.parked
        place[who] = None
        return place

    def together(self, table: PageTable) -> list[int]:
        """All who hold the table's last page, if all are parked; then dropping it frees it. Else nobody."""
        run, page = table.last_run, table.pages[-1]
        if run is not None:
            if not run.left_to_parked:
                return []
            self._parked.setdefault(page, {})[run] = None
        units = self._parked.get(page, {})
        if len(units) < self._num_owners(page):
            return []
        for unit in [unit for unit in units if isinstance(unit, PageRun) and not unit.left_to_parked]:
            del units[unit]  # forked since
        if len(units) < self._num_owners(page):
            return []
        return [who for unit in units for who in ((unit.parked or ()) if isinstance(unit, PageRun) else [unit])]

    def num_needed(self, table: PageTable, start: int, end: int) -> int:
        """How many free pages `reserve` takes for the same arguments. Changes nothing."""
        shared, num_missing = self._plan(table, start, end)
        return len(shared) + num_missing

    def reserve(self, table: PageTable, start: int, end: int) -> list[PageCopy]:
        """Make positions [start, end) of `table` writable. Mutates the table; length becomes max(length, end).

        Missing pages are allocated. A page in the range that has other owners is replaced by a private one. The caller
        must make the returned copies, in order, before the next write and before the next call that can free a page
        (`truncate`, `release`, `drop`; `reserve` never frees). A copy holds the slots below `start`, or all used slots of
        the page if positions from `end` on are still in use. Nothing outside [start, end) is lost; the contents of
        [start, end) are undefined until written.
        Raises BadRange if start is beyond `table.length` (no gaps), and OutOfPages before anything is changed.
        """
        shared, num_missing = self._plan(table, start, end)
        if len(shared) + num_missing > self.num_free:
            raise OutOfPages(len(shared) + num_missing, self.num_free, self.num_pages)
        copies = []
        self._own(table, start // self.page_size if start < end else table.num_held)
        for index in shared:
            source, target = table.pages[index], self._take()
            table.pages[index] = target
            self._refcounts[source] -= 1
            self._tell(source)
            num_slots = self._num_carried(table.length, index, start, end)
            if num_slots:
                copies.append(PageCopy(source, target, num_slots, index * self.page_size))
        table.pages.extend(self._take() for _ in range(num_missing))
        table.length = max(table.length, end)
        return copies

    def truncate(self, table: PageTable, length: int) -> None:
        """Remove the positions from `length` on. Mutates the table; drops the pages that lie wholly beyond."""
        self._check_range(table, 0, length)
        num_kept = self._num_pages_of(length)
        dropped = table.pages[max(num_kept, table.num_held) :]
        self._check_used(dropped)
        del table.pages[num_kept:]
        table.length = length
        for page in dropped:
            self.drop(page)
        if table.run is not None and table.run.end > num_kept:
            kept = table.run.hold(num_kept)
            self._let_go(table.run)
            table.run = kept

    def fork(self, table: PageTable, length: int | None = None) -> PageTable:
        """A new table for the first `length` positions (default: all) that shares every page. No page is copied or counted:
        both tables hold the same run. Mutates `table`: pages of its own become a run.

        The caller owns the new table and must release it. `table` keeps its pages, but its next write to a shared page
        needs a copy.
        """
        length = table.length if length is None else length
        self._check_range(table, 0, length)
        count = self._num_pages_of(length)
        if count > table.num_held:
            own = table.pages[table.num_held : count]
            self._check_used(own)
            table.run = PageRun(table.run, table.num_held, own)
        return PageTable(table.pages[:count], length, run=None if table.run is None else table.run.hold(count))

    def share(self, pages: list[int], length: int) -> PageTable:
        """A new table of these used pages, with one more reference on each. The caller must release it."""
        if not length >= 0 or self._num_pages_of(length) != len(pages):
            raise BadRange(
                f"A table of {length} positions cannot have {len(pages)} pages of {self.page_size}. "
                "Give ceil(length / page_size) pages."
            )
        self._check_used(pages)
        for page in pages:
            self._refcounts[page] += 1
        return PageTable(list(pages), length)

    def release(self, table: PageTable) -> None:
        """Drop all references of `table`. It is empty and closed afterwards. A second release is an error."""
        self.truncate(table, 0)
        table.closed = True

    def retain(self, page: int) -> None:
        """Add a reference to a page in use. The caller must `drop` it once."""
        self._check_used([page])
        self._refcounts[page] += 1

    def drop(self, page: int) -> None:
        """Remove one reference. The page is free if it was the last."""
        self._check_used([page])
        self._refcounts[page] -= 1
        if self._refcounts[page] == 0:
            heappush(self._free, page)
            if self.freed is not None:
                self.freed.append(page)
        self._tell(page)

    def keep(self, page: int) -> None:
        """`retain` for the prefix index, which gives it back by `unkeep` and is told in `left` when it is the only owner."""
        self.retain(page)
        self.indexed.add(page)

    def unkeep(self, page: int) -> None:
        """`drop` for the prefix index."""
        self.indexed.discard(page)
        self.left.discard(page)
        self.drop(page)

    def slot(self, table: PageTable, position: int) -> int:
        """The slot of `position`: page * page_size + offset."""
        self._check_range(table, position, position + 1)
        return table.pages[position // self.page_size] * self.page_size + position % self.page_size

    def slots(self, table: PageTable, start: int, end: int) -> list[int]:
        """The slots of positions [start, end), which must lie within the table."""
        self._check_range(table, start, end)
        size = self.page_size
        if end == start + 1:
            return [table.pages[start // size] * size + start % size]
        slots: list[int] = []
        for index in range(start // size, self._num_pages_of(end)):
            shift = (table.pages[index] - index) * size
            slots.extend(range(shift + max(start, index * size), shift + min(end, (index + 1) * size)))
        return slots

    def check_integrity(self, tables: Iterable[PageTable], retained: Iterable[int] = ()) -> PoolNumbers:
        """Recount all references. Raises IntegrityError with the first fault; changes nothing.

        tables    all live tables, each once
        retained  the pages that `retain` holds, once per reference
        """
        return check_pages(self, list(tables), list(retained))

    def _plan(self, table: PageTable, start: int, end: int) -> tuple[list[int], int]:
        """Indices of the shared pages in [start, end), and the number of missing pages. Changes nothing."""
        if table.closed:
            raise InternalError("This page table was released. Fork a live table or create a new one.")
        if not 0 <= start <= end or start > table.length:
            raise BadRange(
                f"Cannot reserve [{start}, {end}) in a table of {table.length} positions. Start within it or at its end."
            )
        if start == end:
            return [], 0
        num_pages = self._num_pages_of(end)
        touched = table.pages[start // self.page_size : num_pages]
        self._check_used(touched)
        held = self._num_held_by_others(table)
        shared = [
            index for index, page in enumerate(touched, start // self.page_size) if index < held or self._refcounts[page] > 1
        ]
        return shared, max(0, num_pages - len(table.pages))

    def _num_held_by_others(self, table: PageTable) -> int:
        """How many of the table's first pages other tables have as well, because they hold its runs."""
        for run in [] if table.run is None else table.run.chain():
            if run.holders > 1:
                return run.end
        return 0

    def _own(self, table: PageTable, first: int) -> None:
        """Mutates: the table's pages from index `first` on belong to no run any more, but to the table itself."""
        while table.run is not None and table.run.end > first:
            run, others = table.run, table.run.holders > 1
            if run.start < first:
                run.split(first)
            table.run = run.below
            if others:
                run.holders -= 1
                self._hear(run)
                for page in run.pages:
                    self._refcounts[page] += 1
                if run.below is not None:
                    run.below.holders += 1

    def _let_go(self, run: PageRun) -> None:
        """Mutates: one holder less. A run without holders drops its pages and lets go of the one below."""
        for each in run.chain():
            each.holders -= 1
            if each.holders:
                return self._hear(each)
            for page in each.pages:
                self.drop(page)

    def _num_owners(self, page: int) -> int:
        """References to a page, without the index's."""
        return self._refcounts[page] - (page in self.indexed)

    def _tell(self, page: int) -> None:
        """Mutates: after a reference less, notes who has nobody left to wait for."""
        if page in self.indexed and self._refcounts[page] == 1:
            self.left.add(page)
        if page in self._parked and len(self._parked[page]) >= self._num_owners(page):
            self.heard += self._members(self._parked.pop(page))

    def _hear(self, run: PageRun) -> None:
        """Mutates: after a holder less, notes who has nobody left to wait for."""
        if run.left_to_parked:
            self.heard += self._members({run: None})

    def _members(self, units: dict[int | PageRun, None]) -> list[int]:
        """Who is parked there. Mutates: nobody waits in those runs any more."""
        found: list[int] = []
        for unit in units:
            if isinstance(unit, PageRun):
                found += unit.parked or ()
                unit.parked = None
            else:
                found.append(unit)
        return found

    def _num_carried(self, length: int, index: int, start: int, end: int) -> int:
        first = index * self.page_size
        num_used = min(length - first, self.page_size)
        return num_used if first + num_used > end else max(0, start - first)

    def _num_pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _take(self) -> int:
        if not self._free:
            self._list_more()
        page = heappop(self._free)
        self._refcounts[page] = 1
        return page

    def _check_range(self, table: PageTable, start: int, end: int) -> None:
        if table.closed:
            raise InternalError("This page table was released. Fork a live table or create a new one.")
        if not 0 <= start <= end <= table.length:
            raise BadRange(f"Positions [{start}, {end}) are not within a table of length {table.length}.")

    def _check_used(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page == NULL_PAGE:
                raise InternalError(f"Page {NULL_PAGE} is the null page. It has no owner and must not be in a table.")
            if self.refcount(page) < 1:
                raise InternalError(f"Page {page} is not in use. It was freed already, or never allocated.")
