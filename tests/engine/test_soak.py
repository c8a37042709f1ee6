"""The soak test stops at a difference, prints how to reproduce it, and sets the exit code."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import soak
from replaylens.engine.engine import Engine
from tests.engine.reference import random_decoder


def processes(monkeypatch: pytest.MonkeyPatch, *codes: int) -> list[dict[str, str]]:
    """Each process exits with the next code after 500 operations. Returns the environments they receive."""
    ends, environments = iter(codes), list[dict[str, str]]()

    def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        environments.append(env)
        return subprocess.CompletedProcess(
            command, next(ends), json.dumps({"operations": 500, "preemptions": 40}), "KV of branch 3"
        )

    monkeypatch.setattr(subprocess, "run", run)
    return environments


def test_it_runs_until_there_are_enough_operations(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environments = processes(monkeypatch, 0, 0, 0)
    assert soak.main(["--operations", "1200", "--seed", "7"]) == 0
    assert [env["OMP_NUM_THREADS"] for env in environments] == ["1", "2", "3"]
    said = capsys.readouterr().out
    assert "process 2: Thinkers, seed 9, 3 threads" in said
    assert "1500 operations from seed 7 on, 120 preemptions: 0 differences" in said


def test_a_difference_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    processes(monkeypatch, 0, 1)
    assert soak.main(["--operations", "9000", "--seed", "7"]) == 1
    said = capsys.readouterr().out
    assert "KV of branch 3" in said and "`python -m bench.soak --seed 7 --only 1` runs it again" in said


def test_other_bits_after_a_restart_are_found() -> None:
    path = [1, 2, 3, 4, 5, 6, 7]
    kv = Engine(random_decoder(soak.Small.config)).prompt(path).kv()
    soak.check(soak.Small, {json.dumps(path): soak.digest(kv)})
    with pytest.raises(AssertionError, match="after a restart"):
        soak.check(soak.Small, {json.dumps(path): soak.digest(kv + 1e-6)})


@pytest.mark.slow
def test_sessions_are_counted_and_left_to_the_next_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(soak.Small, "sessions", 3)
    monkeypatch.setattr(soak.Small, "steps", 8)
    operations, preemptions = soak.work("Small", 1, tmp_path, "cpu")
    assert operations >= 3 and preemptions >= 6
    left = json.loads((tmp_path / "Small.json").read_text())
    assert left
    monkeypatch.setattr(soak.Small, "sessions", 1)
    assert soak.work("Small", 2, tmp_path, "cpu")[0] >= 1 + len(left)


def test_a_soak_without_preemptions_is_no_soak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Negative control: with a large cache no request loses its pages, and the process fails."""
    monkeypatch.setattr(soak.Small, "sessions", 1)
    monkeypatch.setattr(soak.Small, "steps", 3)
    monkeypatch.setattr(soak.Small, "cache_tokens", 4096)
    with pytest.raises(AssertionError, match="only 0 preemptions in 1 sessions"):
        soak.work("Small", 1, tmp_path, "cpu")
