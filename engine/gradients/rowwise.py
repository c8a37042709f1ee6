"""Derivatives of norms, activations, rotations and soft caps. `g` is always the gradient of what the op returns."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from replaylens.engine.model.config import Activation
from replaylens.engine.model.layers import Norm
from replaylens.engine.model.rotary import Rotary


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


def activated(x: Tensor, kind: Activation) -> Tensor:
    """The activation itself."""
    return _ACTIVATIONS[kind][0](x)


def through_activation(g: Tensor, x: Tensor, kind: Activation) -> Tensor:
    """g times the activation's slope at x, by the functions that autograd uses."""
    return _ACTIVATIONS[kind][1](g, x)


_ATEN = torch.ops.aten
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, _ATEN.silu_backward),
    "gelu": (F.gelu, _ATEN.gelu_backward),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), partial(_ATEN.gelu_backward, approximate="tanh")),
    "relu": (F.relu, lambda g, x: g * (x > 0)),
    "relu2": (lambda x: F.relu(x).square(), lambda g, x: g * 2 * F.relu(x)),
}


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
