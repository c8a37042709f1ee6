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
    """The mutant's text occurs once, the changed source compiles to different code, and its tests exist in CI."""
    mutant.applied(mutant.path(ROOT).read_text())
    assert mutant.breaks
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        assert re.search(rf"^def {name or 'test_'}", source, re.MULTILINE), f"there is no {test}"
        assert not (name and is_slow(source, name)), f"the campaign does not run slow tests: {test}"


def is_slow(source: str, name: str) -> bool:
    """Whether the whole test stands behind the marker."""
    return re.search(rf"^@pytest\.mark\.slow\n(?:.+\n)*?def {name}\(", source, re.MULTILINE) is not None


def test_a_slow_test_is_known() -> None:
    plain, slow = "def test_a() -> None:\n    pass\n", "@pytest.mark.slow\n@more\ndef test_b() -> None:\n    pass\n"
    assert is_slow(slow + "\n\n" + plain, "test_b") and not is_slow(slow + "\n\n" + plain, "test_a")


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
