"""`SiteArray`: one site of a dump as an array on disk, read only where it is indexed.

acts = dump.array("S", 2)   # nothing is read
acts.shape                  # (rows, d_model)
acts[[7, 3, 7]]             # these rows, in this order
acts.pieces()               # the shards' own bytes, mapped without a copy
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.dump.files import DumpFiles
from replaylens.engine.dump.shard import ShardFile
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import integer, shown

RowNumbers = Sequence[int] | np.ndarray | Tensor | slice
"""rows of a dump: their numbers, a mask with one boolean per row, or a slice"""
_RUN_ROWS = 64
"""average length of a run from which on copying it whole is faster than picking its rows one by one"""
_MAX_MAPPED = 30_000
"""shards that are mapped at the same time; Linux allows 65,530 mappings in a process"""
_GAP_BYTES = 1 << 20
"""rows of a remote shard that lie closer than this are fetched with what is between them: a request costs more"""


class AdjacentRows(NamedTuple):
    """Adjacent rows of one shard, among the rows asked for."""

    shard: int
    first: int
    """row within the shard"""
    length: int
    at: int
    """place of the first one in the result"""


@dataclass(frozen=True)
class Located:
    """Rows of a dump, in the order asked for. They are located once and read at several sites."""

    shards: np.ndarray
    rows: np.ndarray
    """within the shards"""

    @classmethod
    def of(cls, starts: np.ndarray, numbers: np.ndarray) -> "Located":
        """`starts`: as given by `shard_starts`; `numbers`: rows of the dump, all of them in range."""
        shards = np.searchsorted(starts, numbers, side="right") - 1
        return cls(shards, numbers - starts[shards])

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _begins(self) -> np.ndarray:
        """Places at which a run of adjacent rows begins."""
        cuts = np.flatnonzero((np.diff(self.rows) != 1) | (np.diff(self.shards) != 0)) + 1
        return np.concatenate([[0], cuts]) if len(self.rows) else cuts

    @property
    def scattered(self) -> bool:
        """Whether picking the rows one by one is faster than copying runs of adjacent rows."""
        return len(self.rows) < _RUN_ROWS * len(self._begins)

    def runs(self) -> list[AdjacentRows]:
        """The rows as runs of adjacent ones."""
        ats = self._begins
        columns = self.shards[ats], self.rows[ats], np.diff(np.append(ats, len(self.rows))), ats
        return [AdjacentRows(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]


def shard_starts(files: DumpFiles) -> np.ndarray:
    """The number of each shard's first row, and of the end."""
    return np.cumsum([0, *(shard.rows for shard in files.manifest.shards)], dtype=np.int64)


def row_numbers(rows: Any, count: int) -> np.ndarray:
    """Numbers from 0 to count - 1, in the order given; negative ones count from the end. BadRequest for anything else."""
    if isinstance(rows, slice):
        try:
            return np.arange(*rows.indices(count), dtype=np.int64)
        except TypeError:
            raise BadRequest(f"Invalid rows={shown(rows)}. Give a slice of whole numbers.") from None
    found = np.asarray(rows.cpu() if isinstance(rows, Tensor) else rows)
    if found.dtype == bool and found.shape == (count,):
        return np.flatnonzero(found)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        what = f"{found.dtype}{list(found.shape)}"
        raise BadRequest(f"Invalid rows={shown(rows)} ({what}). Give row numbers in one dimension, or {count} booleans.")
    found = found.astype(np.int64)
    wrong = found[(found < -count) | (found >= count)]
    if len(wrong):
        raise BadRequest(f"There is no row {wrong[0]}. The rows are numbered from 0 to {count - 1}.")
    return np.where(found < 0, found + count, found)


def mappable(files: DumpFiles) -> bool:
    """Whether all shards can be mapped at once."""
    return files.store.local and len(files.manifest.shards) <= _MAX_MAPPED


