"""The table around a pretrained backbone: the backbone is transferred in pieces without loss, and the job writes its files."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.packed_backbone import BLOCK, OTHERS, WEIGHTS_FILE, pack, unpack
from benchmarks.thinking_backbone import TINY, BackbonePlan, work
from benchmarks.thinking_gpu import Clock, collect
from replaylens.engine.errors import BadWeights
from tests.engine.thinking.pretrained import write_backbone


def quantised(folder: Path) -> dict[str, torch.Tensor]:
    """A folder with matrices as stored in 4-bit and 8-bit files, including a block of zeros and a constant block."""
    random, shape = torch.Generator().manual_seed(0), (6, 4, BLOCK)
    scale, low = (torch.randn(6, 4, 1, generator=random).half().float() for _ in range(2))
    nibbles, bytes_ = torch.randint(16, shape, generator=random), torch.randint(-127, 128, shape, generator=random)
    nibbles[..., 0], nibbles[..., 1], bytes_[..., 0] = 0, 15, 127
    four, eight = nibbles * scale.abs() + low, bytes_ * scale.abs()
    four[0, 0], four[1, 1], eight[0, 0] = 0.0, 0.5, 0.0
    held = {"four": four.flatten(1), "eight": eight.flatten(1), "norm": torch.randn(7, generator=random)}
    folder.mkdir()
    save_file(held, folder / WEIGHTS_FILE)
    for name in OTHERS:
        (folder / name).write_text(name)
    return held


def test_packing_loses_no_bit(tmp_path: Path) -> None:
    held = quantised(tmp_path / "whole")
    pieces = pack(tmp_path / "whole", tmp_path / "packed", largest=700)
    assert len(pieces) > 1 and all(piece.stat().st_size <= 700 for piece in pieces)
    found = load_file(unpack(tmp_path / "packed") / WEIGHTS_FILE)
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name].view(torch.int32), held[name].view(torch.int32)) for name in held)
    assert all((tmp_path / "packed" / name).read_text() == name for name in OTHERS)


def test_what_cannot_be_packed_or_unpacked(tmp_path: Path) -> None:
    held = quantised(tmp_path / "whole")
    pieces = pack(tmp_path / "whole", tmp_path / "packed", largest=700)
    content = pieces[1].read_bytes()
    pieces[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BadWeights, match="are not those"):
        unpack(tmp_path / "packed")
    pieces[1].unlink()
    with pytest.raises(BadWeights, match=r"lacks packed\.1"):
        unpack(tmp_path / "packed")
    held["four"][2, 5] += 1e-3
    save_file(held, tmp_path / "whole" / WEIGHTS_FILE)
    with pytest.raises(BadWeights, match="four does not hold the values"):
        pack(tmp_path / "whole", tmp_path / "other")


@pytest.mark.slow
def test_the_job(tmp_path: Path) -> None:
    backbone, out = str(write_backbone(tmp_path / "backbone")), tmp_path / "out"
    out.mkdir()
    size = {**TINY, "longest": (2,), "width": 160, "most_steps": 2}
    plan = BackbonePlan(seconds=60.0, device="cpu", backbone=backbone, embedded=False, **size)
    clock = Clock(time.time())
    work(plan, 1, clock, out)
    collect(plan, out, clock)
    body = json.loads((out / "thinking-backbone.json").read_text())
    assert {(run["method"], run["N"], run["seed"]) for run in body["runs"]} == set(plan.runs())
    for run in body["runs"]:
        assert run["recipe"]["backbone"] == backbone and run["recipe"]["precision"] == "bf16"
        assert list(map(int, run["curve"])) == plan.lengths(2)
        assert run["steps"] == run["planned"] == 2
