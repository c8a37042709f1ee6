"""docs/dump_format.md is sufficient: digests and seal computed from the page alone equal those of our code."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from replaylens.engine.dump.reader import Dump

KINDS = {"bool": "flag", "string": "text", "float": "number", "int32": "whole", "int64": "whole"}


def column(name: str, values: list[Any], arrow_type: str) -> bytes:
    has = [value is not None for value in values]
    kind = KINDS[arrow_type] if any(has) else "nothing"
    out = f"column {name} {kind} {len(values)}\n".encode() + bytes(has)
    if kind == "text":
        texts = [value.encode() for value in values if value is not None]
        return out + np.array([len(text) for text in texts], "<i8").tobytes() + b"".join(texts)
    if kind == "nothing":
        return out
    return out + np.array([value or 0 for value in values], "<f4" if kind == "number" else "<i8").tobytes()


def part(tensors: dict[str, torch.Tensor], index: pa.Table, mask: np.ndarray) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name][mask.tolist()]
        digest.update(f"tensor {name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}\n".encode())
        digest.update(bytes(x.contiguous().untyped_storage()))
    lines = index.filter(pa.array(mask))
    for name in sorted({*lines.column_names} - {"shard", "row"}):
        digest.update(column(name, lines[name].to_pylist(), str(lines[name].type)))
    return digest.hexdigest()


def test_digests_and_seal_from_the_page(reference: Dump) -> None:
    folder = Path(reference.url)
    manifest = json.loads((folder / "manifest.json").read_text())
    index = pq.read_table(folder / "index.parquet")
    shards, accepted_shards = hashlib.sha256(), hashlib.sha256()
    for number, entry in enumerate(manifest["shards"]):
        lines = index.filter(pa.array(np.asarray(index["shard"]) == number))
        stands = np.asarray(lines["accepted"]).astype(bool)
        tensors = load_file(folder / entry["name"])
        accepted, rejected = part(tensors, lines, stands), part(tensors, lines, ~stands)
        digest = hashlib.sha256(f"accepted {accepted}\nrejected {rejected}\n".encode()).hexdigest()
        assert (digest, accepted) == (entry["digest"], entry["accepted_digest"])
        assert hashlib.sha256((folder / entry["name"]).read_bytes()).hexdigest() == entry["sha256"]
        shards.update(f"{digest}\n".encode())
        accepted_shards.update(f"{accepted}\n".encode())
    assert (shards.hexdigest(), accepted_shards.hexdigest()) == (manifest["digest"], manifest["accepted_digest"])
    seal = manifest.pop("seal")
    assert hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest() == seal


def test_the_page_names_every_column_and_field(reference: Dump) -> None:
    page = (Path(__file__).parents[3] / "docs" / "dump_format.md").read_text()
    manifest = json.loads(Path(reference.url, "manifest.json").read_text())
    names = [*manifest, *manifest["plan"], *(c for c in reference.columns if c not in reference.labels)]
    assert [name for name in names if name.removesuffix("_settings") not in page] == []


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "shard-00002.safetensors"])
def test_shards_have_no_metadata(reference: Dump, name: str) -> None:
    """Two or more metadata keys would make the bytes vary between saves."""
    raw = Path(reference.url, name).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert "__metadata__" not in header and list(header) == sorted(header)
