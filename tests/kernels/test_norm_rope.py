"""Norms, rotation and storing in one launch: to the bit, the three one after the other."""

import pytest
import torch

from replaylens.engine.passes import cuda
from replaylens.kernels.norm import norm
from replaylens.kernels.rope import can_fuse, norm_rotate_and_store, rotate_and_store
from replaylens.kernels.shared import PagedRows
from tests.kernels.interpreted import DEVICES, served
from tests.toy_model import random_model

HEADS, KV_HEADS, PAGE = 20, 2, 16


def problem(case, width, rows=7):
    packed = case.randn(rows, HEADS + 2 * KV_HEADS, width, scale=3.0)
    q, k, v = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    pages = torch.zeros(3, 4, dtype=torch.int32)
    pages[:2] = torch.randperm(8, generator=torch.Generator().manual_seed(0)).view(2, 4) + 1  # last sequence: null page
    sequence, position = case.tensor([0, 0, 0, 1, 1, 1, 2][:rows]), case.tensor([0, 3, 17, 5, 40, 63, 1][:rows])
    angle = torch.rand(64, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    table = torch.stack([angle.cos(), angle.sin()], dim=1).to(case.device)
    weights = (case.randn(width, seed=2), case.randn(width, seed=3))
    cache = lambda: torch.zeros(9 * PAGE, KV_HEADS, width, dtype=case.dtype, device=case.device)  # noqa: E731
    return q, k, v, weights, table, PagedRows(sequence, position, pages.to(case.device)), cache


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_one_launch_has_the_bits_of_three(case, same, width, kind):
    q, k, v, weights, table, rows, cache = problem(case, width)
    mine, theirs = (cache(), cache()), (cache(), cache())
    got = norm_rotate_and_store(q, k, v, weights, 1e-6, kind, table, rows, *mine)
    normed = (norm(x, w, None, 1e-6, kind) for x, w in zip((q, k), weights, strict=True))
    same(got, rotate_and_store(*normed, v, table, rows, *theirs))
    same(mine[0], theirs[0])
    same(mine[1], theirs[1])
    assert mine[0].any() and not mine[0][:PAGE].any(), "the null page must stay zero"


def test_a_row_alone_has_the_same_bits(case, same):
    q, k, v, weights, table, rows, cache = problem(case, 128)
    together = norm_rotate_and_store(q, k, v, weights, 1e-6, "rms", table, rows, cache(), cache())
    one = PagedRows(rows.sequence[4:5].clone(), rows.position[4:5].clone(), rows.page_table)
    alone = norm_rotate_and_store(q[4:5], k[4:5], v[4:5], weights, 1e-6, "rms", table, one, cache(), cache())
    same(alone, together[4:5])


def test_other_weights_of_the_keys_reach_the_keys_only(case):
    q, k, v, weights, table, rows, cache = problem(case, 64)
    keys = cache(), cache()
    turned = [
        norm_rotate_and_store(q, k, v, (weights[0], w), 1e-6, "rms", table, rows, c, cache())
        for w, c in ((weights[1], keys[0]), (weights[1] * 2, keys[1]))
    ]
    assert torch.equal(*turned) and not torch.equal(*keys)


def test_what_cannot_be_fused_is_refused(case):
    q, k, v, weights, table, rows, cache = problem(case, 64)
    assert can_fuse(64, table) and not can_fuse(80, table) and not can_fuse(64, table[:, :, :8])
    with pytest.raises(ValueError, match="cannot be fused"):
        norm_rotate_and_store(q, k, v, weights, 1e-6, "rms", table[:, :, :8].contiguous(), rows, cache(), cache())
    with pytest.raises(ValueError, match="weight of k has shape"):
        norm_rotate_and_store(q, k, v, (weights[0], weights[1][:8]), 1e-6, "rms", table, rows, cache(), cache())


@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_that_shows_what_lies_between_has_the_same_bits(device, monkeypatch):
    """Captured norms are launched one by one. Control: without captures, the fused kernel runs."""
    launched = []
    real = cuda.norm_rotate_and_store
    monkeypatch.setattr(cuda, "norm_rotate_and_store", lambda *given: (launched.append(1), real(*given))[1])
    engine = served(device, random_model(num_layers=1, qk_norm=True))
    between = ["blocks.0.attn.q_norm.hook_out", "blocks.0.attn.hook_rot_k"]
    found = {}
    for sites in ((), *((site,) for site in between)):
        launched.clear()
        branch = engine.prompt([3, 1, 4, 1, 5], sites=[*sites, "blocks.0.hook_out"])
        found[sites] = branch.kv().cpu(), branch.activations["blocks.0.hook_out"]
        assert bool(launched) == (not sites)
        branch.release()
        engine.prefix.clear()
    assert all(torch.equal(a, b) for other in found.values() for a, b in zip(other, found[()], strict=True))
