"""`Loop`: admit, draft, verify, roll back, capture. One `step` serves every job that has rows and pages for it."""

from collections.abc import Callable
from typing import Any

from replaylens.engine.batch import Segment
from replaylens.engine.branches import BranchTree, TokenState
from replaylens.engine.capture import PassTap
from replaylens.engine.commit import Committer, Outcome
from replaylens.engine.drafters import DraftCall, Drafter
from replaylens.engine.edits import page_keys
from replaylens.engine.errors import BadRequest, EngineError, OutOfPages
from replaylens.engine.lane import Job, Lane
from replaylens.engine.pages import PageTable
from replaylens.engine.planner import Planner
from replaylens.engine.prefix import PrefixIndex
from replaylens.engine.runner import PassResult, Runner
from replaylens.engine.turn import Turn
from replaylens.engine.verify import Verdict, judge

Listener = Callable[[dict[str, Any]], None]
"""is told every event: submit, draft, verdict, preempt, finish"""


class Loop:
    """The scheduler. Older jobs come first; when pages run out, younger ones give theirs up and are computed again later."""

    def __init__(
        self,
        runner: Runner,
        tree: BranchTree,
        prefix: PrefixIndex,
        drafters: dict[str, Drafter],
        decode: Callable[[list[int]], str],
        max_rows: int,
    ) -> None:
        self.runner, self.tree, self.prefix, self.drafters = runner, tree, prefix, drafters
        self.decode, self.max_rows = decode, max_rows
        self.planner = Planner()
        self.lanes: dict[int, Lane] = {}
        self.committer = Committer(runner, tree, self.lanes)
        self.jobs: list[Job] = []
        self.listeners: list[Listener] = []
        self._clock = 0

    def step(self) -> None:
        """One round for every job that can have one. A job's failure stays its own."""
        turns = self.draft(self.admit())
        for exact in (True, False):
            if some := [turn for turn in turns if turn.job.exact is exact]:
                self.verify(some, exact)
        self.jobs = [job for job in self.jobs if not job.done]

    def admit(self) -> list[Turn]:
        """Turns for as many jobs as rows and pages allow; those that wait for one token before long prefills."""
        self._clock += 1
        budget, turns = self.max_rows, []
        for job in sorted(self.jobs, key=lambda job: self._num_waiting(job) > 1):
            turn = self._plan(job, budget) if budget > 0 and not job.done else None
            if turn is not None and self._make_room(turn):
                budget -= len(turn.rows) + turn.num_drafts * len(turn.tables)
                turn.job.lane.last_used = self._clock
                turns.append(turn)
        if not turns and self.jobs:
            self._fail(self.jobs[0])
        return turns

    def draft(self, turns: list[Turn]) -> list[Turn]:
        """Fill in the chains of turns that want drafts. Draft KV goes to slots that the verification overwrites."""
        alive = [turn for turn in turns if not turn.num_drafts]
        for name in sorted({turn.job.drafter for turn in turns if turn.num_drafts}):
            mine = [turn for turn in turns if turn.num_drafts and turn.job.drafter == name]
            try:
                with self.planner.timing("draft", len(mine), steps=max(turn.num_drafts for turn in mine)):
                    proposals = self.drafters[name].propose([self._call(turn) for turn in mine])
            except EngineError as error:
                self._abandon(mine, error)
                continue
            for turn, chains in zip(mine, proposals, strict=True):
                turn.chains = [chain for chain in chains if chain] or [[]]
                self.tree.append(turn.job.lane.branch, turn.chains[0], TokenState.DRAFT)
                self._tell("draft", turn.job, at=turn.end, chains=turn.chains)
            alive += mine
        return alive

    def verify(self, turns: list[Turn], exact: bool) -> None:
        """One pass over all turns' rows and drafts; then each turn is judged and committed on its own."""
        segments = []
        for turn in turns:
            self._check_canary(turn)
            for table, chain in zip(turn.tables, turn.chains, strict=False):
                turn.segments.append(len(segments))
                num_logits = len(chain) + 1 if turn.deciding else 0
                lane = turn.job.lane
                segments.append(Segment(table, turn.start, turn.rows + chain, num_logits, lane.edits, lane.hooks))
        tap = PassTap(frozenset().union(*(turn.job.lane.capture.needed() for turn in turns if turn.job.lane.capture)))
        try:
            with self.planner.timing("exact" if exact else "fast", sum(len(s.tokens) for s in segments)):
                result = self.runner.exact(segments, tap) if exact else self.runner.fast(segments, tap)
        except EngineError as error:
            self._abandon(turns, error)
            return
        logit_of = {row: i for i, row in enumerate(result.batch.logit_rows())}
        for turn in turns:
            self._conclude(turn, result, logit_of, tap)

    def _conclude(self, turn: Turn, result: PassResult, logit_of: dict[int, int], tap: PassTap) -> None:
        """Judge and commit one turn."""
        job, outcome = turn.job, Outcome()
        if turn.deciding:
            record = self.tree.branch(job.lane.branch)
            path, num_prompt = record.tokens[: turn.end], record.root_length

            def choose(chain: int, row: int) -> int:
                packed = result.batch.row(turn.segments[chain], turn.end - 1 + row)
                logits = result.logits[logit_of[packed]].numpy()
                return job.sampling.choose(logits, path + turn.chains[chain][:row], num_prompt)

            outcome = self._take(turn, judge(turn.chains, choose), path)
        rejected_before = len(job.rejected)
        self.committer.commit(turn, outcome, tap, result)
        if any(turn.chains):
            rejected = job.rejected[rejected_before:]
            self._tell(
                "verdict", job, chain=outcome.chain, accepted=outcome.accepted, pending=outcome.pending, rejected=rejected
            )
        if job.finish_reason in ("eos", "stop") and not self.tree.branch(job.lane.branch).finish_reason:
            self.tree.finish(job.lane.branch, job.finish_reason)
        self._close_if_done(job)

    def _take(self, turn: Turn, verdict: Verdict, path: list[int]) -> Outcome:
        """What of the verdict is in the sequence: all of it, or up to the token that ends the job. Counts it."""
        job, chain = turn.job, turn.chains[verdict.chain][: verdict.num_accepted]
        new = [*chain, verdict.token]
        for i, token in enumerate(new):
            job.finish_reason = self._ends(job, token, path + new[: i + 1], job.generated + i + 1)
            if job.finish_reason:
                new = new[: i + 1]
                break
        accepted = min(len(new), verdict.num_accepted)
        job.generated += len(new)
        job.statistics.count(sum(map(len, turn.chains)), accepted, len(new))
        return Outcome(verdict.chain, accepted, tuple(new[accepted:]))

    def _ends(self, job: Job, token: int, path: list[int], generated: int) -> str | None:
        if token in job.sampling.stop_tokens:
            return "eos"
        if job.sampling.stop:
            text = self.decode(path[self.tree.branch(job.lane.branch).root_length :])
            if any(stop in text for stop in job.sampling.stop):
                return "stop"
        return "length" if generated == job.new_tokens else None

    # ---- what a job needs next ----------------------------------------------------------------------------------

    def _plan(self, job: Job, budget: int) -> Turn | None:
        """The job's next rows: all that its lane lacks, as far as the budget goes; drafts only after the last token."""
        tokens = self.tree.branch(job.lane.branch).tokens
        start = self._first_row(job)
        rows = tokens[start : start + budget]
        turn = Turn(job, start, rows, complete=start + len(rows) == len(tokens))
        if turn.deciding and job.exact:
            num_drafts = self._num_drafts(job, turn.end)
            if len(rows) > 1:  # the lane lost its KV, and catches up
                reproducible = num_drafts and self.drafters[job.drafter].reproducible
                return Turn(job, start, rows[:-1], complete=False) if reproducible else turn  # same windows as without
            turn.num_drafts = num_drafts
            if 1 + turn.num_drafts * self._width(job, turn.end) > budget:
                return None  # a window is never cut for lack of room: the rejected branches would depend on the load
        return turn

    def _first_row(self, job: Job) -> int:
        """Where the next pass starts. To say what follows the last token, its row must be computed, if need be again."""
        num_tokens = len(self.tree.branch(job.lane.branch).tokens)
        first = job.lane.first_missing(num_tokens, job.final and job.remaining == 0)
        return min(first, num_tokens - 1) if job.remaining else first

    def _num_waiting(self, job: Job) -> int:
        return len(self.tree.branch(job.lane.branch).tokens) - self._first_row(job)

    def _num_drafts(self, job: Job, at: int) -> int:
        if job.forced_drafts is not None:
            return min(max(map(len, job.forced_drafts.get(at, [[]]))), job.remaining - 1)
        window = job.window
        if window is None:
            deciding = sum(other.exact and other.remaining > 0 for other in self.jobs)
            window = self.planner.window(self.drafters[job.drafter].reproducible, deciding, job.statistics)
        return min(window, job.remaining) - 1

    def _width(self, job: Job, at: int) -> int:
        return len(job.forced_drafts.get(at, [[]])) if job.forced_drafts is not None else self.drafters[job.drafter].width

    def _call(self, turn: Turn) -> DraftCall:
        job, record = turn.job, self.tree.branch(turn.job.lane.branch)
        recorded = job.forced_drafts.get(turn.end) if job.forced_drafts is not None else None
        return DraftCall(
            path=list(record.tokens),
            num_prompt=record.root_length,
            count=turn.num_drafts,
            sampling=job.sampling,
            tables=turn.tables,
            branch=record.id,
            recorded=recorded,
            edits=job.lane.edits,
            hooks=job.lane.hooks,
        )

    # ---- pages --------------------------------------------------------------------------------------------------

    def _make_room(self, turn: Turn) -> bool:
        """Reserve the turn's pages, taking them from the idle and the younger if need be. False: it has to wait."""
        lane, pool, end = turn.job.lane, self.runner.pool, turn.end + turn.num_drafts
        turn.tables = [lane.table]
        try:
            for i in range(self._width(turn.job, turn.end) if turn.num_drafts else 1):
                if i:
                    turn.tables.append(pool.fork(lane.table, turn.start))
                self._reserve(turn.tables[i], turn.start, end, turn.job)
        except OutOfPages:
            for table in turn.tables[1:]:
                pool.release(table)
            pool.truncate(lane.table, min(lane.table.length, lane.computed))
            return False
        return True

    def _reserve(self, table: PageTable, start: int, end: int, asking: Job) -> None:
        pool = self.runner.pool
        while (missing := pool.num_needed(table, start, end) - pool.num_free) > 0:
            if not self._reclaim(missing, asking):
                break
        self.runner.reserve(table, start, end)

    def _reclaim(self, num_pages: int, asking: Job) -> bool:
        """Free some pages: cached prefixes first, then idle branches, then the youngest job. False: nothing is left."""
        if self.prefix.evict(num_pages):
            return True
        busy = {job.lane.branch for job in self.jobs}
        idle = [lane for lane in self.lanes.values() if lane.table.pages and lane.branch not in busy]
        if idle:
            self.drop_pages(min(idle, key=lambda lane: (lane.last_used, lane.branch)))
            return True
        younger = self.jobs[self.jobs.index(asking) + 1 :]
        victims = [job for job in younger if job.lane.table.pages and job.lane.last_used != self._clock]
        if victims:
            self.drop_pages(victims[-1].lane)
            self._tell("preempt", victims[-1])
        return bool(victims)

    def drop_pages(self, lane: Lane) -> None:
        """Mutates: the lane's KV is forgotten; its next job computes it again, to the same bits."""
        self.runner.pool.truncate(lane.table, 0)
        lane.computed = 0

    def _check_canary(self, turn: Turn) -> None:
        """In debug mode: what the pass will read is what the branch thinks it is."""
        if self.runner.cache.chain is not None:
            tokens = self.tree.branch(turn.job.lane.branch).tokens[: turn.start]
            for table in turn.tables:
                self.runner.cache.check(tokens, self.runner.pool.slots(table, 0, turn.start))

    # ---- jobs ---------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job; `step` works on it."""
        self._tell("submit", job)
        self.jobs.append(job)
        self._close_if_done(job)

    def run(self, jobs: list[Job]) -> None:
        """Step until these jobs are done; others go on beside them. Raises the first error among them."""
        while any(not job.done for job in jobs):
            self.step()
        for job in jobs:
            if job.error is not None:
                raise job.error

    def end(self, job: Job, error: Exception | None = None) -> None:
        """Stop a job where it stands: cancelled, or failed. What was committed stays."""
        job.done, job.error = True, error
        self._tell("finish", job, reason="error" if error else "cancelled", generated=job.generated)

    def _close_if_done(self, job: Job) -> None:
        allowed = 1 if job.new_tokens and not job.final else 0  # a generated token's own row may stay pending
        if job.remaining == 0 and self._num_waiting(job) <= allowed:
            lane, job.done = job.lane, True
            if lane.certified:
                keys = page_keys(lane.edits, len(lane.table.pages), self.runner.pool.page_size)
                self.prefix.offer(lane.table, self.tree.branch(lane.branch).tokens, lane.computed, keys)
            self._tell("finish", job, reason=job.finish_reason, generated=job.generated)

    def _fail(self, job: Job) -> None:
        """Nobody could have a turn: the oldest job can never be served."""
        turn, pool = self._plan(job, self.max_rows), self.runner.pool
        if turn is None:
            self.end(job, BadRequest(f"a window of {job.window} rows does not fit into a pass of {self.max_rows}"))
        else:
            needed = pool.num_needed(job.lane.table, turn.start, turn.end)
            self.end(job, OutOfPages(needed, pool.num_free, pool.num_pages))
        self.jobs = [job for job in self.jobs if not job.done]

    def _abandon(self, turns: list[Turn], error: EngineError) -> None:
        """A pass failed: nothing of it is committed, the branches stand where they stood, the jobs end with the error."""
        for turn in turns:
            self.committer.abandon(turn)
            self.end(turn.job, error)

    def _tell(self, event: str, job: Job, **details: Any) -> None:
        for listener in self.listeners:
            listener({"event": event, "branch": job.lane.branch, **details})
