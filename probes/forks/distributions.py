"""Outcome distributions of rollouts: distances between them, `outcome_curve` along a path, and their texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from scipy import special, stats

from replaylens.engine.display import Citable
from replaylens.engine.records import Identifier
from replaylens.probes.checks import as_draws, mask_of
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.intervals import LEVEL
from replaylens.rollouts.plan import OutcomeCounts, sentence_spans
from replaylens.rollouts.rollouts import Rollouts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from replaylens.views.rollouts import RolloutTree

# ---- multinomials ----------------------------------------------------------------------------------------------------
# Distances between outcome distributions that are known by counts: estimates without the bias of counting, intervals, tests.
#
# The plug-in distance of two samples of one distribution is above zero: with 100 rollouts each and two equally likely
# outcomes, total variation is .056 on average. docs/branches.md has the formulas and their error rates. Equal input gives
# equal bits.

DistanceKind = Literal["tv", "kl"]
MEASURES = {"tv": "total variation", "kl": "KL divergence, nats"}
PERMUTATIONS, RESAMPLES = 999, 999
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
    under: np.ndarray
    """[pairs, 1 + permutations]: the plug-in distance of the counts, then those with rollouts exchanged between the sides; 0
    for pairs without rollouts"""


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
    permutations, resamples = as_draws("permutations", permutations), as_draws("resamples", resamples)
    most = 1.0 if measure == "tv" else np.inf
    columns = [np.full(len(first), fill) for fill in (np.nan, np.nan, 0.0, most, 1.0)]
    under = np.zeros((len(first), 1 + permutations))
    for pair in np.flatnonzero((first.sum(1) > 0) & (second.sum(1) > 0)):
        sides = _seen(first[pair], second[pair])
        drawing = _Drawing(*sides, permutations, resamples, [seed, int(pair), 0xD157])
        found = drawing.variation(level) if measure == "tv" else drawing.divergence(level)
        for column, number in zip(columns, found[:5], strict=True):
            column[pair] = number
        under[pair] = [found[1], *found[5]]
    value, plain, low, high, p = columns
    return Distances(value, plain, low, high, p, under)


def plug_in(a: np.ndarray, b: np.ndarray, measure: DistanceKind) -> float:
    """The distance of two samples, by counts [outcomes]."""
    one, two = _seen(a, b)
    return float(variation(shares(one), shares(two)) if measure == "tv" else divergence(smoothed(one), smoothed(two)))


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
    return replace(found, value=value, plug_in=np.where(known, value, found.plug_in), low=low, high=high)


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
        self.generator = generator = np.random.default_rng(seed)
        self.a, self.b, self.permutations = a, b, permutations
        self.again = [generator.multinomial(side.sum(), smoothed(side), size=resamples) for side in (a, b)]
        one = generator.multivariate_hypergeometric(a + b, a.sum(), size=permutations)
        self.exchanged = [one, a + b - one]

    def p(self, observed: float, under: np.ndarray) -> float:
        return float((1 + (under >= observed - 1e-12).sum()) / (1 + self.permutations))

    def _rejects_not(self, p: float, level: float) -> bool:
        """Whether the permutations are enough for a test at this level, and it does not reject that both sides are equal."""
        return p > 1 - level and (1 - level) * (1 + self.permutations) >= 1

    def variation(self, level: float) -> tuple[float, float, float, float, float, np.ndarray]:
        """(value, plug-in, low, high, p, plug-ins of exchanged rollouts).

        The interval: a distance of the truth from the plug-in point of at most c moves
        total variation by at most c (triangle inequality), so it holds wherever the truth is, also at zero. Its low end is 0
        unless the test rejects that."""
        plug_in = float(variation(shares(self.a), shares(self.b)))
        under = variation(*map(shares, self.exchanged))
        value = float(np.sqrt(max(plug_in**2 - (under**2).mean(), 0.0)))
        one, other = map(shares, self.again)
        away = variation(one - other, smoothed(self.a) - smoothed(self.b))
        reach, p = _quantile(away, level), self.p(plug_in, under)
        low = 0.0 if self._rejects_not(p, level) else max(plug_in - reach, 0.0)
        return value, plug_in, low, min(plug_in + reach, 1.0), p, under

    def divergence(self, level: float) -> tuple[float, float, float, float, float, np.ndarray]:
        """(value, plug-in, low, high, p, plug-ins of exchanged rollouts).

        The low end is the lower of the percentiles of redrawn and of bias-corrected divergences, and 0 unless the test rejects
        that. The high end is the percentile when both sides are drawn from their posterior (Jeffreys). That gives every
        outcome some weight, which makes a first side that is certain less so, and the divergence smaller. So it is at least
        the one with no weight on outcomes that the first side never has."""
        plug_in = float(divergence(smoothed(self.a), smoothed(self.b)))
        again, under = (divergence(*map(smoothed, sides)) for sides in (self.again, self.exchanged))
        bias, tail, p = float(again.mean()) - plug_in, (1 - level) / 2, self.p(plug_in, under)
        low = float(np.quantile(again, tail))
        low = 0.0 if self._rejects_not(p, level) else max(min(low, low - 2 * bias), 0.0)
        one, bare, other = self._posterior()
        high = max(float(np.quantile(divergence(side, other), 1 - tail)) for side in (one, bare))
        return plug_in - bias, plug_in, low, high, p, under

    def _posterior(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws [resamples, outcomes] of the first side, of it without the outcomes that it never has, and of the second."""
        one, other = (self.generator.dirichlet(side + PRIOR, size=len(self.again[0])) for side in (self.a, self.b))
        bare, seen = np.zeros(one.shape), self.a > 0
        bare[:, seen] = self.generator.dirichlet(self.a[seen], size=len(one))
        return one, bare, other


