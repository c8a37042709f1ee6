"""Prompts and decoding with capture on one CPU thread, and memory: ours, TransformerLens and Hugging Face.

Every arm is a process of its own. Processes take turns, and the best of all rounds counts, so that other work on the machine
affects all alike. TransformerLens captures S, T and C (of SmolLM2: S) with `run_with_cache`, Hugging Face S with
`output_hidden_states`. `--set before=FOLDER` adds an older checkout of this repository.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Line, Lines, case, in_process, memory_mb, random_tokens

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
    return torch.tensor(random_tokens(count, length, vocab, first=5))


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
    """The model in transformers, in float32. Imported here: the memory of Hugging Face's process is measured without ours."""
    from benchmarks.subjects import peer, smollm2_or_shape

    if name == "coin":
        from replaylens import Engine

        return peer(Engine.load("coin-plain").model)
    return smollm2_or_shape()[0]


@torch.inference_mode()
def hugging_face(name: str, repeats: int) -> Times:
    prompts, (count, length, new), _ = SIZES[name]
    model = model_of(name)
    vocab = min(model.config.vocab_size, 40000)
    whole, short = tokens(*prompts, vocab), tokens(count, length, vocab)
    options = dict(
        max_new_tokens=new, min_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(short), pad_token_id=0,
    )  # fmt: skip
    captured = dict(output_hidden_states=True, return_dict_in_generate=True)
    return {
        "prompts": best(lambda: model(whole, logits_to_keep=1), repeats),
        "prompts, captured": best(lambda: model(whole, logits_to_keep=1, output_hidden_states=True), repeats),
        "decode": best(lambda: model.generate(short, **options), repeats),
        "decode, captured": best(lambda: model.generate(short, **options, **captured), repeats),
    }


@torch.inference_mode()
def transformer_lens(name: str, repeats: int) -> Times:
    from benchmarks.subjects import bridge

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
    loaded = memory_mb("VmRSS")
    engine.prompt([1]).release()
    first = memory_mb("VmRSS")
    branches = engine.prompts(tokens(32, 64, 40000).tolist(), sites="S")
    assert len(branches) == 32
    return {"loaded": loaded, "after one token": first, "peak of capturing S of 32 x 64 tokens": memory_mb("VmHWM")}


@torch.inference_mode()
def memory_of_hugging_face() -> Times:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from replaylens.engine.model import hub

    folder = hub.fetched_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = memory_mb("VmRSS")
    model(torch.tensor([[1]]))
    first = memory_mb("VmRSS")
    kept = model(tokens(32, 64, 40000), logits_to_keep=1, output_hidden_states=True)
    assert len(kept.hidden_states) and tokenizer is not None
    return {"loaded": loaded, "after one token": first, "peak of capturing S of 32 x 64 tokens": memory_mb("VmHWM")}


ARMS: dict[str, Callable[[str, int], Times]] = {
    OURS: ours,
    HUGGING_FACE: hugging_face,
    LENS: transformer_lens,
}


def compared(name: str, rounds: int, repeats: int, before: str | None) -> Lines:
    """The best of the processes' best times, in turns."""
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for arm in (*ARMS, *([BEFORE] if before else [])):
            work = ARMS.get(arm, ours)
            for what, value in in_process(work, name, repeats, source=before if arm == BEFORE else None).items():
                times.setdefault(what, {}).setdefault(arm, []).append(value)
    for what, own in times.items():
        found = yield Line(f"{name}: {what}", times=own)
        mine = found.values[OURS]
        others = {arm: value / mine for arm, value in found.values.items() if arm != OURS}
        found.note(**{f"{arm.lower().replace(' ', '_')}_over_ours": ratio for arm, ratio in others.items()})


DECLARED: dict[str, Any] = dict(ours=OURS, baseline=HUGGING_FACE, others=(LENS, BEFORE), best=True, unit="s", threads=1)


@case("passes-cpu.coin", **DECLARED, quick={"rounds": 1, "repeats": 1})
def coin(rounds: int = 2, repeats: int = 4, before: str | None = None) -> Lines:
    """Prompts and decoding of coin-plain with and without capture of S, T, C, one thread, CPU seconds."""
    yield from compared("coin", rounds, repeats, before)


@case("passes-cpu.smollm2", **DECLARED, needs="smollm2", quick={"rounds": 1, "repeats": 1})
def of_smollm2(rounds: int = 2, repeats: int = 4, before: str | None = None) -> Lines:
    """Prompts and decoding of SmolLM2-135M with and without capture of S, one thread, CPU seconds."""
    yield from compared("smollm2", rounds, repeats, before)


@case("passes-cpu.memory", needs="smollm2", threads=1)
def memory(before: str | None = None) -> Lines:
    """Memory of SmolLM2-135M in float32, in MB: ours over Hugging Face, each in a process of its own."""
    mine, theirs = in_process(memory_of_ours), in_process(memory_of_hugging_face)
    old = in_process(memory_of_ours, source=before) if before else {}
    for what, value in mine.items():
        numbers = {"replaylens_mb": value, "hugging_face_mb": theirs[what]} | ({"before_mb": old[what]} if old else {})
        yield Line(f"memory: {what}", ratio=value / theirs[what], aim="<= 1.4", numbers=numbers)
