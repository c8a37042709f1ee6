"""The exact permutation test: labels are exchanged between roots and every probe is refitted."""

import numpy as np
import torch

from replaylens.engine.dump.reader import Dump
from replaylens.engine.run import Run
from replaylens.probes.goals import LABEL, Goal, make_goal
from replaylens.probes.heldout import held_out
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import by_root
from replaylens.probes.statistics import Null, root_permutations

_TOGETHER = 25


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
    """Cross-validated accuracy of one cell, on the labels and on permuted ones, with a new fit for each.

    Slower than a sweep's own test, which does not refit. Permuted goals are solved together.
    """
    rows = ProbeRows.of(given).accepted().at(position)
    target = rows.target(label, "class")
    rows, target = rows.where(target.present), target[target.present]
    goal, split = make_goal(target), by_root(rows, folds, seed)
    goal.check(split.train)
    orders = root_permutations(goal.codes, rows.roots, permutations, seed)
    goals = [goal, *(Goal(label, LABEL, "class", goal.classes, goal.codes[order], goal.present) for order in orders)]
    x = torch.from_numpy(rows.matrix(site, layer)).double()[None]
    scores = []
    for first in range(0, len(goals), _TOGETHER):
        some = goals[first : first + _TOGETHER]
        said = held_out(estimator, x, some, split.train, split.test).predicted[0]
        scores += [float((line == each.codes).mean()) for line, each in zip(said, some, strict=True)]
    return Null(np.array(scores[:1]), np.array(scores[1:])[:, None])
