"""The gate: what a call asks of the machine is compared with what there is, before any work."""

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from replaylens import Engine, tasks
from replaylens.cli import app
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.engine import machine
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import output_path
from replaylens.probes import sweeps
from replaylens.probes.errors import ProbeError
from replaylens.probes.heldout import permutation_test
from replaylens.probes.probe import fit_probe, placebo_probes
from replaylens.probes.rows import ProbeRows
from replaylens.probes.sweeps import sweep
from replaylens.replay import replayer
from replaylens.weights import opening as engines

# Facts


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the files of control groups, as the kernel shows them."""

    def make(own: str, **files: str) -> None:
        for name, text in files.items():
            file = tmp_path / "groups" / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (tmp_path / "own").write_text(own)
        monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
        monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "own")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)

    return make


def test_control_groups_bound_cores_and_memory(groups: Callable[..., None]) -> None:
    """The smallest limit on the way from the root to this process counts; affinity bounds where there is none."""
    groups("0::/pod/box\n", pod__cpu_dot_max="250000 100000\n", pod__box__cpu_dot_max="max 100000\n")
    assert machine.cores() == 3, "two and a half cores take three processes"
    groups("0::/pod/box\n", pod__box__memory_dot_max="1000000\n", pod__memory_dot_max="max\n", pod__cpu_dot_max="max 100000\n")
    assert machine.cores() == 32 and machine.total_memory() == 1_000_000
    old = {"cpu__cpu_dot_cfs_quota_us": "400000\n", "cpu__cpu_dot_cfs_period_us": "100000\n"}
    groups("4:cpu:/box\n", **old, memory__memory_dot_limit_in_bytes="2000000\n")
    assert machine.cores() == 4 and machine.total_memory() == 2_000_000
    groups("4:cpu:/box\n", **old | {"cpu__cpu_dot_cfs_quota_us": "-1\n"})
    assert machine.cores() == 32


def test_free_memory_is_what_control_groups_and_the_machine_leave(
    groups: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of files do not count as used: the kernel gives them up."""
    (tmp_path / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:  3000 kB\n")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    groups("0::/pod/box\n", pod__box__memory_dot_max="max\n", pod__box__memory_dot_current="900\n")
    assert machine.free_memory() == 3000 * 1024
    groups("0::/pod/box\n", pod__memory_dot_max="1000000\n", pod__memory_dot_current="900000\n")
    groups("0::/pod/box\n", pod__memory_dot_stat="anon 700000\ninactive_file 50000\n")
    assert machine.free_memory() == 150_000
    groups("0::/pod/box\n", pod__memory_dot_current="1100000\n")
    assert machine.free_memory() == 0, "more than the limit for a moment"
    old = {"memory__memory_dot_limit_in_bytes": "2000000\n", "memory__memory_dot_usage_in_bytes": "1990000\n"}
    groups("4:memory:/box\n", **old, memory__memory_dot_stat="inactive_file 1\ntotal_inactive_file 7\n")
    assert machine.free_memory() == 10_007


def test_limits_are_just_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The largest number is allowed, the next one is not; the sentence names the option, what there is and what to give."""
    monkeypatch.setattr(machine, "cores", lambda: 3)
    monkeypatch.setattr(machine, "total_memory", lambda: 12 * machine.PROCESS_BYTES)
    monkeypatch.setattr(machine, "free_disk", lambda path: 1000)
    machine.require_room("ranks=12", processes=12, memory=0, disk=1000, path=tmp_path)
    with pytest.raises(BadRequest, match=r"ranks=13 asks for 13 processes, but there are 3 cores, .* Give at most 12\."):
        machine.require_room("ranks=13", processes=13)
    with pytest.raises(BadRequest, match=r"ranks=12 takes about 3\.2 GB of memory, and there are 3\.2 GB"):
        machine.require_room("ranks=12", processes=12, memory=1)
    machine.require_room("ranks=1", processes=1, memory=12 * machine.PROCESS_BYTES)
    for count, besides in ((2, 10), (12, 0)):  # every process takes its part; one alone is there already
        machine.require_room("ranks", processes=count, memory=besides * machine.PROCESS_BYTES)
        with pytest.raises(BadRequest, match="of memory"):
            machine.require_room("ranks", processes=count, memory=besides * machine.PROCESS_BYTES + 1)
    with pytest.raises(BadRequest, match=rf"n=9 takes about 1\.0 kB, and {tmp_path} has room for 1\.0 kB"):
        machine.require_room("n=9", disk=1001, path=tmp_path)
    machine.require_room("workers=400", processes=400, on=100)
    with pytest.raises(BadRequest, match="100 cores"):
        machine.require_room("workers=401", processes=401, on=100)


def test_paths_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not say whether /proc takes a file, and the owner of a machine has them all. Nothing is left behind."""
    (tmp_path / "file").write_text("mine")
    for bad in ("/proc/x", "/proc/x/y", tmp_path / "file" / "x", tmp_path / ("x" * 300), "/proc/version", "a\0b"):
        with pytest.raises(BadRequest, match="Cannot write to"):
            output_path(bad)
    with pytest.raises(BadRequest, match="/proc is not writable"):
        output_path("/proc/x")
    for odd in (b"x", 5, None):
        with pytest.raises(BadRequest, match="Invalid path="):
            output_path(odd)  # type: ignore[arg-type]
    assert output_path(tmp_path / "a" / "b", folder=True) and output_path(str(tmp_path / "file"))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "mine")]
    monkeypatch.setattr("replaylens.engine.request.values.free_disk", lambda path: 0)
    with pytest.raises(BadRequest, match="no room left"):
        output_path(tmp_path / "a")


