"""Training of Thinking-States models, and of two baselines with the same backbone, texts and number of steps.

thinking  gold thoughts are compressed into the states of all chunks at once, so one parallel pass trains everything, without
          back-propagation through time. Loss: next token + thought tokens, with equal weight
cot       the thoughts are written after the prompt, then the answer
none      the answer alone

Deterministic and resumable, as in `trainer`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replaylens.engine.errors import BadRecipe, BadRequest
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.terminal import pause_collector
from replaylens.tasks.task import Example
from replaylens.thinking.model import ThinkingConfig, ThinkingDecoder, padded
from replaylens.training import trainer
from replaylens.training.recipe import Recipe, Tokenizer, backbone_folder, load_tokenizer
from replaylens.training.trainer import adam, descend, longest_at, lr_at, step_seed, training_examples
from replaylens.weights import loading as weights

# ---- chunks ----------------------------------------------------------------------------------------------------------
# `ChunkedText`: a task's text in chunks, with the gold thought of each. `ChunkedTexts`: training batches of them.
#
# A step's thought belongs to the chunk with the earliest token from which the step can be inferred; the thoughts of one chunk
# are joined. The prompt is padded to a chunk border, because T would see the answer in a chunk with prompt and completion.

Method = Literal["thinking", "cot", "none"]
METHODS: tuple[Method, ...] = ("thinking", "cot", "none")
"""thoughts next to the text; thoughts written before the answer; no thoughts"""


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
    """The training text of an example for this config and method. BadRequest if a thought is too long."""
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
        raise BadRequest(
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


# ---- plain -----------------------------------------------------------------------------------------------------------
# A Thinking-States model in plain PyTorch over whole sequences, for training, for scoring, and as the reference for the
# canonical replay. Any device, any dtype; differentiable except for decoding.
#
# Shapes: B texts of K chunks of c tokens. Thoughts are padded with <EOS> to M tokens; a chunk that does not think has an
# empty thought.

OpsOf = Callable[[Sequence[int]], SequenceOps]
"""the arithmetic for sequences of these lengths"""


def states_of(model: ThinkingDecoder, thoughts: Tensor, ops_of: OpsOf = SequenceOps) -> Tensor:
    """C of every thought [..., M] -> states [..., c, d_model]; exactly zero for an empty thought.

    A thought shorter than a chunk is padded with <EOS>; of a longer one, the last c tokens count.
    """
    config, flat = model.thinking, thoughts.reshape(-1, thoughts.shape[-1])
    length = max(flat.shape[1], config.chunk)
    filled = flat.new_full((len(flat), length), config.eos_token)
    filled[:, : flat.shape[1]] = flat
    ops = ops_of([length] * len(flat))
    places = torch.arange(length, device=flat.device).repeat(len(flat))
    out = model.run_compress(filled.flatten(), places, ops).view(len(flat), length, -1)
    if length > config.chunk:
        first = (sizes(flat, config.eos_token) - config.chunk).clamp(min=0)
        picks = first[:, None] + torch.arange(config.chunk, device=flat.device)  # [thoughts, c]
        out = out.gather(1, picks[..., None].expand(-1, -1, out.shape[-1]))
    else:
        out = out[:, : config.chunk]
    out = out * (flat[:, 0] != config.eos_token)[:, None, None]
    return out.view(*thoughts.shape[:-1], config.chunk, -1)


def sizes(thoughts: Tensor, eos_token: int) -> Tensor:
    """Length of each thought [..., M], including its <EOS>: [...]."""
    return (thoughts != eos_token).sum(-1).add(1).clamp(max=thoughts.shape[-1])


def shifted(states: Tensor, continues: Tensor) -> Tensor:
    """States that chunks produce [B, K, c, d] -> states they receive; the first chunk of a text receives zero."""
    received = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
    return received * continues[..., None, None]


def run(model: ThinkingDecoder, tokens: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
    """Run texts [B, K, c] with the states they receive [B, K, c, d]. Returns what T reads and the last residual stream."""
    texts, chunks, c = tokens.shape
    width = chunks * c
    positions = torch.arange(width, device=tokens.device).repeat(texts)
    flat = received.reshape(texts * width, -1)
    hidden, last = model(tokens.flatten(), positions, flat, SequenceOps([width] * texts))
    return hidden.view(received.shape), last.view(received.shape)


def thought_logits(
    model: ThinkingDecoder, hidden: Tensor, thoughts: Tensor, first: int = 0, ops_of: OpsOf = SequenceOps
) -> Tensor:
    """T over what it reads [..., c, d] and given thoughts [..., M] -> logits of their tokens from number `first` on:
    [..., M - first, vocab]."""
    lead, (c, d), m = thoughts.shape[:-1], hidden.shape[-2:], thoughts.shape[-1]
    known = thoughts.reshape(-1, m)[:, :-1]  # the last token is predicted, never read
    count = len(known)
    places = torch.arange(m - 1, device=known.device).repeat(count)
    words = model.thought_embedding(known.flatten(), places).view(count, m - 1, d)
    x = torch.cat([hidden.reshape(count, c, d), words], dim=1)
    ops = ops_of([c + m - 1] * count)
    positions = torch.arange(c + m - 1, device=known.device).repeat(count)
    out = model.run_think(x.reshape(-1, d), positions, ops).view(count, c + m - 1, d)[:, c - 1 + first :]
    return model.thought_logits(out.reshape(-1, d), ops).view(*lead, m - first, -1)


@torch.no_grad()
def think(model: ThinkingDecoder, hidden: Tensor, limit: int) -> Tensor:
    """Greedy thoughts from what T reads [..., c, d]: [..., limit], padded with <EOS>; the last token is always <EOS>."""
    eos = model.thinking.eos_token
    thoughts = torch.full((*hidden.shape[:-2], limit), eos, device=hidden.device)
    open_ = torch.ones(hidden.shape[:-2], dtype=torch.bool, device=hidden.device)
    for place in range(limit - 1):
        token = thought_logits(model, hidden, thoughts[..., : place + 1], place)[..., 0, :].argmax(-1)
        thoughts[..., place] = torch.where(open_, token, eos)
        open_ &= token != eos
        if not bool(open_.any()):
            break
    return thoughts


@torch.no_grad()
def sequential(model: ThinkingDecoder, tokens: Tensor, limit: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: one text [K, c], chunk by chunk, where every chunk thinks and runs over the whole text so far. Returns
    thoughts [K, M], the states that chunks receive [K, c, d], and logits [K, c, vocab]."""
    limit = limit or model.thinking.max_thought
    d = model.config.d_model
    received = torch.zeros(1, *tokens.shape, d, dtype=model.backbone.embed.dtype, device=tokens.device)
    thoughts = []
    for i in range(len(tokens)):
        hidden, last = run(model, tokens[None, : i + 1], received[:, : i + 1])
        thoughts.append(think(model, hidden[:, -1], limit))
        if i + 1 < len(tokens):
            received[:, i + 1] = states_of(model, thoughts[-1])
    logits = model.backbone.logits(last.view(-1, d), SequenceOps([tokens.numel()]))
    return torch.cat(thoughts), received[0], logits.view(*tokens.shape, -1)


