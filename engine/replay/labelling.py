"""Labels as users give them, per text, per token or per character span, turned into labels of texts and of tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from replaylens.engine.errors import BadTexts
from replaylens.engine.request.values import items, shown
from replaylens.tasks.given import TokenSpan
from replaylens.tasks.reading import Label, Offset

NamedLabels = Mapping[str, Sequence[Any]] | Sequence[str] | str | None
"""label -> one value for each text; of a table, the names of the label columns"""
VALUES = "one value, a list with one value per token, or a list of spans {'start', 'end', 'value'} in characters"


def label_columns(labels: NamedLabels, count: int) -> dict[str, list[Any]]:
    """The labels of a list of texts, each with one value for each of them. BadTexts if some are missing."""
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        raise BadTexts(f"Invalid labels={shown(labels)}. Give a dict from label to values, one for each text.")
    found = {}
    for name in labels:
        values = items(f"labels[{name!r}]", labels[name], "a list with one value for each text", BadTexts)
        if len(values) != count:
            raise BadTexts(f"Label {str(name)!r} has {len(values)} values for {count} texts. Give one for each text.")
        found[str(name)] = values
    return found


def same_numbers(values: list[Any]) -> list[Any]:
    """Values of one label with whole numbers and fractions as one type. A column of whole numbers that became fractions
    because some are missing has whole numbers again."""
    found = [_number(value) for value in values]
    known = [value for value in found if value is not None]
    if len(known) + sum(_missing(value) for value in values) < len(values) or not any(isinstance(v, float) for v in known):
        return values
    whole = len(known) < len(values) and all(value == int(value) for value in known if math.isfinite(value))
    return [None if value is None else int(value) if whole and math.isfinite(value) else float(value) for value in found]


def _number(value: Any) -> int | float | None:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value == value else None


def _missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))


def token_labels(
    labels: Mapping[str, Any], length: int, offsets: Callable[[], list[Offset]], where: str
) -> tuple[dict[str, Label], dict[str, tuple[TokenSpan, ...]]]:
    """(labels of the text, labels of its tokens), for a text of `length` tokens. `where` names the text in errors."""
    whole: dict[str, Label] = {}
    spans: dict[str, tuple[TokenSpan, ...]] = {}
    for name, value in labels.items():
        here = f"{where}, label {name!r}"
        if isinstance(value, np.ndarray | Tensor) and value.ndim:
            value = value.tolist()
        if not isinstance(value, list | tuple):
            whole[name] = _plain(value, here)
        elif all(isinstance(each, Mapping) for each in value):
            spans[name] = _runs(_at_tokens(value, offsets(), here) if value else [])
        elif len(value) == length:
            spans[name] = _runs([_plain(each, here) for each in value])
        else:
            raise BadTexts(f"{here} has {len(value)} values for {length} tokens. Give {VALUES}.")
    return whole, spans


def _plain(value: Any, here: str) -> Label:
    """A label as text, a number, True, False or None. NaN and pandas' NA are missing values."""
    value = value.item() if isinstance(value, np.generic | Tensor) and np.ndim(value) == 0 else value
    if _missing(value):
        return None
    if not isinstance(value, str | int | float) or (isinstance(value, float) and math.isinf(value)):
        raise BadTexts(f"{here} is {shown(value)}. Give {VALUES}; a value is text, a finite number, True, False or None.")
    return value


def _at_tokens(spans: Sequence[Mapping[str, Any]], offsets: Sequence[Offset], here: str) -> list[Label]:
    """The value of each token. A token takes the span of its last character, else the last span that it overlaps."""
    values: list[Label] = [None] * len(offsets)
    ends = [False] * len(offsets)
    """whether the value is that of the token's last character"""
    for span in spans:
        start, end, value = _span(span, here)
        touched = [i for i, (a, b) in enumerate(offsets) if a < end and start < b]
        if not touched:
            raise BadTexts(f"{here}: the characters [{start}, {end}) are in no token. Give a span within the text.")
        for i in touched:
            ending = offsets[i][1] <= end
            if ending and ends[i]:
                raise BadTexts(
                    f"{here}: two spans cover the token at characters {list(offsets[i])}. Give spans without overlaps."
                )
            if ending or not ends[i]:
                values[i], ends[i] = value, ending
    return values


def _span(raw: Mapping[str, Any], here: str) -> tuple[int, int, Label]:
    if set(raw) != {"start", "end", "value"}:
        raise BadTexts(f"{here} has the span {shown(dict(raw))}. Give {{'start', 'end', 'value'}}, in characters.")
    start, end, value = raw["start"], raw["end"], _plain(raw["value"], here)
    if type(start) is not int or type(end) is not int or not 0 <= start < end or value is None:
        raise BadTexts(f"{here} has the span {shown(dict(raw))}. Give whole numbers with 0 <= start < end, and a value.")
    return start, end, value


def _runs(values: Sequence[Label]) -> tuple[TokenSpan, ...]:
    """Runs of equal values; tokens without a value are left out."""
    runs: list[TokenSpan] = []
    for i, value in enumerate(values):
        if value is None:
            continue
        if runs and runs[-1][1] == i and runs[-1][2] == value and type(runs[-1][2]) is type(value):
            runs[-1] = (runs[-1][0], i + 1, value)
        else:
            runs.append((i, i + 1, value))
    return tuple(runs)
