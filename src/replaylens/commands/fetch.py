"""`replaylens fetch`: downloads real models for tests and notebooks into a cache folder."""

from typing import Annotated

import typer

from replaylens.commands.reporting import reporting, say_error
from replaylens.engine.errors import BadRequest, EngineError, no_such
from replaylens.engine.model import smollm2

MODELS = {"smollm2": smollm2.fetch}


def fetch(
    name: Annotated[str, typer.Argument(help=f"The model: {' or '.join(MODELS)}.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the folder.")] = False,
) -> None:
    """Download a model to the cache folder and print its path. Does nothing if it is already there."""
    with reporting():
        if name not in MODELS:
            raise BadRequest(no_such("model to fetch", name, MODELS))
    try:
        folder = MODELS[name]((lambda line: None) if quiet else typer.echo)
    except EngineError as error:
        say_error(error)
        raise typer.Exit(1) from error
    if quiet:
        typer.echo(folder)
