"""Distances of outcome distributions, the curve and importance agree with textbook formulas and with exact enumeration."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest
from scipy import stats

from replaylens.engine.resampling.rollouts import OutcomeCounts
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.forks.distributions import (
    RolloutTexts,
    distances,
    divergence,
    entropy,
    interval,
    outcome_curve,
    smoothed,
    variation,
    variation_low,
    whole_counts,
)
from replaylens.probes.forks.importance import _family, counterfactual_importance, importance, step_down
from tests.calibrate_forks import counts_of, rollouts_of


@pytest.mark.parametrize("right, total", [(0, 20), (3, 20), (20, 20), (97, 100)])
def test_intervals_are_those_of_the_textbook(right: int, total: int) -> None:
    """Clopper and Pearson as scipy has it; Jeffreys as quantiles of its posterior, with closed ends at 0 and 1."""
    low, high = interval(np.array([right / total]), np.array([total]), exact=True)
    known = stats.binomtest(right, total).proportion_ci(0.95, "exact")
    assert (low[0], high[0]) == pytest.approx((known.low, known.high))
    low, high = interval(np.array([right / total]), np.array([total]))
    posterior = stats.beta(right + 0.5, total - right + 0.5)
    assert low[0] == (0.0 if right == 0 else pytest.approx(posterior.ppf(0.025)))
    assert high[0] == (1.0 if right == total else pytest.approx(posterior.ppf(0.975)))


def test_the_curve_knows_where_nothing_is_known() -> None:
    curve = outcome_curve(counts_of(np.array([[5, 5], [0, 0], [10, 0]])))
    assert np.isnan(curve.value[1]).all() and np.isnan(curve.entropy[1])
    assert (curve.low[1].tolist(), curve.high[1].tolist()) == ([0, 0], [1, 1])
    assert curve.entropy[0] == pytest.approx(np.log(2)) and curve.entropy[2] == 0
    assert len(curve.frame) == 6 and "<svg" in curve._repr_html_() and curve.plot().axes[0].get_ylim() == (0, 1)
    with pytest.raises(ProbeError, match="level=1"):
        outcome_curve(counts_of(np.ones((1, 2))), level=1)


def test_entropy_without_the_bias_of_counting() -> None:
    """Miller and Madow's correction: the mean over samples is nearer to the truth than the plug-in mean."""
    generator, p = np.random.default_rng(0), np.array([0.6, 0.3, 0.1])
    shares = generator.multinomial(30, p, size=2000) / 30
    truth = float(stats.entropy(p))
    plain = float(stats.entropy(shares, axis=1).mean())
    corrected = float(entropy(shares, np.full(2000, 30)).mean())
    assert abs(corrected - truth) < 0.25 * abs(plain - truth)


def test_probabilities_in_place_of_samples() -> None:
    """Their means are the value; counts that stand for them keep the number of rollouts."""
    share = np.array([[0.26, 0.74], [0.5, 0.5]])
    counts = OutcomeCounts([0, 1], ["a", "b"], np.array([[3, 7], [5, 6]]), ["x", "y"], share)
    assert np.array_equal(outcome_curve(counts).value, share)
    assert whole_counts(counts).tolist() == [[3, 7], [6, 5]]


def test_distances_are_those_of_the_formula() -> None:
    a, b = np.array([[30, 10, 0]]), np.array([[10, 20, 10]])
    tv, kl = (distances(a, b, measure) for measure in ("tv", "kl"))
    assert tv.plug_in[0] == pytest.approx(0.5)
    assert kl.plug_in[0] == pytest.approx(stats.entropy(smoothed(a[0]), smoothed(b[0])))
    assert variation(np.array([1.0, 0]), np.array([0, 1.0])) == 1 and divergence(
        np.array([1.0, 0]), np.array([0.5, 0.5])
    ) == np.log(2)
    for found in (tv, kl):
        assert found.low[0] <= found.value[0] <= found.high[0] and found.p[0] == 0.001


def test_the_permutation_test_is_exact() -> None:
    """The p-value against the sum over all tables with these margins."""
    a, b = np.array([7, 3]), np.array([3, 7])
    drawn = distances(a[None], b[None], permutations=20000).p[0]
    chances = {k: comb(10, k) * comb(10, 10 - k) / comb(20, 10) for k in range(11)}
    exact = sum(p for k, p in chances.items() if abs(2 * k - 10) / 10 >= 0.4 - 1e-12)
    assert drawn == pytest.approx(exact, abs=0.01)


def test_pairs_without_rollouts_say_nothing() -> None:
    found = distances(np.array([[0, 0], [9, 1]]), np.array([[5, 5], [5, 5]]))
    assert np.isnan(found.value[0]) and (found.low[0], found.high[0], found.p[0]) == (0, 1, 1)
    assert found.value[1] > 0
    with pytest.raises(ProbeError, match="Unknown measure 'js'"):
        distances(np.ones((1, 2)), np.ones((1, 2)), "js")  # type: ignore[arg-type]
    with pytest.raises(ProbeError, match="permutations=0"):
        distances(np.ones((1, 2), int), np.ones((1, 2), int), permutations=0)


