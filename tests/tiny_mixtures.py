"""Tiny random models with mixtures of experts, one per way of routing."""

import torch

from replaylens.engine.model.config import MixtureConfig, ModelConfig, Rope, Routing
from replaylens.engine.model.decoder import Decoder

MIXTURES = {
    "softmax of the chosen": MixtureConfig(6, 24, Routing(2)),
    "softmax of all, a shared expert with a gate": MixtureConfig(
        5, 20, Routing(2, normalised=False), layers=(False, True), d_shared=12, shared_gate=True
    ),
    "biases": MixtureConfig(5, 24, Routing(3), bias=True, router_bias=True),
    "sigmoids in groups": MixtureConfig(
        8, 16, Routing(3, "sigmoid", scale=2.5, groups=4, chosen_groups=2, group_best=2, correction=True), d_shared=16
    ),
    "sparsemixer": MixtureConfig(4, 24, Routing(2, "sparsemixer", jitter=0.01)),
}
"""name -> the mixture"""


def mixture_config(name: str) -> ModelConfig:
    kind = "clamped_swiglu" if name == "biases" else "silu"
    config = ModelConfig(2, 32, 4, 2, 8, 48, 61, 256, rotary_dim=8, rope=Rope(theta=1e4), activation=kind, qk_norm=True)  # type: ignore[arg-type]
    return ModelConfig(**{**config.__dict__, "mixture": MIXTURES[name]})


def mixture_model(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Weights large enough that rows choose different experts."""
    model = Decoder(mixture_config(name)).initialize(0).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if "norm" not in parameter_name and ".ln" not in parameter_name and not parameter_name.startswith("ln"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    for _, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype)  # the rotary tables stay in float32
    return model.to(device)
