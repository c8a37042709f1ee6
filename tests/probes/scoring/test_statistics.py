"""Intervals cover, permutations respect roots, corrections correct, and everything is reproducible."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import beta
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from sklearn.pipeline import Pipeline

from replaylens import Engine, tasks
from replaylens.dumps.reader import Dump
from replaylens.probes import intervals, registry
from replaylens.probes.areas import area, area_gains, balanced_accuracy
from replaylens.probes.causal import ablate
from replaylens.probes.controls import Goal, make_goal
from replaylens.probes.errors import OneClass, TooFewGroups
from replaylens.probes.heldout import HeldOutPredictions, Said, exchanged, held_out, permutation_test
from replaylens.probes.intervals import (
    corrected_p,
    difference_over_groups,
    effective_groups,
    false_discovery,
    group_sums,
    mean_over_groups,
    mean_over_placebos,
    means_over_groups,
    ratio_over_groups,
)
from replaylens.probes.permutations import PARTNERS, Null, group_permutations, max_statistic, with_partners
from replaylens.probes.probe import fit_probe
from replaylens.probes.questions.forced import outcome_at_fork, viable_branch
from replaylens.probes.questions.judge import judge
from replaylens.probes.questions.transfer import transfer
from replaylens.probes.registry import calibration_error, code_blocks, code_length, v_information
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows, make_target
from replaylens.probes.sweeps import SweepCache, sweep
from tests.probes.synthetic import rows_of

ROOTS, PER_ROOT = 60, 5


def clusters(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Right and wrong rows whose rate varies by root (mean 0.7), and their roots."""
    generator = np.random.default_rng(seed)
    rate = generator.beta(1.4, 0.6, size=ROOTS)
    return generator.random((ROOTS, PER_ROOT)).ravel() < np.repeat(rate, PER_ROOT), np.repeat(
        np.arange(ROOTS).astype(str), PER_ROOT
    )


def test_interval_covers_on_clusters() -> None:
    """95 % intervals hold the true rate in 90 to 98 of 100 simulations. Treating rows as independent would not achieve this."""
    hits, naive = 0, 0
    for seed in range(150):
        right, roots = clusters(seed)
        hits += 0.7 in ratio_over_groups(right[None], np.ones(len(right)), roots)[0]
        apart = np.arange(len(right)).astype(str)
        naive += 0.7 in ratio_over_groups(right[None], np.ones(len(right)), apart)[0]
    assert 0.90 <= hits / 150 <= 0.98
    assert naive / 150 < 0.85


def test_interval_where_all_agree() -> None:
    """Thirty groups, all right, are compatible with a rate of 92 %: Jeffreys' interval, however many rows they have."""
    for each in (1, 20):
        roots = np.repeat(np.arange(30).astype(str), each)
        estimate = ratio_over_groups(np.ones((1, len(roots))), np.ones(len(roots)), roots)[0]
        assert estimate.value == estimate.high == 1 and estimate.low == pytest.approx(beta.ppf(0.025, 30.5, 0.5))
        none = ratio_over_groups(np.zeros((1, len(roots))), np.ones(len(roots)), roots)[0]
        assert none.low == 0 and none.high == pytest.approx(beta.ppf(0.975, 0.5, 30.5))
    with pytest.raises(TooFewGroups):
        ratio_over_groups(np.ones((1, 3)), np.ones(3), np.array(["a"] * 3))


@pytest.mark.slow
@pytest.mark.parametrize("placebos, rate", [(4, 0.5), (8, 0.25), (8, 0.5), (8, 0.8)])
def test_interval_covers_over_placebos(placebos: int, rate: float) -> None:
    """Each placebo flips every prompt or none: intervals hold the rate over directions. Intervals over prompts alone do not."""
    roots, hits, naive = np.arange(30).astype(str), 0, 0
    for seed in range(100):
        flips = np.random.default_rng(seed).random(placebos) < rate
        values = np.repeat(flips[:, None].astype(float), 30, 1)
        hits += rate in mean_over_placebos(values, roots, seed=seed, share=True)
        naive += rate in mean_over_groups(values.mean(0), roots)
    assert hits / 100 >= 0.88 and naive / 100 < 0.8


def test_interval_over_placebos_where_all_agree() -> None:
    """Eight directions without a flip are compatible with a third of directions flipping. A thousand prompts do not help."""
    doubt = 1 - 0.025 ** (1 / 8)
    for roots in (np.arange(8).astype(str), np.arange(1000).astype(str)):
        none = mean_over_placebos(np.zeros((8, len(roots))), roots, share=True)
        assert none.value == none.low == 0 and none.high == pytest.approx(doubt)
        every = mean_over_placebos(np.ones((8, len(roots))), roots, share=True)
        assert every.low == pytest.approx(1 - doubt) and every.value == every.high == 1


