"""Command-line options of the commands that replay examples."""

from typing import Annotated

import typer

TemperatureOption = Annotated[float, typer.Option(min=0, help="0: greedy.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the sampling; for the task's seed use --knob seed=...")]
BatchOption = Annotated[int, typer.Option(min=1, help="Examples replayed together; changes no bit.")]
MaxNewOption = Annotated[int | None, typer.Option(min=0, help="Maximum tokens per answer.  [default: by task; 0 for texts]")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Hide progress bars.")]
