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

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
from safetensors import SafetensorError
from tqdm.auto import tqdm

from replaylens import boundary
from replaylens.dumps.content import CORE, LOCATORS, Content, RowHash, combine, concatenate, count_accepted
from replaylens.dumps.files import text_bytes, text_limit
from replaylens.dumps.lock import FINISH, LOCK_OR_CLAIM, PATIENCE, DumpLock, lock_name, sweep
from replaylens.dumps.manifest import (
    COMPRESSION,
    INDEX,
    MANIFEST,
    MAX_BYTES,
    PLAN,
    IndexEntry,
    Manifest,
    PlanFile,
    ShardEntry,
    ShardPart,
    ShardParts,
    SiteEntry,
    index_name,
    shard_name,
)
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.dumps.shard import write_shard
from replaylens.dumps.store import Store
from replaylens.engine.errors import BadDump, BadRequest, Caveat, DumpLocked, FolderExists, ReplayMismatch, UnfinishedDump
from replaylens.engine.files import TEMPORARY
from replaylens.engine.records import Fingerprint
from replaylens.engine.terminal import hidden

# ---- queue -----------------------------------------------------------------------------------------------------------
# `WriteQueue`: writes that run in background threads, a bounded number of them at a time.


class WriteQueue:
    """At most `threads` writes are under way. The first error of any of them is raised in the caller, at its next call.

    Leaving the block waits for the writes that have started, whether or not it failed: none is cut off in the middle.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dump-writer")
        self._under_way: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True)

    def put(self, write: Callable[..., None], *arguments: Any) -> None:
        """Start a write once fewer than `threads` are under way. What it holds is released when it ends."""
        while len(self._under_way) >= self.threads:
            self._under_way.popleft().result()
        self.check()
        self._under_way.append(self._pool.submit(write, *arguments))

    def check(self) -> None:
        """Raise the error of a write that failed. Does not wait."""
        for write in self._under_way:
            if write.done():
                write.result()

    def wait(self) -> None:
        """Wait until every write is done. Raises the first error among them."""
        while self._under_way:
            self._under_way.popleft().result()


# ---- manifest repair -------------------------------------------------------------------------------------------------
# `ManifestRepair`: what a damaged manifest still vouches for. Shards that it does not vouch for are made again.
#
# A manifest is text, and damage rarely reaches all of it. A file is intact if its own entry still contains its SHA-256. A
# plan is the dump's if the manifest still contains it. The shards' entries are computed again from the shards and the
# index. Digests that are still legible must come out again.

Describe = Callable[[Content], dict[str, SiteEntry]]
_LENS = ("Z.entropy", "Z.kl", "Z.emitted", "Z.top_ids", "Z.top_logprobs", "Z.targets", "Z.full")
IntactShard = tuple[int, ShardEntry, pa.Table, dict[str, SiteEntry]]
"""number, entry, index lines and sites of an intact shard"""


class ManifestRepair:
    """A damaged manifest, compared with the plan and the fingerprint of a writer. BadDump if it does not show that they are
    the dump's: shards of another plan must not be taken for this one's, nor be overwritten."""

    def __init__(self, store: Store, raw: bytes, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        self.store, self.raw, self.plan = store, raw, plan
        for name, value in (("plan", plan.to_json()), ("fingerprint", fingerprint.parts())):
            if not self._states(name, value):
                raise BadDump(
                    f"{store.url}: {MANIFEST} is damaged, and what is left of it does not name this {name}. Resume with the "
                    f"dump's own options and model. To compute all shards again, choose another folder."
                )

    def _states(self, name: str, value: Any) -> bool:
        return json.dumps({name: value}, indent=1)[2:-2].encode() in self.raw

    def _is_intact(self, name: str, entry: bytes) -> bool:
        wanted = _legible("sha256", entry)
        try:
            return wanted is not None and self.store.sha256(name) == wanted
        except FileNotFoundError:
            return False

    @cached_property
    def _entries(self) -> dict[str, bytes]:
        """What is left of the shards' entries, by name. A name that stands twice has none: one of them is another's."""
        found: list[tuple[bytes, bytes]] = re.findall(rb'\{"name": "(shard-\d{5,9}\.safetensors)"([^{}]*)', self.raw)
        times = Counter(name for name, _ in found)
        return {name.decode(): entry for name, entry in found if times[name] == 1}

    def _shard(self, number: int) -> bytes:
        return self._entries.get(shard_name(number), b"")

    def digests(self, intact: dict[int, str]) -> tuple[str | None, dict[int, str]]:
        """The digests of the dump and of its shards, as far as they are known. `intact`: those of intact shards.

        If the dump's contradicts those of its shards, theirs are kept: those of intact shards are computed from the files.
        """
        legible = {number: _legible("digest", self._shard(number)) for number in range(self.plan.num_shards)}
        shards = {number: digest for number, digest in legible.items() if digest is not None} | intact
        if len(shards) == self.plan.num_shards:
            return combine(shards[number] for number in range(self.plan.num_shards)), shards
        head = re.search(rb'^ "digest": [^\n]*', self.raw, re.MULTILINE)
        return _legible("digest", head[0]) if head else None, shards

    def shards(self, describe: Describe) -> Iterator[IntactShard]:
        """The intact shards, one at a time. None if the index is not intact."""
        entry = re.search(rb'^ "index": \{([^{}]*)', self.raw, re.MULTILINE)
        if entry is None or not self._is_intact(INDEX, entry[1]):
            return
        with self.store.open(INDEX) as file:
            index = pq.ParquetFile(file)
            for group in range(index.num_row_groups):
                lines = index.read_row_group(group)
                number = lines.column("shard")[0].as_py()
                if self._is_intact(shard_name(number), self._shard(number)):
                    try:
                        found = self._entry(number, lines, describe)
                    except SafetensorError:  # an edited entry can name the hash of any file
                        continue
                    yield number, *found

    def _entry(self, number: int, lines: pa.Table, describe: Describe) -> tuple[ShardEntry, pa.Table, dict[str, SiteEntry]]:
        name, indices = shard_name(number), self.plan.indices(number)
        with self.store.open(name) as file:
            tensors = safetensors.torch.load(file.read())
        sparse = [name for stored in self.plan.features for name in stored.tensors]
        order = [*self.plan.sites, *_LENS, *sparse, *sorted(tensors)]  # as they were captured; the file has them by name
        tensors = {site: tensors[site] for site in dict.fromkeys(order) if site in tensors}
        content = Content(tensors, lines.drop_columns(list(LOCATORS)))
        digest, accepted_digest = content.digests()
        entry = ShardEntry(
            name=name,
            first_example=indices[0],
            last_example=indices[-1],
            rows=len(content),
            accepted_rows=count_accepted(content.index),
            bytes=self.store.size(name),
            sha256=self.store.sha256(name),
            digest=digest,
            accepted_digest=accepted_digest,
        )
        return entry, lines, describe(content)


def _legible(field: str, entry: bytes) -> str | None:
    """A hash in what is left of an entry."""
    found = re.search(rb'"%b": "([0-9a-f]{64})"' % field.encode(), entry)
    return found[1].decode() if found else None


# ---- dump repair -----------------------------------------------------------------------------------------------------
# `DumpRepair`: a finished dump with damaged files becomes an unfinished one again, which keeps its intact shards.


class DumpRepair:
    """Checks a finished dump against its manifest, and reopens it if files are damaged."""

    def __init__(self, plan_file: PlanFile, parts: ShardParts) -> None:
        self.plan_file, self.parts, self.store = plan_file, parts, parts.store

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
                self.plan_file.check()
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
            repair = ManifestRepair(self.store, raw or b"", self.plan_file.plan, self.plan_file.fingerprint)
            intact = {}
            for number, entry, lines, sites in repair.shards(describe):
                self.parts.write(number, entry, lines, sites)
                intact[number] = entry.digest
            self.plan_file.rewrite(*repair.digests(intact))
            self.store.remove(MANIFEST)
            self.store.remove(INDEX)

    def _manifest(self) -> Manifest | None:
        """The manifest, None if there is none. Raises PlanMismatch or FingerprintMismatch if it is not this writer's."""
        try:
            raw = self.store.read(MANIFEST, MAX_BYTES)
        except BadDump:
            if self.store.exists(MANIFEST):
                raise
            return None
        manifest = Manifest.from_bytes(raw, self.store.url)
        self.plan_file.require(manifest.plan, manifest.fingerprint)
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
        self.plan_file.rewrite(manifest.digest, {i: entry.digest for i, entry in enumerate(manifest.shards)})
        if INDEX not in damaged:
            with self.store.open(INDEX) as file:
                groups = pq.ParquetFile(file)
                filled = [i for i, entry in enumerate(manifest.shards) if entry.rows]
                for group, i in enumerate(filled):
                    if manifest.shards[i].name not in damaged:
                        self.parts.write(i, manifest.shards[i], groups.read_row_group(group), manifest.sites)
        self.store.remove(MANIFEST)
        self.store.remove(INDEX)


