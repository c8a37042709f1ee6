"""`Edit`: an intervention on a branch; and hook functions, for what no edit can say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor

from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.model.sites import KEY_SITES, STATE, SiteTable
from replaylens.engine.request.capture import HEAD_SITES
from replaylens.engine.request.placed import Op, tensor_from_json, tensor_to_json
from replaylens.engine.request.positions import Positions, numbers
from replaylens.engine.request.values import as_bool, as_float, as_instance, as_int, as_list, integer, named_fields, short_repr

# ---- hooks -----------------------------------------------------------------------------------------------------------
# Hook functions: on whole batches, and at names that can be read but not changed.

HookFunction = Callable[[Tensor, Any], Tensor | None]


def hook_at(name: str, function: HookFunction, table: SiteTable) -> tuple[str, HookFunction]:
    """(site, hook function) of a hook at a name; BadEdit if no pass reaches the site."""
    site = table.resolve(name)
    if site in HEAD_SITES:
        raise BadEdit(
            f"A hook function on {name} is never called: the head runs once the rows are committed. Capture {site} instead, "
            f"or hook {table.per_layer('S')[-1]}."
        )
    if name in table.read_only or site.endswith((*KEY_SITES, STATE)):
        if isinstance(function, BatchHook):
            return site, replace(function, function=_reading(name, function.function))
        return site, _reading(name, function)
    return site, function if name == site or isinstance(function, BatchHook) else NamedHook(function, name)


@dataclass(frozen=True, eq=False)
class NamedHook:
    """A hook function, and the name that it was asked for by: another name of its site."""

    function: HookFunction
    name: str

    def __call__(self, value: Tensor, hook: Any) -> Tensor | None:
        return self.function(value, hook)


@dataclass(frozen=True, eq=False)
class BatchHook:
    """A hook function that sees all sequences of a batch at once, as in TransformerLens.

    The batch must be computed in one pass: its sequences are segments that share this object.
    """

    function: HookFunction
    name: str
    count: int
    """the number of sequences"""
    length: int
    """the tokens of each"""
    heads_first: bool = False
    """whether the function sees [batch, heads, positions, ...]; keys end with the sequence"""
    errors: list[Exception] = field(default_factory=list)
    """what it raised; the first one is for the caller"""

    def __call__(self, value: Tensor, hook: Any) -> Tensor | None:
        """value [batch, positions, ...] -> as the function says; BadRequest if this is not the whole batch."""
        if tuple(value.shape[:2]) != (self.count, self.length):
            raise BadRequest(
                f"The hook function on {self.name} is for {self.count} sequences of {self.length} tokens, which take more than "
                f"one pass. Give fewer at a time, or load the engine with max_rows={self.count * self.length} or more."
            )
        if not self.heads_first:
            return self.function(value, hook)
        value = value.transpose(1, 2)
        changed = self.function(value[..., : self.length] if self.name.endswith(KEY_SITES) else value, hook)
        return None if changed is None else changed.transpose(1, 2)


def _reading(name: str, function: HookFunction) -> HookFunction:
    """The function, shown a copy of the value; BadEdit if it changes it."""

    def read(value: Tensor, hook: Any) -> None:
        given = value.clone()
        changed = function(given, hook)
        if not torch.equal(given if changed is None else changed, value):
            raise BadEdit(f"The hook function on {name} changed its value, which can be read but not changed. Return None.")

    return read


# ---- edits -----------------------------------------------------------------------------------------------------------
# `Edit`: an intervention on a branch, applied identically in every pass that touches the branch.
#
# An edit is data, not code. It has a content hash, so branches with the same edits can share edited KV, and traces and
# dumps can name it. Hook functions work too, but nothing is promised about what they compute.

Hook = tuple[str, Callable[[Tensor, Any], Tensor | None]]
_OPS = get_args(Op)
TOKENS = "a token or several, as text or ids"
HOOKS = "a list of (site name, function) pairs"


@named_fields
@dataclass(frozen=True, eq=False)
class Edit:
    """What to change, and where.

    site       a site name; a letter: S (residual stream), T (attention output) or C (MLP output); or a pattern of names, such
               as blocks.*.hook_out
    op         add: add value * factor; set: replace by value; zero: replace by zeros; scale: multiply by factor, rounded to
               the model's dtype; project_out: remove the directions in value; resample: replace by a row of value, drawn by
               seed and position. On an attention pattern, mask: hide keys from the softmax; zero or set: change weights after
               it, without scaling the others. On the router of a mixture of experts (blocks.N.mlp.gate.hook_out), force or
               forbid: experts are chosen, or not; reweight: the weights of experts are multiplied by factor
    positions  None: all; a number, several, or a slice with step 1; negative ones count from the branch's tip. Numbers name
               tokens that the branch has; a slice may include tokens still to come
    value      a tensor, an array or a list: [*site shape] for all positions, or, for `set` and `add` at given positions,
               [number of positions, *site shape]. With `heads`, the site shape of these heads or of all
    layers     of a letter or a pattern; without them all its layers are edited. They count from 0, never from the end
    factor     for `add`, `scale` and `reweight` only
    heads      of a site with heads, such as attn.hook_z; without them all are edited. Those of hook_k and hook_v are key heads
    keys       of attn.hook_pattern: the keys whose edges from the edited positions change. For `set`, value holds their
               weights: [keys], [heads, keys] or [number of positions, heads, keys]; without keys, rows from key 0 on, as long
               as what their position sees, such as captured ones
    keep_norm  for `add`: scale the result back to the length that the vector had
    match_norm for `add`: scale value to the length of the row that it is added to, before factor: the row x becomes
               x + factor * value * |x| / |value|
    when       a direction [*site shape]: edit only rows whose projection on it is greater than `above`
    above      with `when`: the threshold. Of a probe's score w x + b, when=w and above=-b; `Watch.edit` makes such edits
    tokens     a token or several, as text or ids: edit only positions that hold one of them, also those still to come
    experts    for `force`, `forbid` and `reweight`: which experts, by index

    >>> from replaylens import Engine
    >>> root = Engine.load("coin-plain").prompt("A coin's state is heads. Alice flips. What's the state? A:")
    >>> plain, (edited,) = root.fork()[0], root.fork(edits=[Edit("S", "zero", positions=-1, layers=[4])])
    >>> plain.generate(1).tokens == edited.generate(1).tokens, edited.certified
    (False, True)
    """

    site: str
    op: Op
    value: Tensor | None = None
    positions: Positions = None
    layers: Sequence[int] | None = None
    factor: float = 1.0
    seed: int = 0
    heads: Sequence[int] | None = None
    keys: Positions = None
    keep_norm: bool = False
    when: Tensor | None = None
    tokens: str | int | Sequence[str | int] | None = None
    experts: Sequence[int] | None = None
    match_norm: bool = False
    above: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.op, str) or self.op not in _OPS:
            raise BadEdit(f"Unknown op {short_repr(self.op)}. Known: {', '.join(_OPS)}.")

    @classmethod
    def interchange(cls, site: str, source: Tensor, positions: Positions = None) -> Edit:
        """Replace rows by those captured elsewhere, such as another branch's `activations[site][positions]`."""
        return cls(site, "set", source, positions)

    def to_json(self) -> dict[str, Any]:
        """Plain values, including the bytes of tensors, for dump plans. Fields that older plans lack are left out if unused."""
        plain = self.plain()
        out = {"site": plain.site, "op": plain.op, "positions": _positions_to_json(plain.positions), "layers": plain.layers}
        out |= {"factor": plain.factor, "seed": plain.seed}
        out |= {} if plain.heads is None else {"heads": plain.heads}
        out |= {} if plain.keys is None else {"keys": _positions_to_json(plain.keys)}
        out |= {name: True for name in ("keep_norm", "match_norm") if getattr(plain, name)}
        out |= {"above": plain.above} if plain.above else {}
        out |= {} if plain.tokens is None else {"tokens": plain.tokens}
        out |= {} if plain.experts is None else {"experts": plain.experts}
        tensors = {"value": plain.value, "when": plain.when}
        return out | {name: tensor_to_json(tensor) for name, tensor in tensors.items() if tensor is not None}

    def plain(self) -> Edit:
        """The same edit in plain Python numbers and lists; BadEdit names the field that is invalid."""
        site = as_instance("site", self.site, str, "a site name, or S, T or C", BadEdit)
        factor, largest = as_float("factor", self.factor, BadEdit), torch.finfo(torch.float32).max
        if abs(factor) > largest:
            raise BadEdit(f"factor={factor} is beyond float32, which edits are computed in. Give at most {largest:.3g}.")
        if factor != 1.0 and self.op not in ("add", "scale", "reweight"):
            raise BadEdit(
                f"factor={factor} was given for the op {self.op!r}. Only 'add', 'scale' and 'reweight' take one: scale the "
                "value instead."
            )
        if self.experts is not None and self.op not in ("force", "forbid", "reweight"):
            raise BadEdit(f"experts was given for the op {self.op!r}. Only 'force', 'forbid' and 'reweight' take it.")
        keep_norm = as_bool("keep_norm", self.keep_norm, BadEdit)
        if keep_norm and self.op != "add":
            raise BadEdit(f"keep_norm was given for the op {self.op!r}. Only 'add' takes it.")
        match_norm, above = as_bool("match_norm", self.match_norm, BadEdit), as_float("above", self.above, BadEdit)
        if match_norm and (self.op != "add" or keep_norm):
            other = "keep_norm" if keep_norm else f"the op {self.op!r}"
            raise BadEdit(f"match_norm was given with {other}. Only 'add' takes it, without keep_norm.")
        if above and self.when is None:
            raise BadEdit(f"above={above} is the threshold of a projection, and there is no direction. Give when=, too.")
        return Edit(
            site,
            self.op,
            _plain_tensor("value", site, self.value),
            _plain_positions("positions", self.positions),
            _plain_list("layers", self.layers),
            factor,
            as_int("seed", self.seed, 0, 2**64 - 1, BadEdit),
            _plain_list("heads", self.heads),
            _plain_positions("keys", self.keys),
            keep_norm,
            _plain_tensor("when", site, self.when),
            _plain_tokens(self.tokens),
            _plain_list("experts", self.experts),
            match_norm,
            float(np.float32(above)),
        )

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Edit:
        """Inverse of `to_json`; BadEdit for other values."""
        raw = as_instance("edit", raw, dict, "the result of to_json", BadEdit)
        try:
            value, when = (tensor_from_json(raw[name]) if name in raw else None for name in ("value", "when"))
            return cls(
                raw["site"],
                raw["op"],
                value,
                _positions_from_json(raw["positions"]),
                raw["layers"],
                raw["factor"],
                raw["seed"],
                raw.get("heads"),
                _positions_from_json(raw.get("keys")),
                raw.get("keep_norm", False),
                when,
                raw.get("tokens"),
                raw.get("experts"),
                raw.get("match_norm", False),
                raw.get("above", 0.0),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadEdit(f"Not an edit: {error!r}.") from error


def _positions_to_json(positions: Positions) -> Any:
    return {"start": positions.start, "stop": positions.stop} if isinstance(positions, slice) else positions


def _positions_from_json(raw: Any) -> Positions:
    return slice(raw["start"], raw["stop"]) if isinstance(raw, dict) else raw


def _plain_list(name: str, given: Any) -> list[int] | None:
    if given is None:
        return None
    return [as_int(name, each, error=BadEdit) for each in as_list(name, given, "a list of whole numbers", BadEdit)]


def _plain_tokens(given: Any) -> list[str | int] | None:
    """Tokens as texts and plain ids."""
    if given is None:
        return None
    several = [given] if isinstance(given, str) or integer(given) is not None else as_list("tokens", given, TOKENS, BadEdit)
    if not several:
        raise BadEdit("tokens is empty, so the edit changes nothing. Give at least one token, or leave it out.")
    return [each if isinstance(each, str) else as_int("tokens", each, 0, error=BadEdit) for each in several]


def _plain_tensor(name: str, site: str, value: Any) -> Tensor | None:
    """A dense real tensor without gradient; BadEdit says how to get one."""
    if value is None:
        return None
    try:
        given = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError):  # ragged lists, text
        raise BadEdit(f"Invalid {name} for {site}={short_repr(value)}. Give a tensor, an array or a list of numbers.") from None
    if isinstance(given, FakeTensor) or is_functorch_wrapped_tensor(given):
        raise BadEdit(
            f"The {name} for {site} has no numbers of its own: it was made within FakeTensorMode, or is the argument of a "
            "function under torch.func (vmap, grad). Make it outside."
        )
    if given.requires_grad:
        raise BadEdit(f"The {name} for {site} requires a gradient, but none flows through an engine. Give {name}.detach().")
    if given.layout is not torch.strided or given.device.type == "meta" or given.is_complex() or given.is_quantized:
        raise BadEdit(
            f"The {name} for {site} is a {given.layout} tensor of {given.dtype} on {given.device}. Give a dense real tensor."
        )
    return given


