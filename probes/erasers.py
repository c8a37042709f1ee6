"""Concept erasers (LEACE, INLP), the streamed moments that they are fitted on, and estimators that take tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from sklearn.pipeline import Pipeline
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, has_fit_parameter, validate_data
from torch import Tensor

from replaylens.probes.checks import plain
from replaylens.probes.errors import BadRows, OneClass, ProbeError

# ---- inputs ----------------------------------------------------------------------------------------------------------
# `TensorInput`: estimators that take torch tensors of any dtype and device in addition to what scikit-learn takes.


def _has(name: str) -> Callable[[Any], bool]:
    """Whether the estimator behind the mixin has this method: scikit-learn asks for methods to learn what it can do."""
    return lambda self: hasattr(super(TensorInput, self), name)


class TensorInput:
    """A mixin before scikit-learn's classes: whatever they do, they do to arrays. See `checks.plain` for what becomes one."""

    @available_if(_has("fit"))
    def fit(self, X: Any, y: Any = None, **more: Any) -> Any:
        return super().fit(plain(X), plain(y), **more)  # type: ignore[misc]

    @available_if(_has("predict"))
    def predict(self, X: Any) -> np.ndarray:
        chosen: np.ndarray = super().predict(plain(X))  # type: ignore[misc]
        return chosen

    @available_if(_has("predict_proba"))
    def predict_proba(self, X: Any) -> np.ndarray:
        shares: np.ndarray = super().predict_proba(plain(X))  # type: ignore[misc]
        return shares

    @available_if(_has("decision_function"))
    def decision_function(self, X: Any) -> np.ndarray:
        scores: np.ndarray = super().decision_function(plain(X))  # type: ignore[misc]
        return scores

    @available_if(_has("score"))
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        found: float = super().score(plain(X), plain(y), sample_weight=plain(sample_weight))  # type: ignore[misc]
        return found


class Chain(TensorInput, Pipeline):
    """A pipeline that takes tensors."""


class Discriminant(TensorInput, LinearDiscriminantAnalysis, auto_wrap_output_keys=None):  # type: ignore[call-arg]
    """Linear discriminant analysis that takes tensors. It transforms with a solver that can."""

    @available_if(lambda probe: probe.solver != "lsqr")
    def transform(self, X: Any) -> Any:
        return super().transform(plain(X))

    @available_if(lambda probe: probe.solver != "lsqr")
    def fit_transform(self, X: Any, y: Any = None, **more: Any) -> Any:
        return super().fit_transform(plain(X), plain(y), **more)


# ---- moments ---------------------------------------------------------------------------------------------------------
# `Moments`: means, covariance and cross-covariance of rows and their classes, whole or streamed, with the same bits.
#
# Many probes need nothing else. Each row is extended by its one-hot class; the covariance of the extended rows contains
# everything:
#
#     covariance of [x, onehot(y)]  =  [[cov(x, x), cov(x, y)], [cov(y, x), cov(y, y)]]
#
# Rows are summed in float64, in chunks of a fixed size and in the given order, as differences from the first row: so a large
# common mean costs the covariance no digits, and a constant column has variance 0. The result depends on the rows and their
# order alone, whatever pieces they arrive in.

CHUNK = 256
"""rows per product; part of the order of summation, hence of the bits"""


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of rows [n, d] with k classes, in float64."""

    count: int
    classes: tuple[str, ...]
    mean: Tensor
    """[d]"""
    covariance: Tensor
    """[d, d], divided by n"""
    cross: Tensor
    """[d, k]: covariance of the rows with each class's indicator"""
    shares: Tensor
    """[k]: relative frequency of each class"""

    @property
    def deviations(self) -> Tensor:
        """[d]: standard deviation of each column; 0 for a column that is constant up to rounding."""
        variance = self.covariance.diagonal()
        rounding = 10 * torch.finfo(variance.dtype).eps * self.mean.abs()
        return torch.where(variance > rounding.square(), variance.clamp_min(0).sqrt(), 0.0)

    @property
    def class_means(self) -> Tensor:
        """[k, d]"""
        return self.mean + (self.cross / self.shares).T

    @property
    def within(self) -> Tensor:
        """[d, d]: the covariance about the class means."""
        between = (self.cross / self.shares) @ self.cross.T
        return self.covariance - between


