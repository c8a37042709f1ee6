"""Mixtures of experts on a CUDA device, Qwen3-30B-A3B shape with random weights, bfloat16.

    PYTHONPATH=src:. python -m benchmarks.experts_gpu [--tiny] [section ...]

Deterministic decoding against the engine's own fast path, once with our products of experts and once with the library's grouped
product (the faster of the two counts); the batch-1 step against one read of the weights that it needs; passes of prompts; the
cost of capturing the routers' sites. The bits are checked before every timing: a request alone and among others.
"""

import argparse
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import copy_bandwidth, in_turns
from benchmarks.table import RESULTS, Table
from replaylens.engine.engine import Engine
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.model.config import MixtureConfig, ModelConfig, Rope, Routing
from replaylens.engine.model.decoder import Decoder, Mixture
from replaylens.engine.model.layers import rotary_table
from replaylens.engine.passes import bursts, cuda
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.bursts import Place, Wanted
from replaylens.engine.passes.cuda import LibraryExpertOps
from replaylens.engine.proof import trace
from replaylens.engine.request.capture import CaptureSpec, PassTap
from replaylens.engine.request.sampling import Sampling

SHAPE = ModelConfig(
    num_layers=48,
    d_model=2048,
    num_heads=32,
    num_kv_heads=4,
    d_head=128,
    d_mlp=6144,
    vocab_size=151936,
    max_positions=8192,
    norm_eps=1e-6,
    rotary_dim=128,
    rope=Rope(theta=1e6),
    qk_norm=True,
    tied_embeddings=False,
    mixture=MixtureConfig(num_experts=128, d_expert=768, routing=Routing(top=8)),
)
TINY = replace(SHAPE, num_layers=2, d_model=256, num_heads=4, num_kv_heads=2, d_head=64, rotary_dim=64, vocab_size=999)
ENDLESS = Sampling(ignore_eos=True)
STEPS = 16
"""decode steps that are timed together"""


class LibraryCudaOps(LibraryExpertOps, cuda.FastCudaOps):
    """The fast path with the library's grouped product."""


def random_model(shape: ModelConfig) -> Decoder:
    """Weights made on the device in bfloat16: they do not fit there twice."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(shape)
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        new = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
        is_norm = ".ln" in name or "_norm" in name or name.startswith("ln")
        new = new.fill_(1.0) if is_norm else new.normal_(std=0.02 if "router" not in name else 0.1)
        setattr(module, name.rpartition(".")[2], torch.nn.Parameter(new, requires_grad=False))
    for number, rope in enumerate(model._ropes):
        table = rotary_table(rope, shape.rotary_dim, shape.max_positions).cuda()
        model.register_buffer(f"rotary_{number}", table, persistent=False)
    return model.eval()


def active_bytes(model: Decoder) -> int:
    """Weights that one token's step reads: of the experts, the chosen ones."""
    total = 0
    for name, parameter in model.named_parameters():
        if name != "embed":
            mixture = model.config.mixture
            chosen = mixture.routing.top / mixture.num_experts if mixture and ".experts." in name else 1.0
            total += int(parameter.numel() * parameter.element_size() * chosen)
    return total


def router_sites(model: Decoder) -> tuple[str, ...]:
    """Logits, chosen experts and weights of every layer."""
    mixtures = [block.mlp for block in model.blocks if isinstance(block.mlp, Mixture)]
    return tuple(site for m in mixtures for site in (m.logits_site, m.chosen_site, m.weights_site))


def prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, engine.config.vocab_size, (count, length), generator=generator).tolist()


@contextmanager
def library_experts(engine: Engine) -> Iterator[None]:
    """The fast path uses the library's grouped product."""
    before = bursts.FastCudaOps
    engine.loop.bursts._graphs.clear()
    bursts.FastCudaOps = cuda.FastCudaOps = LibraryCudaOps  # type: ignore[misc]
    try:
        yield
    finally:
        bursts.FastCudaOps = cuda.FastCudaOps = before  # type: ignore[misc]
        engine.loop.bursts._graphs.clear()


def checked(engine: Engine, count: int) -> list[Any]:
    """Branches after some steps in company. The first one has the bits that it has alone."""
    given = prompts(engine, count, 128)
    single = engine.prompt(given[0])
    engine.generate([single], 12, window=1, sampling=ENDLESS)
    branches = engine.prompts(given)
    engine.generate(branches, 12, sampling=ENDLESS)
    assert branches[0].tokens == single.tokens and torch.equal(branches[0].kv(), single.kv()), "company moved bits"
    single.release()
    return branches


def places(engine: Engine, branches: list[Any], spec: CaptureSpec | None = None) -> list[Place]:
    found = []
    for branch in branches:
        lane = branch.lane
        engine.runner.reserve(lane.table, lane.computed, lane.computed + 2 * STEPS)
        wanted = None if spec is None else Wanted(spec, range(STEPS))
        found.append(Place(branch.tokens[-1], lane.computed, lane.table, ENDLESS, wanted=wanted))
    return found


