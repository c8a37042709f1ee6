"""User-supplied values, checked in one place and turned into plain Python numbers, lists and booleans.

Every error names the option, the given value and what is accepted. NumPy and torch scalars count as numbers; booleans do not.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from functools import partial, wraps
from itertools import islice, takewhile
from pathlib import Path
from reprlib import Repr
from tempfile import TemporaryFile
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    ParamSpec,
    TypeGuard,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
)

import numpy as np

from replaylens import boundary
from replaylens.engine.errors import BadRequest, EngineError, UnknownOption
from replaylens.engine.machine import free_disk, require_room
from replaylens.engine.terminal import Later
from replaylens.tasks.errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from replaylens.engine.model import modes
else:
    torch, modes = Later("torch"), Later("replaylens.engine.model.modes")

# ---- values ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")
Error = type[EngineError]
_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_UNORDERED = (str, bytes, bytearray, memoryview, Set, Mapping, type)
"""iterable, but not an ordered list: text and bytes are single values, and sets have no order"""


def short_repr(value: Any) -> str:
    """A short form of any value, for error messages."""
    return _short.repr(value)


def integer(value: Any) -> int | None:
    """A whole number as an int: Python's, NumPy's, or a tensor or array without dimensions. None for other values."""
    plain = _without_dimensions(value)
    return int(plain) if isinstance(plain, int | np.integer) and not isinstance(plain, bool | np.bool_) else None


def real(value: Any) -> float | None:
    """A number as a float, including NaN and infinity. None for other values."""
    plain = _without_dimensions(value)
    if isinstance(plain, bool | np.bool_) or not isinstance(plain, int | float | np.integer | np.floating):
        return None
    try:
        return float(plain)
    except OverflowError:  # a whole number beyond the largest float
        return math.inf if plain > 0 else -math.inf


def _without_dimensions(value: Any) -> Any:
    return value.item() if _is_array(value) and value.ndim == 0 and _held(value) else value


def is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor. While nobody has imported torch, nothing is."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_array(value: Any) -> TypeGuard[np.ndarray | Tensor]:
    return isinstance(value, np.ndarray) or is_tensor(value)


def _held(value: np.ndarray | Tensor) -> bool:
    return isinstance(value, np.ndarray) or value.device.type != "meta"


def as_int(name: str, value: Any, least: int | None = None, most: int | None = None, error: Error = BadRequest) -> int:
    """A whole number from `least` to `most`, or the error."""
    found = integer(value)
    if found is None or (least is not None and found < least) or (most is not None and found > most):
        upwards = f" of at least {least}" if least is not None else ""
        limits = f" between {least} and {most}" if most is not None else upwards
        raise error(f"Invalid {name}={short_repr(value)}. Give a whole number{limits}.")
    return found


def as_float(name: str, value: Any, error: Error = BadRequest, hint: str = "") -> float:
    """A finite number, or the error, which ends with the hint."""
    found = real(value)
    if found is None or not math.isfinite(found):
        raise error(f"Invalid {name}={short_repr(value)}. Give a finite number.{hint}")
    return found


def as_bool(name: str, value: Any, error: Error = BadRequest) -> bool:
    """True or False, or the error. Truthiness would take "no" for True."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"Invalid {name}={short_repr(value)}. Give True or False.")
    return bool(value)


def as_instance(name: str, value: Any, kind: type[T], accepted: str, error: Error = BadRequest) -> T:
    """The value, or the error if it is not of that kind."""
    if not isinstance(value, kind):
        raise error(f"Invalid {name}={short_repr(value)}. Give {accepted}.")
    return value