# ---- writer ----------------------------------------------------------------------------------------------------------

WorkerPart = tuple[int, int]
"""(i, n): write every n-th shard, from number i on"""
_SHARD_FILE = r"(?:shard-(?P<shard>\d{5,9})\.safetensors|part-(?P<part>\d{5,9})\.(?:json|parquet))"
_OWN_ENDING = r"\.\d+-[0-9a-f]{8}" + re.escape(TEMPORARY)
_ENDING = r"(?:\.\d+-[0-9a-f]+)?" + re.escape(TEMPORARY)
_OF_SHARD = re.compile(_SHARD_FILE)
_TEMPORARY = re.compile(_SHARD_FILE + _ENDING)
_BEFORE_A_DUMP = re.compile(f"(?:{_SHARD_FILE}|{re.escape(PLAN)}){_OWN_ENDING}|{LOCK_OR_CLAIM.pattern}")
"""what a writer can leave that is killed before it writes plan.json, or after it removes it"""
_TEMPORARY_OF_DUMP = re.compile(f"(?:{'|'.join(map(re.escape, (PLAN, INDEX, MANIFEST)))}){_ENDING}")


def foreign_names(store: Store) -> list[str]:
    """The files of a folder without a dump that no writer leaves behind which is killed before it writes plan.json."""
    return [name for name in store.names() if not _BEFORE_A_DUMP.fullmatch(name)]


