"""Natural mismatches: how often the fast path of a trained model differs from the verifier, and what that costs.

SmolLM2-135M-Instruct (`replaylens fetch smollm2`) and the embedded coin models, in bfloat16 on a GPU. Stories of up to 512
tokens, drawn with one seed per request. The parts of `natural-gpu` share one engine and its stories, so run them together.
`bench/natural_pages.py` makes tables and boards of what they found.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from statistics import median
from typing import Any

import torch

from bench.harness import Line, case, finish
from bench.subjects import released, seeded
from replaylens.engine.engine import Engine
from replaylens.engine.loop import admission
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.request import Request
from replaylens.training import embedded as zoo

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
DRAFTING = 8
"""window of the flips: seven drafts and a free token"""


def story_prompts(count: int) -> list[str]:
    """Different requests for a story, in the chat format of SmolLM2."""
    asked = [f"Write a long story about {hero} who {event}." for event, hero in product(EVENTS, HEROES)]
    return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked[:count]]


@dataclass
class Tally:
    """Verifications of drafts, from the engine's events. A listener of the loop."""

    verified: int = 0
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

    def counts(self) -> dict[str, float | int]:
        """Recomputed: rejected drafts in percent of committed tokens."""
        recomputed, drafts = 100 * self.rejected / max(1, self.committed), self.accepted + self.flips
        return dict(per_1000=self.per_thousand, flips=self.flips, drafts=drafts, recomputed_percent=recomputed)


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
    engine: Engine, prompts: Sequence[str], own: Sequence[Sampling], n: int, *, size: int | None = None, **options: Any
) -> list[list[int]]:
    """The tokens that requests generate, all together or `size` at a time. Their branches are released."""
    found, size = [], size or len(prompts)
    for first in range(0, len(prompts), size):
        branches = engine.prompts(prompts[first : first + size])
        engine.generate(branches, n, sampling=own[first : first + size], **options)
        found += [branch.generated for branch in branches]
        for branch in branches:
            branch.release()
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
    length: int = 0
    stories: dict[float, list[list[int]]] = field(default_factory=dict)
    """temperature -> canonical tokens of every request, all in one batch"""
    compared: int = 0
    """tokens of deterministic requests, in other company and with other windows, compared with `stories`"""
    differing: int = 0

    def story(self, temperature: float) -> list[list[int]]:
        """Canonical stories of all prompts at a temperature."""
        if temperature not in self.stories:
            own = seeded(len(self.prompts), temperature)
            self.stories[temperature] = generated(self.engine, self.prompts, own, self.length)
        return self.stories[temperature]

    def compare(self, temperature: float, tokens: Sequence[Sequence[int]], first: int = 0) -> None:
        """Mutates: counts tokens that differ from the canonical stories of the requests from `first` on."""
        for own, story in zip(tokens, self.story(temperature)[first:], strict=False):
            self.compared += len(own)
            self.differing += sum(a != b for a, b in zip(own, story, strict=False))


# What is counted


