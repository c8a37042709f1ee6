"""Five jobs of every week on SmolLM2-135M, by the workbench and by TransformerLens: CPU seconds.

    python -m benchmarks.workbench [--rounds 2] [--prompts 4] [--only ablate]

Both sides run on one thread and take turns in one run; the best round of each counts. A round of ours is the whole verb, with
all its cells. Where TransformerLens computes one hooked pass per cell, it runs an evenly spread sample of the same cells, and
both are given per cell. The largest difference between the two results is reported as well.

The grid of ablations is 100 prompts x 30 layers x 9 heads. Both sides run `--prompts` of the 100, and the time is per prompt
and head: prompts are computed one after the other on either side, so it does not depend on their number. TransformerLens is
also measured with 16 prompts in one batch, which a user can do if all prompts have the same length, and in the grid of patches
with all positions of a layer in one batch (`batched_ms`).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.hooked import Hooked, bridge_of_smollm2
from benchmarks.table import Table
from replaylens import Engine, Sampling, ablate, lens, patch, steer

NAMES = ("Mary", "John", "James", "Robert", "David", "Sarah", "Karen", "Daniel", "Mark", "Paul", "Kevin")
PAIRS = [(a, b) for a in NAMES for b in NAMES if a != b][:100]
TEXT = "When {0} and {1} went to the store, {2} gave a drink to"
LAYERS = (0, 7, 15, 22, 29)
"""layers of the sample, evenly spread: a cell costs us more the lower its layer"""
PATCHED = [(layer, position) for layer in LAYERS for position in (2, 9, 13)]
ABLATED = [(layer, head) for layer in LAYERS for head in (0, 6)]
BATCH = 16
"""prompts per pass where TransformerLens computes several together"""
STRENGTHS = (-4.0, -2.0, 2.0, 4.0)
STEERED, NEW = 15, 12
"""the steered layer, and how many tokens are generated"""
COUNT = 16
"""continuations of one prompt"""
CONTRAST = (["I love this", "What a great day"], ["I hate this", "What an awful day"])


def prompts(count: int) -> list[str]:
    return [TEXT.format(a, b, b) for a, b in PAIRS[:count]]


def answers(count: int) -> list[tuple[str, str]]:
    return [(f" {a}", f" {b}") for a, b in PAIRS[:count]]


class Jobs:
    """The five jobs on both sides, each as (ours, theirs, cells of ours, cells of theirs, largest difference)."""

    def __init__(self, engine: Engine, bridge: Any, count: int) -> None:
        self.engine, self.count = engine, count
        self.many, self.batch = (Hooked(bridge, engine, prompts(n), answers(n)) for n in (count, BATCH))
        first, second = PAIRS[0]
        self.pair = TEXT.format(first, second, second), TEXT.format(first, second, first)
        self.two = Hooked(bridge, engine, self.pair, answers(1) * 2)

    def lens(self, table: Table, rounds: int) -> None:
        (token, _), *_ = answers(1)
        ours, theirs = (lambda: lens(self.engine, self.pair[0], token=token).logprob), self.two.lens
        (mine, other), (a, b) = best(rounds, ours, theirs)
        what = "lens: 31 layers x 14 positions, top 5, entropy, KL, one token"
        add(table, what, mine, other, "", apart=float((a - b).abs().max()))

    def patch(self, table: Table, rounds: int) -> None:
        ours = lambda: patch(self.engine, *self.pair, metric=answers(1)[0]).raw["S"]  # noqa: E731
        (mine, other, batched), (grid, values, rows) = best(
            rounds, ours, lambda: self.two.patched(PATCHED), lambda: self.two.patched_together(LAYERS)
        )
        apart = max(abs(float(grid[cell]) - value) for cell, value in zip(PATCHED, values, strict=True))
        apart = max(apart, float((grid[list(LAYERS)] - torch.tensor(rows)).abs().max()))
        together = 1e3 * batched / (len(LAYERS) * len(rows[0]))
        what = "patch: 31 layers x 14 positions"
        add(table, what, mine / grid.numel(), other / len(PATCHED), ">= 8x", apart, batched_ms=together)

    def steer(self, table: Table, rounds: int) -> None:
        text, layer = self.pair[0], STEERED
        ours = lambda: steer(self.engine, CONTRAST, [text], layers=[layer], strengths=STRENGTHS, n=NEW)  # noqa: E731
        vector = ours().vectors[layer]
        theirs = lambda: self.two.steered(layer, vector, (0.0, *STRENGTHS), NEW)  # noqa: E731
        (mine, other), (result, values) = best(rounds, ours, theirs)
        sums = [-NEW * float(torch.tensor(x).log()) for x in result.frame["perplexity"]]
        apart = max(abs(a - b) for a, b in zip(sums, values, strict=True))
        what = f"steer: {len(STRENGTHS) + 1} strengths, {NEW} tokens each"
        add(table, what, mine / len(values), other / len(values), "", apart)

    def resample(self, table: Table, rounds: int) -> None:
        def ours() -> None:
            root = self.engine.prompt(self.pair[0])
            forks = root.fork(COUNT)
            seeds = [Sampling(temperature=1.0, seed=seed, ignore_eos=True) for seed in range(COUNT)]
            for branch in (*self.engine.generate(forks, NEW, sampling=seeds), root):
                branch.release()

        (mine, other), _ = best(rounds, ours, lambda: self.two.resampled(COUNT, NEW))
        add(table, f"resample: {COUNT} continuations of {NEW} tokens", mine / COUNT, other / COUNT, "", None)

    def ablate(self, table: Table, rounds: int) -> None:
        count, heads = self.count, self.engine.config.num_heads
        asked, pairs = prompts(count), answers(count)
        ours = lambda: ablate(self.engine, asked, metric=pairs, heads=True).ablated  # noqa: E731
        theirs = lambda: self.many.ablated(ABLATED)  # noqa: E731
        (mine, other, batched), (grid, values, _) = best(
            rounds, ours, theirs, lambda: self.batch.ablated(ABLATED[::2], together=True)
        )
        apart = max(
            float((grid[layer * heads + head] - torch.tensor(value)).abs().max())
            for (layer, head), value in zip(ABLATED, values, strict=True)
        )
        cells, in_batches = count * len(ABLATED), BATCH * len(ABLATED[::2])
        what = f"ablate: 100 prompts x 30 layers x 9 heads, measured on {count} prompts"
        add(table, what, mine / grid.numel(), other / cells, ">= 8x", apart, batched_ms=1e3 * batched / in_batches)


def best(rounds: int, *works: Callable[[], Any]) -> tuple[list[float], list[Any]]:
    """(the least CPU seconds of each, its last result), measured in turns."""
    seconds, results = [float("inf")] * len(works), [None] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            begin = time.process_time()
            results[i] = work()
            seconds[i] = min(seconds[i], time.process_time() - begin)
    return seconds, results


def add(table: Table, what: str, mine: float, other: float, aim: str, apart: float | None, **more: float) -> None:
    """Mutates the table: adds one job. Times are seconds per cell, or of the whole job."""
    met = other / mine >= 8 if aim else None
    numbers = {"ours_ms": 1e3 * mine, "hooks_ms": 1e3 * other, **more}
    if apart is not None:
        numbers["largest_difference"] = apart
    table.add(what, ratio=other / mine, aim=aim, met=met, **numbers)


def main(arguments: Sequence[str] | None = None) -> None:
    known = ("lens", "patch", "steer", "resample", "ablate")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--only", choices=known, action="append")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    jobs = Jobs(Engine.load("smollm2"), bridge_of_smollm2(), given.prompts)
    table = Table("workbench-cpu", "CPU seconds of TransformerLens / ours, per cell of a grid or per continuation")
    for name in given.only or known:
        getattr(jobs, name)(table, given.rounds)
    table.save(beside=given.only is not None)


if __name__ == "__main__":
    main()
