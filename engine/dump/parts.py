"""`ShardParts`: the part files of an unfinished dump. A shard is complete once its entry, part-K.json, is written."""

import json
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from replaylens.engine.dump.manifest import IndexEntry, ShardEntry, SiteEntry, shard_name
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump
from replaylens.engine.records import read

COMPRESSION = "zstd"
_MAX_ENTRY = 1 << 28


@dataclass(frozen=True)
class ShardPart:
    """The entries of a finished shard in an unfinished dump."""

    shard: ShardEntry
    index: IndexEntry
    sites: dict[str, SiteEntry]


class ShardParts:
    """Reads and writes the index and the entry of each shard."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def entry(self, number: int) -> ShardPart | None:
        """The entries of a finished shard; None if part-K.json is missing or unreadable."""
        try:
            return read(
                ShardPart, self.store.read(_entry_name(number), _MAX_ENTRY), f"{self.store.url}/{_entry_name(number)}", BadDump
            )
        except BadDump:
            return None

    def is_done(self, number: int) -> bool:
        """Whether a shard and its index exist with their recorded sizes and hashes."""
        part = self.entry(number)
        return (
            part is not None and self.is_whole(shard_name(number), part.shard) and self.is_whole(index_name(number), part.index)
        )

    def is_whole(self, name: str, entry: ShardEntry | IndexEntry) -> bool:
        """Whether a file exists with its recorded size and hash."""
        try:
            return self.store.size(name) == entry.bytes and self.store.sha256(name) == entry.sha256
        except FileNotFoundError:
            return False

    def write(self, number: int, entry: ShardEntry, table: pa.Table, sites: dict[str, SiteEntry]) -> None:
        """Write the index of a shard, then its entry. Precondition: the shard itself is complete."""
        with self.store.writing(index_name(number)) as file:
            pq.write_table(table, file, compression=COMPRESSION)
        part = ShardPart(entry, IndexEntry(len(table), file.num_bytes, file.sha256), sites)
        self.store.write(_entry_name(number), json.dumps(asdict(part)).encode())

    def index(self, number: int) -> pa.Table:
        """The index of one shard."""
        with self.store.open(index_name(number)) as file:
            return pq.read_table(file)

    def forget(self, number: int) -> None:
        """Mutates: the shard no longer counts as complete."""
        self.store.remove(_entry_name(number))


def index_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _entry_name(number: int) -> str:
    return f"part-{number:05d}.json"
