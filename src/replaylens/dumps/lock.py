"""`DumpLock`: at most one live process writes a given shard of a dump. The lock of a dead process is taken over.

On a local disk the lock is the kernel's (`flock`), which ends with the process. Elsewhere it is a file that names its owner.
For other hosts it is a lease, which expires unless its owner renews it.

An owner that was suspended for longer than that notices at its next renewal, and leaves the lock to the new owner. What both
wrote meanwhile has the same bits.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType

from replaylens.dumps.store import Store
from replaylens.engine.errors import BadDump, DumpLocked, DumpWriteFailed
from replaylens.engine.records import Natural, read

# ---- owner -----------------------------------------------------------------------------------------------------------
# `LockOwner`: the process that a lock file names, and whether it is alive.

_SIZE = 512
"""bytes of a lock file: a renewal replaces all of them in one write, so that no reader sees half of it"""


@dataclass(frozen=True)
class LockOwner:
    """Host and process, and how often it has renewed the lock. Unknown if the file is damaged."""

    host: str = "?"
    pid: Natural = 0
    started: str | None = None
    """in kernel ticks; distinguishes the process from a later one with the same id"""
    nonce: str = ""
    renewals: Natural = 0

    @classmethod
    def this_process(cls) -> "LockOwner":
        return cls(socket.gethostname(), os.getpid(), started(os.getpid()), uuid.uuid4().hex)

    @classmethod
    def parse(cls, raw: bytes) -> "LockOwner":
        try:
            return read(cls, raw.rstrip(b"\0"), "The lock", BadDump)
        except BadDump:
            return cls()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(_SIZE)

    @property
    def mark(self) -> str:
        """A name for this hold of the lock, which no other has and renewals do not change."""
        return hashlib.sha256(repr((self.host, self.pid, self.started, self.nonce)).encode()).hexdigest()[:32]

    @property
    def is_known(self) -> bool:
        """Whether the file names a process. An owner writes its whole name at once, so that what names none is damage."""
        return self != LockOwner()

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host, which is the only one whose processes can be looked at."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Precondition: the process is of this host."""
        if self.pid < 1:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        return self.started is None or self.started == started(self.pid)


