"""`importance` and `counterfactual_importance`: how much a unit of the text, such as a sentence, changes the outcome.

A unit is compared with what takes its place: rollouts from before the unit (without it) against rollouts from after it (with
it). Resampling importance counts all rollouts without the unit, counterfactual importance only those whose first unit says
something else (Thought Anchors, arXiv 2506.19143). Its divergence is KL(without || with), which is `measure="kl"` here.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from replaylens.engine.display import Citable
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.forks.distributions import (
    MEASURES,
    PERMUTATIONS,
    RESAMPLES,
    DistanceKind,
    Distances,
    RolloutTexts,
    distances,
    interval,
    plug_in,
    whole_counts,
    with_known_means,
)
from replaylens.probes.intervals import LEVEL
from replaylens.rollouts.plan import OutcomeCounts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- similarity ------------------------------------------------------------------------------------------------------
# Whether two units of text say the same. Any function of two texts will do, such as one that compares embeddings.

Similar = Callable[[str, str], bool]
_WORD = re.compile(r"\w+")


def exact(one: str, other: str) -> bool:
    """The same words in the same order, whatever their case and the characters between them.

    >>> exact("So x = 3.", " so X = 3 ")
    True
    """
    return _words(one) == _words(other)


def overlap(least: float = 0.6) -> Similar:
    """A function: whether two units have at least this share of their words in common, by number (Dice coefficient).

    >>> overlap()("the answer is four", "the answer is five"), overlap(0.8)("the answer is four", "the answer is five")
    (True, False)
    """
    if not 0 < least <= 1:
        raise ProbeError(f"least={least} is no share of words. Give a number above 0 and at most 1.")

    def similar(one: str, other: str) -> bool:
        a, b = Counter(_words(one)), Counter(_words(other))
        total = a.total() + b.total()
        return 2 * (a & b).total() >= least * total if total else True

    return similar


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


# ---- importance ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Importance(Citable):
    """How far the outcome distribution moves by each unit, in order of the text."""

    kind: str
    """resampling or counterfactual"""
    measure: DistanceKind
    positions: list[int]
    texts: list[str]
    distances: Distances
    p_family: np.ndarray
    """[units]: p adjusted for all units, by the largest distance among them (step-down; Westfall and Young)"""
    possible: np.ndarray
    """[units] bool: whether any counts of as many rollouts, with these outcomes, would be shown"""
    without: np.ndarray
    with_it: np.ndarray
    """int64 [units, outcomes]: the counts that are compared"""
    level: float

    def __repr__(self) -> str:
        few = int((~self.possible).sum())
        note = f"; {few} with too few rollouts or outcomes to be shown, whatever they say" if few else ""
        return f"Importance({self.kind}, {self.measure}, {len(self.texts)} units, {int(self.shown.sum())} shown{note})"

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
                "possible": self.possible,
                "without": self.without.sum(1),
                "with": self.with_it.sum(1),
            }
        )

    def plot(self) -> "Figure":
        """Importance by unit with intervals; filled marks are shown."""
        from replaylens.engine.display import picture

        figure = picture(min(0.3 * len(self.texts), 18) + 3, 3.2)
        axes = figure.subplots()
        found, x = self.distances, np.arange(len(self.texts))
        axes.vlines(
            x, found.low, np.minimum(found.high, np.nanmax([*found.high[np.isfinite(found.high)], 0.0])), color="#8a949e"
        )
        axes.scatter(x, found.value, s=24, facecolors=np.where(self.shown, "#0b4f8f", "none"), edgecolors="#0b4f8f", zorder=3)
        axes.set(xlabel="unit", ylabel=f"{self.kind} importance\n({MEASURES[self.measure]})", xticks=x)
        return self._shown(figure)

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
    >>> from replaylens.rollouts.plan import OutcomeCounts
    >>> counts = OutcomeCounts([0, 4, 8], ["a", "b"], np.array([[50, 50], [48, 52], [95, 5]]), ["One.", "Two.", "Three."])
    >>> importance(counts).frame[["text", "plug_in", "shown"]].round(3).values.tolist()
    [['One.', 0.02, False], ['Two.', 0.47, True]]
    """
    whole = whole_counts(counts)
    found = distances(whole[:-1], whole[1:], measure, level=level, permutations=permutations, resamples=resamples, seed=seed)
    if counts.probabilities is not None:
        found = with_known_means(found, counts.probabilities[:-1], counts.probabilities[1:], measure)
    names = counts.positions[:-1], counts.texts[:-1]
    family = _family(found, whole[:-1], whole[1:], measure, level)
    return Importance("resampling", measure, *names, found, *family, level, made_by=counts.made_by)


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
    family = _family(found, without, with_it, measure, level)
    return Importance("counterfactual", measure, *names, found, *family, level, made_by=rollouts.made_by)


