"""Latency and throughput of natural requests under load, for `benchmarks/natural_gpu.py`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.natural_subject import Subject, released, samplings
from benchmarks.table import Table
from replaylens.engine.engine import Engine
from replaylens.engine.serving.request import Request


@dataclass(frozen=True)
class Times:
    """Seconds of one request since the start of the run."""

    deterministic: bool
    first: float
    """when the host first had tokens of it: one, or all of a burst"""
    last: float
    between: int
    """tokens after those that came first"""

    @property
    def per_token(self) -> float:
        """Mean time per token after the first."""
        return (self.last - self.first) / max(1, self.between)


def timed(engine: Engine, prompts: Sequence[str], requests: Sequence[Request]) -> tuple[float, list[Times], list[list[int]]]:
    """(seconds of the run, times of each request, tokens of each): all arrive at once, prefill included."""
    engine.prefix.clear()
    step, first, last = engine.loop.step, dict[int, tuple[float, int]](), dict[int, float]()
    _wait()
    begin = time.perf_counter()

    def measured() -> None:
        running = list(engine.loop.jobs)
        step()
        now = time.perf_counter() - begin
        for job in running:
            if job.generated:
                first.setdefault(job.lane.branch, (now, job.generated))
                last[job.lane.branch] = now

    engine.loop.step = measured  # type: ignore[method-assign]
    try:
        branches = engine.prompts(prompts)
        engine.serve(branches, requests)
        _wait()
        total = time.perf_counter() - begin
    finally:
        engine.loop.step = step  # type: ignore[method-assign]
    tokens = [branch.generated for branch in branches]
    times = [
        Times(request.deterministic, first[branch.id][0], last[branch.id], len(own) - first[branch.id][1])
        for branch, request, own in zip(branches, requests, tokens, strict=True)
    ]
    released(branches)
    return total, times, tokens


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load(table: Table, subject: Subject) -> None:
    """All requests arrive at once. Deterministic ones decode directly, or draft and verify."""
    sizes = subject.sizes
    count, base = min(sizes.load, len(subject.prompts)), 0.0
    arms: list[tuple[str, int | None]] = [("direct", None), *((f"draft and verify, W={w}", w) for w in sizes.load_windows)]
    for name, window in arms:
        for share in sizes.shares if window is None else sizes.shares[1:]:
            if subject.late:
                return
            total, times, tokens = loaded(subject, count, share, window)
            rate = sum(map(len, tokens)) / total
            base = base or rate
            what = f"{subject.name}, load, {name}, {100 * share:g} % deterministic"
            table.add(what, ratio=rate / base, tokens_per_s=rate, **summary(times))


def loaded(subject: Subject, count: int, share: float, window: int | None) -> tuple[float, list[Times], list[list[int]]]:
    """The fastest of three runs; the first compiles kernels and captures graphs."""
    own = samplings(count, 1.0)
    promised = [int((i + 1) * share) > int(i * share) for i in range(count)]  # spread evenly over the requests
    asked = [
        Request(subject.sizes.load_tokens, each, window=window if sure else None, deterministic=sure)
        for each, sure in zip(own, promised, strict=True)
    ]
    found = min((timed(subject.engine, subject.prompts[:count], asked) for _ in range(3)), key=lambda run: run[0])
    for i, sure in enumerate(promised):
        if sure:
            subject.compare(1.0, [found[2][i]], i)
    return found


def summary(times: Sequence[Times]) -> dict[str, float]:
    """Milliseconds: median and largest time to the first token, median time per token, by kind of request."""
    found: dict[str, float] = {}
    for name, sure in (("deterministic", True), ("ordinary", False)):
        if mine := [t for t in times if t.deterministic is sure]:
            found[f"{name}_first_ms"] = 1e3 * median(t.first for t in mine)
            found[f"{name}_first_max_ms"] = 1e3 * max(t.first for t in mine)
            found[f"{name}_token_ms"] = 1e3 * median(t.per_token for t in mine)
    return found
