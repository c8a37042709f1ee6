"""Statistics of forks on what `branch.resample` returns."""

import numpy as np
import pytest

import replaylens as rl
from replaylens.engine.errors import BadRequest
from replaylens.engine.resampling.rollouts import OutcomeCounts
from replaylens.probes.errors import BadRows
from replaylens.probes.forks.change_points import change_points
from replaylens.probes.forks.distributions import RolloutTexts, outcome_curve
from replaylens.probes.forks.importance import counterfactual_importance, importance


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
