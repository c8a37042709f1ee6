"""The tables of families with mixtures of experts, and of those with latent attention, DeepSeek's."""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import Latent, MixtureConfig, ModelConfig, Rope, Routing
from replaylens.weights.families.llama import (
    BIASES,
    GRANITE,
    LLAMA,
    LLAMA_NAMES,
    MISTRAL,
    OLMO2,
    PARTIAL,
    names_of,
    reads_of,
)
from replaylens.weights.family import (
    Arrange,
    ExpertNames,
    Family,
    Field,
    Raw,
    clip_qkv,
    grown_by_yarn,
    layer_windows,
    main_rope,
)

# ---- mixtures of experts ---------------------------------------------------------------------------------------------
# The tables of families with mixtures of experts. `docs/extending.md` adds one.

COUNTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})
"""fields that say how many experts there are"""
STACKED = ExpertNames(
    stacked={"up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"},
    each={"up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "down": ("mlp.experts.{}.down_proj",)},
)
MOE_NAMES = replace(names_of(LLAMA_NAMES, mlp__router="mlp.gate"), experts=STACKED)


def sparse_layers(raw: Raw) -> tuple[bool, ...]:
    """The layers with a mixture, of a family that may have MLPs in between; empty: all."""
    dense, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step") or 1
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(raw["num_hidden_layers"]))
    return () if all(layers) else layers


def _top(raw: Raw) -> int:
    top: int = raw["num_experts_per_tok"]
    return top


# ---- Mixtral, PhiMoE, GraniteMoE -----------------------------------------------------------------------------------------

_BY_W = replace(STACKED, each={"up": ("mlp.experts.{}.w1", "mlp.experts.{}.w3"), "down": ("mlp.experts.{}.w2",)})


def _mixtral(raw: Raw) -> MixtureConfig:
    return MixtureConfig(raw["num_local_experts"], raw["intermediate_size"], Routing(_top(raw)))


MIXTRAL = replace(
    MISTRAL,
    names=replace(MOE_NAMES, experts=_BY_W, spellings=((".mlp.", ".block_sparse_moe."),)),
    reads=reads_of(MISTRAL, mixture=_mixtral),
    uses=MISTRAL.uses | COUNTS,
)


def _phimoe(raw: Raw) -> MixtureConfig:
    routing = Routing(_top(raw), "sparsemixer", normalised=False, jitter=raw["router_jitter_noise"])
    return MixtureConfig(raw["num_local_experts"], raw["intermediate_size"], routing)


def _phimoe_rope(raw: Raw) -> Rope:
    """LongRoPE with a factor on cos and sin of its own. Beyond the short factors nothing is computed here."""
    given = raw["rope_parameters"]
    match kind := given.get("rope_type", "default"):
        case "default":
            return main_rope(raw)
        case "longrope":
            return replace(main_rope(raw), attention_factor=float(given["short_mscale"]))
    raise UnsupportedModel(f"phimoe with the rotary scaling {kind!r} is not supported. Known: default, longrope.")


