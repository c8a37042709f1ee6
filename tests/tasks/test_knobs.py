"""Unknown or impossible knobs raise errors that say what to do."""

import pytest

from replaylens import tasks
from replaylens.tasks.errors import BadKnob, TaskError, UnknownKnob, UnknownTask


def test_unknown_task_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(UnknownTask, match=r"'cion' \(did you mean 'coin'\?\). Known: boxes, coin, coin-resets, coins"):
        tasks.get("cion")


def test_unknown_knob_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(UnknownKnob, match=r"'flip' of task 'coin' \(did you mean 'flips'\?\). Known: .*seed, start"):
        tasks.get("coin")(flip=3)


def test_every_error_is_a_task_error_and_a_value_error() -> None:
    assert issubclass(TaskError, ValueError)
    assert all(issubclass(kind, TaskError) for kind in (BadKnob, UnknownKnob, UnknownTask))


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("coin", {"flips": 0}, "from 1 to"),
        ("coin", {"flips": (5, 2)}, "minimum exceeds the maximum"),
        ("coin", {"flips": (1, 2, 3)}, "pair"),
        ("coin", {"flips": "many"}, "pair"),
        ("coin", {"flips": 2.5}, "pair"),
        ("coin", {"flips": (1, 2.5)}, "Give an integer"),
        ("coin", {"flips": True}, "Give an integer"),
        ("coin", {"p": 1.5}, "probability"),
        ("coin", {"p": -0.1}, "probability"),
        ("coin", {"p": float("nan")}, "probability"),
        ("coin", {"p": "half"}, "probability"),
        ("coin", {"start": "edge"}, "random, heads, tails"),
        ("coin", {"names": "nobody"}, "train, held-out, all"),
        ("coin", {"phrasing": "odd"}, "standard, idle, mixed"),
        ("coin", {"rendering": "poem"}, "picture, states, wei, symbols, steps"),
        ("coin", {"verb": "turn"}, "Only the rendering 'wei'"),
        ("coin", {"verb": "toss", "rendering": "wei"}, "flip, turn"),
        ("coin", {"distractors": -1}, "from 0 to"),
        ("coin", {"distractors": 99}, "from 0 to"),
        ("coin", {"rendering": "symbols", "distractors": 1}, "no sentences"),
        ("coin", {"rendering": "symbols", "phrasing": "idle"}, "no phrasings"),
        ("coin", {"seed": -1}, "at least 0"),
        ("coin", {"seed": "x"}, "Give an integer"),
        ("coins", {"coins": 1}, "from 2 to 6"),
        ("coins", {"coins": 7}, "from 2 to 6"),
        ("coin-resets", {"reset": 2}, "probability"),
        ("shell", {"cups": 4}, "3 or 5"),
        ("shell", {"start": "heads"}, "random, fixed"),
        ("words", {"group": "S4"}, "A5, Z60, A4xZ5"),
        ("words", {"length": 0}, "from 1 to"),
        ("fork", {"depth": 1000}, "from 1 to"),
        ("boxes", {"boxes": 2}, "from 3 to 7"),
        ("boxes", {"boxes": 8}, "from 3 to 7"),
        ("variables", {"variables": 1}, "from 2 to 8"),
        ("variables", {"variables": 9}, "from 2 to 8"),
        ("variables", {"modulus": 1}, "from 2 to 10"),
        ("variables", {"modulus": 11}, "from 2 to 10"),
        ("variables", {"operations": 0}, "from 1 to"),
        ("hops", {"people": 2}, "from 4 to 12"),
        ("hops", {"relations": 5}, "from 2 to 4"),
        ("hops", {"hops": 0}, "from 1 to"),
        ("counts", {"people": 5}, "from 1 to 4"),
        ("counts", {"most": 29}, "from 30 to 99"),
        ("counts", {"change": 1}, "from 2 to 9"),
    ],
)
def test_impossible_knobs(name: str, knobs: dict[str, object], message: str) -> None:
    with pytest.raises(BadKnob, match=message):
        tasks.get(name)(**knobs)


def test_knobs_are_frozen_and_one_number_is_a_range() -> None:
    task = tasks.get("coin")(flips=4)
    assert task.knobs.flips == (4, 4)
    assert tasks.get("coin")(flips=[2, 8]).knobs.flips == (2, 8)
    with pytest.raises(AttributeError):
        task.knobs.p = 0.9


def test_with_knobs_changes_only_what_it_is_told() -> None:
    task = tasks.get("coin")(flips=4, p=0.2)
    assert task.with_knobs(p=0.3) == tasks.get("coin")(flips=4, p=0.3)
    assert task == tasks.get("coin")(flips=4, p=0.2)
    with pytest.raises(UnknownKnob):
        task.with_knobs(q=1)
