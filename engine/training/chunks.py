"""`ChunkedText`: a task's text in chunks, with the gold thought of each. `ChunkedTexts`: training batches of them.

A step's thought belongs to the chunk with the earliest token from which the step can be inferred; the thoughts of one chunk
are joined. The prompt is padded to a chunk border, because T would see the answer in a chunk with prompt and completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, BadThought
from replaylens.engine.thinking.model import ThinkingConfig, padded
from replaylens.engine.training.recipe import Recipe
from replaylens.engine.training.tokenizer import Tokenizer
from replaylens.engine.training.trainer import longest_at, step_seed, training_examples
from replaylens.tasks import Example

Method = Literal["thinking", "cot", "none"]
METHODS: tuple[Method, ...] = ("thinking", "cot", "none")
"""thoughts beside the text; thoughts written before the answer; no thoughts"""


@dataclass(frozen=True)
class ChunkedText:
    """Token ids of one example. The prompt ends on a chunk border; the completion does not."""

    prompt: tuple[int, ...]
    thoughts: tuple[tuple[int, ...], ...]
    """per prompt chunk: its tokens and <EOS>; only <EOS> if the chunk has no step"""
    completion: tuple[int, ...]
    """up to and including <EOS>; with method `cot` it starts with all thoughts and an <EOS>"""
    answer: int
    """number of tokens of the completion up to and including the answer"""


def chunked(example: Example, tokenizer: Tokenizer, config: ThinkingConfig, method: Method) -> ChunkedText:
    """The training text of an example for this config and method. BadThought if a thought is too long."""
    ids, offsets = tokenizer.encode_with_offsets(example.prompt)
    ends = np.maximum.accumulate([end for _, end in offsets])  # a special token covers no characters: [0, 0)
    prompt = padded(ids, config)
    words: list[list[int]] = [[] for _ in range(len(prompt) // config.chunk)]
    for read, thought in example.thoughts:
        if read <= ends[-1]:  # steps in the completion, which some tasks have, are written, not thought
            words[int(np.searchsorted(ends, read)) // config.chunk] += tokenizer.encode(thought)
    thoughts = tuple((*tokens, config.eos_token) for tokens in words)
    longest = max(map(len, thoughts))
    if longest > config.max_thought:
        raise BadThought(
            f"A chunk of {config.chunk} tokens has a thought of {longest} tokens, <EOS> included, but max_thought is "
            f"{config.max_thought}. Raise max_thought, or use smaller chunks."
        )
    chain_of_thought = [*chain.from_iterable(words), config.eos_token] if method == "cot" else []
    written = tokenizer.encode(example.completion)
    answered = tokenizer.encode(example.completion[: example.completion.rindex(example.answer) + len(example.answer)])
    if written[: len(answered)] != answered:
        raise BadRequest(
            f"The tokenizer joins the answer {example.answer!r} with the text after it in {example.completion!r}. Use another "
            f"tokenizer or task."
        )
    completion = (*chain_of_thought, *written, config.eos_token)
    return ChunkedText(prompt, thoughts, completion, len(chain_of_thought) + len(answered))


@dataclass(frozen=True)
class ChunkBatch:
    """Texts as rows of chunks; packed rows hold several texts."""

    tokens: Tensor
    """[B, K, c]"""
    weights: Tensor
    """of each token in the loss; padding has 0. [B, K, c]"""
    thoughts: Tensor
    """gold, padded with <EOS>: [B, K, M]"""
    thinks: Tensor
    """prompt chunks: [B, K]"""
    continues: Tensor
    """chunks that receive the state of the chunk before: all but a text's first. [B, K]"""

    def rest(self, first: int) -> "ChunkBatch":
        """The batch without the first chunks of every row."""
        return ChunkBatch(**{name: value[:, first:] for name, value in vars(self).items()})


