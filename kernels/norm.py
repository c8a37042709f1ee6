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

from replaylens.kernels.exact import activate as portable_activation
from replaylens.kernels.exact import activate_gated as portable_gated
from replaylens.kernels.exact import row_sum
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

# ---- norm ------------------------------------------------------------------------------------------------------------


@triton.jit
def moments(X, valid, width, eps, LAYER: tl.constexpr, ROWS: tl.constexpr):
    """Mean and root mean square of float32 rows at the addresses X [ROWS, 1]: [ROWS, 1] each, in portable arithmetic."""
    count = tl.zeros((ROWS, 1), tl.float32) + width.to(tl.float32)
    mean = tl.zeros((ROWS, 1), tl.float32)
    if LAYER:
        mean = tl.div_rn(row_sum(X, valid, mean, width, False, ROWS), count)
    return mean, tl.sqrt_rn(tl.div_rn(row_sum(X, valid, mean, width, True, ROWS), count) + eps)


@triton.jit(do_not_specialize=["rows", "inner"])
def _norm_kernel(
    X, WEIGHT, OTHER, BIAS, OUT, rows, inner, width, eps, stride_xo, stride_xi, stride_o,
    GATE, stride_go, stride_gi, scale, other_scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, FIRST: tl.constexpr,
    GATED: tl.constexpr = False, SCALED: tl.constexpr = False,
):  # fmt: skip
    """FIRST: only so many of the `inner` vectors of a row have the weight WEIGHT, the rest OTHER; 0: all of them. The rounded
    result is multiplied by a number (SCALED) or by silu of a GATE (GATED), as if it had been stored before."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column[None, :] < width
    mask = (row[:, None] < rows) & inside
    at = (row // inner) * stride_xo + (row % inner) * stride_xi
    x = tl.load(X + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if X.dtype.element_ty == tl.float32:
        mean, root = moments(X + at[:, None], row[:, None] < rows, width, eps, LAYER, ROWS)
        if LAYER:
            x = x - mean
        spread = tl.div_rn(tl.full((ROWS, 1), 1.0, tl.float32), root)
    else:
        if LAYER:
            x = tl.where(inside, x - (tl.sum(x, 1) / width)[:, None], 0.0)
        spread = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    weight = tl.load(WEIGHT + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if FIRST:
        other = tl.load(OTHER + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        weight = tl.where((row % inner)[:, None] < FIRST, weight, other)
    y = x * spread
    if HAS_BIAS:
        bias = tl.load(BIAS + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        if X.dtype.element_ty == tl.float32:
            y = tl.fma(y, tl.broadcast_to(weight, y.shape), tl.broadcast_to(bias, y.shape))
        else:
            y = y * weight + bias
    else:
        y = y * weight
    if SCALED:
        factor = tl.where((row % inner)[:, None] < FIRST, scale, other_scale)
        y = y.to(OUT.dtype.element_ty).to(tl.float32) * factor
    if GATED:
        from_gate = (row // inner) * stride_go + (row % inner) * stride_gi
        gate = tl.load(GATE + from_gate[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        y = activate_gated(gate, y.to(OUT.dtype.element_ty).to(tl.float32), "silu", X.dtype.element_ty == tl.float32)
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
    if X.dtype.element_ty == tl.float32:
        _, root = moments(X + at[:, None], row[:, None] < rows, width, eps, LAYER, ROWS)
        tl.store(OUT + row[:, None], root, mask=row[:, None] < rows)
    else:
        x = tl.load(X + at[:, None] + column[None, :], mask=(row[:, None] < rows) & inside, other=0.0).to(tl.float32)
        if LAYER:
            x = tl.where(inside, x - (tl.sum(x, 1) / width)[:, None], 0.0)
        tl.store(OUT + row, tl.sqrt_rn(tl.sum(x * x, 1) / width + eps), mask=row < rows)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    kind: str = "rms",
    out: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """RMSNorm ("rms") or LayerNorm ("layer") of x [rows, width] or [rows, heads, width] over its last dimension.

    gate  of the shape of x: its silu is multiplied into the rounded result, to the bit as `activation` would do it
    """
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
        by = x if gate is None else uniform(gate)
        require(by.shape == x.shape and by.dtype == x.dtype, "gate must be {} of shape {}.", x.dtype, x.shape)
        _norm_kernel[(ceil_div(rows, shape.rows),)](
            x, weight, weight, bias if bias is not None else weight, out, rows, inner, width, eps,
            x.stride(0), x.stride(1) if x.dim() == 3 else 0, width, by, by.stride(0), by.stride(1) if x.dim() == 3 else 0,
            1.0, 1.0, shape.rows, shape.block, kind == "layer", bias is not None, 0, gate is not None,
            num_warps=shape.warps, **EXACT,
        )  # fmt: skip
    return out


def norm_pair(
    x: Tensor, first: int, weights: tuple[Tensor, Tensor], eps: float, kind: str, scales: tuple[float, float] | None = None
) -> Tensor:
    """The norm of every head of x [rows, heads, width]: the first heads have one weight [width], the rest another.

    scales  of the first heads and of the rest: the rounded results are multiplied by them

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
            x, *weights, weights[0], out, rows * heads, heads, width, eps, x.stride(0), x.stride(1), width, x, 0, 0,
            *(scales or (1.0, 1.0)), shape.rows, shape.block, kind == "layer", False, first, False, scales is not None,
            num_warps=shape.warps, **EXACT,
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


