"""`recount`: every reference to a page counted again, and the faults that this can find."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from replaylens.engine.errors import IntegrityError
from replaylens.engine.memory.page_runs import PageRun, PageTable

NULL_PAGE = 0
"""padding of page tables points here; it is never a real page, so that a zeroed entry is recognised as a fault"""


class CountedPool(Protocol):
    """What is counted again: a `PagePool`."""

    num_pages: int
    page_size: int
    _refcounts: list[int]
    _free: list[int]


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


def recount(pool: CountedPool, tables: Sequence[PageTable], retained: Sequence[int]) -> PoolNumbers:
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
    for page in range(1, pool.num_pages + 1):
        if pool._refcounts[page] != references[page]:
            raise IntegrityError(
                f"Page {page}: reference count {pool._refcounts[page]}, but {references[page]} references found."
            )
    return PoolNumbers(
        num_pages=pool.num_pages,
        page_size=pool.page_size,
        num_free=len(pool._free),
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
        if pool._refcounts[page]:
            raise IntegrityError(f"Free list: page {page} has reference count {pool._refcounts[page]}.")
    lost = set(range(1, pool.num_pages + 1)) - set(pool._free)
    for page in sorted(lost):
        if pool._refcounts[page] == 0:
            raise IntegrityError(f"Free list: page {page} has reference count 0 but is not listed (leaked).")
