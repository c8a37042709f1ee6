"""A model that thinks in plain PyTorch over whole sequences, for training, for scoring, and as the reference for the canonical
replay. Any device, any dtype; differentiable except for decoding.

Shapes: B texts of K chunks of c tokens. Thoughts are padded with <EOS> to M tokens; a chunk that does not think has an empty
thought.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from replaylens.engine.model.torch_ops import SequenceOps
from replaylens.engine.thinking.model import ThinkingDecoder

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
