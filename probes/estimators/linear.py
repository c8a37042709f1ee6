"""`LinearReadout`: how a fitted linear classifier reads rows, as in scikit-learn: one line of `coef_` for two classes."""

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from replaylens.probes.checks import plain
from replaylens.probes.estimators.inputs import TensorInput


class LinearReadout(TensorInput, ClassifierMixin, BaseEstimator):
    """Scores and classes of rows. A subclass fits `classes_`, `coef_` [k, d] and `intercept_` [k]."""

    def decision_function(self, X: Any) -> np.ndarray:
        """[rows] for two classes, the second one's lead; otherwise [rows, classes]."""
        check_is_fitted(self)
        X = validate_data(self, plain(X), reset=False)
        scores: np.ndarray = X @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> np.ndarray:
        scores = self.decision_function(X)
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        chosen: np.ndarray = self.classes_[places]
        return chosen
