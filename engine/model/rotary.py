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


def rotary_table(rope: Rope, rotary_dim: int, num_positions: int) -> Tensor:
    """cos and sin for every position: [num_positions, 2, rotary_dim / 2], float32.

    The angle is rounded to float32, as in transformers. cos and sin are computed in float64, so that an entry does not depend
    on the size of the table. The table is made on the CPU whatever the default device: on the meta device, torch would load
    its compiler for this, which takes seconds.
    """
    with modes.canonical():
        angle = torch.arange(num_positions, device="cpu").float()[:, None] * inverse_frequencies(rope, rotary_dim)[None, :]
        return torch.stack([angle.double().cos(), angle.double().sin()], dim=1).float()
