"""`Content`: the rows and index of a shard, independent of the files that store them, and their digest.

The digest covers the name, dtype, shape and bytes of every tensor, and every index column except the locators. Accepted
and rejected rows are hashed separately, because the accepted rows are the same for every drafter.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from replaylens.engine.dump.pieces import pieces_of

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
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Content:
    """Rows in canonical order: tensors [rows, ...] by site, and the index without its locators."""

    tensors: Mapping[str, Tensor]
    index: pa.Table

    def __len__(self) -> int:
        return int(self.index.num_rows)

    def digests(self) -> tuple[str, str]:
        """(digest of everything, digest of the accepted rows)."""
        accepted = self.index.column("accepted").to_numpy(zero_copy_only=False).astype(bool)
        kept, dropped = self._hash(accepted), self._hash(~accepted)
        return hashlib.sha256(f"accepted {kept}\nrejected {dropped}\n".encode()).hexdigest(), kept

    def _hash(self, mask: np.ndarray) -> str:
        digest, part = hashlib.sha256(), self.index.filter(pa.array(mask))
        for name in sorted(self.tensors):
            for block in _tensor_bytes(name, pieces_of(self.tensors, name), mask):
                digest.update(block)
        for name in sorted(part.column_names):
            for block in _column_bytes(name, part.column(name)):
                digest.update(block)
        return digest.hexdigest()

    def select(self, rows: np.ndarray) -> "Content":
        """Select rows by number or by mask, in order."""
        numbers = np.flatnonzero(rows) if rows.dtype == bool else rows
        chosen = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        return Content({name: x[chosen] for name, x in self.tensors.items()}, self.index.take(pa.array(numbers)))

    def accepted(self) -> "Content":
        """The rows of the accepted path only."""
        return self.select(self.index.column("accepted").to_numpy(zero_copy_only=False).astype(bool))

    def of_examples(self, examples: Sequence[int]) -> "Content":
        """The rows of some examples."""
        return self.select(np.isin(self.index.column("example").to_numpy(), np.asarray(examples)))


def combine(digests: Iterable[str]) -> str:
    """A dump's digest, from the digests of its shards in order."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges of rows where the mask is true. Adjacent rows are hashed together, without a copy."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _tensor_bytes(name: str, pieces: list[Tensor], mask: np.ndarray) -> Iterable[Any]:
    """The chosen rows of a tensor, given in pieces, after a line with its name, type and shape."""
    shape, dtype = [int(mask.sum()), *pieces[0].shape[1:]], str(pieces[0].dtype).removeprefix("torch.")
    yield f"tensor {name} {dtype} {shape}\n".encode()
    first = 0
    for piece in pieces:
        raw = piece.view(BITS[piece.element_size()]).numpy()
        for start, end in _runs(mask[first : first + len(raw)]):
            yield raw[start:end]
        first += len(raw)


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
