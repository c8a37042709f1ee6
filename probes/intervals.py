"""Metrics of held-out predictions, with intervals and tests over groups of rows."""

from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.stats import rankdata

from replaylens.engine.request.values import short_repr
from replaylens.probes.checks import as_numbers, no_nan, same_length
from replaylens.probes.errors import BadRows, TooFewGroups

# ---- metrics ---------------------------------------------------------------------------------------------------------
# Metrics of held-out predictions: AUROC, balanced accuracy, F1. Pure functions, for many cells at once.
#
# Give the tested rows alone. What a metric cannot know from them is NaN, and nothing is filled in:
#
#     auroc              NaN if the rows (of every fold) have one class. For more than two classes, the mean of one class
#                        against the rest over the classes that occur
#     balanced_accuracy  the mean recall over the classes that occur; NaN if only one does, since that is not a balance
#     f1                 NaN if the class occurs neither among the labels nor among the predictions. For more than two classes,
#                        the mean over the classes that occur in either
#
# Under cross-validation, give `fold` to `auroc`: rows are then compared within their fold only. Scores of probes with
# different training rows have no common zero, and pooled ones are biased: where nothing is to be read, pooled AUROC is below
# 1/2, because a class that is frequent in the training folds is rarer in the test fold (Forman and Scholz 2010).


def auroc(score: np.ndarray, codes: np.ndarray, fold: np.ndarray | None = None) -> np.ndarray:
    """[cells]: the probability that a row of a class scores higher than a row of another class; ties count one half.

    score  [cells, rows, outputs], as in `HeldOutPredictions.score`: one column of the second of two classes, or one column per
    class codes  [rows]: class numbers
    fold   [rows]: compare rows of equal fold only; each fold counts by its pairs
    """
    if score.shape[-1] == 1:
        return _area(score[..., 0], codes == 1, fold)
    return _mean([_area(score[..., k], codes == k, fold) for k in range(score.shape[-1])])