def _family(
    found: Distances, without: np.ndarray, with_it: np.ndarray, measure: DistanceKind, level: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(p_family, possible, without, with_it). Raises ProbeError if the permutations are too few for any verdict."""
    draws = found.under.shape[1]
    if draws * (1 - level) < 1 - 1e-9:
        raise ProbeError(
            f"{draws - 1} permutations give no p below {1 / draws:.3f}, so nothing can be shown at level={level}. Give "
            f"permutations={int(np.ceil(1 / (1 - level) - 1e-9)) - 1} or more."
        )
    size = np.sqrt((found.under**2).mean(1, keepdims=True))  # the observed one counts, so that all draws are alike
    scaled = np.divide(found.under, size, out=np.zeros_like(found.under), where=size > 0)
    apart = [_apart(*pair) for pair in zip(without, with_it, strict=True)]
    far = np.array([plug_in(a, b, measure) if a.sum() and b.sum() else 0.0 for a, b in apart])
    wide = np.sqrt(size[:, 0] ** 2 + (far**2 - found.under[:, 0] ** 2) / draws)  # of draws the observed one of which is `far`
    best = np.divide(far, wide, out=np.zeros(len(far)), where=size[:, 0] > 0)
    among = scaled[:, 1:].max(0, initial=0.0)
    possible = np.array([_share(among, value) <= 1 - level for value in best], dtype=bool)
    return step_down(scaled), possible, without, with_it


def step_down(scaled: np.ndarray) -> np.ndarray:
    """[units]: family-wise p-values of statistics [units, 1 + permutations], the observed ones first (Westfall and Young).

    A unit is compared with the largest of its own and all smaller statistics in each permutation. Rollouts are exchanged at
    each unit by itself. Neighbours share rollouts, so that their statistics are dependent; for sizes of about normal
    differences that only makes the largest one smaller (Sidak 1967).
    """
    order = np.argsort(-scaled[:, 0], kind="stable")
    largest = np.maximum.accumulate(scaled[order[::-1], 1:], axis=0)[::-1]
    steps = [_share(under, scaled[unit, 0]) for unit, under in zip(order, largest, strict=True)]
    out = np.empty(len(scaled))
    out[order] = np.maximum.accumulate(steps) if len(steps) else []
    return out


def _share(under: np.ndarray, observed: float) -> float:
    return float((1 + (under >= observed - 1e-9).sum()) / (1 + len(under)))


def _apart(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same rollouts, as far apart as they go: the most frequent outcomes on the first side until it is full."""
    pooled = a + b
    order = np.argsort(-pooled, kind="stable")
    filled = np.clip(a.sum() - (np.cumsum(pooled[order]) - pooled[order]), 0, pooled[order])
    one = np.zeros_like(pooled)
    one[order] = filled
    return one, pooled - one


def _each(rollouts: RolloutTexts) -> "zip[tuple[int, tuple[str, ...]]]":
    return zip(rollouts.fork.tolist(), rollouts.units, strict=True)


# ---- resilience ------------------------------------------------------------------------------------------------------
# `resilience`: how often the content of a unit comes back when it is resampled.


@dataclass(frozen=True, eq=False)
class Resilience(Citable):
    """Shares of rollouts from before each unit, with intervals. NaN, with [0, 1], where there are no rollouts."""

    positions: list[int]
    texts: list[str]
    rollouts: np.ndarray
    """[units]: rollouts from before the unit"""
    at_once: np.ndarray
    """[units]: share of rollouts whose first unit says the same"""
    ever: np.ndarray
    ever_low: np.ndarray
    ever_high: np.ndarray
    """[units]: share of rollouts with a unit that says the same, anywhere; ends of its interval"""
    control: np.ndarray
    """[units]: the same share for the other units of the path, on average: what similarity finds without resilience.
    NaN for a path of one unit"""

    def __repr__(self) -> str:
        return f"Resilience({len(self.texts)} units, {int(self.rollouts.sum())} rollouts)"

    @property
    def frame(self) -> pd.DataFrame:
        """One line per unit. `rounds`: how many times it must be removed until it stays away, on average."""
        with np.errstate(divide="ignore"):
            rounds = 1 / (1 - self.ever)
        names = ("rollouts", "at_once", "ever", "ever_low", "ever_high", "control")
        columns = {name: getattr(self, name) for name in names}
        return pd.DataFrame({"position": self.positions, "text": self.texts, **columns, "rounds": rounds})

    def plot(self) -> "Figure":
        """Resilience by unit with intervals, and its control."""
        from replaylens.engine.display import picture

        figure = picture(min(0.3 * len(self.texts), 18) + 3, 3.2)
        axes = figure.subplots()
        x = np.arange(len(self.texts))
        axes.vlines(x, self.ever_low, self.ever_high, color="#8a949e")
        axes.scatter(x, self.ever, s=24, color="#0b4f8f", zorder=3, label="comes back")
        axes.scatter(x, self.control, s=24, marker="_", color="#14171a", zorder=3, label="other units")
        axes.set(xlabel="unit", ylabel="share of rollouts", ylim=(-0.02, 1.02), xticks=x)
        figure.legend(loc="outside right upper", fontsize=8)
        return self._shown(figure)

    def _repr_html_(self) -> str:
        table: str = self.frame.round(3).to_html(index=False)
        return table


def resilience(rollouts: RolloutTexts, *, similar: Similar | None = None, level: float = LEVEL) -> Resilience:
    """How often each unit's content comes back in rollouts from before it.

    similar  whether two units say the same; default: `overlap()`, at least six of ten words in common
    """
    if not len(rollouts):
        raise BadRows("There are no rollouts. Resample at the units whose resilience is asked for.")
    same, texts, memory = similar or overlap(), rollouts.texts, {}

    def says(unit: str, number: int) -> bool:
        key = (unit, number)
        if key not in memory:  # rollouts repeat each other, and `similar` may be slow
            memory[key] = same(texts[number], unit)
        return memory[key]

    forks = len(texts)
    total, first, found = np.zeros(forks, dtype=np.int64), np.zeros(forks), np.zeros((forks, forks))
    for fork, units in zip(rollouts.fork.tolist(), rollouts.units, strict=True):
        total[fork] += 1
        first[fork] += bool(units) and says(units[0], fork)
        found[fork] += [any(says(unit, number) for unit in units) for number in range(forks)]
    with np.errstate(invalid="ignore", divide="ignore"):
        every = found / total[:, None]
        at_once, ever = first / total, np.diag(every).copy()
        control = (every.sum(1) - ever) / (forks - 1) if forks > 1 else np.full(forks, np.nan)
    low, high = interval(ever, total, level)
    return Resilience(rollouts.positions, texts, total, at_once, ever, low, high, control, made_by=rollouts.made_by)
