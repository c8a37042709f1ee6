"""Ranks that send by NCCL, on one GPU: two hosts, as far as NCCL can see."""

import time

import pytest
import torch

from bench.hybrids_ranks_gpu import by_nccl
from replaylens.engine.engine import Engine
from replaylens.engine.errors import RankFailed
from tests.families import hugging_face

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nccl_moves_no_bit_and_a_killed_rank_is_named(dtype: torch.dtype) -> None:
    """Rows go from process to process by NCCL. A rank that is killed costs neither the process of rank 0 nor a token."""
    path, model = list(range(2, 60)), hugging_face("llama")
    one = Engine.load(model, device="cuda", dtype=dtype).prompt(path, sites="STC").generate(12)
    with by_nccl():
        engine = Engine.load(model, device="cuda", dtype=dtype, ranks=2, rank_timeout=60.0)
    assert engine.ranks._followers.wire.device.type == "cuda", "control: tensors do not go by gloo"
    branch = engine.prompt(path, sites="STC").generate(6)
    engine.ranks._followers.processes[0].kill()
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 2 ended"):
        branch.generate(6)
    assert time.monotonic() - began < 30 and branch.tokens == one.tokens[: len(branch.tokens)]
    with by_nccl():
        engine.ranks.restart()
    branch.generate(6)
    assert branch.tokens == one.tokens and torch.equal(branch.kv(), one.kv())
    assert all(torch.equal(branch.activations[site], rows) for site, rows in one.activations.items())
    engine.ranks.close()
