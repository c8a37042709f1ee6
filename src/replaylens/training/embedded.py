"""The embedded models: recipes, checkpoints, and accuracy on held-out examples."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from replaylens.engine.errors import UnsupportedModel, no_such
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.tasks.task import Example
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.training.recipe import Recipe, RecipePart, Tokenizer, tokenizer_files
from replaylens.training.trainer import held_out_examples
from replaylens.weights import loading
from replaylens.weights.zoo import CHECKPOINTS, TOKENIZER_FILE

TEST_SEED = 1_000_003
"""Test examples use this seed, which training never uses, and only held-out prompts."""


def _coin(rendering: str, weight: float) -> RecipePart:
    return RecipePart("coin", weight, (("rendering", rendering),))


RENDERINGS = (_coin("picture", 4), _coin("steps", 2), _coin("states", 2), _coin("wei", 2))
RECIPES = {
    "coin-plain": Recipe(
        config=ModelConfig(
            num_layers=4,
            d_model=128,
            num_heads=4,
            num_kv_heads=4,
            d_head=32,
            d_mlp=384,
            vocab_size=106,
            max_positions=512,
            rotary_dim=32,
        ),
        parts=RENDERINGS,
        longest=8,
        steps=3000,
        batch=128,
        lr=1e-3,
        seed=0,
    ),
    "coin-draft": Recipe(
        config=ModelConfig(
            num_layers=1,
            d_model=64,
            num_heads=2,
            num_kv_heads=2,
            d_head=32,
            d_mlp=192,
            vocab_size=106,
            max_positions=512,
            rotary_dim=32,
        ),
        parts=RENDERINGS,
        longest=8,
        steps=1000,  # with 2000, its answers are too good for a drafter that should sometimes be wrong
        batch=128,
        lr=1e-3,
        seed=0,
    ),
}
TESTS = {
    "picture, from heads": RecipePart("coin", 1, (("rendering", "picture"), ("start", "heads"))),
    "picture, from tails": RecipePart("coin", 1, (("rendering", "picture"), ("start", "tails"))),
    "steps": _coin("steps", 1),
    "states": _coin("states", 1),
    "wei": _coin("wei", 1),
}
"""test sets of the models' cards"""


def names() -> tuple[str, ...]:
    """Names of the embedded models."""
    return tuple(RECIPES)


def recipe(name: str) -> Recipe:
    """The recipe of an embedded model. UnsupportedModel lists the known names."""
    if name not in RECIPES:
        raise UnsupportedModel(no_such("embedded model", name, names()))
    return RECIPES[name]


def load_embedded(name: str) -> tuple[Decoder, WordTokenizer]:
    """A trained model that ships with the package, and its tokenizer. UnsupportedModel lists the known names."""
    recipe(name)
    return load(CHECKPOINTS / name)


def load(folder: Path) -> tuple[Decoder, WordTokenizer]:
    """A model and its tokenizer from a folder written by `save`."""
    return loading.load(folder), WordTokenizer.load(folder / TOKENIZER_FILE)


def save(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model and its tokenizer for `load`. Raises as `loading.write_model`."""
    config, weights = loading.files_of(model).items()
    loading.write_model(folder, dict([config, *tokenizer_files(tokenizer).items(), weights]))


def held_out(part: RecipePart, length: int, number: int) -> list[Example]:
    """The first `number` held-out examples of a part and length, which no training run has seen.

    Few prompts are repeated. TooFewPrompts if none of this length is held out.
    """
    return list(islice(held_out_examples(part.of_length(length, TEST_SEED)), number))


def accuracy(model: Decoder, tokenizer: Tokenizer, examples: Sequence[Example]) -> float:
    """The share of the examples that are `solved`."""
    return sum(solved(model, tokenizer, examples)) / len(examples)


@torch.no_grad()
def solved(model: Decoder, tokenizer: Tokenizer, examples: Sequence[Example], batch: int = 128) -> list[bool]:
    """Whether greedy decoding gives the right completion, up to the answer, for each example.

    One pass over the right text is enough: greedy decoding follows that text exactly as long as each of its tokens is the
    most likely one. A chain of thought counts only if all of it is right.
    """
    verdicts: list[bool] = []
    for start in range(0, len(examples), batch):
        verdicts += _solved_batch(model, tokenizer, examples[start : start + batch])
    return verdicts


def _solved_batch(model: Decoder, tokenizer: Tokenizer, examples: Sequence[Example]) -> list[bool]:
    prompts = [len(tokenizer.encode(example.prompt)) for example in examples]
    texts = [tokenizer.encode(up_to_answer(example)) for example in examples]
    width = max(map(len, texts))
    tokens = torch.tensor([ids + [tokenizer.pad_id] * (width - len(ids)) for ids in texts])
    ops = SequenceOps([width] * len(texts))
    residual = model(tokens.flatten(), torch.arange(width).repeat(len(texts)), ops)
    right = model.logits(residual, ops).argmax(-1).view(tokens.shape)[:, :-1] == tokens[:, 1:]
    return [bool(right[i, prompts[i] - 1 : len(ids) - 1].all()) for i, ids in enumerate(texts)]


def up_to_answer(example: Example) -> str:
    """The example's text, cut after its answer."""
    return example.prompt + example.completion[: example.completion.rindex(example.answer) + len(example.answer)]
