"""`replaylens train square.toml`: a model of your own from a recipe file, and its card."""

from pathlib import Path

from replaylens import tasks
from replaylens.commands.train_thinking import NONE_HELD_OUT, scoring, tested
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.weights import weights_hash
from replaylens.engine.training import trainer
from replaylens.engine.training.recipe import Recipe
from replaylens.engine.training.recipe_file import read_recipe
from replaylens.engine.zoo import coin as zoo

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


def card(name: str, recipe: Recipe, model: Decoder, made: str, examples: int, progress: bool = False) -> str:
    """The model card as Markdown: model, training (`made`), and accuracy, which is measured here."""
    whole = sum(part.weight for part in recipe.parts)
    shares = [f"{title} {part.weight / whole:.0%}" for title, part in zip(_titles(recipe), recipe.parts, strict=True)]
    data = (
        f"{', '.join(shares)} of every batch; texts of 1 to {recipe.longest} steps, {recipe.pool} examples per part and length"
    )
    table = _accuracies(recipe, model, examples, progress)
    return "\n".join([f"# {name}", "", *facts(recipe, model, made, data, "step"), "", "## Accuracy", "", *table, ""])


def _titles(recipe: Recipe) -> list[str]:
    """Each part as a card names it: the task and the knobs that are set."""
    return [" ".join([f"`{part.task}`", *(f"{key}={value}" for key, value in part.knobs)]) for part in recipe.parts]


def _accuracies(recipe: Recipe, model: Decoder, examples: int, progress: bool) -> list[str]:
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
