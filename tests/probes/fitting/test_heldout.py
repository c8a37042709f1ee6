"""The prediction for a held-out row depends only on that row and the rows the probe was fitted on."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from replaylens import tasks
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.probes import registry, splits
from replaylens.probes.controls import CONTROL, LABEL, Goal, control_labels, make_goal
from replaylens.probes.erasers import Leace, Moments, MomentStream, moments_of
from replaylens.probes.errors import OneClass, ProbeError, SharedRows, TooFewGroups
from replaylens.probes.estimators import MassMeanProbe
from replaylens.probes.heldout import HeldOutPredictions, Said, exchanged, held_out, online_codes, permutation_test
from replaylens.probes.probe import fit_probe, fit_streaming
from replaylens.probes.registry import GRID, ChosenProbe, inner_folds, solve_chosen
from replaylens.probes.rows import Cell, ProbeRows, make_target
from replaylens.probes.solvers import one_hot, solve, solve_path
from replaylens.probes.splits import Split, by_root
from replaylens.probes.sweeps import sweep
from tests.devices import covering
from tests.probes.synthetic import rows_of

ROWS = rows_of(roots=24, per_root=2, effect=1.0)
SPLIT = by_root(ROWS, folds=3)
X = torch.from_numpy(ROWS.matrix("S", 1))[None].clone()
SWEPT = [name for name, each in registry.ESTIMATORS.items() if each.swept != "no" and name != "mlp"]


def face() -> Goal:
    return make_goal(ROWS.target("face"))


def same(after: HeldOutPredictions, before: HeldOutPredictions, rows: np.ndarray) -> bool:
    """Whether predictions agree on some rows.

    Confidences agree up to the error of an iterative solver whose folds share a preconditioner.
    """
    sure = np.allclose(after.confidence[0, 0, rows], before.confidence[0, 0, rows], atol=1e-3, equal_nan=True)
    return sure and np.array_equal(after.predicted[0, 0, rows], before.predicted[0, 0, rows])


@pytest.mark.parametrize("name", SWEPT)
def test_labels_of_tested_rows_are_not_looked_at(name: str) -> None:
    """Flipping the labels of all tested rows, fold by fold, does not change their predictions."""
    goal = face()
    before = held_out(name, X, [goal], SPLIT.train, SPLIT.test, groups=ROWS.roots)
    for train, test in list(SPLIT)[:2]:
        flipped = replace(goal, codes=np.where(test, 1 - goal.codes, goal.codes))
        after = held_out(name, X, [flipped], SPLIT.train, SPLIT.test, groups=ROWS.roots)
        assert same(after, before, test)
        assert not same(after, before, train), "the control: other folds were fitted on them"


@pytest.mark.parametrize(("name", "nuisance"), covering(SWEPT, [False, True]))
def test_tested_rows_do_not_see_each_other(name: str, nuisance: bool) -> None:
    """Moving all tested rows of a fold but one leaves that row's prediction unchanged, also with a nuisance removed."""
    goal = face()
    place = np.random.default_rng(0).normal(size=(len(ROWS), 1)) if nuisance else None
    before = held_out(name, X, [goal], SPLIT.train, SPLIT.test, groups=ROWS.roots, nuisance=place)
    for _, test in list(SPLIT)[:1]:
        alone = np.flatnonzero(test)[:1]
        others = np.setdiff1d(np.flatnonzero(test), alone)
        after = held_out(name, _moved(others), [goal], SPLIT.train, SPLIT.test, groups=ROWS.roots, nuisance=place)
        assert same(after, before, alone)
        assert not same(after, before, others), "the control: what moved is read otherwise"


@pytest.mark.parametrize("name", ["logistic", "lda"])
def test_losses_count_the_rows_that_were_fitted(name: str) -> None:
    """Smoothed by as many rows as have the label; what no fold tests is -1 and NaN, not the first class."""
    goal = face()
    goal = replace(goal, present=np.arange(len(ROWS)) % 5 > 0)
    train, test = SPLIT.train[:2], SPLIT.test[:2]
    held = held_out(name, X, [goal], train, test)
    for fit, tested in zip(train, test, strict=True):
        count, p = int((fit & goal.present).sum()), held.confidence[0, 0].astype(np.float64)
        right = tested & (held.predicted[0, 0] == goal.codes)
        loss = -np.log((count * p + 0.5) / (count + 1))
        assert right.sum() > 5 and held.log_loss[0, 0, right] == pytest.approx(loss[right], rel=1e-5)
    left = ~test.any(0)
    assert (held.predicted[0, 0, left] == -1).all() and (held.predicted[0, 0, ~left] >= 0).all()
    for each in (held.log_loss, held.confidence, held.score[..., 0]):
        assert np.array_equal(np.isnan(each[0, 0]), left)


