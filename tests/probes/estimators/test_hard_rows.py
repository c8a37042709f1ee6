"""Rows that are hard for arithmetic: rare classes, classes that a fold lacks, columns of very different scale."""

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from replaylens.probes import registry
from replaylens.probes.controls import Goal
from replaylens.probes.erasers import Inlp, Leace, moments_of
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.estimators import CcsProbe, MassMeanProbe
from replaylens.probes.heldout import held_out

ROWS, WIDTH = 2000, 16


def goal_of(codes: np.ndarray, classes: int) -> Goal:
    return Goal("y", "label", "class", tuple(map(str, range(classes))), codes, np.ones(len(codes), dtype=bool))


def area(X: np.ndarray, y: np.ndarray) -> float:
    """AUROC on the second half of the rows of a class-balanced probe of the first half."""
    half = len(X) // 2
    probe = LogisticRegression(class_weight="balanced").fit(X[:half], y[:half])
    return float(roc_auc_score(y[half:], probe.decision_function(X[half:])))


def rare(share: float, effect: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    y = (generator.random(ROWS) < share).astype(int)
    return generator.normal(size=(ROWS, WIDTH)) + effect * np.eye(1, WIDTH) * y[:, None], y


# ---- erasers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [None, LogisticRegression()], ids=["ridge", "logistic"])
def test_nullspace_projection_erases_a_rare_class(estimator: LogisticRegression | None) -> None:
    """With 95 : 5 labels no classifier beats the majority, yet the label is readable. It is erased all the same."""
    X, y = rare(0.05, 1.5)
    cleaner = Inlp(estimator).fit(X, y)
    assert area(X, y) > 0.8 and area(cleaner.transform(X), y) < 0.6
    assert len(cleaner.basis_) < 8, "what is left is not above chance on held-out rows, so it stops"


def test_nullspace_projection_leaves_noise() -> None:
    """Negative control: where nothing can be read from held-out rows, next to nothing is removed."""
    removed = [len(Inlp().fit(*rare(0.3, 0.0, seed)).basis_) for seed in range(6)]
    assert np.median(removed) == 0


def test_nullspace_projection_keeps_groups_together() -> None:
    """Labels that belong to groups, with noise shared by each group: only folds that split groups take it for the label."""
    generator = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 10)
    y = np.repeat(generator.permutation(np.arange(40) % 2), 10)
    X = np.repeat(generator.normal(size=(40, 30)), 10, 0) + 0.1 * generator.normal(size=(400, 30))
    assert len(Inlp().fit(X, y, groups=groups).basis_) < len(Inlp().fit(X, y).basis_)


def test_nullspace_projection_refuses_what_it_cannot_judge() -> None:
    X, y = rare(0.05, 1.5)
    with pytest.raises(BadRows, match="at least two"):
        Inlp().fit(X, np.arange(ROWS) == 3)
    with pytest.raises(ProbeError, match="sample_weight"):
        Inlp(NoWeights()).fit(X, y)


class NoWeights(LogisticRegression):
    def fit(self, X: np.ndarray, y: np.ndarray) -> "NoWeights":  # type: ignore[override]
        super().fit(X, y)
        return self


@pytest.mark.parametrize("orders", [0, 8, 12])
def test_erasure_does_not_depend_on_scales(orders: int) -> None:
    """Columns whose scales span `orders` of magnitude are erased as well as equal ones, by the same change of the rows."""
    generator = np.random.default_rng(0)
    y = generator.integers(2, size=ROWS)
    X = (generator.normal(size=(ROWS, WIDTH)) + y[:, None]) @ (np.eye(WIDTH) + 0.1 * generator.normal(size=(WIDTH, WIDTH)))
    scales = np.logspace(-orders / 2, orders / 2, WIDTH)
    erased = Leace().fit_transform(X * scales, y)
    standard = StandardScaler().fit_transform(erased)
    free = LogisticRegression(C=1e6, max_iter=5000).fit(standard, y)
    assert free.score(standard, y) <= max(y.mean(), 1 - y.mean()) + 1e-9
    assert np.abs(erased / scales - Leace().fit_transform(X, y)).max() < 1e-6, "erasing commutes with scaling"


def test_erasure_in_a_subspace_is_the_least_change() -> None:
    """Rows of rank 5 in 16 columns of unlike scale: on these rows the eraser is the authors', and one column is constant."""
    from concept_erasure import LeaceFitter

    generator = np.random.default_rng(1)
    y = generator.integers(3, size=400)
    X = (generator.normal(size=(400, 5)) + 2 * np.eye(5)[y]) @ generator.normal(size=(5, WIDTH)) * np.logspace(-1, 1, WIDTH)
    X[:, 7] = 3.0
    onehot = torch.nn.functional.one_hot(torch.from_numpy(y)).double()
    theirs = LeaceFitter.fit(torch.from_numpy(X), onehot, shrinkage=False, svd_tol=1e-8).eraser(torch.from_numpy(X)).numpy()
    assert np.abs(Leace().fit_transform(X, y) - theirs).max() < 1e-8


