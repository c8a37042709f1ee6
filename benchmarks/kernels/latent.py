"""Canonical latent attention (DeepSeek's 512 + 64 columns, absorbed) against torch's products and softmax on contiguous ones.

    PYTHONPATH=src:. python -m benchmarks.kernels.latent [--heads 16 128]

`of_read` is the time of reading every latent once at the speed of a copy, as a share of ours; `tflops` counts both products.
"""

import argparse

import torch
from torch import Tensor

from benchmarks.kernels.harness import Report, compare, copies, error
from replaylens.kernels import reference
from replaylens.kernels.attention import attention
from replaylens.kernels.launch import PAGE_SIZE
from replaylens.kernels.matmul import head_matmul, head_plan
from replaylens.kernels.shared import PagedRows, plan_tiles, rows_per_tile

RANK, REST, PLAIN, SCALE = 512, 64, 128, 192**-0.5


def latents(sequences: int, keys: int) -> tuple[Tensor, Tensor]:
    """(latents, page table) with pages in random order."""
    pages = -(-keys // PAGE_SIZE)
    table = (torch.randperm(sequences * pages, device="cuda", dtype=torch.int32) + 1).view(sequences, pages)
    cache = torch.randn((sequences * pages + 1) * PAGE_SIZE, 1, RANK + REST, device="cuda", dtype=torch.bfloat16)
    cache[:PAGE_SIZE] = 0
    return cache, table


def contiguous(cache: Tensor, table: Tensor, keys: int) -> Tensor:
    """[sequences, keys, columns]"""
    return cache.view(-1, PAGE_SIZE, RANK + REST)[table.long()].flatten(1, 2)[:, :keys].contiguous()


def by_library(q: Tensor, keys: Tensor, hidden: Tensor | None) -> Tensor:
    """q [sequences, rows * heads, columns]"""
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * SCALE
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return torch.bmm(scores.softmax(-1).to(q.dtype), keys[..., :RANK])


def right(q: Tensor, cache: Tensor, rows: PagedRows, out: Tensor, chosen: list[int]) -> bool:
    """Some rows against float64, and each alone against the batch."""
    index = torch.tensor(chosen, device=q.device)
    sequence, position, values = rows.sequence[index], rows.position[index], cache[..., :RANK]
    wide = (q[index].double(), cache.double(), values.double(), sequence, position, rows.page_table, PAGE_SIZE, SCALE)
    alone = attention(q[index], cache, values, PagedRows(sequence, position, rows.page_table), SCALE)
    return error(out[index], reference.attention(*wide)) < 8e-3 and torch.equal(alone, out[index])


def decode(report: Report, heads: int, sequences: int, keys: int, copied: float) -> None:
    cache, table = latents(sequences, keys)
    sets = [(cache,), *((torch.randn_like(cache),) for _ in range(copies(cache) - 1))]
    q = torch.randn(sequences, heads, RANK + REST, device="cuda", dtype=torch.bfloat16)
    number = torch.arange(sequences, device="cuda", dtype=torch.int32)
    rows = PagedRows(number, torch.full_like(number, keys - 1), table, max_keys=keys)
    ours = lambda cache: attention(q, cache, cache[..., :RANK], rows, SCALE)  # noqa: E731
    check = right(q, cache, rows, ours(cache), [0, sequences - 1])
    times = compare(ours, lambda keys: by_library(q, keys, None), sets, [(contiguous(c, table, keys),) for (c,) in sets])
    floor = sequences * keys * (RANK + REST) * 2 / copied * 1e6
    report.add(f"decode {sequences} x {keys} keys, {heads} heads", check, times, of_read=round(floor / times[0], 3))


def prefill(report: Report, heads: int, length: int) -> None:
    cache, table = latents(1, length)
    q = torch.randn(length, heads, RANK + REST, device="cuda", dtype=torch.bfloat16)
    per_tile = rows_per_tile(heads, 1, RANK, q.dtype, length)
    position = torch.arange(length, device="cuda", dtype=torch.int32)
    tiles = plan_tiles([0] * length, per_tile).cuda()
    rows = PagedRows(torch.zeros_like(position), position, table, tiles, length, per_tile)
    ours = lambda: attention(q, cache, cache[..., :RANK], rows, SCALE)  # noqa: E731
    check = right(q, cache, rows, ours(), [0, length // 2, length - 1])
    keys, flat = contiguous(cache, table, length), q.view(1, length * heads, RANK + REST)
    hidden = (position[None, :] > position[:, None]).repeat_interleave(heads, 0)
    times = compare(ours, lambda: by_library(flat, keys, hidden))
    flops = length * (length + 1) * heads * (2 * RANK + REST)
    report.add(f"prefill {length} rows, {heads} heads", check, times, tflops=round(flops / times[0] / 1e6, 1))


def by_head(report: Report, heads: int, rows: int) -> None:
    """The absorbing product of queries; theirs is the library's batched product."""
    weights = [torch.randn(heads, RANK, PLAIN, device="cuda", dtype=torch.bfloat16) / PLAIN**0.5 for _ in range(8)]
    x = torch.randn(rows, heads, PLAIN, device="cuda", dtype=torch.bfloat16)
    plan = head_plan(rows, heads, x.dtype, x.device)
    ours = lambda w: head_matmul(x, w.transpose(1, 2), plan)  # noqa: E731
    alone = head_matmul(x[:1], weights[0].transpose(1, 2), head_plan(1, heads, x.dtype, x.device))
    check = torch.equal(alone, ours(weights[0])[:1])
    times = compare(ours, lambda w: torch.bmm(x.transpose(0, 1), w.transpose(1, 2)), [(w,) for w in weights])
    report.add(f"by head, {rows} rows, {heads} heads", check, times)


def copy_speed() -> float:
    """Bytes per second that a copy reads and writes."""
    x = torch.empty(1 << 29, device="cuda", dtype=torch.uint8)
    once, _ = compare(lambda: x.clone(), lambda: x.clone())
    return 2 * x.numel() / once * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    asked = parser.parse_args()
    report, copied = Report("latent", __doc__), copy_speed()
    for heads in asked.heads:
        for rows in (1, 64, 512):
            by_head(report, heads, rows)
        for sequences, keys in ((1, 2048), (8, 2048), (64, 2048), (8, 8192)):
            decode(report, heads, sequences, keys, copied)
        for length in (512, 2048):
            prefill(report, heads, length)
    report.save()


if __name__ == "__main__":
    main()
