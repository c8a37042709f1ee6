"""`LockOwner`: the process that a lock file names, and whether it is alive."""

import hashlib
import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass

from replaylens.engine.errors import BadDump
from replaylens.engine.records import Natural, read

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
