"""`Family`: an architecture of transformers as a table: how its config names our fields, and how it names its tensors.

What a family computes is said by `ModelConfig`; which tensors it has follows from that. So a table holds names, the fixed
part of the wiring, and the few functions that rearrange a tensor.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from replaylens.engine.errors import MissingTensor, UnsupportedModel, no_such
from replaylens.engine.model.config import Activation, ModelConfig, Rope
from replaylens.engine.model.decoder import Block
from replaylens.engine.model.layers import Experts, HeadLinear, Linear, Norm

# ---- expert names ----------------------------------------------------------------------------------------------------
# `ExpertNames`: the names of a family's experts, stacked in one tensor or stored one by one, and how they are read.


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Where the tensors of a layer's experts are, after the beginning of the layer's names."""

    stacked: Mapping[str, str]
    """our parameter (up, down, up_bias, down_bias) -> theirs, [experts, ...], as transformers holds it in memory"""
    each: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """our parameter -> theirs with {} for the number of the expert, to be joined, as older checkpoints store it"""
    transposed: bool = True
    """products are stored [outputs, inputs]; we store [inputs, outputs]"""
    interleaved: bool = False
    """gate and up take turns; we store gate | up"""

    def read(self, name: str, count: int, begin: str, get: Callable[[str], Tensor]) -> Tensor:
        """One of our parameters, of all experts."""
        x = self._stacked(name, count, begin, get)
        if self.transposed and x.dim() == 3:
            x = x.transpose(1, 2)
        if self.interleaved and name.startswith("up"):
            x = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
        return x

    def _stacked(self, name: str, count: int, begin: str, get: Callable[[str], Tensor]) -> Tensor:
        try:
            return get(begin + self.stacked[name])
        except MissingTensor:
            if name not in self.each:
                raise
            parts = self.each[name]
        joined = [[get(f"{begin}{part.format(expert)}.weight") for part in parts] for expert in range(count)]
        return torch.stack([pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in joined])


def respelled(get: Callable[[str], Tensor], spellings: tuple[tuple[str, str], ...]) -> Callable[[str], Tensor]:
    """As `get`; a tensor that is missing is looked for under its other names: (part of a name, what stands there instead)."""

    def find(name: str) -> Tensor:
        try:
            return get(name)
        except MissingTensor:
            for here, there in spellings:
                if here in name:
                    return get(name.replace(here, there))
            raise

    return find if spellings else get


# ---- family ----------------------------------------------------------------------------------------------------------

Raw = dict[str, Any]
"""a Hugging Face config"""
Get = Callable[[str], Tensor]
"""the source tensor of a Hugging Face name"""
Tensors = dict[str, Tensor]


class Sink(Protocol):
    """Where tensors go, by our names: a dictionary, or the decoder that they fill."""

    def __setitem__(self, name: str, x: Tensor, /) -> None: ...


Arrange = Callable[[ModelConfig, Tensor], Tensor]
"""a source tensor (weights: [outputs, inputs], biases: [outputs]) -> the same in our order of outputs. Of products by head:
[heads, inputs, outputs]"""

_REQUIRED = object()
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_FIELDS = tuple(f.name for f in fields(ModelConfig))
_FLAGS = frozenset(f.name for f in fields(ModelConfig) if isinstance(f.default, bool))


@dataclass(frozen=True)
class Field:
    """A field of a Hugging Face config."""

    name: str
    otherwise: Any = _REQUIRED
    """the value if the config lacks the field or holds None"""

    def read(self, raw: Raw) -> Any:
        value = raw[self.name] if self.otherwise is _REQUIRED else raw.get(self.name)
        return self.otherwise if value is None and self.otherwise is not _REQUIRED else value


