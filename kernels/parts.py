"""Portable products on a GPU: x [M, K] in float32 times w [K, N], stored in float32 or, where it loses nothing, in bfloat16.

An output is eight chains of fused multiply-adds over equal parts of K, added as a tree (`kernels/definition.py`), so that no
tensor core takes part. Four ways give the same bits:

* few rows: one program computes all parts of its columns at once, so that as many weights as possible are in flight;
* more rows, few tiles: each part of a tile has its own program, and a second kernel adds the parts;
* many tiles: a program computes the parts of its tile one after another;
* `lines`: few columns of several products, as the first, in one launch.

A sum that is cut off by a mask goes on with -1 * 0, which leaves every accumulator as it is, also -0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.gpus import gpu_of, num_multiprocessors
from replaylens.kernels.launch import (
    EXACT,
    FEW,
    GemmTile,
    ceil_div,
    fitted,
    next_power_of_2,
    require,
    require_float,
    require_shape,
)

PARTS = tl.constexpr(8)
_DIRECT = 64
"""most rows that read bfloat16 weights as they are; for more, they are widened once per product"""
_WIDENED = 1 << 25
"""most numbers of a weight that are widened together"""
_LINES = GemmTile(4, 32, 32, 4, 4)
"""the tile of `lines`: programs enough for 64 rows at a few sites; it has fewer columns where 16 or 8 are enough"""

# ---- inside kernels --------------------------------------------------------------------------------------------------


@triton.jit
def finish(
    acc, row, column, M, N, BIAS, RESIDUAL, OUT, stride_r, stride_o,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Bias, rounding and residual: what follows the sum in every product."""
    mask = (row[:, None] < M) & (column[None, :] < N)
    row = row.to(tl.int64)
    if HAS_BIAS:
        acc += tl.load(BIAS + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    y = acc.to(OUT.dtype.element_ty)
    if HAS_RESIDUAL:
        r = tl.load(RESIDUAL + row[:, None] * stride_r + column[None, :], mask=mask, other=0.0)
        y = (r.to(tl.float32) + y.to(tl.float32)).to(OUT.dtype.element_ty)
    tl.store(OUT + row[:, None] * stride_o + column[None, :], y, mask=mask)


@triton.jit
def _chain(
    X, W, row, column, M, N, begin, end, stride_xm, stride_xk, stride_wk, stride_wn, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One chain per output, over the inputs [begin, end). EVEN: DEPTH divides them, and there is no row or column too many."""
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = X + row.to(tl.int64)[:, None] * stride_xm + k.to(tl.int64)[None, :] * stride_xk
        w = W + k.to(tl.int64)[:, None] * stride_wk + column.to(tl.int64)[None, :] * stride_wn
        if EVEN:
            a, b = tl.load(x), tl.load(w)
        else:
            a = tl.load(x, mask=(row[:, None] < M) & (k[None, :] < end), other=-1.0)
            b = tl.load(w, mask=(k[:, None] < end) & (column[None, :] < N), other=0.0)
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def dot_parts(
    X, W, row, column, M, N, K, stride_xm, stride_xk, stride_wk, stride_wn, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x[row] @ w[:, column]: the parts one after another. A part is added as soon as the other half of its pair is known."""
    one = tl.zeros((ROWS, COLUMNS), tl.float32)
    two = one
    four = one
    for part in range(PARTS):
        acc = _chain(
            X, W, row, column, M, N, part * K // PARTS, (part + 1) * K // PARTS, stride_xm, stride_xk, stride_wk, stride_wn,
            ROWS, COLUMNS, DEPTH, EVEN,
        )  # fmt: skip
        if part % 2 == 0:
            one = acc
        elif part % 4 == 1:
            two = one + acc
        elif part == 3:
            four = two + (one + acc)
        else:
            four = four + (two + (one + acc))
    return four


@triton.jit
def _pairs(x, HALF: tl.constexpr, SIZE: tl.constexpr):
    """[2 HALF, SIZE] -> [HALF, SIZE]: neighbours are added."""
    a, b = tl.split(tl.permute(tl.reshape(x, (HALF, 2, SIZE)), (0, 2, 1)))
    return a + b


@triton.jit
def _tree(parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[8, ROWS * COLUMNS] -> [ROWS, COLUMNS]: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))"""
    found = _pairs(_pairs(_pairs(parts, 4, ROWS * COLUMNS), 2, ROWS * COLUMNS), 1, ROWS * COLUMNS)
    return tl.reshape(found, (ROWS, COLUMNS))


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _side_by_side(
    X, W, column, N, K, stride_wk, stride_wn, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Rows at the addresses X [1, ROWS, 1] @ w[:, column]. The parts are a dimension of the tile: chains [8, ROWS, COLUMNS].
    EVEN: 8 DEPTH divides K, and COLUMNS N."""
    part, lane = tl.arange(0, PARTS), tl.arange(0, DEPTH)
    begin, end = part * K // PARTS, (part + 1) * K // PARTS
    acc = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    for start in range(0, tl.cdiv(K, PARTS), DEPTH):
        k = begin[:, None] + start + lane[None, :]
        w = W + k.to(tl.int64)[:, :, None] * stride_wk + column.to(tl.int64)[None, None, :] * stride_wn
        if EVEN:
            a, b = tl.load(X + k[:, None, :]), tl.load(w)
        else:
            inside = k < end[:, None]
            a = tl.load(X + k[:, None, :], mask=inside[:, None, :], other=-1.0)
            b = tl.load(w, mask=inside[:, :, None] & (column < N)[None, None, :], other=0.0)
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return _tree(tl.reshape(acc, (PARTS, ROWS * COLUMNS)), ROWS, COLUMNS)


@triton.jit(do_not_specialize=["M"])
def _few_kernel(
    X, W, BIAS, RESIDUAL, OUT, M, N, K, stride_xm, stride_wk, stride_wn, stride_r, stride_o, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x = X + tl.minimum(row, M - 1).to(tl.int64)[None, :, None] * stride_xm  # the last row again in place of one too many
    y = _side_by_side(x, W, column, N, K, stride_wk, stride_wn, ROWS, COLUMNS, DEPTH, EVEN)
    finish(y, row, column, M, N, BIAS, RESIDUAL, OUT, stride_r, stride_o, HAS_BIAS, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["M"])
def _lines_kernel(
    X, W, BIAS, OUT, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """`_few_kernel` for several products, with rows X [products, M, K] in any dtype, which float32 holds exactly."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    product = tl.program_id(2).to(tl.int64)
    x = X + (product * M + tl.minimum(row, M - 1))[None, :, None] * K
    y = _side_by_side(x, W + product * K * N, column, N, K, N, 1, ROWS, COLUMNS, DEPTH, EVEN)
    finish(y, row, column, M, N, BIAS + product * N, X, OUT + product * M * N, N, N, True, False)


@triton.jit(do_not_specialize=["M"])
def _tiles_kernel(
    X, W, BIAS, RESIDUAL, OUT, M, N, K, stride_xk, stride_wk, stride_wn, stride_r, stride_o, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """X is [K, M and more]. SPLIT: one part per program, stored in OUT [8, M, N] as it is."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if SPLIT:
        part = tl.program_id(2)
        acc = _chain(
            X, W, row, column, M, N, part * K // PARTS, (part + 1) * K // PARTS, 1, stride_xk, stride_wk, stride_wn,
            ROWS, COLUMNS, DEPTH, EVEN,
        )  # fmt: skip
        out = OUT + (part.to(tl.int64) * M + row[:, None]) * N + column[None, :]
        tl.store(out, acc, mask=(row[:, None] < M) & (column[None, :] < N))
    else:
        acc = dot_parts(X, W, row, column, M, N, K, 1, stride_xk, stride_wk, stride_wn, ROWS, COLUMNS, DEPTH, EVEN)
        finish(acc, row, column, M, N, BIAS, RESIDUAL, OUT, stride_r, stride_o, HAS_BIAS, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["M"])
def _tree_kernel(
    X, BIAS, RESIDUAL, OUT, M, N, stride_r, stride_o, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Adds the parts X [8, M, N] of one row."""
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = (tl.arange(0, PARTS).to(tl.int64)[:, None] * M + tl.program_id(0)) * N + column[None, :]
    y = _tree(tl.load(X + at, mask=column[None, :] < N, other=0.0), 1, COLUMNS)
    finish(y, row, column, M, N, BIAS, RESIDUAL, OUT, stride_r, stride_o, HAS_BIAS, HAS_RESIDUAL)


# ---- launches --------------------------------------------------------------------------------------------------------


def parts_matmul(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: GemmTile) -> None:
    """Mutates `out` [M, N]: x [M, K] @ w [K, N] (+ bias) (+ residual). Precondition: shapes fit, and no dimension is 0."""
    rows, columns = len(x), w.shape[1]
    if tile.rows <= FEW:
        _few(x, w, bias, residual, out, tile)
    elif w.dtype == torch.float32 or rows <= _DIRECT:
        _tiled(x, w, bias, residual, out, tile)
    else:
        width = max(tile.columns, _WIDENED // w.shape[0] // tile.columns * tile.columns)
        for some in (slice(first, first + width) for first in range(0, columns, width)):
            wide = w[:, some].to(torch.float32, memory_format=torch.contiguous_format)
            more = (None if bias is None else bias[some], None if residual is None else residual[:, some])
            _tiled(x, wide, *more, out[:, some], tile)


def lines(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """x [products, M, K] in any dtype @ w [products, K, N] + bias [products, N] -> [products, M, N] in float32, in one launch.

    The bits are those of `parts_matmul` of the rows as float32, at any number of rows, columns and products.
    """
    count, rows, depth = x.shape
    columns = w.shape[2]
    require_float("x", x)
    require_shape("w", w, (count, depth, None))
    require_shape("bias", bias, (count, columns))
    for name, each in (("x", x), ("w", w), ("bias", bias)):
        require(each.is_contiguous(), "{} has strides {}. It must be contiguous.", name, each.stride())
    require(w.dtype == bias.dtype == torch.float32, "w and bias are {} and {}. Expected float32.", w.dtype, bias.dtype)
    out = torch.empty(count, rows, columns, dtype=torch.float32, device=x.device)
    if out.numel():
        tile = fitted(_LINES, torch.float32, gpu_of(x.device))
        width = min(tile.columns, max(8, next_power_of_2(columns)))
        even = depth % (8 * tile.depth) == 0 and columns % width == 0
        _lines_kernel[(ceil_div(columns, width), ceil_div(rows, tile.rows), count)](
            x, w, bias, out, rows, columns, depth, tile.rows, width, tile.depth, even,
            num_warps=tile.warps, num_stages=tile.stages, **EXACT,
        )  # fmt: skip
    return out


def _few(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: GemmTile) -> None:
    (rows, depth), columns = x.shape, w.shape[1]
    even = depth % (8 * tile.depth) == 0 and columns % tile.columns == 0
    extras, strides, flags = _extras(x, bias, residual, out)
    _few_kernel[(ceil_div(columns, tile.columns), ceil_div(rows, tile.rows))](
        x, w, *extras, out, rows, columns, depth, x.stride(0), *w.stride(), *strides, tile.rows, tile.columns, tile.depth, even,
        **flags, num_warps=tile.warps, num_stages=tile.stages, **EXACT,
    )  # fmt: skip


def _tiled(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, tile: GemmTile) -> None:
    (rows, depth), columns = x.shape, w.shape[1]
    grid = ceil_div(rows, tile.rows), ceil_div(columns, tile.columns)
    even = depth % (8 * tile.depth) == 0 and columns % tile.columns == 0
    extras, strides, flags = _extras(x, bias, residual, out)
    x = _by_input(x, grid[0] * tile.rows)
    split = grid[0] * grid[1] < 4 * num_multiprocessors(x.device)
    where = torch.empty(8, rows, columns, dtype=torch.float32, device=x.device) if split else out
    _tiles_kernel[(*grid, 8 if split else 1)](
        x, w, *extras, where, rows, columns, depth, x.stride(0), *w.stride(), *strides, tile.rows, tile.columns, tile.depth,
        even, split, **flags, num_warps=tile.warps, num_stages=tile.stages, **EXACT,
    )  # fmt: skip
    if split:
        _tree_kernel[(rows, ceil_div(columns, 256))](where, *extras, out, rows, columns, *strides, 256, **flags, **EXACT)


def _by_input(x: Tensor, rows: int) -> Tensor:
    """x [M, K] as [K, rows], so that threads read neighbouring rows at once. What fills up the rows is never stored."""
    out = torch.empty(x.shape[1], rows, dtype=x.dtype, device=x.device)
    out[:, : len(x)] = x.t()
    return out


Extras = tuple[tuple[Tensor, Tensor], tuple[int, int], dict[str, bool]]


def _extras(x: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Extras:
    """(bias, residual), the strides of residual and result, and the flags that say which of them count."""
    given = (x if bias is None else bias, x if residual is None else residual)
    return given, (given[1].stride(0), out.stride(0)), dict(HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None)
