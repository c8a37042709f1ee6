"""`OutcomeCounts`: how often each outcome came of the rollouts from each fork position."""

from dataclasses import dataclass

import numpy as np

from replaylens.engine.errors import BadRequest


@dataclass(frozen=True, eq=False)
class OutcomeCounts:
    """Counts of outcomes of rollouts. Row i: rollouts from the prefix before the unit (sentence or token) that starts there."""

    positions: list[int]
    """token positions of the forks, ascending"""
    outcomes: list[str]
    counts: np.ndarray
    """int64 [positions, outcomes]"""
    texts: list[str]
    """the text of the unit that starts at each position"""
    probabilities: np.ndarray | None = None
    """float64 [positions, outcomes]: mean probability of each outcome over the rollouts, where answers are read as
    probabilities of choice tokens instead of samples"""

    def __post_init__(self) -> None:
        shape = (len(self.positions), len(self.outcomes))
        if self.counts.shape != shape or len(self.texts) != shape[0]:
            raise BadRequest(
                f"The counts have shape {list(self.counts.shape)} and there are {len(self.texts)} texts, for {shape[0]} "
                f"positions and {shape[1]} outcomes. Give counts [positions, outcomes] and one text per position."
            )
        if self.counts.dtype != np.int64 or (self.counts < 0).any():
            raise BadRequest(f"The counts are {self.counts.dtype}. Give int64 numbers of at least 0.")
        if self.probabilities is not None and self.probabilities.shape != shape:
            raise BadRequest(
                f"The probabilities have shape {list(self.probabilities.shape)}. Give {list(shape)}, as the counts."
            )