class StreamingStatistics:
    """Moments of one stream of rows [n, d]. `add` takes pieces of any length."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = 0
        self._first = torch.zeros(width, dtype=torch.float64)
        self._sum = torch.zeros(width, dtype=torch.float64)
        self._products = torch.zeros(width, width, dtype=torch.float64)
        self._waiting = torch.empty(0, width, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Mutates: adds rows after all earlier ones."""
        if rows.dim() != 2 or rows.shape[1] != self.width:
            raise BadRows(f"The rows have shape {tuple(rows.shape)}. Give rows of shape [n, {self.width}].")
        if not self.count and len(rows):
            self._first = rows[0].double().clone()
        waiting = torch.cat([self._waiting, rows.double()])
        whole = len(waiting) // CHUNK * CHUNK
        for chunk in waiting[:whole].split(CHUNK):
            self._take(chunk)
        self._waiting = waiting[whole:].clone()
        self.count += len(rows)

    def _take(self, chunk: Tensor) -> None:
        padded = torch.zeros(CHUNK, self.width, dtype=torch.float64)  # a short last chunk takes the same product
        padded[: len(chunk)] = chunk - self._first
        self._sum += padded.sum(0)
        self._products += padded.T @ padded

    def moments(self) -> tuple[Tensor, Tensor]:
        """(mean [d], covariance [d, d], divided by n), float64. Mutates nothing: more rows may follow."""
        if not self.count:
            raise BadRows("No rows were added. Add rows first.")
        rest = StreamingStatistics(self.width)
        rest._first, rest._sum, rest._products = self._first, self._sum.clone(), self._products.clone()
        if len(self._waiting):
            rest._take(self._waiting)
        mean = rest._sum / self.count
        return self._first + mean, rest._products / self.count - torch.outer(mean, mean)


class MomentStream:
    """Collects moments of rows that arrive in pieces. The order of the rows matters, the cuts do not."""

    def __init__(self, width: int, classes: Sequence[str]) -> None:
        if len(set(classes)) < 2:
            raise OneClass(f"The classes are {list(classes)}. Give at least two.")
        self.classes = tuple(classes)
        self.width = width
        self._place = {name: i for i, name in enumerate(self.classes)}
        self._statistics = StreamingStatistics(width + len(self.classes))

    @property
    def count(self) -> int:
        return self._statistics.count

    def add(self, rows: Tensor, values: Sequence[str] | np.ndarray) -> None:
        """Mutates: adds rows [n, d] with the class of each."""
        extended = torch.zeros(len(rows), self.width + len(self.classes), dtype=torch.float64)
        extended[:, : self.width] = rows
        for i, value in enumerate(values):
            if value not in self._place:
                raise ProbeError(f"Class {value!r} is not among {', '.join(self.classes)}. Name all classes beforehand.")
            extended[i, self.width + self._place[value]] = 1.0
        self._statistics.add(extended)

    def moments(self) -> Moments:
        """Moments of the rows so far; more may follow. Raises OneClass if a class has no rows."""
        mean, covariance = self._statistics.moments()
        d = self.width
        if bool((mean[d:] == 0).any()):
            empty = [name for name, share in zip(self.classes, mean[d:], strict=True) if share == 0]
            raise OneClass(f"No row of class {', '.join(empty)} among {self.count} rows. Fit on rows of every class.")
        return Moments(self.count, self.classes, mean[:d], covariance[:d, :d], covariance[:d, d:], mean[d:])


def moments_of(rows: np.ndarray | Tensor, values: np.ndarray) -> Moments:
    """Moments of rows in memory."""
    x = torch.as_tensor(rows)
    stream = MomentStream(x.shape[1], [str(name) for name in np.unique(values.astype(str))])
    stream.add(x, values.astype(str))
    return stream.moments()


# ---- erasers ---------------------------------------------------------------------------------------------------------
# Erasers: transformations after which a linear probe can no longer read the label.
#
# LEACE (Belrose et al., arXiv 2306.03819): the least change, in the rows' own metric, that makes every class mean equal:
#
#     x  ->  x - W^+ P W (x - mean),   W = cov(x)^(-1/2),   P the orthogonal projection onto the columns of W cov(x, y)
#
# Any W with W' W = cov(x)^-1 gives the same transformation. Here W is taken of standardised columns, W = corr(x)^(-1/2) /
# scale, so that columns of small scale are not mistaken for absent directions.
#
# INLP (Ravfogel et al., arXiv 2004.07667): fit a linear classifier, project its directions out, repeat.

_RANK = 1e-10
"""directions with less than this share of the largest variance, on standardised columns, count as absent"""
_FOLDS = 5
"""to judge a classifier on rows that it was not fitted on"""


