"""100 sentences x 100 rollouts x 64 tokens with states at sentence ends, by one call of `branch.resample`, on a GPU.

    PYTHONPATH=src python -m benchmarks.rollouts_gpu [--tiny] [--sentences 100] [--n 100]

The model has the Llama-3.1-8B shape and random weights in bfloat16, made on the device. Its vocabulary is made up: a token in
eight ends a sentence. S (the residual stream) of four layers is kept at the fork and at the end of every sentence of every
rollout; finished waves go to a folder on local disk, so that memory does not grow with the number of rollouts. Some rollouts
are then generated again, each alone and with sharing off, and compared bit for bit. Last, a few are written as a dump, which
computes their paths once more, and the dump is verified.
"""

import argparse
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.baselines.subject import SHAPE, TINY_SHAPE, random_decoder
from benchmarks.table import RESULTS, Table
from benchmarks.trees_gpu import apart
from replaylens.engine.dump.maker import make_plan, write_dump
from replaylens.engine.dump.verify import verify
from replaylens.engine.engine import Engine
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.resampling.plan import rollout_seed
from replaylens.engine.resampling.rollouts import Rollout, Rollouts
from replaylens.engine.serving.branch import Branch
from replaylens.tasks import WordTokenizer

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
    shape, device, dtype = (TINY_SHAPE, "cpu", torch.float32) if tiny else (SHAPE, "cuda", torch.bfloat16)
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


def measure(table: Table, engine: Engine, sizes: Sizes, folder: Path) -> None:
    """Mutates the table: the rollouts, some of them alone, a dump of a few."""
    cuda = engine.runner.device == "cuda"
    chain = make_chain(engine, sizes)
    chain.resample(2, at=[sizes.prompt], max_new=2, sampling=HOT, sites=sizes.sites, keep="fork")  # compiles
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin, used = time.perf_counter(), time.process_time()
    drawn = sum(
        1
        for _ in chain.stream_rollouts(
            sizes.n,
            at="sentences",
            sampling=HOT,
            max_new=sizes.max_new,
            sites=sizes.sites,
            keep=["fork", "sentences"],
            folder=folder / "rollouts",
        )
    )
    taken, host = time.perf_counter() - begin, time.process_time() - used
    found = Rollouts.load(folder / "rollouts")
    files = sum(file.stat().st_size for file in (folder / "rollouts").iterdir())
    tokens = sum(len(each.tokens) for each in found)
    table.add(
        f"{len(found.plan.positions)} sentences x {sizes.n} rollouts x {sizes.max_new} tokens, S at {len(sizes.sites)} layers",
        rollouts=drawn,
        seconds=taken,
        host_cpu_seconds=host,
        tokens=tokens,
        tokens_per_s=tokens / taken,
        rows=len(found.index),
        gb_written=files / 1e9,
        digest=found.digest,
    )
    table.add(
        "memory at its peak, GiB",
        device_allocated=torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        device_reserved=torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0,
        weights_and_kv_cache=_held_bytes(engine) / 2**30,
        host_before=held,
        host=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    some = [found[i * (len(found) - 1) // (sizes.compared - 1)] for i in range(sizes.compared)]
    wrong = differing(engine, chain, sizes, some)
    table.add("rollouts that differ alone, in tokens or rows", aim="0", met=not wrong, differing=wrong, compared=len(some))
    measure_dump(table, engine, sizes, found, folder)


def measure_dump(table: Table, engine: Engine, sizes: Sizes, found: Rollouts, folder: Path) -> None:
    """Mutates the table: the first rollouts as a dump of the kept rows, verified."""
    first = {"n": sizes.dumped, "positions": found.plan.positions[:1], "texts": found.plan.texts[:1]}
    few = Rollouts(replace(found.plan, **first), found.rollouts[: sizes.dumped])
    begin = time.perf_counter()
    task = engine.texts(few)
    plan = make_plan(engine, task, len(task), sites=sizes.sites, positions="label:place", rejected=False)
    dump = write_dump(engine, plan, folder / "dump")
    taken = time.perf_counter() - begin
    assert dump is not None  # it has one writer
    report = verify(folder / "dump", engine, sample="all")
    table.add(f"a dump of {len(few)} of them, verified", aim="verified", met=bool(report), seconds=taken, rows=report.rows)


def _held_bytes(engine: Engine) -> int:
    weights = sum(parameter.numel() * parameter.element_size() for parameter in engine.runner.model.parameters())
    return weights + engine.runner.cache.num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: shows that everything runs")
    parser.add_argument("--sentences", type=int)
    parser.add_argument("--n", type=int, help="rollouts of each sentence")
    parser.add_argument("--out", type=Path, default=RESULTS / "rollouts-gpu.json")
    given = parser.parse_args()
    sizes = TINY if given.tiny else Sizes()
    sizes = replace(sizes, sentences=given.sentences or sizes.sentences, n=given.n or sizes.n)
    what = "tiny shape, float32, CPU" if given.tiny else f"Llama-3.1-8B shape, bfloat16, {torch.cuda.get_device_name()}"
    about = f"random weights, {what}; a chain of {sizes.length} tokens, {os.cpu_count()} CPU cores"
    folder = Path(tempfile.mkdtemp(prefix="rollouts-"))
    try:
        measure(Table("rollouts-gpu", about, out=given.out), make_engine(given.tiny, sizes), sizes, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
