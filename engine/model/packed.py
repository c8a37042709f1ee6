"""Numbers of quantised weights: how each format packs them, and what they stand for.

Every function returns float32 or bfloat16 [outputs, inputs], as a plain checkpoint would hold the weight. A product of a scale
in float16 and a whole number of 8 bits is exact in float32; other products are rounded once.
"""

import torch
from torch import Tensor

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
        pairs = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], dim=-1).flatten(1).view(outputs, groups, 32)
        power = scales[expert].int() - 127
        out[expert] = torch.ldexp(values[pairs.long()].float(), power[..., None]).view(outputs, -1)
    return out.transpose(1, 2)
