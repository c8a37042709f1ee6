"""Rotary position tables."""

import math
from functools import cached_property

import torch
from torch import Tensor

from replaylens.engine.model import modes
from replaylens.engine.model.config import Rope


class Rotary:
    """The rotations of one pass: a table over all positions, and the positions of the pass's rows."""

    def __init__(self, table: Tensor, positions: Tensor) -> None:
        self.table, self.positions = table, positions

    @cached_property
    def rows(self) -> Tensor:
        """cos and sin of every row: [rows, 2, rotary_dim / 2]"""
        return self.table[self.positions]

    @cached_property
    def turns(self) -> tuple[Tensor, Tensor]:
        """(cos, cos) and (-sin, sin) of every row, over the rotated dimensions of a head: [rows, 1, rotary_dim] each"""
        cos, sin = self.rows[:, None].unbind(2)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def inverse_frequencies(rope: Rope, rotary_dim: int) -> Tensor:
    """Angle per position for each pair of rotated dimensions: [rotary_dim / 2], float32."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").float() / rotary_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.scaling == "linear":
        return frequency / rope.factor
    if rope.scaling == "llama3":
        return _stretch_long_waves(frequency, rope)
    if rope.scaling == "yarn":
        return _blend_by_turns(frequency, rope, rotary_dim)
    if rope.scaling == "divided":
        return frequency / torch.tensor(rope.divisors, dtype=torch.float32, device="cpu")
    return frequency


def _stretch_long_waves(frequency: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1's rule: short waves stay, long waves are slowed by `factor`, waves in between are blended."""
    wavelength = 2 * math.pi / frequency
    longest = rope.original_positions / rope.low_freq_factor
    shortest = rope.original_positions / rope.high_freq_factor
    blend = (rope.original_positions / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequency / rope.factor + blend * frequency
    slowed = torch.where(wavelength > longest, frequency / rope.factor, frequency)
    return torch.where((wavelength <= longest) & (wavelength >= shortest), blended, slowed)


def _blend_by_turns(frequency: Tensor, rope: Rope, rotary_dim: int) -> Tensor:
    """YaRN's rule: waves that turn more than `beta_fast` times within the trained context stay, those that turn less than
    `beta_slow` times are slowed by `factor`, and a ramp over the dimensions blends the rest."""

    def dimension(turns: float) -> float:
        return rotary_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return frequency / rope.factor * (1 - kept) + frequency * kept


def rotary_table(rope: Rope, rotary_dim: int, num_positions: int) -> Tensor:
    """cos and sin for every position, times the rope's factor: [num_positions, 2, rotary_dim / 2], float32.

    The angle is rounded to float32, as in transformers. cos and sin are computed in float64, so that an entry does not depend
    on the size of the table. The table is made on the CPU whatever the default device: on the meta device, torch would load
    its compiler for this, which takes seconds.
    """
    with modes.canonical():
        angle = torch.arange(num_positions, device="cpu").float()[:, None] * inverse_frequencies(rope, rotary_dim)[None, :]
        return torch.stack([angle.double().cos(), angle.double().sin()], dim=1).mul_(rope.attention_factor).float()
