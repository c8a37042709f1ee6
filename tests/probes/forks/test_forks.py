"""Forks: distances of outcome distributions, curves, change points and states.

They agree with textbook formulas and with exact enumeration.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from math import comb

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import gammaln

import replaylens as rl
from bench.calibrate_forks import BIASES, SETTINGS, Setting, counts_of, rate_of, rollouts_of, token_forks
from replaylens import tasks
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.probes.errors import BadRows, ProbeError, SharedRows
from replaylens.probes.forks.change_points import change_points
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
from replaylens.probes.forks.importance import _family, counterfactual_importance, importance, overlap, resilience, step_down
from replaylens.probes.forks.importance import exact as exact_of_rollout_texts
from replaylens.probes.forks.outcome_probe import GAIN, Key, outcome_probe
from replaylens.probes.forks.tokens import TokenFork, draft_agreement, forking_tokens, sibling_divergence
from replaylens.probes.groups import histories, independent
from replaylens.probes.questions.forced import outcome_target
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows
from replaylens.rollouts.plan import OutcomeCounts
from replaylens.views.report import ReportPage
from tests.devices import swept


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
    alone = outcome_curve(counts_of(np.array([[7, 23]])))
    lines = [each.get_segments()[0][:, 1] for each in alone.plot().axes[0].collections]
    assert np.allclose(lines, np.stack([alone.low[0], alone.high[0]], axis=1)), "a single fork has its intervals, too"


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


@pytest.mark.slow
def test_rollouts_of_both_sides_are_taken_as_independent() -> None:
    """What docs/branches.md says of shared seeds: if equal noise makes opposite outcomes, equal ones seem to differ."""
    generator = np.random.default_rng(0)
    first, other = (np.stack([heads, 50 - heads], 1) for heads in generator.binomial(50, 0.5, size=(2, 400)))
    how = dict(permutations=199, resamples=99)
    independent, same, opposite = ((distances(first, b, **how).p <= 0.05).mean() for b in (other, first, first[:, ::-1]))
    assert same == 0 and independent <= 0.05 and 0.10 < opposite < 0.16


# ---- exact tasks -----------------------------------------------------------------------------------------------------
# Estimates against outcome distributions that are known exactly: the tasks `coin` and `fork` have them at every prefix.
# Rollouts come from the tasks themselves: of many examples, those that begin with a prefix are what a perfect model says
# after it. `Coin.outcomes` computes the distribution from the knobs, without sampling; at a fork it is one half until the
# target is told, and certain from there on.

FACES = ["heads", "tails"]
EXAMPLES = 600


@dataclass(frozen=True)
class Path:
    """A path with the counts of its rollouts and the exact distributions [forks, outcomes]."""

    counts: OutcomeCounts
    truth: np.ndarray


@pytest.mark.slow
def test_the_curve_covers_the_truth_of_coin(coin_paths: list[Path]) -> None:
    """Pointwise intervals hold about 95 % of the exact probabilities; joint ones hold whole paths."""
    held = np.concatenate([_inside(path, joint=False) for path in coin_paths])
    assert len(held) > 100 and 0.9 <= held.mean() <= 1
    whole = [bool(_inside(path, joint=True).all()) for path in coin_paths]
    assert np.mean(whole) >= 0.9
    shifted = [Path(path.counts, (path.truth + 0.25) % 1) for path in coin_paths]
    assert np.concatenate([_inside(path, joint=False) for path in shifted]).mean() < 0.6, "negative control"


@pytest.mark.slow
def test_the_curve_covers_the_truth_of_many_coins() -> None:
    """The same on 300 texts."""
    paths = _coin_paths(range(100, 200))
    held = np.concatenate([_inside(path, joint=False) for path in paths])
    assert len(held) > 1800 and 0.94 <= held.mean() <= 0.96
    assert np.mean([_inside(path, joint=True).all() for path in paths]) >= 0.95


def test_importance_covers_the_truth_of_coin(coin_paths: list[Path]) -> None:
    """The interval of each unit holds the exact total variation between before and after; a shown unit has one above 0."""
    held, shown = [], []
    for path in coin_paths:
        found = importance(path.counts, permutations=199, resamples=199)
        truth = 0.5 * np.abs(np.diff(path.truth, axis=0)).sum(1)
        known = ~np.isnan(found.distances.value)
        held += ((found.distances.low - 1e-9 <= truth) & (truth <= found.distances.high + 1e-9))[known].tolist()
        shown += [bool(truth[i] > 0) for i in np.flatnonzero(found.shown)]
    assert np.mean(held) >= 0.93 and len(shown) > 10 and np.mean(shown) >= 0.95


def test_change_points_of_fork(fork_path: Path) -> None:
    """Nothing decides before the target, and the target decides all."""
    found = change_points(fork_path.counts)
    target = int(np.flatnonzero(fork_path.truth.max(1) == 1)[0])
    (point,) = found.points
    assert found.shown and (point.index, point.low, point.high) == (target, target, target)
    assert "Go to" in point.text and point.size == pytest.approx(0.5, abs=0.1)
    assert _inside(fork_path, joint=True).all()
    counts = fork_path.counts
    before = OutcomeCounts(counts.positions[:target], counts.outcomes, counts.counts[:target], counts.texts[:target])
    assert not change_points(before).shown, "negative control: until the target, nothing changes"


def test_outcome_probe_on_a_real_model() -> None:
    """Rollouts drawn from the exact distribution at each step: the third layer of coin-plain tells of it, its embedding and
    the text as a bag do not."""
    run = Engine.load("coin-plain").replay(tasks.get("coin")(flips=(2, 4), p=0.3).examples(60), sites="S")
    every = ProbeRows.of(run).accepted()
    here, target = every.at("step"), outcome_target(every, "step")
    chosen = independent(here)
    p = target.values[np.isin(here.numbers, chosen.rows.numbers)]
    heads = np.random.default_rng(0).binomial(60, p)
    states: dict[Key, np.ndarray] = {("S", layer): chosen.rows.matrix("S", layer) for layer in (0, 3)}
    paths = histories(chosen.rows)
    assert paths is not None
    report = outcome_probe(states, np.stack([heads, 60 - heads], 1), chosen.groups, tokens=paths, estimator="logistic")
    assert [line.partition(" tells")[0] for line in report.findings] == ["Shown to be below 0.1: S0", "Shown: S3"]
    explained = {line["what"]: line.get("share_explained") for line in report.lines}
    assert explained["S3"] > 0.5 > 0.1 > max(explained["S0"], explained["whole text"], explained["shuffled at S3"])


# ---- the paths --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coin_paths() -> list[Path]:
    """Coin texts as symbols, one word an action; the rollouts of a path are all examples of its own seed that begin alike."""
    return _coin_paths(range(12))


def _coin_paths(seeds: range) -> list[Path]:
    return [_coin_path(p, start, seed) for p, start in ((0.5, "random"), (0.3, "heads"), (0.2, "random")) for seed in seeds]


def _coin_path(p: float, start: str, seed: int) -> Path:
    task = tasks.get("coin")(flips=(1, 5), p=p, start=start, rendering="symbols", seed=seed)
    first, *examples = task.examples(EXAMPLES)
    words = first.prompt.split(" ")
    table, truth = [], []
    for count in range(1, len(words) + 1):
        before = " ".join(words[:count])
        own = [example.answer for example in examples if f"{example.prompt} ".startswith(f"{before} ")]
        table.append([own.count(" H"), own.count(" T")])
        truth.append([task.outcomes(before)[face] for face in FACES])
    texts = [*(f" {word}" for word in words[1:]), first.answer]
    return Path(OutcomeCounts(list(range(1, len(words) + 1)), FACES, np.array(table), texts), np.array(truth))


@pytest.fixture(scope="module")
def fork_path() -> Path:
    """One fork, unit by unit. The names of places are exchangeable: every example is, with other names, a rollout from before
    the target, and one with the same viable branch is a rollout from after it."""
    task = tasks.get("fork")(depth=1)
    first, *examples = task.examples(1 + 100 * 8)
    units = [unit for unit in re.split(r"(?<=[.:,])(?= )", f"{first.prompt}{first.answer}.") if unit]
    branch, target = first.events[0].action, next(i for i, unit in enumerate(units) if unit.startswith(" Go to"))
    table = []
    for fork in range(len(units)):
        drawn = [example.events[0].action for example in examples[100 * fork : 100 * (fork + 1)]]
        own = drawn if fork <= target else [each for each in drawn if each == branch]
        table.append([own.count(branch), len(own) - own.count(branch)])
    truth = np.array([[0.5, 0.5] if fork <= target else [1.0, 0.0] for fork in range(len(units))])
    return Path(OutcomeCounts(list(range(len(units))), [branch, "other"], np.array(table), units), truth)


def _inside(path: Path, joint: bool) -> np.ndarray:
    curve = outcome_curve(path.counts, joint=joint)
    rolled = path.counts.counts.sum(1) > 0
    held: np.ndarray = ((curve.low <= path.truth + 1e-9) & (path.truth - 1e-9 <= curve.high))[rolled, 0]
    return held


# ---- change points ---------------------------------------------------------------------------------------------------
# Change points against the sum over all ways to cut a short path; forking tokens; both against simulated errors.


def evidence(counts: np.ndarray, prior: float = 0.5) -> float:
    """Marginal likelihood of counts with one distribution, by the definition of the Dirichlet integral."""
    total, k = counts.sum(0), counts.shape[1]
    log = gammaln(prior + total).sum() - gammaln(k * prior + total.sum()) - k * gammaln(prior) + gammaln(k * prior)
    return float(np.exp(log))


def by_enumeration(table: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(posterior of a change before each fork, posterior of the number of changes)"""
    length = len(table)
    number, at = np.zeros(most + 1), np.zeros(length)
    for m in range(most + 1):
        for cuts in combinations(range(1, length), m):
            ends = [0, *cuts, length]
            parts = np.prod([evidence(table[a:b]) for a, b in pairwise(ends)])
            weight = 0.5 ** (m + 1) / comb(length - 1, m) * parts
            number[m] += weight
            at[list(cuts)] += weight
    return at / number.sum(), number / number.sum()


