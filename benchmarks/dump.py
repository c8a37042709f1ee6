"""Dumping S, T, C against TransformerLens and Hugging Face: one thread, CPU seconds, all tools in turns within one run.

    python -m benchmarks.dump                  # everything
    python -m benchmarks.dump --part large     # one part; the lines of the others stay in the file

coin    coin examples with coin-plain. All tools generate the answers and write every layer's rows of every token. The others
        get batches sorted by length, so they never pad, and write bare tensors; replaylens also writes rejected branches,
        labels, probabilities and hashes. Rows count tokens on accepted paths only, which all of them have.
large   SmolLM2-135M's shape, prompts of one length and one new token. TransformerLens is given the whole paths.
parts   where the CPU seconds of a dump go
capture replay with and without capture, and a dump
memory  peak memory by number of examples

Ratios are rows per CPU second, ours over theirs, from the best of several rounds: the machine is shared.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engine import subject
from benchmarks.llama import hugging_face
from benchmarks.table import RESULTS, Table
from replaylens import tasks
from replaylens.engine.dump.content import Content
from replaylens.engine.dump.maker import ShardMaker, assemble, make_plan, write_dump
from replaylens.engine.dump.manifest import SiteEntry
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.writer import DumpWriter
from replaylens.engine.engine import Engine
from replaylens.engine.model import loading
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.replay.replayer import ReplayOptions, replay_examples
from replaylens.tasks import Example, WordTokenizer
from replaylens.tasks.task import AnyTask

BATCH, NEW, ROUNDS = 32, 4, 3
LARGE = 16
"""examples for the large model"""
TRANSFORMER_LENS = "TransformerLens generate + run_with_cache + torch.save"
HUGGING_FACE = "Hugging Face generate with hidden states (S only) + safetensors"
GIVEN_PATHS = "TransformerLens run_with_cache + torch.save, paths given"
Way = Callable[[Path, int], int]
"""(folder, number of examples) -> number of rows written"""


def peer(model: Decoder) -> Any:
    """The model as a Hugging Face model; loading it again checks the mapping of the weights."""
    made = hugging_face(model)
    ours, theirs = (dict(m.state_dict()) for m in (model, loading.load(made)))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "the mapping of the weights is wrong"
    return made


def bridge(model: Any) -> Any:
    """TransformerLens around a copy of the model."""
    import copy

    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
        named = dict(eos_token="<eos>", bos_token="<pad>", pad_token="<pad>", unk_token="<pad>")
        PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return TransformerBridge.boot_transformers(
            folder, hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32
        )


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


def timed(work: Callable[[Path], Any]) -> tuple[float, float, Any, int]:
    """Wall time, CPU time of all threads, result, and bytes written, after a sync to disk."""
    with tempfile.TemporaryDirectory() as name:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        result = work(Path(name))
        files = [path for path in Path(name).rglob("*") if path.is_file()]
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elapsed, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        return elapsed, cpu, result, sum(path.stat().st_size for path in files)


def in_turns(table: Table, ways: dict[str, Way], n: int, warm: int, prefix: str) -> dict[str, float]:
    """Rows per CPU second of each way, from its best round; the first round, of `warm` examples, does not count."""
    runs: dict[str, list[tuple[float, float, int, int]]] = {label: [] for label in ways}
    for count in (warm, *[n] * ROUNDS):
        for label, work in ways.items():
            runs[label].append(timed(lambda folder, work=work, count=count: work(folder, count)))
    rates = {}
    for label, (_, *counted) in runs.items():
        seconds, cpu, rows, size = min(counted, key=lambda run: run[1])
        rates[label] = rows / cpu
        table.add(f"{prefix}: {label}", rows_per_cpu_s=rates[label], cpu_seconds=cpu, rows=rows, mb=size / 1e6, seconds=seconds)
    return rates


def mine(engine: Engine, task: AnyTask, folder: Path, count: int, **options: Any) -> int:
    return ours(engine, task, count, folder, **options).manifest.accepted_rows


def coin(table: Table, n: int) -> None:
    """coin-plain, the three tools in turns."""
    engine, task = Engine.load("coin-plain"), tasks.get("coin")()
    model = peer(engine.model)
    lens = bridge(model)
    dump = partial(mine, engine, task)
    rates = in_turns(
        table,
        {
            "replaylens dump, drafter lens": partial(dump, drafter="lens"),
            "replaylens dump, drafter ngram": partial(dump, drafter="ngram"),
            "replaylens dump, drafter ngram, no probabilities": partial(dump, drafter="ngram", probabilities=False),
            TRANSFORMER_LENS: lambda folder, count: with_transformer_lens(model, lens, engine, task.examples(count), folder),
            HUGGING_FACE: lambda folder, count: with_hugging_face(model, engine, task.examples(count), folder),
        },
        n,
        BATCH,
        "coin-plain",
    )
    best = max(rates["replaylens dump, drafter lens"], rates["replaylens dump, drafter ngram"])
    for label, aim in ((TRANSFORMER_LENS, 1.5), (HUGGING_FACE, 0.8)):
        ratio = best / rates[label]
        table.add(f"coin-plain: a dump against {label}", ratio=ratio, aim=f">= {aim}", met=ratio >= aim)


def large_engine(model: Any) -> Engine:
    """The model with the coin's words and as many others as it has tokens: any token it chooses has a text."""
    words, known = list(tasks.get("coin").vocabulary()), model.config.vocab_size
    words += [f" x{number}" for number in range(known - 2 - len(words))]
    return Engine(loading.load(model), WordTokenizer(words), cache_tokens=4096)


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


