"""`RowProduct` and `KernelProduct`: the canonical product of an encoder, on a CPU and on a GPU.

A row's bits depend neither on the other rows nor on the number of threads. On a CPU, it is the engine's product on zero-padded
tiles of 16 rows, on one thread (`engine/passes/products.py`); on a GPU, that of `kernels/matmul.py`. The doctor examines the
shapes of the model only, so the encoder's shape is examined here, at its first use. On a CPU these are tiles, and for many rows
a larger count, which is used if it gives the bits of the tiles.
"""

import torch
from torch import Tensor

from replaylens.engine.errors import NotCertified
from replaylens.engine.passes.batch import TILE
from replaylens.engine.passes.products import tile_product

MANY = 128
"""rows of the larger count"""


class RowProduct:
    """The product with one weight, which must not change afterwards."""

    def __init__(self, weight: Tensor) -> None:
        """weight  [inputs, outputs]"""
        self.weight = weight
        self._certified = False
        self._counts: tuple[int, ...] | None = None
        """None: the larger count was not examined yet"""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [n, inputs] -> [n, outputs]. Precondition: within `modes.canonical`. Raises NotCertified."""
        if not self._certified:
            self._examine()
        if self._counts is None and len(rows) >= MANY:
            many = self._random(MANY)
            same = torch.equal(_padded(many, self.weight, (MANY, TILE)), _padded(many, self.weight))
            self._counts = (MANY, TILE) if same else (TILE,)
        return _padded(rows, self.weight, self._counts or (TILE,))

    def _examine(self) -> None:
        """Mutates: certified, or NotCertified if the bits of a row depend on its tile."""
        rows = self._random(TILE)
        order = torch.randperm(TILE, generator=torch.Generator().manual_seed(1))
        together = _padded(rows, self.weight)
        moved = torch.equal(_padded(rows[order], self.weight), together[order])
        alone = torch.equal(_padded(rows[3:4], self.weight), together[3:4])
        if not (moved and alone):
            raise _not_certified(self.weight)
        self._certified = True

    def _random(self, n: int) -> Tensor:
        return torch.randn(n, self.weight.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float32)


class KernelProduct:
    """The product with one weight on a GPU, which must not change afterwards."""

    def __init__(self, weight: Tensor) -> None:
        """weight  [inputs, outputs]"""
        self.weight = weight
        self._certified = False

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [n, inputs] -> [n, outputs], float32. Raises NotCertified."""
        from replaylens.kernels.matmul import matmul  # needs triton

        if not self._certified:
            self._examine()
        return matmul(rows.contiguous(), self.weight)

    def _examine(self) -> None:
        """Mutates: certified, or NotCertified if the bits of a row depend on the number of rows."""
        from replaylens.kernels.matmul import matmul

        generator = torch.Generator(self.weight.device).manual_seed(0)
        many = torch.randn(TILE + 1, self.weight.shape[0], generator=generator, device=self.weight.device, dtype=torch.float32)
        together = matmul(many, self.weight)
        parts = (slice(0, 1), slice(3, 4), slice(1, 10))
        if not all(torch.equal(matmul(many[some], self.weight), together[some]) for some in parts):
            raise _not_certified(self.weight)
        self._certified = True


def _not_certified(weight: Tensor) -> NotCertified:
    return NotCertified(
        f"On this machine, a product of shape {list(weight.shape)} gives a row other bits in another tile, so "
        "features would depend on the rows they are encoded with. Run `replaylens doctor`; use another build of torch."
    )


def _padded(rows: Tensor, weight: Tensor, counts: tuple[int, ...] = (TILE,)) -> Tensor:
    """The product on zero-padded tiles."""
    n = len(rows)
    padded = rows.new_zeros(-(-n // TILE) * TILE, rows.shape[1])  # a new tensor, so that its alignment is always the same
    padded[:n] = rows
    return tile_product(padded, weight, counts)[:n]
