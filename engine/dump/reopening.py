"""`Reopening`: a finished dump with damaged files becomes an unfinished one again, which keeps its intact shards."""

from contextlib import suppress

import pyarrow.parquet as pq

from replaylens.engine.dump.head import Head
from replaylens.engine.dump.lock import FINISH, PATIENCE, DumpLock
from replaylens.engine.dump.manifest import INDEX, MANIFEST, MAX_BYTES, IndexEntry, Manifest, ShardEntry
from replaylens.engine.dump.parts import ShardParts
from replaylens.engine.dump.salvage import Describe, Salvage
from replaylens.engine.errors import BadDump


class Reopening:
    """Checks a finished dump against its manifest, and reopens it if files are damaged."""

    def __init__(self, head: Head, parts: ShardParts) -> None:
        self.head, self.parts, self.store = head, parts, parts.store

    def reopen_if_damaged(self, describe: Describe | None) -> bool:
        """Turn a finished dump with damaged files into an unfinished one that keeps its intact shards. Returns whether the
        dump is unfinished now.

        Damaged files are checked again under the lock, because another writer may have reopened or repaired the dump.
        """
        try:
            seen = self._manifest()
        except BadDump:
            if describe is None:
                raise
            self._rebuild(describe)
            return self.reopen_if_damaged(None) if self.store.exists(MANIFEST) else True
        suspects = self._damaged(seen) if seen is not None else set()
        if seen is not None and not suspects:
            return False
        with DumpLock(self.store, FINISH, PATIENCE):
            manifest = self._manifest()
            if manifest is None:
                self.head.check()
                return True
            if damaged := self._damaged(manifest, suspects):
                self._reopen(manifest, damaged)
            return bool(damaged)

    def _rebuild(self, describe: Describe) -> None:
        """Mutates: if the manifest is damaged, write plan.json and the entries of the shards it still vouches for, then remove
        the manifest."""
        with DumpLock(self.store, FINISH, PATIENCE):
            raw = self.store.peek(MANIFEST)
            with suppress(BadDump):
                if raw is None or Manifest.from_bytes(raw, self.store.url):
                    return  # another writer has reopened or repaired the dump
            salvage = Salvage(self.store, raw or b"", self.head.plan, self.head.fingerprint)
            intact = {}
            for number, entry, lines, sites in salvage.shards(describe):
                self.parts.write(number, entry, lines, sites)
                intact[number] = entry.digest
            self.head.rewrite(*salvage.digests(intact))
            self.store.remove(MANIFEST)
            self.store.remove(INDEX)

    def _manifest(self) -> Manifest | None:
        """The manifest, None if there is none. Raises OtherPlan or OtherFingerprint if it is not this writer's."""
        try:
            raw = self.store.read(MANIFEST, MAX_BYTES)
        except BadDump:
            if self.store.exists(MANIFEST):
                raise
            return None
        manifest = Manifest.from_bytes(raw, self.store.url)
        self.head.require(manifest.plan, manifest.fingerprint)
        return manifest

    def _damaged(self, manifest: Manifest, among: set[str] | None = None) -> set[str]:
        """Files, of all or of `among`, that are missing or do not match the manifest."""
        entries: dict[str, ShardEntry | IndexEntry] = {
            **{shard.name: shard for shard in manifest.shards},
            INDEX: manifest.index,
        }
        return {name for name in entries if (among is None or name in among) and not self.parts.is_whole(name, entries[name])}

    def _reopen(self, manifest: Manifest, damaged: set[str]) -> None:
        """Mutates: write plan.json and the entries of intact shards, then remove the manifest."""
        self.head.rewrite(manifest.digest, {i: entry.digest for i, entry in enumerate(manifest.shards)})
        if INDEX not in damaged:
            with self.store.open(INDEX) as file:
                groups = pq.ParquetFile(file)
                filled = [i for i, entry in enumerate(manifest.shards) if entry.rows]
                for group, i in enumerate(filled):
                    if manifest.shards[i].name not in damaged:
                        self.parts.write(i, manifest.shards[i], groups.read_row_group(group), manifest.sites)
        self.store.remove(MANIFEST)
        self.store.remove(INDEX)
