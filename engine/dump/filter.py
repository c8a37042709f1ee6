"""Filters on a dump's index: what `where` takes, and how it is answered on one shard's index at a time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from replaylens.engine.errors import BadRequest

if TYPE_CHECKING:
    import pandas as pd

Predicate = Callable[["pd.DataFrame"], Any]
"""a shard's index -> a boolean per row"""
DEPTH_NEEDS = ("branch", "fork_position", "position")


@dataclass(frozen=True)
class Filter:
    """One condition: a column and what its value must be, or a function of the index."""

    column: str | None
    wanted: Any

    def mask(self, frame: "pd.DataFrame") -> np.ndarray:
        """A boolean per row of the frame."""
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
        """Whether values lie between start and stop of what is wanted, the end left out. BadRequest for another kind."""
        start, stop = self.wanted.start, self.wanted.stop
        if self.wanted.step not in (None, 1):
            raise BadRequest(f"where {self.column}={self.wanted}: a slice with a step; give a range or a list")
        found = values.notna()
        if not found.any():
            return found
        try:
            found &= (values >= start) if start is not None else True
            found &= (values < stop) if stop is not None else True
        except TypeError:
            some = values.dropna().iloc[0]
            raise BadRequest(
                f"where {self.column}={self.wanted}: its values, such as {some}, do not compare with these ends"
            ) from None
        return found

    def _called(self, frame: "pd.DataFrame") -> np.ndarray:
        given = self.wanted(frame)
        if hasattr(given, "fillna"):
            given = given.fillna(False)  # where a label is missing, a comparison with it is too
        mask = np.asarray(given)
        if mask.shape != (len(frame),) or mask.dtype != bool:
            raise BadRequest(f"the function given to where must return one boolean per row, not {mask.dtype}{list(mask.shape)}")
        return mask


def make_filters(known: Iterable[str], predicate: Predicate | None, conditions: dict[str, Any]) -> tuple[Filter, ...]:
    """Filters of a `where` call; BadRequest names the columns where one is unknown."""
    names = [*known, "depth"]
    for name in conditions:
        if name not in names:
            raise BadRequest(f"no column {name!r} in the index; it has {', '.join(names)}")
    if predicate is not None and not callable(predicate):
        raise BadRequest(f"where({predicate!r:.60}): give a function of the index, or conditions as column=value")
    own = (Filter(None, predicate),) if predicate is not None else ()
    return own + tuple(Filter(name, value) for name, value in conditions.items())


def columns_needed(filters: Iterable[Filter], known: list[str]) -> list[str]:
    """Index columns that the filters look at; a function may look at all of them."""
    needed: dict[str, None] = {}
    for each in filters:
        if each.column is None:
            return known
        needed |= dict.fromkeys(DEPTH_NEEDS if each.column == "depth" else (each.column,))
    return list(needed)


def add_depth(frame: "pd.DataFrame") -> "pd.DataFrame":
    """With the column `depth`: how many tokens ago the row's path left the accepted one; 0 on it, 1 at the first token off."""
    if not set(DEPTH_NEEDS) <= set(frame.columns):
        return frame
    left = frame["position"] - frame["fork_position"] + 1
    return frame.assign(depth=left.where(frame["branch"] > 0, 0))