# ---- graphs ----------------------------------------------------------------------------------------------------------
# Training steps as CUDA graphs. A step of a small model is many hundred launches, which take far longer than their work.
#
# Forward, backward, clipping and Adam of one shape are captured once and replayed on new inputs. The learning rate is a
# tensor, which Adam rounds differently from a float, so graphed steps are deterministic but not bit-equal to
# `LaunchedSteps`.

M = TypeVar("M", bound=nn.Module)
Inputs = tuple[Tensor, ...]


class GraphedSteps(Generic[M]):
    """The steps of a recipe on a CUDA device, one graph per key. Inputs of all steps have the same shapes."""

    def __init__(
        self,
        recipe: Recipe,
        model: M,
        inputs_at: Callable[[int], tuple[int, Inputs]],
        loss_of: Callable[[M, int, Inputs], Tensor],
    ) -> None:
        """`inputs_at(step)` returns a key and the inputs of a step. Whatever the key determines is captured in its graph.
        `loss_of(model, key, inputs)` must not synchronize with the device.
        """
        self.recipe, self.model, self.inputs_at, self.loss_of = recipe, model, inputs_at, loss_of
        self.lr = torch.zeros((), dtype=torch.float32, device="cuda")
        self.optimizer = adam(model, self.lr, capturable=True)
        self._inputs: Inputs = ()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def take(self, step: int) -> Tensor:
        """Take step number `step`. Returns its loss, which is valid until the next step."""
        key, inputs = self.inputs_at(step)
        if not self._graphs:
            self._begin(inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        graph, loss = self._graphs[key]
        self.lr.fill_(lr_at(self.recipe, step))
        graph.replay()
        return loss

    def _begin(self, inputs: Inputs) -> None:
        """Allocate the inputs and Adam's moments, which must not happen during a capture."""
        self._inputs = tuple(torch.empty_like(x) for x in inputs)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr  # a loaded state has its own copy
        if self.optimizer.state:
            return
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # learning rate and gradients are zero: only the step count changes
        for moments in self.optimizer.state.values():
            moments["step"].zero_()

    def _capture(self, key: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.optimizer.zero_grad()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.loss_of(self.model, key, self._inputs).backward()  # loads the kernels; the gradients are discarded
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        shared = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with pause_collector(), torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"):
            loss = descend(self.model, self.optimizer, self.loss_of(self.model, key, self._inputs))
        self.optimizer.zero_grad()
        return graph, loss


# ---- thinking --------------------------------------------------------------------------------------------------------

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
    can only come from the state, so the model learns to use it (see docs/notes/thinking_states.md)"""
    backbone: str | None = None
    """the pretrained model to start from, with its tokenizer: smollm2, or a folder. None: from scratch, with a tokenizer of
    the tasks' words"""
    precision: Precision = "fp32"
    """bf16: matrix products and attention run in bfloat16 (autocast); weights, their gradients, the optimizer, the residual
    stream, norms and the loss stay in float32. Replay is canonical with either"""
    thought_loss: ThoughtLoss = "tokens"
    """tokens: mean over all tokens of thoughts. chunks: as published, the sum over a text's chunks, each with the mean over the
    tokens of its thought, averaged over texts; it grows with the length of a text (see docs/notes/thinking_states.md)"""

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
"""the result of a recipe: a Thinking-States model, or the plain decoder of a baseline"""


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


def arithmetic(precision: Precision, device: str) -> modes.Autocast:
    """A context in which PyTorch computes in this precision."""
    return modes.Autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16")


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
    received = shifted(states_of(model, batch.thoughts), batch.continues)[:, first:]
    hidden, last = run(model, rest.tokens, received)
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
    logits = thought_logits(model, hidden, batch.thoughts)
    places = torch.arange(batch.thoughts.shape[-1], device=hidden.device)
    counted = (places < sizes(batch.thoughts, model.thinking.eos_token)[..., None]) & batch.thinks[..., None]
    found = F.cross_entropy(logits.flatten(0, -2), batch.thoughts.flatten(), reduction="none")
    if over == "tokens":
        return (found * counted.flatten()).sum() / counted.sum().clamp(min=1)  # `cut` may leave no thought
    by_chunk = (found.view(counted.shape) * counted).sum(-1) / counted.sum(-1).clamp(min=1)
    texts = (batch.thinks & ~batch.continues).sum().clamp(min=1)  # texts that begin here; a row under `cut` begins within one
    return by_chunk.sum() / texts
