"""Estimators by name: a description, how to make one, and how a sweep fits it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sklearn.base import is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from replaylens.engine.errors import no_such
from replaylens.engine.request.values import short_repr
from replaylens.probes.checks import plain
from replaylens.probes.erasers import Chain, Discriminant, Inlp, Leace
from replaylens.probes.errors import OneClass, ProbeError, TooFewGroups
from replaylens.probes.estimators import AttentiveProbe, CcsProbe, LinearReadout, MassMeanProbe, SparseProbe
from replaylens.probes.solvers import Solution, one_hot, solve_path
from replaylens.probes.splits import fold_of_groups

# ---- information -----------------------------------------------------------------------------------------------------
# Scores beyond accuracy: usable information, description length, calibration.
#
# V-information (Xu et al., arXiv 2002.10689): bits about the label that a family of probes gains over the class
# frequencies. Online code (Voita & Titov, arXiv 2003.12298): bits to transmit the labels given the rows, each block coded
# by a probe fitted on the blocks before it. Expected calibration error: the gap between confidence and accuracy.
#
# A probe cannot know a class that its training rows lack, and would pay without bound for it. So every probability p of k
# classes, of a probe fitted on n rows and of their class frequencies alike, counts as
#
#     (n p + 1/2) / (n + k/2)
#
# For frequencies this is the estimator of Krichevsky and Trofimov (1981), the standard code for a class that has not
# occurred. For a probe it is a mixture with the uniform distribution, of weight k / (2n + k), that fades as rows come in.
# No row costs more than log(2n + k).

BLOCKS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""ends of the blocks, as fractions of the roots"""
MIN_ROOTS = 8
"""minimum number of roots to fit a probe on; earlier rows are coded uniformly"""


def v_information(log_loss: np.ndarray, null_log_loss: np.ndarray) -> float:
    """Bits per row, from held-out losses in nats under the probe and under the class frequencies of its training set."""
    return float((null_log_loss.mean() - log_loss.mean()) / np.log(2))


def smoothed(log_p: np.ndarray, rows: int) -> np.ndarray:
    """Log-probabilities [..., k] of classes by the rule above, from those of a probe fitted on so many rows."""
    counts = rows * np.exp(log_p)
    out: np.ndarray = np.log((counts + 0.5) / (rows + 0.5 * log_p.shape[-1]))
    return out


def null_log_loss(codes: np.ndarray, train: np.ndarray, test: np.ndarray, classes: int) -> np.ndarray:
    """[rows]: log-loss in nats of each tested row under the class frequencies of the rows that its probe is fitted on.

    codes        [rows]: class numbers, -1 if missing (such a row counts nowhere)
    train, test  [folds, rows] bool; NaN for rows that no fold tests
    """
    out = np.full(len(codes), np.nan)
    for fit, held in zip(train & (codes >= 0), test & (codes >= 0), strict=True):
        with np.errstate(divide="ignore"):
            log_p = np.log(np.bincount(codes[fit], minlength=classes) / max(fit.sum(), 1))
        out[held] = -smoothed(log_p, int(fit.sum()))[codes[held]]
    return out


