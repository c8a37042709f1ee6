"""The engine on a CUDA device, Llama-3.1-8B shape with random weights, bfloat16.

Deterministic decoding against our own fastest decoding without the promise (the library's products, the same graphs); the
batch-1 step against the time to read the weights once; canonical passes against the library's; what capture costs. Every
timing is preceded by a check of the bits it stands for.
"""

import time
from typing import Any

import torch

from benchmarks.table import Table
from replaylens.engine.batch import Segment
from replaylens.engine.capture import PassTap
from replaylens.engine.config import ModelConfig, Rope
from replaylens.engine.engine import Engine
from replaylens.engine.model import Decoder
from replaylens.engine.pages import PageTable
from replaylens.engine.sampling import Sampling

SHAPE = ModelConfig(
    num_layers=32,
    d_model=4096,
    num_heads=32,
    num_kv_heads=8,
    d_head=128,
    d_mlp=14336,
    vocab_size=128256,
    max_positions=8192,
    rotary_dim=128,
    rope=Rope(theta=500000.0),
    tied_embeddings=False,
)
ENDLESS = Sampling(ignore_eos=True)


def subject() -> Decoder:
    """Random weights of the shape, made on the device."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder(SHAPE)
    for name, parameter in model.named_parameters():
        value = torch.ones_like(parameter) if ".ln" in name or name.startswith("ln") else torch.randn_like(parameter) * 0.02
        parameter.data = value.to(torch.bfloat16)
    return model.requires_grad_(False).eval()


def milliseconds(work: Any, repeats: int = 10) -> float:
    """Median device time of `work` after a warm-up."""
    work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(100, 120000, (count, length), generator=generator).tolist()


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy, reads and writes counted."""
    x = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (1e-3 * milliseconds(lambda: y.copy_(x)))


def decode(table: Table, engine: Engine) -> None:
    weight_bytes = sum(p.numel() * 2 for name, p in engine.model.named_parameters() if name != "embed")
    floor = 1e3 * weight_bytes / copy_bandwidth()
    for count in (1, 8, 64):
        branches = engine.prompts(prompts(count, 128))
        single = engine.prompt(prompts(count, 128)[0])
        engine.generate([single], 24, window=1, sampling=ENDLESS)
        engine.generate(branches, 24, sampling=ENDLESS)
        assert branches[0].tokens == single.tokens and torch.equal(branches[0].kv(), single.kv()), "company moved bits"
        step = {}
        for exact in (True, False):
            places = [_place(engine, branch) for branch in branches]
            step[exact] = milliseconds(lambda p=places, e=exact: engine.loop.bursts.run(p, 16, e), 5) / 16
        for branch in [*branches, single]:
            branch.release()
        engine.prefix.clear()
        ratio = step[False] / step[True]
        table.add(
            f"deterministic decode, batch {count}",
            ratio=ratio,
            aim=">= 0.97",
            met=ratio >= 0.97,
            exact_ms=step[True],
            fast_ms=step[False],
        )
        if count == 1:
            share = floor / step[True]
            table.add(
                "batch-1 step against one read of the weights", ratio=share, aim=">= 0.75", met=share >= 0.75, floor_ms=floor
            )


def _place(engine: Engine, branch: Any) -> Any:
    from replaylens.engine.burst import Place

    lane = branch.lane
    engine.runner.reserve(lane.table, lane.computed, lane.computed + 32)
    return Place(branch.tokens[-1], lane.computed, lane.table)


def passes(table: Table, engine: Engine) -> None:
    for rows in (512, 2048):
        page_table = PageTable()
        engine.runner.reserve(page_table, 0, rows)
        segment = [Segment(page_table, 0, prompts(1, rows)[0], 1)]
        exact = milliseconds(lambda s=segment: engine.runner.exact(s), 5)
        fast = milliseconds(lambda s=segment: engine.runner.fast(s), 5)
        names, _ = engine.sites.select("STC")
        taken = milliseconds(lambda s=segment, n=names: _captured(engine, s, n), 5)
        table.add(
            f"canonical pass of {rows} rows",
            ratio=fast / exact,
            aim=">= 0.95",
            met=fast / exact >= 0.95,
            exact_ms=exact,
            fast_ms=fast,
        )
        extra = taken / exact - 1
        table.add(
            f"capture of S, T, C, {rows} rows (kept on the device)", aim="<= 8 %", met=extra <= 0.08, extra=extra, ms=taken
        )
        engine.runner.pool.release(page_table)


def _captured(engine: Engine, segments: list[Segment], names: tuple[str, ...]) -> PassTap:
    tap = PassTap(frozenset(names))
    engine.runner.exact(segments, tap)
    return tap


def load(table: Table, engine: Engine) -> None:
    """64 requests together through the whole engine, scheduler and host included."""
    rates = {}
    for deterministic in (True, False):
        branches = engine.prompts(prompts(64, 128))
        engine.generate(branches, 16, sampling=ENDLESS, deterministic=deterministic)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.generate(branches, 64, sampling=ENDLESS, deterministic=deterministic)
        rates[deterministic] = 64 * 64 / (time.perf_counter() - begin)
        for branch in branches:
            branch.release()
        engine.prefix.clear()
    ratio = rates[True] / rates[False]
    table.add(
        "engine, 64 requests, tokens/s", ratio=ratio, aim=">= 0.97", met=ratio >= 0.97, exact=rates[True], fast=rates[False]
    )


def main() -> None:
    table = Table("engine-gpu", f"Llama-3.1-8B shape, random weights, bfloat16, {torch.cuda.get_device_name()}")
    print(table.about)
    engine = Engine(subject(), cache_tokens=64 * 512)
    print(f"certified: {engine.certificate.certified}; controls that differed: {engine.certificate.has_teeth}")
    decode(table, engine)
    passes(table, engine)
    load(table, engine)
    table.save()


if __name__ == "__main__":
    main()
