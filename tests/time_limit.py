"""A limit on the time of a block, for tests of loops that once had no end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """The block took longer than its limit. Not an Exception, so that no handler of errors takes it for one."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread if the block takes longer."""

    def end(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
