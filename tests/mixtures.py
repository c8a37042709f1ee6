"""Tiny models with mixtures of experts: configs of families, which `tests/families.py` builds, and decoders of our own."""

from typing import Any

import torch

from replaylens.engine.model.config import MixtureConfig, ModelConfig, Rope, Routing
from replaylens.engine.model.decoder import Decoder
from tests import tiny_shapes
from tests.tiny_shapes import ROUTED, SMALL, TYPES, rope

SHAPE = dict(SMALL, intermediate_size=20)
ONE_KV, TWO_KV = dict(SHAPE, num_key_value_heads=1), dict(SHAPE, num_key_value_heads=2)
YARN = dict(tiny_shapes.YARN, beta_fast=32.0, beta_slow=1.0, truncate=False)
LONG = dict(tiny_shapes.LONG, short_mscale=1.2, long_mscale=1.3)
GROUPED = dict(ROUTED, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True)
"""DeepSeek's routing"""
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (config class, its fields)
    "mixtral": ("Mixtral", dict(TWO_KV, num_local_experts=5, num_experts_per_tok=2, sliding_window=7, head_dim=10)),
    "mixtral-one": ("Mixtral", dict(ONE_KV, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=True)),
    "qwen2-moe": (
        "Qwen2Moe",
        dict(
            TWO_KV,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=14,
            shared_expert_intermediate_size=22,
            use_sliding_window=True,
            sliding_window=7,
            layer_types=TYPES,
        ),
    ),
    "qwen2-moe-dense": (
        "Qwen2Moe",
        dict(
            ONE_KV,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=14,
            shared_expert_intermediate_size=22,
            norm_topk_prob=True,
            qkv_bias=False,
            mlp_only_layers=[0],
        ),
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        dict(TWO_KV, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=14, norm_topk_prob=True, head_dim=10),
    ),
    "qwen3-moe-dense": (
        "Qwen3Moe",
        dict(
            ONE_KV,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=14,
            decoder_sparse_step=2,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=7,
            tie_word_embeddings=True,
        ),
    ),
    "olmoe": ("Olmoe", dict(TWO_KV, num_experts=6, num_experts_per_tok=3, attention_bias=True)),
    "olmoe-clipped": ("Olmoe", dict(TWO_KV, num_experts=6, num_experts_per_tok=3, clip_qkv=0.3)),
    "olmoe-normalised": ("Olmoe", dict(ONE_KV, num_experts=3, num_experts_per_tok=2, norm_topk_prob=True)),
    "gpt-oss": (
        "GptOss",
        dict(
            TWO_KV,
            num_local_experts=5,
            num_experts_per_tok=2,
            head_dim=10,
            sliding_window=7,
            layer_types=TYPES,
            rope_parameters=YARN,
        ),
    ),
    "granite-moe": (
        "GraniteMoe",
        dict(
            ONE_KV,
            num_local_experts=5,
            num_experts_per_tok=2,
            embedding_multiplier=12.0,
            attention_multiplier=0.2,
            residual_multiplier=0.22,
            logits_scaling=8.0,
            attention_bias=True,
        ),
    ),
    "phimoe": (
        "Phimoe",
        dict(
            TWO_KV,
            num_local_experts=5,
            num_experts_per_tok=2,
            router_jitter_noise=0.2,
            rope_parameters=LONG,
            original_max_position_embeddings=128,
            lm_head_bias=True,
            attention_bias=True,
        ),
    ),
    "phimoe-plain": ("Phimoe", dict(ONE_KV, num_local_experts=4, num_experts_per_tok=2, sliding_window=7)),
    "flex-olmo": ("FlexOlmo", dict(TWO_KV, num_experts=5, num_experts_per_tok=2, attention_bias=True)),
    "dots1": (
        "Dots1",
        dict(
            TWO_KV,
            **GROUPED,
            head_dim=10,
            first_k_dense_replace=1,
            attention_bias=True,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    "glm4-moe": (
        "Glm4Moe",
        dict(
            ONE_KV,
            **{**GROUPED, "norm_topk_prob": False},
            head_dim=12,
            first_k_dense_replace=0,
            use_qk_norm=True,
            attention_bias=True,
            rope_parameters=rope(partial_rotary_factor=0.5),
        ),
    ),
}


# ---- decoders of our own ----------------------------------------------------------------------------------------------

ROUTINGS = {
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
"""name -> the mixture of a decoder of our own: one per way of routing"""


def mixture_config(name: str) -> ModelConfig:
    kind = "clamped_swiglu" if name == "biases" else "silu"
    config = ModelConfig(2, 32, 4, 2, 8, 48, 61, 256, rotary_dim=8, rope=Rope(theta=1e4), activation=kind, qk_norm=True)  # type: ignore[arg-type]
    return ModelConfig(**{**config.__dict__, "mixture": ROUTINGS[name]})


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
