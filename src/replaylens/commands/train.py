"""`replaylens train`: trains an embedded model from its recipe, or a model of your own from a recipe file."""

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from torch import nn
from tqdm import tqdm

from replaylens.commands import train_recipe, train_thinking
from replaylens.commands.completion import complete_task
from replaylens.commands.reporting import reporting
from replaylens.commands.train_thinking import CARD_FILE, Changes, scoring
from replaylens.engine.errors import BadRequest, RunExists, no_such
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.weights import CONFIG_FILE, weights_hash
from replaylens.engine.progress import hidden
from replaylens.engine.request.values import output_path
from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training import trainer
from replaylens.engine.training.recipe import Recipe
from replaylens.engine.training.recipe_file import SUFFIXES, recipe_text
from replaylens.engine.training.thinking import Model, ThinkingRecipe
from replaylens.engine.zoo import coin as zoo
from replaylens.engine.zoo import thinking as thinking_zoo

STATE_FILE = "training.safetensors"
STATE_PART = f"{STATE_FILE}.part"
"""what a run leaves that is killed while it saves for the first time"""
CARD_EXAMPLES = 500
CARD_LENGTHS = range(1, 17)
R = TypeVar("R", bound=Recipe)
M = TypeVar("M", bound=nn.Module)


def train(
    name: Annotated[
        str,
        typer.Argument(help=f"The model: {', '.join((*zoo.names(), *thinking_zoo.names()))}; or a recipe file (.toml, .json)."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the result.  [default: trained/NAME]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps, instead of the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the recipe's.")] = None,
    device: Annotated[str, typer.Option(help="Device to train on: cpu or cuda.")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Resume the interrupted run in the folder.")] = False,
    method: Annotated[str | None, typer.Option(help="Models that think: thinking, or a baseline (cot, none).")] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Models that think: another task with thoughts. Recipe files: the code of a task in it that is not installed. "
            "A name, module:Class or file.py:Class.",
            autocompletion=complete_task,
        ),
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=1, help="Models that think: maximum number of steps of a training text.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Models that think: tokens per chunk.")] = None,
    backbone: Annotated[Path | None, typer.Option(help="Models that think: start from smollm2, or a model folder.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide progress bars.")] = False,
) -> None:
    """Train an embedded model, or a model of your own from a recipe file. The same recipe on the same machine gives the same
    bits, also after an interruption."""
    own = Path(name) if name.endswith(SUFFIXES) else None
    folder, changes = out or Path("trained") / (own.stem if own else name), Changes(method, task, longest, chunk, backbone)
    with reporting(lambda: "the same command with --resume" if (folder / STATE_FILE).exists() else None):
        check_name(name, changes)
        check_device(device)
        check_folder(folder, resume)
        if own is not None:
            model = _train_own(own, task, steps, seed, device, folder, quiet)
        elif name in thinking_zoo.names():
            model = _train_thinking(name, changes, steps, seed, device, folder, quiet)
        else:
            model = _train_plain(name, steps, seed, device, folder, quiet)
    typer.echo(f"{folder}: weights {weights_hash(model)}")


def _train_own(
    path: Path, task: str | None, steps: int | None, seed: int | None, device: str, folder: Path, quiet: bool
) -> Model:
    recipe = changed(train_recipe.read(path, task), steps, seed)
    given = path.name if task is None else f"{path.name} --task {task}"
    if isinstance(recipe, ThinkingRecipe):
        return _follow_thinking(path.stem, recipe, given, device, folder, quiet, own=True)
    model, made = _follow_plain(path.stem, recipe, given, device, folder, quiet)
    (folder / train_recipe.RECIPE_FILE).write_text(recipe_text(recipe), encoding="utf-8")
    _finish(folder, train_recipe.card(path.stem, recipe, model, made, CARD_EXAMPLES, progress=not quiet))
    return model


