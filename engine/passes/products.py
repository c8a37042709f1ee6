"""`Products`: the matrix products of one model on a CPU, in portable arithmetic.

A product has the same bits at any number of rows, on any number of threads and on any machine (`kernels/cpu.py`), so nothing
is padded and nothing has to be tried out. Weights are packed into panels at their first use.
"""

from torch import Tensor

from replaylens.engine.model.layers import Linear
from replaylens.kernels.cpu import Panels, product


class Products:
    """The products of one model. Packs each weight at its first use: weights must not change afterwards."""

    def __init__(self) -> None:
        self._panels: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Tensor, Panels]] = {}

    def linear(self, x: Tensor, linear: Linear, residual: Tensor | None = None) -> Tensor:
        """x [rows, inputs] -> [rows, outputs], plus the residual stream, if given"""
        return product(rows_of(x), self.panels(linear.weight), linear.bias, None if residual is None else rows_of(residual))

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, heads, inputs] times weight [heads, inputs, outputs], head by head: [rows, heads, outputs]"""
        out = x.new_empty(*x.shape[:2], weight.shape[2])
        for head, each in enumerate(weight):
            out[:, head] = self.product(x[:, head], each)
        return out

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, inputs] times weight [inputs, outputs], of any strides -> [rows, outputs]"""
        return product(rows_of(x), self.panels(weight))

    def panels(self, weight: Tensor) -> Panels:
        """The weight as products read it."""
        where = weight.data_ptr(), weight.stride(), tuple(weight.shape)
        if where not in self._panels:
            self._panels[where] = (weight, Panels.of(weight))  # the weight stays alive, so that its address is not reused
        return self._panels[where][1]


def rows_of(x: Tensor) -> Tensor:
    """Rows [rows, width] that lie in memory as kernels read them: each of them contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
