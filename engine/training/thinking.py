"""Training of models that think, and of the two baselines they are compared with: same backbone, same texts, same steps.

thinking  gold thoughts are compressed into the states of all chunks at once, so one parallel pass trains everything, without
          back-propagation through time. Loss: next token + thought tokens, with equal weight
cot       the thoughts are written out after the prompt, then the answer
none      the answer alone

Deterministic and resumable as in `train`, whose steps these are.
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

from replaylens.engine.model import weights
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.engine.training import plain, trainer
from replaylens.engine.training.chunks import METHODS, ChunkBatch, ChunkedTexts, Method
from replaylens.engine.training.graphs import GraphedSteps
from replaylens.engine.training.recipe import BadRecipe, Recipe
from replaylens.engine.training.tokenizer import Tokenizer, backbone_folder, load_tokenizer

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class ThinkingRecipe(Recipe):
    """A recipe for a backbone that thinks, or for a baseline of it."""

    thinking: ThinkingConfig
    method: Method = "thinking"
    width: int | None = None
    """rows of this many tokens are filled with texts one after the other, so that all positions and distances up to it are
    trained on, whatever the length of a text; None: one text a row"""
    cut: bool = False
    """every other step leaves the first chunks of its rows out, but not the states that came of them: thoughts of a text whose
    beginning is gone can only come from its state, so the model learns to use it (see docs/results.md)"""
    backbone: str | None = None
    """the pretrained model to start from, whose tokenizer is the recipe's, too: smollm2, or a folder. None: from scratch, with
    a tokenizer of the tasks' words"""
    precision: Precision = "fp32"
    """bf16: products and attention of the loss are computed in bfloat16 (autocast); weights, their gradients, the optimizer,
    the residual stream, norms and the loss itself stay in float32. Replay is not concerned: it is canonical in any case"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.thinking.check(self.config)
        if (eos := self.tokenizer().eos_id) != self.thinking.eos_token:
            raise BadRecipe(f"thoughts would end with token {self.thinking.eos_token}, but the tokenizer's <EOS> is {eos}")
        if 2 * self.thinking.chunk > (most := self.config.max_positions):
            raise BadRecipe(
                f"chunks of {self.thinking.chunk} tokens: a text takes two at least, and the config has {most} positions"
            )
        if self.precision not in get_args(Precision):
            raise BadRecipe(f"no precision {self.precision!r}; known: {', '.join(get_args(Precision))}")
        if self.method not in METHODS:
            raise BadRecipe(f"no method {self.method!r}; known: {', '.join(METHODS)}")
        if self.cut and self.method != "thinking":
            raise BadRecipe(f"cut is for models that think: the baseline {self.method} has no states to go on from")

    def tokenizer(self) -> Tokenizer:
        """The backbone's own; from scratch, the words of all tasks."""
        return super().tokenizer() if self.backbone is None else load_tokenizer(backbone_folder(self.backbone))

    def to_json(self) -> str:
        """As `Recipe.to_json`. Of a recipe from scratch in float32 it says neither: such recipes are older than the fields."""
        unset: dict[str, Any] = {"backbone": None, "precision": "fp32"}
        said = {name: value for name, value in asdict(self).items() if name not in unset or value != unset[name]}
        return json.dumps(said, sort_keys=True)


Model = ThinkingDecoder | Decoder
"""what a recipe gives: a model that thinks, or the plain decoder of a baseline"""


def train(
    recipe: ThinkingRecipe,
    device: str = "cpu",
    state: Path | None = None,
    save_every: int = 500,
    after_step: Callable[[int, float], None] | None = None,
    backbone: Decoder | None = None,
) -> Model:
    """Follow the recipe, as `train.train` does. `backbone`: the trained decoder to start from, where it is loaded already."""
    return follow(recipe, texts_of(recipe, device), initial(recipe, backbone), device, state, save_every, after_step)