def calibration_error(confidence: np.ndarray, correct: np.ndarray, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over bins with the same number of rows, each weighted by its rows."""
    order = np.argsort(confidence, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    gaps = [abs(confidence[part].mean() - correct[part].mean()) * len(part) for part in parts]
    return float(sum(gaps) / len(confidence))


def code_blocks(roots: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(train, test) masks [blocks, rows] of the online code; rows in no test block come before the first probe."""
    number = len(np.unique(roots))
    rank = fold_of_groups(roots, number, seed)  # as many folds as roots: a shuffled order of the roots
    ends = sorted({round(number * share) for share in BLOCKS if round(number * share) >= min(MIN_ROOTS, number // 2)})
    train = np.stack([rank < begin for begin in ends[:-1]])
    test = np.stack([(rank >= begin) & (rank < end) for begin, end in pairwise(ends)])
    return train, test


def code_length(log_loss: np.ndarray, coded: np.ndarray, classes: int) -> tuple[float, float]:
    """(bits per row, compression). A row that no probe codes costs log2(classes) bits.

    log_loss  [rows], in nats; only entries with `coded` count. Compression above 1 means fewer bits than a uniform code.
    """
    even = np.log2(classes)
    bits = log_loss[coded].sum() / np.log(2) + even * (~coded).sum()
    return float(bits / len(log_loss)), float(even * len(log_loss) / max(bits, 1e-12))


# ---- chosen ----------------------------------------------------------------------------------------------------------
# Regularisation chosen by inner folds: `logistic-cv` and `ridge-cv`.
#
# The rows that a fold trains on are split again, over groups (roots). Every C of a grid is fitted without one inner fold
# and judged on it; the C with the lowest loss is fitted on the whole training set. Rows that the outer fold tests take no
# part, so the score on them is as honest as with a fixed C. The loss is that of the fit: log-loss (see
# `smoothed`) for logistic regression, squared error for ridge. All inner and outer fits of a cell are solved
# together (`solvers.solve_path`).

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


# ---- registry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimator:
    """One line of `replaylens probe --list`."""

    name: str
    about: str
    make: Callable[[], Any]
    """a fresh estimator with scikit-learn's contract"""
    swept: str
    """how a sweep fits it: `together` (all cells at once), `apart` (one by one, in parallel), or `no`"""
    linear: bool = True
    inner: bool = False
    """whether it chooses its regularisation by inner folds, and so takes `groups` to keep together"""
    refits: bool = True
    """whether it is fitted again for every permutation; a sweep gives no p for one that is too slow"""

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise ProbeError(
                f"make of the estimator {self.name!r} is {short_repr(self.make)}, an estimator instead of what makes one. "
                "Give its class, or a function without arguments."
            )

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """What it predicts: class, number or both."""
        if is_regressor(self.make()):
            return ("number",)
        return ("class", "number") if self.name in ("ridge", "ridge-cv") else ("class",)


def _scaled(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: Chain([("scale", StandardScaler()), ("probe", make())])


ESTIMATORS = {
    each.name: each
    for each in (
        Estimator("logistic", "logistic regression, C = 1", _scaled(lambda: LogisticRegression(max_iter=1000)), "together"),
        Estimator("ridge", "ridge on targets of -1 and 1; for numbers, ridge regression", _scaled(RidgeClassifier), "together"),
        Estimator(
            "logistic-cv",
            "logistic regression, C chosen by inner folds over roots",
            ChosenProbe,
            "together",
            inner=True,
            refits=False,
        ),
        Estimator(
            "ridge-cv",
            "ridge, its penalty chosen by inner folds over roots; also for numbers",
            lambda: ChosenProbe("ridge"),
            "together",
            inner=True,
            refits=False,
        ),
        Estimator("mass-mean", "nearest class mean; the direction between the means", MassMeanProbe, "together"),
        Estimator(
            "mass-mean-whitened",
            "nearest class mean in the metric of the within-class covariance",
            lambda: MassMeanProbe(whiten=True),
            "together",
        ),
        Estimator(
            "lda",
            "linear discriminant analysis, shrunk (Ledoit-Wolf)",
            lambda: Discriminant(solver="lsqr", shrinkage="auto"),
            "apart",
        ),
        Estimator("sparse", "logistic regression on the 8 coordinates whose class means differ most", SparseProbe, "apart"),
        Estimator(
            "mlp",
            "one hidden layer of 64 units, seed 0",
            _scaled(lambda: MLPClassifier((64,), max_iter=1000, tol=1e-3, random_state=0)),
            "apart",
            linear=False,
            refits=False,
        ),
        Estimator("ccs", "contrast-consistent search on pairs of rows, without labels", CcsProbe, "no", linear=False),
        Estimator("attentive", "attention over positions, then a linear classifier", AttentiveProbe, "no", linear=False),
        Estimator("leace", "eraser: closed form, least change", Leace, "no", linear=False),
        Estimator("inlp", "eraser: project out one classifier after another", Inlp, "no", linear=False),
    )
}


def linear() -> list[str]:
    """The estimators that `fit_probe` takes: linear ones, fitted on rows of one position."""
    return [each.name for each in ESTIMATORS.values() if each.linear]


def get(name: str) -> Estimator:
    """The estimator of this name. Raises ProbeError, which lists the names."""
    if not isinstance(name, str):
        raise ProbeError(
            f"Invalid estimator: {short_repr(name)} is a {type(name).__name__}, not a name. Use one of {', '.join(ESTIMATORS)}."
        )
    if name not in ESTIMATORS:
        raise ProbeError(no_such("estimator", name, ESTIMATORS))
    return ESTIMATORS[name]


def calibrated(name: str, X: Any, y: Any, roots: Any, folds: int = 5, seed: int = 0) -> Any:
    """An estimator whose probabilities are calibrated (temperature scaling), on folds that keep roots together."""
    fold = fold_of_groups(np.asarray(plain(roots)), folds, seed)
    parts = [(np.flatnonzero(fold != f), np.flatnonzero(fold == f)) for f in range(folds)]
    return CalibratedClassifierCV(get(name).make(), method="temperature", cv=parts, ensemble=False).fit(plain(X), plain(y))