def _train_thinking(
    name: str, changes: Changes, steps: int | None, seed: int | None, device: str, folder: Path, quiet: bool
) -> Model:
    recipe = changed(train_thinking.changed(thinking_zoo.recipe(name), changes), steps, seed)
    return _follow_thinking(name, recipe, " ".join([name, *changes.given()]), device, folder, quiet, own=False)


def _train_plain(name: str, steps: int | None, seed: int | None, device: str, folder: Path, quiet: bool) -> Decoder:
    recipe = changed(zoo.recipe(name), steps, seed)
    model, made = _follow_plain(name, recipe, name, device, folder, quiet)
    _finish(folder, card(name, recipe, model, made, progress=not quiet))
    return model


def _follow_plain(name: str, recipe: Recipe, given: str, device: str, folder: Path, quiet: bool) -> tuple[Decoder, str]:
    """Train and save. Returns the model, and how it was made. `given`: the words of the command that choose the recipe."""
    state = folder / STATE_FILE
    train = partial(trainer.train, recipe, device, state)
    model, spent = run(recipe, lambda show: train(after_step=show), state, name, quiet)
    zoo.save(model, recipe.tokenizer(), folder)
    return model, _made(recipe, given, device, spent)


def _follow_thinking(name: str, recipe: ThinkingRecipe, given: str, device: str, folder: Path, quiet: bool, own: bool) -> Model:
    """Train, save and write the card; `own`: with the recipe beside it."""
    state = folder / STATE_FILE
    train = partial(thinking_train.train, recipe, device, state)
    model, spent = run(recipe, lambda show: train(after_step=show), state, f"{name} ({recipe.method})", quiet)
    train_thinking.save(model, recipe, folder)
    if own:
        (folder / train_recipe.RECIPE_FILE).write_text(recipe_text(recipe), encoding="utf-8")
    made = _made(recipe, given, device, spent)
    _finish(folder, train_thinking.card(name, recipe, model.to(device), made, CARD_EXAMPLES, progress=not quiet))
    return model


def _made(recipe: Recipe, given: str, device: str, spent: str) -> str:
    command = f"replaylens train {given} --steps {recipe.steps} --seed {recipe.seed} --device {device}"
    return f"`{command}`, {spent} on {machine(device)}"


def _finish(folder: Path, text: str) -> None:
    """Write the card, then remove the state, so that --resume works until there is a card."""
    (folder / CARD_FILE).write_text(text, encoding="utf-8")
    (folder / STATE_FILE).unlink(missing_ok=True)


