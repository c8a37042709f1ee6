"""Gram matrices in a fixed order: X^T X and X^T Y for probes.

    G = sum over chunks c of ( sum over rows r in chunk c of x[r]^T y[r] )

Rows are cut into chunks of `GRAM_CHUNK` from the first row on. A chunk is summed in `inner` precision with one accumulator
per element in the order of the rows; chunk sums are added to the total in order, in the precision of `out`. With float32
inside and float64 totals the error does not grow with the number of rows, and the inner products of bf16 data run on tensor
cores. The total starts from what `out` holds: feeding rows in pieces whose lengths are multiples of `GRAM_CHUNK` gives the
bits of one call. X^T X is symmetric to the bit (products commute), so only one triangle is computed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import (
    EXACT,
    GRAM_CHUNK,
    ceil_div,
    gram_tile,
    require,
    require_rows,
    require_same,
    require_shape,
)


@triton.jit(do_not_specialize=["rows"])
def _gram_kernel(
    X, Y, OUT, rows, width_x, width_y, stride_xb, stride_xr, stride_yb, stride_yr, stride_ob, stride_o,
    CHUNK: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, DOUBLE: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix of the batch."""
    ti, tj = tl.program_id(0), tl.program_id(1)
    if SYMMETRIC:
        if tj < ti:
            return
    batch = tl.program_id(2).to(tl.int64)
    i, j, r = ti * BLOCK + tl.arange(0, BLOCK), tj * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    x = X + batch * stride_xb + r.to(tl.int64)[:, None] * stride_xr + i[None, :]
    y = Y + batch * stride_yb + r.to(tl.int64)[:, None] * stride_yr + j[None, :]
    out = OUT + batch * stride_ob + i.to(tl.int64)[:, None] * stride_o + j[None, :]
    mask = (i[:, None] < width_x) & (j[None, :] < width_y)
    total = tl.load(out, mask=mask, other=0.0)
    inner: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    for chunk in range(0, rows, CHUNK):
        acc = tl.zeros((BLOCK, BLOCK), inner)
        for start in range(chunk, tl.minimum(chunk + CHUNK, rows), DEPTH):
            inside = start + r[:, None] < rows
            a = tl.load(x, mask=inside & (i[None, :] < width_x), other=0.0)
            b = tl.load(y, mask=inside & (j[None, :] < width_y), other=0.0)
            acc = tl.dot(a.T, b, acc, input_precision="ieee", out_dtype=inner)
            x += DEPTH * stride_xr
            y += DEPTH * stride_yr
        total += acc.to(total.dtype)
    tl.store(out, total, mask=mask)
    if SYMMETRIC:
        mirror = OUT + batch * stride_ob + j.to(tl.int64)[None, :] * stride_o + i[:, None]
        tl.store(mirror, total, mask=mask & (ti < tj))


def gram(
    x: Tensor,
    y: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    inner: torch.dtype = torch.float32,
) -> Tensor:
    """X^T X [d, d] or X^T Y [d, t] of x [rows, d], y [rows, t]; with a leading batch dimension, one matrix per entry.

    `out` is added to and returned (a new one starts at zero in `dtype`). `inner`: float32 sums within a chunk, or float64
    for products and sums in double precision (narrower rows are converted first, which takes memory for a copy).
    """
    require(x.dim() in (2, 3), "x has shape {}; expected [rows, d] or [batch, rows, d]", x.shape)
    require(x.dtype.is_floating_point, "x is {}; expected a float", x.dtype)
    require(inner in (torch.float32, torch.float64), "inner is {}; expected float32 or float64", inner)
    require(x.dtype != torch.float64 or inner == torch.float64, "float64 rows need inner=torch.float64")
    if inner == torch.float64:
        x, y = x.double(), None if y is None else y.double()
    y_ = x if y is None else y
    if x.dim() == 2:
        return gram(x[None], None if y is None else y[None], None if out is None else out[None], dtype, inner)[0]
    require_shape("y", y_, (x.shape[0], x.shape[1], None))
    require_same("y", y_, x)
    require_rows("x", x)
    require_rows("y", y_)
    batch, rows, width = x.shape
    if out is None:
        out = torch.zeros(batch, width, y_.shape[2], dtype=dtype, device=x.device)
    require_shape("out", out, (batch, width, y_.shape[2]))
    require(out.dtype in (torch.float32, torch.float64), "out is {}; expected float32 or float64", out.dtype)
    require_rows("out", out)
    tile = gram_tile(x.dtype, out.dtype)
    if batch and rows:
        _gram_kernel[(ceil_div(width, tile.rows), ceil_div(y_.shape[2], tile.rows), batch)](
            x, y_, out, rows, width, y_.shape[2], x.stride(0), x.stride(1), y_.stride(0), y_.stride(1),
            out.stride(0), out.stride(1), GRAM_CHUNK, tile.depth, tile.rows, inner == torch.float64, y is None,
            num_warps=tile.warps, num_stages=tile.stages, **EXACT,
        )  # fmt: skip
    return out
