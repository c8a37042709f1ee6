"""Batched products of attention on a CPU: torch's, or NumPy's where they are faster and give the same bits.

Without MKL, `torch.bmm` starts one product after another, and starting one takes longer than a small product itself (four
microseconds on the machine of the benchmarks). NumPy's loop over its own BLAS library takes a third of that. The two libraries
need not agree, so every process compares them on the shapes of its model before it uses NumPy's.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.model import modes
from replaylens.engine.passes.batch import KV_BLOCK

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
