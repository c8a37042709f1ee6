"""`Packer`: what a turn brings into a pass, a burst or a drafter's call. It changes nothing."""

from typing import TYPE_CHECKING

from replaylens.engine.loop.commit import Committer
from replaylens.engine.loop.drafters import DraftCall
from replaylens.engine.loop.turn import Turn
from replaylens.engine.memory.tree import BranchTree
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.runner import Runner

if TYPE_CHECKING:
    from replaylens.engine.passes.bursts import Place, Wanted


class Packer:
    """Reads turns: their rows, the sites to keep of them, their place in a burst."""

    def __init__(self, runner: Runner, tree: BranchTree, committer: Committer) -> None:
        self.runner, self.tree, self.committer = runner, tree, committer

    def segments(self, turn: Turn) -> list[Segment]:
        """The rows of a turn in a pass: those of its next draft, or its own followed by each of its chains."""
        lane, window = turn.job.lane, turn.job.window_open
        if turn.drafting and window is not None:
            path = self.tree.branch(lane.branch).past.path(turn.end)
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
        return lane.capture.needed() if self.committer.kept(lane, turn.start, longest) else frozenset()

    def place(self, turn: Turn, steps: int) -> "Place":
        """A turn's row in a burst: the last token of its path, or of its window's drafts."""
        from replaylens.engine.passes.bursts import Place  # needs triton, as everything on the device does

        job = turn.job
        if not turn.drafting:
            wanted = self._wanted(turn, steps)
            return Place(turn.rows[-1], turn.start, turn.tables[0], job.sampling, job.lane.edits, wanted)
        (row,) = self.segments(turn)
        return Place(row.tokens[-1], row.start, row.table, job.sampling, job.lane.edits)

    def _wanted(self, turn: Turn, steps: int) -> "Wanted | None":
        """What a turn captures in a burst; None: nothing."""
        from replaylens.engine.passes.bursts import Wanted

        spec, lane = turn.job.lane.capture, turn.job.lane
        if spec is None or lane.recording is None:
            return None
        kept = self.committer.kept(lane, self.committer.first_to_record(turn), turn.start + steps)
        return Wanted(spec, [position - turn.start for position in kept])

    def has_one_row(self, turn: Turn) -> bool:
        """Whether the turn's pass would have a single row. A window whose pages were replaced runs all its rows again."""
        window = turn.job.window_open
        if not turn.drafting or window is None:
            return True
        return window.num_rows(turn.job.lane.table, self.runner.pool.page_size) == 1

    def call(self, turn: Turn) -> DraftCall:
        """What the turn's drafter is asked. Recorded chains, of a trace or of the job's window, are proposed as they are."""
        job, record = turn.job, self.tree.branch(turn.job.lane.branch)
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
            tokens = self.tree.branch(turn.job.lane.branch).tokens[: turn.start]
            for table in turn.tables:
                self.runner.cache.check(tokens, self.runner.pool.slots(table, 0, turn.start))
            if turn.job.lane.recording is not None:
                turn.job.lane.recording.check_integrity()
