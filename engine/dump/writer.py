"""`DumpWriter`: writes a dump shard by shard. It can be interrupted and resumed, and several writers can share a dump.

| file                      | while writing                                  | when finished             |
|---------------------------|------------------------------------------------|---------------------------|
| plan.json                 | plan and fingerprint; written first            | removed                   |
| shard-K.safetensors       | complete once it exists                        | stays                     |
| part-K.parquet            | the shard's index                              | merged into index.parquet |
| part-K.json               | the shard's hashes; written last               | merged into manifest.json |
| lock-I-of-N               | held by the writer of every N-th shard         | removed                   |

With one writing thread, at most two shards are in memory at a time: one is written while the next one is made.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm.auto import tqdm

from replaylens.engine.dump.content import CORE, LOCATORS, Content, concatenate, count_accepted
from replaylens.engine.dump.head import HEAD, Head
from replaylens.engine.dump.lock import FINISH, LOCK_OR_CLAIM, PATIENCE, DumpLock, lock_name, sweep
from replaylens.engine.dump.manifest import INDEX, MANIFEST, MAX_BYTES, IndexEntry, Manifest, ShardEntry, SiteEntry, shard_name
from replaylens.engine.dump.parts import COMPRESSION, ShardPart, ShardParts, index_name
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.queue import WriteQueue
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.reopening import Reopening
from replaylens.engine.dump.salvage import Describe
from replaylens.engine.dump.shard import write_shard
from replaylens.engine.dump.store import TEMPORARY, Store
from replaylens.engine.errors import BadDump, BadRequest, DumpExists, DumpLocked, NotCaptured, ReplayMismatch, UnfinishedDump
from replaylens.engine.progress import hidden
from replaylens.engine.proof.fingerprint import Fingerprint

WorkerPart = tuple[int, int]
"""(i, n): write every n-th shard, from number i on"""
_SHARD_FILE = r"(?:shard-(?P<shard>\d{5,9})\.safetensors|part-(?P<part>\d{5,9})\.(?:json|parquet))"
_OWN_ENDING = r"\.\d+-[0-9a-f]{8}" + re.escape(TEMPORARY)
_ENDING = r"(?:\.\d+-[0-9a-f]+)?" + re.escape(TEMPORARY)
_OF_SHARD = re.compile(_SHARD_FILE)
_TEMPORARY = re.compile(_SHARD_FILE + _ENDING)
_BEFORE_A_DUMP = re.compile(f"(?:{_SHARD_FILE}|{re.escape(HEAD)}){_OWN_ENDING}|{LOCK_OR_CLAIM.pattern}")
"""what a writer can leave that is killed before it writes plan.json, or after it removes it"""
_TEMPORARY_OF_DUMP = re.compile(f"(?:{'|'.join(map(re.escape, (HEAD, INDEX, MANIFEST)))}){_ENDING}")


Make = Callable[[int, Callable[[int], object]], Content]
"""(shard number, progress callback) -> the shard's content"""


