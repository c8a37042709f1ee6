"""`JobQueue`: the unfinished jobs of a loop, from `submit` to their end, and the listeners that hear of them.

A job has a number, by age. `Admission` and `Reservations` keep numbers in their heaps and ask here whether there is still one:
a job that has ended is looked for nowhere, and nothing holds its branch open.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from replaylens.engine.errors import BadRequest, ClosedBranch, EngineError
from replaylens.engine.loop.drafters import Drafter
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.memory.path import path_digest
from replaylens.engine.memory.prefix import PrefixIndex, Trail
from replaylens.engine.memory.tree import BranchStatus, BranchTree, TokenState
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.capture import CaptureSpec
from replaylens.engine.request.placed import page_keys

Listener = Callable[[dict[str, Any]], None]
"""is called with every event: submit, draft, draft_failed, verdict, preempt, finish"""


class JobQueue:
    """Accepts jobs, closes those that are done and ends those that fail."""

    def __init__(
        self, runner: Runner, tree: BranchTree, prefix: PrefixIndex, drafters: dict[str, Drafter], max_rows: int
    ) -> None:
        self.runner, self.tree, self.prefix, self.drafters, self.max_rows = runner, tree, prefix, drafters, max_rows
        self._jobs: OrderedDict[int, Job] = OrderedDict()  # a dict takes long to find its first entry where many were removed
        """by number, which is by age"""
        self._count = 0
        self._ended: list[int] = []
        self.unranked: list[int] = []
        """numbers of jobs that `Admission` has to rank before the next step"""
        self.num_deciding = self.num_hooked = 0
        """jobs that choose canonical tokens, and jobs with hook functions"""
        self.captures: Counter[CaptureSpec] = Counter()
        """what jobs capture"""
        self.changed: set[int] = set()
        """branches whose pages, or whose jobs, have changed since `Reservations` last looked"""
        self.listeners: list[Listener] = []

    @property
    def jobs(self) -> list[Job]:
        """The unfinished jobs, oldest first."""
        return list(self._jobs.values())

    @property
    def oldest(self) -> Job | None:
        return next(iter(self._jobs.values()), None)

    def get(self, number: int) -> Job | None:
        """The job with a number; None: it has ended."""
        return self._jobs.get(number)

    def submit(self, job: Job) -> None:
        """Queue a job for `step`. A job that can never be served ends at once, with an error."""
        self.notify("submit", job)
        if refusal := self.refusal(job):
            self.end(job, refusal)
        else:
            self.close_if_done(job)
        if not job.done:
            self._count += 1
            job.number = job.lane.queued = self._count
            self._jobs[job.number] = job
            self.unranked.append(job.number)
            job.counted = job.lane.capture, bool(job.lane.hooks)
            self._recount(job, 1)

    def refusal(self, job: Job) -> EngineError | None:
        """Why a job cannot be served, regardless of other jobs' load; None: it can."""
        record, vocab = job.lane.record, self.runner.model.config.vocab_size
        if job.lane.unread or job.lane.queued:
            return BadRequest(f"Branch {record.id} is busy with another request. Finish it or close its stream first.")
        if record.status is BranchStatus.REJECTED:
            return ClosedBranch(f"Branch {record.id} is rejected. Fork it to continue from its tokens.")
        if not record.tokens and job.new_tokens:
            return BadRequest(f"Branch {record.id} has no tokens. Force at least one before generating.")
        drafts = job.forced_drafts or {}
        named = [
            *job.sampling.logit_bias,
            *job.sampling.stop_tokens,
            *(t for chains in drafts.values() for chain in chains for t in chain),
        ]
        if bad := [t for t in named if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab]:
            return BadRequest(
                f"Token {bad[0]!r} in logit_bias, stop_tokens or drafts is not in the vocabulary of {vocab} tokens."
            )
        width = self.drafters[job.drafter].width if job.new_tokens else 1
        rows = [min(job.window or 1, job.new_tokens) * width]
        rows += [min(1 + max(map(len, chains)), job.new_tokens) * len(chains) for chains in drafts.values() if chains]
        if max(rows) > self.max_rows:
            return BadRequest(
                f"A window of {max(rows)} rows does not fit into a pass of {self.max_rows}. Use a smaller window."
            )
        return None

    def end(self, job: Job, error: Exception | None = None) -> None:
        """Stop a job, cancelled or failed. Committed tokens stay; forced tokens without KV are removed."""
        job.done, job.error = True, error
        self._ended.append(job.number)
        self._drop_window(job)
        record = job.lane.record
        if TokenState.DRAFT in record.states:
            self.tree.rollback(record.id, record.states.index(TokenState.DRAFT))
            job.lane.tokens_gone(len(record.tokens))
        self._finish(job, "error" if error else "cancelled")

    def _drop_window(self, job: Job) -> None:
        """Mutates: forgets drafts that are not verified yet, with their pages."""
        if job.window_open is not None:
            job.window_open = None
            self.runner.pool.truncate(job.lane.table, min(job.lane.computed, job.lane.table.length))

    def preempted(self, job: Job) -> None:
        """Mutates: forgets the drafts of a job that lost its pages."""
        job.window_open = None
        self.notify("preempt", job)

    def close_if_done(self, job: Job) -> None:
        """Mutates: a job with all its tokens and rows is done, and its whole pages are offered to the prefix index."""
        allowed = 1 if job.new_tokens and not job.final else 0  # a generated token's own row may stay pending
        if job.remaining == 0 and job.num_waiting(len(job.lane.record.tokens)) <= allowed:
            lane, job.done = job.lane, True
            self._ended.append(job.number)
            if lane.certified:
                keys = page_keys(lane.edits, len(lane.table.pages), self.runner.pool.page_size) if lane.edits else None
                self._offer(lane, keys)
            self._finish(job, job.finish_reason)

    def _offer(self, lane: Lane, keys: list[bytes] | None) -> None:
        """Index the lane's whole pages; without edits, only those after the pages that it offered before."""
        past, size = lane.record.past, self.runner.pool.page_size
        before, kept = lane.offered if lane.offered is not None else (None, past.mark(0))
        if keys is not None or before is None or kept.length < before.num_pages * size:  # other edits, or rolled back
            before = Trail()
        self.prefix.offer(lane.table, past.tokens, lane.computed, keys, before)
        lane.offered = (before, past.mark(before.num_pages * size)) if keys is None else None

    def remove(self, job: Job) -> None:
        """Mutates: stops a job that is not done and removes it from the queue; nothing happens if it is in no queue."""
        if self._jobs.get(job.number) is job:
            if not job.done:
                self.end(job)
            self._remove(job)

    def forget_done(self) -> None:
        """Mutates: removes the jobs that are done."""
        for number in self._ended:
            if (job := self._jobs.get(number)) is not None:
                self._remove(job)
        self._ended.clear()

    def _remove(self, job: Job) -> None:
        del self._jobs[job.number]
        job.lane.queued = 0
        self._recount(job, -1)

    def _recount(self, job: Job, by: int) -> None:
        capture, hooked = job.counted
        self.num_deciding += by * (job.exact and job.new_tokens > 0)
        self.num_hooked += by * hooked
        if capture is not None:
            self.captures[capture] += by
            if not self.captures[capture]:
                del self.captures[capture]
        self.changed.add(job.lane.branch)

    def end_all(self, error: Exception) -> None:
        """Mutates: ends every job with the error."""
        for job in self.jobs:
            if not job.done:
                self.end(job, error)
            self._remove(job)
        self._ended.clear()

    def _finish(self, job: Job, reason: str | None) -> None:
        job.lane.statistics.add(job.statistics)
        if self.listeners:  # the digest reads the whole path
            tokens = job.lane.record.tokens
            self.notify("finish", job, reason=reason, generated=job.generated, length=len(tokens), path=path_digest(tokens))

    def notify(self, event: str, job: Job, **details: Any) -> None:
        """Calls every listener with the event."""
        for listener in self.listeners:
            listener({"event": event, "branch": job.lane.branch, **details})