def _quantile(norms: np.ndarray, level: float) -> float:
    """Of norms of about normal vectors. Beyond what the draws resolve, the quantile for 95 % is scaled as that of one normal
    number is, whose tail is the heaviest of all."""
    if (1 - level) * len(norms) >= 5:
        return float(np.quantile(norms, level, method="higher"))
    return float(np.quantile(norms, LEVEL) * stats.norm.ppf((1 + level) / 2) / stats.norm.ppf((1 + LEVEL) / 2))


# ---- farther than a threshold ------------------------------------------------------------------------------------------

_EXACT = 10_000
"""tables of two counts, up to which their probabilities are added up; beyond, the likelihood ratio is about normal"""
_PLACES, _GRID = 24, 1 / 128
"""compatible probabilities that are tried; distances between bounds that are tried"""


def variation_low(a: np.ndarray, b: np.ndarray, threshold: float, level: float) -> float:
    """Lower confidence bound of the total variation behind counts a and b [outcomes]. It is above the threshold just where the
    test rejects that total variation is at most the threshold.

    The test: total variation is the largest difference of probabilities over all ways to split the outcomes into two kinds.
    The split that the counts suggest is tested exactly, by the likelihood ratio, at the least favourable probabilities with
    that difference that are compatible with the counts (Berger and Boos 1994), and corrected for the number of splits.
    """
    there = (a + b) > 0
    if not a.sum() or not b.sum() or there.sum() < 2:
        return 0.0
    one = (shares(a) > shares(b)) & there
    alpha = (1 - level) / (2.0 ** (int(there.sum()) - 1) - 1)
    return _difference_low(int(a[one].sum()), int(a.sum()), int(b[one].sum()), int(b.sum()), threshold, alpha)


@lru_cache(4096)
def _difference_low(x: int, n: int, y: int, m: int, threshold: float, alpha: float) -> float:
    """The same for x of n and y of m, with x / n above y / m: on a grid, and on the right side of the threshold."""
    low, step = 0.0, 0.5
    while step >= _GRID:
        low, step = (low + step if _at_most(x, n, y, m, low + step, alpha) <= alpha else low), step / 2
    above = _at_most(x, n, y, m, threshold, alpha) <= alpha
    return max(low, float(np.nextafter(threshold, 1.0))) if above else min(low, threshold)


def _at_most(x: int, n: int, y: int, m: int, t: float, alpha: float) -> float:
    """p of the test that x of n and y of m, with x / n above y / m, have probabilities whose difference is t at most."""
    if x / n - y / m <= t:
        return 1.0
    if (n + 1) * (m + 1) > _EXACT:
        found = float(_ratio(np.array(x), n, np.array(y), m, t))
        far = x / n - y / m
        return float(stats.norm.sf(found) + stats.norm.sf(found * (far + t) / (far - t)))  # of both signs of the difference
    ratio = _ratios(n, m, t)
    rejected = ratio >= ratio[x, y] - 1e-9
    wide = alpha / 20  # the probability that the truth is not among those compatible, which adds to p
    lows, highs = zip(*(_binomial_ends(k, total, wide / 2) for k, total in ((x, n), (y, m))), strict=True)
    first, last = max(lows[0], lows[1] + t, t), min(highs[0], highs[1] + t, 1.0)
    if first > last:
        return wide
    p = np.linspace(first, last, _PLACES)[:, None]
    one, other = _binomial(n, p), _binomial(m, p - t)
    return float(((one @ rejected) * other).sum(1).max()) + wide


@lru_cache(128)
def _ratios(n: int, m: int, t: float) -> np.ndarray:
    """[n + 1, m + 1]: the ratio of every table, for a difference of either sign."""
    ratio = _ratio(np.arange(n + 1.0)[:, None], n, np.arange(m + 1.0)[None], m, t)
    return np.maximum(ratio, ratio[::-1, ::-1])


