"""Areas under the ROC curve with intervals over groups: what a score is worth that only has to rank rows.

The variance is DeLong's (Biometrics 44, 1988) with rows summed within their group (Obuchowski, Biometrics 53, 1997). Near 0 and
1 it tends to zero while the truth does not have to: the interval therefore inverts a score test, in which the variance is that
of Hanley and McNeil at each candidate area (Newcombe, Statistics in Medicine 25, 2006, method 5), scaled to agree with the
observed one where that can be estimated. So an area of 1 has an interval of positive width, whatever the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from replaylens.probes import intervals
from replaylens.probes.checks import no_nan, same_length
from replaylens.probes.errors import OneClass, TooFewGroups
from replaylens.probes.intervals import LEVEL, Estimate, group_sums

# ---- areas -----------------------------------------------------------------------------------------------------------

_TRUST = 0.5
"""groups' worth of belief in the variance that counts every group once, against the observed variance"""
_DRAWS, _EDGE = 2000, 1 - 1e-9


@dataclass(frozen=True, eq=False)
class Auroc:
    """The area of one score, and what each group contributes to its error."""

    value: float
    parts: np.ndarray
    """[groups]: influence of each group; the sum of their squares is the variance of the area"""
    sizes: tuple[float, float]
    """number of groups of equal size that would say as much as those with good rows, and as those with bad rows"""

    @property
    def variance(self) -> float:
        """Of the value, over groups."""
        return float((self.parts**2).sum())

    def quantile(self, level: float) -> float:
        """Critical value of a two-sided test."""
        return float(stats.t.ppf((1 + level) / 2, len(self.parts) - 1))

    def interval(self, reach: float) -> tuple[float, float]:
        """The areas that a test with this critical value does not reject."""
        scale = self._scale()

        def misfit(area: float) -> float:
            return (self.value - area) ** 2 - reach**2 * scale * _variance(area, *self.sizes)

        inner = min(max(self.value, 1 - _EDGE), _EDGE)  # at 0 and 1 the test does not reject the value, but has no variance
        low = 0.0 if misfit(1 - _EDGE) <= 0 or self.value <= 0 else optimize.brentq(misfit, 1 - _EDGE, inner)
        high = 1.0 if misfit(_EDGE) <= 0 or self.value >= 1 else optimize.brentq(misfit, inner, _EDGE)
        return float(low), float(high)

    def _scale(self) -> float:
        """Observed over expected variance, drawn towards 1 by as much as few groups make up the observed one."""
        expected, squares = _variance(self.value, *self.sizes), self.parts**2
        if expected <= 0 or squares.sum() <= 0:
            return 1.0
        heard = squares.sum() ** 2 / (squares**2).sum()  # number of groups that would give this variance in equal parts
        return float((heard * self.variance / expected + _TRUST) / (heard + _TRUST))


def _variance(area: float, good: float, bad: float) -> float:
    """Of an area over so many independent rows of each kind, for exponential scores (Hanley and McNeil 1982)."""
    more = (good + bad) / 2 - 1
    return area * (1 - area) * (1 + more * (1 - area) / (2 - area) + more * area / (1 + area)) / (good * bad)


def auroc_of(score: np.ndarray, good: np.ndarray, groups: np.ndarray, strata: np.ndarray | None = None) -> Auroc:
    """The area of a score [rows] for good against other rows, with the contribution of every group [rows of names].

    strata  [rows]: only rows of one stratum are compared, such as those of one fold: scores of different probes have no
            common zero, and a kind that is frequent in the training folds is rarer in the tested one
    """
    same_length(score=score, good=good, groups=groups, **({} if strata is None else {"strata": strata}))
    no_nan("score", score)
    score, good, groups = np.asarray(score), np.asarray(good, dtype=bool), np.asarray(groups)
    if good.all() or not good.any():
        raise OneClass(f"All {len(good)} rows are {'good' if good.any() else 'bad'}. An area needs rows of both kinds.")
    if len(np.unique(groups)) < 2:
        raise TooFewGroups("All rows are of one group. Give rows of at least 2 groups for an interval.")
    wins, rivals = np.zeros(len(good)), np.zeros(len(good))  # [rows]: pairs that a row wins if good, or loses if bad; its pairs
    for stratum in [np.ones(len(good), bool)] if strata is None else [strata == each for each in np.unique(strata)]:
        kinds = good[stratum]
        rivals[stratum] = np.where(kinds, (~kinds).sum(), kinds.sum())
        if kinds.any() and not kinds.all():
            wins[stratum] = rivals[stratum] * _ranks(score[stratum], kinds)
    pairs = rivals[good].sum()
    if not pairs:
        raise OneClass("No stratum has rows of both kinds. Give more rows, or fewer strata.")
    value = float(wins[good].sum() / pairs)
    place = (wins - value * rivals) / pairs
    parts, sizes = zip(*(_side(place, side, groups) for side in (good, ~good)), strict=True)
    return Auroc(value, parts[0] + parts[1], (sizes[0], sizes[1]))


