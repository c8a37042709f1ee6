"""Locks of a dump: one holder at a time, on a local disk and elsewhere. Exactly one writer takes over a dead process's lock."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replaylens.commands.reporting import OUT_OF_REACH, exit_code
from replaylens.dumps import lock as dump_lease
from replaylens.dumps import lock as dump_lock
from replaylens.dumps import lock as dump_owner
from replaylens.dumps.content import Content
from replaylens.dumps.lock import DumpLock, Lease, LockOwner, lock_name
from replaylens.dumps.maker import ShardMaker, write_dump
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.dumps.store import Store
from replaylens.dumps.writer import DumpWriter, WriteQueue
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, DumpLocked, DumpWriteFailed, StoreFailed
from tests.dumps.conftest import written

NAME = "lock-0-of-1"
DEAD = json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1, "started": "1"}).encode()
DISTANT = json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}).encode()


@pytest.mark.parametrize(
    "mine, other, clash",
    [((0, 1), (2, 3), True), ((0, 2), (1, 2), False), ((0, 2), (1, 3), True), ((1, 4), (1, 2), True), ((0, 4), (1, 2), False)],
)
@pytest.mark.parametrize("url", ["local", "memory://locks"])
def test_parts_clash_when_they_share_shards(
    tmp_path: Path, url: str, mine: tuple[int, int], other: tuple[int, int], clash: bool
) -> None:
    store = Store(tmp_path if url == "local" else url)
    store.make()
    with DumpLock(store, lock_name(other)):
        if clash:
            with pytest.raises(DumpLocked, match=lock_name(other)), DumpLock(store, lock_name(mine)):
                pass
        else:
            with DumpLock(store, lock_name(mine)):
                pass
    assert store.sizes() == {}


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is renewed every 20 ms and expires after half a second."""
    monkeypatch.setattr(dump_lease, "LEASE", 0.5)
    monkeypatch.setattr(dump_lease, "RENEW", 0.02)


def stores(tmp_path: Path, name: str) -> list[Store]:
    found = [Store(tmp_path / name), Store(f"memory://{name}")]
    for store in found:
        store.make()
    return found


def elsewhere(monkeypatch: pytest.MonkeyPatch, store: Store) -> DumpLock:
    """A lock whose owner is of another host: nobody here can look at its process."""
    lock = DumpLock(store, NAME)
    lock.owner = replace(lock.owner, host="elsewhere")
    if store.local:  # as on a shared disk whose flock does not reach that host
        monkeypatch.setattr(lock, "_take_local", lambda: _write_only(lock))
    return lock


def _write_only(lock: DumpLock) -> None:
    lock._handle = os.open(lock.store.path(lock.name), os.O_RDWR | os.O_CREAT, 0o644)
    os.pwrite(lock._handle, lock.owner.to_bytes(), 0)


def test_the_lock_of_a_dead_process_is_void(tmp_path: Path) -> None:
    for store in stores(tmp_path, "stale"):
        store.write(NAME, DEAD)
        with DumpLock(store, NAME):
            assert str(os.getpid()).encode() in store.read(NAME, 4096)
        assert store.sizes() == {}


@pytest.mark.slow
@pytest.mark.usefixtures("short_lease")
def test_the_lock_of_another_host_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not renewed for so long, by the clock of whoever waits: it is taken over. The time of day is not looked at."""
    monkeypatch.setattr(time, "time", lambda: pytest.fail("clocks of two hosts differ"))
    for store in stores(tmp_path, "expired"):
        store.write(NAME, DISTANT)
        began = time.monotonic()
        with DumpLock(store, NAME):
            assert time.monotonic() - began >= 0.5 and store.exists(NAME)
        assert store.sizes() == {}


@pytest.mark.usefixtures("short_lease")
def test_the_lock_of_another_host_holds_while_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for store in stores(tmp_path, "renewed"):
        with elsewhere(monkeypatch, store):
            for name in (NAME, lock_name((1, 3))):
                began = time.monotonic()
                with pytest.raises(DumpLocked, match=r"on elsewhere \(lock-0-of-1\).*another folder"), DumpLock(store, name):
                    pytest.fail("its holder lives")
                assert time.monotonic() - began < 0.5, "one renewal is enough"
            time.sleep(0.1)
            assert json.loads(store.read(NAME, 4096))["renewals"] > 1
        assert store.sizes() == {}, "its holder gave it back, and nobody else did"


@pytest.mark.usefixtures("short_lease")
@pytest.mark.parametrize("then", ["released", "renewed", "taken over", "left alone"])
def test_what_becomes_of_a_lock_that_is_watched(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a lock that is renewed or changes hands has a live owner; one that is released while it is watched has none."""
    store = Store(f"memory://watched-{then.replace(' ', '-')}")
    store.make()
    owner = replace(LockOwner.this_process(), host="elsewhere")
    store.write(NAME, owner.to_bytes())
    looks, peek = list[int](), Store.peek

    def changing(self: Store, name: str) -> bytes | None:
        looks.append(1)
        if len(looks) == 2 and then == "released":
            store.remove(NAME)
        elif len(looks) == 2 and then != "left alone":
            now = replace(owner, renewals=1) if then == "renewed" else replace(owner, pid=owner.pid + 1)
            store.write(NAME, now.to_bytes())
        return peek(self, name)

    monkeypatch.setattr(Store, "peek", changing)
    assert dump_lease.is_renewed(store, NAME, owner) is (then in ("renewed", "taken over"))
    looks.clear()
    assert dump_lease.is_renewed(store, NAME, replace(owner, renewals=9)) is (then != "released"), (
        "it changed before the first look"
    )


