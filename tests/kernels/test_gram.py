import pytest
import torch

from replaylens.kernels import reference
from replaylens.kernels.gram import gram
from replaylens.kernels.launch import GRAM_CHUNK

BOUND = {torch.float32: 1e-6, torch.float64: 1e-13}


@pytest.mark.parametrize("inner", [torch.float32, torch.float64])
def test_agrees_with_float64(case, inner):
    rows, width, labels = (5000, 300, 17) if case.gpu else (600, 70, 9)
    x, y = case.randn(rows, width) + 0.5, case.randn(rows, labels, seed=1)
    for got, want in (
        (gram(x, inner=inner), reference.gram(x.double())),
        (gram(x, y, inner=inner), reference.gram(x.double(), y.double())),
    ):
        assert (got - want).norm() / want.norm() < BOUND[inner]


@pytest.mark.parametrize("inner", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_of_whole_chunks_are_one_call(case, same, dtype, inner):
    x = case.randn(2 * GRAM_CHUNK + 76, 40)
    whole = gram(x, dtype=dtype, inner=inner)
    same(whole, whole.T.contiguous())
    pieces = gram(x[:GRAM_CHUNK], dtype=dtype, inner=inner)
    gram(x[GRAM_CHUNK:], out=pieces, dtype=dtype, inner=inner)
    same(pieces, whole)


def test_pieces_cut_elsewhere_move_bits(case):
    """Negative control: the chunk is part of the order."""
    x = case.randn(GRAM_CHUNK + 76, 40)
    other = gram(x[:100])
    gram(x[100:], out=other)
    assert not torch.equal(other, gram(x))


def test_an_entry_of_a_batch_does_not_know_the_others(case, same):
    x, y = case.randn(3, 70, 40), case.randn(3, 70, 5, seed=1)
    same(gram(x)[1], gram(x[1]))
    same(gram(x, y)[1], gram(x[1], y[1]))


def test_columns_do_not_know_their_neighbours(case, same):
    x, y = case.randn(70, 150), case.randn(70, 90, seed=1)
    same(gram(x, y)[100:129, 64:], gram(x[:, 100:129].contiguous(), y[:, 64:].contiguous()))


def test_errors_say_what_is_wrong(case):
    x = case.randn(8, 4)
    with pytest.raises(ValueError, match="y has shape"):
        gram(x, x[:4])
    with pytest.raises(ValueError, match="float64 rows need"):
        gram(x.double())
    with pytest.raises(ValueError, match=r"out is torch\.float16"):
        gram(x, out=torch.zeros(4, 4, dtype=torch.float16, device=case.device))
