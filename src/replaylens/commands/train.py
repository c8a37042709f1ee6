"""`replaylens train`: make one of the embedded models anew."""

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


def changed(recipe: Recipe, steps: int | None, seed: int | None) -> Recipe:
    """The recipe with another number of steps or another seed. A short run warms up for a tenth of it at most."""
    steps = recipe.steps if steps is None else steps
    return replace(recipe, steps=steps, warmup=min(recipe.warmup, steps // 10), seed=recipe.seed if seed is None else seed)


def check_device(device: str) -> None:
    """Refuse a device that is not here, before any work is done."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"no device {device!r}; choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch sees no CUDA device here; use --device cpu")


def check_folder(folder: Path, resume: bool) -> None:
    """Neither start over a run that could go on, nor claim to go on where there is none."""
    there = (folder / STATE_FILE).exists()
    if there and not resume:
        raise typer.BadParameter(f"{folder} holds an unfinished run; add --resume, or give another --out")
    if resume and not there:
        raise typer.BadParameter(f"{folder} holds no unfinished run; leave out --resume")


def run(recipe: Recipe, device: str, state: Path, name: str) -> tuple[Decoder, float]:
    """Train with a progress bar; the model, and the seconds it took in this process."""
    start = time.monotonic()
    with tqdm(total=recipe.steps, desc=name, unit="step") as bar:

        def show(done: int, loss: float) -> None:
            bar.update(done - bar.n)
            bar.set_postfix(loss=f"{loss:.4f}", longest=trainer.longest_at(recipe, done - 1), refresh=False)

        model = trainer.train(recipe, device, state, after_step=show)
    return model, time.monotonic() - start
