"""`Products`: the matrix products of one model on a CPU, in portable arithmetic.

A product has the same bits at any number of rows, on any number of threads and on any machine (`kernels/cpu.py`), so nothing
is padded and nothing has to be tried out. Weights are packed into panels at their first use.
"""

from torch import Tensor

from replaylens.engine.model.layers import Linear, Packable
from replaylens.kernels.cpu import PARTS, Panels, product


class Products:
    """The products of one model. Packs each weight at its first use: weights must not change afterwards."""

    def __init__(self, parts: int = PARTS) -> None:
        self.parts = parts
        self._of_modules: dict[tuple[Packable, str, bool], Panels] = {}
        self._panels: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Tensor, Panels]] = {}

    def linear(self, x: Tensor, linear: Linear, residual: Tensor | None = None) -> Tensor:
        """x [rows, inputs] -> [rows, outputs], plus the residual stream, if given"""
        more = None if residual is None else rows_of(residual)
        return product(rows_of(x), self.of(linear), linear.bias, more, self.parts)

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, heads, inputs] times weight [heads, inputs, outputs], head by head: [rows, heads, outputs]"""
        out = x.new_empty(*x.shape[:2], weight.shape[2])
        for head, each in enumerate(weight):
            out[:, head] = self.product(x[:, head], each)
        return out

    def product(self, x: Tensor, weight: Tensor | Panels) -> Tensor:
        """x [rows, inputs] times weight [inputs, outputs], of any strides -> [rows, outputs]"""
        return product(rows_of(x), weight if isinstance(weight, Panels) else self.panels(weight), parts=self.parts)

    def of(self, module: Packable, name: str = "weight", turned: bool = False) -> Panels:
        """A module's weight as products read it; turned: transposed, for gradients."""
        held = module.panels.get(name)
        if not turned and isinstance(held, Panels):
            return held
        key = module, name, turned
        if key not in self._of_modules:
            weight = module.as_multiplied(name, getattr(module, name))
            self._of_modules[key] = Panels.of(weight.mT if turned else weight)
        return self._of_modules[key]

    def in_one_chain(self) -> "Products":
        """The same weights, each product summed as one chain: the fast path."""
        other = Products(parts=1)
        other._panels, other._of_modules = self._panels, self._of_modules
        return other

    def panels(self, weight: Tensor) -> Panels:
        """The weight as products read it."""
        where = weight.data_ptr(), weight.stride(), tuple(weight.shape)
        if where not in self._panels:
            self._panels[where] = (weight, Panels.of(weight))  # the weight stays alive, so that its address is not reused
        return self._panels[where][1]


def rows_of(x: Tensor) -> Tensor:
    """Rows [rows, width] that lie in memory as kernels read them: each of them contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
