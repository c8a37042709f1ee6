"""`Turn`: what one job does in one step of the loop."""

from dataclasses import dataclass, field

from replaylens.engine.loop.lane import Job
from replaylens.engine.memory.pages import PageTable


@dataclass(eq=False)
class Turn:
    """Rows [start, end) of the job's branch, followed by sibling chains of drafts.

    `tables[i]` has private room for the rows and chain i. tables[0] is the lane's own; the others belong to the turn and are
    released when it ends.
    """

    job: Job
    start: int
    rows: list[int]
    complete: bool
    """whether the rows reach the branch's last token, so that the next one can be chosen"""
    num_drafts: int = 0
    drafting: bool = False
    """whether it takes one row of the fast batch, for the next draft of the job's open window, and decides nothing"""
    burst: int = 0
    """direct decode steps that the device takes on its own; 0: an ordinary pass"""
    tables: list[PageTable] = field(default_factory=list)
    chains: list[list[int]] = field(default_factory=lambda: [[]])
    segments: list[int] = field(default_factory=list)
    """the index of each chain's segment in the packed pass"""
    closed: bool = False
    """whether the turn is committed or abandoned"""

    @property
    def end(self) -> int:
        """The position after the last row; the first draft's position."""
        return self.start + len(self.rows)

    @property
    def deciding(self) -> bool:
        """Whether the pass decides what comes next."""
        return self.complete and self.job.remaining > 0 and not self.drafting
