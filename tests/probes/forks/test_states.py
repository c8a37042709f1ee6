"""Outcome probes, sibling states and drafts: what is planted is found, what is not there is not."""

import numpy as np
import pytest

from replaylens.probes.errors import BadRows, SharedRows, UnknownEstimator
from replaylens.probes.forks.outcome_probe import GAIN, outcome_probe
from replaylens.probes.forks.tokens import draft_agreement, sibling_divergence
from replaylens.probes.report import Report
from replaylens.views.report import ReportPage

ROOTS = 50


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


@pytest.mark.parametrize("outcomes, estimator", [(2, "logistic-cv"), (3, "logistic")])
def test_a_state_that_holds_the_distribution(outcomes: int, estimator: str) -> None:
    """It beats every baseline and explains nearly all there is; the cell of noise does not, nor do shuffled outcomes."""
    report = planted(outcomes, estimator)
    shown, empty = report.findings
    assert shown.startswith("Shown: S ") and empty.startswith("Not shown: empty ")
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
    assert report.findings[0].startswith("Not shown: S ")


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
            assert (rest in said) == (own[decisive]["low"] < low) and said.startswith("Shown") == (own[decisive]["low"] > 0)
            apart.append(rest in said)
    assert any(apart) and not all(apart)


def test_an_outcome_probe_refuses_leaks_and_empty_forks() -> None:
    x, tokens = np.zeros((4, 2)), [np.array([1, 2])] * 4
    with pytest.raises(SharedRows, match="Forks 0 and 1 have the same path"):
        outcome_probe({"S": x}, np.ones((4, 2), dtype=np.int64), np.arange(4), tokens=tokens)
    with pytest.raises(UnknownEstimator, match="'ridge' gives no probabilities"):
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
    assert not none.shown and 0 in none.gain and str(none).startswith("Not shown: ")


def test_what_was_taken_does_not_count() -> None:
    found = draft_agreement([1, 1, 2], [[1, 5, 5], [1, 1], [5, 2]], [5, 1, 5], np.arange(3))
    assert found.forks == 2 and found.mass.value == 1  # the second fork has no resample that was not taken
    with pytest.raises(BadRows, match="1 forks have resamples"):
        draft_agreement([1, 1], [[1, 5], [1, 1]], [5, 1], np.arange(2))
    with pytest.raises(BadRows, match="one group"):
        draft_agreement([1, 1], [[1], [2]], [5, 5], np.zeros(2))