def _side(place: np.ndarray, side: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, float]:
    """(influence [groups] of the rows of one kind, their number of groups as in `Auroc.sizes`).

    A group that holds much of its kind pulls the mean towards itself, so that its distance from it is too small: by 1 - share
    on average, which is taken back (Bell and McCaffrey, Survey Methodology 28, 2002).
    """
    share = group_sums(side / side.sum(), groups)
    parts = group_sums(np.where(side, place, 0.0), groups)
    return parts / np.sqrt(np.maximum(1 - share, 0.5)), float(1 / (share**2).sum())


def _ranks(score: np.ndarray, good: np.ndarray) -> np.ndarray:
    """For each good row the share of bad rows below it, for each bad row that of good rows above it; ties count half."""
    ups, downs = np.sort(score[good]), np.sort(score[~good])
    above = 1 - (np.searchsorted(ups, score) + np.searchsorted(ups, score, side="right")) / (2 * len(ups))
    below = (np.searchsorted(downs, score) + np.searchsorted(downs, score, side="right")) / (2 * len(downs))
    return np.where(good, below, above)


def area(
    score: np.ndarray,
    good: np.ndarray,
    groups: np.ndarray,
    *,
    strata: np.ndarray | None = None,
    folds: int = 1,
    level: float = LEVEL,
) -> Estimate:
    """The area of a score with its interval over groups; strata as for `auroc_of`, folds as for `intervals.cross_validation`.

    >>> import numpy as np
    >>> good = np.repeat([True, False], 10)
    >>> print(area(np.where(good, 1.0, 0.0), good, np.arange(20).astype(str)))
    1.000 [0.776, 1.000]
    """
    found = auroc_of(score, good, groups, strata)
    reach = found.quantile(level) * intervals.cross_validation(folds)
    return Estimate(found.value, *found.interval(reach), level)


def area_of_classes(
    score: np.ndarray,
    codes: np.ndarray,
    groups: np.ndarray,
    *,
    strata: np.ndarray | None = None,
    folds: int = 1,
    level: float = LEVEL,
) -> Estimate | None:
    """The mean area of one class against the rest, as `intervals.auroc` has it, with its interval; None if none is defined.

    score  [rows, outputs], as in `HeldOutPredictions.score`
    """
    kinds = [(score[:, 0], codes == 1)] if score.shape[1] == 1 else [(score[:, k], codes == k) for k in range(score.shape[1])]
    found = []
    for column, good in kinds:
        try:
            found.append(auroc_of(column, good, groups, strata))
        except OneClass:
            continue
    if not found:
        return None
    sizes = [float(1 / np.mean([1 / each.sizes[side] for each in found])) for side in (0, 1)]
    mean = Auroc(
        float(np.mean([each.value for each in found])), np.mean([each.parts for each in found], axis=0), (sizes[0], sizes[1])
    )
    reach = mean.quantile(level) * intervals.cross_validation(folds)
    return Estimate(mean.value, *mean.interval(reach), level)


def area_gains(
    scores: Sequence[np.ndarray],
    baseline: np.ndarray,
    good: np.ndarray,
    groups: np.ndarray,
    *,
    strata: np.ndarray | None = None,
    folds: int = 1,
    seed: int = 0,
    level: float = LEVEL,
) -> list[Estimate]:
    """How much larger each score's area is than the baseline's, with intervals that hold for all scores jointly.

    The variance is that of the groups' own differences. Where few groups make it up, it is drawn towards one that adds the
    squared distances of both areas' own ends, less their covariance (Zou, Psychological Methods 12, 2007): two areas of 1
    differ by 0, with an interval of positive width.
    """
    base, *own = (auroc_of(score, good, groups, strata) for score in (baseline, *scores))
    gaps = np.stack([each.parts - base.parts for each in own])  # [scores, groups]
    spread = np.sqrt((gaps**2).sum(1))
    draws = np.random.default_rng([seed, 0xA4EA]).normal(size=(_DRAWS, len(base.parts))) @ gaps.T
    farthest = (np.abs(draws) / np.where(spread > 0, spread, np.inf)).max(1)
    joint = max(float(np.quantile(farthest, level)), float(stats.norm.ppf((1 + level) / 2)))
    reach = joint * base.quantile(level) / float(stats.norm.ppf((1 + level) / 2)) * intervals.cross_validation(folds)
    low, high = base.interval(reach)
    found = []
    for each, gap in zip(own, gaps, strict=True):
        value, (least, most) = each.value - base.value, each.interval(reach)
        size = np.sqrt((each.parts**2).sum() * (base.parts**2).sum())
        shared = float(each.parts @ base.parts / size) if size > 0 else 0.0
        down, up = (
            _shrunk(gap, reach, _joined(*arms, shared))
            for arms in ((each.value - least, high - base.value), (most - each.value, base.value - low))
        )
        found.append(Estimate(value, max(value - down, -1.0), min(value + up, 1.0), level))
    return found


def _joined(a: float, b: float, shared: float) -> float:
    """Length of the difference of two errors of these lengths with this correlation."""
    return float(np.sqrt(max(a**2 + b**2 - 2 * shared * a * b, 0.0)))


