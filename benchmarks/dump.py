"""Dumping S, T, C of coin examples with coin-plain, against TransformerLens and Hugging Face, in one run.

    python -m benchmarks.dump --n 10000

All three generate the answers and write every layer's rows of every token. The others get batches sorted by length, so
they never pad, and write bare tensors; replaylens also writes rejected branches, labels, probabilities and hashes. Rows
count tokens on accepted paths only, which all three have.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.llama import hugging_face
from benchmarks.table import RESULTS, Table
from replaylens import tasks
from replaylens.engine.dump.maker import write_dump
from replaylens.engine.dump.planning import make_plan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.model import weights
from replaylens.engine.model.decoder import Decoder
from replaylens.tasks import Example
from replaylens.tasks.task import AnyTask

BATCH, NEW, ROUNDS = 32, 4, 3
TRANSFORMER_LENS = "TransformerLens run_with_cache + torch.save"
HUGGING_FACE = "Hugging Face hidden states + safetensors"


def peer(model: Decoder) -> Any:
    """The model as a Hugging Face model; loading it again checks the mapping of the weights."""
    made = hugging_face(model)
    ours, theirs = (dict(m.state_dict()) for m in (model, weights.load(made)))
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
    """Wall time, CPU time, result, and bytes written, after a sync to disk."""
    with tempfile.TemporaryDirectory() as name:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        result = work(Path(name))
        files = [path for path in Path(name).rglob("*") if path.is_file()]
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elapsed, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        return elapsed, cpu, result, sum(path.stat().st_size for path in files)


def dumping(table: Table, engine: Engine, task: AnyTask, n: int) -> None:
    """The three tools in turns, after a warm-up round on a few examples."""
    model = peer(engine.model)
    lens = bridge(model)

    def mine(drafter: str) -> Callable[[Path, int], int]:
        return lambda folder, count: ours(engine, task, count, folder, drafter=drafter).manifest.accepted_rows

    ways: dict[str, Callable[[Path, int], int]] = {
        "replaylens dump, drafter lens": mine("lens"),
        "replaylens dump, drafter ngram": mine("ngram"),
        TRANSFORMER_LENS: lambda folder, count: with_transformer_lens(model, lens, engine, task.examples(count), folder),
        HUGGING_FACE: lambda folder, count: with_hugging_face(model, engine, task.examples(count), folder),
    }
    runs: dict[str, list[tuple[float, float, int, int]]] = {label: [] for label in ways}
    for count in (BATCH, *[n] * ROUNDS):
        for label, work in ways.items():
            runs[label].append(timed(lambda folder, work=work, count=count: work(folder, count)))
    rates, cpu_rates = {}, {}
    for label, (_, *counted) in runs.items():
        _, _, rows, size = counted[0]
        seconds, cpu = (median(run[i] for run in counted) for i in (0, 1))
        rates[label], cpu_rates[label] = rows / seconds, rows / cpu
        table.add(label, rows_per_s=rates[label], mb_per_s=size / seconds / 1e6, seconds=seconds, cpu_seconds=cpu, rows=rows)
    best, best_cpu = (max(rate for name, rate in all_.items() if name.startswith("replaylens")) for all_ in (rates, cpu_rates))
    for label, aim in ((TRANSFORMER_LENS, 3.0), (HUGGING_FACE, 1.0)):
        ratio, by_cpu = best / rates[label], best_cpu / cpu_rates[label]
        what = f"ours against {label.split(' + ')[0]}"
        table.add(what, ratio=ratio, aim=f">= {aim}", met=ratio >= aim, ratio_of_cpu_time=by_cpu)


def overhead(table: Table, engine: Engine, task: AnyTask, n: int) -> None:
    """The cost of capture relative to replay, and of writing relative to capture."""
    examples = task.examples(n)

    def replay(sites: str | None) -> float:
        engine.prefix.clear()  # without capture, cached prompts would not be computed at all
        begin = time.perf_counter()
        engine.replay(examples, sites=sites, drafter="lens", max_new=NEW, batch=BATCH)
        return time.perf_counter() - begin

    replay(None)
    pairs = [(replay(None), replay("STC")) for _ in range(3)]  # in turns, because the machine's load changes
    bare, captured = (min(pair[i] for pair in pairs) for i in (0, 1))
    table.add("capture of S, T, C over none", ratio=captured / bare, aim="<= 1.10", met=captured / bare <= 1.1, bare_s=bare)
    written = min(timed(lambda folder: ours(engine, task, n, folder))[0] for _ in range(2))
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
    with tempfile.TemporaryDirectory() as name:
        ours(engine, tasks.get("coin")(), n, Path(name))
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(lines["VmHWM"].split()[0]) * 1024)


def main(n: int, out: Path) -> None:
    table = Table("dump-cpu", f"coin-plain, {n} coin examples, {NEW} new tokens each, batches of {BATCH}", out=out)
    print(table.about, f"{torch.get_num_threads()} threads")
    engine, task = Engine.load("coin-plain"), tasks.get("coin")()
    dumping(table, engine, task, n)
    overhead(table, engine, task, min(n, 1000))
    memory(table, [256, max(512, n // 2), max(1024, n)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS / "dump-cpu.json")
    parser.add_argument("--peak", type=int)
    given = parser.parse_args()
    if given.peak:
        peak(given.peak)
    else:
        main(given.n, given.out)