# Before any work


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, no process starts, no model loads and nothing is replayed."""

    def work(*given: Any, **options: Any) -> Any:
        raise AssertionError("work before the gate")

    monkeypatch.setattr(subprocess, "Popen", work)
    monkeypatch.setattr(ProcessPoolExecutor, "submit", work)
    monkeypatch.setattr(engines, "load_model", work)
    monkeypatch.setattr(replayer, "prompt_examples", work)
    monkeypatch.setattr("replaylens.tasks.task.Task.examples", work)


COMMANDS = {
    "doctor --ranks 99999999": "--ranks 99999999 asks for 99,999,999 processes",
    "warm --device cpu --processes 5000": "--processes 5000 asks for 5,000 processes",
    "dump --out OUT --ranks 99": "--ranks 99 asks for 99 processes",
    "dump --out OUT --workers 100000": "--workers 100000 asks for 100,000 processes",
    "dump --out OUT --writers 100000": "--writers 100000 asks for",
    "dump --out /proc/x": "Cannot write to /proc/x: /proc is not writable",
    "dump --out OUT --keep 5": "--keep 5 says how many of --features to store",
    "dump --out /proc/x --ray nowhere.invalid:1": "Cannot write to /proc/x",
    "resample --out /proc/x --prompt A": "Cannot write to /proc/x",
    "resample --out OUT --prompt A --workers 100000": "--workers 100000 asks for",
    "demo --examples 99999999999999999999 --out /proc/x": "--examples 99999999999999999999 takes about 50,000.0 EB of memory",
    "demo --out /proc/x": "Cannot write to /proc/x",
    "train coin-draft --out /proc/x": "Cannot write to /proc/x",
    "replay --n 99999999999999": "--n 99999999999999 takes about",
    "replay --board /proc/x.svg": "Cannot write to /proc/x.svg",
    "tasks show coin --n 99999999999999": "--n 99999999999999 takes about",
    "tasks check coin --n 99999999999999": "--n 99999999999999 takes about",
    "probe OUT --jobs 100000": "--jobs 100000 asks for 100,000 processes",
    "probe OUT --out /proc/x": "Cannot write to /proc/x",
    "probe OUT --resume /proc/x": "Cannot write to /proc/x",
    "probe OUT --save-probes /proc/x": "Cannot write to /proc/x",
    "steer OUT --n 99999999999999": "--n 99999999999999 takes about",
    "steer OUT --placebos 100000000000": "--placebos 100000000000 takes about 100.0 TB of memory",
    "probe OUT --permutations 100000000000000": "--permutations 100000000000000 takes about 800.0 TB of memory",
    "report OUT --out /proc/x.html": "Cannot write to /proc/x.html",
}


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("line", COMMANDS)
def test_commands_ask_first(line: str, tmp_path: Path) -> None:
    """Exit code 2 and one sentence in the words of the shell; nothing is made."""
    done = CliRunner().invoke(app, line.replace("OUT", str(tmp_path / "out")).split())
    assert done.exit_code == 2 and COMMANDS[line] in done.stderr, (done.exit_code, done.stderr, done.exception)
    assert "Traceback" not in done.stderr and done.stderr.strip().count("\n") == 0 and not list(tmp_path.iterdir())


def test_calls_ask_first(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The same gate, in the words of Python."""
    task = tasks.get("coin")()
    coin = Engine.load("coin-plain")
    run = coin.replay(task.examples(2), sites="S")
    examples, plan = task.examples(2) * 20, make_plan(coin, task, 10**12, sites="S")
    request.getfixturevalue("idle")
    for call, error, said in (
        (lambda: Engine.load("coin-plain", ranks=10**9), BadRequest, "ranks=1000000000 asks for 1,000,000,000 processes"),
        (lambda: sweep(run, "face", jobs=10**5), ProbeError, "jobs=100000 asks for 100,000 processes"),
        (lambda: write_dump(coin, plan, tmp_path / "x"), BadRequest, "examples=1000000000000 takes about"),
        (lambda: write_dump(coin, plan, tmp_path / "x", writers=10**5), BadRequest, "writers=100000 asks"),
        (lambda: coin.replay(examples, max_new=513), BadRequest, "max_new=513 exceeds the model's 512 positions"),
        (lambda: make_plan(coin, task, 2, max_new=513), BadRequest, "max_new=513 exceeds"),
        (lambda: make_plan(coin, task, 2, window=513), BadRequest, "window=513 exceeds"),
        (lambda: run.save("/proc/x"), BadRequest, "Cannot write to /proc/x"),
    ):
        with pytest.raises(error, match=said):
            call()
    assert make_plan(coin, task, 2, max_new=512, window=512).max_new == 512, "the control"


