"""Logits of chosen positions and tokens. Each has the bits that the same row of `unembed.hook_out` has in a capture."""

from collections.abc import Sequence

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.passes.runner import LENS_ROWS, Runner
from replaylens.engine.request.values import integer, items, whole

At = int | slice | Sequence[int] | None


def chosen(positions: At, length: int) -> list[int]:
    """Positions of a path of `length` tokens, counted from 0; None: all. BadRequest for one that it does not have."""
    if positions is None or isinstance(positions, slice):
        found = list(range(length))[slice(None) if positions is None else positions]
    else:
        given = [positions] if integer(positions) is not None else items("positions", positions, "whole numbers, or a slice")
        found = [whole("positions", each, -length, length - 1) % length for each in given]
    if not found:
        raise BadRequest(f"positions={positions} chooses none of {length} tokens. Give at least one.")
    return found


def logits_of(runner: Runner, residual: Tensor, tokens: Sequence[int] | None) -> Tensor:
    """Final residual rows [rows, d_model] -> logits [rows, vocab], or of some tokens only, on the CPU.

    All columns are computed, 256 rows at a time, and only the wanted ones are kept: a narrower product could have other bits.
    """
    columns = slice(None) if tokens is None else list(tokens)
    return torch.cat([runner.logits(piece)[:, columns].cpu() for piece in residual.split(LENS_ROWS)])