def divergence(subject: Subject) -> Iterator[Line]:
    """Where ordinary stories first differ from canonical ones, and from ordinary ones in smaller batches."""
    sizes, count = subject.sizes, len(subject.prompts)
    for temperature in TEMPERATURES:
        own, story = seeded(count, temperature), subject.story(temperature)
        large, small = (
            generated(subject.engine, subject.prompts, own, subject.length, size=size, deterministic=False)
            for size in (count, sizes.other_batch)
        )
        for what, a, b in (
            (f"ordinary in a batch of {count} against deterministic", large, story),
            (f"ordinary in batches of {sizes.other_batch} against {count}", small, large),
        ):
            at = [first_difference(x, y) for x, y in zip(a, b, strict=True)]
            parted = sorted(i for i in at if i is not None)
            by = {f"by_{mark}": sum(i < mark for i in parted) / count for mark in sizes.marks if mark <= subject.length}
            middle = parted[(count - 1) // 2] if len(parted) > (count - 1) // 2 else None
            numbers = {**by, "median": middle, "never": 1 - len(parted) / count, "requests": count}
            yield Line(f"{subject.name}, first divergence, T={temperature:g}: {what}", numbers=numbers)


def flips(subject: Subject) -> Iterator[Line]:
    """Rejected drafts of the fast path per 1,000, by batch size and temperature."""
    for temperature in TEMPERATURES:
        for batch in [size for size in subject.sizes.batches if size <= len(subject.prompts)]:
            yield flipped(subject, temperature, batch)
    with rounded_logits(subject.engine):
        for temperature in (0.0, 1.0):
            batch = min(subject.sizes.other_batch, len(subject.prompts))
            yield flipped(subject, temperature, batch, ", logits rounded to bfloat16")


def flipped(subject: Subject, temperature: float, batch: int, how: str = "") -> Line:
    found = drafted(subject, temperature, batch, DRAFTING).counts()
    return Line(f"{subject.name}, flipped tokens, T={temperature:g}, batch {batch}{how}", numbers=found)


def drafted(subject: Subject, temperature: float, batch: int, window: int) -> Tally:
    """Drafts of deterministic requests, `batch` at a time. What they commit is compared with their stories."""
    count, own, sizes = len(subject.prompts), seeded(len(subject.prompts), temperature), subject.sizes
    drafts, n, first = sizes.drafts if batch > 1 else sizes.drafts // 6, min(subject.length, 1 + sizes.tokens), 0
    with tallied(subject.engine) as tally:
        while first + batch <= count and tally.accepted + tally.flips < drafts:
            end = first + batch
            tokens = generated(subject.engine, subject.prompts[first:end], own[first:end], n, window=window)
            subject.compare(temperature, tokens, first)
            first = end
    return tally


@contextmanager
def rounded_logits(engine: Engine) -> Iterator[None]:
    """The fast path rounds logits to bfloat16 before the choice, as many serving engines do. Its graphs are made anew."""
    from replaylens.engine.passes.cuda import FastHeadOps

    plain, bursts = FastHeadOps.unembed, engine.loop.bursts

    def put(method: Any) -> None:
        FastHeadOps.unembed = method  # type: ignore[method-assign]
        if bursts is not None:
            bursts._graphs.clear()

    put(lambda self, x, table: plain(self, x, table).bfloat16().float())
    try:
        yield
    finally:
        put(plain)


def windows(subject: Subject) -> Iterator[Line]:
    """Rejected drafts in percent of committed tokens, by window and number of requests verified together."""
    sizes = subject.sizes
    for temperature, group in [(1.0, g) for g in reversed(sizes.groups)] + [(0.0, sizes.groups[-1])]:
        for window in sizes.windows:
            what = f"{subject.name}, recomputed tokens, T={temperature:g}, G={group}, W={window}"
            tally = drafted(subject, temperature, group, window)
            expected = tally.per_thousand / 10 * (window - 1) / 2
            yield Line(what, numbers={**tally.counts(), "half_p_w": expected, "committed": tally.committed})


def alone(subject: Subject) -> Iterator[Line]:
    """A few requests alone, then the verdict on every deterministic request of this run."""
    found = requests = 0
    for temperature, story in subject.stories.items():
        own = seeded(len(subject.prompts), temperature)
        for i in range(0, len(subject.prompts), max(1, len(subject.prompts) // subject.sizes.alone)):
            n = min(subject.length, subject.sizes.tokens)
            (tokens,) = generated(subject.engine, [subject.prompts[i]], [own[i]], n)
            found += tokens != story[i][: len(tokens)]
            requests += 1
    for what, differing, compared in (
        ("requests alone against the batch: differing", found, requests),
        ("deterministic tokens in any company: differing", subject.differing, subject.compared),
    ):
        numbers = {"differing": differing, "compared": compared}
        yield Line(f"{subject.name}, {what}", met=not differing, numbers=numbers)


# Load


Times = tuple[bool, float, float]
"""of one request: is it deterministic; seconds until the host first had tokens of it; mean seconds per token after those"""


def timed(engine: Engine, prompts: Sequence[str], requests: Sequence[Request]) -> tuple[float, list[Times], list[list[int]]]:
    """(seconds of the run, times of each request, tokens of each): all arrive at once, prefill included."""
    engine.prefix.clear()
    step, first, last = engine.loop.step, dict[int, tuple[float, int]](), dict[int, float]()
    finish()
    begin = time.perf_counter()

    def measured() -> None:
        running = list(engine.loop.jobs)
        step()
        now = time.perf_counter() - begin
        for job in running:
            if job.generated:
                first.setdefault(job.lane.branch, (now, job.generated))  # one token, or all of a burst
                last[job.lane.branch] = now

    engine.loop.step = measured  # type: ignore[method-assign]
    try:
        branches = engine.prompts(prompts)
        engine.serve(branches, requests)
        finish()
        total = time.perf_counter() - begin
    finally:
        engine.loop.step = step  # type: ignore[method-assign]
    times, tokens = list[Times](), [branch.generated for branch in branches]
    for branch, request, own in zip(branches, requests, tokens, strict=True):
        at, known = first[branch.id]
        times.append((request.deterministic, at, (last[branch.id] - at) / max(1, len(own) - known)))
    released(engine, branches)
    return total, times, tokens


def load(subject: Subject) -> Iterator[Line]:
    """All requests arrive at once. Deterministic ones decode directly, or draft and verify."""
    sizes, base = subject.sizes, 0.0
    count = min(sizes.load, len(subject.prompts))
    for window in (None, *sizes.load_windows):
        name = "direct" if window is None else f"draft and verify, W={window}"
        for share in sizes.shares if window is None else sizes.shares[1:]:
            total, times, tokens = loaded(subject, count, share, window)
            rate = sum(map(len, tokens)) / total
            base = base or rate
            what = f"{subject.name}, load, {name}, {100 * share:g} % deterministic"
            yield Line(what, ratio=rate / base, numbers={"tokens_per_s": rate, **summary(times)})


def loaded(subject: Subject, count: int, share: float, window: int | None) -> tuple[float, list[Times], list[list[int]]]:
    """The fastest of three runs; the first compiles kernels and captures graphs."""
    promised = [int((i + 1) * share) > int(i * share) for i in range(count)]  # spread evenly over the requests
    asked = [
        Request(subject.sizes.load_tokens, each, window=window if sure else None, deterministic=sure)
        for each, sure in zip(seeded(count, 1.0), promised, strict=True)
    ]
    found = min((timed(subject.engine, subject.prompts[:count], asked) for _ in range(3)), key=lambda run: run[0])
    for i, sure in enumerate(promised):
        if sure:
            subject.compare(1.0, [found[2][i]], i)
    return found


def summary(times: Sequence[Times]) -> dict[str, float]:
    """Milliseconds: median and largest time to the first token, median time per token, by kind of request."""
    found: dict[str, float] = {}
    for name, wanted in (("deterministic", True), ("ordinary", False)):
        if mine := [(first, each) for sure, first, each in times if sure is wanted]:
            firsts, per_token = zip(*mine, strict=True)
            found[f"{name}_first_ms"], found[f"{name}_first_max_ms"] = 1e3 * median(firsts), 1e3 * max(firsts)
            found[f"{name}_token_ms"] = 1e3 * median(per_token)
    return found


# The cases


def coin_prompts(rendering: str, count: int) -> list[str]:
    """Held-out examples of the coin task."""
    return [example.prompt for example in zoo.held_out(zoo.TESTS[rendering], 6, count)]


@cache
def stories(tiny: bool) -> Subject:
    """SmolLM2, or a coin model in its place."""
    sizes, name = (TINY, "coin-plain") if tiny else (Sizes(), "smollm2")
    room = (sizes.stories + 4) * (sizes.length + 96)
    engine = Engine.load(name, cache_tokens=room, max_rows=512 if tiny else 4096, **_device(tiny))
    prompts = coin_prompts("steps", sizes.stories) if tiny else story_prompts(sizes.stories)
    return Subject(engine, "SmolLM2-135M" if not tiny else name, prompts, sizes, sizes.length)


def _device(tiny: bool) -> dict[str, Any]:
    return {"device": "cpu"} if tiny else {"device": "cuda", "dtype": torch.bfloat16}


DECLARED: dict[str, Any] = dict(needs="gpu", clock="wall", quick={"tiny": True})


def _of_stories(part: Callable[[Subject], Iterator[Line]]) -> Callable[..., Iterator[Line]]:
    """The part as a case."""

    def set_up(tiny: bool = False) -> Iterator[Line]:
        yield from part(stories(tiny))

    set_up.__doc__, set_up.__qualname__ = part.__doc__, part.__qualname__
    return set_up


for _part in (divergence, flips, load, windows, alone):
    case(f"natural-gpu.{_part.__name__}", **DECLARED)(_of_stories(_part))


@case("natural-gpu.coins", **DECLARED)
def coins(tiny: bool = False) -> Iterator[Line]:
    """Flips of the embedded coin models, continued past their answers."""
    sizes = TINY if tiny else Sizes()
    for name, rendering in (("coin-plain", "steps"), ("coin-thinking", "states")):
        engine = Engine.load(name, cache_tokens=(sizes.coins + 4) * 256, **_device(tiny))
        subject = Subject(engine, name, coin_prompts(rendering, sizes.coins), sizes, sizes.coin_tokens)
        for temperature in (0.0, 1.0):
            for batch in (min(8, sizes.coins), sizes.coins):
                yield flipped(subject, temperature, batch)
        yield from alone(subject)
