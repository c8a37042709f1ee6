"""Gradients have the same bits on every machine: digests of models, paths and metrics that are made of integers."""

from typing import Any

import pytest
import torch

from replaylens.engine.model.config import Latent, MixerConfig, MixtureConfig, ModelConfig, Routing
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof.doctor import digest, numbers
from replaylens.gradients import derivatives
from replaylens.gradients import gradients as metrics
from replaylens.gradients.derivatives import HostProducts
from replaylens.gradients.gradients import Divergence
from tests.toy_model import SHAPE, VOCAB, engine

METRIC = (3, 8)
SITES = ["S", "T", "C", "blocks.0.attn.hook_pattern"]
LATENT = dict(latent=Latent(12, 8, query_rank=10), num_kv_heads=4, rotary_dim=4)
CAPPED: dict[str, Any] = dict(
    norm="layer", activation="gelu", gated_mlp=False, attn_softcap=5.0, logit_softcap=9.0, windows=(20, 0)
)
DIGESTS: dict[str, tuple[dict[str, Any], str]] = {
    "rms norm, silu": ({}, "059483e8e5da58fe"),
    "layer norm, gelu, soft caps, a window": (CAPPED | dict(qk_norm=True, qk_norm_span="all"), "dff1b08002a638b7"),
    "gelu by tanh, ALiBi, post-norms": (
        dict(activation="gelu_tanh", slopes=(0.5, 0.25, 0.125, 0.0625), post_norms=True),
        "46ef2da5e04e4854",
    ),
    "latent attention": (LATENT, "b8560a317d15bec9"),
    "experts": (dict(mixture=MixtureConfig(6, 24, Routing(2), d_shared=16, shared_gate=True)), "9138c0f910ef0f37"),
    "experts by a softmax over all": (
        dict(mixture=MixtureConfig(6, 24, Routing(2, normalised=False, scale=2.5))),
        "a27798c22f35ddc9",
    ),
    "experts by a sigmoid": (dict(mixture=MixtureConfig(6, 24, Routing(3, kind="sigmoid"))), "15d4b0d030ca8e95"),
    "experts by sparsemixer": (
        dict(mixture=MixtureConfig(6, 24, Routing(2, kind="sparsemixer", jitter=0.1))),
        "fb4542a585203029",
    ),
    "experts with clamped gates, attention sinks": (
        dict(mixture=MixtureConfig(6, 24, Routing(2), bias=True), activation="clamped_swiglu", sinks=True, windows=(20, 0)),
        "94b4b9cd6a815177",
    ),
    "gated convolutions": (dict(mixer=MixerConfig("conv", 3, 40), parts=("attn mlp", "mixer mlp")), "26a64679dfc0a4c8"),
    "a gated delta net, gated attention": (
        dict(mixer=MixerConfig("delta", 4, 68, 4, 2, 7, 10), parts=("attn mlp", "mixer mlp"), attn_gate=True),
        "448521257bd826c3",
    ),
    "Mamba-2": (
        dict(mixer=MixerConfig("ssd", 4, 68, 4, 2, 7, 10, norm_groups=2), parts=("attn", "mixer attn mlp")),
        "0cd8d1ee06a116f5",
    ),
}
"""a config -> the digest of its gradients, on every machine"""


def gradient_digest(**changes: Any) -> str:
    """Of a model, a path and metrics that are made of integers."""
    model = Decoder(ModelConfig(**{**SHAPE, **changes})).requires_grad_(False)
    for seed, parameter in enumerate(model.parameters()):
        parameter.copy_(numbers(seed, *parameter.shape) / 16)
    branch = engine(model).prompt([i * i % VOCAB for i in range(70)])
    found = [branch.gradients(metric, SITES) for metric in (METRIC, 5, Divergence(numbers(99, VOCAB)))]
    assert all(torch.isfinite(g).all() and g.any() for each in found for g in each.values())
    values = torch.tensor([each.value for each in found], dtype=torch.float32)
    return digest(torch.cat([values, *(g.flatten() for each in found for g in (*each.values(), *each.times_input().values()))]))


@pytest.mark.parametrize("what", DIGESTS)
def test_the_same_on_every_machine(what: str) -> None:
    changes, expected = DIGESTS[what]
    assert gradient_digest(**changes) == expected


LIBRARY: dict[str, tuple[Any, str, Any]] = {
    "products": (HostProducts, "linear", lambda self, g, linear: g @ linear.weight.t()),
    "batched products": (HostProducts, "batched", lambda self, x, w: x @ w),
    "sums": (HostProducts, "total", lambda self, x: x.sum(-1, keepdim=True)),
    "functions": (HostProducts, "apply", lambda self, name, x: getattr(torch, name)(x)),
    "softmax": (derivatives, "softmax", lambda x, products, sinks: x.softmax(-1)),
    "metrics": (metrics, "_log_softmax", lambda x: x.log_softmax(-1)),
}


@pytest.mark.parametrize("what", LIBRARY)
def test_the_library_gives_other_bits(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(*LIBRARY[what])
    assert gradient_digest() != DIGESTS["rms norm, silu"][1]


def test_the_librarys_square_root_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not correctly rounded on x86-64, where the digests were others."""
    root = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: root(x).nextafter(torch.tensor(torch.inf)))
    assert gradient_digest() == DIGESTS["rms norm, silu"][1]
