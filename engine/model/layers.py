"""The parts of a decoder below its blocks: products, norms, rotary tables, experts. `Ops` computes them."""

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from replaylens.engine.errors import BadConfig, BadWeights
from replaylens.engine.model import modes
from replaylens.engine.model.config import NormKind, Rope
from replaylens.kernels.definition import logarithm, power, turn

# ---- frozen ----------------------------------------------------------------------------------------------------------
# The weights of an engine do not change: its fingerprint names them, and its caches hold what was computed with them. A change
# is refused where it is made, or at the next request.


def refuse_change() -> NoReturn:
    raise BadWeights(
        "The weights of an engine were changed, or were to be. Its fingerprint, its cached prompts and its packed products are "
        "those of the weights that it was loaded with. Change them in the source, e.g. the transformers model, and call "
        "Engine.load on it; to change activations, use edits."
    )


class ReadOnly(Tensor):
    """A view or a copy of a frozen weight: an op that would change it is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        changes = name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
        own_target = isinstance(args[0] if args else None, cls) and name != "requires_grad_"
        if (changes and own_target) or isinstance(kwargs.get("out"), cls):
            refuse_change()
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            own = [x.untyped_storage().data_ptr() for x in args if isinstance(x, cls)]
            same = isinstance(out, Tensor) and out.device.type != "meta" and out.untyped_storage().data_ptr() in own
            return out.as_subclass(cls) if same else out


class FrozenWeight(nn.Parameter):
    """A weight of an engine. In-place ops are found by their count; `data` would hide them from it, so it is read-only."""

    @property
    def data(self) -> Tensor:
        return self.detach().as_subclass(ReadOnly)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # as in model.to("cpu")
            refuse_change()


class FrozenWeights:
    """All weights of a model, and whether they are still those. What a module computes must not change either: no hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._held = [(m._parameters, self._seen(m._parameters)) for m in self._modules if m._parameters or is_packed(m)]

    @staticmethod
    def _seen(weights: dict[str, Any]) -> list[tuple[int, int]]:
        return [(id(x), 0 if x is None or x.is_inference() else x._version) for x in weights.values()]

    def require_unchanged(self) -> None:
        """BadWeights if a weight was replaced or changed in place, or if a hook or another `forward` would change what a module
        computes."""
        if any(self._seen(weights) != seen for weights, seen in self._held):
            refuse_change()
        if _global_forward_hooks or _global_forward_pre_hooks or any(_hooked(module) for module in self._modules):
            raise BadWeights(
                "A module of an engine has a hook, or another `forward`, or torch has a hook on all modules. The engine would "
                "compute something else than its fingerprint says. Remove it; to change activations, use edits, and to read "
                "them, sites."
            )


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def freeze(model: nn.Module) -> None:
    """Mutates: the weights can no longer be changed. Precondition: nobody else holds the model."""
    for module in model.modules():
        for name, x in module._parameters.items():
            if x is not None:
                module._parameters[name] = FrozenWeight(x.detach(), requires_grad=False)


# ---- layers ----------------------------------------------------------------------------------------------------------
# The parts of a decoder that hold weights: products and norms. How they are computed is for `Ops` to say.


class Narrow:
    """A float32 weight on a GPU, stored in bfloat16, which loses nothing."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def of(cls, weight: Tensor) -> "Narrow | None":
        """None if a number would be rounded."""
        tensor = weight.detach().to(torch.bfloat16)
        return cls(tensor) if torch.equal(tensor.to(weight.dtype), weight) else None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def weight(self, turned: bool = False) -> Tensor:
        return (self.tensor.mT if turned else self.tensor).float()

    def pieces(self, turned: bool = False) -> Iterator[Tensor]:
        yield self.weight(turned)


class Elsewhere:
    """A weight that is not held here alone: among a module's packed weights, it says how its products are computed."""

    def ops(self, kind: Any, fast: bool) -> Any:
        """A class of ops like `kind` that knows such weights. fast: of the fast path"""
        raise NotImplementedError


def elsewhere(model: nn.Module) -> Elsewhere | None:
    """A weight of the model that is not held here alone; None: all are."""
    held = (each for module in model.modules() if isinstance(module, Packable) for each in module.panels.values())
    return next((each for each in held if isinstance(each, Elsewhere)), None)


