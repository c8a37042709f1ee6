"""Whatever JSON stands in a manifest, plan or part: it is refused by a named error with the field's path, or it is valid."""

import ast
import copy as copies
import hashlib
import json
import math
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylens.dumps import files
from replaylens.dumps.maker import ShardMaker, describe_sites
from replaylens.dumps.manifest import Manifest, _seal
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.dumps.shard import ShardFile
from replaylens.dumps.store import Store
from replaylens.dumps.verify import MISMATCH, diff, verify
from replaylens.dumps.writer import DumpWriter
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadDump, BadRequest, EngineError
from replaylens.tasks.errors import TaskError
from tests.dumps.damage import edit_manifest, forge_shard
from tests.dumps.test_stores import OLD

Planned = Callable[..., DumpPlan]
FREE = ("knobs", "drafter_settings")
"""their content is any JSON: the task and the drafter check it"""


def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """Replace the value at a path such as `plan.examples.start`."""
    *way, last = path.split(".")

    def change(raw: Any) -> None:
        for step in way:
            raw = raw[int(step) if isinstance(raw, list) else step]
        raw[int(last) if isinstance(raw, list) else last] = value

    return change


HOSTILE: dict[str, tuple[str, Any]] = {
    "a float for a count": ("shards.0.rows", 4.0),
    "true for an index": ("shards.0.first_example", False),
    "a float for the schema": ("schema", 1.0),
    "true for the schema": ("schema", True),
    "a float for the first example": ("plan.examples.start", 0.0),
    "text for the last example": ("plan.examples.stop", "7"),
    "true for shard examples": ("plan.examples_per_shard", True),
    "a float for shard examples": ("plan.examples_per_shard", 4.0),
    "a float for the window": ("plan.window", 8.0),
    "a list for the window": ("plan.window", [8]),
    "text for a flag": ("plan.rejected", "no"),
    "a number for a flag": ("plan.rejected", 1),
    "a float for max_new": ("plan.max_new", 7.0),
    "a number for the task": ("plan.task", 3),
    "a list for the task": ("plan.task", ["coin"]),
    "a number for the positions": ("plan.positions", 3),
    "a list for the dtype": ("plan.dtype", ["float32"]),
    "nested lists for sites": ("plan.sites", [[["blocks.0.hook_in"]]]),
    "text for sites": ("plan.sites", "STC"),
    "a list for knobs": ("plan.knobs", [["flips", 3]]),
    "text for the drafter's settings": ("plan.drafter_settings", "fast"),
    "true for the temperature": ("plan.sampling.temperature", True),
    "a float for the seed": ("plan.sampling.seed", 0.0),
    "a list for the sampling": ("plan.sampling", [0]),
    "nothing of the sampling": ("plan.sampling", {}),
    "half of the lens": ("plan.lens", {"sites": ["blocks.0.hook_in"], "full": False}),
    "a float for top_k": ("plan.lens.top_k", 8.0),
    "text for a flag of the lens": ("plan.lens.full", "yes"),
    "an unknown field of the lens": ("plan.lens.hook", "os.system"),
    "text for edits": ("plan.edits", "none"),
    "a float for the layer": ("sites.blocks/0/hook_in.layer", 0.0),
    "true for a length": ("sites.blocks/0/hook_in.shape", [True]),
    "nested lists for a shape": ("sites.blocks/0/hook_in.shape", [[32]]),
    "nested lists for aliases": ("sites.blocks/0/hook_in.aliases", [["x"]]),
    "a list for the labels": ("labels", [["face", "string"]]),
    "a list for a hash": ("shards.0.sha256", ["0" * 64]),
    "a hash with a line end": ("shards.0.sha256", "0" * 64 + "\n"),
    "a list for the index": ("index", []),
    "a number for a fingerprint's part": ("fingerprint.weights", 7),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest(copy: Path, name: str) -> None:
    path, value = HOSTILE[name]
    edit_manifest(copy, with_slashes(set_at(path, value)))
    with pytest.raises(BadDump, match=r"manifest\.json") as caught:
        Dump.open(copy)
    field = path.split(".")[-1]
    assert field in str(caught.value), "the error names the field"


def with_slashes(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    """Names of sites have dots in them: a path writes slashes there."""

    def renamed(raw: dict[str, Any]) -> None:
        raw["sites"] = {name.replace(".", "/"): site for name, site in raw["sites"].items()}
        change(raw)
        raw["sites"] = {name.replace("/", "."): site for name, site in raw["sites"].items()}

    return renamed


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "[" * 5000 + "]" * 5000])
@pytest.mark.parametrize("place", ['"temperature": 0.0', '"p": 0.5'])
def test_numbers_that_are_none(copy: Path, place: str, literal: str) -> None:
    """Sealed by a writer whose JSON has such numbers, as Python's has."""
    path = copy / "manifest.json"
    text = path.read_text()
    assert place in text
    path.write_text(text.replace(place, f"{place.split(':')[0]}: {literal}"))
    if not literal.startswith("["):
        raw = json.loads(path.read_text())
        raw.pop("seal")
        raw["seal"] = _seal(raw)
        path.write_text(json.dumps(raw).replace("Infinity", "1e999") if literal == "1e999" else json.dumps(raw))
    with pytest.raises(BadDump, match=r"manifest\.json"):
        Dump.open(copy)


