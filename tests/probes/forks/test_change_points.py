"""Change points against the sum over all ways to cut a short path; forking tokens; both against simulated errors."""

from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest
from scipy.special import gammaln

from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.forks.change_points import change_points
from replaylens.probes.forks.tokens import TokenFork, forking_tokens
from tests.calibrate_forks import counts_of, token_forks


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
