"""Stores that are out of reach, lack something, or are laid out otherwise: named errors with their own exit code, or a dump."""

import errno
import hashlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from fsspec.registry import known_implementations
from safetensors.torch import load_file
from typer.testing import CliRunner

from replaylens import cli
from replaylens.cli import app
from replaylens.commands.reporting import reporting
from replaylens.dumps import store as store_module
from replaylens.dumps.content import Content
from replaylens.dumps.maker import ShardMaker, write_dump
from replaylens.dumps.manifest import PlanFile
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.dumps.store import Store
from replaylens.dumps.verify import MISMATCH, OTHER, diff, verify
from replaylens.dumps.writer import ManifestRepair
from replaylens.engine.engine import Engine
from replaylens.engine.errors import (
    BadDump,
    BadRequest,
    DumpWriteFailed,
    EngineError,
    ReplayMismatch,
    StoreFailed,
    UnfinishedDump,
)
from replaylens.engine.terminal import defer_interrupt
from tests.dumps.bucket import BucketFileSystem, NoCredentials
from tests.dumps.conftest import written
from tests.dumps.damage import flip_bit

Planned = Callable[..., DumpPlan]
pytestmark = pytest.mark.usefixtures("computed_once")


@pytest.fixture
def bucket() -> Iterator[type[BucketFileSystem]]:
    BucketFileSystem.reset("mine")
    yield BucketFileSystem
    BucketFileSystem.reset()


@pytest.fixture
def stored(bucket: type[BucketFileSystem], reference: Dump) -> str:
    """The reference dump in a bucket."""
    store = Store("bucket://mine/dump")
    for name in reference.files.store.sizes():
        store.write(name, Path(reference.url, name).read_bytes())
    return store.url


def run(*words: Any) -> tuple[int, str]:
    """Exit code, and the errors."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.stderr


# ---- layouts --------------------------------------------------------------------------------------------------------


def test_a_dump_of_links(engine: Engine, reference: Dump, copy: Path, tmp_path: Path) -> None:
    """As huggingface_hub's cache lays files out: links, relative ones, to blobs named by their hash."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(copy.iterdir())):
        shutil.move(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    dump = Dump.open(snapshot)
    assert dump.digest == reference.digest and (dump.to_numpy("S", 0) == reference.to_numpy("S", 0)).all()
    assert verify(snapshot, engine, sample=0.1)
    (blobs / f"{2:064x}").unlink()
    with pytest.raises(EngineError, match="is missing"):
        Dump.open(snapshot)


def test_links_to_folders_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "manifest.json").symlink_to(tmp_path / "folder")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert Store(tmp_path).sizes() == {}


def test_a_dump_in_a_bucket(engine: Engine, planned: Planned, reference: Dump, bucket: type[BucketFileSystem]) -> None:
    """Negative control of the tests below: nothing fails where nothing is wrong."""
    dump = written(engine, planned(), "bucket://mine/new/dump")
    assert dump.digest == reference.digest and bucket.buckets == {"mine"}
    assert sorted(dump.files.store.sizes()) == sorted(reference.files.store.sizes())
    assert verify(dump.url, engine, sample=0.1)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_mistyped_bucket_is_not_created(engine: Engine, planned: Planned, bucket: type[BucketFileSystem]) -> None:
    with pytest.raises(DumpWriteFailed, match="bucket does not exist"):
        write_dump(engine, planned(), "bucket://mime/dump")
    assert bucket.buckets == {"mine"} and bucket.objects == {}
    code, said = run("dump", "--n", 2, "--sites", "S", "--out", "bucket://mime", "--quiet")
    assert code == 3 and said.startswith("DumpWriteFailed: ") and bucket.buckets == {"mine"}


@pytest.mark.parametrize("command", ["inspect", "verify", "probe"])
def test_a_mistyped_bucket_is_no_bad_dump(bucket: type[BucketFileSystem], command: str) -> None:
    code, said = run(command, "bucket://mime/dump")
    assert code == 3 and said.startswith("StoreFailed: ") and "there is no bucket 'mime'" in said
    code, said = run(command, "bucket://mine/nothing")
    assert code == 2 and "bucket://mine/nothing does not exist" in said


