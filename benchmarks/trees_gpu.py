"""Branches of one prompt on a GPU: reading the shared prefix once against reading it for every branch.

    PYTHONPATH=src python -m benchmarks.trees_gpu [--tiny] [--rounds 2] [--only captured]

The model has the Llama-3.1-8B shape and random weights in bfloat16. All branches are forks of one prompt and generate at
temperature 1, each with its own seed, through `Engine.generate`. "Apart" is the same engine with sharing off and at most 256
branches in a decode step. A few branches are then generated alone, and their tokens and KV are compared bit for bit.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.baselines.subject import SHAPE, TINY_SHAPE, random_decoder
from benchmarks.table import RESULTS, Table
from replaylens.engine.engine import Engine
from replaylens.engine.passes import bursts
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch

NEVER = 1 << 60


@dataclass(frozen=True)
class Sizes:
    """How much is generated."""

    prefixes: tuple[int, ...] = (1024, 8192, 16384)
    branches: int = 1024
    tokens: int = 64
    compared: int = 4
    layers: tuple[int, ...] = (7, 15, 23, 31)


TINY = Sizes(prefixes=(64, 128), branches=6, tokens=4, compared=2, layers=(0, 1))


@contextmanager
def apart(engine: Engine) -> Iterator[None]:
    """Every branch reads its own keys, and a decode step has at most 256 branches."""
    worth, sizes = engine.runner.cache.worth_sharing, bursts.SIZES
    engine.runner.cache.worth_sharing, bursts.SIZES = NEVER, tuple(size for size in sizes if size <= 256)
    try:
        yield
    finally:
        engine.runner.cache.worth_sharing, bursts.SIZES = worth, sizes


def samplings(count: int) -> list[Sampling]:
    return [Sampling(temperature=1.0, seed=seed, ignore_eos=True) for seed in range(count)]


def random_tokens(engine: Engine, count: int) -> list[int]:
    chance = torch.Generator().manual_seed(count)
    return [int(token) for token in torch.randint(2, engine.config.vocab_size, (count,), generator=chance)]


def grown(engine: Engine, root: Branch, sizes: Sizes) -> tuple[float, list[Branch]]:
    """(seconds of generating on all branches, the branches)."""
    branches = root.fork(sizes.branches)
    _wait()
    begin = time.perf_counter()
    engine.generate(branches, sizes.tokens, sampling=samplings(sizes.branches))
    if root.lane.capture is not None and engine.runner.device == "cuda":
        engine.runner.ferry.wait()
    _wait()
    return time.perf_counter() - begin, branches


def rate(engine: Engine, root: Branch, sizes: Sizes, rounds: int) -> float:
    """Tokens per second: the best of some rounds. The first compiles and does not count."""
    times = []
    for _ in range(rounds + 1):
        taken, branches = grown(engine, root, sizes)
        times.append(taken)
        for branch in branches:
            branch.release()
    return sizes.branches * sizes.tokens / min(times[1:])


def differing(engine: Engine, root: Branch, sizes: Sizes) -> int:
    """How many of some branches differ from the same branch alone, in tokens or KV."""
    _, branches = grown(engine, root, sizes)
    chosen = [i * (sizes.branches - 1) // (sizes.compared - 1) for i in range(sizes.compared)]
    found = 0
    with apart(engine):
        for i in chosen:
            (alone,) = root.fork(1)
            alone.generate(sizes.tokens, sampling=samplings(sizes.branches)[i])
            found += alone.tokens != branches[i].tokens or not torch.equal(alone.kv(), branches[i].kv())
            alone.release()
    for branch in branches:
        branch.release()
    return found


def measure(table: Table, engine: Engine, sizes: Sizes, rounds: int) -> None:
    rates = {}
    for prefix in sizes.prefixes:
        root = engine.prompt(random_tokens(engine, prefix))
        rates[prefix] = rate(engine, root, sizes, rounds)
        numbers = {"tokens_per_s": rates[prefix], "ms_a_step": 1e3 * sizes.branches / rates[prefix]}
        if prefix == sizes.prefixes[1]:
            with apart(engine):
                before = rate(engine, root, replace(sizes, tokens=max(1, sizes.tokens // 4)), 1)
            ratio = rates[prefix] / before
            table.add(
                f"prefix {prefix}, against reading it for every branch", ratio=ratio, aim=">= 6", met=ratio >= 6, **numbers
            )
        else:
            table.add(f"prefix {prefix}", **numbers)
        wrong = differing(engine, root, sizes)
        table.add(f"prefix {prefix}: branches that differ alone", met=not wrong, differing=wrong, compared=sizes.compared)
        root.release()
        engine.prefix.clear()
    short, middle = sizes.prefixes[:2]
    ratio = rates[middle] / rates[short]
    table.add(f"prefix {middle} against {short}", ratio=ratio, aim=">= 0.75", met=ratio >= 0.75)
    if len(sizes.prefixes) > 2:
        ratio = rates[sizes.prefixes[2]] / rates[short]
        table.add(f"prefix {sizes.prefixes[2]} against {short}", ratio=ratio, aim=">= 0.85", met=ratio >= 0.85)
    measure_captured(table, engine, sizes, rates[middle], rounds)


def measure_captured(table: Table, engine: Engine, sizes: Sizes, plain: float, rounds: int) -> None:
    """Mutates the table: the middle prefix with rows kept on the host, against the tokens per second without."""
    middle = sizes.prefixes[1]
    sites = [f"blocks.{layer}.hook_out" for layer in sizes.layers]
    for what, asked in ((f"S at {len(sites)} layers", sites), (f"S at {len(sites)} layers and Z", [*sites, "Z"])):
        root = engine.prompt(random_tokens(engine, middle), sites=asked, positions="response")
        ratio = rate(engine, root, sizes, rounds) / plain
        table.add(f"prefix {middle}, {what} on the host", ratio=ratio, aim=">= 0.9", met=ratio >= 0.9)
        root.release()
        engine.prefix.clear()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: shows that everything runs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["captured"], help="measure only what capture costs, and keep the other lines")
    parser.add_argument("--out", type=Path, default=RESULTS / "trees-gpu.json")
    given = parser.parse_args()
    sizes = TINY if given.tiny else Sizes()
    shape, device, dtype = (TINY_SHAPE, "cpu", torch.float32) if given.tiny else (SHAPE, "cuda", torch.bfloat16)
    room = 2 * max(sizes.prefixes) + sizes.branches * (sizes.tokens + 32)
    model = random_decoder(replace(shape, max_positions=2 * max(sizes.prefixes)), device, dtype)
    engine = Engine(model, cache_tokens=room, max_rows=max(512, sizes.branches))
    what = "tiny shape, float32, CPU" if given.tiny else f"Llama-3.1-8B shape, bfloat16, {torch.cuda.get_device_name()}"
    about = f"random weights, {what}; {sizes.branches} branches of {sizes.tokens} tokens"
    if given.only is None:
        measure(Table("trees-gpu", about, out=given.out), engine, sizes, given.rounds)
        return
    table = Table("trees-gpu", about)
    root = engine.prompt(random_tokens(engine, sizes.prefixes[1]))
    plain = rate(engine, root, sizes, given.rounds)
    root.release()
    measure_captured(table, engine, sizes, plain, given.rounds)
    table.out = given.out
    table.save(beside=True)


if __name__ == "__main__":
    main()
