"""The embedded Thinking-States models: recipes, checkpoints, and similar recipes for other tasks and backbones."""

from dataclasses import replace
from pathlib import Path

from replaylens import tasks
from replaylens.engine.errors import BadRecipe, no_such
from replaylens.engine.model.config import ModelConfig
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.thinking import model as thinking
from replaylens.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.training import embedded as zoo
from replaylens.training.recipe import RecipePart, Tokenizer, backbone_folder, load_tokenizer, tokenizer_files
from replaylens.training.thinking import ThinkingRecipe
from replaylens.weights import loading
from replaylens.weights.zoo import CHECKPOINTS

_COIN = ModelConfig(
    num_layers=4,
    d_model=96,
    num_heads=3,
    num_kv_heads=3,
    d_head=32,
    d_mlp=288,
    vocab_size=106,
    max_positions=512,
    rotary_dim=32,
)
RECIPES = {
    "coin-thinking": ThinkingRecipe(
        config=_COIN,
        thinking=ThinkingConfig.for_backbone(_COIN, 2, WordTokenizer.eos_id, WordTokenizer.pad_id, max_thought=4),
        parts=tuple(
            RecipePart("coin", weight, (("rendering", name),)) for name, weight in (("picture", 4), ("states", 2), ("wei", 2))
        ),
        longest=8,
        steps=3000,
        batch=128,
        lr=1e-3,
        seed=0,
    ),
}
TESTS = {name: part for name, part in zoo.TESTS.items() if name != "steps"}
"""test sets of the models' cards; without "steps", because these models think instead of writing their steps"""
_ROOM = 512
"""positions of a model for another task"""


def names() -> tuple[str, ...]:
    """Names of the embedded Thinking-States models."""
    return tuple(RECIPES)


def recipe(name: str) -> ThinkingRecipe:
    """The recipe of an embedded model. UnsupportedModel lists the known names."""
    if name not in RECIPES:
        raise zoo.UnsupportedModel(no_such("embedded Thinking-States model", name, names()))
    return RECIPES[name]


def for_task(like: ThinkingRecipe, task: str, longest: int, chunk: int, max_thought: int) -> ThinkingRecipe:
    """The recipe `like`, but for another task: texts of up to `longest` steps in chunks of `chunk` tokens."""
    part = RecipePart(task, 1.0)
    if not any(example.thoughts for example in part.of_length(longest, like.seed).examples(4)):
        raise BadRecipe(f"Task {task!r} has no thoughts to train on. Use another task.")
    words = WordTokenizer(sorted(set(tasks.get(task).vocabulary())))
    config = replace(like.config, vocab_size=words.vocab_size, max_positions=_ROOM)
    thinks = replace(like.thinking, chunk=chunk, max_thought=max_thought)
    return replace(like, config=config, thinking=thinks, parts=(part,), longest=longest)


def around(like: ThinkingRecipe, backbone: str, chunk: int, max_thought: int) -> ThinkingRecipe:
    """The recipe `like`, but from a pretrained backbone (smollm2, or a folder), with its config and tokenizer.

    A backbone with a Hugging Face tokenizer was trained on other texts. It is fine-tuned with a low learning rate, no
    curriculum, smaller batches, and in bfloat16.
    """
    folder = backbone_folder(backbone)
    config, tokenizer = loading.load(folder).config, load_tokenizer(folder)
    thinks = ThinkingConfig.for_backbone(config, chunk, tokenizer.eos_id, tokenizer.pad_id, max_thought=max_thought)
    recipe = replace(like, config=config, thinking=thinks, backbone=backbone)
    if isinstance(tokenizer, WordTokenizer):
        return recipe
    return replace(recipe, lr=2e-4, curriculum=0.0, batch=32, precision="bf16")


def load_embedded(name: str) -> tuple[ThinkingDecoder, Tokenizer]:
    """An embedded Thinking-States model, and its tokenizer."""
    recipe(name)
    return load(CHECKPOINTS / name)


def load(folder: Path) -> tuple[ThinkingDecoder, Tokenizer]:
    """A model and its tokenizer from a folder written by `save`."""
    return thinking.load(folder), load_tokenizer(folder)


def save(model: ThinkingDecoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model and its tokenizer for `load`. Raises as `loading.write_model`."""
    config, *others = thinking.files_of(model).items()
    loading.write_model(folder, dict([config, *tokenizer_files(tokenizer).items(), *others]))
