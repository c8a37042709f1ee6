"""`Parts`: finished parts of a sweep on disk, so that an interrupted sweep can resume."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from replaylens.probes.checks import make_folder
from replaylens.probes.errors import OtherSweep
from replaylens.probes.fitting.heldout import Held

_KEY = "sweep.key"
_ARRAYS = tuple(field.name for field in fields(Held))


class Parts:
    """Parts by name. Without a folder nothing is stored. Raises OtherSweep if the folder belongs to other settings or rows."""

    def __init__(self, folder: str | Path | None, key: str) -> None:
        self.folder = None if folder is None else make_folder(folder)
        if self.folder is None:
            return
        noted = self.folder / _KEY
        if noted.exists() and noted.read_text() != key:
            raise OtherSweep(f"{folder} holds parts of another sweep. Give its settings and rows, or another folder.")
        noted.write_text(key)

    def get(self, name: str, make: Callable[[], Held]) -> Held:
        """The stored predictions of this name, or else newly computed ones.

        What was not fully written, or written by an earlier version without scores, is computed again.
        """
        return Held(**self.arrays(name, lambda: {each: getattr(made, each) for made in [make()] for each in _ARRAYS}, _ARRAYS))

    def arrays(self, name: str, make: Callable[[], dict[str, np.ndarray]], expected: Sequence[str]) -> dict[str, np.ndarray]:
        """The stored arrays of this name, or else newly computed ones, stored before they are returned."""
        if self.folder is None:
            return make()
        path = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as kept:
                if all(each in kept for each in expected):
                    return {each: kept[each] for each in expected}
        made = make()
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **{each: made[each] for each in expected})
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        return made