# ---- whitening --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [0.1, 1e8])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
def test_constant_column_changes_no_prediction(constant: float, whiten: bool, classes: int) -> None:
    generator = np.random.default_rng(0)
    y = generator.integers(classes, size=600)
    X = generator.normal(size=(600, 8)) + 1.5 * np.eye(classes, 8)[y]
    wide = np.insert(X, 5, constant, axis=1)
    fitted = MassMeanProbe(whiten).fit(wide, y)
    assert np.array_equal(fitted.predict(wide), MassMeanProbe(whiten).fit(X, y).predict(X))
    train = (np.arange(600) < 300)[None]
    name = "mass-mean-whitened" if whiten else "mass-mean"
    for dtype, agreement in ((torch.float64, 1.0), (torch.float32, 0.99)):
        said, without = (
            held_out(name, torch.from_numpy(rows)[None].to(dtype), [goal_of(y, classes)], train, ~train).predicted[
                0, 0, ~train[0]
            ]
            for rows in (wide, X)
        )
        assert np.mean(said == without) >= agreement


def test_whitening_does_not_depend_on_scales() -> None:
    """The metric of the within-class covariance undoes any scaling of the columns."""
    generator = np.random.default_rng(0)
    y = generator.integers(2, size=600)
    X = generator.normal(size=(600, 8)) + np.eye(1, 8) * y[:, None]
    scaled = X * np.logspace(-4, 4, 8)
    train = (np.arange(600) < 300)[None]
    plain = MassMeanProbe(whiten=True).fit(X[:300], y[:300]).predict(X[300:])
    assert np.array_equal(MassMeanProbe(whiten=True).fit(scaled[:300], y[:300]).predict(scaled[300:]), plain)
    held = held_out("mass-mean-whitened", torch.from_numpy(scaled)[None], [goal_of(y, 2)], train, ~train)
    assert np.array_equal(held.predicted[0, 0, 300:], plain)


def test_moments_of_a_far_column() -> None:
    """A mean of 1e8 costs the covariance no digits; a constant column has variance 0."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(700, 3))
    X[:, 1] = 1e8 + X[:, 1]
    X[:, 2] = 1e8 / 3
    moments = moments_of(X, (np.arange(700) % 2).astype(str))
    assert moments.covariance[1, 1].item() == pytest.approx(np.var(X[:, 1] - 1e8), rel=1e-9)
    assert (moments.covariance[2] == 0).all() and (moments.cross[2] == 0).all() and (moments.class_means[:, 2] == 1e8 / 3).all()


# ---- information ------------------------------------------------------------------------------------------------


def unseen(classes: int = 3) -> tuple[torch.Tensor, Goal, np.ndarray]:
    """Rows of which the training half lacks the last class."""
    generator = np.random.default_rng(0)
    codes = generator.integers(classes - 1, size=200)
    codes[150:160] = classes - 1
    x = generator.normal(size=(200, 6)) + 3 * np.eye(classes, 6)[codes]
    return torch.from_numpy(x)[None], goal_of(codes, classes), (np.arange(200) < 100)[None]


@pytest.mark.parametrize("name", ["logistic", "lda", "sparse"])
def test_information_where_a_fold_lacks_a_class(name: str) -> None:
    """The loss of a class that training lacks is finite and bounded by the documented rule, for probe and frequencies alike."""
    x, goal, train = unseen()
    test = ~train[0]
    loss = held_out(name, x, [goal], train, ~train).log_loss[0, 0].astype(np.float64)
    null = registry.null_log_loss(goal.codes, train, ~train, 3)
    bound = np.log(2 * 100 + 3)
    assert loss[test].max() <= bound + 1e-6 and null[goal.codes == 2] == pytest.approx(bound)
    assert registry.v_information(loss[test], null[test]) > 0.5


def test_smoothing_is_alike_for_probe_and_frequencies() -> None:
    """A probe that answers with the frequencies of its training set has no information, whichever classes that set lacks."""
    _, goal, train = unseen()
    shares = np.bincount(goal.codes[train[0]], minlength=3) / 100
    with np.errstate(divide="ignore"):
        probe = -registry.smoothed(np.log(shares), 100)[goal.codes]
    null = registry.null_log_loss(goal.codes, train, ~train, 3)
    assert registry.v_information(probe[~train[0]], null[~train[0]]) == pytest.approx(0, abs=1e-12)
    assert np.exp(registry.smoothed(np.log(np.full((2, 3), 1 / 3)), 5)) == pytest.approx(1 / 3)


def test_online_code_of_many_classes() -> None:
    """A class that no earlier block has costs little more than under the uniform code; that does not decide the length."""
    generator = np.random.default_rng(0)
    codes = generator.integers(10, size=400)
    x = torch.from_numpy(generator.normal(size=(400, 32)) + 4 * np.eye(10, 32)[codes])[None]
    train, test = registry.code_blocks(np.arange(400).astype(str))
    assert len(np.unique(codes[train[0]])) < 10, "the first probe has not seen every class"
    loss = held_out("logistic", x, [goal_of(codes, 10)], train, test).log_loss[0, 0] / np.log(2)
    for fit, block in zip(train, test, strict=True):
        new = block & ~np.isin(codes, codes[fit])
        assert (loss[new] <= np.log2(2 * fit.sum() + 10) + 1e-6).all()
    assert loss[test[0]].mean() < np.log2(10) + 0.5, "five of its twelve rows are of classes that the probe has not seen"
    bits, compression = registry.code_length(loss * np.log(2), test.any(0), 10)
    assert bits < 1.0 and compression > 3.5


# ---- estimators -------------------------------------------------------------------------------------------------


def test_contrast_probe_says_that_it_is_not_fitted() -> None:
    for ask in ("predict", "decision_function"):
        with pytest.raises(NotFittedError):
            getattr(CcsProbe(), ask)(np.zeros((2, 4)))
