"""Permutation tests: labels are exchanged between groups, and what depends on them is computed again.

Under cross-validation every fold is fitted on the labels of the others, so exchanging labels alone leaves out how much scores
vary by the fit: noise then passes as a finding two to three times as often as it should. `refitted` fits every probe again
for every permutation, which is exact if groups are exchangeable (Ojala and Garriga, JMLR 11, 2010). A probe that is fitted on
one side and tested on another needs no new fit: `exchanged`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.dump.reader import Dump
from replaylens.engine.errors import no_such
from replaylens.engine.run import Run
from replaylens.probes.data.groups import independent
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.design.goals import METRICS, Goal, make_goal
from replaylens.probes.design.splits import Split, by_root
from replaylens.probes.errors import ProbeError
from replaylens.probes.fitting.heldout import Said, held_out
from replaylens.probes.scoring import metrics
from replaylens.probes.scoring.areas import area_of_classes
from replaylens.probes.scoring.balanced import balanced_accuracy
from replaylens.probes.scoring.permutations import Null, group_permutations
from replaylens.probes.scoring.statistics import Estimate, ratio_over_groups

_TOGETHER = 50
"""permutations solved together; bounds memory"""


def permutation_test(
    given: Dump | Run | ProbeRows,
    label: str = "state",
    *,
    site: str = "S",
    layer: int | None = None,
    position: str = "step",
    estimator: str = "logistic",
    permutations: int = 99,
    folds: int = 5,
    seed: int = 0,
    metric: str = "accuracy",
) -> Null:
    """The cross-validated score of one cell, on the labels and on permuted ones, with a new fit for each.

    metric  of classes: see `sweep`. Numbers have r2
    """
    if not isinstance(permutations, int) or permutations < 1:
        raise ProbeError(f"permutations={permutations!r} tests nothing. Give a whole number, such as 99.")
    found = ProbeRows.of(given).accepted().at(position)
    here = independent(found, [found.target(label)])
    goal, split = make_goal(here.rows.target(label), metric=known_metric(metric)), by_root(here.rows, folds, seed)
    goal.check(split.train)
    orders = label_orders(goal, here.rows.roots, here.groups, permutations, seed)
    x = torch.from_numpy(here.rows.matrix(site, layer)).double()[None]
    return refitted(estimator, x, goal, orders, split)


def label_orders(goal: Goal, roots: np.ndarray, groups: np.ndarray, count: int, seed: int) -> np.ndarray:
    """[count, rows]: for each row, the row whose label it takes; rows without a label keep none."""
    rows = np.flatnonzero(goal.present)
    orders = np.broadcast_to(np.arange(len(roots)), (count, len(roots))).copy()
    orders[:, rows] = rows[group_permutations(goal.codes[rows], roots[rows], count, seed, groups[rows])]
    return orders


def refitted(
    estimator: str, x: Tensor, goal: Goal, orders: np.ndarray, split: Split, *, nuisance: np.ndarray | None = None
) -> Null:
    """Held-out scores of the cells x [cells, rows, d] on the labels and on permuted ones, with a new fit for each.

    The observed score is fitted along with the permuted ones, in the precision of x.
    """
    goals = [goal, *(replace(goal, codes=goal.codes[order]) for order in orders)]
    tested, fold, scores = split.test.any(0) & goal.present, split.test.argmax(0), []
    for first in range(0, len(goals), _TOGETHER):
        some = goals[first : first + _TOGETHER]
        said = held_out(estimator, x, some, split.train, split.test, nuisance=nuisance, groups=split.roots)
        scores += [_compared(said.of(i, each, tested), each, tested, fold) for i, each in enumerate(some)]
    return Null(scores[0], np.stack(scores[1:]), constant_scores(goals, tested))


def exchanged(said: Said, goal: Goal, roots: np.ndarray, groups: np.ndarray, tested: np.ndarray, count: int, seed: int) -> Null:
    """Scores of what was said of the tested rows, without their labels, on these labels and on permuted ones."""
    side = replace(goal, present=tested)
    orders = label_orders(side, roots, groups, count, seed)
    goals: Sequence[Goal] = [goal, *(replace(goal, codes=goal.codes[order]) for order in orders)]
    scores = [_compared(said, each, tested) for each in goals]
    return Null(scores[0], np.stack(scores[1:]), constant_scores(goals, tested))


def constant_scores(goals: Sequence[Goal], tested: np.ndarray) -> np.ndarray:
    """[goals]: what the best constant guess scores on the tested rows."""
    return np.array([constant_score(goal, tested) for goal in goals])


def constant_score(goal: Goal, tested: np.ndarray) -> float:
    match goal.metric:
        case "r2":
            return 0.0  # of the mean
        case "auroc":
            return 0.5
        case "balanced_accuracy":
            return 1 / len(np.unique(goal.codes[tested]))
    return float(np.bincount(goal.codes[tested]).max() / tested.sum())


def score(said: Said, goal: Goal, tested: np.ndarray, fold: np.ndarray | None = None) -> np.ndarray:
    """[cells]: the score of what was said of the tested rows, by the goal's metric; fold [rows] as for `metrics.auroc`."""
    codes = goal.codes[tested]
    match goal.metric:
        case "auroc":
            return metrics.auroc(said.score, codes, None if fold is None else fold[tested])
        case "balanced_accuracy":
            return metrics.balanced_accuracy(said.predicted, codes)
    top, bottom = ratio(said.predicted, goal, tested)
    return np.asarray(top.sum(1) / bottom.sum())


