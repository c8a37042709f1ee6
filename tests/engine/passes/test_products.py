"""The products of a model: packed once, with the same bits at any number of rows. `tests/kernels/test_cpu.py` has the rest."""

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.model.layers import Linear
from replaylens.engine.passes import products
from replaylens.engine.passes.products import Products
from tests.engine.reference import decoder


def linear(bias: bool) -> Linear:
    torch.manual_seed(0)
    made = Linear(96, 80, bias)
    for parameter in made.parameters():
        parameter.data.normal_()
    return made.requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
def test_any_rows_of_any_strides(bias: bool) -> None:
    module, x, own = linear(bias), torch.randn(130, 96, generator=torch.Generator().manual_seed(1)), Products()
    together, exact = own.linear(x, module), x.double() @ module.weight.double()
    exact = exact if module.bias is None else exact + module.bias.double()
    assert (together.double() - exact).abs().max() < 1e-4
    for rows in (1, 2, 3, 15, 64, 65, 129):
        assert torch.equal(own.linear(x[:rows], module), together[:rows])
    assert torch.equal(own.linear(x.t().contiguous().t(), module), together)
    assert torch.equal(own.linear(x[::3], module), together[::3])
    assert torch.equal(own.linear(x, module, together), together + together)


def test_a_weight_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = decoder("llama"), list[Tensor]()
    real = products.Panels.of
    monkeypatch.setattr(products.Panels, "of", lambda weight: (packed.append(weight), real(weight))[1])
    served = Engine(model)
    served.prompt([3, 1, 4, 1, 5]).generate(9, window=4)
    before = len(packed)
    served.prompt([2, 7, 1]).generate(9, window=4)
    assert before and len(packed) == before
    module = linear(False)
    assert [module.pack("weight"), "weight" in module.panels, module.pack("weight")] == [True] * 3  # packed already is packed
