"""`outcome_curve`: the outcome distribution at every fork, with intervals."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from replaylens.engine.pictures.html import fragment
from replaylens.engine.pictures.outcomes import colours, curve_svg
from replaylens.engine.resampling.counts import OutcomeCounts
from replaylens.probes.errors import ProbeError
from replaylens.probes.forks.multinomials import LEVEL, shares

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class OutcomeCurve:
    """The outcome distribution of rollouts from each position. NaN, with [0, 1] as interval, where there are none."""

    positions: list[int]
    texts: list[str]
    """the unit that starts at each position; rollouts there have not seen it"""
    outcomes: list[str]
    rollouts: np.ndarray
    """[positions]: number of rollouts"""
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    """[positions, outcomes]: probability of each outcome, and the ends of its interval"""
    entropy: np.ndarray
    """[positions], in nats, with the bias of counting removed (Miller and Madow), at most log(outcomes)"""
    level: float
    joint: bool
    """whether all intervals hold at once"""

    def __repr__(self) -> str:
        return f"OutcomeCurve({len(self.positions)} positions, {int(self.rollouts.sum())} rollouts, {', '.join(self.outcomes)})"

    @property
    def frame(self) -> pd.DataFrame:
        """One line per position and outcome."""
        at = np.repeat(np.arange(len(self.positions)), len(self.outcomes))
        return pd.DataFrame(
            {
                "position": np.array(self.positions)[at],
                "text": np.array(self.texts, dtype=object)[at],
                "outcome": np.tile(np.array(self.outcomes, dtype=object), len(self.positions)),
                "rollouts": self.rollouts[at],
                "probability": self.value.ravel(),
                "low": self.low.ravel(),
                "high": self.high.ravel(),
            }
        )

    def plot(self) -> "Figure":
        """Probability of each outcome by position, with intervals."""
        from replaylens.engine.pictures.figure import picture, plain

        figure = picture(min(0.25 * len(self.positions), 18) + 4, 3.2)
        axes = figure.subplots()
        for k, (name, colour) in enumerate(zip(self.outcomes, colours(self.outcomes), strict=True)):
            axes.plot(self.positions, self.value[:, k], marker="o", markersize=3, label=plain(name), color=colour)
            axes.fill_between(self.positions, self.low[:, k], self.high[:, k], alpha=0.25, color=colour, linewidth=0)
        axes.set(xlabel="position of the fork", ylabel="probability of the outcome", ylim=(0, 1))
        figure.legend(loc="outside right upper", fontsize=8)
        return figure

    def _repr_html_(self) -> str:
        return fragment(curve_svg(self.texts, self.outcomes, self.value, self.low, self.high))


def outcome_curve(counts: OutcomeCounts, *, level: float = LEVEL, joint: bool = False) -> OutcomeCurve:
    """The outcome distribution at every position.

    joint  widen the intervals so that all of them hold at once, for statements about the largest or the first
           (exact binomial intervals, Bonferroni); otherwise each holds by itself (Jeffreys)

    >>> import numpy as np
    >>> from replaylens.engine.resampling.counts import OutcomeCounts
    >>> counts = OutcomeCounts([5, 9], ["heads", "tails"], np.array([[52, 48], [97, 3]]), ["Alice flips.", "Bob waits."])
    >>> outcome_curve(counts).frame[["probability", "low", "high"]].round(3).values.tolist()[2]
    [0.97, 0.922, 0.991]
    """
    if not 0 < level < 1:
        raise ProbeError(f"level={level} is no confidence level. Give a number between 0 and 1, such as 0.95.")
    total = counts.counts.sum(1)
    value = shares(counts.counts) if counts.probabilities is None else counts.probabilities
    low, high = (
        interval(value, total[:, None], 1 - (1 - level) / value.size, exact=True)
        if joint
        else interval(value, total[:, None], level)
    )
    seen = np.where(total > 0, np.inf, 0) if counts.probabilities is not None else total  # probabilities are not counted
    return OutcomeCurve(
        counts.positions, counts.texts, counts.outcomes, total, value, low, high, entropy(value, seen), level, joint
    )


def interval(
    value: np.ndarray, total: np.ndarray, level: float = LEVEL, *, exact: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of shares of `total` rollouts: Jeffreys' interval, or the exact one of Clopper and Pearson, which never
    holds less often than its level. Means of probabilities vary less than shares, so both are conservative for them."""
    right, tail = np.nan_to_num(value) * total, (1 - level) / 2
    more = (0.0, 1.0) if exact else (0.5, 0.5)
    with np.errstate(invalid="ignore"):
        low = stats.beta.ppf(tail, right + more[0], total - right + more[1])
        high = stats.beta.ppf(1 - tail, right + more[1], total - right + more[0])
    known = (total > 0) & ~np.isnan(value)
    low, high = np.where(known & (right > 0), low, 0.0), np.where(known & (right < total), high, 1.0)
    return np.minimum(low, np.where(known, value, 0.0)), np.maximum(high, np.where(known, value, 1.0))


def entropy(value: np.ndarray, total: np.ndarray) -> np.ndarray:
    """[positions]: of shares [positions, outcomes] of `total` rollouts, in nats, plus (outcomes seen - 1) / (2 rollouts)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        plain = -np.where(value > 0, value * np.log(value), 0.0).sum(1)
        found = plain + ((value > 0).sum(1) - 1) / (2 * total)
    bounded = np.minimum(found, np.log(max(value.shape[1], 1)))
    return np.where(total > 0, bounded, np.nan)
