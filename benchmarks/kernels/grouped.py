"""Canonical grouped products of a mixture of experts, Qwen3-30B-A3B shape in bf16: every tile against one read of the weights.

    PYTHONPATH=src:. python -m benchmarks.kernels.grouped [--compile I/N] [--rows 1 8 64 512 2048]

Before a tile is timed, its bits are compared with `matmul` and `activation` of every expert's rows. Kernels are compiled by
processes side by side first. Theirs is the library's grouped product on rows that are sorted already.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.kernels.harness import RESULTS, captured, compile_side_by_side, replay
from replaylens.kernels.grouped import combine, grouped_matmul
from replaylens.kernels.launch import CANONICAL_VERSION, GemmTile, grouped_rows, grouped_tile
from replaylens.kernels.matmul import matmul
from replaylens.kernels.norm import activation
from replaylens.kernels.route import Plan, RouteSpec, plan, route, sorted_plan, worst_tiles

EXPERTS, TOP, WIDTH, HIDDEN = 128, 8, 2048, 768
ROWS = (1, 8, 64, 512, 2048)

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


def tiles(table: dict[int, list[tuple[int, int, int, int]]], rows: int) -> list[GemmTile]:
    """Every entry loaded by pointers, and by the copy engine."""
    return [GemmTile(rows, *entry, persistent=copied) for entry in table[rows] for copied in (False, True)]


def heights(rows: int) -> tuple[int, ...]:
    """The rows per tile that are worth a try."""
    return {1: (16,), 8: (16,), 64: (16,), 512: (16, 32, 64), 2048: (64, 128)}[rows]


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

    def bytes(self, columns: int) -> float:
        """Of the weights that are read: `columns` of them per input of one product, per expert."""
        return self.active * columns * 2

    def plans(self, height: int) -> list[Plan]:
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


def microseconds(call: Callable[..., Any], sets: list[tuple[Any, ...]], rounds: int = 7) -> float:
    """Median time of one call, by graph replay over all sets."""
    graph, count = captured(call, sets)
    for _ in range(3):
        replay(graph)
    return sorted(replay(graph) * 1e3 / count for _ in range(rounds))[rounds // 2]


def bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    x = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (microseconds(lambda: y.copy_(x), [()]) * 1e-6)


def variants(rows: int) -> Iterator[tuple[str, GemmTile]]:
    for height in heights(rows):
        yield from (("up", tile) for tile in tiles(UP, height))
        yield from (("down", tile) for tile in tiles(DOWN, height))


def run(problem: Problem, what: str, tile: GemmTile, made: Plan, hidden: Tensor) -> Tensor:
    if what == "up":
        return grouped_matmul(problem.x, problem.up, None, made, TOP, "silu", True, tile)
    return grouped_matmul(hidden, problem.down, None, made, 1, tile=tile)


def compile_all(part: str) -> None:
    """Compile every `n`-th variant from the `i`-th on, each in the forms with and without a plan."""
    first, step = map(int, part.split("/"))
    problems = {rows: Problem(rows) for rows in (1, 8)}
    wanted = {(what, tile, 8) for rows in ROWS[1:] for what, tile in variants(rows)} | {(w, t, 1) for w, t in variants(1)}
    for what, tile, rows in sorted(wanted, key=repr)[first::step]:
        problem = problems[rows]
        hidden = torch.randn(rows * TOP, HIDDEN, device="cuda", dtype=torch.bfloat16)
        try:
            run(problem, what, tile, problem.plans(tile.rows)[0], hidden)
        except Exception as error:
            print(f"cannot compile {what} {tile}: {type(error).__name__} {str(error)[:120]}", flush=True)


def measure(rows: int, speed: float, lines: list[dict[str, Any]]) -> None:
    problem = Problem(rows)
    want_up = problem.by_expert(
        problem.x, lambda x, e: activation(matmul(x, problem.up[e]), "silu", True), pairs=False
    )  # fmt: skip
    want_down = problem.by_expert(want_up, lambda x, e: matmul(x, problem.down[e]), pairs=True)
    floor = {"up": problem.bytes(WIDTH * 2 * HIDDEN) / speed * 1e6, "down": problem.bytes(HIDDEN * WIDTH) / speed * 1e6}
    print(f"rows {rows}: {problem.active:.1f} experts, floor up {floor['up']:.1f} us, down {floor['down']:.1f} us", flush=True)

    def note(what: str, us: float, **more: Any) -> None:
        lines.append({"rows": rows, "what": what, "us": us, **more})
        shown = " ".join(f"{k}={v}" for k, v in more.items())
        print(f"  {what:6s} {us:8.1f} us  {floor.get(what, 0.0) / us:5.2f} of floor  {shown}", flush=True)

    for what, tile in variants(rows):
        plans = problem.plans(tile.rows)
        try:
            same = torch.equal(run(problem, what, tile, plans[0], want_up), want_up if what == "up" else want_down)
            us = microseconds(lambda p, w=what, t=tile: run(problem, w, t, p, want_up), [(p,) for p in plans])
        except Exception as error:
            print(f"  {what} {tile}: {type(error).__name__} {str(error)[:100]}", flush=True)
            continue
        short = f"{tile.rows}x{tile.columns}x{tile.depth}w{tile.warps}s{tile.stages}{'c' if tile.persistent else ''}"
        note(what, us, tile=short, same=same)
    rest(problem, note, want_up, want_down)


def rest(problem: Problem, note: Callable[..., None], hidden: Tensor, out: Tensor) -> None:
    """Routing, plan and sum, and the library's products."""
    rows, pairs = problem.rows, problem.rows * TOP
    logits = torch.randn(rows, EXPERTS, device="cuda")
    chosen, weights, _ = route(logits, RouteSpec(TOP))
    note("route", microseconds(lambda: route(logits, RouteSpec(TOP)), [()]))
    router = torch.randn(WIDTH, EXPERTS, device="cuda", dtype=torch.bfloat16)
    note("logits", microseconds(lambda: matmul(problem.x, router, out_dtype=torch.float32), [()]))
    height = grouped_rows(pairs, EXPERTS, torch.bfloat16)
    room = worst_tiles(pairs, EXPERTS, height)
    note("plan", microseconds(lambda: sorted_plan(chosen, EXPERTS, height, room), [()]), tiles=room)
    stacked = out.view(rows, TOP, WIDTH)
    note("sum", microseconds(lambda: combine(stacked, weights, problem.x), [()]))
    made = [sorted_plan(c, EXPERTS, height, room) for c in problem.chosen]
    xs = [problem.x[p.order.long() // TOP] for p in made]
    note("gather", microseconds(lambda p: problem.x[p.order.long() // TOP], [(p,) for p in made]))
    up = lambda x, p: torch._grouped_mm(x, problem.up, offs=p.ends)  # noqa: E731
    down = lambda x, p: torch._grouped_mm(x, problem.down, offs=p.ends)  # noqa: E731
    try:
        note("up", microseconds(up, list(zip(xs, made, strict=True))), tile="library, no activation")
        hs = [hidden[p.order.long()] for p in made]
        note("down", microseconds(down, list(zip(hs, made, strict=True))), tile="library")
        wide = up(xs[0], made[0])
        note("act", microseconds(lambda: activation(wide, "silu", True), [()]))
    except Exception as error:
        print(f"  the library's grouped product failed: {type(error).__name__} {error}", flush=True)


def save(speed: float, lines: list[dict[str, Any]]) -> None:
    """Write benchmarks/results/kernels-grouped.json."""
    versions = {"torch": torch.__version__, "triton": triton.__version__, "canonical_version": CANONICAL_VERSION}
    machine = {"device": torch.cuda.get_device_name(), **versions}
    about = " ".join((__doc__ or "").split())
    body = {"name": "kernels-grouped", "about": about, "machine": machine, "copy_bytes_per_s": speed, "rows": lines}
    (RESULTS / "kernels-grouped.json").write_text(json.dumps(body, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", help="I/N: only compile every N-th variant from the I-th on")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    given = parser.parse_args()
    if given.compile:
        compile_all(given.compile)
        return
    begin = time.perf_counter()
    compile_side_by_side("benchmarks.kernels.grouped")
    speed = bandwidth()
    lines: list[dict[str, Any]] = []
    print(f"copy: {speed * 1e-12:.2f} TB/s, {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for rows in given.rows:
        measure(rows, speed, lines)
        save(speed, lines)
    print(f"default tiles: {grouped_tile(16, 512, torch.bfloat16, True)}; {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
