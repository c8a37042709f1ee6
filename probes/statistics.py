"""Intervals and tests that respect roots: rows of one prompt are not independent observations.

Every score here is a ratio of sums over rows (right answers over rows; explained over total squares), so a resample of roots
is a weighting of per-root sums. All randomness is seeded: equal input gives equal bits.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from replaylens.probes.errors import TooFewRoots

RESAMPLES, PERMUTATIONS, LEVEL = 1000, 999, 0.95
_TOGETHER = 64
"""permutations scored together; bounds memory"""


@dataclass(frozen=True)
class Estimate:
    """A score with its interval."""

    value: float
    low: float
    high: float
    level: float = LEVEL

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def root_weights(roots: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """[resamples, roots]: how often each root is drawn, with replacement."""
    if roots < 2:
        raise TooFewRoots(f"{roots} root prompts are too few. Give at least 2 for an interval over roots.")
    generator = np.random.default_rng([seed, 0xB007])
    return generator.multinomial(roots, np.full(roots, 1 / roots), size=resamples)


def root_sums(values: np.ndarray, roots: np.ndarray) -> np.ndarray:
    """values [..., rows] -> sums per root [..., roots], roots in order of their ids."""
    place = np.unique(roots, return_inverse=True)[1]
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    return np.add.reduceat(np.asarray(values, dtype=np.float64)[..., order], starts, axis=-1)


def interval(value: np.ndarray, draws: np.ndarray, level: float = LEVEL, folds: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of scores [cells] from those of resampled roots [resamples, cells]: widened percentiles.

    folds  number of cross-validation folds; 1: one held-out side. Roots of different folds help to predict each other, so
           scores vary more than resampling shows: the interval is widened by sqrt(1 + folds / (folds - 1)), the correction
           of Nadeau and Bengio (Machine Learning 52, 2003)
    """
    tail = (1 - level) / 2
    low, high = value + _widening(folds) * (np.quantile(draws, [tail, 1 - tail], axis=0) - value)
    return low, high


def _widening(folds: int) -> float:
    return float(np.sqrt(1 + folds / (folds - 1))) if folds > 1 else 1.0


def simultaneous(value: np.ndarray, draws: np.ndarray, level: float = LEVEL, folds: int = 1) -> list[Estimate]:
    """Intervals that hold for all cells jointly, so that the best cell may be picked; arguments as for `interval`.

    The half-width is the cell's spread times the quantile of the largest standardised deviation over all cells.
    """
    spread = draws.std(0)
    farthest = (np.abs(draws - value) / np.where(spread > 0, spread, np.inf)).max(1)  # [resamples]
    reach = _widening(folds) * np.quantile(farthest, level) * spread
    return [Estimate(float(v), float(v - r), float(v + r), level) for v, r in zip(value, reach, strict=True)]


def bootstrap(
    top: np.ndarray,
    bottom: np.ndarray,
    roots: np.ndarray,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
    folds: int = 1,
    least: float = 0.0,
) -> list[Estimate]:
    """Cluster bootstrap over roots of sum(top) / sum(bottom), for each line of top [cells, rows]; bottom is one line.

    Percentile intervals. If every root scores 0, or every root 1, resampling shows no spread; the end of the interval is then
    the exact binomial one for that many roots.

    folds  see `interval`
    least  lowest possible score: 0 for a share, -inf for r2. The highest is 1
    """
    above, below = root_sums(np.atleast_2d(top), roots), root_sums(np.atleast_2d(bottom), roots)
    weights = root_weights(above.shape[1], resamples, seed).astype(np.float64)
    draws = (weights @ above.T) / (weights @ below.T)  # [resamples, cells]
    value = above.sum(1) / below.sum(1)
    low, high = interval(value, draws, level, folds)
    doubt = _doubt(above.shape[1], level)
    low = np.where((value == 1) & (low == 1), 1 - doubt, low)
    high = np.where((value == 0) & (high == 0), doubt, high)
    low, high = np.maximum(low, least), np.minimum(high, 1.0)  # widening ignores the bounds of a score
    return [Estimate(float(v), float(a), float(b), level) for v, a, b in zip(value, low, high, strict=True)]


def _doubt(observations: int, level: float = LEVEL) -> float:
    """Exact binomial bound if all observations agree: the largest share of others that is compatible with seeing none."""
    return float(1 - ((1 - level) / 2) ** (1 / observations))


