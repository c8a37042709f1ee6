"""Canonical products: x [M, K] @ w [K, N], with the same bits for a row at any M.

    y = round(sum_k x[m, k] w[k, n] + bias[n])            out = round(residual[m, n] + y)

**Why the bits do not move.** Each output element has one float32 accumulator that adds the products in the order of k,
from first to last. Tensor cores add groups of 16 (bf16, fp16) in a way that depends on the group alone, so neither the tile
shape nor the number of rows matters. The tiles in `launch` are chosen by M for speed only. Zeros that pad the last step
along K leave an accumulator unchanged. Splitting K over programs depending on M would break this; libraries do so at few
rows. float32 is portable arithmetic: eight chains of fused multiply-adds over equal parts of K, added as a tree
(`kernels/exact.py`), never tf32.

**Fusing moves no bits.** y is rounded to the storage dtype before the residual is added, exactly as if it were written to
memory first. The residual stream is the same whether y is captured or not.

**Two kernels.** `_rows_kernel`: one program per tile, any shape, stride and dtype. `_persistent_kernel`: one program per
multiprocessor, tiles fed by the bulk tensor copy engine, for many rows. Weights may be stored [K, N] or be a transposed
view of [N, K], at about the same speed. `_batched_kernel` computes many small products at once, in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from replaylens.kernels.gpus import gpu_of, num_multiprocessors
from replaylens.kernels.grouped import grouped_matmul
from replaylens.kernels.launch import (
    EXACT,
    FLOATS,
    GemmTile,
    ceil_div,
    gemm_tile,
    grouped_rows,
    persistent_pays,
    require,
    require_float,
    require_rows,
    require_same,
    require_shape,
    require_weight,
)
from replaylens.kernels.parts import dot_parts, finish, parts_matmul
from replaylens.kernels.route import Plan

# ---- matmul ----------------------------------------------------------------------------------------------------------

_STORED = (torch.float32, torch.bfloat16)
"""dtypes of rows and weights, if float32 weights are stored in bfloat16"""
ROW_GROUP = 8  # row tiles that share columns in flight, so that weights are read from the cache


@triton.jit
def dot_tile(
    X,
    W,
    row,
    column,
    M,
    N,
    K,
    stride_xm,
    stride_wk,
    stride_wn,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """The float32 accumulators of x[row] @ w[:, column], in the canonical order. Every kernel with a product uses it."""
    if X.dtype.element_ty == tl.float32:
        return dot_parts(X, W, row, column, M, N, K, stride_xm, 1, stride_wk, stride_wn, ROWS, COLUMNS, DEPTH, False)
    else:
        return _dot_chain(
            X, W, row, column, M, N, K, stride_xm, stride_wk, stride_wn, ROWS, COLUMNS, DEPTH, EVEN_K, EVEN_N
        )  # fmt: skip


@triton.jit
def _dot_chain(
    X, W, row, column, M, N, K, stride_xm, stride_wk, stride_wn, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """One accumulator per output, by tensor cores."""
    k = tl.arange(0, DEPTH)
    x = X + row.to(tl.int64)[:, None] * stride_xm + k[None, :]
    w = W + k.to(tl.int64)[:, None] * stride_wk + column.to(tl.int64)[None, :] * stride_wn
    x_mask, w_mask = row[:, None] < M, column[None, :] < N
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN_K:
            a = tl.load(x, mask=x_mask, other=0.0)
            b = tl.load(w) if EVEN_N else tl.load(w, mask=w_mask, other=0.0)
        else:
            a = tl.load(x, mask=x_mask & (k[None, :] < K - start), other=0.0)
            b = tl.load(w, mask=w_mask & (k[:, None] < K - start), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x += DEPTH
        w += DEPTH * stride_wk
    return acc


@triton.jit(do_not_specialize=["M"])  # one binary for every number of rows
def _rows_kernel(
    X, W, BIAS, RESIDUAL, OUT, M, N, K, stride_xm, stride_wk, stride_wn, stride_r, stride_o,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = dot_tile(
        X, W, row, column, M, N, K, stride_xm, stride_wk, stride_wn, ROWS, COLUMNS, DEPTH, EVEN_K, EVEN_N
    )  # fmt: skip
    finish(acc, row, column, M, N, BIAS, RESIDUAL, OUT, stride_r, stride_o, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def tile_at(index, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile: down GROUP row tiles, then right, so that consecutive tiles share weights."""
    tiles_m = tl.cdiv(M, ROWS)
    tiles_n = tl.cdiv(N, COLUMNS)
    group = index // (GROUP * tiles_n)
    first = group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = index - group * GROUP * tiles_n
    return (first + within % height) * ROWS, (within // height) * COLUMNS


@triton.jit(do_not_specialize=["M"])
def _persistent_kernel(
    x_tiles, w_tiles, BIAS, RESIDUAL, OUT, M, N, K, stride_r, stride_o,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, W_TRANSPOSED: tl.constexpr,
    PROGRAMS: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, ROWS) * tl.cdiv(N, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, PROGRAMS):
        m, n = tile_at(index, M, N, ROWS, COLUMNS, GROUP)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, K, DEPTH):  # the copy engine pads with zeros past the edges
            a = x_tiles.load([m, k])
            b = w_tiles.load([n, k]).T if W_TRANSPOSED else w_tiles.load([k, n])
            acc = tl.dot(a, b, acc, input_precision="ieee")
        row = m + tl.arange(0, ROWS)
        column = n + tl.arange(0, COLUMNS)
        finish(acc, row, column, M, N, BIAS, RESIDUAL, OUT, stride_r, stride_o, HAS_BIAS, HAS_RESIDUAL)