def test_intervals_end_where_scores_end() -> None:
    """Two of sixty rows are right, widened for five folds: a share stays between 0 and 1. An r2 may be negative."""
    roots = np.repeat(np.arange(30).astype(str), 2)
    few = (np.arange(60) < 2)[None]
    assert 0 <= ratio_over_groups(few, np.ones(60), roots, folds=5)[0].low < 2 / 60
    assert ratio_over_groups(few, np.ones(60), roots, folds=5, least=-np.inf)[0].low < 0
    assert 58 / 60 < ratio_over_groups(~few, np.ones(60), roots, folds=5)[0].high <= 1


def test_no_interval_is_a_point() -> None:
    """Equal values of few groups do not make a mean certain, be they shares or differences."""
    roots = np.arange(20).astype(str)
    for value in (0.0, 1.0, -1.0):
        estimate = mean_over_groups(np.full(20, value), roots)
        assert estimate.value == value and estimate.high - estimate.low > 0.1


def test_one_large_group_is_no_evidence() -> None:
    """Two groups of a hundred rows among 38 of two decide a share almost alone, and the interval knows it."""
    assert effective_groups(np.full(40, 3.0)) == 40 and 3.5 < effective_groups(np.r_[np.full(38, 2.0), [100, 100]]) < 4
    held = 0
    for seed in range(150):
        generator = np.random.default_rng(seed)
        sizes = np.r_[np.full(38, 2), [100, 100]]
        right = generator.random(sizes.sum()) < np.repeat(generator.beta(2.8, 1.2, size=40), sizes)
        held += 0.7 in mean_over_groups(right.astype(float), np.repeat(np.arange(40), sizes).astype(str))
    assert held >= 0.88 * 150


def test_a_difference_is_no_share() -> None:
    """One gain among twenty rows shows nothing, although no row loses."""
    values, roots = (np.arange(20) == 0).astype(float), np.arange(20).astype(str)
    assert difference_over_groups(values, roots).low < 0 < mean_over_groups(values, roots).low


def test_differences_are_widened_for_folds_too() -> None:
    values, roots = np.random.default_rng(0).normal(size=(1, 60)), np.arange(60).astype(str)
    plain, crossed = (mean_over_groups(values[0], roots, folds=folds) for folds in (1, 5))
    assert crossed.high - crossed.low == pytest.approx(np.sqrt(1.625) * (plain.high - plain.low))
    (alone,), (wide,) = (means_over_groups(values, roots, folds=folds) for folds in (1, 5))
    assert wide.high - wide.low == pytest.approx(np.sqrt(1.625) * (alone.high - alone.low))


def test_the_best_of_many_differences() -> None:
    """Twenty null differences: single intervals often miss 0 somewhere, simultaneous ones in one of twenty simulations."""
    roots = np.arange(40).astype(str)
    apart = together = 0
    for seed in range(40):
        values = np.random.default_rng(seed).normal(size=(20, 40))
        apart += any(0 not in mean_over_groups(line, roots) for line in values)
        together += any(0 not in each for each in means_over_groups(values, roots, seed=seed))
    assert apart > 20 and together <= 4
    real = means_over_groups(values + np.eye(20)[:, 7:8], roots)
    assert real[7].low > 0 and all(0 in each for i, each in enumerate(real) if i != 7)


def test_sums_by_root() -> None:
    assert group_sums(np.array([1, 2, 3, 4]), np.array(["b", "a", "b", "a"])).tolist() == [6, 4]
    assert mean_over_groups(np.array([1.0, 2, 3, 4]), np.array(["b", "a", "b", "a"])).value == 2.5


def test_permutations_move_labels_between_roots() -> None:
    """Constant labels are exchanged between roots. Sequences move whole, among roots with the same number of rows."""
    roots = np.repeat(["a", "b", "c", "d", "e"], [2, 2, 3, 3, 1])
    constant = np.repeat([0, 1, 0, 1, 1], [2, 2, 3, 3, 1])
    for order in group_permutations(constant, roots, 20):
        moved = constant[order]
        assert all(len(set(moved[roots == root])) == 1 for root in "abcde")
    varying = np.array([0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1])
    seen = set()
    for order in group_permutations(varying, roots, 20):
        assert sorted(order) == list(range(11)) and order[-1] == 10
        assert {tuple(varying[order][:2]), tuple(varying[order][2:4])} == {(0, 1), (1, 0)}
        seen.add(tuple(order))
    assert len(seen) == 4, "two pairs of roots can be exchanged, each or not"


