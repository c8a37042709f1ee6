"""The parts of a decoder below its blocks: products, norms, rotary tables, experts. `Ops` computes them."""

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from replaylens.engine.model import modes
from replaylens.engine.model.config import NormKind, Rope
from replaylens.kernels.definition import logarithm, power, turn

if TYPE_CHECKING:
    from replaylens.kernels.cpu import Panels

# ---- layers ----------------------------------------------------------------------------------------------------------
# The parts of a decoder that hold weights: products and norms. How they are computed is for `Ops` to say.


class Linear(nn.Module):
    """A product with a weight stored [inputs, outputs], the fastest layout for CPU libraries at few rows."""

    weight: Tensor
    bias: Tensor | None
    panels: "Panels | None" = None
    """the weight in the order in which a CPU reads it, in its place"""
    narrow: Tensor | None = None
    """the weight in bfloat16, which a GPU reads in its place"""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=torch.float32)) if bias else None

    def pack(self) -> None:
        """Mutates: from now on only panels are held, or on a GPU the weight in bfloat16 if that loses nothing. `weight` is then
        a copy that is made anew each time."""
        if "weight" not in self._parameters:
            return
        if self.weight.is_cuda:
            self.narrow = exact_narrow(self.weight)
        else:
            from replaylens.kernels.cpu import Panels  # loads a compiler

            self.panels = Panels.of(self.weight)
        if self.packed:
            del self._parameters["weight"]

    @property
    def packed(self) -> bool:
        """Whether the weight is held as products read it."""
        return self.panels is not None or self.narrow is not None

    @property
    def stored(self) -> Tensor:
        """The weight as a GPU's products read it."""
        return self.weight if self.narrow is None else self.narrow

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.panels is not None:
            return self.panels.weight()
        if name == "weight" and self.narrow is not None:
            return self.narrow.float()
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packed:
            destination[prefix + "weight"] = self.weight


def exact_narrow(weight: Tensor) -> Tensor | None:
    """The weight in bfloat16; None if that would round a number."""
    narrow = weight.detach().to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else None


class HeadLinear(nn.Module):
    """A product for each head, with weights stored [heads, inputs, outputs]."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, inputs, outputs, dtype=torch.float32))


class Norm(nn.Module):
    """The weights of an RMSNorm or LayerNorm over the last dimension."""

    bias: Tensor | None

    def __init__(self, shape: int | tuple[int, int], kind: NormKind, eps: float, bias: bool = True) -> None:
        """shape  the width, or (heads, width): each head is normed on its own and has its own weights
        bias   whether a LayerNorm has one"""
        super().__init__()
        self.kind = kind
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(shape, dtype=torch.float32)) if kind == "layer" and bias else None

    @property
    def by_head(self) -> bool:
        """Whether each head has its own weights."""
        return self.weight.dim() > 1


# ---- rotary ----------------------------------------------------------------------------------------------------------
# Rotary position tables.


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
    frequency = 1.0 / torch.tensor([power(rope.theta, x) for x in exponent.tolist()], dtype=torch.float32, device="cpu")
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
        return rotary_dim * logarithm(rope.original_positions / (turns * 2 * math.pi)) / (2 * logarithm(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return frequency / rope.factor * (1 - kept) + frequency * kept


def rotary_table(rope: Rope, rotary_dim: int, num_positions: int) -> Tensor:
    """cos and sin for every position, times the rope's factor: [num_positions, 2, rotary_dim / 2], float32.

    The angle is rounded to float32, as in transformers. cos and sin are computed in float64 by `turn`. The table is made on the
    CPU whatever the default device: on the meta device, torch would load its compiler for this, which takes seconds.
    """
    with modes.canonical():
        frequency = inverse_frequencies(rope, rotary_dim)
        table = torch.empty(num_positions, 2, len(frequency), dtype=torch.float32, device="cpu")
        for first in range(0, num_positions, _TOGETHER):
            place = torch.arange(first, min(num_positions, first + _TOGETHER), device="cpu").float()
            cos, sin = turn((place[:, None] * frequency[None, :]).double().numpy())
            table[first : first + len(place), 0] = torch.from_numpy(cos * rope.attention_factor)
            table[first : first + len(place), 1] = torch.from_numpy(sin * rope.attention_factor)
        return table


_TOGETHER = 512
"""positions whose angles are computed together, so that they stay in the processor's cache"""


# ---- experts ---------------------------------------------------------------------------------------------------------
# `Experts`: the weights of one layer's experts, and the product of rows with the experts that they are routed to.

Product = Callable[[Tensor, Tensor], Tensor]
"""x [any number of rows, inputs] times a weight [inputs, outputs] -> [rows, outputs]"""


class Experts(nn.Module):
    """One layer's experts, stacked. Weights are stored [inputs, outputs], as those of `Linear`."""

    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(self, count: int, d_model: int, d_expert: int, gated: bool, bias: bool) -> None:
        """gated  `up` holds gate | up, as that of an MLP"""
        super().__init__()
        self.gated = gated
        wide = d_expert * (2 if gated else 1)
        self.up = nn.Parameter(torch.empty(count, d_model, wide, dtype=torch.float32))
        self.down = nn.Parameter(torch.empty(count, d_expert, d_model, dtype=torch.float32))
        self.up_bias = nn.Parameter(torch.empty(count, wide, dtype=torch.float32)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, d_model, dtype=torch.float32)) if bias else None


def by_expert(chosen: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The chosen experts [rows, top] in order: (expert, its places among rows * top, ascending)."""
    experts, counts = chosen.unique(return_counts=True)
    places = chosen.flatten().argsort(stable=True)
    yield from zip(experts.tolist(), places.split(counts.tolist()), strict=True)


def expert_products(x: Tensor, chosen: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Every row times the weights of its chosen experts: [rows, top, outputs].

    x       [rows, inputs], or [rows, top, inputs] with inputs of their own for each expert
    chosen  [rows, top]
    weight  [experts, inputs, outputs], bias [experts, outputs]
    """
    rows, top = chosen.shape
    pairs = x.flatten(0, 1) if x.dim() == 3 else None
    out = x.new_zeros(rows * top, weight.shape[-1])
    for expert, places in by_expert(chosen):
        own = x[places // top] if pairs is None else pairs[places]
        found = product(own, weight[expert])
        out[places] = found if bias is None else found + bias[expert]
    return out.view(rows, top, -1)
