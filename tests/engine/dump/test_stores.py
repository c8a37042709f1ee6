"""Stores that are out of reach, lack something, or are laid out otherwise: named errors with their own exit code, or a dump."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fsspec.registry import known_implementations
from typer.testing import CliRunner

from replaylens import cli
from replaylens.cli import app
from replaylens.commands.reporting import reporting
from replaylens.engine.dump.maker import write_dump
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.store import Store
from replaylens.engine.dump.verify import verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, DumpWriteFailed, EngineError, StoreFailed
from replaylens.engine.terminal import defer_interrupt
from tests.engine.dump.bucket import BucketFileSystem, NoCredentials

Planned = Callable[..., DumpPlan]


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
    dump = write_dump(engine, planned(), "bucket://mine/new/dump")
    assert dump is not None and dump.digest == reference.digest and bucket.buckets == {"mine"}
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
        found = "DamagedShard: " if command == "probe" and not remote else "BadDump: "
        assert code == 2 and said.startswith(found) and name in said and "Traceback" not in said


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
