"""The tables of Llama and its relatives: decoders whose tensors have Llama's names. `docs/extending.md` adds one."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.model.config import ModelConfig
from replaylens.weights.family import (
    Arrange,
    Family,
    Field,
    Names,
    Raw,
    ReadField,
    alpha_rope,
    clip_qkv,
    head_width,
    layer_windows,
    local_rope,
    main_rope,
    one_window,
    positions,
    rotary_width,
)

# ---- Llama and its relatives ---------------------------------------------------------------------------------------------

SIZES: Mapping[str, ReadField] = MappingProxyType(
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
ROTARY: Mapping[str, ReadField] = MappingProxyType({"rotary_dim": rotary_width, "rope": main_rope})
BIASES: Mapping[str, ReadField] = MappingProxyType(
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


def reads_of(family: Family, *, without: tuple[str, ...] = (), **more: ReadField) -> dict[str, ReadField]:
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


ONE_WAY = {"use_bidirectional_attention": (None, False)}
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
    only=ONE_WAY,
    norm_offset=1.0,
)
GEMMA3 = replace(
    GEMMA2,
    reads=reads_of(GEMMA2, without=("attn_softcap",), local_rope=local_rope),
    fixed={"post_norms": True, "qk_norm": True},
    nested_ropes=True,
)
GEMMA = replace(
    LLAMA,
    reads=reads_of(LLAMA, without=("mlp_bias",), embed_scale=_root_width),
    only=ONE_WAY,
    norm_offset=1.0,
)

VAULTGEMMA = replace(GEMMA2, fixed={}, only={})

# ---- other biases, products and activations ------------------------------------------------------------------------------

PARTIAL = frozenset({"partial_rotary_factor"})
"""the family rotates a part of each head"""
MINISTRAL = replace(QWEN2, fixed={}, uses=frozenset({"sliding_window"}))
CWM = replace(MINISTRAL, reads=reads_of(MINISTRAL, mlp_bias=Field("mlp_bias", False)))
SEED_OSS = replace(LLAMA, reads=reads_of(LLAMA, out_bias=Field("attention_out_bias", False)))
ARCEE = replace(LLAMA, names=names_of(LLAMA_NAMES, mlp__up="mlp.up_proj"), fixed={"gated_mlp": False})
NEMOTRON = replace(
    ARCEE,
    reads=reads_of(ARCEE, norm_eps="norm_eps"),
    fixed={"gated_mlp": False, "norm": "layer"},
    uses=PARTIAL,
    norm_offset=1.0,
)
STARCODER2 = replace(
    MISTRAL,
    names=names_of(LLAMA_NAMES, mlp__up="mlp.c_fc", mlp__down="mlp.c_proj"),
    reads=reads_of(MISTRAL, norm_eps="norm_epsilon", qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    fixed={"norm": "layer", "gated_mlp": False},
)
PHI3 = replace(
    MISTRAL,
    names=names_of(LLAMA_NAMES, attn__qkv="self_attn.qkv_proj", mlp__up="mlp.gate_up_proj"),
    uses=MISTRAL.uses | PARTIAL,
)
PHI = Family(
    names=replace(
        names_of(
            LLAMA_NAMES,
            attn__o="self_attn.dense",
            attn__q_norm="self_attn.q_layernorm",
            attn__k_norm="self_attn.k_layernorm",
            mlp__up="mlp.fc1",
            mlp__down="mlp.fc2",
        ),
        final_norm="model.final_layernorm",
    ),
    reads={**SIZES, **ROTARY, "norm_eps": "layer_norm_eps", "activation": "hidden_act", "qk_norm": "qk_layernorm"},
    fixed={
        "norm": "layer",
        "qk_norm_kind": "layer",
        "parallel_residual": True,
        "shared_norm": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "unembed_bias": True,
        "gated_mlp": False,
    },
    uses=PARTIAL | {"attention_bias", "qkv_bias", "mlp_bias"},  # always there
)
STABLELM = replace(
    LLAMA,
    names=names_of(LLAMA_NAMES, attn__q_norm="self_attn.q_layernorm.norms.{}", attn__k_norm="self_attn.k_layernorm.norms.{}"),
    reads=reads_of(
        LLAMA,
        without=("out_bias", "mlp_bias"),
        norm_eps="layer_norm_eps",
        qkv_bias="use_qkv_bias",
        qk_norm="qk_layernorm",
        parallel_residual="use_parallel_residual",
        shared_norm="use_parallel_residual",
    ),
    fixed={"norm": "layer", "qk_norm_kind": "layer", "qk_norm_span": "each"},
    uses=PARTIAL,
)


def _rotates(raw: Raw) -> tuple[bool, ...]:
    return tuple(bool(each) for each in raw["no_rope_layers"])  # 1: the layer does rotate


SMOLLM3 = replace(
    LLAMA,
    reads=reads_of(LLAMA, windows=layer_windows, rotary_layers=_rotates),
    uses=frozenset({"no_rope_layers", "sliding_window"}),
    layer_types=True,
)


def _inverse(field: str) -> ReadField:
    def read(raw: Raw) -> float:
        factor: float = 1.0 / raw[field]
        return factor

    return read


GRANITE = replace(
    LLAMA,
    reads=reads_of(
        LLAMA,
        embed_scale="embedding_multiplier",
        attn_scale="attention_multiplier",
        residual_scale="residual_multiplier",
        logit_scale=_inverse("logits_scaling"),
    ),
    uses=frozenset({"logits_scaling"}),
)

# ---- norms elsewhere -----------------------------------------------------------------------------------------------------

OLMO = replace(
    LLAMA,
    names=replace(names_of(LLAMA_NAMES, ln1="", ln2=""), final_norm=""),
    reads=reads_of(LLAMA, without=("norm_eps", "mlp_bias"), clip_qkv=clip_qkv),
    uses=frozenset({"clip_qkv"}),
    fixed={"norm": "layer", "norm_bias": False, "norm_eps": 1e-5},
)
OLMO2 = replace(
    LLAMA,
    names=names_of(LLAMA_NAMES, ln1_post="post_attention_layernorm", ln2_post="post_feedforward_layernorm"),
    reads=reads_of(LLAMA, without=("mlp_bias",)),
    fixed={"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_span": "all"},
)
OLMO3 = replace(
    OLMO2,
    reads=reads_of(OLMO2, windows=layer_windows, local_rope=local_rope),
    uses=frozenset({"sliding_window"}),
    layer_types=True,
    nested_ropes=True,
)


def rotates_windows(raw: Raw) -> tuple[bool, ...]:
    """Only layers with a window rotate; all do if no layer can have one."""
    if raw.get("sliding_window") is None:
        return ()
    return tuple(kind == "sliding_attention" for kind in raw["layer_types"])


EXAONE4 = replace(
    OLMO2,
    reads=reads_of(OLMO2, without=("qkv_bias", "out_bias"), windows=layer_windows, rotary_layers=rotates_windows),
    fixed={"pre_norms": False, "post_norms": True, "qk_norm": True},
    uses=frozenset({"sliding_window"}),
    layer_types=True,
)
HUNYUAN = replace(
    LLAMA,
    names=names_of(LLAMA_NAMES, attn__q_norm="self_attn.query_layernorm", attn__k_norm="self_attn.key_layernorm"),
    reads=reads_of(LLAMA, without=("mlp_bias",), rope=alpha_rope),
    fixed={"qk_norm": True, "qk_norm_rotated": True},
    uses=frozenset({"alpha", "use_qk_norm"}),  # the norms are always there
)


# ---- neighbouring dimensions -----------------------------------------------------------------------------------------
# The tables of families with Llama's tensor names that rotate neighbouring dimensions: Cohere, GLM, Helium, ERNIE.


def _order(config: ModelConfig) -> Tensor:
    """The dimensions of a head: first and second of all pairs, then those that are not rotated."""
    turned = torch.arange(config.rotary_dim)
    return torch.cat([turned[::2], turned[1::2], torch.arange(config.rotary_dim, config.d_head)])


def pairs_apart(config: ModelConfig, x: Tensor) -> Tensor:
    """q, k and v with the pairs of q and k apart, as we rotate them. q.k does not depend on the order."""
    turned = (config.num_heads + config.num_kv_heads) * config.d_head
    heads = rearrange(x[:turned], "(heads d) ... -> heads d ...", d=config.d_head)[:, _order(config)]
    return torch.cat([rearrange(heads, "heads d ... -> (heads d) ..."), x[turned:]])


def _norm_apart(config: ModelConfig, x: Tensor) -> Tensor:
    return x[..., _order(config)]


PAIRS: dict[str, Arrange] = {"attn.qkv": pairs_apart, "attn.q_norm": _norm_apart, "attn.k_norm": _norm_apart}
COHERE = replace(
    LLAMA,
    reads=reads_of(
        LLAMA,
        without=("mlp_bias",),
        norm_eps="layer_norm_eps",
        logit_scale="logit_scale",
        qk_norm=Field("use_qk_norm", False),
    ),
    fixed={
        "norm": "layer",
        "norm_bias": False,
        "qk_norm_kind": "layer",
        "qk_norm_span": "each",
        "parallel_residual": True,
        "shared_norm": True,
    },
    arrange=PAIRS,
)
COHERE2 = replace(
    COHERE,
    reads=reads_of(COHERE, without=("qk_norm",), windows=layer_windows, rotary_layers=rotates_windows),
    uses=frozenset({"sliding_window"}),
    layer_types=True,
)
GLM = replace(
    LLAMA,
    names=names_of(LLAMA_NAMES, mlp__up="mlp.gate_up_proj"),
    reads=reads_of(LLAMA, without=("out_bias", "mlp_bias")),
    uses=PARTIAL,
    arrange=PAIRS,
)
GLM4 = replace(
    GLM,
    names=names_of(GLM.names, ln1_post="post_self_attn_layernorm", ln2_post="post_mlp_layernorm"),
    fixed={"post_norms": True},
)
HELIUM = replace(LLAMA, reads=reads_of(LLAMA, without=("out_bias",)), arrange=PAIRS)
ERNIE = replace(
    LLAMA,
    reads=reads_of(LLAMA, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    arrange=PAIRS,
)
