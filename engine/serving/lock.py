"""`EngineLock`: many threads, one engine. One thread at a time changes its state; one of the waiting threads drives the loop.

| who                                | what it does                                                                        |
|------------------------------------|-------------------------------------------------------------------------------------|
| a call that reads or changes state | waits for the current step, then runs before the next one                           |
| the first thread with work         | drives: it steps the loop for the work of all threads until its own is done         |
| other threads with work            | wait until theirs is done, or no thread drives: then one of them does               |

So requests of several threads share passes, and another thread takes over from a driver that fails or is interrupted.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from replaylens.engine.errors import BadRequest
from replaylens.engine.terminal import defer_interrupt, pause_collector

P = ParamSpec("P")
R = TypeVar("R")


class EngineLock:
    """Re-entrant and fair. Built on `with` and the interpreter's own locks, which a signal cannot leave half acquired."""

    def __init__(self) -> None:
        self._held = threading.RLock()
        """its holder may touch the engine's state"""
        self._next = threading.RLock()
        """held while waiting for `_held`; the driver acquires it between steps, so that no thread waits for two of them"""
        self._wheel = threading.Lock()
        """held by the driving thread"""
        self._waiting: deque[tuple[Callable[[], bool], threading.Lock]] = deque()
        """what each waiting thread waits for, and an acquired lock; releasing it wakes the thread"""
        self._stepping: int | None = None
        """the id of the thread that is within a step"""
        self._depth = 0
        """how many calls and steps of the holder are within each other"""
        self._left_over: deque[Callable[[], object]] = deque()

    def alone(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `work` while no other thread is in the engine. May be nested, even within a step: a hook may read tokens."""
        first = self._held if self._stepping == threading.get_ident() else self._next
        with first, self._held:
            depth = self._depth
            if not depth:
                self.tidy()
            try:
                self._depth = depth + 1
                return work(*args, **kwargs)
            finally:
                self._depth = depth

    def drive(self, step: Callable[[], object], until: Callable[[], bool], watch: Callable[[], object] | None = None) -> None:
        """Return once `until()` is true. This thread, or another waiting one, calls `step` as often as it takes.

        until  fast, and stays true once it is: the driving thread calls it after each step, without the lock
        watch  called in this thread after steps, whichever thread makes them

        Precondition: this thread is not within `alone`. An error in `step` is raised in the thread that called it.
        """
        self.refuse_within_step()
        while not until():
            wake = threading.Lock()
            wake.acquire()
            # before trying the wheel: if another thread holds it, it wakes this one when its work is done, or when it leaves
            self._waiting.append((until if watch is None else _always, wake))
            with defer_interrupt() as interrupted:  # at most one step long
                if self._wheel.acquire(blocking=False):
                    try:
                        while not until() and not interrupted():
                            self._step(step)
                            self._wake(lambda ready: ready())
                            if watch is not None:
                                watch()
                    finally:
                        self._wheel.release()
                        self._wake(lambda ready: True)
            wake.acquire()  # returns at once if this thread drove
            if watch is not None:
                watch()

    def refuse_within_step(self) -> None:
        """BadRequest for a call from within a step. Only a hook function or a listener can make one."""
        if self._stepping == threading.get_ident():
            raise BadRequest("A hook function called its own engine to compute during a pass. Hook functions may only read.")

    def _step(self, step: Callable[[], object]) -> None:
        with self._next, self._held:  # waiting threads come first; what finalizers left takes both locks, in this order
            self.tidy()
        with self._held:
            depth = self._depth
            try:
                self._stepping, self._depth = threading.get_ident(), depth + 1
                # a step makes many objects, and looking through all of them finds no cycles
                with pause_collector():
                    step()
            finally:
                self._stepping, self._depth = None, depth

    def _wake(self, whom: Callable[[Callable[[], bool]], bool]) -> None:
        """Wake the waiting threads whose condition `whom` accepts."""
        for _ in range(len(self._waiting)):
            try:
                ready, wake = self._waiting.popleft()
            except IndexError:  # empty; a thread that waits from now on is woken by the next driver
                return
            if whom(ready):
                wake.release()
            else:
                self._waiting.append((ready, wake))

    def soon(self, work: Callable[[], object]) -> None:
        """Do `work` now if the engine is free, else before the next call. For finalizers, which run anywhere, also within a
        call of their own thread, and must not block."""
        self._left_over.append(work)
        if self._stepping != threading.get_ident() and self._next.acquire(blocking=False):
            try:
                if self._held.acquire(blocking=False):
                    try:
                        if not self._depth:
                            self.tidy()
                    finally:
                        self._held.release()
            finally:
                self._next.release()

    def later(self, work: Callable[[], object]) -> None:
        """Do `work` before the next call or step. For finalizers of handles: takes no lock and runs nothing."""
        self._left_over.append(work)

    def tidy(self) -> None:
        """Do the work that finalizers left. Precondition: within `alone`, not within a step."""
        depth = self._depth
        try:
            self._depth = depth + 1  # their work calls `alone`, which must not begin the next piece within this one
            while self._left_over:
                self._left_over.popleft()()
        finally:
            self._depth = depth


def _always() -> bool:
    return True


class Locked(Protocol):
    """An object with its engine's lock."""

    @property
    def lock(self) -> EngineLock: ...


L = TypeVar("L", bound=Locked)


def reading(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """Decorate a method that reads the engine's state: it runs between two steps of other threads, never within one."""

    @wraps(method)
    def read(self: L, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.lock.alone(method, self, *args, **kwargs)

    return read


def changing(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """Decorate a method that changes the engine's state: it runs between two steps, and Ctrl-C waits until it is done."""

    @wraps(method)
    def change(self: L, *args: P.args, **kwargs: P.kwargs) -> R:
        self.lock.refuse_within_step()
        with defer_interrupt():
            return self.lock.alone(method, self, *args, **kwargs)

    return change
