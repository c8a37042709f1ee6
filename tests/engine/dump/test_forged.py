"""Forged metadata under a corrected seal: what a manifest and the locators say about the rows is compared with the rows."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from replaylens.engine.dump.maker import describe_sites
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import MISMATCH, diff, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadDump
from tests.engine.dump.damage import edit_manifest
from tests.engine.dump.test_old_dumps import OLD

T, C = "blocks.1.attn.hook_out", "blocks.1.mlp.hook_out"


def swap_letters(raw: dict[str, Any]) -> None:
    for site in raw["sites"].values():
        site["letter"] = {"T": "C", "C": "T"}.get(site["letter"], site["letter"])


def swap_aliases(raw: dict[str, Any]) -> None:
    one, other = raw["sites"][T], raw["sites"][C]
    one["aliases"], other["aliases"] = other["aliases"], one["aliases"]


def claim_a_stored_name(raw: dict[str, Any]) -> None:
    raw["sites"] = {T: raw["sites"][T], **raw["sites"]}  # before the site that has this name
    raw["sites"][T]["aliases"] = ["blocks.1.hook_in"]


def one_accepted_row_less(raw: dict[str, Any]) -> None:
    raw["shards"][0]["accepted_rows"] -= 1
    raw["accepted_rows"] -= 1


SITES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "letters": (swap_letters, "letter"),
    "aliases": (swap_aliases, "aliases"),
    "a stored name as an alias": (claim_a_stored_name, "aliases"),
    "a layer": (lambda raw: raw["sites"][C].update(layer=0), "layer"),
}
INDEX: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "the type of a label": (lambda raw: raw["labels"].update(face="int64"), "column 'face' is of type string, not int64"),
    "accepted rows": (one_accepted_row_less, "accepted rows"),
}


def forge_locator(folder: Path, column: str, change: Callable[[np.ndarray], Any]) -> None:
    """Change a locator in every group of the index; correct its hash and the seal. An Arrow array brings its own type."""
    path = folder / "index.parquet"
    source = pq.ParquetFile(path)
    place = source.schema_arrow.get_field_index(column)
    tables = [source.read_row_group(i) for i in range(source.num_row_groups)]
    changed = [change(table.column(column).to_numpy()) for table in tables]
    kind = changed[0].type if isinstance(changed[0], pa.Array) else source.schema_arrow.field(column).type
    tables = [table.set_column(place, column, pa.array(x, kind)) for table, x in zip(tables, changed, strict=True)]
    with pq.ParquetWriter(path, tables[0].schema, compression="zstd") as target:
        for table in tables:
            target.write_table(table, row_group_size=len(table))
    raw = path.read_bytes()
    note = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["index"].update(note))


@pytest.mark.parametrize("name", SITES)
def test_entries_of_sites(engine: Engine, reference: Dump, copy: Path, name: str) -> None:
    """One replayed example is enough to compare them."""
    change, what = SITES[name]
    edit_manifest(copy, change)
    verdict = verify(copy, engine, sample=0.01)
    assert verdict.status == MISMATCH and verdict.difference is not None, str(verdict)
    assert verdict.difference.what.startswith("site ") and what in verdict.difference.what
    found = diff(reference, copy).difference
    assert found is not None and found.what.startswith("site ") and what in found.what
    assert not diff(reference, copy, accepted=True)


@pytest.mark.parametrize("name", INDEX)
def test_what_the_index_contradicts(
    engine: Engine, reference: Dump, copy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a replay: no engine is needed to see it."""
    change, what = INDEX[name]
    edit_manifest(copy, change)
    verdict = verify(copy, engine)
    assert verdict.status == MISMATCH and any(what in problem for problem in verdict.problems), str(verdict)
    with pytest.raises(BadDump, match=what):
        diff(reference, copy)
    monkeypatch.setattr(engine, "fingerprint", replace(engine.fingerprint, torch="2.99.0"))
    assert verify(copy, engine).status == MISMATCH


@pytest.mark.parametrize("column, change", [("row", lambda x: x[::-1].copy()), ("shard", lambda x: np.full_like(x, 2))])
def test_locators(engine: Engine, reference: Dump, copy: Path, column: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """A reader that goes by `shard` and `row` would read other rows."""
    forge_locator(copy, column, change)
    verdict = verify(copy, engine)
    assert verdict.status == MISMATCH and f"column {column!r}" in verdict.problems[0], str(verdict)
    with pytest.raises(BadDump, match=column):
        diff(copy, reference)


@pytest.mark.parametrize("column", ["shard", "row", "example"])
@pytest.mark.parametrize("kind", ["text", "far away", "missing"])
def test_the_reader_looks_at_the_index(copy: Path, column: str, kind: str) -> None:
    """A column of another type, or with values of no row, is refused by everything that reads the index."""

    def change(x: np.ndarray) -> Any:
        far = pa.array(np.full_like(x, 2**30 if column == "shard" else 10**12))
        return {"text": pa.array(["one"] * len(x)), "far away": far, "missing": pa.nulls(len(x), far.type)}[kind]

    forge_locator(copy, column, change)
    dump = Dump.open(copy)
    with pytest.raises(BadDump, match=rf"is not the index of this dump: column '{column}'"):
        _ = dump.index
    with pytest.raises(BadDump, match=rf"column '{column}'"):
        _ = len(dump.where(**{column: 1}))


def test_untouched_locators_pass(engine: Engine, reference: Dump, copy: Path) -> None:
    """Negative control: the same rewriting, with nothing changed."""
    for column in ("row", "shard"):
        forge_locator(copy, column, lambda x: x)
    assert verify(copy, engine, sample="all") and diff(reference, copy)


def test_an_old_manifest_describes_its_sites_as_today(engine: Engine) -> None:
    """Negative control: dumps of earlier versions are no forgeries."""
    old = Dump.open(OLD)
    assert describe_sites(engine, old.files.content(0)) == old.manifest.sites


def test_an_alias_does_not_hide_a_stored_name(reference: Dump, copy: Path) -> None:
    edit_manifest(copy, claim_a_stored_name)
    forged = Dump.open(copy)
    assert forged.resolve("blocks.1.hook_in") == ("blocks.1.hook_in", None)
    assert torch.equal(forged.to_torch("blocks.1.hook_in"), reference.to_torch("blocks.1.hook_in"))
    edit_manifest(copy, lambda raw: raw["sites"].update({T: raw["sites"].pop(T)}))  # now after it
    mine, honest = (dump.to_activation_cache(0)["blocks.1.hook_in"] for dump in (Dump.open(copy), reference))
    assert torch.equal(mine, honest)
