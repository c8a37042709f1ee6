"""docs/nano.py as a subject of the engine's contract: its branches under the names that the tests know the engine's by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from docs import nano
from replaylens.engine.request.sampling import Sampling
from tests.engine.reference import GREEDY, same_bits

CONFIG = nano.Config(num_layers=2)
SITES = ("S", "T", "C", "Z")


def all_layers(request: nano.Request, count: int) -> list[int]:
    """The drafter `self`: plain products through all layers."""
    engine = request.branch.engine
    engine.skipped = 0
    drafts = engine.early_exit(request, count)
    engine.skipped = 1
    return drafts


def ngram(request: nano.Request, count: int) -> list[int]:
    """What followed the last token when it came before."""
    *past, last = request.branch.tokens
    return past[past.index(last) + 1 :][:count] if last in past else []


def drawn(sampling: Sampling) -> tuple[float, int]:
    """Temperature and seed."""
    return sampling.temperature, sampling.seed % 1000


class Rows(dict[str, Any]):
    """Captured rows by site, from position 0 on."""

    base = 0

    def sites(self) -> list[str]:
        return list(self)


class NanoBranch:
    """A branch of nano. Forks are lists, drafters and samplings those of a contract's request."""

    def __init__(self, served: NanoEngine, branch: nano.Branch, num_prompt: int) -> None:
        self.served, self.branch, self.num_prompt = served, branch, num_prompt

    tokens = property(lambda self: self.branch.tokens)
    length = property(lambda self: len(self.branch.tokens))
    generated = property(lambda self: self.branch.tokens[self.num_prompt :])
    activations = property(lambda self: Rows({site: self.branch.activations(site) for site in SITES}))

    @property
    def rejected(self) -> list[NanoBranch]:
        return [self._like(branch) for branch in self.branch.rejected]

    @property
    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(accepted=self.branch.num_accepted, rejected=self.branch.num_rejected)

    def _like(self, branch: nano.Branch) -> NanoBranch:
        return NanoBranch(self.served, branch, self.num_prompt)

    def kv(self) -> Any:
        return self.branch.kv()

    def fork(self, *, at: int | None = None, edits: Sequence[nano.Edit] = ()) -> list[NanoBranch]:
        child = self.branch.fork(at, edits)
        self.served.live.append(child)
        return [self._like(child)]

    def force(self, tokens: Sequence[int]) -> NanoBranch:
        self.branch.tokens += tokens
        self.branch.generate(0)
        return self

    def rollback(self, to: int) -> NanoBranch:
        self.branch.rollback(to)
        return self

    def release(self) -> None:
        self.branch.release()

    def generate(self, n: int, **options: Any) -> NanoBranch:
        self.served.engine.serve([self.request(n, **options)])
        return self

    def stream(self, n: int, final: bool = True, keep_pages: bool = True, **options: Any) -> Iterator[int]:
        """New tokens. Makes steps of all open streams together, and ends its request when it is closed."""
        request = self.request(n, **options)
        self.served.jobs.append(request)
        return self._steps(request)

    def _steps(self, request: nano.Request) -> Iterator[int]:
        try:
            while len(self.branch.rows) < request.end:
                before = self.length
                self.served.engine.step([job for job in self.served.jobs if len(job.branch.rows) < job.end])
                yield from self.tokens[before:]
        finally:
            self.served.jobs.remove(request)

    def request(
        self,
        n: int,
        drafter: str = "lens",
        window: int | None = None,
        sampling: Sampling = GREEDY,
        drafts: Mapping[int, list[list[int]]] | None = None,
    ) -> nano.Request:
        chains = drafts or {}
        drafters = {
            "self": all_layers,
            "ngram": ngram,
            "forced": lambda request, count: chains.get(len(request.branch.tokens), [[]])[0],
        }
        end, size = self.length + n, 6 if window is None else window
        return nano.Request(self.branch, end, size, drafters.get(drafter), *drawn(sampling), keep_rejected=True)


class NanoEngine:
    """An engine of nano that knows its branches, so that their pages can be counted."""

    def __init__(self, page_size: int = 16, max_rows: int = 64, canonical: bool = True) -> None:
        self.engine = nano.Engine(MODEL, 1024, page_size, max_rows, canonical=canonical)
        self.live, self.jobs = list[nano.Branch](), list[nano.Request]()

    def prompt(
        self, tokens: Sequence[int], sites: str | None = None, keep_rejected: bool = False, edits: Sequence[nano.Edit] = ()
    ) -> NanoBranch:
        self.live.append(self.engine.prompt(tokens, edits))
        return NanoBranch(self, self.live[-1], len(tokens))

    def check_integrity(self) -> None:
        """Every page has as many owners as branches hold it, and every branch just the pages that it needs."""
        pool, held = self.engine.pool, Counter[int]()
        for branch in [*self.live, *(draft for each in self.live for draft in each.rejected)]:
            held.update(branch.pages)
            assert len(branch.pages) >= -(-len(branch.rows) // pool.page_size)
        assert pool.owners == [held[page] for page in range(len(pool.owners))]


MODEL = nano.Model(CONFIG, nano.random_weights(CONFIG))


class NanoReference:
    """Every row computed alone, in its own pass, and kept by its path."""

    def __init__(self) -> None:
        self.engine = nano.Engine(MODEL, num_pages=20_000, page_size=1, chunk=1)
        self._known: dict[tuple[int, ...], nano.Branch] = {}

    def branch(self, path: tuple[int, ...]) -> nano.Branch:
        for end in range(1, len(path) + 1):
            if path[:end] not in self._known:
                before = self._known.get(path[: end - 1])
                branch = self.engine.prompt(path[:1]) if before is None else before.fork()
                branch.tokens[end - 1 :] = path[end - 1 : end]
                self._known[path[:end]] = branch.generate(0)
        return self._known[path]

    def continuation(self, path: Sequence[int], n: int, sampling: Sampling = GREEDY) -> list[int]:
        """The next `n` tokens, one at a time."""
        path, new = tuple(path), tuple[int, ...]()
        while len(new) < n:
            branch = self.branch((*path, *new))
            request = nano.Request(branch, 0, 0, None, *drawn(sampling))
            new += (request.choose(branch.rows[-1], len(branch.tokens)),)
        return list(new)

    def differences(self, branch: NanoBranch) -> list[str]:
        """What differs on a branch from the rows of its path."""
        truth, rows = self.branch(tuple(branch.tokens)), branch.activations
        found = ["KV"] * (not same_bits(branch.kv(), truth.kv()))
        return found + [site for site in SITES if not same_bits(rows[site], truth.activations(site))]
