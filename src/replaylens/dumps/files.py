"""Reads the rows of a finished dump: its files, checked against the manifest, filters, site arrays, statistics."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from replaylens.dumps.content import CORE, LOCATORS, Content
from replaylens.dumps.manifest import INDEX, IndexEntry, Manifest, ShardEntry
from replaylens.dumps.shard import CheckedShards, MappedShards, ShardFile, hashing_threads
from replaylens.dumps.store import Store
from replaylens.engine.errors import BadDump, BadRequest, StoreFailed
from replaylens.engine.request.values import integer, is_tensor, short_repr
from replaylens.engine.terminal import Later, hidden

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor
else:
    torch = Later("torch")

# ---- filter ----------------------------------------------------------------------------------------------------------
# Filters on a dump's index: the conditions of `where`, evaluated on one shard's index at a time.

Predicate = Callable[["pd.DataFrame"], Any]
"""a shard's index -> one boolean per row"""
DEPTH_NEEDS = ("branch", "fork_position", "position")


@dataclass(frozen=True)
class Filter:
    """One condition: a column and its wanted value, or a function of the index."""

    column: str | None
    wanted: Any

    def mask(self, frame: pd.DataFrame) -> np.ndarray:
        """One boolean per row of the frame."""
        if self.column is None:
            return self._called(frame)
        values = frame[self.column]
        wanted = self.wanted
        if wanted is None:
            return np.asarray(values.isna(), dtype=bool)
        if isinstance(wanted, slice) or (isinstance(wanted, range) and wanted.step == 1):
            found = self._within(values)
        else:
            found = self._equal(values)
        return np.asarray(found.fillna(False), dtype=bool)

    def _equal(self, values: pd.Series) -> pd.Series:
        """Whether values are what is wanted, or one of several. BadRequest for what nothing compares with."""
        try:
            several = isinstance(self.wanted, Iterable) and not isinstance(self.wanted, str | bytes)
            return values.isin(list(self.wanted)) if several else values == self.wanted
        except (TypeError, ValueError, RuntimeError, OverflowError):  # unhashable, a dimension too many, or too large
            raise BadRequest(f"where {self.column}={self.wanted!r:.60}: give a value, several, a range or a slice") from None

    def _within(self, values: pd.Series) -> pd.Series:
        """Whether each value lies in [start, stop) of the wanted range; BadRequest if they cannot be compared."""
        start, stop = self.wanted.start, self.wanted.stop
        if self.wanted.step not in (None, 1):
            raise BadRequest(f"{self.column}={self.wanted} in `where` is a slice with a step. Use a range or a list.")
        found = values.notna()
        if not found.any():
            return found
        try:
            found &= (values >= start) if start is not None else True
            found &= (values < stop) if stop is not None else True
        except TypeError:
            some = values.dropna().iloc[0]
            raise BadRequest(
                f"{self.column}={self.wanted} in `where` cannot be compared with the column's values, such as {some!r}. "
                f"Give bounds of their type."
            ) from None
        return found

    def _called(self, frame: pd.DataFrame) -> np.ndarray:
        given = self.wanted(frame)
        if hasattr(given, "fillna"):
            given = given.fillna(False)  # a comparison with a missing label is missing, too
        mask = np.asarray(given)
        if mask.shape != (len(frame),) or mask.dtype != bool:
            raise BadRequest(
                f"The function given to `where` returned {mask.dtype}{list(mask.shape)}. Return one boolean per row."
            )
        return mask


def make_filters(known: Iterable[str], predicate: Predicate | None, conditions: dict[str, Any]) -> tuple[Filter, ...]:
    """The filters of a `where` call. BadRequest for an unknown column lists the known ones."""
    names = [*known, "depth"]
    for name, value in conditions.items():
        if name not in names:
            raise BadRequest(f"The index has no column {name!r}. It has {', '.join(names)}.")
        if isinstance(value, str) and name in CORE.names and not pa.types.is_string(CORE.field(name).type):
            raise BadRequest(f"where({name}={value!r:.60}) selects nothing: {name} is no text. Give a value of its type.")
    if predicate is not None and not callable(predicate):
        raise BadRequest(f"where({predicate!r:.60}): give a function of the index, or conditions as column=value")
    own = (Filter(None, predicate),) if predicate is not None else ()
    return own + tuple(Filter(name, value) for name, value in conditions.items())


