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
from replaylens.probes.fitting.refit import estimates, known_metric
from replaylens.probes.scoring.statistics import Estimate


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
    """over the rows that have a value, with its interval over groups"""
    metric: str
    """accuracy, balanced_accuracy, auroc, or r2 of a number"""
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
    metric: str = "accuracy",
) -> CrossValidated:
    """Fit on all groups but one fold of them, in turn, and predict that fold.

    The predictions are those of `sweep` with the same folds and seed, bit for bit. It adds the controls and the tests, without
    which a score says little.

    X       [rows, d]; see `ProbeRows.of_arrays` for X, y, groups and keys
    metric  of classes: see `sweep`
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
    goal = make_goal(rows.target(LABEL, kind), metric=known_metric(metric))
    split = by_root(rows, folds, seed)
    goal.check(split.train)
    x = torch.from_numpy(rows.matrix(SITE)).double()[None]
    held, fold = held_out(estimator, x, [goal], split.train, split.test, groups=here.groups), split.test.argmax(0)
    there, said = goal.present, held.predicted[0, 0]
    how: dict[str, Any] = dict(fold=fold, groups=here.groups[there], folds=folds)
    (score,) = estimates(held.of(0, goal, there), goal, there, **how)
    predicted = np.array(goal.classes)[said.astype(np.int64)] if goal.kind == "class" else said
    return CrossValidated(rows.numbers, predicted, fold, score, goal.metric, split)
