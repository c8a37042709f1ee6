"""Writing dumps of S, T, C: against TransformerLens and Hugging Face on one CPU thread, against the bytes alone on a GPU.

On the CPU, all tools run in turns within one run, and the ratios are rows per CPU second. The others get batches sorted by
length, so they never pad, and write bare tensors; replaylens also writes rejected branches, labels, probabilities and hashes.
Rows count tokens on accepted paths only, which all of them have. A round ends with a sync to disk.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.harness import Found, Line, Lines, case, in_process, memory_mb, seconds
from benchmarks.subjects import bridge, peer, random_decoder, smollm2_or_shape, where
from replaylens import tasks
from replaylens.engine.dump.content import Content
from replaylens.engine.dump.maker import ShardMaker, make_plan, write_dump
from replaylens.engine.dump.manifest import SiteEntry
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.rows import assemble
from replaylens.engine.dump.verify import verify
from replaylens.engine.dump.writer import DumpWriter
from replaylens.engine.engine import Engine
from replaylens.engine.model import loading
from replaylens.engine.replay.replayer import ReplayOptions, replay_examples
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


def ours(engine: Engine, task: AnyTask, n: int, folder: Path, **options: Any) -> Dump:
    plan = make_plan(engine, task, n, **{"sites": "STC", "max_new": NEW, **options})
    dump = write_dump(engine, plan, folder, batch=BATCH)
    assert dump is not None
    return dump


def words_of(vocab_size: int) -> WordTokenizer:
    """The coin's words and as many others as the model has tokens, so that any token it chooses has a text."""
    words = list(tasks.get("coin").vocabulary())
    return WordTokenizer([*words, *(f" x{number}" for number in range(vocab_size - 2 - len(words)))])


@contextmanager
def in_folders(ways: dict[str, Way], what: str) -> Iterator[tuple[Line, Callable[[Found, str, str], None]]]:
    """(a line whose arms write to a folder each, which a sync to disk ends; what notes its rows per CPU second)."""
    with tempfile.TemporaryDirectory() as name:
        folder, rows, sizes = Path(name) / "out", dict[str, int](), dict[str, int]()

        def work(arm: str) -> None:
            rows[arm] = ways[arm](folder)
            sync(folder)

        def after(arm: str, result: Any) -> None:
            sizes[arm] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder)

        def note(found: Found, best: str, baseline: str) -> None:
            """Mutates: the ratio is that of rows, since not all write as many."""
            rates = {arm: rows[arm] / taken for arm, taken in found.values.items()}
            found.judge(rates[best] / rates[baseline])
            found.note(rows_per_cpu_s=rates, rows=dict(rows), bytes=dict(sizes))

        arms = {arm: partial(work, arm) for arm in ways}
        yield Line(what, arms, before=lambda arm: folder.mkdir(), after=after), note


@torch.inference_mode()
def with_given_paths(lens: Any, engine: Engine, examples: list[Example], folder: Path) -> int:
    """run_with_cache over prompts and one more token, then torch.save. Returns the row count."""
    rows, wanted = 0, {name for letter in "STC" for name in engine.sites.per_layer(letter)}
    for number, prompts in enumerate(batches(engine, examples)):
        tokens = torch.cat([prompts, prompts[:, -1:]], dim=1)
        _, cache = lens.run_with_cache(tokens, names_filter=lambda name: name in wanted)
        torch.save({name: cache[name] for name in wanted}, folder / f"{number}.pt")
        rows += tokens.numel()
    return rows


def dumped(engine: Engine, task: AnyTask, count: int, folder: Path, **options: Any) -> int:
    return ours(engine, task, count, folder / "dump", **options).manifest.accepted_rows


@case(
    "dump-cpu.coin", ours=OURS, baseline=LENS, others=(NGRAM, BARE, HUGGING_FACE), aim=">= 1.5", unit="s", best=True,
    rounds=3, threads=1, quick={"n": 4},
)  # fmt: skip
def coin(n: int = 256) -> Lines:
    """A dump of coin examples with coin-plain, drafter lens, against tools that generate the answers and write every layer's
    rows of every token. One thread, CPU seconds of the same rows."""
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
    with in_folders(ways, "coin-plain: a dump against TransformerLens generate + run_with_cache + torch.save") as (line, note):
        found = yield line
        best = min((OURS, NGRAM), key=found.values.__getitem__)
        note(found, best, LENS)
        rates = found.row["rows_per_cpu_s"]
        what = "coin-plain: a dump against Hugging Face generate with hidden states (S only) + safetensors"
        yield Line(what, ratio=rates[best] / rates[HUGGING_FACE], aim=">= 0.8")


