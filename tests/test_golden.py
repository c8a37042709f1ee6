"""Every public verb gives the answers of `tests/golden.json`."""

import json

import pytest

from tests.golden import FILE, answers, differences
from tests.golden_rest import GROUPS

KNOWN = json.loads(FILE.read_text())


def test_every_group_has_its_answers() -> None:
    assert list(KNOWN) == list(GROUPS)


@pytest.mark.parametrize("name", list(GROUPS))
def test_the_answers_are_the_known_ones(name: str) -> None:
    """`python -m tests.golden NAME` prints what differs; add --record once it is right."""
    assert differences(answers(GROUPS[name]), KNOWN[name]) == []
