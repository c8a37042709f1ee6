"""Edits of packed rows: add a vector, replace by a vector, replace by zeros; scale back to a length.

Edits are elementwise, hence canonical. Lengths are sums over one row, in the launch shape of the norms, which is fixed per
width and never splits a row. Which row is edited, and by which vector, is data: one captured graph serves any edits at the same
sites.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import (
    EXACT,
    ceil_div,
    norm_shape,
    require,
    require_float,
    require_rows,
    require_same,
    require_shape,
)

KEEP, ADD, SET, ZERO = range(4)
"""codes of a row"""
_BLOCK = 1024


@triton.jit
def _edit_kernel(X, CODES, INDEX, TABLE, OUT, width, stride_x, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    code = tl.load(CODES + row)
    x = tl.load(X + row * stride_x + column, mask=inside, other=0.0)
    used = inside & ((code == 1) | (code == 2))
    value = tl.load(TABLE + tl.load(INDEX + row).to(tl.int64) * width + column, mask=used, other=0.0)
    total = (x.to(tl.float32) + value.to(tl.float32)).to(OUT.dtype.element_ty)
    # a kept row must keep its bits: adding zero would turn -0 into 0
    y = tl.where(code == 0, x, tl.where(code == 1, total, value))
    tl.store(OUT + row * width + column, y, mask=inside)


def edit_rows(x: Tensor, codes: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """x [rows, width] after the edits: row i is kept, has table[index[i]] added, is that row, or is zero, as codes[i] says.

    codes, index [rows] int32; table [vectors, width], at least one row
    """
    require_float("x", x)
    require_rows("x", x)
    require(x.dim() == 2, "x has shape {}. Expected [rows, width].", x.shape)
    rows, width = x.shape
    require_shape("codes", codes, (rows,))
    require_shape("index", index, (rows,))
    require(
        codes.dtype == index.dtype == torch.int32, "codes and index are {} and {}. Expected int32.", codes.dtype, index.dtype
    )
    require_shape("table", table, (None, width))
    require_same("table", table, x)
    require(table.is_contiguous(), "table has strides {}. It must be contiguous.", table.stride())
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        _edit_kernel[(rows, ceil_div(width, _BLOCK))](
            x, codes, index, table, out, width, x.stride(0), _BLOCK, num_warps=4, **EXACT
        )
    return out


@triton.jit(do_not_specialize=["vectors", "heads"])
def _length_kernel(
    BEFORE, AFTER, KEPT, OUT, vectors, heads, width, stride_b, stride_a, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    vector = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row, first = vector // heads, (vector % heads) * width
    mask = (vector[:, None] < vectors) & (column[None, :] < width)
    at = first[:, None] + column[None, :]
    before = tl.load(BEFORE + row[:, None] * stride_b + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(AFTER + row[:, None] * stride_a + at, mask=mask, other=0.0)
    after = y.to(tl.float32)
    kept = tl.load(KEPT + row, mask=vector < vectors, other=0) != 0
    length = tl.where(kept, tl.sqrt_rn(tl.sum(after * after, 1)), 1.0)  # others may have length 0
    factor = tl.div_rn(tl.sqrt_rn(tl.sum(before * before, 1)), length)
    scaled = (after * factor[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + vector[:, None] * width + column[None, :], tl.where(kept[:, None], scaled, y), mask=mask)


def keep_lengths(before: Tensor, after: Tensor, kept: Tensor, heads: int = 1) -> Tensor:
    """after [rows, heads * width]: rows with `kept` scaled to the lengths that their vectors have in `before`.

    kept [rows] int32; each of the `heads` vectors of a row has its own length
    """
    require_float("before", before)
    rows, total = before.shape
    for name, x in (("before", before), ("after", after)):
        require_shape(name, x, (rows, total))
        require_same(name, x, before)
        require_rows(name, x)
    require_shape("kept", kept, (rows,))
    require(kept.dtype == torch.int32, "kept is {}. Expected int32.", kept.dtype)
    require(total % heads == 0, "before has width {}. It must be a multiple of {} heads.", total, heads)
    out = torch.empty(rows, total, dtype=before.dtype, device=before.device)
    if rows:
        shape = norm_shape(total // heads)
        _length_kernel[(ceil_div(rows * heads, shape.rows),)](
            before, after, kept, out, rows * heads, heads, total // heads, before.stride(0), after.stride(0),
            shape.rows, shape.block, num_warps=shape.warps, **EXACT,
        )  # fmt: skip
    return out
