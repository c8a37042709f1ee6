"""`Forest`: all live branches of an engine. Plants, forks, forces, rolls back, releases and runs them, and traces it all."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tqdm.auto import tqdm

from replaylens.engine.errors import IntegrityError
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.loop.loop import Loop
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.prefix import PrefixIndex
from replaylens.engine.memory.tree import BranchStatus, BranchTree, TokenState
from replaylens.engine.passes.runner import Runner
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.capture import CaptureSpec, Recording
from replaylens.engine.request.edits import Hook, PlacedEdit, page_keys

Edits = tuple[PlacedEdit, ...]
Hooks = tuple[Hook, ...]


class Forest:
    """The lanes of one engine. Every method that changes a branch leaves an event in the trace."""

    def __init__(self, runner: Runner, tree: BranchTree, prefix: PrefixIndex, loop: Loop, trace: Trace) -> None:
        self.runner, self.tree, self.prefix, self.loop, self.trace = runner, tree, prefix, loop, trace
        loop.listeners.append(self._listen)

    def plant(self, path: list[int], capture: CaptureSpec | None, edits: Edits = (), hooks: Hooks = ()) -> Lane:
        """A new root lane, not computed yet; it may share the pages of an earlier prompt. The caller releases it."""
        table, size = PageTable(), self.runner.pool.page_size
        if capture is None and not hooks:  # rows that are to be captured must be computed, even if their KV is known
            table = self.prefix.adopt(path, page_keys(edits, len(path) // size, size), limit=len(path) - 1)
        lane = Lane(self.tree.plant(path), table, computed=table.length, edits=edits, hooks=hooks, capture=capture)
        lane.recording = Recording() if capture is not None else None
        self.loop.lanes[lane.branch] = lane
        details = edits_json(edits, hooks)
        self.trace.add("plant", branch=lane.branch, tokens=path, capture=asdict(capture) if capture else None, **details)
        return lane

    def fork(self, lane: Lane, at: int, edits: Edits = (), hooks: Hooks = ()) -> Lane:
        """A new lane with the first `at` tokens; pages are shared up to the first edited position. The caller releases it."""
        same = 0 if hooks else min([at, *(edit.first for edit in edits)])  # below this position nothing changes
        child = self.tree.fork(lane.branch, at)
        table = self.runner.pool.fork(lane.table, min(same, lane.computed))
        new = Lane(child, table, table.length, lane.exact, capture=lane.capture)
        new.edits = tuple(edit for edit in lane.edits if edit.needs <= at) + edits
        new.hooks, new.thoughts = lane.hooks + hooks, lane.thoughts
        if lane.recording is not None and lane.capture is not None:
            new.recording = self._inherited(lane, lane.recording, same, at - lane.capture.lag)
        self.loop.lanes[child] = new
        self.trace.add("fork", branch=lane.branch, child=child, at=at, **edits_json(edits, hooks))
        return new

    def _inherited(self, lane: Lane, recording: Recording, same: int, known: int) -> Recording:
        """Captured rows that a fork takes over: those whose position and successor it shares.

        A rejected branch records its own suffix only; what comes before is on the branch that it was cut from, as far as
        that one is still on the same path. The rows in between are computed again.
        """
        parent = self.tree.branch(lane.branch).parent
        main = self.loop.lanes.get(parent) if recording.base and parent is not None else None
        if main is None or main.recording is None:
            return recording.fork(min(same, known))
        if lane.certified and not main.certified:
            return recording.like()  # the fast path has been there since: all rows are computed again
        common = self.tree.common_prefix(main.branch, lane.branch) - (lane.capture.lag if lane.capture else 0)
        mine, other = ({edit.key: edit.first for edit in each.edits} for each in (lane, main))
        apart = [(mine | other)[key] for key in mine.keys() ^ other.keys()]  # same tokens, but other states
        return main.recording.fork(min([same, known, common, *apart]))

    def force(self, lane: Lane, ids: list[int]) -> None:
        """Append tokens; `compute` gives them their rows."""
        self.tree.append(lane.branch, ids, TokenState.DRAFT)
        self.trace.add("force", branch=lane.branch, tokens=ids)

    def rollback(self, lane: Lane, to: int) -> None:
        """Cut the path back to `to` tokens: tokens, KV, captured rows and finish state together."""
        shorter = to < len(self.tree.branch(lane.branch).tokens)
        self.tree.rollback(lane.branch, to)
        self.runner.pool.truncate(lane.table, min(to, lane.table.length))
        lane.computed = min(lane.computed, to)
        if shorter and lane.recording is not None and lane.capture is not None:
            lane.recording.truncate(to - lane.capture.lag)
        self.trace.add("rollback", branch=lane.branch, to=to)

    def release(self, lane: Lane) -> None:
        """Give the pages back and close the branch; jobs on it are cancelled. Its forks live on."""
        for job in [job for job in self.loop.jobs if job.lane is lane]:
            self.cancel(job)
        self.runner.pool.release(lane.table)
        self.tree.release(lane.branch)
        del self.loop.lanes[lane.branch]
        self.trace.add("release", branch=lane.branch)

    def forget(self, branch: int) -> None:
        """Release a branch and the rejected drafts that hang off it, and drop their records, so that nothing of it is left.

        Branches that were forked from it keep its record alive until they are forgotten themselves.
        """
        for child in self.tree.children(branch):
            if self.tree.branch(child).status is BranchStatus.REJECTED:
                self.forget(child)
        if branch in self.loop.lanes:
            self.release(self.loop.lanes[branch])
        elif self.tree.branch(branch).status is not BranchStatus.RELEASED:
            self.tree.release(branch)
        if not self.tree.children(branch):
            self.tree.forget(branch)

    # ---- work ---------------------------------------------------------------------------------------------------

    def compute(self, lanes: Sequence[Lane]) -> None:
        """Bring KV and captured rows of the lanes up to their tokens, all together."""
        self.run([Job(lane, exact=lane.exact) for lane in lanes])

    def submit(self, job: Job) -> None:
        """Queue a job; stepping the loop works on it. A request that is refused leaves no event: nothing happened."""
        if job.new_tokens:
            if refusal := self.loop.refusal(job):
                job.done, job.error = True, refusal
                return
            options = {"deterministic": job.exact, "final": job.final, "keep_rejected": job.keep_rejected}
            self.trace.add("generate", branch=job.lane.branch, n=job.new_tokens, sampling=job.sampling.to_json(), **options)
        self.loop.submit(job)

    def run(self, jobs: list[Job], progress: bool = False) -> None:
        """Submit the jobs and step until they are done; raises the first error among them."""
        for job in jobs:
            self.submit(job)
        with tqdm(total=sum(job.new_tokens for job in jobs), unit="token", disable=not progress) as bar:
            while any(not job.done for job in jobs):
                self.loop.step()
                bar.update(sum(job.generated for job in jobs) - bar.n)
        self.loop.run(jobs)

    def cancel(self, job: Job) -> None:
        """Stop a job at once. What it committed stays on its branch."""
        self.loop.end(job)
        self.loop.jobs = [other for other in self.loop.jobs if other is not job]

    def check_integrity(self) -> list[str]:
        """Recount pages, tree, prefix index and captured rows: lines that say what was counted, or IntegrityError."""
        tables = [lane.table for lane in self.loop.lanes.values()]
        tables += [self.loop.bursts.spare] if self.loop.bursts is not None else []
        lines = [
            str(self.runner.pool.check_integrity(tables, self.prefix.pages())),
            str(self.tree.check_integrity()),
            str(self.prefix.check_integrity()),
        ]
        for lane in self.loop.lanes.values():
            if lane.computed > lane.table.length or lane.computed > len(self.tree.branch(lane.branch).tokens):
                raise IntegrityError(f"branch {lane.branch}: {lane.computed} computed positions, but {lane.table.length} slots")
            if lane.recording is not None:
                lane.recording.check_integrity()
        return lines

    def _listen(self, event: dict[str, Any]) -> None:
        """Trace what the loop does. A fast-path request's tokens are noted: they could not be computed again."""
        if event["event"] in ("draft", "verdict", "finish"):
            details = {key: value for key, value in event.items() if key != "event"}
            if event["event"] == "finish" and not self.loop.lanes[event["branch"]].exact:
                details["tokens"] = self.tree.path(event["branch"])
            self.trace.add(event["event"], **details)


def edits_json(edits: Edits, hooks: Hooks) -> dict[str, Any]:
    """Trace fields; absent where there are no edits. Of hooks only that they were there: functions are not written down."""
    out: dict[str, Any] = {"edits": [edit.to_json() for edit in edits]} if edits else {}
    return out | ({"hooks": len(hooks)} if hooks else {})
