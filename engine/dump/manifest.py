"""`Manifest`: the file that describes a dump. All of it is checked before any other file is read."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from replaylens.engine.dump.content import combine
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.errors import BadDump, EngineError
from replaylens.engine.model.sites import by_layer
from replaylens.engine.proof.fingerprint import Fingerprint

FORMAT = "replaylens-dump"
SCHEMA = 1
MANIFEST = "manifest.json"
INDEX = "index.parquet"
MAX_BYTES = 1 << 28
"""limit for a manifest; that of a million shards is less than half as large"""
_HEADER = 100_000_008
"""the longest header that safetensors allows, with its length field"""
_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
_LABELS = ("string", "int64", "bool", "null")
_MAX_ROWS, _MAX_SIZE = 1 << 40, 1 << 50


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


@dataclass(frozen=True)
class SiteEntry:
    """One stored tensor: [rows, *shape]."""

    dtype: str
    shape: tuple[int, ...]
    layer: int | None
    letter: str | None
    """S, T, C or Z"""
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
    first_example: int
    last_example: int
    rows: int
    accepted_rows: int
    bytes: int
    sha256: str
    digest: str
    accepted_digest: str

    @property
    def digests(self) -> tuple[str, str]:
        """As returned by `Content.digests`."""
        return self.digest, self.accepted_digest


@dataclass(frozen=True)
class IndexEntry:
    """The index file."""

    rows: int
    bytes: int
    sha256: str


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
            "fingerprint": asdict(self.fingerprint),
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
        try:
            raw = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadDump(f"{where}: {MANIFEST} is not JSON ({error.__class__.__name__}: {str(error)[:100]}).") from None
        reader = _Reader(where)
        reader.need(isinstance(raw, dict) and raw.get("format") == FORMAT, f"its format is not {FORMAT!r}")
        reader.need(raw.get("schema") == SCHEMA, f"it has schema {raw.get('schema')!r}, this version reads {SCHEMA}")
        seal = raw.pop("seal", None)
        reader.need(seal == _seal(raw), "its seal is broken, so it was edited or damaged")
        return reader.manifest(raw)


def _seal(raw: dict[str, Any]) -> str:
    """Hash of everything else in the manifest, so that edits are detected."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class _Reader:
    """Turns JSON into a checked Manifest. Every error names the dump and the field."""

    def __init__(self, where: str) -> None:
        self.where = where

    def need(self, fine: bool, complaint: str) -> None:
        if not fine:
            raise BadDump(f"{self.where}: {MANIFEST} is invalid: {complaint}.")

    def manifest(self, raw: dict[str, Any]) -> Manifest:
        sites = {str(name): self.site(str(name), entry) for name, entry in self.table(raw, "sites").items()}
        labels = {str(name): str(kind) for name, kind in self.table(raw, "labels").items()}
        self.need(set(labels.values()) <= set(_LABELS), f"label types must be {', '.join(_LABELS)}")
        self.need(isinstance(raw.get("shards"), list), "'shards' is not a list")
        shards = tuple(self.shard(number, entry) for number, entry in enumerate(raw["shards"]))
        index = self.record(IndexEntry, raw.get("index"), "index")
        manifest = Manifest(self.plan(raw), self.fingerprint(raw), sites, labels, index, shards)
        self.check_together(manifest, raw)
        return manifest

    def check_together(self, manifest: Manifest, raw: dict[str, Any]) -> None:
        plan, row_bytes = manifest.plan, sum(site.row_bytes for site in manifest.sites.values())
        self.need(all(site in manifest.sites for site in plan.sites), "its plan names sites that the dump does not store")
        self.need(
            len(manifest.shards) == plan.num_shards,
            f"it lists {len(manifest.shards)} shards, but {plan.num_shards} are planned",
        )
        for number, shard in enumerate(manifest.shards):
            indices, least = plan.indices(number), shard.rows * row_bytes
            fits = (shard.first_example, shard.last_example) == (indices[0], indices[-1]) and shard.accepted_rows <= shard.rows
            self.need(fits, f"{shard.name} does not hold the planned examples")
            self.need(
                least <= shard.bytes <= least + _HEADER, f"{shard.name}: {shard.rows} rows do not fit {shard.bytes} bytes"
            )
        self.need(manifest.index.rows == manifest.rows, "index and shards have different numbers of rows")
        for name in ("digest", "accepted_digest", "rows", "accepted_rows"):
            self.need(raw.get(name) == getattr(manifest, name), f"its field {name!r} does not match its shards")

    def site(self, name: str, raw: Any) -> SiteEntry:
        self.need(isinstance(raw, dict) and set(raw) == {f.name for f in fields(SiteEntry)}, f"site {name} is malformed")
        shape, layer, aliases = raw["shape"], raw["layer"], raw["aliases"]
        self.need(raw["dtype"] in _ITEM, f"site {name} has dtype {raw['dtype']!r}, known are {', '.join(_ITEM)}")
        whole = isinstance(shape, list) and len(shape) <= 4 and all(_whole(length, 1, 1 << 24) for length in shape)
        self.need(whole, f"site {name} has shape {str(shape)[:100]}, which is out of range")
        self.need(layer is None or _whole(layer, 0, 1 << 20), f"site {name} has layer {layer!r}")
        self.need(raw["letter"] in (None, "S", "T", "C", "Z"), f"site {name} has letter {raw['letter']!r}")
        self.need(isinstance(aliases, list) and all(isinstance(a, str) for a in aliases), f"aliases of {name} are malformed")
        entry = SiteEntry(raw["dtype"], tuple(shape), layer, raw["letter"], tuple(aliases))
        self.need(entry.row_bytes <= 1 << 32, f"site {name} has shape {shape}, which is out of range")
        return entry

    def shard(self, number: int, raw: Any) -> ShardEntry:
        entry = self.record(ShardEntry, raw, f"shards[{number}]")
        self.need(entry.name == shard_name(number), f"shard {number} is named {entry.name[:100]!r}, not {shard_name(number)!r}")
        return entry

    def record(self, kind: type[Any], raw: Any, what: str) -> Any:
        """A flat record: integers are counts, strings are names and hashes."""
        names = {f.name: f.type for f in fields(kind)}
        self.need(isinstance(raw, dict) and set(raw) == set(names), f"{what} is malformed")
        for name, wanted in names.items():
            most = _MAX_SIZE if name == "bytes" else _MAX_ROWS
            fine = _whole(raw[name], 0, most) if wanted in (int, "int") else isinstance(raw[name], str)
            if name == "sha256" or name.endswith("digest"):
                fine = fine and re.fullmatch("[0-9a-f]{64}", raw[name]) is not None
            self.need(fine, f"{what}.{name} is {str(raw[name])[:100]!r}, which is out of range")
        return kind(**raw)

    def plan(self, raw: dict[str, Any]) -> DumpPlan:
        return self.built(DumpPlan.from_json, self.table(raw, "plan"), "plan")

    def fingerprint(self, raw: dict[str, Any]) -> Fingerprint:
        found = self.table(raw, "fingerprint")
        self.need(all(isinstance(value, str) for value in found.values()), "'fingerprint' is malformed")
        return self.built(lambda given: Fingerprint(**given), found, "fingerprint")

    def built(self, make: Callable[[dict[str, Any]], Any], raw: dict[str, Any], what: str) -> Any:
        try:
            return make(raw)
        except (TypeError, KeyError, ValueError, AttributeError, EngineError) as error:
            raise BadDump(f"{self.where}: {MANIFEST} is invalid: '{what}' is malformed: {str(error)[:200]}") from None

    def table(self, raw: dict[str, Any], name: str) -> dict[str, Any]:
        self.need(isinstance(raw.get(name), dict), f"'{name}' is not an object")
        return dict(raw[name])


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
