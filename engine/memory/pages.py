"""`PagePool`: reference-counted KV pages. It only counts; `KVCache` owns the bytes and makes the copies.

| what                                    | who may write there              | who frees it                        |
|-----------------------------------------|----------------------------------|-------------------------------------|
| [0, length), page with one reference    | the table's owner, by `reserve`  | `truncate` / `release` of the table |
| [0, length), page with more references  | nobody; `reserve` replaces it    | the `drop` of the last reference    |
| [length, end of the last page)          | nobody before a `reserve`        | freed with its page                 |
| page 0, the null page                   | nobody: it stays zero            | never owned, never free             |

A table of `length` positions always has exactly ceil(length / page_size) pages.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from replaylens.engine.errors import BadPage, BadPoolSize, BadRange, ClosedTable, IntegrityError, OutOfPages

NULL_PAGE = 0
"""padding of page tables points here; it is never a real page, so that a zeroed entry is recognised as a fault"""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Slots [0, num_slots) of page `source` must be copied to page `target` before the next write."""

    source: int
    target: int
    num_slots: int


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of positions [0, length) of one branch. Only `PagePool` changes it; its owner releases it."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    closed: bool = False


def page_matrix(tables: Sequence[PageTable], shape: tuple[int, int] | None = None, rest: int = NULL_PAGE) -> NDArray[np.int32]:
    """The pages of the tables, one row per table, padded with `rest`. shape: at least (tables, pages of the longest)"""
    pages = np.full(shape or (len(tables), max(len(table.pages) for table in tables)), rest, dtype=np.int32)
    for row, table in zip(pages, tables, strict=False):
        row[: len(table.pages)] = table.pages
    return pages


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
        """How many references `page` has; 0 for a free page and for the null page."""
        if not 0 <= page <= self.num_pages:
            raise BadPage(f"Page {page} does not exist. Pages are {NULL_PAGE} to {self.num_pages}.")
        return self._refcounts[page]

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
        dropped = table.pages[num_kept:]
        self._check_used(dropped)
        del table.pages[num_kept:]
        table.length = length
        for page in dropped:
            self.drop(page)

    def fork(self, table: PageTable, length: int | None = None) -> PageTable:
        """A new table for the first `length` positions (default: all) that shares every page. Nothing is copied.

        The caller owns the new table and must release it. `table` keeps its pages, but its next write to a shared page
        needs a copy.
        """
        length = table.length if length is None else length
        self._check_range(table, 0, length)
        return self.share(table.pages[: self._num_pages_of(length)], length)

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
        tables, retained = list(tables), list(retained)
        references: Counter[int] = Counter()
        for number, table in enumerate(tables):
            self._check_table(number, table)
            references.update(table.pages)
        num_table_references = references.total()
        references.update(retained)
        self._check_free_list()
        if self._refcounts[NULL_PAGE] or references[NULL_PAGE]:
            owned = max(self._refcounts[NULL_PAGE], references[NULL_PAGE])
            raise IntegrityError(f"The null page {NULL_PAGE} has {owned} references. It must have none.")
        for page in range(1, self.num_pages + 1):
            if self._refcounts[page] != references[page]:
                raise IntegrityError(
                    f"Page {page}: reference count {self._refcounts[page]}, but {references[page]} references found."
                )
        return PoolNumbers(
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_free=self.num_free,
            num_shared=sum(count > 1 for count in self._refcounts),
            num_tables=len(tables),
            num_positions=sum(table.length for table in tables),
            num_table_references=num_table_references,
            num_retained=len(retained),
        )

    def _check_table(self, number: int, table: PageTable) -> None:
        pages, length = table.pages, table.length
        if table.closed and (pages or length):
            raise IntegrityError(f"Table {number} is closed but has {len(pages)} pages and length {length}.")
        if length < 0 or len(pages) != self._num_pages_of(length):
            raise IntegrityError(f"Table {number}: length {length} with {len(pages)} pages of {self.page_size}.")
        for index, page in enumerate(pages):
            if not 1 <= page <= self.num_pages:
                raise IntegrityError(f"Table {number}: entry {index} is page {page}, outside 1..{self.num_pages}.")
        for page, count in Counter(pages).items():
            if count > 1:
                raise IntegrityError(f"Table {number}: page {page} occurs {count} times.")

    def _check_free_list(self) -> None:
        for page, count in Counter(self._free).items():
            if not 1 <= page <= self.num_pages:
                raise IntegrityError(f"Free list: page {page} is outside 1..{self.num_pages}.")
            if count > 1:
                raise IntegrityError(f"Free list: page {page} occurs {count} times.")
            if self._refcounts[page]:
                raise IntegrityError(f"Free list: page {page} has reference count {self._refcounts[page]}.")
        lost = set(range(1, self.num_pages + 1)) - set(self._free)
        for page in sorted(lost):
            if self._refcounts[page] == 0:
                raise IntegrityError(f"Free list: page {page} has reference count 0 but is not listed (leaked).")

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
        shared = [index for index, page in enumerate(touched, start // self.page_size) if self._refcounts[page] > 1]
        return shared, max(0, num_pages - len(table.pages))

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
