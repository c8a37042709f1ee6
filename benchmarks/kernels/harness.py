"""What the kernel benchmarks share: timing by graph replay, and a report that refuses numbers without a passed check."""

import json
import statistics
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


def microseconds(calls: Sequence[Callable[[], Any]], replays: int = 5) -> float:
    """Median time of one call, all calls replayed from one graph: launch gaps of the host do not count."""
    calls = list(calls) * max(1, 4 // len(calls))
    for call in calls[:2]:  # compile and warm up outside the capture
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[1:])


def copies(*tensors: Tensor) -> int:
    """How many sets of these tensors a round needs to be larger than the cache."""
    return max(1, -(-BEYOND_CACHE // sum(x.numel() * x.element_size() for x in tensors)))


def error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64; NaN stays NaN."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Report:
    """Rows of one benchmark, printed as they come and saved with the machine they were measured on."""

    def __init__(self, kernel: str, about: str) -> None:
        self.kernel, self.about = kernel, about
        self.rows: list[dict[str, Any]] = []
        print(f"\n{kernel}: {about}", flush=True)

    def add(self, what: str, check: bool, ours: float, theirs: float, **extra: Any) -> None:
        """Mutates: one more line. Without a passed check there is no number."""
        row: dict[str, Any] = {"what": what, "check": check}
        if check:
            row |= {"ours_us": round(ours, 2), "theirs_us": round(theirs, 2), "ratio": round(theirs / ours, 3), **extra}
            shown = " ".join(f"{k}={v}" for k, v in extra.items())
            print(f"  {what:44s} ours {ours:9.1f} us  theirs {theirs:9.1f} us  {theirs / ours:5.2f}x  {shown}", flush=True)
        else:
            print(f"  {what:44s} CHECK FAILED: no number", flush=True)
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
