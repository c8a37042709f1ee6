"""What `benchmarks/natural_gpu.py` measures: stories of a model, how much of them, and counts of verifications."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from replaylens.engine.engine import Engine
from replaylens.engine.loop import admission
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch

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
class Sizes:
    """How much is generated."""

    stories: int = 128
    length: int = 512
    marks: tuple[int, ...] = (100, 256, 512)
    other_batch: int = 32
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    drafts: int = 12000
    """drafts per cell, at least, as far as there are prompts; a sixth of it for requests alone"""
    tokens: int = 256
    """tokens per request that is drafted"""
    windows: tuple[int, ...] = (4, 8, 16, 32, 64)
    groups: tuple[int, ...] = (8, 32, 128)
    load: int = 64
    load_tokens: int = 128
    load_windows: tuple[int, ...] = (8, 32)
    shares: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    alone: int = 8
    coins: int = 64
    coin_tokens: int = 48


TINY = Sizes(
    stories=4, length=12, marks=(4, 12), other_batch=2, batches=(1, 4), drafts=16, tokens=8, windows=(4, 8), groups=(2, 4),
    load=4, load_tokens=8, load_windows=(4,), shares=(0.0, 0.5), alone=2, coins=4, coin_tokens=6,
)  # fmt: skip


@dataclass
class Subject:
    """A model, its prompts, and what its deterministic requests committed."""

    engine: Engine
    name: str
    prompts: Sequence[str]
    sizes: Sizes
    deadline: float
    length: int = 0
    done: frozenset[str] = frozenset()
    """lines that an earlier run has measured"""
    stories: dict[float, list[list[int]]] = field(default_factory=dict)
    """temperature -> canonical tokens of every request, all in one batch"""
    compared: int = 0
    """tokens of deterministic requests, in other company and with other windows, compared with `stories`"""
    differing: int = 0

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def story(self, temperature: float) -> list[list[int]]:
        """Canonical stories of all prompts at a temperature."""
        if temperature not in self.stories:
            own = samplings(len(self.prompts), temperature)
            self.stories[temperature] = generated(self.engine, self.prompts, own, self.length)
        return self.stories[temperature]

    def compare(self, temperature: float, tokens: Sequence[Sequence[int]], first: int = 0) -> None:
        """Mutates: counts tokens that differ from the canonical stories of the requests from `first` on."""
        for own, story in zip(tokens, self.story(temperature)[first:], strict=False):
            self.compared += len(own)
            self.differing += sum(a != b for a, b in zip(own, story, strict=False))
