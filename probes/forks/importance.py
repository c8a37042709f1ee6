"""`importance` and `counterfactual_importance`: how much a unit of the text, such as a sentence, changes the outcome.

A unit is compared with what takes its place: rollouts from before the unit (without it) against rollouts from after it (with
it). Resampling importance counts all rollouts without the unit, counterfactual importance only those whose first unit says
something else (Thought Anchors, arXiv 2506.19143). Its divergence is KL(without || with), which is `measure="kl"` here.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from replaylens.engine.resampling.counts import OutcomeCounts
from replaylens.probes.errors import BadRows
from replaylens.probes.forks.multinomials import (
    LEVEL,
    MEASURES,
    PERMUTATIONS,
    RESAMPLES,
    DistanceKind,
    Distances,
    distances,
    whole_counts,
    with_known_means,
)
from replaylens.probes.forks.rollout_texts import RolloutTexts
from replaylens.probes.forks.similarity import Similar, overlap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Importance:
    """How far the outcome distribution moves by each unit, in order of the text."""

    kind: str
    """resampling or counterfactual"""
    measure: DistanceKind
    positions: list[int]
    texts: list[str]
    distances: Distances
    p_family: np.ndarray
    """[units]: p adjusted for all units (Holm), whatever their dependence"""
    without: np.ndarray
    with_it: np.ndarray
    """int64 [units, outcomes]: the counts that are compared"""
    level: float

    def __repr__(self) -> str:
        return f"Importance({self.kind}, {self.measure}, {len(self.texts)} units, {int(self.shown.sum())} shown)"

    @property
    def shown(self) -> np.ndarray:
        """[units] bool: the unit changes the outcome; a false one among all units has probability 1 - level at most."""
        return self.p_family <= 1 - self.level

    @property
    def frame(self) -> pd.DataFrame:
        """One line per unit."""
        found = self.distances
        return pd.DataFrame(
            {
                "position": self.positions,
                "text": self.texts,
                "importance": found.value,
                "plug_in": found.plug_in,
                "low": found.low,
                "high": found.high,
                "p": found.p,
                "p_family": self.p_family,
                "shown": self.shown,
                "without": self.without.sum(1),
                "with": self.with_it.sum(1),
            }
        )

    def plot(self) -> "Figure":
        """Importance by unit with intervals; filled marks are shown."""
        from replaylens.engine.pictures.figure import picture

        figure = picture(min(0.3 * len(self.texts), 18) + 3, 3.2)
        axes = figure.subplots()
        found, x = self.distances, np.arange(len(self.texts))
        axes.vlines(
            x, found.low, np.minimum(found.high, np.nanmax([*found.high[np.isfinite(found.high)], 0.0])), color="#8a949e"
        )
        axes.scatter(x, found.value, s=24, facecolors=np.where(self.shown, "#0b4f8f", "none"), edgecolors="#0b4f8f", zorder=3)
        axes.set(xlabel="unit", ylabel=f"{self.kind} importance\n({MEASURES[self.measure]})", xticks=x)
        return figure

    def _repr_html_(self) -> str:
        table: str = self.frame.round(4).to_html(index=False)
        return table


def importance(
    counts: OutcomeCounts,
    *,
    measure: DistanceKind = "tv",
    level: float = LEVEL,
    permutations: int = PERMUTATIONS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Importance:
    """Resampling importance of every unit but the last, after which there are no rollouts.

    counts  one row per unit, in order, with no unit left out: the rollouts with a unit are those from before the next one

    >>> import numpy as np
    >>> from replaylens.engine.resampling.counts import OutcomeCounts
    >>> counts = OutcomeCounts([0, 4, 8], ["a", "b"], np.array([[50, 50], [48, 52], [95, 5]]), ["One.", "Two.", "Three."])
    >>> importance(counts).frame[["text", "plug_in", "shown"]].round(3).values.tolist()
    [['One.', 0.02, False], ['Two.', 0.47, True]]
    """
    whole = whole_counts(counts)
    found = distances(whole[:-1], whole[1:], measure, level=level, permutations=permutations, resamples=resamples, seed=seed)
    if counts.probabilities is not None:
        found = with_known_means(found, counts.probabilities[:-1], counts.probabilities[1:], measure)
    names = counts.positions[:-1], counts.texts[:-1]
    return Importance("resampling", measure, *names, found, holm(found.p), whole[:-1], whole[1:], level)


def counterfactual_importance(
    rollouts: RolloutTexts,
    *,
    similar: Similar | None = None,
    measure: DistanceKind = "tv",
    level: float = LEVEL,
    permutations: int = PERMUTATIONS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Importance:
    """Importance of every unit but the last, against rollouts whose first unit differs in content.

    similar  whether two units say the same; default: `overlap()`, at least six of ten words in common
    """
    same = similar or overlap()
    other = np.array([not same(rollouts.texts[fork], units[0] if units else "") for fork, units in _each(rollouts)], dtype=bool)
    if not other.any():
        raise BadRows(
            f"All {len(rollouts)} rollouts begin with a unit like the one they replace, so nothing is counterfactual. Give a "
            f"stricter `similar`, or resample at a higher temperature."
        )
    without, with_it = rollouts.where(other).counts().counts[:-1], rollouts.counts().counts[1:]
    found = distances(without, with_it, measure, level=level, permutations=permutations, resamples=resamples, seed=seed)
    names = rollouts.positions[:-1], rollouts.texts[:-1]
    return Importance("counterfactual", measure, *names, found, holm(found.p), without, with_it, level)


def holm(p: np.ndarray) -> np.ndarray:
    """Family-wise p-values by Holm's method, for any dependence."""
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    out = np.empty(len(p))
    out[order] = np.minimum(steps, 1.0)
    return out


def _each(rollouts: RolloutTexts) -> "zip[tuple[int, tuple[str, ...]]]":
    return zip(rollouts.fork.tolist(), rollouts.units, strict=True)
