"""Options that choose a task: by its name, or by its code."""

from typing import Annotated

import typer

from replaylens import tasks
from replaylens.commands.completion import complete_task
from replaylens.engine.dump.reader import Dump
from replaylens.engine.errors import BadDump, BadRequest

TASK_HELP = "A task's name (see `replaylens tasks list`), module:Class or file.py:Class."
TaskOption = Annotated[str, typer.Option("--task", help=TASK_HELP, autocompletion=complete_task)]
OwnTaskOption = Annotated[
    str | None, typer.Option("--task", help=f"{TASK_HELP}  [default: coin]", autocompletion=complete_task)
]
DumpTaskOption = Annotated[
    str | None,
    typer.Option("--task", help="The code of the dump's task, if it is not installed: module:Class or file.py:Class."),
]


def know_task(reference: str | None, path: str | Dump) -> None:
    """Register the task of a dump by its code, so that the dump finds it by its name. BadRequest if it is another task's."""
    if reference is None:
        return
    loaded = tasks.load(reference)
    try:
        dump = path if isinstance(path, Dump) else Dump.open(path, check_files=False)
    except BadDump:
        return  # the command itself says what is wrong with the dump
    if (used := dump.manifest.plan.task) != loaded.name:
        raise BadRequest(f"--task {reference} is the task {loaded.name!r}, but the dump is of {used!r}. Give that task's code.")
