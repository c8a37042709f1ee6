"""A damaged dump is repaired to its original digest or not at all."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from replaylens import Engine
from replaylens.engine.dump.content import Content
from replaylens.engine.dump.maker import ShardMaker, write_dump
from replaylens.engine.dump.manifest import PlanFile
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.writer import ManifestRepair
from replaylens.engine.errors import BadDump, ReplayMismatch, UnfinishedDump
from tests.engine.dump.damage import flip_bit

Planned = Callable[..., DumpPlan]
DAMAGED = "shard-00001.safetensors"


def test_a_repair_gives_the_digest_that_was(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    flip_bit(copy / DAMAGED)
    repaired = write_dump(engine, planned(), copy, resume=True)
    assert repaired is not None and repaired.digest == reference.digest
    assert (copy / DAMAGED).read_bytes() == Path(reference.url, DAMAGED).read_bytes()


@pytest.mark.parametrize("row", [0, -1])
def test_a_repair_that_gives_other_bits_is_refused(
    engine: Engine, planned: Planned, reference: Dump, copy: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """One bit of one row comes out otherwise: the dump is not finished under another digest, and the error names both.

    The wrong shard does not count as done: once the bits are right again, resuming gives the dump that was.
    """
    flip_bit(copy / DAMAGED)
    with monkeypatch.context() as patch:
        patch.setattr(ShardMaker, "make", _with_a_flipped_bit(ShardMaker.make, row))
        with pytest.raises(ReplayMismatch, match=f"shard 1 .* before, it was {reference.manifest.shards[1].digest}"):
            write_dump(engine, planned(), copy, resume=True)
    assert not (copy / "manifest.json").exists() and not (copy / "part-00001.json").exists()
    with pytest.raises(UnfinishedDump):
        Dump.open(copy)
    repaired = write_dump(engine, planned(), copy, resume=True)
    assert repaired is not None and repaired.digest == reference.digest


def test_a_repair_begun_without_digests_of_shards(
    engine: Engine, planned: Planned, reference: Dump, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan.json of an older version names the digest of the whole only: no shard of a wrong whole counts as done."""
    flip_bit(copy / DAMAGED)
    rewrite = PlanFile.rewrite
    with monkeypatch.context() as patch:
        patch.setattr(PlanFile, "rewrite", lambda self, digest, shards: rewrite(self, digest))
        patch.setattr(ShardMaker, "make", _with_a_flipped_bit(ShardMaker.make, 0))
        with pytest.raises(ReplayMismatch, match=f"before, it was {reference.digest}"):
            write_dump(engine, planned(), copy, resume=True)
    assert not (copy / "manifest.json").exists()
    repaired = write_dump(engine, planned(), copy, resume=True)
    assert repaired is not None and repaired.digest == reference.digest


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], list[int]]] = {
    "a broken seal": (lambda raw: raw.replace(b'"seal": "', b'"seal": "0', 1), []),
    "a flipped bit in a shard's entry": (lambda raw: _flip(raw, b'"sha256": "', 1), [0]),
    "a flipped bit in a digest": (lambda raw: _flip(raw, b'"digest": "', 0), []),
    "another number of rows": (lambda raw: _flip(raw, b'"rows": ', 0), []),
    "a site gone": (lambda raw: raw.replace(b'"blocks.0.hook_in": {', b'"blocks.0.hook_on": {'), []),
    "no JSON": (lambda raw: raw.replace(b'"labels": {', b'"labels": '), []),
    "cut in the shards": (lambda raw: raw[: raw.index(b"shard-00001")], [1, 2]),
    "cut before the shards": (lambda raw: raw[: raw.index(b'"shards"')], [0, 1, 2]),
    "a flipped bit in the index's hash": (lambda raw: _flip(raw, b'"sha256": "', 0), [0, 1, 2]),
}