class ChunkTable:
    """The chunks of many texts in one table; chunk 0 is empty. A batch is a matrix of chunk numbers."""

    def __init__(
        self, texts: Sequence[ChunkedText], config: ThinkingConfig, completion_weight: float, device: torch.device
    ) -> None:
        c, room = config.chunk, max(2, max(len(thought) for text in texts for thought in text.thoughts))
        sizes = np.array([(len(text.prompt) + len(text.completion) + c - 1) // c for text in texts])
        self.sizes, self.starts = sizes, 1 + np.cumsum(sizes) - sizes
        total = 1 + int(sizes.sum())
        tokens = np.full((total, c), config.pad_token, dtype=np.int32)
        weights = np.zeros((total, c), dtype=np.float32)
        thoughts = np.full((total, room), config.eos_token, dtype=np.int32)
        thinks, continues = np.zeros(total, dtype=bool), np.zeros(total, dtype=bool)
        for text, start, size in zip(texts, self.starts, sizes, strict=True):
            ids, prompt = (*text.prompt, *text.completion), len(text.prompt)
            flat, loss = tokens[start : start + size].reshape(-1), weights[start : start + size].reshape(-1)
            flat[: len(ids)] = ids
            loss[:prompt] = flat[:prompt] != config.pad_token
            loss[prompt : len(ids)] = completion_weight
            for i, thought in enumerate(text.thoughts):
                thoughts[start + i, : len(thought)] = thought
            thinks[start : start + prompt // c] = True
            continues[start + 1 : start + size] = True
        self.columns = [torch.from_numpy(x).to(device) for x in (tokens, weights, thoughts, thinks, continues)]

    def batch(self, numbers: np.ndarray | Tensor) -> ChunkBatch:
        """The chunks with these numbers: [B, K]."""
        tokens, weights, thoughts, thinks, continues = self.columns
        index = numbers if isinstance(numbers, Tensor) else torch.from_numpy(numbers).to(tokens.device)
        return ChunkBatch(tokens[index].long(), weights[index], thoughts[index].long(), thinks[index], continues[index])

    def row(self, texts: np.ndarray, chunks: int) -> np.ndarray:
        """Chunk numbers of consecutive texts, as many whole texts as fit into `chunks`: [chunks]."""
        ends = np.cumsum(self.sizes[texts])
        fitting = texts[ends <= chunks]
        numbers = [np.arange(self.starts[text], self.starts[text] + self.sizes[text]) for text in fitting]
        return np.pad(np.concatenate(numbers), (0, chunks - int(self.sizes[fitting].sum())))


class ChunkedTexts:
    """The training texts of a recipe, chunked once, and the batches drawn from them."""

    def __init__(self, recipe: Recipe, config: ThinkingConfig, method: Method, width: int | None, device: torch.device) -> None:
        self.recipe = recipe
        tokenizer = recipe.tokenizer()
        texts = [
            chunked(example, tokenizer, config, method)
            for part in range(len(recipe.parts))
            for length in range(1, recipe.longest + 1)
            for example in _examples(recipe, part, length)
        ]
        self.table = ChunkTable(texts, config, recipe.completion_weight, device)
        self.chunks = None if width is None else width // config.chunk
        if self.chunks is not None and self.table.sizes.max() > self.chunks:
            raise BadRequest(
                f"A row of {width} tokens cannot hold a text of {self.table.sizes.max()} chunks of {config.chunk} tokens. "
                f"Raise the width, or use shorter texts."
            )

    def batch(self, step: int) -> ChunkBatch:
        """The batch of step `step`: one text per row, or rows packed up to the width."""
        return self.table.batch(self.numbers(step))

    def numbers(self, step: int) -> np.ndarray:
        """The numbers of the chunks of step `step` in the table: [B, K]."""
        recipe, random = self.recipe, np.random.default_rng(step_seed(self.recipe.seed, step))
        per_row = 1 if self.chunks is None else int(self.chunks // self.table.sizes.min())
        shape, shares = (recipe.batch, per_row), np.array([part.weight for part in recipe.parts])
        part = random.choice(len(shares), shape, p=shares / shares.sum())
        length = random.integers(longest_at(recipe, step), size=shape)  # 0 means a text of one step
        drawn = (part * recipe.longest + length) * recipe.pool + random.integers(recipe.pool, size=shape)
        chunks = self.chunks or int(self.table.sizes[drawn].max())
        return np.stack([self.table.row(texts, chunks) for texts in drawn])


def _examples(recipe: Recipe, part: int, length: int) -> list[Example]:
    """`pool` training examples of one part and length."""
    return list(islice(training_examples(recipe.parts[part].of_length(length, recipe.seed)), recipe.pool))
