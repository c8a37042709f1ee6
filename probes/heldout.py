"""Held-out predictions: every estimator, cell and goal, on rows of roots that it was not fitted on."""

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.base import clone, is_regressor
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from replaylens.dumps.reader import Dump
from replaylens.engine.errors import no_such
from replaylens.probes import intervals, registry, solvers
from replaylens.probes.areas import area_of_classes, balanced_accuracy
from replaylens.probes.checks import as_draws
from replaylens.probes.controls import METRICS, ZERO, Goal, make_goal
from replaylens.probes.errors import ProbeError
from replaylens.probes.groups import independent
from replaylens.probes.intervals import LEVEL, Estimate, ratio_over_groups
from replaylens.probes.permutations import Null, group_permutations
from replaylens.probes.registry import code_blocks, code_length, smoothed, solve_chosen
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import Split, by_root
from replaylens.replay.run import Run

# ---- heldout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Said:
    """What probes say of some rows about one goal."""

    predicted: np.ndarray
    """[cells, rows]: class numbers, or numbers"""
    score: np.ndarray
    """[cells, rows, outputs], as in `HeldOutPredictions`"""


@dataclass(frozen=True, eq=False)
class HeldOutPredictions:
    """Predictions on held-out rows. Rows that no fold tests have the prediction -1, and NaN otherwise."""

    predicted: np.ndarray
    """[cells, goals, rows]: class numbers, or numbers"""
    log_loss: np.ndarray
    """[cells, goals, rows]: of the true class, in nats, smoothed as by `smoothed`; NaN without probabilities"""
    confidence: np.ndarray
    """[cells, goals, rows]: probability of the predicted class; NaN as above"""
    score: np.ndarray
    """[cells, goals, rows, outputs]: what `intervals.auroc` ranks. Two classes: the log-odds or margin of the second, in one
    column. More: the log-probability of each class, or else its lead over the best other class. Otherwise NaN"""

    @classmethod
    def empty(cls, cells: int, goals: int, rows: int, outputs: int) -> "HeldOutPredictions":
        shape = (cells, goals, rows)
        loss, confidence = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        return cls(np.full(shape, -1.0), loss, confidence, np.full((*shape, outputs), np.nan, np.float32))

    def of(self, number: int, goal: Goal, rows: np.ndarray) -> Said:
        """What is said about the goal with this number, of the chosen rows."""
        return Said(self.predicted[:, number, rows], self.score[:, number, rows, : goal.outputs])

    def cell(self, number: int) -> "HeldOutPredictions":
        """The predictions of one cell; its axis stays."""
        at = slice(number, number + 1)
        return HeldOutPredictions(self.predicted[at], self.log_loss[at], self.confidence[at], self.score[at])


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
) -> HeldOutPredictions:
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
    out = HeldOutPredictions.empty(len(x), len(goals), x.shape[1], max((goal.outputs for goal in goals), default=1))
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
    out: HeldOutPredictions,
    jobs: int,
) -> None:
    """Mutates `out`: the entries of rows in `test`. A known zero of another kind than the estimator's is left out: nobody asked
    for it by name."""
    fitted = [i for i, goal in enumerate(goals) if goal.role != ZERO or goal.kind in spec.kinds]
    for kind, outputs in sorted({(goals[i].kind, goals[i].outputs) for i in fitted}):
        which = [i for i in fitted if (goals[i].kind, goals[i].outputs) == (kind, outputs)]
        same = [goals[i] for i in which]
        if kind not in spec.kinds:
            what, holds, use = (
                ("classifier", "is a number", "ridge") if kind == "number" else ("regressor", "has classes", "a classifier")
            )
            raise ProbeError(f"{spec.name} is a {what}, but label {same[0].label!r} {holds}. Use {use}.")
        if spec.swept == "together":
            scores = _together(spec.name, x, same, np.stack([train & goal.present for goal in same]), groups)
            _read(kind, outputs, scores, same, which, train, test, out, spec.name in ("logistic", "logistic-cv"))
        else:
            _apart(spec, x, same, which, train, test, out, jobs)


def held_out_again(estimator: str, x: Tensor, goal: Goal, splits: Sequence[Split]) -> list[HeldOutPredictions]:
    """`held_out` of one goal by each of several splits with as many folds, all solved together: `logistic` or `ridge`."""
    scores = _together(estimator, x, [goal] * len(splits), np.stack([each.train & goal.present for each in splits]), None)
    found = [HeldOutPredictions.empty(len(x), 1, x.shape[1], goal.outputs) for _ in splits]
    for i, (split, out) in enumerate(zip(splits, found, strict=True)):
        own = scores[:, i : i + 1]
        _read(goal.kind, goal.outputs, own, [goal], [0], split.train, split.test, out, estimator == "logistic")
    return found


