"""Erasers: transformations after which a linear probe can no longer read the label.

LEACE (Belrose et al., arXiv 2306.03819): the least change, in the rows' own metric, that makes every class mean equal:

    x  ->  x - W^+ P W (x - mean),   W = cov(x)^(-1/2),   P the orthogonal projection onto the columns of W cov(x, y)

INLP (Ravfogel et al., arXiv 2004.07667): fit a linear classifier, project its directions out, repeat.
"""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.linear_model import RidgeClassifier
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from replaylens.probes.errors import OneClass
from replaylens.probes.moments import Moments, moments_of

_RANK = 1e-10
"""directions with less than this share of the largest variance count as absent"""


class Leace(TransformerMixin, BaseEstimator):
    """Closed-form concept erasure. After `transform`, no linear classifier beats the majority on the rows of `fit`."""

    def fit(self, X: Any, y: Any) -> "Leace":
        X, y = validate_data(self, X, y)
        return self._set(moments_of(X, _classes(y)))

    def fit_moments(self, moments: Moments) -> "Leace":
        """Fit from streamed moments: bit for bit the eraser that `fit` gives on the same rows in the same order."""
        self.n_features_in_ = len(moments.mean)
        return self._set(moments)

    def _set(self, moments: Moments) -> "Leace":
        values, vectors = torch.linalg.eigh(moments.covariance)
        kept = values > _RANK * values.max()
        roots = values.clamp_min(0).sqrt()
        whiten = _from_spectrum(vectors, torch.where(kept, 1 / roots, 0.0))
        unwhiten = _from_spectrum(vectors, torch.where(kept, roots, 0.0))
        left, size, _ = torch.linalg.svd(whiten @ moments.cross, full_matrices=False)
        basis = left[:, size > 1e-8 * size.max().clamp_min(1e-300)]  # [d, at most k - 1]
        self.mean_ = moments.mean.numpy()
        self.projection_ = (unwhiten @ basis @ basis.T @ whiten).numpy()  # the part to remove
        return self

    def transform(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        return X - (X - self.mean_) @ self.projection_.T


class Inlp(TransformerMixin, BaseEstimator):
    """Iterative nullspace projection.

    estimator   a linear classifier with `coef_`; default: ridge
    iterations  maximum number; stops early when the classifier is no better than the majority on the rows of `fit`
    """

    def __init__(self, estimator: Any = None, iterations: int = 10) -> None:
        self.estimator = estimator
        self.iterations = iterations

    def fit(self, X: Any, y: Any) -> "Inlp":
        X, y = validate_data(self, X, y)
        names = _classes(y)
        majority = np.unique(names, return_counts=True)[1].max() / len(names)
        basis = np.zeros((0, X.shape[1]))
        self.n_iter_ = 0
        while self.n_iter_ < self.iterations:
            self.n_iter_ += 1
            rest = X - X @ basis.T @ basis
            probe = clone(RidgeClassifier() if self.estimator is None else self.estimator).fit(rest, names)
            if probe.score(rest, names) <= majority:
                break
            basis = row_space(np.vstack([basis, row_space(np.atleast_2d(probe.coef_))]))
        self.basis_ = basis  # orthonormal directions to remove
        return self

    def transform(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        return X - X @ self.basis_.T @ self.basis_


def row_space(lines: np.ndarray) -> np.ndarray:
    """Orthonormal directions [m, d] that lines [k, d] span. k classes span k - 1; what rounding adds is dropped."""
    _, size, directions = np.linalg.svd(lines, full_matrices=False)
    return directions[size > 1e-9 * size.max()]


def _classes(y: np.ndarray) -> np.ndarray:
    names = np.asarray(y).astype(str)
    if len(np.unique(names)) < 2:
        raise OneClass(f"All {len(names)} rows have one class. Give rows of at least two classes.")
    return names


def _from_spectrum(vectors: Tensor, values: Tensor) -> Tensor:
    return (vectors * values) @ vectors.T
