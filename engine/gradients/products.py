"""The products of a backward pass: by the CPU's library, or by the kernels of a GPU."""

from typing import Protocol

import torch
from torch import Tensor

from replaylens.engine.model.layers import Linear

_FEW_ROWS = 64
"""up to which the CPU's product runs with the weight in front"""


class BackwardProducts(Protocol):
    """Gradients are float32. A product's bits depend on the path alone."""

    @property
    def certified(self) -> bool:
        """False: a product was found whose bits are not promised."""
        ...

    def linear(self, g: Tensor, linear: Linear) -> Tensor:
        """The gradient of a product [rows, outputs] -> of its input [rows, inputs]."""
        ...

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, n] times weight [n, m], in float32"""
        ...

    def unembed(self, g: Tensor, table: Tensor) -> Tensor:
        """g [rows, vocab] times table [vocab, d_model]"""
        ...

    def batched(self, x: Tensor, w: Tensor) -> Tensor:
        """x [batch, m, k] times w [batch, k, n], both float32"""
        ...


class HostProducts:
    """The library's products, on one thread, in shapes that follow from the path."""

    certified = True

    def linear(self, g: Tensor, linear: Linear) -> Tensor:
        """The order of the factors depends on the number of rows only, as bits must."""
        if len(g) <= _FEW_ROWS:  # CPU libraries take half as long again for few rows times a transposed weight
            return torch.mm(linear.weight, g.t()).t().contiguous()
        return torch.mm(g, linear.weight.t())

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, weight)

    def unembed(self, g: Tensor, table: Tensor) -> Tensor:
        return torch.mm(g, table)

    def batched(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x, w)
