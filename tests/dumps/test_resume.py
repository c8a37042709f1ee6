"""A dump interrupted anywhere resumes to the same bits. Two writers never write the same shard."""

import errno
import io
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import replaylens as rl
from replaylens.dumps import content as module
from replaylens.dumps import writer as dump_writer
from replaylens.dumps.content import Content, Joiner, Pieces, RowHash, end_to_end, first_difference
from replaylens.dumps.lock import DumpLock, LockOwner, lock_name
from replaylens.dumps.maker import ShardMaker, make_plan, write_dump
from replaylens.dumps.manifest import Manifest, PlanFile, ShardParts
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.dumps.shard import write_shard
from replaylens.dumps.store import HashingFile, Store
from replaylens.dumps.writer import DumpWriter
from replaylens.engine import files
from replaylens.engine.engine import Engine
from replaylens.engine.errors import (
    BadDump,
    BadRequest,
    DumpLocked,
    DumpWriteFailed,
    FingerprintMismatch,
    FolderExists,
    PlanMismatch,
    UnfinishedDump,
)
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof.trace import Trace
from replaylens.probes.rows import ProbeRows
from replaylens.replay.replayer import Result
from replaylens.tasks import Example, WordTokenizer
from replaylens.tasks.task import AnyTask
from tests.devices import swept
from tests.dumps.conftest import written
from tests.dumps.damage import flip_bit

Planned = Callable[..., DumpPlan]
pytestmark = pytest.mark.usefixtures("computed_once")


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process and return its wait status. The child's exit does not affect pytest."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def count_steps(at: Callable[[int], None]) -> None:
    """From now on, call `at(n)` before the n-th step of this process that touches the store."""
    done = 0

    def counted(original: Callable[..., Any], counts: Callable[..., bool] = lambda *given: True) -> Callable[..., Any]:
        def step(*given: Any, **options: Any) -> Any:
            nonlocal done
            if counts(*given):
                at(done)
                done += 1
            return original(*given, **options)

        return step

    def at_the_beginning(file: HashingFile, data: Any) -> bool:
        """The first two writes of a file. A parquet file has dozens of similar ones."""
        file.num_writes = getattr(file, "num_writes", 0) + 1  # type: ignore[attr-defined]
        return bool(file.num_writes <= 2)  # type: ignore[attr-defined]

    for name in ("replace", "fsync", "link", "unlink", "pwrite"):
        setattr(os, name, counted(getattr(os, name)))
    HashingFile.write = counted(HashingFile.write, at_the_beginning)  # type: ignore[method-assign]
    Store.remove = counted(Store.remove)  # type: ignore[method-assign]