class Packable(nn.Module):
    """A module that may hold weights as products read them, in their place: in panels on a CPU, in bfloat16 on a GPU."""

    turned: tuple[str, ...] = ()
    """weights that are stored [outputs, inputs]"""

    def __init__(self) -> None:
        super().__init__()
        self.panels: dict[str, Any] = {}

    def pack(self, name: str, weight: Tensor | None = None) -> bool:
        """Mutates: from now on a weight is held only as products read it, and its attribute is a copy that is made anew each
        time. Returns False for a GPU's weight that bfloat16 would round: it stays as it is.

        weight  as the attribute has it; default: the module's own
        """
        if name in self.panels:
            return True
        given = self.as_multiplied(name, getattr(self, name) if weight is None else weight)
        if given.is_cuda:
            held: Any = Narrow.of(given)
        else:
            from replaylens.kernels.cpu import Panels  # loads a compiler

            held = Panels.of(given)
        if held is not None:
            self.panels[name] = held
            del self._parameters[name]
        return held is not None

    def stored(self, name: str = "weight") -> Tensor:
        """A weight as a GPU's products read it."""
        held = self.panels.get(name)
        return held.tensor if isinstance(held, Narrow) else getattr(self, name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a weight as it is multiplied, without a copy of it."""
        held = self.panels.get(name)
        return tuple(held.shape) if held is not None else tuple(self.as_multiplied(name, getattr(self, name)).shape)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a packed weight as the attribute has it."""
        shape = self.shape_of(name)
        return (*shape[:-2], shape[-1], shape[-2]) if name in self.turned else shape

    def as_multiplied(self, name: str, weight: Tensor) -> Tensor:
        """A weight as products take it: [..., inputs, outputs]"""
        return weight.mT if name in self.turned else weight

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("panels", ()):
            return self.panels[name].weight(name in self.turned).as_subclass(ReadOnly)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("panels", ()):
            refuse_change()
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.panels:
            destination[prefix + name] = getattr(self, name)


def is_packed(module: nn.Module) -> bool:
    return isinstance(module, Packable) and bool(module.panels)


class Linear(Packable):
    """A product with a weight stored [inputs, outputs], the fastest layout for CPU libraries at few rows."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=torch.float32)) if bias else None


class HeadLinear(nn.Module):
    """A product for each head, with weights stored [heads, inputs, outputs]."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, inputs, outputs, dtype=torch.float32))


class Conv(nn.Module):
    """The weights of a short convolution, of each channel on its own."""

    bias: Tensor | None

    def __init__(self, taps: int, channels: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(channels, dtype=torch.float32)) if bias else None


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


# ---- parts -----------------------------------------------------------------------------------------------------------
# What is made of the modules above, and has sites. Loops are layers of their own whose weights are those of an earlier one.


class Part(nn.Module):
    """A layer, or a part of one that has sites. Weights of another layer are held there alone, so that whatever looks through
    a model (to pack, freeze, hash, save, train or count) finds them once; its own attributes lead to them."""

    lender: "Part"
    """who holds the weights, where that is another"""

    def share(self, lender: "Part") -> None:
        """Mutates: uses the weights and the modules without sites of a part of another layer. BadConfig if it has others.
        Precondition: neither is packed; the lender holds its own."""
        shapes = [[(name, x.shape) for name, x in part.named_parameters()] for part in (self, lender)]
        if type(self) is not type(lender) or shapes[0] != shapes[1]:
            raise BadConfig(f"A {type(self).__name__} cannot have the weights of another one: weights_of names unlike layers.")
        self.__dict__["lender"] = lender  # no module of this one
        for name, module in list(self._modules.items()):
            if isinstance(module, Part):
                module.share(getattr(lender, name))
            else:
                del self._modules[name]
        for name in [name for name, x in self._parameters.items() if x is not None]:
            del self._parameters[name]

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__
        lender = held.get("lender")
        if lender is not None and not any(name in held[kind] for kind in ("_modules", "_parameters", "_buffers")):
            return getattr(lender, name)
        return super().__getattr__(name)


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

Product = Callable[[Tensor, Any], Tensor]
"""x [any number of rows, inputs] times a weight [inputs, outputs] -> [rows, outputs]"""


class Experts(Packable):
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


def expert_products(x: Tensor, chosen: Tensor, weight: Any, bias: Tensor | None, product: Product) -> Tensor:
    """Every row times the weights of its chosen experts: [rows, top, outputs].

    x       [rows, inputs], or [rows, top, inputs] with inputs of their own for each expert
    chosen  [rows, top]
    weight  [experts, inputs, outputs], or panels of it; bias [experts, outputs]
    """
    rows, top = chosen.shape
    pairs = x.flatten(0, 1) if x.dim() == 3 else None
    out = x.new_zeros(rows * top, weight.shape[-1])
    for expert, places in by_expert(chosen):
        own = x[places // top] if pairs is None else pairs[places]
        found = product(own, weight[expert])
        out[places] = found if bias is None else found + bias[expert]
    return out.view(rows, top, -1)
