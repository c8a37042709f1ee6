"""`Admission`: which jobs have a turn in a step of the loop, and with which rows, drafts and pages.

Older jobs come first. When pages run out, younger jobs give theirs up (preemption) and are computed again later.

A deterministic request that drafts by the fast path takes one draft per step, in the fast batch that also decodes one token of
every ordinary request. Once its window is full, its turn is the verification. So all kinds of requests come on alike. Where the
device decodes on its own, a step has several drafts of each window and as many tokens of every other request.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from heapq import heappop, heappush

import torch

from replaylens.engine.errors import OutOfPages
from replaylens.engine.loop.drafters import REPEATED, Drafter, SelfDrafter
from replaylens.engine.loop.lane import Job, Statistics, Turn, Window
from replaylens.engine.loop.queue import JobQueue
from replaylens.engine.loop.reservations import Reservations
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


# ---- admission -------------------------------------------------------------------------------------------------------

MAX_BURST, LONG_BURST = 16, 64
"""direct decode steps on the device between two looks by the host; the second if only its length can end a request, and
nobody reads its tokens as they come"""

_PASSED_OVER = 16
"""jobs of a kind that find no room before the younger ones are not asked any more: a step takes no time for those that wait"""


class Admission:
    """Plans turns and makes room for them. It decides when rows are computed, never what their bits are.

    A step looks at the jobs that get a turn, and at few others: those that wait lie in two heaps, by age.
    """

    def __init__(
        self,
        runner: Runner,
        drafters: dict[str, Drafter],
        queue: JobQueue,
        reservations: Reservations,
        max_rows: int,
        lone_rows: int,
    ) -> None:
        """
        lone_rows  rows of a pass that nobody waits for, if more than `max_rows`
        """
        self.runner, self.drafters, self.queue = runner, drafters, queue
        self.reservations, self.max_rows, self.lone_rows = reservations, max_rows, max(max_rows, lone_rows)
        self.planner = Planner()
        self._alone = False
        self._clock = 0
        self._ranked: tuple[list[int], list[int]] = ([], [])
        """numbers of the jobs that lack one row, and of those that lack more: two heaps. Some are no longer there"""
        self._drafting: set[int] = set()
        """numbers of the jobs that opened a window"""
        self._missing: set[int] = set()
        """after how many steps the open windows are full"""

    def turns(self, alone: bool) -> list[Turn]:
        """Turns for as many jobs as rows and pages allow. Jobs that lack a single row come before long prefills.

        alone  whether the device takes direct decode steps on its own, without the host in between

        No job starves: if the oldest job had no turn in the last step, it goes first in this one, and its turn is certain.
        """
        self._clock += 1
        self.runner.cache.begin()
        self.reservations.begin(self._clock)
        self._alone = alone
        self._rank()
        open_windows = {number: job.window_open for number in self._drafting if (job := self.queue.get(number)) is not None}
        self._drafting = {number for number, window in open_windows.items() if window is not None}
        self._missing = {window.num_missing for window in open_windows.values() if window is not None}
        with self.runner.cache.copying_together():
            turns = self._admitted()
        if any(turn.job.exact and turn.job.remaining > 0 and self._stepwise(turn.job) for turn in turns):
            _in_step(turns)
        elif any(len(turn.rows) > 1 for turn in turns):
            _join_pass(turns)
        return turns

    def _rank(self) -> None:
        """Mutates: adds jobs that are new, or had their turn, to those that wait."""
        for number in self.queue.unranked:
            job = self.queue.get(number)
            if job is not None and job.rank is None:
                self._wait(job)
        self.queue.unranked.clear()

    def _wait(self, job: Job) -> None:
        job.rank = int(self._prefills(job))
        heappush(self._ranked[job.rank], job.number)

    def _next(self, rank: int) -> Job | None:
        """The oldest waiting job of a rank. Mutates: it waits no longer, until the next step."""
        waiting = self._ranked[rank]
        while waiting:
            job = self.queue.get(heappop(waiting))
            if job is None or job.rank != rank:  # it has ended, or it is not here any more
                continue
            if not rank and self._prefills(job):  # its pages were taken
                self._wait(job)
                continue
            return self._taken(job)
        return None

    def _taken(self, job: Job) -> Job:
        job.rank = None
        self.queue.unranked.append(job.number)
        return job

    def _admitted(self) -> list[Turn]:
        """As many turns as there are rows and pages for."""
        budget, turns, oldest = self._budget(), list[Turn](), self.queue.oldest
        if oldest is not None and oldest.lane.last_used < self._clock - 1:  # passed over in the last step
            budget -= self._admit(self._taken(oldest), budget, turns)
        for rank in range(2):
            passed_over = 0
            while budget > 0 and passed_over < _PASSED_OVER and (job := self._next(rank)) is not None:
                before = len(turns)
                budget -= self._admit(job, budget, turns)
                passed_over += len(turns) == before
        return turns

    def _admit(self, job: Job, budget: int, turns: list[Turn]) -> int:
        """The rows of the job's turn, 0 if it has none. Mutates: adds the turn to the others."""
        turn, certain = self._plan(job, budget), job is self.queue.oldest and not turns
        if turn is not None and not self._make_room(turn, certain):
            # The oldest job could take the pages of all others and still lacks some. Waiting would not help: it would
            # take them again in every step, and the younger jobs would compute them again in vain.
            job.window_open = None  # its pages are gone
            turn = self._last_resort(job) if certain else None
        if turn is None:
            return 0
        job.lane.last_used = self._clock
        turns.append(turn)
        return self._num_rows(turn)

    def _budget(self) -> int:
        """Rows of this step. Wide passes keep a device busy, but all others wait for their next token meanwhile, and all
        captured rows of a pass are in memory at once."""
        if self.lone_rows == self.max_rows or self.queue.num_hooked or self._decodes():
            return self.max_rows
        specs = set(self.queue.captures)
        if not specs:
            return self.lone_rows
        lens = any(spec.lens is not None for spec in specs)
        fit = 0 if lens else self.runner.rows_in_transfer(frozenset().union(*(spec.needed() for spec in specs)))
        return max(self.max_rows, min(fit, self.lone_rows) // self.max_rows * self.max_rows)

    def _decodes(self) -> bool:
        """Whether a job lacks a single row. Mutates: drops numbers of jobs that do not wait there."""
        waiting = self._ranked[0]
        while waiting:
            job = self.queue.get(waiting[0])
            if job is not None and job.rank == 0 and not self._prefills(job):
                return True
            heappop(waiting)
            if job is not None and job.rank == 0:
                self._wait(job)
        return False

    def _prefills(self, job: Job) -> bool:
        return job.num_waiting(len(job.lane.record.tokens)) > 1

    def _plan(self, job: Job, budget: int) -> Turn | None:
        """The job's next rows: those without KV, up to the budget. Drafts come only after the last token. None: it waits."""
        tokens = job.lane.record.tokens
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
        path = job.lane.record.past.path(at)
        again = path.repetition(REPEATED, free) if free else []
        window = Window(at, len(again) or count, again, ended=bool(again) and again[-1] in job.sampling.stop_tokens)
        self._missing.add(window.num_missing)
        self._drafting.add(job.number)
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

    def _num_drafts(self, job: Job, at: int, free: bool = False) -> int:
        if job.forced_drafts is not None:
            return min(max(map(len, job.forced_drafts.get(at, [[]]))), job.remaining - 1)
        window = job.window
        if window is None and isinstance(self.drafters[job.drafter], SelfDrafter) and self._alone:
            return 0  # the device's decode step is canonical: there is nothing to verify
        if window is None:
            drafter = self.drafters[job.drafter]
            together = min(self.queue.num_deciding, self.max_rows)
            window = self.planner.window(drafter.reproducible, together, job.statistics, free)
            window = min(window, self.max_rows // drafter.width)
        return min(window, job.remaining) - 1

    def _width(self, job: Job, at: int) -> int:
        return len(job.forced_drafts.get(at, [[]])) if job.forced_drafts is not None else self.drafters[job.drafter].width

    def _make_room(self, turn: Turn, certain: bool) -> bool:
        """Reserve the turn's pages; younger jobs without a turn in this step may lose theirs. False: the turn must wait."""
        width = self._width(turn.job, turn.end) if turn.num_drafts else 1
        return self.reservations.reserve(turn, width, certain)

    def _last_resort(self, job: Job) -> Turn | None:
        """For the oldest job, whose window does not fit even with all pages to itself: a turn without drafts, or failure."""
        self.runner.cache.begin()  # nobody has a turn: all rooms of recurrent layers may be taken
        turn, pool = self._plan(job, self.max_rows), self.runner.pool
        assert turn is not None  # `submit` refuses windows larger than a pass
        turn.num_drafts, turn.burst, turn.drafting, job.window_open = 0, 0, False, None
        self.reservations.out_of_states = None
        if self._make_room(turn, certain=True):
            return turn
        if self.reservations.out_of_states is not None:
            self.queue.end(job, self.reservations.out_of_states)
            return None
        needed = pool.num_needed(job.lane.table, turn.start, turn.end)
        length = len(job.lane.record.tokens)
        full = (needed, pool.num_free, pool.num_pages)
        self.queue.end(job, OutOfPages.for_ever(*full, length, length + job.remaining, pool.page_size))
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
