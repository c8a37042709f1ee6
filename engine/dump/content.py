"""`Content`: what a shard says, apart from the files that say it. Its digest and the first difference of two.

The digest covers names, dtypes, shapes and bytes of every tensor, and every column of the index that says something about
a row (where the row lies in the files does not). Accepted and rejected rows are hashed apart, because the accepted ones
must come out the same whoever drafted.
"""

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from replaylens.engine.errors import UnknownSite

LOCATORS = ("shard", "row")
"""index columns that say where a row lies"""
CORE = pa.schema(
    [
        ("example", pa.int64()),
        ("root", pa.string()),
        ("branch", pa.int32()),
        ("parent", pa.int32()),
        ("fork_position", pa.int32()),
        ("position", pa.int32()),
        ("token", pa.int32()),
        ("text", pa.string()),
        ("token_state", pa.string()),
        ("accepted", pa.bool_()),
        ("correct", pa.bool_()),
        ("logprob", pa.float32()),
        ("entropy", pa.float32()),
    ]
)
"""index columns that every dump has, besides the locators and the labels of its task"""
KEYS = ("example", "branch", "position")
"""what a row is known by; rows stand in the order of these"""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Content:
    """Rows in canonical order: tensors [rows, ...] by site, and the index without its locators."""

    tensors: dict[str, Tensor]
    index: pa.Table

    def __len__(self) -> int:
        return int(self.index.num_rows)

    def digests(self) -> tuple[str, str]:
        """(digest of everything, digest of the accepted rows)."""
        accepted = self.index.column("accepted").to_numpy(zero_copy_only=False).astype(bool)
        stood, fell = self._hash(accepted), self._hash(~accepted)
        return hashlib.sha256(f"accepted {stood}\nrejected {fell}\n".encode()).hexdigest(), stood

    def _hash(self, mask: np.ndarray) -> str:
        digest, runs, rows = hashlib.sha256(), _runs(mask), int(mask.sum())
        for name in sorted(self.tensors):
            tensor = self.tensors[name].contiguous()
            shape = [rows, *tensor.shape[1:]]
            digest.update(f"tensor {name} {str(tensor.dtype).removeprefix('torch.')} {shape}\n".encode())
            raw: Any = tensor.view(_BITS[tensor.element_size()]).numpy()
            for start, end in runs:
                digest.update(raw[start:end])
        part = self.index.filter(pa.array(mask))
        for name in sorted(part.column_names):
            for piece in _column_bytes(name, part.column(name)):
                digest.update(piece)
        return digest.hexdigest()

    def select(self, rows: np.ndarray) -> "Content":
        """Some rows, by their numbers or a mask, in order."""
        numbers = np.flatnonzero(rows) if rows.dtype == bool else rows
        chosen = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        return Content({name: x[chosen] for name, x in self.tensors.items()}, self.index.take(pa.array(numbers)))


def combine(digests: Iterable[str]) -> str:
    """A dump's digest from those of its shards, in order."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges of rows where the mask holds; adjacent rows are hashed together, without a copy."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _column_bytes(name: str, column: pa.ChunkedArray) -> Iterable[bytes]:
    """A column as bytes that depend on its values only, not on how Arrow lays it out or how wide its numbers are."""
    kind = _kind(column)
    yield f"column {name} {kind} {len(column)}\n".encode()
    yield column.is_valid().to_numpy().astype(np.uint8).tobytes()
    if kind == "text":
        values = column.drop_null().cast(pa.large_string()).combine_chunks()  # 64-bit offsets, then the texts themselves
        _, offsets, texts = values.buffers()
        ends = np.frombuffer(offsets, dtype="<i8")[values.offset : values.offset + len(values) + 1]
        yield np.diff(ends).tobytes()
        yield bytes(texts[int(ends[0]) : int(ends[-1])]) if texts is not None else b""
    elif kind != "nothing":
        zero = pa.scalar(False if kind == "flag" else 0, column.type)
        values = column.fill_null(zero).to_numpy(zero_copy_only=False)
        yield values.astype("<f4" if kind == "number" else "<i8").tobytes()


def _kind(column: pa.ChunkedArray) -> str:
    """A column without any value is of no kind: whether some other shard's values are text must not matter here."""
    if column.null_count == len(column):
        return "nothing"
    if pa.types.is_boolean(column.type):
        return "flag"
    if pa.types.is_integer(column.type):
        return "whole"
    if pa.types.is_floating(column.type):
        return "number"
    return "text"


