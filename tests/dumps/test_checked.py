"""Shards are hashed once, when they are first opened: a flipped bit is found, unless the check is switched off."""

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.dumps import shard
from replaylens.dumps.reader import Dump
from replaylens.dumps.store import Store
from replaylens.engine.errors import BadDump, BadRequest
from replaylens.engine.files import CACHE_VARIABLE
from replaylens.probes.rows import ProbeRows
from tests.dumps.conftest import in_memory
from tests.dumps.damage import edit_manifest, flip_bit


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the shards that are hashed from now on."""
    names: list[str] = []
    plain = Store.sha256
    monkeypatch.setattr(Store, "sha256", lambda store, name: names.append(name) or plain(store, name))
    return names


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file had been written an hour ago; the time of an inode's change cannot be set."""
    monkeypatch.setattr(shard, "_SETTLED_NS", -3600 * 10**9)


READERS = {
    "to_torch": lambda dump: dump.to_torch("S", 0),
    "an array's row": lambda dump: dump.array("S", 0)[len(dump) - 1],
    "pieces": lambda dump: dump.array("S", 0).pieces(),
    "take": lambda dump: dump.take([len(dump) - 1], "S"),
    "matrix": lambda dump: dump.where(accepted=True).matrix("S", 0, label="face"),
    "stream": lambda dump: list(dump.stream("S", 0)),
    "feed": lambda dump: list(dump.feed("S")),
    "feed with workers": lambda dump: list(dump.feed("S").loader(workers=1)),
    "statistics": lambda dump: dump.statistics("S", 0),
    "activation cache": lambda dump: dump.to_activation_cache(6),
    "content": lambda dump: dump.files.content(2),
    "probe rows": lambda dump: ProbeRows.of(dump).matrix("S", 0),
}


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_is_found(copy: Path, name: str) -> None:
    """By every reader; and by none if it is told not to look."""
    flip_bit(copy / "shard-00002.safetensors")
    with pytest.raises(BadDump, match=r"shard-00002\.safetensors was changed .* check=False"):
        READERS[name](Dump.open(copy))
    READERS[name](Dump.open(copy, check=False))


def test_the_rows_without_the_check_are_the_damaged_ones(copy: Path, reference: Dump) -> None:
    """Negative control: with the switch off, a flipped bit comes through as data."""
    flip_bit(copy / "shard-00002.safetensors")
    damaged = Dump.open(copy, check=False)
    pairs = {name: (damaged.to_torch(name).nan_to_num(), reference.to_torch(name).nan_to_num()) for name in reference.sites}
    assert len([name for name, (mine, other) in pairs.items() if not torch.equal(mine, other)]) == 1


def test_shards_that_are_not_read_are_not_hashed(copy: Path, hashed: list[str]) -> None:
    flip_bit(copy / "shard-00002.safetensors")
    dump = Dump.open(copy)
    dump.array("S", 0)[:3]
    dump.array("T", 1)[:3]
    assert hashed == ["shard-00000.safetensors"]


def test_hashed_once(copy: Path, hashed: list[str], cache: Path, settled: None) -> None:
    """The next process takes the result from the cache folder, for each file as long as it stays as it is."""
    names = [f"shard-0000{number}.safetensors" for number in range(3)]
    Dump.open(copy).to_torch("S", 0)
    assert sorted(hashed) == names
    hashed.clear()
    Dump.open(copy).to_torch("S", 0)
    assert hashed == [] and len(list((cache / "shards").iterdir())) == 1
    os.utime(copy / names[1])
    Dump.open(copy).to_torch("S", 0)
    assert hashed == names[1:2], "another time of change: hashed again"


def test_damage_after_the_check_is_found(copy: Path, settled: None) -> None:
    """Writing changes the time, though not the size."""
    Dump.open(copy).to_torch("S", 0)
    flip_bit(copy / "shard-00001.safetensors")
    with pytest.raises(BadDump, match="shard-00001"):
        Dump.open(copy).to_torch("S", 0)


def test_damage_with_the_old_time_is_found(copy: Path, settled: None) -> None:
    """The time of writing can be set back, that of the inode's change cannot."""
    path = copy / "shard-00001.safetensors"
    Dump.open(copy).to_torch("S", 0)
    before = os.stat(path)
    flip_bit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(path).st_mtime_ns == before.st_mtime_ns
    with pytest.raises(BadDump, match="shard-00001"):
        Dump.open(copy).to_torch("S", 0)


def test_a_result_holds_for_its_own_manifest(copy: Path, settled: None) -> None:
    """The file stays as it is, and another manifest, whose seal is right, names another hash."""
    Dump.open(copy).to_torch("S", 0)
    edit_manifest(copy, lambda raw: raw["shards"][1].update(sha256="0" * 64))
    with pytest.raises(BadDump, match="shard-00001"):
        Dump.open(copy).to_torch("S", 0)


def test_a_result_is_not_kept_for_a_file_that_may_still_change(copy: Path, hashed: list[str]) -> None:
    """A file written this very moment could change again without its time changing."""
    for path in copy.iterdir():
        os.utime(path)
    Dump.open(copy).to_torch("S", 0)
    first = len(hashed)
    Dump.open(copy).to_torch("S", 0)
    assert first and len(hashed) == 2 * first


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0", b"shard-00000.safetensors 1 2 3 x\n" * 5])
def test_a_damaged_record_costs_time_only(copy: Path, hashed: list[str], cache: Path, content: bytes, settled: None) -> None:
    Dump.open(copy).to_torch("S", 0)
    (record,) = (cache / "shards").iterdir()
    record.write_bytes(content)
    hashed.clear()
    Dump.open(copy).to_torch("S", 0)
    assert len(hashed) == 3


def test_no_cache_folder(copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settled: None) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert len(Dump.open(copy).to_torch("S", 0))


def test_remote_shards_are_hashed_on_request(reference: Dump, hashed: list[str]) -> None:
    """To be hashed, a remote shard has to be fetched whole."""
    store = in_memory(reference, "memory://checked").files.store
    raw = bytearray(store.read("shard-00001.safetensors", 1 << 30))
    raw[-1] ^= 1
    store.write("shard-00001.safetensors", bytes(raw))
    Dump.open("memory://checked").to_torch("S", 0)
    assert hashed == []
    with pytest.raises(BadDump):
        Dump.open("memory://checked", check=True).to_torch("S", 0)


def test_a_shard_that_vanished(copy: Path) -> None:
    dump = Dump.open(copy)
    (copy / "shard-00001.safetensors").unlink()
    with pytest.raises(BadDump, match="shard-00001"):
        dump.to_torch("S", 0)


def test_check_is_true_or_false(copy: Path) -> None:
    with pytest.raises(BadRequest, match="check"):
        Dump.open(copy, check="no")  # type: ignore[arg-type]


def test_probe_on_a_damaged_dump(copy: Path) -> None:
    """The command ends with a named error and its own code; --no-check reads what is there."""
    flip_bit(copy / "shard-00000.safetensors")
    command = ["probe", str(copy), "--label", "face", "--sites", "S", "--layers", "0", "--positions", "step", "--folds", "2"]
    quick = ["--estimators", "ridge", "--no-controls", "--quiet"]
    done = CliRunner().invoke(app, [*command, *quick])
    assert done.exit_code == 2 and done.stderr.startswith("BadDump: ") and "Resume the dump" in done.stderr
    assert CliRunner().invoke(app, [*command, *quick, "--no-check"]).exit_code == 0
