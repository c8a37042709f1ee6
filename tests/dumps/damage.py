"""Ways to damage a dump, from careless to careful: a careful one corrects every hash it breaks."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from replaylens.dumps.manifest import _seal, shard_name
from replaylens.dumps.reader import Dump
from replaylens.dumps.shard import write_shard
from replaylens.dumps.store import Store


def flip_bit(path: Path, place: int = -100) -> None:
    """Flip one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(bytes(raw))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object], sealed: bool = True) -> None:
    """Change the manifest. `sealed`: also correct its seal."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    raw.pop("seal")
    change(raw)
    raw["seal"] = _seal(raw) if sealed else "0" * 64
    path.write_text(json.dumps(raw))


def forge_shard(folder: Path, number: int, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a shard's tensors, and correct its hash in the manifest and the seal. Digests stay unchanged."""
    name = shard_name(number)
    tensors = load_file(folder / name)
    change(tensors)
    store = Store(folder)
    with store.writing(name) as file:
        write_shard(file, tensors)

    def note(raw: dict[str, Any]) -> None:
        raw["shards"][number] |= {"bytes": file.num_bytes, "sha256": file.sha256}

    edit_manifest(folder, note)


def forge_index(folder: Path, column: str, row: int, value: Any) -> None:
    """Change one cell of the index, and correct its hash in the manifest and the seal."""
    path = folder / "index.parquet"
    source = pq.ParquetFile(path)
    tables = [source.read_row_group(i) for i in range(source.num_row_groups)]
    values = tables[0].column(column).to_pylist()
    values[row] = value
    place = tables[0].column_names.index(column)
    tables[0] = tables[0].set_column(place, column, pa.array(values, tables[0].schema.field(column).type))
    with pq.ParquetWriter(path, source.schema_arrow, compression="zstd") as target:
        for table in tables:
            target.write_table(table, row_group_size=len(table))
    raw = path.read_bytes()
    note = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["index"].update(note))


def forge_digests(folder: Path) -> None:
    """The most careful damage: every digest is corrected too, so only a replay can detect it."""
    from replaylens.dumps.content import combine

    def note(raw: dict[str, Any]) -> None:
        found = [dump.files.content(number).digests() for number in range(len(raw["shards"]))]
        for shard, (digest, accepted) in zip(raw["shards"], found, strict=True):
            shard |= {"digest": digest, "accepted_digest": accepted}
        raw["digest"], raw["accepted_digest"] = (combine(part) for part in zip(*found, strict=True))

    dump = Dump.open(folder)
    edit_manifest(folder, note)
