"""`Products`: how a canonical matrix product is computed on a CPU, shape by shape, as the certificate allows.

| variant | what runs                                                | where                                                |
|---------|----------------------------------------------------------|------------------------------------------------------|
| tile    | the library's product on zero-padded tiles of 16 rows    | everywhere: on one thread this defines the bits      |
| counts  | the library's product on certified larger row counts     | long inputs                                          |
| packed  | the product with a weight that was packed once (MKL)     | short inputs, any row count, down to a single row    |

All variants give the same bits, or the doctor does not certify them; they only differ in speed. On more than one thread a
library may split the sum of a product, so every number of threads has a certificate of its own (`Allowed`). What it does
not allow runs on one thread. A product of few rows spends most of its time on packing the weight, so the packed variant is
worth a second copy of the weights in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.model import modes
from replaylens.engine.model.ops import Linear
from replaylens.engine.passes.batch import TILE

Shape = tuple[int, int]
"""(inputs, outputs) of a product"""
RowCounts = dict[Shape, tuple[int, ...]]
"""shape -> row counts, largest first, that give the bits of the 16-row tile on one thread"""
PACKED_ROWS = 64
"""up to this many rows the packed variant is the faster one; beyond it, the library packs as it goes"""


@dataclass(frozen=True)
class Allowed:
    """Which variants give the canonical bits on some number of threads."""

    row_counts: RowCounts
    packed: frozenset[Shape] = frozenset()
    """shapes whose packed weights do, at any row count"""

    def serves(self, shape: Shape) -> bool:
        """Whether inputs of few rows can be computed."""
        return shape in self.packed or TILE in self.row_counts.get(shape, ())


def tiled(x: Tensor, out: Tensor, counts: tuple[int, ...], product: Callable[[Tensor, Tensor], object]) -> Tensor:
    """Run `product(rows of x, rows of out)` over pieces whose sizes are among `counts` (largest first), which add up to all."""
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

    def __init__(self, allowed: Mapping[int, Allowed]) -> None:
        """allowed  by number of threads; on one, every shape that is not there runs in tiles"""
        self.allowed = allowed
        self._packs: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def tile(self) -> int:
        """Rows must come in multiples of this."""
        one = self.allowed[1]
        return 1 if one.packed and one.packed == one.row_counts.keys() else TILE

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """x [rows, inputs] -> [rows, outputs]"""
        out = self._product(x, linear.weight)
        return out if linear.bias is None else out.add_(linear.bias)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        """x [rows, d] with a table [vocab, d] -> [rows, vocab]"""
        return self._product(x, table.t())

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """As far as possible on the threads that are set, the rest on one."""
        shape, threads = (weight.shape[0], weight.shape[1]), torch.get_num_threads()
        one, here = self.allowed[1], self.allowed.get(threads, _NOTHING)
        counts, all_counts = (each.row_counts.get(shape, ()) for each in (here, one))
        whole = len(x) - len(x) % counts[-1] if counts else 0
        if threads == 1:
            return self._product_here(x, weight, all_counts or (TILE,), shape in one.packed)
        if shape in here.packed or whole == len(x):
            return self._product_here(x, weight, counts, shape in here.packed)
        out = x.new_empty(len(x), weight.shape[1])
        tiled(x[:whole], out[:whole], counts, lambda a, b: torch.mm(a, weight, out=b))
        with modes.threads(1):
            out[whole:] = self._product_here(x[whole:], weight, all_counts or (TILE,), shape in one.packed)
        return out

    def _product_here(self, x: Tensor, weight: Tensor, counts: tuple[int, ...], pack: bool) -> Tensor:
        """On the threads that are set. Pieces of `counts` rows add up to all rows, or the weight is packed."""
        if not pack:
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
            with modes.threads(1):  # as the doctor packs: the layout is the library's secret
                self._packs[where] = (weight, pack(weight))  # the weight is kept too: no other can take its address
        return self._packs[where][1]


_NOTHING = Allowed({})
