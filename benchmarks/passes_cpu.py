"""Prompts and decoding with capture on one CPU thread, and memory: ours, TransformerLens and Hugging Face, in CPU seconds.

    python -m benchmarks.passes_cpu coin            # or: smollm2, memory
    python -m benchmarks.passes_cpu coin --before FOLDER   # also an older checkout of this repository

Every arm is a process of its own. Processes take turns, and the best of all rounds counts, so that other work on the machine
affects all alike. TransformerLens captures S, T and C (of SmolLM2: S) with `run_with_cache`, Hugging Face S with
`output_hidden_states`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import Table

HERE = Path(__file__).parent.parent
OURS, BEFORE, LENS, HUGGING_FACE = "replaylens", "before", "TransformerLens", "Hugging Face"
SIZES = {"coin": ((32, 60), (16, 20, 30), "STC"), "smollm2": ((8, 64), (8, 16, 4), "S")}
"""model -> prompts and their length; branches, their prompts' length and new tokens; captured sites"""
Times = dict[str, float]


def best(work: Callable[[], Any], repeats: int) -> float:
    """CPU seconds of the fastest of several runs, after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times[1:])


def tokens(count: int, length: int, vocab: int) -> torch.Tensor:
    return torch.randint(5, vocab, (count, length), generator=torch.Generator().manual_seed(0))


def ours(name: str, repeats: int) -> Times:
    """Prompts and decoding through the public API, with and without capture."""
    from replaylens import Engine, Sampling

    prompts, (count, length, new), letters = SIZES[name]
    engine = Engine.load("coin-plain" if name == "coin" else name)
    vocab = min(engine.config.vocab_size, 40000)
    whole, short = tokens(*prompts, vocab).tolist(), tokens(count, length, vocab).tolist()

    def run(paths: list[list[int]], sites: str | None, generated: int = 0) -> None:
        branches = engine.prompts(paths, sites=sites)
        if generated:
            engine.generate(branches, generated, window=1, sampling=Sampling(ignore_eos=True))
        for branch in branches:
            branch.release()
        engine.prefix.clear()

    return {
        "prompts": best(lambda: run(whole, None), repeats),
        "prompts, captured": best(lambda: run(whole, letters), repeats),
        "decode": best(lambda: run(short, None, new), repeats),
        "decode, captured": best(lambda: run(short, letters, new), repeats),
    }


def model_of(name: str) -> Any:
    """The model in transformers, in float32."""
    if name == "coin":
        from benchmarks.dump import peer
        from replaylens import Engine

        return peer(Engine.load("coin-plain").model)
    from benchmarks.engine import subject

    return subject()[0]


@torch.inference_mode()
def hugging_face(name: str, repeats: int) -> Times:
    prompts, (count, length, new), _ = SIZES[name]
    model = model_of(name)
    vocab = min(model.config.vocab_size, 40000)
    whole, short = tokens(*prompts, vocab), tokens(count, length, vocab)
    options = dict(
        max_new_tokens=new, min_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(short), pad_token_id=0
    )
    captured = dict(output_hidden_states=True, return_dict_in_generate=True)
    return {
        "prompts": best(lambda: model(whole, logits_to_keep=1), repeats),
        "prompts, captured": best(lambda: model(whole, logits_to_keep=1, output_hidden_states=True), repeats),
        "decode": best(lambda: model.generate(short, **options), repeats),
        "decode, captured": best(lambda: model.generate(short, **options, **captured), repeats),
    }


@torch.inference_mode()
def transformer_lens(name: str, repeats: int) -> Times:
    from benchmarks.dump import bridge

    prompts, _, letters = SIZES[name]
    model = model_of(name)
    whole, last = tokens(*prompts, min(model.config.vocab_size, 40000)), model.config.num_hidden_layers - 1
    ends = [".hook_in"] + [".attn.hook_out", ".mlp.hook_out"] * (letters == "STC")
    wanted = {f"blocks.{layer}{end}" for layer in range(last + 1) for end in ends} | {f"blocks.{last}.hook_out"}
    lens = bridge(model)
    kept = lens.run_with_cache(whole[:1], names_filter=lambda site: site in wanted)[1]
    assert len(kept) == len(wanted), "TransformerLens has other names for these sites"
    return {
        "prompts, captured": best(lambda: lens.run_with_cache(whole, names_filter=lambda site: site in wanted), repeats),
    }


def memory_of_ours() -> Times:
    from replaylens import Engine

    engine = Engine.load("smollm2")
    loaded = status("VmRSS")
    engine.prompt([1]).release()
    first = status("VmRSS")
    branches = engine.prompts(tokens(32, 64, 40000).tolist(), sites="S")
    assert len(branches) == 32
    return {"loaded": loaded, "after one token": first, "peak of capturing S of 32 x 64 tokens": status("VmHWM")}


@torch.inference_mode()
def memory_of_hugging_face() -> Times:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from replaylens.engine.model import hub

    folder = hub.fetched_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = status("VmRSS")
    model(torch.tensor([[1]]))
    first = status("VmRSS")
    kept = model(tokens(32, 64, 40000), logits_to_keep=1, output_hidden_states=True)
    assert len(kept.hidden_states) and tokenizer is not None
    return {"loaded": loaded, "after one token": first, "peak of capturing S of 32 x 64 tokens": status("VmHWM")}


def status(field: str) -> float:
    """A line of the kernel's account of this process, in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024 / 1e6