FAILURES = [
    NoCredentials("Unable to locate credentials"),
    ConnectionRefusedError(111, "refused"),
    TimeoutError(),
    PermissionError(13, "no"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_store_out_of_reach(engine: Engine, planned: Planned, stored: str, bucket: Any, failure: Exception) -> None:
    """Whatever its library raises. It is no mismatch, and no bad dump."""
    dump = Dump.open(stored)
    bucket.failure = failure
    calls: list[Callable[[], object]] = [
        lambda: Dump.open(stored),
        lambda: verify(stored, engine),
        lambda: dump.to_torch("S", 0),
        lambda: dump.index,
        lambda: Store(stored).exists("manifest.json"),
        lambda: write_dump(engine, planned(), stored, resume=True),
        lambda: write_dump(engine, planned(), "bucket://mine/other"),
    ]
    for call in calls:
        with pytest.raises(
            StoreFailed, match=r"bucket://mine/.*" + type(failure).__name__ if not failure.args[1:] else "bucket"
        ):
            call()


def test_a_store_that_fails_while_the_index_is_read(stored: str, bucket: Any) -> None:
    dump = Dump.open(stored)
    assert len(dump.files.lines(0, ["token"]))
    bucket.failure = NoCredentials("expired")
    with pytest.raises(StoreFailed, match="NoCredentials: expired"):
        dump.files.shard(1)


@pytest.mark.parametrize("command", ["inspect", "verify", "probe", "report"])
def test_commands_say_that_a_store_is_out_of_reach(stored: str, bucket: Any, command: str, tmp_path: Path) -> None:
    bucket.failure = NoCredentials("Unable to locate credentials")
    out = ["--out", tmp_path / "page.html"] if command == "report" else []
    code, said = run(command, stored, *out, *([] if command == "inspect" else ["--quiet"]))
    assert code == 3 and said.startswith("StoreFailed: ") and "NoCredentials: Unable to locate credentials" in said
    assert "Traceback" not in said and said.count("\n") == 1


def test_a_real_address_where_nobody_answers() -> None:
    """fsspec's own file system, which connects when it is made."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        code, said = run("inspect", f"ftp://127.0.0.1:{taken.getsockname()[1]}/dump")
    assert code == 3 and said.startswith("StoreFailed: Cannot reach ftp://") and "refused" in said


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_implementations, "cloud", {"class": "no_such_package.Cloud", "err": "Install no_such_package"})
    with pytest.raises(StoreFailed, match="needs a package that is not installed: ImportError: Install no_such_package"):
        Store("cloud://bucket/dump")
    assert run("inspect", "cloud://bucket/dump")[0] == 3


def test_an_unknown_scheme_is_bad_input() -> None:
    with pytest.raises(BadRequest, match=r"Protocol not known: s4\. Known: .*\bs3\b"):
        Store("s4://bucket/dump")
    code, said = run("verify", "s4://bucket/dump", "--quiet")
    assert code == 2 and said.startswith("BadRequest: ")
    assert Store("simplecache::memory://chained").root, "links of a chain are looked at one by one"


@pytest.mark.parametrize("remote", [False, True])
def test_a_damaged_shard_under_probe(stored: str, copy: Path, bucket: Any, remote: bool) -> None:
    """Of the right size, so that it opens: the rows are refused when they are read."""
    name = "shard-00001.safetensors"
    path = copy / name
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])
    if remote:
        Store(stored).write(name, path.read_bytes())
    for command in ("probe", "report"):
        words = ["--sites", "S", "--folds", "2"] if command == "probe" else ["--verify", "0", "--out", copy / "page.html"]
        code, said = run(command, stored if remote else copy, *words, "--quiet")
        assert code == 2 and said.startswith("BadDump: ") and name in said and "Traceback" not in said


def test_what_nobody_expects_is_not_a_mismatch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python ends with 1 after an exception, which would say that the dump differs."""

    def broken(*given: Any, **options: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Dump, "open", broken)
    monkeypatch.setattr(sys, "argv", ["replaylens", "inspect", "x"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 70 and "RuntimeError: a bug" in capsys.readouterr().err


# ---- SIGTERM --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_leaves_a_resumable_dump(model_folder: Path, tmp_path: Path) -> None:
    """As Ctrl-C, with an exit code of its own."""
    words = ["dump", "--model", str(model_folder), "--n", "100000", "--max-new", "7", "--shard-examples", "2", "--quiet"]
    folder = tmp_path / "d"
    child = subprocess.Popen(
        [sys.executable, "-m", "replaylens", *words, "--out", str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 90
    while not list(folder.glob("part-*.json")) and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.05)
    child.terminate()
    try:
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 143 and "Terminated. To continue, run" in said and "Traceback" not in said
    assert not list(folder.glob("lock-*")) and not list(folder.glob("*.tmp")) and (folder / "plan.json").exists()


@pytest.mark.parametrize("interrupt", [signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL])
def test_sigterm_ends_a_command(interrupt: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a shell's background job, which ignores Ctrl-C. Afterwards, signals are handled as before."""
    before = signal.signal(signal.SIGINT, interrupt), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(typer.Exit) as ended, reporting(lambda: "it again"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            pytest.fail("nothing happened")
        assert ended.value.exit_code == 143 and "Terminated. To continue, run it again." in capsys.readouterr().err
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == (interrupt, before[1])
    finally:
        signal.signal(signal.SIGINT, before[0])


def test_sigterm_waits_where_ctrl_c_does(request: pytest.FixtureRequest) -> None:
    """What must happen as a whole does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    done = []
    with pytest.raises(typer.Exit) as ended, reporting(), defer_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        done.append("whole")
    assert done and ended.value.exit_code == 143
    with pytest.raises(typer.Exit) as ended, reporting():
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130, "negative control: Ctrl-C keeps its own code"


# ---- repair ----------------------------------------------------------------------------------------------------------
# A damaged dump is repaired to its original digest or not at all.

DAMAGED = "shard-00001.safetensors"


def test_a_repair_gives_the_digest_that_was(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    flip_bit(copy / DAMAGED)
    repaired = written(engine, planned(), copy, resume=True)
    assert repaired.digest == reference.digest
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
    repaired = written(engine, planned(), copy, resume=True)
    assert repaired.digest == reference.digest


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
    repaired = written(engine, planned(), copy, resume=True)
    assert repaired.digest == reference.digest


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
    repaired = written(engine, planned(), copy, resume=True)
    assert repaired.digest == reference.digest and made == again
    for name in reference.files.store.sizes():
        assert (copy / name).read_bytes() == Path(reference.url, name).read_bytes(), name
    assert sorted(path.name for path in copy.iterdir()) == sorted(reference.files.store.sizes())


def test_a_damaged_manifest_and_a_damaged_shard(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    """Negative control: a shard whose hash the manifest does not hold is not believed."""
    flip_bit(copy / DAMAGED)
    (copy / "manifest.json").write_bytes((copy / "manifest.json").read_bytes()[:-20])
    repaired = written(engine, planned(), copy, resume=True)
    assert repaired.digest == reference.digest


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
    repaired = written(engine, planned(), copy, resume=True)
    assert repaired.digest == reference.digest


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
    resumed = written(engine, planned(), folder, resume=True)
    assert resumed.digest == reference.digest
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
    written(engine, planned(), tmp_path, part=(0, 2), resume=True)
    for name in reference.files.store.sizes():
        assert (tmp_path / name).read_bytes() == Path(reference.url, name).read_bytes(), name


def _with_a_flipped_bit(original: Callable[..., Content], row: int) -> Callable[..., Content]:
    def make(self: ShardMaker, *given: Any) -> Content:
        content = original(self, *given)
        content.tensors["blocks.1.hook_in"].view(torch.int32)[row, 0] ^= 1
        return content

    return make


# ---- format ----------------------------------------------------------------------------------------------------------
# docs/dumps.md is sufficient: digests and seal computed from the page alone equal those of our code.

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
        digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
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
    page = (Path(__file__).parents[2] / "docs" / "dumps.md").read_text()
    manifest = json.loads(Path(reference.url, "manifest.json").read_text())
    names = [*manifest, *manifest["plan"], *(c for c in reference.columns if c not in reference.labels)]
    assert [name for name in names if name.removesuffix("_settings") not in page] == []


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "shard-00002.safetensors"])
def test_shards_have_no_metadata(reference: Dump, name: str) -> None:
    """Two or more metadata keys would make the bytes vary between saves."""
    raw = Path(reference.url, name).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert "__metadata__" not in header and list(header) == sorted(header)


# ---- old dumps -------------------------------------------------------------------------------------------------------
# A dump that was written when schema 1 was new: it opens, its hashes and digests hold, for ever.

OLD = Path(__file__).parent / "data" / "schema-1"
DIGEST = "5c21a05a9c3a2a755d0f2e218c8d7e63a996367ded44ec34fb23eb7fe66051e9"
ACCEPTED = "c5dd25a54d20492516ced4f5138905fb53205e36d66d39a7115495ffb6c32ab3"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy, so that nothing can change the committed files."""
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def test_it_opens_with_its_digests(old: Path) -> None:
    dump = Dump.open(old)
    assert (dump.digest, dump.accepted_digest) == (DIGEST, ACCEPTED)
    assert not dump.files.problems()
    for number, entry in enumerate(dump.manifest.shards):
        assert dump.files.content(number).digests() == entry.digests
    assert len(dump) == 87 and dump.manifest.accepted_rows == 75 and dump.manifest.plan.probabilities
    assert dump.index["logprob"].notna().any() and dump.index["entropy"].notna().all()


def test_it_says_who_could_replay_it(old: Path, engine: Engine) -> None:
    """Its model is the one of these tests, its arithmetic is older. The version named has replayed it, bit for bit."""
    found = verify(old, engine, sample=5)
    assert (found.status, found.rows) == (OTHER, 0), str(found)
    who = "replaylens 0.1.0 up to commit f10e131a, before portable-1, on aarch64 DEFAULT 0xd0c with torch 2.13.0+cpu"
    assert found.problems[-1] == f"its files are intact; {who} could replay it"


def test_damage_is_seen(old: Path, engine: Engine) -> None:
    flip_bit(old / "shard-00000.safetensors")
    assert Dump.open(old, check_files=False).files.problems()
    assert verify(old, engine, sample="all").status == MISMATCH


def test_it_can_be_compared(old: Path, reference: Dump) -> None:
    assert diff(old, OLD)
    found = diff(old, reference)
    assert (
        not found
        and found.arithmetic[0].startswith("1:tile16:block64 (float32 on aarch64")
        and found.arithmetic[1] == "portable-1"
    )


def test_a_large_file_is_flushed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of a flush is told once: it must not be lost, even if the last one succeeds."""
    flushed, refused, fsync = list[int](), list[int](), os.fsync

    def flush(file: int) -> None:
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            flushed.append(os.fstat(file).st_size)
            if len(flushed) in refused:
                raise OSError(errno.EIO, "Input/output error")
        fsync(file)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(store_module, "_FLUSHED", 1 << 20)
    store, block = Store(tmp_path), b"x" * (1 << 19)
    with store.writing("a.bin") as file:
        for _ in range(8):
            file.write(block)
            file.settle()
    assert flushed == [1 << 20, 2 << 20, 3 << 20, 4 << 20, 4 << 20] and (tmp_path / "a.bin").read_bytes() == 8 * block
    refused.append(len(flushed) + 1)
    with pytest.raises(DumpWriteFailed, match="Input/output error"), store.writing("b.bin") as file:
        file.write(4 * block)
    assert len(flushed) == 6 and [each.name for each in tmp_path.iterdir()] == ["a.bin"]
