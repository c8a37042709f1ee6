"""Known zeros: the text does not determine them, so no guess beats the stated chance. Seeds and outcomes are fixed."""

from collections import Counter, defaultdict
from math import sqrt

import pytest
from scipy.stats import binom

from replaylens import tasks
from replaylens.tasks.reading import NEXT_ACTION, SHUFFLED
from replaylens.tasks.task import AnyTask, Example

COUNT = 240
SIGMAS = 4.5
ALARM = 1e-8  # about 2,000 groups below with up to 60 values each: a true zero raises a false alarm for one seed in a thousand
FEATURES = {"no feature", "last_action", "actions", "last words", "empty boxes", SHUFFLED}


def chance_of(task: AnyTask, label: str) -> float:
    return next(zero.chance for zero in task.known_zero if zero.label == label)


def assert_at_chance(values: list[object], chance: float) -> None:
    """Exact test: no value occurs more often than one of probability `chance` could."""
    value, top = Counter(values).most_common(1)[0]
    assert binom.sf(top - 1, len(values), chance) > ALARM, (value, top, len(values), chance)


def places_of(example: Example, state: str) -> list[dict[str, object]]:
    """The labels just before the text reveals each step, with features that a cheap predictor could use."""
    places = []
    for step in example.steps:
        labels = example.reading.labels_after(step.reveals)
        words = " ".join(example.text[: step.reveals].split()[-2:])
        places.append({**labels, "last words": words, "empty boxes": str(labels[state]).count("nothing")})
    return places


def test_next_action_and_shuffled_sit_at_chance(task: AnyTask) -> None:
    """Both sit at chance, overall and within each value of a feature that a predictor could use.

    Actions are independent of each other, so every place counts. `shuffled` is drawn once per example, so one place per example
    counts.
    """
    examples = [places_of(example, task.state_label) for example in task.examples(COUNT)]
    rows = {
        NEXT_ACTION: [place for places in examples for place in places if place[NEXT_ACTION] is not None],
        SHUFFLED: [places[number % len(places)] for number, places in enumerate(examples)],
    }
    for label, given in rows.items():
        assert len(given) > COUNT / 2
        for feature in (
            "no feature",
            task.state_label,
            "last_action",
            "actions",
            "last words",
            "empty boxes",
            SHUFFLED,
        ):
            groups = defaultdict(list)
            for row in given:
                groups[row.get(feature)].append(row[label])
            for values in groups.values():
                if feature != label and len(values) >= 60:
                    assert_at_chance(values, chance_of(task, label))


def test_chance_is_reached(plain_task: AnyTask) -> None:
    """The stated chance is the exact accuracy of the best guess, not just a bound."""
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


RESETS = [
    # p, reset, the likeliest action and its probability
    (0.5, 0.25, ("flip", "keep"), 0.375),
    (0.9, 0.1, ("flip",), 0.81),
    (0.1, 0.2, ("keep",), 0.72),
    (0.5, 0.9, ("set heads", "set tails"), 0.45),
    (0.6, 0.5, ("flip",), 0.3),
    (0.5, 1.0, ("set heads", "set tails"), 0.5),
    (0.7, 0.0, ("flip",), 0.7),
]


@pytest.mark.parametrize(("p", "reset", "likeliest", "chance"), RESETS)
def test_chance_follows_p_and_resets(p: float, reset: float, likeliest: tuple[str, ...], chance: float) -> None:
    """Chance is the probability of the likeliest of flip, keep and the two sets, and matches its frequency in the texts."""
    task = tasks.get("coin-resets")(p=p, reset=reset, flips=8)
    assert chance_of(task, NEXT_ACTION) == pytest.approx(chance)
    actions = Counter(event.action for example in task.examples(100) for event in example.events)
    assert actions.most_common(1)[0][0] in likeliest
    spread = SIGMAS * sqrt(chance * (1 - chance) / 800)
    assert all(abs(actions[action] / 800 - chance) <= spread for action in likeliest)


def test_next_action_tells_the_action_that_comes() -> None:
    for example in tasks.get("coin")(rendering="states").examples(20):
        for step in example.steps:
            assert example.reading.labels_after(step.reveals)[NEXT_ACTION] == step.event.action


def test_no_next_action_in_a_chain_of_thought() -> None:
    """In a chain of thought, the prompt has already stated the next action."""
    for example in tasks.get("coin")(rendering="steps").examples(20):
        start = example.steps[-1].reveals + 1
        assert all(example.reading.labels_after(count)[NEXT_ACTION] is None for count in range(start, len(example.text) + 1))