@pytest.mark.usefixtures("idle")
def test_draws_ask_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders of rows are held three times; placebos are probes. By hand: 3 x 8 bytes x 12 rows x the permutations."""
    rows = ProbeRows.of_arrays(np.random.default_rng(0).normal(size=(12, 3)), {"label": np.array(["a", "b"] * 6)}, range(12))
    how: dict[str, Any] = dict(positions="all", estimators="ridge", controls=False, folds=2)
    monkeypatch.setattr(machine, "total_memory", lambda: 3 * 8 * 12 * 20)
    assert sweep(rows, "label", permutations=20, **how).lines, "the control"
    monkeypatch.setattr(sweeps, "held_out", lambda *given, **options: pytest.fail("work before the gate"))
    with pytest.raises(ProbeError, match=r"^permutations=21 takes about 6.0 kB of memory, and there are 5.8 kB"):
        sweep(rows, "label", permutations=21, **how)
    with pytest.raises(ProbeError, match="permutations=21 takes about"):
        permutation_test(rows, "label", site="X", position="all", permutations=21, folds=2)
    probe = fit_probe(rows, "label", site="X", position="all", estimator="mass-mean")
    monkeypatch.setattr("replaylens.probes.probe.fit_probe", lambda *given, **options: pytest.fail("work before the gate"))
    with pytest.raises(ProbeError, match=r"count=6 takes about 6\.0 kB"):
        placebo_probes(rows, probe, count=6)


def test_captured_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a run stay in memory: by the prompts of a few examples, counted by hand here."""
    engine, examples = Engine.load("coin-plain"), tasks.get("coin")(flips=3).examples(40)
    longest = max(len(engine.tokens_of(each.prompt)) for each in examples)
    needs = 40 * longest * 128 * 4 * 2  # float32 rows of width 128 at two sites
    monkeypatch.setattr(machine, "total_memory", lambda: needs)
    assert len(engine.replay(examples, sites=["blocks.0.hook_in", "blocks.1.hook_in"], max_new=0)) == 40
    monkeypatch.setattr(machine, "total_memory", lambda: needs // 4)
    with pytest.raises(BadRequest, match="A run of 40 examples takes about"):
        engine.replay(examples, sites=["blocks.0.hook_in", "blocks.1.hook_in"], max_new=0)
