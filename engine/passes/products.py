"""`Products`: canonical matrix products on a CPU, in the variants that the certificate allows for each shape.

| variant | what runs                                                | where                                                |
|---------|----------------------------------------------------------|------------------------------------------------------|
| tile    | the library's product on zero-padded tiles of 16 rows    | everywhere: on one thread this defines the bits      |
| counts  | the library's product on certified other row counts      | long inputs; the few rows of an expert               |
| packed  | the product with a weight that was packed once (MKL)     | short inputs, any row count, down to a single row    |

The doctor certifies only variants that give the same bits, so they differ in speed alone. On more than one thread, a library
may split the sum of a product. Every number of threads is therefore certified separately (`Allowed`); what is not allowed
runs on one thread. A product of few rows spends most of its time packing the weight, so the packed variant is worth a second
copy of the weights in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from replaylens.engine.model import modes
from replaylens.engine.model.layers import Linear
from replaylens.engine.passes.batch import TILE

Shape = tuple[int, int]
"""(inputs, outputs) of a product"""
RowCounts = dict[Shape, tuple[int, ...]]
"""shape -> row counts, largest first, that give the bits of the 16-row tile on one thread. Shapes of experts may have counts
below the tile"""
PACKED_ROWS = 64
"""most rows for which the packed variant is faster; beyond, packing on every call costs little"""


@dataclass(frozen=True)
class Allowed:
    """The variants that give canonical bits on one number of threads."""

    row_counts: RowCounts
    packed: frozenset[Shape] = frozenset()
    """shapes whose packed weights give canonical bits at any row count"""

    def serves(self, shape: Shape) -> bool:
        """Whether some variant computes inputs of few rows."""
        return shape in self.packed or TILE in self.row_counts.get(shape, ())


def tiled(x: Tensor, out: Tensor, counts: tuple[int, ...], product: Callable[[Tensor, Tensor], object]) -> Tensor:
    """Call `product(rows of x, rows of out)` on pieces that cover x. Their sizes are in `counts`, largest first."""
    for first, end in _pieces(x.shape[0], counts):
        product(x[first:end], out[first:end])
    return out


@lru_cache(maxsize=1024)
def _pieces(rows: int, counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """[first, end) of pieces that cover `rows` rows."""
    found, done = [], 0
    while done < rows:
        count = next(c for c in counts if c <= rows - done)
        found.append((done, done + count))
        done += count
    return tuple(found)


def tile_product(x: Tensor, weight: Tensor, counts: tuple[int, ...] = (TILE,)) -> Tensor:
    """x [rows, inputs], rows a multiple of 16, times weight [inputs, outputs] -> [rows, outputs]. Defines the bits."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    if x.shape[0] in counts:
        return torch.mm(x, weight, out=out)
    return tiled(x, out, counts, lambda a, b: torch.mm(a, weight, out=b))


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch can pack the weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkl.is_available()


def pack(weight: Tensor) -> Tensor:
    """A packed copy of a weight [inputs, outputs], for `packed_product` only."""
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.t().contiguous(), PACKED_ROWS)
    return packed


def packed_product(x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inputs] times weight [inputs, outputs], whose packed copy is `packed`: [rows, outputs]."""
    # The last argument of the call is the number of rows that the weight was packed for. If it differs from len(x), the
    # library silently uses the plain weight. The layout does not depend on it; the doctor checks every number in use.
    if len(x) == 1:  # the library would use its matrix-vector kernel, which sums in another order
        return packed_product(torch.cat([x, torch.zeros_like(x)]), packed, weight)[:1]
    out: Tensor = torch.ops.mkl._mkl_linear(x, packed, weight.t(), None, len(x))
    return out


class Products:
    """The canonical products of one model. Packs each weight at its first use: weights must not change afterwards."""

    def __init__(self, allowed: Mapping[int, Allowed]) -> None:
        """allowed  by number of threads; on one thread, shapes that are not listed run in tiles"""
        self.allowed = allowed
        self._packs: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    @property
    def tile(self) -> int:
        """The number of rows must be a multiple of this."""
        one = self.allowed[1]
        return 1 if one.packed and one.packed == one.row_counts.keys() else TILE

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """x [rows, inputs] -> [rows, outputs]"""
        out = self.product(x, linear.weight)
        return out if linear.bias is None else out.add_(linear.bias)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        """x [rows, d] times the transposed table [vocab, d] -> [rows, vocab]"""
        return self.product(x, table.t())

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, heads, inputs] times weight [heads, inputs, outputs], head by head: [rows, heads, outputs]"""
        heads = zip(x.transpose(0, 1).contiguous(), weight, strict=True)
        return torch.stack([self.product(one, each) for one, each in heads], dim=1)

    def few(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `product`, of any number of rows: those of one expert, filled up to the smallest certified count."""
        one, shape = self.allowed[1], (weight.shape[0], weight.shape[1])
        missing = 0 if shape in one.packed else -len(x) % one.row_counts.get(shape, (TILE,))[-1]
        if not missing:
            return self.product(x, weight)
        filled = x.new_zeros(len(x) + missing, x.shape[1])
        filled[: len(x)] = x
        return self.product(filled, weight)[: len(x)]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, inputs] times weight [inputs, outputs] -> [rows, outputs].

        As many rows as certified on the current number of threads, the rest on one.
        """
        shape, threads = (weight.shape[0], weight.shape[1]), torch.get_num_threads()
        one = self.allowed[1]
        if threads == 1:
            return self._product_here(x, weight, one.row_counts.get(shape, (TILE,)), shape in one.packed)
        here = self.allowed.get(threads, _NOTHING)
        counts = here.row_counts.get(shape, ())
        whole = len(x) - len(x) % counts[-1] if counts else 0
        if shape in here.packed or whole == len(x):
            return self._product_here(x, weight, counts, shape in here.packed)
        out = x.new_empty(len(x), weight.shape[1])
        tiled(x[:whole], out[:whole], counts, lambda a, b: torch.mm(a, weight, out=b))
        with modes.threads(1):
            out[whole:] = self.product(x[whole:], weight)
        return out

    def _product_here(self, x: Tensor, weight: Tensor, counts: tuple[int, ...], pack: bool) -> Tensor:
        """On the current number of threads. Either `counts` add up to all rows, or the weight is packed."""
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
        where = weight.data_ptr(), weight.stride()  # a weight and its transpose lie at one address
        if where not in self._packs:
            with modes.threads(1):  # as in the doctor, because the layout is opaque
                self._packs[where] = (weight, pack(weight))  # the weight stays alive, so that its address is not reused
        return self._packs[where][1]


_NOTHING = Allowed({})