def places(raw: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, but none within what is free."""
    yield path
    inner = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for name, value in inner:
        if name not in FREE:
            yield from places(value, (*path, name))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_anywhere_in_a_manifest(reference: Dump, data: st.DataObject) -> None:
    """One value is replaced and the seal is right: BadDump, or a manifest that says the same when it is written again."""
    raw = json.loads(Path(reference.url, "manifest.json").read_text())
    del raw["seal"]
    path = data.draw(st.sampled_from([place for place in places(raw) if place]))
    value = data.draw(JSON)
    changed = copies.deepcopy(raw)
    there = changed
    for step in path[:-1]:
        there = there[step]
    there[path[-1]] = value
    changed["seal"] = _seal(changed)
    try:
        found = Manifest.from_bytes(json.dumps(changed).encode(), "here")
    except BadDump:
        return
    again = json.loads(found.to_bytes())
    for step in path:
        again = again[step]
    same = type(again) is type(value) or {type(again), type(value)} == {int, float}
    assert again == value and same, "it was taken for something else"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=JSON)
def test_any_json_as_a_plan(raw: Any) -> None:
    with pytest.raises(BadRequest, match="plan"):
        DumpPlan.from_json(raw)


@pytest.mark.parametrize(
    "change", [("plan.window", 8.0), ("plan", [1]), ("fingerprint.torch", 2), ("digest", "none"), ("x", 1)]
)
def test_hostile_plan_of_an_unfinished_dump(engine: Engine, planned: Planned, tmp_path: Path, change: tuple[str, Any]) -> None:
    writer = DumpWriter(tmp_path, planned(), engine.fingerprint)
    assert writer.plan_file.create()
    raw = json.loads((tmp_path / "plan.json").read_text())
    set_at(*change)(raw)
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    with pytest.raises(BadDump, match=r"plan\.json is"):
        writer.plan_file.check()


@pytest.mark.parametrize(
    "change",
    [("shard.rows", 4.0), ("shard.bytes", True), ("index.sha256", "x"), ("sites", []), ("shard.url", "x"), ("index", [[]])],
)
def test_a_hostile_part_is_no_part(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, change: tuple[str, Any]
) -> None:
    """The shard counts as missing, as if its entry had been cut short; so it is made again."""
    writer = DumpWriter(tmp_path, planned(), engine.fingerprint)
    content = reference.files.content(0)
    writer.write_shard(0, content, reference.manifest.sites)
    assert writer.parts.entry(0) is not None
    raw = json.loads((tmp_path / "part-00000.json").read_text())
    set_at(*change)(raw)
    (tmp_path / "part-00000.json").write_text(json.dumps(raw))
    assert writer.parts.entry(0) is None


@pytest.mark.parametrize("knobs", [{"self": 1}, {"flips": [[[]]]}, {"flips": {"a": 1}}, {"seed": True}, {"": None}])
def test_hostile_knobs_are_the_tasks_to_refuse(reference: Dump, knobs: dict[str, Any]) -> None:
    plan = DumpPlan.from_json({**reference.manifest.plan.to_json(), "knobs": knobs})
    with pytest.raises(TaskError):
        plan.make_task()


# ---- malformed -------------------------------------------------------------------------------------------------------
# Malformed dumps raise named errors before any of their content is executed or allocated.

ROOT = Path(__file__).parents[2]


def first_shard(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["shards"][0].update(changes)


def first_site(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["sites"]["blocks.0.hook_in"].update(changes)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda raw: raw.update(format="zip"), "its format is not"),
    "a later schema": (lambda raw: raw.update(schema=2), "schema 2, this version reads 1"),
    "a schema of another type": (lambda raw: raw.update(schema=[1]), "schema"),
    "a path upwards": (first_shard(name="../../etc/passwd"), "is named '../../etc/passwd'"),
    "an absolute path": (first_shard(name="/etc/passwd"), "is named '/etc/passwd'"),
    "another shard's name": (first_shard(name="shard-00001.safetensors"), "is named"),
    "absurdly many rows": (first_shard(rows=10**18), "rows"),
    "rows that do not fit": (first_shard(rows=10**9), "do not fit"),
    "bytes beyond rows and header": (
        lambda raw: raw["shards"][0].update(bytes=raw["shards"][0]["bytes"] + 10**9),
        "do not fit",
    ),
    "a negative size": (first_shard(bytes=-1), "bytes"),
    "a size that is no number": (first_shard(bytes="1e9"), "bytes"),
    "a boolean size": (first_shard(bytes=True), "bytes"),
    "a hash that is none": (first_shard(sha256="0"), "sha256"),
    "more accepted rows than rows": (first_shard(accepted_rows=10**6), "planned examples"),
    "other examples": (first_shard(last_example=77), "planned examples"),
    "an unknown field": (first_shard(url="http://x"), r"unknown field - at `\$.shards\[0\].url`"),
    "a missing shard entry": (lambda raw: raw["shards"].pop(), "shards, but"),
    "shards that are no list": (lambda raw: raw.update(shards={}), r"Expected `array`, got `object` - at `\$.shards`"),
    "sites that are no table": (lambda raw: raw.update(sites=[]), r"Expected `object`, got `array` - at `\$.sites`"),
    "an absurd shape": (first_site(shape=[1 << 40]), r"site blocks.0.hook_in is invalid: .* - at `\$.shape\[0\]`"),
    "a product too large": (first_site(shape=[1 << 20, 1 << 20]), "out of range"),
    "an empty dimension": (first_site(shape=[0]), ">= 1 - at"),
    "too many dimensions": (first_site(shape=[1] * 9), "length <= 4"),
    "an unknown dtype": (first_site(dtype="object"), r"float32.* - at `\$.dtype`"),
    "aliases that are none": (first_site(aliases=[1]), "aliases"),
    "a letter that is none": (first_site(letter="Q"), "letter"),
    "a negative layer": (first_site(layer=-1), "layer"),
    "an unknown label type": (lambda raw: raw["labels"].update(face="pickle"), r"int64.* - at `\$.labels"),
    "a digest of something else": (lambda raw: raw.update(digest="0" * 64), "field 'digest' does not match"),
    "sites that are not stored": (lambda raw: raw["plan"].update(sites=["blocks.9.hook_in"]), "does not store"),
    "another number of rows": (lambda raw: raw.update(rows=1), "field 'rows' does not match"),
    "an index of another length": (lambda raw: raw["index"].update(rows=1), "different numbers of rows"),
    "absurd examples": (lambda raw: raw["plan"].update(examples={"start": 0, "stop": 10**30}), r"at `\$.examples.stop`"),
    "examples that are none": (lambda raw: raw["plan"].update(examples={"indices": ["a"]}), "plan"),
    "no examples": (lambda raw: raw["plan"].update(examples={"indices": []}), "no examples"),
    "an unknown option": (
        lambda raw: raw["plan"].update(hook="os.system"),
        r"The plan is invalid: unknown field - at `\$.hook`",
    ),
    "a missing option": (lambda raw: raw["plan"].pop("task"), "plan"),
    "an option of another type": (lambda raw: raw["plan"].update(examples_per_shard="many"), "plan"),
    "sites that are numbers": (
        lambda raw: raw["plan"].update(sites=[1, 2]),
        r"The plan is invalid: Expected `str`, got `int` - at `\$.sites\[0\]`",
    ),
    "sampling that is none": (lambda raw: raw["plan"].update(sampling=3), "plan"),
    "another fingerprint's fields": (lambda raw: raw["fingerprint"].update(extra="x"), "fingerprint"),
    "a fingerprint of numbers": (lambda raw: raw["fingerprint"].update(torch=2), "fingerprint"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_malformed_manifest(copy: Path, name: str) -> None:
    """The manifest is sealed again after the edit, so the error names the fault and not the seal."""
    change, complaint = MANIFESTS[name]
    edit_manifest(copy, change)
    with pytest.raises(BadDump, match=complaint):
        Dump.open(copy)


def test_broken_seal(copy: Path) -> None:
    edit_manifest(copy, lambda raw: None, sealed=False)
    with pytest.raises(BadDump, match="seal"):
        Dump.open(copy)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04\x95", b"null", b"[]", b"{", b"[" * 100_000, b'{"format": NaN}', b"\xff\xfe", b"1" * 5000]
)
def test_not_a_manifest(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(BadDump, match=r"manifest\.json"):
        Dump.open(tmp_path)


def test_manifest_of_absurd_size(tmp_path: Path) -> None:
    """A sparse file of a terabyte is refused by its size without being read."""
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadDump, match="more than the limit"):
        Dump.open(tmp_path)


def test_no_dump_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lacks = {"": "is not a dump: it has no manifest.json", "no": "does not exist", "no/deep": "does not exist", "file": "file"}
    for path, what in [*((tmp_path / name, lack) for name, lack in lacks.items()), ("memory://no", "does not exist")]:
        with pytest.raises(BadDump, match=what):
            Dump.open(path)


def test_refusal_allocates_nothing(copy: Path) -> None:
    """A manifest that claims exabytes costs no more memory than reading it."""
    edit_manifest(copy, first_site(shape=[1 << 24, 1 << 24, 1 << 24, 1 << 24]))
    tracemalloc.start()
    with pytest.raises(BadDump):
        Dump.open(copy)
    assert tracemalloc.get_traced_memory()[1] < 10 * (copy / "manifest.json").stat().st_size + 1_000_000
    tracemalloc.stop()


def shard_bytes(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


SHARDS: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda raw: raw[:-9] + b"\0" * 9,  # the size is checked earlier: see below
    "not safetensors": lambda raw: b"\x80\x04" + raw[2:],
    "a header of exabytes": lambda raw: struct.pack("<Q", 1 << 60) + raw[8:],
    "a header longer than the file": lambda raw: struct.pack("<Q", len(raw)) + raw[8:],
    "a header that is no JSON": lambda raw: raw[:8] + b"x" * (len(raw) - 8),
    "an empty header": lambda raw: shard_bytes(b"{}").ljust(len(raw), b"\0"),
}


@pytest.mark.parametrize("name", [name for name in SHARDS if name != "cut short"])
@pytest.mark.parametrize("remote", [False, True])
def test_malformed_shard(copy: Path, name: str, remote: bool) -> None:
    """The shard has the right size, so only its content is wrong. Read from disk and from a remote store."""
    path = copy / "shard-00000.safetensors"
    path.write_bytes(SHARDS[name](path.read_bytes()))
    dump = Dump.open(to_memory(copy) if remote else copy)
    with pytest.raises(BadDump, match=r"shard-00000\.safetensors"):
        dump.to_torch("S", 0)


def to_memory(folder: Path) -> str:
    from replaylens.dumps.store import Store

    store = Store(f"memory://malformed/{folder.parent.name}")
    for path in folder.iterdir():
        store.write(path.name, path.read_bytes())
    return store.url


def test_cut_shard(copy: Path) -> None:
    path = copy / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BadDump, match=r"shard-00001\.safetensors has 1000 bytes"):
        Dump.open(copy)


@pytest.mark.parametrize("remote", [False, True])
def test_shard_of_other_shapes(copy: Path, remote: bool) -> None:
    """Tensors that differ from the manifest: an extra site, or rows of another width."""

    def swap(tensors: dict[str, Any]) -> None:
        x, y = tensors["blocks.0.hook_in"], tensors["blocks.1.hook_in"]
        tensors["blocks.0.hook_in"] = x.reshape(len(x) // 1, 2, -1)
        tensors["blocks.1.hook_in"] = y

    forge_shard(copy, 0, swap)
    with pytest.raises(BadDump, match=r"blocks\.0\.hook_in"):
        Dump.open(to_memory(copy) if remote else copy).to_torch("T", 0)


def test_shard_whose_rows_lie_elsewhere(copy: Path) -> None:
    """A remote header whose offsets point at bytes other than the tensor's own."""
    path = copy / "shard-00000.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = next(iter(header))
    start, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [start + (1 << 44), end + (1 << 44)]
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes((struct.pack("<Q", len(text)) + text + raw[8 + length :])[: len(raw)].ljust(len(raw), b"\0"))
    with pytest.raises(BadDump):
        Dump.open(to_memory(copy)).to_torch(name)


def with_offsets(replacement: Callable[[list[Any]], list[Any]]) -> Callable[[str], str]:
    """Change the offsets of the second tensor."""

    def change(text: str) -> str:
        header = json.loads(text)
        second = sorted(header, key=lambda name: header[name]["data_offsets"])[1]
        header[second]["data_offsets"] = replacement(header[second]["data_offsets"])
        return json.dumps(header, separators=(",", ":"))

    return change


HEADERS: dict[str, tuple[Callable[[str], str], str]] = {
    "infinite": (with_offsets(lambda ends: [math.inf, ends[1]]), r"offsets of '.*' are \[inf"),
    "not a number": (with_offsets(lambda ends: [ends[0], math.nan]), r"offsets of '.*' are \[\d+, nan"),
    "a fraction": (with_offsets(lambda ends: [ends[0] + 0.5, ends[1]]), r"offsets of '.*' are"),
    "a whole fraction": (with_offsets(lambda ends: [float(ends[0]), ends[1]]), r"offsets of '.*' are"),
    "a word": (with_offsets(lambda ends: [str(ends[0]), ends[1]]), r"offsets of '.*' are"),
    "negative": (with_offsets(lambda ends: [-8, ends[1]]), r"offsets of '.*' are \[-8"),
    "in the wrong order": (with_offsets(lambda ends: ends[::-1]), r"offsets of '.*' are"),
    "three of them": (with_offsets(lambda ends: [*ends, ends[1]]), r"offsets of '.*' are"),
    "huge": (with_offsets(lambda ends: [ends[0], 10**30]), "not where the tensor before it ends"),
    "overlapping": (with_offsets(lambda ends: [0, ends[1] - ends[0]]), "not where the tensor before it ends"),
    "a gap": (with_offsets(lambda ends: [ends[0] + 4, ends[1] + 4]), "not where the tensor before it ends"),
    "a name twice": (lambda text: "{" + text[1:].split("},", 1)[0] + "}," + text[1:], "has '.*' twice"),
    "a field twice": (lambda text: text.replace('"dtype":', '"dtype":"F16","dtype":', 1), "has 'dtype' twice"),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("remote", [False, True])
def test_a_header_that_says_where_no_rows_are(reference: Dump, tmp_path: Path, name: str, remote: bool) -> None:
    """Refused by the shard's name and what is wrong, before a row is read, and without a check of its hash."""
    change, saying = HEADERS[name]
    entry, sites = reference.manifest.shards[0], reference.manifest.sites
    raw = Path(reference.url, entry.name).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = change(raw[8 : 8 + length].decode().rstrip()).encode()
    made = shard_bytes(text + b" " * (-len(text) % 8), raw[8 + length :])
    store = Store(f"memory://headers/{tmp_path.name}" if remote else tmp_path)
    store.write(entry.name, made)
    with pytest.raises(BadDump, match=rf"{re.escape(entry.name)} is not a complete safetensors file: .*{saying}"):
        ShardFile(store, replace(entry, bytes=len(made)), sites)
    store.write(entry.name, raw)
    assert ShardFile(store, entry, sites).starts, "control: the shard as it was"


@pytest.mark.parametrize("packed", [True, False])
def test_a_small_index_that_unpacks_to_much(reference: Dump, copy: Path, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long text, the same in every row: as a dictionary, and repeated in pages that compress. The hashes are right."""
    monkeypatch.setattr(files, "_TEXT_AT_LEAST", 1 << 18)  # with the limit as it is, the test would write gigabytes
    assert len(Dump.open(copy).index) == reference.manifest.rows, "control: an honest index is below this limit, too"
    path = copy / "index.parquet"
    source = pq.ParquetFile(path)
    groups = [source.read_row_group(number) for number in range(source.num_row_groups)]
    with pq.ParquetWriter(path, source.schema_arrow, compression="zstd", use_dictionary=packed) as target:
        for lines in groups:
            place = lines.column_names.index("text")
            long = pa.array(["x" * (1 << 17)] * len(lines))
            target.write_table(lines.set_column(place, "text", long), row_group_size=len(lines))
    raw = path.read_bytes()
    note = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    edit_manifest(copy, lambda manifest: manifest["index"].update(note))
    assert len(raw) < 1 << 18 and reference.manifest.shards[0].rows << 17 > 1 << 23
    del groups, lines, long
    pool = pa.default_memory_pool()
    pool.release_unused()
    before = pool.bytes_allocated()
    with pytest.raises(BadDump, match=r"index\.parquet is not the index of this dump: .*'text' unpack.* to \d+ bytes for \d+"):
        Dump.open(copy).index.head()
    assert pool.bytes_allocated() - before < 1 << 20


def test_labels_that_no_reader_would_unpack(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    """Are refused when they are written, so that whatever was written can be read."""
    plan = planned(examples=2, examples_per_shard=2)
    content = ShardMaker(engine, plan).make(0)
    place = content.index.column_names.index("face")
    long = pa.array(["x" * (2 << 20)] * len(content))
    with pytest.raises(BadRequest, match=r"The values of 'face' have \d+ bytes in \d+ rows, more than the limit"):
        DumpWriter(tmp_path, plan, engine.fingerprint).write_shard(
            0, replace(content, index=content.index.set_column(place, "face", long)), {}
        )
    assert not list(tmp_path.iterdir())


def test_index_of_something_else(copy: Path) -> None:
    path = copy / "index.parquet"
    path.write_bytes(b"PAR1" + b"\0" * (path.stat().st_size - 8) + b"PAR1")
    dump = Dump.open(copy)
    assert len(dump.to_torch("S", 0)) == len(dump), "rows without conditions do not need it"
    with pytest.raises(BadDump, match=r"index\.parquet"):
        dump.where(accepted=True).matrix("S", 0)


def test_every_error_is_ours() -> None:
    assert issubclass(BadDump, EngineError) and issubclass(BadDump, ValueError)


def test_no_pickle_anywhere() -> None:
    """No module that reads or writes dumps can execute what it reads."""
    files = [*(ROOT / "src/replaylens/dumps").rglob("*.py"), *(ROOT / "src/replaylens/commands").glob("*.py")]
    assert {"reader.py", "writer.py", "dump.py", "verify.py"} <= {file.name for file in files}
    for file in files:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"} & set(names), file.name
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "torch.save", "np.load", "np.save"), (file.name, called)
                assert not any(keyword.arg == "allow_pickle" for keyword in node.keywords), file.name


# ---- forged ----------------------------------------------------------------------------------------------------------
# Forged metadata under a corrected seal: what a manifest and the locators say about the rows is compared with the rows.

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
