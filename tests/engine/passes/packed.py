"""Ragged batches for the oracles: sequences of different lengths, packed into rows and split again."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps, Tap

RAGGED = (1, 23, 9, 2, 40)
"""one of a single token, one longer than every window, and others; no two equal"""


def sequences(lengths: Sequence[int] = RAGGED, vocab_size: int = 97, seed: int = 0) -> list[Tensor]:
    """Random token ids, one tensor [length] for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def logits(model: Decoder, tokens: Sequence[Tensor], tap: Tap | None = None) -> list[Tensor]:
    """Our logits of all sequences from one packed pass: [length, vocab] for each."""
    lengths = [len(x) for x in tokens]
    ops = SequenceOps(lengths)
    rows, positions = pack(tokens)
    return list(model.logits(model(rows, positions, ops, tap), ops, tap).split(lengths))


def pack(tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Token and position of every row."""
    return torch.cat(list(tokens)), torch.cat([torch.arange(len(x)) for x in tokens])


@torch.no_grad()
def alone(model: Callable[..., object], tokens: Sequence[Tensor]) -> list[Tensor]:
    """A Hugging Face model's logits of each sequence alone, so that no padding is involved."""
    return [model(input_ids=x[None]).logits[0] for x in tokens]  # type: ignore[attr-defined]


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Size of the difference relative to the size of the reference."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def worst(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest `relative` over the sequences."""
    return max(relative(a, b) for a, b in zip(ours, theirs, strict=True))
