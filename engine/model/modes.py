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
| what numpy does about an overflow or underflow | the calling thread | warn, or nothing |

A user or a library may set any of them at any time. `plain` sets all but the number of threads around every call of the
package (`replaylens/boundary.py`), and then restores the user's settings. `canonical` does so while a pass runs, where hook
functions may have changed them. Other threads cannot change a thread's modes; the modes of the process are checked when the
pass ends. The default dtype of torch is the process's, and is left alone: what makes a tensor of floats names its dtype.
"""

import contextvars
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from replaylens.boundary import arithmetic, rounds_usually
from replaylens.engine.errors import ModesChanged
from replaylens.kernels import threads as kernel_threads

_C = torch._C
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
            if torch.get_num_threads() != 1 or not rounds_usually() or torch.is_autocast_enabled("cpu"):
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


def plain() -> AbstractContextManager[object] | None:
    """Leave the caller's modes but for the number of threads; None where there are none to leave.

    Tensors that are made within are ordinary ones: they can be changed later, and autograd can save them.
    """
    # Every call of the package takes this look, so it reads what torch keeps, and calls nothing that reads it
    if (
        _function_modes()
        or _dispatch_modes()
        or _transforms()
        or _in_inference()
        or (_autocast() and not Autocast.own.entered)
        or not rounds_usually()
        or not _one_dnn()
        or _precision("mkldnn", "matmul") not in _IEEE
        or (_ERRORS.get(None) is not _USUAL_ERRORS and _errors_are_raised())
    ):
        return _left()
    return None


_function_modes, _dispatch_modes = _C._len_torch_function_stack, _C._len_torch_dispatch_stack
_transforms, _in_inference = _C._functorch.maybe_current_level, _C.is_inference_mode_enabled
_autocast = _C._is_any_autocast_enabled
_one_dnn, _precision = _C._get_mkldnn_enabled, _C._get_fp32_precision_getter
_IEEE = ("none", "ieee")
"""by default, and by name"""
_ERRORS = np._core.umath._extobj_contextvar  # type: ignore[attr-defined]  # np.geterr takes as long as the rest of `plain`
_USUAL_ERRORS = contextvars.Context().run(_ERRORS.get, None)


class _Own(threading.local):
    entered = 0


class Autocast(torch.autocast):
    """torch's autocast, entered by the package: no mode of the caller, so that calls within stay in it. Losses of a bfloat16
    training had left it, and were float32."""

    own = _Own()

    def __enter__(self) -> Any:
        self.own.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.own.entered -= 1
        return super().__exit__(*error)


_AUTOCAST = ("cpu", "cuda")


@contextmanager
def _left() -> Iterator[None]:
    autocast = [device for device in _AUTOCAST if torch.is_autocast_enabled(device) and not Autocast.own.entered]
    with (
        arithmetic(),
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        _without_function_modes(),
        torch.inference_mode(False),
        np.errstate(**_quiet()) if _errors_are_raised() else nullcontext(),  # see `_quiet`
    ):
        for device in autocast:
            torch.set_autocast_enabled(device, False)
        _PROCESS.enter()
        try:
            yield
        finally:
            _PROCESS.leave()
            for device in autocast:
                torch.set_autocast_enabled(device, True)


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Not torch's DisableTorchFunction, which also has weights forget that they are read-only."""
    modes = [_C._pop_torch_function_stack() for _ in range(_C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _C._push_on_torch_function_stack(mode)


def _errors_are_raised() -> bool:
    """Whether numpy does more than warn of a division by zero, an overflow or an underflow."""
    return not _QUIET.issuperset(np.geterr().values())


def _quiet() -> dict[str, Any]:
    """What numpy does, without exceptions, calls and logs.

    Set only where it differs: finalizers are calls, too, and the collector may run them while a context variable is being set,
    which Python does not expect to be set again meanwhile.
    """
    return {kind: how if how in _QUIET else _BY_DEFAULT[kind] for kind, how in np.geterr().items()}


_QUIET = frozenset({"ignore", "warn"})
_BY_DEFAULT = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


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
    precision: str = _precision("mkldnn", "matmul")
    return _one_dnn(), "ieee" if precision in _IEEE else precision


def _write(enabled: bool, precision: str) -> None:
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]
    inherited = precision == torch.backends.mkldnn.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "none" if inherited else precision  # type: ignore[attr-defined]
