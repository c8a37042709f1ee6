"""The kernel for many rows on Hopper has the bits of the canonical kernel, which the interpreter can run."""

import pytest
import torch

from replaylens.kernels import attention as attention_module
from replaylens.kernels import prefill as prefill_module
from replaylens.kernels.attention import attention
from replaylens.kernels.gpus import gpu_of
from replaylens.kernels.prefill import MAX_PAIRS, prefill
from replaylens.kernels.shared import PagedRows, plan_tiles

PAGE = 16


def made(lengths, heads, kv_heads, d_head, dtype, device="cuda", first=0, spare_tiles=0):
    """(q, k, v, rows): all positions from `first` on of sequences whose pages lie anywhere. Unwritten slots hold NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads + d_head)
    pages = [-(-n // PAGE) for n in lengths]
    free = (torch.randperm(sum(pages), generator=generator) + 1).to(torch.int32)
    table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32)
    k, v = (torch.randn((sum(pages) + 1) * PAGE, kv_heads, d_head, generator=generator) for _ in range(2))
    k[:PAGE], v[:PAGE] = 0, 0
    for s, (n, part) in enumerate(zip(lengths, free.split(pages), strict=True)):
        table[s, : len(part)] = part
        stale = int(part[-1]) * PAGE + torch.arange((n - 1) % PAGE + 1, PAGE)
        k[stale], v[stale] = float("nan"), float("nan")
    sequences = [s for s, n in enumerate(lengths) for _ in range(min(first, n - 1), n)]
    positions = [p for n in lengths for p in range(min(first, n - 1), n)]
    per_tile = MAX_PAIRS // (heads // kv_heads)
    tiles = plan_tiles(sequences, per_tile)
    tiles = torch.cat([tiles, torch.zeros(spare_tiles, 2, dtype=torch.int32)])
    index = lambda x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    rows = PagedRows(index(sequences), index(positions), table.to(device), tiles.to(device), max(lengths), per_tile)
    q = 2 * torch.randn(len(sequences), heads, d_head, generator=generator)
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "lengths", "first", "heads", "kv_heads", "d_head", "softcap", "window"),
    [
        (torch.bfloat16, [2048], 0, 32, 8, 128, 0.0, 0),
        (torch.bfloat16, [1300, 9, 600, 1, 64], 0, 32, 8, 128, 0.0, 0),
        (torch.bfloat16, [3373], 3333, 32, 8, 128, 0.0, 0),
        (torch.bfloat16, [1701, 1500], 1000, 8, 2, 128, 0.0, 600),
        (torch.float16, [1500, 300], 0, 14, 2, 64, 5.0, 37),
    ],
)
def test_same_bits_as_the_canonical_kernel(same, dtype, lengths, first, heads, kv_heads, d_head, softcap, window):
    q, k, v, rows = made(lengths, heads, kv_heads, d_head, dtype, first=first, spare_tiles=3)
    options = dict(softcap=softcap, window=window)
    want = attention(q, k, v, rows, 0.1, specialised=False, **options)
    if not gpu_of(q.device).specialises:  # another GPU, or its facts
        with pytest.raises(ValueError, match="specialised=True needs a Hopper GPU"):
            attention(q, k, v, rows, 0.1, specialised=True, **options)
        return
    for _ in range(2):  # a race would show as a difference between runs
        out = torch.full_like(q, float("nan"))
        same(attention(q, k, v, rows, 0.1, out=out, specialised=True, **options), want)


@pytest.mark.gpu
def test_many_rows_choose_it_and_few_do_not(monkeypatch, same):
    ran = []
    monkeypatch.setattr(attention_module, "prefill", lambda *given: (ran.append(1), prefill(*given)))
    for length, wanted in ((2048, 1), (100, 0)):
        ran.clear()
        q, k, v, rows = made([length], 32, 8, 128, torch.bfloat16)
        same(attention(q, k, v, rows, 0.1), attention(q, k, v, rows, 0.1, split=False))
        assert len(ran) == (wanted if gpu_of(q.device).specialises else 0)


@pytest.mark.gpu
def test_another_split_gives_other_bits(monkeypatch):
    """Negative control: the comparison sees a changed order of summation."""
    q, k, v, rows = made([1500], 32, 8, 128, torch.bfloat16)
    if not gpu_of(q.device).specialises:
        assert not attention_module.can_prefill(q, k, v, MAX_PAIRS, PAGE, 64, 512)
        return
    want, out = attention(q, k, v, rows, 0.1, specialised=False), torch.empty_like(q)
    monkeypatch.setattr(prefill_module, "KV_SPLIT", 256)
    places = (rows.tiles, rows.sequence, rows.position, rows.page_table)
    prefill(q, k, v, out, *places, 0.1 * 1.4426950408889634, 0.0, 0, PAGE)
    assert not torch.equal(out, want)
    assert (out - want).norm() < 0.02 * want.norm()


def test_refuses_what_it_cannot_compute(case):
    q, k, v, rows = made([20], 4, 2, 64, torch.float32, case.device)
    with pytest.raises(ValueError, match=r"specialised=True needs a Hopper GPU, .* q is torch\.float32 \(20, 4, 64\)"):
        attention(q, k, v, rows, 0.1, specialised=True)
