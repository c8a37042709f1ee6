"""What the process around an engine does: Ctrl-C and the collector held back, progress bars, modules on demand."""

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import FrameType
from typing import Any

# ---- interrupts ------------------------------------------------------------------------------------------------------

_pressed: Callable[[], bool] | None = None
"""whether Ctrl-C was pressed within the outermost block of the main thread that holds it back; None: it is in none"""


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold back Ctrl-C until the block ends. The yielded function returns whether it was pressed.

    A second Ctrl-C is not held back. Does nothing outside the main thread, which alone receives signals. Blocks within others
    cost nothing: a wave of rollouts forks and releases a thousand branches.
    """
    global _pressed
    main = threading.current_thread() is threading.main_thread()
    if main and (outer := _pressed) is not None:
        earlier = outer()
        yield lambda: outer() and not earlier
        return
    before = signal.getsignal(signal.SIGINT) if main else None
    if not callable(before):
        yield lambda: False
        return
    pressed = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, hold)
    _pressed = lambda: pressed  # noqa: E731
    try:
        yield _pressed
    finally:
        _pressed = None
        signal.signal(signal.SIGINT, before)
        if pressed:
            before(signal.SIGINT, None)  # the handler that was set before, by default KeyboardInterrupt


# ---- garbage ---------------------------------------------------------------------------------------------------------
# The collector of cycles, held back while a CUDA graph is recorded.

_lock = threading.Lock()
_holders = 0
_was_on = False


@contextmanager
def pause_collector() -> Iterator[None]:
    """No cycles are collected within, in any thread. Afterwards the collector is as it was.

    Tensors, graphs and pinned memory of an engine that is gone may wait in a cycle. The driver refuses to free them while
    this thread records, and drops the recording.
    """
    global _holders, _was_on
    with defer_interrupt():  # half of this would leave the collector off for good
        with _lock:
            if not _holders:
                _was_on = gc.isenabled()
                gc.disable()
            _holders += 1
        try:
            yield
        finally:
            with _lock:
                _holders -= 1
                if not _holders and _was_on:
                    gc.enable()


# ---- progress --------------------------------------------------------------------------------------------------------
# Whether a progress bar is shown: if it is asked for, and somebody looks at it.


def hidden(progress: bool) -> bool:
    """The `disable` of a tqdm bar. In a log file or a pipe, each of its updates would be a line of its own; a notebook has no
    terminal either, but draws the bar."""
    watched = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return not (progress and watched)


# ---- modules ---------------------------------------------------------------------------------------------------------
# Modules that load when they are first used. A dump is listed without torch, which takes longer to load than all the rest.


_load = cache(import_module)
"""asked at every call of a verb; the import itself takes microseconds, even of a module that is loaded"""


class Later:
    """Stands for a module until one of its names is asked for. Type checkers see the module itself."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(_load(self._module), name)