def _binomial(total: int, p: np.ndarray) -> np.ndarray:
    """[places, total + 1]: the probability of each count, for p [places, 1]."""
    k = np.arange(total + 1)
    ways = special.gammaln(total + 1) - special.gammaln(k + 1) - special.gammaln(total - k + 1)
    found: np.ndarray = np.exp(ways + special.xlogy(k, p) + special.xlog1py(total - k, -p))
    return found


def _binomial_ends(k: int, total: int, alpha: float) -> tuple[float, float]:
    """The exact interval of a probability (Clopper and Pearson)."""
    low = 0.0 if k == 0 else float(special.betaincinv(k, total - k + 1, alpha / 2))
    return low, 1.0 if k == total else float(special.betaincinv(k + 1, total - k, 1 - alpha / 2))


def _ratio(x: np.ndarray, n: int, y: np.ndarray, m: int, t: float) -> np.ndarray:
    """Signed root of the likelihood ratio of x of n and y of m against probabilities with the difference t.

    The likeliest of these solve a cubic equation (Farrington and Manning 1990).
    """
    p, q, r = x / n, y / m, m / n
    a, b, c, d = 1 + r, -(1 + r + p + r * q + t * (r + 2)), t * t + t * (2 * p + r + 1) + p + r * q, -p * t * (1 + t)
    v = (b / (3 * a)) ** 3 - b * c / (6 * a * a) + d / (2 * a)
    u = np.sign(v) * np.sqrt(np.maximum((b / (3 * a)) ** 2 - c / (3 * a), 1e-60))
    turned = (np.pi + np.arccos(np.clip(v / np.where(u == 0, 1.0, u**3), -1, 1))) / 3
    first = np.clip(2 * u * np.cos(turned) - b / (3 * a), t, 1)
    with np.errstate(divide="ignore"):
        excess = 2 * (_excess(x, n, first) + _excess(y, m, first - t))
    root: np.ndarray = np.sqrt(np.clip(excess, 0, 1e9))
    return np.where(p - q > t, root, -root)


def _excess(k: np.ndarray, total: int, p: np.ndarray) -> np.ndarray:
    """Log-likelihood of k of total at its own share, minus that at p."""
    own = special.xlogy(k, k / total) + special.xlogy(total - k, 1 - k / total)
    lost: np.ndarray = own - special.xlogy(k, p) - special.xlogy(total - k, 1 - p)
    return lost


# ---- distributions ---------------------------------------------------------------------------------------------------
# `outcome_curve`: the outcome distribution at every fork, with intervals.


@dataclass(frozen=True, eq=False)
class OutcomeCurve(Citable):
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
        from replaylens.engine.display import picture, plain
        from replaylens.views.rollouts import colours

        figure = picture(min(0.25 * len(self.positions), 18) + 4, 3.2)
        axes = figure.subplots()
        for k, (name, colour) in enumerate(zip(self.outcomes, colours(self.outcomes), strict=True)):
            axes.plot(self.positions, self.value[:, k], marker="o", markersize=3, label=plain(name), color=colour)
            if len(self.positions) > 1:
                axes.fill_between(self.positions, self.low[:, k], self.high[:, k], alpha=0.25, color=colour, linewidth=0)
            else:  # a band over one position has no width
                axes.vlines(self.positions, self.low[:, k], self.high[:, k], color=colour)
        axes.set(xlabel="position of the fork", ylabel="probability of the outcome", ylim=(0, 1))
        figure.legend(loc="outside right upper", fontsize=8)
        return self._shown(figure)

    def _repr_html_(self) -> str:
        from replaylens.views.html import fragment
        from replaylens.views.rollouts import curve_svg

        return fragment(curve_svg(self.texts, self.outcomes, self.value, self.low, self.high))


