"""`Turn`: what one job does in one step of the loop."""

from dataclasses import dataclass, field

from replaylens.engine.loop.lane import Job
from replaylens.engine.memory.pages import PageTable


@dataclass(eq=False)
class Turn:
    """Rows [start, end) of the job's branch, then drafts after them.

    `tables[i]` has private room for the rows and chain i; tables[0] is the lane's own, the others belong to the turn
    and are released when it ends.
    """

    job: Job
    start: int
    rows: list[int]
    complete: bool
    """whether the rows reach the branch's last token, so that something can be said about the next"""
    num_drafts: int = 0
    burst: int = 0
    """direct steps that the device takes alone; 0: an ordinary pass"""
    tables: list[PageTable] = field(default_factory=list)
    chains: list[list[int]] = field(default_factory=lambda: [[]])
    segments: list[int] = field(default_factory=list)
    """index of each chain's segment in the packed pass"""
    closed: bool = False
    """whether it was committed or abandoned"""

    @property
    def end(self) -> int:
        """The position after the last row; the first draft's position."""
        return self.start + len(self.rows)

    @property
    def deciding(self) -> bool:
        """Whether the pass shall say what comes next."""
        return self.complete and self.job.remaining > 0
