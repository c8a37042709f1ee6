"""`DumpFiles`: the files of a finished dump, opened on first use and checked against the manifest."""

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from replaylens.engine.dump.checked import CheckedShards, hashing_threads
from replaylens.engine.dump.content import CORE, LOCATORS, Content
from replaylens.engine.dump.filter import add_depth
from replaylens.engine.dump.manifest import INDEX, IndexEntry, Manifest, ShardEntry
from replaylens.engine.dump.region import Region
from replaylens.engine.dump.shard import ShardFile
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump, BadRequest, StoreFailed
from replaylens.engine.progress import hidden

if TYPE_CHECKING:
    import pandas as pd

_OPEN_SHARDS = 1024
"""mapped, which takes no file handle and no memory"""
_FRAMES = 8


def frame_of(lines: pa.Table) -> "pd.DataFrame":
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
        """Hash those of the shards that were not hashed before, if the dump was opened so. Raises DamagedShard."""
        if self.checked is not None:
            self.checked.check(numbers)

    @cached_property
    def region(self) -> Region:
        """All shards of a local dump in one range of addresses."""
        return Region(self.store, self.manifest, self.shard)

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
                table = self._index.read_row_group(self._group[number], columns).select(columns)
            else:
                table = self._index.schema_arrow.empty_table().select(columns)
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

    def _read_frame(self, number: int) -> "pd.DataFrame":
        """One shard's index as a pandas frame, with the column `depth`. The frame is cached: do not modify it."""
        return self.to_frame(self.lines(number, self.columns))

    def to_frame(self, lines: pa.Table) -> "pd.DataFrame":
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
            index = pq.ParquetFile(source, memory_map=self.store.local)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error
        found = index.metadata.num_rows, index.metadata.num_row_groups, sorted(index.schema_arrow.names)
        groups = sum(shard.rows > 0 for shard in self.manifest.shards)
        if found != (self.manifest.rows, groups, sorted(self.columns)):
            raise self._bad_index(f"it has {found[0]} lines in {found[1]} groups, with columns {', '.join(found[2])[:500]}")
        types = {**dict(zip(CORE.names, CORE.types, strict=True)), **self.manifest.labels, **LOCATORS}
        for name, wanted in types.items():
            if (kind := str(index.schema_arrow.field(name).type)) != str(wanted):
                raise self._bad_index(f"column {name!r} is of type {kind}, not {wanted}")
        return index

    def _unreadable(self, error: Exception) -> BadDump | StoreFailed:
        """An index whose hash is right can fail to arrive from a store that is out of reach; on a local disk, it is damaged."""
        if isinstance(error, StoreFailed) or (isinstance(error, OSError) and not self.store.local):
            return error if isinstance(error, StoreFailed) else self.store.failed("read", error)
        return self._bad_index(str(error))

    def _bad_index(self, why: str) -> BadDump:
        return BadDump(f"{self.store.url}/{INDEX} is not the index of this dump: {why}.")