def _moved(rows: np.ndarray) -> Tensor:
    x = X.clone()
    x[:, rows] = x[:, rows] * -3 + 7
    return x


# ---- chosen ----------------------------------------------------------------------------------------------------------
# Regularisation chosen by inner folds: scikit-learn's choice, groups kept together, tested rows never looked at.

ROWS_OF_CHOSEN, WIDTH, FOLDS = 180, 10, 2
GROUPS = np.arange(ROWS_OF_CHOSEN) // 3
TEST = np.arange(FOLDS)[:, None] == GROUPS % FOLDS


def problem(effect: float = 1.0, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, Goal]:
    generator = np.random.default_rng(seed)
    codes = generator.integers(classes, size=ROWS_OF_CHOSEN)
    x = generator.normal(size=(ROWS_OF_CHOSEN, WIDTH)) + effect * np.eye(classes, WIDTH)[codes]
    return x, Goal("y", "label", "class", tuple(map(str, range(classes))), codes, np.ones(ROWS_OF_CHOSEN, dtype=bool))


@pytest.mark.parametrize("kind", ["logistic", "ridge"])
def test_path_is_one_fit_after_another(kind: str) -> None:
    """Each strength of a path gives the probe that it gives alone."""
    x, goal = problem(classes=3)
    targets, train = one_hot(goal.codes[None], 3), ~TEST[None]
    for C, found in zip(GRID, solve_path(kind, torch.from_numpy(x)[None], targets, train, GRID, tolerance=1e-10), strict=True):
        alone = solve(kind, torch.from_numpy(x)[None], targets, train, C=C, alpha=1 / C, tolerance=1e-10)
        assert torch.allclose(found.weight, alone.weight, atol=1e-6) and torch.allclose(found.bias, alone.bias, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("effect, kind", covering([0.0, 0.7], ["logistic", "ridge"]))
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


def test_a_permutation_test_breaks_ties_of_accuracy_by_the_area() -> None:
    """Equal accuracies are ranked by how sure the wrong answers are, never by more than one right answer counts."""
    codes, roots = np.tile([0, 1], 20), np.arange(40).astype(str)
    goal, tested = make_goal(make_target("label", codes.astype(str))), np.ones(40, dtype=bool)
    wrong = np.arange(40) < 4
    predicted = np.where(wrong, 1 - codes, codes)
    sides = np.where(predicted == 1, 1.0, -1.0)

    def observed(predicted: np.ndarray, score: np.ndarray) -> float:
        said = Said(predicted[None], score[None, :, None])
        return float(exchanged(said, goal, roots, roots, tested, 19, 0).observed[0])

    sure, unsure = observed(predicted, sides), observed(predicted, np.where(wrong, 0.1, 1.0) * sides)
    one_more = observed(np.where(np.arange(40) == 0, codes, predicted), sides)
    assert sure == pytest.approx(0.9, abs=1e-3) and sure < unsure < one_more


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
    quick = dict(sites="S", positions="all", controls=False, permutations=0)
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


# ---- online code -----------------------------------------------------------------------------------------------------
# The online code of a label beside that of its control task.

ROWS_OF_ONLINE_CODE = 600


def goal_of(codes: np.ndarray, role: str) -> Goal:
    return Goal("y", role, "class", ("0", "1"), codes, codes >= 0)


def problem_of_online_code(memorable: bool) -> tuple[torch.Tensor, Goal, list[Goal], np.ndarray]:
    """Two cells, the first with the label along one direction. `memorable`: each of 20 types of context has its own column."""
    generator = np.random.default_rng(0)
    codes, types = generator.integers(2, size=ROWS_OF_ONLINE_CODE), generator.integers(20, size=ROWS_OF_ONLINE_CODE)
    codes[:30] = -1
    x = generator.normal(size=(2, ROWS_OF_ONLINE_CODE, 24))
    x[0, :, 20] += 6 * codes
    if memorable:
        x[..., :20] += 6 * np.eye(20)[types]
    draws = [goal_of(control_labels(types, codes, seed), CONTROL) for seed in range(3)]
    return torch.from_numpy(x), goal_of(codes, LABEL), draws, np.repeat(np.arange(ROWS_OF_ONLINE_CODE // 2).astype(str), 2)


@cache
def coded(memorable: bool) -> list[Any]:
    """The codes of the cell with the label and of the one without it, beside the control task."""
    return online_codes(*problem_of_online_code(memorable))


@pytest.mark.slow
@pytest.mark.parametrize("memorable", [False, True])
def test_label_against_control_task(memorable: bool) -> None:
    """Where contexts can be told apart the control task is coded as well as the label, and selectivity shrinks."""
    read, noise = coded(memorable)
    assert read.compression > 4 > 1.2 > noise.compression
    assert read.control_bits * read.control_compression == pytest.approx(1)
    if memorable:
        assert read.control_bits < 0.6 and read.selectivity < 0.5 and noise.selectivity < 0, (
            "the control is easier there than the label"
        )
    else:
        assert read.control_bits > 0.9 and read.selectivity > 0.7


def test_controls_do_not_change_the_label() -> None:
    x, label, _, roots = problem_of_online_code(True)
    alone, beside = online_codes(x, label, [], roots)[0], coded(True)[0]
    assert (alone.bits, alone.compression) == (beside.bits, beside.compression)
    assert np.isnan([alone.control_bits, alone.control_compression, alone.selectivity]).all()
    with pytest.raises(ProbeError, match="number"):
        online_codes(
            x, Goal("y", LABEL, "number", (), np.zeros(ROWS_OF_ONLINE_CODE), np.ones(ROWS_OF_ONLINE_CODE, bool)), [], roots
        )


# ---- streaming -------------------------------------------------------------------------------------------------------
# Probes fitted during capture equal those fitted from the dump, bit for bit.

X_OF_STREAMING = torch.randn(700, 6, generator=torch.Generator().manual_seed(0)).double()
Y = np.where(np.random.default_rng(0).integers(2, size=700) == 1, "b", "a")


def streamed(cuts: list[int], rows: torch.Tensor = X_OF_STREAMING, values: np.ndarray = Y) -> Moments:
    stream, at = MomentStream(6, ["a", "b"]), 0
    for cut in [*cuts, len(rows)]:
        stream.add(rows[at : at + cut], values[at : at + cut])
        at += cut
    return stream.moments()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 300), max_size=6))
