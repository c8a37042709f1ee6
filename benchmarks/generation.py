"""Generation, prefill, branches and forks on a CPU against Hugging Face and TransformerLens; latent against plain attention."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from benchmarks.harness import Line, Lines, case, random_tokens, seconds
from benchmarks.subjects import ENDLESS, bridge, llama, smollm2_or_shape
from replaylens.engine.engine import Engine
from replaylens.engine.model import loading
from replaylens.engine.model.config import Latent, ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.serving.branch import Branch

OURS, HUGGING_FACE, DIRECT, LENS = "ours", "hugging face", "direct", "transformer lens"


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return random_tokens(count, length, 40000, seed, first=100)


@cache
def smollm2_engine() -> tuple[Engine, Any]:
    """SmolLM2-135M, or a random model of its shape, in the engine and in Hugging Face."""
    model, name = smollm2_or_shape()
    print(f"{name}, float32, {torch.get_num_threads()} threads")
    return Engine(loading.load(model), cache_tokens=16384), model


def released(engine: Engine, branches: list[Branch]) -> None:
    for branch in branches:
        branch.release()
    engine.prefix.clear()


def written(model: Any, paths: list[list[int]], n: int) -> list[list[int]]:
    """The new tokens of Hugging Face's greedy `generate`."""
    x = torch.tensor(paths)
    more = dict(min_new_tokens=n, max_new_tokens=n, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(x))
    with torch.inference_mode():
        found: list[list[int]] = model.generate(x, **more)[:, x.shape[1] :].tolist()
    return found


@case(
    "engine-cpu.generation", ours=OURS, baseline=HUGGING_FACE, others=(DIRECT,), clock="wall", rounds=3,
    quick={"requests": ((1, 4, ">= 1.25"),), "scaling": (1, 4)},
)  # fmt: skip
def generation(
    requests: tuple[tuple[int, int, str], ...] = ((1, 48, ">= 1.25"), (16, 24, ">= 1.8")),
    scaling: tuple[int, ...] = (1, 4, 16, 64),
) -> Lines:
    """Deterministic generation after 32-token prompts (not timed) against Hugging Face `generate`, SmolLM2-135M, all threads.
    The first round warms up: the planner measures its code paths in it."""
    engine, model = smollm2_engine()
    made: list[Branch] = []
    tokens: dict[str, list[list[int]]] = {}
    for count, n, aim in requests:
        paths = prompts(count, 32)

        def before(arm: str) -> None:
            made[:] = [] if arm == HUGGING_FACE else engine.prompts(paths)

        def after(arm: str, result: Any) -> None:
            if made:
                tokens[arm] = [branch.generated for branch in made]
            released(engine, made)

        arms = {
            OURS: lambda n=n: engine.generate(made, n, sampling=ENDLESS),
            HUGGING_FACE: lambda n=n, paths=paths: written(model, paths, n),
            DIRECT: lambda n=n: engine.generate(made, n, sampling=ENDLESS, window=1),
        }
        yield Line(f"deterministic generation, {count} request(s)", arms, per=n, aim=aim, before=before, after=after)
        assert tokens[OURS] == tokens[DIRECT], "the planner changed the output"
    rates: dict[int, float] = {}
    for count in scaling:
        paths = prompts(count, 32)
        arms = {OURS: lambda: engine.generate(made, 16, sampling=ENDLESS)}
        found = yield Line(f"16 tokens of {count} requests", arms, before=before, after=after, rounds=1)
        rates[count] = count * 16 / found.values[OURS]
    grows = all(a < b for a, b in zip(rates.values(), list(rates.values())[1:], strict=False))
    ratio, numbers = rates[scaling[-1]] / rates[scaling[0]], {str(count): rate for count, rate in rates.items()}
    yield Line(f"tokens/s grows with {', '.join(numbers)} requests", ratio=ratio, aim="grows", met=grows, numbers=numbers)


@case(
    "engine-cpu.prefill", ours=OURS, baseline=HUGGING_FACE, aim=">= 1.0", clock="wall", unit="s",
    quick={"sizes": ((2, 16),)},
)  # fmt: skip
def prefill(sizes: tuple[tuple[int, int], ...] = ((16, 64), (2, 512))) -> Lines:
    """Canonical prefill against Hugging Face's forward, SmolLM2-135M, all threads."""
    engine, model = smollm2_engine()
    for count, length in sizes:
        some = prompts(count, length)
        x = torch.tensor(some)
        arms = {
            OURS: lambda: released(engine, engine.prompts(some)),
            HUGGING_FACE: torch.inference_mode()(lambda: model(x, logits_to_keep=1)),
        }
        yield Line(f"canonical prefill, {count} x {length} tokens", arms)


