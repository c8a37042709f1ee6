"""`make gpu` on made-up tests: every test runs in exactly one process, and every failure is reported."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import run as gpu_run
from tests.gpu.run import ROOT, candidates

GOOD = """
import os, time
import pytest

@pytest.fixture(scope="module")
def made():
    with open("{folder}/made", "a") as file:
        file.write(f"{{os.getpid()}}\\n")

@pytest.mark.parametrize("number", range(12))
def test_good(made, number):
    time.sleep(0.05)
    with open("{folder}/ran", "a") as file:
        file.write(f"{{number}} {{os.getpid()}}\\n")
"""
BAD = {
    "a failure": ("def test_bad(): assert 1 == 2", r"failed: \S*test_made.py::test_bad"),
    "a failing fixture": ("@pytest.fixture\ndef x(): 1 / 0\ndef test_bad(x): ...", r"failed: \S*test_made.py::test_bad"),
    "a crash": ("def test_bad(): os._exit(0)", r"no result: \S*test_made.py::test_bad"),
    "a file that cannot be read": ("import nothing_of_this_name", "crashed"),
}


def run(folder: Path, more: str = "", marker: str = "not gpu", *options: str) -> "subprocess.CompletedProcess[str]":
    (folder / "test_made.py").write_text(GOOD.format(folder=folder) + more)
    command = [sys.executable, "-m", "tests.gpu.run", "--processes", "2", "--marker", marker, *options, str(folder)]
    bare = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # only pytest, as on a GPU machine; also starts faster
    return subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=120)


def test_every_test_runs_once_and_processes_share(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    *_, counts, last = done.stdout.splitlines()
    assert counts.startswith("12 passed in ") and last == "Tests marked not gpu: all passed."
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(int(number) for number, _ in ran) == list(range(12))
    processes, made = {process for _, process in ran}, (tmp_path / "made").read_text().split()
    assert sorted(made) == sorted(processes), "a fixture of the module is made once in each process that needs it"


@pytest.mark.parametrize(
    "plant", ["a crash", *(pytest.param(plant, marks=pytest.mark.slow) for plant in BAD if plant != "a crash")]
)
def test_whatever_goes_wrong_is_an_error(plant: str, tmp_path: Path) -> None:
    source, said = BAD[plant]
    done = run(tmp_path, source)
    assert done.returncode == 1 and re.search(said, done.stdout)
    assert done.stdout.splitlines()[-1] == "Tests marked not gpu: FAILED."


@pytest.mark.slow
def test_nothing_to_run_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, marker="gpu")
    assert done.returncode == 1 and "no test was selected" in done.stdout


def test_candidates() -> None:
    found = {str(Path(file).relative_to(ROOT)) for file in candidates()}
    assert {"tests/gpu/test_contract_cuda.py", "tests/kernels/test_norm.py", "tests/engine/test_contract.py"} <= found
    assert not {"tests/test_types.py", "tests/test_package.py"} & found, "they need what a machine with a GPU may lack"


@pytest.mark.slow
def test_a_run_that_takes_too_long_reports_what_ran(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_slow(): time.sleep(60)\ndef test_after(): ...", "not gpu", "--seconds", "4")
    assert done.returncode == 1 and re.search("time ran out: [12] tests have no result", done.stdout), done.stdout
    assert re.search("1[123] passed", done.stdout) and "crashed" not in done.stdout


def test_failures_are_told_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_run, "EVERY", 0.3)
    notes = [{"collected": ["a", "b", "c"]}, {"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed"}]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes) + '{"test": "c", "outc')
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    codes, late = gpu_run.ended([running], tmp_path, seconds=1.2)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert late and codes == [-signal.SIGINT] and "1 passed, 1 failed of 3" in first and second == "failed: b"
