"""The benchmark harness: cases are declared, arms take turns, ratios and aims are right, results say where they are from."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import harness, workbench
from benchmarks.harness import CASES, Case, Line, Lines, case, chosen, run

command.declared()
ROOT = harness.RESULTS.parent.parent


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., Case]]:
    """`case`, for cases that are forgotten after the test."""
    monkeypatch.setattr(harness, "CASES", {})

    def made(**declared: Any) -> Callable[..., Case]:
        def decorate(set_up: Callable[..., Lines]) -> Case:
            case("planted", **{"ours": "a", "baseline": "b", **declared})(set_up)
            return harness.CASES["planted"]

        return decorate

    return made


@pytest.mark.parametrize("made", CASES.values(), ids=CASES.keys())
def test_declarations(made: Case) -> None:
    """Ours and the baseline are among the arms, an aim is a bound, the words are there, and the parameters fit into JSON."""
    assert made.about and made.name == made.name.lower() and (not made.ours or {made.ours, made.baseline} <= set(made.arms))
    assert not made.aim or harness.meets(1.0, made.aim) is not None
    json.dumps([made.parameters(False), made.parameters(True)])


def test_triton_is_not_needed_to_list_cases() -> None:
    code = "import sys; from benchmarks import __main__ as m; m.main(['list']); sys.exit('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in CASES)


def test_names_and_patterns() -> None:
    assert [made.name for made in chosen(["hostwork-cpu"])] == ["hostwork-cpu"]
    assert {made.file for made in chosen(["dump-cpu"])} == {"dump-cpu"} and len(chosen(["dump-cpu"])) > 3
    assert len(chosen(["kernels-*"])) > 8
    with pytest.raises(SystemExit, match=r"no case 'hostwrok'; the cases are .*hostwork-cpu"):
        chosen(["hostwrok"])


def test_every_command_of_the_docs_is_a_case() -> None:
    """`python -m benchmarks run NAME` in README, docs, notes and Makefile."""
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md"), *(ROOT / "notes").glob("*.md")]
    named = [w for page in pages for line in page.read_text().split("benchmarks run ")[1:] for w in names(line)]
    assert len(named) > 20 and all(chosen([name]) for name in named if name != "NAME")


def names(text: str) -> list[str]:
    """The cases at the beginning of a text, up to an option or the end of the command."""
    found = []
    for word in text.replace("`", " ` ").split():
        if word.startswith(("-", "`", "\\", "#")):
            break
        found.append(word.strip("'\""))
    return found


def test_arms_take_turns_and_the_ratio_is_theirs_over_ours(
    declare: Callable[..., Callable[..., Case]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is planted: `a` takes one second, `b` three, `c` half of one for each of four."""
    now, called = [0.0], []
    monkeypatch.setattr(harness.time, "process_time", lambda: now[0])

    def work(name: str, taken: float) -> str:
        called.append(name)
        now[0] += taken
        return name.upper()

    @declare(others=("c",), aim=">= 2", rounds=2, unit="s")
    def planted(size: int = 3) -> Lines:
        """Words."""
        arms = {name: lambda n=name, t=t: work(n, t) for name, t in (("a", 1.0), ("b", size), ("c", 0.5))}
        found = yield Line("planted", arms, per={"a": 1, "b": 1, "c": 4}, numbers={"size": size})
        assert found.results["b"] == "B"
        found.note(later=1)
        yield Line("counted", ratio=1.5, aim="<= 1.2")

    out = tmp_path / "out.json"
    assert run(planted, out=out)
    assert called == ["a", "b", "c", "b", "c", "a", "c", "a", "b"], "a warm-up round and two others, each begun by another arm"
    body = json.loads(out.read_text())
    first, second = body["rows"]
    assert (first["ratio"], first["lowest"], first["highest"], first["met"]) == (3, 3, 3, True)
    assert (first["a_s"], first["c_s"], first["later"]) == (1, 0.125, 1) and first["times_s"]["b"] == [3, 3]
    assert second["met"] is False and second["case"] == "planted"
    about = body["cases"]["planted"]
    assert about["parameters"] == {"size": 3} and about["about"] == "Words." and about["date"][:2] == "20"
    assert {"cpu", "architecture", "cores", "gpu", "torch", "threads", "canonical_version"} <= set(about["machine"])
    assert len(about["commit"].partition("+")[0]) == 40
    assert run(planted, out=out, given={"size": 1}) and [row["what"] for row in json.loads(out.read_text())["rows"]] == [
        "planted", "counted",
    ]  # fmt: skip
    assert json.loads(out.read_text())["rows"][0]["met"] is False, "a rerun replaces the rows of its case"


def test_costs_and_the_best_round(declare: Callable[..., Callable[..., Case]]) -> None:
    @declare(cost=True, best=True, aim="<= 0.5")
    def planted() -> Lines:
        """Words."""
        yield Line("", times={"a": [3.0, 1.0], "b": [4.0, 8.0]})

    row = harness.measure(planted, next(planted.set_up())).row
    assert (row["ratio"], row["lowest"], row["highest"], row["met"]) == (0.25, 0.125, 0.75, True)


def test_what_is_wrong_is_not_timed(
    declare: Callable[..., Callable[..., Case]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed check leaves no number, a failing set-up leaves the lines before it, and both fail the run."""
    timed, cleaned = [], []

    @declare()
    def planted(fail: bool = False) -> Lines:
        """Words."""
        yield Line("wrong", {"a": lambda: timed.append(1), "b": lambda: None}, check=False)
        try:
            yield Line("broken", {"a": lambda: 1 / 0, "b": lambda: None})
        finally:
            cleaned.append(1)

    assert not run(planted, out=tmp_path / "out.json")
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["what"] == "wrong" and not row["check"] and "a_ms" not in row and not timed and cleaned
    assert "CHECK FAILED" in (told := capsys.readouterr().out) and "ZeroDivisionError" in told


def test_declarations_that_are_refused(declare: Callable[..., Callable[..., Case]]) -> None:
    def planted(n: int = 1) -> Lines:
        """Words."""
        yield Line("")

    for wrong in ({"baseline": ""}, {"baseline": "a"}, {"others": ("b",)}, {"quick": {"m": 1}}):
        with pytest.raises(ValueError, match="planted: "):
            declare(**wrong)(planted)
    made = declare()(planted)
    with pytest.raises(SystemExit, match="planted has no parameter m; it has n"):
        run(made, given={"m": 1})
    with pytest.raises(AssertionError, match="declares no arms"):
        harness.measure(made, Line("", {"c": lambda: None}))
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device found"):
            run(CASES["kernels-norm"])


def rows(name: str, out: Path) -> list[dict[str, Any]]:
    """The rows of a quick run, which has a tiny model on the CPU."""
    assert run(CASES[name], quick=True, out=out)
    found: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return found


def test_the_grid_of_patches_and_its_cells(tmp_path: Path) -> None:
    grid, cells, gradients, _ = rows("workbench-gpu", tmp_path / "out.json")
    assert grid["cells"] == 3 * 6 and grid["met"] and cells["met"] and cells["apart"] == 0 and gradients["certified"]


def test_a_cell_with_other_bits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = workbench.grid
    monkeypatch.setattr(workbench, "grid", lambda *given: torch.nextafter(honest(*given), torch.tensor(9.0)))
    _, cells, *_ = rows("workbench-gpu", tmp_path / "out.json")
    assert not cells["met"] and cells["apart"] == workbench.CHECKED
