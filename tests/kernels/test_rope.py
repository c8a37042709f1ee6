import pytest
import torch

from replaylens.kernels import reference
from replaylens.kernels.rope import rotate, rotate_and_store, store
from replaylens.kernels.shared import PagedRows

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
