"""Long prompts on a GPU: `Engine.prompt` against Hugging Face's forward with SDPA, in turns.

    PYTHONPATH=src python -m benchmarks.long_gpu [--tiny] [--lengths 8192 32768] [--out FILE]

The model has the Llama-3.1-8B shape and random weights in bfloat16. "General" is the same engine, without graphs, with the
attention kernel that runs everywhere in place of the one for Hopper. Before the timing, the KV of both and of a prompt cut
elsewhere are compared bit for bit. Hugging Face computes one row of logits, as the engine does.
"""

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.baselines.subject import SHAPE, TINY_SHAPE, random_decoder
from benchmarks.gpu import in_turns as device_ms
from benchmarks.kernels.attention import D_HEAD, HEADS, KV_HEADS, cache, contiguous
from benchmarks.llama import hugging_face
from benchmarks.table import RESULTS, Table, in_turns
from replaylens.engine.engine import Engine
from replaylens.kernels import attention
from replaylens.kernels.shared import PagedRows, plan_tiles, rows_per_tile

ROWS = (1024, 8192)
"""rows per pass: while others decode, and of a prompt alone"""


@contextmanager
def general(engine: Engine) -> Iterator[None]:
    """Attention without the kernel for Hopper, and none of the graphs that have it."""
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


def tokens_of(engine: Engine, count: int) -> list[int]:
    chance = torch.Generator().manual_seed(count)
    return torch.randint(2, engine.config.vocab_size, (count,), generator=chance).tolist()


def prompt(engine: Engine, tokens: list[int]) -> None:
    """One prompt, up to its logits."""
    engine.prompt(tokens).release()
    engine.prefix.clear()
    finish()


def finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check(engine: Engine, tokens: list[int]) -> None:
    """The kernel and where a prompt is cut move no bit."""

    def kv(cut: int) -> torch.Tensor:
        if cut:
            engine.prompt(tokens[:cut]).release()  # stays in the prefix index
        branch = engine.prompt(tokens)
        found = branch.kv().clone()
        branch.release()
        engine.prefix.clear()
        return found

    whole = kv(0)
    assert torch.equal(kv(len(tokens) // 3), whole), "where a prompt is cut moved bits"
    with general(engine):
        assert torch.equal(kv(0), whole), "the kernel moved bits"


def measure(table: Table, engine: Engine, model: Any, length: int, rounds: int) -> None:
    tokens = tokens_of(engine, length)
    x = torch.tensor([tokens], device=engine.model.embed.device)
    default = engine.loop.admission.lone_rows

    @torch.inference_mode()
    def theirs() -> None:
        model(x, logits_to_keep=1, use_cache=True)
        finish()

    def in_passes(rows: int, everywhere: bool) -> None:
        engine.loop.admission.lone_rows = rows
        if everywhere:
            with general(engine):
                prompt(engine, tokens)
        else:
            prompt(engine, tokens)
        engine.loop.admission.lone_rows = default

    few, many = ROWS
    arms = ((few, False), (many, False), (few, True))
    works: list[Callable[[], None]] = [theirs, *(partial(in_passes, rows, everywhere) for rows, everywhere in arms)]
    other, narrow, wide, plain = (1e3 * seconds for seconds in in_turns(*works, rounds=rounds))
    table.add(
        f"prompt of {length} tokens, Hugging Face with SDPA",
        ratio=other / wide,
        aim=">= 1.0 at 32768",
        met=other / wide >= 1.0,
        hugging_face_ms=other,
        ours_ms=narrow,
        ours_wide_ms=wide,
        general_ms=plain,
        ratio_narrow=other / narrow,
        ratio_general=other / plain,
    )


def one_layer(table: Table, length: int) -> None:
    """Attention of a prompt in one pass, with both kernels, against SDPA on contiguous keys."""
    scale = D_HEAD**-0.5
    k, v, pages = cache(1, length)
    per_tile = rows_per_tile(HEADS, KV_HEADS, D_HEAD, k.dtype, length)
    position = torch.arange(length, device="cuda", dtype=torch.int32)
    tiles = plan_tiles([0] * length, per_tile).cuda()
    rows = PagedRows(torch.zeros_like(position), position, pages, tiles, length, per_tile)
    q = torch.randn(length, HEADS, D_HEAD, device="cuda", dtype=k.dtype)
    flat, keys, values = q.transpose(0, 1)[None].contiguous(), contiguous(k, pages, length), contiguous(v, pages, length)
    ours = attention.attention(q, k, v, rows, scale)
    assert torch.equal(ours, attention.attention(q, k, v, rows, scale, specialised=False)), "the kernel moved bits"
    works = (
        lambda: F.scaled_dot_product_attention(flat, keys, values, is_causal=True, enable_gqa=True),
        lambda: attention.attention(q, k, v, rows, scale, out=ours),
        lambda: attention.attention(q, k, v, rows, scale, out=ours, specialised=False),
    )
    library, special, plain = device_ms(*works)
    table.add(
        f"attention of {length} rows, SDPA",
        ratio=library / special,
        aim=">= 0.75",
        met=library / special >= 0.75,
        sdpa_ms=library,
        ours_ms=special,
        general_ms=plain,
        ratio_general=library / plain,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: shows that everything runs")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 8192, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "long-gpu.json")
    given = parser.parse_args()
    longest = max(given.lengths)
    shape, device = (TINY_SHAPE, "cpu") if given.tiny else (SHAPE, "cuda")
    shape = replace(shape, max_positions=max(shape.max_positions, longest + 16))
    about = "tiny shape, CPU" if given.tiny else f"Llama-3.1-8B shape, random weights, bfloat16, {torch.cuda.get_device_name()}"
    table = Table("long-gpu", f"{about}; one prompt at a time, {ROWS[0]} rows per pass (wide: {ROWS[1]})", out=given.out)
    decoder = random_decoder(shape, device, torch.float32 if given.tiny else torch.bfloat16)
    engine = Engine(decoder, cache_tokens=2 * longest + 4096)
    print(f"certified: {engine.certificate.certified}; controls that differed: {engine.certificate.has_teeth}", flush=True)
    check(engine, tokens_of(engine, min(5000, longest)))
    print("bits: equal", flush=True)
    model = hugging_face(decoder)
    for length in given.lengths:
        measure(table, engine, model, length, given.rounds)
    for length in () if given.tiny else given.lengths:
        one_layer(table, length)


if __name__ == "__main__":
    main()
