"""`Content`: the rows and index of a shard, independent of the files that store them, and their digest.

The digest covers the name, dtype, shape and bytes of every tensor, and every index column except the locators. Accepted
and rejected rows are hashed separately, because the accepted rows are the same for every drafter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from replaylens.engine.model.sites import layer_of
from replaylens.engine.records import Identifier
from replaylens.engine.terminal import Later

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Later("torch")

# ---- pieces ----------------------------------------------------------------------------------------------------------
# `Pieces`: the rows of a shard's sites where passes left them, brought together only when somebody asks for a tensor.
#
# Files and digests take rows in blocks, which a `Joiner` gathers in the same memory again and again. Joining them all in fresh
# memory would cost more than computing the rows on a GPU. Handling them branch by branch would, too: a thread that writes or
# hashes waits for the interpreter after each of them.

_BLOCK = 1 << 24
"""bytes of a block, at most; longer runs of rows are blocks of their own"""
_SCATTERED = 4
"""runs of each piece, on average, from which on it pays to take all of a piece's rows at once"""


class Layout:
    """Rows as runs of consecutive rows of some pieces. Sites that are captured together share a layout."""

    def __init__(self, runs: Iterable[tuple[int, int, int]]) -> None:
        """`runs`, in order: which piece, its first row, how many rows. Precondition: there is at least one."""
        self.runs = list(runs)
        self.rows = sum(count for _, _, count in self.runs)
        self._picks: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {}

    def joined(self, pieces: Sequence[Tensor], first: int, end: int, out: Tensor) -> None:
        """Fill `out` with the rows of runs [first, end)."""
        from replaylens.engine.request.capture import scatter  # a dump is listed without what computes

        runs = self.runs[first:end]
        if len({piece for piece, _, _ in runs}) * _SCATTERED > len(runs):
            torch.cat([pieces[piece][at : at + count] for piece, at, count in runs], out=out)
            return
        for piece, targets, rows in self._picked(first, end):
            scatter(out, targets, pieces[piece], rows)

    def _picked(self, first: int, end: int) -> list[tuple[int, Tensor, Tensor]]:
        """(piece, where its rows go, its rows) of runs [first, end)."""
        if (first, end) not in self._picks:
            piece, at, count = np.array(self.runs[first:end], dtype=np.int64).T
            targets = np.arange(count.sum())
            rows, piece = targets + np.repeat(at - np.cumsum(count) + count, count), np.repeat(piece, count)
            own = [(number, np.flatnonzero(piece == number)) for number in np.unique(piece).tolist()]
            self._picks[first, end] = [(n, torch.from_numpy(there), torch.from_numpy(rows[there])) for n, there in own]
        return self._picks[first, end]


