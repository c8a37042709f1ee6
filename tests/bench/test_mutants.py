"""The table matches the sources, so it cannot become outdated unnoticed between campaigns."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.mutants.__main__ import main
from bench.mutants.campaign import Campaign, NotSound, Outcome, Result, good_enough
from bench.mutants.mutant import CannotApply, Mutant
from bench.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
LEAST = 60
ROOMS = ("engine.loop", "engine.memory", "engine.passes", "engine.request", "dumps", "thinking", "probes", "tasks")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_planted(mutant: Mutant) -> None:
    """The mutant's text occurs once, the changed source compiles to different code, and its tests exist in CI."""
    mutant.applied(mutant.path(ROOT).read_text())
    assert mutant.breaks
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("[")[0].partition("::")
        source = (ROOT / file).read_text()
        assert re.search(rf"^def {name or 'test_'}", source, re.MULTILINE), f"there is no {test}"


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


# ---- campaign --------------------------------------------------------------------------------------------------------
# The campaign tells a deadly fault from a harmless one, and counts nothing else as a kill.

SOURCE = '''"""A tiny module."""


def double(x: int) -> int:
    while x < 0:
        x = -x
    return x + x
'''
TESTS = """from replaylens.tiny import double


def test_double() -> None:
    assert double(2) == 4 and double(-2) == 4
"""
NEAR = ("tests/test_tiny.py",)


def planted(name: str, before: str, after: str, tests: tuple[str, ...] = NEAR) -> Mutant:
    return Mutant(name, "replaylens.tiny", before, after, "double gives twice the size", tests)


DEADLY = planted("deadly", "return x + x", "return x * 3")
HARMLESS = planted("harmless", "return x + x", "return 2 * x")
STALE = planted("stale", "return x - x", "return x")
LOST = Mutant("lost", "replaylens.nowhere", "x", "y", "nothing", NEAR)
ENDLESS = planted("endless", "x = -x", "x = x - 1")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with one module, one test, and files that are not copied."""
    root = tmp_path / "checkout"
    for folder in ("src/replaylens", "bench/mutants", "tests/dumps", "dumps", ".venv"):
        (root / folder).mkdir(parents=True)
    for package in ("src/replaylens", "tests", "bench/mutants"):
        (root / package / "__init__.py").touch()
    (root / "src/replaylens/tiny.py").write_text(SOURCE)
    (root / "tests/test_tiny.py").write_text(TESTS)
    (root / "tests/dumps/test_kept.py").write_text(TESTS)
    (root / "dumps/test_not_copied.py").write_text(TESTS)
    (root / ".venv/large").touch()
    (root / "bench/mutants/quick.py").touch()  # nothing to configure: no Hypothesis here
    return root


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_outcomes(checkout: Path) -> None:
    """Mutants run one after the other in the same copy. The checkout does not change."""
    before = everything(checkout)
    results = Campaign(checkout).run([DEADLY, HARMLESS, STALE, LOST])
    assert [result.outcome for result in results] == [
        Outcome.KILLED,
        Outcome.SURVIVED,
        Outcome.NOT_APPLIED,
        Outcome.NOT_APPLIED,
    ]
    assert results[0].detail == "tests/test_tiny.py::test_double"
    assert "occurs 0 times" in results[2].detail and "there is no replaylens.nowhere" in results[3].detail
    assert everything(checkout) == before


@pytest.mark.slow
def test_a_run_that_is_cut_off_or_cannot_start_kills_nothing(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Campaign, "_check", lambda *given: None)
    (result,) = Campaign(checkout, limit=1).run([ENDLESS])
    assert result.outcome is Outcome.CUT_OFF
    (result,) = Campaign(checkout).run([planted("nobody", "return x + x", "return 0", ("tests/test_gone.py",))])
    assert result.outcome is Outcome.NOT_RUN and "test_gone.py" in result.detail


def test_tests_that_fail_by_themselves_prove_nothing(checkout: Path) -> None:
    (checkout / "tests/test_tiny.py").write_text(TESTS.replace("== 4", "== 5"))
    with pytest.raises(NotSound, match="without any mutant"):
        Campaign(checkout).run([DEADLY])


def test_folders_are_left_out_at_the_top_only(checkout: Path, tmp_path: Path) -> None:
    copy = Campaign(checkout)._copy(tmp_path / "copy")
    assert not (copy / "dumps").exists() and not (copy / ".venv").exists()
    assert (copy / "tests/dumps/test_kept.py").exists()


@pytest.mark.parametrize(
    ("killed", "survived", "not_applied", "good"), [(9, 1, 0, True), (8, 2, 0, False), (99, 0, 1, False), (10, 0, 0, True)]
)
def test_how_many_must_be_killed(killed: int, survived: int, not_applied: int, good: bool) -> None:
    counts = {Outcome.KILLED: killed, Outcome.SURVIVED: survived, Outcome.NOT_APPLIED: not_applied}
    results = [Result(DEADLY, outcome) for outcome, count in counts.items() for _ in range(count)]
    assert good_enough(results) is good


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command's exit status and output for given outcomes."""
    outcomes = {"deadly": Outcome.KILLED, "harmless": Outcome.SURVIVED}

    def run(self: Campaign, mutants: list[Mutant], told: Callable[[Result], object]) -> list[Result]:
        results = [Result(mutant, outcomes[mutant.name]) for mutant in mutants]
        for result in results:
            told(result)
        return results

    def unsound(*given: object) -> list[Result]:
        raise NotSound("they fail")

    monkeypatch.setattr(Campaign, "run", run)
    mutants = [DEADLY, HARMLESS]
    assert main(["--only", "deadly"], mutants) == 0
    assert main([], mutants) == main(["--only", "harmless"], mutants) == 1
    said = capsys.readouterr().out
    assert "1 of 1 killed (100%" in said and "1 of 2 killed (50%" in said and "0 of 1 killed (0%" in said
    assert "survived: harmless: double gives twice the size" in said
    assert main(["--list"], mutants) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["deadly", "harmless"]
    with pytest.raises(SystemExit):
        main(["--only", "unknown"], mutants)
    monkeypatch.setattr(Campaign, "run", unsound)
    assert main([], mutants) == 2
