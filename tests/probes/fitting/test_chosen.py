"""Regularisation chosen by inner folds: scikit-learn's choice, groups kept together, tested rows never looked at."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from replaylens.probes import registry
from replaylens.probes.controls import Goal
from replaylens.probes.errors import ProbeError, TooFewGroups
from replaylens.probes.heldout import held_out, permutation_test
from replaylens.probes.probe import fit_probe
from replaylens.probes.registry import GRID, ChosenProbe, inner_folds, solve_chosen
from replaylens.probes.solvers import one_hot, solve, solve_path
from replaylens.probes.sweeps import sweep
from tests.probes.synthetic import rows_of

ROWS, WIDTH, FOLDS = 180, 10, 2
GROUPS = np.arange(ROWS) // 3
TEST = np.arange(FOLDS)[:, None] == GROUPS % FOLDS


def problem(effect: float = 1.0, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, Goal]:
    generator = np.random.default_rng(seed)
    codes = generator.integers(classes, size=ROWS)
    x = generator.normal(size=(ROWS, WIDTH)) + effect * np.eye(classes, WIDTH)[codes]
    return x, Goal("y", "label", "class", tuple(map(str, range(classes))), codes, np.ones(ROWS, dtype=bool))


@pytest.mark.parametrize("kind", ["logistic", "ridge"])
def test_path_is_one_fit_after_another(kind: str) -> None:
    """Each strength of a path gives the probe that it gives alone."""
    x, goal = problem(classes=3)
    targets, train = one_hot(goal.codes[None], 3), ~TEST[None]
    for C, found in zip(GRID, solve_path(kind, torch.from_numpy(x)[None], targets, train, GRID, tolerance=1e-10), strict=True):
        alone = solve(kind, torch.from_numpy(x)[None], targets, train, C=C, alpha=1 / C, tolerance=1e-10)
        assert torch.allclose(found.weight, alone.weight, atol=1e-6) and torch.allclose(found.bias, alone.bias, atol=1e-6)


@pytest.mark.parametrize("effect", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["logistic", "ridge"])
def test_choice_is_that_of_a_loop_over_scikit_learn(kind: str, effect: float) -> None:
    """The same C as by fitting every C on every inner fold, and the same predictions."""
    x, goal = problem(effect)
    held = held_out(f"{kind}-cv", torch.from_numpy(x)[None], [goal], ~TEST, TEST, groups=GROUPS)
    found = solve_chosen(kind, torch.from_numpy(x)[None], one_hot(goal.codes[None], 2), ~TEST[None], GROUPS)[1][0, 0]
    for fold, test in enumerate(TEST):
        losses = [sum(one_loss(kind, C, x, goal.codes, inner, ~test) for inner in inner_folds(GROUPS, ~test)) for C in GRID]
        assert found[fold] == GRID[int(np.argmin(losses))]
        last = make(kind, found[fold]).fit(x[~test], goal.codes[~test])
        assert np.array_equal(last.predict(x[test]), held.predicted[0, 0, test])


def make(kind: str, C: float) -> object:
    last = LogisticRegression(C=C, tol=1e-10, max_iter=10000) if kind == "logistic" else RidgeClassifier(alpha=1 / C)
    return make_pipeline(StandardScaler(), last)


def one_loss(kind: str, C: float, x: np.ndarray, codes: np.ndarray, inner: np.ndarray, fit: np.ndarray) -> float:
    """Summed loss on an inner fold, written out."""
    rows = fit & ~inner
    score = make(kind, C).fit(x[rows], codes[rows]).decision_function(x[inner])
    sign = 2 * codes[inner] - 1
    if kind == "ridge":
        return float(((score - sign) ** 2).sum())
    share = 1 / (1 + np.exp(-score * sign))
    return float(-np.log((rows.sum() * share + 0.5) / (rows.sum() + 1)).sum())


def looks_at_tested_rows(name: str) -> bool:
    """Whether flipping the labels of tested rows changes their scores."""
    x, goal = problem(0.4, seed=2)

    def score(codes: np.ndarray, test: np.ndarray) -> np.ndarray:
        held = held_out(name, torch.from_numpy(x)[None], [replace(goal, codes=codes)], ~test[None], test[None], groups=GROUPS)
        return held.score[0, 0, test, 0]

    return not all(
        np.allclose(score(goal.codes, test), score(np.where(test, 1 - goal.codes, goal.codes), test), atol=1e-3)
        for test in TEST
    )


@pytest.mark.parametrize("name", ["logistic-cv", "ridge-cv"])
def test_tested_rows_take_no_part_in_the_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a choice that is judged on the tested rows is found out."""
    assert not looks_at_tested_rows(name)
    monkeypatch.setattr(registry, "inner_folds", lambda groups, fit: inner_folds(groups, fit) | ~fit)
    assert looks_at_tested_rows(name)


def test_inner_folds_keep_groups_together() -> None:
    """Labels of groups, with noise that a group shares: rows apart, memorising groups pays, and C comes out larger."""
    generator = np.random.default_rng(0)
    y = np.repeat(generator.permutation(np.arange(60) % 2), 5)
    X = np.repeat(generator.normal(size=(60, 40)), 5, 0) + 0.1 * generator.normal(size=(300, 40))
    groups = np.repeat(np.arange(60), 5)
    for kind in ("logistic", "ridge"):
        assert ChosenProbe(kind).fit(X, y, groups=groups).C_ < 0.1 < ChosenProbe(kind).fit(X, y).C_
    for inner in inner_folds(groups, groups % 3 > 0):
        assert inner.any() and not np.intersect1d(groups[inner], groups[(groups % 3 > 0) & ~inner]).size
        assert not inner[groups % 3 == 0].any()


def test_groups_are_needed() -> None:
    x, goal = problem()
    with pytest.raises(ProbeError, match="groups="):
        held_out("logistic-cv", torch.from_numpy(x)[None], [goal], ~TEST, TEST)
    with pytest.raises(TooFewGroups, match="use a fixed one"):
        inner_folds(np.zeros(6), np.ones(6, dtype=bool))
    with pytest.raises(ProbeError, match="Unknown kind"):
        ChosenProbe("lasso").fit(x, goal.codes)
    assert inner_folds(np.arange(3), np.ones(3, dtype=bool)).any(1).tolist() == [True, True, True, False, False]


def test_sweep_and_probe_take_them() -> None:
    """Through a sweep, for classes and numbers, and as a saved direction."""
    rows = rows_of(roots=60)
    rows.frame["size"] = rows.matrix("S", 1)[:, 0] + 0.1
    quick = dict(sites="S", positions="all", controls=False, permutations=19)
    table = sweep(rows, "face", layers=[0, 1], estimators=["logistic-cv", "ridge-cv"], **quick).table
    assert (table[table["layer"] == 1]["accuracy"] > 0.95).all() and (table[table["layer"] == 0]["accuracy"] < 0.7).all()
    assert table[table["estimator"] == "logistic-cv"]["v_information"].notna().all()
    assert sweep(rows, "size", layers=[1], estimators="ridge-cv", **quick).table["accuracy"].iloc[0] > 0.95
    probe = fit_probe(rows, "face", layer=1, position="all", estimator="logistic-cv")
    assert np.mean(probe.predict(rows.matrix("S", 1)) == rows.target("face").values) > 0.95


def test_refitted_permutations_take_them() -> None:
    """A permutation test gives them their groups."""
    rows = rows_of(roots=30)
    assert permutation_test(rows, "face", layer=1, position="all", estimator="ridge-cv", permutations=19).p[0] == 0.05