@pytest.mark.usefixtures("short_lease")
def test_an_owner_that_slept_too_long_leaves_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended beyond its lease, it wakes up while another holds the lock: it does not renew or remove it, and says so."""
    for store in stores(tmp_path, "asleep"):
        with pytest.raises(DumpLocked, match="took lock-0-of-1 over"), elsewhere(monkeypatch, store) as slow:
            assert slow._lease is not None
            slow._lease.end()
            with DumpLock(store, NAME):
                slow._lease = Lease(store, NAME, slow.owner, slow._handle)
                time.sleep(0.1)
                slow._lease.end()
                assert slow._lease.lost and json.loads(store.read(NAME, 4096))["pid"] == os.getpid()
                assert LockOwner.parse(store.read(NAME, 4096)).host == socket.gethostname()
        assert store.sizes() == {}


def test_who_ends_after_a_takeover_leaves_the_lock(tmp_path: Path) -> None:
    """It has not noticed yet: its next renewal would have been later."""
    for store in stores(tmp_path, "taken over"):
        other = replace(LockOwner.this_process(), host="elsewhere").to_bytes()
        with DumpLock(store, NAME), store.fs.open(store.path(NAME), "r+b" if store.local else "wb") as file:
            file.write(other)
        assert store.read(NAME, 4096) == other


@pytest.mark.usefixtures("short_lease")
def test_a_renewal_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures, write = Store("memory://shaky"), [], Store.write

    def shaky(self: Store, name: str, data: bytes) -> None:
        if len(failures) < 3:
            failures.append(name)
            raise StoreFailed("out of reach")
        write(self, name, data)

    with DumpLock(store, NAME) as lock:
        monkeypatch.setattr(Store, "write", shaky)
        time.sleep(0.3)
        assert lock._lease is not None and not lock._lease.lost
        assert len(failures) == 3 and json.loads(store.read(NAME, 4096))["renewals"] > 3
    assert store.sizes() == {}


class Killed(BaseException):
    """Stands for SIGKILL: what comes after it, in `finally` too, reaches the store no more."""


class DyingStore(Store):
    """A store as a process sees it that is killed before its n-th change."""

    def __init__(self, url: str, changes: int) -> None:
        super().__init__(url)
        self.left = changes

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def create(self, name: str, data: bytes) -> bool:
        self._count()
        return super().create(name, data)

    def remove(self, name: str) -> None:
        self._count()
        super().remove(name)


def die(url: str, changes: int) -> bool:
    """Take the lock as a process that is killed on the way; whether it was."""
    store = DyingStore(url, changes)
    lock = DumpLock(store, NAME)
    lock.owner = replace(lock.owner, pid=2**22 + 1, started="1")
    try:
        lock._take_remote()
    except Killed:
        return True
    return False


def test_a_kill_anywhere_in_a_takeover_blocks_nobody() -> None:
    """The claim of a process that died in the middle is claimed by the next; also when that one dies, at any step."""
    store = Store("memory://killed")
    for first in range(10):
        for second in range(10):
            store.write(NAME, DEAD)
            killed = die(store.url, first), die(store.url, second)
            with DumpLock(store, NAME):
                assert LockOwner.parse(store.read(NAME, 4096)).pid == os.getpid()
                dump_lock.sweep(store)
                assert list(store.sizes()) == [NAME], "no claim is left"
            assert store.sizes() == {}
            if not killed[1]:
                break
    assert first == 9 and second > 3


def test_a_claim_of_a_live_process_is_respected() -> None:
    """Negative control: two chains of dead claimants end in one live one, which alone may remove the lock."""
    store = Store("memory://claimed")
    store.write(NAME, DEAD)
    assert die(store.url, 2), "killed with its claim in place"
    (claim,) = [name for name in store.sizes() if name.startswith("takeover-")]
    live = DumpLock(store, NAME)
    held = list[str]()
    live._claim(LockOwner.parse(DEAD), held)
    for _ in range(2):
        with pytest.raises(DumpLocked, match=f"process {os.getpid()}"), DumpLock(store, NAME):
            pytest.fail("the other may remove the lock at any moment")
        assert store.exists(claim) and store.read(NAME, 4096) == DEAD, "who is refused changes nothing"
        dump_lock._sweep_claims(store)
    for name in held:
        store.remove(name)
    with DumpLock(store, NAME):
        assert list(store.sizes()) == [NAME]


def test_a_process_id_that_was_given_again_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that took the lock has ended, and a later one has its number: only who began then could be the holder."""
    monkeypatch.setattr(dump_owner, "started", lambda pid: "900")
    store, owner = Store("memory://reused"), {"host": socket.gethostname(), "pid": os.getpid()}
    store.write(NAME, json.dumps({**owner, "started": "100"}).encode())
    with DumpLock(store, NAME):
        assert json.loads(store.read(NAME, 4096))["started"] == "900", "it is ours now"
    store.write(NAME, json.dumps({**owner, "started": "900"}).encode())
    with pytest.raises(DumpLocked, match=f"process {os.getpid()}"), DumpLock(store, NAME):
        pytest.fail("its holder lives")
    assert store.exists(NAME)
    store.remove(NAME)


