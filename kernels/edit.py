"""Edits of packed rows: add a vector, replace by a vector, replace by zeros. Elementwise, hence canonical.

Which row is edited, and by which vector, is data: one captured graph serves any edits at the same sites.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import EXACT, ceil_div, require, require_float, require_rows, require_same, require_shape

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