def permuted(predicted: np.ndarray, labels: np.ndarray, roots: np.ndarray, count: int, seed: int = 0) -> Null:
    """The test of predictions [cells, rows] that were made without these labels."""
    every = np.ones(len(labels), dtype=bool)
    said = Said(predicted, np.full((*predicted.shape, 1), np.nan))
    return exchanged(said, make_goal(make_target("label", labels)), roots, roots, every, count, seed)


@pytest.mark.slow
def test_p_values_are_small_only_where_something_is() -> None:
    """On uninformative held-out predictions, p is below 5 % in about 5 % of cases; on good ones it always is."""
    generator = np.random.default_rng(0)
    roots = np.repeat(np.arange(40).astype(str), 3)
    small = 0
    for seed in range(100):
        labels = np.repeat(generator.integers(2, size=40), 3)
        guesses = generator.integers(2, size=(1, 120))
        small += permuted(guesses, labels, roots, 19, seed).p[0] <= 0.05
    assert small <= 11
    assert permuted(labels[None], labels, roots, 99).p[0] == 0.01


def test_corrected_t_test() -> None:
    """Means of zero are called positive in about 5 % of cases, fewer once corrected for folds. A real gain is found."""
    generator, roots = np.random.default_rng(4), np.repeat(np.arange(30).astype(str), 2)
    gains = generator.normal(size=(2000, 60)) + np.repeat(generator.normal(size=(2000, 30)), 2, axis=1)
    assert 0.035 < (corrected_p(gains, roots, 1) <= 0.05).mean() < 0.065
    assert (corrected_p(gains, roots, 5) <= 0.05).mean() < 0.03
    assert corrected_p(gains + 2, roots, 5).max() < 0.01
    assert corrected_p(np.ones((1, 60)), roots, 5)[0] == 0.5**30, "never zero"


def test_partners_of_equal_length() -> None:
    """Groups keep their first rows, as many as four others at least, with the fewest rows left out. By trying all cuts."""
    generator = np.random.default_rng(3)
    for count in (5, 9, 10, 12, 13):
        sizes = np.maximum(1, np.round(4 * np.exp(generator.normal(size=count)))).astype(int)
        groups = generator.permutation(np.repeat(np.arange(count), sizes))
        kept = with_partners(groups)
        lengths = np.array([kept[groups == group].sum() for group in range(count)])
        assert all(kept[groups == group][:length].all() for group, length in enumerate(lengths))
        assert (np.unique(lengths, return_counts=True)[1] >= PARTNERS).all()
        ordered, least = np.sort(sizes)[::-1], np.inf
        for inside in itertools.product((False, True), repeat=count - 1):
            parts = np.split(ordered, 1 + np.flatnonzero(inside))
            if all(len(part) >= PARTNERS for part in parts):
                least = min(least, sum((part - part.min()).sum() for part in parts))
        assert (~kept).sum() == least
    assert with_partners(np.repeat(np.arange(3), 4)).all(), "of one size: nothing is left out"


def test_max_statistic_pays_for_looking_often() -> None:
    """The best of many null cells is significant on its own but not over the family. A real effect is significant in both."""
    generator = np.random.default_rng(1)
    labels = generator.integers(2, size=100)
    roots = np.arange(100).astype(str)
    cells = generator.integers(2, size=(200, 100))
    cells[7] = np.where(generator.random(100) < 0.85, labels, 1 - labels)
    null = permuted(cells, labels, roots, 199)
    (family,) = max_statistic([null])
    q = false_discovery(null.p)
    others = np.delete(np.arange(200), 7)
    assert null.p[others].min() <= 0.02 and family[others].min() > 0.05 and q[others].min() > 0.05
    assert family[7] == 1 / 200


def test_spreads_of_few_draws() -> None:
    """Cells of one spread are compared by their scores, those of different ones by their own; any draw may be the observed
    one, so that 5 % of them are shown. So are cells of one centre, and of different ones."""
    generator = np.random.default_rng(2)
    alike, apart = generator.normal(size=(40, 3)), generator.normal(size=(40, 3)) * [1, 10, 100]
    every = [np.roll(alike, turn, 0) for turn in range(40)]
    least = [max_statistic([Null(turn[0], turn[1:])])[0].min() for turn in every]
    assert np.mean(np.array(least) <= 0.05) == 0.05
    seen = np.vstack(Null(alike[0], alike[1:]).standard())
    assert np.allclose(np.diff(seen - alike / alike.std(0) * seen.std(0), axis=1), 0)  # one scale and centre for all cells
    other = np.vstack(Null(apart[0], apart[1:]).standard())
    assert np.allclose(other.std(0), 1, atol=0.02) and abs(other.mean(0)).max() < 0.3
    far = alike + np.array([0, 9, 99])
    moved = np.vstack(Null(far[0], far[1:]).standard())
    assert abs(moved.mean(0)).max() < 0.05, "centres that differ are taken out"


