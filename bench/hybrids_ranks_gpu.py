"""Hybrids, watched probes and ranks on a CUDA device, through the public API: random weights, bfloat16."""

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.engine_gpu import DRAWN, EXPERTS, contract, generation, kept_hash, llama, prompts
from bench.harness import Line, Lines, case, random_tokens, seconds
from bench.subjects import ENDLESS, SHAPE, certified, random_decoder, released
from replaylens.engine.engine import Engine
from replaylens.engine.memory.cache import cache_bytes, kv_bytes
from replaylens.engine.model.config import MixerConfig, ModelConfig, Rope
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof import fingerprint
from replaylens.engine.request.edits import Edit
from replaylens.extras import wire

HYBRID = ModelConfig(
    num_layers=32, d_model=2560, num_heads=16, num_kv_heads=4, d_head=256, d_mlp=9216, vocab_size=151936, max_positions=16384,
    norm_eps=1e-6, rotary_dim=64, rope=Rope(theta=1e7), qk_norm=True, attn_gate=True,
    mixer=MixerConfig("delta", taps=4, channels=8192, heads=32, key_heads=16, d_key=128, d_value=128),
    parts=("mixer mlp", "mixer mlp", "mixer mlp", "attn mlp") * 8,
)  # fmt: skip
"""three gated delta nets to one gated attention, as in Qwen3.5, about 4B"""
HYBRID_EXPERTS = replace(
    HYBRID, num_layers=48, d_model=2048, num_kv_heads=2, d_mlp=6144, parts=HYBRID.parts[:4] * 12, mixture=EXPERTS.mixture
)
"""the same with experts, about 30B of which 3B take part in a token"""


HYBRIDS: dict[str, Any] = dict(ours="hybrid", baseline="attention only", needs="gpu", clock="wall", cost=True, rounds=3, warm=1)


