"""Activations of the MLP, plain and gated. Elementwise, hence canonical.

    plain  y = f(x)                    gated  y = f(gate) * up,   x = [gate | up]
    clamped_swiglu, gated only         y = (up + 1) * gate * sigmoid(1.702 gate), with gate <= 7 and |up| <= 7

The arithmetic is float32 with one rounding at the end. Gate and up are read as the product stored them, so a captured gate
has the values that the activation used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import EXACT, ceil_div, require, require_float, require_rows

PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
KINDS = (*PLAIN, "clamped_swiglu")
_BLOCK = 1024


@triton.jit
def activate(x, KIND: tl.constexpr):
    """f(x) in float32. exp is computed with exp2, which the device has as an instruction."""
    if KIND == "silu":
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
def activate_gated(gate, up, KIND: tl.constexpr):
    """f(gate) * up in float32."""
    if KIND == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)  # NaN stays
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1.0) * (gate / (1.0 + tl.exp2(gate * -2.455466961949891)))  # -1.702 log2(e)
    else:
        return activate(gate, KIND) * up


@triton.jit
def _activation_kernel(X, OUT, width, stride_x, stride_o, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(X + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        y = activate_gated(x, tl.load(X + row * stride_x + width + column, mask=mask, other=0.0).to(tl.float32), KIND)
    else:
        y = activate(x, KIND)
    tl.store(OUT + row * stride_o + column, y.to(OUT.dtype.element_ty), mask=mask)


def activation(x: Tensor, kind: str, gated: bool, out: Tensor | None = None) -> Tensor:
    """Plain: x [rows, width] -> f(x). Gated: x [rows, gate | up] -> f(gate) * up [rows, width / 2]."""
    require(kind in KINDS, "Unknown activation {!r}. Use one of {}.", kind, ", ".join(KINDS))
    require(gated or kind in PLAIN, "{} needs a gate.", kind)
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
