"""`Admission`: which jobs have a turn in a step of the loop, and with which rows, drafts and pages.

Older jobs come first. When pages run out, younger jobs give theirs up (preemption) and are computed again later.

A deterministic request that drafts by the fast path takes one draft per step, in the fast batch that also decodes one token of
every ordinary request. Once its window is full, its turn is the verification. So all kinds of requests come on alike. Where the
device decodes on its own, a step has several drafts of each window and as many tokens of every other request.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from replaylens.engine.errors import OutOfPages, OutOfStates
from replaylens.engine.loop.drafters import REPEATED, Drafter, SelfDrafter
from replaylens.engine.loop.lane import Job, Lane, Statistics, Turn, Window
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.prefix import PrefixIndex
from replaylens.engine.memory.tree import BranchTree
from replaylens.engine.passes.runner import Runner

# ---- planner ---------------------------------------------------------------------------------------------------------
# `Planner`: chooses the window (rows per verification) from measured costs. It changes how fast tokens come, never which.

FIXED_WINDOW = 8
"""the window of reproducible drafters: the set of rejected branches must not depend on timings"""
_CLASS = 16
_WINDOWS = (1, 4, 8, 16, 32)
_AT_FIRST = 3
"""free drafts of a path whose repetition has not been tried: a long guess that fails costs many direct steps"""
_CLEARLY = 1.1
"""times the speed of direct decoding that a window must promise: a smaller gain may be an error of measurement"""


class Planner:
    """Keeps running averages of the cost of draft steps and passes, and picks the window with the most tokens per second.

    Costs are CPU seconds of the thread that drives the engine: those of the clock would be the neighbours' on a busy machine.
    """

    def __init__(self) -> None:
        self._cost: dict[str, dict[int, float]] = defaultdict(dict)
        self._costs: dict[tuple[int, bool], list[float]] = {}
        """seconds of a step at each of `_WINDOWS`, by number of requests and whether drafts are free; forgotten at the next
        measurement"""

    @contextmanager
    def timing(self, kind: str, rows: int) -> Iterator[None]:
        """Measure the block, a pass over `rows` rows."""
        begin = time.thread_time()
        yield
        sample = time.thread_time() - begin
        size = rows if kind == "draft" else _size(rows)
        old = self._cost[kind].get(size)
        self._cost[kind][size] = sample if old is None else 0.8 * old + 0.2 * sample
        self._costs.clear()

    def window(self, reproducible: bool, num_requests: int, statistics: Statistics, free: bool = False) -> int:
        """Rows per verification, including the last token's own; 1 means direct decoding.

        free  drafts are known already, and only their verification costs
        """
        if reproducible:
            return FIXED_WINDOW
        acceptance = (statistics.accepted + 8) / (statistics.drafted + 8)  # optimistic until measured
        if (case := (num_requests, free)) not in self._costs:
            self._costs[case] = [self._step_cost(window, num_requests, free) for window in _WINDOWS]
        direct, *rates = [run / cost for run, cost in zip(_expected(acceptance), self._costs[case], strict=True)]
        return 1 if max(rates) < _CLEARLY * direct else _WINDOWS[1 + rates.index(max(rates))]  # the smallest of equals

    def _step_cost(self, window: int, num_requests: int, free: bool = False) -> float:
        """Seconds of the drafts and the verification of all requests together."""
        drafts = 0.0 if free else (window - 1) * self._draft_cost(num_requests)
        return self._pass_cost(window * num_requests) + drafts

    def _draft_cost(self, num_requests: int) -> float:
        """Seconds of one draft step for all requests; before the first measurement, those of a direct step."""
        known = self._cost["draft"]
        if not known:
            return self._pass_cost(num_requests)
        nearest = min(known, key=lambda k: abs(k - num_requests))
        return known[nearest] * num_requests / nearest

    def _pass_cost(self, rows: int) -> float:
        """Seconds of one pass: measured, or scaled from the nearest measured size as a fixed part and a part per row."""
        size = _size(rows)
        known = self._cost["exact"]
        if size in known:
            return known[size]
        if not known:
            return 1.0 + 0.02 * size
        nearest = min(known, key=lambda k: abs(k - size))
        return known[nearest] * (_CLASS + size) / (_CLASS + nearest)


@lru_cache(maxsize=1024)
def _expected(acceptance: float) -> list[float]:
    """The tokens that a verification is expected to yield, at each of `_WINDOWS`."""
    return [1 + sum(acceptance**i for i in range(1, window)) for window in _WINDOWS]


def _size(rows: int) -> int:
    """The size class of a pass: its rows up to 16, then by sixteens."""
    return rows if rows < _CLASS else -(-rows // _CLASS) * _CLASS


# ---- reservations ----------------------------------------------------------------------------------------------------
# `Reservations`: pages for turns, and who gives up theirs. What is given up is computed again, to the same bits.

_AT_ONCE = 16
"""one part in so many of the cached prefixes is given up together: finding the oldest takes a look at all of them"""


class Reservations:
    """Takes pages from cached prefixes first, then from idle branches, then from the youngest job."""

    def __init__(self, runner: Runner, prefix: PrefixIndex, lanes: dict[int, Lane], preempted: Callable[[Job], None]) -> None:
        self.runner, self.pool, self.prefix, self.lanes = runner, runner.pool, prefix, lanes
        self.preempted = preempted
        self.out_of_states: OutOfStates | None = None
        """the last such failure"""

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

    def forget(self, lane: Lane, known: int) -> None:
        """Mutates: the KV from `known` on is computed again, with the states of recurrent layers that were not kept."""
        lane.computed = known
        self.pool.truncate(lane.table, known)

    def _reserve(self, table: PageTable, start: int, end: int, jobs: list[Job], victims: Callable[[], list[Job]]) -> None:
        while True:
            try:
                return self.runner.reserve(table, start, end)
            except OutOfStates as full:  # others' pages would not help: whatever this step does not use was free to take
                self.out_of_states = full
                raise
            except OutOfPages as full:  # rare, so jobs are looked at only now
                if not self.reclaim(full.needed - full.free, {job.lane.branch for job in jobs}, victims()):
                    raise

    def _sharers(self, lane: Lane) -> int:
        """How many tables, and prefix entries, use the lane's last page."""
        return self.pool.sharers(lane.table, len(lane.table.pages) - 1)

    def _drop_tail(self, lane: Lane) -> None:
        """Mutates: drops the lane's last pages, as many as have no more sharers than the very last. Pages shared by more stay:
        dropping them would free none, and later forks of the lane would compute them again."""
        sharers, kept = self._sharers(lane), len(lane.table.pages) - 1
        while kept and self.pool.sharers(lane.table, kept - 1) <= sharers:
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


