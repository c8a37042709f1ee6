"""Runs that stop in the middle, for tests of resuming; and a limit on the time of a block that once had no end."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Stands for a crash."""


def interrupt_at(step: int) -> Callable[[int, float], None]:
    """A callback for every step of a training run. Stops the run after `step`."""

    def after_step(done: int, loss: float) -> None:
        if done == step:
            raise Interrupted

    return after_step


class OutOfTime(BaseException):
    """The block took longer than its limit. Not an Exception, so that no handler of errors takes it for one."""


@contextmanager
def time_limit(seconds: float, processor: bool = False) -> Iterator[None]:
    """Raise OutOfTime in the main thread if the block takes longer. processor: counts only while this process works"""

    def end(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"more than {seconds} s")

    clock, sent = (signal.ITIMER_VIRTUAL, signal.SIGVTALRM) if processor else (signal.ITIMER_REAL, signal.SIGALRM)
    before = signal.signal(sent, end)
    signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        signal.setitimer(clock, 0)
        signal.signal(sent, before)
