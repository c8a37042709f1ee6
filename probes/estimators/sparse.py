"""k-sparse probes: logistic regression on the k coordinates whose class means differ most (Gurnee et al., arXiv 2305.01610)."""

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from replaylens.probes.checks import plain
from replaylens.probes.errors import OneClass
from replaylens.probes.estimators.inputs import TensorInput


class SparseProbe(TensorInput, ClassifierMixin, BaseEstimator):
    """Logistic regression on few coordinates.

    TransformerLens' `fit_sparse_probe` selects coordinates by the same score but splits the rows itself. Here the caller
    splits, so that all branches of a root stay on one side. The tests compare the two.

    k  number of coordinates
    C  as in scikit-learn's LogisticRegression
    """

    def __init__(self, k: int = 8, C: float = 1.0) -> None:
        self.k = k
        self.C = C

    def fit(self, X: Any, y: Any) -> "SparseProbe":
        X, y = validate_data(self, plain(X), plain(y))
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise OneClass(f"All {len(y)} rows have one class, {self.classes_[0]!r}. Give rows of at least two classes.")
        means = np.stack([X[y == each].mean(0) for each in self.classes_])  # [k, d]
        spread = np.abs(means[-1] - means[0]) if len(means) == 2 else means.std(0)
        self.selected_ = np.argsort(-spread, kind="stable")[: self.k]
        self.probe_ = LogisticRegression(C=self.C, max_iter=1000).fit(X[:, self.selected_], y)
        self.coef_ = np.zeros((len(self.probe_.coef_), X.shape[1]))
        self.coef_[:, self.selected_] = self.probe_.coef_
        self.intercept_ = self.probe_.intercept_
        self.n_iter_ = int(self.probe_.n_iter_.max())
        return self

    def _chosen(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        chosen: np.ndarray = validate_data(self, plain(X), reset=False)[:, self.selected_]
        return chosen

    def decision_function(self, X: Any) -> np.ndarray:
        chosen = self._chosen(X)
        scores: np.ndarray = self.probe_.decision_function(chosen)
        return scores

    def predict_proba(self, X: Any) -> np.ndarray:
        chosen = self._chosen(X)
        probabilities: np.ndarray = self.probe_.predict_proba(chosen)
        return probabilities

    def predict(self, X: Any) -> np.ndarray:
        chosen = self._chosen(X)
        classes: np.ndarray = self.probe_.predict(chosen)
        return classes
