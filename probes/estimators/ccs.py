"""Contrast-consistent search (Burns et al., arXiv 2212.03827): a direction found without labels.

A statement and its negation should have probabilities p+ and p- with p- = 1 - p+, and neither should be 1/2:

    loss = (p+ + p- - 1)^2 + min(p+, p-)^2

Each half is centred and scaled separately, so that the words that distinguish the halves cannot serve as the direction.
"""

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from replaylens.probes.checks import plain
from replaylens.probes.errors import BadRows, OneClass
from replaylens.probes.estimators.inputs import TensorInput


class CcsProbe(TensorInput, ClassifierMixin, BaseEstimator):
    """Rows are pairs: the first half of the columns is the statement's row, the second half its negation's.

    Labels only set the sign of the direction; the direction itself is found without them.

    tries    number of random starts; the one with the lowest loss is kept
    steps    maximum number of L-BFGS steps per start
    """

    def __init__(self, tries: int = 10, steps: int = 100, random_state: int = 0) -> None:
        self.tries = tries
        self.steps = steps
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "CcsProbe":
        X, y = validate_data(self, plain(X), plain(y))
        self.classes_ = np.unique(y)
        if len(self.classes_) != 2:
            raise OneClass(f"The labels have {len(self.classes_)} classes. Contrast pairs need exactly two.")
        if X.shape[1] % 2:
            raise BadRows(f"{X.shape[1]} columns are not a pair. Give two rows of equal width, side by side.")
        halves = torch.as_tensor(X, dtype=torch.float64).view(len(X), 2, -1).transpose(0, 1)  # [2, n, d]
        self.mean_ = halves.mean(1, keepdim=True)
        self.scale_ = halves.std(1, keepdim=True).clamp_min(1e-12)
        found = [self._search((halves - self.mean_) / self.scale_, number) for number in range(self.tries)]
        self.loss_, self.weight_, self.bias_ = min(found, key=lambda each: each[0])
        self.sign_ = 1.0
        if np.mean(self.predict(X) == y) < 0.5:
            self.sign_ = -1.0
        return self

    def _search(self, pairs: Tensor, number: int) -> tuple[float, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.random_state * 1000 + number)
        weight = torch.randn(pairs.shape[2], generator=generator, dtype=torch.float64)
        weight = (weight / weight.norm()).requires_grad_()
        bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=self.steps, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            p = torch.sigmoid(pairs @ weight + bias)  # [2, n]
            value = ((p.sum(0) - 1) ** 2 + p.min(0).values ** 2).mean()
            value.backward()
            return value

        optimizer.step(loss)
        with torch.no_grad():
            p = torch.sigmoid(pairs @ weight + bias)
            value = float(((p.sum(0) - 1) ** 2 + p.min(0).values ** 2).mean())
        return value, weight.detach(), bias.detach()

    def decision_function(self, X: Any) -> np.ndarray:
        """Positive if the statement holds."""
        check_is_fitted(self)
        X = validate_data(self, plain(X), reset=False)
        halves = torch.as_tensor(X, dtype=torch.float64).view(len(X), 2, -1).transpose(0, 1)
        p = torch.sigmoid(((halves - self.mean_) / self.scale_) @ self.weight_ + self.bias_)
        scores: np.ndarray = ((p[0] - p[1]) * self.sign_).numpy()
        return scores

    def predict(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        chosen: np.ndarray = self.classes_[(self.decision_function(X) > 0).astype(int)]
        return chosen
