"""Dense products of few rows, Qwen3-30B-A3B shapes in bf16: every tile against one read of the weights.

    PYTHONPATH=src:. python -m benchmarks.kernels.few_rows [--compile I/N] [--rows 1 8]

Before a tile is timed, its bits are compared with those of the tile that the launch table chooses. Kernels are compiled by
processes side by side first. Attention of one row follows, by tile and schedule.
"""

import argparse
import time

import torch
from torch import Tensor

from benchmarks.kernels.grouped import bandwidth, microseconds
from benchmarks.kernels.harness import compile_side_by_side, copies
from replaylens.kernels.attention import Workspace, attention
from replaylens.kernels.launch import PAGE_SIZE, AttentionTile, GemmTile, gemm_tile
from replaylens.kernels.matmul import matmul
from replaylens.kernels.shared import PagedRows

SHAPES = {"queries, keys, values": (2048, 5120), "output of attention": (4096, 2048), "router": (2048, 128)}
WIDE = [
    (16, 32, 256, 4, 5), (16, 32, 128, 4, 6), (16, 32, 128, 2, 6), (16, 32, 256, 2, 5), (16, 16, 256, 2, 6),
    (16, 64, 128, 4, 5), (16, 64, 128, 4, 6), (16, 64, 256, 4, 3), (64, 32, 128, 4, 5), (64, 32, 256, 4, 4),
    (64, 64, 128, 4, 4),
]  # fmt: skip
NARROW = [
    (16, 16, 256, 2, 5), (16, 16, 256, 2, 8), (16, 16, 512, 2, 4), (16, 16, 128, 2, 8), (16, 16, 256, 1, 5),
    (16, 32, 256, 4, 5), (16, 32, 512, 4, 3), (16, 32, 256, 2, 5), (64, 16, 256, 4, 4), (64, 16, 128, 4, 8),
    (64, 32, 256, 4, 4),
]  # fmt: skip


def tiles(columns: int) -> list[GemmTile]:
    """Every entry loaded by pointers, and by the copy engine."""
    entries = WIDE if columns > 4000 else NARROW
    return [GemmTile(*entry, persistent=copied) for entry in entries for copied in (False, True)]


def problem(rows: int, depth: int, columns: int) -> tuple[Tensor, list[Tensor]]:
    """x, and weights that do not fit into the cache together."""
    generator = torch.Generator("cuda").manual_seed(columns)
    new = lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    first = new(depth, columns) / depth**0.5
    return new(rows, depth), [first, *(first.clone() for _ in range(copies(first) - 1))]


def compile_all(part: str) -> None:
    """Compile every `n`-th variant from the `i`-th on."""
    first, step = map(int, part.split("/"))
    wanted = [(shape, tile) for shape in SHAPES.values() for tile in tiles(shape[1])]
    for (depth, columns), tile in wanted[first::step]:
        x = torch.zeros(1, depth, device="cuda", dtype=torch.bfloat16)
        try:
            matmul(x, torch.zeros(depth, columns, device="cuda", dtype=torch.bfloat16), tile=tile)
        except Exception as error:
            print(f"cannot compile {tile}: {type(error).__name__} {str(error)[:120]}", flush=True)


def measure(rows: int, speed: float) -> None:
    for name, (depth, columns) in SHAPES.items():
        x, weights = problem(rows, depth, columns)
        chosen, want = gemm_tile(rows, depth, columns, x.dtype), matmul(x, weights[0])
        floor = depth * columns * 2 / speed * 1e6
        print(f"{name}, {rows} rows: floor {floor:.1f} us, chosen {short(chosen)}", flush=True)
        found = []
        for tile in tiles(columns):
            try:
                same = torch.equal(matmul(x, weights[0], tile=tile), want)
                found.append((microseconds(lambda w, x=x, t=tile: matmul(x, w, tile=t), [(w,) for w in weights]), tile, same))
            except Exception as error:
                print(f"  {short(tile)}: {type(error).__name__} {str(error)[:100]}", flush=True)
        for us, tile, same in sorted(found, key=lambda line: line[0]):
            print(f"  {us:8.2f} us  {floor / us:5.2f} of floor  {short(tile):20s} same={same}", flush=True)


def attend(part: str | None) -> None:
    """Attention of one row over few keys, by tile and schedule. part: I/N, only compile"""
    first, step = map(int, part.split("/")) if part else (0, 1)
    heads, kv_heads, width = 32, 4, 128
    table = torch.arange(1, 65, dtype=torch.int32, device="cuda").view(1, -1)
    k = torch.randn(65 * PAGE_SIZE, kv_heads, width, dtype=torch.bfloat16, device="cuda")
    v, q = torch.randn_like(k), torch.randn(1, heads, width, dtype=torch.bfloat16, device="cuda")
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    options = [(w, s, split) for w in (1, 2, 4, 8) for s in (1, 2, 3, 5) for split in (False, True)]
    for keys in (140, 1000):
        rows = PagedRows(zero, zero + keys - 1, table, max_keys=1024)
        space = Workspace.of(1, kv_heads, 2, 16, width, q.device)
        want, found = attention(q, k, v, rows, width**-0.5), []
        for warps, stages, split in options[first::step]:
            tile = AttentionTile(16, warps, stages)
            run = lambda t=tile, s=split, r=rows, w=space: attention(q, k, v, r, 0.088, workspace=w, tile=t, split=s)  # noqa: E731
            same = torch.equal(attention(q, k, v, rows, width**-0.5, workspace=space, tile=tile, split=split), want)
            if part is None:
                found.append((microseconds(run, [()] * 16), warps, stages, split, same))
        if part is None:
            print(f"attention of one row over {keys} keys", flush=True)
        for us, warps, stages, split, same in sorted(found)[:14]:
            print(f"  {us:8.2f} us  warps={warps} stages={stages} split={split} same={same}", flush=True)


def short(tile: GemmTile) -> str:
    return f"{tile.rows}x{tile.columns}x{tile.depth}w{tile.warps}s{tile.stages}{'c' if tile.persistent else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", help="I/N: only compile every N-th variant from the I-th on")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args()
    if given.compile:
        compile_all(given.compile)
        attend(given.compile)
        return
    begin = time.perf_counter()
    compile_side_by_side("benchmarks.kernels.few_rows")
    speed = bandwidth()
    print(f"copy: {speed * 1e-12:.2f} TB/s, {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for rows in given.rows:
        measure(rows, speed)
    attend(None)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
