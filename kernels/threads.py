"""The threads of a CPU's kernels, which divide outputs among them: their number moves no bit.

Threads are our own and stay within compiled code, where they wait for work without the interpreter: spinning for a fraction of
a millisecond, then asleep. Handing work to 16 of them takes a few microseconds; a queue per Python thread took 145. They set
the processor's usual modes when they start, nobody else runs anything in them, and a fork leaves them behind.
"""

import ctypes
import math
import os
import platform
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from replaylens.kernels.portable import compiled, inlined, integers

GRAIN = 1 << 15
"""multiply-adds that pay for one more thread"""
_SPINS, _YIELDS = 3000, 3000
"""how often a thread looks for work before it lets others run (20 to 150 microseconds, by the processor), and again before it
sleeps (about 2 ms). Threads that slept sooner were asleep at the next kernel of 64 rows: 0.5 s a step, where 0.05 are needed"""

# A crew is 64 words of 8 bytes, by their numbers. Those that several threads write have a cache line of their own.
_GO = 0
"""the work: 65536 times its number, plus 256 times its parts, plus how many of them have been taken"""
_ENDED = 8
"""how many parts have ended, plus 2^32 times how many of them did so without an error"""
_ASLEEP = 16
"""whether a helper sleeps that was not told of the latest work"""
_OWNED, _WORK = 24, 25
_MUTEX, _CONDITION = 32, 48
"""of the system's threads, in 128 bytes each, which is more than any system takes"""

_lock_mutex = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_unlock_mutex = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_wait_for_condition = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
_tell_all = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.intp))
_yield = types.ExternalFunction("sched_yield", types.int32())


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def _add(_context: Any, address: Any, value: Any) -> Any:
    """Adds to a word that several threads write."""
    return types.intp(types.intp, types.intp), lambda _cg, builder, _signature, given: builder.atomic_rmw(
        "add", _word(builder, given[0]), given[1], "seq_cst"
    )