def gather(files: DumpFiles, name: str, entry: int | None, located: Located) -> Tensor:
    """The located rows of one site, in the order they were asked for: [rows, ...]. The caller owns the result."""
    used = np.unique(located.shards).tolist()
    files.check(used)
    mapped = mappable(files)
    if mapped and (located.scattered or entry is not None):
        return files.region.take(name, entry, located.shards, located.rows)
    site = files.manifest.sites[name]
    out = torch.empty([len(located), *site.shape], dtype=getattr(torch, site.dtype))
    if mapped:
        for run in located.runs():
            files.region.copy(name, run.shard, run.first, out[run.at : run.at + run.length])
    else:
        for number in used:
            here = np.flatnonzero(located.shards == number)
            out[torch.from_numpy(here)] = _fetch(files.shard(number), name, located.rows[here])
    return _entry(out, entry)


def _fetch(shard: ShardFile, name: str, rows: np.ndarray) -> Tensor:
    """Rows of a shard that is not mapped, in a few requests: each covers rows that lie close together."""
    gap = max(1, _GAP_BYTES // shard.sites[name].row_bytes)
    wanted, back = np.unique(rows, return_inverse=True)
    groups = np.split(wanted, np.flatnonzero(np.diff(wanted) > gap) + 1)
    return torch.cat([shard.rows(name, group) for group in groups])[torch.from_numpy(back)]


def _entry(x: Tensor, entry: int | None) -> Tensor:
    return x if entry is None else x[:, entry]


class SiteArray:
    """Rows of one site, [rows, ...], in the stored dtype. Immutable; nothing is read before it is indexed."""

    def __init__(self, files: DumpFiles, name: str, entry: int | None, chosen: np.ndarray | None) -> None:
        """`entry`: the layer of Z to take, None: the site as it is stored; `chosen`: rows of the dump, None: all."""
        self.files, self.name, self.entry, self.chosen = files, name, entry, chosen
        self._starts = shard_starts(files)

    def __repr__(self) -> str:
        return f"SiteArray({self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __len__(self) -> int:
        return int(self._starts[-1]) if self.chosen is None else len(self.chosen)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.files.manifest.sites[self.name].shape
        return (len(self), *(shape if self.entry is None else shape[1:]))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.files.manifest.sites[self.name].dtype)
        return dtype

    def __getitem__(self, rows: "int | RowNumbers") -> Tensor:
        """One row, or several in the order asked for. The caller owns the result."""
        one = integer(rows)
        numbers = row_numbers(rows if one is None else [one], len(self))
        if self.chosen is not None:
            numbers = self.chosen[numbers]
        found = gather(self.files, self.name, self.entry, Located.of(self._starts, numbers))
        return found if one is None else found[0]

    def read(self) -> Tensor:
        """All rows, in memory."""
        if self.chosen is not None or self.entry is not None or not mappable(self.files):
            return self[:]
        self.files.check(range(len(self.files.manifest.shards)))
        out = torch.empty(self.shape, dtype=self.dtype)
        for number, (first, last) in enumerate(pairwise(self._starts.tolist())):
            self.files.region.copy(self.name, number, 0, out[first:last])
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("A site of a dump becomes a NumPy array only by reading it. pieces() copies nothing.")
        return np.asarray(to_numpy(self.read()), dtype=dtype)

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError("Iterating over single rows is slow. Use array[first:last], dump.stream or dump.feed.")

    def pieces(self) -> list[Tensor]:
        """The rows of each shard as a tensor over the mapped file: nothing is copied, pages are read when touched.

        Writing into a tensor changes neither the file nor what other calls return. Needs all rows of a local dump.
        """
        if not self.files.store.local:
            raise BadRequest(f"{self.files.store.url} is not on a local disk, so it cannot be mapped. Read rows by indexing.")
        if self.chosen is not None:
            raise BadRequest("These rows are filtered, so they are not whole shards. Read them by indexing.")
        manifest = self.files.manifest
        self.files.check(range(len(manifest.shards)))
        shards = (ShardFile(self.files.store, shard, manifest.sites) for shard in manifest.shards)
        return [_entry(shard.mapped(self.name), self.entry) for shard in shards]


def to_numpy(x: Tensor) -> np.ndarray:
    """bfloat16, which NumPy lacks, becomes float32 without loss."""
    return (x.float() if x.dtype is torch.bfloat16 else x).numpy()
