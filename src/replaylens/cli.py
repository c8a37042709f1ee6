"""The `replaylens` command: assembles the groups of `replaylens.commands`."""

import typer

from replaylens.commands import tasks as tasks_commands

app = typer.Typer(
    name="replaylens",
    help="Replay reasoning tasks on a deterministic, branching engine; capture, dump and probe what the model thinks.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(tasks_commands.app, name="tasks")


def main() -> None:
    """Entry point of the `replaylens` script."""
    app()
