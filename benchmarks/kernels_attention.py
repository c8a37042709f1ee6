"""Canonical paged attention on a GPU against torch on contiguous keys, bfloat16."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Line, Lines, case
from benchmarks.kernels import KERNEL, against, copies, error, randn

HEADS, KV_HEADS, D_HEAD, SCALE = 32, 8, 128, 128**-0.5


def paged(sequences: int, keys: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """(rows of a cache, page table) with pages in random order; page 0 is empty."""
    from replaylens.kernels.launch import PAGE_SIZE

    pages = -(-keys // PAGE_SIZE)
    table = (torch.randperm(sequences * pages, device="cuda", dtype=torch.int32) + 1).view(sequences, pages)
    rows = randn((sequences * pages + 1) * PAGE_SIZE, heads, width)
    rows[:PAGE_SIZE] = 0
    return rows, table


def cache(sequences: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """(k, v, page table)."""
    from replaylens.kernels.launch import PAGE_SIZE

    k, table = paged(sequences, keys, KV_HEADS, D_HEAD)
    v = torch.randn_like(k)
    v[:PAGE_SIZE] = 0
    return k, v, table


def contiguous(x: Tensor, table: Tensor, keys: int) -> Tensor:
    """[sequences, kv_heads, keys, width], what torch wants."""
    from replaylens.kernels.launch import PAGE_SIZE

    return x.view(-1, PAGE_SIZE, *x.shape[1:])[table.long()].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous()


def prompt_rows(sequences: int, length: int, table: Tensor, heads: tuple[int, int], width: int) -> Any:
    """`PagedRows` of whole prompts, with the tiles of the engine."""
    from replaylens.kernels.shared import PagedRows, plan_tiles, rows_per_tile

    numbers = [s for s in range(sequences) for _ in range(length)]
    per_tile = rows_per_tile(*heads, width, torch.bfloat16, length)
    position = torch.arange(length, device="cuda", dtype=torch.int32).repeat(sequences)
    owner = torch.tensor(numbers, device="cuda", dtype=torch.int32)
    return PagedRows(owner, position, table, plan_tiles(numbers, per_tile).cuda(), length, per_tile)


def last_rows(sequences: int, keys: int, table: Tensor) -> Any:
    """`PagedRows` of one new row of every sequence."""
    from replaylens.kernels.shared import PagedRows

    number = torch.arange(sequences, device="cuda", dtype=torch.int32)
    return PagedRows(number, torch.full_like(number, keys - 1), table, max_keys=keys)


def right(q: Tensor, k: Tensor, v: Tensor, rows: Any, scale: float, out: Tensor, chosen: list[int]) -> bool:
    """Some rows against float64, and each alone against the batch."""
    from replaylens.kernels import reference
    from replaylens.kernels.attention import attention
    from replaylens.kernels.launch import PAGE_SIZE
    from replaylens.kernels.shared import PagedRows

    index = torch.tensor(chosen, device=q.device)
    sequence, position = rows.sequence[index], rows.position[index]
    wide = (q[index].double(), k.double(), v.double(), sequence, position, rows.page_table, PAGE_SIZE, scale)
    alone = attention(q[index], k, v, PagedRows(sequence, position, rows.page_table), scale)
    return error(out[index], reference.attention(*wide)) < 8e-3 and torch.equal(alone, out[index])


@case("kernels-attention", **KERNEL)
def attention_(
    decoded: tuple[tuple[int, int], ...] = ((1, 512), (1, 2048), (8, 2048), (64, 512), (64, 2048), (1, 8192), (8, 8192)),
    prompts: tuple[tuple[int, int], ...] = ((1, 512), (4, 512), (1, 2048), (1, 4096), (1, 8192), (1, 32768)),
) -> Lines:
    """Canonical paged attention against torch's attention on contiguous keys, 32 heads over 8, head size 128, bf16."""
    for sequences, keys in decoded:
        yield decode(sequences, keys)
    for sequences, length in prompts:
        yield prefill(sequences, length)


def decode(sequences: int, keys: int) -> Line:
    from replaylens.kernels.attention import Workspace, attention
    from replaylens.kernels.launch import KV_SPLIT

    k, v, table = cache(sequences, keys)
    sets = [(k, v), *((torch.randn_like(k), torch.randn_like(v)) for _ in range(copies(k, v) - 1))]
    q, rows = randn(sequences, HEADS, D_HEAD), last_rows(sequences, keys, table)
    out = torch.full_like(q, float("nan"))
    space = Workspace.of(sequences, KV_HEADS, -(-keys // KV_SPLIT), 16, D_HEAD, q.device)
    check = right(q, k, v, rows, SCALE, attention(q, k, v, rows, SCALE, out=out), [0, sequences - 1])
    return against(
        f"decode {sequences} x {keys} keys",
        check,
        lambda k, v: attention(q, k, v, rows, SCALE, out=out, workspace=space),
        lambda k, v: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True),
        sets,
        [(contiguous(k, table, keys), contiguous(v, table, keys)) for k, v in sets],
    )


def prefill(sequences: int, length: int) -> Line:
    from replaylens.kernels.attention import attention

    k, v, table = cache(sequences, length)
    q, rows = randn(sequences * length, HEADS, D_HEAD), prompt_rows(sequences, length, table, (HEADS, KV_HEADS), D_HEAD)
    out = torch.full_like(q, float("nan"))
    chosen = [0, length // 2, length - 1, len(q) - 1]
    check = right(q, k, v, rows, SCALE, attention(q, k, v, rows, SCALE, out=out), chosen)
    flat = q.view(sequences, length, HEADS, D_HEAD).transpose(1, 2).contiguous()
    keys, values = contiguous(k, table, length), contiguous(v, table, length)
    return against(
        f"prefill {sequences} x {length} rows",
        check,
        lambda: attention(q, k, v, rows, SCALE, out=out),
        lambda: F.scaled_dot_product_attention(flat, keys, values, is_causal=True, enable_gqa=True),
    )
