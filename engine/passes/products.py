"""`Products`: how a canonical matrix product is computed on a CPU, shape by shape, as the certificate allows.

| road    | what runs                                                | where                                                |
|---------|----------------------------------------------------------|------------------------------------------------------|
| tile    | the library's product on zero-padded tiles of 16 rows    | everywhere: this is what the canonical bits are      |
| counts  | the library's product on certified larger row counts     | long inputs                                          |
| packed  | the product with a weight that was packed once (MKL)     | short inputs, any row count, down to a single row    |

The roads give the same bits, or the doctor does not certify them; they only differ in speed. A product of few rows spends
most of its time on packing the weight, so the packed road is worth a second copy of the weights in memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from replaylens.engine.model.ops import Linear
from replaylens.engine.passes.batch import TILE

Shape = tuple[int, int]
"""(inputs, outputs) of a product"""
RowCounts = dict[Shape, tuple[int, ...]]
"""shape -> row counts, largest first and ending in 16, that give the bits of the 16-row tile"""
PACKED_ROWS = 64
"""up to this many rows the packed road is the faster one; beyond it, the library packs as it goes"""


def tiled(x: Tensor, out: Tensor, counts: tuple[int, ...], product: Callable[[Tensor, Tensor], object]) -> Tensor:
    """Run `product(rows of x, rows of out)` over pieces whose sizes are among `counts` (largest first, ending in 16)."""
    done = 0
    while done < len(x):
        count = next(c for c in counts if c <= len(x) - done)
        product(x[done : done + count], out[done : done + count])
        done += count
    return out


def tile_product(x: Tensor, weight: Tensor, counts: tuple[int, ...] = (TILE,)) -> Tensor:
    """x [rows, inputs], rows a multiple of 16, with a weight [inputs, outputs] -> [rows, outputs]. The meaning of the rest."""
    return tiled(x, x.new_empty(len(x), weight.shape[1]), counts, lambda a, b: torch.mm(a, weight, out=b))


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch can pack such a weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkl.is_available()


def pack(weight: Tensor) -> Tensor:
    """A packed copy of a weight [inputs, outputs]: opaque to all but `packed_product`."""
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.t().contiguous(), PACKED_ROWS)
    return packed


def packed_product(x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inputs] times the weight [inputs, outputs] whose packed copy is `packed`: [rows, outputs]."""
    # The last argument says for how many rows the weight was packed. At any other number the library would silently take
    # the plain weight; the layout does not depend on the number, which the doctor checks at every one that is used.
    if len(x) == 1:  # the library would take its matrix-vector kernel, which sums in another order
        return packed_product(torch.cat([x, torch.zeros_like(x)]), packed, weight)[:1]
    out: Tensor = torch.ops.mkl._mkl_linear(x, packed, weight.t(), None, len(x))
    return out


class Products:
    """The canonical products of one model. Packs a weight when it is first used: weights must not change afterwards."""

    def __init__(self, counts: RowCounts, packed: frozenset[Shape] = frozenset()) -> None:
        self.counts, self.packed = counts, packed
        self._packs: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def tile(self) -> int:
        """Rows must come in multiples of this."""
        return 1 if self.packed and self.packed == self.counts.keys() else TILE

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """x [rows, inputs] -> [rows, outputs]"""
        out = self._product(x, linear.weight)
        return out if linear.bias is None else out.add_(linear.bias)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        """x [rows, d] with a table [vocab, d] -> [rows, vocab]"""
        return self._product(x, table.t())

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        shape = (weight.shape[0], weight.shape[1])
        counts = self.counts.get(shape, (TILE,))
        if shape not in self.packed:
            return tile_product(x, weight, counts)
        packed = self._pack(weight)
        if len(x) <= PACKED_ROWS:
            return packed_product(x, packed, weight)
        large = tuple(count for count in counts if count > PACKED_ROWS)
        whole = len(x) - len(x) % large[-1] if large else 0
        out = x.new_empty(len(x), weight.shape[1])
        tiled(x[:whole], out[:whole], large, lambda a, b: torch.mm(a, weight, out=b))
        for first in range(whole, len(x), PACKED_ROWS):
            out[first : first + PACKED_ROWS] = packed_product(x[first : first + PACKED_ROWS], packed, weight)
        return out

    def _pack(self, weight: Tensor) -> Tensor:
        where = weight.data_ptr()
        if where not in self._packs:
            self._packs[where] = (weight, pack(weight))  # the weight is kept too, so that no other can take its address
        return self._packs[where][1]
