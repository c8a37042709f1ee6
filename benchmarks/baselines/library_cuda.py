"""`LibraryCudaOps`: the library's products and attention beside our elementwise kernels; needs triton."""

from torch import Tensor

from benchmarks.baselines.library import PAGE, Attend, ContiguousCache, LibraryOps
from replaylens.engine.model.layers import Rotary
from replaylens.engine.model.ops import Heads
from replaylens.engine.passes.cuda import FastHeadOps
from replaylens.kernels.rope import rotate, rotate_and_store
from replaylens.kernels.shared import PagedRows


class LibraryCudaOps(LibraryOps, FastHeadOps):
    """One pass on the device."""

    def __init__(self, cache: ContiguousCache, rows: int, length: int, attend: Attend) -> None:
        super().__init__(cache, rows, length, attend)
        self.rows = PagedRows(self.sequence, self.positions.int(), cache.pages, max_keys=length)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        """In 16 bits: to choose a token, the library needs no more."""
        return x @ table.t()

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        return rotate(x, rotary.table, self.rows)

    def _store(self, heads: Heads, layer: int) -> Tensor:
        assert heads.rotary is not None
        keys, values = self.cache.data[layer]
        table = heads.rotary.table
        return rotate_and_store(heads.q, heads.k, heads.v, table, self.rows, keys, values, page_size=PAGE)
