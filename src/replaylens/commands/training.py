"""What `replaylens train` does: trains an embedded model from its recipe, or a model of your own from a recipe file."""

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import typer
from torch import nn
from tqdm import tqdm

from replaylens import tasks
from replaylens.commands.reporting import reporting
from replaylens.engine.errors import BadRequest, FolderExists, no_such
from replaylens.engine.files import TEMPORARY, require_own, write_file
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.request.values import output_path
from replaylens.engine.terminal import hidden
from replaylens.tasks.errors import TooFewPrompts
from replaylens.tasks.task import Example
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.training import embedded as zoo
from replaylens.training import embedded_thinking as thinking_zoo
from replaylens.training import thinking as thinking_train
from replaylens.training import trainer
from replaylens.training.recipe import Recipe, RecipePart, backbone_folder, load_tokenizer
from replaylens.training.recipe_file import SUFFIXES, read_recipe, recipe_text
from replaylens.training.score import score
from replaylens.training.thinking import METHODS, Method, Model, ThinkingRecipe
from replaylens.weights.loading import CONFIG_FILE

# ---- train thinking --------------------------------------------------------------------------------------------------
# `replaylens train coin-thinking`: Thinking-States models and their baselines, also for other tasks and backbones.

CARD_FILE = "card.md"
CARD_LENGTHS = range(1, 17)
OTHER_CHUNK, OTHER_THOUGHT = 4, 16
"""chunk size and longest thought for a task without its own recipe"""
NONE_HELD_OUT = "none held out"
"""a card's cell for a length whose prompts are all trained on, as happens to tasks with few prompts"""
PRETRAINED_CHUNK = 8
"""chunk size for a pretrained backbone, whose tokens are shorter than words"""


@dataclass(frozen=True)
class Changes:
    """Options that replace the recipe's values; None: as in the recipe."""

    method: str | None = None
    task: str | None = None
    longest: int | None = None
    chunk: int | None = None
    backbone: Path | None = None

    def given(self) -> list[str]:
        """The options that are set, as written in the shell."""
        return [f"--{name} {value}" for name, value in vars(self).items() if value is not None]


def changed_thinking(recipe: ThinkingRecipe, changes: Changes) -> ThinkingRecipe:
    """The recipe with another task, method, length or chunk."""
    longest = changes.longest or recipe.longest
    if changes.task is not None:
        recipe = thinking_zoo.for_task(
            recipe, tasks.load(changes.task).name, longest, changes.chunk or OTHER_CHUNK, OTHER_THOUGHT
        )
    elif changes.chunk is not None:
        recipe = replace(recipe, thinking=replace(recipe.thinking, chunk=changes.chunk, max_thought=OTHER_THOUGHT))
    if changes.backbone is not None:
        recipe = thinking_zoo.around(recipe, str(changes.backbone), *_cut(recipe, changes))
    return replace(recipe, longest=longest, method=_method(changes.method or recipe.method))


def _cut(recipe: ThinkingRecipe, changes: Changes) -> tuple[int, int]:
    """Chunk size and longest thought for a backbone: the recipe's, if its tokenizer is a `WordTokenizer`."""
    tokenizer = load_tokenizer(backbone_folder(str(changes.backbone)))
    if isinstance(tokenizer, WordTokenizer):
        return recipe.thinking.chunk, recipe.thinking.max_thought
    return changes.chunk or PRETRAINED_CHUNK, OTHER_THOUGHT


def _method(name: str) -> Method:
    for method in METHODS:
        if method == name:
            return method
    raise BadRequest(f"Unknown method {name!r}. Use one of {', '.join(METHODS)}.")


def scoring(lengths: Sequence[int], progress: bool) -> Iterable[int]:
    """Lengths for the card's accuracies, under a progress bar."""
    return tqdm(lengths, desc="scoring held-out examples for the card", unit="length", disable=hidden(progress))


def save(model: Model, recipe: ThinkingRecipe, folder: Path) -> None:
    """Write a Thinking-States model, or a baseline, with its tokenizer."""
    if isinstance(model, Decoder):
        zoo.save(model, recipe.tokenizer(), folder)
    else:
        thinking_zoo.save(model, recipe.tokenizer(), folder)