def test_max_statistic_runs_over_all_families() -> None:
    """A cell of the first position is significant alone, but not beside the many of the second. Checked by the definition."""
    generator = np.random.default_rng(2)
    few = Null(np.array([2.2]), generator.normal(size=(199, 1)))
    table = np.vstack([[0.0, 1.5, 0.5] + [0.0] * 37, generator.normal(size=(199, 40))])
    table = (table - table.mean(0)) * 2 / table.std(0)  # equal centres and spreads, which are not drawn together
    many = Null(table[0], table[1:])
    whole = {id(null): np.vstack([null.observed, null.drawn]) for null in (few, many)}
    best = []
    for number in range(199):
        scores = [(null.drawn[number] - whole[id(null)].mean(0)) / whole[id(null)].std(0) for null in (few, many)]
        best.append(max(score for family in scores for score in family))
    for order in ([few, many], [many, few]):
        for null, family in zip(order, max_statistic(order), strict=True):
            seen = (null.observed - whole[id(null)].mean(0)) / whole[id(null)].std(0)
            assert family == pytest.approx([(1 + sum(b >= s for b in best)) / 200 for s in seen])
    assert max_statistic([few])[0][0] < 0.05 < max_statistic([few, many])[0][0], "the control: the others do count"


def test_a_cell_that_never_varies_is_never_significant() -> None:
    null = Null(np.array([0.5]), np.full((99, 1), 0.5))
    assert null.p[0] == 1 and max_statistic([null])[0][0] == 1


def test_refitted_permutations() -> None:
    """The exact test finds a planted label, and nothing in noise."""
    rows = rows_of(roots=60)
    found = permutation_test(rows, "face", layer=1, position="all", permutations=39)
    absent = permutation_test(rows, "face", layer=0, position="all", permutations=39)
    assert found.p[0] == 1 / 40 and absent.p[0] > 0.05
    assert abs(found.drawn.mean() - 0.5) < 0.05


def test_information() -> None:
    """A coin known for certain is one bit. A probe that knows only the class shares has none. An even code costs one bit."""
    null = np.full(100, np.log(2))
    assert v_information(np.zeros(100), null) == pytest.approx(1)
    assert v_information(null, null) == 0
    assert code_length(np.zeros(10), np.zeros(10, dtype=bool), 2) == (1.0, 1.0)
    assert code_length(np.zeros(10), np.arange(10) >= 5, 2) == (0.5, 2.0)


def test_code_blocks_are_nested() -> None:
    """Each block is coded by a probe of all earlier roots and no later ones. Every root but the first is coded once."""
    roots = np.repeat(np.arange(200).astype(str), 2)
    train, test = code_blocks(roots)
    assert not (train & test).any() and (test.sum(0) <= 1).all() and test.any(0).mean() > 0.9
    assert all((train[i] | test[i] == train[i + 1]).all() for i in range(len(train) - 1))
    for fit, coded in zip(train, test, strict=True):
        assert not set(roots[fit]) & set(roots[coded])


def test_calibration_error() -> None:
    """Probabilities that match frequencies have error 0. Full confidence that is right half the time has error one half."""
    generator = np.random.default_rng(0)
    said = generator.uniform(0.5, 1, size=20000)
    assert calibration_error(said, generator.random(20000) < said) < 0.02
    assert calibration_error(np.ones(1000), np.arange(1000) % 2) == pytest.approx(0.5, abs=0.01)


# ---- areas -----------------------------------------------------------------------------------------------------------
# Areas under the ROC curve and balanced accuracy: their values, and intervals that cover the truth with few groups.


def names(groups: int, rows: int = 1) -> np.ndarray:
    return np.repeat(np.arange(groups), rows).astype(str)


def test_values_are_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    score, good = generator.integers(20, size=300) / 7, generator.random(300) < 0.4
    assert area(score, good, names(100, 3)).value == pytest.approx(roc_auc_score(good, score), abs=1e-12)
    codes, said = generator.integers(4, size=(2, 300))
    assert balanced_accuracy(said == codes, codes, names(100, 3)).value == pytest.approx(balanced_accuracy_score(codes, said))


