"""Filters on a dump's index: the conditions of `where`, evaluated on one shard's index at a time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from replaylens.engine.errors import BadRequest

if TYPE_CHECKING:
    import pandas as pd

Predicate = Callable[["pd.DataFrame"], Any]
"""a shard's index -> one boolean per row"""
DEPTH_NEEDS = ("branch", "fork_position", "position")


@dataclass(frozen=True)
class Filter:
    """One condition: a column and its wanted value, or a function of the index."""

    column: str | None
    wanted: Any

    def mask(self, frame: "pd.DataFrame") -> np.ndarray:
        """One boolean per row of the frame."""
        if self.column is None:
            return self._called(frame)
        values = frame[self.column]
        wanted = self.wanted
        if wanted is None:
            return np.asarray(values.isna(), dtype=bool)
        if isinstance(wanted, slice) or (isinstance(wanted, range) and wanted.step == 1):
            found = self._within(values)
        else:
            found = self._equal(values)
        return np.asarray(found.fillna(False), dtype=bool)

    def _equal(self, values: "pd.Series") -> "pd.Series":
        """Whether values are what is wanted, or one of several. BadRequest for what nothing compares with."""
        try:
            several = isinstance(self.wanted, Iterable) and not isinstance(self.wanted, str | bytes)
            return values.isin(list(self.wanted)) if several else values == self.wanted
        except (TypeError, ValueError, RuntimeError, OverflowError):  # unhashable, a dimension too many, or too large
            raise BadRequest(f"where {self.column}={self.wanted!r:.60}: give a value, several, a range or a slice") from None

    def _within(self, values: "pd.Series") -> "pd.Series":
        """Whether each value lies in [start, stop) of the wanted range; BadRequest if they cannot be compared."""
        start, stop = self.wanted.start, self.wanted.stop
        if self.wanted.step not in (None, 1):
            raise BadRequest(f"{self.column}={self.wanted} in `where` is a slice with a step. Use a range or a list.")
        found = values.notna()
        if not found.any():
            return found
        try:
            found &= (values >= start) if start is not None else True
            found &= (values < stop) if stop is not None else True
        except TypeError:
            some = values.dropna().iloc[0]
            raise BadRequest(
                f"{self.column}={self.wanted} in `where` cannot be compared with the column's values, such as {some!r}. "
                f"Give bounds of their type."
            ) from None
        return found

    def _called(self, frame: "pd.DataFrame") -> np.ndarray:
        given = self.wanted(frame)
        if hasattr(given, "fillna"):
            given = given.fillna(False)  # a comparison with a missing label is missing, too
        mask = np.asarray(given)
        if mask.shape != (len(frame),) or mask.dtype != bool:
            raise BadRequest(
                f"The function given to `where` returned {mask.dtype}{list(mask.shape)}. Return one boolean per row."
            )
        return mask


def make_filters(known: Iterable[str], predicate: Predicate | None, conditions: dict[str, Any]) -> tuple[Filter, ...]:
    """The filters of a `where` call. BadRequest for an unknown column lists the known ones."""
    names = [*known, "depth"]
    for name in conditions:
        if name not in names:
            raise BadRequest(f"The index has no column {name!r}. It has {', '.join(names)}.")
    if predicate is not None and not callable(predicate):
        raise BadRequest(f"where({predicate!r:.60}): give a function of the index, or conditions as column=value")
    own = (Filter(None, predicate),) if predicate is not None else ()
    return own + tuple(Filter(name, value) for name, value in conditions.items())


def columns_needed(filters: Iterable[Filter], known: list[str]) -> list[str]:
    """Index columns that the filters use; a function may use all of them."""
    needed: dict[str, None] = {}
    for each in filters:
        if each.column is None:
            return known
        needed |= dict.fromkeys(DEPTH_NEEDS if each.column == "depth" else (each.column,))
    return list(needed)


def add_depth(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Add the column `depth`: 0 on the accepted path, then the number of tokens since the fork, from 1."""
    if not set(DEPTH_NEEDS) <= set(frame.columns):
        return frame
    left = frame["position"] - frame["fork_position"] + 1
    return frame.assign(depth=left.where(frame["branch"] > 0, 0))
