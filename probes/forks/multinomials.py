"""Distances between outcome distributions that are known by counts: estimates without the bias of counting, intervals, tests.

The plug-in distance of two samples of one distribution is above zero: with 100 rollouts each and two equally likely outcomes,
total variation is .056 on average. docs/forks.md has the formulas and their error rates. Equal input gives equal bits.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from replaylens.engine.resampling.counts import OutcomeCounts
from replaylens.probes.errors import ProbeError

DistanceKind = Literal["tv", "kl"]
MEASURES = {"tv": "total variation", "kl": "KL divergence, nats"}
PERMUTATIONS, RESAMPLES, LEVEL = 999, 999, 0.95
PRIOR = 0.5
"""added to the count of every outcome (Jeffreys): an outcome that was not seen is not impossible"""


@dataclass(frozen=True, eq=False)
class Distances:
    """Distances of pairs of outcome distributions. NaN, with the whole range as interval, for pairs without rollouts."""

    value: np.ndarray
    """[pairs]: with the bias of counting removed"""
    plug_in: np.ndarray
    """[pairs]: the distance of the two samples"""
    low: np.ndarray
    high: np.ndarray
    """[pairs]: ends of the interval"""
    p: np.ndarray
    """[pairs]: of the permutation test that both sides have one distribution"""


def distances(
    first: np.ndarray,
    second: np.ndarray,
    measure: DistanceKind = "tv",
    *,
    level: float = LEVEL,
    permutations: int = PERMUTATIONS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Distances:
    """Distances of the distributions behind counts first and second, [pairs, outcomes]. KL is KL(first || second)."""
    if measure not in MEASURES:
        raise ProbeError(f"Unknown measure {measure!r}. Use {' or '.join(MEASURES)}.")
    if not 0 < level < 1 or permutations < 19 or resamples < 99:
        raise ProbeError(
            f"level={level}, permutations={permutations}, resamples={resamples} give no interval or test. Give a level between "
            f"0 and 1, at least 19 permutations and 99 resamples."
        )
    most = 1.0 if measure == "tv" else np.inf
    columns = [np.full(len(first), fill) for fill in (np.nan, np.nan, 0.0, most, 1.0)]
    for pair in np.flatnonzero((first.sum(1) > 0) & (second.sum(1) > 0)):
        sides = _seen(first[pair], second[pair])
        drawing = _Drawing(*sides, permutations, resamples, [seed, int(pair), 0xD157])
        found = drawing.variation(level) if measure == "tv" else drawing.divergence(level)
        for column, number in zip(columns, found, strict=True):
            column[pair] = number
    return Distances(*columns)


def variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Total variation of distributions [..., outcomes]."""
    half: np.ndarray = 0.5 * np.abs(p - q).sum(-1)
    return half


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) in nats, of distributions [..., outcomes] without zeros in q."""
    terms = np.where(p > 0, p * (np.log(np.where(p > 0, p, 1.0)) - np.log(q)), 0.0)
    total: np.ndarray = terms.sum(-1)
    return total


def shares(counts: np.ndarray) -> np.ndarray:
    """[..., outcomes]: counts over their sum; NaN without any."""
    total = counts.sum(-1, keepdims=True)
    return np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)


def smoothed(counts: np.ndarray) -> np.ndarray:
    """[..., outcomes]: shares after `PRIOR` is added to each count."""
    weights = counts + PRIOR
    mean: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return mean


def with_known_means(found: Distances, first: np.ndarray, second: np.ndarray, measure: DistanceKind) -> Distances:
    """The distances of pairs whose distributions, [pairs, outcomes], are means of probabilities instead of shares of samples.

    They are taken as given, without the bias of counting. Intervals and tests stay those of as many samples.
    """
    value = variation(first, second) if measure == "tv" else divergence(first, np.where(second > 0, second, np.nan))
    known = np.isfinite(value)
    value = np.where(known, value, found.value)
    low, high = (
        np.where(known, np.minimum(found.low, value), found.low),
        np.where(known, np.maximum(found.high, value), found.high),
    )
    return Distances(value, np.where(known, value, found.plug_in), low, high, found.p)


def whole_counts(counts: OutcomeCounts) -> np.ndarray:
    """int64 [positions, outcomes]: the counts or, where answers are probabilities, the rollouts that these stand for.

    The mean of probabilities varies less than a share of samples with the same mean, so intervals and tests of these counts
    are conservative.
    """
    if counts.probabilities is None:
        return counts.counts
    total = counts.counts.sum(1, keepdims=True)
    exact = total * counts.probabilities
    whole = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(whole - exact, axis=1, kind="stable"), axis=1)  # largest remainders first
    return whole + (rank < total - whole.sum(1, keepdims=True))


def _seen(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both sides without the outcomes that neither has, which count as one that was not seen: rollouts that all agree leave
    room for others, and twenty outcomes that never occur no more than one."""
    there = (a + b) > 0
    if there.all() and there.sum() > 1:
        return a, b
    return np.append(a[there], 0), np.append(b[there], 0)


