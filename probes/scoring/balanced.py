"""Balanced accuracy, the mean over classes of the share of rows that are right, with an interval over groups.

The interval is Wilson's, for the number of rows that the variance over groups is worth (as Korn and Graubard count them for
surveys, Survey Methodology 24, 1998), with Satterthwaite's degrees of freedom. The variance of a class is taken at a share
that is drawn towards that of all classes, and its ratio to that of one row per group towards 1: a class with two rows, both
right, is not certain. So the width is positive even if every row is right.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from replaylens.probes.checks import no_nan, same_length
from replaylens.probes.errors import TooFewGroups
from replaylens.probes.scoring import statistics
from replaylens.probes.scoring.statistics import LEVEL, Estimate, group_sums

_PRIOR, _TRUST = 1.5, 1.0
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
        return float((heard * ratio + _TRUST) / (heard + _TRUST))


def balanced_accuracy(
    right: np.ndarray, codes: np.ndarray, groups: np.ndarray, *, folds: int = 1, level: float = LEVEL
) -> Estimate:
    """The mean over the classes of codes [rows] of the share of right [rows], with its interval over groups.

    folds  as for `statistics.cross_validation`

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
    reach = float(stats.t.ppf((1 + level) / 2, min(freedom, count - 1))) * statistics.cross_validation(folds)
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
    return max(float((heard * squares.sum() / alone + _TRUST * most) / (heard + _TRUST)), 1.0)


def _wilson(share: float, size: float, reach: float) -> tuple[float, float]:
    middle, square = share + reach**2 / (2 * size), reach**2 / size
    half = reach * np.sqrt(share * (1 - share) / size + square / (4 * size))
    return max(0.0, float((middle - half) / (1 + square))), min(1.0, float((middle + half) / (1 + square)))
