"""A dump of S, T, C to local disk against writing the same bytes with as many threads, on a GPU.

    PYTHONPATH=src python -m benchmarks.dump_gpu [--tiny]

The model has the Llama-3.1-8B shape and random weights in bfloat16. Both sides end with a sync of all files. The dump is then
verified: its files are hashed, and a tenth of its examples is computed again and compared bit for bit.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.baselines.subject import SHAPE, TINY_SHAPE, random_decoder
from benchmarks.table import RESULTS, Table
from replaylens import tasks
from replaylens.engine.dump.maker import make_plan, write_dump
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import verify
from replaylens.engine.engine import Engine
from replaylens.tasks import WordTokenizer

WRITERS, BLOCK = 8, 1 << 24


def make_engine(tiny: bool) -> Engine:
    """The model with the coin's words and as many others as it has tokens, so that any token it chooses has a text."""
    words = list(tasks.get("coin").vocabulary())
    shape, device, dtype = (
        (replace(TINY_SHAPE, vocab_size=len(words) + 2), "cpu", torch.float32) if tiny else (SHAPE, "cuda", torch.bfloat16)
    )
    words += [f" x{number}" for number in range(shape.vocab_size - 2 - len(words))]
    return Engine(random_decoder(shape, device, dtype), WordTokenizer(words), cache_tokens=64 * 256)


def synced(work: Callable[[], object], folder: Path) -> float:
    """Seconds of `work` and of a sync of all files it wrote."""
    begin = time.perf_counter()
    work()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(_sync, [path for path in folder.rglob("*") if path.is_file()]))
    return time.perf_counter() - begin


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_raw(sizes: list[int], folder: Path) -> None:
    """Files of these sizes from one block of memory, by as many threads as the dump has."""
    folder.mkdir()
    block = memoryview(torch.randint(256, (BLOCK,), dtype=torch.uint8).numpy())

    def one(number: int) -> None:
        with (folder / str(number)).open("wb", buffering=0) as file:
            for first in range(0, sizes[number], BLOCK):
                file.write(block[: min(BLOCK, sizes[number] - first)])

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(one, range(len(sizes))))


def write_ours(engine: Engine, plan: DumpPlan, folder: Path) -> Dump:
    engine.prefix.clear()
    dump = write_dump(engine, plan, folder, batch=64, writers=WRITERS)
    assert dump is not None
    return dump


def measure(table: Table, engine: Engine, examples: int, rounds: int) -> None:
    """Dump and raw writing in turns; the first round does not count."""
    task = tasks.get("coin")(flips=16, p=1.0)
    plan = make_plan(engine, task, examples, sites="STC", drafter="ngram", max_new=4, examples_per_shard=max(1, examples // 16))
    ours, raw = [], []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "dump"
            taken = synced(lambda folder=folder: write_ours(engine, plan, folder), folder)
            sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
            if number == rounds:
                _verify(table, engine, folder)
            shutil.rmtree(folder)
            plain = synced(lambda folder=folder, sizes=sizes: write_raw(sizes, folder), folder)
        print(f"round {number}: dump {taken:.1f} s, the bytes alone {plain:.1f} s", flush=True)
        if number:
            ours, raw = [*ours, taken], [*raw, plain]
    total, best, floor = sum(sizes), min(ours), min(raw)
    table.add(
        f"dump of S, T, C, {examples} examples, {WRITERS} writers",
        ratio=floor / best,
        aim=">= 0.8",
        met=floor / best >= 0.8,
        gb=total / 1e9,
        dump_gb_per_s=total / best / 1e9,
        raw_gb_per_s=total / floor / 1e9,
    )


def _verify(table: Table, engine: Engine, folder: Path) -> None:
    begin = time.perf_counter()
    found = verify(folder, engine, sample=0.1)
    table.add("verified, a tenth by replay", met=bool(found), rows=found.rows, seconds=time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: shows that everything runs")
    parser.add_argument("--examples", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "dump-gpu.json")
    given = parser.parse_args()
    what = "tiny shape, float32, CPU" if given.tiny else f"Llama-3.1-8B shape, bfloat16, {torch.cuda.get_device_name()}"
    table = Table("dump-gpu", f"random weights, {what}; coin prompts of 75 tokens", out=given.out)
    measure(table, make_engine(given.tiny), given.examples, given.rounds)


if __name__ == "__main__":
    main()
