from itertools import product

import pytest

from replaylens.kernels import reference
from replaylens.kernels.norm import PLAIN, activation


@pytest.mark.parametrize(("kind", "gated"), [*product(PLAIN, (False, True)), ("clamped_swiglu", True)])
def test_agrees_with_float64_and_rows_stand_alone(case, same, kind, gated):
    rows, width = (129, 3000) if case.gpu else (17, 70)
    x = case.randn(rows, width, scale=4.0)
    got = activation(x, kind, gated, out=case.poison(rows, width // (2 if gated else 1)))
    case.close(got, reference.activation(x.double(), kind, gated))
    same(activation(x[5:6], kind, gated), got[5:6])


def test_errors_say_what_is_wrong(case):
    with pytest.raises(ValueError, match="Use one of silu, gelu, gelu_tanh, relu"):
        activation(case.randn(2, 4), "swish", False)
    with pytest.raises(ValueError, match="even width"):
        activation(case.randn(2, 5), "silu", True)
    with pytest.raises(ValueError, match="clamped_swiglu needs a gate"):
        activation(case.randn(2, 4), "clamped_swiglu", False)