def large(table: Table, n: int) -> None:
    """SmolLM2-135M's shape: a dump, with and without probabilities, against run_with_cache on paths that are known."""
    model, name = subject()
    engine, lens = large_engine(model), bridge(model)
    task = tasks.get("coin")(flips=6, p=1.0)  # prompts of one length: TransformerLens gets a single batch
    dump = partial(mine, engine, task, max_new=1, drafter="ngram")
    rates = in_turns(
        table,
        {
            "replaylens dump": dump,
            "replaylens dump, no probabilities": partial(dump, probabilities=False),
            GIVEN_PATHS: lambda folder, count: with_given_paths(lens, engine, task.examples(count), folder),
        },
        n,
        2,
        name,
    )
    ratio = rates["replaylens dump"] / rates[GIVEN_PATHS]
    table.add(f"{name}: a dump against {GIVEN_PATHS}", ratio=ratio, aim=">= 1.0", met=ratio >= 1.0)


def parts(table: Table, n: int) -> None:
    """CPU seconds of the parts of a dump, each on its own: replay, rows, digests, files."""
    engine, task = Engine.load("coin-plain"), tasks.get("coin")()
    plan = make_plan(engine, task, n, sites="STC", max_new=NEW, examples_per_shard=n)
    maker = ShardMaker(engine, plan, BATCH)
    options = ReplayOptions(sites=maker.wanted, drafter=plan.drafter, window=plan.window, max_new=NEW)
    best: dict[str, float] = {}

    def spent(what: str, work: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = work()
        best[what] = min(best.get(what, float("inf")), time.process_time() - begin)
        return result

    for _ in range(ROUNDS):
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
        table.add(f"part of a dump: {what}", share=cpu / whole, cpu_seconds=cpu)


def capture(table: Table, n: int) -> None:
    """The cost of capture relative to replay, and of writing relative to capture, in CPU seconds."""
    engine, task = Engine.load("coin-plain"), tasks.get("coin")()
    examples = task.examples(n)

    def replay(sites: str | None) -> float:
        engine.prefix.clear()  # without capture, cached prompts would not be computed at all
        begin = time.process_time()
        engine.replay(examples, sites=sites, drafter="lens", max_new=NEW, batch=BATCH)
        return time.process_time() - begin

    replay(None)
    rounds = [(replay(None), replay("STC"), timed(lambda folder: ours(engine, task, n, folder))[1]) for _ in range(3)]
    bare, captured, written = (min(each[i] for each in rounds) for i in range(3))
    table.add("capture of S, T, C over none", ratio=captured / bare, aim="<= 1.10", met=captured / bare <= 1.1, bare_s=bare)
    table.add("dump over capture", ratio=written / captured, captured_s=captured, dump_s=written)


def memory(table: Table, sizes: list[int]) -> None:
    """Peak memory of a process by number of examples dumped."""
    peaks = {}
    for n in sizes:
        command = [sys.executable, "-m", "benchmarks.dump", "--peak", str(n)]
        peaks[n] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1e6
    grows = peaks[sizes[-1]] / peaks[sizes[0]]
    shown = {f"mb_at_{n}": peak for n, peak in peaks.items()}
    table.add(f"peak memory, {sizes[-1]} examples over {sizes[0]}", ratio=grows, aim="<= 1.1", met=grows <= 1.1, **shown)


def peak(n: int) -> None:
    """Dump n examples and print the peak memory in bytes; getrusage would include the parent's."""
    engine = Engine.load("coin-plain")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        ours(engine, tasks.get("coin")(), n, Path(name))
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(lines["VmHWM"].split()[0]) * 1024)


PARTS: dict[str, Callable[[Table, int], None]] = {"coin": coin, "large": large, "parts": parts, "capture": capture}


def main(n: int, chosen: list[str], out: Path) -> None:
    torch.set_num_threads(1)
    about = f"coin-plain, {n} coin examples, {NEW} new tokens each, batches of {BATCH}; CPU seconds on one thread"
    table = Table("dump-cpu", about)
    print(table.about)
    for part in chosen:
        if part == "memory":
            memory(table, [256, 512, 1024])
        else:
            PARTS[part](table, LARGE if part == "large" else n)
    table.out = out
    table.save(beside=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--part", action="append", choices=[*PARTS, "memory"], help="this part; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS / "dump-cpu.json")
    parser.add_argument("--peak", type=int)
    given = parser.parse_args()
    if given.peak:
        peak(given.peak)
    else:
        main(given.n, given.part or [*PARTS, "memory"], given.out)
