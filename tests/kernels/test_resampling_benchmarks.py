"""The benchmarks of trees and rollouts run on a tiny model, with lines for everything they promise to measure."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import resampling
from benchmarks.harness import CASES, run


def lines(tmp_path: Path, name: str, **given: Any) -> dict[str, dict[str, Any]]:
    out = tmp_path / "result.json"
    assert run(CASES[name], quick=True, out=out, given=given)
    return {row["what"]: row for row in json.loads(out.read_text())["rows"]}


def test_rollouts(tmp_path: Path) -> None:
    found = lines(tmp_path, "rollouts-gpu")
    (drawn,) = [row for what, row in found.items() if "rollouts x" in what]
    assert drawn["rollouts"] == 20 and drawn["tokens"] == 120
    assert drawn["rows"] > 20, "forks and sentence ends"
    assert found["rollouts that differ alone, in tokens or rows"]["met"]
    assert found["a dump of 3 of them, verified"]["met"]
    assert len(drawn["digest"]) == 64


def test_a_rollout_with_other_rows_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Control: the comparison alone fails if it draws another rollout."""
    monkeypatch.setattr(resampling, "rollout_seed", lambda seed, position, number: seed + 1)
    assert not lines(tmp_path, "rollouts-gpu")["rollouts that differ alone, in tokens or rows"]["met"]


def test_capture_of_trees(tmp_path: Path) -> None:
    found = lines(tmp_path, "trees-gpu", parts=("captured",))
    kinds = ("S at 2 layers", "S at 2 layers and Z")
    asked = [f"prefix 128, {kind} on the host{rest}" for kind in kinds for rest in (", time", "")]
    assert list(found) == ["prefix 128", *asked]