def test_strata_are_compared_within() -> None:
    """A shift of a whole fold changes nothing; the value is the mean over folds, weighted by their pairs."""
    generator = np.random.default_rng(4)
    score, good, fold = generator.normal(size=120), generator.random(120) < 0.4, np.repeat(np.arange(4), 30)
    found = area(score, good, names(60, 2), strata=fold)
    assert found == area(score + 10.0 * fold, good, names(60, 2), strata=fold)
    pairs = np.array([good[fold == each].sum() * (~good[fold == each]).sum() for each in range(4)])
    apart = [roc_auc_score(good[fold == each], score[fold == each]) for each in range(4)]
    assert found.value == pytest.approx(np.average(apart, weights=pairs), abs=1e-12)
    assert area(score, good, names(60, 2), strata=np.zeros(120)) == area(score, good, names(60, 2))
    with pytest.raises(OneClass, match="No stratum"):
        area(score, good, names(60, 2), strata=good)


def test_no_interval_has_width_zero() -> None:
    """A perfect score, or a useless one, leaves doubt: less with more groups, not with more copies of the same rows."""
    good = np.tile([True, False], 10)
    score = good.astype(float)
    perfect, more = area(score, good, names(20)), area(np.tile(score, 5), np.tile(good, 5), names(100))
    assert perfect.high == 1 and perfect.low < more.low < 1
    copies = area(np.repeat(score, 5), np.repeat(good, 5), names(20, 5))
    assert copies.low == pytest.approx(perfect.low), "copies of rows are no evidence"
    assert area(-score, good, names(20)).low == 0 < area(-score, good, names(20)).high
    (gain,) = area_gains([score], score, good, names(20))
    assert gain.value == 0 and gain.low < 0 < gain.high
    for right in (np.zeros(20), np.ones(20)):
        found = balanced_accuracy(right, good.astype(int), names(20))
        assert found.low < found.high and found.value in (found.low, found.high)
        several = balanced_accuracy(np.repeat(right, 5), np.repeat(good.astype(int), 5), names(20, 5))
        assert (several.low, several.high) == pytest.approx((found.low, found.high))


@pytest.mark.parametrize("groups, truth", [(10, 0.985), (20, 0.9), (20, 0.985), (50, 0.985)])
def test_areas_cover_the_truth(groups: int, truth: float) -> None:
    """Three rows per group that share most of their score; the standard error of a coverage of 95 % is 1.8 %."""
    generator, found = np.random.default_rng(1), []
    while len(found) < 100:
        good = np.repeat(generator.random(groups) < 0.4, 3)
        if good.sum() in (0, 3, len(good) - 3, len(good)):
            continue
        noise = np.sqrt([0.6, 0.4]) @ [np.repeat(generator.normal(size=groups), 3), generator.normal(size=3 * groups)]
        found.append(area(noise + np.sqrt(2) * stats.norm.ppf(truth) * good, good, names(groups, 3)))
    assert 0.9 <= np.mean([truth in each for each in found]) <= 1
    assert np.mean([each.high - each.low for each in found]) < 2.5 / np.sqrt(groups), "not by being endless"


def test_gains_cover_zero() -> None:
    """Three scores as good as the baseline: in 95 of 100 simulations no interval lies beyond zero."""
    generator, held = np.random.default_rng(2), 0
    for _ in range(60):
        good = generator.random(40) < 0.5
        common = generator.normal(size=40) + 2 * good
        base, *scores = (common + generator.normal(size=40) for _ in range(4))
        held += all(0 in gain for gain in area_gains(scores, base, good, names(20, 2)))
    assert held >= 54


@pytest.mark.parametrize("classes, share, per_group", [(2, 0.97, 1), (2, 0.5, 3), (8, 0.125, 1), (8, 0.9, 3)])
def test_balanced_accuracy_covers_the_truth(classes: int, share: float, per_group: int) -> None:
    """Twenty groups whose rows have one class and mostly stand or fall together; classes of unequal size."""
    generator, held, done = np.random.default_rng(3), 0, 0
    often = 0.6 ** np.arange(classes) if classes == 2 else np.ones(classes)
    while done < 100:
        codes = np.repeat(generator.choice(classes, 20, p=often / often.sum()), per_group)
        if len(np.unique(codes)) < classes:
            continue
        shared, own = np.repeat(generator.random(20), per_group), generator.random(len(codes))
        right = np.where(generator.random(len(codes)) < 0.7, shared, own) < share
        held, done = held + (share in balanced_accuracy(right, codes, names(20, per_group))), done + 1
    assert held / done >= 0.9


def test_what_has_no_interval() -> None:
    with pytest.raises(OneClass, match="All 4 rows are good"):
        area(np.arange(4.0), np.ones(4), names(4))
    with pytest.raises(TooFewGroups, match="one group"):
        area(np.arange(4.0), np.array([1, 0, 1, 0]), names(1, 4))
    with pytest.raises(TooFewGroups, match="1 groups"):
        balanced_accuracy(np.ones(4), np.zeros(4, dtype=int), names(1, 4))


