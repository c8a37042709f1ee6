"""Intervals cover, permutations respect roots, corrections correct, and everything is reproducible."""

import numpy as np
import pytest
from scipy.stats import beta

from replaylens.probes.controls import make_goal
from replaylens.probes.errors import TooFewGroups
from replaylens.probes.heldout import Said, exchanged, permutation_test
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
from replaylens.probes.permutations import Null, group_permutations, max_statistic
from replaylens.probes.registry import calibration_error, code_blocks, code_length, v_information
from replaylens.probes.rows import make_target
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
    for seed in range(300):
        right, roots = clusters(seed)
        hits += 0.7 in ratio_over_groups(right[None], np.ones(len(right)), roots)[0]
        apart = np.arange(len(right)).astype(str)
        naive += 0.7 in ratio_over_groups(right[None], np.ones(len(right)), apart)[0]
    assert 0.90 <= hits / 300 <= 0.98
    assert naive / 300 < 0.85


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


@pytest.mark.parametrize("placebos, rate", [(4, 0.5), (8, 0.25), (8, 0.5), (8, 0.8)])
def test_interval_covers_over_placebos(placebos: int, rate: float) -> None:
    """Each placebo flips every prompt or none: intervals hold the rate over directions. Intervals over prompts alone do not."""
    roots, hits, naive = np.arange(30).astype(str), 0, 0
    for seed in range(150):
        flips = np.random.default_rng(seed).random(placebos) < rate
        values = np.repeat(flips[:, None].astype(float), 30, 1)
        hits += rate in mean_over_placebos(values, roots, seed=seed, share=True)
        naive += rate in mean_over_groups(values.mean(0), roots)
    assert hits / 150 >= 0.88 and naive / 150 < 0.8


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


def test_p_values_are_small_only_where_something_is() -> None:
    """On uninformative held-out predictions, p is below 5 % in about 5 % of cases; on good ones it always is."""
    generator = np.random.default_rng(0)
    roots = np.repeat(np.arange(40).astype(str), 3)
    small = 0
    for seed in range(200):
        labels = np.repeat(generator.integers(2, size=40), 3)
        guesses = generator.integers(2, size=(1, 120))
        small += permuted(guesses, labels, roots, 99, seed).p[0] <= 0.05
    assert small <= 20
    assert permuted(labels[None], labels, roots, 99).p[0] == 0.01


def test_corrected_t_test() -> None:
    """Means of zero are called positive in about 5 % of cases, fewer once corrected for folds. A real gain is found."""
    generator, roots = np.random.default_rng(4), np.repeat(np.arange(30).astype(str), 2)
    gains = generator.normal(size=(2000, 60)) + np.repeat(generator.normal(size=(2000, 30)), 2, axis=1)
    assert 0.035 < (corrected_p(gains, roots, 1) <= 0.05).mean() < 0.065
    assert (corrected_p(gains, roots, 5) <= 0.05).mean() < 0.03
    assert corrected_p(gains + 2, roots, 5).max() < 0.01
    assert corrected_p(np.ones((1, 60)), roots, 5)[0] == 0.5**30, "never zero"


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
    one, so that 5 % of them are shown."""
    generator = np.random.default_rng(2)
    alike, apart = generator.normal(size=(40, 3)), generator.normal(size=(40, 3)) * [1, 10, 100]
    every = [np.roll(alike, turn, 0) for turn in range(40)]
    least = [max_statistic([Null(turn[0], turn[1:])])[0].min() for turn in every]
    assert np.mean(np.array(least) <= 0.05) == 0.05
    seen = np.vstack(Null(alike[0], alike[1:]).standard())
    assert np.allclose(seen.std(0) / seen.std(0)[0], alike.std(0) / alike.std(0)[0])  # one scale for all cells
    other = np.vstack(Null(apart[0], apart[1:]).standard())
    assert np.allclose(other.std(0), 1, atol=0.01)


def test_max_statistic_runs_over_all_families() -> None:
    """A cell of the first position is significant alone, but not beside the many of the second. Checked by the definition."""
    generator = np.random.default_rng(2)
    few = Null(np.array([2.2]), generator.normal(size=(199, 1)))
    table = np.vstack([[0.0, 1.5, 0.5] + [0.0] * 37, generator.normal(size=(199, 40))])
    table *= 2 / table.std(0)  # equal spreads, which are not drawn together
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
