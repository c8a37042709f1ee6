"""`Manifest`: the file that describes a dump. All of it is checked before any other file is read."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Meta

from replaylens.dumps.content import combine
from replaylens.dumps.plan import PROBES, DumpPlan
from replaylens.dumps.store import Store
from replaylens.engine.errors import BadDump, EngineError, FingerprintMismatch, PlanMismatch, ReplayMismatch, UnfinishedDump
from replaylens.engine.model.sites import by_layer
from replaylens.engine.records import Fingerprint, Hash, build, one_of, parse, read

# ---- manifest --------------------------------------------------------------------------------------------------------

FORMAT = "replaylens-dump"
SCHEMA = 1
MANIFEST = "manifest.json"
INDEX = "index.parquet"
MAX_BYTES = 1 << 28
"""limit for a manifest; that of a million shards is less than half as large"""
_HEADER = 100_000_008
"""the longest header that safetensors allows, with its length field"""
_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
_MAX_ROW = 1 << 32
"""limit for the bytes of one row of a site"""
RowCount = Annotated[int, Meta(ge=0, le=1 << 40)]
Size = Annotated[int, Meta(ge=0, le=1 << 50)]
Length = Annotated[int, Meta(ge=1, le=1 << 24)]
LabelType = Annotated[str, one_of("string", "int64", "bool", "double", "null")]


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


@dataclass(frozen=True)
class SiteEntry:
    """One stored tensor: [rows, *shape]."""

    dtype: Annotated[str, one_of(*_ITEM)]
    shape: Annotated[tuple[Length, ...], Meta(max_length=4)]
    layer: Annotated[int, Meta(ge=0, le=1 << 20)] | None
    letter: Annotated[str, one_of("S", "T", "C", "Z")] | None
    aliases: tuple[str, ...]
    """other names of the same site"""

    @property
    def row_bytes(self) -> int:
        size = _ITEM[self.dtype]
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class ShardEntry:
    """One shard file, and the examples in it."""

    name: str
    first_example: RowCount
    last_example: RowCount
    rows: RowCount
    accepted_rows: RowCount
    bytes: Size
    sha256: Hash
    digest: Hash
    accepted_digest: Hash

    @property
    def digests(self) -> tuple[str, str]:
        """As returned by `Content.digests`."""
        return self.digest, self.accepted_digest


@dataclass(frozen=True)
class IndexEntry:
    """The index file."""

    rows: RowCount
    bytes: Size
    sha256: Hash


@dataclass(frozen=True)
class Manifest:
    """The description of a whole dump."""

    plan: DumpPlan
    fingerprint: Fingerprint
    sites: dict[str, SiteEntry]
    labels: dict[str, str]
    """label names with their Arrow types"""
    index: IndexEntry
    shards: tuple[ShardEntry, ...]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def accepted_rows(self) -> int:
        return sum(shard.accepted_rows for shard in self.shards)

    @property
    def digest(self) -> str:
        """Digest of the whole content."""
        return combine(shard.digest for shard in self.shards)

    @property
    def accepted_digest(self) -> str:
        """Digest of the accepted rows; the same for every drafter."""
        return combine(shard.accepted_digest for shard in self.shards)

    def letter(self, letter: str) -> list[str]:
        """Stored sites with this letter, in layer order."""
        return [name for name, site in self.sites.items() if site.letter == letter]

    def layers(self, letter: str) -> dict[int, str]:
        """Stored sites of S, T or C by layer."""
        return by_layer(self.letter(letter))

    def to_bytes(self) -> bytes:
        """The file's bytes; equal manifests give equal bytes."""
        raw: dict[str, Any] = {
            "format": FORMAT,
            "schema": SCHEMA,
            "digest": self.digest,
            "accepted_digest": self.accepted_digest,
            "rows": self.rows,
            "accepted_rows": self.accepted_rows,
            "fingerprint": self.fingerprint.parts(),
            "plan": self.plan.to_json(),
            "sites": {name: asdict(site) for name, site in self.sites.items()},
            "labels": self.labels,
            "index": asdict(self.index),
            "shards": [asdict(shard) for shard in self.shards],
        }
        raw["seal"] = _seal(raw)
        shards = ",\n".join("  " + json.dumps(shard) for shard in raw.pop("shards"))  # one line each
        head = json.dumps(raw, indent=1).removesuffix("\n}")
        return f'{head},\n "shards": [\n{shards}\n ]\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "Manifest":
        """Parse and check a manifest; BadDump says what is wrong. Allocates no more than the file's size requires."""
        raw = parse(content, f"{where}: {MANIFEST}", BadDump)
        checks = _Checks(where)
        checks.need(isinstance(raw, dict) and raw.get("format") == FORMAT, f"its format is not {FORMAT!r}")
        schema = raw.get("schema")
        known = type(schema) is int and schema == SCHEMA
        checks.need(known, f"it has schema {str(schema)[:60]}, this version reads {SCHEMA}")
        seal = raw.pop("seal", None)
        checks.need(seal == _seal(raw), "its seal is broken, so it was edited or damaged. Resume the dump to rebuild it")
        return checks.manifest(raw)