def balanced_accuracy(predicted: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """[cells]: mean recall over classes, from predicted [cells, rows] and codes [rows]."""
    found = np.unique(codes)
    if len(found) < 2:
        return np.full(len(predicted), np.nan)
    return _mean([(predicted[:, codes == k] == k).mean(1) for k in found])


def f1(predicted: np.ndarray, codes: np.ndarray, classes: int) -> np.ndarray:
    """[cells]: harmonic mean of precision and recall, from predicted [cells, rows] and codes [rows].

    Two classes: of the second. More: the mean over classes.
    """
    return _mean([_f1_of(predicted == k, codes == k) for k in ([1] if classes == 2 else range(classes))])


def contributions(
    metric: str, predicted: np.ndarray, score: np.ndarray, codes: np.ndarray, fold: np.ndarray | None = None
) -> np.ndarray:
    """[cells, rows], whose means are the metric of each cell; deviations from it are the influence of each row.

    So the sums over groups give standard errors and paired differences of every metric, as those of right answers do for
    accuracy: of an area, they are the components of DeLong (Biometrics 44, 1988).

    metric  accuracy, balanced_accuracy or auroc, which is NaN where no fold has two classes; other arguments as for these
    """
    if metric == "accuracy":
        return np.asarray(predicted == codes, dtype=np.float64)
    if metric == "balanced_accuracy":
        return _recall_parts(predicted == codes, codes)
    columns = {1: score[..., 0]} if score.shape[-1] == 1 else {k: score[..., k] for k in range(score.shape[-1])}
    parts = [part for k, column in columns.items() if (part := _area_parts(column, codes == k, fold)) is not None]
    return np.mean(parts, axis=0) if parts else np.full(score.shape[:2], np.nan)


def _recall_parts(right: np.ndarray, codes: np.ndarray) -> np.ndarray:
    found, place, counts = np.unique(codes, return_inverse=True, return_counts=True)
    recall = np.stack([right[:, place == k].mean(1) for k in range(len(found))])  # [classes, cells]
    return np.asarray(recall.mean(0)[:, None] + (right - recall[place].T) * (len(codes) / (len(found) * counts[place])))


def _area_parts(score: np.ndarray, positive: np.ndarray, fold: np.ndarray | None) -> np.ndarray | None:
    """[cells, rows] of one class against the others; None if no fold has both."""
    wins, rivals, pairs = np.zeros(score.shape), np.zeros(len(positive)), 0
    for mask in _strata(fold, len(positive)):
        rows = np.flatnonzero(mask)
        own, other = rows[positive[rows]], rows[~positive[rows]]
        pairs += len(own) * len(other)
        rivals[own], rivals[other] = len(other), len(own)
        every = rankdata(score[:, rows].astype(np.float64), axis=1)
        for side, sign in ((own, 1), (other, -1)):
            if len(side):
                within = rankdata(score[:, side].astype(np.float64), axis=1)
                below = every[:, np.searchsorted(rows, side)] - within  # of the other kind; ties count one half
                wins[:, side] = below if sign > 0 else len(own) - below
    if not pairs:
        return None
    value = wins[:, positive].sum(1, keepdims=True) / pairs
    return np.asarray(value + (wins - value * rivals) * (len(positive) / pairs))


def _area(score: np.ndarray, positive: np.ndarray, fold: np.ndarray | None) -> np.ndarray:
    """The Mann-Whitney statistic of score [cells, rows], divided by the number of pairs."""
    wins, pairs = np.zeros(len(score)), 0
    for rows in _strata(fold, len(positive)):
        own, ones = positive[rows], int(positive[rows].sum())
        ranks = _ranks(score[:, rows].astype(np.float64))
        wins += ranks[:, own].sum(1) - ones * (ones + 1) / 2
        pairs += ones * (len(own) - ones)
    return wins / pairs if pairs else np.full(len(score), np.nan)


def _ranks(score: np.ndarray) -> np.ndarray:
    """[cells, rows]: `rankdata` by row, in a third of its time where no two scores are equal."""
    order = np.argsort(score, axis=1)
    ordered = np.take_along_axis(score, order, 1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return np.asarray(rankdata(score, axis=1))
    ranks = np.empty(score.shape)
    np.put_along_axis(ranks, order, np.arange(1.0, score.shape[1] + 1)[None], 1)
    return ranks


def _strata(fold: np.ndarray | None, count: int) -> list[np.ndarray]:
    """Masks of the rows that are compared with each other."""
    return [
        np.ones(count, dtype=bool) if fold is None else fold == number for number in ([0] if fold is None else np.unique(fold))
    ]


def _f1_of(said: np.ndarray, true: np.ndarray) -> np.ndarray:
    both, either = (said & true).sum(1), said.sum(1) + true.sum()
    return np.divide(2 * both, either, out=np.full(len(said), np.nan), where=either > 0)


def _mean(parts: list[np.ndarray]) -> np.ndarray:
    """[cells]: the mean over the classes that are defined; NaN where none is."""
    values = np.stack(parts)  # [classes, cells]
    known = ~np.isnan(values)
    total = np.where(known, values, 0.0).sum(0)
    return np.divide(total, known.sum(0), out=np.full(values.shape[1], np.nan), where=known.any(0))


# ---- statistics ------------------------------------------------------------------------------------------------------
# Intervals and tests over groups: rows of one group are not independent observations (see `groups`).
#
# Every score here is a ratio of sums over rows: right answers over rows, explained over total squares. Its standard error
# comes from the groups' own sums (linearisation), its reference distribution has one degree of freedom less than there are
# groups.
#
# Cross-validated scores vary more than their groups show, because folds are fitted on each other's rows. `cross_validation`
# gives the factor; docs/probes.md has the simulation that it was chosen by. All randomness is seeded: equal input gives equal
# bits.

RESAMPLES, LEVEL = 1000, 0.95


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


# ---- sums over groups -------------------------------------------------------------------------------------------------


def group_sums(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """values [..., rows] -> sums per group [..., groups], groups in order of their ids."""
    place = np.unique(groups, return_inverse=True)[1]
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    return np.add.reduceat(np.asarray(values, dtype=np.float64)[..., order], starts, axis=-1)


def group_weights(groups: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """[resamples, groups]: how often each group is drawn, with replacement."""
    if groups < 2:
        raise TooFewGroups(f"{groups} independent groups are too few. Give prompts of at least 2 for an interval.")
    generator = np.random.default_rng([seed, 0xB007])
    return generator.multinomial(groups, np.full(groups, 1 / groups), size=resamples)


def cross_validation(folds: int, answers: float = 80.0) -> float:
    """The factor between the standard error of a cross-validated score and the one that its groups show; 1 without folds.

    Nadeau and Bengio (Machine Learning 52, 2003) give sqrt(1 + folds / (folds - 1)) for resampled splits, which is too much for
    disjoint folds of many rows: half of their term covers in simulations (docs/probes.md). Of few independent answers, a dozen
    groups that are right or wrong as a whole, all of it is needed: fits on so few vary more.

    answers  how many independent answers the score is worth; the default gives one half
    """
    return float(np.sqrt(1 + min(0.4 + 8 / answers, 1.5) * folds / (folds - 1))) if folds > 1 else 1.0


def effective_groups(sizes: np.ndarray) -> float:
    """How many groups of equal size tell as much as groups of these sizes [groups]: n for n equal ones, fewer otherwise.

    One large group among small ones decides a mean almost alone, so that the number of groups says little about its error.
    """
    if len(sizes) < 2:
        raise TooFewGroups(f"{len(sizes)} independent groups are too few. Give prompts of at least 2 for an interval.")
    return float(max(sizes.sum() ** 2 / (sizes**2).sum(), 1.5))


def _errors(above: np.ndarray, below: np.ndarray, value: np.ndarray, folds: int) -> np.ndarray:
    """Standard errors [cells] of above.sum(1) / below.sum(1), from sums per group [cells, groups]; `below` has equal lines."""
    count = effective_groups(below[0])
    away = (above - value[:, None] * below) / below.sum(1)[:, None]
    return np.asarray(cross_validation(folds) * np.sqrt(count / (count - 1) * (away**2).sum(1)))


# ---- intervals --------------------------------------------------------------------------------------------------------


def ratio_over_groups(
    top: np.ndarray,
    bottom: np.ndarray,
    groups: np.ndarray,
    *,
    level: float = LEVEL,
    folds: int = 1,
    least: float = 0.0,
) -> list[Estimate]:
    """sum(top) / sum(bottom) for each line of top [cells, rows], with its interval over groups; bottom is one line.

    folds  number of cross-validation folds that the scores come from; 1: one held-out side
    least  lowest possible score: 0 for a share, which gets the interval of `_share`; -inf for r2. The highest is 1
    """
    same_length(top=top, bottom=bottom, groups=groups)
    above, below = group_sums(np.atleast_2d(top), groups), group_sums(np.atleast_2d(bottom), groups)
    value = above.sum(1) / below.sum(1)
    size, rows = effective_groups(below[0]), len(groups)
    error = _errors(above, below, value, folds)
    if least == 0:
        counts = _answers(above, below, value, size, rows)
        return [_share(v, n, cross_validation(folds, n), size, rows, level) for v, n in zip(value, counts, strict=True)]
    reach = stats.t.ppf((1 + level) / 2, size - 1) * error
    return [Estimate(float(v), float(v - r), float(min(v + r, 1.0)), level) for v, r in zip(value, reach, strict=True)]


_TRUST = 3.0
"""groups' worth of belief that a group is right or wrong as a whole, against what the groups show of it"""


def _answers(above: np.ndarray, below: np.ndarray, value: np.ndarray, groups: float, rows: int) -> np.ndarray:
    """[cells]: how many independent answers each share is worth, from sums per group [cells, groups].

    The number that would have the variance that the groups show. Where few groups make it up, as where all but one row are
    right, it is drawn towards one answer a group, which it is where all agree: one error leaves the interval nearly as it is.
    """
    away = ((above - value[:, None] * below) / below.sum(1)[:, None]) ** 2
    shown = groups / (groups - 1) * away.sum(1)
    heard = np.divide(away.sum(1) ** 2, (away**2).sum(1), out=np.zeros(len(value)), where=shown > 0)
    one_each = value * (1 - value) / groups
    variance = (heard**2 * shown + _TRUST**2 * one_each) / (heard**2 + _TRUST**2)
    counts = np.divide(value * (1 - value), variance, out=np.full(len(value), float(groups)), where=shown > 0)
    return np.asarray(np.minimum(counts, rows))


def _share(value: float, answers: float, more: float, groups: float, rows: int, level: float) -> Estimate:
    """A share with its interval: Jeffreys' for so many independent answers (Korn and Graubard, Survey Methodology 24, 1998).

    more  factor of its standard error
    """
    narrower = stats.t.ppf((1 + level) / 2, max(rows - 1, 1)) / stats.t.ppf((1 + level) / 2, groups - 1)
    count = answers / more**2 * (narrower**2 if 0 < value < 1 else 1.0)
    tail, right = (1 - level) / 2, value * count
    low = stats.beta.ppf(tail, right + 0.5, count - right + 0.5) if value > 0 else 0.0
    high = stats.beta.ppf(1 - tail, right + 0.5, count - right + 0.5) if value < 1 else 1.0
    return Estimate(float(value), float(min(low, value)), float(max(high, value)), level)


def mean_over_groups(values: np.ndarray, groups: np.ndarray, *, folds: int = 1) -> Estimate:
    """The mean of values [rows] with its interval over groups. Zeros and ones are a share; for differences, which can be
    -1 although none is, take `difference_over_groups`."""
    values = as_numbers("values", values)
    same_length(values=values, groups=groups)
    if np.isin(values, (0, 1)).all():
        return ratio_over_groups(values[None], np.ones(len(values)), groups, folds=folds)[0]
    return difference_over_groups(values, groups, folds=folds, bounded=bool(np.abs(values).max() <= 1))


def difference_over_groups(
    values: np.ndarray, groups: np.ndarray, *, folds: int = 1, extra: float = 0.0, bounded: bool = True, level: float = LEVEL
) -> Estimate:
    """The mean of paired differences [rows], or of any numbers, with its t interval over groups.

    If all bounded values are equal, the interval still allows for what that many groups can miss.

    extra    variance of the mean that does not come from the groups
    bounded  values are differences of shares, between -1 and 1, and not numbers of any size (nats)
    """
    values = np.asarray(values, dtype=np.float64)
    above, below = group_sums(values[None], groups), group_sums(np.ones((1, len(values))), groups)
    value, size = values.mean(), effective_groups(below[0])
    reach = stats.t.ppf((1 + level) / 2, size - 1) * np.sqrt(_errors(above, below, np.array([value]), folds)[0] ** 2 + extra)
    if np.ptp(values) > 0 or not bounded:
        return Estimate(float(value), float(value - reach), float(value + reach), level)
    doubt = max(_doubt(size, level), reach)
    return Estimate(float(value), float(max(value - doubt, -1.0)), float(min(value + doubt, 1.0)), level)


def _doubt(observations: float, level: float = LEVEL) -> float:
    """Exact binomial bound if all observations agree: the largest share of others that is compatible with seeing none."""
    return float(1 - ((1 - level) / 2) ** (1 / observations))


def mean_over_placebos(
    values: np.ndarray, groups: np.ndarray, *, seed: int = 0, share: bool = False, level: float = LEVEL
) -> Estimate:
    """The mean of values [placebos, rows] with an interval over both: each resample draws groups and, independently, placebos.

    Placebos are a sample of directions, as groups are a sample of prompts: if a placebo does the same to every prompt, all its
    rows are one observation.

    share  values are 0 or 1. If all are equal, resampling shows no spread; the end of the interval is then the exact
           binomial one for the number of groups or of placebos, whichever is smaller
    """
    sums, sizes = group_sums(values, groups), group_sums(np.ones(len(groups)), groups)  # [placebos, groups], [groups]
    weights = group_weights(len(sizes), RESAMPLES, seed)
    count = len(values)
    drawn = np.random.default_rng([seed, 0xF1A7]).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    draws = ((drawn @ sums) * weights).sum(1) / (count * (weights @ sizes))
    value = float(values.mean())
    low, high = (float(end) for end in np.quantile(draws, [(1 - level) / 2, (1 + level) / 2]))
    if share and np.ptp(values) == 0:
        doubt = _doubt(min(count, len(sizes)), level)
        low, high = max(0.0, value - doubt), min(1.0, value + doubt)
    return Estimate(value, low, high, level)


# ---- several cells at once --------------------------------------------------------------------------------------------


def simultaneous(value: np.ndarray, draws: np.ndarray, groups: float, level: float = LEVEL, folds: int = 1) -> list[Estimate]:
    """Intervals that hold for all cells jointly, so that the best cell may be picked.

    draws  [resamples, cells]: scores of resampled groups

    The half-width is the cell's spread times the quantile of the largest standardised deviation over all cells, widened as a
    t quantile is against a normal one.
    """
    spread = draws.std(0)
    farthest = (np.abs(draws - value) / np.where(spread > 0, spread, np.inf)).max(1)  # [resamples]
    reach = _wider(groups, level) * cross_validation(folds) * np.quantile(farthest, level) * spread
    return [Estimate(float(v), float(v - r), float(v + r), level) for v, r in zip(value, reach, strict=True)]


def _wider(groups: float, level: float) -> float:
    return float(stats.t.ppf((1 + level) / 2, groups - 1) / stats.norm.ppf((1 + level) / 2))


def means_over_groups(values: np.ndarray, groups: np.ndarray, *, seed: int = 0, folds: int = 1) -> list[Estimate]:
    """The mean of each line of values [cells, rows], with intervals that hold for all of them jointly."""
    values = as_numbers("values", values)
    same_length(values=values, groups=groups)
    value, draws = _means(values, groups, seed)
    return simultaneous(value, draws, effective_groups(group_sums(np.ones(len(groups)), groups)), folds=folds)


@dataclass(frozen=True, eq=False)
class Bounds:
    """Means of cells with one-sided bounds, each of which holds for all cells jointly."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    error: np.ndarray
    """standard error of each mean"""


def one_sided_bounds(
    values: np.ndarray,
    groups: np.ndarray,
    *,
    level: float = LEVEL,
    seed: int = 0,
    folds: int = 1,
    extra: np.ndarray | float = 0.0,
) -> Bounds:
    """Of the mean of each line of values [cells, rows].

    extra  variance of each mean that does not come from the groups
    """
    value, draws = _means(values, groups, seed)
    above, below = group_sums(values, groups), group_sums(np.ones((1, len(groups))), groups)
    error = np.sqrt(_errors(above, np.broadcast_to(below, above.shape), value, folds) ** 2 + extra)
    spread = draws.std(0)
    away = (draws - value) / np.where(spread > 0, spread, np.inf)
    size = effective_groups(below[0])
    one_sided, doubt = stats.t.ppf(level, size - 1) / stats.norm.ppf(level), _doubt(size, 2 * level - 1)
    down, up = (one_sided * np.quantile(side.max(1), level) * error for side in (away, -away))
    return Bounds(value, value - np.where(spread > 0, down, doubt), value + np.where(spread > 0, up, doubt), error)


def variance_of_fits(values: np.ndarray, groups: np.ndarray, folds: int) -> np.ndarray:
    """[cells]: the part of the variance of cross-validated means of values [cells, rows] that their groups do not show."""
    above, below = group_sums(values, groups), group_sums(np.ones((1, len(groups))), groups)
    shown = _errors(above, np.broadcast_to(below, above.shape), above.sum(1) / below.sum(), 1)
    return (cross_validation(folds) ** 2 - 1) * shown**2


def _means(values: np.ndarray, groups: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(means [cells], those of resampled groups [resamples, cells])"""
    above, below = group_sums(values, groups), group_sums(np.ones(len(groups)), groups)
    weights = group_weights(len(below), RESAMPLES, seed)
    return above.sum(1) / below.sum(), (weights @ above.T) / (weights @ below)[:, None]


# ---- tests ------------------------------------------------------------------------------------------------------------


def corrected_p(gains: np.ndarray, groups: np.ndarray, folds: int) -> np.ndarray:
    """One-sided p-values [cells] that the mean of gains [cells, rows] is at most 0: a t test over groups, its standard error
    corrected for cross-validation. For probes that are too slow to refit for every permutation."""
    above, below = group_sums(gains, groups), group_sums(np.ones((1, len(groups))), groups)
    value = above.sum(1) / below.sum()
    error = _errors(above, np.broadcast_to(below, above.shape), value, folds)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(error > 0, value / error, np.where(value > 0, np.inf, -np.inf))
    count = effective_groups(below[0])
    return np.maximum(stats.t.sf(t, count - 1), 0.5**count)  # no test over groups can say more


def false_discovery(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg q-values over the whole grid."""
    no_nan("p", p)
    if np.size(p) and not (np.min(p) >= 0 and np.max(p) <= 1):
        raise BadRows(f"Invalid p={short_repr(p)}. Give p-values, from 0 to 1.")
    adjusted: np.ndarray = stats.false_discovery_control(p) if len(p) else p
    return adjusted
