"""The index of rows that come from arrays: labels, groups, and what else is known about each row."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from replaylens.engine.dump.content import CORE
from replaylens.engine.request.values import shown
from replaylens.probes.data.positions import PLACES
from replaylens.probes.errors import BadRows, MissingGroups

LABEL = "label"
"""the name of a label that is given without one"""
OWN = (*CORE.names, *PLACES, "shard", "row", "depth", "part", "key", "group", "since_last")
"""columns of the index, which labels must not replace"""
GIVEN = ("correct", "steps")
"""of these, what a caller may know: whether the answer is right (`by_answer`), the prompt's length in steps (`by_length`)"""
_WHY = (
    "Rows of one prompt or document are not independent: they share tokens, so a probe fitted on some reads the others by "
    "heart. Folds, intervals and permutations keep groups together. Give groups=, one id per row, such as the number of its "
    "prompt; where every row has its own prompt, give range(len(X))."
)


def make_index(rows: int, labels: Any, groups: Any, *, prompts: Any, positions: Any, tokens: Any, keys: Any) -> pd.DataFrame:
    """One line per row, with the columns of a dump's index, missing where unknown. Arguments as in `ProbeRows.of_arrays`."""
    if groups is None:
        raise MissingGroups(f"No groups given. {_WHY}")
    own = read_labels(labels, rows)
    root = _ids("groups", groups, rows)
    prompt = root if prompts is None else _ids("prompts", prompts, rows)
    example = pd.factorize(prompt)[0]
    _check_prompts(root, prompt, example)
    place = np.full(rows, np.nan) if positions is None else _whole("positions", positions, rows)
    if positions is not None:
        _check_places(prompt, place)
    token, text = (np.full(rows, np.nan), None) if tokens is None else _tokens(tokens, rows)
    frame = pd.DataFrame(
        {
            "example": example,
            "root": root,
            "branch": 0,
            "parent": pd.NA,
            "fork_position": 0,
            "position": place,
            "token": token,
            "text": text,
            "token_state": "prompt",
            "accepted": True,
            "correct": None,
            "logprob": np.nan,
            "entropy": np.nan,
            "depth": 0,
            **dict.fromkeys(PLACES, np.nan),
        }
    )
    frame["since_last"] = frame["position"] - frame.groupby("example")["position"].transform("max")  # marks rows from arrays
    if keys is not None:
        frame["key"] = _ids("keys", keys, rows)
    return frame.assign(**own)


def read_labels(labels: Any, rows: int) -> dict[str, pd.Series]:
    """Label columns by name, from an array, a dict of arrays or a pandas object. Raises BadRows."""
    if isinstance(labels, pd.DataFrame):
        if not labels.columns.is_unique:
            twice = labels.columns[labels.columns.duplicated()][0]
            raise BadRows(f"Two label columns have the name {twice!r}. Give every label its own name.")
        given: dict[Any, Any] = {name: labels[name] for name in labels.columns}
    elif isinstance(labels, Mapping):
        given = dict(labels)
    else:
        name = labels.name if isinstance(labels, pd.Series) else None
        given = {LABEL if name is None else name: labels}
    if not given:
        raise BadRows("No labels given. Give an array, a dict of arrays, or a DataFrame.")
    for name in given:
        if not isinstance(name, str) or not name:
            raise BadRows(f"Label name {name!r} is no text. Give every label a name.")
        if name in OWN and name not in GIVEN:
            raise BadRows(f"Label name {name!r} is taken by the index. Give the label another name.")
    return {name: _label(name, values, rows) for name, values in given.items()}


def _label(name: str, values: Any, rows: int) -> pd.Series:
    """One label column. Whole numbers, booleans and text keep their kind beside missing values."""
    column = _column(f"label {name!r}", values, rows)
    if pd.api.types.is_float_dtype(column) and np.isinf(column.to_numpy(dtype=float, na_value=np.nan)).any():
        raise BadRows(f"Label {name!r} has infinite values. Leave them out, or give NaN where the label is missing.")
    if column.dtype != object:
        return column
    kinds = {_kind(value) for value in column[column.notna()]}
    if len(kinds) > 1:
        raise BadRows(f"Label {name!r} mixes {' and '.join(sorted(kinds))}. Give values of one kind.")
    kind = next(iter(kinds), "text")
    if kind not in ("text", "whole numbers", "booleans", "numbers"):
        raise BadRows(f"Label {name!r} has values of type {kind}. Give text, numbers or booleans.")
    wanted = {"text": object, "whole numbers": "Int64", "booleans": "boolean", "numbers": "float64"}[kind]
    return column.astype(wanted)


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool | np.bool_):
        return "booleans"
    if isinstance(value, int | np.integer):
        return "whole numbers"
    return "numbers" if isinstance(value, float | np.floating) else type(value).__name__