def test_pieces_do_not_move_a_bit(cuts: list[int]) -> None:
    whole, cut = moments_of(X_OF_STREAMING, Y), streamed(cuts)
    for name in ("mean", "covariance", "cross", "shares"):
        assert torch.equal(getattr(whole, name), getattr(cut, name))


def test_order_is_part_of_the_bits() -> None:
    """Negative control: another order of rows gives other bits."""
    assert not torch.equal(streamed([]).covariance, streamed([], X_OF_STREAMING.flip(0), Y[::-1]).covariance)


def test_moments_are_right() -> None:
    """Class means and within-class covariance match numpy in double precision."""
    moments = streamed([100, 33])
    rows = X_OF_STREAMING.numpy()
    means = np.stack([rows[name == Y].mean(0) for name in "ab"])
    assert np.allclose(moments.class_means.numpy(), means, atol=1e-12)
    within = np.cov((rows - means[(Y == "b").astype(int)]).T, bias=True)
    assert np.allclose(moments.within.numpy(), within, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("batch, backwards", [(7, False), pytest.param(30, False, marks=pytest.mark.slow), (16, True)])
def test_fitted_while_capturing(engine: Engine, coin_dump: Dump, batch: int, backwards: bool) -> None:
    """Mass-mean, whitened and LEACE fits have the same bits from a replay, in any batches and any order, and from the dump."""
    examples = tasks.get("coin")(flips=(2, 5)).examples(30)
    if backwards:
        examples = examples[::-1]
    collected = fit_streaming(engine, examples, "face", ["heads", "tails"], sites="S", batch=batch)
    rows = ProbeRows.of(coin_dump).accepted().at("step")
    rows = rows.where(rows.frame["example"] < 30)
    for layer in (0, 2, 4):
        X, y = rows.matrix("S", layer), rows.target("face").values
        for whiten in (False, True):
            ours = collected.fit("mass-mean-whitened" if whiten else "mass-mean")[Cell("S", layer)]
            theirs = MassMeanProbe(whiten).fit(X, y)
            assert np.array_equal(ours.coef_, theirs.coef_) and np.array_equal(ours.intercept_, theirs.intercept_)
            assert np.array_equal(ours.predict(X), theirs.predict(X))
        assert np.array_equal(collected.fit("leace")[Cell("S", layer)].projection_, Leace().fit(X, y).projection_)


def test_what_moments_cannot_do(engine: Engine) -> None:
    with pytest.raises(OneClass, match="at least two"):
        MomentStream(3, ["a"])
    with pytest.raises(OneClass, match="No row of class b"):
        streamed([], X_OF_STREAMING, np.full(len(X_OF_STREAMING), "a"))
    with pytest.raises(ProbeError, match="Name all classes"):
        streamed([], X_OF_STREAMING, np.full(len(X_OF_STREAMING), "c"))
    few = fit_streaming(engine, tasks.get("coin")(flips=2).examples(8), "face", ["heads", "tails"], sites=["blocks.1.hook_in"])
    with pytest.raises(ProbeError, match="Use one of mass-mean"):
        few.fit("mlp")


# ---- splits ----------------------------------------------------------------------------------------------------------
# Splits: every fold is checked for roots on both sides; held-out names and words are held out everywhere.

FOLDS_OF_SPLITS = 3


def masks(roots: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Three folds over six roots of two rows each, with two roots tested per fold: (train, test)."""
    fold = np.array([int(root) // 2 for root in roots])
    test = np.arange(FOLDS_OF_SPLITS)[:, None] == fold
    return ~test, test


@pytest.mark.parametrize("fold", range(FOLDS_OF_SPLITS))
def test_a_root_on_both_sides_is_found_in_every_fold(fold: int) -> None:
    """One row of one tested root is in the training set of a single fold."""
    roots = [str(i // 2) for i in range(12)]
    train, test = masks(roots)
    assert len(Split("sound", train, test, np.array(roots))) == FOLDS_OF_SPLITS
    leaked = int(np.flatnonzero(test[fold])[-1])
    train[fold, leaked] = True
    test[fold, leaked] = False
    with pytest.raises(SharedRows, match=f"fold {fold}: root {roots[leaked]} and 0 more"):
        Split("leaky", train, test, np.array(roots))


@pytest.mark.parametrize("fold", range(FOLDS_OF_SPLITS))
@pytest.mark.parametrize("side", [0, 1])
def test_an_empty_side_is_found_in_every_fold(fold: int, side: int) -> None:
    roots = [str(i // 2) for i in range(12)]
    both = masks(roots)
    both[side][fold] = False
    with pytest.raises(TooFewGroups, match=f"fold {fold}: "):
        Split("empty", *both, np.array(roots))


def test_a_row_is_tested_once() -> None:
    roots = [str(i // 2) for i in range(12)]
    train, test = masks(roots)
    test[2, 0], train[2, :2] = True, False
    with pytest.raises(ProbeError, match="several folds"):
        Split("twice", train, test, np.array(roots))


# Names


NAMES = [("Ann", "Bob"), ("Cid", "Cid"), ("Ann", "Cid"), ("Cid", "Dan"), ("Dan", "Cid"), ("Bob", "Bob")] * 3


def test_prompts_with_held_out_and_other_names_are_on_neither_side() -> None:
    """Held-out names are tested only on prompts without other names: elsewhere the probe could read a known name."""
    rows = rows_of(roots=len(NAMES), name=np.array(NAMES).ravel())
    split = splits.by_names(rows, {"Cid", "Dan"})
    held = {"Cid", "Dan"}
    by_root = dict(zip(rows.roots[::2], NAMES, strict=True))
    fitted, tested = set(rows.roots[split.train[0]]), set(rows.roots[split.test[0]])
    assert fitted == {root for root, names in by_root.items() if not set(names) & held}
    assert tested == {root for root, names in by_root.items() if set(names) <= held}
    left_out = set(by_root) - fitted - tested
    assert {by_root[root] for root in left_out} == {("Ann", "Cid")}, "the control: there are mixed prompts"


# Words


WORD = " not"


def branching(accepted_has: list[bool], rejected_has: list[bool]) -> ProbeRows:
    """Prompts of two tokens, the second with a rejected draft. The flags say whether the accepted or rejected one is WORD."""
    texts = [
        [" x", WORD if accepted else " x", WORD if rejected else " y"]
        for accepted, rejected in zip(accepted_has, rejected_has, strict=True)
    ]
    roots = len(texts)
    return rows_of(
        roots=roots,
        per_root=3,
        text=np.array(texts).ravel(),
        branch=np.tile([0, 0, 1], roots),
        position=np.tile([0, 1, 1], roots),
        fork_position=np.tile([0, 0, 1], roots),
        depth=np.tile([0, 0, 1], roots),
        accepted=np.tile([True, True, False], roots),
    )


def test_a_word_on_a_rejected_branch_keeps_its_prompt_out_of_the_fit() -> None:
    """The probe is also fitted on rows of rejected branches, so it has seen a word there."""
    kinds = [(False, False), (True, False), (False, True), (True, True)] * 3
    rows = branching(*map(list, zip(*kinds, strict=True)))
    by_root = dict(zip(rows.roots[::3], kinds, strict=True))
    for here in (rows, rows.accepted()):
        split = splits.by_phrase(here, WORD)
        fitted, tested = set(here.roots[split.train[0]]), set(here.roots[split.test[0]])
        assert fitted == {root for root, kind in by_root.items() if kind == (False, False)}
        assert tested == {root for root, (accepted, _) in by_root.items() if accepted}
