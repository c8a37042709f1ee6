"""Values that users hand in, checked in one place and made plain: Python's own numbers, lists and booleans.

Every error names the option, what was given and what is accepted. NumPy's and torch's scalars count as numbers; a boolean
counts as a boolean only.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from reprlib import Repr
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from replaylens.engine.errors import BadRequest, EngineError

T = TypeVar("T")
_short = Repr()
_short.maxstring = _short.maxother = 60


def shown(value: Any) -> str:
    """A value as an error shows it: short, and whatever it is."""
    return _short.repr(value)


def integer(value: Any) -> int | None:
    """A whole number as an int: Python's, NumPy's, or a tensor or array without dimensions. None: it is none."""
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, np.ndarray) and value.ndim == 0 and np.issubdtype(value.dtype, np.integer):
        return int(value)
    if isinstance(value, Tensor) and value.ndim == 0 and value.dtype.is_signed is not None and not _fractional(value):
        return int(value)
    return None


def _fractional(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex() or value.dtype.itemsize == 1 and "bool" in str(value.dtype)


def real(value: Any) -> float | None:
    """A number as a float, NaN and infinity included. None: it is none."""
    if (whole_number := integer(value)) is not None:
        value = whole_number
    elif isinstance(value, np.ndarray | Tensor) and value.ndim == 0 and str(value.dtype).removeprefix("torch.") != "bool":
        value = value.item()
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.floating):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number beyond the largest float
        return math.copysign(math.inf, value)


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """A whole number between `least` and `most`, or BadRequest."""
    found = integer(value)
    if found is None or (least is not None and found < least) or (most is not None and found > most):
        limits = f" of at least {least}" if most is None and least is not None else f" between {least} and {most}" if most else ""
        raise BadRequest(f"{name}={shown(value)}: give a whole number{limits}")
    return found


def number(name: str, value: Any, hint: str = "") -> float:
    """A finite number, or BadRequest."""
    found = real(value)
    if found is None or not math.isfinite(found):
        raise BadRequest(f"{name}={shown(value)}: give a finite number{hint}")
    return found


def flag(name: str, value: Any) -> bool:
    """True or False, or BadRequest: a word such as "no" would count as yes."""
    if not isinstance(value, bool | np.bool_):
        raise BadRequest(f"{name}={shown(value)}: give True or False")
    return bool(value)


def optional(check: Callable[..., T], name: str, value: Any, *limits: Any) -> T | None:
    """What `check` makes of the value; None stays None."""
    return None if value is None else check(name, value, *limits)


def instance(name: str, value: Any, kind: type[T], accepted: str) -> T:
    """The value, or BadRequest where it is not of that kind."""
    if not isinstance(value, kind):
        raise BadRequest(f"{name}={shown(value)}: give {accepted}")
    return value


def items(name: str, value: Any, accepted: str, error: type[EngineError] = BadRequest) -> list[Any]:
    """Several things in order, as a list: of a sequence, an iterator, an array or a tensor. Text, bytes, sets and
    mappings are none."""
    if isinstance(value, np.ndarray | Tensor) and value.ndim:
        return list(value)
    unordered = isinstance(value, str | bytes | bytearray | memoryview | Set | Mapping | np.ndarray | Tensor | type)
    if unordered or not isinstance(value, Sequence | Iterator | Iterable):
        raise error(f"{name}={shown(value)}: give {accepted}")
    return list(value)


def token_ids(name: str, value: Any) -> list[Any]:
    """Token ids as plain numbers. What is no whole number is left as it is, for the check against the vocabulary."""
    if isinstance(value, np.ndarray | Tensor) and value.ndim == 1:
        value = value.tolist()
    found = items(name, value, "text, or token ids as a list, an array or a tensor of one dimension")
    return [each if (plain := integer(each)) is None else plain for each in found]
