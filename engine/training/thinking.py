"""Training of models that think, and of two baselines with the same backbone, texts and number of steps.

thinking  gold thoughts are compressed into the states of all chunks at once, so one parallel pass trains everything, without
          back-propagation through time. Loss: next token + thought tokens, with equal weight
cot       the thoughts are written after the prompt, then the answer
none      the answer alone

Deterministic and resumable, as in `trainer`.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from replaylens.engine.errors import BadRecipe
from replaylens.engine.model import weights
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.torch_ops import SequenceOps
from replaylens.engine.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.engine.training import plain, trainer
from replaylens.engine.training.chunks import METHODS, ChunkBatch, ChunkedTexts, Method
from replaylens.engine.training.graphs import GraphedSteps
from replaylens.engine.training.recipe import Recipe
from replaylens.engine.training.tokenizer import Tokenizer, backbone_folder, load_tokenizer

Precision = Literal["fp32", "bf16"]
ThoughtLoss = Literal["tokens", "chunks"]


@dataclass(frozen=True, kw_only=True)
class ThinkingRecipe(Recipe):
    """A recipe for a backbone that thinks, or for a baseline of it."""

    thinking: ThinkingConfig
    method: Method = "thinking"
    width: int | None = None
    """tokens per row. Rows are packed with texts, so that all positions and distances up to the width are trained, whatever
    the length of a text. None: one text per row"""
    cut: bool = False
    """every other step omits the first chunks of its rows but keeps their states. Without the beginning of its text, a thought
    can only come from the state, so the model learns to use it (see docs/results.md)"""
    backbone: str | None = None
    """the pretrained model to start from, with its tokenizer: smollm2, or a folder. None: from scratch, with a tokenizer of
    the tasks' words"""
    precision: Precision = "fp32"
    """bf16: matrix products and attention run in bfloat16 (autocast); weights, their gradients, the optimizer, the residual
    stream, norms and the loss stay in float32. Replay is canonical with either"""
    thought_loss: ThoughtLoss = "tokens"
    """tokens: mean over all tokens of thoughts. chunks: as published, the sum over a text's chunks, each with the mean over the
    tokens of its thought, averaged over texts; it grows with the length of a text (see docs/results.md)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.thinking.check(self.config)
        if (eos := self.tokenizer().eos_id) != self.thinking.eos_token:
            raise BadRecipe(f"Thoughts end with token {self.thinking.eos_token}, but the tokenizer's <EOS> is {eos}.")
        if 2 * self.thinking.chunk > (most := self.config.max_positions):
            raise BadRecipe(
                f"Chunks of {self.thinking.chunk} tokens are too large: a text takes at least two, and the config has {most} "
                f"positions."
            )
        if self.precision not in get_args(Precision):
            raise BadRecipe(f"Unknown precision {self.precision!r}. Use one of {', '.join(get_args(Precision))}.")
        if self.thought_loss not in get_args(ThoughtLoss):
            raise BadRecipe(f"Unknown thought_loss {self.thought_loss!r}. Use one of {', '.join(get_args(ThoughtLoss))}.")
        if self.method not in METHODS:
            raise BadRecipe(f"Unknown method {self.method!r}. Use one of {', '.join(METHODS)}.")
        if self.cut and self.method != "thinking":
            raise BadRecipe(
                f"The baseline {self.method!r} has no states, so `cut` does not apply. Use it with 'thinking' only."
            )

    def tokenizer(self) -> Tokenizer:
        """The backbone's tokenizer; from scratch, one of the tasks' words."""
        return super().tokenizer() if self.backbone is None else load_tokenizer(backbone_folder(self.backbone))

    def to_json(self) -> str:
        """As `Recipe.to_json`. Omits default values of newer fields, so that older recipes keep their text."""
        unset: dict[str, Any] = {"backbone": None, "precision": "fp32", "thought_loss": "tokens"}
        said = {name: value for name, value in asdict(self).items() if name not in unset or value != unset[name]}
        return json.dumps(said, sort_keys=True)


Model = ThinkingDecoder | Decoder
"""the result of a recipe: a model that thinks, or the plain decoder of a baseline"""


def train(
    recipe: ThinkingRecipe,
    device: str = "cpu",
    state: Path | None = None,
    save_every: int = 500,
    after_step: Callable[[int, float], None] | None = None,
    backbone: Decoder | None = None,
) -> Model:
    """Train by the recipe, as in `trainer.train`. `backbone`: the decoder to start from, if it is already loaded."""
    return follow(recipe, texts_of(recipe, device), initial(recipe, backbone), device, state, save_every, after_step)


def texts_of(recipe: ThinkingRecipe, device: str) -> ChunkedTexts:
    """The recipe's training texts. BadRecipe if, padded to whole chunks, they exceed the model's positions."""
    texts = ChunkedTexts(recipe, recipe.thinking, recipe.method, recipe.width, torch.device(device))
    chunk = recipe.thinking.chunk
    longest = chunk * (texts.chunks or int(texts.table.sizes.max()))
    if longest > recipe.config.max_positions:
        raise BadRecipe(
            f"In chunks of {chunk} tokens, the longest row has {longest} tokens, but the config has "
            f"{recipe.config.max_positions} positions. Use smaller chunks, or texts of fewer steps."
        )
    return texts


def follow(
    recipe: ThinkingRecipe,
    texts: ChunkedTexts,
    model: Model,
    device: str = "cpu",
    state: Path | None = None,
    save_every: int = 500,
    after_step: Callable[[int, float], None] | None = None,
) -> Model:
    """Mutates `model`: take the recipe's steps on chunked texts.

    On a CUDA device, steps with rows of one width run as CUDA graphs.
    """

    def inputs_at(step: int) -> tuple[int, tuple[Tensor, ...]]:
        batch = texts.batch(step)
        return left_out(step, batch.tokens.shape[1]) if recipe.cut else 0, tuple(vars(batch).values())

    def loss_of(m: Model, first: int, inputs: tuple[Tensor, ...]) -> Tensor:
        with arithmetic(recipe.precision, device):
            return loss(m, ChunkBatch(*inputs), first, recipe.thought_loss)

    def steps(m: Model) -> trainer.Steps:
        if device == "cpu" or recipe.width is None:
            return trainer.LaunchedSteps(recipe, m, lambda m, step: loss_of(m, *inputs_at(step)))
        return GraphedSteps(recipe, m, inputs_at, loss_of)

    return trainer.follow(recipe, model, steps, device, state, save_every, after_step)


def arithmetic(precision: Precision, device: str) -> torch.autocast:
    """A context in which PyTorch computes in this precision."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16")


