"""Locks of a dump: one holder at a time, on a local disk and elsewhere. Exactly one writer takes over a dead process's lock."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from replaylens.engine.dump import lock as dump_lock
from replaylens.engine.dump.lock import DumpLock, lock_name
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import DumpLocked

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


def test_lock_files_of_the_dead_and_the_distant(tmp_path: Path) -> None:
    """A lock of a dead process here is void; one of another machine is respected, and the text says what to do."""
    for store in (Store(tmp_path), Store("memory://stale")):
        store.make()
        store.write(NAME, DEAD)
        with DumpLock(store, NAME):
            assert str(os.getpid()).encode() in store.read(NAME, 4096)
        store.write(NAME, DISTANT)
        with pytest.raises(DumpLocked, match=r"another folder.*delete the file lock-0-of-1"), DumpLock(store, NAME):
            pass
        store.remove(NAME)


def test_a_process_id_that_was_given_again_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that took the lock has ended, and a later one has its number: only who began then could be the holder."""
    monkeypatch.setattr(dump_lock, "_started", lambda pid: "900")
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
        mine = dump_lock._started(os.getpid())
        assert mine is not None and mine.isdigit() and dump_lock._started(os.getpid()) == mine
        assert dump_lock._started(child.pid) not in (None, mine)
    finally:
        child.communicate(b"\n")
    assert dump_lock._started(child.pid) is None, "it is gone"


def test_one_of_two_takes_over_what_the_dead_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both writers see that the owner is dead. The second one continues only after the first has taken the lock."""
    store = Store("memory://takeover")
    store.write(NAME, DEAD)
    first, looked, original = DumpLock(store, NAME), list[bool](), dump_lock._is_held

    def slow(*given: Any) -> bool:
        held = original(*given)
        looked.append(held)
        if len(looked) == 1:
            first.__enter__()
        return held

    monkeypatch.setattr(dump_lock, "_is_held", slow)
    with pytest.raises(DumpLocked, match=f"process {os.getpid()}"), DumpLock(store, NAME):
        pytest.fail("two hold one lock")
    assert store.exists(NAME), "the loser did not remove the winner's"
    first.__exit__(None, None, None)
    assert store.sizes() == {}


def test_a_half_done_takeover_is_named() -> None:
    store = Store("memory://half")
    for name in (NAME, f"takeover-{NAME}"):
        store.write(name, DEAD)
    with pytest.raises(DumpLocked, match="delete the file takeover-lock-0-of-1"), DumpLock(store, NAME):
        pass


def test_who_only_looks_does_not_keep_the_writer_out(tmp_path: Path) -> None:
    """Checking whether a lock is held locks it briefly. A writer that comes at that moment waits."""
    store = Store(tmp_path)
    store.write(NAME, b"")
    handle = os.open(store.path(NAME), os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_SH)
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