def thinking_card(name: str, recipe: ThinkingRecipe, model: Model, made: str, examples: int, progress: bool = False) -> str:
    """The model card as Markdown: model, training (`made`), and accuracy, which is measured here."""
    c, t, named = recipe.config, recipe.thinking, ", ".join(sorted({part.task for part in recipe.parts}))
    shares = [f"{dict(part.knobs).get('rendering', part.task)} {part.weight:g}" for part in recipe.parts]
    size = sum(x.numel() for x in model.parameters())
    origin = "from scratch" if recipe.backbone is None else f"pretrained: `{recipe.backbone}`"
    facts = [
        f"| backbone | {origin}; layers: {c.num_layers}, d_model {c.d_model}, {c.num_heads} heads of {c.d_head}, gated MLP of "
        f"{c.d_mlp}, rotary positions, RMSNorm, tied embeddings; {size:,} weights with T and C, float32 |",
        f"| method | {recipe.method}; chunks of {t.chunk} tokens, state added after block {t.write_layer}, T reads block "
        f"{t.read_layer}, thoughts of up to {t.max_thought} tokens |",
        f"| data | {named}: {', '.join(shares)}; 1 to {recipe.longest} steps, {recipe.pool} examples per part and length |",
        "| held out | every eighth prompt, by its hash, for every seed |",
        f"| loss | next token (after the prompt: weight {recipe.completion_weight:g}) + tokens of the gold thoughts |",
        f"| run | {recipe.steps} steps of {recipe.batch} rows, seed {recipe.seed}; AdamW, peak rate {recipe.lr:g}, cosine, "
        f"{recipe.precision}; the longest text grows from 1 step to {recipe.longest} over the first {recipe.curriculum:.0%} |",
        f"| made by | {made} |",
        f"| weights | `{weights_hash(model)}` |",
    ]
    return "\n".join(
        [
            f"# {name}",
            "",
            "| | |",
            "|---|---|",
            *facts,
            "",
            "## Accuracy",
            "",
            *accuracies(recipe, model, examples, progress),
            "",
        ]
    )


def tested(part: RecipePart, length: int, number: int) -> list[Example]:
    """Held-out examples for one cell of a card; empty if the task has no held-out prompt of this length."""
    try:
        return zoo.held_out(part, length, number)
    except TooFewPrompts:
        return []


def accuracies(recipe: ThinkingRecipe, model: Model, examples: int, progress: bool = False) -> list[str]:
    """One line per number of steps: share of right answers, and of examples with all thoughts right."""
    coin = all(part.task == "coin" for part in recipe.parts)
    tests = thinking_zoo.TESTS if coin else {part.task: RecipePart(part.task, 1.0, part.knobs) for part in recipe.parts}
    lines = [
        f"Percent of {examples} held-out examples per cell with the right greedy answer / with every thought right. Lengths",
        f"above {recipe.longest} were never trained on.",
        "",
        f"| steps | {' | '.join(tests)} |",
        "|---:" * (len(tests) + 1) + "|",
    ]
    tokenizer = recipe.tokenizer()
    for length in scoring(CARD_LENGTHS if coin else range(1, recipe.longest + 1), progress):
        cells = []
        for part in tests.values():
            if not (test := tested(part, length, examples)):
                cells.append(NONE_HELD_OUT)
                continue
            found = score(model, recipe.method, recipe.thinking, tokenizer, test, precision=recipe.precision)
            shares = sum(s.answered for s in found) / examples, sum(s.thought for s in found) / examples
            cells.append(f"{shares[0]:.1%} / {shares[1]:.1%}")
        lines.append(f"| {length} | {' | '.join(cells)} |")
    return lines


# ---- train recipe ----------------------------------------------------------------------------------------------------
# `replaylens train square.toml`: a model of your own from a recipe file, and its card.

RECIPE_FILE = "recipe.json"


def read(path: Path, task: str | None) -> Recipe:
    """The recipe of a file. `task`: the code of a task in it that is not installed, as module:Class or file.py:Class."""
    loaded = None if task is None else tasks.load(task)
    recipe = read_recipe(path)
    used = sorted({part.task for part in recipe.parts})
    if loaded is not None and loaded.name not in used:
        raise BadRequest(f"--task {task} is the task {loaded.name!r}, but {path} trains on {', '.join(used)}. Leave it out.")
    return recipe


