"""Tiles of products with few rows, Qwen3-30B-A3B shapes in bfloat16: every tile against one read of the weights.

Before a tile is timed, its bits are compared. Kernels are compiled by processes side by side first.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Line, Lines, case
from benchmarks.kernels import Replay, copies, copy_speed, randn

EXPERTS, TOP, WIDTH, HIDDEN = 128, 8, 2048, 768
COMPILERS = 12
"""processes that compile variants"""
UP = {
    16: [
        (16, 128, 4, 6), (16, 256, 4, 4), (32, 64, 4, 6), (32, 128, 4, 4), (32, 128, 4, 5), (32, 128, 2, 4), (32, 256, 4, 3),
        (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 8, 3), (128, 64, 8, 3),
    ],
    32: [(32, 128, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3)],
    64: [(32, 128, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3)],
    128: [(64, 64, 8, 3), (64, 64, 8, 4), (128, 64, 8, 3)],
}  # fmt: skip
DOWN = {
    16: [
        (32, 64, 4, 6), (32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3),
        (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3),
    ],
    32: [(64, 128, 4, 4), (64, 64, 4, 4), (128, 64, 4, 4)],
    64: [(64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4)],
    128: [(128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 3)],
}  # fmt: skip
HEIGHTS = {1: (16,), 8: (16,), 64: (16,), 512: (16, 32, 64), 2048: (64, 128)}
"""rows -> the rows per tile that are worth a try"""
DENSE = {"queries, keys, values": (2048, 5120), "output of attention": (4096, 2048), "router": (2048, 128)}
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
Tile = Any
"""`kernels.launch.GemmTile`, which needs triton"""


def tiles(entries: list[tuple[int, ...]], *rows: int) -> list[Tile]:
    """Every entry loaded by pointers, and by the copy engine."""
    from replaylens.kernels.launch import GemmTile

    return [GemmTile(*rows, *entry, persistent=copied) for entry in entries for copied in (False, True)]


def short(tile: Tile) -> str:
    return f"{tile.rows}x{tile.columns}x{tile.depth}w{tile.warps}s{tile.stages}{'c' if tile.persistent else ''}"


def compile_side_by_side(work: Callable[[int, int], None]) -> None:
    """Run `work(i, n)` in n processes, which fill Triton's cache. A failure shows when it is measured."""
    code = f"from {work.__module__} import {work.__name__} as f; f({{}}, {COMPILERS})"
    running = [subprocess.Popen([sys.executable, "-c", code.format(i)]) for i in range(COMPILERS)]
    for process in running:
        process.wait()


def timed(what: str, call: Callable[[], tuple[bool, Replay]], floor: float | None = None, **more: Any) -> Line:
    """One call against `floor`, the seconds of one read of its weights. A tile that does not compile says why."""
    try:
        same, graph = call()
        taken = graph.seconds()
    except Exception as error:
        return Line(what, numbers={**more, "failed": f"{type(error).__name__} {str(error)[:100]}"})
    share = None if floor is None else floor / taken
    return Line(what, ratio=share, check=same, numbers={"us": 1e6 * taken, "same": same, **more})


# Grouped products