class Leace(TensorInput, TransformerMixin, BaseEstimator):
    """Closed-form concept erasure. After `transform`, no linear classifier beats the majority on the rows of `fit`.

    Scaling a column before `fit` and undoing it after `transform` changes nothing but rounding.
    """

    def fit(self, X: Any, y: Any) -> "Leace":
        X, y = validate_data(self, plain(X), plain(y))
        return self._set(moments_of(X, _classes(y)))

    def fit_moments(self, moments: Moments) -> "Leace":
        """Fit from streamed moments: bit for bit the eraser that `fit` gives on the same rows in the same order."""
        self.n_features_in_ = len(moments.mean)
        return self._set(moments)

    def _set(self, moments: Moments) -> "Leace":
        scales = torch.where(moments.deviations > 0, moments.deviations, 1.0)
        values, vectors = torch.linalg.eigh(moments.covariance / torch.outer(scales, scales))
        kept = values > _RANK * values.max()
        roots = values.clamp_min(0).sqrt()
        whiten = _from_spectrum(vectors, torch.where(kept, 1 / roots, 0.0))
        unwhiten = _from_spectrum(vectors, torch.where(kept, roots, 0.0))
        left, size, _ = torch.linalg.svd(whiten @ (moments.cross / scales[:, None]), full_matrices=False)
        basis = left[:, size > 1e-8 * size.max().clamp_min(1e-300)]  # [d, at most k - 1]
        self.mean_ = moments.mean.numpy()
        standard = unwhiten @ basis @ basis.T @ whiten
        self.projection_ = (scales[:, None] * standard / scales).numpy()  # the part to remove
        return self

    def transform(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, plain(X), reset=False)
        return X - (X - self.mean_) @ self.projection_.T


class Inlp(TensorInput, TransformerMixin, BaseEstimator):
    """Iterative nullspace projection.

    Every class has the same weight in the fits and in the rule that stops them, so that rare classes are erased as well: a
    classifier of 95 : 5 labels need not beat the majority to rank the rows.

    estimator   a linear classifier with `coef_` whose `fit` takes `sample_weight`; default: ridge
    iterations  maximum number; stops early when the classifier's balanced accuracy on held-out rows (five folds) is at most two
                standard errors above chance
    """

    def __init__(self, estimator: Any = None, iterations: int = 10) -> None:
        self.estimator = estimator
        self.iterations = iterations

    def fit(self, X: Any, y: Any, groups: Any = None) -> "Inlp":
        """groups [n]: rows of one group, such as the branches of a root, share a fold; default: each row is its own group."""
        X, y = validate_data(self, plain(X), plain(y))
        names = _classes(y)
        probe = RidgeClassifier() if self.estimator is None else self.estimator
        if not has_fit_parameter(probe, "sample_weight"):
            raise ProbeError(f"The fit of {type(probe).__name__} takes no sample_weight. Give a classifier whose fit does.")
        folds = _folds(X, names, None if groups is None else np.asarray(plain(groups)))
        weight = compute_sample_weight("balanced", names)
        basis = np.zeros((0, X.shape[1]))
        self.n_iter_ = 0
        while self.n_iter_ < self.iterations:
            self.n_iter_ += 1
            rest = X - X @ basis.T @ basis
            if not _readable(probe, rest, names, weight, folds):
                break
            fitted = clone(probe).fit(rest, names, sample_weight=weight)
            basis = row_space(np.vstack([basis, row_space(np.atleast_2d(fitted.coef_))]))
        self.basis_ = basis  # orthonormal directions to remove
        return self

    def transform(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, plain(X), reset=False)
        return X - X @ self.basis_.T @ self.basis_


def row_space(lines: np.ndarray) -> np.ndarray:
    """Orthonormal directions [m, d] that lines [k, d] span. k classes span k - 1; what rounding adds is dropped."""
    _, size, directions = np.linalg.svd(lines, full_matrices=False)
    return directions[size > 1e-9 * size.max()]


def _folds(X: np.ndarray, names: np.ndarray, groups: np.ndarray | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows to fit, rows to judge) of each fold, with every class in about its share. Raises BadRows for too few groups."""
    units = np.arange(len(names)) if groups is None else groups
    least = min(len(np.unique(units[names == name])) for name in np.unique(names))
    if least < 2:
        raise BadRows("A class has rows of one group only. Give at least two rows, of different groups, of every class.")
    made = StratifiedKFold if groups is None else StratifiedGroupKFold
    return list(made(min(_FOLDS, least), shuffle=True, random_state=0).split(X, names, groups))


def _readable(
    probe: Any, X: np.ndarray, names: np.ndarray, weight: np.ndarray, folds: list[tuple[np.ndarray, np.ndarray]]
) -> bool:
    """Whether balanced accuracy on held-out rows is more than two standard errors above chance."""
    right = np.zeros(len(names), dtype=bool)
    for fit, held in folds:
        right[held] = clone(probe).fit(X[fit], names[fit], sample_weight=weight[fit]).predict(X[held]) == names[held]
    parts = [right[names == name] for name in np.unique(names)]
    chance = 1 / len(parts)
    error = np.sqrt(sum(chance * (1 - chance) / len(part) for part in parts)) / len(parts)
    return bool(np.mean([part.mean() for part in parts]) > chance + 2 * error)


def _classes(y: np.ndarray) -> np.ndarray:
    names = np.asarray(y).astype(str)
    if len(np.unique(names)) < 2:
        raise OneClass(f"All {len(names)} rows have one class. Give rows of at least two classes.")
    return names


def _from_spectrum(vectors: Tensor, values: Tensor) -> Tensor:
    return (vectors * values) @ vectors.T