def test_when_a_process_began_is_known_here() -> None:
    """The start time of this process is a constant number. A child's is different."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mine = dump_owner.started(os.getpid())
        assert mine is not None and mine.isdigit() and dump_owner.started(os.getpid()) == mine
        assert dump_owner.started(child.pid) not in (None, mine)
    finally:
        child.communicate(b"\n")
    assert dump_owner.started(child.pid) is None, "it is gone"


def test_one_of_two_takes_over_what_the_dead_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both writers see that the owner is dead. The second one continues only after the first has taken the lock."""
    store = Store("memory://takeover")
    store.write(NAME, DEAD)
    first, looked, original = DumpLock(store, NAME), list[bool](), dump_lock.is_live

    def slow(*given: Any) -> bool:
        held = original(*given)
        looked.append(held)
        if len(looked) == 1:
            first.__enter__()
        return held

    monkeypatch.setattr(dump_lock, "is_live", slow)
    with pytest.raises(DumpLocked, match=f"process {os.getpid()}"), DumpLock(store, NAME):
        pytest.fail("two hold one lock")
    assert store.exists(NAME), "the loser did not remove the winner's"
    first.__exit__(None, None, None)
    assert store.sizes() == {}


def test_who_only_looks_does_not_keep_the_writer_out(tmp_path: Path) -> None:
    """Checking whether a lock is held locks it briefly. A writer that comes at that moment waits."""
    store = Store(tmp_path)
    store.write(NAME, b"")
    handle = os.open(store.path(NAME), os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_SH)
    assert not dump_lock._is_held(store, NAME), "two who look do not take each other for a writer"
    looker = threading.Timer(0.1, os.close, [handle])
    looker.start()
    with DumpLock(store, NAME):
        assert dump_lock._is_held(store, NAME)
        dump_lock.sweep(store)
        assert store.exists(NAME), "it is held"
    looker.join()