def started(pid: int) -> str | None:
    """When the process started, in kernel ticks; None if there is no such process, or the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[19].decode()
    except (OSError, IndexError):
        return None


# ---- lease -----------------------------------------------------------------------------------------------------------
# `Lease`: a lock that its owner renews, and whether the owner of a lock is alive.
#
# On its own host, a process can be looked at. For other hosts, who finds a lock unchanged for LEASE seconds of its own clock
# takes its owner for dead. No clocks of two machines are compared.

LEASE, RENEW = 60.0, 10.0
"""seconds until the lock of another host expires; between two renewals"""
_POLL = 0.5
_UNREADABLE = 0.1
"""seconds until a lock that names no process expires"""


class Lease:
    """Renews a lock from a thread until `end`. `lost`: another process has taken the lock over."""

    def __init__(self, store: Store, name: str, owner: LockOwner, handle: int | None) -> None:
        self.store, self.name, self.owner, self.handle = store, name, owner, handle
        self.lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease of {name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop renewing."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        store = None
        while not self._ended.wait(RENEW) and not self.lost:
            with suppress(OSError):  # the store is out of reach for now; the next renewal finds out what became of the lock
                store = store or self.store.apart()
                self._renew(store)

    def _renew(self, store: Store) -> None:
        now = owner_of(store, self.name) if self.handle is None else owner_in(self.handle)
        if now is None or now.mark != self.owner.mark:
            self.lost = True
            return
        self.owner = replace(self.owner, renewals=self.owner.renewals + 1)
        if self.handle is None:
            store.write(self.name, self.owner.to_bytes())
        else:
            os.pwrite(self.handle, self.owner.to_bytes(), 0)


def is_live(store: Store, name: str, owner: LockOwner) -> bool:
    """Whether the owner of a lock is alive. For one of another host, this watches whether the lock is renewed."""
    return owner.is_alive if owner.is_here else is_renewed(store, name, owner)


def is_renewed(store: Store, name: str, owner: LockOwner) -> bool:
    """Whether the lock changes hands or is renewed within LEASE seconds of this process's clock, or far fewer if it names no
    process: its content is damaged, or none of ours. False if it is released."""
    lease = LEASE if owner.is_known else min(LEASE, _UNREADABLE)
    deadline = time.monotonic() + lease
    while time.monotonic() < deadline:
        now = owner_of(store, name)
        if now != owner:
            return now is not None
        time.sleep(min(_POLL, lease / 4))
    return False


def owner_in(handle: int) -> LockOwner | None:
    """The owner that an open local lock file names; None if it names none yet."""
    raw = os.pread(handle, 4096, 0)
    return LockOwner.parse(raw) if raw.strip() else None


def owner_of(store: Store, name: str) -> LockOwner | None:
    """The owner that the lock file names; None if there is no file."""
    raw = store.peek(name)
    return None if raw is None else LockOwner.parse(raw)


# ---- lock ------------------------------------------------------------------------------------------------------------

FINISH = "lock-finish"
PATIENCE = 60.0
"""seconds to wait for another writer that finishes a dump or reopens a damaged one"""
_PAUSE = 0.01
_PROBE = 2.0
"""seconds; checking whether a lock is held takes it for a much shorter time"""
_NAME = re.compile(r"lock-(\d{1,6})-of-(\d{1,6})")
_CLAIM = "takeover-"
LOCK_OR_CLAIM = re.compile(rf"(?:{_CLAIM})?(?:{FINISH}|{_NAME.pattern})|{_CLAIM}[0-9a-f]{{32}}")


def lock_name(part: tuple[int, int]) -> str:
    """The lock of writer i of n, which writes every n-th shard from number i on."""
    return f"lock-{part[0]}-of-{part[1]}"


class DumpLock:
    """A context manager: entering takes the lock or raises DumpLocked, leaving releases it.

    patience  seconds to wait for the current holder
    """

    def __init__(self, store: Store, name: str, patience: float = 0.0) -> None:
        self.store, self.name, self.patience = store, name, patience
        self.owner = LockOwner.this_process()
        self._handle: int | None = None
        self._lease: Lease | None = None

    def __enter__(self) -> "DumpLock":
        deadline = time.monotonic() + self.patience
        while True:
            try:
                self._take()
                break
            except DumpLocked:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE)
        self._lease = Lease(self.store, self.name, self.owner, self._handle)
        return self

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
        assert self._lease is not None
        self._lease.end()
        lost = self._lease.lost
        self._give_back()
        if lost and kind is None:
            raise DumpLocked(
                f"{self.store.url}: another process took {self.name} over, because this one did not renew it for "
                f"{LEASE:.0f} seconds. Complete shards are kept. Resume once the other process has ended."
            )

    def _take_local(self) -> None:
        path, deadline = self.store.path(self.name), time.monotonic() + _PROBE
        while True:
            handle = _open(self.store, self.name, os.O_RDWR | os.O_CREAT)
            if _flock(handle, fcntl.LOCK_EX):
                if _same_file(handle, path):
                    break
                os.close(handle)  # the last owner removed the file between `open` and `flock`
                continue
            owner = owner_in(handle)
            os.close(handle)
            live = owner is not None and (not owner.is_here or owner.is_alive)
            if live or time.monotonic() >= deadline:
                raise _locked(self.store, self.name)
            time.sleep(_PAUSE)  # no owner is named: a process is checking the lock, or has yet to write its identity
        owner = owner_in(handle)
        if owner is not None and not owner.is_here and is_renewed(self.store, self.name, owner):
            os.close(handle)  # on a shared disk, flock may not cover other machines
            raise _locked(self.store, self.name)
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, self.owner.to_bytes(), 0)
        except OSError as error:
            os.close(handle)
            raise _refused(self.store, self.name, f"{error.strerror}. Make room") from error
        self._handle = handle

    def _take_remote(self) -> None:
        """Create the lock. Remove it first if its owner is dead, which only one of the processes that see this may do."""
        claims: list[str] = []
        try:
            while not self._create(self.name):
                owner = owner_of(self.store, self.name)
                if owner is None:
                    continue  # it was just released
                if is_live(self.store, self.name, owner):
                    raise _locked(self.store, self.name)
                self._claim(owner, claims)
                now = owner_of(self.store, self.name)
                if now is not None and now.mark == owner.mark:
                    self.store.remove(self.name)
        finally:
            for claim in claims:
                self.store.remove(claim)

    def _create(self, name: str) -> bool:
        """Create the lock, or a claim. Returns whether it is this owner's: a store may write the file and lose its answer, so
        that the second try finds it there."""
        try:
            if self.store.create(name, self.owner.to_bytes()):
                return True
        except DumpWriteFailed:
            if not self._is_mine(name):
                raise
            return True
        return self._is_mine(name)

    def _is_mine(self, name: str) -> bool:
        owner = owner_of(self.store, name)
        return owner is not None and owner.mark == self.owner.mark

    def _claim(self, dead: LockOwner, claims: list[str]) -> None:
        """Claim the right to remove the lock of a dead owner, or raise DumpLocked. Mutates `claims`: files to remove then.

        A claim is a file that is named after the owner it is about. Who finds one of a process that died over it claims that
        one's right, and so on: there is one live claimant at most, wherever the others were killed. Claims that were cut all
        name the same unknown owner; so as not to go in a circle, no name is followed twice.
        """
        mark, dead_claims = dead.mark, list[str]()
        while not self._create(name := _CLAIM + mark):
            claimant = owner_of(self.store, name)
            if claimant is None:
                continue  # it was just released
            if is_live(self.store, name, claimant):
                raise _locked(self.store, name)
            dead_claims.append(name)
            mark = claimant.mark
            while _CLAIM + mark in dead_claims:
                mark = _after(mark)
        claims += [*dead_claims, name]

    def _give_back(self) -> None:
        """Remove the lock unless it is another's by now."""
        with suppress(OSError):
            owner = owner_of(self.store, self.name) if self._handle is None else owner_in(self._handle)
            if owner is not None and owner.mark == self.owner.mark:
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
    """Remove lock files of dead processes and of none, and claims on locks that are gone. Those of live processes and other
    hosts stay."""
    for name in store.sizes():
        if name == FINISH or _NAME.fullmatch(name):
            with suppress(DumpLocked):
                if store.local:
                    _remove_if_free(store, name)
                elif (owner := owner_of(store, name)) is not None and (owner.is_here or not owner.is_known):
                    lock = DumpLock(store, name)
                    lock._take_remote()
                    lock._give_back()
    if not store.local:
        _sweep_claims(store)