@case("engine-cpu.forks", clock="wall", quick={"prefix": 64})
def forks(prefix: int = 4000) -> Lines:
    """The time and the pages of forks of SmolLM2-135M."""
    engine, _ = smollm2_engine()
    pool = engine.runner.pool
    root = engine.prompt(prompts(1, prefix)[0])
    free = pool.num_free
    t = sorted(seconds(root.fork, "wall")[0] for _ in range(51))[25]
    numbers: dict[str, Any] = {"fork_ms": 1e3 * t, "pages_taken": free - pool.num_free}
    yield Line(f"fork of a {prefix}-token branch", aim="< 1 ms", met=t < 1e-3, numbers=numbers)
    root.release()
    engine.prefix.clear()
    root = engine.prompt(prompts(1, 512)[0])
    used = pool.num_pages - pool.num_free
    made = root.fork(64)
    engine.force_all(made, prompts(64, 8, seed=2))
    tails = pool.num_pages - pool.num_free - used
    numbers = {"prefix_pages": 512 // pool.page_size, "tail_pages": tails}
    yield Line("64 branches of 8 tokens off 512", aim="prefix+tails", met=tails <= 64, numbers=numbers)
    released(engine, [*made, root])


@case(
    "branches-cpu", ours=OURS, baseline=LENS, aim=">= 10", unit="s", best=True, rounds=2, warm=0,
    quick={"branches": 4, "scaled_from": 2},
)  # fmt: skip
def branches(branches: int = 256, scaled_from: int = 32) -> Lines:
    """256 branches of 8 tokens from one 64-token prefix, with all S, T, C captured, against TransformerLens' `run_with_cache`.
    CPU seconds of all threads. TransformerLens computes 32 of the 256 sequences, as one batch, and its time is scaled: no
    sequence helps another."""
    engine, model = smollm2_engine()
    prefix, tails = prompts(1, 64)[0], prompts(branches, 8, seed=1)

    def ours() -> None:
        root = engine.prompt(prefix, sites="STC")
        made = root.fork(len(tails))
        engine.force_all(made, tails)
        for branch in [*made, root]:
            branch.release()

    lens, wanted = bridge(model), set(engine.sites.select("STC")[0])
    x = torch.tensor([prefix + tail for tail in tails[:scaled_from]])
    theirs = torch.inference_mode()(lambda: lens.run_with_cache(x, names_filter=lambda name: name in wanted))
    yield Line(
        f"{branches} branches of 8 off a 64-token prefix, captured", {OURS: ours, LENS: theirs},
        per={OURS: 1, LENS: scaled_from / branches}, numbers={"transformer_lens_sequences": scaled_from},
    )  # fmt: skip


@case(
    "generate-cpu", ours=OURS, baseline=HUGGING_FACE, unit="s", best=True, rounds=8, threads=1,
    quick={"models": ("tiny llama (3 layers, width 64)",)},
)  # fmt: skip
def generate_cpu(models: tuple[str, ...] = ("tiny llama (3 layers, width 64)", "SmolLM2-135M's shape")) -> Lines:
    """Greedy generation after 16-token prompts, prefill included, against Hugging Face `generate`: random weights, float32, one
    thread, CPU seconds."""
    known = {
        "tiny llama (3 layers, width 64)": ((3, 64, 4, 2, 192, 512), 64, {1: 1.0, 16: 1.0}),
        "SmolLM2-135M's shape": ((30, 576, 9, 3, 1536, 49152), 24, {1: 1.0, 16: 1.2}),
    }
    for name in models:
        shape, n, aims = known[name]
        model = llama(*shape)
        engine, tokens = Engine.load(model, cache_tokens=4096), list[list[int]]()

        def after(arm: str, made: list[Any]) -> None:
            if arm == OURS:
                tokens[:] = [branch.generated for branch in made]
                released(engine, made)

        for count, aim in aims.items():
            paths = random_tokens(count, 16, shape[-1], seed=count)
            arms = {
                OURS: lambda: engine.generate(engine.prompts(paths), n, sampling=ENDLESS),
                HUGGING_FACE: lambda: written(model, paths, n),
            }
            what = f"{name}, {count} request{'s' * (count > 1)}"
            found = yield Line(what, arms, aim=f">= {aim}", after=after)
            agreed = sum(a == b for a, b in zip(tokens, found.results[HUGGING_FACE], strict=True))
            rates = {f"{arm.replace(' ', '_')}_tokens_per_cpu_s": count * n / taken for arm, taken in found.values.items()}
            found.note(**rates, same_continuations=f"{agreed}/{count}")


@case("latent-cpu", ours="latent", baseline="plain", cost=True, best=True, threads=1, quick={"lengths": ((64, 1),)})
def latent_cpu(lengths: tuple[tuple[int, int], ...] = ((512, 3), (2048, 1)), new: int = 8) -> Lines:
    """Latent attention with the sizes of DeepSeek-V2-Lite against plain attention with as many heads of that width. Two layers
    of random weights with a small MLP and vocabulary, so that attention counts; float32, one thread, CPU time. Ratio: latent
    over plain; below 1, latent is faster."""
    plain = ModelConfig(
        num_layers=2, d_model=2048, num_heads=16, num_kv_heads=16, d_head=192, d_mlp=256, vocab_size=256, max_positions=4096,
        rotary_dim=64,
    )  # fmt: skip
    shapes = {"latent": replace(plain, latent=Latent(rank=512, d_value=128)), "plain": plain}
    engines = {
        name: Engine(Decoder(shape).initialize(0).requires_grad_(False), cache_tokens=3072) for name, shape in shapes.items()
    }
    made: list[Branch] = []
    for length, rounds in lengths:
        path = [(i * i) % plain.vocab_size for i in range(length)]

        def after(arm: str, branch: Branch) -> None:
            branch.release()
            made.clear()
            engines[arm].prefix.clear()

        prompt = {name: lambda engine=engine: engine.prompt(path) for name, engine in engines.items()}
        yield Line(f"prefill of {length} tokens", dict(prompt), after=after, rounds=rounds)
        decode = dict.fromkeys(engines, lambda: made[0].generate(new, window=1))
        ready = lambda arm: made.append(engines[arm].prompt(path))  # noqa: E731
        yield Line(f"decoding a token after {length}", decode, per=new, before=ready, after=after, rounds=rounds)
