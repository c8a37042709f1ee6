"""Choices on a CUDA device: tokens are drawn, and drafts compared, where the logits are; two numbers per chain leave it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.request.sampling import Sampling
from replaylens.kernels.judge import judge
from replaylens.kernels.sample import sample_logits


@dataclass(frozen=True)
class Question:
    """Which drafts of a chain stand, and what follows them? Precondition: the sampling is `bare`."""

    row: int
    """of the logits: what follows the token before the drafts; the drafts' own rows come after it"""
    drafts: Sequence[int]
    sampling: Sampling
    position: int
    """of the first draft"""


def answers(logits: Tensor, questions: Sequence[Question]) -> list[tuple[int, int]]:
    """For each question: how many drafts stand, and the next token. logits [rows, vocab]"""
    chosen = draw(logits, *_rows(questions, len(logits)))
    most = max(len(q.drafts) for q in questions)
    table = [[*q.drafts, *[-1] * (most - len(q.drafts)), q.row, len(q.drafts)] for q in questions]
    told = torch.tensor(table, device=logits.device)  # [chains, most + 2]
    drafts, first, length = (x.contiguous() for x in (told[:, :most], told[:, most], told[:, most + 1]))
    return [(accepted, token) for accepted, token in torch.stack(judge(chosen, drafts, first, length), 1).tolist()]


def draw(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token per row of logits [rows, vocab], at its position in its path: [rows] int64, on the device."""
    if not any(sampling.temperature for sampling in samplings):
        return sample_logits(logits)[0]
    position = torch.tensor(positions, device=logits.device)
    return sample_logits(logits, seeds(samplings, logits.device), position, temperatures(samplings, logits.device))[0]


def seeds(samplings: Sequence[Sampling], device: torch.device) -> Tensor:
    """[rows] int64 with the bits of the unsigned seeds."""
    return torch.tensor([s.seed - 2**64 if s.seed >= 2**63 else s.seed for s in samplings], device=device)


def temperatures(samplings: Sequence[Sampling], device: torch.device) -> Tensor:
    """[rows] float64; 0: greedy."""
    return torch.tensor([float(s.temperature) for s in samplings], dtype=torch.float64, device=device)


def _rows(questions: Sequence[Question], rows: int) -> tuple[list[Sampling], list[int]]:
    """Sampling and position of every row; rows that nobody asks about are greedy."""
    samplings, positions = [Sampling()] * rows, [0] * rows
    for q in questions:
        for i in range(len(q.drafts) + 1):
            samplings[q.row + i], positions[q.row + i] = q.sampling, q.position + i
    return samplings, positions