def finite_float32(value: Tensor, site: str) -> Tensor:
    """A copy on the CPU in float32; BadEdit for NaN, infinity and numbers that float32 does not have."""
    found = value.to("cpu", torch.float32).clone()
    if not bool(found.isfinite().all()):
        if bool(value.isfinite().all()):
            most, largest = float(value.double().abs().max()), torch.finfo(torch.float32).max
            raise BadEdit(f"The value for {site} holds {most:.3g} (absolute), beyond float32. Give at most {largest:.3g}.")
        raise BadEdit(f"The value for {site} holds NaN or infinity. Give finite numbers.")
    return found


def _plain_positions(name: str, positions: Any) -> Positions:
    found = numbers(name, positions, BadEdit)
    if not isinstance(found, slice):
        return found
    if found.step not in (None, 1):
        raise BadEdit(f"A slice of {name} has step {found.step}. Give a slice with step 1.")
    return slice(found.start, found.stop)


def listed(edits: Iterable[Edit]) -> list[Edit]:
    """The edits as a list; BadEdit if one is not an Edit, or if they are not in a list."""
    return [
        as_instance("edits", edit, Edit, "a list of Edits", BadEdit)
        for edit in as_list("edits", edits, "a list of Edits", BadEdit)
    ]


def resolve_hooks(hooks: Iterable[Hook], table: SiteTable) -> tuple[Hook, ...]:
    """The hooks with resolved site names; BadEdit if one is not a (site, function) pair."""
    out: list[Hook] = []
    for pair in as_list("hooks", hooks, HOOKS, BadEdit):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
            raise BadEdit(f"Invalid hook {short_repr(pair)}. Give {HOOKS}.")
        out.append(hook_at(pair[0], pair[1], table))
    return tuple(out)


def span(positions: Positions, length: int) -> tuple[int, int | None, tuple[int, ...]]:
    """(start, stop, picks) on a branch of `length` tokens, with negative positions counted from the tip."""
    if positions is None:
        return 0, None, ()
    if isinstance(positions, slice):
        start, stop = (None if p is None else p + length if p < 0 else p for p in (positions.start, positions.stop))
        start = start or 0
        if start < 0 or (stop is not None and stop <= start):
            raise BadEdit(f"Positions [{start}, {stop}) are empty or start before 0.")
        return start, stop, ()
    given = positions if isinstance(positions, Sequence) else [positions]
    picks = tuple(sorted({p + length if p < 0 else p for p in given}))
    if not picks or picks[0] < 0:
        raise BadEdit(f"Invalid positions={positions} on a branch of {length} tokens. Give at least one, none before 0.")
    return picks[0], picks[-1] + 1, picks
