"""Calls whose options are checked by name, before Python reports them in terms of the code."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from replaylens.engine.errors import UnknownOption
from replaylens.engine.model import modes

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_FIELDS: dict[str, frozenset[str]] = {}
"""the fields of the dataclasses that are checked, by their names"""


def named_options(method: Callable[P, R]) -> Callable[P, R]:
    """The method, which raises UnknownOption where Python would raise a TypeError about its signature, and runs within
    `modes.plain`."""
    return _checked(method, method.__name__)


def named_fields(cls: type[T]) -> type[T]:
    """The dataclass, made with the same check."""
    _FIELDS[cls.__name__] = frozenset(inspect.signature(cls).parameters)
    setattr(cls, "__init__", _checked(cls.__init__, cls.__name__))  # noqa: B010, a type checker refuses the assignment
    return cls


def _checked(method: Callable[P, R], name: str) -> Callable[P, R]:
    parameters = dict(list(inspect.signature(method).parameters.items())[1:])  # without self or cls
    by_position = [key for key, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
    needed = [key for key, each in parameters.items() if each.default is each.empty]
    most, known = len(by_position) + 1, frozenset(parameters)

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > most or not known.issuperset(kwargs):
            _refuse(name, by_position, list(parameters), args[1:], kwargs)
        if len(args) <= len(needed) and any(key not in kwargs for key in needed[len(args) - 1 :]):
            missing = [key for key in needed[len(args) - 1 :] if key not in kwargs]
            raise UnknownOption(f"{name}() needs {' and '.join(missing)}. Give a value.")
        with modes.plain():
            return method(*args, **kwargs)

    return call


def _refuse(name: str, by_position: list[str], known: list[str], values: tuple[Any, ...], given: Mapping[str, Any]) -> NoReturn:
    """Raise UnknownOption for the first option that does not exist, or for too many values."""
    unknown = [key for key in given if key not in known]
    if not unknown:
        taken = ", ".join(by_position) or "nothing"
        others = ", ".join(key for key in known if key not in by_position) or "none"
        raise UnknownOption(
            f"{name}() takes only {taken} by position, and its options by name: {others}. Got {len(values)} values by position."
        )
    for owner, own in _FIELDS.items():
        if owner.lower() in known and unknown[0] in own:
            instead = f"{owner.lower()}={owner}({unknown[0]}=...)"
            raise UnknownOption(f"{name}() has no option {unknown[0]!r}, but {owner} has. Give {instead}.")
    nearest = get_close_matches(unknown[0], known, n=1, cutoff=0.7)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise UnknownOption(f"{name}() has no option {unknown[0]!r}{hint}. It has {', '.join(known)}.")
