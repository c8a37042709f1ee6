"""Sampling and draft verification on a CUDA device. Only two numbers per chain go to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.request.sampling import Sampling
from replaylens.kernels.judge import judge
from replaylens.kernels.sample import sample_logits


@dataclass(frozen=True)
class Question:
    """Which drafts of a chain are accepted, and which token is next? Precondition: the sampling is `bare`."""

    row: int
    """row of logits that verifies the first draft; the rows of the drafts follow it"""
    drafts: Sequence[int]
    sampling: Sampling
    position: int
    """of the first draft"""


def answers(logits: Tensor, questions: Sequence[Question]) -> list[tuple[int, int]]:
    """(number of accepted drafts, next token) for each question. logits [rows, vocab]"""
    chosen = draw(logits, *_rows(questions, len(logits)))
    longest = max(len(q.drafts) for q in questions)
    table = [[*q.drafts, *[-1] * (longest - len(q.drafts)), q.row, len(q.drafts)] for q in questions]
    packed = torch.tensor(table, device=logits.device)  # [chains, longest + 2]
    drafts, first, length = (x.contiguous() for x in (packed[:, :longest], packed[:, longest], packed[:, longest + 1]))
    return [(accepted, token) for accepted, token in torch.stack(judge(chosen, drafts, first, length), 1).tolist()]


def draw(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token per row of logits [rows, vocab]: [rows] int64, on the device. `positions` are those of the drawn tokens."""
    if not any(sampling.temperature for sampling in samplings):
        return sample_logits(logits)[0]
    position = torch.tensor(positions, device=logits.device)
    return sample_logits(logits, seeds(samplings, logits.device), position, temperatures(samplings, logits.device))[0]


def seeds(samplings: Sequence[Sampling], device: torch.device) -> Tensor:
    """The unsigned seeds, reinterpreted as int64: [rows]."""
    return torch.tensor([s.seed - 2**64 if s.seed >= 2**63 else s.seed for s in samplings], device=device)


def temperatures(samplings: Sequence[Sampling], device: torch.device) -> Tensor:
    """[rows] float64; 0 means greedy."""
    return torch.tensor([float(s.temperature) for s in samplings], dtype=torch.float64, device=device)


def _rows(questions: Sequence[Question], rows: int) -> tuple[list[Sampling], list[int]]:
    """Sampling and position of every row. Rows without a question are greedy."""
    samplings, positions = [Sampling()] * rows, [0] * rows
    for q in questions:
        for i in range(len(q.drafts) + 1):
            samplings[q.row + i], positions[q.row + i] = q.sampling, q.position + i
    return samplings, positions
