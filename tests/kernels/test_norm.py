from itertools import product

import pytest
import torch

from replaylens.kernels import reference
from replaylens.kernels.norm import PLAIN, activation, norm, norm_pair, norm_scale

KINDS = ["rms", "layer"]


def weights(case, width, kind):
    return case.randn(width, seed=1), case.randn(width, seed=2) if kind == "layer" else None


def number_of_rows(case, width):
    """More than one program has; each wide row has its own."""
    return 129 if case.gpu else 17 if width < 1000 else 5


def double(x):
    return None if x is None else x.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [24, 576, 4096])
def test_agrees_with_float64_and_rows_stand_alone(case, same, kind, width):
    rows = number_of_rows(case, width)
    x = case.randn(rows, width, scale=3.0) + 1
    weight, bias = weights(case, width, kind)
    got = norm(x, weight, bias, 1e-5, kind, out=case.poison(rows, width))
    case.close(got, reference.norm(x.double(), weight.double(), double(bias), 1e-5, kind))
    for start, count in ((0, 1), (3, 3), (rows - 1, 1)):
        same(norm(x[start : start + count], weight, bias, 1e-5, kind), got[start : start + count])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [24, 576, pytest.param(4096, marks=pytest.mark.slow)])
def test_scale_is_what_the_norm_divides_by_and_rows_stand_alone(case, same, kind, width):
    rows = number_of_rows(case, width)
    x = case.randn(rows, width, scale=3.0) + 1
    scale = norm_scale(x, 1e-5, kind)
    assert scale.shape == (rows, 1) and scale.dtype == torch.float32
    want = reference.norm_scale(x.double(), 1e-5, kind)
    assert float(((scale.double() - want) / want).abs().max()) < 1e-6
    for start, count in ((0, 1), (3, 3), (rows - 1, 1)):
        same(norm_scale(x[start : start + count], 1e-5, kind), scale[start : start + count])
    plain = norm(x, torch.ones_like(x[0]), None, 1e-5, kind)
    case.close(plain, reference.norm(x.double(), torch.ones_like(x[0]).double(), None, 1e-5, kind))
    heads = case.randn(5, 7, width)
    same(norm_scale(heads[:, 1:4], 1e-5, kind)[:, 1], norm_scale(heads[:, 2].contiguous(), 1e-5, kind))


def test_heads_of_a_packed_product(case, same):
    packed = case.randn(5, 7, 64)
    weight, _ = weights(case, 64, "rms")
    same(norm(packed[:, 1:4], weight), norm(packed[:, 1:4].contiguous(), weight))
    same(norm(packed[:, 1:4], weight)[:, 1], norm(packed[:, 2].contiguous(), weight))


@pytest.mark.parametrize(("width", "total"), [(36, 48), (20, 32), (64, 68)])
def test_one_row_of_a_packed_product_has_the_bits_that_it_has_among_others(case, same, width, total):
    """The view of one row tells other strides than the view of several; an odd start lies at another kind of address."""
    packed, weight = case.randn(9, total), case.randn(width, seed=1)
    full, scales = norm(packed[:, :width], weight), norm_scale(packed[:, :width])
    same(full, norm(packed[:, :width].contiguous(), weight))
    same(full, norm(torch.cat([packed[:, :1], packed], dim=1)[:, 1 : 1 + width], weight))
    for row in range(9):
        one = packed[row : row + 1].clone()[:, :width].reshape(1, width)
        same(norm(one, weight), full[row : row + 1])
        same(norm_scale(one), scales[row : row + 1])


def test_a_large_mean_costs_nothing(case):
    """Squares are summed after the mean is subtracted."""
    if case.dtype != torch.float32:
        pytest.skip("a large mean leaves no digits in 16 bits")
    x = case.randn(3, 512) + 1000
    weight, bias = weights(case, 512, "layer")
    want = reference.norm(x.double(), weight.double(), bias.double(), 1e-5, "layer")
    case.close(norm(x, weight, bias, 1e-5, "layer"), want, slack=50)


def test_errors_say_what_is_wrong(case):
    x, w = case.randn(2, 8), case.randn(8)
    with pytest.raises(ValueError, match="Use rms or layer"):
        norm(x, w, kind="batch")
    with pytest.raises(ValueError, match="weight has shape"):
        norm(x, w[:4])


def test_two_weights_in_one_launch_move_no_bit(case, same):
    """Queries and keys of one packed product: a view with other vectors behind them."""
    for width in (128, 24):
        packed = case.randn(5, 9, width, seed=width)
        weights = (case.randn(width, seed=1), case.randn(width, seed=2))
        got = norm_pair(packed[:, :7], 4, weights, 1e-6, "rms")
        same(got[:, :4].contiguous(), norm(packed[:, :4], weights[0], None, 1e-6, "rms"))
        same(got[:, 4:].contiguous(), norm(packed[:, 4:7], weights[1], None, 1e-6, "rms"))


# ---- activation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "gated"), [*product(PLAIN, (False, True)), ("clamped_swiglu", True)])
def test_activations_agree_with_float64_and_rows_stand_alone(case, same, kind, gated):
    rows, width = (129, 3000) if case.gpu else (17, 70)
    x = case.randn(rows, width, scale=4.0)
    got = activation(x, kind, gated, out=case.poison(rows, width // (2 if gated else 1)))
    case.close(got, reference.activation(x.double(), kind, gated))
    same(activation(x[5:6], kind, gated), got[5:6])


def test_errors_of_activations(case):
    with pytest.raises(ValueError, match="Use one of silu, gelu, gelu_tanh, relu"):
        activation(case.randn(2, 4), "swish", False)
    with pytest.raises(ValueError, match="even width"):
        activation(case.randn(2, 5), "silu", True)
    with pytest.raises(ValueError, match="clamped_swiglu needs a gate"):
        activation(case.randn(2, 4), "clamped_swiglu", False)
