"""The `replaylens` command. It imports the module of a subcommand only when the subcommand runs.

Exit codes of every command:

  0    done, and the answer is yes: verified, certified, the same content
  1    done, and the answer is no: a mismatch, not certified, other content; or a download failed
  2    not done: bad input, such as an unknown option or a dump that is none, explained by one line on stderr
  3    not done: the dump's store or the cluster cannot be reached, refuses, or lacks a package, or another process writes the
       dump; one line on stderr. Says nothing about the dump; the same command may succeed later
  70   not done: an error that replaylens does not expect, with its traceback; please report it
  130  interrupted by Ctrl-C; if it can be resumed, the line says how
  143  terminated by SIGTERM; as 130
"""

import sys
import traceback
import warnings
from importlib import import_module
from typing import Annotated, Any, NamedTuple, TextIO

import typer
from rich.console import Console
from typer.core import TyperGroup

import replaylens

COMMANDS = {
    "demo": "demo",
    "doctor": "doctor",
    "warm": "doctor",
    "replay": "replay",
    "explore": "explore",
    "dump": "dump",
    "inspect": "inspect",
    "verify": "dump",
    "diff": "dump",
    "resample": "resample",
    "report": "report",
    "probe": "probe",
    "steer": "probe",
    "train": "train",
    "reproduce": "reproduce",
    "fetch": "demo",
    "tasks": "tasks",
    "extend": "extend",
}
"""command -> its module in `replaylens.commands`, in the order of --help"""


class LazyGroup(TyperGroup):
    """Imports a command's module on first use, so that `--version` and completion do not wait for torch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)  # None: not loaded yet

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands.get(cmd_name)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        options = super(TyperGroup, self).shell_complete(ctx, incomplete)  # the group's own method would load every command
        return [Suggestion(name) for name in COMMANDS if name.startswith(incomplete)] + options


class Suggestion(NamedTuple):
    """One suggestion; the shell reads these three fields."""

    value: str
    type: str = "plain"
    help: str | None = None


def _load(name: str) -> Any:
    """The command, or group of commands, with this name."""
    from replaylens.commands.reporting import Command

    module = import_module(f"replaylens.commands.{COMMANDS[name]}")
    if hasattr(module, "app"):
        group = typer.main.get_command(module.app)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=Command)(getattr(module, name))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="replaylens",
    cls=LazyGroup,
    help="Replay, fork, dump and probe language models on a deterministic engine. Lens, patching, steering: in Python.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(replaylens.__version__)
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 yes, 1 no (a mismatch, not certified), 2 bad input, 3 store or cluster unreachable, 130 interrupted."
)
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Replay, fork, dump and probe language models on a deterministic engine. Lens, patching, steering: in Python."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings of our own as one line, like errors: the line of code that they come from says nothing to a user."""
    ours = category.__module__.startswith("replaylens.")
    text = f"{category.__name__}: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)


def main() -> None:
    """Entry point of the `replaylens` script. Every error ends with an exit code of the list above, never with 1."""
    from replaylens.commands.reporting import exit_code
    from replaylens.engine.errors import EngineError
    from replaylens.tasks.errors import TaskError

    warnings.showwarning = _show_warning
    try:
        app(prog_name="replaylens")
    except (EngineError, TaskError) as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False, soft_wrap=True)
        sys.exit(exit_code(error))
    except Exception:  # Python's own code for it is 1, which says "no"
        traceback.print_exc()
        sys.exit(70)