@pytest.mark.parametrize("outcomes", [2, 3])
def test_the_posterior_is_exact(outcomes: int) -> None:
    generator = np.random.default_rng(outcomes)
    p = generator.dirichlet(np.ones(outcomes), size=2)
    table = np.concatenate([generator.multinomial(8, p[0], size=3), generator.multinomial(8, p[1], size=4)])
    found = change_points(counts_of(table), most=3)
    at, number = by_enumeration(table, 3)
    assert found.number == pytest.approx(number, rel=1e-9) and found.probability == pytest.approx(at, rel=1e-9)


def test_the_probability_of_a_place_is_given_the_number_of_changes() -> None:
    """`probability` of a change point is that of its place among those of one number of changes; the array sums over all."""
    table = np.array([[8, 2, 14], [17, 1, 6], [18, 5, 1], [18, 5, 1]])
    found = change_points(counts_of(table))
    (point,) = found.points
    places = {cut: evidence(table[:cut]) * evidence(table[cut:]) for cut in (1, 2, 3)}
    assert point.probability == pytest.approx(places[point.index] / sum(places.values()), rel=1e-9)
    assert found.frame["probability"].tolist() == [point.probability]
    assert abs(point.probability - found.probability[point.index]) > 0.01, "two numbers, which the docs tell apart"
    two = change_points(counts_of(np.array([[2, 3], [5, 0]])))
    assert not two.shown and two.points[0].probability == 1 > two.probability[1]


