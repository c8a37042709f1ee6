"""RMSNorm and LayerNorm, with the residual addition before them on request.

    s = round(x + residual)        rms: y = s / sqrt(mean(s^2) + eps) * weight
                                   layer: y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias

float32 inside, one rounding at the end. A sum over a tile axis adds in an order set by the thread layout, so the launch
shape is fixed per width (`launch.norm_shape`) and a row is never cut: canonical by construction. The mean of LayerNorm is
subtracted before squaring (two passes over registers), which loses nothing when the mean is large. The sum that is returned
is rounded first and then normalised, so fusing the addition changes no bit.
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


@triton.jit(do_not_specialize=["rows", "inner"])
def _norm_kernel(
    X, RESIDUAL, WEIGHT, BIAS, SUM, OUT, rows, inner, width, eps,
    stride_xo, stride_xi, stride_r, stride_s, stride_o,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column[None, :] < width
    mask = (row[:, None] < rows) & inside
    at = (row // inner) * stride_xo + (row % inner) * stride_xi
    x = tl.load(X + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(RESIDUAL + row[:, None] * stride_r + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total = x.to(SUM.dtype.element_ty)
        tl.store(SUM + row[:, None] * stride_s + column[None, :], total, mask=mask)
        x = total.to(tl.float32)
    if LAYER:
        x = tl.where(inside, x - (tl.sum(x, 1) / width)[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    y = x * spread[:, None] * tl.load(WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(OUT + row[:, None] * stride_o + column[None, :], y.to(OUT.dtype.element_ty), mask=mask)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, kind: str = "rms", out: Tensor | None = None
) -> Tensor:
    """RMSNorm ("rms") or LayerNorm ("layer") of x [rows, width] or [rows, heads, width] over its last dimension."""
    y, _ = _launch(x, None, weight, bias, eps, kind, out)
    return y


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    kind: str = "rms",
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual) for x, residual [rows, width]."""
    require_shape("residual", residual, tuple(x.shape))
    require_same("residual", residual, x)
    require_rows("residual", residual)
    require(x.dim() == 2, "x has shape {}; expected [rows, width]", x.shape)
    y, total = _launch(x, residual, weight, bias, eps, kind, out)
    return y, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: str, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check, launch; returns (norm, sum), where the sum is x itself without a residual."""
    require(kind in ("rms", "layer"), "no norm {!r}; known: rms, layer", kind)
    require(x.dim() in (2, 3), "x has shape {}; expected [rows, width] or [rows, heads, width]", x.shape)
    require_float("x", x)
    require_rows("x", x)
    width = x.shape[-1]
    for name, w in (("weight", weight), ("bias", bias)):
        if w is not None:
            require_shape(name, w, (width,))
            require_same(name, w, x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    require(out.shape == x.shape and out.is_contiguous(), "out must be contiguous of shape {}", x.shape)
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows:
        return out, total
    shape = norm_shape(width)
    added = residual if residual is not None else x
    _norm_kernel[(ceil_div(rows, shape.rows),)](
        x, added, weight, bias if bias is not None else weight, total, out, rows, inner, width, eps,
        x.stride(0), x.stride(1) if x.dim() == 3 else 0, added.stride(0), total.stride(0), width,
        shape.rows, shape.block, kind == "layer", bias is not None, residual is not None, num_warps=shape.warps, **EXACT,
    )  # fmt: skip
    return out, total
