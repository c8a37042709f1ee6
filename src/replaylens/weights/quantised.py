"""Reads checkpoints whose weights are quantised, by the `quantization_config` of their config.

Weights become plain numbers as they are read; the model then computes like any other. Activations and KV stay in the engine's
dtype, also where the config describes how to quantise them.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.errors import BadConfig, BadWeights, UnsupportedModel
from replaylens.weights.source import Source

# ---- packed ----------------------------------------------------------------------------------------------------------
# Numbers of quantised weights: how each format packs them, and what they stand for.
#
# Every function returns float32 or bfloat16 [outputs, inputs], as a plain checkpoint would hold the weight. A product of a
# scale in float16 and a whole number of 8 bits is exact in float32; other products are rounded once.

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""the column that each four bits of an AWQ word hold, lowest bits first"""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""the values of four bits in MXFP4: sign, two bits of exponent, one of mantissa"""


def unpacked(words: Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> Tensor:
    """int32 words, each with 32 / bits whole numbers along `dim`, lowest bits first -> the numbers, as int16.

    order  where each of a word's numbers belongs; default: in order
    """
    count = 32 // bits
    out = torch.empty(*words.shape[: dim + 1], count, *words.shape[dim + 1 :], dtype=torch.int16)
    for i in range(count):
        place = order[i] if order else i
        out.select(dim + 1, place).copy_((words >> (bits * i)) & ((1 << bits) - 1))
    return out.flatten(dim, dim + 1)


def from_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, groups: Tensor, bits: int, zeros_less_one: bool) -> Tensor:
    """qweight [inputs / n, outputs], qzeros [groups, outputs / n], n numbers a word; scales [groups, outputs]; groups [inputs].

    zeros_less_one  zero points are stored less one (GPTQ's first format)
    """
    zeros = unpacked(qzeros, bits, 1) + int(zeros_less_one)
    return _scaled(unpacked(qweight, bits, 0), zeros, scales, groups)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs], groups [inputs]"""
    return _scaled(unpacked(qweight, 4, 1, AWQ_ORDER), unpacked(qzeros, 4, 1, AWQ_ORDER), scales, groups)


def _scaled(numbers: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """(numbers - zero of the group) * scale of the group, [inputs, outputs], transposed."""
    out, scales = torch.empty(numbers.shape, dtype=torch.float32), scales.float()
    for first in range(0, len(out), 1024):
        rows = slice(first, first + 1024)
        group = groups[rows].long()
        out[rows] = (numbers[rows] - zeros[group]).float() * scales[group]
    return out.T


def from_scaled(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """weight [outputs, inputs] in float8 or int8, times its scale: of the tensor, of each row, or of each block."""
    out, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return out.mul_(scale.reshape(()))
    if block is None:
        return out.mul_(scale.reshape(-1, 1))
    rows, columns = block
    for i, each in enumerate(scale):
        out[i * rows : (i + 1) * rows].mul_(each.repeat_interleave(columns)[: out.shape[1]])
    return out


def from_packed(packed: Tensor, scale: Tensor, inputs: int, group_size: int, bits: int) -> Tensor:
    """Symmetric numbers of compressed-tensors: packed [outputs, inputs / n], scale [outputs, groups]."""
    numbers = unpacked(packed, bits, 1)[:, :inputs] - (1 << (bits - 1))
    return numbers.float().mul_(scale.float().repeat_interleave(group_size, dim=1)[:, :inputs])


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [experts, outputs, groups, 16] of two numbers a byte, scales [experts, outputs, groups]: powers of two.

    Returns [experts, inputs, outputs] in bfloat16, which holds every such number exactly.
    """
    values = torch.tensor(FP4, dtype=torch.bfloat16)
    experts, outputs, groups, _ = blocks.shape
    out = torch.empty(experts, outputs, groups * 32, dtype=torch.bfloat16)
    for expert in range(experts):
        pairs = rearrange([blocks[expert] & 15, blocks[expert] >> 4], "two outputs groups n -> outputs groups (n two)")
        power = scales[expert].int() - 127
        out[expert] = torch.ldexp(values[pairs.long()].float(), power[..., None]).flatten(1)
    return rearrange(out, "experts outputs inputs -> experts inputs outputs")


# ---- quantised -------------------------------------------------------------------------------------------------------

WeightParts = dict[str, Tensor]
"""the tensors of one quantised weight, by the ends of their names"""
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_UNUSED = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale")
"""ends of the names of tensors that quantise activations and KV"""


@dataclass(frozen=True)
class Scheme:
    """One way of storing weights."""

    marks: tuple[str, ...]
    """a name with one of these ends tells that the weight is quantised"""
    parts: tuple[str, ...]
    """ends of the names of the other tensors of a weight"""
    optional: tuple[str, ...]
    decode: Callable[[WeightParts], Tensor]
    plain: str = ".weight"
    """end of the name of the plain weight"""
    how: str = ""
    """what makes the parts necessary, for errors"""


def dequantised(source: Source, config: dict[str, Any]) -> Source:
    """The plain weights of a quantised checkpoint. UnsupportedModel names a method or a value that is not supported."""
    scheme = _scheme(config)
    marks = {name.removesuffix(end): end for name in source.names for end in scheme.marks if name.endswith(end)}
    if not marks:
        raise UnsupportedModel(
            f"The config sets quantization_config to {config!r:.120}, but no weight is stored that way. Remove "
            "quantization_config from the config if the weights are plain."
        )
    _require_meant(config, marks)
    ends = (*scheme.marks, *scheme.parts, *scheme.optional)
    used = {module + end for module in marks for end in ends}
    weights = {module + scheme.plain: module for module in marks}

    def read(name: str) -> Tensor:
        if name not in weights:
            return source.read(name)
        module = weights[name]
        parts = {end: source.read(module + end) for end in ends if module + end in source.names}
        if missing := [end for end in (marks[module], *scheme.parts) if end not in parts]:
            raise BadWeights(
                f"{module} is quantised{scheme.how}, but {module}{missing[0]} is missing. Is the checkpoint complete?"
            )
        try:
            return scheme.decode(parts)
        except (ValueError, IndexError, RuntimeError) as e:
            shapes = ", ".join(f"{end[1:]} {x.dtype} {tuple(x.shape)}" for end, x in parts.items())
            raise BadWeights(f"{module} does not hold weights as its quantization_config says: {shapes} ({e}).") from e

    return Source(weights.keys() | {name for name in source.names - used if not name.endswith(_UNUSED)}, read)


def _require_meant(config: dict[str, Any], modules: Iterable[str]) -> None:
    """BadConfig if the config says of a quantised module that it is not quantised. Names match as in transformers: from the
    start up to a dot, as a regular expression, or as an end."""
    given = config.get("modules_to_not_convert")
    if given is None:
        return
    if not isinstance(given, list) or not all(isinstance(name, str) and name for name in given):
        raise _bad_field(config, "modules_to_not_convert", "a list of names of modules")
    try:
        begins = {name: re.compile(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in given}
    except re.error:
        raise _bad_field(config, "modules_to_not_convert", "a list of names, each a regular expression") from None
    for module in sorted(modules):
        if name := next((name for name in given if begins[name].match(module) or module.endswith(name)), None):
            raise BadConfig(
                f"The quantization_config says by modules_to_not_convert ({name!r}) that {module} is not quantised, but its "
                "weight is stored with scales. Remove the name from the config, or copy config and weights again."
            )


def _scheme(config: dict[str, Any]) -> Scheme:
    method = str(config.get("quant_method"))
    if method not in _METHODS:
        raise UnsupportedModel(
            f"Weights quantised by {method!r} are not supported. Supported: {', '.join(sorted(_METHODS))}, and GGUF files. "
            "Give a checkpoint in float16 or bfloat16."
        )
    return _METHODS[method](config)


def _require(config: dict[str, Any], field: str, default: Any, *values: Any) -> Any:
    """The value of a field, which must be one of `values`."""
    value = config.get(field)
    value = default if value is None else value.lower() if isinstance(value, str) else value
    if value not in values:
        raise UnsupportedModel(
            f"Weights quantised by {config.get('quant_method')!r} with {field} = {value!r} are not supported. Supported: "
            f"{', '.join(map(repr, values))}."
        )
    return value


def _group_size(config: dict[str, Any]) -> int | None:
    """The inputs that share a scale; None: all."""
    size = config.get("group_size")
    if size in (None, -1):
        return None
    if type(size) is not int or size < 1:
        raise _bad_field(config, "group_size", "a whole number above 0, or -1 for one group")
    return size


def _block(config: dict[str, Any], field: str) -> tuple[int, int] | None:
    """The rows and columns that share a scale; None: whole rows, or the whole weight."""
    block = config.get(field)
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise _bad_field(config, field, "two whole numbers above 0")
    return block[0], block[1]


def _object(config: dict[str, Any], field: str) -> dict[str, Any]:
    value = config.get(field)
    if value is not None and not isinstance(value, dict):
        raise _bad_field(config, field, "an object")
    return value or {}


def _bad_field(config: dict[str, Any], field: str, what: str) -> BadConfig:
    return BadConfig(
        f"The quantization_config of {config.get('quant_method')!r} has {field} = {config[field]!r:.120}. It must be {what}. "
        "Copy the config again from the model's source."
    )


def _gptq(config: dict[str, Any]) -> Scheme:
    bits = _require(config, "bits", None, 2, 4, 8)
    less_one = _require(config, "checkpoint_format", "gptq", "gptq", "gptq_v2") == "gptq"
    _require(config, "dynamic", {}, {})  # other bits for some modules
    size, ordered = _group_size(config), config.get("desc_act")
    if not isinstance(ordered, bool | None):
        raise _bad_field(config, "desc_act", "true or false")

    def decode(parts: WeightParts) -> Tensor:
        qweight, qzeros, scales = parts[".qweight"], parts[".qzeros"], parts[".scales"]
        inputs = qweight.shape[0] * (32 // bits)
        groups = parts.get(".g_idx", _groups(inputs, size, len(scales)))  # their number is checked either way
        _require_groups(groups, inputs, len(scales))
        if less_one and bool((unpacked(qzeros, bits, 1) == (1 << bits) - 1).any()):
            raise ValueError("a zero point is stored as the largest number, which readers of this format take for two things")
        return from_gptq(qweight, qzeros, scales, groups, bits, less_one)

    if ordered:  # inputs were sorted before they were grouped, so only g_idx tells their groups
        return Scheme((".qweight",), (".qzeros", ".scales", ".g_idx"), (), decode, how=" with desc_act = True")
    return Scheme((".qweight",), (".qzeros", ".scales"), (".g_idx",), decode)


def _awq(config: dict[str, Any]) -> Scheme:
    _require(config, "bits", None, 4)
    _require(config, "version", "gemm", "gemm")
    size = _group_size(config)

    def decode(parts: WeightParts) -> Tensor:
        qweight, scales = parts[".qweight"], parts[".scales"]
        groups = _groups(len(qweight), size, len(scales))
        return from_awq(qweight, parts[".qzeros"], scales, groups)

    return Scheme((".qweight",), (".qzeros", ".scales"), (), decode)


def _groups(inputs: int, size: int | None, count: int) -> Tensor:
    """The group of each input; `size` None: one group."""
    size = inputs if size is None else size
    _fits(-(-inputs // size) == count, f"{count} groups of {size} do not cover {inputs} inputs")
    return torch.arange(inputs) // size


def _require_groups(groups: Tensor, inputs: int, count: int) -> None:
    _fits(groups.dtype in (torch.int32, torch.int64), "g_idx is not of whole numbers")
    _fits(groups.shape == (inputs,), "g_idx has another size")
    low, high = (int(end) for end in groups.aminmax())
    _fits(low >= 0 and high < count, f"g_idx holds {low} to {high}, but there are {count} groups")


def _fp8(config: dict[str, Any]) -> Scheme:
    return _float8(_block(config, "weight_block_size"))


def _float8(block: tuple[int, int] | None) -> Scheme:
    def decode(parts: WeightParts) -> Tensor:
        weight = parts[".weight"]
        scale = next(parts[end] for end in (".weight_scale_inv", ".weight_scale") if end in parts)
        _fits(weight.dtype in _FLOAT8, "the weight is not in float8")
        _require_scale(weight, scale, block)
        return from_scaled(weight, scale, block)

    return Scheme((".weight_scale_inv", ".weight_scale"), (".weight",), (), decode)


def _require_scale(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> None:
    rows, columns = weight.shape
    by_row = ((rows,), (rows, 1))
    by_block = ((-(-rows // block[0]), -(-columns // block[1])),) if block else ()
    _fits(scale.numel() == 1 or tuple(scale.shape) in (by_block or by_row), "the scale has another shape")


def _compressed(config: dict[str, Any]) -> Scheme:
    """compressed-tensors, with one kind of weights."""
    _require(config, "transform_config", {}, {}, {"config_groups": {}})  # rotations of activations
    groups = [group for group in _object(config, "config_groups").values() if isinstance(group, dict)]
    kinds = [_object({**group, "quant_method": "compressed-tensors"}, "weights") for group in groups]
    if len(kinds) != 1:
        raise UnsupportedModel(f"compressed-tensors with {len(kinds)} groups of weights is not supported. Supported: one.")
    kind = {**kinds[0], "quant_method": "compressed-tensors"}
    form = _require(config, "format", None, "float-quantized", "int-quantized", "pack-quantized")
    _require(kind, "symmetric", True, True)
    _require(kind, "actorder", None, None, False, "weight", "static")  # "group" permutes inputs
    if form == "float-quantized":
        _require(kind, "num_bits", None, 8)
        return _float8(_block(kind, "block_structure"))
    if form == "int-quantized":
        _require(kind, "num_bits", None, 8)
        return Scheme((".weight_scale",), (".weight",), (".weight_zero_point",), _from_int8)
    bits, group_size = _require(kind, "num_bits", None, 4, 8), _group_size(kind)

    def decode(parts: WeightParts) -> Tensor:
        (rows, inputs), scale = parts[".weight_shape"].tolist(), parts[".weight_scale"]
        size = inputs if group_size is None else group_size
        _fits(tuple(scale.shape) == (rows, -(-inputs // size)), "the scale has another shape")
        _require_no_zero(parts)
        return from_packed(parts[".weight_packed"], scale, inputs, size, bits)

    return Scheme((".weight_packed",), (".weight_scale", ".weight_shape"), (".weight_zero_point",), decode)


def _from_int8(parts: WeightParts) -> Tensor:
    weight, scale = parts[".weight"], parts[".weight_scale"]
    _fits(weight.dtype == torch.int8, "the weight is not in int8")
    _require_scale(weight, scale, None)
    _require_no_zero(parts)
    return from_scaled(weight, scale, None)


def _require_no_zero(parts: WeightParts) -> None:
    zero = parts.get(".weight_zero_point")
    _fits(zero is None or not bool(zero.any()), "the zero points of a symmetric scheme are not 0")


def _mxfp4(config: dict[str, Any]) -> Scheme:
    return Scheme(("_blocks",), ("_scales",), (), lambda parts: from_mxfp4(parts["_blocks"], parts["_scales"]), "")


def _fits(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


_METHODS: dict[str, Callable[[dict[str, Any]], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": lambda config: _float8(None),
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}