def changed(recipe: R, steps: int | None, seed: int | None) -> R:
    """The recipe with another number of steps or another seed. The warmup is then at most a tenth of the steps."""
    if steps is not None:
        recipe = replace(recipe, steps=steps, warmup=min(recipe.warmup, steps // 10))
    return recipe if seed is None else replace(recipe, seed=seed)


def check_name(name: str, changes: Changes) -> None:
    """Raise for unknown models, and for options that the model does not have."""
    if name.endswith(SUFFIXES):
        if given := replace(changes, task=None).given():
            raise BadRequest(f"{', '.join(given)}: not for recipe files. Change the recipe, or give only --steps and --seed.")
        return
    if name not in (*zoo.names(), *thinking_zoo.names()):
        raise zoo.UnknownModel(no_such("embedded model", name, (*zoo.names(), *thinking_zoo.names())))
    if changes.given() and name not in thinking_zoo.names():
        thinking = ", ".join(thinking_zoo.names())
        raise BadRequest(f"{', '.join(changes.given())}: only for models that think ({thinking}). Leave it out.")


def check_device(device: str) -> None:
    """Raise BadRequest for a missing device, before any work is done."""
    if device not in ("cpu", "cuda"):
        raise BadRequest(f"Unknown device {device!r}. Use cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadRequest("No CUDA device found. Use --device cpu.")


def check_folder(folder: Path, resume: bool) -> None:
    """Raise if the run could not be written, would overwrite another or files of somebody else, or is not there to resume."""
    output_path(folder, folder=True)
    there, trained = (folder / STATE_FILE).exists(), (folder / CONFIG_FILE).exists()
    if there and not resume:
        raise RunExists(f"{folder} holds an unfinished run. Add --resume, or give another --out.")
    if trained and not there:
        raise RunExists(f"{folder} holds a trained model. Give another --out.")
    if resume and not there:
        raise BadRequest(f"{folder} holds no unfinished run. Leave out --resume.")
    foreign = sorted(file.name for file in folder.iterdir() if file.name != STATE_PART) if folder.exists() and not there else ()
    if foreign:
        raise RunExists(f"{folder} is not empty: it holds {foreign[0][:100]!r}. Give a new or an empty folder as --out.")


def run(
    recipe: Recipe, train: Callable[[Callable[[int, float], None]], M], state: Path, name: str, quiet: bool
) -> tuple[M, str]:
    """Train with a progress bar. Returns the model and the time it took; for a resumed run, that of the rest."""
    start, rest = time.monotonic(), " for the rest of an interrupted run" if state.exists() else ""
    with tqdm(total=recipe.steps, desc=name, unit="step", disable=hidden(not quiet)) as bar:

        def show(done: int, loss: float) -> None:
            bar.update(done - bar.n)
            bar.set_postfix(loss=f"{loss:.4f}", longest=trainer.longest_at(recipe, done - 1), refresh=False)

        model = train(show)
        bar.update(recipe.steps - bar.n)  # a resumed run may have no step left
    return model, f"{time.monotonic() - start:.0f} s{rest}"


def machine(device: str) -> str:
    """Device and PyTorch version, which the bits of a trained model depend on besides its recipe."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, threads: {torch.get_num_threads()}, torch {torch.__version__}"


def card(name: str, recipe: Recipe, model: Decoder, made: str, progress: bool = False) -> str:
    """The model card as Markdown: model, training (`made`), and accuracy, which is measured here."""
    accuracies = _accuracies(recipe, model, progress)
    return "\n".join([f"# {name}", "", *_facts(recipe, model, made), "", "## Accuracy", "", *accuracies, ""])


def _facts(recipe: Recipe, model: Decoder, made: str) -> list[str]:
    whole = sum(part.weight for part in recipe.parts)
    shares = [f"{dict(part.knobs).get('rendering', part.task)} {part.weight / whole:.0%}" for part in recipe.parts]
    data = (
        f"task `{recipe.parts[0].task}`, renderings {', '.join(shares)} of every batch; 1 to {recipe.longest} actors, each "
        f"flips with probability 1/2; start face random; training names only; {recipe.pool} examples per rendering and length"
    )
    return train_recipe.facts(recipe, model, made, data, "actor")


def _accuracies(recipe: Recipe, model: Decoder, progress: bool) -> list[str]:
    """One line per number of actors, with the number of different prompts, which is small for few actors."""
    tokenizer = recipe.tokenizer()
    lines = [
        f"Percent of {CARD_EXAMPLES} held-out examples per cell whose greedy completion is right up to and including the",
        "answer; in `steps` that is the whole chain of thought. Lengths above "
        f"{recipe.longest} were never trained on. `prompts`: the number",
        "of different prompts in a line, smallest over its columns.",
        "",
        f"| actors | {' | '.join(zoo.TESTS)} | prompts |",
        "|---:" * (len(zoo.TESTS) + 2) + "|",
    ]
    for length in scoring(CARD_LENGTHS, progress):
        tests = [zoo.held_out(part, length, CARD_EXAMPLES) for part in zoo.TESTS.values()]
        shares = [f"{zoo.accuracy(model, tokenizer, test):.1%}" for test in tests]
        prompts = min(len({example.root for example in test}) for test in tests)
        lines.append(f"| {length} | {' | '.join(shares)} | {prompts} |")
    return lines
