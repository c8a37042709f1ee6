"""How commands fail: an error on purpose is one line on stderr that starts with its name; exit codes are those of `cli`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from replaylens.engine.errors import EngineError
from replaylens.tasks.errors import TaskError


@contextmanager
def reporting(resumable: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Errors on purpose become one line and exit code 2; Ctrl-C becomes exit code 130.

    resumable  asked after a Ctrl-C: what to do to go on; None: there is nothing to go on with
    """
    try:
        yield
    except (EngineError, TaskError, OSError) as error:
        say_error(error)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        how = resumable()
        say(f"interrupted; go on with: {how}" if how else "interrupted")
        raise typer.Exit(130) from None


def say_error(error: Exception) -> None:
    """One line: the error's name and what it says."""
    say(f"{type(error).__name__}: {error}")


def say(line: str) -> None:
    """A line on stderr, as it is."""
    Console(stderr=True, highlight=False).print(Text(line), soft_wrap=True)