ReadField = str | Field | Callable[[Raw], Any]
"""how a field of `ModelConfig` is read: a field that must be there, one that may be missing, or a function of the config"""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a family's tensors, without `.weight` and `.bias`."""

    embed: str
    final_norm: str
    """empty: the norm has no weights"""
    block: str
    """the beginning of all names of a layer, with {} for its number"""
    parts: Mapping[str, str | tuple[str, ...]]
    """our module within a block -> theirs, or theirs to be joined, in our order of outputs. Empty: a norm without weights.
    With {}: one norm for each head. A parameter of its own (attn.sinks) -> theirs, or theirs and the parts that it is stored
    in elsewhere"""
    pos_embed: str = ""
    pos_offset: int = 0
    """rows of the table of positions before that of position 0"""
    embed_norm: str = ""
    """a LayerNorm of the embedding, which is applied to the table once (BLOOM)"""
    head: str = "lm_head"
    transposed: bool = True
    """products are stored [outputs, inputs]; we store [inputs, outputs]"""
    experts: ExpertNames | None = None
    """the names of a mixture's experts"""
    spellings: tuple[tuple[str, str], ...] = ()
    """(part of a name, what stands there in files of older versions)"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of transformers."""

    names: Names
    reads: Mapping[str, ReadField]
    """field of `ModelConfig` -> where its value comes from"""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """field of `ModelConfig` -> its value in every model of the family"""
    uses: frozenset[str] = frozenset()
    """config fields that the model computes with and that `reads` does not name"""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """config fields that transformers computes with -> the values for which we compute the same"""
    same: Mapping[str, str] = field(default_factory=dict)
    """config fields that transformers computes with -> the field whose value they must have"""
    layer_types: bool = False
    """`layer_types` says which layers have a window"""
    nested_ropes: bool = False
    """`rope_parameters` may hold one rotary embedding for each kind of layer"""
    norm_offset: float = 0.0
    """what is added to stored norm weights"""
    plain_norms: frozenset[str] = frozenset()
    """norms of a block to whose weights nothing is added"""
    arrange: Mapping[str, Arrange] = field(default_factory=dict)
    """our module -> how its source tensor is rearranged"""
    renamed: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    """names of parts that depend on the config"""
    later_layers: bool = False
    """checkpoints may hold layers after the last one, which guess further tokens and which transformers leaves out"""
    left_out: tuple[str, ...] = ()
    """beginnings of the names of other tensors that transformers leaves out"""

    def __post_init__(self) -> None:
        """UnsupportedModel names an entry that no model would ever use: a misspelt one would silently change nothing."""
        for name in (*self.reads, *self.fixed):
            if name not in _FIELDS:
                raise UnsupportedModel(f"A table of a family sets {no_such('field of ModelConfig', name, _FIELDS)}")

    @property
    def used(self) -> frozenset[str]:
        """All config fields that the model computes with, as far as the table says."""
        named = {read if isinstance(read, str) else read.name for read in self.reads.values() if isinstance(read, str | Field)}
        return self.uses | named

    def config(self, raw: Raw) -> ModelConfig:
        """The config in our terms. KeyError names a missing field."""
        values: dict[str, Any] = {"family": raw["model_type"], **self.fixed}
        for name, read in self.reads.items():
            value = Field(read).read(raw) if isinstance(read, str) else read.read(raw) if isinstance(read, Field) else read(raw)
            values[name] = bool(value) if name in _FLAGS else activation(value) if name == "activation" else value
        return ModelConfig(**values)

    def tensors(self, config: ModelConfig, get: Get) -> Tensors:
        """All tensors that a decoder of `config` has, by our names."""
        out: Tensors = {}
        self.fill(config, get, out)
        return out

    def fill(self, config: ModelConfig, get: Get, out: Sink) -> None:
        """Mutates: set all tensors that a decoder of `config` has in `out`, by our names, one after the other."""
        names, parts = self.names, {**self.names.parts, **self.renamed(config)}
        for name in (*self.arrange, *sorted(self.plain_norms)):
            self._part(config, parts, name)
        get = respelled(get, names.spellings)
        embed = get(f"{names.embed}.weight")
        if names.embed_norm:
            weight, bias = (get(f"{names.embed_norm}.{end}").float() for end in ("weight", "bias"))
            embed = F.layer_norm(embed.float(), (config.d_model,), weight, bias, config.norm_eps)
        out["embed"] = embed
        del embed  # it may be a large part of all weights
        if config.learned_positions:
            out["pos_embed"] = get(f"{names.pos_embed}.weight")[names.pos_offset :]
        if not config.tied_embeddings:
            out["unembed.weight"] = get(f"{names.head}.weight").T
        if config.unembed_bias:
            out["unembed_bias"] = get(f"{names.head}.bias")
        with torch.device("meta"):
            blocks = [Block(config, layer) for layer in range(config.num_layers)]  # some may have a mixture
            final = Norm(config.d_model, config.norm, config.norm_eps, config.norm_bias)
        for end, like in final.named_parameters():
            out[f"ln_final.{end}"] = self._norm(names.final_norm, end, like, get)
        for number, layer in enumerate(config.holders):
            block, begin = blocks[layer], names.block.format(number)
            for name, like in block.named_parameters():
                part, _, end = name.rpartition(".")
                module = block.get_submodule(part)
                if not isinstance(module, Linear | HeadLinear | Norm):
                    out[f"blocks.{layer}.{name}"] = self._single(config, block, name, begin, get)
                    continue
                theirs = self._part(config, parts, part)
                if isinstance(module, Linear | HeadLinear):
                    pieces = [get(f"{begin}{each}.{end}") for each in ((theirs,) if isinstance(theirs, str) else theirs)]
                    x = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                else:
                    assert isinstance(theirs, str)  # norms are not joined
                    x = self._norm(theirs and begin + theirs, end, like, get, part in self.plain_norms)
                if part in self.arrange:
                    x = self.arrange[part](config, x)
                is_weight = isinstance(module, Linear) and end == "weight"
                out[f"blocks.{layer}.{name}"] = x.T if is_weight and names.transposed else x

    def unused(self, num_layers: int, unread: list[str]) -> list[str]:
        """The names of tensors that were not read, and that the family does not leave out on purpose. num_layers: with any"""
        unread = [name for name in unread if not name.startswith(self.left_out)]
        if not self.later_layers:
            return unread
        first, last = self.names.block.split("{}")
        later = re.compile(rf"{re.escape(first)}(\d+){re.escape(last)}")
        layer = lambda name: int(found[1]) if (found := later.match(name)) else -1  # noqa: E731
        return [name for name in unread if layer(name) < num_layers]

    @staticmethod
    def _part(config: ModelConfig, parts: Mapping[str, str | tuple[str, ...]], name: str) -> str | tuple[str, ...]:
        if name not in parts:
            raise UnsupportedModel(f"The table of the family {config.family!r}: {no_such('part', name, parts)}")
        return parts[name]

    def _single(self, config: ModelConfig, block: Block, name: str, begin: str, get: Get) -> Tensor:
        """A parameter that is neither of a product nor of a norm."""
        part, _, end = name.rpartition(".")
        module = block.get_submodule(part)
        if isinstance(module, Experts):
            assert self.names.experts is not None  # a family with mixtures names them
            return self.names.experts.read(end, len(module.up), begin, get)
        theirs = self._part(config, self.names.parts, name)
        whole, *pieces = (theirs,) if isinstance(theirs, str) else theirs
        try:
            x = get(begin + whole)
        except MissingTensor:
            if not pieces:
                raise
            x = torch.cat([get(begin + piece) for piece in pieces])
        return x if name not in self.arrange else self.arrange[name](config, x)

    def _norm(self, theirs: str, end: str, like: Tensor, get: Get, plain: bool = False) -> Tensor:
        """The weights or biases of a norm, of the shape of `like`."""
        if not theirs:
            return (
                torch.ones(like.shape, dtype=torch.float32) if end == "weight" else torch.zeros(like.shape, dtype=torch.float32)
            )
        each = [theirs.format(head) for head in range(len(like))] if "{}" in theirs else [theirs]
        x = get(f"{theirs}.{end}") if each == [theirs] else torch.stack([get(f"{name}.{end}") for name in each])
        return self.norm_offset + x.float() if self.norm_offset and end == "weight" and not plain else x


def activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"The activation {name!r} is not supported. Known: {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[name]


# ---- raw fields ------------------------------------------------------------------------------------------------------
# Values of `ModelConfig` that a Hugging Face config says in several fields: widths, rotary embeddings, windows.


def head_width(raw: Raw) -> int:
    """The width of a head, which may differ from d_model / heads."""
    return raw.get("head_dim") or split_width(raw)


def split_width(raw: Raw) -> int:
    """The width of a head in a family that divides d_model between its heads."""
    width: int = raw["hidden_size"] // raw["num_attention_heads"]
    return width


def rotary_width(raw: Raw) -> int:
    """The number of rotated dimensions per head."""
    return int(head_width(raw) * _ropes(raw)[0].get("partial_rotary_factor", 1.0))


def main_rope(raw: Raw) -> Rope:
    """The rotary embedding of layers that see all positions."""
    return read_rope(_ropes(raw)[0], raw["max_position_embeddings"])


def local_rope(raw: Raw) -> Rope | None:
    """The rotary embedding of layers with a window, if the config has one of its own."""
    local = _ropes(raw)[1]
    return None if local is None else read_rope(local, raw["max_position_embeddings"])


def _ropes(raw: Raw) -> tuple[Raw, Raw | None]:
    ropes = raw.get("rope_parameters") or {}
    return (ropes["full_attention"], ropes["sliding_attention"]) if "full_attention" in ropes else (ropes, None)


def positions(raw: Raw) -> int:
    """The longest sequence. With LongRoPE, that of the short factors: longer ones would turn every earlier key anew."""
    longest: int = raw["max_position_embeddings"]
    ropes = [rope for rope in _ropes(raw) if rope is not None]
    short = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return min([longest, *short])