def left_out(step: int, chunks: int) -> int:
    """Number of first chunks that a step omits under `cut`: none, or one to eight eighths of the first half of a row.

    There are few values, because each needs its own shape, and on a GPU its own graph.
    """
    if step % 2 == 0 or chunks < 4:
        return 0
    return max(1, chunks // 2 * int(np.random.default_rng(step).integers(1, 9)) // 8)


def initial(recipe: ThinkingRecipe, backbone: Decoder | None = None) -> Model:
    """The model before the first step."""
    if backbone is None and recipe.backbone is not None:
        backbone = weights.load(backbone_folder(recipe.backbone))
    if backbone is not None and backbone.config != recipe.config:
        raise BadRecipe("The backbone's config differs from the recipe's. Use the backbone's config in the recipe.")
    start = trainer.initial(recipe) if backbone is None else backbone
    return ThinkingDecoder.around(start, recipe.thinking) if recipe.method == "thinking" else start.requires_grad_()


def loss(model: Model, batch: ChunkBatch, first: int = 0, over: ThoughtLoss = "tokens") -> Tensor:
    """The loss of a step: next-token loss, plus the thought loss if the model thinks.

    first  number of first chunks to omit; their states are kept
    over   as `ThinkingRecipe.thought_loss`
    """
    rest = batch.rest(first)
    if isinstance(model, Decoder):
        return token_loss(model, plain_pass(model, rest.tokens), rest)
    received = plain.shifted(plain.states_of(model, batch.thoughts), batch.continues)[:, first:]
    hidden, last = plain.run(model, rest.tokens, received)
    return token_loss(model.backbone, last, rest) + thought_loss(model, hidden, rest, over)


def plain_pass(model: Decoder, tokens: Tensor) -> Tensor:
    """Run a plain decoder over texts [B, K, c]; returns the last residual stream [B, K, c, d]."""
    texts, width = len(tokens), tokens[0].numel()
    positions = torch.arange(width, device=tokens.device).repeat(texts)
    return model(tokens.flatten(), positions, SequenceOps([width] * texts)).view(*tokens.shape, -1)


def token_loss(model: Decoder, last: Tensor, batch: ChunkBatch) -> Tensor:
    """Weighted mean of the next-token loss: last residual stream [B, K, c, d] -> scalar."""
    width = batch.tokens[0].numel()
    rows = last.reshape(len(last), width, -1)[:, :-1].flatten(0, 1)
    wanted, weights = (x.reshape(len(x), width)[:, 1:].flatten() for x in (batch.tokens, batch.weights))
    found = F.cross_entropy(model.logits(rows, SequenceOps([len(rows)])), wanted, reduction="none")
    return (found * weights).sum() / weights.sum()


def thought_loss(model: ThinkingDecoder, hidden: Tensor, batch: ChunkBatch, over: ThoughtLoss = "tokens") -> Tensor:
    """Loss over the tokens of gold thoughts, including <EOS>: hidden [B, K, c, d] -> scalar. `over` as in the recipe."""
    logits = plain.thought_logits(model, hidden, batch.thoughts)
    places = torch.arange(batch.thoughts.shape[-1], device=hidden.device)
    counted = (places < plain.sizes(batch.thoughts, model.thinking.eos_token)[..., None]) & batch.thinks[..., None]
    found = F.cross_entropy(logits.flatten(0, -2), batch.thoughts.flatten(), reduction="none")
    if over == "tokens":
        return (found * counted.flatten()).sum() / counted.sum().clamp(min=1)  # `cut` may leave no thought
    by_chunk = (found.view(counted.shape) * counted).sum(-1) / counted.sum(-1).clamp(min=1)
    texts = (batch.thinks & ~batch.continues).sum().clamp(min=1)  # texts that begin here; a row under `cut` begins within one
    return by_chunk.sum() / texts
