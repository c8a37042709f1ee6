"""Rollouts, similarity and resilience."""

import numpy as np
import pandas as pd
import pytest

from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.forks.distributions import RolloutTexts
from replaylens.probes.forks.importance import exact, overlap, resilience

TEXTS = ["We flip it.", "So it is heads."]


@pytest.fixture
def rollouts() -> RolloutTexts:
    units = [("We flip it.", "Heads then."), ("We wait.", "We flip it."), ("We wait.",), ("so it is HEADS",), ("It is tails.",)]
    return RolloutTexts(
        [3, 8], TEXTS, ["heads", "tails"], np.array([0, 0, 0, 1, 1]), units, ["heads", "heads", "tails", "heads", "tails"]
    )


def test_counts_and_selection(rollouts: RolloutTexts) -> None:
    assert rollouts.counts().counts.tolist() == [[2, 1], [1, 1]] and len(rollouts) == 5
    some = rollouts.where(np.array([True, False, True, False, False]))
    assert some.counts().counts.tolist() == [[1, 1], [0, 0]] and some.units[1] == ("We wait.",)
    tree = rollouts.tree()
    assert np.array_equal(tree.counts(), rollouts.counts().counts)


def test_of_frame(rollouts: RolloutTexts) -> None:
    frame = pd.DataFrame({"position": [3, 3, 3, 8, 8], "outcome": rollouts.outcome, "units": rollouts.units})
    again = RolloutTexts.of_frame(frame, TEXTS)
    assert np.array_equal(again.counts().counts, rollouts.counts().counts) and again.outcomes == ["heads", "tails"]
    written = frame.assign(
        text=["|".join(units) for units in rollouts.units], outcome=["heads", "heads", None, "heads", "tails"]
    )
    cut = RolloutTexts.of_frame(written, TEXTS, split=lambda text: text.split("|"))
    assert cut.units == rollouts.units and cut.outcome[2] == "no answer"
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
    assert exact("It is Heads.", "it is heads") and not exact("heads it is", "it is heads")
    same = overlap(0.6)
    assert same("the coin shows heads now", "now the coin shows tails") and not same("heads", "tails")
    assert same("...", "!") and not same("", "word"), "texts without words are alike"
    with pytest.raises(ProbeError, match="least=0"):
        overlap(0)


def test_resilience(rollouts: RolloutTexts) -> None:
    """At once: the first unit says the same; ever: any does. The control is how often the path's other units turn up."""
    found = resilience(rollouts, similar=exact)
    assert found.at_once.tolist() == pytest.approx([1 / 3, 1 / 2]) and found.ever.tolist() == pytest.approx([2 / 3, 1 / 2])
    assert found.control.tolist() == [0, 0] and found.rollouts.tolist() == [3, 2]
    assert found.frame["rounds"].tolist() == pytest.approx([3, 2])
    assert (found.ever_low < found.ever).all() and (found.ever < found.ever_high).all()
    assert found.plot().axes[0].get_xlabel() == "unit" and "rounds" in found._repr_html_()
    with pytest.raises(BadRows, match="no rollouts"):
        resilience(rollouts.where(np.zeros(5, dtype=bool)))


def test_the_control_of_resilience_by_hand() -> None:
    """Of three units, the control of each is the mean share of the other two, in rollouts from before it."""
    texts = ["one.", "two.", "three."]
    units = [("one.", "two."), ("two.",), ("three.", "two."), ("x.",), ("two.", "one."), ("three.",)]
    found = resilience(
        RolloutTexts([0, 4, 8], texts, ["a", "b"], np.array([0, 0, 0, 1, 1, 2]), units, ["a"] * 6), similar=exact
    )
    assert found.ever.tolist() == pytest.approx([1 / 3, 1 / 2, 1]) and found.at_once.tolist() == pytest.approx(
        [1 / 3, 1 / 2, 1]
    )
    assert found.control.tolist() == pytest.approx([(3 / 3 + 1 / 3) / 2, (1 / 2 + 0) / 2, 0])
    assert found.frame["rounds"].tolist() == pytest.approx([1.5, 2, np.inf])
    alone = resilience(RolloutTexts([0], texts[:1], ["a", "b"], np.array([0]), units[:1], ["a"]), similar=exact)
    assert np.isnan(alone.control[0]), "a path of one unit has no other"


def test_a_slow_similarity_is_asked_once(rollouts: RolloutTexts) -> None:
    asked: list[tuple[str, str]] = []
    resilience(rollouts, similar=lambda a, b: asked.append((a, b)) is not None)
    assert len(asked) == len(set(asked))
