"""`replaylens train coin-thinking`: models that think and their baselines, also for other tasks and backbones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from replaylens import tasks
from replaylens.engine.errors import BadRequest
from replaylens.engine.model import weights
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.progress import hidden
from replaylens.engine.training.chunks import METHODS, Method
from replaylens.engine.training.recipe import Part
from replaylens.engine.training.score import score
from replaylens.engine.training.thinking import Model, ThinkingRecipe
from replaylens.engine.training.tokenizer import backbone_folder, load_tokenizer
from replaylens.engine.zoo import coin as zoo
from replaylens.engine.zoo import thinking as thinking_zoo
from replaylens.tasks import Example, WordTokenizer
from replaylens.tasks.errors import TooFewPrompts

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


def changed(recipe: ThinkingRecipe, changes: Changes) -> ThinkingRecipe:
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
    """Write a model that thinks, or a baseline, with its tokenizer."""
    if isinstance(model, Decoder):
        weights.save(model, folder)
        recipe.tokenizer().save(folder / zoo.TOKENIZER_FILE)
    else:
        thinking_zoo.save(model, recipe.tokenizer(), folder)


def card(name: str, recipe: ThinkingRecipe, model: Model, made: str, examples: int, progress: bool = False) -> str:
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
        f"| weights | `{weights.weights_hash(model)}` |",
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


def tested(part: Part, length: int, number: int) -> list[Example]:
    """Held-out examples for one cell of a card; empty if the task has no held-out prompt of this length."""
    try:
        return zoo.held_out(part, length, number)
    except TooFewPrompts:
        return []


def accuracies(recipe: ThinkingRecipe, model: Model, examples: int, progress: bool = False) -> list[str]:
    """One line per number of steps: share of right answers, and of examples with all thoughts right."""
    coin = all(part.task == "coin" for part in recipe.parts)
    tests = thinking_zoo.TESTS if coin else {part.task: Part(part.task, 1.0, part.knobs) for part in recipe.parts}
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
