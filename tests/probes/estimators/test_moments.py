"""Streaming moments: the same bits however the rows are split into chunks, and correct against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens.probes.erasers import CHUNK, StreamingStatistics
from replaylens.probes.errors import BadRows

ROWS = torch.randn(3 * CHUNK + 17, 12, generator=torch.Generator().manual_seed(0)) + 2


def moments(pieces: list[int], rows: torch.Tensor = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    statistics, at = StreamingStatistics(rows.shape[1]), 0
    for piece in pieces:
        statistics.add(rows[at : at + piece])
        at += piece
    statistics.add(rows[at:])
    return statistics.moments()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 400), max_size=8))
def test_pieces_do_not_move_a_bit(pieces: list[int]) -> None:
    whole, cut = moments([]), moments(pieces)
    assert torch.equal(whole[0], cut[0]) and torch.equal(whole[1], cut[1])


def test_order_is_part_of_the_result() -> None:
    """Negative control: another order of rows gives other bits."""
    whole, flipped = moments([]), moments([], ROWS.flip(0))
    assert not (torch.equal(whole[0], flipped[0]) and torch.equal(whole[1], flipped[1]))


def test_moments_are_right() -> None:
    mean, covariance = moments([5, 300])
    exact = ROWS.double()
    assert torch.allclose(mean, exact.mean(0), atol=1e-12)
    assert torch.allclose(covariance, torch.cov(exact.T, correction=0), atol=1e-10)


def test_bad_rows_are_refused() -> None:
    with pytest.raises(BadRows, match=r"shape \[n, 3\]"):
        StreamingStatistics(3).add(torch.zeros(2, 4))
    with pytest.raises(BadRows, match="No rows were added"):
        StreamingStatistics(3).moments()
