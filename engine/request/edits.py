"""`Edit`: an intervention on a branch, applied identically in every pass that touches the branch.

An edit is data, not code. It has a content hash, so branches with the same edits can share edited KV, and traces and dumps can
name it. Hook functions work too, but nothing is promised about what they compute.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit
from replaylens.engine.model import modes
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.request.hooks import hook_at
from replaylens.engine.request.options import named_fields
from replaylens.engine.request.sampling import hash_bits
from replaylens.engine.request.values import instance, integer, items, number, shown, whole

Op = Literal["add", "set", "zero", "project_out", "resample"]
Positions = int | slice | Sequence[int] | None
Hook = tuple[str, Callable[[Tensor, Any], Tensor | None]]
_OPS = ("add", "set", "zero", "project_out", "resample")
HOOKS = "a list of (site name, function) pairs"
_NOT_EDITABLE = ("attn.hook_pattern", "ln_final.hook_out", "unembed.hook_out")


@named_fields
@dataclass(frozen=True, eq=False)
class Edit:
    """What to change, and where.

    site       a site name, or a letter: S (residual stream), T (attention output) or C (MLP output)
    op         add: add value * factor; set: replace by value; zero: replace by zeros; project_out: remove the directions
               in value; resample: replace by a row of value, drawn by seed and position
    positions  None: all; a number, several, or a slice with step 1; negative ones count from the branch's tip
    value      a tensor, an array or a list: [*site shape] for all positions, or, for `set` and `add` at given positions,
               [number of positions, *site shape]
    layers     of a letter; without them all its layers are edited. They count from 0, never from the end
    factor     for `add` only

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

    @classmethod
    def interchange(cls, site: str, source: Tensor, positions: Positions = None) -> "Edit":
        """Replace rows by those captured elsewhere, such as another branch's `activations[site][positions]`."""
        return cls(site, "set", source, positions)

    def to_json(self) -> dict[str, Any]:
        """Plain values, including the bytes of `value`, for dump plans."""
        plain = self.plain()
        where = plain.positions
        where_plain: Any = {"start": where.start, "stop": where.stop} if isinstance(where, slice) else where
        out = {"site": plain.site, "op": plain.op, "positions": where_plain, "layers": plain.layers}
        out |= {"factor": plain.factor, "seed": plain.seed}
        return out if plain.value is None else {**out, "value": _value_to_json(plain.value)}

    def plain(self) -> "Edit":
        """The same edit in plain Python numbers and lists; BadEdit names the field that is invalid."""
        if not isinstance(self.op, str) or self.op not in _OPS:
            raise BadEdit(f"Unknown op {shown(self.op)}. Known: {', '.join(_OPS)}.")
        site = instance("site", self.site, str, "a site name, or S, T or C", BadEdit)
        factor = number("factor", self.factor, BadEdit)
        if factor != 1.0 and self.op != "add":
            raise BadEdit(f"factor={factor} was given for the op {self.op!r}. Only 'add' takes one: scale the value instead.")
        layers = None if self.layers is None else items("layers", self.layers, "a list of whole numbers", BadEdit)
        return Edit(
            site,
            self.op,
            _plain_value(site, self.value),
            _plain_positions(self.positions),
            None if layers is None else [whole("layers", layer, error=BadEdit) for layer in layers],
            factor,
            whole("seed", self.seed, 0, 2**64 - 1, BadEdit),
        )

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Edit":
        """Inverse of `to_json`; BadEdit for other values."""
        raw = instance("edit", raw, dict, "the result of to_json", BadEdit)
        try:
            where = raw["positions"]
            if isinstance(where, dict):
                where = slice(where["start"], where["stop"])
            value = _value_from_json(raw["value"]) if "value" in raw else None
            return cls(raw["site"], raw["op"], value, where, raw["layers"], raw["factor"], raw["seed"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadEdit(f"Not an edit: {error!r}.") from error


def _plain_value(site: str, value: Any) -> Tensor | None:
    """A dense real tensor without gradient; BadEdit says how to get one."""
    if value is None:
        return None
    try:
        given = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError):  # ragged lists, text
        raise BadEdit(f"Invalid value for {site}={shown(value)}. Give a tensor, an array or a list of numbers.") from None
    if given.requires_grad:
        raise BadEdit(f"The value for {site} requires a gradient, but none flows through an engine. Give value.detach().")
    if given.layout is not torch.strided or given.device.type == "meta" or given.is_complex() or given.is_quantized:
        raise BadEdit(
            f"The value for {site} is a {given.layout} tensor of {given.dtype} on {given.device}. Give a dense real tensor."
        )
    return given


def _plain_positions(positions: Any) -> Positions:
    if isinstance(positions, slice):
        if positions.step is not None and integer(positions.step) != 1:
            raise BadEdit(f"A slice of positions has step {shown(positions.step)}. Give a slice with step 1.")
        ends = (positions.start, positions.stop)
        return slice(*(None if p is None else whole("positions", p, error=BadEdit) for p in ends))
    if positions is None or (single := integer(positions)) is not None:
        return None if positions is None else single
    several = items("positions", positions, "whole numbers, or a slice", BadEdit)
    return [whole("positions", p, error=BadEdit) for p in several]


@dataclass(frozen=True, eq=False)
class PlacedEdit:
    """An edit at one site of one model, with positions counted from 0. `key` is its content hash."""

    site: str
    op: Op
    value: Tensor | None
    start: int
    stop: int | None
    """exclusive; None: all later positions"""
    picks: tuple[int, ...]
    """single positions instead of a range; empty: the range"""
    factor: float
    seed: int
    key: bytes
    needs: int = 0
    """made from this many tokens: a fork before them does not inherit it"""

    def touches(self, first: int, end: int) -> bool:
        """Whether any position of [first, end) is edited."""
        if self.picks:
            return any(first <= p < end for p in self.picks)
        return self.start < end and (self.stop is None or self.stop > first)

    @property
    def first(self) -> int:
        return min(self.picks) if self.picks else self.start

    def positions(self, first: int, end: int) -> list[int]:
        """The edited positions of [first, end), in order."""
        if self.picks:
            return [p for p in self.picks if first <= p < end]
        return list(range(max(first, self.start), end if self.stop is None else min(end, self.stop)))

    def apply(self, rows: Tensor, positions: list[int]) -> Tensor:
        """The edited rows [n, ...] at these positions. Precondition: all are edited. No row depends on another."""
        match self.op:
            case "zero":
                return torch.zeros_like(rows)
            case "project_out":
                return _project_out(rows, self.vectors.to(rows))
            case "resample":
                return self.vectors[self.draws(positions)].to(rows)
        value = self.vectors.to(rows)
        if value.dim() == rows.dim():  # one row per edited position
            value = value[[self.place(p) for p in positions]]
        return value.expand_as(rows) if self.op == "set" else rows + value * self.factor

    def draws(self, positions: list[int]) -> list[int]:
        """The vector that a `resample` draws at each position."""
        return [int(hash_bits(self.seed, p, np.zeros(1, dtype=np.uint64))[0] % len(self.vectors)) for p in positions]

    def place(self, position: int) -> int:
        """The index of `position` among the edited positions. Precondition: it is edited."""
        return self.picks.index(position) if self.picks else position - self.start

    @property
    def vectors(self) -> Tensor:
        """`value`, which every op but `zero` has."""
        assert self.value is not None  # `place` checks it
        return self.value

    def to_json(self) -> dict[str, Any]:
        """All fields, including `value`, for traces."""
        out = {name: getattr(self, name) for name in ("site", "op", "start", "stop", "factor", "seed", "needs")}
        out["picks"] = list(self.picks)
        if self.value is not None:
            out["value"] = _value_to_json(self.value)
        return out

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "PlacedEdit":
        value = _value_from_json(raw["value"]) if "value" in raw else None
        made = _keyed(raw["site"], raw["op"], value, raw["start"], raw["stop"], tuple(raw["picks"]), raw["factor"], raw["seed"])
        return replace(made, needs=raw.get("needs", 0))


def _value_to_json(value: Tensor) -> dict[str, Any]:
    value = value.detach().to("cpu", torch.float32).contiguous()
    return {"shape": list(value.shape), "data": base64.b64encode(value.numpy().tobytes()).decode()}


def _value_from_json(raw: dict[str, Any]) -> Tensor:
    array = np.frombuffer(base64.b64decode(raw["data"]), dtype=np.float32)
    return torch.from_numpy(array.reshape(raw["shape"]).copy())


def _project_out(rows: Tensor, directions: Tensor) -> Tensor:
    """Remove orthonormal directions [k, d], one after the other. Sums run over one row, so no row depends on another."""
    for direction in directions:
        rows = without_direction(rows, direction)
    return rows


def without_direction(rows: Tensor, direction: Tensor) -> Tensor:
    """rows [n, d] minus their part along a direction [d] of length 1."""
    return rows - _dots(rows, direction) * direction


def _dots(rows: Tensor, direction: Tensor) -> Tensor:
    """[n, 1]. On a GPU the order of a plain sum may depend on the number of rows, so the canonical product is used there."""
    if rows.is_cuda:
        from replaylens.kernels.matmul import matmul

        return matmul(rows, direction[:, None].contiguous())
    return (rows * direction).sum(-1, keepdim=True)


def place_all(edits: Iterable[Edit], table: SiteTable, length: int) -> tuple[PlacedEdit, ...]:
    """Several edits on a branch of `length` tokens, in their order."""
    return tuple(placed for edit in listed(edits) for placed in place(edit, table, length))


def listed(edits: Iterable[Edit]) -> list[Edit]:
    """The edits as a list; BadEdit if one is not an Edit, or if they are not in a list."""
    return [
        instance("edits", edit, Edit, "a list of Edits", BadEdit) for edit in items("edits", edits, "a list of Edits", BadEdit)
    ]


def resolve_hooks(hooks: Iterable[Hook], table: SiteTable) -> tuple[Hook, ...]:
    """The hooks with resolved site names; BadEdit if one is not a (site, function) pair."""
    out: list[Hook] = []
    for pair in items("hooks", hooks, HOOKS, BadEdit):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
            raise BadEdit(f"Invalid hook {shown(pair)}. Give {HOOKS}.")
        out.append(hook_at(pair[0], pair[1], table))
    return tuple(out)


def place(edit: Edit, table: SiteTable, length: int) -> list[PlacedEdit]:
    """Resolve an edit on a branch of `length` tokens into one placed edit per site; BadEdit if it does not fit."""
    edit = instance("edits", edit, Edit, "a list of Edits", BadEdit).plain()
    start, stop, picks = _where(edit.positions, length)
    placed = []
    for name in _names(edit, table):
        if name.endswith(_NOT_EDITABLE):
            raise BadEdit(f"{name} can be captured but not edited. Edit the residual stream (hook_in, hook_out) instead.")
        value = _check_value(edit, name, table.sites[name].shape, len(picks) or (stop - start if stop is not None else None))
        placed.append(_keyed(name, edit.op, value, start, stop, picks, edit.factor, edit.seed))
    return placed


def _names(edit: Edit, table: SiteTable) -> list[str]:
    if edit.site not in ("S", "T", "C"):
        if edit.layers is not None:
            raise BadEdit(f"layers was given, but {edit.site!r} is not S, T or C. Give one of these letters, or no layers.")
        return [table.editable(edit.site)]
    names = table.per_layer(edit.site)
    layers = range(len(names)) if edit.layers is None else edit.layers
    if bad := [layer for layer in layers if not 0 <= layer < len(names)]:
        raise BadEdit(f"No layer {bad[0]}. {edit.site} has layers 0 to {len(names) - 1}.")
    return [names[layer] for layer in layers]


def _where(positions: Positions, length: int) -> tuple[int, int | None, tuple[int, ...]]:
    """(start, stop, picks), with negative positions counted from the tip."""
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


def _check_value(edit: Edit, name: str, shape: tuple[int, ...], count: int | None) -> Tensor | None:
    if edit.op == "zero":
        if edit.value is not None:
            raise BadEdit("The op 'zero' takes no value.")
        return None
    if edit.value is None:
        raise BadEdit(f"The op {edit.op!r} needs a value.")
    value = edit.value.to("cpu", torch.float32).clone()
    if not bool(torch.isfinite(value).all()):
        raise BadEdit(f"The value for {name} holds NaN or infinity.")
    if edit.op == "project_out":
        return _orthonormal(value.reshape(-1, *shape) if value.shape[-1:] == shape[-1:] else value, shape)
    several = (len(value), *shape) if edit.op == "resample" else (count, *shape) if count else shape
    if tuple(value.shape) not in ((several,) if edit.op == "resample" else (shape, several)):
        if count is None and tuple(value.shape[1:]) == shape:
            raise BadEdit(
                f"The value for {name} has shape {tuple(value.shape)}, one row per position, but no positions were given. "
                f"Give positions, such as range({len(value)}), or one row for all."
            )
        wanted = " or ".join(str(each) for each in dict.fromkeys([shape, several]))
        raise BadEdit(f"The value for {name} has shape {tuple(value.shape)}; expected {wanted}.")
    return value


def _orthonormal(directions: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(shape) != 1 or directions.dim() != 2:
        raise BadEdit(f"project_out needs a site with vectors; its rows have shape {shape}.")
    with modes.canonical():
        q, r = torch.linalg.qr(directions.double().T)
    too_many = len(directions) > shape[0]  # QR would drop the rest
    if too_many or bool((r.diagonal().abs() <= 1e-8 * r.abs().max()).any()):
        raise BadEdit("The directions to project out are zero or linearly dependent. Give independent ones.")
    return q.T.float().contiguous()


def _keyed(
    site: str, op: Op, value: Tensor | None, start: int, stop: int | None, picks: tuple[int, ...], factor: float, seed: int
) -> PlacedEdit:
    digest = hashlib.blake2b(repr((site, op, start, stop, picks, factor, seed)).encode(), digest_size=16)
    if value is not None:
        digest.update(repr(tuple(value.shape)).encode() + value.contiguous().numpy().tobytes())
    return PlacedEdit(site, op, value, start, stop, picks, factor, seed, digest.digest())


def added(site: str, start: int, rows: Tensor) -> PlacedEdit:
    """An edit that adds rows [n, *site shape], made from the tokens before `start`, at positions [start, start + n)."""
    return replace(_keyed(site, "add", rows, start, start + len(rows), (), 1.0, 0), needs=start)


def page_keys(edits: Iterable[PlacedEdit], num_pages: int, page_size: int) -> list[bytes]:
    """The keys of the edits that touch each page. Branches share a page only if tokens and keys agree."""
    edits = list(edits)
    return [b"".join(e.key for e in edits if e.touches(page * page_size, (page + 1) * page_size)) for page in range(num_pages)]
