"""Estimators by name: a description, how to make one, and how a sweep fits it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from replaylens.engine.errors import no_such
from replaylens.engine.request.values import shown
from replaylens.probes.checks import plain
from replaylens.probes.design.splits import fold_of_groups
from replaylens.probes.errors import UnknownEstimator
from replaylens.probes.estimators.attentive import AttentiveProbe
from replaylens.probes.estimators.ccs import CcsProbe
from replaylens.probes.estimators.erasers import Inlp, Leace
from replaylens.probes.estimators.inputs import Chain, Discriminant
from replaylens.probes.estimators.mass_mean import MassMeanProbe
from replaylens.probes.estimators.sparse import SparseProbe
from replaylens.probes.fitting.chosen import ChosenProbe


@dataclass(frozen=True)
class Estimator:
    """One line of `replaylens probe --list`."""

    name: str
    about: str
    make: Callable[[], Any]
    """a fresh estimator with scikit-learn's contract"""
    swept: str
    """how a sweep fits it: `together` (all cells at once), `apart` (one by one, in parallel), or `no`"""
    linear: bool = True
    inner: bool = False
    """whether it chooses its regularisation by inner folds, and so takes `groups` to keep together"""


def _scaled(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: Chain([("scale", StandardScaler()), ("probe", make())])


ESTIMATORS = {
    each.name: each
    for each in (
        Estimator("logistic", "logistic regression, C = 1", _scaled(lambda: LogisticRegression(max_iter=1000)), "together"),
        Estimator("ridge", "ridge on targets of -1 and 1; for numbers, ridge regression", _scaled(RidgeClassifier), "together"),
        Estimator(
            "logistic-cv",
            "logistic regression, C chosen by inner folds over roots",
            ChosenProbe,
            "together",
            inner=True,
        ),
        Estimator(
            "ridge-cv",
            "ridge, its penalty chosen by inner folds over roots; also for numbers",
            lambda: ChosenProbe("ridge"),
            "together",
            inner=True,
        ),
        Estimator("mass-mean", "nearest class mean; the direction between the means", MassMeanProbe, "together"),
        Estimator(
            "mass-mean-whitened",
            "nearest class mean in the metric of the within-class covariance",
            lambda: MassMeanProbe(whiten=True),
            "together",
        ),
        Estimator(
            "lda",
            "linear discriminant analysis, shrunk (Ledoit-Wolf)",
            lambda: Discriminant(solver="lsqr", shrinkage="auto"),
            "apart",
        ),
        Estimator("sparse", "logistic regression on the 8 coordinates whose class means differ most", SparseProbe, "apart"),
        Estimator(
            "mlp",
            "one hidden layer of 64 units, seed 0",
            _scaled(lambda: MLPClassifier((64,), max_iter=1000, tol=1e-3, random_state=0)),
            "apart",
            linear=False,
        ),
        Estimator("ccs", "contrast-consistent search on pairs of rows, without labels", CcsProbe, "no"),
        Estimator("attentive", "attention over positions, then a linear classifier", AttentiveProbe, "no", linear=False),
        Estimator("leace", "eraser: closed form, least change", Leace, "no"),
        Estimator("inlp", "eraser: project out one classifier after another", Inlp, "no"),
    )
}


def get(name: str) -> Estimator:
    """The estimator of this name. Raises UnknownEstimator, which lists the names."""
    if not isinstance(name, str):
        raise UnknownEstimator(
            f"Invalid estimator: {shown(name)} is a {type(name).__name__}, not a name. Use one of {', '.join(ESTIMATORS)}."
        )
    if name not in ESTIMATORS:
        raise UnknownEstimator(no_such("estimator", name, ESTIMATORS))
    return ESTIMATORS[name]


def calibrated(name: str, X: Any, y: Any, roots: Any, folds: int = 5, seed: int = 0) -> Any:
    """An estimator whose probabilities are calibrated (temperature scaling), on folds that keep roots together."""
    fold = fold_of_groups(np.asarray(plain(roots)), folds, seed)
    parts = [(np.flatnonzero(fold != f), np.flatnonzero(fold == f)) for f in range(folds)]
    return CalibratedClassifierCV(get(name).make(), method="temperature", cv=parts, ensemble=False).fit(plain(X), plain(y))