@pytest.mark.parametrize("outcomes", [1, 2, 20])
def test_rollouts_that_all_agree_leave_room(outcomes: int) -> None:
    """The high end of the interval is near the exact bound for outcomes that 40 rollouts did not show; others add nothing."""
    table = np.zeros((1, outcomes), dtype=np.int64)
    table[0, 0] = 40
    for measure in ("tv", "kl"):
        found = distances(table, table, measure)  # type: ignore[arg-type]
        assert found.low[0] == 0 and found.p[0] == 1 and 0.02 < found.high[0] < 0.2


@pytest.mark.parametrize("count", [1, 3, 5, 20])
def test_a_certain_side(count: int) -> None:
    """Where 100 rollouts of the first side agree, the divergence is -log q, and its high end that of q's own interval."""
    found = distances(np.array([[100, 0]]), np.array([[100 - count, count]]), "kl", resamples=9999)
    wanted = -np.log(stats.beta.ppf(0.025, 100 - count + 0.5, count + 0.5))
    assert found.high[0] == pytest.approx(wanted, rel=0.05, abs=0.005)


def test_equal_input_gives_equal_bits() -> None:
    a, b = np.array([[30, 20]]), np.array([[20, 30]])
    one, again, other = (distances(a, b, seed=seed) for seed in (3, 3, 4))
    assert one.low.tobytes() == again.low.tobytes() and one.p.tobytes() == again.p.tobytes()
    assert one.value.tobytes() != other.value.tobytes()


def test_step_down_by_hand() -> None:
    """The largest statistic is compared with the largest of all, the next with that of the others; never smaller than p."""
    scaled = np.array([[3.0, 1, 4, 2, 1], [1.0, 0, 0, 2, 3], [2.0, 2, 1, 1, 1]])
    assert step_down(scaled).tolist() == pytest.approx([3 / 5, 4 / 5, 4 / 5])  # 2 of 4; 3 of 4; 2 of 4, but not below 4 / 5
    generator = np.random.default_rng(0)
    for _ in range(20):
        scaled = np.abs(generator.normal(size=(5, 40))).round(1)
        alone = (1 + (scaled[:, 1:] >= scaled[:, :1]).sum(1)) / 40
        found = step_down(scaled)
        assert (found >= alone).all() and (np.diff(found[np.argsort(-scaled[:, 0], kind="stable")]) >= 0).all()


def test_any_draw_may_be_the_observed_one() -> None:
    """Each of 200 draws in turn as the observed one: of equally likely draws, at most 5 % show any unit."""
    generator = np.random.default_rng(0)
    one, two = generator.multinomial([30] * 20, [0.5, 0.5]), generator.multinomial([30] * 20, [0.5, 0.5])
    found = distances(one, two, "tv", permutations=199, resamples=99)
    turns = [replace(found, under=np.roll(found.under, turn, axis=1)) for turn in range(200)]
    least = np.array([_family(turn, one, two, "tv", 0.95)[0].min() for turn in turns])
    assert 0.01 < (least <= 0.05).mean() <= 0.05


def test_importance_among_many_units() -> None:
    """999 permutations are enough for 200 units: the one that decides is shown. By Holm, no p is below 200 / 1000."""
    generator = np.random.default_rng(1)
    sides = ((90, (0.5, 0.5)), (111, (0.9, 0.1)))
    table = np.concatenate([generator.multinomial(100, side, size=each) for each, side in sides])
    found = importance(counts_of(table), resamples=99)
    assert np.flatnonzero(found.shown).tolist() == [89] and found.possible[:90].all() and found.p_family[89] == 0.001


def test_units_that_cannot_be_shown_are_named() -> None:
    """Two rollouts on each side, or rollouts that all agree, are never evidence. Too few permutations are refused."""
    found = importance(counts_of(np.array([[50, 50], [95, 5], [95, 5], [1, 1], [2, 0], [60, 0], [60, 0]])))
    assert found.possible.tolist() == [True, True, True, False, False, False] and found.shown.tolist() == [True] + [False] * 5
    assert "1 shown; 3 with too few rollouts or outcomes" in repr(found) and not found.frame["possible"][3]
    with pytest.raises(ProbeError, match=r"29 permutations give no p below 0\.033.*permutations=99 or more"):
        importance(counts_of(np.ones((3, 2))), permutations=29, level=0.99)


# ---- farther than a threshold


