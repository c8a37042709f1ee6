"""Drafts that are drawn together on the device: the tokens that each request draws by itself."""

from types import SimpleNamespace

import pytest
import torch

from replaylens.engine.loop.commit import _drawn_together
from replaylens.engine.loop.lane import Job, Lane, Turn, Window
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.request.sampling import Sampling


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_drawn_together_as_one_by_one(device: str) -> None:
    """Rows in another order than the turns, windows of different lengths, different seeds and temperatures."""
    logits = 3 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    rows, turns = [4, 0, 6, 1], []
    for i, (temperature, length) in enumerate([(0.7, 5), (1.0, 9), (2.0, 3), (1.0, 30)]):
        job = Job(Lane(i, PageTable()), sampling=Sampling(temperature=temperature, seed=i))
        job.window_open = Window(length, 4, list(range(i)))
        turns.append(Turn(job, length - 1, [1], complete=True, drafting=True))
    result = SimpleNamespace(logits=logits.to(device))
    found = _drawn_together(turns, result, dict(zip(turns, rows, strict=True)))  # type: ignore[arg-type]
    for i, (turn, row) in enumerate(zip(turns, rows, strict=True)):
        path = [0] * (turn.end + i)
        assert found[turn] == turn.job.sampling.choose(logits[row].numpy(), path, 1)
    other = turns[0].job.sampling.choose(logits[rows[0]].numpy(), [0] * 2, 1)
    assert other != found[turns[0]], "negative control: the position matters"
