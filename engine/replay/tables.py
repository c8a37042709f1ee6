"""Tables of texts: data frames, JSON lines, Hugging Face datasets and mappings of columns, read by the names of columns."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replaylens.engine.errors import BadTexts, no_such
from replaylens.engine.request.values import shown

Columns = dict[str, list[Any]]
TABLE = "a pandas DataFrame, the path of a JSONL file, a Hugging Face dataset, a mapping of columns, or a list of records"
"""what counts as a table, for error messages"""


def read_columns(table: Any, names: Sequence[str]) -> Columns:
    """The named columns of a table, each as a list. BadTexts names what is missing or malformed."""
    if isinstance(table, str | Path):
        return _of_records(_json_lines(Path(table)), names, str(table))
    if _is_split_dataset(table):
        raise BadTexts(f"The dataset has the splits {', '.join(map(str, table))}. Give one of them.")
    if (known := _column_names(table)) is not None:
        for name in names:
            if name not in known:
                raise BadTexts(no_such("column", name, known))
        return {name: _listed(table[name]) for name in names}
    if isinstance(table, Iterable) and not isinstance(table, str | bytes):  # also a dataset that is streamed
        return _of_records(list(table), names, "The table")
    raise BadTexts(f"Invalid texts={shown(table)}. Give {TABLE}.")


def _is_split_dataset(table: Any) -> bool:
    """Whether this is a dictionary of datasets by split, as `datasets.load_dataset` returns."""
    return isinstance(table, Mapping) and bool(table) and all(hasattr(each, "column_names") for each in table.values())


def _column_names(table: Any) -> list[str] | None:
    """The columns of a data frame, a dataset or a mapping; None if it has none to ask for."""
    if isinstance(table, Mapping):
        return [str(name) for name in table]
    found = getattr(table, "column_names", None)  # a dataset
    if found is None or not hasattr(table, "__len__"):
        found = getattr(table, "columns", None)  # a data frame
    return [str(name) for name in found] if found is not None and hasattr(table, "__getitem__") else None


def _listed(column: Any) -> list[Any]:
    return column.to_list() if hasattr(column, "to_list") else list(column)


def _of_records(records: Sequence[Any], names: Sequence[str], where: str) -> Columns:
    """The columns of a list of records. A label may be missing in some of them, but not in all."""
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise BadTexts(
                f"{where}: record {number} is {shown(record)}. Give records with named fields, such as {{'text': ...}}."
            )
    known = list(dict.fromkeys(name for record in records for name in record))
    for name in names:
        if name not in known:
            raise BadTexts(f"{where}: {no_such('column', name, known)}")
    return {name: [record.get(name) for record in records] for name in names}


def _json_lines(path: Path) -> list[Any]:
    """The records of a JSONL file; empty lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise BadTexts(f"Cannot read {path}: {error}. Give the path of a JSONL file, one JSON object per line.") from None
    records = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise BadTexts(f"{path}, line {number} is not JSON: {error}. Give one JSON object per line.") from None
    if not records:
        raise BadTexts(f"{path} has no lines. Give one JSON object per line.")
    return records