class DumpWriter:
    """Writes the files of one dump. Independent of models: content comes from a maker, here or on another machine."""

    def __init__(self, path: str | Path, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        if not str(path).strip():
            raise BadRequest("The path is empty. Name a folder for the dump.")
        self.store, self.plan, self.fingerprint = Store(path), plan, fingerprint
        self.head = Head(self.store, plan, fingerprint)
        self.parts = ShardParts(self.store)

    def write(
        self,
        make: Make,
        describe: Describe,
        *,
        resume: bool = False,
        part: WorkerPart = (0, 1),
        progress: bool = False,
        writers: int = 1,
    ) -> Dump | None:
        """Make and write every missing shard of this part, then finish the dump if no shard of any part is missing.

        writers  threads that hash and write shards while the next ones are made, and so shards in memory besides those

        If a write fails, the next call of the progress callback raises its error. If the dump fails before its first shard is
        complete, nothing is left behind.
        """
        with (
            self._new_folder(),
            self.writing(part, resume, describe) as missing,
            self._beginning(part),
            self.progress_bar(missing, part, progress) as bar,
            WriteQueue(writers) as queue,
        ):

            def done(count: int) -> None:
                bar.update(count)
                queue.check()

            for number in missing:
                content = make(number, done)
                queue.put(self.write_shard, number, content, describe(content))
                del content  # the queue alone holds it, until it is written
            queue.wait()
        return self.finish()

    @contextmanager
    def writing(self, part: WorkerPart, resume: bool, describe: Describe | None = None) -> Iterator[list[int]]:
        """Hold the part's lock; yields the numbers of the shards to write. `describe` is needed to rebuild a manifest."""
        self.numbers(part)
        self._refuse_foreign()
        self.store.make()
        with DumpLock(self.store, lock_name(part)):
            missing = self.begin(part, resume, describe)
            self._remove_temporaries(part)
            yield missing

    @contextmanager
    def _new_folder(self) -> Iterator[None]:
        """If the block fails, remove the folder if it is new and empty."""
        was_there = self.store.has_folder()
        try:
            yield
        except BaseException:
            if not was_there:
                self.store.remove_folder()
            raise

    @contextmanager
    def _beginning(self, part: WorkerPart) -> Iterator[None]:
        """If the block fails before any shard is complete, remove its files, so that the next attempt may have another plan.

        Only under a lock on all shards, because other writers could share the plan. A reopened dump keeps its digest.
        """
        try:
            yield
        except BaseException:
            ours = [name for name in self.store.sizes() if name == HEAD or _OF_SHARD.fullmatch(name)]
            done = any(name.endswith(".json") and name != HEAD for name in ours)
            if part[1] == 1 and not done and self.head.digest is None:
                for name in sorted(ours, key=lambda name: name == HEAD):  # last: without it, shards are nobody's
                    self.store.remove(name)
            raise

    def progress_bar(self, missing: list[int], part: WorkerPart, shown: bool) -> Any:
        total = sum(len(self.plan.indices(number)) for number in self.numbers(part))
        done = total - sum(len(self.plan.indices(number)) for number in missing)
        return tqdm(total=total, initial=done, unit="example", desc="dump", disable=hidden(shown))

    def numbers(self, part: WorkerPart) -> range:
        """The shards of a part."""
        i, n = part
        if not 0 <= i < n:
            raise BadRequest(f"Invalid part {i}/{n}. Give i/n with 0 <= i < n.")
        return range(i, self.plan.num_shards, n)

    # ---- starting -----------------------------------------------------------------------------------------------

    def _refuse_foreign(self) -> None:
        """Raise BadDump for a folder that holds no dump, but files: under our names, they would be overwritten or removed."""
        foreign = [name for name in self.store.names() if not _BEFORE_A_DUMP.fullmatch(name)]
        begun = any(self.store.exists(name) for name in (HEAD, MANIFEST)) if foreign else True
        if not begun:  # asked after the look: another writer may have started the dump just now
            raise BadDump(
                f"{self.store.url} is not empty, and holds no dump but {min(foreign)[:100]!r}. Choose a new or an empty folder."
            )

    def _remove_temporaries(self, part: WorkerPart) -> None:
        """Remove what killed writers of this part left incomplete. Precondition: the part's lock is held."""
        for name in self.store.sizes():
            if (found := _TEMPORARY.fullmatch(name)) and int(found["shard"] or found["part"]) in self.numbers(part):
                self.store.remove(name)

    def begin(self, part: WorkerPart, resume: bool, describe: Describe | None = None) -> list[int]:
        """Check that the folder is empty or can be resumed. Returns the numbers of the shards to write."""
        there = self.store.sizes()
        if (MANIFEST in there or HEAD in there) and not resume and part[1] == 1:
            raise DumpExists(
                f"{self.store.url} holds {self._state(MANIFEST in there)} dump. Resume it, or choose another folder."
            )
        if MANIFEST in there:
            if not Reopening(self.head, self.parts).reopen_if_damaged(describe):
                return []
        elif not self.head.create():
            self.head.check()
        return [number for number in self.numbers(part) if not self.parts.is_done(number)]

    def _state(self, manifest: bool) -> str:
        """Whether the folder's dump is finished. BadDump if its manifest, or plan.json, is damaged or somebody else's."""
        if not manifest:
            self.head.read()
            return "an unfinished"
        try:
            Manifest.from_bytes(self.store.read(MANIFEST, MAX_BYTES), self.store.url)
        except BadDump as error:
            raise BadDump(f"{error} Choose another folder; if this is a dump of yours, resume it to repair it.") from None
        return "a finished"

    # ---- one shard ----------------------------------------------------------------------------------------------

    def write_shard(self, number: int, content: Content, sites: dict[str, SiteEntry]) -> None:
        """Write one shard: its tensors, its index, and last part-K.json, which marks both as complete."""
        indices = self.plan.indices(number)
        with self.store.writing(shard_name(number)) as file, ThreadPoolExecutor(1) as hashing:
            digests = hashing.submit(content.digests)  # beside the hash of the file
            write_shard(file, content.tensors)
            digest, accepted_digest = digests.result()
            self.head.check_digest(number, digest)  # if it fails, the file does not appear
        entry = ShardEntry(
            name=shard_name(number),
            first_example=indices[0],
            last_example=indices[-1],
            rows=len(content),
            accepted_rows=count_accepted(content.index),
            bytes=file.num_bytes,
            sha256=file.sha256,
            digest=digest,
            accepted_digest=accepted_digest,
        )
        index = content.index.append_column("shard", pa.array(np.full(len(content), number, dtype=np.int32)))
        self.parts.write(number, entry, index.append_column("row", pa.array(np.arange(len(content)))), sites)

    # ---- finishing ----------------------------------------------------------------------------------------------

    def finish(self) -> Dump | None:
        """If every shard is complete, merge the indices, write the manifest and clean up. Exactly one writer does this.

        Returns None while shards are missing. Raises DumpLocked if another writer holds the lock for too long, UnfinishedDump
        if the index of a shard is not the recorded one.
        """
        try:
            with DumpLock(self.store, FINISH, PATIENCE):
                if not self.store.exists(MANIFEST):
                    parts = [self.parts.entry(number) for number in range(self.plan.num_shards)]
                    whole = [part for part in parts if part is not None]
                    if len(whole) < len(parts):
                        return None
                    self._check_indices(whole)
                    self._merge(whole)
                self._clean_up()
        except DumpLocked:
            if not self.store.exists(MANIFEST):
                raise
        return Dump.open(self.store.url)

    def _check_indices(self, parts: list[ShardPart]) -> None:
        """Each writer has checked its own shards only."""
        wrong = [
            index_name(number) for number, part in enumerate(parts) if not self.parts.is_whole(index_name(number), part.index)
        ]
        if wrong:
            more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise UnfinishedDump(
                f"{self.store.url}: files are missing or were changed after they were written: {', '.join(wrong[:8])}{more}. "
                f"Resume the dump to make the shards of these numbers again."
            )

    def _merge(self, parts: list[ShardPart]) -> None:
        """Write index and manifest. Each shard is one row group of the index; shards without rows have none."""
        if any(part.sites != parts[0].sites for part in parts):
            raise BadDump(f"The shards of {self.store.url} hold different sites. Write it again into another folder.")
        schema = concatenate([self.parts.index(number).slice(0, 0) for number in range(len(parts))]).schema
        labels = {field.name: str(field.type) for field in schema if field.name not in (*CORE.names, *LOCATORS)}
        with self.store.writing(INDEX) as file, pq.ParquetWriter(file, schema, compression=COMPRESSION) as merged:
            for number in range(len(parts)):
                table = self.parts.index(number).cast(schema)
                if len(table):
                    merged.write_table(table, row_group_size=len(table))
        index = IndexEntry(sum(part.shard.rows for part in parts), file.num_bytes, file.sha256)
        if not index.rows:
            warnings.warn(
                f"{self.store.url} has no rows: positions={self.plan.positions!r} chooses none of {len(self.plan.examples)} "
                "examples. Give other positions, and mind the leading space of words.",
                NotCaptured,
                stacklevel=2,
            )
        shards = tuple(part.shard for part in parts)
        manifest = Manifest(self.plan, self.fingerprint, parts[0].sites, labels, index, shards)
        before = self.head.digest
        if before not in (None, manifest.digest):
            for number in range(len(parts)):  # which shard is wrong is not known, so that none counts as done
                self.parts.forget(number)
            raise ReplayMismatch(f"{self.store.url} has digest {manifest.digest} after its repair; before, it was {before}.")
        self.store.write(MANIFEST, manifest.to_bytes())

    def _clean_up(self) -> None:
        """Remove files that only writers need. Locks of live processes stay, and so do files that no writer makes."""
        sweep(self.store)
        for name in self.store.sizes():
            part = (found := _OF_SHARD.fullmatch(name)) is not None and found["part"] is not None
            if name == HEAD or part or _TEMPORARY.fullmatch(name) or _TEMPORARY_OF_DUMP.fullmatch(name):
                self.store.remove(name)
