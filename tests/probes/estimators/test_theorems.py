"""Theorems as tests: what a probe must find, and what it must not."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from replaylens.probes.controls import make_goal
from replaylens.probes.erasers import Inlp, Leace
from replaylens.probes.estimators import MassMeanProbe
from replaylens.probes.heldout import held_out
from replaylens.probes.intervals import ratio_over_groups
from replaylens.probes.probe import fit_probe
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import by_root
from replaylens.probes.sweeps import sweep
from tests.probes.synthetic import direction, rows_of


def test_planted_direction_is_found_and_noise_is_not() -> None:
    """The layer that holds the label is shown. Noise, and the layer with that direction removed, are not."""
    table = sweep(rows_of(), "face", sites="S", positions="all", estimators=["logistic", "mass-mean", "ridge"]).table
    main = table[~table["known_zero"]]
    planted, rest = main[main["layer"] == 1], main[main["layer"] != 1]
    assert (planted["accuracy"] > 0.95).all() and (planted["p_family"] <= 0.01).all()
    assert (rest["p_family"] > 0.05).all() and (rest["low"] < 0.5).all()


@pytest.mark.parametrize("estimator", ["logistic", "mass-mean", "mass-mean-whitened", "ridge", "lda"])
def test_direction_is_the_planted_one(estimator: str) -> None:
    """The direction is the planted one up to sampling error. Negative control: labels permuted between roots give another."""
    rows = rows_of(roots=400)
    found = fit_probe(rows, "face", layer=1, position="all", estimator=estimator)
    lost = fit_probe(rows, "face", layer=1, position="all", estimator=estimator, shuffled=True)
    assert found.direction("heads", "tails") @ direction() > 0.95
    assert abs(lost.direction("heads", "tails") @ direction()) < 0.9


def inside(rows: ProbeRows, labels: list[str], chance: float, seed: int) -> list[bool]:
    """For each label, whether the interval of a cross-validated probe contains chance."""
    goals, split = [make_goal(rows.target(label)) for label in labels], by_root(rows, seed=seed)
    x = torch.from_numpy(rows.matrix("S", 0))[None]
    said = held_out("logistic", x, goals, split.train, split.test).predicted[0]
    right = np.stack([line == goal.codes for line, goal in zip(said, goals, strict=True)])
    return [chance in each for each in ratio_over_groups(right, np.ones(len(rows)), rows.roots, folds=5)]


@pytest.mark.parametrize("seeds, fewest, most", [(40, 34, 40), pytest.param(100, 90, 99, marks=pytest.mark.slow)])
def test_known_zeros_sit_at_chance(seeds: int, fewest: int, most: int) -> None:
    """In about 95 of 100 seeds the 95 % interval contains 1/2, the exact accuracy of guessing, for each of two labels."""
    labels = ["shuffled", "next_action"]
    held = [inside(rows_of(roots=150, per_root=1, seed=seed, width=32), labels, 0.5, seed) for seed in range(seeds)]
    assert all(fewest <= number <= most for number in np.sum(held, axis=0))


def test_intervals_have_teeth() -> None:
    """Negative control: where the label is present, no interval contains chance."""
    rows = rows_of(roots=150, per_root=1)
    goal, split = make_goal(rows.target("face")), by_root(rows)
    said = held_out("logistic", torch.from_numpy(rows.matrix("S", 1))[None], [goal], split.train, split.test).predicted[0, 0]
    assert 0.5 not in ratio_over_groups((said == goal.codes)[None], np.ones(len(rows)), rows.roots, folds=5)[0]


def test_erased_rows_cannot_be_learned() -> None:
    """After LEACE every class has the same mean, so no linear classifier beats the majority on these rows."""
    rows = rows_of(roots=200)
    X, y = rows.matrix("S", 1), rows.target("face").values
    erased = Leace().fit_transform(X, y)
    majority = max(np.mean(y == "heads"), np.mean(y == "tails"))
    free = dict(C=np.inf, tol=1e-10, max_iter=10000)
    assert LogisticRegression(**free).fit(erased, y).score(erased, y) <= majority + 1e-9
    assert np.abs(erased[y == "heads"].mean(0) - erased[y == "tails"].mean(0)).max() < 1e-9
    assert LogisticRegression(**free).fit(X, y).score(X, y) > 0.95, "the rows must have held the label before"


def test_leace_is_concept_erasure() -> None:
    """LEACE gives the same rows as the authors' implementation."""
    from concept_erasure import LeaceFitter

    generator = np.random.default_rng(0)
    for classes in (2, 3):
        y = generator.integers(classes, size=500)
        X = generator.normal(size=(500, 10)) @ generator.normal(size=(10, 10)) + 2 * np.eye(10)[y]
        ours = Leace().fit(X, y.astype(str)).transform(X)
        onehot = torch.nn.functional.one_hot(torch.from_numpy(y)).double()
        theirs = LeaceFitter.fit(torch.from_numpy(X), onehot, shrinkage=False, svd_tol=1e-8).eraser(torch.from_numpy(X)).numpy()
        assert np.abs(ours - theirs).max() < 1e-8


def test_leace_changes_least() -> None:
    """Projecting out the difference of means erases too, but moves the rows farther in their own metric."""
    rows = rows_of(roots=200)
    X, y = rows.matrix("S", 1), rows.target("face").values
    way = MassMeanProbe().fit(X, y).coef_[0]
    plain = X - np.outer((X - X.mean(0)) @ way, way) / (way @ way)
    whiten = np.linalg.inv(np.cov(X.T))

    def moved(other: np.ndarray) -> float:
        return float(np.einsum("nd,de,ne->", other - X, whiten, other - X))

    assert moved(Leace().fit_transform(X, y)) < moved(plain)


def test_nullspace_projection_erases_a_planted_direction() -> None:
    rows = rows_of(roots=200)
    X, y = rows.matrix("S", 1), rows.target("face").values
    cleaned = Inlp(iterations=12).fit_transform(X, y)
    assert LogisticRegression().fit(cleaned, y).score(cleaned, y) < 0.65
    assert np.linalg.matrix_rank(cleaned) < X.shape[1]


def test_nullspace_projection_takes_one_direction_less_than_classes() -> None:
    """Three classes along two directions: those two are removed and nothing else, whatever the scale of the rows."""
    generator = np.random.default_rng(0)
    y = generator.integers(3, size=600)
    for scale in (1.0, 1e5):
        X = scale * (generator.normal(size=(600, 20)) + 5 * np.eye(20)[y] * (y < 2)[:, None])
        once, cleaner = Inlp(iterations=1).fit(X, y.astype(str)), Inlp().fit(X, y.astype(str))
        assert once.basis_.shape == (2, 20) and np.allclose(once.basis_ @ once.basis_.T, np.eye(2))
        assert np.linalg.norm(once.basis_[:, :2]) > 1.35, "both lie in the plane that was planted"
        assert len(cleaner.basis_) % 2 == 0 and np.linalg.matrix_rank(cleaner.transform(X)) == 20 - len(cleaner.basis_)
