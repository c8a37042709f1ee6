"""RMSNorm and LayerNorm.

    rms: y = x / sqrt(mean(x^2) + eps) * weight        layer: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

The arithmetic is float32 with one rounding at the end. The thread layout sets the order of a sum over a tile axis, so the
launch shape is fixed per width (`launch.norm_shape`), x is always of one kind (`launch.uniform`) and a row is never split:
canonical by construction. LayerNorm
subtracts the mean before squaring (two passes over registers), which stays accurate if the mean is large.
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
    uniform,
)


@triton.jit(do_not_specialize=["rows", "inner"])
def _norm_kernel(
    X, WEIGHT, OTHER, BIAS, OUT, rows, inner, width, eps, stride_xo, stride_xi, stride_o,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """FIRST: only so many of the `inner` vectors of a row have the weight WEIGHT, the rest OTHER; 0: all of them."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column[None, :] < width
    mask = (row[:, None] < rows) & inside
    at = (row // inner) * stride_xo + (row % inner) * stride_xi
    x = tl.load(X + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if LAYER:
        x = tl.where(inside, x - (tl.sum(x, 1) / width)[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    weight = tl.load(WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if FIRST:
        other = tl.load(OTHER + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        weight = tl.where((row % inner)[:, None] < FIRST, weight, other)
    y = x * spread[:, None] * weight
    if HAS_BIAS:
        y += tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(OUT + row[:, None] * stride_o + column[None, :], y.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "inner"])
def _scale_kernel(
    X, OUT, rows, inner, width, eps, stride_xo, stride_xi,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column[None, :] < width
    at = (row // inner) * stride_xo + (row % inner) * stride_xi
    x = tl.load(X + at[:, None] + column[None, :], mask=(row[:, None] < rows) & inside, other=0.0).to(tl.float32)
    if LAYER:
        x = tl.where(inside, x - (tl.sum(x, 1) / width)[:, None], 0.0)
    tl.store(OUT + row, tl.sqrt_rn(tl.sum(x * x, 1) / width + eps), mask=row < rows)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, kind: str = "rms", out: Tensor | None = None
) -> Tensor:
    """RMSNorm ("rms") or LayerNorm ("layer") of x [rows, width] or [rows, heads, width] over its last dimension."""
    require(kind in ("rms", "layer"), "Unknown norm {!r}. Use rms or layer.", kind)
    require(x.dim() in (2, 3), "x has shape {}. Expected [rows, width] or [rows, heads, width].", x.shape)
    require_float("x", x)
    require_rows("x", x)
    width = x.shape[-1]
    for name, w in (("weight", weight), ("bias", bias)):
        if w is not None:
            require_shape(name, w, (width,))
            require_same(name, w, x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    require(out.shape == x.shape and out.is_contiguous(), "out must be contiguous and have shape {}.", x.shape)
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    if rows:
        x, shape = uniform(x), norm_shape(width)
        _norm_kernel[(ceil_div(rows, shape.rows),)](
            x, weight, weight, bias if bias is not None else weight, out, rows, inner, width, eps,
            x.stride(0), x.stride(1) if x.dim() == 3 else 0, width,
            shape.rows, shape.block, kind == "layer", bias is not None, 0, num_warps=shape.warps, **EXACT,
        )  # fmt: skip
    return out


def norm_pair(x: Tensor, first: int, weights: tuple[Tensor, Tensor], eps: float, kind: str) -> Tensor:
    """The norm of every head of x [rows, heads, width]: the first heads have one weight [width], the rest another.

    To the bit: `norm` of both parts. One launch instead of two.
    """
    require(kind in ("rms", "layer"), "Unknown norm {!r}. Use rms or layer.", kind)
    require(x.dim() == 3, "x has shape {}. Expected [rows, heads, width].", x.shape)
    require(0 < first < x.shape[1], "The first {} of {} heads leave no rest.", first, x.shape[1])
    require_float("x", x)
    require_rows("x", x)
    rows, heads, width = x.shape
    for name, w in zip(("first weight", "second weight"), weights, strict=True):
        require_shape(name, w, (width,))
        require_same(name, w, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        x, shape = uniform(x), norm_shape(width)
        _norm_kernel[(ceil_div(rows * heads, shape.rows),)](
            x, *weights, weights[0], out, rows * heads, heads, width, eps, x.stride(0), x.stride(1), width,
            shape.rows, shape.block, kind == "layer", False, first, num_warps=shape.warps, **EXACT,
        )  # fmt: skip
    return out


def norm_scale(x: Tensor, eps: float = 1e-5, kind: str = "rms") -> Tensor:
    """What the norm of x [rows, width] or [rows, heads, width] divides by: [..., 1], float32."""
    require(kind in ("rms", "layer"), "Unknown norm {!r}. Use rms or layer.", kind)
    require(x.dim() in (2, 3), "x has shape {}. Expected [rows, width] or [rows, heads, width].", x.shape)
    require_float("x", x)
    require_rows("x", x)
    out = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    inner = x.shape[1] if x.dim() == 3 else 1
    rows, width = x.shape[0] * inner, x.shape[-1]
    if rows:
        x, shape = uniform(x), norm_shape(width)
        _scale_kernel[(ceil_div(rows, shape.rows),)](
            x, out, rows, inner, width, eps, x.stride(0), x.stride(1) if x.dim() == 3 else 0,
            shape.rows, shape.block, kind == "layer", num_warps=shape.warps, **EXACT,
        )  # fmt: skip
    return out
