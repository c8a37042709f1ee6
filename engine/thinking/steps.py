"""`ChunkStates`, `ThoughtSteps`: what T reads of a chunk, and the decode steps of several thoughts."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replaylens.engine.passes.finite import not_finite
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.thinking.model import THINK_SITE


@dataclass(frozen=True, eq=False)
class ChunkStates:
    """The rows of one chunk that T reads."""

    number: int
    hidden: Tensor
    """[c, d_model]"""
    edits: tuple[PlacedEdit, ...] = ()
    """on T and C, by chunk and step"""


class ThoughtSteps(NamedTuple):
    """Steps of several thoughts, on the device."""

    said: Tensor
    """the tokens: [steps, thoughts]"""
    hidden: Tensor
    """T's rows: [steps, thoughts, d_model]"""
    fine: Tensor
    """whether row and logits are finite: [steps, thoughts]"""

    def cut(self, steps: int, thoughts: int) -> "ThoughtSteps":
        """The first ones."""
        return ThoughtSteps(*(x[:steps, :thoughts] for x in self))


def all_ended(said: Tensor, eos: int) -> bool:
    """Whether every thought has an <EOS>: tokens [steps, thoughts]."""
    return bool((said == eos).any(0).all())


def ended(steps: ThoughtSteps, eos: int) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens and T's rows [steps, d_model] of each thought up to <EOS>, on the CPU. NonFinite if one of these rows is not."""
    tokens, fine = steps.said.t().tolist(), steps.fine.t().tolist()
    hidden = steps.hidden.cpu()
    sizes = [words.index(eos) + 1 if eos in words else len(words) for words in tokens]
    if not all(all(each[:size]) for each, size in zip(fine, sizes, strict=True)):
        raise not_finite("thoughts")
    cut = [words[:size] for words, size in zip(tokens, sizes, strict=True)]
    return cut, [hidden[:size, i].clone() for i, size in enumerate(sizes)]


def largest(logits: Tensor) -> Tensor:
    """The likeliest token of each row [rows, vocab], the lowest id among equals: [rows]."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), ids, logits.shape[-1] - 1).amin(-1)


def edited(row: Tensor, chunk: ChunkStates, step: int, room: int) -> Tensor:
    """One row of T [d_model] under the chunk's edits."""
    rows = row[None]
    for edit in (edit for edit in chunk.edits if edit.site == THINK_SITE):
        rows = applied(edit, rows, chunk.number * room + step)
    return rows[0]


def applied(edit: PlacedEdit, rows: Tensor, first: int) -> Tensor:
    """The edited rows [n, d_model], which are at places first, first + 1, ... of the edit's axis."""
    places = edit.positions(first, first + len(rows))
    if not places:
        return rows
    picks, out = [place - first for place in places], rows.clone()
    out[picks] = edit.apply(rows[picks], places)
    return out