def mean_over_placebos(values: np.ndarray, roots: np.ndarray, *, seed: int = 0, share: bool = False) -> Estimate:
    """The mean of values [placebos, rows] with an interval over both: each resample draws roots and, independently, placebos.

    Placebos are a sample of directions, as roots are a sample of prompts: if a placebo does the same to every prompt, all its
    rows are one observation.

    share  values are 0 or 1. If all are equal, resampling shows no spread; the end of the interval is then the exact
           binomial one for the number of roots or of placebos, whichever is smaller
    """
    sums, sizes = root_sums(values, roots), root_sums(np.ones(len(roots)), roots)  # [placebos, roots], [roots]
    weights = root_weights(len(sizes), RESAMPLES, seed)
    count = len(values)
    drawn = np.random.default_rng([seed, 0xF1A7]).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    draws = ((drawn @ sums) * weights).sum(1) / (count * (weights @ sizes))
    value = float(values.mean())
    low, high = (float(end) for end in np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    if share and np.ptp(values) == 0:
        doubt = _doubt(min(count, len(sizes)))
        low, high = max(0.0, value - doubt), min(1.0, value + doubt)
    return Estimate(value, low, high)


def mean_over_roots(values: np.ndarray, roots: np.ndarray, *, seed: int = 0, folds: int = 1) -> Estimate:
    """The mean of values [rows], with its cluster-bootstrap interval over roots."""
    value, draws = _means(values[None], roots, seed)
    low, high = interval(value, draws, folds=folds)
    return Estimate(float(value[0]), float(low[0]), float(high[0]))


def means_over_roots(values: np.ndarray, roots: np.ndarray, *, seed: int = 0, folds: int = 1) -> list[Estimate]:
    """The mean of each line of values [cells, rows], with intervals that hold for all of them jointly."""
    return simultaneous(*_means(values, roots, seed), folds=folds)


def _means(values: np.ndarray, roots: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(means [cells], those of resampled roots [resamples, cells])"""
    above, below = root_sums(values, roots), root_sums(np.ones(len(roots)), roots)
    weights = root_weights(len(below), RESAMPLES, seed)
    return above.sum(1) / below.sum(), (weights @ above.T) / (weights @ below)[:, None]


# ---- permutation ------------------------------------------------------------------------------------------------------


def root_permutations(labels: np.ndarray, roots: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """[count, rows]: for each row, the number of the row whose label it takes.

    Labels move between roots, never within one. If every root has a single label, roots exchange labels freely; otherwise
    roots with the same number of rows exchange whole sequences of labels.
    """
    different, place = np.unique(roots, return_inverse=True)
    members = [np.flatnonzero(place == i) for i in range(len(different))]
    generator = np.random.default_rng([seed, 0x5EED])
    constant = all((labels[rows] == labels[rows[0]]).all() for rows in members)
    if constant:
        first = np.array([rows[0] for rows in members])
        return np.stack([first[generator.permutation(len(first))][place] for _ in range(count)]) if count else _none(roots)
    strata: dict[int, list[np.ndarray]] = {}
    for rows in members:
        strata.setdefault(len(rows), []).append(rows)
    out = np.empty((count, len(roots)), dtype=np.int64)
    for size in sorted(strata):
        block = np.stack(strata[size])  # [roots of this size, rows of each]
        for number in range(count):
            out[number, block] = block[generator.permutation(len(block))]
    return out


def _none(roots: np.ndarray) -> np.ndarray:
    return np.empty((0, len(roots)), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Null:
    """Scores of a family of cells, on the labels and on permuted ones."""

    observed: np.ndarray
    """[cells]"""
    drawn: np.ndarray
    """[permutations, cells]"""

    @property
    def p(self) -> np.ndarray:
        """One-sided p-value of each cell alone."""
        return (1 + (self.drawn >= self.observed - 1e-12).sum(0)) / (1 + len(self.drawn))

    def standard(self) -> tuple[np.ndarray, np.ndarray]:
        """Observed and drawn scores in units of each cell's own null spread, so that cells can be compared."""
        spread = self.drawn.std(0)
        spread = np.where(spread > 0, spread, np.inf)  # a cell whose null never varies cannot be significant
        return (self.observed - self.drawn.mean(0)) / spread, (self.drawn - self.drawn.mean(0)) / spread


def permuted_accuracy(predicted: np.ndarray, labels: np.ndarray, permutations: np.ndarray) -> Null:
    """Accuracy of held-out predictions [cells, rows] (class numbers) on labels [rows] and on permuted ones.

    The probes are not refitted: the null hypothesis is that held-out predictions and labels are independent.
    """
    drawn, observed = np.zeros((len(permutations), len(predicted))), np.zeros(len(predicted))
    for value in np.unique(labels):
        says, holds = (predicted == value).astype(np.float32), (labels == value).astype(np.float32)
        observed += says @ holds
        for first in range(0, len(permutations), _TOGETHER):
            drawn[first : first + _TOGETHER] += holds[permutations[first : first + _TOGETHER]] @ says.T
    return Null(observed / len(labels), drawn / len(labels))


def permuted_product(predicted: np.ndarray, labels: np.ndarray, permutations: np.ndarray) -> Null:
    """The same for numbers: covariance of held-out predictions with labels."""
    centred = predicted - predicted.mean(1, keepdims=True)
    drawn = labels[permutations] @ centred.T / len(labels)
    return Null(centred @ labels / len(labels), drawn)


def max_statistic(nulls: list[Null]) -> list[np.ndarray]:
    """Family-wise p-values: how often the best of ALL cells scores as well on permuted labels. One array per Null.

    Nulls of different rows (positions) are permuted separately, which makes the maximum larger, never smaller, than a joint
    permutation would: the correction is conservative.
    """
    standard = [null.standard() for null in nulls]
    most = np.max([drawn.max(1) for _, drawn in standard], axis=0)  # [permutations]
    return [(1 + (most[:, None] >= seen[None] - 1e-12).sum(0)) / (1 + len(most)) for seen, _ in standard]


def false_discovery(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg q-values over the whole grid."""
    adjusted: np.ndarray = stats.false_discovery_control(p) if len(p) else p
    return adjusted