@dataclass(frozen=True)
class Difference:
    """Where two contents part."""

    example: int | None
    branch: int | None
    position: int | None
    what: str
    """a site, an index column, or what else is not the same"""
    layer: int | None
    here: str
    there: str

    def __str__(self) -> str:
        place = [f"{name} {value}" for name, value in (("example", self.example), ("branch", self.branch)) if value is not None]
        place += [f"position {self.position}"] if self.position is not None else []
        layer = f" (layer {self.layer})" if self.layer is not None else ""
        return f"{', '.join(place) + ': ' if place else ''}{self.what}{layer}: {self.here} here, {self.there} there"


def first_difference(here: Content, there: Content) -> Difference | None:
    """The first row that differs, and in it the first index column or site; None where all bits agree."""
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


def layer_of(site: str) -> int | None:
    """The layer in a site's name."""
    found = re.match(r"blocks\.(\d+)\.", site)
    return int(found[1]) if found else None


def by_layer(sites: Iterable[str]) -> dict[int, str]:
    """Sites of one letter by their layer, in order. The stream that leaves block l counts as l + 1: it would enter that."""
    leaves = re.compile(r"blocks\.\d+\.hook_out")
    found = {(layer_of(site) or 0) + bool(leaves.fullmatch(site)): site for site in sites}
    return dict(sorted(found.items()))


def at_layer(letter: str, stored: dict[int, str], layer: int | None) -> str:
    """The site of a letter at a layer; -1 is the last one stored. UnknownSite lists the layers that there are."""
    if layer is not None and -len(stored) <= layer < 0:
        return list(stored.values())[layer]
    if layer not in stored:
        raise UnknownSite(f"{letter} is stored at layers {', '.join(map(str, stored))}: say which, not {layer}")
    return stored[layer]


def _names_differ(what: str, here: set[str], there: set[str]) -> Difference | None:
    if here == there:
        return None
    return Difference(None, None, None, what, None, f"{sorted(here - there)} more", f"{sorted(there - here)} more")


def _keys_differ(here: Content, there: Content) -> Difference | None:
    """A row that one of them lacks."""
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
    if _kind(here) == _kind(there) == "number":  # by bits: NaN equals itself
        pairs = [(np.asarray(c.fill_null(0.0), dtype="<f4").view("<i4"), c.is_valid().to_numpy()) for c in (here, there)]
        same = (pairs[0][0] == pairs[1][0]) & (pairs[0][1] == pairs[1][1])
    else:
        same = np.array([a == b and type(a) is type(b) for a, b in zip(here.to_pylist(), there.to_pylist(), strict=True)])
    wrong = np.flatnonzero(~same)
    return int(wrong[0]) if len(wrong) else None


def _tensor_differs(here: Tensor, there: Tensor) -> list[int] | None:
    """Indices of the first element whose bits differ."""
    bits = _BITS[here.element_size()]
    wrong = (here.contiguous().view(bits) != there.contiguous().view(bits)).flatten().nonzero()
    return [int(i) for i in np.unravel_index(int(wrong[0]), here.shape)] if len(wrong) else None


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(value: Tensor) -> str:
    """A number with as many digits as tell it from its neighbours."""
    number: Any = value.item()
    if isinstance(number, float) and math.isfinite(number):
        return f"{number:.9g}"
    return str(number)


def concatenate(tables: list[pa.Table]) -> pa.Table:
    """Index tables one after the other; a column that is empty in some takes its type from the others."""
    return pa.concat_tables(tables, promote_options="default")


def count_accepted(index: pa.Table) -> int:
    return int(pc.sum(index.column("accepted")).as_py() or 0)
