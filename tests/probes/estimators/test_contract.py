"""One suite over all our estimators: scikit-learn's own checks, and a few promises of ours."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

from replaylens.probes.erasers import Inlp, Leace
from replaylens.probes.errors import BadRows, OneClass, UnknownEstimator
from replaylens.probes.estimators import AttentiveProbe, CcsProbe, MassMeanProbe, SparseProbe
from replaylens.probes.registry import ESTIMATORS, ChosenProbe, calibrated, get
from tests.devices import covering

OURS = [
    MassMeanProbe(),
    MassMeanProbe(whiten=True),
    SparseProbe(k=3),
    AttentiveProbe(steps=20),
    pytest.param(ChosenProbe(), marks=pytest.mark.slow),
    ChosenProbe("ridge"),
    Leace(),
    Inlp(),
]
GENERATOR = np.random.default_rng(0)
Y = GENERATOR.integers(2, size=200)
X = GENERATOR.normal(size=(200, 8))
X[:, 2] += 4 * (Y - 0.5)


@pytest.mark.parametrize("estimator", OURS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_accepts_it(estimator: Any) -> None:
    """Every scikit-learn check passes. CcsProbe is left out: its rows are pairs, so their width must be even."""
    results = check_estimator(estimator, on_fail=None)
    assert [r["check_name"] for r in results if r["status"] == "failed"] == []
    assert sum(r["status"] == "passed" for r in results) > 40


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_same_data_same_bits(name: str) -> None:
    """Fitting twice gives bit-identical predictions and does not change the input."""
    rows, values = X.copy(), Y.astype(str)
    first, second = (clone(get(name).make()).fit(rows, values) for _ in range(2))
    answer = "transform" if hasattr(first, "transform") and not hasattr(first, "predict") else "predict"
    assert np.array_equal(getattr(first, answer)(rows), getattr(second, answer)(rows))
    assert np.array_equal(rows, X)


@pytest.mark.parametrize("name", [name for name, each in ESTIMATORS.items() if name not in ("ccs", "leace", "inlp")])
@pytest.mark.parametrize("classes", [2, 3])
def test_reads_what_is_there(name: str, classes: int) -> None:
    """Two or three text classes are predicted as text, and well-separated classes are found."""
    values = np.array(["a", "b", "c"])[GENERATOR.integers(classes, size=300)]
    rows = np.random.default_rng(1).normal(size=(300, 6)) + 5 * (values[:, None] == np.array(["a", "b", "c", "", "", ""]))
    fitted = clone(get(name).make()).fit(rows, values)
    assert np.mean(fitted.predict(rows) == values) > 0.95
    assert set(fitted.classes_) == set(values)


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "tensor": torch.from_numpy,
    "with gradients": lambda x: torch.from_numpy(x).requires_grad_(x.dtype.kind == "f"),
    "bfloat16": lambda x: torch.from_numpy(x).bfloat16() if x.dtype.kind == "f" else torch.from_numpy(x),
    "half, on a stride": lambda x: torch.from_numpy(np.repeat(x, 2, 0)).to(torch.half if x.dtype.kind == "f" else torch.int8)[
        ::2
    ],
    "list": lambda x: x.tolist(),
    "list of tensors": lambda x: list(torch.from_numpy(x)),
    "frame": lambda x: pd.DataFrame(x) if x.ndim == 2 else pd.Series(x),
}
ANSWERS = ("predict", "predict_proba", "decision_function", "transform", "attention")


@pytest.mark.parametrize(("name", "form"), covering(ESTIMATORS, FORMS))
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_takes_any_form_of_rows(name: str, form: str) -> None:
    """Tensors of any dtype, with gradients or strides, lists and frames give what the array of the same numbers gives."""
    x = torch.from_numpy(X[:80]).bfloat16().double().numpy()  # numbers that every dtype holds
    given, labels = FORMS[form](x), FORMS[form](Y[:80])
    usual, other = clone(get(name).make()).fit(x, Y[:80]), clone(get(name).make()).fit(given, labels)
    asked = [answer for answer in ANSWERS if hasattr(usual, answer) and (name, answer) != ("lda", "transform")]
    assert asked and all(hasattr(other, answer) == hasattr(usual, answer) for answer in ANSWERS)
    for answer in asked:
        assert np.allclose(getattr(other, answer)(given), getattr(usual, answer)(x), atol=1e-4), answer
    if hasattr(usual, "score"):
        assert other.score(given, labels) == usual.score(x, Y[:80])


@pytest.mark.parametrize("estimator", [*OURS, CcsProbe()], ids=str)
def test_one_class_is_refused(estimator: Any) -> None:
    with pytest.raises(OneClass):
        clone(estimator).fit(X, np.zeros(len(X), dtype=int).astype(str))


def test_contrast_pairs_need_no_labels() -> None:
    """CCS finds the truth direction. Flipping the labels changes only its sign."""
    truth = GENERATOR.integers(2, size=300)
    base = GENERATOR.normal(size=(300, 10)) * 0.3
    way = np.eye(10)[4] * 3
    pairs = np.hstack([base + np.outer(truth - 0.5, way), base - np.outer(truth - 0.5, way)])
    fitted = CcsProbe(tries=3).fit(pairs, truth)
    assert np.mean(fitted.predict(pairs) == truth) > 0.98
    turned = CcsProbe(tries=3).fit(pairs, 1 - truth)
    assert np.array_equal(fitted.weight_, turned.weight_) and fitted.sign_ == -turned.sign_
    with pytest.raises(BadRows, match="two rows of equal width"):
        CcsProbe().fit(pairs[:, :-1], truth)


def test_attention_finds_the_position() -> None:
    """One of four positions holds the label, and the attention goes there. Absent positions get none."""
    x = GENERATOR.normal(size=(400, 4, 5))
    y = GENERATOR.integers(2, size=400)
    x[:, 2, 0] += 4 * (y - 0.5)
    x[:, 2, 1] += 3  # marks the position, so that attention can find it
    x[:50, 0] = 0
    fitted = AttentiveProbe(positions=4).fit(x.reshape(400, -1), y)
    weights = fitted.attention(x.reshape(400, -1))
    assert fitted.score(x.reshape(400, -1), y) > 0.9
    assert weights[:, 2].mean() > 0.6 and (weights[:50, 0] == 0).all()


def test_sparse_probe_chooses_as_transformer_lens_does() -> None:
    """Coordinates are chosen by TransformerLens's score: the absolute difference of class means."""
    chosen = SparseProbe(k=3).fit(X, Y).selected_
    score = np.abs(X[Y == 1].mean(0) - X[Y == 0].mean(0))
    assert list(chosen) == list(np.argsort(-score)[:3]) and chosen[0] == 2


@pytest.mark.slow  # importing TransformerLens takes ten seconds
def test_sparse_probe_against_transformer_lens() -> None:
    """On TransformerLens's training rows, both choose the same coordinates and give the same answers."""
    from transformer_lens.tools.analysis.sparse_probing import fit_sparse_probe

    theirs = fit_sparse_probe(torch.from_numpy(X), torch.from_numpy(Y), k=3, class_weight=None)
    train = theirs.train_indices.numpy()
    ours = SparseProbe(k=3).fit(X[train], Y[train])
    assert list(ours.selected_) == theirs.selected_features.tolist()
    said = X[:, ours.selected_] @ theirs.coefficients.numpy() + float(theirs.intercept) > 0
    assert np.mean(said == ours.predict(X).astype(bool)) > 0.98


def test_calibration_keeps_roots_together() -> None:
    """Calibrated probabilities have the right shape and sum to 1, and folds hold whole roots."""
    roots = np.repeat([f"r{i}" for i in range(50)], 4)
    fitted = calibrated("logistic", X, Y, roots)
    probabilities = fitted.predict_proba(X)
    assert probabilities.shape == (200, 2) and np.allclose(probabilities.sum(1), 1)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnknownEstimator, match="mass-mean"):
        get("magic")
