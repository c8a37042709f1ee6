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
from replaylens.engine.run import Run
from replaylens.probes.data.groups import independent
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.design.goals import Goal, make_goal
from replaylens.probes.design.splits import Split, by_root
from replaylens.probes.errors import ProbeError
from replaylens.probes.fitting.heldout import held_out
from replaylens.probes.scoring.permutations import Null, group_permutations

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
) -> Null:
    """Cross-validated accuracy (for a number, r2) of one cell, on the labels and on permuted ones, with a new fit for each."""
    if not isinstance(permutations, int) or permutations < 1:
        raise ProbeError(f"permutations={permutations!r} tests nothing. Give a whole number, such as 99.")
    found = ProbeRows.of(given).accepted().at(position)
    here = independent(found, [found.target(label)])
    goal, split = make_goal(here.rows.target(label)), by_root(here.rows, folds, seed)
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
    tested, scores = split.test.any(0) & goal.present, []
    for first in range(0, len(goals), _TOGETHER):
        some = goals[first : first + _TOGETHER]
        said = held_out(estimator, x, some, split.train, split.test, nuisance=nuisance, groups=split.roots).predicted[
            ..., tested
        ]
        scores += [score(said[:, i], each, tested) for i, each in enumerate(some)]
    return Null(scores[0], np.stack(scores[1:]), constant_scores(goals, tested))


def exchanged(
    predicted: np.ndarray, goal: Goal, roots: np.ndarray, groups: np.ndarray, tested: np.ndarray, count: int, seed: int
) -> Null:
    """Scores of predictions [cells, rows], made without the labels of the tested rows, on these labels and on permuted ones."""
    side = replace(goal, present=tested)
    orders = label_orders(side, roots, groups, count, seed)
    goals: Sequence[Goal] = [goal, *(replace(goal, codes=goal.codes[order]) for order in orders)]
    scores = [score(predicted[:, tested], each, tested) for each in goals]
    return Null(scores[0], np.stack(scores[1:]), constant_scores(goals, tested))


def constant_scores(goals: Sequence[Goal], tested: np.ndarray) -> np.ndarray:
    """[goals]: what the best constant guess scores on the tested rows."""
    if goals[0].kind == "number":
        return np.zeros(len(goals))  # r2 of the mean
    return np.array([np.bincount(goal.codes[tested]).max() / tested.sum() for goal in goals])


def score(predicted: np.ndarray, goal: Goal, tested: np.ndarray) -> np.ndarray:
    """[cells]: accuracy, or r2, of predictions [cells, tested rows]."""
    top, bottom = ratio(predicted, goal, tested)
    return np.asarray(top.sum(1) / bottom.sum())


def ratio(predicted: np.ndarray, goal: Goal, tested: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(top [cells, tested rows], bottom [tested rows]): the score is the ratio of their sums."""
    codes = goal.codes[tested]
    if goal.kind == "class":
        return predicted == codes, np.ones(len(codes))
    total = (codes - codes.mean()) ** 2
    return total - (codes - predicted) ** 2, total
