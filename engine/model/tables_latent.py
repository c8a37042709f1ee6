"""The tables of DeepSeek-V2 and V3 and their relatives: latent attention, most with mixtures of experts."""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from replaylens.engine.model.config import Latent, ModelConfig
from replaylens.engine.model.family import Arrange, Raw
from replaylens.engine.model.raw_fields import grown_by_yarn
from replaylens.engine.model.tables_llama import LLAMA, names_of, reads_of
from replaylens.engine.model.tables_moe import COUNTS, DEEPSEEK_PARTS, MOE_NAMES, deepseek_v2_mixture, deepseek_v3_mixture


def _latent(raw: Raw) -> Latent:
    return Latent(rank=raw["kv_lora_rank"], d_value=raw["v_head_dim"], query_rank=raw.get("q_lora_rank") or 0)


def _width(raw: Raw) -> int:
    width: int = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
    return width


def _scale(raw: Raw) -> float:
    """YaRN may grow the scores as well: both queries and keys."""
    rope = raw.get("rope_parameters") or {}
    by = rope.get("mscale_all_dim") if rope.get("rope_type", "default") != "default" else None
    grown = grown_by_yarn(rope["factor"], by) if by else 1.0
    scale: float = _width(raw) ** -0.5 * grown * grown
    return scale


# ---- tensors -------------------------------------------------------------------------------------------------------------


def _pairs_apart(config: ModelConfig, x: Tensor) -> Tensor:
    """The last dimensions of heads [heads, width, ...], which are rotated by pairs of neighbours, with the pairs apart."""
    kept, turned = x.shape[1] - config.rotary_dim, torch.arange(config.rotary_dim)
    return x[:, torch.cat([torch.arange(kept), kept + turned[::2], kept + turned[1::2]])]


def _queries(config: ModelConfig, x: Tensor) -> Tensor:
    return _pairs_apart(config, x.view(config.num_heads, config.d_head, *x.shape[1:])).reshape(x.shape)


def _compressed(config: ModelConfig, x: Tensor) -> Tensor:
    """The latent, then the part of the keys that is rotated."""
    return _pairs_apart(config, x[None])[0]


def _by_head(config: ModelConfig, x: Tensor, values: bool) -> Tensor:
    """Keys or values of [heads * (keys + values), rank]: [heads, rank, outputs]"""
    keys = config.d_head - config.rotary_dim
    both = x.view(config.num_heads, keys + config.d_value, -1)
    return (both[:, keys:] if values else both[:, :keys]).transpose(1, 2)


PARTS: dict[str, Arrange] = {
    "attn.k": lambda config, x: _by_head(config, x, values=False),
    "attn.v": lambda config, x: _by_head(config, x, values=True),
}


def _query_name(config: ModelConfig) -> Mapping[str, str]:
    assert config.latent is not None
    return {"attn.q": "self_attn.q_b_proj" if config.latent.query_rank else "self_attn.q_proj"}


# ---- families ------------------------------------------------------------------------------------------------------------

_SIZES = frozenset({"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"})
LATENT = replace(
    LLAMA,
    names=names_of(
        MOE_NAMES,
        attn__q_a="self_attn.q_a_proj",
        attn__q_a_norm="self_attn.q_a_layernorm",
        attn__kv_a="self_attn.kv_a_proj_with_mqa",
        attn__kv_a_norm="self_attn.kv_a_layernorm",
        attn__k="self_attn.kv_b_proj",
        attn__v="self_attn.kv_b_proj",
    ),
    reads=reads_of(LLAMA, num_kv_heads="num_attention_heads", d_head=_width, latent=_latent, attn_scale=_scale),
    uses=_SIZES,
    same={"num_key_value_heads": "num_attention_heads"},
    arrange=PARTS,
    renamed=_query_name,
)
"""rotates the halves of a part of each head"""
PAIRED = replace(
    LATENT,
    reads=reads_of(LATENT, without=("mlp_bias",)),
    uses=LATENT.uses | {"rope_interleave"},
    only={"rope_interleave": (True,)},
    arrange={"attn.q": _queries, "attn.kv_a": _compressed, **PARTS},
)
"""rotates neighbours"""


def _factor_on_depth(raw: Raw) -> float:
    factor: float = raw["scale_depth"] / sqrt(raw["num_hidden_layers"])
    return factor


def _factor_on_logits(raw: Raw) -> float:
    factor: float = raw["dim_model_base"] / raw["hidden_size"]
    return factor


MINICPM3 = replace(
    LATENT,
    reads=reads_of(LATENT, embed_scale="scale_emb", residual_scale=_factor_on_depth, logit_scale=_factor_on_logits),
    uses=LATENT.uses | {"scale_depth"},
)
YOUTU = PAIRED

# ---- with mixtures -------------------------------------------------------------------------------------------------------

_MIXED = replace(LATENT.names, parts={**LATENT.names.parts, **DEEPSEEK_PARTS})
_EVERY = {"moe_layer_freq": (None, 1)}
"""every layer after the first ones has a mixture"""
DEEPSEEK_V2 = replace(
    LATENT,
    names=_MIXED,
    reads=reads_of(LATENT, mixture=deepseek_v2_mixture),
    uses=LATENT.uses | COUNTS,
    only={
        **_EVERY,
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": (None, "softmax"),
        "norm_topk_prob": (None, False),  # transformers does not normalise, whatever the field says
    },
    arrange=PAIRED.arrange,
)
DEEPSEEK_V3 = replace(
    PAIRED,
    names=_MIXED,
    reads=reads_of(PAIRED, mixture=deepseek_v3_mixture),
    uses=PAIRED.uses | COUNTS,
    only={**_EVERY, **PAIRED.only, "scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")},
    later_layers=True,
)
GLM4_MOE_LITE = DEEPSEEK_V3
