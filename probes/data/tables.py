"""Rows from tables: the columns of a pandas frame or of a Hugging Face dataset, as the arguments of `ProbeRows.of_arrays`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from replaylens.engine.errors import MissingPackage, no_such
from replaylens.probes.errors import BadRows

if TYPE_CHECKING:
    import datasets

Features = str | Sequence[str] | Mapping[Any, str | Sequence[str]]
"""a column of vectors, several columns of numbers, or a dict of either by site"""


def activations(frame: pd.DataFrame, features: Features) -> Any:
    """X of `ProbeRows.of_arrays`: one array [rows, d], or several by site."""
    if isinstance(features, Mapping):
        return {site: _matrix(frame, columns) for site, columns in features.items()}
    return _matrix(frame, features)


def require_no_answers(features: Features, labels: str | Sequence[str], group: str | None, key: str | None) -> None:
    """Raise BadRows if a feature is a label, the group or the key: a probe would read its own answer."""
    sites = features.values() if isinstance(features, Mapping) else [features]
    given = {name for names in sites for name in ([names] if isinstance(names, str) else names)}
    roles = dict.fromkeys([labels] if isinstance(labels, str) else labels, "a label") | {group: "the group", key: "the key"}
    for name, role in roles.items():
        if name is not None and name in given:
            raise BadRows(f"Feature column {name!r} is {role}. Leave it out of the features: a probe would read it there.")


def columns(frame: pd.DataFrame, names: str | Sequence[str] | None) -> Any:
    """One column, several as a frame, or None. Raises BadRows for an unknown or repeated column."""
    if names is None:
        return None
    for name in [names] if isinstance(names, str) else names:
        if name not in frame:
            raise BadRows(no_such("column", str(name), map(str, frame.columns)))
        if isinstance(frame[name], pd.DataFrame):
            raise BadRows(f"Two columns have the name {name!r}. Rename one.")
    return frame[names] if isinstance(names, str) else frame[list(names)]


def _matrix(frame: pd.DataFrame, names: str | Sequence[str]) -> np.ndarray:
    if isinstance(names, str):
        return _stacked(names, columns(frame, names))
    if not len(names):
        raise BadRows("No feature columns given. Give their names, or the name of one column of vectors.")
    chosen = columns(frame, list(names))
    if not chosen.columns.is_unique:
        raise BadRows(f"Feature column {chosen.columns[chosen.columns.duplicated()][0]!r} is given twice. Give it once.")
    for name in chosen:
        if not pd.api.types.is_numeric_dtype(chosen[name]):
            raise BadRows(f"Feature column {name!r} holds {chosen[name].dtype}, not numbers. Leave it out.")
    return np.asarray(chosen.to_numpy(dtype=None if chosen.notna().all(axis=None) else np.float64, na_value=np.nan))


def _stacked(name: str, column: pd.Series) -> np.ndarray:
    """[rows, d] of a column whose cells are vectors."""
    cells = [np.asarray(cell) for cell in column]
    shapes = {cell.shape for cell in cells}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise BadRows(f"Column {name!r} holds shapes {sorted(shapes)[:3]}. Give vectors of one length, or several columns.")
    return np.stack(cells) if cells else np.empty((0, 0))


def dataset_frame(dataset: "datasets.Dataset", features: Features, names: Sequence[str]) -> pd.DataFrame:
    """The named columns of a dataset as pandas, with class labels as text. Raises MissingPackage without `datasets`."""
    try:
        import datasets
    except ImportError:
        raise MissingPackage("`of_dataset` needs the package datasets. Install it with: pip install datasets") from None
    if isinstance(dataset, datasets.DatasetDict):
        raise BadRows(f"This is a dict of datasets. Give one of them: {', '.join(map(repr, dataset))}.")
    if not isinstance(dataset, datasets.Dataset):
        raise BadRows(f"Cannot read a {type(dataset).__name__}. Give a datasets.Dataset, with all rows at hand.")
    parts = features.values() if isinstance(features, Mapping) else [features]
    wanted = list(dict.fromkeys([*names, *(n for part in parts for n in ([part] if isinstance(part, str) else part))]))
    for name in wanted:
        if name not in dataset.column_names:
            raise BadRows(no_such("column", name, dataset.column_names))
    chosen = dataset.select_columns(wanted)
    frame: pd.DataFrame = chosen.with_format("arrow")[:].to_pandas()  # by way of its NumPy format, float64 would become float32
    for name in names:
        if isinstance(kind := chosen.features[name], datasets.ClassLabel):
            frame[name] = [None if pd.isna(code) or code < 0 else kind.int2str(int(code)) for code in frame[name]]
    return frame
