"""Known zeros: nothing in the text tells them, so no guess beats the stated chance. Fixed seeds, fixed outcome."""

from collections import Counter, defaultdict
from math import sqrt

import pytest

from replaylens import tasks
from replaylens.tasks.script import NEXT_ACTION, SHUFFLED
from replaylens.tasks.task import AnyTask

COUNT = 400
SIGMAS = 4.5  # about a thousand comparisons below; each goes wrong for a true zero three times in a million


def chance_of(task: AnyTask, label: str) -> float:
    return next(zero.chance for zero in task.known_zero if zero.label == label)


def assert_at_chance(values: list[object], chance: float) -> None:
    top = Counter(values).most_common(1)[0][1] / len(values)
    assert top <= chance + SIGMAS * sqrt(chance * (1 - chance) / len(values)), (top, chance, len(values))


def test_next_action_and_shuffled_sit_at_chance(task: AnyTask) -> None:
    """One place per example, so that the places are independent; then the same within each value of other labels."""
    rows = []
    for example in task.examples(COUNT):
        places = [example.reading.labels_after(step.reveals) for step in example.steps]
        places = [place for place in places if place[NEXT_ACTION] is not None] or places
        rows.append(places[example.index % len(places)])
    for label in (NEXT_ACTION, SHUFFLED):
        chance = chance_of(task, label)
        given = [row for row in rows if row[label] is not None]
        assert len(given) > COUNT / 2
        assert_at_chance([row[label] for row in given], chance)
        for other in (task.state_label, "last_action", "actions", SHUFFLED, task.label_names[0]):
            groups = defaultdict(list)
            for row in given:
                groups[row.get(other)].append(row[label])
            for values in groups.values():
                if other != label and len(values) >= 60:
                    assert_at_chance(values, chance)


def test_chance_is_reached(plain_task: AnyTask) -> None:
    """The stated chance is the exact accuracy of the best guess, not merely a bound."""
    if plain_task.name == "words":
        plain_task = plain_task.with_knobs(length=16)
    values = []
    for example in plain_task.examples(COUNT):
        values += [example.reading.labels_after(step.reveals)[NEXT_ACTION] for step in example.steps]
    values = [value for value in values if value is not None]
    chance = chance_of(plain_task, NEXT_ACTION)
    top = Counter(values).most_common(1)[0][1] / len(values)
    assert top >= chance - SIGMAS * sqrt(chance * (1 - chance) / len(values))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.7])
def test_chance_follows_p(p: float) -> None:
    assert chance_of(tasks.get("coin")(p=p), NEXT_ACTION) == max(p, 1 - p)


def test_next_action_tells_the_action_that_comes() -> None:
    for example in tasks.get("coin")(rendering="states").examples(20):
        for step in example.steps:
            assert example.reading.labels_after(step.reveals)[NEXT_ACTION] == step.event.action


def test_no_next_action_in_a_chain_of_thought() -> None:
    """There the prompt has told it already."""
    for example in tasks.get("coin")(rendering="steps").examples(20):
        start = example.steps[-1].reveals + 1
        assert all(
            example.reading.labels_after(count)[NEXT_ACTION] is None for count in range(start, len(example.text) + 1)
        )
