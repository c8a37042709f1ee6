"""Canonical paged attention against torch's attention on contiguous keys, 32 heads over 8, head size 128, bf16."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.harness import Report, compare, copies, error
from replaylens.kernels import reference
from replaylens.kernels.attention import Workspace, attention
from replaylens.kernels.launch import KV_SPLIT, PAGE_SIZE
from replaylens.kernels.shared import PagedRows, plan_tiles, rows_per_tile

HEADS, KV_HEADS, D_HEAD, SCALE = 32, 8, 128, 128**-0.5


def cache(sequences: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """(k, v, page table) with pages in random order."""
    pages = -(-keys // PAGE_SIZE)
    table = (torch.randperm(sequences * pages, device="cuda", dtype=torch.int32) + 1).view(sequences, pages)
    k = torch.randn((sequences * pages + 1) * PAGE_SIZE, KV_HEADS, D_HEAD, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    k[:PAGE_SIZE], v[:PAGE_SIZE] = 0, 0
    return k, v, table


def contiguous(k: Tensor, table: Tensor, keys: int) -> Tensor:
    """[sequences, kv_heads, keys, d_head], what torch wants."""
    return k.view(-1, PAGE_SIZE, KV_HEADS, D_HEAD)[table.long()].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous()


def right(q: Tensor, k: Tensor, v: Tensor, rows: PagedRows, out: Tensor, chosen: list[int]) -> bool:
    """Some rows against float64, and each alone against the batch."""
    index = torch.tensor(chosen, device=q.device)
    sequence, position = rows.sequence[index], rows.position[index]
    want = reference.attention(q[index].double(), k.double(), v.double(), sequence, position, rows.page_table, PAGE_SIZE, SCALE)
    alone = attention(q[index], k, v, PagedRows(sequence, position, rows.page_table), SCALE)
    return error(out[index], want) < 8e-3 and torch.equal(alone, out[index])


def decode(report: Report, sequences: int, keys: int) -> None:
    k, v, table = cache(sequences, keys)
    sets = [(k, v), *((torch.randn_like(k), torch.randn_like(v)) for _ in range(copies(k, v) - 1))]
    q = torch.randn(sequences, HEADS, D_HEAD, device="cuda", dtype=torch.bfloat16)
    number = torch.arange(sequences, device="cuda", dtype=torch.int32)
    rows = PagedRows(number, torch.full_like(number, keys - 1), table, max_keys=keys)
    out = torch.full_like(q, float("nan"))
    space = Workspace.of(sequences, KV_HEADS, -(-keys // KV_SPLIT), 16, D_HEAD, q.device)
    check = right(q, k, v, rows, attention(q, k, v, rows, SCALE, out=out), [0, sequences - 1])
    times = compare(
        lambda k, v: attention(q, k, v, rows, SCALE, out=out, workspace=space),
        lambda k, v: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True),
        sets,
        [(contiguous(k, table, keys), contiguous(v, table, keys)) for k, v in sets],
    )
    report.add(f"decode {sequences} x {keys} keys", check, times)


def prefill(report: Report, sequences: int, length: int) -> None:
    k, v, table = cache(sequences, length)
    numbers = [s for s in range(sequences) for _ in range(length)]
    q = torch.randn(len(numbers), HEADS, D_HEAD, device="cuda", dtype=torch.bfloat16)
    per_tile = rows_per_tile(HEADS, KV_HEADS, D_HEAD, q.dtype, length)
    rows = PagedRows(
        torch.tensor(numbers, device="cuda", dtype=torch.int32),
        torch.arange(length, device="cuda", dtype=torch.int32).repeat(sequences),
        table,
        plan_tiles(numbers, per_tile).cuda(),
        length,
        per_tile,
    )
    out = torch.full_like(q, float("nan"))
    chosen = [0, length // 2, length - 1, len(numbers) - 1]
    check = right(q, k, v, rows, attention(q, k, v, rows, SCALE, out=out), chosen)
    flat = q.view(sequences, length, HEADS, D_HEAD).transpose(1, 2).contiguous()
    keys, values = contiguous(k, table, length), contiguous(v, table, length)
    times = compare(
        lambda: attention(q, k, v, rows, SCALE, out=out),
        lambda: F.scaled_dot_product_attention(flat, keys, values, is_causal=True, enable_gqa=True),
    )
    report.add(f"prefill {sequences} x {length} rows", check, times)


def main() -> None:
    report = Report("attention", __doc__)
    for sequences, keys in ((1, 512), (1, 2048), (8, 2048), (64, 512), (64, 2048), (1, 8192), (8, 8192)):
        decode(report, sequences, keys)
    for sequences, length in ((1, 512), (4, 512), (1, 2048), (1, 4096), (1, 8192), (1, 32768)):
        prefill(report, sequences, length)
    report.save()


if __name__ == "__main__":
    main()
