"""`OutcomeCounts`: how often each outcome followed each fork. What statistics of forks start from."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from replaylens.engine.errors import BadRequest


@dataclass(frozen=True, eq=False)
class OutcomeCounts:
    """Counts of outcomes at each fork position. Immutable; the arrays must not be changed.

    >>> counts = OutcomeCounts([4, 9], ["heads", "tails"], np.array([[3, 1], [0, 4]]), [" Alice flips.", " Bob flips."])
    >>> counts.shares.tolist()
    [[0.75, 0.25], [0.0, 1.0]]
    """

    positions: list[int]
    """fork positions: the number of tokens that the rollouts share with the path"""
    outcomes: list[str]
    """the names of the outcomes"""
    counts: NDArray[np.int64]
    """[positions, outcomes]: rollouts with this outcome. With choice tokens, rollouts whose likeliest choice it is"""
    texts: list[str]
    """the text of the unit of the path, such as a sentence, that starts at each position; "" at its end"""
    probabilities: NDArray[np.float64] | None = None
    """[positions, outcomes]: with choice tokens, the mean probability of each choice over the rollouts; otherwise None"""

    def __post_init__(self) -> None:
        shape = (len(self.positions), len(self.outcomes))
        for name in ("counts", "probabilities"):
            given = getattr(self, name)
            if given is not None and np.shape(given) != shape:
                raise BadRequest(f"{name} is of shape {np.shape(given)}, for {shape[0]} positions and {shape[1]} outcomes.")
        if not np.issubdtype(np.asarray(self.counts).dtype, np.integer) or (np.asarray(self.counts) < 0).any():
            raise BadRequest("counts are numbers of rollouts. Give an array of whole numbers of at least 0.")
        if any(later <= earlier for earlier, later in pairwise(self.positions)):
            raise BadRequest(f"Positions {self.positions[:8]} are not in ascending order. Sort them, each once.")
        if len(self.texts) != shape[0]:
            raise BadRequest(f"Got {len(self.texts)} texts for {shape[0]} positions. Give one for each.")

    @property
    def shares(self) -> NDArray[np.float64]:
        """The estimated outcome distribution at each position: [positions, outcomes]. nan where nothing was drawn."""
        if self.probabilities is not None:
            return self.probabilities
        with np.errstate(invalid="ignore"):
            return np.asarray(self.counts / self.counts.sum(1, keepdims=True))
