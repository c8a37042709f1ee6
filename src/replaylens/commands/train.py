"""`replaylens train`: make one of the embedded models anew."""

import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from tqdm import tqdm

from replaylens.engine import train as trainer
from replaylens.engine import zoo
from replaylens.engine.errors import EngineError
from replaylens.engine.model import Decoder
from replaylens.engine.train import Recipe
from replaylens.engine.weights import weights_hash

STATE_FILE = "training.safetensors"
CARD_FILE = "card.md"


def train(
    name: Annotated[str, typer.Argument(help=f"Which model: {' or '.join(zoo.names())}.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the result.  [default: trained/NAME]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, instead of the recipe's own number.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the recipe's own.")] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu or cuda.")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the interrupted run in the folder.")] = False,
) -> None:
    """Train an embedded model from scratch. Same recipe, same machine: same bits, also after an interruption."""
    folder = out or Path("trained") / name
    try:
        recipe = changed(zoo.recipe(name), steps, seed)
        check_device(device)
        check_folder(folder, resume)
        model, seconds = run(recipe, device, folder / STATE_FILE, name)
    except EngineError as error:
        raise typer.BadParameter(str(error)) from error
    zoo.save(model, recipe.tokenizer(), folder)
    (folder / CARD_FILE).write_text(card(name, recipe, model, device, seconds), encoding="utf-8")
    (folder / STATE_FILE).unlink(missing_ok=True)
    typer.echo(f"{folder}: weights {weights_hash(model)}")