# ---- admission -------------------------------------------------------------------------------------------------------

MAX_BURST, LONG_BURST = 16, 64
"""direct decode steps on the device between two looks by the host; the second if only its length can end a request, and
nobody reads its tokens as they come"""


class Admission:
    """Plans turns and makes room for them. It decides when rows are computed, never what their bits are."""

    def __init__(
        self,
        runner: Runner,
        tree: BranchTree,
        drafters: dict[str, Drafter],
        reservations: Reservations,
        max_rows: int,
        lone_rows: int,
        fail: Callable[[Job, Exception], None],
    ) -> None:
        """
        lone_rows  rows of a pass that nobody waits for, if more than `max_rows`
        fail       `fail(job, error)` ends a job that does not fit into the cache even on its own
        """
        self.runner, self.tree, self.drafters, self.reservations = runner, tree, drafters, reservations
        self.max_rows, self.lone_rows, self.fail = max_rows, max(max_rows, lone_rows), fail
        self.planner = Planner()
        self._jobs: list[Job] = []
        self._alone = self._drafting = False
        self._clock = 0
        self._deciding = 0
        self._missing: set[int] = set()
        """after how many steps the open windows are full"""

    def turns(self, jobs: list[Job], alone: bool) -> list[Turn]:
        """Turns for as many jobs as rows and pages allow. Jobs that lack a single row come before long prefills.

        jobs   all unfinished jobs, oldest first
        alone  whether the device takes direct decode steps on its own, without the host in between

        No job starves: if the oldest job had no turn in the last step, it goes first in this one, and its turn is certain.
        """
        self._clock += 1
        self.runner.cache.begin()
        self._jobs, self._alone = jobs, alone
        self._deciding = sum(job.exact and job.remaining > 0 for job in jobs)
        self._drafting = any(job.exact and job.remaining > 0 and self._stepwise(job) for job in jobs)
        self._missing = {job.window_open.num_missing for job in jobs if job.window_open is not None}
        with self.runner.cache.copying_together():
            turns = self._admitted()
        if self._drafting:
            _in_step(turns)
        elif any(len(turn.rows) > 1 for turn in turns):
            _join_pass(turns)
        self._jobs = []  # a job keeps its branch open: hold none longer than needed
        return turns

    def _admitted(self) -> list[Turn]:
        """As many turns as there are rows and pages for."""
        budget = self._budget()
        turns: list[Turn] = []
        for job in sorted(self._jobs, key=self._rank):
            turn = self._plan(job, budget) if budget > 0 else None
            if turn is not None and not self._make_room(turn):
                # The oldest job could take the pages of all others and still lacks some. Waiting would not help: it would
                # take them again in every step, and the younger jobs would compute them again in vain.
                job.window_open = None  # its pages are gone
                turn = self._last_resort(job) if job is self._jobs[0] and not turns else None
            if turn is not None:
                budget -= self._num_rows(turn)
                job.lane.last_used = self._clock
                turns.append(turn)
        return turns

    def _budget(self) -> int:
        """Rows of this step. Wide passes keep a device busy, but all others wait for their next token meanwhile, and all
        captured rows of a pass are in memory at once."""
        if self.lone_rows == self.max_rows or any(job.lane.hooks or not self._prefills(job) for job in self._jobs):
            return self.max_rows
        specs = {job.lane.capture for job in self._jobs if job.lane.capture is not None}
        if not specs:
            return self.lone_rows
        lens = any(spec.lens is not None for spec in specs)
        fit = 0 if lens else self.runner.rows_in_transfer(frozenset().union(*(spec.needed() for spec in specs)))
        return max(self.max_rows, min(fit, self.lone_rows) // self.max_rows * self.max_rows)

    def _prefills(self, job: Job) -> bool:
        return job.num_waiting(len(self.tree.branch(job.lane.branch).tokens)) > 1

    def _plan(self, job: Job, budget: int) -> Turn | None:
        """The job's next rows: those without KV, up to the budget. Drafts come only after the last token. None: it waits."""
        tokens = self.tree.branch(job.lane.branch).tokens
        start = self._start(job, len(tokens))
        rows = tokens[start : start + budget]
        turn = Turn(job, start, rows, complete=start + len(rows) == len(tokens))
        if turn.deciding and job.exact and self._stepwise(job):
            return self._draft_or_verify(turn, budget)
        if turn.deciding and job.exact:
            num_drafts = self._num_drafts(job, turn.end)
            if len(rows) > 1:  # the lane lost its KV and catches up; then its windows are those of an undisturbed lane
                reproducible = num_drafts and self.drafters[job.drafter].reproducible
                return Turn(job, start, rows[:-1], complete=False) if reproducible else turn
            turn.num_drafts = num_drafts
            if num_drafts and (1 + num_drafts) * self._width(job, turn.end) > budget:
                return None  # a shorter window would make the rejected branches depend on the load
        if self._alone and turn.deciding and len(rows) == 1 and not turn.num_drafts and self._may_burst(job, start):
            turn.burst = min(job.remaining, LONG_BURST if job.certain else MAX_BURST)
            if turn.burst == job.remaining and job.final and (job.lane.capture is None or not job.lane.capture.lag):
                turn.burst += 1  # the row of the last token; what follows it is dropped
        return turn

    def _start(self, job: Job, num_tokens: int) -> int:
        """The job's first row. Mutates: where states of a hybrid are gone, what follows the last ones is computed again."""
        start, window, table = job.first_row(num_tokens), job.window_open, job.lane.table
        known = self.runner.cache.known(table, start)
        if known < start:
            self.reservations.forget(job.lane, known)
            job.window_open = None
            return known
        if window is not None and self.runner.cache.known(table, table.length) < table.length:
            window.lose_rows()
        return start

    def _stepwise(self, job: Job) -> bool:
        """Whether the job takes its drafts one per step from the fast batch."""
        mine = isinstance(self.drafters[job.drafter], SelfDrafter) and job.forced_drafts is None
        return mine and job.window != 1 and not (self._alone and job.window is None)

    def _draft_or_verify(self, turn: Turn, budget: int) -> Turn | None:
        """The next draft of the job's window, or the verification of a full one; None: it waits.

        The first token after a prompt, or after KV was lost, comes directly out of the canonical pass.
        """
        job, window = turn.job, turn.job.window_open
        if len(turn.rows) > 1 or turn.start < job.lane.computed:
            job.window_open = None
            return turn
        if window is None or window.at != turn.end:
            window = job.window_open = self._opened(job, turn.end)
        turn.drafting, turn.num_drafts = not window.full, len(window.chain) if window.full else window.count
        if turn.drafting and self._num_rows(turn) == 1 and self._decodes_alone(job, turn.start):
            turn.burst = min(window.num_missing, MAX_BURST)
        return turn if self._num_rows(turn) <= budget else None

    def _opened(self, job: Job, at: int) -> Window:
        """A new window. If others are full soon, it is shorter, so that one pass verifies all of them. Drafts of a path that
        repeats itself are free, and pay where others do not: a few at first, more as they are accepted."""
        count = free = self._num_drafts(job, at)
        if job.window is None:
            free = min(self._num_drafts(job, at, free=True), _AT_FIRST + job.statistics.accepted)
        count = max((steps for steps in self._missing if (count - 1) / 2 <= steps <= count), default=count)
        path = self.tree.branch(job.lane.branch).past.path(at)
        again = path.repetition(REPEATED, free) if free else []
        window = Window(at, len(again) or count, again, ended=bool(again) and again[-1] in job.sampling.stop_tokens)
        self._missing.add(window.num_missing)
        return window

    def _num_rows(self, turn: Turn) -> int:
        """The rows that a turn takes in the passes of its step."""
        if turn.drafting and turn.job.window_open is not None:
            return turn.job.window_open.num_rows(turn.job.lane.table, self.runner.pool.page_size)
        return (len(turn.rows) + turn.num_drafts) * max(1, len(turn.tables))

    def _may_burst(self, job: Job, start: int) -> bool:
        """Whether the device can decode on its own and capture what the job wants."""
        capture = job.lane.capture
        there = capture is None or capture.on_device
        if capture is not None and capture.lens is not None:
            model = self.runner.model
            there = there and model.config.plain_logits and model.dtype != torch.float32  # whose Z the host reads
        return there and self._decodes_alone(job, start)

    def _decodes_alone(self, job: Job, start: int) -> bool:
        """Whether the device can take steps of the job on its own: no hook functions, no edits of patterns or of chosen tokens
        at positions to come, and sampling does not need the host."""
        lane = job.lane
        if any((edit.on_pattern or edit.tokens) and edit.touches(start, start + LONG_BURST + 1) for edit in lane.edits):
            return False
        plain = not lane.hooks and self.runner.cache.chain is None
        return self._alone and plain and job.sampling.bare and job.forced_drafts is None

    def _rank(self, job: Job) -> int:
        passed_over = job is self._jobs[0] and job.lane.last_used < self._clock - 1
        return 0 if passed_over else 2 if self._prefills(job) else 1

    def _num_drafts(self, job: Job, at: int, free: bool = False) -> int:
        if job.forced_drafts is not None:
            return min(max(map(len, job.forced_drafts.get(at, [[]]))), job.remaining - 1)
        window = job.window
        if window is None and isinstance(self.drafters[job.drafter], SelfDrafter) and self._alone:
            return 0  # the device's decode step is canonical: there is nothing to verify
        if window is None:
            drafter = self.drafters[job.drafter]
            window = self.planner.window(drafter.reproducible, self._deciding, job.statistics, free)
            window = min(window, self.max_rows // drafter.width)
        return min(window, job.remaining) - 1

    def _width(self, job: Job, at: int) -> int:
        return len(job.forced_drafts.get(at, [[]])) if job.forced_drafts is not None else self.drafters[job.drafter].width

    def _make_room(self, turn: Turn) -> bool:
        """Reserve the turn's pages; younger jobs without a turn in this step may lose theirs. False: the turn must wait."""
        width = self._width(turn.job, turn.end) if turn.num_drafts else 1
        return self.reservations.reserve(turn, width, self._jobs, lambda: self._victims(turn.job))

    def _victims(self, job: Job) -> list[Job]:
        """The jobs that may lose their pages to this one."""
        younger = self._jobs[self._jobs.index(job) + 1 :]
        return [other for other in younger if other.lane.last_used != self._clock]

    def _last_resort(self, job: Job) -> Turn | None:
        """For the oldest job, whose window does not fit even with all pages to itself: a turn without drafts, or failure."""
        self.runner.cache.begin()  # nobody has a turn: all rooms of recurrent layers may be taken
        turn, pool = self._plan(job, self.max_rows), self.runner.pool
        assert turn is not None  # `submit` refuses windows larger than a pass
        turn.num_drafts, turn.burst, turn.drafting, job.window_open = 0, 0, False, None
        self.reservations.out_of_states = None
        if self._make_room(turn):
            return turn
        if self.reservations.out_of_states is not None:
            self.fail(job, self.reservations.out_of_states)
            return None
        needed = pool.num_needed(job.lane.table, turn.start, turn.end)
        length = len(self.tree.branch(job.lane.branch).tokens)
        full = (needed, pool.num_free, pool.num_pages)
        self.fail(job, OutOfPages.for_ever(*full, length, length + job.remaining, pool.page_size))
        return None


def _join_pass(turns: list[Turn]) -> None:
    """Mutates: turns that decode add their row to the pass that prompts need anyway, where it costs next to nothing. A burst
    of its own would decode for the few whose prompts are done while all others wait."""
    for turn in turns:
        turn.burst = 0


def _in_step(turns: list[Turn]) -> None:
    """Mutates: turns that decode or draft take equally many steps on the device; one each, if one of them needs the host."""
    decoding = [turn for turn in turns if turn.drafting or (turn.deciding and not turn.num_drafts)]
    steps = min((turn.burst for turn in decoding), default=0)
    for turn in decoding:
        turn.burst = steps if steps > 1 else 0
