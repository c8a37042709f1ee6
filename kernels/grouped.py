"""Canonical grouped products: each (row, expert) pair of a mixture times the weights of its expert.

    hidden[p] = f(round(x[p // top] @ up[e] + up_bias[e]))           out[p] = round(hidden[p] @ down[e] + down_bias[e])

**Why the bits do not move.** A pair's element has one float32 accumulator that adds the products in the order of k, as
`kernels/matmul.py` does: its bits are those of `matmul(x, up[e])`, and the activation's those of `activation`, whatever the
number of pairs of an expert and whichever pairs share a tile.

**Cost.** A tile belongs to one expert. The weights of an expert are read once per tile, hence once if its pairs fit into one;
further tiles of the same expert run at about the same time and find them in the cache. Experts that nobody chose are not read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from replaylens.kernels.gpus import gpu_of
from replaylens.kernels.launch import (
    EXACT,
    GemmTile,
    ceil_div,
    grouped_tile,
    require,
    require_float,
    require_rows,
    require_same,
    require_shape,
    require_weight,
)
from replaylens.kernels.norm import KINDS, PLAIN, activate, activate_gated
from replaylens.kernels.parts import dot_parts
from replaylens.kernels.route import Plan


@triton.jit
def _tile_at(tile, TILES, ORDER, ROWS: tl.constexpr, PLANNED: tl.constexpr):
    """(expert, pairs [ROWS], how many of them count) of a tile."""
    lane = tl.arange(0, ROWS)
    if PLANNED:
        expert, first, count = tl.load(TILES + tile * 4), tl.load(TILES + tile * 4 + 1), tl.load(TILES + tile * 4 + 2)
        return expert.to(tl.int64), tl.load(ORDER + first + lane, mask=lane < count, other=0), count
    else:
        return tl.load(TILES + tile), tile + tl.zeros((ROWS,), tl.int32), 1


@triton.jit
def _dots(
    X, W, expert, row, valid, start_n, N, K, stride_x, stride_we, stride_wk, stride_wn, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, GATED: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """The accumulators of x[row] @ w[expert], in the order of `dot_tile`; GATED: of gate and up, N columns apart."""
    if X.dtype.element_ty == tl.float32:
        own, wide = W + expert * stride_we, start_n + tl.arange(0, COLUMNS)
        gate = dot_parts(X, own, row, wide, 2147483647, N, K, stride_x, 1, stride_wk, stride_wn, ROWS, COLUMNS, DEPTH, False)
        up = gate
        if GATED:
            own += N * stride_wn
            up = dot_parts(X, own, row, wide, 2147483647, N, K, stride_x, 1, stride_wk, stride_wn, ROWS, COLUMNS, DEPTH, False)
        return gate, up
    else:
        return _dot_chains(
            X, W, expert, row, valid, start_n, N, K, stride_x, stride_we, stride_wk, stride_wn, ROWS, COLUMNS, DEPTH, EVEN_K,
            EVEN_N, GATED, COPIED,
        )  # fmt: skip


@triton.jit
def _dot_chains(
    X, W, expert, row, valid, start_n, N, K, stride_x, stride_we, stride_wk, stride_wn, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, GATED: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """One accumulator per output, by tensor cores."""
    k = tl.arange(0, DEPTH)
    column = start_n + tl.arange(0, COLUMNS)
    x = X + row.to(tl.int64)[:, None] * stride_x + k[None, :]
    x_mask, w_mask = valid[:, None], column[None, :] < N
    if COPIED:
        line = (expert * K).to(tl.int32)
    else:
        w = W + expert * stride_we + k.to(tl.int64)[:, None] * stride_wk + column.to(tl.int64)[None, :] * stride_wn
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    more = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN_K:
            a = tl.load(x, mask=x_mask, other=0.0)
        else:
            a = tl.load(x, mask=x_mask & (k[None, :] < K - start), other=0.0)
        if COPIED:
            b = W.load([line + start, start_n])
        elif EVEN_K and EVEN_N:
            b = tl.load(w)
        else:
            b = tl.load(w, mask=w_mask & (k[:, None] < K - start), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if GATED:
            if COPIED:
                c = W.load([line + start, N + start_n])
            elif EVEN_K and EVEN_N:
                c = tl.load(w + N * stride_wn)
            else:
                c = tl.load(w + N * stride_wn, mask=w_mask & (k[:, None] < K - start), other=0.0)
            more = tl.dot(a, c, more, input_precision="ieee")
        x += DEPTH
        if not COPIED:
            w += DEPTH * stride_wk
    return acc, more


@triton.jit
def _biased(acc, BIAS, expert, column, mask, stride_b, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(BIAS + expert * stride_b + column, mask=mask, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _grouped_kernel(
    X, W, BIAS, OUT, TILES, ORDER, N, K, blocks, stride_x, stride_we, stride_wk, stride_wn, stride_b, stride_o,
    PER_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, PLANNED: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """One program per tile and block of columns. The columns of a tile are neighbours in time: they share its rows of x."""
    start_n = tl.program_id(0) % blocks * COLUMNS
    expert, pair, count = _tile_at(tl.program_id(0) // blocks, TILES, ORDER, ROWS, PLANNED)
    if count == 0:
        return
    valid = tl.arange(0, ROWS) < count
    acc, more = _dots(
        X, W, expert, pair // PER_ROW, valid, start_n, N, K, stride_x, stride_we, stride_wk, stride_wn,
        ROWS, COLUMNS, DEPTH, EVEN_K, EVEN_N, GATED, COPIED,
    )  # fmt: skip
    column = start_n + tl.arange(0, COLUMNS)
    inside = column < N
    y = _biased(acc, BIAS, expert, column, inside, stride_b, HAS_BIAS).to(OUT.dtype.element_ty)
    if GATED:  # rounded before the activation, as if it were written to memory
        up = _biased(more, BIAS, expert, N + column, inside, stride_b, HAS_BIAS).to(OUT.dtype.element_ty)
        y = activate_gated(y.to(tl.float32), up.to(tl.float32), KIND, X.dtype.element_ty == tl.float32).to(OUT.dtype.element_ty)
    elif KIND != "":
        y = activate(y.to(tl.float32), KIND, X.dtype.element_ty == tl.float32).to(OUT.dtype.element_ty)
    place = OUT + pair.to(tl.int64)[:, None] * stride_o + column[None, :]
    tl.store(place, y, mask=valid[:, None] & inside[None, :])


def grouped_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: Plan,
    per_row: int,
    kind: str = "",
    gated: bool = False,
    tile: GemmTile | None = None,
) -> Tensor:
    """x [rows, K], w [experts, K, N], bias [experts, N] -> [rows * per_row, N]: of pair p, x[p // per_row] @ w[its expert].

    With `kind`, the activation follows. gated: w is [experts, K, gate | up], and the result f(gate) * up has half its columns.
    `tile` overrides the launch table and moves no bit. Its rows are those of the plan.
    """
    depth, columns = _check(x, w, bias, kind, gated)
    pairs = len(x) * per_row
    out = torch.empty(pairs, columns, dtype=x.dtype, device=x.device)
    if not pairs:
        return out
    tile = tile or grouped_tile(plan.tile_rows, pairs, x.dtype, gated, gpu_of(x.device))
    fits = tile.rows == plan.tile_rows
    require(fits, "The tile has {} rows, but the plan has tiles of {}.", tile.rows, plan.tile_rows)
    even = depth % tile.depth == 0
    copied = tile.persistent and even and x.dtype != torch.float32 and _copyable(w)
    blocks = ceil_div(columns, tile.columns)
    weights = TensorDescriptor.from_tensor(w.flatten(0, 1), [tile.depth, tile.columns]) if copied else w
    _grouped_kernel[(plan.num_tiles * blocks,)](
        x, weights, x if bias is None else bias, out, plan.tiles, plan.order, columns, depth, blocks,
        x.stride(0), *w.stride(), 0 if bias is None else bias.stride(0), out.stride(0),
        per_row, tile.rows, tile.columns, tile.depth, even, columns % tile.columns == 0, bias is not None, kind, gated,
        plan.planned, copied, num_warps=tile.warps, num_stages=tile.stages, **EXACT,
    )  # fmt: skip
    return out


def _copyable(w: Tensor) -> bool:
    """Whether the copy engine can load tiles of the stacked weights, which are aligned, but not in the interpreter."""
    if not gpu_of(w.device).copies or not w.is_contiguous():
        return False
    aligned = w.stride(1) * w.element_size() % 16 == 0 and w.data_ptr() % 16 == 0
    return w.device.type != "cuda" or aligned


def _check(x: Tensor, w: Tensor, bias: Tensor | None, kind: str, gated: bool) -> tuple[int, int]:
    """(K, columns of the result). Raises ValueError if the tensors do not fit together."""
    require(x.dim() == 2, "x has shape {}. Expected [rows, inputs].", x.shape)
    require_float("x", x)
    require_rows("x", x)
    require_shape("w", w, (None, x.shape[1], None))
    require_weight("w", w, x)
    require(not kind or kind in KINDS, "Unknown activation {!r}. Use one of {}.", kind, ", ".join(KINDS))
    require(bool(kind) or not gated, "A gated product needs an activation.")
    require(gated or not kind or kind in PLAIN, "{} needs a gate.", kind)
    require(not gated or w.shape[2] % 2 == 0, "w has {} columns. A gated activation needs an even number.", w.shape[2])
    if bias is not None:
        require_shape("bias", bias, (w.shape[0], w.shape[2]))
        require_same("bias", bias, x)
        require_rows("bias", bias)
    return x.shape[1], w.shape[2] // (2 if gated else 1)


_BLOCK = 1024


@triton.jit
def _combine_kernel(
    Y, WEIGHTS, RESIDUAL, OUT, width, stride_r, TOP: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    dtype = OUT.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP):
        y = tl.load(Y + (row * TOP + slot) * width + column, mask=mask, other=0.0).to(tl.float32)
        term = (y * tl.load(WEIGHTS + row * TOP + slot)).to(dtype).to(tl.float32)
        if slot == 0:
            total = term
        else:
            total = (total + term).to(dtype).to(tl.float32)
    if ADDED:
        total = tl.load(RESIDUAL + row * stride_r + column, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(OUT + row * width + column, total.to(dtype), mask=mask)


def combine(y: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """y [rows, top, width], weights [rows, top] float32 -> [rows, width]: the terms round(weight * y), added slot by slot.

    Every sum is rounded, as if it were written to memory. The residual stream, if given, is added last.
    """
    rows, top, width = y.shape
    require_shape("weights", weights, (rows, top))
    require(y.is_contiguous() and weights.is_contiguous(), "y and weights must be contiguous.")
    out = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    if residual is not None:
        require_shape("residual", residual, (rows, width))
        require_rows("residual", residual)
    if rows:
        block = min(_BLOCK, 256 if rows < 64 else _BLOCK)
        _combine_kernel[(rows, ceil_div(width, block))](
            y, weights, y if residual is None else residual, out, width, 0 if residual is None else residual.stride(0),
            top, block, residual is not None, num_warps=4, **EXACT,
        )  # fmt: skip
    return out
