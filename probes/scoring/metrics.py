"""Metrics of held-out predictions: AUROC, balanced accuracy, F1. Pure functions, for many cells at once.

Give the tested rows alone. What a metric cannot know from them is NaN, and nothing is filled in:

    auroc              NaN if the rows (of every fold) have one class. For more than two classes, the mean of one class against
                       the rest over the classes that occur
    balanced_accuracy  the mean recall over the classes that occur; NaN if only one does, since that is not a balance
    f1                 NaN if the class occurs neither among the labels nor among the predictions. For more than two classes,
                       the mean over the classes that occur in either

Under cross-validation, give `fold` to `auroc`: rows are then compared within their fold only. Scores of probes with different
training rows have no common zero, and pooled ones are biased: where nothing is to be read, pooled AUROC is below 1/2, because a
class that is frequent in the training folds is rarer in the test fold (Forman and Scholz 2010).
"""

import numpy as np
from scipy.stats import rankdata


def auroc(score: np.ndarray, codes: np.ndarray, fold: np.ndarray | None = None) -> np.ndarray:
    """[cells]: the probability that a row of a class scores higher than a row of another class; ties count one half.

    score  [cells, rows, outputs], as in `Held.score`: one column of the second of two classes, or one column per class
    codes  [rows]: class numbers
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

    metric  accuracy, balanced_accuracy or auroc; other arguments as for these
    """
    if metric == "accuracy":
        return np.asarray(predicted == codes, dtype=np.float64)
    if metric == "balanced_accuracy":
        return _recall_parts(predicted == codes, codes)
    columns = {1: score[..., 0]} if score.shape[-1] == 1 else {k: score[..., k] for k in range(score.shape[-1])}
    parts = [_area_parts(column, codes == k, fold) for k, column in columns.items()]
    return np.mean([part for part in parts if part is not None], axis=0)


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