class Pieces(Mapping[str, "Tensor"]):
    """Tensors [rows, ...] by site."""

    def __init__(self, pieces: Mapping[str, tuple[Sequence[Tensor], Layout]]) -> None:
        """Precondition: nobody changes the pieces."""
        self._pieces = dict(pieces)
        self._own: set[str] = set()
        """sites whose rows are shared with nobody"""

    def __getitem__(self, site: str) -> Tensor:
        """All rows of a site, which the caller may change: they are shared with this object alone."""
        if site not in self._own:
            self._pieces[site] = end_to_end(joined(*self._pieces[site]))
            self._own.add(site)
        return self._pieces[site][0][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def pieces(self, site: str) -> tuple[Sequence[Tensor], Layout]:
        return self._pieces[site]


def end_to_end(*pieces: Tensor) -> tuple[Sequence[Tensor], Layout]:
    """All rows of some pieces, one after another."""
    return pieces, Layout((number, 0, len(x)) for number, x in enumerate(pieces))


def pieces_of(tensors: Mapping[str, Tensor], site: str) -> tuple[Sequence[Tensor], Layout]:
    """The pieces of a site, of which there is at least one, and their layout."""
    return tensors.pieces(site) if isinstance(tensors, Pieces) else end_to_end(tensors[site])


def joined(pieces: Sequence[Tensor], layout: Layout) -> Tensor:
    """All rows, in fresh memory."""
    made = pieces[0].new_empty((layout.rows, *pieces[0].shape[1:]))
    layout.joined(pieces, 0, len(layout.runs), made)
    return made


def bits_of(x: Tensor) -> Tensor:
    """The elements of a contiguous tensor as whole numbers, in the same memory."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


class Joiner:
    """Gathers rows in memory that it uses again."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def blocks(self, pieces: Sequence[Tensor], layout: Layout) -> Iterator[Tensor]:
        """The rows of one site in contiguous blocks. Each is valid until the next one is asked for."""
        first, size, each = 0, 0, math.prod(pieces[0].shape[1:]) * pieces[0].element_size()
        for number, (_, _, count) in enumerate(layout.runs):
            if number > first and size + count * each > _BLOCK:
                yield self._joined(pieces, layout, first, number)
                first, size = number, 0
            size += count * each
        yield self._joined(pieces, layout, first, len(layout.runs))

    def rows(self, block: Tensor, chosen: Tensor) -> Tensor:
        """Some rows of a block, by number; valid until the next call."""
        return torch.index_select(block, 0, chosen, out=self._room(block, len(chosen)))

    def _joined(self, pieces: Sequence[Tensor], layout: Layout, first: int, end: int) -> Tensor:
        if end - first == 1:
            piece, at, count = layout.runs[first]
            return pieces[piece][at : at + count].contiguous()
        room = self._room(pieces[0], sum(count for _, _, count in layout.runs[first:end]))
        layout.joined(pieces, first, end, room)
        return room

    def _room(self, like: Tensor, rows: int) -> Tensor:
        size = rows * math.prod(like.shape[1:]) * like.element_size()
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(like.dtype).view(rows, *like.shape[1:])


def blocks_of(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every site's rows in blocks, of which each site has at least one, sorted by site; a block is valid until the next."""
    joiner = Joiner()
    for name in sorted(tensors):
        for block in joiner.blocks(*pieces_of(tensors, name)):
            yield name, block


# ---- content ---------------------------------------------------------------------------------------------------------

LOCATORS = {"shard": pa.int32(), "row": pa.int64()}
"""index columns that say where a row is stored, and their types"""
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
"""columns that identify a row; rows are sorted by them"""


@dataclass(frozen=True)
class Content:
    """Rows in canonical order: tensors [rows, ...] by site, and the index without its locators."""

    tensors: Mapping[str, Tensor]
    index: pa.Table

    def __len__(self) -> int:
        return int(self.index.num_rows)

    def digests(self) -> tuple[str, str]:
        """(digest of everything, digest of the accepted rows)."""
        hashed = RowHash(self.index)
        for name, block in blocks_of(self.tensors):
            hashed.add(name, block)
        return hashed.digests()

    def select(self, rows: np.ndarray) -> Content:
        """Select rows by number or by mask, in order."""
        numbers = np.flatnonzero(rows) if rows.dtype == bool else rows
        chosen = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        return Content({name: x[chosen] for name, x in self.tensors.items()}, self.index.take(pa.array(numbers)))

    def accepted(self) -> Content:
        """The rows of the accepted path only."""
        return self.select(self.index.column("accepted").to_numpy(zero_copy_only=False).astype(bool))

    def of_examples(self, examples: Sequence[int]) -> Content:
        """The rows of some examples."""
        return self.select(np.isin(self.index.column("example").to_numpy(), np.asarray(examples)))

    def row_identifier(self, row: int) -> Identifier:
        """What one row is cited by: the digest of a content of this row alone, and its place."""
        alone = self.select(np.array([row]))
        return Identifier(alone.digests()[0], _place(alone, 0))


def combine(digests: Iterable[str]) -> str:
    """A dump's digest, from the digests of its shards in order."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


class RowHash:
    """The digests of rows that are given in the order of `blocks_of`. Accepted rows and rejected ones have a hash each."""

    def __init__(self, index: pa.Table) -> None:
        self.index, self._joiner = index, Joiner()
        accepted = index.column("accepted").to_numpy(zero_copy_only=False).astype(bool)
        self._parts = [(hashlib.sha256(), mask) for mask in (accepted, ~accepted)]
        self._name, self._first = "", 0

    def add(self, name: str, block: Tensor) -> None:
        """Mutates: adds the next rows of a site."""
        if name != self._name:
            self._name, self._first = name, 0
            for digest, mask in self._parts:
                shape, dtype = [int(mask.sum()), *block.shape[1:]], str(block.dtype).removeprefix("torch.")
                digest.update(f"tensor {name} {dtype} {shape}\n".encode())
        for digest, mask in self._parts:
            chosen = np.flatnonzero(mask[self._first : self._first + len(block)])
            if len(chosen) and block.numel():
                own = block if len(chosen) == len(block) else self._joiner.rows(block, torch.from_numpy(chosen))
                digest.update(bits_of(own).numpy().data)
        self._first += len(block)

    def digests(self) -> tuple[str, str]:
        """Mutates: adds the index. Returns the digest of everything, and that of the accepted rows."""
        for digest, mask in self._parts:
            part = self.index.filter(pa.array(mask))
            for name in sorted(part.column_names):
                for block in _column_bytes(name, part.column(name)):
                    digest.update(block)
        kept, dropped = (digest.hexdigest() for digest, _ in self._parts)
        return hashlib.sha256(f"accepted {kept}\nrejected {dropped}\n".encode()).hexdigest(), kept


def _column_bytes(name: str, column: pa.ChunkedArray) -> Iterable[bytes]:
    """A column as bytes that depend only on its values, not on Arrow's layout or the width of its numbers."""
    kind = kind_of(column)
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
        yield values.astype({"number": "<f4", "real": "<f8"}.get(kind, "<i8")).tobytes()


def kind_of(column: pa.ChunkedArray) -> str:
    """The kind of a column's values. An all-null column is "nothing": its type may come from another shard's values."""
    if column.null_count == len(column):
        return "nothing"
    if pa.types.is_boolean(column.type):
        return "flag"
    if pa.types.is_integer(column.type):
        return "whole"
    if pa.types.is_floating(column.type):
        return "real" if pa.types.is_float64(column.type) else "number"  # labels are real, numbers of the engine float32
    return "text"


def concatenate(tables: list[pa.Table]) -> pa.Table:
    """Concatenate index tables. A column that is null in some of them takes its type from the others."""
    return pa.concat_tables(tables, promote_options="default")


def count_accepted(index: pa.Table) -> int:
    return int(pc.sum(index.column("accepted")).as_py() or 0)


# ---- difference ------------------------------------------------------------------------------------------------------
# `first_difference`: the first row in which two contents differ.


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
    wrong = (bits_of(here.contiguous()) != bits_of(there.contiguous())).flatten().nonzero()
    return [int(i) for i in np.unravel_index(int(wrong[0]), here.shape)] if len(wrong) else None


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(value: Tensor) -> str:
    """A number, with enough digits to identify its float32 value."""
    number: Any = value.item()
    if isinstance(number, float) and math.isfinite(number):
        return f"{number:.9g}"
    return str(number)