@case(
    "dump-cpu.large", ours=OURS, baseline=LENS, others=(BARE,), aim=">= 1.0", unit="s", best=True, rounds=3, threads=1,
    quick={"n": 2},
)  # fmt: skip
def large(n: int = 16) -> Lines:
    """A dump of one new token with SmolLM2-135M's shape against run_with_cache on paths that are known, prompts of one length:
    TransformerLens gets a single batch. One thread, CPU seconds."""
    model, name = smollm2_or_shape()
    engine = Engine(loading.load(model), words_of(model.config.vocab_size), cache_tokens=4096)
    lens, task = bridge(model), tasks.get("coin")(flips=6, p=1.0)
    dump = partial(dumped, engine, task, n, max_new=1, drafter="ngram")
    ways: dict[str, Way] = {
        OURS: dump,
        BARE: partial(dump, probabilities=False),
        LENS: lambda folder: with_given_paths(lens, engine, task.examples(n), folder),
    }
    with in_folders(ways, f"{name}: a dump against TransformerLens run_with_cache + torch.save, paths given") as (line, note):
        note((yield line), OURS, LENS)


@case("dump-cpu.parts", threads=1, quick={"n": 4, "rounds": 1})
def parts(n: int = 256, rounds: int = 3) -> Lines:
    """Where the CPU seconds of a dump go, each part on its own: replay, rows, digests, files. coin-plain, best of the
    rounds."""
    engine, task = Engine.load("coin-plain"), tasks.get("coin")()
    plan = make_plan(engine, task, n, sites="STC", max_new=NEW, examples_per_shard=n)
    maker = ShardMaker(engine, plan, BATCH)
    options = ReplayOptions(sites=maker.wanted, drafter=plan.drafter, window=plan.window, max_new=NEW)
    best: dict[str, float] = {}

    def spent(what: str, work: Callable[[], Any]) -> Any:
        taken, result = seconds(work, "cpu")
        best[what] = min(best.get(what, float("inf")), taken)
        return result

    for _ in range(rounds):
        results = spent("replay with capture", lambda: replay_examples(engine, task.examples(n), options, BATCH))
        content: Content = spent("rows, labels, probabilities", lambda results=results: assemble(engine, plan, results))
        digests = spent("digests of the content", content.digests)
        sites: dict[str, SiteEntry] = maker.sites(content)
        with tempfile.TemporaryDirectory() as name:
            writer = DumpWriter(name, plan, engine.fingerprint)
            writer.store.make()
            spent("files, hashes and digests", lambda w=writer, c=content, s=sites: w.write_shard(0, c, s))
        assert digests == content.digests()
    whole = best["replay with capture"] + best["rows, labels, probabilities"] + best["files, hashes and digests"]
    for what, cpu in best.items():
        yield Line(f"part of a dump: {what}", numbers={"share": cpu / whole, "cpu_seconds": cpu})


def peak(n: int) -> float:
    """MB of this process after a dump of n examples."""
    with tempfile.TemporaryDirectory() as name:
        ours(Engine.load("coin-plain"), tasks.get("coin")(), n, Path(name))
    return memory_mb("VmHWM")


@case("dump-cpu.memory", quick={"sizes": (4, 8)})
def memory(sizes: tuple[int, ...] = (256, 512, 1024)) -> Lines:
    """Peak memory of a process by number of examples dumped."""
    peaks = {n: in_process(peak, n) for n in sizes}
    numbers, ratio = {f"mb_at_{n}": mb for n, mb in peaks.items()}, peaks[sizes[-1]] / peaks[sizes[0]]
    yield Line(f"peak memory, {sizes[-1]} examples over {sizes[0]}", ratio=ratio, aim="<= 1.1", numbers=numbers)


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


def write_ours(engine: Engine, plan: DumpPlan, folder: Path) -> Dump:
    engine.prefix.clear()
    dump = write_dump(engine, plan, folder, batch=64, writers=WRITERS)
    assert dump is not None
    return dump


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
        write_ours(engine, plan, folder)
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        taken, found = seconds(lambda: verify(folder, engine, sample=0.1), "wall")
        yield Line("verified, a tenth by replay", met=bool(found), numbers={"rows": found.rows, "seconds": taken})

        def before(arm: str) -> None:
            for each in (folder, raw):
                shutil.rmtree(each, ignore_errors=True)

        def dump() -> None:
            write_ours(engine, plan, folder)
            sync(folder)

        def plain() -> None:
            write_raw(sizes, raw)
            sync(raw)

        line = yield Line(
            f"dump of S, T, C, {examples} examples, {WRITERS} writers", {"dump": dump, "raw": plain}, before=before
        )
        rates = {f"{arm}_gb_per_s": sum(sizes) / time / 1e9 for arm, time in line.values.items()}
        line.note(gb=sum(sizes) / 1e9, **rates)
