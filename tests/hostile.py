"""Modes that a caller may have set, and a harness that has them set at every call from a test into the package.

Within `hostile`, each outermost call of a public name is made in the given modes, while the test's own code runs in the usual
ones: so any test, with its inputs and comparisons, becomes a test of the boundary (`src/replaylens/boundary.py`).
"""

import ctypes
import decimal
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from replaylens import boundary
from replaylens.kernels import threads

Mode = Callable[[], AbstractContextManager[Any]]
Held = Callable[[], AbstractContextManager[Any] | None]
AARCH64 = platform.machine() == "aarch64"
ROUNDINGS = {"up": 1, "down": 2, "to zero": 3} if AARCH64 else {"up": 2, "down": 1, "to zero": 3}
"""the processor's numbers for the directions other than to nearest, which is 0"""


def number_of(direction: str) -> int:
    return ROUNDINGS[direction] << (22 if AARCH64 else 10)


@contextmanager
def rounding(direction: str) -> Iterator[None]:
    """fesetround of the C library, which also other libraries call."""
    libm, mode = ctypes.CDLL(None), number_of(direction)
    assert libm.fesetround(mode) == 0
    try:
        yield
        assert libm.fegetround() == mode, "the user's direction is restored"
    finally:
        libm.fesetround(0)


@contextmanager
def setting(set_it: Callable[[Any], object], value: Any, get: Callable[[], Any]) -> Iterator[None]:
    """A mode of the process or thread, which must be as it was set when the block ends."""
    before = get()
    set_it(value)
    try:
        yield
        assert get() == value, "the user's setting is restored"
    finally:
        set_it(before)


def flushing() -> bool:
    return boundary.flushes()


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return setting(torch.set_default_dtype, dtype, torch.get_default_dtype)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
        assert torch.get_default_device() == torch.device("meta"), "the user's device is restored"
    finally:
        torch.set_default_device(None)


@contextmanager
def numpy_raises() -> Iterator[None]:
    """np.seterr, as programs call it once and for all."""
    with np.errstate():
        np.seterr(all="raise")
        yield
        assert {*np.geterr().values()} == {"raise"}, "the user's setting is restored"


MODES: Mapping[str, Mode] = {
    **{f"rounding {direction}": partial(rounding, direction) for direction in ROUNDINGS},
    "flushed denormals": partial(setting, torch.set_flush_denormal, True, flushing),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients on": torch.enable_grad,
    "the meta device": lambda: torch.device("meta"),
    "another default device": default_device,
    "float64 by default": partial(default_dtype, torch.float64),
    "float16 by default": partial(default_dtype, torch.float16),
    "bfloat16 by default": partial(default_dtype, torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "without oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "medium precision": partial(setting, torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision),
    "deterministic algorithms": partial(
        setting, torch.set_deterministic_debug_mode, 2, torch.get_deterministic_debug_mode
    ),  # as use_deterministic_algorithms, without loading the compiler
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "fake tensors": FakeTensorMode,
    "numpy raises": numpy_raises,
    "three decimal digits": lambda: decimal.localcontext(
        decimal.Context(prec=3, rounding=decimal.ROUND_UP, traps=[decimal.Inexact, decimal.Rounded, decimal.InvalidOperation])
    ),
    "two threads": partial(setting, torch.set_num_threads, 2, torch.get_num_threads),
}
"""every mode by itself"""
_ALWAYS = ("flushed denormals", "inference mode", "autocast", "medium precision", "deterministic algorithms", "fake tensors")
COMBINED = {
    "up": (
        "rounding up",
        "float64 by default",
        *_ALWAYS,
        "the meta device",
        "numpy raises",
        "two threads",
        "without oneDNN",
        "three decimal digits",
    ),
    "down": ("another default device", "rounding down", "float16 by default", *_ALWAYS, "numpy raises", "no gradients"),
    "to zero": ("rounding to zero", "bfloat16 by default", *_ALWAYS, "the meta device", "two threads", "anomaly detection"),
}
"""states in which a call is made in many of them at once"""


class Crossing:
    """A call from the test into the package."""

    def __init__(self, here: threading.local, modes: tuple[Mode, ...], held: Held) -> None:
        self.here, self.modes, self.held, self.stack = here, modes, held, ExitStack()

    def __enter__(self) -> None:
        self.here.within = True
        with ExitStack() as stack:
            stack.callback(setattr, self.here, "within", False)
            for mode in self.modes:
                stack.enter_context(mode())
            stack.enter_context(self.held() or nullcontext())
            self.stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)


@contextmanager
def hostile(*names: str, bounded: bool = True) -> Iterator[set[str]]:
    """Calls are made in these modes. Gives the set of functions that were called, which grows.

    bounded  False: without the boundary
    """
    here, called, held = threading.local(), set[str](), boundary._held
    here.within, modes = False, tuple(MODES[name] for name in names)

    def crossing(function: Callable[..., Any]) -> AbstractContextManager[Any] | None:
        own = held if bounded else lambda function: None
        if getattr(here, "within", True):  # threads of the package have the modes of their start
            return own(function)
        called.add(f"{function.__module__}.{function.__qualname__}".removeprefix("replaylens."))
        return Crossing(here, modes, partial(own, function))

    with patch.object(boundary, "_held", crossing):
        yield called


def divide_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on as many threads as are allowed, however small the work and the machine."""
    monkeypatch.setattr(threads, "GRAIN", 1)
    monkeypatch.setattr(threads, "processors", lambda: 16)
