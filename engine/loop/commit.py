"""`Committer`: the transaction at the end of a turn. Tokens, KV and captured rows are committed together or not at all.

Rejected drafts are rolled back in the same transaction: they become a rejected branch, which keeps its rows or pages on demand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from replaylens.engine.loop.captured import PassRows
from replaylens.engine.loop.lane import Lane
from replaylens.engine.loop.turn import Turn
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.tree import ORDINARY, BranchTree, TokenState
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.recording import Chunk


@dataclass(frozen=True)
class Outcome:
    """What a turn decided: the first `accepted` drafts of `chain`, then `pending`, whose KV is not computed yet."""

    chain: int = 0
    accepted: int = 0
    pending: tuple[int, ...] = ()
    by_draft: bool = False
    """whether the pending token is an accepted draft, too: one that ends the request"""


class Committer:
    """Applies outcomes to tree, pages and recordings. A rejected branch that keeps rows or pages is added to `lanes`."""

    def __init__(self, runner: Runner, tree: BranchTree, lanes: dict[int, Lane]) -> None:
        self.runner, self.tree, self.lanes = runner, tree, lanes

    def commit(self, turn: Turn, outcome: Outcome, rows: "PassRows | Mapping[str, Tensor] | None") -> None:
        """Mutates tree, lane, pages and recording. Precondition: the turn's rows are computed.

        rows  what the pass captured; after a burst, which rejects nothing, the rows of the turn's kept positions
        """
        followed = turn.chains[outcome.chain]
        num_accepted = {i: 0 for i, chain in enumerate(turn.chains) if i != outcome.chain and chain}
        if len(followed) > outcome.accepted:
            num_accepted[outcome.chain] = outcome.accepted
        # Everything that can fail comes first: rows and lens readouts are taken while nothing has changed.
        captured = self._captured(turn, outcome, rows)
        cut_off = {i: self._cut_off(turn, i, n, rows) for i, n in num_accepted.items()}
        turn.closed = True
        self.drop_drafts(turn)
        self._accept_rows(turn)
        for i, n in num_accepted.items():
            self._reject(turn, i, n, cut_off[i])
        branch = turn.job.lane.branch
        if outcome.accepted:
            self.tree.append(branch, followed[: outcome.accepted], TokenState.DRAFT)
            self.tree.mark(branch, turn.end, turn.end + outcome.accepted, TokenState.ACCEPTED)
        if outcome.pending:  # a finished branch refuses even an empty append
            self.tree.append(branch, outcome.pending, TokenState.PENDING)
        self._accept_kv(turn, outcome)
        if captured is not None and turn.job.lane.recording is not None:
            turn.job.lane.recording.add(*captured)

    def abandon(self, turn: Turn) -> None:
        """Undo a turn whose pass failed: the branch is as it was before. Mutates tree, lane and pages."""
        lane, turn.job.window_open = turn.job.lane, None
        self.drop_drafts(turn)
        self._release_forks(turn)
        lane.computed = min(lane.computed, turn.start)
        self.runner.pool.truncate(lane.table, lane.computed)
        turn.closed = True

    def drop_drafts(self, turn: Turn) -> None:
        """Cut the turn's drafts from the tree. Mutates the tree only."""
        if turn.complete and len(self.tree.branch(turn.job.lane.branch).tokens) > turn.end:
            self.tree.rollback(turn.job.lane.branch, turn.end)  # of an incomplete turn, the rest is prompt, not drafts

    def _accept_rows(self, turn: Turn) -> None:
        branch = turn.job.lane.branch
        states, first = self.tree.branch(branch).states, turn.start
        while first < turn.end and states[first] not in (TokenState.PENDING, TokenState.DRAFT):
            first += 1
        self.tree.mark(branch, first, turn.end, TokenState.ACCEPTED)

    def _accept_kv(self, turn: Turn, outcome: Outcome) -> None:
        lane, pool = turn.job.lane, self.runner.pool
        if outcome.chain:  # a sibling chain is followed: its table becomes the branch's
            turn.tables[0], turn.tables[outcome.chain] = turn.tables[outcome.chain], turn.tables[0]
            lane.table = turn.tables[0]
        lane.computed = turn.end + outcome.accepted
        lane.exact = lane.exact and turn.job.exact
        if not lane.exact:
            self.tree.uncertify(lane.branch, turn.start, ORDINARY)
        pool.truncate(lane.table, lane.computed)
        self._release_forks(turn)
        self._seal(lane, turn.start)

    def _seal(self, lane: Lane, start: int) -> None:
        """In debug mode, record what the lane's KV from `start` on holds."""
        if self.runner.cache.chain is not None:
            tokens = self.tree.branch(lane.branch).tokens[: lane.computed]
            self.runner.cache.seal(tokens, self.runner.pool.slots(lane.table, 0, lane.computed), start)

    def _release_forks(self, turn: Turn) -> None:
        for table in turn.tables[1:]:
            self.runner.pool.release(table)

    def first_to_record(self, turn: Turn) -> int:
        """Where recording goes on: computing KV again leaves recorded rows alone."""
        recording = turn.job.lane.recording
        assert recording is not None
        return max(turn.start, recording.end - recording.open_end)

    def _captured(
        self, turn: Turn, outcome: Outcome, rows: "PassRows | Mapping[str, Tensor] | None"
    ) -> tuple[Chunk, bool] | None:
        """(rows, open end) of the committed positions. None: nothing to record."""
        job, lane = turn.job, turn.job.lane
        if lane.capture is None or lane.recording is None or rows is None:
            return None
        known = self.tree.branch(lane.branch).tokens  # a complete turn's may end in drafts; a part of a prompt's are final
        added = [*turn.chains[outcome.chain][: outcome.accepted], *outcome.pending]
        length = turn.end + len(added) if turn.complete else len(known)
        computed, start = turn.end + outcome.accepted, self.first_to_record(turn)
        end = min(computed, length - lane.capture.lag)
        if isinstance(rows, PassRows) and job.remaining == 0 and computed == length:
            end = computed  # no token follows yet: the last row's end is open. After a burst, a pass reads that row
        if end <= start:
            return None
        open_end = end == length and lane.capture.lag > 0
        if not isinstance(rows, PassRows):
            return Chunk(start, end, self.kept(lane, start, end), rows), open_end
        follows = known[start + 1 : end + 1]
        if turn.complete:
            follows = [*known[start + 1 : turn.end], *added[max(0, start + 1 - turn.end) :]]
        emitted = [*follows, -1][: end - start]
        return rows.chunk(lane, turn.segments[outcome.chain], start, emitted), open_end

    def kept(self, lane: Lane, start: int, end: int) -> Sequence[int]:
        """The positions of [start, end) that the lane captures."""
        assert lane.capture is not None
        return lane.capture.positions.kept(start, end, self.tree.branch(lane.branch).root_length)

    def _cut_off(
        self, turn: Turn, index: int, num_accepted: int, rows: "PassRows | Mapping[str, Tensor] | None"
    ) -> Chunk | None:
        """The rows of a chain's rejected drafts. None: they are not kept."""
        lane, chain = turn.job.lane, turn.chains[index]
        if lane.recording is None or lane.capture is None or not lane.capture.rejected or not isinstance(rows, PassRows):
            return None
        return rows.chunk(lane, turn.segments[index], turn.end + num_accepted, [*chain[num_accepted + 1 :], -1])

    def _reject(self, turn: Turn, index: int, num_accepted: int, rows: Chunk | None) -> None:
        """Make chain[num_accepted:] a rejected branch with its own canonical rows and, if the job keeps them, its pages."""
        job, lane, chain = turn.job, turn.job.lane, turn.chains[index]
        base = turn.end + num_accepted
        self.tree.append(lane.branch, chain, TokenState.DRAFT)
        self.tree.mark(lane.branch, turn.end, base, TokenState.ACCEPTED)
        kept = self.tree.rollback(lane.branch, base, keep=True)
        assert kept is not None  # chain[num_accepted:] is not empty
        self.tree.rollback(lane.branch, turn.end)
        job.rejected.append(kept)
        other = Lane(kept, PageTable(), exact=lane.exact, edits=lane.edits, hooks=lane.hooks, thoughts=lane.thoughts)
        other.capture, other.traced = lane.capture, lane.traced
        other.template = lane.recording.like(base=base) if lane.recording is not None else None
        if rows is not None and other.template is not None:
            other.recording = other.template.like(base=base)
            other.recording.add(rows)
        if job.keep_pages:
            other.computed = turn.end + len(chain)
            other.table = self.runner.pool.fork(turn.tables[index], other.computed)
            self._seal(other, turn.start)
        if other.recording is not None or job.keep_pages:
            self.lanes[kept] = other
            lane.rejected.append(kept)