@pytest.mark.parametrize("pair", [(0.5, 0.8), (0.35, 0.65), (1.0, 0.7), (0.95, 0.65)])
def test_few_rollouts_seldom_seem_far(pair: tuple[float, float]) -> None:
    """The error of the bound at the threshold, by adding up the probabilities of all tables: below its level, and not far
    below. The plain normal test has four times its level at (.5, .8)."""
    n, level = 30, 0.99
    chances = [stats.binom.pmf(np.arange(n + 1), n, p) for p in pair]
    x, y = np.indices((n + 1, n + 1))
    far = np.abs(x - y) / n > 0.3
    found = np.zeros((n + 1, n + 1), dtype=bool)
    for i, j in zip(*np.nonzero(far & (np.abs(x - y) < 20)), strict=True):  # beyond, all are: tried by hand
        found[i, j] = variation_low(np.array([i, n - i]), np.array([j, n - j]), 0.3, level) > 0.3
    found |= np.abs(x - y) >= 20
    error = float((np.outer(*chances) * found).sum())
    assert 0.002 < error <= 0.01
    if pair == (0.5, 0.8):
        spread = np.sqrt((x * (n - x) + y * (n - y)) / n**3)
        assert float((np.outer(*chances) * (np.abs(x - y) / n - 0.3 > stats.norm.ppf(level) * spread)).sum()) > 0.015


def test_the_error_of_a_family_of_forking_tokens() -> None:
    """40 tokens with two alternatives each, all just at the threshold, 30 rollouts: by all tables, not by drawing some."""
    n, level = 30, 1 - 0.05 / 80
    x, y = np.indices((n + 1, n + 1))
    found = np.abs(x - y) >= 24  # tried by hand
    for i, j in zip(*np.nonzero((np.abs(x - y) / n > 0.3) & ~found), strict=True):
        found[i, j] = variation_low(np.array([i, n - i]), np.array([j, n - j]), 0.3, level) > 0.3
    for pair in ((0.5, 0.8), (0.9, 0.6)):
        taken, other = (stats.binom.pmf(np.arange(n + 1), n, p) for p in pair)
        none = float(taken @ (1 - found @ other) ** 2)  # both alternatives are compared with the same rollouts
        assert 0.03 < 1 - none**40 < 0.05


def test_a_bound_of_many_rollouts_is_that_of_the_normal_test() -> None:
    """Beyond the exact tables, and across the border between them; more outcomes widen it."""
    a, b = np.array([900, 100]), np.array([400, 600])
    spread = np.sqrt(0.9 * 0.1 / 1000 + 0.4 * 0.6 / 1000)
    assert variation_low(a, b, 0.3, 0.95) == pytest.approx(0.5 - 1.645 * spread, abs=0.004)
    small, large = (variation_low(n * np.array([9, 1]), n * np.array([4, 6]), 0.0, 0.95) for n in (9, 10))
    assert small == pytest.approx(large, abs=0.02) and 0.3 < small < large
    assert variation_low(np.array([900, 100, 0]), np.array([400, 500, 100]), 0.3, 0.95) < 0.5 - 2 * spread
    assert variation_low(a, a, 0.3, 0.95) == variation_low(a, np.zeros(2, int), 0.3, 0.95) == 0


def test_importance_finds_the_unit_that_decides() -> None:
    counts = counts_of(np.array([[50, 50], [52, 48], [90, 10], [91, 9]]))
    found = importance(counts)
    assert found.shown.tolist() == [False, True, False] and len(found.frame) == 3
    assert found.distances.value[1] == pytest.approx(0.38, abs=0.02) and 0.38 > found.distances.low[1] > 0.2
    assert "unit 1." in found._repr_html_() and len(found.plot().axes[0].collections) == 2


def test_counterfactual_importance_leaves_out_what_says_the_same() -> None:
    """Of rollouts that replace a unit by its like, none count; an unstable unit keeps its effect, resampling dilutes it."""
    rollouts = rollouts_of(np.random.default_rng(0), same=0.7, effect=0.8, each=200)
    diluted, clean = importance(rollouts.counts()), counterfactual_importance(rollouts)
    assert clean.without[2].sum() < 0.5 * diluted.without[2].sum() and clean.with_it[2].sum() == 200
    assert clean.distances.value[2] > 2 * diluted.distances.value[2] and clean.shown[2]
    same = RolloutTexts([0, 1], ["a b.", "c d."], ["x", "y"], np.array([0, 1]), [("a b.",), ("c d.",)], ["x", "y"])
    with pytest.raises(BadRows, match="nothing is counterfactual"):
        counterfactual_importance(same)


def test_rollouts_of_both_sides_are_taken_as_independent() -> None:
    """What docs/forks.md says of shared seeds: if equal noise makes opposite outcomes, equal distributions seem to differ."""
    generator = np.random.default_rng(0)
    first, other = (np.stack([heads, 50 - heads], 1) for heads in generator.binomial(50, 0.5, size=(2, 400)))
    independent, same, opposite = ((distances(first, b).p <= 0.05).mean() for b in (other, first, first[:, ::-1]))
    assert same == 0 and independent <= 0.05 and 0.10 < opposite < 0.16
