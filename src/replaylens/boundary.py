"""The boundary: nothing that the package computes depends on the modes of its caller.

A program may have set a direction of rounding, a default device, inference mode, fake tensors or another of the modes in
`engine/model/modes.py` when it loads or calls the package. `install` is called before the first module is loaded. From then on

| what | runs in the usual modes |
|---|---|
| a module | while it is compiled and executed: Python itself rounds the numbers of a source |
| its public functions; public methods, properties and `SPECIAL` methods of its classes | from the call to the return |
| a generator or context manager that one of them returns | at each step |

so a new module or name is within the boundary without doing anything for it. What is in `INNER` is reached through the rest,
and left alone: a call costs a microsecond. The caller's own functions (metrics, hooks, stop conditions) run in the usual
modes, too. `tests/test_boundary.py` runs each public name in hostile modes.
"""

import ctypes
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, nullcontext
from enum import Enum
from functools import _lru_cache_wrapper, cache, cached_property, wraps
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

INNER = """
boundary moved cli commands kernels engine.errors engine.terminal weights.zoo
engine.loop engine.memory engine.passes thinking.blocks thinking.graphs
engine.model.config engine.model.decoder weights.family weights.families engine.model.layers
engine.model.mixers engine.model.modes engine.model.ops engine.model.program engine.model.sites.layer_of
engine.request.placed engine.request.scores engine.request.values engine.request.edits.listed
engine.request.edits.BatchHook engine.request.edits.NamedHook
engine.request.capture.CaptureSpec engine.request.capture.Chunk engine.request.capture.LazyRows
engine.request.capture.PassTap engine.request.positions engine.request.capture.NamedRows
engine.request.capture.JoinedRows engine.request.capture.sliced_rows
engine.request.sampling.Sampling.bare engine.request.sampling.Sampling.plain_greedy
engine.request.capture.Recording.add engine.request.capture.Recording.end engine.request.capture.with_keys
tasks.boxes tasks.coin tasks.coin_resets tasks.coins tasks.counts tasks.fork tasks.hops tasks.shell tasks.texts
tasks.variables tasks.words tasks.reading.Scene tasks.task.Draws
dumps.plan.ExamplePath.offsets engine.serving.lock.EngineLock.tidy engine.serving.lock.EngineLock.alone
engine.serving.lock.EngineLock.refuse_within_step engine.serving.forest.Forest.note
engine.model.text.Text.decode engine.model.text.Text.eos_id probes.controls.Goal.outputs
gradients.derivatives gradients.backward.Backward
"""
"""what is not enclosed: what runs within passes, what computes no floats, and the command line, which has no caller"""
ENTRIES = """
engine.model.decoder.Decoder.__init__ engine.model.decoder.Decoder.initialize engine.model.program.Program.of tasks.coin.p_even
engine.passes.lens.TunedLens engine.passes.lens.next_token engine.passes.lens.read engine.passes.lens.read_ranked
engine.passes.lens.train engine.passes.lens.unembed_hash
"""
PROBABILITIES = ("next_action_chance", "outcomes")
"""what of it is, nevertheless: callers make models and lenses of their own, and these two methods of tasks divide"""
MARK = "__replaylens_enclosed__"
"""an attribute of functions that are enclosed"""
SPECIAL = frozenset(
    (
        *("__init__", "__post_init__", "__call__", "__enter__", "__exit__", "__iter__", "__next__", "__getitem__"),
        *("__contains__", "__len__", "__eq__", "__repr__", "__str__", "__array__", "__rich_console__"),
        *("_repr_html_", "_repr_svg_", "_repr_mimebundle_"),
    )
)
"""the methods with underscores that callers reach"""


