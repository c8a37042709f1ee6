"""The host's work: per committed token of 64 branches, and of a fork with its release. Neither may grow with the path.

A stand-in for the runner skips the model's arithmetic, which reads all keys and so grows on any engine, and keeps every other
step: admission, page tables, batches, sampling, commits, captures, streams.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.harness import Line, Lines, case
from bench.subjects import TINY_SHAPE, released
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import Tap
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.runner import PassResult
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch

LENGTHS = (1_000, 8_000, 32_000, 64_000)
FORK_LENGTHS = LENGTHS[:3]
BRANCHES, STEPS, VOCAB, FORKS = 64, 16, 61, 32


class Letters:
    """A tokenizer of one letter per token, of the kind whose text `Stops` may decode from the end."""

    is_fast, eos_token_id = True, None

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool = False) -> str:
        return "".join(chr(65 + token) for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(65 + token)


def host_engine(max_positions: int, cache_tokens: int) -> Engine:
    """An engine without arithmetic: the token at position p is a function of p, and every captured row is zero."""
    config = ModelConfig(1, 8, 1, 1, 8, 8, VOCAB, max_positions, rotary_dim=8)
    engine = Engine(Decoder(config).initialize(0).requires_grad_(False), Letters(), cache_tokens=cache_tokens, max_rows=4096)
    runner = engine.runner

    def exact(segments: list[Segment], tap: Tap | None = None, stop_at_layer: int | None = None) -> PassResult:
        batch = Batch(segments, runner.pool, runner.device)
        _ = batch.write_slots
        residual = torch.zeros(batch.num_rows, config.d_model)
        for site in getattr(tap, "wanted", ()):
            assert tap is not None
            tap(site, residual)
        rows = batch.logit_rows()
        logits = torch.zeros(len(rows), VOCAB)
        logits[torch.arange(len(rows)), (batch.positions[rows] * 17 + 5) % VOCAB] = 3.0
        return PassResult(batch, residual, logits)

    runner.exact = runner.fast = exact  # type: ignore[method-assign, assignment]
    return engine


def planted(engine: Engine, length: int, sites: str | None) -> Branch:
    path = [(i * i) % VOCAB for i in range(length)]
    return engine.prompt(path[:8], sites=sites).force(path[8:])


def branches(engine: Engine, length: int, count: int, sites: str | None = None) -> list[Branch]:
    """Forks of one path of `length` tokens, of which all but the first eight count as generated."""
    root = planted(engine, length, sites)
    forks = root.fork(count)
    root.release()
    return forks


def generate(engine: Engine, given: list[Branch], **options: Any) -> None:
    """Steps of all branches together, without drafts by default."""
    engine.generate(given, STEPS, **{"window": 1, **options})


def one_by_one(engine: Engine, given: list[Branch]) -> None:
    for _ in range(STEPS):
        engine.generate(given, 1)


def streamed(engine: Engine, given: list[Branch]) -> None:
    streams = [branch.stream(STEPS, window=1) for branch in given]
    for _ in range(STEPS):  # read in turns
        for stream in streams:
            next(stream)


HARSH = Sampling(temperature=0.7, seed=3, repetition_penalty=1.2, presence_penalty=0.5)
WAYS: dict[str, tuple[Callable[[Engine, list[Branch]], None], str | None]] = {
    "greedy": (generate, None),
    "sampled with penalties": (partial(generate, sampling=HARSH), None),
    "stop strings": (partial(generate, sampling=Sampling(stop=("never", "<end>"))), None),
    "one request per token": (one_by_one, None),
    "streams": (streamed, None),
    "S captured": (generate, "S"),
    "drafter ngram": (partial(generate, drafter="ngram", window=4), None),
}
"""name -> what to do with the branches, and the sites captured on them"""


def at(length: int) -> str:
    """The name of an arm."""
    return f"at {length}"


@case(
    "hostwork-cpu", ours=at(LENGTHS[-1]), baseline=at(LENGTHS[0]), others=tuple(map(at, LENGTHS[1:-1])), aim="<= 1.2",
    cost=True, best=True, unit="us", warm=0, threads=1, quick={"ways": ("greedy",), "count": 2},
)  # fmt: skip
def hostwork(ways: tuple[str, ...] = tuple(WAYS), count: int = BRANCHES) -> Lines:
    """CPU time of the host per token of 64 branches of one prompt, without the model's arithmetic, at 1,000 to 64,000
    positions. Ratio: the time at 64,000 over that at 1,000."""
    engine = host_engine(max(LENGTHS) + 4096, 2 * max(LENGTHS) + 64 * count)
    given: list[Branch] = []
    for name in ways:
        work, sites = WAYS[name]

        def before(arm: str) -> None:
            given[:] = branches(engine, int(arm.split()[1]), count, sites)
            generate(engine, given)  # the first step copies shared pages and makes what later steps extend
            work(engine, given)

        arms = {at(length): lambda: work(engine, given) for length in LENGTHS}
        yield Line(name, dict(arms), per=STEPS * count, before=before, after=lambda arm, _: released(engine, given))


def fork_by_fork(root: Branch) -> None:
    """A fork that is released before the next one."""
    for _ in range(FORKS):
        root.fork()[0].release()


def together(root: Branch, **options: Any) -> None:
    """Many forks by one call, then released."""
    for fork in root.fork(FORKS, **options):
        fork.release()


def within(root: Branch) -> None:
    """Forks within the path, half a page further left each."""
    for number in range(FORKS):
        root.fork(at=root.length - 8 * number)[0].release()


def of_forks(root: Branch) -> None:
    """A fork of a fork of a fork, each a token longer."""
    made = [root]
    for number in range(FORKS):
        (fork,) = made[-1].fork()
        made.append(fork.force([number % VOCAB]))
    for fork in made[1:]:
        fork.release()


def edited(root: Branch) -> None:
    """Forks with an edit of the last position."""
    together(root, edits=[Edit("blocks.0.hook_in", "zero", positions=root.length - 1)])


FORK_WAYS: dict[str, tuple[Callable[[Branch], None], str | None]] = {
    "fork and release": (fork_by_fork, None),
    "32 forks by one call, and their releases": (together, None),
    "forks within the path": (within, None),
    "forks of forks, a token each": (of_forks, None),
    "forks with an edit": (edited, None),
    "forks of a path with S captured": (fork_by_fork, "S"),
}
"""name -> what to do with a branch, and the sites captured on it"""


@case(
    "forks-cpu", ours=at(FORK_LENGTHS[-1]), baseline=at(FORK_LENGTHS[0]), others=(at(FORK_LENGTHS[1]),), aim="<= 1.5",
    cost=True, best=True, unit="us", rounds=7, threads=1, quick={"ways": ("fork and release",)},
)  # fmt: skip
def forks(ways: tuple[str, ...] = tuple(FORK_WAYS)) -> Lines:
    """CPU time of a fork with its release off prefixes of 1,000 to 32,000 tokens, without the model's arithmetic. Ratio: the
    time at 32,000 over that at 1,000. The first round makes what later forks share."""
    engine = host_engine(max(FORK_LENGTHS) + 4096, 8 * max(FORK_LENGTHS))
    for name in ways:
        work, sites = FORK_WAYS[name]
        roots = {at(length): planted(engine, length, sites) for length in FORK_LENGTHS}
        yield Line(name, {arm: lambda root=root: work(root) for arm, root in roots.items()}, per=FORKS)
        released(engine, roots.values())


COUNTS = (100, 1_000, 10_000, 100_000)
CACHES = {"cache_tokens=8192": 8192, "default cache": None}
AIMS = {"cache_tokens=8192": "<= 2", "default cache": "<= 1.3"}


def beside(count: int) -> str:
    """The name of an arm."""
    return f"{count} branches"


def two_tokens(engine: Engine, root: Branch, count: int) -> None:
    """Two tokens on each of `count` forks, together. As many forks in all whatever the count, up to a few thousand."""
    for _ in range(max(1, 4 * COUNTS[1] // count)):
        forks: list[Branch] = []
        while len(forks) < count:
            forks += root.fork(min(count - len(forks), 50_000))
        engine.generate(forks, 2)
        for fork in forks:
            fork.release()


@case(
    "forks-cpu.many", ours=beside(COUNTS[-1]), baseline=beside(COUNTS[0]), others=tuple(map(beside, COUNTS[1:-1])),
    cost=True, best=True, unit="us", rounds=1, warm=0, threads=1, quick={"counts": (100,), "models": ("tiny",)},
)  # fmt: skip
def many(counts: tuple[int, ...] = COUNTS, models: tuple[str, ...] = ("coin-plain", "tiny")) -> Lines:
    """CPU time per token of two tokens on each of 100 to 100,000 forks of one prompt, forks and releases included, with the
    default cache and with one that is full at once. Ratio: the time with 100,000 branches over that with 100."""
    for model in models:
        for cache, tokens in CACHES.items():
            small = Decoder(TINY_SHAPE).initialize(0).requires_grad_(False) if model == "tiny" else None
            engine = Engine.load(model, cache_tokens=tokens) if small is None else Engine(small, cache_tokens=tokens)
            root = engine.prompt(list(range(2, 22)))
            two_tokens(engine, root, 64)
            rows = [0]
            exact, fast = engine.runner.exact, engine.runner.fast

            def counted(run: Callable[..., Any], rows: list[int], segments: list[Segment], *given: Any) -> Any:
                rows[0] += sum(len(segment.tokens) for segment in segments)
                return run(segments, *given)

            engine.runner.exact = partial(counted, exact, rows)  # type: ignore[method-assign]
            engine.runner.fast = partial(counted, fast, rows)  # type: ignore[method-assign]
            arms = {beside(n): partial(two_tokens, engine, root, n) for n in counts}
            per = {beside(n): 2.0 * n * max(1, 4 * COUNTS[1] // n) for n in counts}
            found = yield Line(f"{model}, {cache}", dict(arms), per=per, aim=AIMS[cache])
            found.note(
                cache_tokens=engine.cache_tokens,
                rows_per_token=rows[0] / sum(per.values()) / len(next(iter(found.row["times_s"].values()))),
            )
            released(engine, [root])