def as_path(name: str, value: Any, error: Error = BadRequest) -> Path:
    """A path of a file or folder; the error if it is neither text nor a Path."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise error(f"Invalid {name}={short_repr(value)}. Give a path, as text or Path.")
    return Path(value)


def as_list(name: str, value: Any, accepted: str, error: Error = BadRequest) -> list[Any]:
    """An ordered iterable as a list; the error for single values, text, bytes, sets and mappings."""
    single = _is_array(value) and value.ndim == 0
    if single or isinstance(value, _UNORDERED) or not isinstance(value, Iterable):
        raise error(f"Invalid {name}={short_repr(value)}. Give {accepted}.")
    return list(value)


def token_ids(name: str, value: Any) -> list[Any]:
    """Token ids as plain numbers. Values that are not whole numbers are left for the check against the vocabulary."""
    if is_tensor(value) and value.device.type == "meta":
        value = None  # it has no values
    found = as_list(name, value, "text, or token ids as a list, or as an array or a tensor of one dimension")
    if set(map(type, found)) == {int}:  # the usual case
        return found
    return [each if (plain := integer(each)) is None else plain for each in _listed(found)]


def one_path(value: Any) -> list[Any]:
    """The token ids of one prompt: one list of them, or a batch of one, as a tokenizer returns."""
    several = "Give one prompt: text, a list of token ids, or a chat. For several, use prompts([...])."
    if isinstance(value, Mapping):
        raise BadRequest(
            f"Invalid text={short_repr(value)}: not a prompt. A chat is a list of messages, also if it has only one; where "
            "several prompts go, give a list of chats."
        )
    if _is_array(value) and value.ndim > 1:
        if value.ndim > 2 or len(value) != 1:
            raise BadRequest(f"Invalid text={type(value).__name__} of shape {tuple(value.shape)}. {several}")
        value = value[0]
    if isinstance(value, list | tuple) and value and all(isinstance(each, list | tuple | str) for each in value):
        if len(value) != 1 or isinstance(value[0], str) or any(isinstance(each, Mapping) for each in value[0]):
            raise BadRequest(f"Invalid text={short_repr(value)}. {several}")
        value = value[0]
    if hasattr(value, "record") and hasattr(value, "tokens"):  # a Branch, which this room does not know
        raise BadRequest(f"Invalid text={short_repr(value)}: a branch, not a prompt. Give branch.tokens.")
    return token_ids("text", value)


def _listed(found: list[Any]) -> list[Any]:
    """Converts a list of tensors at once, which is faster than one by one."""
    if found and all(is_tensor(each) and each.ndim == 0 and each.dtype == torch.int64 for each in found):
        plain: list[Any] = torch.stack(found).tolist()
        return plain
    return found


def as_processes(name: str, value: Any, least: int = 1, on: int | None = None) -> int:
    """A number of processes for which there is room; on: the cores of other machines that run them."""
    found = as_int(name, value, least)
    require_room(f"{name}={short_repr(found)}", processes=found, on=on)
    return found


def output_path(given: str | Path, folder: bool = False) -> Path:
    """A path at which a file, or a folder, can be written; BadRequest if not. Leaves nothing, so that it can be asked before
    the work whose result goes there."""
    path = as_path("path", given)
    refused = f"Cannot write to {str(given)[:200]}: {{}}. Give another path."
    for place in (path, *path.absolute().parents):
        try:
            os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise BadRequest(refused.format(getattr(error, "strerror", None) or error)) from error
        if not (place.is_dir() or (place == path and not folder)):
            raise BadRequest(refused.format(f"{place} is not a folder"))
        try:
            if not os.access(place, os.W_OK):
                raise PermissionError
            if place.is_file():
                with place.open("ab"):
                    pass
            if place.is_dir():
                with TemporaryFile(dir=place):  # a system of its own, such as /proc, refuses what permissions allow
                    pass
                if not free_disk(place):
                    raise BadRequest(refused.format(f"there is no room left in {place}"))
        except OSError as error:
            raise BadRequest(refused.format(f"{place} is not writable")) from error
        break
    return path


# ---- options ---------------------------------------------------------------------------------------------------------
# Calls whose options are checked by name, before Python reports them in terms of the code.

P = ParamSpec("P")
R = TypeVar("R")
_FIELDS: dict[str, frozenset[str]] = {}
"""the fields of the dataclasses that are checked, by their names"""
_KEYWORDS: dict[str, list[inspect.Parameter]] = {}
"""what `**options: Unpack[X]` of a checked call stands for, by the name of X"""


def named_options(method: Callable[P, R]) -> Callable[P, R]:
    """The method, which raises UnknownOption where Python would raise a TypeError about its signature."""
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
                boundary.warn(text, DeprecationWarning)
                kwargs[new] = kwargs.pop(old)
            return method(*args, **kwargs)

        return call

    return decorated


def defines(*bundles: Any) -> Callable[[T], T]:
    """A decorator of a call or dataclass: it has the defaults of these TypedDicts, which other calls pass on to it as
    `**options: Unpack[Bundle]`. If those are checked, their signatures list each option."""

    def decorated(owner: T) -> T:
        held = inspect.signature(owner).parameters  # type: ignore[arg-type]
        for bundle in bundles:
            types = {key: getattr(given, "__forward_arg__", given) for key, given in bundle.__annotations__.items()}
            assert types.keys() <= held.keys(), f"{owner} does not take all of {bundle.__name__}"
            named = (each.replace(kind=each.KEYWORD_ONLY) for key, each in held.items() if key in types)
            _KEYWORDS[bundle.__name__] = [each.replace(annotation=types[each.name]) for each in named]
        return owner

    return decorated


def _expanded(method: Callable[..., Any]) -> inspect.Signature:
    """The signature of a method, with the options that it passes on."""
    found = inspect.signature(method)
    own = [each for each in found.parameters.values() if each.kind is not each.VAR_KEYWORD]
    for each in found.parameters.values():
        if each.kind is each.VAR_KEYWORD:  # Unpack[Bundle], or its text
            own += _KEYWORDS[re.findall(r"\w+", str(each.annotation))[-1]]
    return found.replace(parameters=own)


def named_fields(cls: type[T]) -> type[T]:
    """The dataclass, made with the same check."""
    _FIELDS[cls.__name__] = frozenset(inspect.signature(cls).parameters)
    setattr(cls, "__init__", _checked(cls.__init__, cls.__name__))  # noqa: B010, a type checker refuses the assignment
    return cls


def _checked(method: Callable[P, R], name: str, own: int = 1) -> Callable[P, R]:
    """own  the number of parameters that no caller gives: self or cls"""
    signature = _expanded(method)
    parameters = dict(list(signature.parameters.items())[own:])
    by_position = [key for key, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
    needed = [key for key, each in parameters.items() if each.default is each.empty]
    most, known, takes_engine = len(by_position) + own, frozenset(parameters), by_position[:1] == ["engine"]

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > most or not known.issuperset(kwargs):
            _refuse(name, by_position, list(parameters), args[own:], kwargs)
        if len(args) - own < len(needed) and any(key not in kwargs for key in needed[len(args) - own :]):
            missing = [key for key in needed[len(args) - own :] if key not in kwargs]
            raise UnknownOption(f"{name}() needs {' and '.join(missing)}. {_described(method, missing[0])}.")
        if takes_engine and not hasattr(given := args[own] if len(args) > own else kwargs["engine"], "tokens_of"):
            raise BadRequest(f"Invalid engine={short_repr(given)} in {name}(). Give an Engine, as Engine.load returns it.")
        return method(*args, **kwargs)

    setattr(call, "__signature__", signature)  # noqa: B010, a type checker refuses the assignment
    return call


def _described(method: Callable[..., Any], option: str) -> str:
    """What to give for an option: the first sentence that the docstring has on it, if there is one."""
    found = re.search(rf"^(?:\w+, )*{option}(?:, \w+)*  +((?:.+\n)+)", f"{inspect.getdoc(method)}\n", re.MULTILINE)
    if not found:
        return "Give a value"
    first, *lines = found[1].splitlines()
    more = takewhile(lambda line: line.startswith("  "), lines)
    return f"{option}: {re.split(r'[.;](?: |$)', ' '.join([first, *map(str.strip, more)]))[0]}"


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


# ---- kinds ------------------------------------------------------------------------------------------------------------
# The kinds of a call's arguments, looked at once the call has failed: is one of them not what the signature says?
#
# A call that works pays nothing, and whatever behaves like what is wanted is taken. One that ends in an error of Python, NumPy
# or torch, deep in the code, ends in a BadRequest that names the argument, what was given and what to give.

_PROTOCOL = ("__getitem__", "__contains__", "__iter__", "__next__", "__eq__", "__len__", "__enter__", "__exit__")
"""methods whose errors Python itself reads, such as the KeyError of a mapping"""
_LOOKED_AT = 100
"""elements of a list whose kind is looked at"""


def explained(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> EngineError | None:
    """The error to raise in the place of Python's own; None: the arguments are what the signature says."""
    if isinstance(error, EngineError | TaskError | StopIteration) or function.__name__ in _PROTOCOL:
        return None
    name = function.__qualname__.removesuffix(".__init__")
    try:
        signature = inspect.signature(function)
        given = signature.bind(*args, **kwargs).arguments
    except ValueError:  # of C code
        return None
    except TypeError as problem:
        return UnknownOption(f"{name}(): {problem}. It has {', '.join(signature.parameters)}.")
    for key, value in given.items():
        parameter = signature.parameters[key]
        hint = _resolved(parameter.annotation, function)
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for each in value if parameter.kind is parameter.VAR_POSITIONAL else (value,):
            if each is not parameter.default and not fits(each, hint):
                return BadRequest(f"Invalid {key}={short_repr(each)} in {name}(). Give {' or '.join(in_words(hint))}.")
    return None


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the kind that an annotation names. What cannot be told fits."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, str | int | type(None)) and value in inner
    if origin in (Annotated, Unpack):
        return fits(value, inner[0])
    if (kind := _SIMPLE.get(origin or hint)) is not None:
        return kind(value) and (origin is None or _elements_fit(value, inner))
    known = origin or hint
    try:
        return not isinstance(known, type) or isinstance(value, known)
    except TypeError:  # a protocol, whose methods nobody lists
        return True