def _sweep_claims(store: Store) -> None:
    names = [name for name in store.sizes() if LOCK_OR_CLAIM.fullmatch(name)]
    owners = {name: owner for name in names if (owner := owner_of(store, name)) is not None}
    while True:
        named = {(name, owner.mark) for name, owner in owners.items()}
        named |= {(name, _after(name.removeprefix(_CLAIM))) for name in owners if name.startswith(_CLAIM)}
        subjects = {_CLAIM + mark for name, mark in named if name != _CLAIM + mark}  # a claim does not keep itself
        gone = [name for name in owners if name.startswith(_CLAIM) and name not in subjects]
        if not gone:
            return
        for name in gone:
            store.remove(name)
            del owners[name]


def _remove_if_free(store: Store, name: str) -> None:
    """Remove a lock file that no process holds. Writes no owner into it, so that a writer who wants the lock now waits."""
    with suppress(DumpWriteFailed), _opened(store, name) as handle:  # what cannot be opened stays
        if handle is None:
            return
        owner = owner_in(handle)
        ours = owner is None or owner.is_here or not owner.is_known
        if ours and _flock(handle, fcntl.LOCK_EX) and _same_file(handle, store.path(name)):
            store.remove(name)


@contextmanager
def _opened(store: Store, name: str) -> Iterator[int | None]:
    """An open local lock file; None if there is none."""
    try:
        handle = _open(store, name, os.O_RDWR)
    except FileNotFoundError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _is_held(store: Store, name: str) -> bool:
    """Whether a live process holds the lock. For one of another host, watches whether it is renewed."""
    if not store.local:
        owner = owner_of(store, name)
        return owner is not None and is_live(store, name, owner)
    with _opened(store, name) as handle:
        if handle is None:
            return False
        owner = owner_in(handle)
        distant = owner is not None and not owner.is_here
        return not _flock(handle, fcntl.LOCK_SH) or (distant and owner is not None and is_renewed(store, name, owner))


def _open(store: Store, name: str, flags: int) -> int:
    """Open a local lock file. A link is not followed: it could lead to any file, which the owner would overwrite."""
    try:
        handle = os.open(store.path(name), flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            raise _refused(store, name, "there is no such folder. Create it") from None
        raise
    except OSError as error:
        said = {errno.ELOOP: "it is a symbolic link. Remove it", errno.EISDIR: "it is a folder. Remove it"}
        why = said.get(error.errno or 0, f"{error.strerror}. Make the folder writable, with room for new files")
        raise _refused(store, name, why) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _refused(store, name, "it is not a regular file. Remove it")
    return handle


def _refused(store: Store, name: str, why: str) -> DumpWriteFailed:
    return DumpWriteFailed(f"Cannot take the lock {store.url}/{name}: {why}, or choose another folder.")


def _after(mark: str) -> str:
    """The mark that stands for one that is taken: every process finds the same."""
    return hashlib.sha256(mark.encode()).hexdigest()[:32]


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


def _locked(store: Store, name: str) -> DumpLocked:
    owner = owner_of(store, name) or LockOwner()
    return DumpLocked(
        f"{store.url} is being written by process {owner.pid or '?'} on {owner.host} ({name}). Wait for it, or choose another "
        f"folder. If that process has ended, its lock expires {LEASE:.0f} seconds after its last renewal."
    )
