"""Writing dumps of S, T, C: against TransformerLens and Hugging Face on one CPU thread, against the bytes alone on a GPU.

On the CPU, the others get batches sorted by length, so they never pad, and write bare tensors; replaylens also writes rejected
branches, labels, probabilities and hashes. Rows count tokens on accepted paths only, which all of them have.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.harness import Line, Lines, case, seconds
from bench.subjects import bridge, peer, random_decoder, where
from replaylens import tasks
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.verify import verify
from replaylens.engine.engine import Engine
from replaylens.tasks import Example, WordTokenizer
from replaylens.tasks.task import AnyTask

BATCH, NEW = 32, 4
OURS, NGRAM, BARE = "replaylens", "replaylens, drafter ngram", "replaylens, no probabilities"
LENS, HUGGING_FACE = "TransformerLens", "Hugging Face"
Way = Callable[[Path], int]
"""folder -> number of rows written"""


def batches(engine: Engine, examples: list[Example]) -> Iterator[Tensor]:
    """Prompts grouped by length, so that no padding is needed: [batch, length]."""
    by_length: dict[int, list[list[int]]] = {}
    for example in examples:
        ids = engine.text.encode(example.prompt)
        by_length.setdefault(len(ids), []).append(ids)
    for prompts in by_length.values():
        for first in range(0, len(prompts), BATCH):
            yield torch.tensor(prompts[first : first + BATCH])


def generated(model: Any, prompts: Tensor, **more: Any) -> Any:
    """Hugging Face's greedy answers."""
    options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(prompts))
    return model.generate(prompts, return_dict_in_generate=True, **options, **more)


@torch.inference_mode()
def with_transformer_lens(model: Any, lens: Any, engine: Engine, examples: list[Example], folder: Path) -> int:
    """Generate, run_with_cache over the whole paths, torch.save. Returns the row count."""
    rows = 0
    wanted = {name for letter in "STC" for name in engine.sites.per_layer(letter)}
    for number, prompts in enumerate(batches(engine, examples)):
        tokens = generated(model, prompts).sequences
        _, cache = lens.run_with_cache(tokens, names_filter=lambda name: name in wanted)
        kept = {name: cache[name] for name in wanted}
        torch.save(kept, folder / f"{number}.pt")
        rows += tokens.numel()
    return rows


@torch.inference_mode()
def with_hugging_face(model: Any, engine: Engine, examples: list[Example], folder: Path) -> int:
    """Generate with output_hidden_states, then safetensors: only S, without the last token's row. Returns the row count."""
    rows = 0
    for number, prompts in enumerate(batches(engine, examples)):
        steps = generated(model, prompts, output_hidden_states=True).hidden_states
        layers = [torch.cat([step[layer] for step in steps], dim=1) for layer in range(len(steps[0]))]
        save_file({f"hidden.{i}": x.contiguous() for i, x in enumerate(layers)}, folder / f"{number}.safetensors")
        rows += layers[0].shape[0] * layers[0].shape[1]
    return rows


def dumped(engine: Engine, task: AnyTask, n: int, folder: Path, **options: Any) -> int:
    """Ours. Returns the row count."""
    dump = write_dump(engine, make_plan(engine, task, n, sites="STC", max_new=NEW, **options), folder / "dump", batch=BATCH)
    assert dump is not None
    return dump.manifest.accepted_rows


def words_of(vocab_size: int) -> WordTokenizer:
    """The coin's words and as many others as the model has tokens, so that any token it chooses has a text."""
    words = list(tasks.get("coin").vocabulary())
    return WordTokenizer([*words, *(f" x{number}" for number in range(vocab_size - 2 - len(words)))])


