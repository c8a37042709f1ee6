"""The table matches the sources, so it cannot become outdated unnoticed between campaigns."""

import re
from pathlib import Path

import pytest

from tests.mutants.mutant import CannotApply, Mutant
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
LEAST = 60
ROOMS = ("engine.loop", "engine.memory", "engine.passes", "engine.request", "engine.dump", "engine.thinking", "probes", "tasks")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_planted(mutant: Mutant) -> None:
    """The mutant's text occurs once, the changed source compiles to different code, and its tests exist."""
    mutant.applied(mutant.path(ROOT).read_text())
    assert mutant.breaks
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name or 'test_'}", (ROOT / file).read_text(), re.MULTILINE), f"there is no {test}"


def test_the_table_covers_what_carries_promises() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= LEAST
    for room in ROOMS:
        assert sum(mutant.module.startswith(f"replaylens.{room}") for mutant in MUTANTS) >= 2, room


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("x = 3", "x = 4", "occurs 0 times"),
        ("1", "2", "occurs 2 times"),
        ("x = 1", "x = ", "does not compile"),
        ("x = 1", "x  =  1  # one", "changes nothing"),
    ],
)
def test_a_mutant_that_is_out_of_date_is_named(before: str, after: str, says: str) -> None:
    """Negative control: an outdated mutant is named."""
    mutant = Mutant("planted", "replaylens.nothing", before, after, "nothing", ("tests",))
    with pytest.raises(CannotApply, match=says):
        mutant.applied("x = 1\ny = 1\n")