def read_rope(raw: dict[str, Any], longest: int = 0) -> Rope:
    """A Hugging Face `rope_parameters` entry. `longest`: the config's number of positions."""
    kind, theta = raw.get("rope_type", "default"), raw["rope_theta"]
    match kind:
        case "default" | "dynamic":  # dynamic scaling starts beyond the longest sequence, where nothing is computed here
            return Rope(theta=theta)
        case "linear":
            return Rope(theta=theta, scaling="linear", factor=raw["factor"])
        case "llama3":
            return Rope(
                theta=theta,
                scaling="llama3",
                factor=raw["factor"],
                low_freq_factor=raw["low_freq_factor"],
                high_freq_factor=raw["high_freq_factor"],
                original_positions=raw["original_max_position_embeddings"],
            )
        case "yarn":
            return _yarn(raw, longest)
        case "longrope":
            return _longrope(raw, longest)
    known = "default, dynamic, linear, llama3, longrope, yarn"
    raise UnsupportedModel(f"The rotary scaling {kind!r} is not supported. Known: {known}.")


def alpha_rope(raw: Raw) -> Rope:
    """HunYuan's: dynamic scaling with an `alpha` is a larger base at every length."""
    rope = raw["rope_parameters"]
    if rope.get("rope_type") != "dynamic" or not rope.get("alpha"):
        return main_rope(raw)
    width = head_width(raw)
    return Rope(theta=rope["rope_theta"] * rope["alpha"] ** (width / (width - 2)))


def grown_by_yarn(factor: float, by: float) -> float:
    """What YaRN multiplies queries and keys with, for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def _yarn(raw: dict[str, Any], longest: int) -> Rope:
    original = raw["original_max_position_embeddings"]
    factor = longest / original if raw["factor"] is None else raw["factor"]
    by, by_all = raw.get("mscale"), raw.get("mscale_all_dim")
    usual = grown_by_yarn(factor, by) / grown_by_yarn(factor, by_all) if by and by_all else grown_by_yarn(factor, 1)
    truncate = raw.get("truncate")
    return Rope(
        theta=raw["rope_theta"],
        scaling="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=float(raw.get("beta_fast") or 32),
        beta_slow=float(raw.get("beta_slow") or 1),
        truncate=True if truncate is None else truncate,
        attention_factor=usual if raw.get("attention_factor") is None else raw["attention_factor"],
    )


def _longrope(raw: dict[str, Any], longest: int) -> Rope:
    original = raw["original_max_position_embeddings"]
    factor = longest / original if raw.get("factor") is None else raw["factor"]
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    given = raw.get("attention_factor")
    divisors = tuple(float(x) for x in raw["short_factor"])
    return Rope(
        theta=raw["rope_theta"],
        scaling="divided",
        divisors=divisors,
        original_positions=original,
        attention_factor=usual if given is None else given,
    )


def one_window(raw: Raw) -> tuple[int, ...]:
    """One window for all layers."""
    window = raw.get("sliding_window") or 0
    return (window,) * raw["num_hidden_layers"] if window else ()


def layer_windows(raw: Raw) -> tuple[int, ...]:
    """A window for each layer that `layer_types` says has one."""
    window = raw.get("sliding_window") or 0
    kinds = raw.get("layer_types")
    if kinds is None:
        return one_window(raw)
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"The attention kinds {sorted(unknown)} are not supported.")
    if not window and (local := [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]):
        raise UnsupportedModel(
            f"layer_types has sliding_attention at layers {local}, but sliding_window is {raw.get('sliding_window')!r}. "
            "Set the window, or layer_types to full_attention."
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def clip_qkv(raw: Raw) -> float:
    """The bound of q, k and v; 0: none. transformers takes every number for a bound, also 0."""
    value = raw.get("clip_qkv")
    if value is not None and not value > 0:
        raise UnsupportedModel(
            f"{raw.get('model_type')} with clip_qkv = {value!r} is not supported. Supported: None, and numbers above 0."
        )
    return value or 0.0


# ---- fields ----------------------------------------------------------------------------------------------------------
# Config fields that change what a model computes, and what becomes of one that a family does not read.
#
# Transformers silently ignores a field that a family does not read: a Llama config with a `sliding_window` is computed
# without one. The config then describes another model than the one that would be served. So it is refused by the field's
# name, unless the field has a value that changes nothing.

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
    for key, neutral in NEUTRAL.items():
        if key in used or key in family.only or raw.get(key) in neutral:
            continue
        if key == "sliding_window" and raw[key] >= raw.get("max_position_embeddings", 0):
            continue  # the window covers all positions
        _refuse(name, key, raw[key])
    for key, values in family.only.items():
        if raw.get(key) not in values:
            raise UnsupportedModel(
                f"{name} with {key} = {raw[key]!r} is not supported. Supported: {', '.join(map(repr, values))}."
            )
    for key, other in family.same.items():
        if raw.get(key) not in (None, raw[other]):
            raise UnsupportedModel(f"{name} with {key} = {raw[key]!r} is not supported. It must equal {other}: {raw[other]!r}.")
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