def columns_needed(filters: Iterable[Filter], known: list[str]) -> list[str]:
    """Index columns that the filters use; a function may use all of them."""
    needed: dict[str, None] = {}
    for each in filters:
        if each.column is None:
            return known
        needed |= dict.fromkeys(DEPTH_NEEDS if each.column == "depth" else (each.column,))
    return list(needed)


def add_depth(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the column `depth`: 0 on the accepted path, then the number of tokens since the fork, from 1."""
    if not set(DEPTH_NEEDS) <= set(frame.columns):
        return frame
    left = frame["position"] - frame["fork_position"] + 1
    return frame.assign(depth=left.where(frame["branch"] > 0, 0))


# ---- files -----------------------------------------------------------------------------------------------------------
# `DumpFiles`: the files of a finished dump, opened on first use and checked against the manifest.

_OPEN_SHARDS = 1024
"""mapped, which takes no file handle and no memory"""
_OPEN_SITES = 8 * _OPEN_SHARDS
_FRAMES = 8


def frame_of(lines: pa.Table) -> pd.DataFrame:
    """Index lines as a pandas frame, with `depth`. Columns with missing values keep their integer or boolean type."""
    import pandas as pd

    nullable = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.bool_(): pd.BooleanDtype()}
    frame = lines.to_pandas()
    for name in lines.column_names:
        if name == "parent" or name not in (*CORE.names, *LOCATORS):
            frame[name] = lines.column(name).to_pandas(types_mapper=nullable.get)
    return add_depth(frame)


class DumpFiles:
    """Shards and index of one dump, shared by all filtered views of it."""

    def __init__(self, store: Store, manifest: Manifest, check: bool = True) -> None:
        """`check`: hash every shard when it is first opened."""
        self.store, self.manifest = store, manifest
        self.checked = CheckedShards(store, manifest) if check else None
        self.shard = lru_cache(_OPEN_SHARDS)(self._open_shard)
        self.frame = lru_cache(_FRAMES)(self._read_frame)
        self.rows = lru_cache(_OPEN_SITES)(self._mapped_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send no open files to other processes; a copy there opens its own."""
        return DumpFiles, (self.store, self.manifest, self.checked is not None)

    @property
    def columns(self) -> list[str]:
        """Index columns."""
        return [*CORE.names, *self.manifest.labels, *LOCATORS]

    def shard_of(self, example: int) -> int:
        """The number of the shard that holds an example; BadRequest if none does."""
        number = bisect_left(self.manifest.shards, example, key=lambda shard: shard.last_example)
        if number == len(self.manifest.shards) or example not in self.manifest.plan.indices(number):
            raise BadRequest(f"Example {example} is not in this dump.")
        return number

    def by_shard(self, examples: Iterable[int]) -> dict[int, list[int]]:
        """Group examples by the shard that holds them."""
        found: dict[int, list[int]] = {}
        for example in examples:
            found.setdefault(self.shard_of(example), []).append(example)
        return found

    def check(self, numbers: Iterable[int]) -> None:
        """Hash those of the shards that were not hashed before, if the dump was opened so. Raises BadDump."""
        if self.checked is not None:
            self.checked.check(numbers)

    @cached_property
    def mapped_shards(self) -> MappedShards:
        """All shards of a local dump in one range of addresses."""
        return MappedShards(self.store, self.manifest, self.shard)

    @property
    def _entries(self) -> dict[str, IndexEntry | ShardEntry]:
        return {INDEX: self.manifest.index, **{shard.name: shard for shard in self.manifest.shards}}

    def wrong_sizes(self, there: dict[str, int] | None = None) -> list[str]:
        """One line for every file that is missing or has another size than in the manifest. `there`: a listing at hand."""
        there = self.store.sizes() if there is None else there
        missing = [f"{name} is missing" for name in self._entries if name not in there]
        sizes = ((name, there.get(name), entry.bytes) for name, entry in self._entries.items())
        return missing + [
            f"{name} has {size} bytes, not {wanted}" for name, size, wanted in sizes if size not in (None, wanted)
        ]

    def problems(self, progress: bool = False) -> list[str]:
        """One line for every file that is missing or whose size or SHA-256 differs from the manifest."""
        there = self.store.sizes()
        found = self.wrong_sizes(there)
        whole = {name: entry for name, entry in self._entries.items() if there.get(name) == entry.bytes}
        with hashing_threads() as pool, tqdm(total=len(whole), unit="file", desc="hashes", disable=hidden(progress)) as bar:
            for (name, entry), sha256 in zip(whole.items(), pool.map(self.store.sha256, whole), strict=True):
                bar.update()
                found += [f"{name} was changed after it was written: its SHA-256 differs"] * (sha256 != entry.sha256)
        if self.checked is not None and not found:
            self.checked.trust(range(len(self.manifest.shards)))
        return found

    def lines(self, number: int, columns: list[str]) -> pa.Table:
        """The index lines of one shard."""
        wanted = self.manifest.shards[number].rows
        try:
            if wanted:
                group = int(self._group[number])
                require_packed(self._index.metadata.row_group(group), wanted, self._bad_index)
                packed = self._index.read_row_group(group, columns).select(columns)
                table = unpacked(packed, wanted, self._bad_index)
            else:
                table = unpacked(self._index.schema_arrow.empty_table().select(columns), 0, self._bad_index)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise self._unreadable(error) from error
        if len(table) != wanted:
            raise self._bad_index(f"shard {number} has {len(table)} lines for {wanted} rows")
        self._check_values(number, table)
        return table

    def _check_values(self, number: int, table: pa.Table) -> None:
        """Raise BadDump if lines of a shard are those of other examples, or do not say where their rows are stored."""
        shard, found = self.manifest.shards[number], table.column_names
        for name, wanted in (("shard", np.full(shard.rows, number)), ("row", np.arange(shard.rows))):
            if name in found and (table.column(name).null_count or not np.array_equal(table.column(name).to_numpy(), wanted)):
                raise self._bad_index(f"column {name!r} does not say where the rows of {shard.name} are stored")
        if "example" in found and shard.rows:
            ends = pc.min_max(table.column("example")).as_py()
            missing = table.column("example").null_count
            if missing or ends["min"] < shard.first_example or ends["max"] > shard.last_example:
                raise self._bad_index(f"column 'example' names other examples than those of {shard.name}")

    def content(self, number: int) -> Content:
        """All rows of a shard with their index. Those of a local shard are mapped, not read: do not change them."""
        shard, every = self.shard(number), slice(0, self.manifest.shards[number].rows)
        tensors = {name: shard.mapped(name) if self.store.local else shard.rows(name, every) for name in self.manifest.sites}
        return Content(tensors, self.lines(number, [name for name in self.columns if name not in LOCATORS]))

    def _open_shard(self, number: int) -> ShardFile:
        opened = ShardFile(self.store, self.manifest.shards[number], self.manifest.sites)
        self.check([number])
        return opened

    def _mapped_rows(self, number: int, name: str) -> Tensor:
        """All rows of a site in a shard of a local dump, checked and mapped. Do not change them."""
        self.check([number])
        return self.shard(number).mapped(name)

    def _read_frame(self, number: int) -> pd.DataFrame:
        """One shard's index as a pandas frame, with the column `depth`. The frame is cached: do not modify it."""
        return self.to_frame(self.lines(number, self.columns))

    def to_frame(self, lines: pa.Table) -> pd.DataFrame:
        """Index lines as a pandas frame, with `depth`; see `frame_of`."""
        return frame_of(lines)

    @cached_property
    def _group(self) -> np.ndarray:
        """The row group of each shard. Shards without rows have none."""
        filled = np.array([shard.rows > 0 for shard in self.manifest.shards], dtype=np.int64)
        return np.cumsum(filled) - filled

    @cached_property
    def _index(self) -> Any:
        """The index file, after checking its hash, number of lines and columns against the manifest."""
        path = self.store.path(INDEX)
        try:
            if self.store.sha256(INDEX) != self.manifest.index.sha256:
                raise self._bad_index("it was changed after it was written, its SHA-256 differs. Resume the dump to repair it")
            source = path if self.store.local else self.store.open(INDEX)
            texts = [name for name in self.columns if str({**CORE_TYPES, **self.manifest.labels}.get(name)) == "string"]
            index = pq.ParquetFile(source, memory_map=self.store.local, read_dictionary=texts)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error
        found = index.metadata.num_rows, index.metadata.num_row_groups, sorted(index.schema_arrow.names)
        groups = sum(shard.rows > 0 for shard in self.manifest.shards)
        if found != (self.manifest.rows, groups, sorted(self.columns)):
            raise self._bad_index(f"it has {found[0]} lines in {found[1]} groups, with columns {', '.join(found[2])[:500]}")
        for name, wanted in {**CORE_TYPES, **self.manifest.labels, **LOCATORS}.items():
            if (kind := str(plain_type(index.schema_arrow.field(name).type))) != str(wanted):
                raise self._bad_index(f"column {name!r} is of type {kind}, not {wanted}")
        return index

    def _unreadable(self, error: Exception) -> BadDump | StoreFailed:
        """An index whose hash is right can fail to arrive from a store that is out of reach; on a local disk, it is damaged."""
        if isinstance(error, StoreFailed) or (isinstance(error, OSError) and not self.store.local):
            return error if isinstance(error, StoreFailed) else self.store.failed("read", error)
        return self._bad_index(str(error))

    def _bad_index(self, why: str) -> BadDump:
        return BadDump(f"{self.store.url}/{INDEX} is not the index of this dump: {why}.")


# ---- limits ----------------------------------------------------------------------------------------------------------
# How much memory an index may take once it is unpacked: a few bytes of Parquet can stand for gigabytes of one repeated text.

CORE_TYPES = dict(zip(CORE.names, CORE.types, strict=True))
_TEXT_PER_ROW, _TEXT_AT_LEAST = 1 << 12, 1 << 26
"""bytes of a text column: the mean of its rows, and what is always allowed"""


def text_limit(rows: int) -> int:
    """The bytes that the values of an index column may have together."""
    return rows * _TEXT_PER_ROW + _TEXT_AT_LEAST


def text_bytes(column: pa.ChunkedArray) -> int:
    """The bytes of a column of texts, or of a dictionary of texts, as it would be unpacked."""
    total = 0
    for chunk in column.chunks:
        packed = isinstance(chunk, pa.DictionaryArray)
        sizes = pc.binary_length(chunk.dictionary if packed else chunk).cast(pa.int64())
        total += pc.sum(sizes.take(chunk.indices) if packed else sizes).as_py() or 0
    return total


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, however they are packed."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def require_packed(group: Any, rows: int, bad: Callable[[str], BadDump]) -> None:
    """Raise unless the pages of a row group unpack to what so many rows may take. Reads nothing but the file's end."""
    for number in range(group.num_columns):
        column = group.column(number)
        if (size := column.total_uncompressed_size) > text_limit(rows):
            raise bad(f"column {column.path_in_schema[:60]!r} unpacks to {size} bytes for {rows} rows")


def unpacked(table: pa.Table, rows: int, bad: Callable[[str], BadDump]) -> pa.Table:
    """The table with its texts written out. Raises if they take more than so many rows may."""
    for place, name in enumerate(table.column_names):
        if pa.types.is_dictionary(kind := table.schema.field(place).type):
            if (size := text_bytes(table.column(place))) > text_limit(rows):
                raise bad(f"the texts of column {name[:60]!r} unpack to {size} bytes for {rows} rows")
            table = table.set_column(place, pa.field(name, kind.value_type), table.column(place).cast(kind.value_type))
    return table


# ---- array -----------------------------------------------------------------------------------------------------------
# `SiteArray`: one site of a dump as an array on disk, read only where it is indexed.
#
# acts = dump.array("S", 2)   # nothing is read
# acts.shape                  # (rows, d_model)
# acts[[7, 3, 7]]             # these rows, in this order
# acts.pieces()               # the shards' own bytes, mapped without a copy

RowNumbers = Union[Sequence[int], np.ndarray, "Tensor", slice]
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
    def of(cls, starts: np.ndarray, numbers: np.ndarray) -> Located:
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
            raise BadRequest(f"Invalid rows={short_repr(rows)}. Give a slice of whole numbers.") from None
    found = np.asarray(rows.cpu() if is_tensor(rows) else rows)
    if found.dtype == bool and found.shape == (count,):
        return np.flatnonzero(found)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        what = f"{found.dtype}{list(found.shape)}"
        raise BadRequest(f"Invalid rows={short_repr(rows)} ({what}). Give row numbers in one dimension, or {count} booleans.")
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
        return files.mapped_shards.take(name, entry, located.shards, located.rows)
    site = files.manifest.sites[name]
    out = torch.empty([len(located), *site.shape], dtype=getattr(torch, site.dtype))
    if mapped:
        for run in located.runs():
            files.mapped_shards.copy(name, run.shard, run.first, out[run.at : run.at + run.length])
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
        self._bounds: list[int] = self._starts.tolist()

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

    def __getitem__(self, rows: int | RowNumbers) -> Tensor:
        """One row, or several in the order asked for. The caller owns the result."""
        one = integer(rows)
        if one is not None and -len(self) <= one < len(self) and mappable(self.files):
            return self._row(one if one >= 0 else one + len(self))
        numbers = row_numbers(rows if one is None else [one], len(self))
        if self.chosen is not None:
            numbers = self.chosen[numbers]
        found = gather(self.files, self.name, self.entry, Located.of(self._starts, numbers))
        return found if one is None else found[0]

    def _row(self, number: int) -> Tensor:
        """One row of a local dump, without what a list of rows needs: a loop over rows spends its time in Python."""
        at = number if self.chosen is None else int(self.chosen[number])
        shard = bisect_right(self._bounds, at) - 1
        row = self.files.rows(shard, self.name)[at - self._bounds[shard]]
        return (row if self.entry is None else row[self.entry]).clone()

    def read(self) -> Tensor:
        """All rows, in memory."""
        if self.chosen is not None or self.entry is not None or not mappable(self.files):
            return self[:]
        self.files.check(range(len(self.files.manifest.shards)))
        out = torch.empty(self.shape, dtype=self.dtype)
        for number, (first, last) in enumerate(pairwise(self._starts.tolist())):
            self.files.mapped_shards.copy(self.name, number, 0, out[first:last])
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


# ---- statistics ------------------------------------------------------------------------------------------------------
# `SiteStatistics`: mean, standard deviation and mean norm of a site's rows, the same bits however the rows are stored.
#
# Sums are float64 and taken in a fixed order: rows in blocks from the first on, each block as a tree of additions. So shards,
# threads and machines have no influence.

_BLOCK = 2048


@dataclass(frozen=True, eq=False)
class SiteStatistics:
    """Of all rows of a site. Each tensor is float64, in the shape of a row."""

    rows: int
    mean: Tensor
    std: Tensor
    """of each coordinate, over the rows (divided by their number)"""
    mean_norm: float
    """mean of the rows' Euclidean norms"""

    @property
    def unit_scale(self) -> float:
        """The factor that gives the rows the mean norm sqrt(d), as sparse autoencoders are trained on."""
        return float(self.mean.numel()) ** 0.5 / self.mean_norm


def statistics(array: SiteArray) -> SiteStatistics:
    """One pass over the rows. Blocks are merged as Chan, Golub and LeVeque do, which is stable."""
    if not len(array):
        raise BadRequest("No row of the dump is selected, so it has no statistics. Widen the conditions of `where`.")
    mean = squares = torch.zeros(array.shape[1:], dtype=torch.float64)
    norms, done = 0.0, 0
    for first in range(0, len(array), _BLOCK):
        x = array[first : first + _BLOCK].double()
        here, total = len(x), done + len(x)
        own = _sum(x) / here
        shift = own - mean
        squares = squares + _sum((x - own).square()) + shift.square() * (done * here / total)
        mean = mean + shift * (here / total)
        norms += float(_sum(_sum(x.flatten(1).square().t()).sqrt()))
        done = total
    return SiteStatistics(done, mean, (squares / done).sqrt(), norms / done)


def _sum(x: Tensor) -> Tensor:
    """The sum over the first dimension, as a tree: halves are added to each other until one is left."""
    while len(x) > 1:
        half = (len(x) + 1) // 2
        added = x[: len(x) - half] + x[half:]
        x = added if len(added) == half else torch.cat([added, x[half - 1 : half]])
    return x[0]
