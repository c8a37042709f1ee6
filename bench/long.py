"""Long prompts on a GPU: `Engine.prompt` against Hugging Face's forward with SDPA."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from bench.harness import Line, Lines, case, random_tokens
from bench.subjects import certified, hugging_face, random_decoder, where
from replaylens.engine.engine import Engine

ROWS = {"ours": 8192, "ours, 1024 rows per pass": 1024, "general": 1024}
"""rows per pass: of a prompt alone, while others decode, and with the general kernel"""


@contextmanager
def general(engine: Engine) -> Iterator[None]:
    """Attention without the kernel for Hopper, and none of the graphs that have it."""
    from replaylens.kernels import attention

    graphs, before = engine.runner.graphs, attention.can_prefill
    kept = (OrderedDict(), 0) if graphs is None else (graphs.graphs, graphs.worth)
    attention.can_prefill = lambda *given: False
    if graphs is not None:
        graphs.graphs, graphs.worth = OrderedDict(), 1 << 60
    try:
        yield
    finally:
        attention.can_prefill = before
        if graphs is not None:
            graphs.graphs, graphs.worth = kept


def check(engine: Engine, tokens: list[int]) -> None:
    """The kernel and where a prompt is cut move no bit."""

    def kv(cut: int) -> torch.Tensor:
        if cut:
            engine.prompt(tokens[:cut]).release()  # stays in the prefix index
        with engine.prompt(tokens) as branch:
            found = branch.kv().clone()
        engine.prefix.clear()
        return found

    whole = kv(0)
    assert torch.equal(kv(len(tokens) // 3), whole), "where a prompt is cut moved bits"
    with general(engine):
        assert torch.equal(kv(0), whole), "the kernel moved bits"


@case(
    "long-gpu.prompts", ours="ours", baseline="hugging face", others=tuple(ROWS)[1:], aim=">= 1.0", needs="gpu", clock="wall",
    rounds=3, quick={"tiny": True, "lengths": (64,)},
)  # fmt: skip
def prompts(tiny: bool = False, lengths: tuple[int, ...] = (32768, 8192, 2048)) -> Lines:
    """`Engine.prompt` against Hugging Face's forward with SDPA and one row of logits: Llama-3.1-8B shape, random weights,
    bfloat16, one prompt at a time. "General" is the same engine, without graphs, with the attention kernel that runs everywhere
    in place of the one for Hopper. Before the timing, the KV of both and of a prompt cut elsewhere are compared bit for bit."""
    shape, device, dtype = where(tiny)
    decoder = random_decoder(replace(shape, max_positions=max(shape.max_positions, max(lengths) + 16)), device, dtype)
    engine = certified(Engine(decoder, cache_tokens=2 * max(lengths) + 4096))
    vocab, admission = engine.config.vocab_size, engine.loop.admission
    check(engine, random_tokens(1, min(5000, max(lengths)), vocab)[0])
    model, default = hugging_face(decoder), admission.lone_rows
    for length in lengths:
        (tokens,) = random_tokens(1, length, vocab, seed=length)
        x = torch.tensor([tokens], device=device)

        def ours(arm: str) -> None:
            admission.lone_rows = ROWS[arm]
            with general(engine) if arm == "general" else nullcontext():
                engine.prompt(tokens).release()
            engine.prefix.clear()
            admission.lone_rows = default

        arms: dict[str, Any] = {arm: lambda arm=arm: ours(arm) for arm in ROWS}
        arms["hugging face"] = torch.inference_mode()(lambda: model(x, logits_to_keep=1, use_cache=True) and None)
        found = yield Line(f"prompt of {length} tokens, Hugging Face with SDPA", arms)
        other = found.values["hugging face"]
        found.note(**{f"ratio_of_{arm}": other / found.values[arm] for arm in ROWS})
