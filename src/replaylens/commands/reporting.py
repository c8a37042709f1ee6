"""Error reporting of commands: one line on stderr that starts with the error's name; exit codes as in `cli`."""

import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from replaylens.engine.errors import BadRequest, ClusterFailed, DumpLocked, EngineError, RankFailed, StoreFailed
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


def say_error(error: Exception) -> None:
    """Print the error's name and message as one line, which names options as the shell does."""
    say(f"{type(error).__name__}: {in_shell_words(str(error))}")


_running: ContextVar[Any] = ContextVar("running", default=None)
"""the context of the command that runs"""


class Command(TyperCommand):
    """A command whose errors name its options."""

    def invoke(self, ctx: Any) -> Any:
        before = _running.set(ctx)
        try:
            return super().invoke(ctx)
        finally:
            _running.reset(before)


def _parameters() -> Sequence[Any]:
    """Of the command that runs."""
    context = _running.get()
    return () if context is None else context.command.params


def refuse_idle(names: Sequence[str], why: str) -> None:
    """Raise BadRequest for the first of these options that was given to the running command, where it can have no effect.

    names  of the command's parameters
    """
    for each in _parameters():
        if each.name in names and _running.get().get_parameter_source(each.name).name == "COMMANDLINE":
            raise BadRequest(f"{each.opts[0]} has no effect {why}, or leave it out.")


SHELL_NAMES = {"examples": "n", "examples_per_shard": "shard_examples"}
"""options of calls -> parameters of commands, where they differ"""


def in_shell_words(text: str) -> str:
    """The message of a call with `max_new=5` as `--max-new 5`, for options that the running command has."""
    known = {each.name: each for each in _parameters()}

    def written(found: re.Match[str]) -> str:
        option = known.get(found[1]) or known.get(SHELL_NAMES.get(found[1], ""))
        if option is None or not option.opts[0].startswith("--") or _IN_A_CALL.search(text[: found.start()]):
            return found[0]
        if found[2] in ("True", "False"):
            return option.opts[0] if found[2] == "True" else (*option.secondary_opts, f"no {option.opts[0]}")[0]
        return f"{option.opts[0]} {found[2]}"

    return _GIVEN.sub(written, text)


_GIVEN = re.compile(r"""(?<![\w.-])([a-z]\w*)=('[^']*'|"[^"]*"|[^\s'",;()]*[^\s'",;:.()])""")
"""an option of a call with its value, as errors write it"""
_IN_A_CALL = re.compile(r"\w\([^()]*$")
"""before what belongs to a call that is written out"""


def say(line: str) -> None:
    """Print a line on stderr verbatim."""
    Console(stderr=True, highlight=False).print(Text(line), soft_wrap=True)
