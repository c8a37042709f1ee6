"""Config fields that change what a model computes, and what becomes of one that a family does not read.

Transformers silently ignores a field that a family does not read: a Llama config with a `sliding_window` is computed without
one. The config then describes another model than the one that would be served. So it is refused by the field's name, unless
the field has a value that changes nothing.
"""

from typing import Any

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.family import Family

_OFF: tuple[Any, ...] = (None, False, 0)
_ONE: tuple[Any, ...] = (None, 1)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # attention
    "attention_bias": _OFF,
    "attention_chunk_size": _OFF,
    "attention_multiplier": _ONE,
    "attention_out_bias": _OFF,
    "attn_logit_softcapping": _OFF,
    "attn_scale": _ONE,
    "attn_temperature_tuning": _OFF,
    "add_cross_attention": _OFF,
    "alibi": _OFF,
    "clip_qkv": _OFF,
    "cross_attention_layers": (*_OFF, []),
    "is_causal": (None, True),
    "no_rope_layers": (*_OFF, []),
    "num_kv_shared_layers": _OFF,
    "qk_layernorm": _OFF,
    "qk_norm": _OFF,
    "qkv_bias": _OFF,
    "query_pre_attn_scalar": _OFF,
    "sliding_window": _OFF,
    "use_bidirectional_attention": _OFF,
    "use_qk_norm": _OFF,
    # positions
    "partial_rotary_factor": _ONE,
    "rope_interleave": _OFF,
    "rotary_dim": _OFF,
    "rotary_pct": _ONE,
    # MLP
    "mlp_bias": _OFF,
    "n_routed_experts": _OFF,
    "num_experts": _OFF,
    "num_local_experts": _OFF,
    # residual stream and logits
    "embedding_multiplier": _ONE,
    "final_logit_softcapping": _OFF,
    "is_encoder_decoder": _OFF,
    "lm_head_multiplier": _ONE,
    "logit_scale": _ONE,
    "logits_scaling": _ONE,
    "num_loops": _ONE,
    "parallel_attn": _OFF,
    "residual_multiplier": _ONE,
    "residual_scale": _ONE,
    "scale_depth": _ONE,
    "scale_emb": _ONE,
    "use_parallel_residual": _OFF,
}
"""the values of each field that change nothing"""

_ROPE_READS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "longrope": frozenset({"factor", "short_factor", "long_factor", "attention_factor"}),
    "yarn": frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}
_ROPE_NAMES = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"})
"""entries of `rope_parameters` that are allowed with every kind of scaling"""


def require_readable(raw: dict[str, Any], family: Family) -> None:
    """Raise UnsupportedModel, naming the first field that is set but not used by `family`."""
    used, name = family.used, str(raw.get("model_type"))
    for field, neutral in NEUTRAL.items():
        if field in used or field in family.only or raw.get(field) in neutral:
            continue
        if field == "sliding_window" and raw[field] >= raw.get("max_position_embeddings", 0):
            continue  # the window covers all positions
        _refuse(name, field, raw[field])
    for field, values in family.only.items():
        if raw.get(field) not in values:
            raise UnsupportedModel(
                f"{name} with {field} = {raw[field]!r} is not supported. Supported: {', '.join(map(repr, values))}."
            )
    for field, other in family.same.items():
        if raw.get(field) not in (None, raw[other]):
            raise UnsupportedModel(
                f"{name} with {field} = {raw[field]!r} is not supported. It must equal {other}: {raw[other]!r}."
            )
    quantised = raw.get("quantization_config")  # of a model in memory: folders are dequantised before
    if quantised and "gguf" not in str(quantised.get("quant_method")).lower():  # which transformers dequantises
        raise UnsupportedModel(
            f"The model in memory is quantised ({quantised!r:.120}). Give the folder of its checkpoint, or a model that is not."
        )
    ropes = raw.get("rope_parameters") or {}
    nested = {kind: each for kind, each in ropes.items() if isinstance(each, dict)}
    if nested and not family.nested_ropes:
        _refuse(name, "rope_parameters", ropes)
    for each in nested.values() if nested else (ropes,):
        _require_rope(each, name, used)


def require_described(raw: dict[str, Any], family: Family, config: ModelConfig) -> None:
    """Raise UnsupportedModel if the config describes layers or heads that the family does not have."""
    kinds = raw.get("layer_types")
    if kinds and not family.layer_types:
        has = ["sliding_attention" if config.window(layer) else "full_attention" for layer in range(config.num_layers)]
        if list(kinds) != has:
            _refuse(config.family, "layer_types", kinds)
    width = config.d_head if config.latent is None else config.rotary_dim  # of latent attention, the rotated part of a head
    if raw.get("head_dim") not in (None, 0, width):
        _refuse(config.family, "head_dim", raw["head_dim"])


def _require_rope(rope: dict[str, Any], family: str, used: frozenset[str]) -> None:
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_READS:
        return  # `read_rope` refuses it and lists the known kinds
    if "partial_rotary_factor" not in used and rope.get("partial_rotary_factor") not in _ONE:
        _refuse(family, "partial_rotary_factor", rope["partial_rotary_factor"])
    for name in rope.keys() - _ROPE_READS[kind] - _ROPE_NAMES - used:
        if rope[name] not in (*_ONE, *_OFF):
            _refuse(f"{family} with rope_type {kind!r}", name, rope[name])


def _refuse(family: str, name: str, value: Any) -> None:
    raise UnsupportedModel(
        f"The config sets {name} to {value!r}, but {family} does not compute with it. Transformers ignores the field, so "
        f"this is not the model that the config describes. Remove {name} from the config if that is intended."
    )
