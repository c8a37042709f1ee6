"""`DumpLock`: at most one live process writes a given shard of a dump. The lock of a dead process is taken over.

On a local disk the lock is the kernel's (`flock`), which ends with the process. Elsewhere it is a file that names host and
process. Whether that process is alive can be checked only on the same host; a process on another host counts as alive.
"""

import fcntl
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from replaylens.engine.dump.store import Store
from replaylens.engine.errors import DumpLocked

FINISH = "lock-finish"
_PAUSE = 0.01
_PROBE = 2.0
"""seconds; checking whether a lock is held takes it for a much shorter time"""
_NAME = re.compile(r"lock-(\d{1,6})-of-(\d{1,6})")


def lock_name(part: tuple[int, int]) -> str:
    """The lock of writer i of n, which writes every n-th shard from number i on."""
    return f"lock-{part[0]}-of-{part[1]}"


class DumpLock:
    """A context manager: entering takes the lock or raises DumpLocked, leaving releases it.

    patience  seconds to wait for the current holder
    """

    def __init__(self, store: Store, name: str, patience: float = 0.0) -> None:
        self.store, self.name, self.patience = store, name, patience
        self._handle: int | None = None

    def __enter__(self) -> "DumpLock":
        deadline = time.monotonic() + self.patience
        while True:
            try:
                self._take()
                return self
            except DumpLocked:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE)

    def _take(self) -> None:
        if self.store.local:
            self._take_local()
        else:
            self._take_remote()
        for other in self._overlapping():
            if _is_held(self.store, other):
                self._give_back()
                raise _locked(self.store, other)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()

    def _take_local(self) -> None:
        path, deadline = self.store.path(self.name), time.monotonic() + _PROBE
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if _flock(handle, fcntl.LOCK_EX):
                if _same_file(handle, path):
                    break
                os.close(handle)  # the last owner removed the file between `open` and `flock`
                continue
            owner = _parse(os.pread(handle, 4096, 0))
            os.close(handle)
            if (owner and _is_alive(owner)) or time.monotonic() >= deadline:
                raise _locked(self.store, self.name)
            time.sleep(_PAUSE)  # no owner is named: a process is checking the lock, or has yet to write its identity
        owner = _parse(os.pread(handle, 4096, 0))
        if owner and owner.get("host") != socket.gethostname():  # on a shared disk, flock may not cover other machines
            os.close(handle)
            raise _locked(self.store, self.name)
        os.ftruncate(handle, 0)
        os.pwrite(handle, _identity(), 0)
        self._handle = handle

    def _take_remote(self) -> None:
        mine = _identity()
        if self.store.create(self.name, mine):
            return
        if _is_held(self.store, self.name):
            raise _locked(self.store, self.name)
        with self._taking_over():  # a dead process left the lock; only one of the processes that see this may remove it
            if _is_held(self.store, self.name):
                raise _locked(self.store, self.name)
            self.store.remove(self.name)
            if not self.store.create(self.name, mine):
                raise _locked(self.store, self.name)

    @contextmanager
    def _taking_over(self) -> Iterator[None]:
        name = f"takeover-{self.name}"
        if not self.store.create(name, _identity()):
            raise _locked(self.store, name)
        try:
            yield
        finally:
            self.store.remove(name)

    def _give_back(self) -> None:
        with suppress(OSError):
            self.store.remove(self.name)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _overlapping(self) -> list[str]:
        """Other locks in the folder that share shards with this one."""
        mine = _NAME.fullmatch(self.name)
        if mine is None:
            return []
        i, n = map(int, mine.groups())
        found = []
        for name in self.store.sizes():
            other = _NAME.fullmatch(name)
            if other and name != self.name and int(other[2]):
                common = math.gcd(n, int(other[2]))
                if i % common == int(other[1]) % common:
                    found.append(name)
        return found


def sweep(store: Store) -> None:
    """Remove lock files of dead processes. Those of live processes and of other machines stay."""
    for name in store.sizes():
        if name == FINISH or _NAME.fullmatch(name):
            lock = DumpLock(store, name)
            with suppress(DumpLocked):
                if store.local:
                    _remove_if_free(store, name)
                else:
                    lock._take_remote()
                    lock._give_back()


def _remove_if_free(store: Store, name: str) -> None:
    """Remove a lock file that no process holds. Writes no owner into it, so that a writer who wants the lock now waits."""
    with _opened(store, name) as handle:
        if handle is not None and _is_free(handle, fcntl.LOCK_EX) and _same_file(handle, store.path(name)):
            store.remove(name)


@contextmanager
def _opened(store: Store, name: str) -> Iterator[int | None]:
    """An open local lock file; None if there is none."""
    try:
        handle = os.open(store.path(name), os.O_RDWR)
    except FileNotFoundError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _is_free(handle: int, kind: int) -> bool:
    """Whether a local lock is free. If so, no process can take it before the handle is closed."""
    owner = _parse(os.pread(handle, 4096, 0))
    distant = bool(owner) and owner.get("host") != socket.gethostname()
    return not distant and _flock(handle, kind)


def _is_held(store: Store, name: str) -> bool:
    """Whether a live process holds the lock, as far as this host can see."""
    if store.local:
        with _opened(store, name) as handle:
            return handle is not None and not _is_free(handle, fcntl.LOCK_SH)
    owner = _owner(store, name)
    return owner is not None and _is_alive(owner)


def _flock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _same_file(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _identity() -> bytes:
    me = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "nonce": uuid.uuid4().hex}
    return json.dumps(me).encode()


def _started(pid: int) -> str | None:
    """When the process started, in kernel ticks. Distinguishes it from a later process with the same id."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[19].decode()
    except (OSError, IndexError):
        return None


def _is_alive(owner: dict[str, Any]) -> bool:
    """Whether the process that a lock names is alive. A process on another or unknown host counts as alive."""
    pid, started = owner.get("pid"), owner.get("started")
    if owner.get("host") != socket.gethostname():
        return True
    if not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return started is None or started == _started(pid)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(raw)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _owner(store: Store, name: str) -> dict[str, Any] | None:
    """The owner that the lock file names; None if there is no file."""
    try:
        return _parse(bytes(store.fs.cat_file(store.path(name))))
    except FileNotFoundError:
        return None


def _locked(store: Store, name: str) -> DumpLocked:
    owner = _owner(store, name) or {}
    return DumpLocked(
        f"{store.url} is being written by process {owner.get('pid', '?')} on {owner.get('host', '?')} ({name}). Wait for it, "
        f"or choose another folder. If that process has ended, delete the file {name}."
    )
