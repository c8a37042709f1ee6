"""Training of small decoders from scratch on task texts: deterministic, resumable, the same code on CPU and GPU.

Initial weights, texts and batches are pure functions of the recipe and the step number. So a resumed run needs no generator
state, and gives the bits of an uninterrupted one.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_of
from torch import Tensor, nn

from replaylens.engine.errors import BadRecipe
from replaylens.engine.files import write_file
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer, SequenceOps, TorchOps
from replaylens.engine.terminal import defer_interrupt
from replaylens.tasks.splits import kept
from replaylens.tasks.task import AnyTask, Example
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.training.recipe import Recipe, RecipePart, Tokenizer

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
GRADIENT_NORM = 1.0
"""Gradients are clipped to this norm."""
FINAL_LR = 0.02
"""The learning rate ends at this share of its peak."""
STATE_KEY = "replaylens"
M = TypeVar("M", bound=nn.Module)

TrainingBatch = list[tuple[Tensor, Tensor]]
"""For each part of a recipe: tokens [sequences, width], and their weights in the loss; padding weighs 0."""


def is_held_out(example: Example) -> bool:
    """Whether an example is excluded from training: one prompt in eight, chosen by a hash of the prompt.

    The choice does not depend on seeds or indices, so an example is on the same side wherever it is drawn.
    """
    return int(example.root[0], 16) < 2


def training_examples(task: AnyTask) -> Iterator[Example]:
    """The examples that are not held out, by index and without end. TooFewPrompts if there is none."""
    return kept(task, lambda example: not is_held_out(example), "training")


def held_out_examples(task: AnyTask) -> Iterator[Example]:
    """The held-out examples, by index and without end. TooFewPrompts if there is none."""
    return kept(task, is_held_out, "held-out")


class Texts:
    """The training texts of a recipe, tokenised once, and the batches drawn from them."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.numbers = recipe.sequences()
        tokenizer = recipe.tokenizer()
        rows = [[list(_rows(recipe, part, n, tokenizer)) for n in self._lengths()] for part in recipe.parts]
        self.widths = [[max(len(tokens) for tokens, _ in cell) for cell in cells] for cells in rows]
        self.tables = [_table(list(chain.from_iterable(cells)), recipe, device) for cells in rows]

    def _lengths(self) -> range:
        return range(1, self.recipe.longest + 1)

    def batch(self, step: int) -> TrainingBatch:
        """The batch of step `step`: each part's share of the sequences, with lengths up to the curriculum's."""
        recipe = self.recipe
        generator = torch.Generator().manual_seed(step_seed(recipe.seed, step))
        longest = longest_at(recipe, step)
        return [self._draw(part, number, longest, generator) for part, number in enumerate(self.numbers)]

    def _draw(self, part: int, number: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(longest, (number,), generator=generator)  # 0 means a text of one step
        row = lengths * self.recipe.pool + torch.randint(self.recipe.pool, (number,), generator=generator)
        width = max(self.widths[part][length] for length in lengths.tolist())
        tokens, weights = self.tables[part]
        row = row.to(tokens.device)
        return tokens[row, :width].long(), weights[row, :width]


def _rows(recipe: Recipe, part: RecipePart, length: int, tokenizer: Tokenizer) -> Iterator[tuple[list[int], int]]:
    """Token ids of `pool` training texts of one part and length, each with the length of its prompt."""
    for example in islice(training_examples(part.of_length(length, recipe.seed)), recipe.pool):
        prompt = tokenizer.encode(example.prompt)
        ids = [*prompt, *tokenizer.encode(example.completion), tokenizer.eos_id]
        if len(ids) > (most := recipe.config.max_positions):
            raise BadRecipe(f"A text of {length} steps has {len(ids)} tokens, but the config has {most} positions.")
        yield ids, len(prompt)


def _table(rows: list[tuple[list[int], int]], recipe: Recipe, device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded tokens and loss weights, both [rows, longest text]. Padding comes last, so causality hides it."""
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), width), WordTokenizer.pad_id, dtype=torch.int32)
    weights = torch.zeros(len(rows), width, dtype=torch.float32)
    for i, (ids, prompt) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        weights[i, :prompt] = 1.0
        weights[i, prompt : len(ids)] = recipe.completion_weight
    return tokens.to(device), weights.to(device)


def step_seed(seed: int, step: int) -> int:
    """A generator seed for one step, independent of other steps and seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:7], "big")


def longest_at(recipe: Recipe, step: int) -> int:
    """The curriculum: the longest text that step `step` may draw."""
    rising = recipe.curriculum * recipe.steps
    return recipe.longest if step >= rising else 1 + int(step / rising * recipe.longest)


