"""The engine on a CUDA device, Llama-3.1-8B shape with random weights, bfloat16.

Deterministic decoding against the engine's fast path (library products, the same graphs); the batch-1 step against the time
to read the weights once; canonical passes against the library's; the cost of capture. The bits are checked before every
timing.
"""

import sys
import time
import traceback
from typing import Any

import torch

from benchmarks.baselines.subject import ENDLESS, SHAPE, random_decoder
from benchmarks.table import Table
from replaylens.engine.engine import Engine
from replaylens.engine.lens import cuda as cuda_lens
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.graphs import WORTH
from replaylens.engine.request.capture import LensSpec, PassTap
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch

DRAWN = Sampling(ignore_eos=True, temperature=0.8, seed=3)


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


def in_turns(*works: Any, rounds: int = 5) -> list[float]:
    """Median device time of each, measured in turns, so that a falling clock affects all alike."""
    times = [[milliseconds(work, 2) for work in works] for _ in range(rounds)]
    return [sorted(mine)[rounds // 2] for mine in zip(*times, strict=True)]


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(100, 120000, (count, length), generator=generator).tolist()


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy, counting reads and writes."""
    x = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (1e-3 * milliseconds(lambda: y.copy_(x)))


def decode(table: Table, engine: Engine) -> None:
    weight_bytes = sum(p.numel() * 2 for name, p in engine.model.named_parameters() if name != "embed")
    floor = 1e3 * weight_bytes / copy_bandwidth()
    for count in (1, 8, 64):
        step, drawn = _steps(engine, count, ENDLESS), _steps(engine, count, DRAWN)
        ratio = step[False] / step[True]
        table.add(
            f"deterministic decode, batch {count}",
            ratio=ratio,
            aim=">= 0.97",
            met=ratio >= 0.97,
            exact_ms=step[True],
            fast_ms=step[False],
        )
        ratio = drawn[False] / drawn[True]
        table.add(f"deterministic decode, drawn at temperature 0.8, batch {count}", ratio=ratio, exact_ms=drawn[True])
        if count == 1:
            share = floor / step[True]
            table.add(
                "batch-1 step against one read of the weights", ratio=share, aim=">= 0.75", met=share >= 0.75, floor_ms=floor
            )


def _steps(engine: Engine, count: int, sampling: Sampling) -> dict[bool, float]:
    """Milliseconds per decode step of `count` requests, canonical and fast, after a check of the bits."""
    branches = engine.prompts(prompts(count, 128))
    single = engine.prompt(prompts(count, 128)[0])
    engine.generate([single], 24, window=1, sampling=sampling)
    engine.generate(branches, 24, sampling=sampling)
    assert branches[0].tokens == single.tokens and torch.equal(branches[0].kv(), single.kv()), "company moved bits"
    step = {}
    for exact in (True, False):
        places = [_place(engine, branch, sampling) for branch in branches]
        step[exact] = milliseconds(lambda p=places, e=exact: engine.loop.bursts.run(p, 16, e), 5) / 16
    for branch in [*branches, single]:
        branch.release()
    engine.prefix.clear()
    return step


def _place(engine: Engine, branch: Branch, sampling: Sampling) -> Any:
    from replaylens.engine.passes.bursts import Place

    lane = branch.lane
    engine.runner.reserve(lane.table, lane.computed, lane.computed + 32)
    return Place(branch.tokens[-1], lane.computed, lane.table, sampling)


def passes(table: Table, engine: Engine) -> None:
    engine.runner.graphs.worth = 1
    for rows in (512, 2048):
        page_table = PageTable()
        engine.runner.reserve(page_table, 0, rows)
        segment = [Segment(page_table, 0, prompts(1, rows)[0], 1)]
        names, _ = engine.sites.select("STC")
        exact, fast, taken = in_turns(
            lambda s=segment: engine.runner.exact(s),
            lambda s=segment: engine.runner.fast(s),
            lambda s=segment, n=names: _captured(engine, s, n),
        )
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
    engine.runner.graphs.worth = WORTH


def _captured(engine: Engine, segments: list[Segment], names: tuple[str, ...]) -> PassTap:
    tap = PassTap(frozenset(names))
    engine.runner.exact(segments, tap)
    return tap


def load(table: Table, engine: Engine) -> None:
    """64 concurrent requests through the whole engine, including scheduler and host."""
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


def lens(table: Table, engine: Engine) -> None:
    """Z at all layers of 512 rows, against bare products with the unembedding; first checks that rows ignore the batch."""
    spec, layers = LensSpec(()), SHAPE.num_layers
    stacked = torch.randn(512, layers, SHAPE.d_model, dtype=torch.bfloat16, device="cuda")
    whole = cuda_lens.read(spec, engine.model, stacked, [7] * 512)
    alone = cuda_lens.read(spec, engine.model, stacked[100:101], [7])
    assert all(torch.equal(alone[name], whole[name][100:101]) for name in alone), "company moved bits of Z"
    weight, by_layer = engine.model.unembed.weight, stacked.transpose(0, 1).contiguous()
    out = torch.empty(512, SHAPE.vocab_size, dtype=torch.bfloat16, device="cuda")
    bare, ours = in_turns(
        lambda: [torch.mm(x, weight, out=out) for x in by_layer],
        lambda: cuda_lens.read(spec, engine.model, stacked, [7] * 512),
    )
    table.add(
        "Z at 32 layers, 512 rows, over bare products",
        ratio=ours / bare,
        aim="<= 1.15",
        met=ours <= 1.15 * bare,
        ms=ours,
        bare_ms=bare,
    )


def contract(table: Table, engine: Engine) -> None:
    """A short contract test at this shape: captured rows of a request alone, in a batch, and verified from drafts."""
    mine, others = prompts(1, 100)[0], [prompts(1, n)[0] for n in (3, 40, 130, 77)]
    found = []
    for beside, options in (([], {"window": 1}), (others, {"window": 1}), (others[:2], {"drafter": "lens", "window": 6})):
        branches = engine.prompts([*beside, mine], sites="STCZ")
        engine.generate(branches, 8, sampling=ENDLESS, final=True, **options)
        last = branches[-1]
        found.append((last.tokens, last.kv().cpu(), {site: last.activations[site] for site in last.activations.sites()}))
        for branch in branches:
            branch.release()
        engine.prefix.clear()
    (tokens, kv, rows), *rest = found
    bits = lambda x: x.contiguous().view(torch.uint8)  # noqa: E731 (NaN marks a row without successor)
    wrong = sum(t != tokens or not torch.equal(k, kv) for t, k, _ in rest)
    wrong += sum(not torch.equal(bits(other[site]), bits(rows[site])) for *_, other in rest for site in rows)
    table.add(
        "contract at this shape: tokens, KV, S, T, C, Z",
        aim="0 differences",
        met=wrong == 0,
        differences=wrong,
        sites=len(rows),
    )


SECTIONS = (decode, passes, contract, lens, load)


def main() -> None:
    """All sections, or those named on the command line. A failing section is reported, and the others still run."""
    table = Table("engine-gpu", f"Llama-3.1-8B shape, random weights, bfloat16, {torch.cuda.get_device_name()}")
    print(table.about)
    engine = Engine(random_decoder(SHAPE, "cuda", torch.bfloat16), cache_tokens=64 * 512)
    print(f"certified: {engine.certificate.certified}; controls that differed: {engine.certificate.has_teeth}", flush=True)
    asked, failed = sys.argv[1:], []
    for section in SECTIONS:
        if asked and section.__name__ not in asked:
            continue
        try:
            section(table, engine)
        except Exception:
            failed.append(section.__name__)
            print(f"{section.__name__} FAILED\n{traceback.format_exc()}", flush=True)
        table.save(beside=bool(asked))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
