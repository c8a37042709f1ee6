"""`Loop`: admit, draft, verify, commit or roll back. One `step` serves all jobs for which there are rows and pages.

The package's docstring (`engine/loop/__init__.py`) walks through one turn.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from replaylens.engine.errors import EngineError, InternalError
from replaylens.engine.loop.admission import Admission
from replaylens.engine.loop.commit import Committer, Endings, Outcome, PassRows, Verdict, drafted, judged, overruled
from replaylens.engine.loop.drafters import Chains, DraftCall, Drafter
from replaylens.engine.loop.lane import Job, Lane, Turn
from replaylens.engine.loop.queue import JobQueue, Listener
from replaylens.engine.loop.reservations import Reservations
from replaylens.engine.memory.prefix import PrefixIndex
from replaylens.engine.memory.tree import BranchTree, TokenState
from replaylens.engine.model.text import Text
from replaylens.engine.passes.batch import Segment, finite, not_finite
from replaylens.engine.passes.lens import KnownLenses
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.capture import PassTap
from replaylens.engine.request.scores import Scorer, score

if TYPE_CHECKING:
    from replaylens.engine.passes.bursts import BurstCapture, BurstRequest, Bursts

# ---- packer ----------------------------------------------------------------------------------------------------------
# `Packer`: what a turn brings into a pass, a burst or a drafter's call. It changes nothing.


class Packer:
    """Reads turns: their rows, the sites to keep of them, their place in a burst."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def segments(self, turn: Turn) -> list[Segment]:
        """The rows of a turn in a pass: those of its next draft, or its own followed by each of its chains."""
        lane, window = turn.job.lane, turn.job.window_open
        if turn.drafting and window is not None:
            path = lane.record.past.path(turn.end)
            start, tokens = window.rows(path, lane.table, self.runner.pool.page_size)
            return [Segment(lane.table, start, tokens, 1, lane.edits, lane.hooks)]
        pairs = zip(turn.tables, turn.chains, strict=False)
        return [
            Segment(table, turn.start, turn.rows + chain, len(chain) + 1 if turn.deciding else 0, lane.edits, lane.hooks)
            for table, chain in pairs
        ]

    def needed(self, turn: Turn) -> frozenset[str]:
        """The sites that a pass must keep for a turn. Empty if it captures none of the turn's positions."""
        lane = turn.job.lane
        if lane.capture is None or lane.recording is None:
            return frozenset()
        longest = turn.end + max(map(len, turn.chains))
        return lane.capture.needed() if lane.kept(turn.start, longest) else frozenset()

    def scored(self, turns: Sequence[Turn]) -> list[Scorer]:
        """Whose scores a pass must have for some turns."""
        specs = (turn.job.lane.capture for turn in turns if self.needed(turn))
        return list(dict.fromkeys(each for spec in specs if spec is not None for each in spec.scored))

    def place(self, turn: Turn, steps: int) -> "BurstRequest":
        """A turn's row in a burst: the last token of its path, or of its window's drafts."""
        from replaylens.engine.passes.bursts import BurstRequest  # needs triton, as everything on the device does

        job = turn.job
        if not turn.drafting:
            wanted = self._wanted(turn, steps)
            return BurstRequest(turn.rows[-1], turn.start, turn.tables[0], job.sampling, job.lane.edits, wanted)
        (row,) = self.segments(turn)
        return BurstRequest(row.tokens[-1], row.start, row.table, job.sampling, job.lane.edits)

    def _wanted(self, turn: Turn, steps: int) -> "BurstCapture | None":
        """What a turn captures in a burst; None: nothing."""
        from replaylens.engine.passes.bursts import BurstCapture

        spec, lane = turn.job.lane.capture, turn.job.lane
        if spec is None or lane.recording is None:
            return None
        kept = lane.kept(turn.first_to_record, turn.start + steps)
        if isinstance(kept, range):
            return BurstCapture(spec, range(kept.start - turn.start, kept.stop - turn.start, kept.step))
        return BurstCapture(spec, [position - turn.start for position in kept])

    def has_one_row(self, turn: Turn) -> bool:
        """Whether the turn's pass would have a single row. A window whose pages were replaced runs all its rows again."""
        window = turn.job.window_open
        if not turn.drafting or window is None:
            return True
        return window.num_rows(turn.job.lane.table, self.runner.pool.page_size) == 1

    def call(self, turn: Turn) -> DraftCall:
        """What the turn's drafter is asked. Recorded chains, of a trace or of the job's window, are proposed as they are."""
        job, record = turn.job, turn.job.lane.record
        recorded = job.forced_drafts.get(turn.end) if job.forced_drafts is not None else None
        if job.window_open is not None:
            recorded = [job.window_open.chain]
        return DraftCall(
            path=record.past.path(len(record.tokens)),
            num_prompt=record.root_length,
            count=turn.num_drafts,
            sampling=job.sampling,
            tables=turn.tables,
            branch=record.id,
            recorded=recorded,
            edits=job.lane.edits,
            hooks=job.lane.hooks,
        )

    def check_canary(self, turn: Turn) -> None:
        """In debug mode, check that the KV the pass will read is the branch's own."""
        if self.runner.cache.chain is not None:
            tokens = turn.job.lane.record.tokens[: turn.start]
            for table in turn.tables:
                self.runner.cache.check(tokens, self.runner.pool.slots(table, 0, turn.start))
            if turn.job.lane.recording is not None:
                turn.job.lane.recording.check_integrity()


