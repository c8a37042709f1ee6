"""`CheckedShards`: every shard is hashed once, when it is first opened, so that damage does not pass for data.

The result is kept in the cache folder by the file's path, size, inode and times of change; while these stay, no later process
hashes the shard again. The time of writing can be set back by any program, that of the inode's change cannot.
"""

import hashlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from replaylens.engine.dump.manifest import Manifest
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump, DamagedShard, StoreFailed
from replaylens.engine.model.cache_folder import cache_folder

_THREADS = 8
_SETTLED_NS = 2 * 10**9
"""a file changed so recently may change again within the clock's resolution; its result is not kept"""


def hashing_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))


class CheckedShards:
    """The shards of one dump and which of them are known to be intact."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store, self.manifest = store, manifest
        self._intact: set[int] = set()

    def check(self, numbers: Iterable[int]) -> None:
        """Mutates: hash the shards that were not checked before, several at a time. Raises DamagedShard."""
        if waiting := [number for number in dict.fromkeys(numbers) if number not in self._intact]:
            stamps = {number: self._stamp(number) for number in waiting}
            unknown = [number for number in waiting if self._line(number, stamps[number]) not in self._kept]
            if len(unknown) > 1:
                with hashing_threads() as pool:
                    list(pool.map(self._hash, unknown))  # raises the first error
            else:
                for number in unknown:
                    self._hash(number)
            self._keep(self._line(number, stamps[number]) for number in unknown if self._settled(number))
            self._intact.update(waiting)

    def trust(self, numbers: Iterable[int]) -> None:
        """Mutates: these shards were just hashed elsewhere and are intact."""
        self._intact.update(numbers)

    def _hash(self, number: int) -> None:
        shard = self.manifest.shards[number]
        try:
            found = self.store.sha256(shard.name)
        except StoreFailed:  # which says nothing about the shard
            raise
        except OSError as error:
            raise BadDump(f"{self.store.url}/{shard.name} cannot be read: {error.strerror or error}.") from error
        if found != shard.sha256:
            raise DamagedShard(
                f"{self.store.url}/{shard.name} was changed after it was written: its SHA-256 is {found[:16]}…, in the "
                f"manifest it is {shard.sha256[:16]}…. Resume the dump to write it again, or copy it again from an intact "
                "dump. To read it as it is, open the dump with check=False (--no-check)."
            )

    def _stamp(self, number: int) -> str:
        """What changes when the file does, as cheap as a stat. A file that is gone has none, and hashing it says so."""
        path = self.store.path(self.manifest.shards[number].name)
        with suppress(OSError):
            if not self.store.local:
                return str(self.store.fs.ukey(path))
            found = os.stat(path)
            return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"
        return "none"

    def _settled(self, number: int) -> bool:
        if not self.store.local:
            return True
        found = os.stat(self.store.path(self.manifest.shards[number].name))
        return time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > _SETTLED_NS

    def _line(self, number: int, stamp: str) -> str:
        shard = self.manifest.shards[number]
        return f"{shard.name} {stamp} {shard.sha256}"

    @property
    def _record(self) -> Path:
        where = os.path.realpath(self.store.root) if self.store.local else self.store.url
        return cache_folder() / "shards" / f"{hashlib.sha256(where.encode()).hexdigest()[:32]}.txt"

    @cached_property
    def _kept(self) -> set[str]:
        """The lines that earlier processes left. A line that is damaged matches no shard, which is then hashed."""
        try:
            return set(self._record.read_text(encoding="utf-8", errors="replace").splitlines())
        except OSError:
            return set()

    def _keep(self, lines: Iterable[str]) -> None:
        """Append to the record. Without a writable cache folder the next process hashes again, which costs time only."""
        if text := "".join(f"{line}\n" for line in lines):
            with suppress(OSError):
                self._record.parent.mkdir(parents=True, exist_ok=True)
                with self._record.open("a", encoding="utf-8") as file:
                    file.write(text)
