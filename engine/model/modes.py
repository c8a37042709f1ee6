"""The modes of torch and its libraries that change bits, fixed while canonical bits are computed.

| mode | belongs to | canonical |
|---|---|---|
| number of threads | the calling thread | one, or a count certified as equal |
| flushing of denormal numbers to zero | the calling thread and every worker it started | off |
| autocast | the calling thread | off |
| oneDNN | the process | on |
| precision of oneDNN's float32 products | the process | IEEE |

A user or a library may set any of them at any time. `canonical` sets them while a pass runs and then restores the user's
settings. Other threads cannot change a thread's modes; the modes of the process are checked when the pass ends.
"""

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from replaylens.engine.errors import ModesChanged

ENVIRONMENT = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "GLIBC_TUNABLES",
)
"""variables that make libraries choose other kernels when a process starts; part of the fingerprint if they are set"""
_MAX_THREADS = 64
_GRAIN = 32768
"""the least number of elements that torch gives to a thread"""
_PROCESS_MODES = (True, "ieee")


@contextmanager
def canonical(count: int = 1) -> Iterator[None]:
    """Hold the canonical modes, with at most `count` threads. ModesChanged if they changed meanwhile."""
    before, autocast, flush = torch.get_num_threads(), torch.is_autocast_enabled("cpu"), _flushes()
    if autocast:
        torch.set_autocast_enabled("cpu", False)
    if flush:
        torch.set_flush_denormal(False)
    _set_threads(count)
    if count > 1 and _workers_flush(count):
        count = 1
        _set_threads(count)
    entered = _PROCESS.enter()
    try:
        yield
        if torch.get_num_threads() != count or _flushes() or torch.is_autocast_enabled("cpu"):
            raise ModesChanged(
                "A hook function changed the number of threads, the flushing of denormal numbers or autocast, and did not "
                "restore it. Nothing of this pass was committed. Restore it in the function."
            )
        _PROCESS.check(entered)
    finally:
        _PROCESS.leave()
        _set_threads(before)
        if flush:
            torch.set_flush_denormal(True)
        if autocast:
            torch.set_autocast_enabled("cpu", True)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use another number of threads within the block. Precondition: within `canonical`."""
    before = torch.get_num_threads()
    _set_threads(count)
    try:
        yield
    finally:
        _set_threads(before)


def thread_counts() -> tuple[int, ...]:
    """The numbers of threads worth testing on this machine: 1, 2, 4, ..., its number of cores, and half of that."""
    cores = min(available_cores(), _MAX_THREADS)
    doubled = [1 << i for i in range(cores.bit_length()) if 1 << i <= cores]
    return tuple(sorted({*doubled, max(1, cores // 2), cores}))


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> str:
    """The variables of `ENVIRONMENT` that are set, as `NAME=value`; empty: none."""
    return " ".join(f"{name}={os.environ[name]}" for name in ENVIRONMENT if os.environ.get(name))


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


def _workers_flush(count: int) -> bool:
    """Whether a worker of this thread does. Workers that started while the flag was set keep it."""
    tiny = torch.full((count * _GRAIN,), 1e-40, dtype=torch.float32, device="cpu")
    if bool((tiny * 0.5)[::_GRAIN].all()):  # an element of every worker's share
        return False
    warnings.warn(
        "Worker threads of this process flush denormal numbers to zero (torch.set_flush_denormal was on when they started), so "
        "canonical passes run on one thread. Set it later, or not at all, to use more.",
        RuntimeWarning,
        stacklevel=4,
    )
    return True


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