def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: GemmTile | None = None,
) -> Tensor:
    """x [M, K] @ w [K, N] (+ bias [N]) (+ residual [M, N]) -> [M, N].

    `out` may be `residual` itself. `out_dtype=torch.float32` keeps the accumulators unrounded, for logits. `tile` overrides
    the launch table and moves no bit.
    """
    rows, depth, columns = _check_product(x, w)
    out = _output(out, (rows, columns), out_dtype or x.dtype, x)
    if bias is not None:
        require_shape("bias", bias, (columns,))
        require_same("bias", bias, x)
    if residual is not None:
        require_shape("residual", residual, (rows, columns))
        require_same("residual", residual, out)
        require_rows("residual", residual)
    if not rows:
        return out
    if tile is None:
        transposed = w.stride(0) == 1
        persistent = (persistent_pays(rows) or transposed) and copyable(x, w)
        tile = gemm_tile(rows, depth, columns, x.dtype, gpu_of(x.device), transposed, persistent)
    if x.dtype == torch.float32:
        parts_matmul(x, w, bias, residual, out, tile)
        return out
    extras = (bias if bias is not None else x, residual if residual is not None else x)
    flags = dict(HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None)
    strides = (extras[1].stride(0), out.stride(0))
    options = dict(num_warps=tile.warps, num_stages=tile.stages, **EXACT)
    if tile.persistent and copyable(x, w):
        programs = min(num_multiprocessors(x.device), ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns))
        _persistent_kernel[(programs,)](
            *tiles_of(x, w, tile), *extras, out, rows, columns, depth, *strides,
            tile.rows, tile.columns, tile.depth, w.stride(0) == 1, programs, ROW_GROUP, **flags,
            **options,
        )  # fmt: skip
        return out
    grid = (ceil_div(rows, tile.rows), ceil_div(columns, tile.columns))
    _rows_kernel[grid](
        x, w, *extras, out, rows, columns, depth, x.stride(0), w.stride(0), w.stride(1), *strides,
        tile.rows, tile.columns, tile.depth, depth % tile.depth == 0, columns % tile.columns == 0, **flags, **options,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _batched_kernel(
    X, W, OUT, M, N, K, stride_xb, stride_xm, stride_wb, stride_wk, stride_wn, stride_ob, stride_om,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    batch = tl.program_id(2).to(tl.int64)
    acc = dot_tile(
        X + batch * stride_xb, W + batch * stride_wb, row, column, M, N, K, stride_xm, stride_wk, stride_wn,
        ROWS, COLUMNS, DEPTH, EVEN_K, EVEN_N,
    )  # fmt: skip
    mask = (row[:, None] < M) & (column[None, :] < N)
    out = OUT + batch * stride_ob + row.to(tl.int64)[:, None] * stride_om + column[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=mask)


def batched_matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [batch, M, K] @ w [batch, K, N] -> [batch, M, N]: `matmul` for each entry, to the bit. w may have any strides."""
    require(x.dim() == w.dim() == 3, "x and w have shapes {} and {}. Expected three dimensions.", x.shape, w.shape)
    batch, rows, depth = x.shape
    require_float("x", x)
    require_rows("x", x)
    require_shape("w", w, (batch, depth, None))
    require_weight("w", w, x)
    columns = w.shape[2]
    out = torch.empty(batch, rows, columns, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = gemm_tile(rows, depth, columns, x.dtype, gpu_of(x.device), False, False)
        _batched_kernel[(ceil_div(rows, tile.rows), ceil_div(columns, tile.columns), batch)](
            x, w, out, rows, columns, depth, x.stride(0), x.stride(1), *w.stride(), out.stride(0), out.stride(1),
            tile.rows, tile.columns, tile.depth, depth % tile.depth == 0, columns % tile.columns == 0,
            num_warps=tile.warps, num_stages=tile.stages, **EXACT,
        )  # fmt: skip
    return out


def tiles_of(x: Tensor, w: Tensor, tile: GemmTile) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of x and w for the copy engine. w is described in its memory layout."""
    transposed = w.stride(0) == 1
    stored = w.T if transposed else w
    block = [tile.columns, tile.depth] if transposed else [tile.depth, tile.columns]
    return TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]), TensorDescriptor.from_tensor(stored, block)


