"""`replaylens train`: its options. What it does is in `training`, which needs torch."""

from pathlib import Path
from typing import Annotated

import typer

from replaylens.commands.options import complete_task
from replaylens.weights import zoo


def train(
    name: Annotated[
        str,
        typer.Argument(help=f"The model: {', '.join((*zoo.PLAIN, *zoo.THINKING))}; or a recipe file (.toml, .json)."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the result.  [default: trained/NAME]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps, instead of the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the recipe's.")] = None,
    device: Annotated[str, typer.Option(help="Device to train on: cpu or cuda.")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Resume the interrupted run in the folder.")] = False,
    method: Annotated[str | None, typer.Option(help="Thinking-States models: thinking, or a baseline (cot, none).")] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Thinking-States models: another task with thoughts. Recipe files: the code of a task in it that is not "
            "installed. A name, module:Class or file.py:Class.",
            autocompletion=complete_task,
        ),
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=1, help="Thinking-States models: maximum number of steps of a training text.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Thinking-States models: tokens per chunk.")] = None,
    backbone: Annotated[
        Path | None, typer.Option(help="Thinking-States models: start from smollm2, or a model folder.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide progress bars.")] = False,
) -> None:
    """Train an embedded model, or a model of your own from a recipe file. The same recipe on the same machine gives the same
    bits, also after an interruption."""
    from replaylens.commands import training

    training.train(name, out, steps, seed, device, resume, training.Changes(method, task, longest, chunk, backbone), quiet)
