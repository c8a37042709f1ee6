"""The products of a backward pass on a GPU, by the canonical kernels: a row has the same bits at any number of rows.

Gradients are rounded to the weights' dtype before a product, as activations are in a forward pass, and summed in float32. The
doctor examines the products of the forward pass. Those with transposed weights are examined here, at the first use of a shape.
"""

import torch
from torch import Tensor

from replaylens.engine.model.layers import Linear, Packable
from replaylens.gradients.derivatives import Function
from replaylens.kernels.matmul import batched_matmul, matmul

_EXAMINED_ROWS = 33
_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
_known: dict[_Shape, bool] = {}
"""whether a row alone has the bits that it has among others, by the shape of the weight"""


class KernelProducts:
    """Every product in the order of `kernels/matmul.py`."""

    def __init__(self) -> None:
        self.certified = True

    def linear(self, g: Tensor, linear: Linear) -> Tensor:
        return self._product(g, linear.weight.t())

    def ahead(self, x: Tensor, linear: Linear) -> Tensor:
        return self._product(x, linear.weight)

    def weight(self, module: Packable, name: str, turned: bool = False) -> Tensor:
        weight = module.as_multiplied(name, getattr(module, name))
        return weight.mT if turned else weight

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._product(x, weight)

    def batched(self, x: Tensor, w: Tensor) -> Tensor:
        return batched_matmul(x.contiguous(), w)

    def total(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    def apply(self, name: Function, x: Tensor) -> Tensor:
        found: Tensor = getattr(torch, name)(x)
        return found

    def _product(self, g: Tensor, weight: Tensor) -> Tensor:
        """g [rows, n] times weight [n, m], in float32. Mutates: not certified if the shape was found not to be."""
        shape = weight.shape, weight.stride(), weight.dtype, weight.device
        if shape not in _known:
            _known[shape] = _examined(weight)
        self.certified = self.certified and _known[shape]
        return _rounded_product(g, weight)


def _rounded_product(g: Tensor, weight: Tensor) -> Tensor:
    return matmul(g.to(weight.dtype).contiguous(), weight, out_dtype=torch.float32)


def _examined(weight: Tensor) -> bool:
    """Whether one row, and a few, have the bits that they have among more."""
    generator = torch.Generator(weight.device).manual_seed(2024)
    rows = torch.randn(_EXAMINED_ROWS, len(weight), generator=generator, device=weight.device, dtype=torch.float32)
    together = _rounded_product(rows, weight)
    return all(torch.equal(_rounded_product(rows[:n], weight), together[:n]) for n in (1, 17))