ARMS: dict[str, Callable[[str, int], Times]] = {
    OURS: lambda name, repeats: memory_of_ours() if name == "memory" else ours(name, repeats),
    HUGGING_FACE: lambda name, repeats: memory_of_hugging_face() if name == "memory" else hugging_face(name, repeats),
    LENS: transformer_lens,
}


def measured(arm: str, name: str, repeats: int, before: Path | None) -> Times:
    """The numbers of one arm, from a process of its own. `before` runs the arm `replaylens` on another checkout."""
    source = before if arm == BEFORE else HERE
    environment = {**os.environ, "PYTHONPATH": f"{source}/src{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    shown = OURS if arm == BEFORE else arm
    command = [sys.executable, "-m", "benchmarks.passes_cpu", name, "--arm", shown, "--repeats", str(repeats)]
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arm} failed on {name}: {done.stderr[-2000:]}")
    found: Times = json.loads(done.stdout.splitlines()[-1])
    return found


def main(name: str, rounds: int, repeats: int, before: Path | None) -> None:
    arms = [OURS, *([BEFORE] if before else []), HUGGING_FACE, *([LENS] if name != "memory" else [])]
    least: dict[str, Times] = {arm: {} for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            for what, value in measured(arm, name, repeats, before).items():
                least[arm][what] = min(value, least[arm].get(what, value))
    table = Table("passes-cpu", "One thread. Times in CPU seconds; memory in MB, in float32. Ratios: theirs over ours")
    for what, mine in least[OURS].items():
        others = {arm: least[arm][what] for arm in arms[1:] if what in least[arm]}
        numbers = {f"{arm.lower().replace(' ', '_')}_over_ours": value / mine for arm, value in others.items()}
        unit = "mb" if name == "memory" else "cpu_s"
        values = {f"{arm.lower().replace(' ', '_')}_{unit}": value for arm, value in {OURS: mine, **others}.items()}
        if name == "memory":
            ratio = mine / others[HUGGING_FACE]
            table.add(f"memory: {what}", ratio=ratio, aim="<= 1.4", met=ratio <= 1.4, **values)
        else:
            table.add(f"{name}: {what}", ratio=others.get(LENS, others[HUGGING_FACE]) / mine, **numbers, **values)
    table.save(beside=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*SIZES, "memory"])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--arm", choices=list(ARMS))
    given = parser.parse_args()
    if given.arm:
        print(json.dumps(ARMS[given.arm](given.name, given.repeats)))
    else:
        main(given.name, given.rounds, given.repeats, given.before)