def copyable(x: Tensor, w: Tensor) -> bool:
    """Whether the copy engine can load tiles of both: base and rows must be 16-byte aligned, but not in the interpreter."""
    if not gpu_of(x.device).copies or x.device.type != "cuda":
        return gpu_of(x.device).copies
    wide = w.stride(1) if w.stride(0) == 1 else w.stride(0)
    lengths = (x.stride(0) * x.element_size(), wide * w.element_size(), x.data_ptr(), w.data_ptr())
    return all(n % 16 == 0 for n in lengths)


def _check_product(x: Tensor, w: Tensor) -> tuple[int, int, int]:
    """(M, K, N). Raises ValueError if the shapes do not fit. The common case is one expression: products are called often."""
    if (
        x.dim() == w.dim() == 2
        and x.shape[1] == w.shape[0] > 0 < w.shape[1]
        and (x.dtype == w.dtype or (x.dtype, w.dtype) == _STORED)
        and x.dtype in FLOATS
        and x.device == w.device
        and x.stride(1) == 1
        and 1 in w.stride()
    ):
        return x.shape[0], x.shape[1], w.shape[1]
    require(x.dim() == 2, "x has shape {}. Expected [rows, inputs].", x.shape)
    require_float("x", x)
    require_rows("x", x)
    require_shape("w", w, (x.shape[1], None))
    require_weight("w", w, x)
    require(1 in w.stride(), "w has strides {}. It must be contiguous or the transpose of a contiguous tensor.", w.stride())
    require(min(w.shape) > 0, "w has shape {}. It must not be empty.", w.shape)
    return x.shape[0], x.shape[1], w.shape[1]


def _output(out: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, x: Tensor) -> Tensor:
    """`out` after a check, or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=x.device)
    require_shape("out", out, shape)
    same = out.dtype == dtype and out.device == x.device
    require(same, "out is {} on {}. Expected {} on {}.", out.dtype, out.device, dtype, x.device)
    require_rows("out", out)
    return out


# ---- heads -----------------------------------------------------------------------------------------------------------
# Canonical products by head: each head of a row times the weight of that head.
#
#     out[r, h] = round(x[r, h] @ w[h])
#
# It is the grouped product (`kernels/grouped.py`) with heads in place of experts: one float32 accumulator per element,
# which adds in the order of k. So an element has the bits of `matmul(x[:, h], w[h])` at any number of rows.


def head_plan(rows: int, heads: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """The tiles of a product by head, which depend on the number of rows alone. Made on the device, so graphs can hold it."""
    number = torch.arange(heads, device=device)
    tile_rows = grouped_rows(rows * heads, heads, dtype)
    if rows <= 1:  # every pair is a tile of its own
        return Plan(number, number, number, tile_rows, planned=False)
    place = torch.arange(rows, device=device)
    order = (place * heads + number[:, None]).flatten().to(torch.int32)  # pairs by head
    first = torch.arange(ceil_div(rows, tile_rows), device=device) * tile_rows
    tiles = torch.zeros(heads, len(first), 4, dtype=torch.int32, device=device)
    tiles[..., 0] = number[:, None]
    tiles[..., 1] = number[:, None] * rows + first
    tiles[..., 2] = (rows - first).clamp(max=tile_rows)
    return Plan(tiles.flatten(0, 1), order, ((number + 1) * rows).to(torch.int32), tile_rows, planned=True)


def head_matmul(x: Tensor, w: Tensor, plan: Plan) -> Tensor:
    """x [rows, heads, inputs], w [heads, inputs, outputs] -> [rows, heads, outputs]. plan: that of these rows and heads"""
    require_shape("w", w, (x.shape[1], x.shape[2], None))
    return grouped_matmul(x.flatten(0, 1), w, None, plan, 1).unflatten(0, x.shape[:2])