# ---- loop ------------------------------------------------------------------------------------------------------------


class Loop:
    """Serves jobs step by step, all admitted ones together."""

    def __init__(
        self,
        runner: Runner,
        tree: BranchTree,
        prefix: PrefixIndex,
        drafters: dict[str, Drafter],
        text: Text,
        max_rows: int,
        lone_rows: int,
        lenses: KnownLenses,
    ) -> None:
        self.runner, self.tree, self.drafters, self.max_rows, self.lenses = runner, tree, drafters, max_rows, lenses
        self.lanes: dict[int, Lane] = {}
        self.queue = JobQueue(runner, tree, prefix, drafters, max_rows)
        self.committer = Committer(runner, tree, self.lanes, self.queue.changed)
        self.packer, self.endings = Packer(runner), Endings(text)
        self.reservations = Reservations(runner, prefix, self.lanes, self.queue)
        self.admission = Admission(runner, drafters, self.queue, self.reservations, max_rows, lone_rows)
        self.bursts: Bursts | None = None
        """direct decode steps on the device alone; None on a CPU"""

    @property
    def jobs(self) -> list[Job]:
        """The unfinished jobs, oldest first."""
        return self.queue.jobs

    @property
    def listeners(self) -> list[Listener]:
        """They are called with every event. Append to it to listen."""
        return self.queue.listeners

    def submit(self, job: Job) -> None:
        """Queue a job for `step`; see `JobQueue.submit`."""
        self.queue.submit(job)

    def step(self) -> None:
        """One turn for every admitted job. A job's failure ends no other job."""
        turns: list[Turn] = []
        try:
            turns += self.admit()
            self.draft(turns)
            for exact, mine in self._by_arithmetic([turn for turn in turns if not turn.closed]):
                direct = {turn: None for turn in mine if turn.burst and self.packer.has_one_row(turn)}
                if direct:
                    self.burst(list(direct), exact)
                if others := [turn for turn in mine if turn not in direct]:
                    self.verify(others, exact)
        except BaseException as error:  # an interrupt or a bug: no draft may remain and pass for a committed token
            for turn in turns:
                if not turn.closed:
                    self.committer.abandon(turn)
            if isinstance(error, Exception):  # any job may be the cause; an interrupt is not the jobs' fault
                self.queue.end_all(error)
            raise
        self.queue.forget_done()

    def _by_arithmetic(self, turns: list[Turn]) -> list[tuple[bool, list[Turn]]]:
        """(whether canonical, turns that run together). Drafts and ordinary requests share the fast batch. On a device both
        arithmetics take equally long, so ordinary requests join a canonical pass that is the only one: two would take twice as
        long."""
        fast = [turn for turn in turns if turn.drafting or not turn.job.exact]
        exact = [turn for turn in turns if turn.job.exact and not turn.drafting]
        if self.bursts is not None and exact and not any(turn.drafting for turn in turns):
            return [(True, turns)]
        return [(True, exact), (False, fast)]

    def admit(self) -> list[Turn]:
        """Turns for as many jobs as rows and pages allow; see `Admission`."""
        self.queue.forget_done()
        return self.admission.turns(alone=self.bursts is not None)

    def draft(self, turns: list[Turn]) -> list[Turn]:
        """Fill in the chains of turns that verify drafts. Draft KV goes to slots that the verification overwrites."""
        for name in sorted({turn.job.drafter for turn in turns if turn.num_drafts and not turn.drafting}):
            mine = [turn for turn in turns if turn.num_drafts and not turn.drafting and turn.job.drafter == name]
            for turn, chains in zip(mine, self._propose(name, mine), strict=True):
                if turn.closed:
                    continue
                turn.job.window_open = None
                turn.chains = _verifiable(chains, turn.num_drafts, len(turn.tables), self.runner.model.config.vocab_size)
                self.tree.append(turn.job.lane.branch, turn.chains[0], TokenState.DRAFT)
                self.queue.notify("draft", turn.job, at=turn.end, chains=turn.chains, after=turn.rows[-1])
        return turns

    def _propose(self, name: str, turns: list[Turn]) -> list[Chains]:
        """The drafter's chains. An EngineError costs a turn its drafts, never the request; listeners are notified. Any other
        error, of the drafter or of a hook function in its pass, ends the one request that caused it."""
        try:
            return self.drafters[name].propose([self.packer.call(turn) for turn in turns])
        except Exception as error:
            if len(turns) > 1:
                return [self._propose(name, [turn])[0] for turn in turns]
            if not isinstance(error, EngineError):
                self._abandon(turns, error)
                return [[[]]]
            self.queue.notify("draft_failed", turns[0].job, drafter=name, error=f"{type(error).__name__}: {error}")
            return [[[]]]

    def verify(self, turns: list[Turn], exact: bool) -> None:
        """One pass over the rows and drafts of all turns. Then each turn is judged and committed on its own. In the fast batch,
        turns that draft gain a draft and commit nothing."""
        segments: list[Segment] = []
        for turn in turns:
            own = self.packer.segments(turn)
            turn.segments = list(range(len(segments), len(segments) + len(own)))
            segments += own
        drafting, committing = [turn for turn in turns if turn.drafting], [turn for turn in turns if not turn.drafting]
        tap = PassTap(frozenset().union(*(self.packer.needed(turn) for turn in committing)))
        try:
            for turn in turns:
                self.packer.check_canary(turn)
            with self._timed(segments, exact, bool(drafting)):
                result = self.runner.exact(segments, tap) if exact else self.runner.fast(segments, tap)
            score(tap.values, self.packer.scored(committing), self.runner.kernels)
            rows = PassRows(self.runner, self.lenses, tap, result)
            finite(result.residual[: result.batch.num_rows], "activations")
            verdicts = judged([turn for turn in committing if turn.deciding], result)
            chosen = drafted(drafting, result)
            rows.send(committing)  # last: on the bus, what the lines above read would queue behind it
            rows.read_ahead(committing, verdicts)
        except Exception as error:  # of the engine, or of a hook function
            self._isolate(turns, exact, error)
            return
        for turn, token in chosen.items():
            self._add_drafts(turn, [token])
        for turn in committing:
            self._conclude(turn, rows, verdicts.get(turn))

    def _timed(self, segments: list[Segment], exact: bool, drafting: bool) -> AbstractContextManager[None]:
        """Measures a pass for the planner. Of a fast batch with drafts it wants to know the cost of one request's row."""
        if drafting:
            return self.admission.planner.timing("draft", len(segments))
        return self.admission.planner.timing("exact" if exact else "fast", sum(len(s.tokens) for s in segments))

    def burst(self, turns: list[Turn], exact: bool) -> None:
        """Several decode steps on the device. If `exact`, its choices are canonical and need no verification. If not, those of
        turns that draft go into their windows."""
        assert self.bursts is not None
        steps = min(turn.burst for turn in turns)
        chosen, kept = self.bursts.run([self.packer.place(turn, steps) for turn in turns], steps, exact)
        for turn, tokens, rows in zip(turns, chosen, kept, strict=True):
            if max(tokens) >= self.runner.model.config.vocab_size:
                if turn.drafting:
                    self._stop_drafting(turn, not_finite("activations"))
                else:
                    self._abandon([turn], not_finite("activations"))
                continue
            if turn.drafting:
                self._add_drafts(turn, tokens)
                continue
            turn.chains = [tokens[:-1]]
            outcome = self.endings.cut(turn, Verdict(0, len(tokens) - 1, tokens[-1]), drafted=0)
            turn.chains = [tokens[: outcome.accepted]]  # tokens after the end are dropped: they are not rejected drafts
            self.committer.commit(turn, outcome, rows if rows is not None or turn.job.lane.capture is None else {})
            self._finish_turn(turn)

    def _add_drafts(self, turn: Turn, tokens: Sequence[int]) -> None:
        """Mutates: the window has more drafts. What follows a draft that ends the sequence is dropped."""
        window, lane = turn.job.window_open, turn.job.lane
        assert window is not None
        for token in tokens:
            if not window.full:
                window.add(token, turn.job.sampling.stop_tokens, lane.table, self.runner.pool.page_size)
        turn.closed = True

    def _isolate(self, turns: list[Turn], exact: bool, error: Exception) -> None:
        """After a failed pass: run each turn alone, then without its drafts, to find the one whose rows fail."""
        if len(turns) > 1:
            for turn in turns:
                self.verify([turn], exact)
        elif turns[0].drafting and isinstance(error, EngineError):
            self._stop_drafting(turns[0], error)
        elif any(turns[0].chains):
            self.committer.drop_drafts(turns[0])
            turns[0].chains = [[]]
            self.verify(turns, exact)
        else:
            self._abandon(turns, error)

    def _stop_drafting(self, turn: Turn, error: EngineError) -> None:
        """The fast path failed: what it drafted so far is verified in the next step. This costs the request no token."""
        assert turn.job.window_open is not None
        turn.job.window_open.ended = turn.closed = True
        self.queue.notify("draft_failed", turn.job, drafter=turn.job.drafter, error=f"{type(error).__name__}: {error}")

    def _conclude(self, turn: Turn, rows: PassRows, verdict: Verdict | None) -> None:
        """Commit one turn, with its verdict if it was deciding. One that cannot be committed is abandoned."""
        job, before = turn.job, (turn.job.generated, turn.job.finish_reason)
        try:
            self._commit(turn, rows, verdict)
        except BaseException as error:
            if turn.closed:  # half committed
                self.queue.end(job, InternalError(f"Branch {job.lane.branch} was interrupted within a commit. Release it."))
                raise
            job.generated, job.finish_reason = before
            if not isinstance(error, Exception):
                raise
            self._abandon([turn], error)

    def _commit(self, turn: Turn, rows: PassRows, verdict: Verdict | None) -> None:
        """Commit a turn and report the verdict of its drafts."""
        job, outcome, void, drafted = turn.job, Outcome(), list[int](), any(turn.chains)
        if verdict is not None:
            if self.queue.listeners and drafted:
                void = overruled(turn, verdict, rows.result)
            outcome = self.endings.cut(turn, verdict)
        rejected_before = len(job.rejected)
        self.committer.commit(turn, outcome, rows)
        if drafted:
            rejected, ended = job.rejected[rejected_before:], outcome.by_draft
            said: dict[str, Any] = {"chain": outcome.chain, "accepted": outcome.accepted + ended}
            said["pending"] = () if ended else outcome.pending
            if void and rejected:
                said["overruled"] = void
            self.queue.notify("verdict", job, **said, rejected=rejected)
        self._finish_turn(turn)

    def _finish_turn(self, turn: Turn) -> None:
        """After a commit. Mutates: ends the branch, the job or both if that was their last token."""
        job = turn.job
        if job.finish_reason in ("eos", "stop") and not job.lane.record.finish_reason:
            self.tree.finish(job.lane.branch, job.finish_reason)
        self.queue.close_if_done(job)
        if not job.done and job.cancel_at is not None and job.generated >= job.cancel_at:
            self.queue.end(job)

    def _abandon(self, turns: list[Turn], error: Exception) -> None:
        """After a failed pass: nothing of it is committed, the branches are as before, and the jobs end with the error."""
        for turn in turns:
            self.committer.abandon(turn)
            self.queue.end(turn.job, error)


def _verifiable(chains: Chains, most: int, width: int, vocab: int) -> Chains:
    """The part of a proposal that can be verified: at most `width` chains with different first tokens, each at most `most`
    long and cut before the first id outside the vocabulary."""
    by_first: dict[int, list[int]] = {}
    for chain in chains:
        known = list(takewhile(lambda token: 0 <= token < vocab, chain[:most]))
        if known:
            by_first.setdefault(known[0], known)
    return list(by_first.values())[:width] or [[]]
