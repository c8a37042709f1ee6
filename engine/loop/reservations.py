"""`Reservations`: pages for turns, and who gives up theirs. What is given up is computed again, to the same bits."""

from collections.abc import Callable

from replaylens.engine.errors import OutOfPages
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.loop.turn import Turn
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.prefix import PrefixIndex
from replaylens.engine.passes.runner import Runner

_AT_ONCE = 16
"""one part in so many of the cached prefixes is given up together: finding the oldest takes a look at all of them"""


class Reservations:
    """Takes pages from cached prefixes first, then from idle branches, then from the youngest job."""

    def __init__(self, runner: Runner, prefix: PrefixIndex, lanes: dict[int, Lane], preempted: Callable[[Job], None]) -> None:
        self.runner, self.pool, self.prefix, self.lanes = runner, runner.pool, prefix, lanes
        self.preempted = preempted

    def reserve(self, turn: Turn, width: int, jobs: list[Job], victims: Callable[[], list[Job]]) -> bool:
        """Give the turn `width` tables with room for its rows and drafts. False: the turn must wait, and holds nothing new.

        jobs     all unfinished jobs
        victims  returns those of them that may lose their pages; the last one loses them first
        """
        lane, end = turn.job.lane, turn.end + max(turn.num_drafts, turn.burst - 1)
        turn.tables = [lane.table]
        try:
            for i in range(width):
                if i:
                    turn.tables.append(self.pool.fork(lane.table, turn.start))
                self._reserve(turn.tables[i], turn.start, end, jobs, victims)
        except OutOfPages:
            for table in turn.tables[1:]:
                self.pool.release(table)
            lane.computed = min(lane.computed, turn.start)  # a page copied for the turn has no KV from there on
            self.pool.truncate(lane.table, min(lane.table.length, lane.computed))
            return False
        return True

    def drop_pages(self, lane: Lane) -> None:
        """Mutates: drops the lane's KV. Its next job computes it again, to the same bits."""
        self.pool.truncate(lane.table, 0)
        lane.computed = 0

    def _reserve(self, table: PageTable, start: int, end: int, jobs: list[Job], victims: Callable[[], list[Job]]) -> None:
        while True:
            try:
                return self.runner.reserve(table, start, end)
            except OutOfPages as full:  # rare, so jobs are looked at only now
                if not self.reclaim(full.needed - full.free, {job.lane.branch for job in jobs}, victims()):
                    raise

    def _sharers(self, lane: Lane) -> int:
        """How many tables, and prefix entries, use the lane's last page."""
        return self.pool.refcount(lane.table.pages[-1])

    def _drop_tail(self, lane: Lane) -> None:
        """Mutates: drops the lane's last pages, as many as have no more sharers than the very last. Pages shared by more stay:
        dropping them would free none, and later forks of the lane would compute them again."""
        pages, sharers = lane.table.pages, self._sharers(lane)
        kept = len(pages) - 1
        while kept and self.pool.refcount(pages[kept - 1]) <= sharers:
            kept -= 1
        lane.computed = min(lane.computed, kept * self.pool.page_size)
        self.pool.truncate(lane.table, lane.computed)

    def reclaim(self, num_pages: int, busy: set[int], victims: list[Job]) -> bool:
        """Mutates: frees some pages, of cached prefixes, of branches that are not `busy`, or of the last of the victims. False:
        there are none left to take."""
        if self.prefix.evict(max(num_pages, len(self.prefix) // _AT_ONCE)):
            return True
        idle = [lane for lane in self.lanes.values() if lane.table.pages and lane.branch not in busy]
        if idle:
            self._drop_tail(min(idle, key=lambda lane: (self._sharers(lane), lane.last_used, lane.branch)))
            return True
        if len(self.prefix):  # the index keeps all pages before one that a branch still uses, even if no branch uses those
            self.prefix.clear()
            return True
        holding = [job for job in victims if job.lane.table.pages]
        if holding:
            self.drop_pages(holding[-1].lane)
            self.preempted(holding[-1])
        return bool(holding)
