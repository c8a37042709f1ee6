"""The modes that a library's arithmetic depends on, held while canonical bits are computed.

| mode | belongs to | canonical |
|---|---|---|
| number of threads | the calling thread | one, or a count certified as equal |
| flushing of denormal numbers to zero | the calling thread, and every worker it started | off |
| autocast | the calling thread | off |
| oneDNN | the process | on |
| precision of oneDNN's float32 products | the process | IEEE |

A user or a library may set any of them at any time. `canonical` sets them for as long as a pass runs and gives the user's
settings back. Nobody else can change what belongs to a thread; what belongs to the process is checked when the pass ends.
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
"""variables by which libraries choose other kernels when a process starts: part of the fingerprint where they are set"""
_MAX_THREADS = 64
_GRAIN = 32768
"""elements that torch gives to a thread at least"""
_PROCESS_MODES = (True, "ieee")


@contextmanager
def canonical(count: int = 1) -> Iterator[None]:
    """Hold the canonical modes, on `count` threads or fewer. ModesChanged where somebody changed them meanwhile."""
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
                "a hook function changed the number of threads, the flushing of denormal numbers or autocast, and left it "
                "changed; nothing of this pass was committed. Undo it in the function."
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
    """Another number of threads for a while, within `canonical`."""
    before = torch.get_num_threads()
    _set_threads(count)
    try:
        yield
    finally:
        _set_threads(before)


def thread_counts() -> tuple[int, ...]:
    """The numbers of threads worth examining on this machine: 1, 2, 4, ... up to its cores, and half of them."""
    cores = min(available_cores(), _MAX_THREADS)
    doubled = [1 << i for i in range(cores.bit_length()) if 1 << i <= cores]
    return tuple(sorted({*doubled, max(1, cores // 2), cores}))


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> str:
    """The variables of `ENVIRONMENT` that are set, as `NAME=value`; empty: none."""
    return " ".join(f"{name}={os.environ[name]}" for name in ENVIRONMENT if os.environ.get(name))


def _set_threads(count: int) -> None:
    """Set the number of threads where it is another one: to set it makes oneDNN forget its compiled products."""
    # Once per Python thread it is always set: MKL has a number of its own, which cannot be asked for and may be another.
    if torch.get_num_threads() != count or not getattr(_HAS_SET, "threads", False):
        torch.set_num_threads(count)
        _HAS_SET.threads = True


_HAS_SET = threading.local()


def _flushes() -> bool:
    """Whether the calling thread flushes denormal numbers to zero, as results or as operands."""
    return sys.float_info.min * 0.5 * 2.0 == 0.0


def _workers_flush(count: int) -> bool:
    """Whether a worker of this thread does: those started while the flag was set keep it for ever."""
    tiny = torch.full((count * _GRAIN,), 1e-40, dtype=torch.float32, device="cpu")
    if bool((tiny * 0.5)[::_GRAIN].all()):  # an element of every worker's share
        return False
    warnings.warn(
        "worker threads of this process flush denormal numbers to zero (torch.set_flush_denormal was on when they started): "
        "canonical passes run on one thread. Set it later, or not at all, to use more.",
        RuntimeWarning,
        stacklevel=4,
    )
    return True


class _Process:
    """The modes of the process. Several threads may hold them: the first one sets them, the last one gives them back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders, self.disturbed, self.before = 0, 0, _PROCESS_MODES

    def enter(self) -> int:
        """Mutates the modes. Returns what `check` wants."""
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
        """ModesChanged, where somebody changed the modes since `enter`."""
        with self.lock:
            if self.disturbed != entered or _read() != _PROCESS_MODES:
                raise ModesChanged(
                    "another thread changed torch.backends.mkldnn or the precision of float32 products in the middle of a "
                    "pass; nothing of it was committed. Set them before the engine works, and call it again."
                )

    def leave(self) -> None:
        """Mutates the modes; what somebody else has set meanwhile stays."""
        with self.lock:
            self.holders -= 1
            if self.holders == 0 and self.before != _PROCESS_MODES and _read() == _PROCESS_MODES:
                _write(*self.before)


_PROCESS = _Process()


def _read() -> tuple[bool, str]:
    """(oneDNN is on, its precision of float32 products, where nothing was said the default)"""
    # torch.backends reads the same two, five times as slowly: several times per pass
    precision: str = torch._C._get_fp32_precision_getter("mkldnn", "matmul")
    return torch._C._get_mkldnn_enabled(), "ieee" if precision == "none" else precision


def _write(enabled: bool, precision: str) -> None:
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]
    inherited = precision == torch.backends.mkldnn.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "none" if inherited else precision  # type: ignore[attr-defined]