def _elements_fit(value: Any, inner: tuple[Any, ...]) -> bool:
    """Whether the first elements are of the kind that a list's annotation names; other containers are not looked into."""
    if not isinstance(value, list | tuple | range | np.ndarray) or len(inner) != 1 or isinstance(inner[0], TypeVar):
        return True
    return all(fits(each, inner[0]) for each in islice(value, _LOOKED_AT))


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and getattr(value, "ndim", 1) > 0


def _holds_numbers(value: Any) -> bool:
    """An array, or nested lists of numbers."""
    if _is_array(value):
        return True
    try:
        return _is_list(value) and np.asarray(value).dtype.kind in "biuf"
    except (TypeError, ValueError):
        return False


_SIMPLE: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: integer(value) is not None,
    float: lambda value: real(value) is not None,
    bool: lambda value: isinstance(value, bool | np.bool_),
    str: lambda value: isinstance(value, str),
    Path: lambda value: isinstance(value, str | os.PathLike),
    os.PathLike: lambda value: isinstance(value, str | os.PathLike),
    np.ndarray: _holds_numbers,
    **dict.fromkeys((list, tuple, set, frozenset, Sequence, Iterable, Set), _is_list),
    **dict.fromkeys((dict, Mapping), lambda value: isinstance(value, Mapping)),
    Callable: callable,
    type: lambda value: isinstance(value, type),
}
"""annotation -> whether a value is taken for it"""

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    Path: "a path",
    os.PathLike: "a path",
    np.ndarray: "an array of numbers",
    **dict.fromkeys((list, tuple, set, frozenset, Sequence, Iterable, Set), "a list"),
    **dict.fromkeys((dict, Mapping), "a dict"),
    Callable: "a function",
    type: "a class",
    type(None): "None",
}


def in_words(hint: Any) -> list[str]:
    """What an annotation takes, in words, without doubles."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return list(dict.fromkeys(word for each in inner for word in in_words(each)))
    if origin is Literal:
        return [repr(each) for each in inner]
    if origin in (Annotated, Unpack):
        return in_words(inner[0])
    word = _WORDS.get(origin or hint)
    if word == "a list" and len(inner) == 1 and (of := getattr(get_origin(inner[0]) or inner[0], "__name__", "")):
        return [f"a list of {of}"]
    name = getattr(origin or hint, "__name__", str(hint))
    return [word or f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"]


def _resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    """An annotation as a type; Any if it names what only type checkers load."""
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        while isinstance(function, partial) or hasattr(function, "__wrapped__"):
            function = function.func if isinstance(function, partial) else function.__wrapped__
        return eval(annotation, getattr(function, "__globals__", {}))  # noqa: S307 (the package's own source)
    except Exception:
        return Any
