"""`replaylens reproduce`: published figures, computed by one call each on small weights, with a hit or a miss.

Exit codes: 0 a hit, 1 a miss, 2 bad input or a model that is missing, 130 interrupted.
"""

import json
from typing import Annotated

import typer

from replaylens.commands.reporting import refuse_idle, reporting
from replaylens.commands.tasks import JsonOption
from replaylens.engine.errors import BadRequest
from replaylens.engine.machine import optional


def reproduce(
    name: Annotated[str, typer.Argument(help="The figure; --list shows all.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="List the figures with what was published, and where.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compute one of twelve published figures on small weights: the claim, the call, the measured number, hit or miss."""
    with reporting():
        figures = optional("replaylens.extras.reproduce", "replaylens reproduce")
    if listed:
        with reporting():
            refuse_idle(["name", "as_json"], "with --list. Leave out --list")
        for figure in figures.FIGURES.values():
            typer.echo(f"{figure.name:<16} arXiv {figure.source}  {figure.claim}")
        return
    with reporting():
        if not name:
            raise BadRequest(f"No figure given. Name one of {', '.join(figures.FIGURES)}; --list says what they are.")
        found = figures.reproduce(name)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
    else:
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in found.measured.items())
        lines = {
            "claim": f"{found.claim} (arXiv {found.source})",
            "model": found.model,
            "call": found.call,
            "criterion": found.criterion,
            "measured": numbers,
            "verdict": "hit" if found.hit else "miss",
            "digest": found.digest,
        }
        for key, value in lines.items():
            typer.echo(f"{key:<10} {value}")
    raise typer.Exit(0 if found.hit else 1)