def _shrunk(gap: np.ndarray, reach: float, arm: float) -> float:
    """The reach of the groups' own differences [groups], drawn towards another arm if few groups make them up."""
    squares = gap**2
    if squares.sum() == 0:
        return arm
    heard = squares.sum() ** 2 / (squares**2).sum()
    own = reach**2 * squares.sum()
    return float(np.sqrt((heard * own + _TRUST * arm**2) / (heard + _TRUST)))


# ---- balanced --------------------------------------------------------------------------------------------------------
# Balanced accuracy, the mean over classes of the share of rows that are right, with an interval over groups.
#
# The interval is Wilson's, for the number of rows that the variance over groups is worth (as Korn and Graubard count them for
# surveys, Survey Methodology 24, 1998), with Satterthwaite's degrees of freedom. The variance of a class is taken at a share
# that is drawn towards that of all classes, and its ratio to that of one row per group towards 1: a class with two rows, both
# right, is not certain. So the width is positive even if every row is right.

_PRIOR, _TRUST_BALANCED = 1.5, 1.0
"""groups' worth of belief that a class is as easy as all classes, and that rows of a group are copies of each other"""


@dataclass(frozen=True, eq=False)
class _Class:
    share: float
    parts: np.ndarray
    """[groups]: their contributions to the error of the share"""
    size: int
    """number of groups with rows of the class"""

    def variance(self, common: float) -> float:
        """Of the share, drawn towards one that all classes have in common."""
        likely = (self.size * self.share + _PRIOR * common) / (self.size + _PRIOR)
        return likely * (1 - likely) / self.size * self._copies()

    def _copies(self) -> float:
        """The observed variance over that of one row per group: 1 if the rows of a group are copies, less otherwise."""
        squares, expected = self.parts**2, self.share * (1 - self.share) / self.size
        if self.size < 2 or squares.sum() == 0:
            return 1.0
        heard = squares.sum() ** 2 / (squares**2).sum()  # number of groups that would give this variance in equal parts
        ratio = float(squares.sum()) * self.size / (self.size - 1) / expected
        return float((heard * ratio + _TRUST_BALANCED) / (heard + _TRUST_BALANCED))


def balanced_accuracy(
    right: np.ndarray, codes: np.ndarray, groups: np.ndarray, *, folds: int = 1, level: float = LEVEL
) -> Estimate:
    """The mean over the classes of codes [rows] of the share of right [rows], with its interval over groups.

    folds  as for `intervals.cross_validation`

    >>> import numpy as np
    >>> print(balanced_accuracy(np.ones(12), np.repeat([0, 1], 6), np.arange(12).astype(str)))
    1.000 [0.712, 1.000]
    """
    same_length(right=right, codes=codes, groups=groups)
    right, codes, groups = np.asarray(right, dtype=float), np.asarray(codes), np.asarray(groups)
    no_nan("right", right)
    if (count := len(np.unique(groups))) < 2:
        raise TooFewGroups(f"{count} groups are too few. Give rows of at least 2 for an interval over groups.")
    classes = [_class(right, codes == each, groups) for each in np.unique(codes)]
    value = float(np.mean([each.share for each in classes]))
    common = (value * count + 0.5) / (count + 1)
    variances = np.array([each.variance(common) for each in classes])
    sizes = np.array([each.size for each in classes])
    likely = np.mean([(each.size * each.share + _PRIOR * common) / (each.size + _PRIOR) for each in classes])
    freedom = variances.sum() ** 2 / (variances**2 / (sizes - 1 + _PRIOR)).sum()
    variance = _together(classes) * variances.sum() / len(classes) ** 2
    reach = float(stats.t.ppf((1 + level) / 2, min(freedom, count - 1))) * intervals.cross_validation(folds)
    return Estimate(value, *_wilson(value, float(likely * (1 - likely) / variance), reach), level)


def _class(right: np.ndarray, own: np.ndarray, groups: np.ndarray) -> _Class:
    share = float(right[own].mean())
    parts = group_sums(np.where(own, right - share, 0) / own.sum(), groups)
    return _Class(share, parts, len(np.unique(groups[own])))


def _together(classes: list[_Class]) -> float:
    """How much larger the variance is because a group with rows of several classes errs in all of them; at least 1."""
    parts = np.stack([each.parts for each in classes])
    alone, squares = (parts**2).sum(), parts.sum(0) ** 2
    most = sum(each.size for each in classes) / parts.shape[1]  # classes per group: if they always err together
    if squares.sum() == 0:
        return most
    heard = squares.sum() ** 2 / (squares**2).sum()
    return max(float((heard * squares.sum() / alone + _TRUST_BALANCED * most) / (heard + _TRUST_BALANCED)), 1.0)


def _wilson(share: float, size: float, reach: float) -> tuple[float, float]:
    middle, square = share + reach**2 / (2 * size), reach**2 / size
    half = reach * np.sqrt(share * (1 - share) / size + square / (4 * size))
    low, high = float((middle - half) / (1 + square)), float((middle + half) / (1 + square))
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding must not leave out the share itself
