"""Calls whose options are checked by name, before Python reports them in terms of the code."""

import inspect
import warnings
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


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """As `named_options`, of a function."""
    return _checked(function, function.__name__, 0)


def hides(*names: str) -> Callable[[type[T]], type[T]]:
    """A class decorator: these attributes are for other modules of the package, so that completion does not list them."""

    def decorated(cls: type[T]) -> type[T]:
        own = cls.__dir__
        setattr(cls, "__dir__", lambda self: [name for name in own(self) if name not in names])  # noqa: B010
        return cls

    return decorated


def renamed(**options: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the method also takes an option by its old name (old="new"), with a DeprecationWarning, for one version."""

    def decorated(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in options.keys() & kwargs.keys():
                new = options[old]
                if new in kwargs:
                    raise UnknownOption(f"{method.__name__}() got {new} and {old}, its old name. Give {new} only.")
                text = f"{old} of {method.__name__}() is now called {new}; the old name goes with the next version."
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return method(*args, **kwargs)

        return call

    return decorated


def named_fields(cls: type[T]) -> type[T]:
    """The dataclass, made with the same check."""
    _FIELDS[cls.__name__] = frozenset(inspect.signature(cls).parameters)
    setattr(cls, "__init__", _checked(cls.__init__, cls.__name__))  # noqa: B010, a type checker refuses the assignment
    return cls


def _checked(method: Callable[P, R], name: str, own: int = 1) -> Callable[P, R]:
    """own  the number of parameters that no caller gives: self or cls"""
    parameters = dict(list(inspect.signature(method).parameters.items())[own:])
    by_position = [key for key, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
    needed = [key for key, each in parameters.items() if each.default is each.empty]
    most, known = len(by_position) + own, frozenset(parameters)

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > most or not known.issuperset(kwargs):
            _refuse(name, by_position, list(parameters), args[own:], kwargs)
        if len(args) - own < len(needed) and any(key not in kwargs for key in needed[len(args) - own :]):
            missing = [key for key in needed[len(args) - own :] if key not in kwargs]
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
