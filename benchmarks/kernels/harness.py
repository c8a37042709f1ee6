"""What the kernel benchmarks share: timing by graph replay, and a report that refuses numbers without a passed check."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from replaylens.kernels.launch import CANONICAL_VERSION

RESULTS = Path(__file__).parent.parent / "results"
BEYOND_CACHE = 200_000_000
"""bytes that a round of calls must touch, so that weights come from memory as they do in a model"""
COMPILERS = 12
"""processes that compile variants"""
WARM_MS = 30.0
"""clocks need a while to rise after the host was busy with something else"""


def captured(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of at least four calls, one per set of arguments in turn, and how many there are."""
    sets = list(sets) * max(1, 4 // len(sets))
    for arguments in sets[:2]:  # compile outside the capture
        call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in sets:
            call(*arguments)
    return graph, len(sets)


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def compare(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]] = ((),),
    their_sets: Sequence[tuple[Any, ...]] | None = None,
    rounds: int = 7,
) -> tuple[float, float]:
    """Median microseconds of a call, ours and theirs, replayed in turn after a common warm-up."""
    sides = [captured(ours, sets), captured(theirs, sets if their_sets is None else their_sets)]
    spent = 0.0
    while spent < WARM_MS:
        spent += sum(replay(graph) for graph, _ in sides)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for side, (graph, count) in zip(times, sides, strict=True):
            side.append(replay(graph) * 1e3 / count)
    return statistics.median(times[0]), statistics.median(times[1])


def copies(*tensors: Tensor) -> int:
    """How many sets of these tensors a round needs to be larger than the cache."""
    return max(1, -(-BEYOND_CACHE // sum(x.numel() * x.element_size() for x in tensors)))


def error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64; NaN stays NaN."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Report:
    """Rows of one benchmark, printed as they come and saved with the machine they were measured on."""

    def __init__(self, kernel: str, about: str | None) -> None:
        self.kernel, self.about = kernel, " ".join((about or "").split())
        self.rows: list[dict[str, Any]] = []
        print(f"\n{kernel}: {self.about}", flush=True)

    def add(self, what: str, check: bool, times: tuple[float, float], **extra: Any) -> None:
        """Mutates: one more line. Without a passed check there is no number."""
        row: dict[str, Any] = {"what": what, "check": check}
        if check:
            ours, theirs = times
            row |= {"ours_us": round(ours, 2), "theirs_us": round(theirs, 2), "ratio": round(theirs / ours, 3), **extra}
            shown = " ".join(f"{k}={v}" for k, v in extra.items())
            print(f"  {what:52s} ours {ours:9.1f} us  theirs {theirs:9.1f} us  {theirs / ours:5.2f}x  {shown}", flush=True)
        else:
            print(f"  {what:52s} CHECK FAILED: no number", flush=True)
        self.rows.append(row)

    def save(self) -> None:
        """Write benchmarks/results/kernels-<name>.json; an error if any check failed."""
        machine = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "canonical_version": CANONICAL_VERSION,
        }
        RESULTS.mkdir(exist_ok=True)
        body = {"name": f"kernels-{self.kernel}", "about": self.about, "machine": machine, "rows": self.rows}
        (RESULTS / f"kernels-{self.kernel}.json").write_text(json.dumps(body, indent=1) + "\n")
        if not all(row["check"] for row in self.rows):
            raise SystemExit(f"{self.kernel}: a correctness check failed")


def compile_side_by_side(module: str) -> None:
    """Run `python -m MODULE --compile I/N` in N processes, which fill Triton's cache. A failure shows when it is measured."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", module, "--compile"]
    running = [subprocess.Popen([*command, f"{i}/{COMPILERS}"]) for i in range(COMPILERS)]
    for process in running:
        process.wait()
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