def facts(recipe: Recipe, model: Decoder, made: str, data: str, step: str) -> list[str]:
    """The table at the top of a card. `data`: the training texts in words; `step`: what a text's length counts."""
    c = recipe.config
    betas = f"betas {trainer.BETAS[0]} and {trainer.BETAS[1]}, weight decay {trainer.WEIGHT_DECAY}"
    rising = f"the longest text grows from 1 {step} to {recipe.longest} over the first {recipe.curriculum:.0%} of the steps"
    return [
        "| | |",
        "|---|---|",
        f"| model | layers: {c.num_layers}, d_model {c.d_model}, {c.num_heads} heads of {c.d_head}, gated MLP of {c.d_mlp}, "
        f"rotary positions, RMSNorm, tied embeddings; {sum(x.numel() for x in model.parameters()):,} weights, float32 |",
        f"| data | {data} |",
        "| held out | every eighth prompt, by its hash, for every seed |",
        f"| loss | next token at every position; tokens after the prompt have weight {recipe.completion_weight:g}, others 1 |",
        f"| run | {recipe.steps} steps of {recipe.batch} texts, seed {recipe.seed}; {rising} |",
        f"| optimizer | AdamW, {betas}; peak learning rate {recipe.lr:g} after {recipe.warmup} steps, cosine down to "
        f"{trainer.FINAL_LR:.0%}; initial matrices scaled by {recipe.init_scale:g} |",
        f"| made by | {made} |",
        f"| weights | `{weights_hash(model)}` |",
    ]


def recipe_card(name: str, recipe: Recipe, model: Decoder, made: str, examples: int, progress: bool = False) -> str:
    """The model card as Markdown: model, training (`made`), and accuracy, which is measured here."""
    whole = sum(part.weight for part in recipe.parts)
    shares = [f"{title} {part.weight / whole:.0%}" for title, part in zip(_titles(recipe), recipe.parts, strict=True)]
    data = (
        f"{', '.join(shares)} of every batch; texts of 1 to {recipe.longest} steps, {recipe.pool} examples per part and length"
    )
    table = _recipe_accuracies(recipe, model, examples, progress)
    return "\n".join([f"# {name}", "", *facts(recipe, model, made, data, "step"), "", "## Accuracy", "", *table, ""])


def _titles(recipe: Recipe) -> list[str]:
    """Each part as a card names it: the task and the knobs that are set."""
    return [" ".join([f"`{part.task}`", *(f"{key}={value}" for key, value in part.knobs)]) for part in recipe.parts]


def _recipe_accuracies(recipe: Recipe, model: Decoder, examples: int, progress: bool) -> list[str]:
    """One line per length, with the number of different held-out prompts, which is small for short texts."""
    lines = [
        f"Percent of {examples} held-out examples per cell whose greedy completion is right up to and including the answer, "
        "and the number",
        f"of different prompts among them. {NONE_HELD_OUT}: every prompt of this length is trained on.",
        "",
        f"| steps | {' | '.join(_titles(recipe))} |",
        "|---:" * (len(recipe.parts) + 1) + "|",
    ]
    for length in scoring(range(1, recipe.longest + 1), progress):
        tests = [tested(part, length, examples) for part in recipe.parts]
        cells = [
            f"{zoo.accuracy(model, recipe.tokenizer(), test):.1%} of {len({e.root for e in test})}" if test else NONE_HELD_OUT
            for test in tests
        ]
        lines.append(f"| {length} | {' | '.join(cells)} |")
    return lines


# ---- train -----------------------------------------------------------------------------------------------------------

STATE_FILE = "training.safetensors"
CARD_EXAMPLES = 500
R = TypeVar("R", bound=Recipe)
M = TypeVar("M", bound=nn.Module)


