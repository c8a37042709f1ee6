"""The families that load, one table each. `docs/extending.md` adds one."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.family import Family, Field, Names, Raw, Read
from replaylens.engine.model.raw_fields import (
    head_width,
    layer_windows,
    local_rope,
    main_rope,
    one_window,
    positions,
    rotary_width,
    split_width,
)

# ---- Llama and its relatives ---------------------------------------------------------------------------------------------

SIZES: Mapping[str, Read] = MappingProxyType(
    {
        "num_layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "d_head": head_width,
        "d_mlp": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_positions": positions,
        "tied_embeddings": "tie_word_embeddings",
    }
)
ROTARY: Mapping[str, Read] = MappingProxyType({"rotary_dim": rotary_width, "rope": main_rope})
BIASES: Mapping[str, Read] = MappingProxyType(
    {"qkv_bias": Field("attention_bias", False), "out_bias": Field("attention_bias", False)}
)
LLAMA_NAMES = Names(
    embed="model.embed_tokens",
    final_norm="model.norm",
    block="model.layers.{}.",
    parts={
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.o": "self_attn.o_proj",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": "mlp.down_proj",
    },
)
LLAMA = Family(
    names=LLAMA_NAMES,
    reads={
        **SIZES,
        **ROTARY,
        **BIASES,
        "norm_eps": "rms_norm_eps",
        "activation": "hidden_act",
        "mlp_bias": Field("mlp_bias", False),
    },
)


def reads_of(family: Family, *, without: tuple[str, ...] = (), **more: Read) -> dict[str, Read]:
    """The `reads` of a family, some left out and some changed."""
    return {**{name: read for name, read in family.reads.items() if name not in without}, **more}


def names_of(names: Names, **parts: str | tuple[str, ...]) -> Names:
    """The names of a family with some parts changed; `__` stands for a dot."""
    return replace(names, parts={**names.parts, **{ours.replace("__", "."): theirs for ours, theirs in parts.items()}})


MISTRAL = replace(
    LLAMA,
    reads=reads_of(LLAMA, without=("qkv_bias", "out_bias", "mlp_bias"), windows=one_window),
    uses=frozenset({"sliding_window"}),
)
QWEN2 = replace(
    MISTRAL,
    reads=reads_of(MISTRAL, windows=layer_windows),
    fixed={"qkv_bias": True},
    uses=frozenset({"attention_bias", "qkv_bias", "sliding_window"}),  # q, k and v always have biases
    layer_types=True,
)
QWEN3 = replace(
    MISTRAL, reads={**reads_of(MISTRAL, windows=layer_windows), **BIASES}, fixed={"qk_norm": True}, layer_types=True
)


def _gemma_scale(raw: Raw) -> float:
    scale: float = raw["query_pre_attn_scalar"] ** -0.5
    return scale


def _root_width(raw: Raw) -> float:
    root: float = raw["hidden_size"] ** 0.5
    return root


GEMMA2 = replace(
    QWEN3,
    names=names_of(
        LLAMA_NAMES,
        ln2="pre_feedforward_layernorm",
        ln1_post="post_attention_layernorm",
        ln2_post="post_feedforward_layernorm",
    ),
    reads=reads_of(
        QWEN3,
        activation="hidden_activation",
        embed_scale=_root_width,
        attn_scale=_gemma_scale,
        attn_softcap=Field("attn_logit_softcapping", 0.0),
        logit_softcap=Field("final_logit_softcapping", 0.0),
    ),
    fixed={"post_norms": True},
    uses=frozenset({"query_pre_attn_scalar", "sliding_window"}),
    norm_offset=1.0,
)
GEMMA3 = replace(
    GEMMA2,
    reads=reads_of(GEMMA2, without=("attn_softcap",), local_rope=local_rope),
    fixed={"post_norms": True, "qk_norm": True},
    nested_ropes=True,
)

# ---- GPT-2 and GPT-NeoX --------------------------------------------------------------------------------------------------

GPT2 = Family(
    names=Names(
        embed="transformer.wte",
        pos_embed="transformer.wpe",
        final_norm="transformer.ln_f",
        block="transformer.h.{}.",
        parts={
            "ln1": "ln_1",
            "ln2": "ln_2",
            "attn.qkv": "attn.c_attn",
            "attn.o": "attn.c_proj",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        transposed=False,
    ),
    reads={
        "num_layers": "n_layer",
        "d_model": "n_embd",
        "num_heads": "n_head",
        "num_kv_heads": "n_head",
        "d_head": lambda raw: raw["n_embd"] // raw["n_head"],
        "d_mlp": lambda raw: raw.get("n_inner") or 4 * raw["n_embd"],
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        "tied_embeddings": Field("tie_word_embeddings", True),
    },
    fixed={
        "norm": "layer",
        "learned_positions": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
    },
    only={"scale_attn_by_inverse_layer_idx": (None, False), "scale_attn_weights": (None, True)},
)


def by_part(config: ModelConfig, x: Tensor) -> Tensor:
    """[head, (q k v), d_head, ...] -> [(q k v), head, d_head, ...]"""
    return x.view(config.num_heads, 3, config.d_head, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


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
    uses=frozenset({"partial_rotary_factor", "rotary_pct"}),
    arrange={"attn.qkv": by_part},
)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt2": GPT2,
    "gpt_neox": NEOX,
}


def family_of(raw: Raw) -> str:
    """The family of a Hugging Face config; UnsupportedModel if it is unknown."""
    name = str(raw.get("model_type"))
    if name not in FAMILIES:
        raise UnsupportedModel(f"The model_type {name!r} is not supported. Known: {', '.join(sorted(FAMILIES))}.")
    return name
