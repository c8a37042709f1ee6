"""What is measured: shapes with random weights, SmolLM2-135M, and the same weights in Hugging Face and TransformerLens."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.batch import Segment
from replaylens.engine.request.capture import CaptureSpec
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.weights import hub, loading
from replaylens.weights.loading import bridge as bridge
from replaylens.weights.loading import hugging_face as hugging_face

SHAPE = ModelConfig(
    32, 4096, 32, 8, 128, 14336, 128256, 8192, rotary_dim=128, rope=Rope(theta=500000.0), tied_embeddings=False
)  # fmt: skip
"""Llama-3.1-8B's"""
TINY_SHAPE = ModelConfig(2, 32, 4, 2, 8, 48, 101, 256, rotary_dim=8, tied_embeddings=False)
ENDLESS = Sampling(ignore_eos=True)


def where(tiny: bool) -> tuple[ModelConfig, str, torch.dtype]:
    """(shape, device, dtype): the 8B shape on a GPU, or a tiny one on the CPU."""
    return (TINY_SHAPE, "cpu", torch.float32) if tiny else (SHAPE, "cuda", torch.bfloat16)


def random_decoder(shape: ModelConfig, device: str, dtype: torch.dtype, like: Decoder | None = None) -> Decoder:
    """Weights of the size that training begins with, made where they are used: large ones do not fit there twice. Those of
    `like` are shared where shapes agree."""
    torch.manual_seed(0)
    held = {} if like is None else dict(like.named_parameters())
    with torch.device("meta"):
        model = Decoder(shape)
    for name, parameter in list(model.named_parameters()):
        new = held.get(name)
        if new is None or new.shape != parameter.shape:
            new = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False)
            is_norm = ".ln" in name or "_norm" in name or name.startswith("ln")
            new.fill_(1.0) if is_norm else new.normal_(std=0.1 if "router" in name else 0.02)
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], new)
    return model.to(device).eval()  # the rotary tables are made on the CPU


def certified(engine: Engine) -> Engine:
    """The engine; prints what its doctor found."""
    print(f"certified: {engine.certificate.certified}; controls that differed: {engine.certificate.has_teeth}", flush=True)
    return engine


def released(engine: Engine, branches: Iterable[Branch]) -> None:
    """Mutates the engine: nothing of these branches stays, nor of any prompt."""
    for branch in branches:
        branch.release()
    engine.prefix.clear()


def seeded(count: int, temperature: float = 1.0) -> list[Sampling]:
    """One per request: the same seed gives a request the same noise in every run."""
    return [Sampling(temperature=temperature, seed=seed, ignore_eos=True) for seed in range(count)]


# What is timed


def checked(engine: Engine, paths: Sequence[list[int]], n: int, sampling: Sampling = ENDLESS) -> list[Branch]:
    """Branches after n tokens in company. AssertionError unless the first one has the bits that it has alone."""
    engine.prefix.clear()
    with engine.prompt(paths[0]) as single:
        engine.generate([single], n, window=1, sampling=sampling)
        tokens, kv = list(single.tokens), single.kv().clone()
    engine.prefix.clear()  # otherwise it would share the pages of its twin
    branches = engine.prompts(paths)
    engine.generate(branches, n, sampling=sampling)
    assert branches[0].tokens == tokens and torch.equal(branches[0].kv(), kv), "company moved bits"
    return list(branches)


def steps(
    engine: Engine, branches: Sequence[Branch], count: int, sampling: Sampling = ENDLESS, exact: bool = True,
    spec: CaptureSpec | None = None,
) -> Callable[[], Any]:  # fmt: skip
    """`count` decode steps from the branches' last tokens on, canonical or fast, as the engine takes them between two looks of
    the host, with the rows of `spec` captured; on a CPU the host looks at each. They commit nothing."""
    given, runner = [(branch.tokens[-1], branch.length - 1, branch.lane.table) for branch in branches], engine.runner
    for _, first, table in given:
        runner.reserve(table, first, first + 2 * count)
    if engine.loop.bursts is not None:
        from replaylens.engine.passes.bursts import BurstCapture, BurstRequest

        bursts, wanted = engine.loop.bursts, None if spec is None else BurstCapture(spec, range(count))
        places = [BurstRequest(token, first, table, sampling, wanted=wanted) for token, first, table in given]
        return lambda: bursts.run(places, count, exact)

    def one_by_one() -> None:
        for step in range(count):
            (runner.exact if exact else runner.fast)([Segment(table, first + step, [2], 1) for _, first, table in given])

    return one_by_one


# Peers


@cache
def smollm2_or_shape() -> tuple[Any, str]:
    """(a Hugging Face model, its description): SmolLM2-135M if it is fetched, else a random model of its shape."""
    import transformers as tf

    if hub.is_fetched():
        found = tf.AutoModelForCausalLM.from_pretrained(hub.model_folder()).float().eval()
        return found.requires_grad_(False), "SmolLM2-135M"
    shape = ModelConfig(30, 576, 9, 3, 64, 1536, 49152, 8192, rotary_dim=64)
    return hugging_face(random_decoder(shape, "cpu", torch.float32)), "random model of SmolLM2-135M's shape"


def peer(model: Decoder) -> Any:
    """As `hugging_face`; loading it again checks the mapping of the weights."""
    made = hugging_face(model)
    ours, theirs = (dict(m.state_dict()) for m in (model, loading.load(made)))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "the mapping of the weights is wrong"
    return made


def difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())
