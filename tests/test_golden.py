"""Every public verb gives the answers of `tests/golden.json`."""

import numpy as np
import pytest
import torch

from tests.golden import Walk, answers, differences, read, same
from tests.golden_inside import GROUPS

KNOWN = read()
LONG = (
    "questions", "reproduce", "sweeps", "probes with options", "estimators", "page", "shell", "patch", "rarer", "attribution",
    "lens", "attention routing compare", "saved probes", "dumps with options", "rows", "ablate and steer", "graphs", "dumps",
    "tasks", "replay", "commands", "small caches", "solver steps", "evaluation", "fork statistics", "resampling", "features",
    "statistics with options",
)  # fmt: skip
"""groups of a second and more: what they ask has tests of its own, and a change that moves verbs runs `make slow`"""


def test_every_group_has_its_answers() -> None:
    assert list(KNOWN) == list(GROUPS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in GROUPS])
def test_the_answers_are_the_known_ones(name: str) -> None:
    """`python -m tests.golden NAME` prints what differs; add --record once it is right."""
    differ = differences(answers(GROUPS[name]), KNOWN[name])
    assert not differ, differ


def test_a_difference_is_found() -> None:
    """Negative control: a number, a hash and a text that changed, an answer that is gone, a new one."""
    known = {"a": ["x", 1, 2.0, 0.0, 2.0], "b": ["yes"], "c": ["x", "0123"], "d": ["gone"], "f": ["x", "01", 1, 2.0, 0.0, 2.0]}
    found = {"a": ["x", 1, 2.1, 0.0, 2.1], "b": ["no"], "c": ["x", "4567"], "e": ["new"], "f": ["x", "01", 1, 2.0, 1e-6, 2.0]}
    assert [line[0] for line in differences(found, known)] == ["a", "b", "c", "d", "e"]


def test_what_is_promised_bit_for_bit_is_compared_so() -> None:
    """A last bit of float32 is a difference, in float64 it is rounding."""
    one = np.full(3, 1.0)
    for dtype, alike in {"float32": False, "float64": True}.items():
        first = one.astype(dtype)
        next_ = np.nextafter(first, np.inf, dtype=dtype)
        assert same(Walk(next_).leaf(), Walk(first).leaf()) is alike
        assert same(Walk(torch.tensor(next_)).leaf(), Walk(torch.tensor(first)).leaf()) is alike
        assert same(Walk(next_, rounded=True).leaf(), Walk(first, rounded=True).leaf())
