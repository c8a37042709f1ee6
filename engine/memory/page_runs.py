"""`PageTable`, and `PageRun`: pages that several tables begin with, counted once for all of them.

A fork takes hold of the run that its parent's pages end with, and a release lets go of it: one number changes, however many
pages the run has. Runs lie on each other like the branches of a tree. Each has one reference to each of its pages, and drops
them when nobody holds it any more.

    pages of a table:   [0, run.start) of the runs below | [run.start, run.end) of `run` | [run.end, ...) its own
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


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
