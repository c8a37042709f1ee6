"""The tables of GPT-NeoX and of families that rotate positions under tensor names of their own: Persimmon, GPT-J, Falcon."""

from dataclasses import replace

import torch
from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.engine.model.family import Family, Field, Names, Raw
from replaylens.engine.model.raw_fields import split_width
from replaylens.engine.model.tables_gpt import GPT2, by_part
from replaylens.engine.model.tables_llama import PARTIAL, ROTARY, SIZES
from replaylens.engine.model.tables_pairs import pairs_apart

NEOX = Family(
    names=Names(
        embed="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        block="gpt_neox.layers.{}.",
        parts={
            "ln1": "input_layernorm",
            "ln2": "post_attention_layernorm",
            "attn.qkv": "attention.query_key_value",
            "attn.o": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
    ),
    reads={
        **SIZES,
        **ROTARY,
        "num_kv_heads": "num_attention_heads",
        "d_head": split_width,
        "rotary_dim": lambda raw: int(split_width(raw) * raw["rope_parameters"].get("partial_rotary_factor", 1.0)),
        "norm_eps": "layer_norm_eps",
        "activation": "hidden_act",
        "parallel_residual": "use_parallel_residual",
        "qkv_bias": Field("attention_bias", True),
        "out_bias": Field("attention_bias", True),
    },
    fixed={"norm": "layer", "mlp_bias": True, "gated_mlp": False},
    uses=PARTIAL | {"rotary_pct"},
    arrange={"attn.qkv": by_part},
)

PERSIMMON = replace(
    NEOX,
    names=Names(
        embed="model.embed_tokens",
        final_norm="model.final_layernorm",
        block="model.layers.{}.",
        parts={
            "ln1": "input_layernorm",
            "ln2": "post_attention_layernorm",
            "attn.qkv": "self_attn.query_key_value",
            "attn.o": "self_attn.dense",
            "attn.q_norm": "self_attn.q_layernorm",
            "attn.k_norm": "self_attn.k_layernorm",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
    ),
    reads={
        **{name: NEOX.reads[name] for name in (*SIZES, *ROTARY, "norm_eps", "activation")},
        "qk_norm": "qk_layernorm",
    },
    fixed={**NEOX.fixed, "qk_norm_kind": "layer", "qkv_bias": True, "out_bias": True},
    uses=PARTIAL,
)


def _rotary_dim(raw: Raw) -> int:
    width: int | None = raw["rotary_dim"]
    if width is None:
        raise UnsupportedModel("gptj without rotary_dim is not supported: its angles would follow from d_model, not d_head.")
    return width


GPTJ = Family(
    names=Names(
        embed="transformer.wte",
        final_norm="transformer.ln_f",
        block="transformer.h.{}.",
        parts={
            "ln1": "ln_1",
            "attn.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            "attn.o": "attn.out_proj",
            "mlp.up": "mlp.fc_in",
            "mlp.down": "mlp.fc_out",
        },
    ),
    reads={
        **{name: GPT2.reads[name] for name in ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_head", "d_mlp")},
        **{name: GPT2.reads[name] for name in ("vocab_size", "max_positions", "norm_eps", "activation")},
        "rotary_dim": _rotary_dim,
        "tied_embeddings": Field("tie_word_embeddings", False),
    },
    fixed={
        "norm": "layer",
        "rope": Rope(theta=10000.0),
        "parallel_residual": True,
        "shared_norm": True,
        "mlp_bias": True,
        "unembed_bias": True,
        "gated_mlp": False,
    },
    uses=frozenset({"rotary_dim"}),
    arrange={"attn.qkv": pairs_apart},
)


def _falcon_heads(config: ModelConfig, x: Tensor) -> Tensor:
    """[kv_head, (its queries, k, v), d_head, ...] -> [(q k v), head, d_head, ...]; of one kv_head, nothing moves"""
    groups = x.view(config.num_kv_heads, config.group + 2, config.d_head, *x.shape[1:])
    parts = groups.split([config.group, 1, 1], dim=1)
    return torch.cat([part.reshape(-1, *x.shape[1:]) for part in parts])


def _falcon_kv_heads(raw: Raw) -> int:
    kv_heads: int = raw["num_kv_heads"]
    return kv_heads if raw["new_decoder_architecture"] or not raw["multi_query"] else 1


def _falcon_norms(raw: Raw) -> bool:
    """Whether attention and MLP share one norm."""
    if raw["new_decoder_architecture"]:
        return raw.get("num_ln_in_parallel_attn") == 1
    return bool(raw["parallel_attn"])


FUSED_PARTS = {
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn.qkv": "self_attention.query_key_value",
    "attn.o": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
"""names within a block that Falcon and BLOOM share"""

FALCON = Family(
    names=Names(
        embed="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        block="transformer.h.{}.",
        parts=FUSED_PARTS,
    ),
    reads={
        **SIZES,
        **ROTARY,
        "num_kv_heads": _falcon_kv_heads,
        "d_head": split_width,
        "d_mlp": "ffn_hidden_size",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation",
        "parallel_residual": "parallel_attn",
        "shared_norm": _falcon_norms,
        "qkv_bias": "bias",
        "out_bias": "bias",
        "mlp_bias": "bias",
    },
    fixed={"norm": "layer", "gated_mlp": False},
    only={"alibi": (None, False)},
    arrange={"attn.qkv": _falcon_heads},
    renamed=lambda config: {"ln1": "ln_attn", "ln2": "ln_mlp"} if config.parallel_residual and not config.shared_norm else {},
)