def _flip(raw: bytes, after: bytes, times: int) -> bytes:
    """Change the character after the n-th occurrence of some text to another."""
    place = -1
    for _ in range(times + 1):
        place = raw.index(after, place + 1)
    place += len(after)
    return raw[:place] + (b"1" if raw[place : place + 1] != b"1" else b"2") + raw[place + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_rebuilt(
    engine: Engine, planned: Planned, reference: Dump, copy: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """From the shards that it still vouches for; the others are made again. Every file comes out as it was."""
    change, again = DAMAGES[damage]
    (copy / "manifest.json").write_bytes(change((copy / "manifest.json").read_bytes()))
    with pytest.raises(BadDump):
        Dump.open(copy)
    made, original = list[int](), ShardMaker.make

    def counting(self: ShardMaker, number: int, *given: Any) -> Content:
        made.append(number)
        return original(self, number, *given)

    monkeypatch.setattr(ShardMaker, "make", counting)
    repaired = write_dump(engine, planned(), copy, resume=True)
    assert repaired is not None and repaired.digest == reference.digest and made == again
    for name in reference.files.store.sizes():
        assert (copy / name).read_bytes() == Path(reference.url, name).read_bytes(), name
    assert sorted(path.name for path in copy.iterdir()) == sorted(reference.files.store.sizes())


def test_a_damaged_manifest_and_a_damaged_shard(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    """Negative control: a shard whose hash the manifest does not hold is not believed."""
    flip_bit(copy / DAMAGED)
    (copy / "manifest.json").write_bytes((copy / "manifest.json").read_bytes()[:-20])
    repaired = write_dump(engine, planned(), copy, resume=True)
    assert repaired is not None and repaired.digest == reference.digest


def test_a_damaged_manifest_and_swapped_shards(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    """A hash vouches for the shard in whose entry it stands, and for no other."""
    first, second = copy / "shard-00000.safetensors", copy / DAMAGED
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    _rebuilt(engine, planned, reference, copy)


@pytest.mark.parametrize("given", ["index.parquet", "a vouched-for text"])
def test_a_damaged_manifest_and_a_shard_that_is_none(
    engine: Engine, planned: Planned, reference: Dump, copy: Path, given: str
) -> None:
    """The shard is made again, even if its entry holds the hash of what lies there."""
    raw = (copy / "index.parquet").read_bytes() if given == "index.parquet" else b"no tensors"
    (copy / DAMAGED).write_bytes(raw)
    if given != "index.parquet":
        manifest, entry = (copy / "manifest.json").read_bytes(), reference.manifest.shards[1]
        (copy / "manifest.json").write_bytes(manifest.replace(entry.sha256.encode(), sha256(raw).hexdigest().encode()))
    _rebuilt(engine, planned, reference, copy)


def test_a_name_that_stands_twice_vouches_for_nothing(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    manifest = (copy / "manifest.json").read_bytes()
    (copy / "manifest.json").write_bytes(manifest.replace(b"shard-00000", b"shard-00001"))
    (copy / DAMAGED).write_bytes((copy / "shard-00000.safetensors").read_bytes())
    _rebuilt(engine, planned, reference, copy)


@pytest.mark.parametrize("damage", ["a broken seal", "a flipped bit in a digest", "cut before the shards"])
def test_a_rebuilt_manifest_has_the_digest_that_was(
    engine: Engine, planned: Planned, reference: Dump, copy: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """What a damaged manifest still says of digests is compared: other bits are refused, the right ones are written."""
    flip_bit(copy / DAMAGED)
    (copy / "manifest.json").write_bytes(DAMAGES[damage][0]((copy / "manifest.json").read_bytes()))
    with monkeypatch.context() as patch:
        patch.setattr(ShardMaker, "make", _with_a_flipped_bit(ShardMaker.make, 0))
        with pytest.raises(ReplayMismatch, match="before, it was"):
            write_dump(engine, planned(), copy, resume=True)
    assert not (copy / "manifest.json").exists() and not (copy / "part-00001.json").exists()
    repaired = write_dump(engine, planned(), copy, resume=True)
    assert repaired is not None and repaired.digest == reference.digest


def _rebuilt(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    """Break the seal, resume, and compare every file with the reference."""
    raw = (copy / "manifest.json").read_bytes()
    (copy / "manifest.json").write_bytes(raw.replace(b'"seal": "', b'"seal": "0', 1))
    assert write_dump(engine, planned(), copy, resume=True) is not None
    for name in reference.files.store.sizes():
        assert (copy / name).read_bytes() == Path(reference.url, name).read_bytes(), name


def test_an_entry_that_stands_twice_vouches_for_nothing(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    """One of the two is another shard's: neither its hash nor its digest is expected of the repair."""
    raw = (copy / "manifest.json").read_bytes().replace(b"shard-00001.safetensors", b"shard-00000.safetensors")
    repair = ManifestRepair(reference.files.store, raw, planned(), engine.fingerprint)
    assert [number for number, *_ in repair.shards(ShardMaker(engine, planned()).sites)] == [2]
    assert repair.digests({})[1] == {2: reference.manifest.shards[2].digest}


def test_what_a_file_holds_counts_more_than_what_its_entry_says(engine: Engine, planned: Planned, reference: Dump) -> None:
    """A digest that was edited in the manifest: the one computed from the intact file is expected of the repair."""
    raw = Path(reference.url, "manifest.json").read_bytes()
    digests = [shard.digest for shard in reference.manifest.shards]
    repair = ManifestRepair(reference.files.store, raw.replace(digests[0].encode(), b"0" * 64), planned(), engine.fingerprint)
    assert repair.digests({})[1][0] == "0" * 64
    whole, shards = repair.digests(dict(enumerate(digests)))
    assert whole == reference.digest and shards == dict(enumerate(digests))


@pytest.mark.parametrize("left", [b"", b"{", b"plan"])
def test_a_manifest_without_its_plan_is_not_rebuilt(engine: Engine, planned: Planned, copy: Path, left: bytes) -> None:
    """Shards of other options must not be taken for these; the way out is named, and works."""
    before = (copy / DAMAGED).read_bytes()
    (copy / "manifest.json").write_bytes(left)
    with pytest.raises(BadDump, match=r"does not name this plan.*choose another folder"):
        write_dump(engine, planned(), copy, resume=True)
    assert (copy / DAMAGED).read_bytes() == before and (copy / "manifest.json").read_bytes() == left
    assert write_dump(engine, planned(), copy.parent / "another") is not None


def test_other_options_do_not_rebuild_a_manifest(engine: Engine, planned: Planned, copy: Path) -> None:
    (copy / "manifest.json").write_bytes((copy / "manifest.json").read_bytes()[:-20])
    with pytest.raises(BadDump, match="Resume with the dump's own options"):
        write_dump(engine, planned(max_new=4), copy, resume=True)


@pytest.mark.parametrize("name", ["part-00000.parquet", "shard-00000.safetensors", "part-00000.json"])
def test_a_shard_of_an_unfinished_dump_counts_only_whole(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The tensors, index or note of a finished shard are damaged before the dump is finished: only that shard is rewritten."""
    folder, made, original = tmp_path / "unfinished", list[int](), ShardMaker.make

    def interrupted(self: ShardMaker, number: int, *given: Any) -> Content:
        made.append(number)
        if len(made) == 3:
            raise KeyboardInterrupt
        return original(self, number, *given)

    monkeypatch.setattr(ShardMaker, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_dump(engine, planned(), folder)
    flip_bit(folder / name, 0)
    resumed = write_dump(engine, planned(), folder, resume=True)
    assert resumed is not None and resumed.digest == reference.digest
    assert made == [0, 1, 2, 0, 2]


@pytest.mark.parametrize("damage", ["swapped", "empty", "gone"])
def test_the_index_of_another_writers_shard_is_checked(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, damage: str
) -> None:
    """The writer who finishes names the shard whose index is not the recorded one; resuming makes it again."""
    assert write_dump(engine, planned(), tmp_path, part=(0, 2)) is None
    first, second = tmp_path / "part-00000.parquet", tmp_path / "part-00002.parquet"
    one, other = first.read_bytes(), second.read_bytes()
    if damage == "swapped":
        first.write_bytes(other)
        second.write_bytes(one)
    elif damage == "empty":
        first.write_bytes(b"")
    else:
        first.unlink()
    wrong = "part-00000.parquet, part-00002.parquet" if damage == "swapped" else "part-00000.parquet"
    with pytest.raises(UnfinishedDump, match=rf"written: {wrong}\. Resume"):
        write_dump(engine, planned(), tmp_path, part=(1, 2))
    assert not (tmp_path / "manifest.json").exists()
    finished = write_dump(engine, planned(), tmp_path, part=(0, 2), resume=True)
    assert finished is not None
    for name in reference.files.store.sizes():
        assert (tmp_path / name).read_bytes() == Path(reference.url, name).read_bytes(), name


def _with_a_flipped_bit(original: Callable[..., Content], row: int) -> Callable[..., Content]:
    def make(self: ShardMaker, *given: Any) -> Content:
        content = original(self, *given)
        content.tensors["blocks.1.hook_in"].view(torch.int32)[row, 0] ^= 1
        return content

    return make
