"""The patch grid of the GPU benchmark, tiny and on the CPU: it runs, checks its cells, and writes its measurements."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import workbench_gpu


def rows(out: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    given = ["workbench_gpu", "--tiny", "--positions", "6", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    workbench_gpu.main()
    found: list[dict[str, object]] = json.loads(out.read_text())["rows"]
    return found


def test_grid_and_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, cells, gradients, _ = rows(tmp_path / "out.json", monkeypatch)
    assert grid["cells"] == 3 * 6 and grid["met"] and cells["met"] and cells["apart"] == 0 and gradients["certified"]


def test_a_cell_with_other_bits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = workbench_gpu.grid
    monkeypatch.setattr(workbench_gpu, "grid", lambda *given: torch.nextafter(honest(*given), torch.tensor(9.0)))
    _, cells, *_ = rows(tmp_path / "out.json", monkeypatch)
    assert not cells["met"] and cells["apart"] == workbench_gpu.CHECKED
