"""`Lease`: a lock that its owner renews, and whether the owner of a lock is alive.

On its own host, a process can be looked at. For other hosts, who finds a lock unchanged for LEASE seconds of its own clock
takes its owner for dead. No clocks of two machines are compared.
"""

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace

from replaylens.engine.dump.owner import LockOwner
from replaylens.engine.dump.store import Store

LEASE, RENEW = 60.0, 10.0
"""seconds until the lock of another host expires; between two renewals"""
_POLL = 0.5


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
    """Whether the lock changes hands or is renewed within LEASE seconds of this process's clock. False if it is released."""
    deadline = time.monotonic() + LEASE
    while time.monotonic() < deadline:
        now = owner_of(store, name)
        if now != owner:
            return now is not None
        time.sleep(min(_POLL, LEASE / 4))
    return False


def owner_in(handle: int) -> LockOwner | None:
    """The owner that an open local lock file names; None if it names none yet."""
    raw = os.pread(handle, 4096, 0)
    return LockOwner.parse(raw) if raw.strip() else None


def owner_of(store: Store, name: str) -> LockOwner | None:
    """The owner that the lock file names; None if there is no file."""
    raw = store.peek(name)
    return None if raw is None else LockOwner.parse(raw)
