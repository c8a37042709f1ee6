"""What `benchmarks/natural_gpu.py` measures with: stories, counts of verifications, times of tokens."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from replaylens.engine.engine import Engine
from replaylens.engine.loop import admission
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.request import Request

HEROES = (
    "a lighthouse keeper", "a young baker", "a retired pilot", "two sisters", "a clockmaker", "an old fisherman", "a gardener",
    "a night nurse", "a street musician", "a mapmaker", "a shy robot", "a mountain guide", "a librarian", "a lost postman",
    "a glassblower", "a stubborn farmer",
)  # fmt: skip
EVENTS = (
    "finds a letter that was never sent", "must cross a river before dawn", "hears a song from an empty house",
    "repairs a machine nobody understands", "wakes up in a town without clocks", "is given a key but no door",
    "follows a stray dog into the forest", "waits for a train that is late by a year",
)  # fmt: skip
TEMPERATURES = (0.0, 0.7, 1.0)


def story_prompts(count: int) -> list[str]:
    """Different requests for a story, in the chat format of SmolLM2."""
    asked = [f"Write a long story about {hero} who {event}." for event, hero in product(EVENTS, HEROES)]
    return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked[:count]]


def samplings(count: int, temperature: float, endless: bool = True) -> list[Sampling]:
    """One per request: the same seed gives a request the same noise in every run."""
    return [Sampling(temperature=temperature, seed=seed, ignore_eos=endless) for seed in range(count)]


@dataclass
class Tally:
    """Verifications of drafts, from the engine's events. A listener of the loop."""

    verified: int = 0
    """verifications"""
    accepted: int = 0
    rejected: int = 0
    flips: int = 0
    """verifications that found a mismatch: each ends at its first one"""
    committed: int = 0
    _drafted: dict[int, int] = field(default_factory=dict)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "draft":
            self._drafted[event["branch"]] = len(event["chains"][0])
        elif event["event"] == "verdict":
            drafted = self._drafted.pop(event["branch"])
            self.verified += 1
            self.accepted += event["accepted"]
            self.rejected += drafted - event["accepted"]
            self.flips += event["accepted"] < drafted
            self.committed += event["accepted"] + len(event["pending"])

    @property
    def per_thousand(self) -> float:
        """Flipped tokens per 1,000 drafts that follow verified or accepted tokens only."""
        return 1e3 * self.flips / max(1, self.accepted + self.flips)

    @property
    def recomputed(self) -> float:
        """Rejected drafts in percent of committed tokens."""
        return 100 * self.rejected / max(1, self.committed)


@contextmanager
def tallied(engine: Engine) -> Iterator[Tally]:
    """Counts verifications. Drafts come from the fast path alone: a path that repeats itself is not taken as a guess."""
    tally, repeated = Tally(), admission.REPEATED
    engine.loop.listeners.append(tally)
    admission.REPEATED = 1 << 30
    try:
        yield tally
    finally:
        engine.loop.listeners.remove(tally)
        admission.REPEATED = repeated


def generated(
    engine: Engine, prompts: Sequence[str], own: Sequence[Sampling], n: int, *, window: int | None = None, verified: bool = True
) -> list[list[int]]:
    """The tokens that a batch of requests generates. Its branches are released."""
    branches = engine.prompts(prompts)
    engine.generate(branches, n, sampling=own, window=window, deterministic=verified)
    tokens = [branch.generated for branch in branches]
    released(branches)
    return tokens


def released(branches: Sequence[Branch]) -> None:
    for branch in branches:
        branch.release()


def in_batches(
    engine: Engine, prompts: Sequence[str], own: Sequence[Sampling], n: int, size: int, *, verified: bool = True
) -> list[list[int]]:
    """As `generated`, `size` requests at a time."""
    found = []
    for start in range(0, len(prompts), size):
        end = start + size
        found += generated(engine, prompts[start:end], own[start:end], n, verified=verified)
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two token lists differ; None if they agree as far as both go."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


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
