"""Scores of Thinking-States models, and of baselines, with their own thoughts or chains of thought, never with gold ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer, TorchOps, visible
from replaylens.tasks.task import Example
from replaylens.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.training import thinking
from replaylens.training.recipe import Tokenizer
from replaylens.training.thinking import (
    ChunkBatch,
    ChunkedText,
    ChunkTable,
    Method,
    Model,
    Precision,
    arithmetic,
    chunked,
    plain_pass,
)

PATIENCE = 64
"""a chain of thought may be this many tokens longer than the right one before it is stopped"""


@dataclass(frozen=True)
class Score:
    """One example's outcome."""

    answered: bool
    """the answer is right"""
    thought: bool
    """every thought is right; always false without thoughts"""
    rounds: int
    """number of passes of its batch"""


@torch.no_grad()
def score(
    model: Model,
    method: Method,
    config: ThinkingConfig,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    batch: int = 128,
    precision: Precision = "fp32",
) -> list[Score]:
    """Scores of greedy answers, in order. Every example of a batch costs as much as its longest, so batch similar lengths."""
    device = next(model.parameters()).device
    texts = [chunked(example, tokenizer, config, method) for example in examples]
    out: list[Score] = []
    with arithmetic(precision, device.type):
        for start in range(0, len(texts), batch):
            piece = texts[start : start + batch]
            if method == "cot":
                assert isinstance(model, Decoder)
                out += _written(model, config, piece)
            else:
                out += _answered(model, config, piece, device)
    return out


def _answered(model: Model, config: ThinkingConfig, texts: Sequence[ChunkedText], device: torch.device) -> list[Score]:
    """Answers directly after the prompt. Greedy decoding follows the right text while its tokens are the most likely."""
    table = ChunkTable(texts, config, 1.0, device)
    chunks = int(table.sizes.max())
    batch = table.batch(np.stack([table.row(np.array([i]), chunks) for i in range(len(texts))]))
    right, rounds = torch.zeros(len(texts), dtype=torch.bool), 1
    if isinstance(model, Decoder):
        backbone, last = model, plain_pass(model, batch.tokens)
    else:
        thoughts, last = along(model, batch.tokens, batch.thinks)
        gold = F.pad(batch.thoughts, (0, thoughts.shape[-1] - batch.thoughts.shape[-1]), value=config.eos_token)
        right = (thoughts == gold).flatten(1).all(1).cpu()
        backbone, rounds = model.backbone, chunks
    answered = _follows(backbone, last, batch, texts)
    return [Score(a, bool(t), rounds) for a, t in zip(answered, right, strict=True)]


def _follows(model: Decoder, last: Tensor, batch: ChunkBatch, texts: Sequence[ChunkedText]) -> list[bool]:
    """Whether each token of the completion, up to the answer, is the most likely one."""
    tokens, rows = batch.tokens.flatten(1), last.flatten(1, 2)
    verdicts = []
    for i, text in enumerate(texts):
        first, end = len(text.prompt), len(text.prompt) + text.answer
        found = model.logits(rows[i, first - 1 : end - 1], TorchOps()).argmax(-1)
        verdicts.append(bool((found == tokens[i, first:end]).all()))
    return verdicts


@torch.no_grad()
def along(model: ThinkingDecoder, tokens: Tensor, thinks: Tensor) -> tuple[Tensor, Tensor]:
    """Run texts [B, K, c] chunk by chunk, in parallel, with the model's own thoughts.

    `thinks` [B, K]: prompt chunks; the others have empty thoughts. Returns all thoughts [B, K, max_thought], and the residual
    stream after the last block [B, K, c, d].
    """
    config, (texts, chunks, c) = model.thinking, tokens.shape
    ops = GrowingOps(model.config, texts, chunks * c, model.backbone.embed)
    state = model.backbone.embed.new_zeros(texts, c, model.config.d_model)
    thoughts, lasts = [], []
    for i in range(chunks):
        ops.positions = torch.arange(i * c, (i + 1) * c, device=tokens.device).expand(texts, -1)
        hidden, last = model(tokens[:, i].flatten(), ops.positions.flatten(), state.flatten(0, 1), ops)
        thought = thinking.think(model, hidden.view(texts, c, -1), config.max_thought)
        thoughts.append(torch.where(thinks[:, i, None], thought, config.eos_token))
        lasts.append(last.view(texts, c, -1))
        state = thinking.states_of(model, thoughts[-1])
    return torch.stack(thoughts, 1), torch.stack(lasts, 1)


