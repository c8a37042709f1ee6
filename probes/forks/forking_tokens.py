"""`forking_tokens`: tokens where another choice leads to another outcome (Forking Paths, arXiv 2412.07961).

At each token of a path, rollouts continue from each of the likeliest next tokens. A token is a fork if an alternative leads to
an outcome distribution farther than a threshold from that of the token taken. The survival curve is the probability that
no token drawn so far was such an alternative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.forks.multinomials import LEVEL, RESAMPLES, distances, variation_low

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THRESHOLD = 0.3
"""total variation beyond which an alternative counts as another outcome"""
_PERMUTATIONS = 199


@dataclass(frozen=True, eq=False)
class TokenFork:
    """The alternatives at one token. Raises BadRows for counts or weights that do not fit."""

    position: int
    tokens: list[str]
    """the token taken comes first"""
    weights: np.ndarray
    """[alternatives]: probability of each token at this place; what is missing to 1 belongs to tokens without rollouts"""
    counts: np.ndarray
    """int64 [alternatives, outcomes]: outcomes of rollouts that continue from each token"""

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or not len(self.tokens) == len(self.weights) == len(self.counts):
            raise BadRows(
                f"Position {self.position}: {len(self.tokens)} tokens, {len(self.weights)} weights and counts of shape "
                f"{list(self.counts.shape)}. Give one weight and one row of counts per token."
            )
        if (self.weights < 0).any() or self.weights.sum() > 1 + 1e-6:
            raise BadRows(f"Position {self.position}: the weights sum to {self.weights.sum():.4f}. Give probabilities.")


@dataclass(frozen=True, eq=False)
class ForkingTokens:
    """Which tokens decide. Bounds hold for all alternatives of all tokens at once."""

    positions: list[int]
    tokens: list[str]
    """the tokens taken"""
    alternatives: pd.DataFrame
    """one line per alternative: position, token, weight, tv (total variation from the token taken), low, high, forks"""
    hazard: np.ndarray
    """[positions]: probability of drawing an alternative that surely leads elsewhere (its low bound is above the threshold)"""
    hazard_high: np.ndarray
    """[positions]: the same for every alternative that may lead elsewhere, tokens without rollouts included"""
    threshold: float
    level: float

    def __repr__(self) -> str:
        return f"ForkingTokens({int(self.forks.sum())} of {len(self.positions)} tokens, threshold {self.threshold})"

    @property
    def forks(self) -> np.ndarray:
        """[positions] bool: an alternative surely leads elsewhere; a false one among all has probability 1 - level at most."""
        return self.hazard > 0

    @property
    def survival_low(self) -> np.ndarray:
        """[positions]: lower bound of the probability that no token up to this one leads elsewhere."""
        return np.cumprod(1 - self.hazard_high)

    @property
    def survival_high(self) -> np.ndarray:
        """[positions]: upper bound of the same."""
        return np.cumprod(1 - self.hazard)

    @property
    def frame(self) -> pd.DataFrame:
        """One line per token of the path."""
        columns = {name: getattr(self, name) for name in ("hazard", "hazard_high", "survival_low", "survival_high", "forks")}
        return pd.DataFrame({"position": self.positions, "token": self.tokens, **columns})

    def plot(self) -> "Figure":
        """The survival curve between its bounds, with forking tokens as lines."""
        from replaylens.engine.pictures.figure import picture

        figure = picture(min(0.12 * len(self.positions), 18) + 4, 3.0)
        axes = figure.subplots()
        axes.fill_between(self.positions, self.survival_low, self.survival_high, step="post", alpha=0.35, color="#0b4f8f")
        axes.vlines(np.array(self.positions)[self.forks], 0, 1, color="#ee8a72", linewidth=1)
        axes.set(xlabel="position", ylabel="P(no other outcome so far)", ylim=(0, 1.02))
        return figure

    def _repr_html_(self) -> str:
        table: str = self.frame[self.forks].round(3).to_html(index=False)
        return table


def forking_tokens(
    forks: Sequence[TokenFork], *, threshold: float = THRESHOLD, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> ForkingTokens:
    """Find the tokens where an alternative leads to another outcome distribution.

    The low bounds come from an exact test (`multinomials.variation_low`), at a level for all alternatives of all tokens.

    threshold  total variation from the token taken beyond which an alternative counts as leading elsewhere
    """
    if not forks:
        raise BadRows("There are no tokens. Give the alternatives of at least one.")
    if not 0 <= threshold < 1:
        raise ProbeError(f"threshold={threshold} is no total variation. Give a number from 0 to below 1.")
    taken = np.concatenate([np.repeat(fork.counts[:1], len(fork.tokens) - 1, 0) for fork in forks])
    others = np.concatenate([fork.counts[1:] for fork in forks])
    joint = 1 - (1 - level) / max(len(others), 1)
    found = distances(taken, others, "tv", level=joint, permutations=_PERMUTATIONS, resamples=resamples, seed=seed)
    low = np.array([variation_low(a, b, threshold, joint) for a, b in zip(taken, others, strict=True)])
    table = pd.DataFrame(
        {
            "position": np.repeat([fork.position for fork in forks], [len(fork.tokens) - 1 for fork in forks]),
            "token": [token for fork in forks for token in fork.tokens[1:]],
            "weight": np.concatenate([fork.weights[1:] for fork in forks]),
            "tv": found.value,
            "low": low,
            "high": np.maximum(found.high, low),
            "forks": low > threshold,
        }
    )
    at = np.repeat(np.arange(len(forks)), [len(fork.tokens) - 1 for fork in forks])
    sure, maybe = (np.bincount(at, table["weight"] * (table[end] > threshold), len(forks)) for end in ("low", "high"))
    unseen = np.array([max(1 - fork.weights.sum(), 0.0) for fork in forks])
    names = [fork.position for fork in forks], [fork.tokens[0] for fork in forks]
    return ForkingTokens(*names, table, sure, np.minimum(maybe + unseen, 1.0), threshold, level)
