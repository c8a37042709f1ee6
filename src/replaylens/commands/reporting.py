"""Error reporting of commands: one line on stderr that starts with the error's name; exit codes as in `cli`."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.text import Text

from replaylens.engine.errors import ClusterFailed, DumpLocked, EngineError, RankFailed, StoreFailed
from replaylens.tasks.errors import TaskError

NOT_DONE, OUT_OF_REACH, INTERRUPTED, TERMINATED = 2, 3, 130, 143


def exit_code(error: BaseException) -> int:
    """The exit code of an error that ends a command."""
    return OUT_OF_REACH if isinstance(error, StoreFailed | ClusterFailed | DumpLocked | RankFailed) else NOT_DONE


@contextmanager
def reporting(resumable: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Turn errors of replaylens into one line and their exit code, Ctrl-C into 130 and SIGTERM into 143.

    resumable  called after Ctrl-C or SIGTERM; returns the command that continues the work, or None
    """
    with _terminable() as terminated:
        try:
            yield
        except (EngineError, TaskError, OSError) as error:
            say_error(error)
            raise typer.Exit(exit_code(error)) from error
        except KeyboardInterrupt:
            how, what = resumable(), "Terminated" if terminated() else "Interrupted"
            say(f"{what}. To continue, run {how}." if how else f"{what}.")
            raise typer.Exit(TERMINATED if terminated() else INTERRUPTED) from None


@contextmanager
def _terminable() -> Iterator[Callable[[], bool]]:
    """Make SIGTERM end the block as Ctrl-C does, also where Ctrl-C is held back for a moment. The yielded function returns
    whether it arrived. Does nothing outside the main thread, which alone receives signals."""
    terminated = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):  # a shell's background jobs ignore Ctrl-C
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: terminated
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield lambda: terminated
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def size(count: int) -> str:
    """A number of bytes in kB, MB or GB, with at least two digits that count."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count} bytes"


def say_error(error: Exception) -> None:
    """Print the error's name and message as one line."""
    say(f"{type(error).__name__}: {error}")


def say(line: str) -> None:
    """Print a line on stderr verbatim."""
    Console(stderr=True, highlight=False).print(Text(line), soft_wrap=True)
