"""The prediction for a held-out row depends only on that row and the rows the probe was fitted on."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from replaylens.probes import registry
from replaylens.probes.controls import Goal, make_goal
from replaylens.probes.heldout import HeldOutPredictions, held_out
from replaylens.probes.splits import by_root
from tests.devices import covering
from tests.probes.synthetic import rows_of

ROWS = rows_of(roots=24, per_root=2, effect=1.0)
SPLIT = by_root(ROWS, folds=3)
X = torch.from_numpy(ROWS.matrix("S", 1))[None].clone()
SWEPT = [name for name, each in registry.ESTIMATORS.items() if each.swept != "no" and name != "mlp"]


def face() -> Goal:
    return make_goal(ROWS.target("face"))


def same(after: HeldOutPredictions, before: HeldOutPredictions, rows: np.ndarray) -> bool:
    """Whether predictions agree on some rows.

    Confidences agree up to the error of an iterative solver whose folds share a preconditioner.
    """
    sure = np.allclose(after.confidence[0, 0, rows], before.confidence[0, 0, rows], atol=1e-3, equal_nan=True)
    return sure and np.array_equal(after.predicted[0, 0, rows], before.predicted[0, 0, rows])


@pytest.mark.parametrize("name", SWEPT)
def test_labels_of_tested_rows_are_not_looked_at(name: str) -> None:
    """Flipping the labels of all tested rows, fold by fold, does not change their predictions."""
    goal = face()
    before = held_out(name, X, [goal], SPLIT.train, SPLIT.test, groups=ROWS.roots)
    for train, test in SPLIT:
        flipped = replace(goal, codes=np.where(test, 1 - goal.codes, goal.codes))
        after = held_out(name, X, [flipped], SPLIT.train, SPLIT.test, groups=ROWS.roots)
        assert same(after, before, test)
        assert not same(after, before, train), "the control: other folds were fitted on them"


@pytest.mark.parametrize(("name", "nuisance"), covering(SWEPT, [False, True]))
def test_tested_rows_do_not_see_each_other(name: str, nuisance: bool) -> None:
    """Moving all tested rows of a fold but one leaves that row's prediction unchanged, also with a nuisance removed."""
    goal = face()
    place = np.random.default_rng(0).normal(size=(len(ROWS), 1)) if nuisance else None
    before = held_out(name, X, [goal], SPLIT.train, SPLIT.test, groups=ROWS.roots, nuisance=place)
    for _, test in list(SPLIT)[:2]:
        alone = np.flatnonzero(test)[:1]
        others = np.setdiff1d(np.flatnonzero(test), alone)
        after = held_out(name, _moved(others), [goal], SPLIT.train, SPLIT.test, groups=ROWS.roots, nuisance=place)
        assert same(after, before, alone)
        assert not same(after, before, others), "the control: what moved is read otherwise"


def _moved(rows: np.ndarray) -> Tensor:
    x = X.clone()
    x[:, rows] = x[:, rows] * -3 + 7
    return x
