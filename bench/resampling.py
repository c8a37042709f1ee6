"""Branches of one prompt and rollouts on a GPU: Llama-3.1-8B shape, random weights in bfloat16; `--quick`: tiny, on the CPU."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.harness import Line, Lines, case, memory_mb, random_tokens, seconds
from bench.subjects import random_decoder, released, seeded, where
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.verify import verify
from replaylens.engine.engine import Engine
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.rollouts.plan import rollout_seed
from replaylens.rollouts.rollouts import Rollout, Rollouts
from replaylens.tasks import WordTokenizer

NEVER = 1 << 60


@contextmanager
def apart(engine: Engine) -> Iterator[None]:
    """Every branch reads its own keys, and a decode step has at most 256 branches."""
    from replaylens.engine.passes import bursts  # needs triton

    worth, sizes = engine.runner.cache.worth_sharing, bursts.SIZES
    engine.runner.cache.worth_sharing, bursts.SIZES = NEVER, tuple(size for size in sizes if size <= 256)
    try:
        yield
    finally:
        engine.runner.cache.worth_sharing, bursts.SIZES = worth, sizes


@dataclass(frozen=True)
class TreeSizes:
    """How much is generated."""

    prefixes: tuple[int, ...] = (1024, 8192, 16384)
    branches: int = 1024
    tokens: int = 64
    compared: int = 4
    layers: tuple[int, ...] = (7, 15, 23, 31)


TINY_TREES = TreeSizes(prefixes=(64, 128), branches=6, tokens=4, compared=2, layers=(0, 1))


def differing_branches(engine: Engine, root: Branch, sizes: TreeSizes) -> int:
    """How many of some branches differ from the same branch alone, in tokens or KV."""
    branches = root.fork(sizes.branches)
    engine.generate(branches, sizes.tokens, sampling=seeded(sizes.branches))
    chosen = [i * (sizes.branches - 1) // (sizes.compared - 1) for i in range(sizes.compared)]
    found = 0
    with apart(engine):
        for i in chosen:
            (alone,) = root.fork(1)
            alone.generate(sizes.tokens, sampling=seeded(sizes.branches)[i])
            found += alone.tokens != branches[i].tokens or not torch.equal(alone.kv(), branches[i].kv())
            alone.release()
    _free(branches)
    return found


def _free(branches: Sequence[Branch]) -> None:
    """Their prompt stays in the prefix index."""
    for branch in branches:
        branch.release()


def grown(engine: Engine, root: Branch, sizes: TreeSizes, what: str, arm: str, tokens: int | None = None) -> Line:
    """A line of the time per token of all branches; forking and releasing are not timed."""
    tokens, branches = tokens or sizes.tokens, list[Branch]()

    def work() -> None:
        engine.generate(branches, tokens, sampling=seeded(sizes.branches))
        if root.lane.capture is not None and engine.runner.device == "cuda":
            engine.runner.host_copy.wait()

    before = lambda arm: branches.__setitem__(slice(None), root.fork(sizes.branches))  # noqa: E731
    return Line(what, {arm: work}, per=tokens * sizes.branches, before=before, after=lambda arm, _: _free(branches))


@case(
    "trees-gpu", ours="shared", baseline="apart", others=("captured",), needs="gpu", clock="wall", unit="us", best=True,
    rounds=2, quick={"tiny": True},
)  # fmt: skip
def trees(tiny: bool = False, parts: tuple[str, ...] = ("prefixes", "captured")) -> Lines:
    """Reading the shared prefix of 1,024 forks of one prompt once against reading it for every branch: 64 tokens each at
    temperature 1; times are per token. "Apart" is the same engine with sharing off and at most 256 branches in a decode step. A
    few branches are generated alone, and their tokens and KV are compared bit for bit."""
    sizes, (shape, device, dtype) = TINY_TREES if tiny else TreeSizes(), where(tiny)
    model = random_decoder(replace(shape, max_positions=2 * max(sizes.prefixes)), device, dtype)
    room = 2 * max(sizes.prefixes) + sizes.branches * (sizes.tokens + 32)
    engine = Engine(model, cache_tokens=room, max_rows=max(512, sizes.branches))
    (short, middle, *longer), rates = sizes.prefixes, dict[int, float]()
    planted = lambda length, **how: engine.prompt(random_tokens(1, length, shape.vocab_size, seed=length)[0], **how)  # noqa: E731
    for prefix in sizes.prefixes if "prefixes" in parts else (middle,):
        root = planted(prefix)
        found = yield grown(engine, root, sizes, f"prefix {prefix}", "shared")
        rates[prefix] = 1 / found.values["shared"]
        found.note(tokens_per_s=rates[prefix], ms_a_step=1e3 * sizes.branches / rates[prefix])
        if "prefixes" in parts:
            wrong = differing_branches(engine, root, sizes)
            numbers = {"differing": wrong, "compared": sizes.compared}
            yield Line(f"prefix {prefix}: branches that differ alone", met=not wrong, numbers=numbers)
        if prefix == middle and "prefixes" in parts:
            with apart(engine):
                found = yield grown(engine, root, sizes, f"prefix {prefix}, apart", "apart", max(1, sizes.tokens // 4))
            ratio = rates[prefix] * found.values["apart"]
            yield Line(f"prefix {prefix}, against reading it for every branch", ratio=ratio, aim=">= 6")
        released(engine, [root])
    for prefix, aim in zip((middle, *longer), (">= 0.75", ">= 0.8"), strict=False):
        if "prefixes" in parts:
            yield Line(f"prefix {prefix} against {short}", ratio=rates[prefix] / rates[short], aim=aim)
    sites = [f"blocks.{layer}.hook_out" for layer in sizes.layers]
    for what, names in ((f"S at {len(sites)} layers", sites), (f"S at {len(sites)} layers and Z", [*sites, "Z"])):
        if "captured" in parts:
            root = planted(middle, sites=names, positions="response")
            found = yield grown(engine, root, sizes, f"prefix {middle}, {what} on the host, time", "captured")
            ratio = 1 / found.values["captured"] / rates[middle]
            yield Line(f"prefix {middle}, {what} on the host", ratio=ratio, aim=">= 0.9")
            released(engine, [root])


# Rollouts

ENDS = 8
"""one word in so many ends a sentence"""
HOT = Sampling(temperature=1.0, seed=0, ignore_eos=True)


@dataclass(frozen=True)
class Sizes:
    """How much is drawn."""

    sentences: int = 100
    n: int = 100
    max_new: int = 64
    prompt: int = 64
    sentence: int = 12
    """tokens of a sentence of the chain"""
    compared: int = 8
    dumped: int = 16
    layers: tuple[int, ...] = (7, 15, 23, 31)

    @property
    def sites(self) -> list[str]:
        return [f"blocks.{layer}.hook_out" for layer in self.layers]

    @property
    def length(self) -> int:
        return self.prompt + self.sentences * self.sentence


TINY = Sizes(sentences=5, n=4, max_new=6, prompt=24, sentence=8, compared=4, dumped=3, layers=(0, 1))


def make_engine(tiny: bool, sizes: Sizes) -> Engine:
    shape, device, dtype = where(tiny)
    words = [f" x{i}" + "." * (i % ENDS == 0) for i in range(shape.vocab_size - 2)]
    model = random_decoder(replace(shape, max_positions=sizes.length + sizes.max_new + 1), device, dtype)
    wave = min(1024, sizes.sentences * sizes.n)
    room = 2 * sizes.length + wave * (sizes.max_new + 32)
    return Engine(model, Words(words), cache_tokens=room, max_rows=max(512, wave))


class Words(WordTokenizer):
    """Words that may end with a full stop, which `WordTokenizer` takes for a word of its own."""

    def __init__(self, words: Sequence[str]) -> None:
        self._tokens = ("<pad>", "<eos>", *words)
        self._texts = ("", "", *words)
        self._ids = {word: number for number, word in enumerate(self._tokens)}


def make_chain(engine: Engine, sizes: Sizes) -> Branch:
    """A prompt and a chain of sentences, all of random words."""
    chance = torch.Generator().manual_seed(0)
    words = engine.config.vocab_size - 2

    def drawn(count: int, ends: bool) -> list[int]:
        some = torch.randint(words // ENDS, (count,), generator=chance) * ENDS + (0 if ends else 3)
        return (some.clamp(max=words - 1) + 2).tolist()

    chain = [token for _ in range(sizes.sentences) for token in (*drawn(sizes.sentence - 1, False), *drawn(1, True))]
    return engine.prompt(drawn(sizes.prompt - 1, False) + drawn(1, True)).force(chain)


def differing(engine: Engine, chain: Branch, sizes: Sizes, found: Sequence[Rollout]) -> int:
    """How many of some rollouts differ from the same rollout alone, in tokens or kept rows."""
    wrong = 0
    with apart(engine):
        for each in found:
            with engine.prompt(chain.tokens[: each.position], sites=sizes.sites) as root:
                own = replace(HOT, seed=rollout_seed(HOT.seed, each.position, each.number))
                root.generate(sizes.max_new, sampling=own, final=True)
                at = torch.tensor([token for _, token in each.rows])
                same = tuple(root.tokens[each.position :]) == each.tokens
                rows = all(torch.equal(root.activations[site].cpu()[at], each.states[site]) for site in sizes.sites)
                wrong += not (same and rows)
    return wrong


def prepared(tiny: bool, sizes: Sizes) -> tuple[Engine, Branch, dict[str, Any], float]:
    """An engine, a chain, options of its rollouts, and the seconds of a wave with their shapes, which compiles kernels."""
    engine = make_engine(tiny, sizes)
    chain, how = make_chain(engine, sizes), dict[str, Any](sampling=HOT, max_new=sizes.max_new, sites=sizes.sites)
    first = [sizes.prompt + i * sizes.sentence for i in range(min(sizes.sentences, -(-1024 // sizes.n)))]
    compiling, _ = seconds(lambda: chain.resample(sizes.n, at=first, keep="fork", **how), "wall")
    return engine, chain, how, compiling


@case("rollouts-gpu", needs="gpu", clock="wall", quick={"tiny": True, "sentences": 5, "n": 4})
def rollouts(tiny: bool = False, sentences: int = 100, n: int = 100) -> Lines:
    """100 sentences x 100 rollouts x 64 tokens by one call of `branch.stream_rollouts`, with S of four layers kept at the fork
    and at every sentence end; a token in eight ends a sentence. Finished waves go to a folder, so that memory does not grow.
    Some rollouts are generated again, alone and with sharing off, and compared bit for bit. Last, a few are written as a dump,
    which computes their paths once more and is verified."""
    sizes = replace(TINY if tiny else Sizes(), sentences=sentences, n=n)
    engine, chain, how, compiling = prepared(tiny, sizes)
    cuda = engine.runner.device == "cuda"
    held = memory_mb("VmHWM") * 1e6 / 2**30
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(prefix="rollouts-") as name:
        folder = Path(name)
        drawing = chain.stream_rollouts(sizes.n, at="sentences", keep=["fork", "sentences"], folder=folder / "rollouts", **how)
        host, (taken, drawn) = seconds(lambda: seconds(lambda: sum(1 for _ in drawing), "wall"), "cpu")
        found = Rollouts.load(folder / "rollouts")
        files = sum(file.stat().st_size for file in (folder / "rollouts").iterdir())
        tokens = sum(len(each.tokens) for each in found)
        numbers: dict[str, Any] = dict(rollouts=drawn, seconds=taken, host_cpu_seconds=host, tokens=tokens)
        numbers |= dict(first_wave_seconds=compiling)
        numbers |= dict(tokens_per_s=tokens / taken, rows=len(found.index), gb_written=files / 1e9, digest=found.digest)
        drawn_of = f"{len(found.plan.positions)} sentences x {sizes.n} rollouts x {sizes.max_new} tokens"
        yield Line(f"{drawn_of}, S at {len(sizes.sites)} layers", numbers=numbers)
        weights = sum(x.nbytes for x in engine.runner.model.parameters())
        numbers = {"host": memory_mb("VmHWM") * 1e6 / 2**30, "host_before": held}
        numbers["weights_and_kv_cache"] = (weights + engine.runner.cache.num_bytes) / 2**30
        for kind in ("allocated", "reserved"):
            numbers[f"device_{kind}"] = getattr(torch.cuda, f"max_memory_{kind}")() / 2**30 if cuda else 0.0
        yield Line("memory at its peak, GiB", numbers=numbers)
        some = [found[i * (len(found) - 1) // (sizes.compared - 1)] for i in range(sizes.compared)]
        wrong = differing(engine, chain, sizes, some)
        numbers = {"differing": wrong, "compared": len(some)}
        yield Line("rollouts that differ alone, in tokens or rows", aim="0", met=not wrong, numbers=numbers)
        yield _dump(engine, sizes, found, folder / "dump")


@case("rollouts-gpu.sustained", needs="gpu", clock="wall", quick={"tiny": True, "sentences": 5, "n": 8})
def sustained(tiny: bool = False, sentences: int = 100, n: int = 1000) -> Lines:
    """100,000 rollouts as in `rollouts-gpu`, by one call, quarter by quarter: whether speed and memory stay as they are. One of
    each quarter is generated again, alone and with sharing off, and compared bit for bit."""
    sizes = replace(TINY if tiny else Sizes(), sentences=sentences, n=n)
    engine, chain, how, _ = prepared(tiny, sizes)
    total, some, begin = sizes.sentences * sizes.n, list[Rollout](), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rollouts-") as name:
        drawing = chain.stream_rollouts(sizes.n, at="sentences", keep=["fork", "sentences"], folder=Path(name) / "own", **how)
        tokens, started, every = 0, begin, total // 4
        for number, each in enumerate(drawing, 1):
            tokens += len(each.tokens)
            if number % every == every // 2:
                some.append(each)
            if number % every == 0:
                now, started = time.perf_counter() - started, time.perf_counter()
                numbers = {"seconds": now, "tokens_per_s": tokens / now, "host_gib": memory_mb("VmHWM") * 1e6 / 2**30}
                yield Line(f"rollouts {number - every} to {number}", numbers=numbers)
                tokens = 0
        taken = time.perf_counter() - begin
        numbers = {"seconds": taken, "tokens_per_s": total * sizes.max_new / taken}
        yield Line(f"{total} rollouts x {sizes.max_new} tokens, S at {len(sizes.sites)} layers", numbers=numbers)
        wrong = differing(engine, chain, sizes, some)
    yield Line("rollouts that differ alone", aim="0", met=not wrong, numbers={"differing": wrong, "compared": len(some)})


def _dump(engine: Engine, sizes: Sizes, found: Rollouts, folder: Path) -> Line:
    """The first rollouts as a dump of the kept rows, verified."""
    first = {"n": sizes.dumped, "positions": found.plan.positions[:1], "texts": found.plan.texts[:1]}
    few = Rollouts(replace(found.plan, **first), found.rollouts[: sizes.dumped])

    def work() -> None:
        task = engine.texts(few)
        plan = make_plan(engine, task, len(task), sites=sizes.sites, positions="label:place", rejected=False)
        assert write_dump(engine, plan, folder) is not None  # it has one writer

    taken, _ = seconds(work, "wall")
    report = verify(folder, engine, sample="all")
    numbers = {"seconds": taken, "rows": report.rows}
    return Line(f"a dump of {len(few)} of them, verified", aim="verified", met=bool(report), numbers=numbers)
