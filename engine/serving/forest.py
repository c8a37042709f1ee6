"""`Forest`: all live branches of an engine. Plants, forks, forces, rolls back, releases and serves them, and traces it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from torch import Tensor
from tqdm.auto import tqdm

from replaylens.engine.errors import BadRequest, ClosedBranch, IntegrityError
from replaylens.engine.loop.lane import Job, Lane, raise_first
from replaylens.engine.loop.loop import Listener, Loop
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.prefix import PrefixIndex
from replaylens.engine.memory.tree import HOOKED, BranchTree, TokenState
from replaylens.engine.model import sites
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.capture import CaptureSpec, Recording
from replaylens.engine.request.edits import Hook
from replaylens.engine.request.placed import PlacedEdit, page_keys
from replaylens.engine.serving.lock import EngineLock, changing, reading
from replaylens.engine.terminal import defer_interrupt, hidden

if TYPE_CHECKING:
    from replaylens.engine.proof.trace import Trace

# ---- forest ----------------------------------------------------------------------------------------------------------

Edits = tuple[PlacedEdit, ...]
Hooks = tuple[Hook, ...]


class Forest:
    """The lanes of one engine. Every method that changes a branch adds an event to the trace, if there is one.

    Any thread may call any method. `serve` and `compute` wait for passes; the others wait only for the current step.
    """

    def __init__(
        self, runner: Runner, tree: BranchTree, prefix: PrefixIndex, loop: Loop, lock: EngineLock, trace: "Trace | None"
    ) -> None:
        self.runner, self.tree, self.prefix, self.loop, self.trace = runner, tree, prefix, loop, trace
        self.lock = lock
        self.aliases = sites.table(runner.model.config).names
        self._twins = sites.twins(runner.entries)
        self._thread = threading.local()
        if trace is not None:  # the loop builds no events that nobody reads
            loop.listeners.append(_weakly(WeakMethod(self._listen)))

    @changing
    def plant(self, path: list[int], capture: CaptureSpec | None, edits: Edits = (), hooks: Hooks = ()) -> Lane:
        """A new root lane, not computed yet. It may share the pages of an earlier prompt. The caller must release it."""
        table, size = PageTable(), self.runner.pool.page_size
        if capture is None and not hooks:  # captured rows must be computed, even if their KV is cached
            table = self.prefix.adopt(path, page_keys(edits, len(path) // size, size), limit=len(path) - 1)
        lane = Lane(
            self.tree.branch(self.tree.plant(path)), table, computed=table.length, edits=edits, hooks=hooks, capture=capture
        )
        if hooks:
            self.tree.uncertify(lane.branch, 0, HOOKED)
        if capture is not None:
            lane.recording = Recording()
            lane.recording.aliases, lane.recording.twins = self.aliases, self.twins(lane)
        self.add(lane)
        kept = capture.traced() if capture and self.trace is not None else None
        self.note(lane, "plant", edits, hooks, tokens=path, capture=kept)
        return lane

    def twins(self, lane: Lane) -> Mapping[str, str]:
        """Sites of a lane whose rows are those of another site: between two blocks, unless something is changed there."""
        changed = {edit.site for edit in lane.edits} | {site for site, _ in lane.hooks}
        return {a: b for a, b in self._twins.items() if a not in changed and b not in changed} if changed else self._twins

    def add(self, lane: Lane) -> None:
        """Mutates: adds a lane, traced unless its thread is `quiet`. Precondition: the lock is held."""
        lane.traced = lane.traced and not getattr(self._thread, "quiet", False)
        self.loop.lanes[lane.branch] = lane
        self.loop.reservations.note(lane)

    @changing
    def fork(self, lane: Lane, at: int, edits: Edits = (), hooks: Hooks = ()) -> Lane:
        """A new lane with the first `at` tokens. Pages are shared up to the first edit. The caller must release it."""
        same = 0 if hooks else min([at, *(edit.first for edit in edits)])  # below this position nothing changes
        child = self.tree.fork(lane.branch, at)
        table = self.runner.pool.fork(lane.table, min(same, lane.computed))
        new = Lane(self.tree.branch(child), table, table.length, lane.exact, capture=lane.capture, traced=lane.traced)
        new.edits = tuple(edit for edit in lane.edits if edit.needs <= at) + edits
        new.hooks, new.carried = lane.hooks + hooks, lane.carried
        if hooks:
            self.tree.uncertify(child, 0, HOOKED)
        recorded = lane.template if lane.recording is None else lane.recording
        if recorded is not None and lane.capture is not None:
            new.recording = self._inherited(lane, recorded, same, recorded.num_valid(at, lane.capture.lag))
            new.recording.twins = self.twins(new)
        if lane.offered is not None and not new.edits and not new.hooks:
            trail, kept = lane.offered  # what the index knows of this path: the fork need not hash it again
            size = self.runner.pool.page_size
            own = trail.upto(min(kept.length, at) // size)
            new.offered = own, new.record.past.mark(own.num_pages * size)
        self.add(new)
        self.loop.reservations.note(lane)  # what it had alone is shared now
        self.note(lane, "fork", edits, hooks, child=child, at=at)
        return new

    def _inherited(self, lane: Lane, recording: Recording, same: int, known: int) -> Recording:
        """The captured rows that a fork inherits: those whose position and next token it shares.

        A rejected branch records only its own suffix. Earlier rows are taken from the branch it was cut from, as far as that
        branch is still on the same path. The rows in between are computed again.
        """
        parent = lane.record.parent
        main = self.loop.lanes.get(parent) if recording.base and parent is not None else None
        if main is None or main.recording is None:
            return recording.fork(min(same, known))
        if lane.certified and not main.certified:
            return recording.like()  # the parent has used the fast path since: all rows are computed again
        common = self.tree.common_prefix(main.branch, lane.branch) - (lane.capture.lag if lane.capture else 0)
        mine, other = ({edit.key: edit.first for edit in each.edits} for each in (lane, main))
        apart = [(mine | other)[key] for key in mine.keys() ^ other.keys()]  # same tokens, different edits
        return main.recording.fork(min([same, known, common, *apart]))

    @changing
    def force(self, lane: Lane, ids: list[int]) -> None:
        """Append tokens; `compute` computes their rows."""
        self.tree.append(lane.branch, ids, TokenState.DRAFT, forced=True)
        self.note(lane, "force", tokens=ids)

    @changing
    def rollback(self, lane: Lane, to: int, pending: bool = False) -> None:
        """Cut the path back to `to` tokens, with KV, captured rows and finish state. Rejected branches of the removed part go
        too, unless they keep rows or pages.

        pending  the last token left has neither KV nor rows, as if it had just been generated
        """
        record = lane.record
        shorter = to < len(record.tokens)
        self.tree.rollback(lane.branch, to, pending=pending)
        for rejected in [other for other in record.cut if other.fork_position > to and not other.forks]:
            if rejected.id not in self.loop.lanes:
                self.tree.discard(rejected.id)
        lane.computed = min(lane.computed, to - pending)
        self.runner.pool.truncate(lane.table, min(lane.computed, lane.table.length))
        self.loop.reservations.note(lane)
        if shorter:
            lane.tokens_gone(to)
        if pending and lane.recording is not None:
            lane.recording.truncate(to - 1)
        details: dict[str, Any] = {"to": to, "pending": True} if pending else {"to": to}
        self.note(lane, "rollback", **details)

    @changing
    def release(self, lane: Lane) -> None:
        """Free the lane's pages and close its branch. Cancels its jobs and releases its rejected branches; forks stay open."""
        if (job := self.loop.queue.get(lane.queued)) is not None:
            self.cancel(job)
        for rejected in [self.loop.lanes[i] for i in lane.rejected if i in self.loop.lanes]:
            self.release(rejected)
        parent = lane.record.parent
        if parent in self.loop.lanes and lane.branch in self.loop.lanes[parent].rejected:
            self.loop.lanes[parent].rejected.remove(lane.branch)
        self.loop.reservations.released(lane)
        self.runner.pool.release(lane.table)
        self.tree.release(lane.branch)
        del self.loop.lanes[lane.branch]
        self.note(lane, "release")

    @changing
    def release_all(self, lanes: Sequence[Lane]) -> None:
        """Release the lanes that are still open."""
        for lane in lanes:
            if lane.branch in self.loop.lanes:
                self.release(lane)

    def abandon(self, lane: Lane) -> None:
        """Release a lane that nobody holds any more. It is not traced: when Python notices is a matter of chance.

        Precondition: the lock is held. Does nothing if the lane was released, or if a new handle on it was made since.
        """
        held = None if lane.lifetime is None else lane.lifetime()
        if held is None and self.loop.lanes.get(lane.branch) is lane:
            for other in [lane, *(self.loop.lanes[i] for i in lane.rejected if i in self.loop.lanes)]:
                other.traced = False
            self.release(lane)

    @contextmanager
    def made(self) -> Iterator[list[Lane]]:
        """A list for new lanes. If the block fails, they are released, since no caller has a handle on them."""
        lanes: list[Lane] = []
        try:
            yield lanes
        except BaseException:
            self.release_all(lanes)
            raise

    # ---- work ---------------------------------------------------------------------------------------------------

    def compute(self, lanes: Sequence[Lane]) -> None:
        """Bring the lanes' KV and captured rows up to date with their tokens, all together."""
        self.serve(lambda: [Job(lane, exact=lane.exact) for lane in lanes])

    def serve(self, make: Callable[[], list[Job]], progress: bool = False) -> list[Job]:
        """Start the jobs that `make` returns, all or none, and wait until they are done. Raises the first error among them.

        make  is called with the lock held, so that what it checks still holds when the jobs start

        If the wait is interrupted (Ctrl-C, a bug), all jobs are cancelled. Committed tokens stay.
        """
        jobs: list[Job] = []
        try:
            self._start(make, jobs)
            self.wait(jobs, progress)
        except BaseException:
            for job in jobs:
                self.cancel(job)
            raise
        return jobs

    @changing
    def _start(self, make: Callable[[], list[Job]], jobs: list[Job]) -> None:
        made = make()
        self.require(made)
        for job in made:
            jobs.append(job)
            self._submit(job)

    @changing
    def start(self, job: Job) -> None:
        """Queue a job for the loop, or raise the error that says why it cannot be served."""
        self.require([job])
        self._submit(job)

    def require(self, jobs: Sequence[Job]) -> None:
        """Raise if one of the jobs cannot be served, before anything changes. Precondition: the lock is held."""
        self.lock.tidy()
        self.runner.weights.require_unchanged()
        times = Counter(job.lane.branch for job in jobs)
        for job in jobs:
            branch = job.lane.branch
            if branch not in self.loop.lanes:
                raise ClosedBranch(f"Branch {branch} was released. Use a live branch, or prompt again.")
            if times[branch] > 1:
                raise BadRequest(f"Branch {branch} is given {times[branch]} times. Give each branch once, or fork it.")
            if refusal := self.loop.queue.refusal(job):
                raise refusal

    def _submit(self, job: Job) -> None:
        if job.new_tokens and self.trace is not None:
            options = {"deterministic": job.exact, "final": job.final, "keep_rejected": job.keep_pages}
            details: dict[str, Any] = {"n": job.new_tokens, "sampling": job.sampling.to_json(), **options}
            self.note(job.lane, "generate", **details)
        self.loop.queue.submit(job)

    def wait(self, jobs: Sequence[Job], progress: bool = False) -> None:
        """Wait until submitted jobs are done, stepping the loop if no other thread does. Raises the first error among them."""
        ended = [0]  # jobs before it are done: not every step looks at all of them

        def done() -> bool:
            first = ended[0]
            while first < len(jobs) and jobs[first].done:
                first += 1
            ended[0] = first
            return first == len(jobs)

        with tqdm(total=sum(job.new_tokens for job in jobs), unit="token", disable=hidden(progress)) as bar:

            def show() -> None:  # what a job that stopped early leaves out is no longer to come
                bar.total = sum(job.generated if job.done else job.new_tokens for job in jobs)
                bar.update(sum(job.generated for job in jobs) - bar.n)

            self.lock.drive(self.loop.step, done, show if progress else None)
            show()
            bar.refresh()
        raise_first(jobs)
        for job in jobs:
            if job.lane.branch not in self.loop.lanes:
                raise ClosedBranch(f"Branch {job.lane.branch} was released by another thread during this request.")

    @contextmanager
    def meanwhile(self, work: Callable[[], object]) -> Iterator[None]:
        """Call `work` once: when requests of the block keep the device busy, so that it delays none of them, else at the end.
        On a CPU, at once."""
        called, bursts = threading.Lock(), self.loop.bursts

        def once() -> None:
            if called.acquire(blocking=False):
                work()

        if bursts is None:
            once()
            yield
            return
        bursts.meanwhile.append(once)
        try:
            yield
        finally:
            bursts.meanwhile.remove(once)
            once()

    @changing
    def cancel(self, job: Job) -> None:
        """Stop a job at once. Its committed tokens stay on the branch. Does nothing if the job has ended."""
        self.loop.queue.remove(job)

    @reading
    def held_kv(self, lane: Lane) -> Tensor:
        """A copy of the KV that the lane holds now."""
        return self.runner.cache.rows(self.runner.pool.slots(lane.table, 0, lane.computed))

    @reading
    def check_integrity(self) -> list[str]:
        """Recount pages, tree, prefix index and captured rows. Returns lines with the counts, or raises IntegrityError."""
        tables = [lane.table for lane in self.loop.lanes.values()]
        tables += [self.loop.bursts.spare] if self.loop.bursts is not None else []
        lines = [
            str(self.runner.pool.check_integrity(tables, self.prefix.pages())),
            str(self.tree.check_integrity()),
            str(self.prefix.check_integrity()),
        ]
        if self.runner.cache.rooms is not None:
            lines.append(str(self.runner.cache.rooms.check_integrity()))
        for lane in self.loop.lanes.values():
            tokens = len(lane.record.tokens)
            if lane.computed > min(lane.table.length, tokens):
                counts = f"{lane.computed} computed positions, {lane.table.length} slots, {tokens} tokens"
                raise IntegrityError(f"Branch {lane.branch}: {counts}.")
            if lane.recording is not None:
                lane.recording.check_integrity()
        return lines

    # ---- missing rows -------------------------------------------------------------------------------------------
    # What a branch lacks is computed on a twin: an untraced fork with the same path, released afterwards. The branch itself may
    # be busy or closed meanwhile. What is computed becomes the branch's own, if it still lacks it.

    def kv(self, lane: Lane) -> Tensor:
        """A copy of the KV of all committed tokens [positions, layers, *kv_shape]. Missing KV is computed on a twin,
        since the branch itself may be busy or closed. Raises OutOfPages if there is no room."""
        known, committed = self._known_kv(lane)
        if known is not None:
            return known
        with self.made() as lanes, self.quiet():
            with defer_interrupt():
                lanes.append(twin := self.fork(lane, committed))
            twin.capture = twin.recording = None
            return self._computed(lane, twin, committed)

    def complete_rows(self, lane: Lane) -> None:
        """Mutates: computes the captured rows that committed tokens lack, on a twin as `kv` does. A fork with edits lacks some
        until its first request, and so does a branch that was cut back where Z had been read. Does nothing if the lane is
        released or keeps no rows. Raises OutOfPages if there is no room."""
        committed, following = self._committed(lane)
        if committed <= (committed if lane.recording is None else lane.recording.end):
            return
        with self.made() as lanes, self.quiet():
            with defer_interrupt():
                lanes.append(twin := self.fork(lane, committed + following))
            self._computed(lane, twin, committed)

    def final_rows(self, lanes: Sequence[Lane], first: Sequence[int], site: str) -> list[Tensor]:
        """The rows of one site from position first[i] on, pending tokens included. They are computed on twins, as by `kv`."""
        ends = [len(lane.record.tokens) for lane in lanes]
        return [rows[site] for rows in self.rows_between(lanes, first, ends, CaptureSpec((site,), last=site))]

    def rows_between(
        self, lanes: Sequence[Lane], first: Sequence[int], end: Sequence[int], capture: CaptureSpec
    ) -> list[Recording]:
        """The rows of positions [first[i], end[i]), whatever the lanes capture, with the bits that they have in a capture."""
        with self.made() as twins, self.quiet():
            with defer_interrupt():
                for lane, start, stop in zip(lanes, first, end, strict=True):
                    twins.append(twin := self.fork(lane, stop))
                    twin.capture, twin.recording = capture, Recording(start)
                    twin.recording.aliases, twin.recording.twins = self.aliases, self.twins(twin)
            self.compute(twins)
            rows = [twin.recording for twin in twins if twin.recording is not None]
            self.release_all(twins)
            return rows

    @reading
    def _committed(self, lane: Lane) -> tuple[int, bool]:
        """The number of committed tokens, none if the lane is released; and whether another token follows them."""
        if lane.branch not in self.loop.lanes:
            return 0, False
        states = lane.record.states
        waiting = TokenState.PENDING in states or TokenState.DRAFT in states
        committed = states.num_committed if waiting else len(states)
        return committed, committed < len(states)

    @reading
    def _known_kv(self, lane: Lane) -> tuple[Tensor | None, int]:
        """The KV of all committed tokens, None if some is missing; and the number of these tokens."""
        committed, _ = self._committed(lane)
        return (self.held_kv(lane) if lane.computed >= committed else None), committed

    def _computed(self, lane: Lane, twin: Lane, length: int) -> Tensor:
        """Compute the twin, and return `_taken_over`. Requests of other threads may take the pages of an idle twin before."""
        while True:
            self.compute([twin])
            if (kv := self._taken_over(lane, twin, length)) is not None:
                return kv

    @changing
    def _taken_over(self, lane: Lane, twin: Lane, length: int) -> Tensor | None:
        """The twin's KV of the first `length` tokens. Its pages and rows become the lane's, if the lane still lacks them.
        Releases the twin. None, and nothing changes, if the twin has lost its pages."""
        if twin.computed < length:
            return None
        twin.computed = length
        self.runner.pool.truncate(twin.table, length)
        kv, path = self.held_kv(twin), len(twin.record.tokens)
        if lane.branch in self.loop.lanes and self.tree.common_prefix(lane.branch, twin.branch) == path:
            if lane.computed < length:
                lane.table, twin.table, lane.computed = twin.table, lane.table, length
                for each in (lane, twin):
                    self.loop.reservations.note(each)
            if twin.recording is not None and lane.recording is not None and lane.recording.end < length:
                twin.recording.truncate(length)
                lane.recording.take_over(twin.recording)
        self.release(twin)
        return kv

    # ---- the trace ----------------------------------------------------------------------------------------------

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Branches that this thread makes within the block are not traced."""
        before = getattr(self._thread, "quiet", False)
        self._thread.quiet = True
        try:
            yield
        finally:
            self._thread.quiet = before

    def note(self, lane: Lane, event: str, edits: Edits = (), hooks: Hooks = (), **details: Any) -> None:
        """Mutates: adds an event of a lane, if a trace is kept. Of hooks only the number is kept: functions are not traced."""
        if self.trace is None or not lane.traced or (event == "fork" and not self.loop.lanes[details["child"]].traced):
            return
        if edits:
            details["edits"] = [edit.to_json() for edit in edits]
        if hooks:
            details["hooks"] = len(hooks)
        self.trace.add(event, branch=lane.branch, **details)

    def _listen(self, event: dict[str, Any]) -> None:
        """Trace what the loop does. What a fast-path request came to is kept: a replay could not compute it again."""
        if event["event"] in ("draft", "verdict", "finish"):
            lane, details = self.loop.lanes[event["branch"]], dict(event)
            if event["event"] == "finish" and not lane.exact:
                details["tokens"] = self.tree.path(lane.branch)
                ended = lane.record.finish_reason
                if ended != event["reason"] and ended is not None:  # its last token was seen before it was cancelled
                    details["ended"] = ended
            del details["branch"], details["event"]
            self.note(lane, event["event"], **details)


def _weakly(listen: "WeakMethod[Listener]") -> Listener:
    """The method, not held: the loop would keep the forest, and the forest the loop, until Python looks for cycles."""

    def told(event: dict[str, Any]) -> None:
        if (method := listen()) is not None:
            method(event)

    return told
