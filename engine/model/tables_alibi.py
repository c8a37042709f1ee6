"""The tables of families whose attention falls with distance by fixed slopes (ALiBi): BLOOM, MPT."""

from dataclasses import replace

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.family import Family, Field, Names, Raw
from replaylens.engine.model.tables_neox import FUSED_PARTS, NEOX


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