# ---- metrics ---------------------------------------------------------------------------------------------------------
# Metrics of held-out predictions, against scikit-learn, and the scores that sweeps keep for them.

SWEPT = [name for name, each in registry.ESTIMATORS.items() if each.swept != "no" and name != "mlp"]


def planted(classes: int, rows: int = 240, width: int = 5, seed: int = 0) -> tuple[torch.Tensor, Goal, np.ndarray]:
    """(x [1, rows, width], goal, train [1, rows])"""
    generator = np.random.default_rng(seed)
    codes = generator.integers(classes, size=rows)
    x = generator.normal(size=(rows, width)) + 1.5 * np.eye(classes, width)[codes]
    goal = Goal("y", "label", "class", tuple(map(str, range(classes))), codes, np.ones(rows, bool))
    return torch.from_numpy(x)[None], goal, (np.arange(rows) < rows // 2)[None]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", SWEPT)
def test_scores_rank_as_scikit_learn(name: str, classes: int) -> None:
    """Scores of a sweep order the rows as the fitted scikit-learn estimator does, and decide as its predictions."""
    x, goal, train = planted(classes)
    held = held_out(name, x, [goal], train, ~train, groups=np.arange(len(goal.codes)))
    score, said = held.score[0, 0][~train[0]], held.predicted[0, 0][~train[0]]
    assert score.shape[1] == goal.outputs and np.isnan(held.score[0, 0][train[0]]).all()
    assert np.array_equal((score[:, 0] > 0) if classes == 2 else score.argmax(1), said)
    fitted = registry.get(name).make().fit(x[0, train[0]], goal.codes[train[0]])
    proper = hasattr(fitted[-1] if isinstance(fitted, Pipeline) else fitted, "predict_proba")
    theirs = fitted.predict_proba(x[0, ~train[0]]) if proper and classes > 2 else fitted.decision_function(x[0, ~train[0]])
    theirs = theirs.reshape(len(said), -1)
    if not proper and classes > 2:
        theirs = theirs - np.stack([np.delete(theirs, k, 1).max(1) for k in range(classes)], 1)
    for column in range(goal.outputs):
        pairs = np.sign(np.subtract.outer(score[:, column], score[:, column]))
        assert np.mean(pairs == np.sign(np.subtract.outer(theirs[:, column], theirs[:, column]))) > 0.999


KEY = "0" * 64


def test_parts_keep_scores_and_replace_old_files(tmp_path: Path) -> None:
    """A part is read back with every array. One without scores, of an earlier version, is computed again."""
    x, goal, train = planted(3)
    made = held_out("ridge", x, [goal], train, ~train)
    SweepCache(tmp_path, KEY).get("part", lambda: made)

    def never() -> HeldOutPredictions:
        raise AssertionError("the part is stored")

    kept = SweepCache(tmp_path, KEY).get("part", never)
    assert np.array_equal(kept.score, made.score, equal_nan=True) and np.array_equal(kept.predicted, made.predicted)
    (file,) = tmp_path.glob("*.npz")
    np.savez(file, predicted=made.predicted, log_loss=made.log_loss, confidence=made.confidence)
    again = SweepCache(tmp_path, KEY).get("part", lambda: made)
    assert again.score is made.score and SweepCache(tmp_path, KEY).get("part", never).score.shape == made.score.shape


def answers(classes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scores [3 cells, 90 rows, outputs] with ties, predictions [3, 90], codes [90] with a rare class)"""
    generator = np.random.default_rng(seed)
    codes = generator.choice(classes, size=90, p=np.array([classes, *[1] * (classes - 1)]) / (2 * classes - 1))
    scores = (generator.normal(size=(3, 90, classes)) + np.eye(classes)[codes]).round(1)
    return (scores[..., 1:] - scores[..., :1] if classes == 2 else scores), scores.argmax(-1), codes


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_metrics_are_scikit_learns(classes: int, seed: int) -> None:
    score, said, codes = answers(classes, seed)
    average = "binary" if classes == 2 else "macro"
    areas = [np.mean([roc_auc_score(codes == k, each[:, i]) for i, k in columns(classes)]) for each in score]
    assert intervals.auroc(score, codes) == pytest.approx(areas, abs=1e-12)
    recalls = [balanced_accuracy_score(codes, each) for each in said]
    assert intervals.balanced_accuracy(said, codes) == pytest.approx(recalls, abs=1e-12)
    assert intervals.f1(said, codes, classes) == pytest.approx([f1_score(codes, each, average=average) for each in said])


def columns(classes: int) -> list[tuple[int, int]]:
    """(column of the score, class that it speaks of)"""
    return [(0, 1)] if classes == 2 else [(k, k) for k in range(classes)]


def test_macro_area_of_probabilities() -> None:
    """On probabilities, which scikit-learn insists on, its own macro average agrees."""
    score, _, codes = answers(4, 2)
    shares = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
    theirs = [roc_auc_score(codes, each, multi_class="ovr") for each in shares]
    assert intervals.auroc(np.log(shares), codes) == pytest.approx(theirs, abs=1e-12)


def test_what_is_undefined_is_nan() -> None:
    score, said, codes = answers(3, 0)
    one = np.zeros(90, dtype=int)
    assert np.isnan(intervals.auroc(score[..., :1], one)).all() and np.isnan(intervals.auroc(score, one)).all()
    assert np.isnan(intervals.balanced_accuracy(said, one)).all()
    assert (
        np.isnan(intervals.f1(np.zeros((2, 90)), one, 2)).all() and not np.isnan(intervals.f1(np.ones((2, 90)), one, 2)).any()
    )
    two = np.minimum(codes, 1)  # the third class does not occur: the mean is over the others
    assert intervals.auroc(score, two) == pytest.approx(
        intervals._mean([intervals._area(score[..., k], two == k, None) for k in (0, 1)])
    )
    assert not np.isnan(intervals.auroc(score, two)).any()
    assert np.isnan(intervals.auroc(score[..., :1], two, fold=two)).all(), "no fold has a pair of rows to compare"


def test_pooling_folds_biases_the_area() -> None:
    """On noise, AUROC within folds is 1/2 on average. Negative control: pooled over the folds, it is lower."""
    within, pooled = [], []
    for seed in range(60):
        generator = np.random.default_rng(seed)
        codes, fold = generator.integers(2, size=60), np.arange(60) % 10
        goal = Goal("y", "label", "class", ("0", "1"), codes, np.ones(60, dtype=bool))
        test = np.arange(10)[:, None] == fold
        score = held_out("ridge", torch.from_numpy(generator.normal(size=(1, 60, 2))), [goal], ~test, test).score[:, 0]
        within.append(intervals.auroc(score, codes, fold)[0])
        pooled.append(intervals.auroc(score, codes)[0])
    error = np.std(within) / np.sqrt(60)
    assert abs(np.mean(within) - 0.5) < 3 * error
    assert np.mean(pooled) < 0.5 - 3 * error


# ---- widening --------------------------------------------------------------------------------------------------------
# Every report widens the intervals of cross-validated scores. `statistics.cross_validation` gives the reason.


@pytest.mark.parametrize("folds, factor", [(1, 1.0), (2, math.sqrt(2)), (5, math.sqrt(1.625)), (10, math.sqrt(1 + 5 / 9))])
def test_intervals_by_their_definition(folds: int, factor: float) -> None:
    """Means have a t interval over groups, shares that of Korn and Graubard; standard errors carry the factor of the folds."""
    generator = np.random.default_rng(3)
    roots = np.repeat(np.arange(40).astype(str), 2)
    values = generator.normal(size=80)
    sums = np.array([(values[roots == root] - values.mean()).sum() for root in np.unique(roots)])
    error = factor * math.sqrt(40 / 39 * (sums**2).sum()) / 80
    found = mean_over_groups(values, roots, folds=folds)
    assert found.high - found.value == pytest.approx(stats.t.ppf(0.975, 39) * error)
    right = generator.random(80) < 0.6
    sums = np.array([(right[roots == root] - right.mean()).sum() for root in np.unique(roots)])
    spread, heard = right.mean() * (1 - right.mean()), (sums**2).sum() ** 2 / (sums**4).sum()
    variance = (heard**2 * 40 / 39 * (sums**2).sum() / 80**2 + 9 * spread / 40) / (heard**2 + 9)  # drawn towards one a group
    size = min(spread / variance, 80)
    size /= 1 + (0.4 + 8 / size) * folds / (folds - 1) if folds > 1 else 1
    size *= (stats.t.ppf(0.975, 79) / stats.t.ppf(0.975, 39)) ** 2
    share = ratio_over_groups(right[None], np.ones(80), roots, folds=folds)[0]
    wanted = stats.beta.ppf([0.025, 0.975], right.mean() * size + 0.5, (1 - right.mean()) * size + 0.5)
    assert (share.low, share.high) == pytest.approx(tuple(wanted))


def both_answers() -> ProbeRows:
    """A right and a wrong run of the same prompts."""
    right = rows_of(roots=40, per_root=1)
    return ProbeRows.join(greedy=right, sampled=ProbeRows(right.frame.assign(correct=False), right.source, right.numbers))


def ablated(engine: Engine, coin: Dump) -> Report:
    probe = fit_probe(coin, "face", layer=3, position="query", estimator="mass-mean")
    return ablate(engine, probe, tasks.get("coin")(flips=(2, 5)).examples(range(80, 92)), placebos=1)


PLANTED = dict(sites="S", layers=[0, 1], positions="all", controls=False, estimators="ridge")
REPORTS: dict[str, tuple[Callable[[Engine, Dump, Dump], Report], Callable[[list[str]], set[int]]]] = {
    "sweep": (
        lambda engine, coin, steps: sweep(rows_of(roots=40), ["face", "shuffled"], folds=4, permutations=19, **PLANTED),
        lambda lines: {1, 4},  # the variance of the fits is the difference of both
    ),
    "outcome_at_fork": (
        lambda engine, coin, steps: outcome_at_fork(coin, layers=[3], folds=4),
        lambda lines: {4},
    ),
    "transfer": (
        lambda engine, coin, steps: transfer(steps, "implied", layers=[1], folds=4, estimator="ridge"),
        lambda lines: {4},
    ),
    "viable_branch": (
        lambda engine, coin, steps: viable_branch(both_answers(), layers=[1], positions=["all"], folds=4),
        lambda lines: {4},
    ),
    "judge": (
        lambda engine, coin, steps: judge(coin, draft_layer=2, layers=[3], folds=4),
        lambda lines: {1 if what.endswith("alone") else 4 for what in lines},  # a single number needs no fit
    ),
    "ablate": (
        lambda engine, coin, steps: ablated(engine, coin),
        lambda lines: {5 for what in lines if what.startswith("refit")},
    ),
}
"""how each report is made, and for how many folds its intervals must be widened"""


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_reports_widen_what_was_cross_validated(
    engine: Engine, coin_dump: Dump, steps_dump: Dump, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[int] = Counter()
    factor = intervals.cross_validation

    def watched(folds: int, *answers: float) -> float:
        asked[folds] += 1
        return factor(folds, *answers)

    monkeypatch.setattr(intervals, "cross_validation", watched)
    make, wanted = REPORTS[name]
    report = make(engine, coin_dump, steps_dump)
    if name == "ablate":  # flip rates involve no fitted predictions
        asked.pop(1, None)
    assert set(asked) == wanted([line.get("what", "") for line in report.lines])


def test_the_line_of_a_sweep_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own folds: the count above does not tell a line's interval from the variance of the fits."""
    factor, widths = intervals.cross_validation, []
    for times in (1, 2):

        def wider(folds: int, answers: float | None = None, k: int = times) -> float:
            return factor(folds) if answers is None else factor(folds, answers) * (k if folds == 4 else 1)

        monkeypatch.setattr(intervals, "cross_validation", wider)
        (line,) = sweep(
            rows_of(roots=40), "face", sites="S", layers=[0], positions="all", controls=False, folds=4, permutations=0
        ).lines
        widths.append(line["high"] - line["low"])
    assert widths[1] > 1.5 * widths[0]


def test_intervals_of_few_groups_cover() -> None:
    """Twelve groups with one label each, ridge by plain numpy: the interval holds the mean score in 92 % or more."""
    found, plain = [], []
    for seed in range(150):
        random = np.random.default_rng([seed, 5])
        group = np.repeat(np.arange(12), 5)
        y = random.permutation(np.arange(12) % 2)[group]
        x = (
            0.84 * random.normal(size=(60, 4))
            + 0.55 * random.normal(size=(12, 4))[group]
            + 0.8 * np.eye(1, 4) * (y[:, None] - 0.5)
        )
        fold, right = (random.permutation(12) % 5)[group], np.zeros(60)
        for each in range(5):
            fit = fold != each
            aim = 2.0 * y[fit] - 1
            a = x[fit] - x[fit].mean(0)
            w = np.linalg.solve(a.T @ a + np.eye(4), a.T @ (aim - aim.mean()))
            right[~fit] = ((x[~fit] - x[fit].mean(0)) @ w + aim.mean() > 0) == (y[~fit] == 1)
        found.append((right.mean(), ratio_over_groups(right[None], np.ones(60), group.astype(str), folds=5)[0]))
        plain.append(ratio_over_groups(right[None], np.ones(60), group.astype(str), folds=1)[0])
    truth = float(np.mean([value for value, _ in found]))
    assert np.mean([truth in each for _, each in found]) >= 0.92
    assert np.mean([truth in each for each in plain]) < 0.88, "negative control: without the factor they do not"


def test_two_groups_are_enough_for_an_area() -> None:
    found = area(np.array([0.1, 0.9, 0.2, 0.8]), np.array([False, True, False, True]), np.array(["a", "a", "b", "b"]))
    assert found.value == 1.0
