"""The tables of GPT-2 and of families that, like it, learn an embedding for every position: GPT-BigCode, GPT-Neo, OPT."""

from dataclasses import replace

from torch import Tensor

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.family import Family, Field, Names, Raw
from replaylens.engine.model.raw_fields import split_width
from replaylens.engine.model.tables_llama import SIZES

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
    """[head, (q k v), d_head, ...] -> [(q k v), head, d_head, ...]"""
    return x.view(config.num_heads, 3, config.d_head, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


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
