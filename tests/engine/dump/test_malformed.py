"""Malformed dumps raise named errors before any of their content is executed or allocated."""

import ast
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaylens.engine.dump.reader import Dump
from replaylens.engine.errors import BadDump, EngineError
from tests.engine.dump.damage import edit_manifest, forge_shard

ROOT = Path(__file__).parents[3]


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
    from replaylens.engine.dump.store import Store

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
    files = [*(ROOT / "engine" / "dump").rglob("*.py"), *(ROOT / "src/replaylens/commands").glob("*.py")]
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
