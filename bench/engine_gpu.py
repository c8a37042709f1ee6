"""The engine on a CUDA device against its own fast path, which promises nothing about bits: random weights, bfloat16.

`engine-gpu` has the Llama-3.1-8B shape: the fast path has the library's products in the same graphs. `experts-gpu` has the
Qwen3-30B-A3B shape: the fast path has our products of experts, or the library's grouped product, and the faster counts.
`portable-gpu` has the 8B shape in float32, whose digests hold on every machine. Bits are checked before every timing.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench.harness import Line, Lines, case, random_tokens, seconds
from bench.subjects import ENDLESS, SHAPE, certified, checked, random_decoder, released, steps
from replaylens.engine.engine import Engine
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.model.config import Activation, MixtureConfig, ModelConfig, Rope, Routing
from replaylens.engine.model.decoder import Decoder, Mixture
from replaylens.engine.model.layers import Experts
from replaylens.engine.passes.batch import Segment
from replaylens.engine.proof import fingerprint
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import CaptureSpec, PassTap
from replaylens.engine.request.sampling import Sampling
from replaylens.kernels.gpus import gpu_of, imposed, known

EXPERTS = ModelConfig(
    48, 2048, 32, 4, 128, 6144, 151936, 8192, norm_eps=1e-6, rotary_dim=128, rope=Rope(theta=1e6), qk_norm=True,
    tied_embeddings=False, mixture=MixtureConfig(num_experts=128, d_expert=768, routing=Routing(top=8)),
)  # fmt: skip
STEPS = 16
"""decode steps that are timed together"""
DRAWN = Sampling(ignore_eos=True, temperature=0.8, seed=3)
DECLARED: dict[str, Any] = dict(ours="exact", baseline="fast", needs="gpu", clock="device")


@cache
def llama() -> Engine:
    return certified(Engine(random_decoder(SHAPE, "cuda", torch.bfloat16), cache_tokens=64 * 512))


@cache
def experts() -> Engine:
    fingerprint.weights_hash = kept_hash
    return certified(Engine(random_decoder(EXPERTS, "cuda", torch.bfloat16), cache_tokens=64 * 512))


def kept_hash(model: torch.nn.Module) -> str:
    """Of a few numbers per tensor: hashing 61 GB would take longer than everything that is measured."""
    ends: list[Tensor] = [x.flatten()[:: max(1, x.numel() // 8)].float().sum() for x in model.state_dict().values()]
    return f"{float(torch.stack(ends).sum()):.8e}"


def prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    return random_tokens(count, length, engine.config.vocab_size, seed=count, first=100)


def router_sites(model: Decoder) -> tuple[str, ...]:
    """Logits, chosen experts and weights of every layer."""
    mixtures = [block.mlp for block in model.blocks if isinstance(block.mlp, Mixture)]
    return tuple(site for m in mixtures for site in (m.logits_site, m.chosen_site, m.weights_site))


def one_read(model: Decoder) -> tuple[float, float]:
    """(seconds of one read of the weights that a token's step needs, of the experts the chosen ones; bytes per second)."""
    mixture, total = model.config.mixture, 0.0
    for name, parameter in model.named_parameters():
        chosen = mixture.routing.top / mixture.num_experts if mixture and ".experts." in name else 1.0
        total += 0 if name == "embed" else parameter.numel() * parameter.element_size() * chosen
    x = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    speed = 2 * x.numel() / sorted(seconds(lambda: y.copy_(x), "device")[0] for _ in range(11))[5]
    return total / speed, speed


# Decoding


def against_one_read(engine: Engine, step: float, what: str, aim: str) -> Line:
    """A step of one branch against one read of the weights that it needs."""
    floor, speed = one_read(engine.model)
    numbers = {"floor_ms": 1e3 * floor, "copy_TB_s": speed * 1e-12}
    return Line(f"batch-1 step against one read of the {what}", ratio=floor / step, aim=aim, numbers=numbers)


@case("engine-gpu.decode", **DECLARED)
def decode(batches: tuple[int, ...] = (1, 8, 64)) -> Lines:
    """Deterministic decode steps against the fast path, greedy and drawn; the batch-1 step against one read of the weights."""
    engine = llama()
    for count in batches:
        for sampling, what, aim in ((ENDLESS, "", ">= 0.97"), (DRAWN, ", drawn at temperature 0.8", "")):
            branches = checked(engine, prompts(engine, count, 128), 24, sampling)
            arms = {arm: steps(engine, branches, STEPS, sampling, arm == "exact") for arm in ("exact", "fast")}
            found = yield Line(f"deterministic decode{what}, batch {count}", arms, per=STEPS, aim=aim)
            released(engine, branches)
            if count == 1 and sampling is ENDLESS:
                yield against_one_read(engine, found.values["exact"], "weights", ">= 0.88")


@case("experts-gpu.decode", **DECLARED, others=("captured", "library experts"))
def experts_decode(batches: tuple[int, ...] = (1, 8, 64)) -> Lines:
    """Deterministic decode steps of a mixture of experts against the faster own path without the promise; the cost of capturing
    the routers' sites; the batch-1 step against one read of the active weights."""
    engine = experts()
    spec = CaptureSpec(router_sites(engine.model))
    for count in batches:
        branches, library = checked(engine, prompts(engine, count, 128), 24), float("inf")
        arms = {"exact": steps(engine, branches, STEPS), "fast": steps(engine, branches, STEPS, exact=False)}
        try:
            with library_experts(engine):
                what = f"fast decode with the library's grouped product, batch {count}"
                found = yield Line(what, {"library experts": arms["fast"]}, per=STEPS)
                library = found.values["library experts"]
        except Exception:
            print(f"the library's grouped product failed\n{traceback.format_exc()}", flush=True)
        arms["captured"] = steps(engine, branches, STEPS, spec=spec)
        what = f"deterministic decode, batch {count}, of the faster own path without the promise"
        found = yield Line(what, arms, per=STEPS, aim=">= 0.95")
        exact = found.values["exact"]
        found.judge(min(found.values["fast"], library) / exact)
        found.note(library_experts_ms=1e3 * library)
        extra = found.values["captured"] / exact - 1
        yield Line(f"capture of router sites, batch {count}", aim="<= 3 %", met=extra <= 0.03, numbers={"extra": extra})
        if count == 1:
            yield against_one_read(engine, exact, "active weights", ">= 0.6")
        released(engine, branches)


@contextmanager
def library_experts(engine: Engine) -> Iterator[None]:
    """The fast path uses the library's grouped product, over rows that are sorted by expert first. It is slower than ours on an
    H200 at every size that was measured, so the engine does not have it."""
    from replaylens.engine.passes import bursts, cuda
    from replaylens.kernels.norm import activation
    from replaylens.kernels.route import Plan, sorted_plan

    def ordered(chosen: Tensor, experts: Experts) -> Plan:
        return sorted_plan(chosen.contiguous(), len(experts.up), tile_rows=chosen.numel(), capacity=len(experts.up))

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None, made: Plan, chosen: Tensor) -> Tensor:
        out: Tensor = torch._grouped_mm(rows, weight, offs=made.ends)
        return out if bias is None else out + bias[chosen.flatten()[made.order]]

    def unsorted(x: Tensor, made: Plan, chosen: Tensor) -> Tensor:
        return torch.empty_like(x).index_copy_(0, made.order.long(), x).unflatten(0, chosen.shape)

    class LibraryCudaOps(cuda.FastCudaOps):
        """The fast path with the library's grouped product."""

        def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
            made = ordered(chosen, experts)
            wide = product(x[made.order // chosen.shape[1]], experts.up, experts.up_bias, made, chosen)
            return unsorted(activation(wide, kind, experts.gated), made, chosen)

        def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
            made = ordered(chosen, experts)
            rows = hidden.flatten(0, 1)[made.order]
            return unsorted(product(rows, experts.down, experts.down_bias, made, chosen), made, chosen)

    before = bursts.FastCudaOps
    engine.loop.bursts._graphs.clear()
    bursts.FastCudaOps = cuda.FastCudaOps = LibraryCudaOps  # type: ignore[misc]
    try:
        yield
    finally:
        bursts.FastCudaOps = cuda.FastCudaOps = before  # type: ignore[misc]
        engine.loop.bursts._graphs.clear()


# Passes, captured rows, the whole engine


def prompt_pass(engine: Engine, rows: int) -> list[Segment]:
    """One prompt, whose pass becomes a graph at once."""
    engine.runner.graphs.worth, table = 1, PageTable()
    engine.runner.reserve(table, 0, rows)
    return [Segment(table, 0, prompts(engine, 1, rows)[0], 1)]


def passes(engine: Engine, names: frozenset[str], sites: str, most: float) -> Lines:
    """Canonical passes against the fast path, and the price of capture, which may be `most`."""
    from replaylens.engine.passes.graphs import WORTH

    for rows in (512, 2048):
        segment = prompt_pass(engine, rows)
        arms = {
            "exact": lambda: engine.runner.exact(segment),
            "fast": lambda: engine.runner.fast(segment),
            "captured": lambda: engine.runner.exact(segment, PassTap(names)),
        }
        found = yield Line(f"canonical pass of {rows} rows", arms, aim=">= 0.95")
        extra = found.values["captured"] / found.values["exact"] - 1
        aim = f"<= {100 * most:.0f} %"
        yield Line(f"capture of {sites}, {rows} rows", aim=aim, met=extra <= most, numbers={"extra": extra})
        engine.runner.pool.release(segment[0].table)
    engine.runner.graphs.worth = WORTH


@case("engine-gpu.passes", **DECLARED, others=("captured",))
def llama_passes() -> Lines:
    """Canonical passes of 512 and 2,048 rows against the library's; the cost of capturing S, T, C, kept on the device."""
    engine = llama()
    yield from passes(engine, frozenset(engine.sites.select("STC")[0]), "S, T, C", 0.08)


@case("experts-gpu.passes", **DECLARED, others=("captured",))
def experts_passes() -> Lines:
    """Canonical passes of a mixture of experts against the fast path; the cost of capturing the routers' sites."""
    engine = experts()
    yield from passes(engine, frozenset(router_sites(engine.model)), "router sites", 0.03)


# The facts of other GPUs


@case("facts-gpu", ours="imposed", baseline="own", needs="gpu", clock="device", rounds=9, warm=2)
def facts(names: tuple[str, ...] = ("A100", "4090", "5090"), batches: tuple[int, ...] = (1, 64)) -> Lines:
    """Decode steps and prompts with the facts of other GPUs imposed against the device's own, first that bits are the same."""
    engines, own = {"": llama()}, gpu_of(torch.device("cuda"))
    # all engines stand in one process, and programs for multiprocessors that are not there would wait for others
    gpus = {name: replace(known(name), memory=own.memory, multiprocessors=own.multiprocessors) for name in names}
    for name in names:
        with imposed(gpus[name]):
            engines[name] = certified(Engine(llama().model, cache_tokens=64 * 512))

    def under(name: str, work: Callable[[], Any]) -> Any:
        with imposed(gpus[name]) if name else nullcontext():
            return work()

    def compared(what: str, make: Callable[[Engine], tuple[Callable[[], Any], Any, Callable[[], Any]]], **more: Any) -> Lines:
        """make  of an engine: what is timed, the bits that it gives, and what frees its memory"""
        made = {name: under(name, partial(make, engine)) for name, engine in engines.items()}
        for name in names:
            same = all(torch.equal(*pair) for pair in zip(made[name][1], made[""][1], strict=True))
            arms = {"imposed": partial(under, name, made[name][0]), "own": made[""][0]}
            yield Line(f"{what}, facts of {name}", arms, check=same, **more)
        for *_, free in made.values():
            free()

    def decoding(count: int, engine: Engine) -> tuple[Callable[[], Any], Any, Callable[[], Any]]:
        branches = list(engine.prompts(prompts(engine, count, 128)))
        engine.generate(branches, 8, sampling=ENDLESS)
        bits = [torch.tensor([branch.tokens for branch in branches]), *(branch.kv().clone() for branch in branches[:2])]
        return steps(engine, branches, STEPS), bits, partial(released, engine, branches)

    def passing(rows: int, engine: Engine) -> tuple[Callable[[], Any], Any, Callable[[], Any]]:
        segment = prompt_pass(engine, rows)
        work = partial(engine.runner.exact, segment)
        return work, [work().residual.clone(), work().logits.clone()], partial(engine.runner.pool.release, segment[0].table)

    for count in batches:
        yield from compared(f"decode, batch {count}", partial(decoding, count), per=STEPS, aim=">= 0.95")
    for rows in (512, 2048):
        yield from compared(f"prompt of {rows} tokens", partial(passing, rows), aim=">= 0.9")


# Portable arithmetic


@cache
def wide() -> Engine:
    """The 8B shape in float32, its numbers those of bfloat16: the library's products are its fast path."""
    fingerprint.weights_hash = kept_hash
    model = random_decoder(SHAPE, "cuda", torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return Engine(model, cache_tokens=64 * 512)


@cache
def portable() -> Engine:
    return certified(Engine.load(wide().model, device="cuda", dtype=torch.float32, cache_tokens=64 * 512))


@case("portable-gpu.decode", portable=True, ours="step", baseline="S captured", needs="gpu", clock="device")
def portable_decode(batches: tuple[int, ...] = (1, 8, 16, 64)) -> Lines:
    """Decode steps in portable float32, and with S of all layers captured: ratio, and milliseconds of a step."""
    engine, aims = portable(), {1: 9.0, 64: 14.0}
    spec = CaptureSpec(tuple(engine.sites.select("S")[0]))
    for count in batches:
        branches = checked(engine, prompts(engine, count, 128), 24)
        arms = {"S captured": steps(engine, branches, STEPS, spec=spec), "step": steps(engine, branches, STEPS)}
        found = yield Line(f"S captured against no capture, batch {count}", arms, per=STEPS, aim="")
        step, captured = found.values["step"], found.values["S captured"]
        found.judge(step / captured)
        found.note(aim=">= 0.95", met=step / captured >= 0.95)
        if count in aims:
            met, aim = 1e3 * step <= aims[count], f"<= {aims[count]:.0f} ms"
            yield Line(f"a decode step, batch {count}", aim=aim, met=met, numbers={"ms": 1e3 * step})
        released(engine, branches)


@case("portable-gpu.passes", portable=True, ours="portable", baseline="library", needs="gpu", clock="device", aim=">= 0.6")
def portable_passes() -> Lines:
    """Prompts in portable float32 against the library's products in float32, without TF32, in the same passes."""
    for rows in (512, 2048):
        ours, theirs = prompt_pass(portable(), rows), prompt_pass(wide(), rows)
        arms = {"portable": lambda: portable().runner.exact(ours), "library": lambda: wide().runner.fast(theirs)}
        yield Line(f"a prompt of {rows} tokens", arms)


def contract(engine: Engine, sites: Any, window: int) -> Lines:
    """Tokens, KV and captured rows of a request alone, in company, and verified from drafts."""
    mine, others = prompts(engine, 1, 100)[0], [prompts(engine, n, n)[0] for n in (3, 40, 130, 77)]
    found = []
    for beside, options in (([], {"window": 1}), (others, {"window": 1}), (others[:2], {"drafter": "lens", "window": window})):
        branches = engine.prompts([*beside, mine], sites=sites)
        engine.generate(branches, 8, sampling=ENDLESS, final=True, **options)
        last = branches[-1]
        found.append((last.tokens, last.kv().cpu(), {site: last.activations[site] for site in last.activations.sites()}))
        released(engine, branches)
    (tokens, kv, rows), *rest = found
    bits = lambda x: x.contiguous().view(torch.uint8)  # noqa: E731 (NaN marks a row without successor)
    wrong = sum(t != tokens or not torch.equal(k, kv) for t, k, _ in rest)
    wrong += sum(not torch.equal(bits(other[site]), bits(rows[site])) for *_, other in rest for site in rows)
    numbers = {"differences": wrong, "sites": len(rows)}
    yield Line("contract at this shape: tokens, KV, captured rows", aim="0 differences", met=wrong == 0, numbers=numbers)


@case("engine-gpu.contract", needs="gpu")
def llama_contract() -> Lines:
    """A short contract test at the 8B shape: tokens, KV, S, T, C, Z."""
    yield from contract(llama(), "STCZ", 6)


@case("experts-gpu.contract", needs="gpu")
def experts_contract() -> Lines:
    """A short contract test of a mixture of experts: tokens, KV, S, T, C and the routers' sites."""
    engine = experts()
    yield from contract(engine, [*engine.sites.select("STC")[0], *router_sites(engine.model)], 4)


@case("engine-gpu.lens", ours="lens", baseline="bare", aim="<= 1.15", needs="gpu", clock="device", cost=True)
def lens(rows: int = 512) -> Lines:
    """Z at all layers of 512 rows over bare products with the unembedding; first checks that rows ignore the batch."""
    from replaylens.engine.passes import cuda as cuda_lens

    engine, spec = llama(), LensSpec(())
    stacked = torch.randn(rows, SHAPE.num_layers, SHAPE.d_model, dtype=torch.bfloat16, device="cuda")
    whole = cuda_lens.read_lens(spec, engine.model, stacked, [7] * rows)
    alone = cuda_lens.read_lens(spec, engine.model, stacked[100:101], [7])
    assert all(torch.equal(alone[name], whole[name][100:101]) for name in alone), "company moved bits of Z"
    weight, by_layer = engine.model.unembed.weight, stacked.transpose(0, 1).contiguous()
    out = torch.empty(rows, SHAPE.vocab_size, dtype=torch.bfloat16, device="cuda")
    arms = {
        "lens": lambda: cuda_lens.read_lens(spec, engine.model, stacked, [7] * rows),
        "bare": lambda: [torch.mm(x, weight, out=out) for x in by_layer],
    }
    yield Line(f"Z at {SHAPE.num_layers} layers, {rows} rows, over bare products", arms)


@case("engine-gpu.load", **{**DECLARED, "clock": "wall"}, aim=">= 0.97", rounds=1, warm=0)
def load(requests: int = 64, tokens: int = 64) -> Lines:
    """64 concurrent requests through the whole engine, including scheduler and host, deterministic or not."""
    engine = llama()
    how = {arm: {"deterministic": arm == "exact"} for arm in ("exact", "fast")}
    found = yield generation("engine, 64 requests, tokens/s", dict.fromkeys(how, engine), requests, tokens, how)
    found.note(**{f"{arm}_tokens_per_s": requests * tokens / taken for arm, taken in found.values.items()})


def generation(
    what: str, engines: dict[str, Engine], count: int, tokens: int, how: dict[str, Any] | None = None, **line: Any
) -> Line:
    """A line of `tokens` more tokens of `count` requests, after a few that do not count. how: options by arm"""
    made, how = list[Any](), how or {arm: {} for arm in engines}

    def before(arm: str) -> None:
        made[:] = engines[arm].prompts(prompts(engines[arm], count, 128))
        engines[arm].generate(made, 16, sampling=ENDLESS, **how[arm])

    work = lambda arm: engines[arm].generate(made, tokens, sampling=ENDLESS, **how[arm])  # noqa: E731
    arms = {arm: partial(work, arm) for arm in engines}
    return Line(what, arms, before=before, after=lambda arm, _: released(engines[arm], made), **line)
