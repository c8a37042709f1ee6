"""`PlacedEdit`: an edit at one site of one model, with its content hash and its arithmetic on rows."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.model.sites import STATE
from replaylens.engine.request.sampling import hash_bits

Op = Literal["add", "set", "zero", "scale", "project_out", "resample", "mask", "force", "forbid", "reweight"]
PLACED_OPS: tuple[Op, ...] = ("add", "set", "zero", "project_out", "resample", "mask", "reweight")
"""what is left once edits are placed: scaling is reweighting by the same factor everywhere; forcing and forbidding an expert
replace its score in what experts are chosen by"""
PATTERN = "attn.hook_pattern"


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
    key: bytes = b""
    needs: int = 0
    """made from this many tokens: a fork before them does not inherit it"""
    heads: tuple[int, ...] = ()
    """edited heads, in order; empty: all"""
    keys: tuple[int, ...] = ()
    """of an attention pattern: the keys whose edges from the edited rows change"""
    keep_norm: bool = False
    when: Tensor | None = None
    """[*site shape]: only rows whose projection on it is greater than `above` are edited"""
    tokens: tuple[int, ...] = ()
    """only positions that hold one of these tokens are edited; empty: all"""
    match_norm: bool = False
    """the value is scaled to the length of the row that it is added to"""
    above: float = 0.0
    """a float32"""

    def keyed(self) -> "PlacedEdit":
        """The same edit with its content hash, which covers everything but `needs`."""
        parts: tuple[Any, ...] = (self.site, self.op, self.start, self.stop, self.picks, self.factor, self.seed)
        extra = {name: getattr(self, name) for name in ("heads", "keys", "keep_norm", "tokens") if getattr(self, name)}
        extra |= {name: getattr(self, name) for name in ("match_norm", "above") if getattr(self, name)}
        if extra:
            parts = (*parts, extra)  # an edit without them keeps the hash that it has in older traces
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=16)
        for name, tensor in (("", self.value), ("when", self.when)):
            if tensor is not None:
                digest.update(name.encode() + repr(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
        return replace(self, key=digest.digest())

    @property
    def on_pattern(self) -> bool:
        """Whether it edits an attention pattern, inside attention rather than on rows."""
        return self.site.endswith(PATTERN)

    @property
    def inside(self) -> bool:
        """Whether it is applied inside attention or a recurrence rather than on rows."""
        return self.site.endswith((PATTERN, STATE))

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

    def edited(self, start: int, tokens: Sequence[int]) -> list[int]:
        """The edited positions among those of `tokens`, the first of which is at `start`, in order."""
        found = self.positions(start, start + len(tokens))
        return [p for p in found if tokens[p - start] in self.tokens] if self.tokens else found

    def on_path(self, tokens: Sequence[int]) -> "PlacedEdit | None":
        """The same edit of a whole path, at positions instead of tokens; None if it changes nothing there."""
        if not self.tokens:
            return self
        found = tuple(self.edited(0, tokens))
        return replace(self, start=found[0], stop=found[-1] + 1, picks=found, tokens=()) if found else None

    def apply(self, rows: Tensor, positions: list[int]) -> Tensor:
        """The edited rows [n, ...] at these positions. Precondition: all are edited. No row depends on another."""
        if self.when is not None:
            return self._where_above(rows, positions, self.when.to(rows))
        edited = self._changed(rows, positions)
        if self.keep_norm:
            edited = edited * (_lengths(rows) / _lengths(edited))
        if self.heads:
            chosen, edited = edited[:, list(self.heads)], rows.clone()
            edited[:, list(self.heads)] = chosen
        return edited

    def _where_above(self, rows: Tensor, positions: list[int], direction: Tensor) -> Tensor:
        """Rows that meet the condition are edited. The others are not computed: their derivative may not exist."""
        chosen = (_dots(rows, direction) > self.above).squeeze(-1).nonzero().squeeze(-1)
        edited = rows.clone()
        if len(chosen):
            edited[chosen] = replace(self, when=None).apply(rows[chosen], [positions[i] for i in chosen.tolist()])
        return edited

    def _changed(self, rows: Tensor, positions: list[int]) -> Tensor:
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
        if self.op == "reweight":
            return rows * value
        if self.match_norm:
            value = value.expand_as(rows)
            lengths = _lengths(value)
            value = value * (_lengths(rows) / torch.where(lengths > 0, lengths, 1.0))  # those of other heads may be 0
        return value.expand_as(rows) if self.op == "set" else rows + value * self.factor

    def draws(self, positions: list[int]) -> list[int]:
        """The vector that a `resample` draws at each position."""
        return drawn(self.seed, positions, len(self.vectors))

    def place(self, position: int) -> int:
        """The index of `position` among the edited positions. Precondition: it is edited."""
        return self.picks.index(position) if self.picks else position - self.start

    @property
    def vectors(self) -> Tensor:
        """`value`, which every op but `zero` and `mask` has."""
        assert self.value is not None  # `place` checks it
        return self.value

    def to_json(self) -> dict[str, Any]:
        """All fields, including tensors, for traces. Fields that older traces lack are left out if they are empty."""
        out: dict[str, Any] = {name: getattr(self, name) for name in ("site", "op", "start", "stop", "factor", "seed", "needs")}
        out["picks"] = list(self.picks)
        out |= {name: list(getattr(self, name)) for name in ("heads", "keys", "tokens") if getattr(self, name)}
        out |= {name: True for name in ("keep_norm", "match_norm") if getattr(self, name)}
        out |= {"above": self.above} if self.above else {}
        tensors = {"value": self.value, "when": self.when}
        return out | {name: tensor_to_json(tensor) for name, tensor in tensors.items() if tensor is not None}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "PlacedEdit":
        value, when = (tensor_from_json(raw[name]) if name in raw else None for name in ("value", "when"))
        return cls(
            raw["site"],
            raw["op"],
            value,
            raw["start"],
            raw["stop"],
            tuple(raw["picks"]),
            raw["factor"],
            raw["seed"],
            needs=raw.get("needs", 0),
            heads=tuple(raw.get("heads", ())),
            keys=tuple(raw.get("keys", ())),
            keep_norm=raw.get("keep_norm", False),
            when=when,
            tokens=tuple(raw.get("tokens", ())),
            match_norm=raw.get("match_norm", False),
            above=raw.get("above", 0.0),
        ).keyed()


def drawn(seed: int, positions: Iterable[int], count: int) -> list[int]:
    """One of `count` rows for each position, by seed and position."""
    return [int(hash_bits(seed, p, np.zeros(1, dtype=np.uint64))[0] % count) for p in positions]


def tensor_to_json(value: Tensor) -> dict[str, Any]:
    """Shape and bytes of a tensor, as float32."""
    value = value.detach().to("cpu", torch.float32).contiguous()
    return {"shape": list(value.shape), "data": base64.b64encode(value.numpy().tobytes()).decode()}


def tensor_from_json(raw: dict[str, Any]) -> Tensor:
    """Inverse of `tensor_to_json`."""
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
    """[n, 1]: a product, in the order that it has anywhere."""
    if rows.is_cuda:
        from replaylens.kernels.matmul import matmul

        return matmul(rows, direction[:, None].contiguous())
    if rows.dtype != torch.float32:  # a reference in float64
        return (rows * direction).sum(-1, keepdim=True)
    from replaylens.kernels import cpu

    return cpu.product(rows.contiguous(), cpu.Panels.of(direction[:, None]))


def _lengths(rows: Tensor) -> Tensor:
    """The lengths of the vectors of rows [..., d]: [..., 1], on a CPU."""
    if rows.dtype != torch.float32:  # a reference in float64
        return (rows * rows).sum(-1, keepdim=True).sqrt()
    from replaylens.kernels import cpu

    return cpu.apply("sqrt", cpu.row_sums(rows * rows))


def added(site: str, start: int, rows: Tensor) -> PlacedEdit:
    """An edit that adds rows [n, *site shape], made from the tokens before `start`, at positions [start, start + n)."""
    return PlacedEdit(site, "add", rows, start, start + len(rows), (), 1.0, 0, needs=start).keyed()


def page_keys(edits: Iterable[PlacedEdit], num_pages: int, page_size: int) -> list[bytes]:
    """The keys of the edits that touch each page. Branches share a page only if tokens and keys agree."""
    edits = list(edits)
    return [b"".join(e.key for e in edits if e.touches(page * page_size, (page + 1) * page_size)) for page in range(num_pages)]
