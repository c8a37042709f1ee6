"""Ctrl-C held back, so that it cannot tear apart what must happen as a whole."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is held back until the block ends, and comes then; the function says whether it was pressed.

    A second one is not held back. Outside the main thread, which alone gets signals, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before):
        yield lambda: False
        return
    pressed = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, hold)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            before(signal.SIGINT, None)  # as it would have been called: KeyboardInterrupt, unless somebody wanted otherwise