Make = Callable[[int, Callable[[int], object]], Content]
"""(shard number, progress callback) -> the shard's content"""


class DumpWriter:
    """Writes the files of one dump. Independent of models: content comes from a maker, here or on another machine."""

    def __init__(self, path: str | Path, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        if not str(path).strip():
            raise BadRequest("The path is empty. Name a folder for the dump.")
        self.store, self.plan, self.fingerprint = Store(path), plan, fingerprint
        self.plan_file = PlanFile(self.store, plan, fingerprint)
        self.parts = ShardParts(self.store)

    def write(
        self,
        make: Make,
        describe: Describe,
        expect: Callable[[list[int]], object] = lambda numbers: None,
        *,
        resume: bool = False,
        part: WorkerPart = (0, 1),
        progress: bool = False,
        writers: int = 1,
    ) -> Dump | None:
        """Make and write every missing shard of this part, then finish the dump if no shard of any part is missing.

        expect   called with the numbers of the shards before the first one is made
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

            expect(missing)
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
            ours = [name for name in self.store.sizes() if name == PLAN or _OF_SHARD.fullmatch(name)]
            done = any(name.endswith(".json") and name != PLAN for name in ours)
            if part[1] == 1 and not done and self.plan_file.digest is None:
                for name in sorted(ours, key=lambda name: name == PLAN):  # last: without it, shards are nobody's
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
        foreign = foreign_names(self.store)
        begun = any(self.store.exists(name) for name in (PLAN, MANIFEST)) if foreign else True
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
        if (MANIFEST in there or PLAN in there) and not resume and part[1] == 1:
            raise FolderExists(
                f"{self.store.url} holds {self._state(MANIFEST in there)} dump. Resume it (resume=True), or use another folder."
            )
        if MANIFEST in there:
            if not DumpRepair(self.plan_file, self.parts).reopen_if_damaged(describe):
                return []
        elif not self.plan_file.create():
            self.plan_file.check()
        return [number for number in self.numbers(part) if not self.parts.is_done(number)]

    def _state(self, manifest: bool) -> str:
        """Whether the folder's dump is finished. BadDump if its manifest, or plan.json, is damaged or somebody else's."""
        if not manifest:
            self.plan_file.read()
            return "an unfinished"
        try:
            Manifest.from_bytes(self.store.read(MANIFEST, MAX_BYTES), self.store.url)
        except BadDump as error:
            raise BadDump(f"{error} Choose another folder; if this is a dump of yours, resume it to repair it.") from None
        return "a finished"

    # ---- one shard ----------------------------------------------------------------------------------------------

    def write_shard(self, number: int, content: Content, sites: dict[str, SiteEntry]) -> None:
        """Write one shard: its tensors, its index, and last part-K.json, which marks both as complete.

        BadRequest if its labels have more text than a reader unpacks.
        """
        indices = self.plan.indices(number)
        for name, column in zip(content.index.column_names, content.index.columns, strict=True):
            if pa.types.is_string(column.type) and (size := text_bytes(column)) > text_limit(len(content)):
                raise BadRequest(
                    f"The values of {name!r} have {size} bytes in {len(content)} rows, more than the limit of "
                    f"{text_limit(len(content))}. Give shorter labels, or fewer examples per shard."
                )
        with self.store.writing(shard_name(number)) as file:
            hashed = RowHash(content.index)
            write_shard(file, content.tensors, hashed)
            digest, accepted_digest = hashed.digests()
            self.plan_file.check_digest(number, digest)  # if it fails, the file does not appear
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
            boundary.warn(
                f"{self.store.url} has no rows: positions={self.plan.positions!r} chooses none of {len(self.plan.examples)} "
                "examples. Give other positions, and mind the leading space of words.",
                Caveat,
            )
        shards = tuple(part.shard for part in parts)
        manifest = Manifest(self.plan, self.fingerprint, parts[0].sites, labels, index, shards)
        before = self.plan_file.digest
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
            if name == PLAN or part or _TEMPORARY.fullmatch(name) or _TEMPORARY_OF_DUMP.fullmatch(name):
                self.store.remove(name)