def _column(what: str, values: Any, rows: int) -> pd.Series:
    """Values as a column of this many rows, whatever index they had."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    if isinstance(values, pd.Series):
        column = values.reset_index(drop=True)
    else:
        values = values if isinstance(values, np.ndarray) or pd.api.types.is_array_like(values) else _array(what, values)
        if values.ndim != 1:
            several = " Give several labels as a dict." if what.startswith("label") else ""
            raise BadRows(f"The {what} must have one value per row, but the shape is {list(values.shape)}.{several}")
        column = pd.Series(values)
    if len(column) != rows:
        has = "has" if what.startswith("label") else "have"
        raise BadRows(f"The {what} {has} {len(column)} values for {rows} rows. Give one per row, in the order of the rows.")
    return column


def _array(what: str, values: Any) -> np.ndarray:
    """A list, range or the like, without turning one kind of value into another."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise BadRows(f"The {what} must be an array or a list, but {values!r:.40} is neither. Give one value per row.")
    listed = list(values)
    out = np.empty(len(listed), dtype=object)
    out[:] = [value.item() if isinstance(value, Tensor) and value.ndim == 0 else value for value in listed]
    return out


def _ids(what: str, values: Any, rows: int) -> np.ndarray:
    """Ids as text. Raises BadRows if one is missing."""
    column = _column(what, values, rows)
    if column.isna().any():
        raise BadRows(f"The {what} lack a value at row {int(np.flatnonzero(column.isna())[0])}. Give an id for every row.")
    return column.map(str).to_numpy(dtype=object)


def _whole(what: str, values: Any, rows: int) -> np.ndarray:
    column = _column(what, values, rows)
    try:
        if any(isinstance(value, str | bytes) for value in column):
            raise TypeError  # "7" would become a number
        numbers = column.to_numpy(dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.full(rows, np.nan)
    bad = ~((numbers >= 0) & (numbers == np.floor(numbers)))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        found = shown(column.tolist()[row])
        raise BadRows(f"The {what} must be whole numbers from 0 on, but row {row} has {found}. Count from 0.")
    return numbers.astype(np.int64)


def _tokens(tokens: Any, rows: int) -> tuple[np.ndarray, Any]:
    """(ids, text or None): of text, the ids are its rank."""
    column = _column("tokens", tokens, rows)
    if len(column) and all(isinstance(token, str) for token in column):
        return np.unique(column.to_numpy(dtype=str), return_inverse=True)[1], column.to_numpy(dtype=object)
    return _whole("tokens", tokens, rows), None


def _check_prompts(root: np.ndarray, prompt: np.ndarray, example: np.ndarray) -> None:
    first = np.unique(example, return_index=True)[1]
    wrong = np.flatnonzero(root != root[first][example])
    if len(wrong):
        row = int(wrong[0])
        raise BadRows(
            f"Prompt {prompt[row]!r} has rows in group {root[first[example[row]]]!r} and in group {root[row]!r} (row {row}). "
            f"Rows of one prompt are not independent: put them into one group."
        )


def _check_places(prompt: np.ndarray, place: np.ndarray) -> None:
    twice = pd.DataFrame({"prompt": prompt, "place": place}).duplicated().to_numpy()
    if twice.any():
        row = int(np.flatnonzero(twice)[0])
        other = int(np.flatnonzero((prompt == prompt[row]) & (place == place[row]))[0])
        raise BadRows(
            f"Rows {other} and {row} are both position {place[row]} of prompt {prompt[row]!r}. If a group has several prompts, "
            f"give prompts=, one id per row; otherwise correct or leave out the positions."
        )
