"""`first_difference`: the first row in which two contents differ."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from replaylens.engine.dump.content import BITS, KEYS, Content, kind_of
from replaylens.engine.model.sites import layer_of


@dataclass(frozen=True)
class Difference:
    """One place where two contents differ."""

    example: int | None
    branch: int | None
    position: int | None
    what: str
    """a site, an index column, or another part of the content"""
    layer: int | None
    here: str
    there: str

    def __str__(self) -> str:
        place = [f"{name} {value}" for name, value in (("example", self.example), ("branch", self.branch)) if value is not None]
        place += [f"position {self.position}"] if self.position is not None else []
        layer = f" (layer {self.layer})" if self.layer is not None else ""
        return f"{', '.join(place) + ': ' if place else ''}{self.what}{layer}: {self.here} here, {self.there} there"


def first_difference(here: Content, there: Content) -> Difference | None:
    """The first row that differs, with its first differing index column or site; None if all bits are equal."""
    if found := _names_differ("sites", set(here.tensors), set(there.tensors)):
        return found
    if found := _names_differ("index columns", set(here.index.column_names), set(there.index.column_names)):
        return found
    if found := _keys_differ(here, there):
        return found
    best: tuple[int, Difference] | None = None
    for name in here.index.column_names:
        row = _column_differs(here.index.column(name), there.index.column(name))
        if row is not None and (best is None or row < best[0]):
            values = (str(here.index.column(name)[row].as_py()), str(there.index.column(name)[row].as_py()))
            best = row, Difference(*_place(here, row), name, None, *values)
    for name, mine in here.tensors.items():
        yours = there.tensors[name]
        if mine.dtype != yours.dtype or mine.shape != yours.shape:
            return Difference(None, None, None, name, layer_of(name), _form(mine), _form(yours))
        found_at = _tensor_differs(mine, yours)
        if found_at is not None and (best is None or found_at[0] < best[0]):
            row, rest = found_at[0], tuple(found_at[1:])
            layer = rest[0] if name.startswith("Z.") and rest else layer_of(name)
            values = (_shown(mine[row][rest]), _shown(yours[row][rest]))
            best = row, Difference(*_place(here, row), f"{name}{list(rest)}", layer, *values)
    return None if best is None else best[1]


def _names_differ(what: str, here: set[str], there: set[str]) -> Difference | None:
    if here == there:
        return None
    return Difference(None, None, None, what, None, f"{sorted(here - there)} more", f"{sorted(there - here)} more")


def _keys_differ(here: Content, there: Content) -> Difference | None:
    """The first row that only one of them has."""
    mine, yours = (list(zip(*(c.index.column(k).to_pylist() for k in KEYS), strict=True)) for c in (here, there))
    for i in range(max(len(mine), len(yours))):
        a, b = mine[i] if i < len(mine) else None, yours[i] if i < len(yours) else None
        if a != b:
            example, branch, position = place = min(key for key in (a, b) if key is not None)
            here_is, there_is = ("present" if key == place else "missing" for key in (a, b))
            return Difference(example, branch, position, "row", None, here_is, there_is)
    return None


def _place(content: Content, row: int) -> tuple[int, int, int]:
    example, branch, position = (content.index.column(key)[row].as_py() for key in KEYS)
    return example, branch, position


def _column_differs(here: pa.ChunkedArray, there: pa.ChunkedArray) -> int | None:
    if kind_of(here) == kind_of(there) == "number":  # bitwise, so that NaN equals itself
        pairs = [(np.asarray(c.fill_null(0.0), dtype="<f4").view("<i4"), c.is_valid().to_numpy()) for c in (here, there)]
        same = (pairs[0][0] == pairs[1][0]) & (pairs[0][1] == pairs[1][1])
    else:
        pairs_of = zip(here.to_pylist(), there.to_pylist(), strict=True)
        same = np.array([a == b and type(a) is type(b) for a, b in pairs_of], dtype=bool)  # also of no rows
    wrong = np.flatnonzero(~same)
    return int(wrong[0]) if len(wrong) else None


def _tensor_differs(here: Tensor, there: Tensor) -> list[int] | None:
    """Indices of the first element whose bits differ."""
    bits = BITS[here.element_size()]
    wrong = (here.contiguous().view(bits) != there.contiguous().view(bits)).flatten().nonzero()
    return [int(i) for i in np.unravel_index(int(wrong[0]), here.shape)] if len(wrong) else None


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(value: Tensor) -> str:
    """A number, with enough digits to identify its float32 value."""
    number: Any = value.item()
    if isinstance(number, float) and math.isfinite(number):
        return f"{number:.9g}"
    return str(number)
