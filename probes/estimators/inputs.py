"""`TensorInput`: estimators that take torch tensors of any dtype and device beside what scikit-learn takes."""

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.pipeline import Pipeline
from sklearn.utils.metaestimators import available_if

from replaylens.probes.checks import plain


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


class Discriminant(TensorInput, LinearDiscriminantAnalysis):
    """Linear discriminant analysis that takes tensors."""
