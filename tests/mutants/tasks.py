"""Faults in the ground truth."""

from tests.mutants.mutant import Mutant

TASKS = (
    Mutant(
        "announced-after-a-stated-face",
        "replaylens.tasks.coin_scene",
        "self.claim(piece[1:])\n                    self.announced = False",
        "self.claim(piece[1:])",
        "a stated face announces no further actor",
        ("tests/tasks/test_coin.py::test_outcomes_after_a_stated_face",),
    ),
    Mutant(
        "chance-without-sets",
        "replaylens.tasks.coin_resets",
        "max((1 - reset) * p, (1 - reset) * (1 - p), reset / len(FACES))",
        "max((1 - reset) * p, (1 - reset) * (1 - p))",
        "the chance of the next action is that of the likeliest one",
        ("tests/tasks/test_known_zeros.py::test_chance_follows_p_and_resets",),
    ),
    Mutant(
        "chance-of-keeps-forgotten",
        "replaylens.tasks.coin_resets",
        "max((1 - reset) * p, (1 - reset) * (1 - p), reset / len(FACES))",
        "max((1 - reset) * p, reset / len(FACES))",
        "the chance of the next action is that of the likeliest one",
        ("tests/tasks/test_known_zeros.py::test_chance_follows_p_and_resets",),
    ),
    Mutant(
        "labels-one-character-early",
        "replaylens.tasks.reading",
        "bisect_right(self._reads, count) - 1",
        "bisect_right(self._reads, count + 1) - 1",
        "a token takes the labels in force after its last character",
        ("tests/tasks/test_reading.py",),
    ),
    Mutant(
        "labels-of-unreadable-text",
        "replaylens.tasks.reading",
        "if not 0 < count <= self.readable_until:",
        "if not 0 < count:",
        "what is no text of the task has no labels",
        ("tests/tasks/test_reading.py",),
    ),
    Mutant(
        "half-a-character-counted",
        "replaylens.tasks.labels",
        'return text.rstrip("\\N{REPLACEMENT CHARACTER}")',
        "return text",
        "a piece of a character adds nothing to the text",
        ("tests/tasks/test_labels.py",),
    ),
    Mutant(
        "values-without-modulus",
        "replaylens.tasks.variables",
        "now.get(event.action, number) % modulus",
        "now.get(event.action, number)",
        "values are taken modulo the knob",
        ("tests/tasks/test_variables.py",),
    ),
)
