"""Derivatives of products, norms, activations, rotations and soft caps. `g` is always the gradient of what the op returns."""

import math

import torch
from torch import Tensor

from replaylens.engine.model.config import Activation
from replaylens.engine.model.ops import Linear, Norm
from replaylens.engine.model.rotary import Rotary

_FEW_ROWS = 64
"""up to which the product runs with the weight in front"""


def through_linear(g: Tensor, linear: Linear) -> Tensor:
    """g [rows, outputs] -> [rows, inputs]. The order of the factors depends on the number of rows only, as bits must."""
    if len(g) <= _FEW_ROWS:  # CPU libraries take half as long again for few rows times a transposed weight
        return torch.mm(linear.weight, g.t()).t().contiguous()
    return torch.mm(g, linear.weight.t())


def through_norm(g: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """The gradient of the norm's input x, over the last dimension.

    RMS:    y = w x r, r = (mean x^2 + eps)^-1/2      dx = r (h - u mean(h u)),            h = w g, u = x r
    layer:  y = w u + b, u = (x - mean x) r           dx = r (h - mean h - u mean(h u))
    """
    layer = norm.kind == "layer"
    x = x - x.mean(-1, keepdim=True) if layer else x
    r = x.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    u, h = x * r, g * norm.weight
    dx = h - u * (h * u).mean(-1, keepdim=True)
    if layer:
        dx -= h.mean(-1, keepdim=True)
    return dx.mul_(r)


def value_and_slope(x: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
    """An activation and its derivative."""
    match kind:
        case "silu":
            s = torch.sigmoid(x)
            y = x * s
            return y, s + y * (1 - s)
        case "gelu_tanh":
            c = math.sqrt(2 / math.pi)
            t = torch.tanh(c * (x + 0.044715 * x**3))
            return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)
        case "gelu":
            below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
            return x * below, below + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        case "relu":
            return x.relu(), (x > 0).to(x.dtype)


def through_rotary(g: Tensor, rotary: Rotary) -> Tensor:
    """g [rows, heads, d_head] turned back: the transpose of a rotation is its inverse."""
    cos, sin = rotary.turns
    width = cos.shape[-1]
    pairs = g[..., :width]
    turned = pairs * cos - pairs.roll(width // 2, -1) * sin
    return turned if width == g.shape[-1] else torch.cat([turned, g[..., width:]], dim=-1)


def through_softcap(g: Tensor, x: Tensor, cap: float) -> Tensor:
    """The gradient of x under cap tanh(x / cap); 0: no cap."""
    return g * (1 - torch.tanh(x / cap).square()) if cap else g