def lr_at(recipe: Recipe, step: int) -> float:
    """Linear warmup to the peak, then a half cosine down to `FINAL_LR` of it."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * done)) / 2)


class PartsOps(TorchOps):
    """Arithmetic over groups of sequences, each group with its own width.

    Padding all parts to one width would nearly double the work, because a chain of thought is twice as long as an answer.
    """

    def __init__(self, batch: TrainingBatch) -> None:
        self.groups = [SequenceOps([tokens.shape[1]] * len(tokens)) for tokens, _ in batch]

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        q, k, v = self.turned(heads)
        rows = [sum(group.lengths) for group in self.groups]
        pieces = zip(self.groups, q.split(rows), k.split(rows), v.split(rows), strict=True)
        return torch.cat([group.attend(Heads(q, k, v), spec, observe) for group, q, k, v in pieces])


def weighted_loss(model: Decoder, batch: TrainingBatch) -> Tensor:
    """Mean next-token loss over all positions, each with the weight of the token it predicts."""
    tokens = torch.cat([part.flatten() for part, _ in batch])
    positions = torch.cat([torch.arange(part.shape[1], device=part.device).repeat(len(part)) for part, _ in batch])
    # Row i predicts token i + 1. The last row of a sequence would predict the next sequence's first token, so it has weight 0.
    weights = torch.cat([F.pad(part[:, 1:], (0, 1)).flatten() for _, part in batch])
    ops = PartsOps(batch)
    logits = model.logits(model(tokens, positions, ops), ops)
    loss = F.cross_entropy(logits, tokens.roll(-1), reduction="none")
    return (loss * weights).sum() / weights.sum()


def train(
    recipe: Recipe,
    device: str = "cpu",
    state: Path | None = None,
    save_every: int = 500,
    after_step: Callable[[int, float], None] | None = None,
) -> Decoder:
    """Train by the recipe; returns the trained decoder, on the CPU.

    state       file with the state of the run. If it exists, the run resumes from it. It is written every `save_every` steps,
                after the last step, and on Ctrl-C, which ends the run after the current step
    after_step  called with the number of steps done and the last loss; an exception from it ends the run
    """
    texts = Texts(recipe, torch.device(device))
    steps = lambda model: LaunchedSteps(recipe, model, lambda m, step: weighted_loss(m, texts.batch(step)))  # noqa: E731
    return follow(recipe, initial(recipe), steps, device, state, save_every, after_step)


class Steps(Protocol):
    """Takes the steps of a recipe, one by one, on a model on its device."""

    optimizer: torch.optim.Optimizer

    def take(self, step: int) -> Tensor:
        """Mutates the model: take step number `step`. Returns its loss."""
        ...


class LaunchedSteps(Generic[M]):
    """Steps without CUDA graphs, on any device."""

    def __init__(self, recipe: Recipe, model: M, loss_at: Callable[[M, int], Tensor]) -> None:
        """`loss_at(model, step)`: the loss of step number `step`."""
        self.recipe, self.model, self.loss_at = recipe, model, loss_at
        self.optimizer: torch.optim.Optimizer = adam(model, recipe.lr)

    def take(self, step: int) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.recipe, step)
        self.optimizer.zero_grad()
        return descend(self.model, self.optimizer, self.loss_at(self.model, step))


def adam(model: nn.Module, lr: float | Tensor, capturable: bool = False) -> torch.optim.Optimizer:
    """The optimizer of every recipe. `capturable`: its step can be captured as a CUDA graph."""
    return torch.optim.AdamW(
        model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True, capturable=capturable
    )


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Mutates the model: one optimizer step on the loss, with gradients that start at zero. Returns the detached loss."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    return loss.detach()


def follow(
    recipe: Recipe,
    model: M,
    steps: Callable[[M], Steps],
    device: str,
    state: Path | None,
    save_every: int,
    after_step: Callable[[int, float], None] | None,
) -> M:
    """Mutates `model`: take the steps of a recipe. Other parameters as in `train`."""
    with deterministic(device), defer_interrupt() as interrupted:
        model = model.to(device)
        taken = steps(model)
        first = load_state(state, recipe, model, taken.optimizer) if state is not None and state.exists() else 0
        for done in range(first + 1, recipe.steps + 1):
            loss, stop = taken.take(done - 1), interrupted()
            if state is not None and (stop or done % save_every == 0 or done == recipe.steps):
                save_state(state, recipe, model, taken.optimizer, done)
            if after_step is not None:
                after_step(done, float(loss))
            if stop:
                break
    return model.cpu().requires_grad_(False).eval()


@torch.no_grad()
def initial(recipe: Recipe) -> Decoder:
    """The decoder before the first step."""
    model = Decoder(recipe.config).initialize(recipe.seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:  # not norms
            parameter.mul_(recipe.init_scale)
    return model


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms within the block."""
    before, variable = torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG"
    if device != "cpu":
        os.environ.setdefault(variable, ":4096:8")  # cuBLAS reads it on first use, and is not deterministic without it
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def save_state(path: Path, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    """Write weights, optimizer moments, recipe and step count to one safetensors file, as a whole or not at all, over an
    older run only: BadRequest otherwise."""
    tensors = {f"model.{name}": x.detach().contiguous() for name, x in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors |= {f"adam.{name}.{key}": x for key, x in optimizer.state[parameter].items()}
    told = {STATE_KEY: json.dumps({"done": done, "recipe": recipe.to_json()})}
    write_file(path, safetensors_of(tensors, told), _is_state)


def _is_state(content: bytes) -> bool:
    """Whether a file is a saved run: its header begins with what `save_state` tells."""
    return content[8:].lstrip().startswith(f'{{"__metadata__":{{"{STATE_KEY}":'.encode())


@torch.no_grad()
def load_state(path: Path, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Mutates model and optimizer: load a saved run. Returns the number of steps done. BadRecipe if the recipe differs."""
    try:
        with safe_open(path, framework="pt") as file:
            saved = json.loads(file.metadata()[STATE_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, KeyError, TypeError) as error:
        raise BadRecipe(f"{path} is not a saved training run ({error}). Use another folder to start again.") from error
    if saved["recipe"] != recipe.to_json():
        raise BadRecipe(f"{path} belongs to another recipe. Use another folder.")
    moments = optimizer.state_dict()
    for i, (name, parameter) in enumerate(model.named_parameters()):
        parameter.copy_(tensors[f"model.{name}"])
        prefix = f"adam.{name}."
        moments["state"][i] = {key[len(prefix) :]: x for key, x in tensors.items() if key.startswith(prefix)}
    optimizer.load_state_dict(moments)
    return int(saved["done"])
