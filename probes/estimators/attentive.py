"""`AttentiveProbe`: attention over positions with one learned query, then a linear classifier.

    a = softmax over positions of x_i . q,   scores = W (sum_i a_i x_i) + b

The weights `a` show which positions the label is read from.
"""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from replaylens.probes.checks import plain
from replaylens.probes.errors import BadRows, OneClass
from replaylens.probes.estimators.inputs import TensorInput


class AttentiveProbe(TensorInput, ClassifierMixin, BaseEstimator):
    """Each row is one path: its positions side by side, [positions * d]. An all-zero position counts as absent.

    positions  number of positions per row
    C          inverse strength of the penalty on query and weights
    steps      maximum number of L-BFGS steps
    """

    def __init__(self, positions: int = 1, C: float = 1.0, steps: int = 200, random_state: int = 0) -> None:
        self.positions = positions
        self.C = C
        self.steps = steps
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "AttentiveProbe":
        X, y = validate_data(self, plain(X), plain(y))
        check_classification_targets(y)
        self.classes_, places = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise OneClass(f"All {len(y)} rows have one class, {self.classes_[0]!r}. Give rows of at least two classes.")
        if X.shape[1] % self.positions:
            raise BadRows(f"{X.shape[1]} columns do not split into {self.positions} equal positions. Change `positions`.")
        x = self._shaped(X)
        there = x.abs().sum(-1, keepdim=True) > 0
        count = there.sum().clamp_min(1)
        self.mean_ = x.sum((0, 1)) / count
        self.scale_ = (((x - self.mean_) ** 2 * there).sum((0, 1)) / count).sqrt().clamp_min(1e-12)
        self._descend(x, torch.as_tensor(places))
        return self

    def _descend(self, x: Tensor, target: Tensor) -> None:
        generator = torch.Generator().manual_seed(self.random_state)
        d, k = x.shape[2], len(self.classes_)
        self.query_ = (0.01 * torch.randn(d, generator=generator, dtype=torch.float64)).requires_grad_()
        self.weight_ = torch.zeros(k, d, dtype=torch.float64, requires_grad=True)
        self.bias_ = torch.zeros(k, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [self.query_, self.weight_, self.bias_], max_iter=self.steps, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            fit = torch.nn.functional.cross_entropy(self._scores(x), target, reduction="sum")
            value = fit + 0.5 / self.C * (self.query_.square().sum() + self.weight_.square().sum())
            (value / len(x)).backward()
            return value / len(x)

        optimizer.step(loss)
        self.n_iter_ = optimizer.state[self.query_].get("n_iter", 0)
        self.query_, self.weight_, self.bias_ = self.query_.detach(), self.weight_.detach(), self.bias_.detach()

    def _shaped(self, X: np.ndarray) -> Tensor:
        return torch.as_tensor(X, dtype=torch.float64).view(len(X), self.positions, -1)  # [n, positions, d]

    def _attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        there = x.abs().sum(-1) > 0
        standard = (x - self.mean_) / self.scale_
        logits = (standard @ self.query_).masked_fill(~there, -1e300)
        return standard, logits.softmax(1)

    def _scores(self, x: Tensor) -> Tensor:
        standard, weights = self._attention(x)
        return (weights[:, :, None] * standard).sum(1) @ self.weight_.T + self.bias_  # [n, k]

    def attention(self, X: Any) -> np.ndarray:
        """Attention weights [rows, positions]."""
        check_is_fitted(self)
        weights: np.ndarray = self._attention(self._shaped(validate_data(self, plain(X), reset=False)))[1].numpy()
        return weights

    def predict_proba(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        probabilities: np.ndarray = self._scores(self._shaped(validate_data(self, plain(X), reset=False))).softmax(1).numpy()
        return probabilities

    def predict(self, X: Any) -> np.ndarray:
        places = self.predict_proba(X).argmax(1)
        chosen: np.ndarray = self.classes_[places]
        return chosen