@pytest.mark.parametrize("apart", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step(engine: Engine, planned: Planned, tmp_path: Path, apart: int) -> None:
    """SIGKILL before each write, flush, rename and removal (or every fifth one). The partial dump is refused, then resumed to
    the same bytes."""
    plan = planned(examples=2, examples_per_shard=1, max_new=2, sites="S")
    maker = ShardMaker(engine, plan)
    made = [maker.make(number) for number in range(2)]  # done beforehand: the test is about files

    def write(folder: Path, resume: bool = False) -> Dump | None:
        writer = dump_writer.DumpWriter(folder, plan, engine.fingerprint)
        return writer.write(lambda number, done: made[number], maker.sites, resume=resume)

    whole = write(tmp_path / "whole")
    assert whole is not None
    for killed_at in range(0, 200, apart):
        folder = tmp_path / f"at{killed_at}"

        def work(fatal: int = killed_at, folder: Path = folder) -> None:
            count_steps(lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == fatal else None)
            write(folder)

        status = in_child(work)
        if not os.WIFSIGNALED(status):
            break
        begun, finished = (folder / "plan.json").exists(), (folder / "manifest.json").exists()
        if not finished:
            with pytest.raises(BadDump):
                Dump.open(folder)
        again = write(folder, resume=begun or finished)
        assert again is not None and again.digest == whole.digest, f"killed at step {killed_at}"
        assert sorted(again.files.store.sizes()) == sorted(whole.files.store.sizes()), f"killed at step {killed_at}"
    assert killed_at > 40, "the steps were not counted"
    assert os.WEXITSTATUS(status) == 0


def test_whole_shards_are_kept(engine: Engine, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming redoes only what is missing."""
    made: list[int] = []
    original = ShardMaker.make

    def counting(self: ShardMaker, number: int, *rest: Any) -> Any:
        made.append(number)
        if len(made) == 3:
            raise KeyboardInterrupt
        return original(self, number, *rest)

    monkeypatch.setattr(ShardMaker, "make", counting)
    with pytest.raises(KeyboardInterrupt):
        write_dump(engine, planned(), tmp_path)
    assert made == [0, 1, 2] and not list(tmp_path.glob("lock-*")), "the lock is given back"
    with pytest.raises(UnfinishedDump, match="Resume the dump"):
        Dump.open(tmp_path)
    (tmp_path / "shard-00001.safetensors").write_bytes(b"half")
    assert write_dump(engine, planned(), tmp_path, resume=True) is not None
    assert made == [0, 1, 2, 1, 2], "shard 0 was kept, shard 1 failed its hash"


@pytest.mark.parametrize("room", swept([0, 5_000, 60_000, 150_000], 0, 60000))
def test_disk_full(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A full disk raises a clear error and leaves no partial file under its final name. With free space the dump resumes."""
    left = room
    original = HashingFile.write

    def limited(self: HashingFile, data: Any) -> int:
        nonlocal left
        left -= memoryview(data).nbytes
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(HashingFile, "write", limited)
        with pytest.raises(DumpWriteFailed, match=r"No space left on device.*resume"):
            write_dump(engine, planned(), tmp_path)
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob("lock-*"))
    for shard in tmp_path.glob("part-*.json"):
        assert json.loads(shard.read_text())["shard"]["bytes"] == (tmp_path / shard.name.replace("part", "shard").replace(
            "json", "safetensors")).stat().st_size  # fmt: skip
    resumed = written(engine, planned(), tmp_path, resume=True)
    assert resumed.digest == reference.digest


def test_real_limit_on_files(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    """The kernel itself refuses further writes: the same clear error."""
    import resource

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            write_dump(engine, planned(), tmp_path)
        except DumpWriteFailed as error:
            assert "too large" in str(error)
            os._exit(7)

    assert os.WEXITSTATUS(in_child(work)) == 7
    assert not list(tmp_path.glob("*.tmp"))
    assert write_dump(engine, planned(), tmp_path, resume=True) is not None


def test_existing_dumps_are_not_overwritten(engine: Engine, planned: Planned, copy: Path) -> None:
    with pytest.raises(FolderExists, match="a finished dump"):
        write_dump(engine, planned(), copy)
    with pytest.raises(PlanMismatch, match="max_new"):
        write_dump(engine, planned(max_new=3), copy, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_failure_before_the_first_shard_leaves_nothing(
    engine: Engine, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    """The corrected plan can then be written to the same place. A folder that was there stays."""

    def fail(*_: object) -> None:
        raise BadRequest("too long")

    for folder in (tmp_path / "new", tmp_path / "old"):
        if folder.name == "old":
            folder.mkdir()
        with monkeypatch.context() as patch, pytest.raises(BadRequest, match="too long"):
            patch.setattr(ShardMaker, "make", fail)
            write_dump(engine, planned(), folder, resume=resume)
    assert not (tmp_path / "new").exists() and list((tmp_path / "old").iterdir()) == []
    assert write_dump(engine, planned(examples=5), tmp_path / "new") is not None


MINE = (
    "My_notes.tmp",
    "notes.tmp",
    "part-notes.md",
    "part-one.json",
    "part-1.parquet",
    "part-00000.parquet.bak",
    "part-00000.md.tmp",
    "shard-list.txt",
    "shard-00000.safetensors.txt",
    "shard-00000.mine.tmp",
    "plan.json.tmp.txt",
)


@pytest.mark.parametrize("fails", [False, True])
def test_files_of_the_user_stay(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Whether the dump is finished or fails early, it removes only files that writers make, those of killed ones included."""
    left = ("manifest.json.77-0123abcd.tmp", "index.parquet.77-0123abcd.tmp", "shard-00001.safetensors.77-0123abcd.tmp")
    assert dump_writer.DumpWriter(tmp_path, planned(), engine.fingerprint).plan_file.create()
    for name in (*MINE, *left):
        (tmp_path / name).write_text("mine")
    if fails:
        monkeypatch.setattr(ShardMaker, "make", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_dump(engine, planned(), tmp_path, resume=True)
        made = set(left[:2])  # the writer who finishes removes these
    else:
        finished = written(engine, planned(), tmp_path, resume=True)
        assert finished.digest == reference.digest
        made = set(reference.files.store.sizes())
    assert {path.name for path in tmp_path.iterdir()} == {*MINE, *made}
    assert all((tmp_path / name).read_text() == "mine" for name in MINE)


def test_files_of_the_user_that_look_like_locks_stay(engine: Engine, planned: Planned, reference: Dump) -> None:
    """On a store without flock, where claims on locks are files too."""
    store, mine = Store("memory://like-locks"), ("lock-Notes", "takeover-Notes", "takeover-notes")
    assert dump_writer.DumpWriter(store.url, planned(), engine.fingerprint).plan_file.create()
    for name in mine:
        store.fs.pipe_file(f"{store.root}/{name}", b"mine")
    assert write_dump(engine, planned(), store.url, resume=True) is not None
    assert sorted(store.sizes()) == sorted({*reference.files.store.sizes(), *mine})


FOREIGN = (
    "index.parquet",
    "shard-00000.safetensors",
    "part-00000.json",
    "shard-00000.safetensors.tmp",
    "manifest.json",
    "plan.json",
    ".hidden",
    "notes.txt",
    "sub",
)


@pytest.mark.parametrize("how", ["new", "resumed", "a part"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_somebody_else(engine: Engine, planned: Planned, tmp_path: Path, name: str, how: str) -> None:
    """Whatever its files are named, nothing of it is changed, and nobody is told to delete it."""
    file = tmp_path / name
    file.mkdir() if name == "sub" else file.write_text('{"name": "mine"}')
    with pytest.raises(BadDump, match=r"hoose a(nother| new or an empty) folder") as caught:
        write_dump(engine, planned(), tmp_path, resume=how == "resumed", part=(1, 2) if how == "a part" else (0, 1))
    assert (
        [each.name for each in tmp_path.iterdir()] == [name] and "elete" not in str(caught.value) and name in str(caught.value)
    )
    assert name == "sub" or file.read_text() == '{"name": "mine"}'


def test_a_bucket_of_somebody_else(engine: Engine, planned: Planned) -> None:
    store = Store("memory://foreign")
    store.fs.pipe_file(f"{store.root}/deeper/index.parquet", b"mine")
    with pytest.raises(BadDump, match="not empty, and holds no dump but 'deeper'"):
        write_dump(engine, planned(), store.url)
    assert store.fs.find(store.root) == ["/foreign/deeper/index.parquet"]


def test_folders_in_place_of_files(engine: Engine, planned: Planned, copy: Path) -> None:
    """A dump of ours, in which somebody put folders where files belong: they are named, and no network is blamed."""
    (copy / "shard-00001.safetensors").unlink()
    (copy / "shard-00001.safetensors").mkdir()
    with pytest.raises(BadDump, match=r"shard-00001\.safetensors is missing"):
        Dump.open(copy)
    with pytest.raises(BadDump, match=r"shard-00001\.safetensors is a folder, where a file of a dump belongs"):
        Dump.open(copy, check_files=False).to_torch("S", 0)
    with pytest.raises(DumpWriteFailed, match=r"shard-00001\.safetensors: Is a directory.*Move that folder away, and resume"):
        write_dump(engine, planned(), copy, resume=True)
    (copy / "plan.json").unlink()
    (copy / "plan.json").mkdir()
    with pytest.raises(BadDump, match=r"plan\.json is a folder, where a file of a dump belongs"):
        write_dump(engine, planned(), copy, resume=True)


def test_a_folder_that_another_writer_begins_meanwhile(
    engine: Engine, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing can miss plan.json and show the first shard: parts of one dump start at the same time."""
    assert write_dump(engine, planned(), tmp_path, part=(0, 2)) is None
    monkeypatch.setattr(Store, "names", lambda self: ["shard-00000.safetensors"])
    assert write_dump(engine, planned(), tmp_path, part=(1, 2)) is not None


def test_a_clean_up_that_is_killed(engine: Engine, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first attempt fails, and is killed while it removes its files: plan.json goes last, so that the rest is still ours."""
    removed = list[str]()
    write, remove = Store.write, Store.remove

    def stop(self: Store, name: str) -> None:
        removed.append(name)
        remove(self, name)

    def full(self: Store, name: str, data: bytes) -> None:
        if name == "part-00000.json":
            raise DumpWriteFailed("full")
        write(self, name, data)

    monkeypatch.setattr(Store, "remove", stop)
    monkeypatch.setattr(Store, "write", full)
    with pytest.raises(DumpWriteFailed, match="full"):
        write_dump(engine, planned(), tmp_path)
    files = [name for name in removed if not name.startswith("lock")]
    assert files[-1] == "plan.json" and "shard-00000.safetensors" in files and not list(tmp_path.iterdir())


def test_a_failure_after_the_first_shard_leaves_it(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: complete shards are kept, and so is their plan."""
    make = ShardMaker.make

    def fail_at_two(maker: ShardMaker, number: int, *rest: Any) -> Any:
        if number == 2:
            raise BadRequest("too long")
        return make(maker, number, *rest)

    with monkeypatch.context() as patch, pytest.raises(BadRequest, match="too long"):
        patch.setattr(ShardMaker, "make", fail_at_two)
        write_dump(engine, planned(), tmp_path)
    assert (tmp_path / "plan.json").exists() and (tmp_path / "part-00000.json").exists()
    with pytest.raises(FolderExists, match=r"Resume it \(resume=True\), or use another folder\.$"):
        write_dump(engine, planned(examples=5), tmp_path)
    resumed = written(engine, planned(), tmp_path, resume=True)
    assert resumed.digest == reference.digest


def test_a_failed_repair_keeps_the_digest(
    engine: Engine, planned: Planned, reference: Dump, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished dump without a single intact shard keeps its digest, which the repair must reproduce."""
    for number in range(3):
        flip_bit(copy / f"shard-{number:05d}.safetensors")

    def fail(*_: object) -> None:
        raise BadRequest("too long")

    with monkeypatch.context() as patch, pytest.raises(BadRequest, match="too long"):
        patch.setattr(ShardMaker, "make", fail)
        write_dump(engine, planned(), copy, resume=True)
    assert json.loads((copy / "plan.json").read_text())["digest"] == reference.digest


def test_resume_with_other_options_or_weights(
    engine: Engine, model: Decoder, tokenizer: WordTokenizer, planned: Planned, tmp_path: Path
) -> None:
    """An unfinished dump resumes only with its own plan and weights."""
    assert write_dump(engine, planned(), tmp_path, part=(0, 2)) is None
    with pytest.raises(FolderExists, match="an unfinished dump"):
        write_dump(engine, planned(), tmp_path)
    with pytest.raises(PlanMismatch, match=r"drafter: tree here, lens there"):
        write_dump(engine, planned(drafter="tree"), tmp_path, resume=True)
    other = Decoder(model.config)
    other.load_state_dict(model.state_dict())
    other.requires_grad_(False).embed.view(-1).view(dtype=__import__("torch").int32)[7] ^= 1
    changed = Engine(other, tokenizer)
    with pytest.raises(FingerprintMismatch, match="weights"):
        write_dump(changed, planned(engine=changed), tmp_path, resume=True)


def test_damaged_plan(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(BadDump, match="damaged"):
        write_dump(engine, planned(), tmp_path, resume=True)


@pytest.mark.parametrize("lost", ["shard-00001.safetensors", "index.parquet"])
def test_resume_repairs_a_finished_dump(engine: Engine, planned: Planned, reference: Dump, copy: Path, lost: str) -> None:
    """A lost or damaged file of a finished dump is rewritten. The digest must not change."""
    (copy / lost).unlink()
    with pytest.raises(BadDump, match=f"{lost} is missing"):
        Dump.open(copy)
    repaired = written(engine, planned(), copy, resume=True)
    assert repaired.digest == reference.digest
    for name in reference.files.store.sizes():
        assert (copy / name).read_bytes() == Path(reference.url, name).read_bytes(), name


def test_two_repair_one_dump(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    """One writer sees the damage. Before it acts, another writer repairs and finishes the dump."""
    flip_bit(copy / "shard-00000.safetensors")
    maker, repaired = ShardMaker(engine, planned()), list[Dump | None]()

    class Slow(ShardParts):
        def is_whole(self, name: str, entry: Any) -> bool:
            whole = super().is_whole(name, entry)
            if name == "index.parquet" and not repaired:  # the last file that is checked
                repaired.append(write_dump(engine, planned(), copy, part=(0, 2), resume=True))
            return whole

    slow = dump_writer.DumpWriter(copy, planned(), engine.fingerprint)
    slow.parts = Slow(slow.store)
    late = slow.write(maker.make, maker.sites, resume=True, part=(1, 2))
    assert repaired[0] is not None and late is not None
    assert Dump.open(copy).digest == reference.digest and sorted(late.files.store.sizes()) == sorted(
        reference.files.store.sizes()
    )


def test_one_reopens_and_both_repair(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    """Shards of both parts are damaged: the second writer finds the dump reopened, rewrites its own shards, and finishes."""
    for number in (0, 1):
        flip_bit(copy / f"shard-{number:05d}.safetensors")
    assert write_dump(engine, planned(), copy, part=(0, 2), resume=True) is None
    done = written(engine, planned(), copy, part=(1, 2), resume=True)
    assert done.digest == reference.digest


def test_who_finds_another_finishing_waits_for_the_dump(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both writers get the dump. None would mean that shards are missing."""
    assert write_dump(engine, planned(), tmp_path, part=(0, 2)) is None
    with monkeypatch.context() as patch:
        patch.setattr(dump_writer.DumpWriter, "finish", lambda self: None)
        write_dump(engine, planned(), tmp_path, part=(1, 2))
    merging, original, found = threading.Event(), dump_writer.DumpWriter._merge, list[Dump | None]()

    def slowly(self: dump_writer.DumpWriter, parts: Any) -> None:
        merging.set()
        time.sleep(0.2)
        original(self, parts)

    monkeypatch.setattr(dump_writer.DumpWriter, "_merge", slowly)
    writers = [dump_writer.DumpWriter(tmp_path, planned(), engine.fingerprint) for _ in range(2)]
    first = threading.Thread(target=lambda: found.append(writers[0].finish()))
    first.start()
    assert merging.wait(60)
    found.append(writers[1].finish())
    first.join()
    assert [dump.digest for dump in found if dump is not None] == [reference.digest] * 2


def test_resume_of_a_whole_dump_does_nothing(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    found = written(engine, planned(), copy, resume=True)
    assert found.digest == reference.digest
    assert {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} == before


# ---- several writers ------------------------------------------------------------------------------------------------


def test_second_writer_is_refused(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    """While one process writes, another one gets an error that names it. Once the first is killed, its lock is void."""
    ready, go_on = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        tmp_path.mkdir(exist_ok=True)
        with DumpLock(Store(tmp_path), lock_name((0, 1))):
            go_on.send("locked")
            time.sleep(60)
        os._exit(0)
    try:
        assert ready.recv() == "locked"
        for part in ((0, 1), (1, 3)):
            with pytest.raises(DumpLocked, match=f"process {child}"):
                write_dump(engine, planned(), tmp_path, part=part)
        assert not (tmp_path / "plan.json").exists(), "the loser wrote nothing"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / "lock-0-of-1").exists(), "killed, it could not clean up"
    assert write_dump(engine, planned(), tmp_path) is not None
    assert not list(tmp_path.glob("lock-*"))


def test_race_for_one_folder(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Many writers start at once: one writes the dump, the others are refused by name, and no file is damaged."""
    children = []
    for _ in range(5):
        child = os.fork()
        if not child:
            try:
                write_dump(engine, planned(), tmp_path)
            except (DumpLocked, FolderExists):
                os._exit(3)
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    endings = sorted(os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children)
    assert endings == [0, 3, 3, 3, 3]
    assert Dump.open(tmp_path).digest == reference.digest


def test_parts_make_one_dump(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """The writer of the last shard finishes the dump. There may be more parts than shards. Late writers find it finished."""
    for i in (2, 0, 3):
        assert write_dump(engine, planned(), tmp_path, part=(i, 4), batch=i + 1) is None
    last = written(engine, planned(), tmp_path, part=(1, 4))
    assert last.digest == reference.digest
    assert sorted(last.files.store.sizes()) == sorted(reference.files.store.sizes())
    late = written(engine, planned(), tmp_path, part=(3, 4))
    assert late.digest == reference.digest


def test_resume_finishes_what_parts_left(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """All shards exist but the dump is not finished: `resume` finishes it without computing anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dump_writer.DumpWriter, "finish", lambda self: None)
        for i in range(2):
            assert write_dump(engine, planned(), tmp_path, part=(i, 2)) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardMaker, "make", lambda *given: pytest.fail("nothing is missing"))
        done = written(engine, planned(), tmp_path, resume=True)
    assert done.digest == reference.digest


@pytest.mark.parametrize("part", [(1, 1), (-1, 2), (0, 0)])
def test_impossible_parts(engine: Engine, planned: Planned, tmp_path: Path, part: tuple[int, int]) -> None:
    with pytest.raises(BadRequest, match="part"):
        write_dump(engine, planned(), tmp_path, part=part)


def test_three_processes(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Three parts run at the same time. One is killed and restarted. One of them finishes the dump."""

    def begin(i: int) -> int:
        child = os.fork()
        if not child:
            done = 1
            try:
                write_dump(engine, planned(), tmp_path, part=(i, 3), batch=i + 2)
                done = 0
            finally:
                os._exit(done)
        return child

    children = [begin(i) for i in range(3)]
    time.sleep(0.1)
    os.kill(children[1], signal.SIGKILL)
    os.waitpid(children[1], 0)
    children[1] = begin(1)
    assert [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    dump = Dump.open(tmp_path)
    assert (dump.digest, dump.accepted_digest) == (reference.digest, reference.accepted_digest)
    assert sorted(dump.files.store.sizes()) == sorted(reference.files.store.sizes())


# ---- the store ------------------------------------------------------------------------------------------------------


def test_a_name_never_shows_half_a_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("manifest.json", b"old")
    with pytest.raises(RuntimeError), store.writing("manifest.json") as file:
        file.write(b"ne")
        assert (tmp_path / "manifest.json").read_bytes() == b"old"
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"manifest.json": b"old"}


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", "", ".", "..", ".hidden", "UPPER", "a\\b", "x\n"])
def test_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadDump, match="not a valid name"):
        Store(tmp_path).path(name)


def test_create_is_exclusive(tmp_path: Path) -> None:
    for store in (Store(tmp_path), Store("memory://create")):
        assert store.create("plan.json", b"1") and not store.create("plan.json", b"2")
        assert store.read("plan.json", 10) == b"1" and list(store.sizes()) == ["plan.json"]
        store.remove("plan.json")


def test_unwritable_folder(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "below", "/proc/dump"):  # the permissions of /proc allow what it refuses
        with pytest.raises(BadRequest, match=f"Cannot write to {folder}"):
            write_dump(engine, planned(), folder)


def test_temporary_suffix_is_what_clean_up_looks_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Store(tmp_path).writing("index.parquet"):
        (hidden,) = tmp_path.iterdir()
        assert hidden.name.startswith("index.parquet.") and hidden.name.endswith(files.TEMPORARY)
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    """One was given up for dead while it wrote: neither writes into the other's file, nor takes it away."""
    store, name = Store(tmp_path), "shard-00000.safetensors"
    with store.writing(name) as slow:
        slow.write(b"sl")
        with store.writing(name) as quick:
            quick.write(b"quick")
        assert (tmp_path / name).read_bytes() == b"quick"
        slow.write(b"ow")
    assert (tmp_path / name).read_bytes() == b"slow" and [path.name for path in tmp_path.iterdir()] == [name]


def test_what_killed_writers_left_incomplete_is_removed(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    """When their part is begun again. Files of other parts stay: their writer may live."""
    writer = dump_writer.DumpWriter(tmp_path, planned(), engine.fingerprint)
    assert writer.plan_file.create()
    for name in ("shard-00000.safetensors.77-ab.tmp", "part-00001.json.77-ab.tmp", "part-00002.parquet.tmp"):
        (tmp_path / name).write_bytes(b"half")
    with writer.writing((0, 2), resume=False):
        assert [path.name for path in tmp_path.glob("*.tmp")] == ["part-00001.json.77-ab.tmp"]


# ---- locks that nobody holds ----------------------------------------------------------------------------------------


def test_a_finish_that_was_killed_in_a_takeover_is_done_by_the_next(engine: Engine, planned: Planned, reference: Dump) -> None:
    """On a store without flock: the lock is a dead process's, and so are claims on it, of this protocol and of the last."""
    store = Store("memory://killed-finish")
    dead = LockOwner(host=socket.gethostname(), pid=2**22 + 1, started="1", nonce="a")
    claimant = replace(dead, nonce="b")
    store.write("lock-finish", dead.to_bytes())
    store.write("takeover-lock-finish", dead.to_bytes())
    store.write(f"takeover-{dead.mark}", claimant.to_bytes())
    done = written(engine, planned(), store.url)
    assert done.digest == reference.digest
    assert sorted(store.sizes()) == sorted(reference.files.store.sizes())


def test_a_finish_that_cannot_be_had_is_an_error(engine: Engine, planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """None would say that shards are missing, and the command would end as if all were well."""
    monkeypatch.setattr(dump_writer, "PATIENCE", 0.1)
    store = Store("memory://held-finish")
    with DumpLock(store, "lock-finish"), pytest.raises(DumpLocked, match="lock-finish"):
        write_dump(engine, planned(examples=2), store.url)


# ---- written ---------------------------------------------------------------------------------------------------------
# Files written by earlier versions are read, and mean the same: written again, they are the same bytes.

DUMP = Path(__file__).parent / "written"
PROOF = Path(__file__).parents[1] / "engine" / "proof" / "written"
"""version 0.1.0, before files were read by a schema library; with edits, biases, stop strings and listed examples"""


def test_a_manifest() -> None:
    raw = (DUMP / "manifest.json").read_bytes()
    manifest = Manifest.from_bytes(raw, "here")
    assert manifest.to_bytes() == raw
    plan = manifest.plan
    assert plan.examples == (0, 2, 5) and plan.sampling.logit_bias == {4: 0.5} and plan.sampling.seed == 2**63 + 5
    assert len(plan.edits) == 2 and plan.lens is not None and plan.lens.targets == (5, 7)


def test_an_unfinished_dump() -> None:
    manifest = Manifest.from_bytes((DUMP / "manifest.json").read_bytes(), "here")
    plan_file = PlanFile(Store(DUMP), manifest.plan, manifest.fingerprint)
    plan_file.check()
    assert plan_file.digest is None
    part = DumpWriter(DUMP, manifest.plan, manifest.fingerprint).parts.entry(0)
    assert part is not None and part.shard == manifest.shards[0] and part.sites == manifest.sites


def test_a_trace(tmp_path: Path) -> None:
    trace = Trace.load(PROOF / "trace.jsonl")
    trace.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (PROOF / "trace.jsonl").read_bytes()
    assert len({event["event"] for event in trace.events}) == 9, "every kind of event"


# ---- pieces ----------------------------------------------------------------------------------------------------------
# Rows in pieces: the same digest and file as joined rows, no copy on the way to the file, and no tensor shared with a run.


@pytest.fixture(params=[1, 1 << 12, 1 << 40])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a block: every piece is one, some are joined, all are."""
    monkeypatch.setattr(module, "_BLOCK", request.param)
    return int(request.param)


@pytest.mark.parametrize("cuts", swept([[], [1], [7, 8, 30]], [7, 8, 30]))
def test_pieces_have_the_digest_and_the_file_of_joined_rows(reference: Dump, size: int, cuts: list[int]) -> None:
    content = reference.files.content(0)
    cut = Content(
        Pieces({site: end_to_end(*x.tensor_split(cuts)) for site, x in content.tensors.items()}),
        content.index,
    )
    assert cut.digests() == content.digests()
    files = [HashingFile(io.BytesIO()) for _ in range(2)]
    for file, each in zip(files, (content, cut), strict=True):
        hashed = RowHash(each.index)
        write_shard(file, each.tensors, hashed)
        assert hashed.digests() == content.digests(), "the digest is taken while the file is written"
    assert files[0].sha256 == files[1].sha256 and files[0].num_bytes == files[1].num_bytes
    assert first_difference(content, cut) is None
    assert cut.digests() == content.digests()


def test_blocks_are_joined_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in dumps of long prompts with a few tokens generated one by one: what is large is not copied, and copies take no fresh
    memory."""
    monkeypatch.setattr(module, "_BLOCK", 100)
    rows = [torch.full((n, 4), float(i)) for i, n in enumerate([1, 2, 50, 1, 1, 0, 1, 70, 2, 1])]
    joiner, found, copies = Joiner(), list[torch.Tensor](), set[int]()
    for block in joiner.blocks(*end_to_end(*rows)):
        found.append(block.clone())
        if len(block) < 50:
            copies.add(block.data_ptr())
        else:
            assert block.data_ptr() in (rows[2].data_ptr(), rows[7].data_ptr())
    assert [len(block) for block in found] == [3, 50, 3, 70, 3] and len(copies) == 1
    assert torch.equal(torch.cat(found), torch.cat(rows))


def test_rows_of_a_probe_are_its_own(size: int) -> None:
    """What is done to them does not reach the activations of the run, nor rows made from it later."""
    engine = rl.Engine.load("coin-plain")
    run = engine.replay(rl.tasks.get("coin")().examples(1), sites="S")
    before = run[0].activations["blocks.1.hook_in"]
    for _ in range(2):
        rows = ProbeRows.of(run)
        x = rows.source.tensors["blocks.1.hook_in"]  # type: ignore[attr-defined]
        assert torch.equal(x[: len(before)], before)
        x += 1
    assert torch.equal(run[0].activations["blocks.1.hook_in"], before)


# ---- batches beyond a shard ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batches_reach_beyond_small_shards(
    engine: Engine, coin: AnyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of two examples, replayed five at a time: the same dump as example by example. One that fails is its own shard's
    matter: those before it are written."""
    plan = make_plan(engine, coin, 9, sites="S", max_new=2, examples_per_shard=2)
    replayed, replay = list[list[int]](), ShardMaker._replay

    def watched(self: ShardMaker, examples: list[Example]) -> list[Result]:
        replayed.append([example.index for example in examples])
        if failing is not None and failing in replayed[-1]:
            raise BadRequest("cannot be replayed")
        return replay(self, examples)

    failing: int | None = None
    monkeypatch.setattr(ShardMaker, "_replay", watched)
    together, apart = (write_dump(engine, plan, tmp_path / str(batch), batch=batch) for batch in (5, 1))
    assert together is not None and apart is not None and together.digest == apart.digest
    assert [len(some) for some in replayed[:2]] == [5, 4] and len(replayed) == 2 + 9
    failing = 4
    with pytest.raises(BadRequest, match="cannot be replayed"):
        write_dump(engine, plan, tmp_path / "failed", batch=5)
    assert {file.name for file in (tmp_path / "failed").glob("part-*.json")} == {"part-00000.json", "part-00001.json"}
    failing = None
    resumed = written(engine, plan, tmp_path / "failed", batch=5, resume=True)
    assert resumed.digest == apart.digest