PHIMOE = replace(
    MIXTRAL,
    names=replace(
        names_of(MIXTRAL.names, mlp__router="mlp.router"),
        spellings=((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")),
    ),
    reads={**reads_of(MIXTRAL, mixture=_phimoe, rope=_phimoe_rope, unembed_bias="lm_head_bias"), **BIASES},
    fixed={"norm": "layer"},
    uses=MIXTRAL.uses | {"short_mscale", "long_mscale"},
    only={"num_experts_per_tok": (2,)},
)
GRANITEMOE = replace(
    GRANITE,
    names=replace(
        names_of(LLAMA_NAMES, mlp__router="block_sparse_moe.router"),
        experts=ExpertNames(
            stacked={"up": "block_sparse_moe.experts.gate_up_proj", "down": "block_sparse_moe.experts.down_proj"}
        ),
        spellings=(
            (".router.weight", ".router.layer.weight"),
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
        ),
    ),
    reads=reads_of(GRANITE, without=("mlp_bias",), mixture=_mixtral),
    uses=GRANITE.uses | COUNTS,
)

# ---- Qwen-MoE, OLMoE -----------------------------------------------------------------------------------------------------


def _qwen3(raw: Raw) -> MixtureConfig:
    routing = Routing(_top(raw), normalised=raw["norm_topk_prob"])
    count = raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]
    return MixtureConfig(count, raw["moe_intermediate_size"], routing, sparse_layers(raw))


def qwen2_mixture(raw: Raw) -> MixtureConfig:
    return replace(_qwen3(raw), d_shared=raw["shared_expert_intermediate_size"], shared_gate=True)


def _olmoe(raw: Raw) -> MixtureConfig:
    return MixtureConfig(raw["num_experts"], raw["intermediate_size"], Routing(_top(raw), normalised=raw["norm_topk_prob"]))


QWEN3_MOE = replace(
    MISTRAL,
    names=MOE_NAMES,
    reads={**reads_of(MISTRAL, mixture=_qwen3), **BIASES},
    fixed={"qk_norm": True},
    uses=MISTRAL.uses | COUNTS,
)
QWEN2_MOE = replace(
    MISTRAL,
    names=names_of(
        MOE_NAMES,
        mlp__shared__up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        mlp__shared__down="mlp.shared_expert.down_proj",
        mlp__shared_gate="mlp.shared_expert_gate",
    ),
    reads=reads_of(MISTRAL, mixture=qwen2_mixture, windows=layer_windows, qkv_bias=Field("qkv_bias", True)),
    uses=MISTRAL.uses | COUNTS,
    layer_types=True,
)
OLMOE = replace(
    LLAMA,
    names=MOE_NAMES,
    reads=reads_of(LLAMA, without=("mlp_bias",), mixture=_olmoe, clip_qkv=clip_qkv),
    fixed={"qk_norm": True, "qk_norm_span": "all"},
    uses=COUNTS | {"clip_qkv"},
    only={"sliding_window": (None,)},  # a window with some attention
)

# ---- GPT-OSS -------------------------------------------------------------------------------------------------------------


def _gpt_oss(raw: Raw) -> MixtureConfig:
    return replace(_mixtral(raw), bias=True, router_bias=True)


GPT_OSS: Family = replace(
    MISTRAL,
    names=replace(
        names_of(LLAMA_NAMES, mlp__router="mlp.router", attn__sinks="self_attn.sinks"),
        experts=ExpertNames(
            stacked={
                "up": "mlp.experts.gate_up_proj",
                "up_bias": "mlp.experts.gate_up_proj_bias",
                "down": "mlp.experts.down_proj",
                "down_bias": "mlp.experts.down_proj_bias",
            },
            transposed=False,
            interleaved=True,
        ),
    ),
    reads={**reads_of(MISTRAL, without=("activation",), windows=layer_windows, mixture=_gpt_oss), **BIASES},
    fixed={"sinks": True, "activation": "clamped_swiglu"},
    uses=MISTRAL.uses | COUNTS,
    only={"swiglu_alpha": (None, 1.702), "swiglu_limit": (None, 7.0)},
    layer_types=True,
)

# ---- OLMo-2 with experts -------------------------------------------------------------------------------------------------

FLEX_OLMO = replace(
    OLMO2,
    names=replace(names_of(OLMO2.names, mlp__router="mlp.gate"), experts=STACKED),
    reads=reads_of(OLMO2, mixture=_olmoe),
    uses=COUNTS,
)

# ---- DeepSeek's routing --------------------------------------------------------------------------------------------------


def deepseek_v2_mixture(raw: Raw) -> MixtureConfig | None:
    """Softmax over all experts; with groups, only those in the best groups are chosen, a group being as good as its best."""
    if not any(layers := _deepseek_layers(raw)):
        return None
    groups = raw["n_group"] if raw["topk_method"] == "group_limited_greedy" else 1
    routing = Routing(
        _top(raw),
        normalised=False,
        scale=raw["routed_scaling_factor"],
        groups=groups,
        chosen_groups=raw["topk_group"] if groups > 1 else 1,
    )
    return _deepseek(raw, routing, layers)


def sigmoids_in_groups(raw: Raw) -> Routing:
    """Sigmoids; the choice adds a trained bias to them. A group is as good as its two best experts together."""
    return Routing(
        _top(raw),
        "sigmoid",
        normalised=raw["norm_topk_prob"],
        scale=raw["routed_scaling_factor"],
        groups=raw["n_group"],
        chosen_groups=raw["topk_group"],
        group_best=2,
        correction=True,
    )


def deepseek_v3_mixture(raw: Raw) -> MixtureConfig | None:
    if not any(layers := _deepseek_layers(raw)):
        return None
    return _deepseek(raw, sigmoids_in_groups(raw), layers)


def _deepseek_layers(raw: Raw) -> tuple[bool, ...]:
    """Which layers have a mixture: all but the first ones, if they are not listed."""
    kinds = raw.get("mlp_layer_types")
    if kinds is not None:
        return tuple(kind == "sparse" for kind in kinds)
    return tuple(layer >= raw["first_k_dense_replace"] for layer in range(raw["num_hidden_layers"]))


def _deepseek(raw: Raw, routing: Routing, layers: tuple[bool, ...]) -> MixtureConfig:
    """Shared experts are one, as wide as all together."""
    shared = raw["moe_intermediate_size"] * (raw["n_shared_experts"] or 0)
    count = next(raw[name] for name in ("n_routed_experts", "num_local_experts", "num_experts") if name in raw)
    return MixtureConfig(count, raw["moe_intermediate_size"], routing, () if all(layers) else layers, d_shared=shared)


DEEPSEEK_PARTS: dict[str, str | tuple[str, ...]] = {
    "mlp.router": "mlp.gate",
    "mlp.correction": "mlp.gate.e_score_correction_bias",
    "mlp.shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
"""the names of the mixture's parts; its experts are `STACKED`"""
DEEPSEEK_NAMES = replace(LLAMA_NAMES, parts={**LLAMA_NAMES.parts, **DEEPSEEK_PARTS}, experts=STACKED)
DOTS1 = replace(
    MISTRAL,
    names=DEEPSEEK_NAMES,
    reads={**reads_of(MISTRAL, windows=layer_windows, mixture=deepseek_v3_mixture), **BIASES},
    fixed={"qk_norm": True},
    uses=MISTRAL.uses | COUNTS,
    layer_types=True,
)
GLM4_MOE = replace(
    LLAMA,
    names=DEEPSEEK_NAMES,
    reads=reads_of(LLAMA, without=("out_bias", "mlp_bias"), mixture=deepseek_v3_mixture, qk_norm=Field("use_qk_norm", False)),
    uses=PARTIAL | COUNTS,
)


# ---- latent attention ------------------------------------------------------------------------------------------------
# The tables of DeepSeek-V2 and V3 and their relatives: latent attention, most with mixtures of experts.


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
    heads = _pairs_apart(config, rearrange(x, "(heads d) ... -> heads d ...", d=config.d_head))
    return rearrange(heads, "heads d ... -> (heads d) ...")


def _compressed(config: ModelConfig, x: Tensor) -> Tensor:
    """The latent, then the part of the keys that is rotated."""
    return _pairs_apart(config, x[None])[0]


def _by_head(config: ModelConfig, x: Tensor, values: bool) -> Tensor:
    """Keys or values of [heads * (keys + values), rank]: [heads, rank, outputs]"""
    keys = config.d_head - config.rotary_dim
    both = rearrange(x, "(heads d) rank -> heads rank d", heads=config.num_heads)
    return both[..., keys:] if values else both[..., :keys]


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
