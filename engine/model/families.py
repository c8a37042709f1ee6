"""How Hugging Face configs and tensor names map to our decoder, family by family.

A family is a function that reads its config and one that reads its tensors. The latter takes a `get(name)` that returns one
source tensor, so that nothing is loaded twice and a missing tensor is named.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import Activation, ModelConfig, Rope

Get = Callable[[str], Tensor]
"""the source tensor of a Hugging Face name"""
Tensors = dict[str, Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"The activation {name!r} is not supported. Known: {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[name]


def read_rope(raw: dict[str, Any]) -> Rope:
    """A Hugging Face `rope_parameters` entry."""
    kind = raw.get("rope_type", "default")
    if kind == "default":
        return Rope(theta=raw["rope_theta"])
    if kind == "linear":
        return Rope(theta=raw["rope_theta"], scaling="linear", factor=raw["factor"])
    if kind == "llama3":
        return Rope(
            theta=raw["rope_theta"],
            scaling="llama3",
            factor=raw["factor"],
            low_freq_factor=raw["low_freq_factor"],
            high_freq_factor=raw["high_freq_factor"],
            original_positions=raw["original_max_position_embeddings"],
        )
    raise UnsupportedModel(f"The rotary scaling {kind!r} is not supported. Known: default, linear, llama3.")


def layer_windows(raw: dict[str, Any]) -> tuple[int, ...]:
    """Per-layer windows from `layer_types`, or one window for all layers (Mistral)."""
    window = raw.get("sliding_window") or 0
    kinds = raw.get("layer_types")
    if kinds is None:
        return (window,) * raw["num_hidden_layers"] if window else ()
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"The attention kinds {sorted(unknown)} are not supported.")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _llama_like_config(raw: dict[str, Any]) -> ModelConfig:
    family = raw["model_type"]
    gemma = family.startswith("gemma")
    ropes = raw["rope_parameters"]
    nested = "full_attention" in ropes
    d_head = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return ModelConfig(
        family=family,
        num_layers=raw["num_hidden_layers"],
        d_model=raw["hidden_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        d_head=d_head,
        d_mlp=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw["rms_norm_eps"],
        post_norms=gemma,
        rotary_dim=d_head,
        rope=read_rope(ropes["full_attention"] if nested else ropes),
        local_rope=read_rope(ropes["sliding_attention"]) if nested else None,
        windows=layer_windows(raw) if family != "llama" else (),
        attn_scale=raw["query_pre_attn_scalar"] ** -0.5 if gemma else 0.0,
        attn_softcap=raw.get("attn_logit_softcapping") or 0.0,
        logit_softcap=raw.get("final_logit_softcapping") or 0.0,
        qk_norm=family in ("qwen3", "gemma3_text"),
        qkv_bias=family == "qwen2" or bool(raw.get("attention_bias")),
        out_bias=family != "qwen2" and bool(raw.get("attention_bias")),
        mlp_bias=bool(raw.get("mlp_bias")),
        activation=activation(raw["hidden_activation"] if gemma else raw["hidden_act"]),
        embed_scale=raw["hidden_size"] ** 0.5 if gemma else 1.0,
        tied_embeddings=bool(raw["tie_word_embeddings"]),
    )


def _llama_like_tensors(config: ModelConfig, get: Get) -> Tensors:
    gemma = config.post_norms
    norm = (lambda name: 1.0 + get(name).float()) if gemma else get  # Gemma stores its norm weights minus one
    before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    out: Tensors = {"embed": get("model.embed_tokens.weight"), "ln_final.weight": norm("model.norm.weight")}
    if not config.tied_embeddings:
        out["unembed.weight"] = get("lm_head.weight").T
    for layer in range(config.num_layers):
        src, dst = f"model.layers.{layer}.", f"blocks.{layer}."
        attn, mlp = src + "self_attn.", src + "mlp."
        out[dst + "ln1.weight"] = norm(src + "input_layernorm.weight")
        out[dst + "ln2.weight"] = norm(src + before_mlp + ".weight")
        out[dst + "attn.qkv.weight"] = torch.cat([get(f"{attn}{x}_proj.weight") for x in "qkv"]).T
        out[dst + "attn.o.weight"] = get(attn + "o_proj.weight").T
        out[dst + "mlp.up.weight"] = torch.cat([get(f"{mlp}{x}_proj.weight") for x in ("gate", "up")]).T
        out[dst + "mlp.down.weight"] = get(mlp + "down_proj.weight").T
        if config.qkv_bias:
            out[dst + "attn.qkv.bias"] = torch.cat([get(f"{attn}{x}_proj.bias") for x in "qkv"])
        if config.out_bias:
            out[dst + "attn.o.bias"] = get(attn + "o_proj.bias")
        if config.mlp_bias:
            out[dst + "mlp.up.bias"] = torch.cat([get(f"{mlp}{x}_proj.bias") for x in ("gate", "up")])
            out[dst + "mlp.down.bias"] = get(mlp + "down_proj.bias")
        if config.qk_norm:
            out[dst + "attn.q_norm.weight"] = norm(attn + "q_norm.weight")
            out[dst + "attn.k_norm.weight"] = norm(attn + "k_norm.weight")
        if gemma:
            out[dst + "ln1_post.weight"] = norm(src + "post_attention_layernorm.weight")
            out[dst + "ln2_post.weight"] = norm(src + "post_feedforward_layernorm.weight")
    return out


def _gpt2_config(raw: dict[str, Any]) -> ModelConfig:
    if raw.get("scale_attn_by_inverse_layer_idx") or not raw.get("scale_attn_weights", True):
        raise UnsupportedModel("GPT-2 with scale_attn_by_inverse_layer_idx or without scale_attn_weights is not supported.")
    return ModelConfig(
        family="gpt2",
        num_layers=raw["n_layer"],
        d_model=raw["n_embd"],
        num_heads=raw["n_head"],
        num_kv_heads=raw["n_head"],
        d_head=raw["n_embd"] // raw["n_head"],
        d_mlp=raw.get("n_inner") or 4 * raw["n_embd"],
        vocab_size=raw["vocab_size"],
        max_positions=raw["n_positions"],
        norm="layer",
        norm_eps=raw["layer_norm_epsilon"],
        learned_positions=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation=activation(raw["activation_function"]),
        tied_embeddings=bool(raw.get("tie_word_embeddings", True)),
    )


def _gpt2_tensors(config: ModelConfig, get: Get) -> Tensors:
    out: Tensors = {"embed": get("transformer.wte.weight"), "pos_embed": get("transformer.wpe.weight")}
    if not config.tied_embeddings:
        out["unembed.weight"] = get("lm_head.weight").T
    parts = {
        "ln1": "ln_1",
        "ln2": "ln_2",
        "attn.qkv": "attn.c_attn",
        "attn.o": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for end in ("weight", "bias"):
        out[f"ln_final.{end}"] = get(f"transformer.ln_f.{end}")
        for layer in range(config.num_layers):
            for ours, theirs in parts.items():  # GPT-2 stores its weights [inputs, outputs], as we do
                out[f"blocks.{layer}.{ours}.{end}"] = get(f"transformer.h.{layer}.{theirs}.{end}")
    return out


def _neox_config(raw: dict[str, Any]) -> ModelConfig:
    d_head = raw["hidden_size"] // raw["num_attention_heads"]
    rope = raw["rope_parameters"]
    return ModelConfig(
        family="gpt_neox",
        num_layers=raw["num_hidden_layers"],
        d_model=raw["hidden_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_attention_heads"],
        d_head=d_head,
        d_mlp=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"],
        norm="layer",
        norm_eps=raw["layer_norm_eps"],
        parallel_residual=bool(raw["use_parallel_residual"]),
        rotary_dim=int(d_head * rope.get("partial_rotary_factor", 1.0)),
        rope=read_rope(rope),
        qkv_bias=bool(raw.get("attention_bias", True)),
        out_bias=bool(raw.get("attention_bias", True)),
        mlp_bias=True,
        gated_mlp=False,
        activation=activation(raw["hidden_act"]),
        tied_embeddings=bool(raw["tie_word_embeddings"]),
    )


def _neox_tensors(config: ModelConfig, get: Get) -> Tensors:
    def by_part(x: Tensor) -> Tensor:  # theirs: [head, (q k v), d_head, ...]; ours: [(q k v), head, d_head, ...]
        return x.view(config.num_heads, 3, config.d_head, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    out: Tensors = {"embed": get("gpt_neox.embed_in.weight")}
    if not config.tied_embeddings:
        out["unembed.weight"] = get("lm_head.weight").T
    norms = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
    products = {
        "attn.qkv": "attention.query_key_value",
        "attn.o": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    for end in ("weight", "bias"):
        out[f"ln_final.{end}"] = get(f"gpt_neox.final_layer_norm.{end}")
    for layer in range(config.num_layers):
        src, dst = f"gpt_neox.layers.{layer}.", f"blocks.{layer}."
        for ours, theirs in norms.items():
            out[f"{dst}{ours}.weight"], out[f"{dst}{ours}.bias"] = (
                get(f"{src}{theirs}.weight"),
                get(f"{src}{theirs}.bias"),
            )
        for ours, theirs in products.items():
            arrange = by_part if ours == "attn.qkv" else (lambda x: x)
            out[f"{dst}{ours}.weight"] = arrange(get(f"{src}{theirs}.weight")).T
            if config.qkv_bias or ours.startswith("mlp"):
                out[f"{dst}{ours}.bias"] = arrange(get(f"{src}{theirs}.bias"))
    return out


FAMILIES: dict[str, tuple[Callable[[dict[str, Any]], ModelConfig], Callable[[ModelConfig, Get], Tensors]]] = {
    "llama": (_llama_like_config, _llama_like_tensors),
    "mistral": (_llama_like_config, _llama_like_tensors),
    "qwen2": (_llama_like_config, _llama_like_tensors),
    "qwen3": (_llama_like_config, _llama_like_tensors),
    "gemma2": (_llama_like_config, _llama_like_tensors),
    "gemma3_text": (_llama_like_config, _llama_like_tensors),
    "gpt2": (_gpt2_config, _gpt2_tensors),
    "gpt_neox": (_neox_config, _neox_tensors),
}


def family_of(raw: dict[str, Any]) -> str:
    """The family of a Hugging Face config; UnsupportedModel if it is unknown."""
    name = str(raw.get("model_type"))
    if name not in FAMILIES:
        raise UnsupportedModel(f"The model_type {name!r} is not supported. Known: {', '.join(sorted(FAMILIES))}.")
    return name
