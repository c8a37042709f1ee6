"""Regularisation chosen by inner folds: `logistic-cv` and `ridge-cv`.

The rows that a fold trains on are split again, over groups (roots). Every C of a grid is fitted without one inner fold and
judged on it; the C with the lowest loss is fitted on the whole training set. Rows that the outer fold tests take no part, so
the score on them is as honest as with a fixed C. The loss is that of the fit: log-loss (smoothed as `information` says) for
logistic regression, squared error for ridge. All inner and outer fits of a cell are solved together (`solvers.solve_path`).
"""

from typing import Any

import numpy as np
import torch
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from replaylens.probes.checks import plain
from replaylens.probes.design.splits import fold_of_groups
from replaylens.probes.errors import OneClass, ProbeError, TooFewGroups
from replaylens.probes.estimators.linear import LinearReadout
from replaylens.probes.estimators.solvers import Solution, one_hot, solve_path
from replaylens.probes.fitting.information import smoothed

GRID = tuple(10.0**power for power in range(-4, 3))
"""values of C, ascending; for ridge, alpha = 1 / C"""
INNER = 5
"""inner folds; fewer if there are fewer groups"""
_SEED = 0x1BBE
"""of the order of the groups, so that inner folds do not follow the outer ones"""


def solve_chosen(
    kind: str, x: Tensor, targets: np.ndarray, train: np.ndarray, groups: np.ndarray, grid: tuple[float, ...] = GRID
) -> tuple[Solution, np.ndarray]:
    """(probes, C of each [cells, tasks, folds]): as `solvers.solve`, with C chosen for each cell, task and fold.

    kind    logistic, ridge or regression; for these, alpha = 1 / C
    groups  [rows]: rows of one group share an inner fold
    """
    if kind != "logistic" and train.shape[1] > 1:  # inner folds of different folds cut the rows into too many atoms for `Grams`
        parts = [solve_chosen(kind, x, targets, train[:, f : f + 1], groups, grid) for f in range(train.shape[1])]
        weight, bias = (torch.cat(each, 2) for each in zip(*((part.weight, part.bias) for part, _ in parts), strict=True))
        return Solution(weight, bias), np.concatenate([chosen for _, chosen in parts], 2)
    judged = np.stack([[inner_folds(groups, mask) for mask in masks] for masks in train])  # [tasks, folds, inner, rows]
    tasks, folds, inner, n = judged.shape
    fits = train[:, :, None] & ~judged
    every = np.concatenate([fits.reshape(tasks, folds * inner, n), train], 1)
    path = solve_path(kind, x, targets, every, grid)
    losses = np.stack([_losses(kind, each, x, targets, fits, judged) for each in path])  # [grid, cells, tasks, folds]
    best = losses.argmin(0)  # of equal losses the strongest regularisation, which comes first
    at = torch.as_tensor(best, device=x.device)
    weight, bias = (_pick(torch.stack(parts), at) for parts in _outer(path, folds))
    return Solution(weight, bias), np.array(grid)[best]


def inner_folds(groups: np.ndarray, fit: np.ndarray) -> np.ndarray:
    """[INNER, rows] bool: the rows among `fit` that each inner fold is judged on. Raises TooFewGroups for one group."""
    count = min(INNER, len(np.unique(groups[fit])))
    if count < 2:
        raise TooFewGroups(f"{count} groups to fit on, but choosing the regularisation takes 2. Give more, or use a fixed one.")
    fold = np.full(len(groups), -1)
    fold[fit] = fold_of_groups(groups[fit], count, _SEED)
    return fold == np.arange(INNER)[:, None]


def _losses(kind: str, solution: Solution, x: Tensor, targets: np.ndarray, fits: np.ndarray, judged: np.ndarray) -> np.ndarray:
    """[cells, tasks, folds]: mean loss on the judged rows; fits and judged [tasks, folds, inner, rows]."""
    tasks, folds, inner, _ = judged.shape
    total = np.zeros((len(x), tasks, folds))
    for t in range(tasks):
        for f in range(folds):
            for i in range(inner):
                rows = judged[t, f, i]
                at = (slice(None), t, f * inner + i)
                part = x[:, torch.as_tensor(rows, device=x.device)] @ solution.weight[at].mT + solution.bias[at][:, None]
                scores = part.cpu().double().numpy()  # [cells, rows, k]
                total[:, t, f] += _loss(kind, scores, targets[t, rows], int(fits[t, f, i].sum())).sum(-1)
    return total / judged.sum((2, 3))


def _loss(kind: str, scores: np.ndarray, targets: np.ndarray, fitted: int) -> np.ndarray:
    """[cells, rows]: of scores [cells, rows, k] against targets [rows, k], by a probe of `fitted` rows."""
    if kind != "logistic":
        aim = targets if kind == "regression" else 2 * targets - 1
        error: np.ndarray = ((scores - aim) ** 2).sum(-1)
        return error
    if targets.shape[-1] == 1:
        scores, targets = np.concatenate([np.zeros_like(scores), scores], -1), np.concatenate([1 - targets, targets], -1)
    log_p = smoothed(scores - np.logaddexp.reduce(scores, -1, keepdims=True), fitted)
    loss: np.ndarray = -(targets * log_p).sum(-1)
    return loss


def _outer(path: list[Solution], folds: int) -> tuple[list[Tensor], list[Tensor]]:
    """(weights, biases) of each C, of the fits on whole training sets."""
    return [each.weight[:, :, -folds:] for each in path], [each.bias[:, :, -folds:] for each in path]


def _pick(values: Tensor, best: Tensor) -> Tensor:
    """values [grid, cells, tasks, folds, ...] at best [cells, tasks, folds]."""
    places = best.reshape(1, *best.shape, *[1] * (values.dim() - 4)).expand(1, *values.shape[1:])
    return values.gather(0, places)[0]


class ChosenProbe(LinearReadout):
    """A linear classifier on standardised columns whose C is chosen by inner folds.

    kind  logistic or ridge (with alpha = 1 / C)

    Attributes after `fit`: `coef_` and `intercept_` in the rows' own coordinates, `classes_`, and the chosen `C_`.
    """

    def __init__(self, kind: str = "logistic") -> None:
        self.kind = kind

    def fit(self, X: Any, y: Any, groups: Any = None) -> "ChosenProbe":
        """groups [n]: rows of one group share an inner fold; default: each row is its own group."""
        if self.kind not in ("logistic", "ridge"):
            raise ProbeError(f"Unknown kind {self.kind!r}. Use logistic or ridge.")
        X, y = validate_data(self, plain(X), plain(y))
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise OneClass(f"All {len(y)} rows have one class, {self.classes_[0]!r}. Give rows of at least two classes.")
        units = np.arange(len(y)) if groups is None else np.asarray(plain(groups))
        x, train = torch.as_tensor(X, dtype=torch.float64)[None], np.ones((1, 1, len(y)), dtype=bool)
        found, chosen = solve_chosen(self.kind, x, one_hot(codes[None], len(self.classes_)), train, units)
        self.coef_, self.intercept_ = found.weight[0, 0, 0].numpy(), found.bias[0, 0, 0].numpy()
        self.C_ = float(chosen[0, 0, 0])
        return self

    @available_if(lambda probe: probe.kind == "logistic")
    def predict_proba(self, X: Any) -> np.ndarray:
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], 1)
        shares: np.ndarray = np.exp(scores - np.logaddexp.reduce(scores, 1, keepdims=True))
        return shares
