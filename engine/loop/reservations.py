"""`Reservations`: pages for turns, and who gives up theirs. What is given up is computed again, to the same bits.

Pages are taken in this order, and no more of them than a turn lacks:

1. cached prefixes that no branch uses, the one used longest ago first;
2. the last pages of idle branches, of the one used longest ago first. Pages that idle branches share are freed by none of them
   alone: they are passed over until the last of them is asked, and then give them up together;
3. cached pages before those of a branch;
4. the last pages of jobs that are younger than the turn's and have no turn in this step, of the youngest first. If they are
   too few, the jobs keep them and the turn waits;
5. for the oldest job, which always goes on, also what younger jobs share with others, and all that is indexed.

So a page that many branches begin with, such as a prompt's, stays while they run or wait.

A reservation takes no walk over branches or jobs. Each lies in a heap, and is looked at when it is popped. An idle branch that
shares its last page is then parked there (`PagePool.park`); it is listed again once it changes (`note`), or only parked ones
are left.
"""

from heapq import heapify, heappop, heappush

from replaylens.engine.errors import OutOfPages, OutOfStates
from replaylens.engine.loop.lane import Job, Lane, Turn
from replaylens.engine.loop.queue import JobQueue
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.prefix import PrefixIndex
from replaylens.engine.passes.runner import Runner

_STALE = 64
"""entries of a heap, beyond twice the branches, before those of released ones are removed"""