def decode(table: Table, engine: Engine, batches: tuple[int, ...] = (1, 8, 64)) -> None:
    speed, spec = copy_bandwidth(), CaptureSpec(router_sites(engine.model))
    floor = 1e3 * active_bytes(engine.model) / speed
    for count in batches:
        branches = checked(engine, count)
        plain, captured = places(engine, branches), places(engine, branches, spec)
        run = lambda p, exact: engine.loop.bursts.run(p, STEPS, exact)  # noqa: E731
        exact, fast, taken = in_turns(lambda: run(plain, True), lambda: run(plain, False), lambda: run(captured, True))
        library = float("inf")
        try:
            with library_experts(engine):
                library = in_turns(lambda: run(plain, False))[0]
        except Exception:
            print(f"the library's grouped product failed\n{traceback.format_exc()}", flush=True)
        best = min(fast, library)
        table.add(
            f"deterministic decode, batch {count}, of the faster own path without the promise",
            ratio=best / exact,
            aim=">= 0.95",
            met=best / exact >= 0.95,
            exact_ms=exact / STEPS,
            fast_ms=fast / STEPS,
            library_experts_ms=library / STEPS,
        )
        extra = taken / exact - 1
        table.add(f"capture of router sites, batch {count}", aim="<= 3 %", met=extra <= 0.03, extra=extra, ms=taken / STEPS)
        if count == 1:
            share = floor * STEPS / exact
            table.add(
                "batch-1 step against one read of the active weights",
                ratio=share,
                aim=">= 0.5",
                met=share >= 0.5,
                floor_ms=floor,
                copy_TB_s=speed * 1e-12,
            )
        for branch in branches:
            branch.release()
        engine.prefix.clear()


def passes(table: Table, engine: Engine) -> None:
    engine.runner.graphs.worth = 1
    for rows in (512, 2048):
        page_table = PageTable()
        engine.runner.reserve(page_table, 0, rows)
        segment = [Segment(page_table, 0, prompts(engine, 1, rows)[0], 1)]
        names = frozenset(router_sites(engine.model))
        exact, fast, taken = in_turns(
            lambda s=segment: engine.runner.exact(s),
            lambda s=segment: engine.runner.fast(s),
            lambda s=segment: engine.runner.exact(s, PassTap(names)),
            rounds=3,
        )
        what = f"canonical pass of {rows} rows, of our own without the promise"
        table.add(what, ratio=fast / exact, aim=">= 0.95", met=fast / exact >= 0.95, exact_ms=exact, fast_ms=fast)
        extra = taken / exact - 1
        table.add(f"capture of router sites, {rows} rows", aim="<= 3 %", met=extra <= 0.03, extra=extra, ms=taken)
        engine.runner.pool.release(page_table)


def contract(table: Table, engine: Engine) -> None:
    """Tokens, KV, S, T, C and the routers' sites of a request alone, in company, and verified from drafts."""
    mine, others = prompts(engine, 1, 100)[0], [prompts(engine, n, n)[0] for n in (3, 40, 130, 77)]
    names, found = router_sites(engine.model), []
    for beside, options in (([], {"window": 1}), (others, {"window": 1}), (others[:2], {"drafter": "lens", "window": 4})):
        branches = engine.prompts([*beside, mine], sites=[*engine.sites.select("STC")[0], *names])
        engine.generate(branches, 8, sampling=ENDLESS, final=True, **options)
        last = branches[-1]
        found.append((last.tokens, last.kv().cpu(), {site: last.activations[site] for site in last.activations.sites()}))
        for branch in branches:
            branch.release()
        engine.prefix.clear()
    (tokens, kv, rows), *rest = found
    wrong = sum(t != tokens or not torch.equal(k, kv) for t, k, _ in rest)
    wrong += sum(not torch.equal(other[site], rows[site]) for *_, other in rest for site in rows)
    table.add("contract: tokens, KV, S, T, C, router sites", aim="0 apart", met=wrong == 0, apart=wrong, sites=len(rows))


def profile(table: Table, engine: Engine) -> None:
    """The kernels of a batch-1 step, by time. Prints only."""
    branches = engine.prompts(prompts(engine, 1, 128))
    engine.generate(branches, 2, sampling=ENDLESS)
    plain = places(engine, branches)
    engine.loop.bursts.run(plain, STEPS, True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        engine.loop.bursts.run(plain, STEPS, True)
        torch.cuda.synchronize()
    lines = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(e.device_time_total for e in lines) / STEPS
    print(f"kernels of a batch-1 step: {total:.0f} us in all", flush=True)
    for e in lines[:24]:
        each, count = e.device_time_total / e.count, e.count / STEPS
        print(f"  {e.key[:60]:60s} {count:6.1f} x {each:7.2f} us = {e.device_time_total / STEPS:8.1f}", flush=True)


SECTIONS: dict[str, Callable[[Table, Engine], None]] = {
    "decode": decode,
    "single": lambda table, engine: decode(table, engine, (1,)),
    "passes": passes,
    "contract": contract,
    "profile": profile,
}


def kept_hash(model: torch.nn.Module) -> str:
    """Of a few numbers per tensor: hashing 61 GB would take longer than everything that is measured."""
    ends: list[Tensor] = [x.flatten()[:: max(1, x.numel() // 8)].float().sum() for x in model.state_dict().values()]
    return f"{float(torch.stack(ends).sum()):.8e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="two layers: shows that everything runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "experts-gpu.json")
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    given = parser.parse_args()
    trace.weights_hash = kept_hash
    shape = TINY if given.tiny else SHAPE
    name = "tiny shape" if given.tiny else "Qwen3-30B-A3B shape"
    table = Table("experts-gpu", f"{name}, random weights, bfloat16, {torch.cuda.get_device_name()}", out=given.out)
    print(table.about, flush=True)
    engine = Engine(random_model(shape), cache_tokens=64 * 512)
    print(f"certified: {engine.certificate.certified}; controls that differed: {engine.certificate.has_teeth}", flush=True)
    failed = []
    for section in given.sections or ("decode", "passes", "contract"):
        try:
            SECTIONS[section](table, engine)
        except Exception:
            failed.append(section)
            print(f"{section} FAILED\n{traceback.format_exc()}", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
