"""Paths of rows: which rows lie before a row on its own branch, and whether all of them are there."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True, eq=False)
class RowPath:
    """One branch of an example, from the prompt's first token on. Numbers are places in the frame, by position."""

    rows: np.ndarray
    """of the whole path: the accepted one up to the fork, then the branch's own"""
    num_own: int
    """of them, at the end, that are the branch's own"""
    whole: np.ndarray
    """[rows] bool: whether the path is there without a hole from position 0 up to the row"""

    @property
    def own(self) -> np.ndarray:
        return self.rows[len(self.rows) - self.num_own :]


def row_paths(frame: pd.DataFrame) -> Iterator[RowPath]:
    """Every branch of every example; examples of joined parts are told apart."""
    position, branch, fork = (frame[name].to_numpy() for name in ("position", "branch", "fork_position"))
    keys = ["part", "example"] if "part" in frame else ["example"]
    for rows in frame.groupby(keys, sort=False).indices.values():
        rows = rows[np.argsort(position[rows], kind="stable")]
        main = rows[branch[rows] == 0]
        for number in np.unique(branch[rows]):
            own = rows[branch[rows] == number]
            path = own if number == 0 else np.concatenate([main[position[main] < fork[own[0]]], own])
            yield RowPath(path, len(own), np.logical_and.accumulate(position[path] == np.arange(len(path))))
