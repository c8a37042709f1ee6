"""`change_points`: where the outcome distribution changes along a text, by exact Bayesian inference.

Between two change points all rollouts have one outcome distribution, with a Dirichlet prior; its integral over a stretch of
positions is known in closed form. Sums over all ways to cut the text are exact, by dynamic programming (Fearnhead, Statistics
and Computing 16, 2006): no sampling, no asymptotics. The prior halves with each further change point, half of it is on none,
and all places are equally likely.

A slow drift is no change point of this model: it is cut into several small ones.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.special import gammaln, logsumexp

from replaylens.engine.display import Citable
from replaylens.engine.request.values import as_int
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.forks.distributions import PRIOR, shares, variation, whole_counts
from replaylens.probes.intervals import LEVEL
from replaylens.rollouts.plan import OutcomeCounts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST_MEANS = 20
"""rollouts a position that probabilities must stand for, or rounding them to counts would say more than they do"""
MAX_CHANGES = 10
_FEW_FORKS, _ORDERS = 7, 99


@dataclass(frozen=True)
class ChangePoint:
    """One change of the most probable number of changes, with the shortest span of forks that holds it at the given level."""

    index: int
    """number of the first fork after the change: the unit before it, index - 1, made the change"""
    low: int
    high: int
    """ends of the interval, as numbers of forks, both inclusive"""
    position: int
    """token position of the fork"""
    text: str
    """the unit that made the change"""
    probability: float
    """that this is its place, given that there are as many changes as `ChangePoints.points`: how well the change is located,
    not whether there is one"""
    size: float
    """total variation between the stretches before and after it"""


@dataclass(frozen=True, eq=False)
class ChangePoints(Citable):
    """The posterior of the change points of one path."""

    positions: list[int]
    texts: list[str]
    probability: np.ndarray
    """[positions]: that the distribution changes between the fork before and this one, whatever the number of changes; 0 at
    the first. That of a `ChangePoint`, and of `frame`, is given their number"""
    number: np.ndarray
    """[0 to most changes]: posterior of the number of change points"""
    points: tuple[ChangePoint, ...]
    """those of the most probable number of changes"""
    level: float
    p: float = 0.0
    """that forks in any order would look as much like a path with changes; 0 of fewer forks than `_FEW_FORKS`"""

    def __repr__(self) -> str:
        return f"ChangePoints({len(self.points)} of {len(self.positions)} positions, P(any) = {1 - self.number[0]:.3f})"

    @property
    def shown(self) -> bool:
        """Whether there is a change at all: the posterior of none is at most 1 - level, and so is `p`.

        The posterior takes each fork's rollouts as draws of one distribution. Forks that differ for no reason of place, each
        with a distribution of its own, look like many changes to it; in another order they do so as well.
        """
        return bool(self.number[0] <= 1 - self.level and self.p <= 1 - self.level)

    @property
    def frame(self) -> pd.DataFrame:
        """One line per change point; `probability` is that of its place, given the number of changes."""
        return pd.DataFrame([vars(point) for point in self.points], columns=list(ChangePoint.__dataclass_fields__))

    def plot(self) -> "Figure":
        """Posterior probability of a change before each fork, with the intervals of the change points."""
        from replaylens.engine.display import picture

        figure = picture(min(0.25 * len(self.positions), 18) + 4, 2.8)
        axes = figure.subplots()
        axes.bar(np.arange(len(self.positions)), self.probability, color="#0b4f8f")
        for point in self.points:
            axes.axvspan(point.low - 0.5, point.high + 0.5, color="#f3d535", alpha=0.35, zorder=0)
        axes.set(xlabel="fork", ylabel="P(change before it)", ylim=(0, 1))
        return self._shown(figure)

    def _repr_html_(self) -> str:
        table: str = self.frame.round(3).to_html(index=False)
        return table


def change_points(
    counts: OutcomeCounts, *, most: int = MAX_CHANGES, level: float = LEVEL, prior: float = PRIOR
) -> ChangePoints:
    """The posterior of where and how often the outcome distribution changes.

    most   change points at most
    prior  of each outcome in the Dirichlet prior of a stretch: 0.5 is that of Jeffreys

    >>> import numpy as np
    >>> from replaylens.rollouts.plan import OutcomeCounts
    >>> table = np.array([[51, 49], [47, 53], [52, 48], [96, 4], [97, 3]])
    >>> found = change_points(OutcomeCounts([0, 3, 6, 9, 12], ["a", "b"], table, ["One.", "Two.", "Three.", "Four.", "Five."]))
    >>> found.shown, [(point.text, point.low, point.high) for point in found.points]
    (True, [('Three.', 3, 3)])
    """
    most = as_int("most", most, 1, error=ProbeError)
    if not prior > 0 or not 0 < level < 1:
        raise ProbeError(f"prior={prior} and level={level} are not valid. Give a prior above 0 and a level between 0 and 1.")
    if counts.probabilities is not None and counts.counts.sum(1).min(initial=_LEAST_MEANS) < _LEAST_MEANS:
        raise BadRows(
            f"The answers are probabilities, of {int(counts.counts.sum(1).min())} rollouts at some position. Change points are "
            f"those of counts: draw at least {_LEAST_MEANS} rollouts a position, or look at `counts.shares` and `importance`."
        )
    table = whole_counts(counts)
    rolled = np.flatnonzero(table.sum(1))  # forks without rollouts say nothing: a change there would be free
    table, length = table[rolled], len(rolled)
    if length < 2:
        raise BadRows(f"{length} positions with rollouts have no change between them. Give two or more.")
    most = min(most, length - 1)
    stretch = _stretches(table, prior)
    before, after = _before(stretch, most), _after(stretch, most)
    return replace(_posterior(counts, table, rolled, before, after, most, level), p=_p_of_order(table, prior, most))


def _p_of_order(table: np.ndarray, prior: float, most: int) -> float:
    """The share of orders of the forks, the given one included, in which changes are as well supported."""
    if len(table) < _FEW_FORKS:
        return 0.0
    random = np.random.default_rng([len(table), 0xC4A6])
    orders = [np.arange(len(table)), *(random.permutation(len(table)) for _ in range(_ORDERS))]
    support = np.array([_support(table[order], prior, most) for order in orders])
    return float((support >= support[0] - 1e-9).mean())


def _support(table: np.ndarray, prior: float, most: int) -> float:
    """Log of the evidence for any change over that for none."""
    evidence = _weights(len(table), most) + _before(_stretches(table, prior), most)[:, -1]
    return float(logsumexp(evidence[1:]) - evidence[0])


def _weights(length: int, most: int) -> np.ndarray:
    """[changes]: log of the prior of each number of changes, and of one way to place them."""
    m = np.arange(most + 1)
    places = gammaln(length) - gammaln(m + 1) - gammaln(length - m)  # log of the number of ways to place m changes
    return np.asarray(-(m + 1) * np.log(2) - places)


def _stretches(table: np.ndarray, prior: float) -> np.ndarray:
    """[start, end]: log marginal likelihood of forks start..end-1 with one distribution; -inf unless start < end."""
    sums = np.vstack([np.zeros(table.shape[1]), table.cumsum(0)])
    inside = sums[None] - sums[:, None]  # [start, end, outcomes]
    with np.errstate(invalid="ignore"):
        log = gammaln(prior + inside).sum(-1) - gammaln(prior * table.shape[1] + inside.sum(-1))
    log += gammaln(prior * table.shape[1]) - table.shape[1] * gammaln(prior)
    return np.where(np.triu(np.ones(log.shape, dtype=bool), 1), log, -np.inf)


def _before(stretch: np.ndarray, most: int) -> np.ndarray:
    """[changes, end]: log of the sum over all ways to cut forks 0..end-1 with that many change points."""
    out = [stretch[0]]
    for _ in range(most):
        out.append(logsumexp(out[-1][:, None] + stretch, axis=0))
    return np.stack(out)


def _after(stretch: np.ndarray, most: int) -> np.ndarray:
    """[changes, start]: the same for forks from start to the end."""
    out = [stretch[:, -1]]
    for _ in range(most):
        out.append(logsumexp(stretch + out[-1][None], axis=1))
    return np.stack(out)


def _posterior(
    counts: OutcomeCounts,
    table: np.ndarray,
    rolled: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    most: int,
    level: float,
) -> ChangePoints:
    """Of the forks `rolled`, whose counts are `table`; a change is put at the first of them after it."""
    length = len(table)
    weight = _weights(length, most)
    evidence = weight + before[:, -1]
    number = np.exp(evidence - logsumexp(evidence))
    chance = np.zeros(length)
    for total in range(1, most + 1):  # the change point in question is the j-th of `total`
        for j in range(1, total + 1):
            chance[1:] += np.exp(weight[total] + before[j - 1, 1:-1] + after[total - j, 1:-1] - logsumexp(evidence))
    best = int(number.argmax())
    ends = [_place(before[j - 1, 1:-1] + after[best - j, 1:-1], level) for j in range(1, best + 1)]
    cuts = [0, *(at for at, _, _, _ in ends), length]
    parts = [shares(table[a:b].sum(0)) for a, b in pairwise(cuts)]
    points = tuple(_point(counts, rolled, each, float(variation(parts[k], parts[k + 1]))) for k, each in enumerate(ends))
    probability = np.zeros(len(counts.positions))
    probability[rolled] = np.minimum(chance, 1.0)
    return ChangePoints(counts.positions, counts.texts, probability, number, points, level, made_by=counts.made_by)


def _point(counts: OutcomeCounts, rolled: np.ndarray, place: tuple[int, int, int, float], size: float) -> ChangePoint:
    """A change point as forks of the whole path: forks without rollouts before the interval may be its place too."""
    at, low, high = int(rolled[place[0]]), int(rolled[place[1] - 1]) + 1, int(rolled[place[2]])
    return ChangePoint(at, low, high, counts.positions[at], counts.texts[at - 1], place[3], size)


def _place(log: np.ndarray, level: float) -> tuple[int, int, int, float]:
    """(most probable fork, first and last fork of the shortest span with the level, probability of the first)"""
    chance = np.exp(log - logsumexp(log))
    sums = np.concatenate([[0.0], chance.cumsum()])
    last = np.searchsorted(sums, sums[:-1] + level - 1e-12)  # exclusive end for each start
    spans = np.where(last < len(sums), last - np.arange(len(chance)), len(sums))
    start = int(spans.argmin())
    best = int(chance.argmax())
    low, high = min(start, best), max(start + int(spans[start]) - 1, best)
    return best + 1, low + 1, high + 1, float(chance[best])