def _together(name: str, x: Tensor, goals: list[Goal], masks: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """[cells, goals, folds, rows, k]; masks [goals, folds, rows]: what each is fitted on"""
    number = goals[0].kind == "number"
    targets = np.stack([g.codes[:, None] if number else solvers.one_hot(g.codes, len(g.classes)) for g in goals])
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
    out: HeldOutPredictions,
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


_FITS: ContextVar[dict[str, list[int]] | None] = ContextVar("fits", default=None)
"""within `unconverged_together`: estimator -> (fits that did not converge, fits)"""


@contextmanager
def unconverged_together() -> Iterator[None]:
    """One ConvergenceWarning per estimator at the end of the outermost block, with the number of fits, instead of one each."""
    if _FITS.get() is not None:
        yield
        return
    counts: dict[str, list[int]] = {}
    token = _FITS.set(counts)
    try:
        yield
    finally:
        _FITS.reset(token)
    for name, (some, fits) in counts.items():
        if some:
            why = (
                f"{some} of {fits} fits of {name} did not converge. Scale the rows, or make it with more iterations (max_iter)."
            )
            warnings.warn(why, ConvergenceWarning, stacklevel=3)


@contextmanager
def _converging() -> Iterator[set[Any]]:
    """The numbers of the fits in the block that warn that they did not converge. Other warnings come as they are."""
    found = set[Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("always", ConvergenceWarning)
        show = warnings.showwarning

        def note(message: Any, category: type[Warning], *where: Any) -> None:
            if issubclass(category, ConvergenceWarning):
                found.add(_FIT.number)
            else:
                show(message, category, *where)

        warnings.showwarning = note  # type: ignore[assignment]
        yield found


class _Fit(threading.local):
    """The fit that this thread makes."""

    number: Any = None


_FIT = _Fit()


def _apart(
    spec: registry.Estimator,
    x: Tensor,
    goals: list[Goal],
    which: list[int],
    train: np.ndarray,
    test: np.ndarray,
    out: HeldOutPredictions,
    jobs: int,
) -> None:
    """Mutates `out`: one scikit-learn fit per cell, goal and fold, in parallel. The order of the fits changes no bit."""
    rows = x.cpu().numpy()
    work = [(c, i, f) for c in range(len(rows)) for i in range(len(goals)) for f in range(len(train))]
    with unconverged_together(), _converging() as here:
        done = Parallel(n_jobs=jobs)(
            delayed(_counted)(
                n,
                os.getpid(),
                spec.make(),
                rows[c],
                goals[i].codes,
                train[f] & goals[i].present,
                test[f],
                len(goals[i].classes),
            )
            for n, (c, i, f) in enumerate(work)
        )
        counts = _FITS.get()
        assert counts is not None
        total = counts.setdefault(spec.name, [0, 0])
        total[0] += len(here) + sum(elsewhere for elsewhere, _ in done)
        total[1] += len(work)
    for (c, i, f), (_, (predicted, score, log_p)) in zip(work, done, strict=True):
        at = (c, which[i], test[f])
        out.predicted[at] = predicted
        if score is not None:
            out.score[(*at, slice(goals[i].outputs))] = score
        if log_p is not None:
            truth = np.clip(goals[i].codes[test[f]], 0, None)
            smooth = smoothed(log_p, int((train[f] & goals[i].present).sum()))
            out.log_loss[at] = -np.take_along_axis(smooth, truth[:, None], -1)[:, 0]
            out.confidence[at] = np.exp(log_p.max(-1))


def _counted(number: int, parent: int, *given: Any) -> tuple[bool, Any]:
    """(whether a fit in another process than `parent` did not converge, `_one` of what is given)"""
    _FIT.number = number
    if os.getpid() == parent:
        return False, _one(*given)
    with _converging() as found:
        made = _one(*given)
    return bool(found), made


def _one(
    estimator: Any, x: np.ndarray, codes: np.ndarray, fit: np.ndarray, test: np.ndarray, classes: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """(predictions [rows], scores [rows, outputs] as in `HeldOutPredictions`, log-probabilities [rows, classes]) of the rows
    `test`. A regressor has predictions only; a classifier without `predict_proba`, no log-probabilities."""
    fitted = clone(estimator).fit(x[fit], codes[fit])
    predicted = fitted.predict(x[test])
    if is_regressor(fitted):
        return predicted, None, None
    if not hasattr(fitted, "predict_proba"):
        scores = _decided(fitted, x[test], predicted, classes)
        return predicted, scores[:, 1:] - scores[:, :1] if classes == 2 else _leads(scores), None
    log_p = np.full((int(test.sum()), classes), -np.inf)
    log_p[:, fitted.classes_] = np.log(fitted.predict_proba(x[test]).clip(1e-300))
    if classes > 2:
        return predicted, log_p, log_p
    if hasattr(fitted, "decision_function"):  # finer than the log-odds of probabilities that round to 0 or 1
        return predicted, fitted.decision_function(x[test])[:, None], log_p
    return predicted, log_p[:, 1:] - log_p[:, :1], log_p


def _decided(fitted: Any, x: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """[rows, classes]: by `decision_function`, below all others for a class that the fit lacks; of a classifier that has none,
    1 for the predicted class and 0 for the others."""
    if not hasattr(fitted, "decision_function"):
        return np.eye(classes)[predicted.astype(int)]
    found = fitted.decision_function(x)
    if found.ndim == 1:
        found = np.stack([np.zeros_like(found), found], 1)
    scores = np.full((len(x), classes), found.min(initial=0.0) - 1.0)
    scores[:, fitted.classes_] = found
    return scores


# ---- refit -----------------------------------------------------------------------------------------------------------
# Permutation tests: labels are exchanged between groups, and what depends on them is computed again.
#
# Under cross-validation every fold is fitted on the labels of the others, so exchanging labels alone leaves out how much
# scores vary by the fit: noise then passes as a finding two to three times as often as it should. `refitted` fits every
# probe again for every permutation, which is exact if groups are exchangeable (Ojala and Garriga, JMLR 11, 2010). A probe
# that is fitted on one side and tested on another needs no new fit: `exchanged`.

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
    require_orders(count, len(roots))
    rows = np.flatnonzero(goal.present)
    orders = np.broadcast_to(np.arange(len(roots)), (count, len(roots))).copy()
    orders[:, rows] = rows[group_permutations(goal.codes[rows], roots[rows], count, seed, groups[rows])]
    return orders


def require_orders(permutations: int, rows: int) -> None:
    """Raise ProbeError if there is no memory for so many orders of the rows: each is held three times while they are drawn."""
    as_draws("permutations", permutations, each=3 * 8 * rows)


def refitted(
    estimator: str,
    x: Tensor,
    goal: Goal,
    orders: np.ndarray,
    split: Split,
    *,
    nuisance: np.ndarray | None = None,
    jobs: int = 1,
) -> Null:
    """Held-out scores of the cells x [cells, rows, d] on the labels and on permuted ones, with a new fit for each.

    The observed score is fitted along with the permuted ones, in the precision of x.
    """
    goals = [goal, *(replace(goal, codes=goal.codes[order]) for order in orders)]
    tested, fold, scores = split.test.any(0) & goal.present, split.test.argmax(0), []
    for first in range(0, len(goals), _TOGETHER):
        some = goals[first : first + _TOGETHER]
        said = held_out(estimator, x, some, split.train, split.test, nuisance=nuisance, groups=split.roots, jobs=jobs)
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
    """[cells]: the score of what was said of the tested rows, by the goal's metric; fold [rows] as for `intervals.auroc`."""
    codes = goal.codes[tested]
    match goal.metric:
        case "auroc":
            return intervals.auroc(said.score, codes, None if fold is None else fold[tested])
        case "balanced_accuracy":
            return intervals.balanced_accuracy(said.predicted, codes)
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
    area = intervals.auroc(said.score, goal.codes[tested], None if fold is None else fold[tested])
    return np.asarray(found + _TIE * np.nan_to_num(area - 0.5))


def gains(said: Said, goal: Goal, tested: np.ndarray, fold: np.ndarray | None = None) -> np.ndarray:
    """[cells, tested rows], whose means are the scores: what intervals and paired differences are made of."""
    if goal.kind == "class":
        within = None if fold is None else fold[tested]
        return intervals.contributions(goal.metric, said.predicted, said.score, goal.codes[tested], within)
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
    said: Said, goal: Goal, tested: np.ndarray, *, fold: np.ndarray, groups: np.ndarray, folds: int, level: float = LEVEL
) -> list[Estimate]:
    """The score of each cell by the goal's metric, with its interval over groups [tested rows]."""
    codes = goal.codes[tested]
    if goal.metric == "auroc":
        areas = areas_of(said, goal, tested, fold=fold, groups=groups, folds=folds, level=level)
        return [each or Estimate(np.nan, np.nan, np.nan) for each in areas]
    if goal.metric == "balanced_accuracy":
        return [balanced_accuracy(each == codes, codes, groups, folds=folds, level=level) for each in said.predicted]
    top, bottom = ratio(said.predicted, goal, tested)
    least = 0.0 if goal.kind == "class" else -np.inf
    return ratio_over_groups(top, bottom, groups, folds=folds, least=least, level=level)


def areas_of(
    said: Said, goal: Goal, tested: np.ndarray, *, fold: np.ndarray, groups: np.ndarray, folds: int, level: float = LEVEL
) -> list[Estimate | None]:
    """AUROC of each cell with its interval; None for numbers, and where the rows have one class."""
    if goal.kind == "number":
        return [None] * len(said.predicted)
    codes = goal.codes[tested]
    how: dict[str, Any] = dict(strata=fold[tested], folds=folds, level=level)
    return [area_of_classes(each.astype(float), codes, groups, **how) for each in said.score]


def known_metric(metric: str) -> str:
    """The metric, if there is one of this name. Raises ProbeError, which lists them."""
    if metric not in METRICS:
        raise ProbeError(no_such("metric", metric, METRICS))
    return metric


# ---- online code -----------------------------------------------------------------------------------------------------
# `OnlineCode`: the description length of a label next to that of its control task.
#
# Online code: Voita & Titov, arXiv 2003.12298. Control task: Hewitt & Liang, arXiv 1909.03368. A probe that reads a property
# codes the labels in few bits, but one that memorises codes a random class per type of context just as well. So the length of
# the label's code means something only next to that of the control task, in the same blocks and with the same probe. See
# `code_blocks` for the blocks, and `smoothed` for classes that no earlier block has.


@dataclass(frozen=True)
class OnlineCode:
    """Code lengths of one cell."""

    FIELDS: ClassVar = ("bits", "compression", "control_bits", "control_compression")

    bits: float
    """bits per row of the label"""
    compression: float
    """uniform code / online code of the label; above 1 is shorter than uniform"""
    control_bits: float
    """bits per row of the control task, mean over its draws; NaN without one"""
    control_compression: float
    """NaN without a control task"""

    @property
    def selectivity(self) -> float:
        """Share of the uniform code that the label saves beyond what the control task saves."""
        return 1 / self.control_compression - 1 / self.compression


def online_codes(
    x: Tensor,
    label: Goal,
    controls: Sequence[Goal],
    groups: np.ndarray,
    *,
    seed: int = 0,
    nuisance: np.ndarray | None = None,
) -> list[OnlineCode]:
    """The online code of a label and of draws of its control task, in every cell.

    x         [cells, rows, d]
    controls  goals with the classes of the label, as `controls.control_labels` draws them; each is coded on its own, so that
              the label's length does not depend on them
    groups    [rows]: blocks are made of whole groups (roots), in an order that `seed` sets
    nuisance  as for `held_out`
    """
    if label.kind != "class":
        raise ProbeError(f"Label {label.label!r} is a number. The online code is one of classes.")
    own = _lengths(x, label, groups, seed, nuisance)
    drawn = [_lengths(x, goal, groups, seed, nuisance) for goal in controls]
    found = []
    for cell, (bits, compression) in enumerate(own):
        control = float(np.mean([lengths[cell][0] for lengths in drawn])) if drawn else np.nan
        found.append(OnlineCode(bits, compression, control, bits * compression / control))  # their uniform code is the same
    return found


def _lengths(x: Tensor, goal: Goal, groups: np.ndarray, seed: int, nuisance: np.ndarray | None) -> list[tuple[float, float]]:
    """(bits per row, compression) of each cell. A block with fewer than two classes before it is coded uniformly."""
    train, test = code_blocks(groups, seed)
    fine = [len(np.unique(goal.codes[mask & goal.present])) > 1 for mask in train]
    train, test, there = train[fine], test[fine], goal.present
    if not len(train):
        return [code_length(np.zeros(int(there.sum())), np.zeros(int(there.sum()), dtype=bool), len(goal.classes))] * len(x)
    held = held_out("logistic", x, [goal], train, test, nuisance=nuisance)
    coded = np.asarray(test.any(0))[there]
    return [code_length(held.log_loss[cell, 0][there].astype(np.float64), coded, len(goal.classes)) for cell in range(len(x))]