@case(
    "dump-cpu.coin", ours=OURS, baseline=LENS, others=(NGRAM, BARE, HUGGING_FACE), aim=">= 1.5", unit="s", best=True,
    rounds=3, threads=1, quick={"n": 4},
)  # fmt: skip
def coin(n: int = 256) -> Lines:
    """A dump of coin examples with coin-plain, drafter lens, against tools that generate the answers and write every layer's
    rows of every token. One thread, CPU seconds of the same rows, a sync to disk included."""
    engine, task = Engine.load("coin-plain"), tasks.get("coin")()
    model = peer(engine.model)
    lens, dump, examples = bridge(model), partial(dumped, engine, task, n), task.examples(n)
    ways: dict[str, Way] = {
        OURS: partial(dump, drafter="lens"),
        NGRAM: partial(dump, drafter="ngram"),
        BARE: partial(dump, drafter="ngram", probabilities=False),
        LENS: lambda folder: with_transformer_lens(model, lens, engine, examples, folder),
        HUGGING_FACE: lambda folder: with_hugging_face(model, engine, examples, folder),
    }
    with tempfile.TemporaryDirectory() as name:
        folder, sizes = Path(name) / "out", dict[str, int]()

        def work(arm: str) -> int:
            rows = ways[arm](folder)
            sync(folder)
            return rows

        def after(arm: str, rows: int) -> None:
            sizes[arm] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder)

        what = "coin-plain: a dump against TransformerLens generate + run_with_cache + torch.save"
        found = yield Line(what, {arm: partial(work, arm) for arm in ways}, before=lambda arm: folder.mkdir(), after=after)
    rates = {arm: found.results[arm] / taken for arm, taken in found.values.items()}  # not all write as many rows
    best = max(rates[OURS], rates[NGRAM])
    found.judge(best / rates[LENS])
    found.note(rows_per_cpu_s=rates, rows=found.results, bytes=sizes)
    what = "coin-plain: a dump against Hugging Face generate with hidden states (S only) + safetensors"
    yield Line(what, ratio=best / rates[HUGGING_FACE], aim=">= 0.8")


# On a GPU

WRITERS, BLOCK = 8, 1 << 24


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Waits until all files are on the disk."""
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(_sync, [path for path in folder.rglob("*") if path.is_file()]))


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


@case(
    "dump-gpu", ours="dump", baseline="raw", aim=">= 0.8", needs="gpu", clock="wall", unit="s", best=True, rounds=3,
    quick={"tiny": True, "examples": 4},
)  # fmt: skip
def dump_gpu(tiny: bool = False, examples: int = 160) -> Lines:
    """A dump of S, T, C of coin prompts of 75 tokens to local disk against writing the same bytes with as many threads, both
    with a sync of all files: Llama-3.1-8B shape, random weights, bfloat16. The dump is then verified: its files are hashed, and
    a tenth of its examples is computed again and compared bit for bit."""
    shape, device, dtype = where(tiny)
    shape = replace(shape, vocab_size=len(tasks.get("coin").vocabulary()) + 2) if tiny else shape
    engine = Engine(random_decoder(shape, device, dtype), words_of(shape.vocab_size), cache_tokens=64 * 256)
    task = tasks.get("coin")(flips=16, p=1.0)
    plan = make_plan(engine, task, examples, sites="STC", drafter="ngram", max_new=4, examples_per_shard=max(1, examples // 16))
    with tempfile.TemporaryDirectory() as name:
        folder, raw = Path(name) / "dump", Path(name) / "raw"

        def dump() -> None:
            engine.prefix.clear()
            assert write_dump(engine, plan, folder, batch=64, writers=WRITERS) is not None
            sync(folder)

        def plain() -> None:
            write_raw(sizes, raw)
            sync(raw)

        def before(arm: str) -> None:
            for each in (folder, raw):
                shutil.rmtree(each, ignore_errors=True)

        dump()
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        taken, found = seconds(lambda: verify(folder, engine, sample=0.1), "wall")
        yield Line("verified, a tenth by replay", met=bool(found), numbers={"rows": found.rows, "seconds": taken})
        what = f"dump of S, T, C, {examples} examples, {WRITERS} writers"
        line = yield Line(what, {"dump": dump, "raw": plain}, before=before)
        rates = {f"{arm}_gb_per_s": sum(sizes) / time / 1e9 for arm, time in line.values.items()}
        line.note(gb=sum(sizes) / 1e9, **rates)