def texts_of(recipe: ThinkingRecipe, device: str) -> ChunkedTexts:
    """The recipe's training texts. BadRecipe where, filled up to whole chunks, they are longer than the model."""
    texts = ChunkedTexts(recipe, recipe.thinking, recipe.method, recipe.width, torch.device(device))
    chunk = recipe.thinking.chunk
    longest = chunk * (texts.chunks or int(texts.table.sizes.max()))
    if longest > recipe.config.max_positions:
        raise BadRecipe(
            f"in chunks of {chunk} tokens the longest row has {longest} tokens, the config has {recipe.config.max_positions} "
            "positions: take smaller chunks, or texts of fewer steps"
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
    """Mutates `model`: the steps of the recipe on texts that are already cut up.

    On a CUDA device, steps on rows of one width are replayed from graphs.
    """

    def inputs_at(step: int) -> tuple[int, tuple[Tensor, ...]]:
        batch = texts.batch(step)
        return left_out(step, batch.tokens.shape[1]) if recipe.cut else 0, tuple(vars(batch).values())

    def loss_of(m: Model, first: int, inputs: tuple[Tensor, ...]) -> Tensor:
        with arithmetic(recipe.precision, device):
            return loss(m, ChunkBatch(*inputs), first)

    def steps(m: Model) -> trainer.Steps:
        if device == "cpu" or recipe.width is None:
            return trainer.LaunchedSteps(recipe, m, lambda m, step: loss_of(m, *inputs_at(step)))
        return GraphedSteps(recipe, m, inputs_at, loss_of)

    return trainer.follow(recipe, model, steps, device, state, save_every, after_step)


def arithmetic(precision: Precision, device: str) -> torch.autocast:
    """A context in which plain PyTorch computes in this precision."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16")


def left_out(step: int, chunks: int) -> int:
    """How many of a row's first chunks a step leaves out where the recipe cuts: none, or an eighth to all of the first half.

    Few different numbers: each is a shape, and on a GPU a graph, of its own.
    """
    if step % 2 == 0 or chunks < 4:
        return 0
    return max(1, chunks // 2 * int(np.random.default_rng(step).integers(1, 9)) // 8)


def initial(recipe: ThinkingRecipe, backbone: Decoder | None = None) -> Model:
    """The model before the first step."""
    if backbone is None and recipe.backbone is not None:
        backbone = weights.load(backbone_folder(recipe.backbone))
    if backbone is not None and backbone.config != recipe.config:
        raise BadRecipe("the backbone has another config than the recipe; take the backbone's")
    start = trainer.initial(recipe) if backbone is None else backbone
    return ThinkingDecoder.around(start, recipe.thinking) if recipe.method == "thinking" else start.requires_grad_()


def loss(model: Model, batch: ChunkBatch, first: int = 0) -> Tensor:
    """What a step makes smaller: next-token loss, plus the loss of the thoughts where the model thinks.

    first  chunks that are left out, but for the states that came of them
    """
    rest = batch.rest(first)
    if isinstance(model, Decoder):
        return token_loss(model, plain_pass(model, rest.tokens), rest)
    received = plain.shifted(plain.states_of(model, batch.thoughts), batch.continues)[:, first:]
    hidden, last = plain.run(model, rest.tokens, received)
    return token_loss(model.backbone, last, rest) + thought_loss(model, hidden, rest)


def plain_pass(model: Decoder, tokens: Tensor) -> Tensor:
    """A plain decoder over texts [B, K, c]: the last residual stream [B, K, c, d]."""
    texts, width = len(tokens), tokens[0].numel()
    positions = torch.arange(width, device=tokens.device).repeat(texts)
    return model(tokens.flatten(), positions, SequenceOps([width] * texts)).view(*tokens.shape, -1)


def token_loss(model: Decoder, last: Tensor, batch: ChunkBatch) -> Tensor:
    """Mean next-token loss, each token with its weight: last [B, K, c, d] -> a number."""
    width = batch.tokens[0].numel()
    rows = last.reshape(len(last), width, -1)[:, :-1].flatten(0, 1)
    wanted, weights = (x.reshape(len(x), width)[:, 1:].flatten() for x in (batch.tokens, batch.weights))
    found = F.cross_entropy(model.logits(rows, SequenceOps([len(rows)])), wanted, reduction="none")
    return (found * weights).sum() / weights.sum()


def thought_loss(model: ThinkingDecoder, hidden: Tensor, batch: ChunkBatch) -> Tensor:
    """Mean loss of the gold thoughts' tokens, <EOS> included: hidden [B, K, c, d] -> a number."""
    logits = plain.thought_logits(model, hidden, batch.thoughts)
    places = torch.arange(batch.thoughts.shape[-1], device=hidden.device)
    counted = (places < plain.sizes(batch.thoughts, model.thinking.eos_token)[..., None]) & batch.thinks[..., None]
    found = F.cross_entropy(logits.flatten(0, -2), batch.thoughts.flatten(), reduction="none")
    return (found * counted.flatten()).sum() / counted.sum()
