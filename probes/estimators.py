"""Estimators beyond logistic regression: mass-mean, contrast-consistent, k-sparse and attentive probes."""

from typing import Any

import numpy as np
import torch
from einops import rearrange
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from replaylens.probes.checks import plain
from replaylens.probes.erasers import Moments, TensorInput, moments_of
from replaylens.probes.errors import BadRows, OneClass

# ---- linear ----------------------------------------------------------------------------------------------------------
# `LinearReadout`: how a fitted linear classifier reads rows, as in scikit-learn: one line of `coef_` for two classes.


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


# ---- mass mean -------------------------------------------------------------------------------------------------------
# Mass-mean probes: the direction from one class's mean to the other's (Marks & Tegmark, arXiv 2310.06824).
#
# Plain:     a row belongs to the nearest class mean; for two classes the direction is mean1 - mean0.
# Whitened:  nearest in the metric of the within-class covariance; the direction becomes within^-1 (mean1 - mean0).

RIDGE = 1e-6
"""fraction of each column's variance added before inversion, since rows may lie in a subspace"""


class MassMeanProbe(LinearReadout):
    """Nearest class mean.

    whiten  measure distance by the within-class covariance
    """

    def __init__(self, whiten: bool = False) -> None:
        self.whiten = whiten

    def fit(self, X: Any, y: Any) -> "MassMeanProbe":
        X, y = validate_data(self, plain(X), plain(y))
        check_classification_targets(y)
        self.classes_, places = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise OneClass(f"All {len(y)} rows have one class, {self.classes_[0]!r}. Give rows of at least two classes.")
        names = np.array([f"{i:09d}" for i in range(len(self.classes_))])  # sort as text in the order of the classes
        return self._set(moments_of(X, names[places]))

    def fit_moments(self, moments: Moments) -> "MassMeanProbe":
        """Fit from streamed moments: bit for bit the probe that `fit` gives on the same rows in the same order."""
        self.classes_ = np.array(moments.classes)
        self.n_features_in_ = len(moments.mean)
        return self._set(moments)

    def _set(self, moments: Moments) -> "MassMeanProbe":
        means = moments.class_means - moments.mean  # [k, d]; from the mean of all rows, whose length may dwarf them
        weights = whitened(means, moments.within, moments.deviations) if self.whiten else means
        bias = -0.5 * (weights * means).sum(1) - weights @ moments.mean
        if len(means) == 2:
            weights, bias = weights[1:] - weights[:1], bias[1:] - bias[:1]
        self.coef_, self.intercept_ = weights.numpy(), bias.numpy()  # as in scikit-learn: one line for two classes
        return self


def whitened(means: Tensor, within: Tensor, deviations: Tensor) -> Tensor:
    """within^-1 means, for means [..., k, d] and within [..., d, d].

    Columns are first divided by their standard deviation [..., d], so that columns of any scale count alike; then RIDGE is
    added to the diagonal. A constant column (deviation 0) gets weight 0.
    """
    scales = torch.where(deviations > 0, deviations, torch.inf)
    standard = within / (scales[..., :, None] * scales[..., None, :])
    eye = torch.eye(within.shape[-1], dtype=within.dtype, device=within.device)
    solved = torch.linalg.solve(standard + RIDGE * eye, (means / scales[..., None, :]).mT).mT
    return solved / scales[..., None, :]


# ---- ccs -------------------------------------------------------------------------------------------------------------
# Contrast-consistent search (Burns et al., arXiv 2212.03827): a direction found without labels.
#
# A statement and its negation should have probabilities p+ and p- with p- = 1 - p+, and neither should be 1/2:
#
#     loss = (p+ + p- - 1)^2 + min(p+, p-)^2
#
# Each half is centred and scaled separately, so that the words that distinguish the halves cannot serve as the direction.


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
        halves = rearrange(torch.as_tensor(X, dtype=torch.float64), "n (halves d) -> halves n d", halves=2)
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
        halves = rearrange(torch.as_tensor(X, dtype=torch.float64), "n (halves d) -> halves n d", halves=2)
        p = torch.sigmoid(((halves - self.mean_) / self.scale_) @ self.weight_ + self.bias_)
        scores: np.ndarray = ((p[0] - p[1]) * self.sign_).numpy()
        return scores

    def predict(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        chosen: np.ndarray = self.classes_[(self.decision_function(X) > 0).astype(int)]
        return chosen


# ---- sparse ----------------------------------------------------------------------------------------------------------
# k-sparse probes: logistic regression on the k coordinates whose class means differ most (Gurnee et al., arXiv 2305.01610).


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


# ---- attentive -------------------------------------------------------------------------------------------------------
# `AttentiveProbe`: attention over positions with one learned query, then a linear classifier.
#
#     a = softmax over positions of x_i . q,   scores = W (sum_i a_i x_i) + b
#
# The weights `a` show which positions the label is read from.


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
        return rearrange(torch.as_tensor(X, dtype=torch.float64), "n (positions d) -> n positions d", positions=self.positions)

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
