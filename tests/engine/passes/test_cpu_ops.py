"""The CPU's own implementations of row operations give the bits of `TorchOps`."""

import pytest
import torch

from replaylens.engine.model.config import Rope
from replaylens.engine.model.layers import Linear, Norm, Rotary, rotary_table
from replaylens.engine.model.ops import TorchOps
from replaylens.engine.passes.cpu import CpuOps

ROWS = (1, 2, 3, 16, 17, 130)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 3


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", [8, 17, 96, 576])
def test_norms(kind: str, width: int) -> None:
    norm = Norm(width, kind, 1e-5)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in norm.parameters():  # uninitialised memory
            parameter.copy_(values(width))
        for rows in ROWS:
            for shape in ((rows, width), (rows, 3, width)):
                assert torch.equal(CpuOps().norm(values(*shape), norm), TorchOps().norm(values(*shape), norm))


@pytest.mark.parametrize("rotary_dim", [4, 10, 16])
def test_rotary(rotary_dim: int) -> None:
    table = rotary_table(Rope(), rotary_dim, 200)
    for rows in ROWS:
        rotary = Rotary(table, torch.arange(rows) + 5)
        qkv = values(rows, 9, 16)
        for heads in (qkv[:, :5], qkv[:, 5:7]):  # as in a pass: views of one product
            assert torch.equal(CpuOps().rotate(heads, rotary), TorchOps().rotate(heads, rotary))


def test_rotary_keeps_the_sign_of_zero() -> None:
    rotary = Rotary(rotary_table(Rope(), 8, 40), torch.arange(32))
    heads = torch.zeros(32, 2, 12)
    heads[:, 1] = -0.0
    heads[::3, :, ::2] = 1.0
    ours, theirs = CpuOps().rotate(heads, rotary), TorchOps().rotate(heads, rotary)
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert (ours.view(torch.int32) == -(2**31)).any(), "control: there are negative zeros"


def test_products_that_are_added() -> None:
    linear = Linear(24, 40, bias=True)
    with torch.no_grad():
        linear.weight.copy_(values(24, 40))
        linear.bias.copy_(values(40))  # type: ignore[union-attr]
        for rows in ROWS:
            x, residual = values(rows, 24), values(rows, 40)
            assert torch.equal(CpuOps().linear_add(x, linear, residual), TorchOps().linear_add(x, linear, residual))
