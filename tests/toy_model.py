"""Small decoders for the engine's tests: random weights, or a script that maps each token to its successor.

`reference` defines everything the engine commits: the whole path computed alone, in one pass, from scratch.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.capture import PassTap
from replaylens.engine.request.sampling import Sampling

VOCAB = 61
SHAPE = dict(
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    d_head=8,
    d_mlp=48,
    vocab_size=VOCAB,
    max_positions=256,
    rotary_dim=8,
    tied_embeddings=False,
)


def random_model(seed: int = 0, gain: float = 12.0, **changes: Any) -> Decoder:
    """Random weights, `gain` times those of a model at initialisation, so its continuations vary."""
    model = Decoder(ModelConfig(**{**SHAPE, **changes})).initialize(seed).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            parameter.mul_(gain)
    return model


@cache
def toy() -> Decoder:
    """The random model that most tests share. Tests must not change it."""
    return random_model()


def scripted_model(successor: Mapping[int, int], vocab: int = VOCAB, **changes: Any) -> Decoder:
    """A model that predicts `successor[t]` after every token t (by default the next id), whatever came before.

    Its keys and values vary as in any model, but its blocks write too little to change the prediction.
    """
    model = random_model(**{"d_model": 64, "vocab_size": vocab, **changes})
    width = model.config.d_model
    model.embed.copy_(torch.eye(vocab, width))
    assert model.unembed is not None
    model.unembed.weight.zero_()
    for token in range(vocab):
        model.unembed.weight[token, successor.get(token, (token + 1) % vocab)] = 1.0
    for name, parameter in model.named_parameters():
        if name.endswith(("attn.o.weight", "mlp.down.weight")):
            parameter.mul_(1e-3)
    return model


def engine(model: Decoder | None = None, **options: Any) -> Engine:
    """An engine with small pages, so that every test crosses page boundaries."""
    return Engine(model or toy(), **{"page_size": 4, "cache_tokens": 2048, **options})


def watch_passes(subject: Engine) -> list[list[Segment]]:
    """A list that collects the segments of every full canonical pass from now on."""
    passes: list[list[Segment]] = []
    exact = subject.runner.exact

    def watched(segments: list[Segment], tap: Any = None, stop_at_layer: int | None = None) -> Any:
        if stop_at_layer is None:
            passes.append(segments)
        return exact(segments, tap, stop_at_layer)

    subject.runner.exact = watched
    return passes


class Reference:
    """Everything about one path, computed alone in one pass."""

    def __init__(self, model: Decoder, path: Sequence[int], sites: Sequence[str] = ()) -> None:
        runner, table, tap = Runner(model, len(path), 1), PageTable(), PassTap(frozenset(sites))
        runner.reserve(table, 0, len(path))
        result = runner.exact([Segment(table, 0, list(path), len(path))], tap)
        self.kv: Tensor = runner.cache.rows(runner.pool.slots(table, 0, len(path)))
        self.logits: Tensor = result.logits
        self.rows = {site: value[: len(path)] for site, value in tap.values.items()}


def continuation(model: Decoder, prompt: Sequence[int], n: int, sampling: Sampling | None = None) -> list[int]:
    """The next n tokens, each from its whole path computed from scratch. Slow, stateless, and right by definition."""
    path = _grown.setdefault((model, tuple(prompt), repr(sampling)), list(prompt))  # called repeatedly
    while len(path) < len(prompt) + n:
        logits = Reference(model, path).logits[-1].numpy()
        path.append((sampling or Sampling()).choose(logits, path, len(prompt)))
    return path[len(prompt) : len(prompt) + n]


_grown: dict[tuple[Decoder, tuple[int, ...], str], list[int]] = {}
