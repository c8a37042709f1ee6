"""`Parts`: finished parts of a sweep on disk, so that an interrupted sweep can resume."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np

from replaylens.probes.errors import OtherSweep
from replaylens.probes.heldout import Held

_KEY = "sweep.key"
_ARRAYS = tuple(field.name for field in fields(Held))


class Parts:
    """Parts by name. Without a folder nothing is stored. Raises OtherSweep if the folder belongs to other settings or rows."""

    def __init__(self, folder: str | Path | None, key: str) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        noted = self.folder / _KEY
        if noted.exists() and noted.read_text() != key:
            raise OtherSweep(f"{folder} holds parts of another sweep. Give its settings and rows, or another folder.")
        noted.write_text(key)

    def get(self, name: str, make: Callable[[], Held]) -> Held:
        """The stored part, or else a newly computed one.

        A part whose file was not fully written, or that an earlier version wrote without scores, is computed again.
        """
        if self.folder is None:
            return make()
        path = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as kept:
                if all(name in kept for name in _ARRAYS):
                    return Held(**{name: kept[name] for name in _ARRAYS})
        held = make()
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, **{name: getattr(held, name) for name in _ARRAYS})
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        return held
