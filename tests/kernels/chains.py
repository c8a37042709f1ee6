"""Chains of fused multiply-adds for Triton's interpreter, as a device computes them."""

from typing import Any

import numpy as np
from numba import njit

from replaylens.kernels import portable


@njit(cache=True, error_model="numpy")
def _chain(a, b, out):  # type: ignore[no-untyped-def]
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            for j in range(b.shape[1]):
                out[i, j] = portable.fma(a[i, k], b[k, j], out[i, j])


@njit(cache=True, error_model="numpy")
def _fused(a, b, c, out):  # type: ignore[no-untyped-def]
    for i in range(len(a)):
        out[i] = portable.fma(a[i], b[i], c[i])


def chain(a: Any, b: Any, c: Any) -> Any:
    """a [m, k] times b [k, n], added to c [m, n] from the first k to the last; of three dimensions, one by one."""
    if c.dtype != np.float32:
        return np.matmul(a, b, dtype=c.dtype) + c
    if a.ndim == 3:
        return np.stack([chain(*each) for each in zip(a, b, c, strict=True)])
    out = np.array(c, order="C")
    _chain(np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32), out)
    return out


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    out = np.empty(a.shape, c.dtype)
    _fused(*(np.ascontiguousarray(x).reshape(-1) for x in (a, b, c)), out.reshape(-1))
    return out