def transformers_prompt(shape: ModelConfig, length: int) -> Any:
    """A forward pass of transformers over a prompt, without logits but the last: torch's chunked delta rule, random weights."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    m = shape.mixer
    assert m is not None
    sizes = dict(hidden_size=shape.d_model, intermediate_size=shape.d_mlp, num_hidden_layers=shape.num_layers)
    heads = dict(num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.d_head)
    linear = dict(linear_num_key_heads=m.key_heads, linear_num_value_heads=m.heads, linear_conv_kernel_dim=m.taps)
    linear |= dict(linear_key_head_dim=m.d_key, linear_value_head_dim=m.d_value)
    config = Qwen3NextConfig(**sizes, **heads, **linear, num_experts=0, vocab_size=shape.vocab_size, tie_word_embeddings=True)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3NextForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    path = torch.tensor(random_tokens(1, length, shape.vocab_size, seed=length), device="cuda")
    return torch.inference_mode()(lambda: model(path, logits_to_keep=1).logits)


@case("hybrid-gpu", **HYBRIDS, others=("transformers",))
def hybrid(batches: tuple[int, ...] = (1, 64), tokens: int = 64, lengths: tuple[int, ...] = (2048, 8192)) -> Lines:
    """A hybrid of about 4B against the same model with attention in every layer: decoding, prompts, forks, and the memory of
    its states. The longest prompt also against transformers. First its bits: a request alone and among others."""
    engines = hybrid_engines(HYBRID, max(batches))
    yield from hybrid_steps(engines, batches, tokens)
    for length in lengths:
        (path,) = random_tokens(1, length, HYBRID.vocab_size, seed=length)
        arms = {arm: lambda own=own, path=path: own.prompt(path) for arm, own in engines.items()}  # type: ignore[misc]
        if length == max(lengths):
            arms["transformers"] = transformers_prompt(HYBRID, length)
        after = lambda arm, made: released(engines[arm], [made]) if arm in engines else None  # noqa: E731
        found = yield Line(f"a prompt of {length}", arms, after=after)
        if "transformers" in arms:
            found.note(of_transformers_speed=found.values["transformers"] / found.values["hybrid"])
    engine = engines["hybrid"]
    root = engine.prompt(prompts(engine, 1, 1000)[0])
    taken = []
    for _ in range(5):  # Python's collector takes part in some of them
        each, forks = seconds(lambda: root.fork(1024), "wall")
        taken.append(each / 1.024)
        released(engine, forks)
    numbers = {"ms_a_fork": statistics.median(taken), "ms_a_fork_at_most": max(taken)}
    released(engine, [root])
    for count in (2**14, 2**17):  # positions
        kept = cache_bytes(HYBRID, count, 64, torch.bfloat16, 5120)
        numbers[f"kb_a_position_of_{count}"] = kept / count / 1e3
        numbers[f"kb_if_all_were_kept_of_{count}"] = cache_bytes(HYBRID, count, 64, torch.bfloat16, None) / count / 1e3
    numbers["kv_kb_a_position"] = kv_bytes(HYBRID, torch.bfloat16) / 1e3
    yield Line("1,024 forks at 1,000 tokens; the memory of a position", numbers=numbers)


@case("hybrid-gpu.experts", **HYBRIDS)
def hybrid_experts(batches: tuple[int, ...] = (1, 64), tokens: int = 32) -> Lines:
    """The same with experts, about 30B of which 3B take part in a token: bits, and decoding."""
    yield from hybrid_steps(hybrid_engines(HYBRID_EXPERTS, max(batches)), batches, tokens)


def hybrid_engines(shape: ModelConfig, most: int) -> dict[str, Engine]:
    """The hybrid, and the same with attention in every layer, for up to `most` requests."""
    fingerprint.weights_hash = kept_hash
    model = random_decoder(shape, "cuda", torch.bfloat16)
    alike = random_decoder(replace(shape, mixer=None, parts=()), "cuda", torch.bfloat16, like=model)
    room: dict[str, Any] = {"cache_tokens": 2**14}
    return {"hybrid": Engine(model, state_tokens=1024 + 128 * most, **room), "attention only": Engine(alike, **room)}


def hybrid_steps(engines: dict[str, Engine], batches: tuple[int, ...], tokens: int) -> Lines:
    """The bits of a hybrid, then decode steps of both."""
    yield from contract(certified(engines["hybrid"]), "STC", 4)
    for count in batches:
        yield generation(f"a decode step of {count}", engines, count, tokens, per=tokens, aim="<= 1.15")


# Probes that watch


@case(
    "watch-gpu", ours="watched", baseline="no probes", others=("read", "captured", "watched and captured", "stop"), needs="gpu",
    clock="wall", cost=True, rounds=5, warm=1, aim="<= 1.01",
)  # fmt: skip
def watched(count: int = 64, tokens: int = 64, layers: tuple[int, ...] = (6, 13, 20, 27), probes: int = 32) -> Lines:
    """Scores of probes within the graph of a decode step, also read by the caller, beside captured rows, and as a stop
    condition. First their bits: scores of a graph, and of the same rows scored afterwards."""
    engine, draw = llama(), np.random.default_rng(0)
    sites = [f"blocks.{layer}.hook_out" for layer in layers]
    made = [SimpleNamespace(weight=draw.normal(size=(1, SHAPE.d_model)) / 64, bias=draw.normal(size=1)) for _ in range(probes)]
    for number, probe in enumerate(made):
        vars(probe).update(classes=("no", "yes"), label="random", site=sites[number % len(sites)])
    watch = engine.watch({f"p{number}": probe for number, probe in enumerate(made)})
    ways: dict[str, dict[str, Any]] = {"no probes": {}, "captured": {"sites": sites}, "watched and captured": {"sites": sites}}
    branches = list[Any]()

    def before(arm: str) -> None:
        asked = {} if arm in ("no probes", "captured") else {"watch": watch}
        branches[:] = engine.prompts(prompts(engine, count, 128), **ways.get(arm, {}), **asked)

    def step(arm: str) -> None:
        if arm == "stop":
            watch.generate(branches, tokens, sampling=ENDLESS, stop={"p0": 1e9})
            return
        engine.generate(branches, tokens, sampling=ENDLESS)
        if arm == "read":
            for branch in branches:
                watch.scores(branch)

    found = list[Any]()
    for arm in ("watched", "captured"):
        before(arm)
        step(arm)
        found.append([watch.scores(branch) for branch in branches])
        released(engine, branches)
    same = all(torch.equal(one[name], other[name]) for one, other in zip(*found, strict=True) for name in one)
    arms = {arm: partial(step, arm) for arm in ("watched", "no probes", "read", "captured", "watched and captured", "stop")}
    yield Line(
        f"{probes} probes, {count} branches", arms, before=before, after=lambda arm, _: released(engine, branches), per=tokens,
        check=same,
    )  # fmt: skip


# Several devices, several ranks


def outcome(engine: Engine) -> dict[str, Any]:
    """What users get of one engine: a prompt beside others, drafts and a rollback, an edit, a fork that draws."""
    path, *others = prompts(engine, 3, 96)
    beside = engine.prompts(others)
    root = engine.prompt(path, sites="STC")
    engine.generate([root, *beside], 8, drafter="ngram", window=4, sampling=ENDLESS)
    root.rollback(to=root.length - 3)
    (drawn,) = root.fork(1)
    (edited,) = root.fork(1, edits=[Edit("S", "scale", factor=1.5, positions=slice(96, None), layers=[1])])
    drawn.generate(6, sampling=DRAWN)
    edited.generate(4, sampling=ENDLESS)
    found: dict[str, Any] = {}
    for name, branch in (("root", root), ("drawn", drawn), ("edited", edited)):
        found |= {f"{name} {site}": branch.activations[site].cpu() for site in branch.activations.sites()}
        found |= {f"{name} kv": branch.kv().cpu(), f"{name} tokens": torch.tensor(branch.tokens)}
    released(engine, [root, drawn, edited, *beside])
    return found


@contextmanager
def by_nccl() -> Iterator[None]:
    """Followers that share this GPU send by NCCL. It refuses two ranks of one GPU, unless they seem to be on two hosts."""
    before, names = wire.own_gpus, {"NCCL_HOSTID": "1", "NCCL_SOCKET_IFNAME": "lo"}  # as followers have them

    def chosen(size: int) -> bool:
        os.environ["NCCL_HOSTID"] = "0"
        return True

    os.environ.update(names)
    wire.own_gpus = chosen
    try:
        yield
    finally:
        wire.own_gpus = before
        for name in names:
            os.environ.pop(name)


@case("ranks-gpu", ours="several", baseline="one", needs="gpu", clock="wall", rounds=3, quick={"tiny": True})
def several(tiny: bool = False, layers: int = 2, tokens: int = 32) -> Lines:
    """Layers over two stages of one GPU, and ranks that share it, against one process: first every bit, then decode steps of
    one request."""
    place: Any = {"device": "cpu"} if tiny else {"device": "cuda", "dtype": torch.bfloat16}
    stages = {"devices": ["cpu"] * 2 if tiny else ["cuda:0"] * 2, **({} if tiny else {"dtype": torch.bfloat16})}
    small: dict[str, Any] = dict(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_head=8, rotary_dim=8, vocab_size=401)
    shapes = {"8B": SHAPE, "30B-A3B": EXPERTS}
    cases: list[tuple[str, int, str, dict[str, Any]]] = [
        *(("8B", layers, f"{n} ranks, nccl", {"ranks": n}) for n in (2, 4)),
        ("8B", 32, "two stages", stages),
        *(("30B-A3B", layers, f"{n} ranks, {way}", {"ranks": n}) for n in (4, 2) for way in ("gloo", "nccl")),
        *(("8B", layers, f"{n} ranks, gloo", {"ranks": n}) for n in (2, 4)),
    ]
    if tiny:
        cases = [cases[2], cases[-2]]
    kept: dict[tuple[str, int], tuple[Decoder, Engine, dict[str, Any]]] = {}
    fingerprint.weights_hash = kept_hash
    for name, depth, what, given in cases:
        if (name, depth) not in kept:
            kept.clear()
            shape = replace(shapes[name], **(small if tiny else {"num_layers": depth}))
            model = random_decoder(shape, "cpu" if tiny else "cuda", torch.float32 if tiny else torch.bfloat16)
            one = Engine.load(model, **place, cache_tokens=4096)
            kept[name, depth] = model, one, outcome(one)
        model, one, truth = kept[name, depth]
        with by_nccl() if "nccl" in what else nullcontext():
            engine = Engine.load(model, **{**place, **given} if "ranks" in given else given, cache_tokens=4096)
        found = outcome(engine)
        wrong = [key for key, value in truth.items() if not torch.equal(value, found[key])]
        numbers = {"tensors": len(truth), "differing": len(wrong), "layers": depth}
        aim = ">= 0.97" if "stages" in what else ""
        told: dict[str, Any] = dict(per=tokens, aim=aim, check=not wrong, numbers=numbers)
        yield generation(f"{name}, {what}", {"several": engine, "one": one}, 1, tokens, **told)
        if "ranks" in given:
            engine.ranks.close()
