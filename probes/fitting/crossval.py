"""`cross_validate`: one probe on plain arrays, held out by group, with its interval: one cell of a sweep, without controls."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaylens.probes.data.arrays import SITE
from replaylens.probes.data.columns import LABEL
from replaylens.probes.data.groups import independent
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.design.goals import make_goal
from replaylens.probes.design.splits import Split, by_root
from replaylens.probes.fitting.heldout import held_out
from replaylens.probes.scoring.statistics import Estimate, ratio_over_groups


@dataclass(frozen=True, eq=False)
class CrossValidated:
    """Held-out predictions of one probe."""

    rows: np.ndarray
    """[n]: numbers of the rows that count. Of rows that are the same observation, one does"""
    predicted: np.ndarray
    """[n]: classes as text, or numbers; each from a probe that saw no row of the row's group"""
    fold: np.ndarray
    """[n]: the fold that a row is tested in"""
    score: Estimate
    """accuracy, or r2 of a number, over the rows that have a value, with its interval over groups"""
    metric: str
    """accuracy or r2"""
    split: Split


def cross_validate(
    X: np.ndarray | torch.Tensor,
    y: Any,
    groups: Any,
    *,
    keys: Any = None,
    estimator: str = "logistic",
    kind: str = "auto",
    folds: int = 5,
    seed: int = 0,
) -> CrossValidated:
    """Fit on all groups but one fold of them, in turn, and predict that fold.

    The predictions are those of `sweep` with the same folds and seed, bit for bit. It adds the controls and the tests, without
    which a score says little.

    X       [rows, d]; see `ProbeRows.of_arrays` for X, y, groups and keys
    kind    class, number (use the estimator ridge), or auto: text, booleans and few whole numbers are classes

    Raises BadRows and MissingGroups for arrays that do not fit, TooFewGroups for fewer groups than folds, OneClass if a fold
    leaves one class to fit on.

    >>> import numpy as np
    >>> y = np.arange(60) % 3
    >>> X = np.random.default_rng(0).normal(size=(60, 8)) + 6 * np.eye(8)[y]
    >>> found = cross_validate(X, y, groups=np.arange(60) // 3, estimator="mass-mean")
    >>> found.metric, found.score.value, found.predicted[:3].tolist(), len(found.split)
    ('accuracy', 1.0, ['0', '1', '2'], 5)
    """
    given = ProbeRows.of_arrays({SITE: X}, {LABEL: y}, groups, keys=keys)
    here = independent(given, [given.target(LABEL, kind)])
    rows = here.rows
    goal, split = make_goal(rows.target(LABEL, kind)), by_root(rows, folds, seed)
    goal.check(split.train)
    x = torch.from_numpy(rows.matrix(SITE)).double()[None]
    said = held_out(estimator, x, [goal], split.train, split.test, groups=here.groups).predicted[0, 0]
    there, codes = goal.present, goal.codes[goal.present]
    if goal.kind == "class":
        metric, top, bottom, least = "accuracy", said[there] == codes, np.ones(len(codes)), 0.0
        predicted = np.array(goal.classes)[said.astype(np.int64)]
    else:
        metric, bottom, least, predicted = "r2", (codes - codes.mean()) ** 2, -np.inf, said
        top = bottom - (codes - said[there]) ** 2
    (score,) = ratio_over_groups(top, bottom, here.groups[there], folds=folds, least=least)
    return CrossValidated(rows.numbers, predicted, split.test.argmax(0), score, metric, split)
