"""Mass-mean probes: the direction from one class's mean to the other's (Marks & Tegmark, arXiv 2310.06824).

Plain:     a row belongs to the nearest class mean; for two classes the direction is mean1 - mean0.
Whitened:  nearest in the metric of the within-class covariance; the direction becomes within^-1 (mean1 - mean0).
"""

from typing import Any

import numpy as np
import torch
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from replaylens.probes.checks import plain
from replaylens.probes.errors import OneClass
from replaylens.probes.estimators.linear import LinearReadout
from replaylens.probes.estimators.moments import Moments, moments_of

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