def train(
    name: str, out: Path | None, steps: int | None, seed: int | None, device: str, resume: bool, changes: Changes, quiet: bool
) -> None:
    """Do what `replaylens train` was asked for."""
    own = Path(name) if name.endswith(SUFFIXES) else None
    folder = out or Path("trained") / (own.stem if own else name)
    with reporting(lambda: "the same command with --resume" if (folder / STATE_FILE).exists() else None):
        check_name(name, changes)
        check_device(device)
        check_folder(folder, resume)
        if own is not None:
            model = _train_own(own, changes.task, steps, seed, device, folder, quiet)
        elif name in thinking_zoo.names():
            model = _train_thinking(name, changes, steps, seed, device, folder, quiet)
        else:
            model = _train_plain(name, steps, seed, device, folder, quiet)
    typer.echo(f"{folder}: weights {weights_hash(model)}")


def _train_own(
    path: Path, task: str | None, steps: int | None, seed: int | None, device: str, folder: Path, quiet: bool
) -> Model:
    recipe = changed(read(path, task), steps, seed)
    given = path.name if task is None else f"{path.name} --task {task}"
    if isinstance(recipe, ThinkingRecipe):
        return _follow_thinking(path.stem, recipe, given, device, folder, quiet, own=True)
    model, made = _follow_plain(path.stem, recipe, given, device, folder, quiet)
    write_file(folder / RECIPE_FILE, recipe_text(recipe), _is_recipe)
    _finish(folder, recipe_card(path.stem, recipe, model, made, CARD_EXAMPLES, progress=not quiet))
    return model


def _train_thinking(
    name: str, changes: Changes, steps: int | None, seed: int | None, device: str, folder: Path, quiet: bool
) -> Model:
    recipe = changed(changed_thinking(thinking_zoo.recipe(name), changes), steps, seed)
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
    """Train, save and write the card; `own`: with its recipe."""
    state = folder / STATE_FILE
    train = partial(thinking_train.train, recipe, device, state)
    model, spent = run(recipe, lambda show: train(after_step=show), state, f"{name} ({recipe.method})", quiet)
    save(model, recipe, folder)
    if own:
        write_file(folder / RECIPE_FILE, recipe_text(recipe), _is_recipe)
    made = _made(recipe, given, device, spent)
    _finish(folder, thinking_card(name, recipe, model.to(device), made, CARD_EXAMPLES, progress=not quiet))
    return model


def _made(recipe: Recipe, given: str, device: str, spent: str) -> str:
    command = f"replaylens train {given} --steps {recipe.steps} --seed {recipe.seed} --device {device}"
    return f"`{command}`, {spent} on {machine(device)}"


def _finish(folder: Path, text: str) -> None:
    """Write the card, then remove the state, so that --resume works until there is a card."""
    write_file(folder / CARD_FILE, text, _is_card)
    for left in (folder / STATE_FILE, *_unfinished(folder)):
        left.unlink(missing_ok=True)


def _unfinished(folder: Path) -> set[Path]:
    """What runs leave that are killed while they save."""
    return {*folder.glob(f"{STATE_FILE}.*{TEMPORARY}"), *folder.glob(f"{STATE_FILE}.part")}


def _is_recipe(content: bytes) -> bool:
    """Whether a file begins as `recipe_text` does."""
    return content.startswith(b'{\n "model": {\n')


def _is_card(content: bytes) -> bool:
    """Whether a file is the card of a model that was trained here."""
    return content.startswith(b"# ") and b"\n| weights | `" in content


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
        raise zoo.UnsupportedModel(no_such("embedded model", name, (*zoo.names(), *thinking_zoo.names())))
    if changes.given() and name not in thinking_zoo.names():
        thinking = ", ".join(thinking_zoo.names())
        raise BadRequest(f"{', '.join(changes.given())}: only for Thinking-States models ({thinking}). Leave it out.")


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
        raise FolderExists(f"{folder} holds an unfinished run. Add --resume, or give another --out.")
    if trained and not there:
        raise FolderExists(f"{folder} holds a trained model. Give another --out.")
    if resume and not there:
        raise BadRequest(f"{folder} holds no unfinished run. Leave out --resume.")
    foreign = sorted({*folder.iterdir()} - _unfinished(folder)) if folder.exists() and not there else ()
    if foreign:
        raise FolderExists(f"{folder} is not empty: it holds {foreign[0].name[:100]!r}. Give a new or empty folder as --out.")
    require_own(folder / RECIPE_FILE, _is_recipe)
    require_own(folder / CARD_FILE, _is_card)


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
    return facts(recipe, model, made, data, "actor")


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
