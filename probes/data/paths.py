"""Paths of rows: the rows before each row on its branch, and whether any are missing."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True, eq=False)
class RowPath:
    """One branch of an example, from the prompt's first token on. Rows are numbers in the frame, sorted by position."""

    rows: np.ndarray
    """the whole path: accepted rows up to the fork, then the branch's own"""
    num_own: int
    """number of the branch's own rows, at the end"""
    whole: np.ndarray
    """[rows] bool: whether no position from 0 up to the row is missing"""

    @property
    def own(self) -> np.ndarray:
        return self.rows[len(self.rows) - self.num_own :]


def row_paths(frame: pd.DataFrame) -> Iterator[RowPath]:
    """Every branch of every example; examples of joined parts are kept apart."""
    position, branch, fork = (frame[name].to_numpy() for name in ("position", "branch", "fork_position"))
    keys = ["part", "example"] if "part" in frame else ["example"]
    for rows in frame.groupby(keys, sort=False).indices.values():
        rows = rows[np.argsort(position[rows], kind="stable")]
        main = rows[branch[rows] == 0]
        for number in np.unique(branch[rows]):
            own = rows[branch[rows] == number]
            path = own if number == 0 else np.concatenate([main[position[main] < fork[own[0]]], own])
            yield RowPath(path, len(own), np.logical_and.accumulate(position[path] == np.arange(len(path))))


def example_keys(frame: pd.DataFrame) -> list[tuple[str, int]]:
    """The example of each row, as (part, example): joined parts number their examples alike."""
    part = frame["part"] if "part" in frame else [""] * len(frame)
    return list(zip(part, frame["example"], strict=True))