def install() -> None:
    """Mutates: modules of the package that are loaded from now on are enclosed."""
    sys.meta_path.insert(0, _Finder())


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line that called the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("replaylens."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


# ---- the processor ---------------------------------------------------------------------------------------------------
# Its modes belong to the calling thread, and can be asked for and set without torch, which takes seconds to load.


@contextmanager
def arithmetic() -> Iterator[None]:
    """Hold the processor's own modes in the calling thread: round to nearest, flush nothing. The user's are restored.

    Raises ModesChanged if the processor rounds in another direction and the system has no `fesetround`.
    """
    if rounds_usually():
        try:
            yield
        finally:
            if not rounds_usually():  # a function within has changed them
                _set_usual()
        return
    before = ctypes.create_string_buffer(_FENV_BYTES)
    library, flush = _c_library(), flushes()
    if library is not None:
        library.fegetenv(before)
    _set_usual()
    try:
        yield
    finally:
        if library is not None:
            library.fesetenv(before)
        if flushes() != flush:
            _set_flushing(flush)


def flushes() -> bool:
    """Whether the calling thread flushes denormal numbers to zero, as results or as operands."""
    return _NORMAL * 0.5 * 2.0 == 0.0


def rounds_away() -> bool:
    """Whether the calling thread rounds in another direction than to nearest: up, or down and to zero."""
    return 1.0 + _QUARTER != 1.0 or 1.0 + _MOST == 1.0


def rounds_usually() -> bool:
    """Neither of both, at half of their cost: every call of the package asks."""
    return _NORMAL * 0.5 * 2.0 != 0.0 and 1.0 + _QUARTER == 1.0 and 1.0 + _MOST != 1.0


_NORMAL = sys.float_info.min
_QUARTER, _MOST = sys.float_info.epsilon * 0.25, sys.float_info.epsilon * 0.75
"""parts of a unit in the last place of 1.0"""


def _set_usual() -> None:
    """Mutates the modes of the calling thread. ModesChanged if it cannot."""
    if flushes():
        _set_flushing(False)
    if rounds_away() and (library := _c_library()) is not None:
        library.fesetround(0)  # FE_TONEAREST is 0 on every processor
    if rounds_away():
        from replaylens.engine.errors import ModesChanged

        raise ModesChanged(
            "The processor rounds in another direction than to nearest (fesetround was called in this thread), and the C "
            "library of this system cannot change it. Nothing was computed. Call fesetround(FE_TONEAREST) before the engine."
        )


def _set_flushing(flush: bool) -> None:
    import torch

    torch.set_flush_denormal(flush)


@cache
def _c_library() -> ctypes.CDLL | None:
    """The C library, with `fesetround`, `fegetenv` and `fesetenv`; None if the process has none."""
    try:
        library = ctypes.CDLL(None)
        return library if library.fesetround and library.fegetenv and library.fesetenv else None
    except (OSError, AttributeError, TypeError):
        return None


_FENV_BYTES = 256
"""larger than the `fenv_t` of any system (glibc on x86-64: 32)"""


# ---- loading ---------------------------------------------------------------------------------------------------------


class _Source(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        _execute(super().exec_module, module)


class _Compiled(importlib.machinery.SourcelessFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        _execute(super().exec_module, module)


def _execute(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute a module in the processor's usual modes, and enclose it."""
    with arithmetic():
        run(module)
        enclose(module)


class _Finder:
    """Finds the modules of the package as Python does, and has them enclosed when they are loaded."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("replaylens."):
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        for kind, own in (
            (importlib.machinery.SourceFileLoader, _Source),
            (importlib.machinery.SourcelessFileLoader, _Compiled),
        ):
            if found is not None and type(found.loader) is kind:
                found.loader = own(name, str(found.origin))
        above = name.rpartition(".")[0]  # a folder that is called otherwise now has files that are loaded already
        if found is None or getattr(sys.modules.get(above), "__name__", above) != above:
            from replaylens import moved

            return moved.found(name) or found
        return found


def _inner(*names: str) -> bool:
    name = f"{'.'.join(names)}."
    return name.startswith(_INNER) and not name.startswith(_ENTRIES) and names[-1] not in PROBABILITIES


_INNER, _ENTRIES = (tuple(f"replaylens.{name}." for name in names.split()) for names in (INNER, ENTRIES))


def enclose(module: ModuleType) -> None:
    """Mutates: the module's public functions, and the methods of its classes, run in the usual modes."""
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, type):
            _enclose_class(value)
        elif isinstance(value, FunctionType | _lru_cache_wrapper) and not (
            name.startswith("_") or _inner(module.__name__, name)
        ):
            setattr(module, name, _enclosed(value))


def _enclose_class(cls: type) -> None:
    if issubclass(cls, Enum | BaseException) or getattr(cls, "_is_protocol", False):
        return
    for name, value in list(vars(cls).items()):
        if (name.startswith("_") and name not in SPECIAL) or _inner(cls.__module__, cls.__name__, name):
            continue
        if isinstance(value, FunctionType):
            made = value.__code__.co_filename == "<string>"  # what a dataclass generates copies values
            if not made and not hasattr(value, MARK):
                setattr(cls, name, _enclosed(value))
        elif type(value) in (staticmethod, classmethod):
            setattr(cls, name, type(value)(_enclosed(value.__func__)))
        elif type(value) is property:
            read, write, delete = (part and _enclosed(part) for part in (value.fget, value.fset, value.fdel))
            setattr(cls, name, property(read, write, delete, value.__doc__))
        elif type(value) is cached_property:
            value.func = _enclosed(value.func)


# ---- calling ---------------------------------------------------------------------------------------------------------


def _enclosed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which runs in the usual modes."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if (held := _held(function)) is None:
                found = function(*args, **kwargs)
            else:
                with held:
                    found = function(*args, **kwargs)
            kind = type(found)
            if kind is GeneratorType:
                return _Steps(found, function)
            if kind is _GeneratorContextManager and type(found.gen) is GeneratorType:
                found.gen = _Steps(found.gen, function)
            return found
        except _OF_ARGUMENTS as error:
            if (instead := _explained(function, args, kwargs, error)) is None:
                raise
            raise instead from error

    setattr(call, MARK, True)
    for name in ("cache_clear", "cache_info", "cache_parameters"):  # of functools.cache, which `wraps` does not copy
        if hasattr(function, name):
            setattr(call, name, getattr(function, name))
    return call


_OF_ARGUMENTS = (TypeError, AttributeError, ValueError, LookupError, ArithmeticError, RuntimeError, AssertionError)
"""what Python, numpy and torch raise where an argument is of another kind than the signature says. Of others the argument is
not the cause: a full disk, an error of the caller's own function, an interrupt"""


def _explained(function: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> Exception | None:
    """A named error for an argument of a caller outside the package; None: the error is not of that kind."""
    if sys._getframe(2).f_globals.get("__name__", "").startswith("replaylens."):
        return None
    from replaylens.engine.request.values import explained

    return explained(function, args, kwargs, error)


class _Steps(Generator[Any, Any, Any]):
    """A generator, each step of which runs in the usual modes: between two of them the caller's code runs."""

    def __init__(self, inner: Generator[Any, Any, Any], function: Callable[..., Any]) -> None:
        self.inner, self.function = inner, function

    def send(self, value: Any) -> Any:
        with _held(self.function) or _NOTHING:
            return self.inner.send(value)

    def throw(self, *error: Any) -> Any:
        with _held(self.function) or _NOTHING:
            return self.inner.throw(*error)

    def close(self) -> None:
        with _held(self.function) or _NOTHING:
            self.inner.close()


_NOTHING = nullcontext()


def _held(function: Callable[..., Any]) -> AbstractContextManager[object] | None:
    """A block in the usual modes, in which the function runs; None: the caller's modes are the usual ones.

    Those of torch need no look before torch is loaded.
    """
    loaded: Any = sys.modules.get("replaylens.engine.model.modes")
    if loaded is None:
        if "torch" not in sys.modules and rounds_usually():
            return None
        from replaylens.engine.model import modes as loaded
    held: AbstractContextManager[object] | None = loaded.plain()
    return held
