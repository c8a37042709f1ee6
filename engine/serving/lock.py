"""`EngineLock`: many threads, one engine. One thread at a time changes its state; one of those that wait drives the loop.

| who                                | what it does                                                                        |
|------------------------------------|-------------------------------------------------------------------------------------|
| a call that reads or changes state | waits for the step under way, then comes before the next one                        |
| the first thread with work         | drives: it steps the loop, for the work of all threads, until its own is done       |
| other threads with work            | wait until theirs is done, or nobody drives: then one of them does                  |

So the requests of several threads share passes, and a driver that fails or is interrupted is followed by another one.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from replaylens.engine.errors import BadRequest
from replaylens.engine.interrupts import held_interrupt

P = ParamSpec("P")
R = TypeVar("R")


class EngineLock:
    """Re-entrant and fair. Held by `with` on locks of the interpreter's own, which no signal can leave half taken."""

    def __init__(self) -> None:
        self._held = threading.RLock()
        """whoever has it may touch the engine's state"""
        self._next = threading.RLock()
        """whoever waits for `_held` has it, and the driver asks for it between two steps: so nobody waits for two"""
        self._wheel = threading.Lock()
        """held by the thread that drives, as long as it does"""
        self._waiting: deque[tuple[Callable[[], bool], threading.Lock]] = deque()
        """what each waiting thread waits for, and a closed lock: opening it wakes the thread"""
        self._stepping: int | None = None
        """the thread within a step"""
        self._left_over: deque[Callable[[], object]] = deque()

    def alone(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `work` while no other thread is in the engine. May be nested, also within a step: a hook may read tokens."""
        first = self._held if self._stepping == threading.get_ident() else self._next
        with first, self._held:
            return work(*args, **kwargs)

    def drive(self, step: Callable[[], object], until: Callable[[], bool], watch: Callable[[], object] | None = None) -> None:
        """Return once `until()` holds; `step` is called as often as it takes, by this thread or another one that waits.

        until  quick, and true for good once it is: whoever drives asks it after each step, without the lock
        watch  is called in this thread after steps, whoever makes them
        Precondition: this thread is not within `alone`. What `step` raises is raised here, if it was this thread's step.
        """
        self.refuse_within_step()
        while not until():
            wake = threading.Lock()
            wake.acquire()
            # before the wheel is tried: who has it wakes us when our work is done, or it leaves
            self._waiting.append((until if watch is None else _always, wake))
            with held_interrupt() as interrupted:  # at most one step long
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
            wake.acquire()  # open, if we drove
            if watch is not None:
                watch()

    def refuse_within_step(self) -> None:
        """BadRequest for a call from within a step: only a hook function or a listener can make one."""
        if self._stepping == threading.get_ident():
            raise BadRequest("a hook function asked its own engine to work, within the engine's pass: it may read, no more")

    def _step(self, step: Callable[[], object]) -> None:
        with self._next:  # those who wait come first
            pass
        with self._held:
            self.tidy()
            self._stepping = threading.get_ident()
            try:
                step()
            finally:
                self._stepping = None

    def _wake(self, whom: Callable[[Callable[[], bool]], bool]) -> None:
        """Wake the waiting threads that `whom` picks, by what they wait for."""
        for _ in range(len(self._waiting)):
            try:
                ready, wake = self._waiting.popleft()
            except IndexError:  # another driver was quicker: it wakes them
                return
            if whom(ready):
                wake.release()
            else:
                self._waiting.append((ready, wake))

    def soon(self, work: Callable[[], object]) -> None:
        """Do it now if the engine is free, else leave it to `tidy`. For finalizers: those run anywhere, and must not wait."""
        self._left_over.append(work)
        if self._stepping != threading.get_ident() and self._next.acquire(blocking=False):
            try:
                if self._held.acquire(blocking=False):
                    try:
                        self.tidy()
                    finally:
                        self._held.release()
            finally:
                self._next.release()

    def tidy(self) -> None:
        """Do what finalizers left over. Precondition: within `alone`, not within a step."""
        while self._left_over:
            self._left_over.popleft()()


def _always() -> bool:
    return True


class Locked(Protocol):
    """What has the lock of its engine."""

    @property
    def lock(self) -> EngineLock: ...


L = TypeVar("L", bound=Locked)


def reading(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """A method that sees the engine between two steps, never within one of another thread."""

    @wraps(method)
    def read(self: L, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.lock.alone(method, self, *args, **kwargs)

    return read


def changing(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """A method that changes the engine between two steps, as a whole: Ctrl-C comes when it is done."""

    @wraps(method)
    def change(self: L, *args: P.args, **kwargs: P.kwargs) -> R:
        self.lock.refuse_within_step()
        with held_interrupt():
            return self.lock.alone(method, self, *args, **kwargs)

    return change