# ---- activation ------------------------------------------------------------------------------------------------------
# Activations of the MLP, plain and gated. Elementwise, hence canonical.
#
#     plain  y = f(x)                    gated  y = f(gate) * up,   x = [gate | up]
#     clamped_swiglu, gated only         y = (up + 1) * gate * sigmoid(1.702 gate), with gate <= 7 and |up| <= 7
#
# The arithmetic is float32 with one rounding at the end. Gate and up are read as the product stored them, so a captured gate
# has the values that the activation used.

PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
FUNCTIONS = ("exp", "tanh", "sigmoid", "softplus")
"""of single numbers, in portable arithmetic: float32 only"""
KINDS = (*PLAIN, "clamped_swiglu")
_BLOCK = 1024


@triton.jit
def activate(x, KIND: tl.constexpr, PORTABLE: tl.constexpr):
    """f(x) in float32. exp is computed with exp2, which the device has as an instruction, unless it must be PORTABLE."""
    if PORTABLE:
        return portable_activation(x, KIND)
    elif KIND == "silu":
        return x / (1.0 + tl.exp2(x * -1.4426950408889634))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 0.5 (1 + tanh u) = 1 / (1 + exp(-2 u)): one division, no overflow for large |u|
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp2(u * -2.8853900817779268))
    elif KIND == "relu2":
        above = tl.maximum(x, 0.0)
        return above * above
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def activate_gated(gate, up, KIND: tl.constexpr, PORTABLE: tl.constexpr):
    """f(gate) * up in float32."""
    if PORTABLE:
        return portable_gated(gate, up, KIND)
    elif KIND == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)  # NaN stays
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1.0) * (gate / (1.0 + tl.exp2(gate * -2.455466961949891)))  # -1.702 log2(e)
    else:
        return activate(gate, KIND, False) * up


@triton.jit
def _activation_kernel(X, OUT, width, stride_x, stride_o, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(X + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(X + row * stride_x + width + column, mask=mask, other=0.0).to(tl.float32)
        y = activate_gated(x, up, KIND, X.dtype.element_ty == tl.float32)
    else:
        y = activate(x, KIND, X.dtype.element_ty == tl.float32)
    tl.store(OUT + row * stride_o + column, y.to(OUT.dtype.element_ty), mask=mask)


def activation(x: Tensor, kind: str, gated: bool, out: Tensor | None = None) -> Tensor:
    """Plain: x [rows, width] -> f(x). Gated: x [rows, gate | up] -> f(gate) * up [rows, width / 2]."""
    require(kind in (*KINDS, *FUNCTIONS), "Unknown activation {!r}. Use one of {}.", kind, ", ".join(KINDS))
    require(gated or kind in (*PLAIN, *FUNCTIONS), "{} needs a gate.", kind)
    require_float("x", x)
    require_rows("x", x)
    require(x.dim() == 2, "x has shape {}. Expected [rows, width].", x.shape)
    require(not gated or x.shape[1] % 2 == 0, "x has width {}. A gated activation needs an even width.", x.shape[1])
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        _activation_kernel[(rows, ceil_div(width, _BLOCK))](
            x, out, width, x.stride(0), out.stride(0), kind, gated, _BLOCK, num_warps=4, **EXACT
        )
    return out