def test_sweeping_leaves_no_free_lock(tmp_path: Path) -> None:
    for store in (Store(tmp_path), Store("memory://swept")):
        store.write("lock-0-of-2", DEAD)
        store.write("lock-1-of-2", DISTANT)
        dump_lock.sweep(store)
        assert list(store.sizes()) == ["lock-1-of-2"], "of another machine it cannot be told"


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """Who can write into the folder must not make others overwrite files elsewhere. Sweeping leaves the link alone."""
    store, target = Store(tmp_path / "dump"), tmp_path / "precious"
    store.make()
    target.write_text("thesis")
    for name in (NAME, dump_lock.FINISH):
        (tmp_path / "dump" / name).symlink_to(target)
        with pytest.raises(DumpWriteFailed, match=f"{name}.*symbolic link"), DumpLock(store, name):
            pytest.fail("a link is no lock")
    with pytest.raises(DumpWriteFailed, match="symbolic link"), DumpLock(store, lock_name((1, 3))):
        pytest.fail("whether the other lock is held cannot be told")
    dump_lock.sweep(store)
    assert target.read_text() == "thesis" and (tmp_path / "dump" / NAME).is_symlink()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_lock_that_is_no_file(tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        (tmp_path / NAME).mkdir()
    else:
        os.mkfifo(tmp_path / NAME)
    with pytest.raises(DumpWriteFailed, match=f"lock {tmp_path}/{NAME}"), DumpLock(Store(tmp_path), NAME):
        pytest.fail("it cannot be locked")


@pytest.mark.parametrize("call, error", [("open", errno.EROFS), ("open", errno.ENOSPC), ("pwrite", errno.ENOSPC)])
def test_a_disk_that_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int) -> None:
    """Read-only, without inodes, or full: a named error with the exit code of a store that cannot be used."""

    def refuse(*given: Any) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch, pytest.raises(DumpWriteFailed, match=os.strerror(error)) as caught:
        patch.setattr(os, call, refuse)
        DumpLock(Store(tmp_path), NAME).__enter__()
    assert exit_code(caught.value) == OUT_OF_REACH
    with DumpLock(Store(tmp_path), NAME):
        pass  # what failed holds nothing


@pytest.mark.parametrize("content", [b"", DEAD])
def test_claims_that_lead_in_a_circle(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """A claim that was cut names nobody, as a lock that was cut does; a claim may also name its own subject."""
    monkeypatch.setattr(dump_lease, "LEASE", 0.02)
    store, plain, tries = Store("memory://circle"), Store.create, list[str]()

    def counted(self: Store, name: str, data: bytes) -> bool:
        tries.append(name)
        assert len(tries) < 50, "an endless loop"
        return plain(self, name, data)

    monkeypatch.setattr(Store, "create", counted)
    store.write(NAME, content)
    first = "takeover-" + LockOwner.parse(content).mark
    store.write(first, content)
    live, held = DumpLock(store, NAME), list[str]()
    live._claim(LockOwner.parse(content), held)
    dump_lock._sweep_claims(store)
    assert sorted(held) == sorted(name for name in store.sizes() if name != NAME), "a claim in use is not swept"
    with pytest.raises(DumpLocked, match=f"process {os.getpid()}"), DumpLock(store, NAME):
        pytest.fail("one live claimant at most")
    store.remove(held[-1])
    with DumpLock(store, NAME):
        assert list(store.sizes()) == [NAME]
    assert store.sizes() == {}


@pytest.mark.parametrize("url", ["local", "memory://garbage"])
@pytest.mark.parametrize("content", [b"\0" * 512, b"\xff\x00garbage", b'{"host": "elsewhere"', b'{"pid": "one"}', b"[]"])
def test_a_lock_that_names_no_process_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, content: bytes
) -> None:
    """Damage is not another host: none of the locks waits for a lease. A lock that names another host does: control."""
    store, slept = Store(tmp_path if url == "local" else url), list[float]()
    clock = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(dump_lock.time, "sleep", sleep)
    monkeypatch.setattr(dump_lock.time, "monotonic", lambda: clock[0])
    store.make()
    for name in (NAME, "lock-1-of-3", dump_lock.FINISH):
        store.write(name, content)
    with DumpLock(store, NAME), DumpLock(store, dump_lock.FINISH):
        assert sum(slept) < 1
    dump_lock.sweep(store)
    assert store.sizes() == {}
    store.write(NAME, DISTANT)
    with DumpLock(store, NAME):
        assert sum(slept) > dump_lease.LEASE


class LosingStore(Store):
    """An object store that writes every new file and loses the answer: the library tries again, and finds it there, or tells
    of the lost connection."""

    tells = False

    def create(self, name: str, data: bytes) -> bool:
        if super().create(name, data) and self.tells:
            raise DumpWriteFailed("Cannot write: the connection was lost.")
        return False


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("before", [None, DEAD])
def test_a_writer_whose_answer_was_lost_knows_its_own_mark(tells: bool, before: bytes | None) -> None:
    """Of a new lock, and of the claims on that of a dead process. The lock of another is still another's: control."""
    store = LosingStore("memory://lost")
    store.tells = tells
    if before is not None:
        store.write(NAME, before)
    with DumpLock(store, NAME) as lock:
        assert LockOwner.parse(store.read(NAME, 4096)).mark == lock.owner.mark
        with pytest.raises(DumpLocked, match=f"process {os.getpid()}"), DumpLock(store, NAME):
            pytest.fail("two hold one lock")
        assert list(store.sizes()) == [NAME]
    assert store.sizes() == {}