@intrinsic
def _swap(_context: Any, address: Any, old: Any, new: Any) -> Any:
    """Replace a word if it is still the old one -> whether it was."""

    def codegen(_cg: Any, builder: Any, _signature: Any, given: Any) -> Any:
        found = builder.cmpxchg(_word(builder, given[0]), given[1], given[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(found, 1), ir.IntType(64))

    return types.intp(types.intp, types.intp, types.intp), codegen


@intrinsic
def _read(_context: Any, address: Any) -> Any:
    return types.intp(types.intp), lambda _cg, builder, _signature, given: builder.load_atomic(
        _word(builder, given[0]), "seq_cst", 8
    )


@intrinsic
def _write(_context: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        builder.store_atomic(given[1], _word(builder, given[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def _pause(_context: Any) -> Any:
    """Tell the processor that this thread only waits."""

    def codegen(context: Any, builder: Any, _signature: Any, _given: Any) -> Any:
        x86 = platform.machine() in ("x86_64", "AMD64")
        kind = ir.FunctionType(ir.VoidType(), [] if x86 else [ir.IntType(32)])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause" if x86 else "llvm.aarch64.hint")
        builder.call(hint, [] if x86 else [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _call(_context: Any, function: Any, given: Any, index: Any, count: Any) -> Any:
    """Call a task by its address."""

    def codegen(_cg: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 3)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.intp(types.intp, types.intp, types.intp, types.intp), codegen


@inlined
def _do(crew, number):
    """Take parts of the work with this number and do them, until none is left. Parts belong to nobody: while a busy machine
    keeps a helper waiting, the others do them. Whoever has taken none touches nothing, since the work may be over."""
    work = integers(crew + 8 * _WORK, 2)
    while True:
        go = _read(crew + 8 * _GO)
        if go >> 16 != number or go & 255 == go >> 8 & 255:
            return
        if _swap(crew + 8 * _GO, go, go + 1):
            good = _call(work[0], work[1], go & 255, go >> 8 & 255)
            _add(crew + 8 * _ENDED, 1 + (good << 32))


@inlined
def _sleep(crew, number):
    """Until there is other work than this."""
    _lock_mutex(crew + 8 * _MUTEX)
    _write(crew + 8 * _ASLEEP, 1)
    while _read(crew + 8 * _GO) >> 16 == number:
        _wait_for_condition(crew + 8 * _CONDITION, crew + 8 * _MUTEX)
    _unlock_mutex(crew + 8 * _MUTEX)


@compiled("void(intp)")
def _serve(crew):
    """A helper's life."""
    while True:
        number, spins = _read(crew + 8 * _GO) >> 16, 0
        _do(crew, number)
        while _read(crew + 8 * _GO) >> 16 == number:
            _pause()
            spins += 1
            if spins > _SPINS + _YIELDS:
                _sleep(crew, number)
            elif spins > _SPINS:
                _yield()


@inlined
def _begin(crew, count):
    """Begin a work of so many parts -> its number"""
    number = (_read(crew + 8 * _GO) >> 16) + 1
    _write(crew + 8 * _ENDED, 0)
    _write(crew + 8 * _GO, number << 16 | count << 8)
    if _read(crew + 8 * _ASLEEP):
        _lock_mutex(crew + 8 * _MUTEX)
        _write(crew + 8 * _ASLEEP, 0)  # told once, although they take a while to come
        _tell_all(crew + 8 * _CONDITION)
        _unlock_mutex(crew + 8 * _MUTEX)
    return number


@compiled("intp(intp,intp,intp,intp)")
def _run(crew, function, given, count):
    """Run a task in `count` parts, on this thread and the helpers -> how many of them failed. In one part while another
    thread's work has the crew. No interrupt comes between: nobody else writes to the task's memory when this returns."""
    if count == 1 or not _swap(crew + 8 * _OWNED, 0, 1):
        return 1 - _call(function, given, 0, 1)
    work, spins = integers(crew + 8 * _WORK, 2), 0
    work[0], work[1] = function, given
    _do(crew, _begin(crew, count))
    while _read(crew + 8 * _ENDED) & 0xFFFFFFFF < count:
        _pause()
        spins += 1
        if spins > _SPINS:
            _yield()
    failed = count - (_read(crew + 8 * _ENDED) >> 32)
    _write(crew + 8 * _OWNED, 0)
    return failed


@compiled("intp(intp,intp,intp,intp)")
def _run_list(crew, works, num, arguments):
    """Run works [num, 3] one after another: (task, where its arguments begin, parts) -> 0, or which of them failed, from 1."""
    table = integers(works, 3 * num)
    for i in range(num):
        if _run(crew, table[3 * i], arguments + 8 * table[3 * i + 1], table[3 * i + 2]):
            return i + 1
    return 0


class Crew:
    """Threads that wait for work."""

    def __init__(self) -> None:
        self._memory = np.zeros(72, np.int64)
        self.address = int(self._memory.ctypes.data + 63) // 64 * 64
        library = ctypes.CDLL(None)
        library.pthread_mutex_init(ctypes.c_void_p(self.address + 8 * _MUTEX), None)
        library.pthread_cond_init(ctypes.c_void_p(self.address + 8 * _CONDITION), None)
        self.lock, self.helpers = threading.Lock(), 0

    def run(self, function: CFunc, given: "array[int]", count: int) -> None:
        """Run a task in `count` parts. MemoryError if it has no room for what it needs."""
        if self.helpers < count - 1:
            self._start(count - 1)
        if _run(self.address, function.address, given.buffer_info()[0], count):
            raise MemoryError(f"{function.__name__} in {count} parts: there is no memory for its sums.")

    def run_list(self, works: "np.ndarray[Any, np.dtype[np.int64]]", given: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        """Run works [num, 3], whose arguments lie in `given`, in one call. See `_run_list`."""
        if self.helpers < (most := int(works[:, 2].max()) - 1):
            self._start(most)
        if failed := _run_list(self.address, works.ctypes.data, len(works), given.ctypes.data):
            raise MemoryError(f"Work {failed} of {len(works)} of a pass: there is no memory for its sums.")

    def _start(self, helpers: int) -> None:
        """Start what is missing of so many threads. There may be fewer: the others do their parts."""
        with self.lock, suppress(RuntimeError):  # no more threads, or the interpreter ends
            while self.helpers < helpers:
                name = f"replaylens-{self.helpers + 1}"
                threading.Thread(target=_help, args=(self,), name=name, daemon=True).start()
                self.helpers += 1


def _help(crew: Crew) -> None:
    """A helper holds on to the crew, whose memory it reads."""
    _set_usual_modes()
    _serve(crew.address)


def _set_usual_modes() -> None:
    """Round to nearest, keep denormal numbers: a thread begins with the modes of the one that starts it."""
    import torch

    torch.set_flush_denormal(False)
    with suppress(OSError, AttributeError, TypeError):  # a system without fesetround
        ctypes.CDLL(None).fesetround(0)


_crew = Crew()
_here = threading.local()


def _forget() -> None:
    global _crew
    _crew = Crew()


os.register_at_fork(after_in_child=_forget)  # threads do not survive a fork


@cache
def processors() -> int:
    """How many processors this process may use, by its affinity and its control group: a thread more would only wait."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        found = min(found, max(1, math.ceil(int(quota) / int(period))))
    return min(found, 255)


@contextmanager
def within(count: int) -> Iterator[None]:
    """Use at most `count` threads in calls of this thread within the block, unless an enclosing block says how many."""
    before = getattr(_here, "count", None)
    _here.count = count if before is None else before
    try:
        yield
    finally:
        _here.count = before


def run_list(works: "np.ndarray[Any, np.dtype[np.int64]]", given: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
    """See `Crew.run_list`."""
    _crew.run_list(works, given)


def allowed() -> int:
    """How many threads kernels may use."""
    return min(getattr(_here, "count", None) or _of_torch(), processors())


def threads_for(cost: float, pieces: int) -> int:
    """How many threads are allowed and pay for work of so many multiply-adds that has so many pieces at most."""
    if cost < GRAIN:
        return 1
    return max(1, min(allowed(), pieces, 1 + int(cost) // GRAIN))


@dataclass(frozen=True, eq=False)
class Work:
    """What `divided` was asked for."""

    function: CFunc
    cost: float
    pieces: int
    given: "array[int]"


def divided(function: CFunc, cost: float, pieces: int, *given: int) -> None:
    """Run a task with these arguments on as many threads as are allowed and pay. See `threads_for`."""
    arguments = array("q", given)
    _crew.run(function, arguments, threads_for(cost, pieces))
    if (written := getattr(_here, "written", None)) is not None:
        written.append(Work(function, cost, pieces, arguments))


@contextmanager
def written() -> Iterator[list[Work]]:
    """The works that this thread divides within the block."""
    _here.written = list[Work]()
    try:
        yield _here.written
    finally:
        _here.written = None


def _of_torch() -> int:
    import torch

    return torch.get_num_threads()


def bits(x: float) -> int:
    """A float32 as an argument of a task, which reads it by `as_float(np.int32(...))`."""
    return int(np.float32(x).view(np.int32))
