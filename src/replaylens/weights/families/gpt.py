"""The tables of families with tensor names of their own: GPT-2 and GPT-NeoX with their relatives, and ALiBi's."""

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.weights.families.llama import PARTIAL, ROTARY, SIZES, pairs_apart
from replaylens.weights.family import Family, Field, Names, Raw, split_width

# ---- GPT-2 and its relatives -----------------------------------------------------------------------------------------
# The tables of GPT-2 and of families that, like it, learn an embedding for every position: GPT-BigCode, GPT-Neo, OPT.

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
        "attn_scale": lambda raw: 0.0 if raw.get("scale_attn_weights", True) else 1.0,
        "scale_by_layer": Field("scale_attn_by_inverse_layer_idx", False),
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
    only={"add_cross_attention": (None, False)},
)


def by_part(config: ModelConfig, x: Tensor) -> Tensor:
    """q, k and v of each head -> those of all heads one after the other"""
    return rearrange(x, "(heads qkv d) ... -> (qkv heads d) ...", heads=config.num_heads, qkv=3)


def _heads_or_parts(config: ModelConfig, x: Tensor) -> Tensor:
    """With one key head, q, k and v follow each other; else each head has its own three."""
    return x if config.num_kv_heads == 1 else by_part(config, x)


GPT_BIGCODE = replace(
    GPT2,
    names=replace(GPT2.names, transposed=True),
    reads={
        **{name: read for name, read in GPT2.reads.items() if name != "scale_by_layer"},
        "num_kv_heads": lambda raw: 1 if raw["multi_query"] else raw["n_head"],
    },
    arrange={"attn.qkv": _heads_or_parts},
)


def _local_windows(raw: Raw) -> tuple[int, ...]:
    return tuple(raw["window_size"] if kind == "local" else 0 for kind in raw["attention_layers"])


GPT_NEO = Family(
    names=Names(
        embed="transformer.wte",
        pos_embed="transformer.wpe",
        final_norm="transformer.ln_f",
        block="transformer.h.{}.",
        parts={
            "ln1": "ln_1",
            "ln2": "ln_2",
            "attn.qkv": ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
            "attn.o": "attn.attention.out_proj",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
    ),
    reads={
        "num_layers": "num_layers",
        "d_model": "hidden_size",
        "num_heads": "num_heads",
        "num_kv_heads": "num_heads",
        "d_head": lambda raw: raw["hidden_size"] // raw["num_heads"],
        "d_mlp": lambda raw: raw.get("intermediate_size") or 4 * raw["hidden_size"],
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        "windows": _local_windows,
        "tied_embeddings": "tie_word_embeddings",
    },
    fixed={
        "norm": "layer",
        "attn_scale": 1.0,
        "learned_positions": True,
        "out_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
    },
)
OPT = Family(
    names=Names(
        embed="model.decoder.embed_tokens",
        pos_embed="model.decoder.embed_positions",
        pos_offset=2,
        final_norm="model.decoder.final_layer_norm",
        block="model.decoder.layers.{}.",
        parts={
            "ln1": "self_attn_layer_norm",
            "ln2": "final_layer_norm",
            "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attn.o": "self_attn.out_proj",
            "mlp.up": "fc1",
            "mlp.down": "fc2",
        },
    ),
    reads={
        **SIZES,
        "num_kv_heads": "num_attention_heads",
        "d_head": split_width,
        "d_mlp": "ffn_dim",
        "max_positions": "max_position_embeddings",
        "activation": "activation_function",
        "qkv_bias": "enable_bias",
        "out_bias": "enable_bias",
        "mlp_bias": "enable_bias",
    },
    fixed={"norm": "layer", "norm_eps": 1e-5, "learned_positions": True, "gated_mlp": False},
    only={
        "do_layer_norm_before": (True,),
        "layer_norm_elementwise_affine": (None, True),
        "_remove_final_layer_norm": (None, False),
    },
    same={"word_embed_proj_dim": "hidden_size"},
)


# ---- GPT-NeoX and its relatives --------------------------------------------------------------------------------------
# The tables of GPT-NeoX and of families that rotate positions under tensor names of their own: Persimmon, GPT-J, Falcon.

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
    groups = rearrange(x, "(kv part d) ... -> kv part d ...", kv=config.num_kv_heads, d=config.d_head)
    parts = groups.split([config.group, 1, 1], dim=1)
    return torch.cat([rearrange(part, "kv part d ... -> (kv part d) ...") for part in parts])


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
    uses=frozenset({"num_ln_in_parallel_attn"}),
    only={"alibi": (None, False)},
    arrange={"attn.qkv": _falcon_heads},
    renamed=lambda config: {"ln1": "ln_attn", "ln2": "ln_mlp"} if config.parallel_residual and not config.shared_norm else {},
)


