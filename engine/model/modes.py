"""The modes of torch and its libraries that change bits, fixed while canonical bits are computed.

| mode | belongs to | canonical |
|---|---|---|
| number of threads | the calling thread | one for torch; that of kernels moves no bit |
| flushing of denormal numbers to zero | the calling thread | off |
| direction of rounding (`fesetround`) | the calling thread | to nearest, ties to even |
| autocast | the calling thread | off |
| oneDNN | the process | on |
| precision of oneDNN's float32 products | the process | IEEE |
| inference mode, default device, modes that intercept ops (FakeTensorMode) | the calling thread | none |

A user or a library may set any of them at any time. `canonical` sets them while a pass runs and then restores the user's
settings; `plain` does so for the last row of the table, around every call of an engine. Other threads cannot change a thread's
modes; the modes of the process are checked when the pass ends.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from replaylens.engine.errors import ModesChanged
from replaylens.kernels import threads as kernel_threads

P = ParamSpec("P")
R = TypeVar("R")

_PROCESS_MODES = (True, "ieee")


@contextmanager
def canonical() -> Iterator[None]:
    """Hold the canonical modes. ModesChanged if they changed meanwhile.

    torch computes on one thread within; kernels use as many as torch had, or had outside of an enclosing block.
    """
    before, autocast = torch.get_num_threads(), torch.is_autocast_enabled("cpu")
    with arithmetic(), kernel_threads.within(before):
        if autocast:
            torch.set_autocast_enabled("cpu", False)
        _set_threads(1)
        entered = _PROCESS.enter()
        try:
            yield
            if torch.get_num_threads() != 1 or _flushes() or _rounds_away() or torch.is_autocast_enabled("cpu"):
                raise ModesChanged(
                    "A hook function changed the number of threads, the flushing of denormal numbers, the direction of "
                    "rounding or autocast, and did not restore it. Nothing of this pass was committed. Restore it in the "
                    "function."
                )
            _PROCESS.check(entered)
        finally:
            _PROCESS.leave()
            _set_threads(before)
            if autocast:
                torch.set_autocast_enabled("cpu", True)


def plain() -> AbstractContextManager[object]:
    """Leave the caller's inference mode, default device, autocast, direction of rounding, flushing, and modes and transforms
    (vmap) that intercept ops.

    Tensors that are made within are ordinary ones: they can be changed later, and autograd can save them.
    """
    c = torch._C
    intercepted = c._len_torch_function_stack() or c._len_torch_dispatch_stack() or c._functorch.maybe_current_level()
    entered = torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _AUTOCAST))
    if not (intercepted or entered or _flushes() or _rounds_away()):
        return _NOTHING
    return _left()


_NOTHING = nullcontext()
_AUTOCAST = ("cpu", "cuda")


@contextmanager
def _left() -> Iterator[None]:
    with (
        arithmetic(),
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
    ):
        autocast = [device for device in _AUTOCAST if torch.is_autocast_enabled(device)]
        for device in autocast:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device in autocast:
                torch.set_autocast_enabled(device, True)


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that runs within `plain`."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with plain():
            return function(*args, **kwargs)

    return called


@contextmanager
def arithmetic() -> Iterator[None]:
    """Hold the processor's own modes in the calling thread: round to nearest, flush nothing. The user's are restored.

    Raises ModesChanged if the processor rounds in another direction and the system has no `fesetround`.
    """
    if not (_flushes() or _rounds_away()):
        try:
            yield
        finally:
            if _flushes() or _rounds_away():  # a function within has changed them
                _set_usual()
        return
    before = ctypes.create_string_buffer(_FENV_BYTES)
    library, flush = _c_library(), _flushes()
    if library is not None:
        library.fegetenv(before)
    _set_usual()
    try:
        yield
    finally:
        if library is not None:
            library.fesetenv(before)
        torch.set_flush_denormal(flush)


def rounds_to_nearest() -> bool:
    """Whether float32 is rounded to nearest even and keeps denormal numbers."""
    # Half of 3 and of 5 times the smallest number: 2 and 2 to nearest even, 2 and 3 up, 1 and 2 down, 0 and 0 flushed.
    halves = torch.tensor([3, 5], dtype=torch.int32, device="cpu").view(torch.float32) * 0.5
    return halves.view(torch.int32).tolist() == [2, 2]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use another number of threads within the block. Precondition: within `canonical`."""
    before = torch.get_num_threads()
    _set_threads(count)
    try:
        yield
    finally:
        _set_threads(before)


def _set_threads(count: int) -> None:
    """Set the number of threads if it differs: setting it clears oneDNN's cache of compiled products."""
    # The first call in each Python thread always sets it: MKL has a number of its own, which cannot be read.
    if torch.get_num_threads() != count or not getattr(_HAS_SET, "threads", False):
        torch.set_num_threads(count)
        _HAS_SET.threads = True


_HAS_SET = threading.local()


def _flushes() -> bool:
    """Whether the calling thread flushes denormal numbers to zero, as results or as operands."""
    return sys.float_info.min * 0.5 * 2.0 == 0.0


def _rounds_away() -> bool:
    """Whether the calling thread rounds in another direction than to nearest: up, or down and to zero."""
    return 1.0 + _ULP * 0.25 != 1.0 or 1.0 + _ULP * 0.75 == 1.0


_ULP = sys.float_info.epsilon


def _set_usual() -> None:
    """Mutates the modes of the calling thread. ModesChanged if it cannot."""
    torch.set_flush_denormal(False)
    if _rounds_away() and (library := _c_library()) is not None:
        library.fesetround(0)  # FE_TONEAREST is 0 on every processor
    if _rounds_away():
        raise ModesChanged(
            "The processor rounds in another direction than to nearest (fesetround was called in this thread), and the C "
            "library of this system cannot change it. Nothing was computed. Call fesetround(FE_TONEAREST) before the engine."
        )


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


class _Process:
    """The modes of the process. Several threads may hold them: the first one sets them, the last one restores them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders, self.disturbed, self.before = 0, 0, _PROCESS_MODES

    def enter(self) -> int:
        """Mutates the modes. Returns the argument of `check`."""
        with self.lock:
            now = _read()
            if self.holders == 0:
                self.before = now
            if now != _PROCESS_MODES:
                self.disturbed += self.holders > 0
                _write(*_PROCESS_MODES)
            self.holders += 1
            return self.disturbed

    def check(self, entered: int) -> None:
        """ModesChanged if the modes changed since `enter`."""
        with self.lock:
            if self.disturbed != entered or _read() != _PROCESS_MODES:
                raise ModesChanged(
                    "Another thread changed torch.backends.mkldnn or the precision of float32 products during a pass. Nothing "
                    "of it was committed. Set them before calling the engine, and call it again."
                )

    def leave(self) -> None:
        """Mutates the modes. Settings that others made meanwhile are kept."""
        with self.lock:
            self.holders -= 1
            if self.holders == 0 and self.before != _PROCESS_MODES and _read() == _PROCESS_MODES:
                _write(*self.before)


_PROCESS = _Process()


def _read() -> tuple[bool, str]:
    """(whether oneDNN is on, its precision of float32 products, by default IEEE)"""
    # torch.backends reads the same two values, but is five times slower, and this runs several times per pass
    precision: str = torch._C._get_fp32_precision_getter("mkldnn", "matmul")
    return torch._C._get_mkldnn_enabled(), "ieee" if precision == "none" else precision


def _write(enabled: bool, precision: str) -> None:
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]
    inherited = precision == torch.backends.mkldnn.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "none" if inherited else precision  # type: ignore[attr-defined]