def test_a_claim_that_names_itself_is_swept() -> None:
    store = Store("memory://itself")
    store.write("takeover-" + LockOwner.parse(b"").mark, b"")
    dump_lock._sweep_claims(store)
    assert store.sizes() == {}


# ---- queue -----------------------------------------------------------------------------------------------------------
# Writes beside the computation: bounded, never cut off, their errors raised in the caller; any number of threads, one dump.

Planned = Callable[..., DumpPlan]
pytestmark = pytest.mark.usefixtures("computed_once")


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_writes_than_threads(threads: int) -> None:
    under_way, most, lock = [0], [0], threading.Lock()

    def write(pause: threading.Event) -> None:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        pause.wait(0.02)
        with lock:
            under_way[0] -= 1

    with WriteQueue(threads) as queue:
        for _ in range(9):
            queue.put(write, threading.Event())
        queue.wait()
    assert most == [threads] and under_way == [0]


def test_an_error_is_raised_at_the_next_call() -> None:
    def write(message: str) -> None:
        if message:
            raise DumpWriteFailed(message)

    for call in ("check", "put", "wait"):
        with WriteQueue() as queue, pytest.raises(DumpWriteFailed, match="the disk is full"):
            queue.put(write, "the disk is full")
            queue._pool.submit(lambda: None).result()  # the one thread has come to the end of the write
            queue.put(write, "") if call == "put" else getattr(queue, call)()


def test_a_failing_block_does_not_cut_off_a_write() -> None:
    go, written = threading.Event(), list[str]()

    def write() -> None:
        assert go.wait(60)
        written.append("all")

    with pytest.raises(KeyboardInterrupt), WriteQueue() as queue:
        queue.put(write)
        threading.Timer(0.05, go.set).start()
        raise KeyboardInterrupt
    assert written == ["all"]


@pytest.mark.parametrize("writers", [1, 3])
def test_the_files_do_not_depend_on_the_threads(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, writers: int
) -> None:
    dump = written(engine, planned(), tmp_path, writers=writers)
    assert dump.digest == reference.digest
    for name in reference.files.store.sizes():
        assert (tmp_path / name).read_bytes() == Path(reference.url, name).read_bytes(), name


def test_impossible_numbers_of_threads(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="writers"):
        write_dump(engine, planned(), tmp_path / "none", writers=0)
    assert not (tmp_path / "none").exists()


def test_a_failed_write_ends_the_next_shard_early(
    engine: Engine, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 1 cannot be written. The error comes after a batch of shard 2, not after all of it, and shard 0 is kept."""
    original, put, made, queues = DumpWriter.write_shard, WriteQueue.put, list[int](), list[WriteQueue]()

    def write(self: DumpWriter, number: int, content: Content, sites: Any) -> None:
        if number == 1:
            raise DumpWriteFailed("the disk is full")
        original(self, number, content, sites)

    plan = planned(examples=9, examples_per_shard=3)
    maker = ShardMaker(engine, plan, batch=1)

    def make(number: int, done: Callable[[int], object]) -> Content:
        def counted(count: int) -> None:
            made.append(number)
            if number == 2:  # the thread has ended with its error
                assert isinstance(queues[-1]._under_way[0].exception(60), DumpWriteFailed)
            done(count)

        return maker.make(number, counted)

    def seen(self: WriteQueue, *work: Any) -> None:
        queues.append(self)
        put(self, *work)

    with monkeypatch.context() as patch:
        patch.setattr(DumpWriter, "write_shard", write)
        patch.setattr(WriteQueue, "put", seen)
        with pytest.raises(DumpWriteFailed, match="the disk is full"):
            DumpWriter(tmp_path, plan, engine.fingerprint).write(make, maker.sites)
    assert made == [0] * 3 + [1] * 3 + [2]
    assert sorted(path.name for path in tmp_path.glob("part-*.json")) == ["part-00000.json"]
    whole = written(engine, plan, tmp_path, resume=True)
    assert whole.digest == _digest(engine, plan, tmp_path / "again")


def _digest(engine: Engine, plan: DumpPlan, folder: Path) -> str:
    dump = written(engine, plan, folder)
    return dump.digest