_TIE = 1e-6
"""weight of the area in a comparison: less than one right answer of any number of rows that fits into memory"""


def _compared(said: Said, goal: Goal, tested: np.ndarray, fold: np.ndarray | None = None) -> np.ndarray:
    """The score, with ties broken by the area under the ROC curve: 40 rows have 41 accuracies, and a test that counts every
    tie against the label finds too little. Observed and permuted labels are compared alike, so the test stays exact."""
    found = score(said, goal, tested, fold)
    if goal.kind == "number" or goal.metric == "auroc":
        return found
    area = metrics.auroc(said.score, goal.codes[tested], None if fold is None else fold[tested])
    return np.asarray(found + _TIE * np.nan_to_num(area - 0.5))


def gains(said: Said, goal: Goal, tested: np.ndarray, fold: np.ndarray | None = None) -> np.ndarray:
    """[cells, tested rows], whose means are the scores: what intervals and paired differences are made of."""
    if goal.kind == "class":
        within = None if fold is None else fold[tested]
        return metrics.contributions(goal.metric, said.predicted, said.score, goal.codes[tested], within)
    top, bottom = ratio(said.predicted, goal, tested)
    return np.asarray(top / bottom.mean())


def ratio(predicted: np.ndarray, goal: Goal, tested: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(top [cells, tested rows], bottom [tested rows]): accuracy and r2 are the ratio of their sums."""
    codes = goal.codes[tested]
    if goal.kind == "class":
        return predicted == codes, np.ones(len(codes))
    total = (codes - codes.mean()) ** 2
    return total - (codes - predicted) ** 2, total


def estimates(
    said: Said, goal: Goal, tested: np.ndarray, *, fold: np.ndarray, groups: np.ndarray, folds: int
) -> list[Estimate]:
    """The score of each cell by the goal's metric, with its interval over groups [tested rows]."""
    codes = goal.codes[tested]
    if goal.metric == "auroc":
        areas = areas_of(said, goal, tested, fold=fold, groups=groups, folds=folds)
        return [each or Estimate(np.nan, np.nan, np.nan) for each in areas]
    if goal.metric == "balanced_accuracy":
        return [balanced_accuracy(each == codes, codes, groups, folds=folds) for each in said.predicted]
    top, bottom = ratio(said.predicted, goal, tested)
    return ratio_over_groups(top, bottom, groups, folds=folds, least=0.0 if goal.kind == "class" else -np.inf)


def areas_of(
    said: Said, goal: Goal, tested: np.ndarray, *, fold: np.ndarray, groups: np.ndarray, folds: int
) -> list[Estimate | None]:
    """AUROC of each cell with its interval; None for numbers, and where the rows have one class."""
    if goal.kind == "number":
        return [None] * len(said.predicted)
    codes = goal.codes[tested]
    return [area_of_classes(each.astype(float), codes, groups, strata=fold[tested], folds=folds) for each in said.score]


def known_metric(metric: str) -> str:
    """The metric, if there is one of this name. Raises ProbeError, which lists them."""
    if metric not in METRICS:
        raise ProbeError(no_such("metric", metric, METRICS))
    return metric