def _seal(raw: dict[str, Any]) -> str:
    """Hash of everything else in the manifest, so that edits are detected."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class _ManifestRecord:
    """What `Manifest.to_bytes` writes, without the seal. Plan and sites are read on their own, to name them in errors."""

    format: str
    schema: int
    digest: Hash
    accepted_digest: Hash
    rows: RowCount
    accepted_rows: RowCount
    fingerprint: Fingerprint
    plan: dict[str, Any]
    sites: dict[str, dict[str, Any]]
    labels: dict[str, LabelType]
    index: IndexEntry
    shards: tuple[ShardEntry, ...]


class _Checks:
    """Turns JSON values into a checked Manifest. Every error names the dump and the field."""

    def __init__(self, where: str) -> None:
        self.what = f"{where}: {MANIFEST}"

    def need(self, fine: bool, complaint: str) -> None:
        if not fine:
            raise BadDump(f"{self.what} is invalid: {complaint}.")

    def manifest(self, raw: dict[str, Any]) -> Manifest:
        read = build(_ManifestRecord, raw, self.what, BadDump)
        sites = {
            name: build(SiteEntry, entry, f"{self.what}, site {name[:100]}", BadDump) for name, entry in read.sites.items()
        }
        try:
            plan = DumpPlan.from_json(read.plan)
        except EngineError as error:
            raise BadDump(f"{self.what} is invalid: {str(error)[:300]}") from None
        manifest = Manifest(plan, read.fingerprint, sites, read.labels, read.index, read.shards)
        self.check_together(manifest, read)
        return manifest

    def check_together(self, manifest: Manifest, read: _ManifestRecord) -> None:
        for name, site in manifest.sites.items():
            self.need(site.row_bytes <= _MAX_ROW, f"site {name} has shape {list(site.shape)}, which is out of range")
        plan, row_bytes = manifest.plan, sum(site.row_bytes for site in manifest.sites.values())
        self.need(all(site in manifest.sites for site in plan.sites), "its plan names sites that the dump does not store")
        for stored in plan.features:
            shapes = [manifest.sites[name].shape if name in manifest.sites else None for name in stored.tensors]
            fine = shapes == [(stored.keep,), (stored.keep,), ()]
            self.need(fine, f"the features {stored.name!r} of its plan are not stored as planned")
        for probe in plan.probes:
            count, entry = probe.weight.shape[0] if probe.weight.shape else 0, manifest.sites.get(f"{PROBES}{probe.name}")
            fine = entry is not None and entry.shape == (() if count == 1 else (count,))
            self.need(fine, f"the scores of the probe {probe.name[:60]!r} of its plan are not stored as planned")
        self.need(
            len(manifest.shards) == plan.num_shards,
            f"it lists {len(manifest.shards)} shards, but {plan.num_shards} are planned",
        )
        for number, shard in enumerate(manifest.shards):
            wanted = shard_name(number)
            self.need(shard.name == wanted, f"shard {number} is named {shard.name[:100]!r}, not {wanted!r}")
            indices, least = plan.indices(number), shard.rows * row_bytes
            fits = (shard.first_example, shard.last_example) == (indices[0], indices[-1]) and shard.accepted_rows <= shard.rows
            self.need(fits, f"{shard.name} does not hold the planned examples")
            self.need(
                least <= shard.bytes <= least + _HEADER, f"{shard.name}: {shard.rows} rows do not fit {shard.bytes} bytes"
            )
        self.need(manifest.index.rows == manifest.rows, "index and shards have different numbers of rows")
        for name in ("digest", "accepted_digest", "rows", "accepted_rows"):
            self.need(getattr(read, name) == getattr(manifest, name), f"its field {name!r} does not match its shards")


# ---- plan file -------------------------------------------------------------------------------------------------------
# `PlanFile`: plan.json, the first file of an unfinished dump. It holds plan and fingerprint, so that other writers can join.

PLAN = "plan.json"
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class _PlanFileRecord:
    """The content of plan.json."""

    fingerprint: Fingerprint
    plan: dict[str, Any]
    digest: Hash | None = None
    shards: dict[int, Hash] = field(default_factory=dict)


class PlanFile:
    """Plan and fingerprint of one writer, and their comparison with those in the folder."""

    def __init__(self, store: Store, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        self.store, self.plan, self.fingerprint = store, plan, fingerprint

    def create(self) -> bool:
        """Write plan.json if the folder has none. Returns whether it was written."""
        return self.store.create(PLAN, self._bytes())

    def rewrite(self, digest: str | None = None, shards: dict[int, str] | None = None) -> None:
        """Mutates: record the digests of a damaged dump, of all of it and of its shards. Its repair must reproduce them."""
        self.store.write(PLAN, self._bytes(digest, shards))

    def _bytes(self, digest: str | None = None, shards: dict[int, str] | None = None) -> bytes:
        record = asdict(_PlanFileRecord(self.fingerprint, self.plan.to_json(), digest, shards or {}))
        return json.dumps(record | {"fingerprint": self.fingerprint.parts()}, indent=1).encode()

    def check(self) -> None:
        """Raise PlanMismatch or FingerprintMismatch if this writer cannot resume the folder's dump, BadDump if it is none."""
        found = self.read()
        try:
            plan = DumpPlan.from_json(found.plan)
        except EngineError as error:
            raise self._damaged(error) from None
        self.require(plan, found.fingerprint)

    @property
    def digest(self) -> str | None:
        """The digest of a damaged dump before it was reopened; None for a new dump."""
        return self.read().digest

    def check_digest(self, number: int, digest: str) -> None:
        """Raise ReplayMismatch if shard `number` had another digest before the dump was damaged."""
        before = self.read().shards.get(number) if self.store.exists(PLAN) else None
        if before not in (None, digest):
            raise ReplayMismatch(
                f"{self.store.url}: shard {number} has digest {digest} after its repair; before, it was {before}. It was not "
                f"written. Run `replaylens doctor`, then resume."
            )

    def read(self) -> _PlanFileRecord:
        """The content of plan.json; BadDump if it is damaged, or not that of a dump."""
        try:
            return read(_PlanFileRecord, self.store.read(PLAN, _MAX_BYTES), f"{self.store.url}/{PLAN}", BadDump)
        except BadDump as error:
            raise self._damaged(error) from None

    def _damaged(self, error: EngineError) -> BadDump:
        return BadDump(f"{self.store.url}/{PLAN} is damaged, or not that of a dump: {error} Choose another folder.")

    def require(self, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        """Raise PlanMismatch or FingerprintMismatch if these differ from the writer's own."""
        if differences := self.plan.differences(plan):
            raise PlanMismatch(
                f"{self.store.url} was started with other options: {'; '.join(differences)}. Resume it with those options, "
                f"or choose another folder."
            )
        if differences := self.fingerprint.differences(fingerprint):
            raise FingerprintMismatch(
                f"{self.store.url} was started under another fingerprint: {'; '.join(differences)}. Resume it there, or choose "
                f"another folder."
            )


def without_manifest(store: Store, path: str) -> BadDump:
    """The error for a folder with plan.json and no manifest: an unfinished dump, or rollouts, whose plan has the same name."""
    try:
        raw = parse(store.read(PLAN, _MAX_BYTES), PLAN, BadDump)
    except BadDump:  # a damaged plan: resuming says so
        raw = None
    if isinstance(raw, dict) and "wave" in raw:
        return BadDump(
            f"{path} holds rollouts, not a dump. To make a dump of their rows, draw them with `replaylens resample --sites S "
            f"--dump FOLDER` and give that FOLDER; in Python, read rollouts with `Rollouts.load`."
        )
    return UnfinishedDump(f"{path} is not finished. Resume the dump.")


# ---- parts -----------------------------------------------------------------------------------------------------------
# `ShardParts`: the part files of an unfinished dump. A shard is complete once its entry, part-K.json, is written.

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
