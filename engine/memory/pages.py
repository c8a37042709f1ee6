"""`PagePool`: reference-counted KV pages. It only counts; `KVCache` owns the bytes and makes the copies.

| what                                    | who may write there              | who frees it                        |
|-----------------------------------------|----------------------------------|-------------------------------------|
| [0, length), page with one reference    | the table's owner, by `reserve`  | `truncate` / `release` of the table |
| [0, length), page with more references  | nobody; `reserve` replaces it    | the `drop` of the last reference    |
| [length, end of the last page)          | nobody before a `reserve`        | freed with its page                 |
| page 0, the null page                   | nobody: it stays zero            | never owned, never free             |

A table of `length` positions always has exactly ceil(length / page_size) pages. Its first ones may belong to a `PageRun` that
other tables hold as well; the others have a reference of the table's own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from replaylens.engine.errors import BadPage, BadPoolSize, BadRange, ClosedTable, OutOfPages
from replaylens.engine.memory.page_runs import PageRun
from replaylens.engine.memory.page_runs import PageTable as PageTable
from replaylens.engine.memory.recount import NULL_PAGE as NULL_PAGE
from replaylens.engine.memory.recount import PoolNumbers, recount


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Slots [0, num_slots) of page `source` must be copied to page `target` before the next write."""

    source: int
    target: int
    num_slots: int


def page_matrix(tables: Sequence[PageTable], shape: tuple[int, int] | None = None, rest: int = NULL_PAGE) -> NDArray[np.int32]:
    """The pages of the tables, one row per table, padded with `rest`. shape: at least (tables, pages of the longest)"""
    pages = np.full(shape or (len(tables), max(len(table.pages) for table in tables)), rest, dtype=np.int32)
    for row, table in zip(pages, tables, strict=False):
        row[: len(table.pages)] = table.pages
    return pages


class PagePool:
    """Pages 1..num_pages and their reference counts. The free page with the lowest id is allocated first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise BadPoolSize(f"num_pages is {num_pages} and page_size is {page_size}. Both must be at least 1.")
        self.num_pages = num_pages
        """usable pages; with the null page, the KV cache needs num_pages + 1"""
        self.page_size = page_size
        self._refcounts = [0] * (num_pages + 1)
        self._free = list(range(1, num_pages + 1))  # a heap: allocation order does not depend on the past

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, page: int) -> int:
        """How many references `page` has: of tables, runs and `retain`. 0 for a free page and for the null page."""
        if not 0 <= page <= self.num_pages:
            raise BadPage(f"Page {page} does not exist. Pages are {NULL_PAGE} to {self.num_pages}.")
        return self._refcounts[page]

    def sharers(self, table: PageTable, index: int) -> int:
        """How many references the page at `index` has, those of the tables that hold its run counted one by one. Where forks
        of forks hold it, it may be more."""
        runs = [] if table.run is None else [run for run in table.run.chain() if run.end > index]
        return self.refcount(table.pages[index]) + sum(run.holders - 1 for run in runs)

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
            num_slots = self._num_carried(table.length, index, start, end)
            if num_slots:
                copies.append(PageCopy(source, target, num_slots))
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

    def slot_rows(self, tables: Sequence[PageTable], ends: Sequence[int], width: int, first: int = 0) -> NDArray[np.int64]:
        """The slots of positions [first, ends[i]) of each table, one row per table: [tables, width], padded with slot 0.

        As `slots`, but without a Python step per position. Preconditions: `first` begins a page, and no end is beyond
        `first` + `width`.
        """
        size, skipped = self.page_size, first // self.page_size
        pages = np.zeros((len(tables), self._num_pages_of(width)), dtype=np.int64)
        for row, table, end in zip(pages, tables, ends, strict=True):
            self._check_range(table, 0, end)
            count = self._num_pages_of(end)
            row[: count - skipped] = table.pages if count - skipped == len(table.pages) else table.pages[skipped:count]
        slots = (pages[:, :, None] * size + np.arange(size)).reshape(len(tables), -1)[:, :width]
        slots[np.arange(first, first + width) >= np.asarray(ends)[:, None]] = 0
        return slots

    def check_integrity(self, tables: Iterable[PageTable], retained: Iterable[int] = ()) -> PoolNumbers:
        """Recount all references. Raises IntegrityError with the first fault; changes nothing.

        tables    all live tables, each once
        retained  the pages that `retain` holds, once per reference
        """
        return recount(self, list(tables), list(retained))

    def _plan(self, table: PageTable, start: int, end: int) -> tuple[list[int], int]:
        """Indices of the shared pages in [start, end), and the number of missing pages. Changes nothing."""
        if table.closed:
            raise ClosedTable("This page table was released. Fork a live table or create a new one.")
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
                for page in run.pages:
                    self._refcounts[page] += 1
                if run.below is not None:
                    run.below.holders += 1

    def _let_go(self, run: PageRun) -> None:
        """Mutates: one holder less. A run without holders drops its pages and lets go of the one below."""
        for each in run.chain():
            each.holders -= 1
            if each.holders:
                return
            for page in each.pages:
                self.drop(page)

    def _num_carried(self, length: int, index: int, start: int, end: int) -> int:
        first = index * self.page_size
        num_used = min(length - first, self.page_size)
        return num_used if first + num_used > end else max(0, start - first)

    def _num_pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _take(self) -> int:
        page = heappop(self._free)
        self._refcounts[page] = 1
        return page

    def _check_range(self, table: PageTable, start: int, end: int) -> None:
        if table.closed:
            raise ClosedTable("This page table was released. Fork a live table or create a new one.")
        if not 0 <= start <= end <= table.length:
            raise BadRange(f"Positions [{start}, {end}) are not within a table of length {table.length}.")

    def _check_used(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page == NULL_PAGE:
                raise BadPage(f"Page {NULL_PAGE} is the null page. It has no owner and must not be in a table.")
            if self.refcount(page) < 1:
                raise BadPage(f"Page {page} is not in use. It was freed already, or never allocated.")
