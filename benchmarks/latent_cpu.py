"""CPU seconds of latent attention with the sizes of DeepSeek-V2-Lite against plain attention with as many heads of that width.

    PYTHONPATH=src:. python -m benchmarks.latent_cpu

Two layers of random weights with a small MLP and vocabulary, so that attention counts; one thread. Both models take turns, and
the best round counts. Ratio: time of latent attention over that of plain attention; below 1, latent is faster.
"""

import time
from dataclasses import replace

import torch

from benchmarks.table import Table
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import Latent, ModelConfig
from replaylens.engine.model.decoder import Decoder

PLAIN = ModelConfig(
    num_layers=2, d_model=2048, num_heads=16, num_kv_heads=16, d_head=192, d_mlp=256, vocab_size=256, max_positions=4096,
    rotary_dim=64,
)  # fmt: skip
LATENT = replace(PLAIN, latent=Latent(rank=512, d_value=128))
NEW = 8
LENGTHS = {512: 3, 2048: 1}
"""tokens of the prompt -> rounds"""


def path(length: int) -> list[int]:
    return [(i * i) % PLAIN.vocab_size for i in range(length)]


def measure(engine: Engine, length: int) -> dict[str, float]:
    """CPU ms of a prompt, and of a token decoded after it."""
    begin = time.process_time()
    branch = engine.prompt(path(length))
    middle = time.process_time()
    branch.generate(NEW, window=1)
    end = time.process_time()
    branch.release()
    engine.prefix.clear()
    return {"prefill": 1000 * (middle - begin), "decoding": 1000 * (end - middle) / NEW}


def main() -> None:
    torch.set_num_threads(1)
    engines = [Engine(Decoder(config).initialize(0).requires_grad_(False), cache_tokens=3072) for config in (LATENT, PLAIN)]
    table = Table("latent-cpu", "two layers with the sizes of DeepSeek-V2-Lite's attention, float32, CPU ms")
    for engine in engines:
        measure(engine, 64)  # examines the shapes
    for length, rounds in LENGTHS.items():
        found = [[measure(engine, length) for engine in engines] for _ in range(rounds)]
        for what in found[0][0]:
            latent, plain = (min(times[i][what] for times in found) for i in range(2))
            name = f"prefill of {length} tokens" if what == "prefill" else f"decoding a token after {length}"
            table.add(name, ratio=latent / plain, latent_ms=latent, plain_ms=plain, rounds=rounds)
    table.save()


if __name__ == "__main__":
    main()