def test_a_change_has_an_interval_and_a_size() -> None:
    table = np.array([[50, 50]] * 6 + [[70, 30]] * 6)
    found = change_points(counts_of(table))
    (point,) = found.points
    assert found.shown and point.index == 6 and point.low <= 6 <= point.high and point.text == "unit 5."
    assert point.size == pytest.approx(0.2) and found.probability[6] == found.probability.max()
    unclear = change_points(counts_of(table // 4)).points
    assert not unclear or unclear[0].high - unclear[0].low > point.high - point.low, "fewer rollouts give a wider interval"
    assert len(found.frame) == 1 and "unit 5." in found._repr_html_() and found.plot().axes[0].get_ylim() == (0, 1)


def test_nothing_changes() -> None:
    """Negative control: equal shares, and shares that differ as samples do."""
    for table in (np.full((12, 2), 50), np.random.default_rng(1).multinomial(100, [0.3, 0.7], size=12)):
        found = change_points(counts_of(table))
        assert not found.shown and not found.points and found.number[0] > 0.5


def test_forks_without_rollouts_change_nothing() -> None:
    """They are left out of the posterior, and widen the interval of a change that they stand before."""
    table = np.array([[50, 50]] * 5 + [[95, 5]] * 5)
    whole = change_points(counts_of(table))
    holes = change_points(counts_of(np.insert(table, [5, 5, 10], 0, axis=0)))
    assert holes.number.tobytes() == whole.number.tobytes()
    (point,), (hole,) = whole.points, holes.points
    assert (point.low, point.index, point.high) == (5, 5, 5) and (hole.low, hole.index, hole.high) == (5, 7, 7)
    assert holes.probability[[5, 6, 12]].tolist() == [0, 0, 0]


def test_change_points_refuse() -> None:
    with pytest.raises(BadRows, match="1 positions with rollouts"):
        change_points(counts_of(np.ones((1, 2))))
    with pytest.raises(ProbeError, match="most=0"):
        change_points(counts_of(np.ones((3, 2))), most=0)
    with pytest.raises(ProbeError, match="prior=0"):
        change_points(counts_of(np.ones((3, 2))), prior=0)


def test_forking_tokens_and_survival() -> None:
    """Alternatives far beyond the threshold are found, others not; the survival curve is between its bounds."""
    found = forking_tokens(token_forks(np.random.default_rng(0), 200, far=0.7), threshold=0.3)
    table = found.alternatives
    assert table[table.token == "other"].forks.all() and not table[table.token == "alike"].forks.any()
    assert found.hazard.tolist() == pytest.approx([0.3] * 20) and found.survival_high[-1] == pytest.approx(0.7**20)
    assert (found.survival_low <= found.survival_high).all() and len(found.frame) == 20
    near = forking_tokens(token_forks(np.random.default_rng(0), 200, far=0.1), threshold=0.3)
    assert not near.forks.any() and near.survival_high[-1] == 1
    assert found.plot().axes[0].get_xlabel() == "position" and "taken" in found._repr_html_()


def test_tokens_without_rollouts_may_lead_anywhere() -> None:
    table = np.array([[50, 0], [50, 0]])
    fork = TokenFork(7, ["a", "b"], np.array([0.5, 0.2]), table)
    found = forking_tokens([fork])
    assert found.hazard[0] == 0 and found.hazard_high[0] == pytest.approx(0.3)
    with pytest.raises(BadRows, match=r"sum to 1\.2"):
        TokenFork(7, ["a", "b"], np.array([0.5, 0.7]), table)
    with pytest.raises(BadRows, match="3 tokens"):
        TokenFork(7, ["a", "b", "c"], np.array([0.5, 0.2]), table)
    with pytest.raises(BadRows, match="no tokens"):
        forking_tokens([])
    with pytest.raises(ProbeError, match="threshold=1"):
        forking_tokens([fork], threshold=1)


# ---- of rollouts -----------------------------------------------------------------------------------------------------
# Statistics of forks on what `branch.resample` returns.


@pytest.fixture(scope="module")
def rollouts():
    chain = rl.Engine.load("coin-plain").prompt("A coin's state is heads.").force(" Alice flips. Bob flips.")
    return chain.resample(12, at="sentences", max_new=40, answer=rl.Answer.regex("A: (heads|tails)"))


def test_texts_of_rollouts(rollouts, tmp_path) -> None:
    found = RolloutTexts.of(rollouts)
    assert len(found) == len(rollouts.frame) and found.positions == rollouts.outcomes().positions
    assert "".join(found.units[3]) == rollouts.frame["text"][3]
    assert found.counts().counts.sum() == len(found)
    page = rl.report(
        tmp_path / "page.html", results=[rollouts, outcome_curve(rollouts.outcomes()), importance(rollouts.outcomes())]
    )
    assert page.read_text().count("<svg") >= 3
    assert len(counterfactual_importance(found).texts) == len(found.texts) - 1


def exact(p: list[list[float]], rollouts: int = 1) -> OutcomeCounts:
    share = np.array(p)
    counts = np.zeros(share.shape, dtype=np.int64)
    counts[np.arange(len(share)), share.argmax(1)] = rollouts
    return OutcomeCounts(list(range(len(share))), ["a", "b", "c"], counts, [""] * len(share), share)


def test_exact_probabilities_are_not_rounded_to_counts() -> None:
    """One rollout with known probabilities: distances and entropies are those of the probabilities."""
    known = exact([[0.2, 0.3, 0.5], [0.25, 0.45, 0.3], [0.6, 0.3, 0.1]])
    found = importance(known)
    assert np.allclose(found.distances.value, [0.2, 0.35]) and np.allclose(found.distances.plug_in, [0.2, 0.35])
    assert (found.distances.low <= found.distances.value).all() and (found.distances.value <= found.distances.high).all()
    assert np.allclose(
        importance(known, measure="kl").distances.value[0], np.sum([0.2, 0.3, 0.5] * np.log([0.8, 2 / 3, 5 / 3]))
    )
    entropy = [-np.sum(p * np.log(p)) for p in known.probabilities]
    assert np.allclose(outcome_curve(known).entropy, entropy)
    with pytest.raises(BadRows, match="at least 20 rollouts"):
        change_points(known)


@pytest.mark.parametrize(
    ("counts", "positions"), [([[-1, 2], [1, 1]], [0, 5]), ([[0.5, 2], [1, 1]], [0, 5]), ([[1, 2], [1, 1]], [5, 0])]
)
def test_impossible_counts_are_refused(counts, positions) -> None:
    with pytest.raises(BadRequest):
        OutcomeCounts(positions, ["a", "b"], np.array(counts), ["", ""])


# ---- states ----------------------------------------------------------------------------------------------------------
# Outcome probes, sibling states and drafts: what is planted is found, what is not there is not.

ROOTS = 50


@cache
def planted(outcomes: int, estimator: str, from_text: bool = False, seed: int = 0) -> Report:
    """Two forks of each root. The state holds the logits of the outcomes or, with `from_text`, only what the tokens say."""
    generator = np.random.default_rng(seed)
    forks = 2 * ROOTS
    tokens = [generator.integers(8, size=6) for _ in range(forks)]
    bag = np.stack([np.bincount(path, minlength=8) for path in tokens]).astype(float)
    hidden = generator.normal(size=(forks, 4))
    logits = 1.2 * (bag[:, :outcomes] - 0.75) if from_text else 1.5 * hidden[:, :outcomes]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    counts = np.stack([generator.multinomial(40, each) for each in p])
    state = np.column_stack([bag, generator.normal(size=(forks, 2))]) if from_text else hidden
    noise = generator.normal(size=(forks, 4))
    how = dict(tokens=tokens, untrained={"S": noise, "empty": noise}, estimator=estimator)
    return outcome_probe({"S": state, "empty": noise}, counts, np.arange(forks) // 2, **how)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("outcomes, estimator", [(2, "logistic-cv"), (3, "logistic")])
def test_a_state_that_holds_the_distribution(outcomes: int, estimator: str) -> None:
    """It beats every baseline and explains nearly all there is; the cell of noise does not, nor do shuffled outcomes."""
    report = planted(outcomes, estimator)
    shown, empty = report.findings
    assert shown.startswith("Shown: S ") and empty.startswith(("Undecided", "Shown to be below")) and ": empty " in empty
    explained = {line["what"]: line["share_explained"] for line in report.lines if line["metric"] != GAIN}
    assert explained["S"] > 0.8 and explained["outcome frequencies"] == 0
    assert max(explained[name] for name in ("whole text", "bag of tokens", "shuffled at S", "empty")) < 0.2
    assert "untrained S" in explained and report.notes == []
    assert "outcome_probe" in ReportPage(probes=(report,)).html()


def test_a_state_that_holds_only_the_text() -> None:
    """Negative control: the outcome can be read off, but the bag of tokens tells as much."""
    report = planted(2, "logistic", from_text=True)
    explained = {line["what"]: line["share_explained"] for line in report.lines if line["metric"] != GAIN}
    assert explained["S"] > 0.6 and explained["bag of tokens"] > 0.6
    assert report.findings[0].startswith(("Undecided", "Shown to be below")) and ": S " in report.findings[0]


def lengths(seed: int) -> Report:
    """The outcome follows the length of the path, which the state holds with some noise: several baselines come close."""
    generator = np.random.default_rng(seed)
    length = generator.integers(5, 40, size=40)
    state = np.column_stack([length + generator.normal(0, 2, 40), generator.normal(size=(40, 6))])
    heads = generator.binomial(12, 1 / (1 + np.exp((22 - length) / 8)))
    tokens = [generator.integers(8, size=each) for each in length]
    return outcome_probe({"S": state}, np.stack([heads, 12 - heads], 1), np.arange(40), tokens=tokens, estimator="logistic")


def test_the_sentence_names_the_least_gain_of_the_table() -> None:
    """The verdict follows the lowest bound; where that is of another baseline, the sentence names this one as well."""
    apart = []
    for report in (*map(lengths, range(4)), planted(2, "logistic")):
        gains = [line for line in report.lines if line["metric"] == GAIN]
        for cell, said in zip(dict.fromkeys(line["state"] for line in gains), report.findings, strict=True):
            own = {line["what"].removeprefix(f"{cell} against "): line for line in gains if line["state"] == cell}
            name, decisive = min(own, key=lambda each: own[each]["accuracy"]), min(own, key=lambda each: own[each]["low"])
            gain, low, high = (own[name][each] for each in ("accuracy", "low", "high"))
            assert f"least gain {gain:+.3f} nats over {name} ({low:+.3f} to {high:+.3f})." in said
            rest = f" The lowest bound decides: {own[decisive]['low']:+.3f} over {decisive} "
            assert (rest in said) == (own[decisive]["low"] < low) and said.startswith("Shown: ") == (own[decisive]["low"] > 0)
            apart.append(rest in said)
    assert any(apart) and not all(apart)


def test_an_outcome_probe_refuses_leaks_and_empty_forks() -> None:
    x, tokens = np.zeros((4, 2)), [np.array([1, 2])] * 4
    with pytest.raises(SharedRows, match="Forks 0 and 1 have the same path"):
        outcome_probe({"S": x}, np.ones((4, 2), dtype=np.int64), np.arange(4), tokens=tokens)
    with pytest.raises(ProbeError, match="'ridge' gives no probabilities"):
        outcome_probe({"S": x}, np.ones((4, 2), dtype=np.int64), np.arange(4), tokens=tokens, estimator="ridge")
    with pytest.raises(BadRows, match="4 of 4 forks have no rollouts"):
        outcome_probe({"S": x}, np.zeros((4, 2), dtype=np.int64), np.arange(4), tokens=tokens)
    with pytest.raises(BadRows, match="Different numbers of rows"):
        outcome_probe({"S": x[:3]}, np.ones((4, 2), dtype=np.int64), np.arange(4), tokens=tokens)


def siblings(effect: float, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    outcome = np.tile([0, 1, 0, 1], (15, 1))
    x = generator.normal(size=(15, 4, 3, 6)) + 2 * generator.normal(size=(15, 1, 1, 6))
    x[..., 0] += effect * outcome[:, :, None] * np.array([0, 0, 1])
    fork, sibling, depth = np.indices((15, 4, 3)).reshape(3, -1)
    return dict(states=x.reshape(-1, 6), forks=fork, depths=depth, outcomes=outcome[fork, sibling])


def test_siblings_part_where_their_outcomes_do() -> None:
    found = sibling_divergence(**siblings(6.0))
    assert found.shown.tolist() == [False, False, True] and found.gap[2].low > 0 and 0 in found.gap[0]
    assert found.pairs == [90, 90, 90] and list(found.frame)[2:5] == ["distance", "distance_low", "distance_high"]
    assert not sibling_divergence(**siblings(0.0)).shown.any()
    assert found.plot().axes[0].get_xlabel() == "tokens after the fork" and "gap_low" in found._repr_html_()


def test_the_distance_is_that_of_the_formula() -> None:
    """Two forks with three siblings each: means over pairs, relative to the mean norm."""
    states = np.array([[3.0, 4], [3, 4], [6, 8], [3, 4], [6, 8], [6, 8]])
    found = sibling_divergence(states, np.repeat([0, 1], 3), np.zeros(6), np.array([0, 0, 1, 0, 1, 1]))
    assert found.distance[0].value == pytest.approx((10 / 3) / 7.5) and found.gap[0].value == pytest.approx(5 / 7.5)
    with pytest.raises(BadRows, match="No depth has two forks"):
        sibling_divergence(states[:3], np.zeros(3), np.zeros(3), np.array([0, 0, 1]))


def test_drafts_agree_with_resamples_of_their_own_fork() -> None:
    generator = np.random.default_rng(0)
    own = generator.integers(6, size=40).tolist()
    resamples = [[unit, unit, 9, int(generator.integers(6))] for unit in own]
    groups = np.arange(40) // 2
    found = draft_agreement(own, resamples, [9] * 40, groups)
    assert found.shown and found.found.value == 1 and found.mass.value > 0.6 > found.control and found.p == 0.01
    assert str(found).startswith("Shown: ")
    others = generator.permutation(own).tolist()
    none = draft_agreement(others, resamples, [9] * 40, groups)
    assert not none.shown and 0 in none.gain and str(none).startswith(("Undecided", "Shown to be below"))


def test_what_was_taken_does_not_count() -> None:
    found = draft_agreement([1, 1, 2], [[1, 5, 5], [1, 1], [5, 2]], [5, 1, 5], np.arange(3))
    assert found.forks == 2 and found.mass.value == 1  # the second fork has no resample that was not taken
    with pytest.raises(BadRows, match="1 forks have resamples"):
        draft_agreement([1, 1], [[1, 5], [1, 1]], [5, 1], np.arange(2))
    with pytest.raises(BadRows, match="one group"):
        draft_agreement([1, 1], [[1], [2]], [5, 5], np.zeros(2))


# ---- rollout texts ---------------------------------------------------------------------------------------------------
# Rollouts, similarity and resilience.

TEXTS = ["We flip it.", "So it is heads."]


@pytest.fixture
def rollouts_of_rollout_texts() -> RolloutTexts:
    units = [("We flip it.", "Heads then."), ("We wait.", "We flip it."), ("We wait.",), ("so it is HEADS",), ("It is tails.",)]
    return RolloutTexts(
        [3, 8], TEXTS, ["heads", "tails"], np.array([0, 0, 0, 1, 1]), units, ["heads", "heads", "tails", "heads", "tails"]
    )


def test_counts_and_selection(rollouts_of_rollout_texts: RolloutTexts) -> None:
    assert rollouts_of_rollout_texts.counts().counts.tolist() == [[2, 1], [1, 1]] and len(rollouts_of_rollout_texts) == 5
    some = rollouts_of_rollout_texts.where(np.array([True, False, True, False, False]))
    assert some.counts().counts.tolist() == [[1, 1], [0, 0]] and some.units[1] == ("We wait.",)
    tree = rollouts_of_rollout_texts.tree()
    assert np.array_equal(tree.counts(), rollouts_of_rollout_texts.counts().counts)


def test_of_frame(rollouts_of_rollout_texts: RolloutTexts) -> None:
    frame = pd.DataFrame(
        {"position": [3, 3, 3, 8, 8], "outcome": rollouts_of_rollout_texts.outcome, "units": rollouts_of_rollout_texts.units}
    )
    again = RolloutTexts.of_frame(frame, TEXTS)
    assert np.array_equal(again.counts().counts, rollouts_of_rollout_texts.counts().counts) and again.outcomes == [
        "heads",
        "tails",
    ]
    written = frame.assign(
        text=["|".join(units) for units in rollouts_of_rollout_texts.units], outcome=["heads", "heads", None, "heads", "tails"]
    )
    cut = RolloutTexts.of_frame(written, TEXTS, split=lambda text: text.split("|"))
    assert cut.units == rollouts_of_rollout_texts.units and cut.outcome[2] == "no answer"
    with pytest.raises(BadRows, match="no column 'units'"):
        RolloutTexts.of_frame(frame[["position", "outcome"]], TEXTS)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(outcome=["heads"]), "2 units and 1 outcomes"),
        (dict(outcome=["heads", "edge"]), "'edge' is not among"),
        (dict(fork=np.array([0, 2])), "Forks go from 0 to 1"),
    ],
)
def test_rollouts_that_do_not_fit(change: dict[str, object], message: str) -> None:
    fields = dict(fork=np.array([0, 1]), units=[("a",), ("b",)], outcome=["heads", "tails"])
    with pytest.raises(BadRows, match=message):
        RolloutTexts([3, 8], TEXTS, ["heads", "tails"], **(fields | change))  # type: ignore[arg-type]


def test_similarity() -> None:
    assert exact_of_rollout_texts("It is Heads.", "it is heads") and not exact_of_rollout_texts("heads it is", "it is heads")
    same = overlap(0.6)
    assert same("the coin shows heads now", "now the coin shows tails") and not same("heads", "tails")
    assert same("...", "!") and not same("", "word"), "texts without words are alike"
    with pytest.raises(ProbeError, match="least=0"):
        overlap(0)


def test_resilience(rollouts_of_rollout_texts: RolloutTexts) -> None:
    """At once: the first unit says the same; ever: any does. The control is how often the path's other units turn up."""
    found = resilience(rollouts_of_rollout_texts, similar=exact_of_rollout_texts)
    assert found.at_once.tolist() == pytest.approx([1 / 3, 1 / 2]) and found.ever.tolist() == pytest.approx([2 / 3, 1 / 2])
    assert found.control.tolist() == [0, 0] and found.rollouts.tolist() == [3, 2]
    assert found.frame["rounds"].tolist() == pytest.approx([3, 2])
    assert (found.ever_low < found.ever).all() and (found.ever < found.ever_high).all()
    assert found.plot().axes[0].get_xlabel() == "unit" and "rounds" in found._repr_html_()
    with pytest.raises(BadRows, match="no rollouts"):
        resilience(rollouts_of_rollout_texts.where(np.zeros(5, dtype=bool)))


def test_the_control_of_resilience_by_hand() -> None:
    """Of three units, the control of each is the mean share of the other two, in rollouts from before it."""
    texts = ["one.", "two.", "three."]
    units = [("one.", "two."), ("two.",), ("three.", "two."), ("x.",), ("two.", "one."), ("three.",)]
    found = resilience(
        RolloutTexts([0, 4, 8], texts, ["a", "b"], np.array([0, 0, 0, 1, 1, 2]), units, ["a"] * 6),
        similar=exact_of_rollout_texts,
    )
    assert found.ever.tolist() == pytest.approx([1 / 3, 1 / 2, 1]) and found.at_once.tolist() == pytest.approx(
        [1 / 3, 1 / 2, 1]
    )
    assert found.control.tolist() == pytest.approx([(3 / 3 + 1 / 3) / 2, (1 / 2 + 0) / 2, 0])
    assert found.frame["rounds"].tolist() == pytest.approx([1.5, 2, np.inf])
    alone = resilience(
        RolloutTexts([0], texts[:1], ["a", "b"], np.array([0]), units[:1], ["a"]), similar=exact_of_rollout_texts
    )
    assert np.isnan(alone.control[0]), "a path of one unit has no other"


def test_a_slow_similarity_is_asked_once(rollouts_of_rollout_texts: RolloutTexts) -> None:
    asked: list[tuple[str, str]] = []
    resilience(rollouts_of_rollout_texts, similar=lambda a, b: asked.append((a, b)) is not None)
    assert len(asked) == len(set(asked))


# ---- calibration ------------------------------------------------------------------------------------------------------
# Error rates of the verdicts: some by few simulations, with room for their spread; all of them in the slow test.

QUICK = 20
"""simulations; an error rate of 5 % shows more than 5 errors in 1 of 300 runs, and the seeds are fixed"""
MISSED = {
    "outcome curve, p = 0.98, 100 rollouts",  # holds too often: .985
    "sibling divergence, effect 1.5 at the last depth",  # found in 57 %
}
"""settings whose aim is missed, as docs/branches.md says"""
BY_NAME = {setting.name: setting for setting in SETTINGS}
CHOSEN = (
    "importance, tv, 10 units, 30 rollouts, 2 outcomes, rarest 0.5",
    "counterfactual importance, 5 units, 60 rollouts",
    "change points, 20 forks, 30 rollouts, 2 outcomes",
    "forking tokens, 20 of 3, all at the threshold, 50 rollouts",
    "kl, (1.0, 0.0) from (0.95, 0.05), 100 rollouts",
    "sibling divergence, 4 depths, 20 forks of 6",
    "draft agreement, 60 forks of 30 roots",
    "tv, equal, 30 rollouts",
    "importance, tv, one of 10 units by .3, 100 rollouts",
    "change points, one change of .2, 100 rollouts",
    "draft agreement, half of the drafts",
)


@pytest.mark.parametrize(
    "name",
    swept(
        CHOSEN,
        "change points, one change of .2, 100 rollouts",
        "kl, (1.0, 0.0) from (0.95, 0.05), 100 rollouts",
        "tv, equal, 30 rollouts",
        "importance, tv, one of 10 units by .3, 100 rollouts",
        "draft agreement, half of the drafts",
        "counterfactual importance, 5 units, 60 rollouts",
    ),
)
def test_quick(name: str) -> None:
    found = BY_NAME[name].rate(QUICK)
    room = 3 * np.sqrt(0.05 * 0.95 / found.simulations)
    assert found.aim[0] - room <= found.rate <= found.aim[1] + room, found


def test_quick_control() -> None:
    """Negative control: a test that always finds something misses its aim."""
    found = Setting("error", "always", lambda generator: 1.0, (0.0, 0.05)).rate(QUICK)
    assert not found.held


@pytest.mark.slow
def test_estimates_lose_the_bias_of_counting() -> None:
    """At equal distributions the corrected distance is nearer to 0 than the plug-in one, at far ones no farther off."""
    found = {setting.name: setting.mean(40) for setting in BIASES if "100 rollouts" in setting.name}
    for measure in ("tv", "kl"):
        for about in ("equal", "4 outcomes, equal"):
            assert abs(found[f"{measure}, {about}, 100 rollouts"]) < 0.6 * found[f"{measure} (plug-in), {about}, 100 rollouts"]
        assert abs(found[f"{measure}, far, 100 rollouts"]) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_every_aim_is_met(number: int) -> None:
    """What `python -m bench.calibrate_forks` tabulates."""
    found = rate_of(number, 300)
    assert found.held != (found.setting in MISSED), found
