"""`replaylens extend`: does a part that you add keep the promises of its kind?"""

import json
from typing import Annotated

import typer

from replaylens.commands.reporting import Command, refuse_idle, reporting
from replaylens.commands.tasks import JsonOption, tell_promises
from replaylens.engine.errors import BadRequest

app = typer.Typer(help="Parts of your own: tasks, model families, estimators, sites and views.", no_args_is_help=True)


@app.callback()
def extend() -> None:
    """Parts of your own: tasks, model families, estimators, sites and views."""


@app.command(cls=Command)
def check(
    name: Annotated[
        str, typer.Argument(help="A task, family, estimator, site or view; or file.py:NAME, which runs its code.")
    ] = "",
    kind: Annotated[str | None, typer.Option(help="task, family, estimator, site or view, if several have the name.")] = None,
    model: Annotated[str | None, typer.Option(help="Of a family: the folder of a small model. Default: a random one.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the names that can be given, by kind.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Try the promises of a part: bits, gradients, contracts, and every place that must name it.

    Exit codes: 0 all kept, 1 one is broken.
    """
    with reporting():
        from replaylens.extend import check as tried
        from replaylens.extend import names

        if listed:
            refuse_idle(["name", "kind", "model"], "with --list. Leave out --list")
            found_names = names()
            lines = "\n".join(f"{kind:<10} {' '.join(each)}" for kind, each in found_names.items())
            typer.echo(json.dumps(found_names, indent=1) if as_json else lines)
            return
        if not name:
            raise BadRequest("No part given. Name one; --list says which there are.")
        found = tried(name, kind=kind, model=model)
    tell_promises(found, as_json)
