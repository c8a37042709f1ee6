"""Every public verb gives the answers of `tests/golden.json`."""

import pytest

from tests.golden import answers, differences, read
from tests.golden_inside import GROUPS

KNOWN, ALIKE = read()
LONG = (
    "questions", "reproduce", "sweeps", "probes with options", "estimators", "page", "shell", "patch", "rarer", "attribution",
    "lens", "attention routing compare", "saved probes", "dumps with options", "ablate and steer", "replay", "graphs", "edits",
    "dumps", "evaluation",
)  # fmt: skip
"""groups of a second and more: what they ask has tests of its own, and a change that moves verbs runs `make slow`"""


def test_every_group_has_its_answers() -> None:
    assert list(KNOWN) == list(GROUPS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in GROUPS])
def test_the_answers_are_the_known_ones(name: str) -> None:
    """`python -m tests.golden NAME` prints what differs; add --record once it is right."""
    assert differences(answers(GROUPS[name]), KNOWN[name], ALIKE) == []


def test_a_difference_is_found() -> None:
    """Negative control: a number and a text that changed, an answer that is gone, a new one; and what another machine skips."""
    known = {"a": ["x", 1, 2.0, 0.0, 2.0], "b": ["yes"], "c": ["long.. 0123"], "d": ["gone"]}
    found = {"a": ["x", 1, 2.1, 0.0, 2.1], "b": ["no"], "c": ["long.. 4567"], "e": ["new"]}
    assert [line[0] for line in differences(found, known)] == ["a", "b", "c", "d", "e"]
    assert [line[0] for line in differences(found, known, everything=False)] == ["b", "d", "e"]
