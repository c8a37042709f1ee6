"""The `replaylens` command: finds each command where it lives, and only then loads what it needs.

Exit codes, the same for every command:

  0    done, and the answer is yes: verified, certified, the same content
  1    done, and the answer is no: a mismatch, not certified, other content; or a download failed
  2    not done: bad input, or a failure that the one line on stderr explains
  130  interrupted; where it can be resumed, the line says how
"""

import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from typer.core import TyperGroup

import replaylens

COMMANDS = {
    "demo": "demo",
    "doctor": "doctor",
    "replay": "dump",
    "dump": "dump",
    "inspect": "dump",
    "verify": "dump",
    "diff": "dump",
    "report": "report",
    "probe": "probe",
    "steer": "probe",
    "train": "train",
    "fetch": "fetch",
    "tasks": "tasks",
}
"""every command, and the module of `replaylens.commands` that holds it; in the order in which help lists them"""


class LazyGroup(TyperGroup):
    """Loads a command's module when the command is asked for: torch takes seconds, `--version` and completion do not."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)  # None: not loaded yet

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands.get(cmd_name)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        options = super(TyperGroup, self).shell_complete(ctx, incomplete)  # the group's own would load every command
        return [Completion(name) for name in COMMANDS if name.startswith(incomplete)] + options


class Completion(NamedTuple):
    """What a shell is offered; it asks for these three."""

    value: str
    type: str = "plain"
    help: str | None = None


def _load(name: str) -> Any:
    """The command, or group of commands, of this name."""
    module = import_module(f"replaylens.commands.{COMMANDS[name]}")
    if hasattr(module, "app"):
        group = typer.main.get_command(module.app)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name)(getattr(module, name))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="replaylens",
    cls=LazyGroup,
    help="Replay reasoning tasks on a deterministic, branching engine; capture, dump and probe what the model thinks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(replaylens.__version__)
        raise typer.Exit


@app.callback(epilog="Exit codes: 0 yes, 1 no (a mismatch, not certified), 2 bad input, 130 interrupted.")
def top(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Replay reasoning tasks on a deterministic, branching engine; capture, dump and probe what the model thinks."""


def main() -> None:
    """Entry point of the `replaylens` script. An error that we raise on purpose is one line and exit code 2."""
    from replaylens.engine.errors import EngineError
    from replaylens.tasks.errors import TaskError

    try:
        app(prog_name="replaylens")
    except (EngineError, TaskError) as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
