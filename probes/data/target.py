"""`Target`: the values that a probe predicts."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from replaylens.probes.errors import ProbeError

MAX_CLASSES = 64
"""an integer label with more values than this is a number to regress on, not classes"""


@dataclass(frozen=True, eq=False)
class Target:
    """The values that a probe predicts: one per row, missing ones marked."""

    name: str
    values: np.ndarray
    """classes as text, or numbers as float64"""
    present: np.ndarray
    """bool: whether the row has a value"""
    kind: str
    """class or number"""

    @property
    def classes(self) -> np.ndarray:
        return np.unique(self.values[self.present]) if self.kind == "class" else np.array([])

    def __getitem__(self, chosen: np.ndarray) -> "Target":
        return replace(self, values=self.values[chosen], present=self.present[chosen])


def make_target(name: str, values: Any, kind: str = "auto") -> Target:
    """A target from any column of values; None and NaN are missing values.

    Whole numbers are classes also where missing values have made floats of them.
    """
    column = pd.Series(values).reset_index(drop=True)
    present = column.notna().to_numpy()
    if pd.api.types.is_float_dtype(column) and not present.all() and (column[present] % 1 == 0).all():
        column = column.astype("Int64")
    if kind == "auto":
        number = pd.api.types.is_float_dtype(column) or (
            pd.api.types.is_integer_dtype(column) and column.nunique() > MAX_CLASSES
        )
        kind = "number" if number else "class"
    if kind == "number":
        return Target(name, column.to_numpy(dtype=np.float64, na_value=np.nan), present, kind)
    if kind != "class":
        raise ProbeError(f"Unknown kind {kind!r}. Use 'auto', 'class' or 'number'.")
    return Target(name, np.where(present, column.astype(object).map(_class_name), "").astype(str), present, kind)


def _class_name(value: Any) -> str:
    return "" if pd.isna(value) else str(value)
