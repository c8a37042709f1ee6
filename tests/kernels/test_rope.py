import pytest
import torch

from replaylens.engine.passes import cuda
from replaylens.kernels import reference
from replaylens.kernels.norm import norm
from replaylens.kernels.rope import can_fuse, norm_rotate_and_store, rotate, rotate_and_store, store
from replaylens.kernels.shared import PagedRows
from tests.devices import covering
from tests.kernels.interpreted import DEVICES, served
from tests.toy_model import random_model

HEADS, KV_HEADS, D_HEAD, PAGE = 6, 2, 24, 16


def problem(case, rotary=16):
    packed = case.randn(9, HEADS + 2 * KV_HEADS, D_HEAD)
    q, k, v = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    pages = torch.zeros(4, 4, dtype=torch.int32)
    pages[:3] = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4) + 1  # last sequence: null page
    sequence, position = case.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3]), case.tensor([0, 3, 17, 5, 40, 2, 31, 32, 1])
    rows = PagedRows(sequence, position, pages.to(case.device))
    angle = torch.rand(64, rotary // 2, generator=torch.Generator().manual_seed(1)) * 6
    table = torch.stack([angle.cos(), angle.sin()], dim=1).to(case.device)
    cache = lambda: torch.zeros(13 * PAGE, KV_HEADS, D_HEAD, dtype=case.dtype, device=case.device)  # noqa: E731
    return q, k, v, rows, table, cache(), cache()


@pytest.mark.parametrize("rotary", [16, D_HEAD])
def test_rotates_and_writes_each_row_to_its_slot(case, same, rotary):
    q, k, v, rows, table, k_cache, v_cache = problem(case, rotary)
    turned_q, turned_k = rotate_and_store(q, k, v, table, rows, k_cache, v_cache), rotate(k, table, rows)
    case.close(turned_q, reference.rotate(q.double(), table.double(), rows.position))
    case.close(turned_k, reference.rotate(k.double(), table.double(), rows.position))
    slot = reference.slots(rows.sequence, rows.position, rows.page_table, PAGE)[:-1]
    same(k_cache[slot], turned_k[:-1])
    same(v_cache[slot], v[:-1])
    assert not k_cache[:PAGE].any() and not v_cache[:PAGE].any(), "the null page must stay zero"
    assert (k_cache.abs().amax((1, 2)) > 0).sum() == len(slot), "nothing else may be written"


def test_rows_stand_alone_and_pieces_agree(case, same):
    q, k, v, rows, table, k_cache, v_cache = problem(case)
    turned, turned_k = rotate_and_store(q, k, v, table, rows, k_cache, v_cache), rotate(k, table, rows)
    same(rotate(q, table, rows), turned)
    one = PagedRows(rows.sequence[4:5].clone(), rows.position[4:5].clone(), rows.page_table)
    same(rotate(q[4:5], table, one), turned[4:5])
    again_k, again_v = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    store(turned_k, v, rows, again_k, again_v)
    same(again_k, k_cache)
    same(again_v, v_cache)


def test_without_a_table_heads_are_only_stored(case, same):
    _, k, v, rows, _, k_cache, v_cache = problem(case)
    store(k, v, rows, k_cache, v_cache)
    same(k_cache[reference.slots(rows.sequence, rows.position, rows.page_table, PAGE)[:-1]], k[:-1])


def test_errors_say_what_is_wrong(case):
    q, k, v, rows, table, k_cache, v_cache = problem(case)
    with pytest.raises(ValueError, match="rotates 64 of 24"):
        rotate(q, table.repeat(1, 1, 4), rows)
    with pytest.raises(ValueError, match="contiguous float32"):
        rotate(q, table.double(), rows)
    with pytest.raises(ValueError, match="k_cache has shape"):
        rotate_and_store(q, k, v, table, rows, k_cache[:, :1], v_cache)


# ---- with norms -------------------------------------------------------------------------------------------------------
# Norms, rotation and storing in one launch: to the bit, the three one after the other.

QUERY_HEADS = 20


def fused_problem(case, width, rows=7):
    packed = case.randn(rows, QUERY_HEADS + 2 * KV_HEADS, width, scale=3.0)
    q, k, v = packed.split([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)
    pages = torch.zeros(3, 4, dtype=torch.int32)
    pages[:2] = torch.randperm(8, generator=torch.Generator().manual_seed(0)).view(2, 4) + 1  # last sequence: null page
    sequence, position = case.tensor([0, 0, 0, 1, 1, 1, 2][:rows]), case.tensor([0, 3, 17, 5, 40, 63, 1][:rows])
    angle = torch.rand(64, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    table = torch.stack([angle.cos(), angle.sin()], dim=1).to(case.device)
    weights = (case.randn(width, seed=2), case.randn(width, seed=3))
    cache = lambda: torch.zeros(9 * PAGE, KV_HEADS, width, dtype=case.dtype, device=case.device)  # noqa: E731
    return q, k, v, weights, table, PagedRows(sequence, position, pages.to(case.device)), cache


@pytest.mark.parametrize("kind, width", covering(["rms", "layer"], [16, 64, 128, 256]))
def test_one_launch_has_the_bits_of_three(case, same, width, kind):
    q, k, v, weights, table, rows, cache = fused_problem(case, width)
    mine, theirs = (cache(), cache()), (cache(), cache())
    got = norm_rotate_and_store(q, k, v, weights, 1e-6, kind, table, rows, *mine)
    normed = (norm(x, w, None, 1e-6, kind) for x, w in zip((q, k), weights, strict=True))
    same(got, rotate_and_store(*normed, v, table, rows, *theirs))
    same(mine[0], theirs[0])
    same(mine[1], theirs[1])
    assert mine[0].any() and not mine[0][:PAGE].any(), "the null page must stay zero"


def test_a_row_alone_has_the_same_bits(case, same):
    q, k, v, weights, table, rows, cache = fused_problem(case, 128)
    together = norm_rotate_and_store(q, k, v, weights, 1e-6, "rms", table, rows, cache(), cache())
    one = PagedRows(rows.sequence[4:5].clone(), rows.position[4:5].clone(), rows.page_table)
    alone = norm_rotate_and_store(q[4:5], k[4:5], v[4:5], weights, 1e-6, "rms", table, one, cache(), cache())
    same(alone, together[4:5])


def test_other_weights_of_the_keys_reach_the_keys_only(case):
    q, k, v, weights, table, rows, cache = fused_problem(case, 64)
    keys = cache(), cache()
    turned = [
        norm_rotate_and_store(q, k, v, (weights[0], w), 1e-6, "rms", table, rows, c, cache())
        for w, c in ((weights[1], keys[0]), (weights[1] * 2, keys[1]))
    ]
    assert torch.equal(*turned) and not torch.equal(*keys)


def test_what_cannot_be_fused_is_refused(case):
    q, k, v, weights, table, rows, cache = fused_problem(case, 64)
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
