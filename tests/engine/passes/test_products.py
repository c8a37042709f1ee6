"""The products of a model: packed once, with the same bits at any number of rows. `tests/kernels/test_cpu.py` has the rest."""

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.model.layers import Linear, Narrow
from replaylens.engine.passes import cpu as products
from replaylens.engine.passes.cpu import Products
from tests.engine.reference import decoder
from tests.toy_model import random_model


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


def test_a_packed_weight_reads_as_before() -> None:
    """Of a product, and of the embedding, which is stored the other way round than it is multiplied."""
    for module, name, turned in ((linear(True), "weight", False), (random_model(), "embed", True)):
        before = getattr(module, name).clone()
        shape = tuple(before.mT.shape if turned else before.shape)
        assert module.shape_of(name) == shape and torch.equal(module.stored(name), before)
        assert module.pack(name) and module.pack(name)  # the second time it is packed already
        assert name in module.panels and module.shape_of(name) == shape
        assert torch.equal(getattr(module, name), before) and torch.equal(module.stored(name), before)


def test_a_weight_in_bfloat16_that_loses_nothing() -> None:
    given = torch.arange(6.0).reshape(2, 3)
    held = Narrow.of(given)
    assert held is not None and held.tensor.dtype == torch.bfloat16 and held.shape == (2, 3)
    for turned in (False, True):
        for found in (held.weight(turned), *held.pieces(turned)):
            assert found.dtype == torch.float32 and torch.equal(found, given.mT if turned else given)
    assert Narrow.of(given + 2**-12) is None
