"""Benchmarks of a device on tiny models: the library's baseline computes the decoder's function, and no line is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import library, resampling
from bench.harness import CASES, run
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps

CONFIG = ModelConfig(2, 32, 4, 2, 16, 48, 97, 64, rotary_dim=16, tied_embeddings=False)
COUNT, LENGTH = 3, 21


@pytest.mark.slow
def test_passes_and_steps(case):
    meant = Decoder(CONFIG).initialize(0).requires_grad_(False).double()
    model = Decoder(CONFIG).initialize(0).requires_grad_(False).to(case.device, case.dtype)
    for table, own in zip(model.buffers(), Decoder(CONFIG).buffers(), strict=True):
        table.data = own.to(case.device)  # the rotary table stays in float32
    tokens = case.ints(COUNT, LENGTH, below=97, dtype=torch.int64)
    positions = torch.arange(LENGTH).repeat(COUNT)
    want = meant(tokens.cpu().flatten(), positions, SequenceOps([LENGTH] * COUNT)).unflatten(0, (COUNT, LENGTH))
    attend = {rows: next(iter(library.ways(rows, "cpu").values())) for rows in (1, LENGTH, 15)}
    cache = library.ContiguousCache(CONFIG, COUNT, LENGTH, model.embed)

    def rows(first: int, end: int) -> torch.Tensor:
        ops = library.library_cuda_ops()(cache, end - first, end, attend[end - first])
        return model(tokens[:, first:end].flatten(), ops.positions, ops).unflatten(0, (COUNT, end - first)).cpu()

    case.close(rows(0, LENGTH), want, slack=4)
    cache.data.zero_()
    case.close(rows(0, 15), want[:, :15], slack=4)
    for position in range(15, LENGTH):
        case.close(rows(position, position + 1), want[:, position : position + 1], slack=4)
    assert not cache.data[:, :, : library.PAGE].any(), "page 0 is not written"


# ---- resampling -------------------------------------------------------------------------------------------------------
# The benchmarks of trees and rollouts run on a tiny model, with lines for everything they promise to measure.


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
