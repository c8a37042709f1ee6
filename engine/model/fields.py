"""Config fields that change what a model computes, and which of them each family reads.

Transformers silently ignores a field that a family does not read: a Llama config with a `sliding_window` is computed without
one. The config then describes another model than the one that would be served. So it is refused by the field's name, unless
the field has a value that changes nothing.
"""

from typing import Any

from replaylens.engine.errors import UnsupportedModel

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

READS: dict[str, frozenset[str]] = {
    "llama": frozenset({"attention_bias", "mlp_bias"}),
    "mistral": frozenset({"sliding_window"}),
    "qwen2": frozenset({"attention_bias", "qkv_bias", "sliding_window"}),  # q, k and v always have biases
    "qwen3": frozenset({"attention_bias", "sliding_window"}),
    "gemma2": frozenset(
        {"attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window"}
    ),
    "gemma3_text": frozenset({"attention_bias", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window"}),
    "gpt2": frozenset(),
    "gpt_neox": frozenset({"attention_bias", "partial_rotary_factor", "rotary_pct", "use_parallel_residual"}),
}
"""the fields of the table above that the family's model in transformers uses"""

_LAYER_TYPES = ("qwen2", "qwen3", "gemma2", "gemma3_text")
"""families that read `layer_types`"""
_ROPE_READS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
_ROPE_NAMES = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"})
"""entries of `rope_parameters` that are allowed with every kind of scaling"""


def require_readable(raw: dict[str, Any], family: str) -> None:
    """Raise UnsupportedModel, naming the first field that is set but not used by `family`."""
    for name, neutral in NEUTRAL.items():
        if name in READS[family] or raw.get(name) in neutral:
            continue
        if name == "sliding_window" and raw[name] >= raw.get("max_position_embeddings", 0):
            continue  # the window covers all positions
        _refuse(family, name, raw[name])
    quantised = raw.get("quantization_config")
    if quantised and "gguf" not in str(quantised.get("quant_method")).lower():  # transformers dequantises GGUF files
        _refuse(family, "quantization_config", quantised)
    _require_layers(raw, family)
    ropes = raw.get("rope_parameters") or {}
    nested = {kind: each for kind, each in ropes.items() if isinstance(each, dict)}
    if nested and family != "gemma3_text":
        _refuse(family, "rope_parameters", ropes)
    for each in nested.values() if nested else (ropes,):
        _require_rope(each, family)


def _require_layers(raw: dict[str, Any], family: str) -> None:
    """Refuse layers of different kinds if the family does not have them."""
    kinds = set(raw.get("layer_types") or ())
    same = {"sliding_attention"} if family == "mistral" and raw.get("sliding_window") else {"full_attention"}
    if family not in _LAYER_TYPES and kinds - same:
        _refuse(family, "layer_types", raw["layer_types"])
    width = raw.get("head_dim")
    if family in ("gpt2", "gpt_neox") and width:
        heads = raw.get("num_attention_heads") or raw.get("n_head") or 1
        if width * heads != (raw.get("hidden_size") or raw.get("n_embd")):
            _refuse(family, "head_dim", width)


def _require_rope(rope: dict[str, Any], family: str) -> None:
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_READS:
        return  # `read_rope` refuses it and lists the known kinds
    if "partial_rotary_factor" not in READS[family] and rope.get("partial_rotary_factor") not in _ONE:
        _refuse(family, "partial_rotary_factor", rope["partial_rotary_factor"])
    for name in rope.keys() - _ROPE_READS[kind] - _ROPE_NAMES:
        if rope[name] not in (*_ONE, *_OFF):
            _refuse(f"{family} with rope_type {kind!r}", name, rope[name])


def _refuse(family: str, name: str, value: Any) -> None:
    raise UnsupportedModel(
        f"The config sets {name} to {value!r}, but {family} does not compute with it. Transformers ignores the field, so "
        f"this is not the model that the config describes. Remove {name} from the config if that is intended."
    )
