"""Erasers: transformations after which a linear probe can no longer read the label.

LEACE (Belrose et al., arXiv 2306.03819): the least change, in the rows' own metric, that makes every class mean equal:

    x  ->  x - W^+ P W (x - mean),   W = cov(x)^(-1/2),   P the orthogonal projection onto the columns of W cov(x, y)

Any W with W' W = cov(x)^-1 gives the same transformation. Here W is taken of standardised columns, W = corr(x)^(-1/2) / scale,
so that columns of small scale are not mistaken for absent directions.

INLP (Ravfogel et al., arXiv 2004.07667): fit a linear classifier, project its directions out, repeat.
"""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import check_is_fitted, has_fit_parameter, validate_data
from torch import Tensor

from replaylens.probes.checks import plain
from replaylens.probes.errors import BadRows, OneClass, ProbeError
from replaylens.probes.estimators.inputs import TensorInput
from replaylens.probes.estimators.moments import Moments, moments_of

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
