"""The benchmarks of trees and rollouts run on a tiny model, with lines for everything they promise to measure."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import rollouts_gpu, trees_gpu


def lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: object, *options: str) -> dict[str, dict[str, object]]:
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--tiny", "--out", str(out), *options])
    module.main()  # type: ignore[attr-defined]
    return {row["what"]: row for row in json.loads(out.read_text())["rows"]}


def test_rollouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = lines(monkeypatch, tmp_path, rollouts_gpu)
    (drawn,) = [row for what, row in found.items() if "rollouts x" in what]
    assert drawn["rollouts"] == 20 and drawn["tokens"] == 120
    assert int(str(drawn["rows"])) > 20, "forks and sentence ends"
    assert found["rollouts that differ alone, in tokens or rows"]["met"]
    assert found["a dump of 3 of them, verified"]["met"]
    assert len(drawn["digest"]) == 64  # type: ignore[arg-type]


def test_a_rollout_with_other_rows_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Control: the comparison alone fails if it draws another rollout."""
    monkeypatch.setattr(rollouts_gpu, "rollout_seed", lambda seed, position, number: seed + 1)
    assert not lines(monkeypatch, tmp_path, rollouts_gpu)["rollouts that differ alone, in tokens or rows"]["met"]


def test_capture_of_trees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = lines(monkeypatch, tmp_path, trees_gpu, "--only", "captured", "--rounds", "1")
    assert list(found) == ["prefix 128, S at 2 layers on the host", "prefix 128, S at 2 layers and Z on the host"]
