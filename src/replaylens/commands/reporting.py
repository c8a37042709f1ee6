"""Error reporting of commands: one line on stderr that starts with the error's name; exit codes as in `cli`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from replaylens.engine.errors import EngineError
from replaylens.tasks.errors import TaskError


@contextmanager
def reporting(resumable: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Turn errors of replaylens into one line and exit code 2, and Ctrl-C into exit code 130.

    resumable  called after Ctrl-C; returns the command that continues the work, or None
    """
    try:
        yield
    except (EngineError, TaskError, OSError) as error:
        say_error(error)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        how = resumable()
        say(f"Interrupted. To continue, run {how}." if how else "Interrupted.")
        raise typer.Exit(130) from None


def say_error(error: Exception) -> None:
    """Print the error's name and message as one line."""
    say(f"{type(error).__name__}: {error}")


def say(line: str) -> None:
    """Print a line on stderr verbatim."""
    Console(stderr=True, highlight=False).print(Text(line), soft_wrap=True)