def outcome_curve(counts: OutcomeCounts, *, level: float = LEVEL, joint: bool = False) -> OutcomeCurve:
    """The outcome distribution at every position.

    joint  widen the intervals so that all of them hold at once, for statements about the largest or the first
           (exact binomial intervals, Bonferroni); otherwise each holds by itself (Jeffreys)

    >>> import numpy as np
    >>> from replaylens.rollouts.plan import OutcomeCounts
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
    names, made_by = (counts.positions, counts.texts, counts.outcomes), counts.made_by
    return OutcomeCurve(*names, total, value, low, high, entropy(value, seen), level, joint, made_by=made_by)


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


# ---- rollout texts ---------------------------------------------------------------------------------------------------
# `RolloutTexts`: the texts and outcomes of rollouts from forks along one path.

_NO_ANSWER = "no answer"


@dataclass(frozen=True, eq=False)
class RolloutTexts(Citable):
    """One entry per rollout. Raises BadRows for lengths or outcomes that do not fit."""

    positions: list[int]
    """token positions of the forks, ascending"""
    texts: list[str]
    """the unit of the path that starts at each position"""
    outcomes: list[str]
    """all outcomes, in the order of columns and colours"""
    fork: np.ndarray
    """int64 [rollouts]: the number of the position that a rollout starts from"""
    units: list[tuple[str, ...]]
    """[rollouts]: the units of its text; the first takes the place of the path's"""
    outcome: list[str]
    """[rollouts]"""

    def __post_init__(self) -> None:
        lengths = {len(self.fork), len(self.units), len(self.outcome)}
        if len(lengths) > 1 or len(self.positions) != len(self.texts):
            raise BadRows(
                f"{len(self.fork)} forks, {len(self.units)} units and {len(self.outcome)} outcomes of rollouts, "
                f"{len(self.positions)} positions and {len(self.texts)} texts. Give one of each per rollout and per position."
            )
        unknown = sorted(set(self.outcome) - set(self.outcomes))
        if unknown:
            raise BadRows(f"Outcome {unknown[0]!r} is not among {', '.join(self.outcomes)}. List it in `outcomes`.")
        if len(self.fork) and (self.fork.min() < 0 or self.fork.max() >= len(self.positions)):
            raise BadRows(f"Forks go from 0 to {len(self.positions) - 1}; given: {self.fork.min()} to {self.fork.max()}.")

    def __len__(self) -> int:
        return len(self.fork)

    def __repr__(self) -> str:
        return f"RolloutTexts({len(self)} from {len(self.positions)} forks, {', '.join(self.outcomes)})"

    @classmethod
    def of(cls, rollouts: Rollouts) -> "RolloutTexts":
        """Of what `branch.resample` returns; units are sentences (docs/branches.md)."""
        split = lambda text: [text[start:end] for start, end in sentence_spans(text)]  # noqa: E731
        counts = rollouts.outcomes()
        return replace(cls.of_frame(rollouts.frame, counts.texts, split=split), made_by=counts.made_by)

    @classmethod
    def of_frame(
        cls,
        frame: pd.DataFrame,
        texts: Sequence[str],
        *,
        outcomes: Sequence[str] | None = None,
        split: Callable[[str], Sequence[str]] | None = None,
    ) -> "RolloutTexts":
        """From a frame with the columns `position`, `outcome` (None: no answer) and `units`, one line per rollout.

        texts     the path's unit at each position that occurs, in ascending order
        outcomes  their order; default: by frequency
        split     makes units of the column `text`, in place of the column `units`
        """
        wanted = "units" if split is None else "text"
        missing = [name for name in ("position", "outcome", wanted) if name not in frame]
        if missing:
            raise BadRows(f"The frame has no column {missing[0]!r}. It has {', '.join(map(str, frame.columns))}.")
        positions, fork = np.unique(frame["position"].to_numpy(), return_inverse=True)
        names = [_NO_ANSWER if pd.isna(name) else str(name) for name in frame["outcome"]]
        order = list(outcomes) if outcomes is not None else list(pd.Series(names, dtype=object).value_counts().index)
        units = [tuple(each if split is None else split(each)) for each in frame[wanted]]
        return cls(positions.tolist(), list(texts), order, fork.astype(np.int64), units, names)

    def counts(self) -> OutcomeCounts:
        """The outcomes counted at each position."""
        place = {name: k for k, name in enumerate(self.outcomes)}
        table = np.zeros((len(self.positions), len(self.outcomes)), dtype=np.int64)
        np.add.at(table, (self.fork, np.array([place[name] for name in self.outcome], dtype=np.int64)), 1)
        return OutcomeCounts(self.positions, self.outcomes, table, self.texts, made_by=self.made_by)

    def where(self, mask: np.ndarray) -> "RolloutTexts":
        """Some of the rollouts; positions and outcomes stay."""
        at = np.flatnonzero(mask_of("mask of rollouts", mask, len(self)))
        units, outcome = [self.units[i] for i in at], [self.outcome[i] for i in at]
        return RolloutTexts(self.positions, self.texts, self.outcomes, self.fork[at], units, outcome, made_by=self.made_by)

    def tree(self, title: str = "", prompt: str = "") -> "RolloutTree":
        """The picture of all rollouts, folded where they say the same; `prompt` is shown before the path."""
        from replaylens.views.rollouts import RolloutTree

        number = {name: k for k, name in enumerate(self.outcomes)}
        return RolloutTree(
            tuple(self.texts),
            tuple(self.outcomes),
            tuple(self.fork.tolist()),
            tuple(self.units),
            tuple(number[name] for name in self.outcome),
            title or f"{len(self)} rollouts from {len(self.positions)} forks",
            prompt,
            source=str(Identifier(self.digest)),
        )
