"""Held-out predictions: every estimator, cell and goal, on rows of roots that it was not fitted on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.base import clone
from torch import Tensor

from replaylens.probes.design.goals import Goal
from replaylens.probes.errors import ProbeError
from replaylens.probes.estimators import solvers
from replaylens.probes.fitting import registry
from replaylens.probes.fitting.chosen import solve_chosen
from replaylens.probes.fitting.information import smoothed


@dataclass(frozen=True, eq=False)
class Said:
    """What probes say of some rows about one goal."""

    predicted: np.ndarray
    """[cells, rows]: class numbers, or numbers"""
    score: np.ndarray
    """[cells, rows, outputs], as in `Held`"""


@dataclass(frozen=True, eq=False)
class Held:
    """Predictions on held-out rows. Entries of rows that no fold tests are undefined."""

    predicted: np.ndarray
    """[cells, goals, rows]: class numbers, or numbers"""
    log_loss: np.ndarray
    """[cells, goals, rows]: of the true class, in nats, smoothed as `information` says; NaN without probabilities"""
    confidence: np.ndarray
    """[cells, goals, rows]: probability of the predicted class; NaN as above"""
    score: np.ndarray
    """[cells, goals, rows, outputs]: what `metrics.auroc` ranks. Two classes: the log-odds or margin of the second, in one
    column. More: the log-probability of each class, or else its lead over the best other class. Otherwise NaN"""

    @classmethod
    def empty(cls, cells: int, goals: int, rows: int, outputs: int) -> "Held":
        shape = (cells, goals, rows)
        loss, confidence = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        return cls(np.full(shape, -1.0), loss, confidence, np.full((*shape, outputs), np.nan, np.float32))

    def of(self, number: int, goal: Goal, rows: np.ndarray) -> Said:
        """What is said about the goal with this number, of the chosen rows."""
        return Said(self.predicted[:, number, rows], self.score[:, number, rows, : goal.outputs])

    def cell(self, number: int) -> "Held":
        """The predictions of one cell; its axis stays."""
        at = slice(number, number + 1)
        return Held(self.predicted[at], self.log_loss[at], self.confidence[at], self.score[at])


def held_out(
    estimator: str,
    x: Tensor,
    goals: Sequence[Goal],
    train: np.ndarray,
    test: np.ndarray,
    *,
    nuisance: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    jobs: int = 1,
) -> Held:
    """Fit and predict.

    x         [cells, rows, d]; its dtype and device are those of the arithmetic
    train     [folds, rows] bool; a goal is fitted on the rows that have its label
    test      [folds, rows] bool, disjoint
    groups    [rows]: what the inner folds of `logistic-cv` and `ridge-cv` keep together, such as roots
    nuisance  [rows, m]: columns whose linear effect is first removed from x, with coefficients of the training rows
    """
    spec = registry.get(estimator)
    if spec.swept == "no":
        raise ProbeError(f"{estimator} does not take rows of one position. See docs/probes.md for its input.")
    if spec.inner and groups is None:
        raise ProbeError(
            f"{estimator} chooses its regularisation by inner folds over groups. Give the group of each row (groups=)."
        )
    out = Held.empty(len(x), len(goals), x.shape[1], max((goal.outputs for goal in goals), default=1))
    if nuisance is not None:  # then every fold has its own rows
        for fit, held in zip(train, test, strict=True):
            clean = residualised(x, nuisance, fit)
            _fill(spec, clean, goals, fit[None], held[None], groups, out, jobs)
    else:
        _fill(spec, x, goals, train, test, groups, out, jobs)
    return out


def residualised(x: Tensor, nuisance: np.ndarray, fit: np.ndarray) -> Tensor:
    """x without the linear effect of the nuisance columns, estimated on the rows `fit`."""
    columns = np.column_stack([np.ones(len(nuisance)), (nuisance - nuisance[fit].mean(0)) / (nuisance[fit].std(0) + 1e-12)])
    full = torch.as_tensor(columns, dtype=x.dtype, device=x.device)
    rows = torch.as_tensor(fit, device=x.device)
    known = full[rows]
    coefficients = torch.linalg.pinv(known.double()).to(x.dtype) @ x[:, rows]  # [cells, m + 1, d]
    return x - full @ coefficients


def _fill(
    spec: registry.Estimator,
    x: Tensor,
    goals: Sequence[Goal],
    train: np.ndarray,
    test: np.ndarray,
    groups: np.ndarray | None,
    out: Held,
    jobs: int,
) -> None:
    """Mutates `out`: the entries of rows in `test`."""
    for kind, outputs in sorted({(goal.kind, goal.outputs) for goal in goals}):
        which = [i for i, goal in enumerate(goals) if (goal.kind, goal.outputs) == (kind, outputs)]
        same = [goals[i] for i in which]
        if kind == "number" and spec.name not in ("ridge", "ridge-cv"):
            raise ProbeError(f"{spec.name} is a classifier, but label {same[0].label!r} is a number. Use ridge.")
        if spec.swept == "together":
            scores = _together(spec.name, x, same, train, groups)
            _read(kind, outputs, scores, same, which, train, test, out, spec.name in ("logistic", "logistic-cv"))
        else:
            _apart(spec, x, same, which, train, test, out, jobs)


def _together(name: str, x: Tensor, goals: list[Goal], train: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """[cells, goals, folds, rows, k]"""
    number = goals[0].kind == "number"
    targets = np.stack([g.codes[:, None] if number else solvers.one_hot(g.codes, len(g.classes)) for g in goals])
    masks = np.stack([train & goal.present for goal in goals])
    kind = "regression" if number else name.removesuffix("-cv")
    if groups is not None and name.endswith("-cv"):
        solution, _ = solve_chosen(kind, x, targets, masks, groups)
    else:
        solution = solvers.solve(kind, x, targets, masks)
    return solution.scores(x).cpu().double().numpy()


def _read(
    kind: str,
    outputs: int,
    scores: np.ndarray,
    goals: list[Goal],
    which: list[int],
    train: np.ndarray,
    test: np.ndarray,
    out: Held,
    proper: bool,
) -> None:
    """Mutates `out`: predictions, and for `proper` scores (log-odds) the losses."""
    for i, goal in enumerate(goals):
        for fold, rows in enumerate(test):
            part = scores[:, i, fold][:, rows]  # [cells, rows, k]
            at = (slice(None), which[i], rows)
            if kind == "number":
                out.predicted[at] = part[..., 0]
                continue
            out.score[(*at, slice(outputs))] = part if outputs == 1 else _leads(part)
            logits = np.concatenate([np.zeros_like(part), part], -1) if outputs == 1 else part
            out.predicted[at] = logits.argmax(-1)
            if proper:
                log_p = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
                if outputs > 1:
                    out.score[(*at, slice(outputs))] = log_p
                truth = np.clip(goal.codes[rows], 0, None)
                smooth = smoothed(log_p, int((train[fold] & goal.present).sum()))
                out.log_loss[at] = -np.take_along_axis(smooth, truth[None, :, None], -1)[..., 0]
                out.confidence[at] = np.exp(log_p.max(-1))


def _leads(scores: np.ndarray) -> np.ndarray:
    """[..., k]: each score minus the best other one. What all classes of a row share, and so decides nothing, cancels."""
    second, best = np.moveaxis(np.sort(scores, -1)[..., -2:, None], -2, 0)
    leads: np.ndarray = scores - np.where(scores == best, second, best)
    return leads


def _apart(
    spec: registry.Estimator,
    x: Tensor,
    goals: list[Goal],
    which: list[int],
    train: np.ndarray,
    test: np.ndarray,
    out: Held,
    jobs: int,
) -> None:
    """Mutates `out`: one scikit-learn fit per cell, goal and fold, in parallel. The order of the fits changes no bit."""
    rows = x.cpu().numpy()
    work = [(c, i, f) for c in range(len(rows)) for i in range(len(goals)) for f in range(len(train))]
    done = Parallel(n_jobs=jobs)(
        delayed(_one)(spec.make(), rows[c], goals[i].codes, train[f] & goals[i].present, test[f], len(goals[i].classes))
        for c, i, f in work
    )
    for (c, i, f), (predicted, score, log_p) in zip(work, done, strict=True):
        at = (c, which[i], test[f])
        out.predicted[at] = predicted
        out.score[(*at, slice(goals[i].outputs))] = score
        truth = np.clip(goals[i].codes[test[f]], 0, None)
        smooth = smoothed(log_p, int((train[f] & goals[i].present).sum()))
        out.log_loss[at] = -np.take_along_axis(smooth, truth[:, None], -1)[:, 0]
        out.confidence[at] = np.exp(log_p.max(-1))


def _one(
    estimator: Any, x: np.ndarray, codes: np.ndarray, fit: np.ndarray, test: np.ndarray, classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(predictions [rows], scores [rows, outputs] as in `Held`, log-probabilities [rows, classes]) of the rows `test`."""
    fitted = clone(estimator).fit(x[fit], codes[fit])
    log_p = np.full((int(test.sum()), classes), -np.inf)
    log_p[:, fitted.classes_] = np.log(fitted.predict_proba(x[test]).clip(1e-300))
    if classes > 2:
        return fitted.predict(x[test]), log_p, log_p
    if hasattr(fitted, "decision_function"):  # finer than the log-odds of probabilities that round to 0 or 1
        return fitted.predict(x[test]), fitted.decision_function(x[test])[:, None], log_p
    return fitted.predict(x[test]), log_p[:, 1:] - log_p[:, :1], log_p