# ---- slopes ----------------------------------------------------------------------------------------------------------
# The tables of families whose attention falls with distance by fixed slopes (ALiBi): BLOOM, MPT.


def _bloom_slopes(raw: Raw) -> tuple[float, ...]:
    """ALiBi's: a geometric series for a power of two heads, every other term of the next finer one for the rest."""
    heads = raw["n_head"]
    whole = 1 << (heads.bit_length() - 1)
    series = [2.0 ** (-8 * i / whole) for i in range(1, whole + 1)]
    finer = [2.0 ** (-4 * i / whole) for i in range(1, 2 * (heads - whole) + 1, 2)]
    return (*series, *finer)


BLOOM = replace(
    NEOX,
    names=Names(
        embed="transformer.word_embeddings",
        embed_norm="transformer.word_embeddings_layernorm",
        head="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        block="transformer.h.{}.",
        parts=FUSED_PARTS,
    ),
    reads={
        "num_layers": "n_layer",
        "d_model": "hidden_size",
        "num_heads": "n_head",
        "num_kv_heads": "n_head",
        "d_head": lambda raw: raw["hidden_size"] // raw["n_head"],
        "d_mlp": lambda raw: 4 * raw["hidden_size"],
        "vocab_size": "vocab_size",
        "max_positions": Field("seq_length", 2048),
        "norm_eps": "layer_norm_epsilon",
        "slopes": _bloom_slopes,
    },
    fixed={
        **NEOX.fixed,
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "out_bias": True,
        "tied_embeddings": False,  # the table that embeds is normed, the one that unembeds is not
    },
    uses=frozenset(),
    only={"apply_residual_connection_post_layernorm": (None, False), "tie_word_embeddings": (True,)},
)


def _mpt_attention(raw: Raw) -> Raw:
    """`attn_config`; UnsupportedModel for values that transformers ignores or that are not computed here."""
    given: Raw = raw["attn_config"]
    usual = {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False}
    for name, value in usual.items():
        if given.get(name, value) != value:
            raise UnsupportedModel(f"mpt with attn_config {name} = {given[name]!r} is not supported. Supported: {value!r}.")
    return given


def _mpt_slopes(raw: Raw) -> tuple[float, ...]:
    """ALiBi's in MPT's order: of the next power of two, every second term first."""
    heads = raw["n_heads"]
    whole = 1 << (heads - 1).bit_length()
    series = [2.0 ** (-8 * i / whole) for i in range(1, whole + 1)]
    return tuple(series if whole == heads else [*series[1::2], *series[::2]][:heads])


MPT = Family(
    names=Names(
        embed="transformer.wte",
        final_norm="transformer.norm_f",
        block="transformer.blocks.{}.",
        parts={
            "ln1": "norm_1",
            "ln2": "norm_2",
            "attn.qkv": "attn.Wqkv",
            "attn.o": "attn.out_proj",
            "mlp.up": "ffn.up_proj",
            "mlp.down": "ffn.down_proj",
        },
    ),
    reads={
        "num_layers": "n_layers",
        "d_model": "d_model",
        "num_heads": "n_heads",
        "num_kv_heads": "n_heads",
        "d_head": lambda raw: raw["d_model"] // raw["n_heads"],
        "d_mlp": lambda raw: 4 * raw["d_model"],
        "vocab_size": "vocab_size",
        "max_positions": "max_seq_len",
        "norm_eps": "layer_norm_epsilon",
        "attn_scale": lambda raw: _mpt_attention(raw).get("softmax_scale") or 0.0,
        "clip_qkv": lambda raw: _mpt_attention(raw).get("clip_qkv") or 0.0,
        "slopes": _mpt_slopes,
        "tied_embeddings": "tie_word_embeddings",
    },
    fixed={"norm": "layer", "norm_bias": False, "activation": "gelu", "gated_mlp": False},
    only={"no_bias": (None, True), "expansion_ratio": (None, 4)},
)