class Reservations:
    """Takes pages from cached prefixes first, then from idle branches, then from the youngest job."""

    def __init__(self, runner: Runner, prefix: PrefixIndex, lanes: dict[int, Lane], queue: JobQueue) -> None:
        self.runner, self.pool, self.prefix, self.lanes, self.queue = runner, runner.pool, prefix, lanes, queue
        self.out_of_states: OutOfStates | None = None
        """the last such failure"""
        self._idle: list[tuple[int, int]] = []
        """a heap of (step of its last use, branch)"""
        self._busy: list[tuple[int, int]] = []
        """a heap of (-number of the job, branch)"""
        self._sharing: list[tuple[int, int]] = []
        """those of `_busy` that shared their last page when they were looked at"""
        self._aside: list[tuple[int, int]] = []
        """those of `_busy` that have a turn in this step"""
        self._clock = 0
        self.given_up = 0
        """positions whose KV branches gave up so far, because the cache was full"""
        self._missed: tuple[int, int] | None = None
        """in this step, a job of this number did not find so many pages"""

    # ---- turns --------------------------------------------------------------------------------------------------

    def begin(self, clock: int) -> None:
        """Mutates: a step begins."""
        self._clock, self._missed = clock, None
        self._bring_back()

    def reserve(self, turn: Turn, width: int, certain: bool) -> bool:
        """Give the turn `width` tables with room for its rows and drafts. False: the turn must wait, and holds nothing new.

        certain  the job is the oldest, and takes all pages of younger ones if necessary
        """
        lane, end = turn.job.lane, turn.end + max(turn.num_drafts, turn.burst - 1)
        turn.tables = [lane.table]
        try:
            for i in range(width):
                if i:
                    turn.tables.append(self.pool.fork(lane.table, turn.start))
                self._reserve(turn.tables[i], turn.start, end, turn.job, certain)
        except OutOfPages:
            for table in turn.tables[1:]:
                self.pool.release(table)
            lane.computed = min(lane.computed, turn.start)  # a page copied for the turn has no KV from there on
            self.pool.truncate(lane.table, min(lane.table.length, lane.computed))
            return False
        finally:
            self.note(lane)  # after a look in between, at the lane without its first page, nobody would ask it for them
        return True

    def _reserve(self, table: PageTable, start: int, end: int, job: Job, certain: bool) -> None:
        while True:
            try:
                return self.runner.reserve(table, start, end)
            except OutOfStates as full:  # others' pages would not help: whatever this step does not use was free to take
                self.out_of_states = full
                raise
            except OutOfPages as full:
                if not self.reclaim(full.needed - full.free, job, certain):
                    raise

    def drop_pages(self, lane: Lane) -> None:
        """Mutates: drops the lane's KV. Its next job computes it again, to the same bits."""
        self.forget(lane, 0)

    def forget(self, lane: Lane, known: int) -> None:
        """Mutates: the KV from `known` on is computed again, with the states of recurrent layers that were not kept."""
        lane.computed = known
        self.pool.truncate(lane.table, known)
        self.note(lane)

    # ---- who is asked -------------------------------------------------------------------------------------------

    def note(self, lane: Lane) -> None:
        """Mutates: the lane's pages have changed, or it is new."""
        self.queue.changed.add(lane.branch)

    def released(self, lane: Lane) -> None:
        """Mutates: the lane is asked for nothing any more."""
        self.queue.changed.discard(lane.branch)
        _leave(lane)

    def reclaim(self, num_pages: int, job: Job | None = None, certain: bool = False, spare: Lane | None = None) -> bool:
        """Mutates: frees some pages, at most `num_pages`, or some branches have a page less. False: there are none to take.

        job    whose turn needs them; None: jobs keep theirs
        spare  an idle lane that keeps its own
        """
        self._look()
        if self.prefix.evict(num_pages) or self._from_idle(num_pages, spare):
            return True
        if self.prefix.has_inner():
            self.prefix.clear()
            return True
        if job is not None and self._from_jobs(num_pages, job, certain):
            return True
        if certain and len(self.prefix):  # a page that the oldest job writes to need not be copied for the index
            self.prefix.clear()
            return True
        return False

    def _look(self) -> None:
        """Mutates: lists the lanes that changed, and those with nobody left to wait for."""
        changed, heard = self.queue.changed, self.pool.heard
        if not changed and not heard:
            return
        changed.update(heard)
        heard.clear()
        for branch in changed:
            lane = self.lanes.get(branch)
            if lane is not None:
                _leave(lane)
                if lane.table.pages and lane.listed != lane.queued:
                    self._list(lane)
        changed.clear()
        for waiting in (self._idle, self._busy, self._sharing):
            if len(waiting) > 2 * len(self.lanes) + _STALE:
                waiting[:] = [entry for entry in waiting if self._lane(entry, waiting) is not None]
                heapify(waiting)

    def _list(self, lane: Lane) -> None:
        lane.listed = lane.queued
        if lane.queued:
            heappush(self._busy, (-lane.queued, lane.branch))
        else:
            heappush(self._idle, (lane.last_used, lane.branch))

    def _lane(self, entry: tuple[int, int], waiting: list[tuple[int, int]]) -> Lane | None:
        """The lane of an entry; None: it is released, or listed elsewhere by now."""
        lane = self.lanes.get(entry[1])
        where = 0 if waiting is self._idle else entry[0] if waiting is self._sharing else -entry[0]
        return lane if lane is not None and lane.listed == where else None

    def _from_idle(self, num_pages: int, spare: Lane | None) -> bool:
        """Mutates: takes pages of the idle lane that was used longest ago."""
        while self._idle:
            lane = self._lane(entry := heappop(self._idle), self._idle)
            if lane is None:
                continue
            lane.listed = None
            if lane is spare:
                self.note(lane)
            elif lane.last_used != entry[0]:
                self._list(lane)
            elif lane.table.pages:
                givers = [lane] if self.pool.alone(lane.table) else self._parked(lane)
                for giver in givers:
                    self._drop_tail(giver, num_pages)
                if givers:
                    return True
        return False

    def _from_jobs(self, num_pages: int, job: Job, certain: bool) -> bool:
        """Mutates: takes pages of jobs younger than `job`, of the youngest first."""
        if not certain and self._missed is not None and num_pages >= self._missed[0] and job.number >= self._missed[1]:
            return False
        found, missing = list[Lane](), num_pages
        while missing > 0 and self._busy and -self._busy[0][0] > job.number:
            lane = self._lane(entry := heappop(self._busy), self._busy)
            if lane is None:
                continue
            if lane.last_used == self._clock:
                self._aside.append(entry)
            elif not lane.table.pages:
                lane.listed = None
            elif self.pool.alone(lane.table):
                lane.listed = None
                found.append(lane)
                missing -= len(lane.table.pages) - self.pool.tail(lane.table, missing)
            else:
                lane.listed = -lane.queued
                heappush(self._sharing, entry)
        if missing > 0 and not certain:
            self._missed = num_pages, job.number
            for lane in found:
                self.note(lane)
            return False
        for lane in found:
            num_pages -= self._drop_tail(lane, num_pages)
        return bool(found) or (certain and self._from_sharing(job))

    def _from_sharing(self, job: Job) -> bool:
        """Mutates: the youngest job that shares its last pages gives them up, which frees them once all others do."""
        while self._sharing and -self._sharing[0][0] > job.number:
            lane = self._lane(heappop(self._sharing), self._sharing)
            if lane is not None:
                lane.listed = None
                if lane.table.pages:
                    self._drop_tail(lane, len(lane.table.pages))
                    return True
        return False

    def _bring_back(self) -> None:
        for entry in self._aside:
            heappush(self._busy, entry)
        self._aside.clear()

    # ---- giving -------------------------------------------------------------------------------------------------

    def _parked(self, lane: Lane) -> list[Lane]:
        """All who have the lane's last page, if all are idle and were asked. Mutates: the lane waits for the others."""
        _leave(lane)
        lane.parked = self.pool.park(lane.table, lane.branch)
        mates = [self.lanes[branch] for branch in self.pool.together(lane.table)]
        page = lane.table.pages[-1]
        for mate in [mate for mate in mates if mate.table.pages[-1:] != [page]]:  # it was cut meanwhile
            _leave(mate)
            self.note(mate)
            mates = []
        return mates

    def _drop_tail(self, lane: Lane, most: int) -> int:
        """How many of its last pages the lane gave up. Mutates: pages that more lanes have stay. Dropping them would free none,
        and later forks of the lane would compute them again."""
        kept, before = self.pool.tail(lane.table, most), len(lane.table.pages)
        self.given_up += max(0, lane.computed - kept * self.pool.page_size)
        self.forget(lane, min(lane.computed, kept * self.pool.page_size))
        if (job := self.queue.get(lane.queued)) is not None:
            self.queue.preempted(job)
        return before - kept


def _leave(lane: Lane) -> None:
    """Mutates: the lane is parked nowhere."""
    if lane.parked is not None:
        lane.parked.pop(lane.branch, None)
        lane.parked = None