def _written(model: Decoder, config: ThinkingConfig, texts: Sequence[ChunkedText]) -> list[Score]:
    """Answers after the model's own chain of thought, which ends at its first <EOS>."""
    right = [text.completion[: text.answer] for text in texts]
    ends = [list(answer).index(config.eos_token) for answer in right]
    limit = max(map(len, right)) + PATIENCE
    written = generate(model, [text.prompt for text in texts], limit, lambda new: _enough(new, config, right, ends))
    out = []
    for ids, answer, end in zip(written, right, ends, strict=True):
        del ids[len(answer) + PATIENCE :]  # other texts of the batch may need more tokens
        after = ids[ids.index(config.eos_token) :] if config.eos_token in ids else []
        out.append(Score(tuple(after[: len(answer) - end]) == answer[end:], tuple(ids[: len(answer)]) == answer, limit))
    return out


def _enough(new: Tensor, config: ThinkingConfig, right: Sequence[tuple[int, ...]], ends: Sequence[int]) -> bool:
    """Whether every text has its first <EOS> and enough tokens after it. new [B, n]"""
    tail = max(len(answer) - end for answer, end in zip(right, ends, strict=True))
    return new.shape[1] >= tail and bool((new[:, : new.shape[1] - tail + 1] == config.eos_token).any(1).all())


class GrowingOps(TorchOps):
    """Plain arithmetic with a dense cache, for texts of different lengths in parallel."""

    def __init__(self, config: ModelConfig, texts: int, width: int, like: Tensor) -> None:
        planes, kv_heads, d_head = config.kv_shape
        shape, kind = (config.num_layers, planes, texts, kv_heads, width, d_head), like.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
        self.cache = like.new_zeros(shape, dtype=dtype)
        self.positions = torch.empty(0, dtype=torch.int64)
        """positions of the rows of this pass: [texts, rows]"""

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        q, k, v = self.turned(heads)
        texts, rows = self.positions.shape
        fold = lambda x: x.view(texts, rows, x.shape[1], -1).transpose(1, 2)  # noqa: E731
        cache, (q, k, v) = self.cache[spec.layer], map(fold, (q, k, v))  # [texts, heads, rows, d_head]
        place = self.positions[:, None, :, None].expand_as(k)
        cache[0].scatter_(2, place, k)
        cache[-1].scatter_(2, place, v)  # the same place if keys are also the values
        seen = visible(self.positions.flatten(), cache.shape[-2], spec.window).view(texts, 1, rows, -1)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (cache[0], cache[-1]))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=spec.scale)
        return out.transpose(1, 2).reshape(texts * rows, q.shape[1], -1)


@torch.no_grad()
def generate(
    model: Decoder, prompts: Sequence[Sequence[int]], limit: int, enough: Callable[[Tensor], bool] = lambda new: False
) -> list[list[int]]:
    """Greedy continuations by up to `limit` tokens, all prompts in parallel; `enough(tokens [B, n])` may end them earlier."""
    device, lengths = model.device, [len(prompt) for prompt in prompts]
    width = min(max(lengths) + limit, model.config.max_positions)
    ops = GrowingOps(model.config, len(prompts), width, model.embed)
    tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.tensor(prompt)  # rows past the end are overwritten before they are read
    place = torch.tensor(lengths, device=device)[:, None]
    rows = _grow(model, ops, tokens.to(device), torch.arange(max(lengths), device=device).expand(len(prompts), -1))
    row = rows[torch.arange(len(prompts), device=device), place[:, 0] - 1]
    new = torch.empty(len(prompts), 0, dtype=torch.int64, device=device)
    while True:
        new = torch.cat([new, model.logits(row, ops).argmax(-1, keepdim=True)], dim=1)
        if new.shape[1] == limit or int(place.max()) == width or (new.shape[1] % 8 == 0 and enough(new)):
            return [[int(token) for token in ids] for ids in new.tolist()]
        row = _grow(model, ops, new[:, -1:], place)[:, 0]
        place = place + 1


def _grow(model: Decoder, ops: GrowingOps, tokens: Tensor, positions: Tensor) -> Tensor:
    """Run new rows [B, n]; returns the last residual stream [B, n, d]."""
    ops.positions = positions
    return model(tokens.flatten(), positions.flatten(), ops).view(*tokens.shape, -1)
