"""`Committer`: the transaction at the end of a turn. Tokens, KV and captured rows are accepted together, or not at all."""

from dataclasses import dataclass

from replaylens.engine import readout
from replaylens.engine.branches import BranchTree, TokenState
from replaylens.engine.capture import HEAD_SITES, PassTap, Rows
from replaylens.engine.lane import Lane
from replaylens.engine.pages import PageTable
from replaylens.engine.runner import PassResult, Runner
from replaylens.engine.tuned_lens import TunedLens
from replaylens.engine.turn import Turn


@dataclass(frozen=True)
class Outcome:
    """What a turn decided: follow `chain`, of which `accepted` drafts stand; then `pending`, whose KV is not computed."""

    chain: int = 0
    accepted: int = 0
    pending: tuple[int, ...] = ()


class Committer:
    """Carries outcomes into tree, pages and recordings. A rejected branch that keeps something gets an entry in `lanes`."""

    def __init__(self, runner: Runner, tree: BranchTree, lanes: dict[int, Lane]) -> None:
        self.runner, self.tree, self.lanes = runner, tree, lanes
        self.lenses: dict[str, TunedLens] = {}
        """tuned lenses that captures may ask for, by digest"""

    def commit(self, turn: Turn, outcome: Outcome, tap: PassTap, result: PassResult | None) -> None:
        """Mutates tree, lane, pages and recording. Precondition: the turn's rows have been computed.

        `result` is the pass that did it; None after a burst, which captures and rejects nothing.
        """
        turn.closed = True
        self.drop_drafts(turn)
        self._accept_rows(turn)
        for i, chain in enumerate(turn.chains):
            if i != outcome.chain and chain:
                self._reject(turn, i, 0, tap, result)
        followed = turn.chains[outcome.chain]
        if len(followed) > outcome.accepted:
            self._reject(turn, outcome.chain, outcome.accepted, tap, result)
        branch = turn.job.lane.branch
        if outcome.accepted:
            self.tree.append(branch, followed[: outcome.accepted], TokenState.DRAFT)
            self.tree.mark(branch, turn.end, turn.end + outcome.accepted, TokenState.ACCEPTED)
        if outcome.pending:  # a finished branch takes no tokens, not even none
            self.tree.append(branch, outcome.pending, TokenState.PENDING)
        self._accept_kv(turn, outcome)
        self._record(turn, outcome, tap, result)

    def abandon(self, turn: Turn) -> None:
        """Undo a turn whose pass failed: the branch stands where it stood. Mutates tree, lane and pages."""
        lane = turn.job.lane
        self.drop_drafts(turn)
        self._release_forks(turn)
        lane.computed = min(lane.computed, turn.start)
        self.runner.pool.truncate(lane.table, lane.computed)
        turn.closed = True

    def drop_drafts(self, turn: Turn) -> None:
        """Cut the turn's drafts from the tree. Mutates the tree only."""
        if turn.complete and len(self.tree.branch(turn.job.lane.branch).tokens) > turn.end:
            self.tree.rollback(turn.job.lane.branch, turn.end)  # what follows the rows of a chunk are no drafts

    def _accept_rows(self, turn: Turn) -> None:
        branch = turn.job.lane.branch
        states = self.tree.branch(branch).states
        waiting = (TokenState.PENDING, TokenState.DRAFT)
        first = next((p for p in range(turn.start, turn.end) if states[p] in waiting), turn.end)
        self.tree.mark(branch, first, turn.end, TokenState.ACCEPTED)

    def _accept_kv(self, turn: Turn, outcome: Outcome) -> None:
        lane, pool = turn.job.lane, self.runner.pool
        if outcome.chain:  # a sibling was right: its table becomes the branch's
            turn.tables[0], turn.tables[outcome.chain] = turn.tables[outcome.chain], turn.tables[0]
            lane.table = turn.tables[0]
        lane.computed = turn.end + outcome.accepted
        lane.exact = lane.exact and turn.job.exact
        pool.truncate(lane.table, lane.computed)
        self._release_forks(turn)
        tokens = self.tree.branch(lane.branch).tokens[: lane.computed]
        self.runner.cache.seal(tokens, pool.slots(lane.table, 0, lane.computed), turn.start)

    def _release_forks(self, turn: Turn) -> None:
        for table in turn.tables[1:]:
            self.runner.pool.release(table)

    def _record(self, turn: Turn, outcome: Outcome, tap: PassTap, result: PassResult | None) -> None:
        """Captured rows of the committed positions, but for those at the tip whose successor must be known first."""
        job, lane = turn.job, turn.job.lane
        if lane.capture is None or lane.recording is None or result is None:
            return
        tokens = self.tree.branch(lane.branch).tokens
        ended = job.final and job.remaining == 0 and lane.computed == len(tokens)
        end = lane.computed if ended else min(lane.computed, len(tokens) - lane.capture.lag)
        start = max(turn.start, lane.recording.end - lane.recording.open_end)  # while KV is computed again, rows stay
        if end > start:
            first = result.batch.row(turn.segments[outcome.chain], start)
            emitted = [*tokens[start + 1 : end + 1], -1][: end - start]
            open_end = end == len(tokens) and lane.capture.lag > 0
            lane.recording.append(start, self._rows(lane, tap, first, emitted), open_end)

    def _reject(self, turn: Turn, index: int, stood: int, tap: PassTap, result: PassResult | None) -> None:
        """File chain[stood:] as a rejected branch, with its own canonical rows and, where asked, its pages."""
        job, lane, chain = turn.job, turn.job.lane, turn.chains[index]
        self.tree.append(lane.branch, chain, TokenState.DRAFT)
        self.tree.mark(lane.branch, turn.end, turn.end + stood, TokenState.ACCEPTED)
        kept = self.tree.rollback(lane.branch, turn.end + stood, keep=True)
        assert kept is not None  # chain[stood:] is not empty
        self.tree.rollback(lane.branch, turn.end)
        job.rejected.append(kept)
        other = Lane(kept, PageTable(), exact=lane.exact, edits=lane.edits, hooks=lane.hooks, thoughts=lane.thoughts)
        if lane.recording is not None and lane.capture is not None and lane.capture.rejected and result is not None:
            first = result.batch.row(turn.segments[index], turn.end + stood)
            other.capture, other.recording = lane.capture, lane.recording.like(base=turn.end + stood)
            other.recording.append(turn.end + stood, self._rows(lane, tap, first, [*chain[stood + 1 :], -1]))
        if job.keep_rejected:
            other.computed = turn.end + len(chain)
            other.table = self.runner.pool.fork(turn.tables[index], other.computed)
            slots = self.runner.pool.slots(other.table, 0, other.computed)
            self.runner.cache.seal(self.tree.branch(kept).tokens, slots, turn.start)
        if other.recording is not None or job.keep_rejected:
            self.lanes[kept] = other

    def _rows(self, lane: Lane, tap: PassTap, first: int, emitted: list[int]) -> Rows:
        """Packed rows [first, first + len(emitted)) as the lane's capture wants them."""
        spec, end = lane.capture, first + len(emitted)
        assert spec is not None
        rows = tap.rows([site for site in spec.sites if site not in HEAD_SITES], first, end)
        if head := [site for site in spec.sites if site in HEAD_SITES]:
            rows |= self.runner.head(tap.rows([spec.last], first, end)[spec.last], head)
        if spec.lens is not None:
            residuals = tap.rows(spec.lens.sites, first, end)
            tuned = self.lenses[spec.lens.tuned] if spec.lens.tuned else None
            rows |= readout.read(spec.lens, self.runner, residuals, emitted, tuned)
        return rows
