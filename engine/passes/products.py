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

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from replaylens.engine.errors import BadCertificate
from replaylens.engine.model import modes
from replaylens.engine.model.layers import Linear
from replaylens.engine.passes.batch import KV_BLOCK, TILE
from replaylens.engine.records import Positive, read

# ---- products --------------------------------------------------------------------------------------------------------

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


# ---- batched ---------------------------------------------------------------------------------------------------------
# Batched products of attention on a CPU: torch's, or NumPy's where they are faster and give the same bits.
#
# Without MKL, `torch.bmm` starts one product after another, and starting one takes longer than a small product itself (four
# microseconds on the machine of the benchmarks). NumPy's loop over its own BLAS library takes a third of that. The two
# libraries need not agree, so every process compares them on the shapes of its model before it uses NumPy's.

BatchedProduct = Callable[[Tensor, Tensor], Tensor]
"""[batch, m, k] times [batch, k, n] -> [batch, m, n]"""
_MAX_SIZE = 3 << 16
"""m * k * n up to which NumPy is used: below the size at which BLAS libraries start threads (OpenBLAS: 1 << 18)"""
_MAX_KEYS = 4 * KV_BLOCK
"""the most keys for which it is used: the comparison covers every number up to this one"""


def by_torch(a: Tensor, b: Tensor) -> Tensor:
    """Defines the bits."""
    return torch.bmm(a, b)


def small_by_numpy(a: Tensor, b: Tensor) -> Tensor:
    """`by_torch`, with small products by NumPy."""
    batch, m, k = a.shape
    n = b.shape[2]
    if not _is_small(m, k, n):
        return by_torch(a, b)
    out = a.new_empty(batch, m, n)
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    return out


def _is_small(m: int, k: int, n: int) -> bool:
    """For a single row (m = 1), libraries have kernels that sum in another order."""
    return m > 1 and n <= _MAX_KEYS and m * k * n <= _MAX_SIZE


def batched_product(query_rows: tuple[int, ...], group: int, d_head: int) -> BatchedProduct:
    """The fastest product with the bits of `by_torch`, for pieces of these sizes and `group` query heads per key head."""
    if torch.backends.mkl.is_available():  # torch then has batched products of its own
        return by_torch
    return small_by_numpy if _all_agree(torch.bmm, np.matmul, query_rows, group, d_head) else by_torch


@lru_cache(maxsize=64)
def _all_agree(_torch: object, _numpy: object, query_rows: tuple[int, ...], group: int, d_head: int) -> bool:
    """Compares once per pair of functions and shape."""
    with modes.canonical(1), torch.inference_mode():
        return all(_agree(rows * group, d_head) for rows in query_rows)


def _agree(m: int, d_head: int) -> bool:
    """Whether both give the same bits for m queries: scores of up to `_MAX_KEYS` keys, and sums over a block of values."""
    generator = torch.Generator().manual_seed(m)
    random = lambda *shape: torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)  # noqa: E731
    q, keys = random(3, m, d_head), random(3, _MAX_KEYS, d_head)
    weights = random(3, m, _MAX_KEYS).exp_() * (random(3, m, _MAX_KEYS) > 0)  # hidden keys have weight 0
    for n in range(KV_BLOCK, _MAX_KEYS + 1, KV_BLOCK):
        turned = keys[:, :n].clone().transpose(1, 2)
        block, values = weights[..., :n].clone()[..., n - KV_BLOCK :], keys[:, n - KV_BLOCK : n]
        for a, b in ((q, turned), (block, values)):
            if _is_small(m, a.shape[2], b.shape[2]) and not torch.equal(small_by_numpy(a, b), by_torch(a, b)):
                return False
    return True


# ---- certificate -----------------------------------------------------------------------------------------------------
# `Certificate`: the ops and shapes that were shown to give canonical bits on this device.

ShapeText = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,8}x[1-9][0-9]{0,8}\Z")]
"""inputs x outputs"""


@dataclass(frozen=True)
class Finding:
    """One comparison of bits."""

    op: str
    shape: str
    check: str
    equal: bool
    control: bool = False
    """a negative control: it must differ for at least one shape, or the comparison proves nothing"""
    threads: int = 1
    """variants that differ on more than one thread are not used, so they are no failure"""

    @property
    def passed(self) -> bool:
        return self.control or self.equal or self.threads > 1


@dataclass(frozen=True)
class Certificate:
    """The doctor's findings. The engine uses only what is listed here. Canonical bits are those of one thread."""

    allowed: dict[int, Allowed]
    """allowed products by number of threads, starting with one; all other ops have canonical bits on each of these numbers"""
    query_rows: tuple[int, ...]
    """query rows per attention piece that give the bits of the reference piece on all these threads, smallest first"""
    findings: tuple[Finding, ...]

    @property
    def threads(self) -> tuple[int, ...]:
        """The certified numbers of threads."""
        return tuple(self.allowed)

    @property
    def row_counts(self) -> RowCounts:
        """On one thread."""
        return self.allowed[1].row_counts

    @property
    def packed(self) -> frozenset[Shape]:
        """On one thread."""
        return self.allowed[1].packed

    def threads_for(self, limit: int) -> int:
        """The fastest certified number of threads up to `limit`, taking a product's time as proportional to its weights."""
        return min((n for n in self.allowed if n <= limit), key=lambda n: (self._cost(n), -n))

    def _cost(self, threads: int) -> float:
        """Relative time of a pass of few rows. Products that are not certified on `threads` threads run on one."""
        some = self.allowed[threads]
        return sum(k * n / (threads if some.serves((k, n)) else 1) for k, n in self.row_counts)

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if not f.passed]

    @property
    def has_teeth(self) -> bool:
        """Whether at least one negative control differed, as it must."""
        return any(f.control and not f.equal for f in self.findings)

    @property
    def certified(self) -> bool:
        return not self.failures and self.has_teeth

    def to_json(self) -> str:
        return json.dumps(
            {
                "certified": self.certified,
                "threads": {str(count): _allowed_json(some) for count, some in self.allowed.items()},
                "query_rows": list(self.query_rows),
                "findings": [asdict(f) for f in self.findings],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Certificate":
        """The inverse of `to_json`; BadCertificate names the first field that is not of its type."""
        record = read(_CertificateRecord, text, "The certificate", BadCertificate)
        if 1 not in record.threads:
            raise BadCertificate("The certificate is invalid: it does not cover one thread - at `$.threads`.")
        allowed = {count: some.allowed() for count, some in record.threads.items()}
        return cls({1: allowed[1]} | allowed, record.query_rows, record.findings)


@dataclass(frozen=True)
class _AllowedRecord:
    row_counts: dict[ShapeText, tuple[Positive, ...]]
    packed: tuple[ShapeText, ...]

    def allowed(self) -> Allowed:
        counts = {_shape(text): rows for text, rows in self.row_counts.items()}
        return Allowed(counts, frozenset(map(_shape, self.packed)))


@dataclass(frozen=True)
class _CertificateRecord:
    """What `Certificate.to_json` writes. Whether it is certified follows from the findings."""

    certified: bool
    threads: dict[Positive, _AllowedRecord]
    query_rows: tuple[Positive, ...]
    findings: tuple[Finding, ...]


def _allowed_json(some: Allowed) -> dict[str, Any]:
    counts = {f"{k}x{n}": list(c) for (k, n), c in sorted(some.row_counts.items())}
    return {"row_counts": counts, "packed": [f"{k}x{n}" for k, n in sorted(some.packed)]}


def _shape(text: str) -> Shape:
    inputs, outputs = text.split("x")
    return int(inputs), int(outputs)