class Problem:
    """Weights of one layer, and rows whose experts take turns, so that weights come from memory."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator("cuda").manual_seed(rows)
        new = lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.rows = rows
        self.up, self.down = new(EXPERTS, WIDTH, 2 * HIDDEN) / WIDTH**0.5, new(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5
        self.x = new(rows, WIDTH)
        if rows == 1:  # sixteen choices without a common expert
            shuffled = torch.randperm(EXPERTS, generator=generator, device="cuda").view(-1, 1, TOP)
            self.chosen = list(shuffled.sort(dim=-1).values)
        else:
            scores = torch.rand(2, rows, EXPERTS, generator=generator, device="cuda")
            self.chosen = list(scores.topk(TOP, dim=-1).indices.sort(dim=-1).values)
        self.active = sum(len(chosen.unique()) for chosen in self.chosen) / len(self.chosen)

    def plans(self, height: int) -> list[Any]:
        from replaylens.kernels.route import plan

        return [plan(chosen, EXPERTS, height) for chosen in self.chosen]

    def by_expert(self, x: Tensor, product: Callable[[Tensor, int], Tensor], pairs: bool) -> Tensor:
        """What the grouped product of the first choice must be: one product per expert."""
        chosen, out = self.chosen[0].flatten(), None
        for expert in chosen.unique().tolist():
            mine = (chosen == expert).nonzero().flatten()
            found = product(x[mine if pairs else mine // TOP], expert)
            out = found.new_full((len(chosen), found.shape[1]), float("nan")) if out is None else out
            out[mine] = found
        assert out is not None
        return out

    def run(self, what: str, tile: Tile, made: Any, hidden: Tensor) -> Tensor:
        from replaylens.kernels.grouped import grouped_matmul

        if what == "up":
            return grouped_matmul(self.x, self.up, None, made, TOP, "silu", True, tile)
        return grouped_matmul(hidden, self.down, None, made, 1, tile=tile)


def variants(rows: int) -> Iterator[tuple[str, Tile]]:
    for height in HEIGHTS[rows]:
        yield from (("up", tile) for tile in tiles(UP[height], height))
        yield from (("down", tile) for tile in tiles(DOWN[height], height))


def compile_grouped(first: int, step: int) -> None:
    """Compile every `step`-th variant from the `first` on, each in the forms with and without a plan."""
    problems = {rows: Problem(rows) for rows in (1, 8)}
    wanted = {(what, tile, 8) for rows in HEIGHTS if rows > 1 for what, tile in variants(rows)}
    for what, tile, rows in sorted(wanted | {(w, t, 1) for w, t in variants(1)}, key=repr)[first::step]:
        try:
            problems[rows].run(what, tile, problems[rows].plans(tile.rows)[0], randn(rows * TOP, HIDDEN))
        except Exception as error:
            print(f"cannot compile {what} {tile}: {type(error).__name__} {str(error)[:120]}", flush=True)


@case("kernels-grouped", needs="gpu", clock="device", unit="us")
def grouped(rows: tuple[int, ...] = tuple(HEIGHTS)) -> Lines:
    """Canonical grouped products of a mixture of experts, every tile against one read of the weights at the speed of a copy
    (ratio), with the bits of `matmul` and `activation` of every expert's rows; routing, plan and sum; and the library's grouped
    product on rows that are sorted already."""
    from replaylens.kernels.matmul import matmul
    from replaylens.kernels.norm import activation

    compile_side_by_side(compile_grouped)
    speed = copy_speed()
    for count in rows:
        problem = Problem(count)
        up = problem.by_expert(problem.x, lambda x, e: activation(matmul(x, problem.up[e]), "silu", True), pairs=False)
        down = problem.by_expert(up, lambda x, e: matmul(x, problem.down[e]), pairs=True)
        want, columns = {"up": up, "down": down}, {"up": WIDTH * 2 * HIDDEN, "down": HIDDEN * WIDTH}
        for what, tile in variants(count):
            plans = problem.plans(tile.rows)

            def call() -> tuple[bool, Replay]:
                same = torch.equal(problem.run(what, tile, plans[0], up), want[what])
                return same, Replay(lambda plan: problem.run(what, tile, plan, up), [(plan,) for plan in plans])

            floor = problem.active * columns[what] * 2 / speed
            yield timed(f"{what}, {count} rows, {short(tile)}", call, floor, rows=count, experts=problem.active)
        yield from rest(problem, up, down)


def rest(problem: Problem, hidden: Tensor, out: Tensor) -> Iterator[Line]:
    """Routing, plan and sum, and the library's products."""
    from replaylens.kernels.grouped import combine
    from replaylens.kernels.launch import grouped_rows
    from replaylens.kernels.matmul import matmul
    from replaylens.kernels.norm import activation
    from replaylens.kernels.route import RouteSpec, route, sorted_plan, worst_tiles

    rows, pairs = problem.rows, problem.rows * TOP
    logits, router = randn(rows, EXPERTS, dtype=torch.float32), randn(WIDTH, EXPERTS)
    chosen, weights, _ = route(logits, RouteSpec(TOP))
    height = grouped_rows(pairs, EXPERTS, torch.bfloat16)
    room, stacked = worst_tiles(pairs, EXPERTS, height), out.view(rows, TOP, WIDTH)
    made = [sorted_plan(c, EXPERTS, height, room) for c in problem.chosen]
    sorted_x = [(problem.x[p.order.long() // TOP], p) for p in made]
    sorted_hidden = [(hidden[p.order.long()], p) for p in made]
    up = lambda x, p: torch._grouped_mm(x, problem.up, offs=p.ends)  # noqa: E731
    down = lambda x, p: torch._grouped_mm(x, problem.down, offs=p.ends)  # noqa: E731
    works: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
        "route": (lambda: route(logits, RouteSpec(TOP)), [()]),
        "logits": (lambda: matmul(problem.x, router, out_dtype=torch.float32), [()]),
        "plan": (lambda: sorted_plan(chosen, EXPERTS, height, room), [()]),
        "sum": (lambda: combine(stacked, weights, problem.x), [()]),
        "gather": (lambda p: problem.x[p.order.long() // TOP], [(p,) for p in made]),
        "up of the library, no activation": (up, sorted_x),
        "down of the library": (down, sorted_hidden),
        "activation": (lambda x: activation(x, "silu", True), [(randn(pairs, 2 * HIDDEN),)]),
    }
    for what, (work, sets) in works.items():
        yield timed(f"{what}, {rows} rows", lambda: (True, Replay(work, sets)))


# Dense products and attention of few rows


def dense_tiles(columns: int) -> list[Tile]:
    return tiles(WIDE if columns > 4000 else NARROW)


def compile_few_rows(first: int, step: int) -> None:
    from replaylens.kernels.matmul import matmul

    wanted = [(shape, tile) for shape in DENSE.values() for tile in dense_tiles(shape[1])]
    for (depth, columns), tile in wanted[first::step]:
        try:
            matmul(randn(1, depth), randn(depth, columns), tile=tile)
        except Exception as error:
            print(f"cannot compile {tile}: {type(error).__name__} {str(error)[:120]}", flush=True)


@case("kernels-few-rows", needs="gpu", clock="device", unit="us")
def few_rows(rows: tuple[int, ...] = (1, 8), keys: tuple[int, ...] = (140, 1000)) -> Lines:
    """Dense products of few rows, every tile against one read of the weights at the speed of a copy (ratio), with the bits of
    the tile that the launch table chooses; then attention of one row over few keys, by tile and schedule."""
    from replaylens.kernels.launch import gemm_tile
    from replaylens.kernels.matmul import matmul

    compile_side_by_side(compile_few_rows)
    speed = copy_speed()
    for count in rows:
        for name, (depth, columns) in DENSE.items():
            x, first = randn(count, depth), randn(depth, columns) / depth**0.5
            weights = [(first,), *((first.clone(),) for _ in range(copies(first) - 1))]
            want, chosen = matmul(x, first), short(gemm_tile(count, depth, columns, x.dtype))
            for tile in dense_tiles(columns):

                def call() -> tuple[bool, Replay]:
                    same = torch.equal(matmul(x, first, tile=tile), want)
                    return same, Replay(lambda w: matmul(x, w, tile=tile), weights)

                what = f"{name}, {count} rows, {short(tile)}"
                yield timed(what, call, depth * columns * 2 / speed, chosen=short(tile) == chosen)
    for count in keys:
        yield from attend(count)


def attend(keys: int, heads: int = 32, kv_heads: int = 4, width: int = 128) -> Iterator[Line]:
    """Attention of one row over few keys."""
    from replaylens.kernels.attention import Workspace, attention
    from replaylens.kernels.launch import PAGE_SIZE, AttentionTile
    from replaylens.kernels.shared import PagedRows

    table = torch.arange(1, 65, dtype=torch.int32, device="cuda").view(1, -1)
    k, q = randn(65 * PAGE_SIZE, kv_heads, width), randn(1, heads, width)
    v, zero, scale = torch.randn_like(k), torch.zeros(1, dtype=torch.int32, device="cuda"), width**-0.5
    rows, space = PagedRows(zero, zero + keys - 1, table, max_keys=1024), Workspace.of(1, kv_heads, 2, 16, width, q.device)
    want = attention(q, k, v, rows, scale)
    for warps, stages, split in [(w, s, split) for w in (1, 2, 4, 8) for s in (1, 2, 3, 5) for split in (False, True)]:
        tile = AttentionTile(16, warps, stages)
        work = lambda: attention(q, k, v, rows, scale, workspace=space, tile=tile, split=split)  # noqa: E731
        what = f"attention of one row over {keys} keys, warps {warps}, stages {stages}, {'split' if split else 'whole'}"
        yield timed(what, lambda: (torch.equal(work(), want), Replay(work, [()] * 16)))
