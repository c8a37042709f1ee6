"""The `replaylens` command: assembles the groups of `replaylens.commands`."""

import sys
from typing import Annotated

import typer
from rich.console import Console

import replaylens
import replaylens.commands.tasks
from replaylens.commands.demo import demo
from replaylens.commands.doctor import doctor
from replaylens.commands.dump import diff, dump, inspect, replay, verify
from replaylens.commands.fetch import fetch
from replaylens.commands.probe import probe, steer
from replaylens.commands.report import report
from replaylens.commands.train import train
from replaylens.engine.errors import EngineError
from replaylens.tasks.errors import TaskError

app = typer.Typer(
    name="replaylens",
    help="Replay reasoning tasks on a deterministic, branching engine; capture, dump and probe what the model thinks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(doctor)
for command in (replay, dump, inspect, verify, diff):
    app.command()(command)
app.command()(report)
app.command()(probe)
app.command()(steer)
app.command()(train)
app.command()(fetch)
app.add_typer(replaylens.commands.tasks.app, name="tasks")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(replaylens.__version__)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Replay reasoning tasks on a deterministic, branching engine; capture, dump and probe what the model thinks."""


def main() -> None:
    """Entry point of the `replaylens` script. An error that we raise on purpose is one line and exit code 2."""
    try:
        app()
    except (EngineError, TaskError) as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
