"""Generation on a CPU against Hugging Face `generate`: tokens per CPU second at 1 and 16 requests.

    python -m benchmarks.generate_cpu

Both sides run on one thread, from the same prompts, greedily, prefill included, through their public calls. They take turns
in one run, and the best round of each counts: on a shared machine the others measure its neighbours. CPU seconds are those
of the whole process (`time.process_time`).
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.table import Table
from replaylens.engine.engine import Engine
from replaylens.engine.request.sampling import Sampling

ENDLESS = Sampling(ignore_eos=True)
PROMPT = 16


def llama(layers: int, d_model: int, heads: int, kv_heads: int, d_mlp: int, vocab: int) -> Any:
    """A random Llama from Hugging Face, with tied embeddings."""
    import transformers as tf

    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=vocab,
        hidden_size=d_model,
        intermediate_size=d_mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return tf.LlamaForCausalLM(config).eval().requires_grad_(False)


SUBJECTS: dict[str, tuple[Callable[[], Any], int, dict[int, float]]] = {
    "tiny llama (3 layers, width 64)": (lambda: llama(3, 64, 4, 2, 192, 512), 64, {1: 1.0, 16: 1.0}),
    "SmolLM2-135M's shape": (lambda: llama(30, 576, 9, 3, 1536, 49152), 24, {1: 1.0, 16: 1.2}),
}
"""name -> how to make the model, new tokens per request, and the least ratio aimed at by number of requests"""


def prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab, (count, PROMPT), generator=generator).tolist()


def ours(engine: Engine, paths: list[list[int]], n: int) -> tuple[float, list[list[int]]]:
    """CPU seconds of prefill and generation, and the new tokens."""
    begin = time.process_time()
    branches = engine.generate(engine.prompts(paths), n, sampling=ENDLESS)
    elapsed = time.process_time() - begin
    tokens = [branch.generated for branch in branches]
    for branch in branches:
        branch.release()
    engine.prefix.clear()
    return elapsed, tokens


def theirs(model: Any, paths: list[list[int]], n: int) -> tuple[float, list[list[int]]]:
    """CPU seconds of Hugging Face's `generate`, and the new tokens."""
    x = torch.tensor(paths)
    begin = time.process_time()
    with torch.inference_mode():
        out = model.generate(x, attention_mask=torch.ones_like(x), min_new_tokens=n, max_new_tokens=n, do_sample=False)
    return time.process_time() - begin, out[:, PROMPT:].tolist()


def compare(table: Table, name: str, rounds: int) -> None:
    make, n, aims = SUBJECTS[name]
    model = make()
    engine = Engine.load(model, cache_tokens=4096)
    for count, aim in aims.items():
        paths = prompts(count, model.config.vocab_size, seed=count)
        mine, other = [], []
        for _ in range(rounds + 1):
            elapsed, tokens = ours(engine, paths, n)
            mine.append(elapsed)
            elapsed, expected = theirs(model, paths, n)
            other.append(elapsed)
        agreed = sum(a == b for a, b in zip(tokens, expected, strict=True))
        best, peer = min(mine[1:]), min(other[1:])  # the first round warms up; the planner measures its code paths
        table.add(
            f"{name}, {count} request{'s' * (count > 1)}",
            ratio=peer / best,
            aim=f">= {aim}",
            met=peer / best >= aim,
            ours_tokens_per_cpu_s=count * n / best,
            hugging_face_tokens_per_cpu_s=count * n / peer,
            same_continuations=f"{agreed}/{count}",
        )


def main(rounds: int, only: str) -> None:
    torch.set_num_threads(1)
    table = Table("generate-cpu", f"greedy generation after {PROMPT}-token prompts, float32, one thread, CPU seconds")
    for name in SUBJECTS:
        if only in name:
            compare(table, name, rounds)
            table.save(beside=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="", help="a part of a subject's name")
    given = parser.parse_args()
    main(given.rounds, given.only)