class _Drawing:
    """One pair, redrawn: from its smoothed shares, for intervals, and with rollouts exchanged between its sides, for tests."""

    def __init__(self, a: np.ndarray, b: np.ndarray, permutations: int, resamples: int, seed: list[int]) -> None:
        generator = np.random.default_rng(seed)
        self.a, self.b, self.permutations = a, b, permutations
        self.again = [generator.multinomial(side.sum(), smoothed(side), size=resamples) for side in (a, b)]
        one = generator.multivariate_hypergeometric(a + b, a.sum(), size=permutations)
        self.exchanged = [one, a + b - one]

    def p(self, observed: float, under: np.ndarray) -> float:
        return float((1 + (under >= observed - 1e-12).sum()) / (1 + self.permutations))

    def _rejects_not(self, p: float, level: float) -> bool:
        """Whether the permutations are enough for a test at this level, and it does not reject that both sides are equal."""
        return p > 1 - level and (1 - level) * (1 + self.permutations) >= 1

    def variation(self, level: float) -> tuple[float, float, float, float, float]:
        """(value, plug-in, low, high, p). The interval: a distance of the truth from the plug-in point of at most c moves
        total variation by at most c (triangle inequality), so it holds wherever the truth is, also at zero. Its low end is 0
        unless the test rejects that."""
        plug_in = float(variation(shares(self.a), shares(self.b)))
        under = variation(*map(shares, self.exchanged))
        value = float(np.sqrt(max(plug_in**2 - (under**2).mean(), 0.0)))
        one, other = map(shares, self.again)
        away = variation(one - other, smoothed(self.a) - smoothed(self.b))
        reach, p = _quantile(away, level), self.p(plug_in, under)
        low = 0.0 if self._rejects_not(p, level) else max(plug_in - reach, 0.0)
        return value, plug_in, low, min(plug_in + reach, 1.0), p

    def divergence(self, level: float) -> tuple[float, float, float, float, float]:
        """(value, plug-in, low, high, p). The interval: from the lower of the percentiles of redrawn and of bias-corrected
        divergences to the higher one; its low end is 0 unless the test rejects that."""
        plug_in = float(divergence(smoothed(self.a), smoothed(self.b)))
        again, under = (divergence(*map(smoothed, sides)) for sides in (self.again, self.exchanged))
        bias = float(again.mean()) - plug_in
        low, high = (float(end) for end in np.quantile(again, [(1 - level) / 2, (1 + level) / 2]))
        p = self.p(plug_in, under)
        low = 0.0 if self._rejects_not(p, level) else max(min(low, low - 2 * bias), 0.0)
        return plug_in - bias, plug_in, low, max(high, high - 2 * bias), p


def _quantile(norms: np.ndarray, level: float) -> float:
    """Of norms of about normal vectors. Beyond what the draws resolve, the quantile for 95 % is scaled as that of one normal
    number is, whose tail is the heaviest of all."""
    if (1 - level) * len(norms) >= 5:
        return float(np.quantile(norms, level, method="higher"))
    return float(np.quantile(norms, LEVEL) * stats.norm.ppf((1 + level) / 2) / stats.norm.ppf((1 + LEVEL) / 2))
