"""The derivative of every op of a decoder. `g` is always the gradient of what the op returns.

Every sum and function comes from `BackwardProducts`. What is left to torch adds, multiplies, divides and takes roots of single
numbers, which IEEE 754 rounds alike everywhere: on a CPU, a gradient has the same bits on every machine.
"""

import math
from functools import reduce
from typing import Any, Literal, NamedTuple, Protocol

import torch
from einops import rearrange, repeat
from torch import Tensor

from replaylens.engine.errors import NoGradient
from replaylens.engine.model.config import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, Routing
from replaylens.engine.model.layers import Conv, Linear, Norm, Packable, Rotary
from replaylens.engine.model.ops import AttentionSpec, Recurrence, position_bias, visible
from replaylens.engine.passes.cpu import Products, rows_of
from replaylens.kernels import cpu as portable

# ---- products --------------------------------------------------------------------------------------------------------
# The sums and functions of a backward pass: portable ones on a CPU, those of the kernels and of torch on a GPU.

Function = Literal["exp", "tanh", "sigmoid", "erf", "sqrt", "softplus"]


class BackwardProducts(Protocol):
    """Gradients are float32. The bits of a product or a sum depend on the path alone."""

    @property
    def certified(self) -> bool:
        """False: a product was found whose bits are not promised."""
        ...

    def linear(self, g: Tensor, linear: Linear) -> Tensor:
        """The gradient of a product [rows, outputs] -> of its input [rows, inputs]."""
        ...

    def ahead(self, x: Tensor, linear: Linear) -> Tensor:
        """x [rows, inputs] -> [rows, outputs], without the bias, in float32"""
        ...

    def weight(self, module: Packable, name: str, turned: bool = False) -> Any:
        """A weight as `plain` takes it: [..., inputs, outputs]; turned: [..., outputs, inputs]"""
        ...

    def plain(self, x: Tensor, weight: Any) -> Tensor:
        """x [rows, n] times weight [n, m], in float32"""
        ...

    def batched(self, x: Tensor, w: Tensor) -> Tensor:
        """x [batch, m, k] times w [batch, k, n], both float32"""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sums over the last dimension: [..., 1]"""
        ...

    def apply(self, name: Function, x: Tensor) -> Tensor:
        """A function of every number."""
        ...


class HostProducts:
    """Portable arithmetic: the same bits on any number of threads and on every machine."""

    certified = True

    def __init__(self, products: Products) -> None:
        """products  of the model, which keep its weights as products read them"""
        self.products = products

    def linear(self, g: Tensor, linear: Linear) -> Tensor:
        return portable.product(rows_of(g), self.products.of(linear, turned=True))

    def ahead(self, x: Tensor, linear: Linear) -> Tensor:
        return portable.product(rows_of(x), self.products.of(linear))

    def weight(self, module: Packable, name: str, turned: bool = False) -> Any:
        return self.products.of(module, name, turned)

    def packed(self, weight: Tensor) -> portable.Panels:
        """A tensor [n, m], which belongs to no module, as `plain` takes it. Nothing keeps it."""
        return portable.Panels.of(weight)

    def plain(self, x: Tensor, weight: Any) -> Tensor:
        return self.products.product(x, weight)

    def batched(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.stack([portable.product(rows_of(a), portable.Panels.of(b)) for a, b in zip(x, w, strict=True)])

    def total(self, x: Tensor) -> Tensor:
        return portable.row_sums(x)

    def apply(self, name: Function, x: Tensor) -> Tensor:
        return portable.apply(name, x)


# ---- rowwise ---------------------------------------------------------------------------------------------------------


def through_norm(g: Tensor, x: Tensor, norm: Norm, products: BackwardProducts) -> Tensor:
    """The gradient of the norm's input x, over the last dimension.

    RMS:    y = w x r, r = (mean x^2 + eps)^-1/2      dx = r (h - u mean(h u)),            h = w g, u = x r
    layer:  y = w u + b, u = (x - mean x) r           dx = r (h - mean h - u mean(h u))
    """
    layer, mean = norm.kind == "layer", lambda rows: products.total(rows) / rows.shape[-1]
    x = x - mean(x) if layer else x
    r = norm_factor(x, norm, products)
    u, h = x * r, g * norm.weight
    dx = h - u * mean(h * u)
    if layer:
        dx -= mean(h)
    return dx.mul_(r)


def norm_factor(x: Tensor, norm: Norm, products: BackwardProducts) -> Tensor:
    """What a norm multiplies rows x by, before its weights: [..., 1]. Precondition: those of a LayerNorm are centred."""
    return 1 / products.apply("sqrt", products.total(x * x) / x.shape[-1] + norm.eps)


def activation(x: Tensor, kind: Activation, products: BackwardProducts) -> tuple[Tensor, Tensor]:
    """The activation at x, and its slope there."""
    match kind:
        case "silu":
            open_ = products.apply("sigmoid", x)
            return x * open_, open_ * (1 + x * (1 - open_))
        case "gelu":
            below = 0.5 * (1 + products.apply("erf", x * 0.5**0.5))
            return x * below, below + x * products.apply("exp", -0.5 * x * x) * (2 * math.pi) ** -0.5
        case "gelu_tanh":  # 1 + tanh(u) = 2 sigmoid(2 u)
            factor, cube, square = 2 * (2 / math.pi) ** 0.5, 0.044715, x * x
            open_ = products.apply("sigmoid", x * (1 + cube * square) * factor)
            return x * open_, open_ * (1 + x * (1 - open_) * (1 + 3 * cube * square) * factor)
        case "relu" | "relu2":
            above = x.clamp(min=0.0)
            return (above, (x > 0).float()) if kind == "relu" else (above * above, 2 * above)
    raise NoGradient(f"The derivative of the activation {kind!r} is not implemented. Use patching.")


def through_rotary(g: Tensor, rotary: Rotary) -> Tensor:
    """g [rows, heads, d_head] turned back: the transpose of a rotation is its inverse."""
    cos, sin = rotary.turns
    width = cos.shape[-1]
    pairs = g[..., :width]
    turned = pairs * cos - pairs.roll(width // 2, -1) * sin
    return turned if width == g.shape[-1] else torch.cat([turned, g[..., width:]], dim=-1)


def through_softcap(g: Tensor, capped: Tensor, cap: float) -> Tensor:
    """The gradient of x from that of capped = cap tanh(x / cap), whose slope is 1 - (capped / cap)^2; 0: no cap."""
    return g * (1 - (capped / cap).square()) if cap else g


def softmax(x: Tensor, products: BackwardProducts, sinks: Tensor | None = None) -> Tensor:
    """Over the last dimension; -inf: 0. sinks [..., 1]: scores whose share is left out"""
    top = x.amax(-1, keepdim=True)
    top = top if sinks is None else torch.maximum(top, sinks)
    weights = products.apply("exp", x - top)
    total = products.total(weights)
    return weights / (total if sinks is None else total + products.apply("exp", sinks - top))


def through_softmax(g: Tensor, p: Tensor, products: BackwardProducts) -> Tensor:
    """The gradient of what p is the softmax of. A sink changes nothing here: nobody reads its share."""
    return p * (g - products.total(g * p))


# ---- attention -------------------------------------------------------------------------------------------------------
# The derivative of one layer's attention over one whole path.

QUERY_ROWS = 64
"""rows whose scores are computed together, from position 0 on: later keys are skipped, and memory grows with the length only"""


class AttentionGradients(NamedTuple):
    """Gradients of the inputs of an attention."""

    q: Tensor
    """[rows, heads, d_head], after the rotation"""
    k: Tensor
    """[rows, kv_heads, d_head], after the rotation"""
    v: Tensor
    """[rows, kv_heads, width of values]"""
    pattern: Tensor | None
    """[rows, heads, keys], 0 where a row does not see a key; None unless asked for"""


def through_attention(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    want_pattern: bool,
    products: BackwardProducts,
    own: bool = False,
    sinks: Tensor | None = None,
) -> AttentionGradients:
    """g [rows, heads, d_value] is the gradient of z = p v with p = softmax(cap(scale q k^T)), rows at positions 0, 1, ...

    dv = p^T g,  dp = g v^T,  ds = p (dp - sum(dp p)) cap',  dq = scale ds k,  dk = scale ds^T q

    own    keys and values get what they do to their own row alone, so that no row's gradient depends on another row's
    sinks  [heads]
    """
    rows, heads, _ = q.shape
    k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # [kv_heads, rows, d]
    dq, dk, dv = q.new_empty(q.shape), torch.zeros_like(k), torch.zeros_like(v)
    pattern = q.new_zeros(rows, heads, rows) if want_pattern else None
    for first in range(0, rows, QUERY_ROWS):  # this order defines the bits
        end = min(first + QUERY_ROWS, rows)
        low = max(0, first + 1 - spec.window) if spec.window else 0  # the first key that any of these rows sees
        part, keys = slice(first, end), slice(low, end)
        hidden = ~visible(torch.arange(first - low, end - low, device=q.device), end - low, spec.window)
        bias = position_bias(spec.slopes, end, q)[:, low:] if spec.slopes else None
        others = None
        if own:
            others = torch.arange(first, end, device=q.device)[:, None] != torch.arange(low, end, device=q.device)
        found = _through_rows(g[part], q[part], k[:, keys], v[:, keys], spec, hidden, bias, products, others, sinks)
        dq[part], by_k, by_v, dp = found
        dk[:, keys] += by_k
        dv[:, keys] += by_v
        if pattern is not None:
            pattern[part, :, keys] = dp
    return AttentionGradients(dq, dk.transpose(0, 1), dv.transpose(0, 1), pattern)


def _through_rows(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    hidden: Tensor,
    bias: Tensor | None,
    products: BackwardProducts,
    others: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g, q [rows, heads, width], k, v [kv_heads, keys, width], hidden [rows, keys], bias [heads, keys], sinks [heads]
    -> dq, dk, dv as these, dp [rows, heads, keys]

    others  [rows, keys]: edges that give their keys and values no gradient
    """
    (rows, heads, _), kv_heads = q.shape, len(k)
    fold = lambda x: rearrange(x, "rows (kv group) d -> kv (group rows) d", kv=kv_heads)  # noqa: E731
    back = lambda x: rearrange(x, "kv (group rows) d -> rows (kv group) d", rows=rows)  # noqa: E731
    unseen = repeat(hidden, "rows keys -> (group rows) keys", group=heads // kv_heads)
    g, q = fold(g), fold(q) * spec.scale
    product = products.batched
    p, capped = _scored(q, k, spec, unseen, bias, products, sinks)
    dp = product(g, v.transpose(1, 2)).masked_fill_(unseen, 0.0)
    ds = through_softcap(through_softmax(dp, p, products), capped, spec.softcap)
    dq = back(product(ds, k).mul_(spec.scale))
    if others is not None:
        cut = repeat(others, "rows keys -> (group rows) keys", group=heads // kv_heads)
        ds, p = ds.masked_fill(cut, 0.0), p.masked_fill(cut, 0.0)
    return dq, product(ds.transpose(1, 2), q), product(p.transpose(1, 2), g), back(dp)


def _scored(
    q: Tensor,
    k: Tensor,
    spec: AttentionSpec,
    unseen: Tensor,
    bias: Tensor | None,
    products: BackwardProducts,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [kv_heads, group rows, width], scaled -> the pattern [kv_heads, group rows, keys], and its scores before the bias"""
    raw = products.batched(q, k.transpose(1, 2))
    scores = capped = products.apply("tanh", raw / spec.softcap) * spec.softcap if spec.softcap else raw
    if bias is not None:
        rows = q.shape[1] * len(k) // len(bias)
        scores = scores + repeat(bias, "(kv group) keys -> kv (group rows) keys", kv=len(k), rows=rows)
    if sinks is not None:
        sinks = repeat(sinks.float(), "(kv group) -> kv (group rows) 1", kv=len(k), rows=q.shape[1] * len(k) // len(sinks))
    return softmax(scores.masked_fill(unseen, -torch.inf), products, sinks), capped


def pattern_of(q: Tensor, k: Tensor, spec: AttentionSpec, products: BackwardProducts, sinks: Tensor | None = None) -> Tensor:
    """The pattern of rows at positions 0, 1, ...: [kv_heads, group, rows, keys]. q, k [rows, heads, d_head]; sinks [heads].

    On a CPU, the bits of a row do not depend on how many rows follow: a sum that ends with zeros has those of a shorter one.
    """
    (rows, heads, _), kv_heads = q.shape, k.shape[1]
    k, group = k.transpose(0, 1).contiguous(), heads // kv_heads
    found = q.new_zeros(kv_heads, group, rows, rows)
    for first in range(0, rows, QUERY_ROWS):
        end = min(first + QUERY_ROWS, rows)
        hidden = ~visible(torch.arange(first, end, device=q.device), end, spec.window)
        bias = position_bias(spec.slopes, end, q) if spec.slopes else None
        part = rearrange(q[first:end] * spec.scale, "rows (kv group) d -> kv (group rows) d", kv=kv_heads)
        p, _ = _scored(part, k[:, :end], spec, hidden.repeat(group, 1), bias, products, sinks)
        found[:, :, first:end, :end] = p.view(kv_heads, group, end - first, end)
    return found


# ---- experts ---------------------------------------------------------------------------------------------------------
# The derivatives of what a mixture of experts is made of. Which experts a row goes to is constant; their weights are not, as in
# transformers.


def ordered_sum(x: Tensor) -> Tensor:
    """The sum over a few heads or experts, in order: [rows, few, width] -> [rows, width]"""
    return reduce(torch.add, x.unbind(1))


def through_gate(g: Tensor, wide: Tensor, kind: Activation, gated: bool, products: BackwardProducts) -> Tensor:
    """The gradient of what an activation reads; gated: of gate | up."""
    if not gated:
        return g * activation(wide, kind, products)[1]
    gate, up = wide.chunk(2, dim=-1)
    if kind != "clamped_swiglu":
        found, slope = activation(gate, kind, products)
        return torch.cat([g * up * slope, g * found], dim=-1)
    small, kept = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    open_ = products.apply("sigmoid", small * SWIGLU_ALPHA)
    slope = open_ * (1 + small * SWIGLU_ALPHA * (1 - open_))
    return torch.cat([g * (kept + 1) * slope * (gate == small), g * (small * open_) * (up == kept)], dim=-1)


def through_weights(g: Tensor, logits: Tensor, chosen: Tensor, routing: Routing, products: BackwardProducts) -> Tensor:
    """g [rows, top], of the weights -> the gradient of the logits [rows, experts] that `weigh` reads."""
    if routing.kind == "sparsemixer":
        return _sparsemixer(g, logits, chosen, routing, products)
    g, zeros = g * routing.scale, torch.zeros_like(logits)
    if routing.kind == "softmax" and not routing.normalised:
        return through_softmax(zeros.scatter(-1, chosen, g), softmax(logits, products), products)
    own = logits.gather(-1, chosen)
    if routing.kind == "softmax":
        return zeros.scatter(-1, chosen, through_softmax(g, softmax(own, products), products))
    open_ = products.apply("sigmoid", own)
    if routing.normalised:  # w = s / S, dw[i] / ds[j] = (1[i = j] - w[i]) / S
        whole = products.total(open_) + routing.floor
        g = (g - products.total(g * open_) / whole) / whole
    return zeros.scatter(-1, chosen, g * open_ * (1 - open_))


def _sparsemixer(g: Tensor, logits: Tensor, chosen: Tensor, routing: Routing, products: BackwardProducts) -> Tensor:
    """Each weight is one entry of a softmax of its own. Which logits are close enough to take part is constant."""
    own = logits.gather(-1, chosen)
    first = own[:, 1:] > own[:, :1]  # whether the second is the better one
    places, g = torch.where(first, chosen.flip(-1), chosen), torch.where(first, g.flip(-1), g)
    found, left = torch.zeros_like(logits), logits
    for place, each in zip(places.split(1, -1), g.split(1, -1), strict=True):
        top = logits.gather(-1, place)
        far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * routing.jitter
        p = softmax(left.masked_fill(far, -torch.inf), products)
        found = found + through_softmax(torch.zeros_like(p).scatter(-1, place, each), p, products)
        left = left.scatter(-1, place, -torch.inf)
    return found


# ---- recurrent -------------------------------------------------------------------------------------------------------
# The derivatives of recurrences and short convolutions over one whole path. On a CPU only: the walk back over a recurrence is a
# kernel (`kernels/cpu_recurrent.py`).


def through_recurrence(
    g: Tensor,
    given: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor | None,
    decay: Tensor,
    own: bool,
) -> list[tuple[Any, Tensor]]:
    """What a recurrence was given, and the gradients of these, from that of what is read from its states.

    own  nothing passes from one position to another
    """
    from replaylens.kernels.cpu_recurrent import recur_back  # compiled for hybrids only

    found, key_heads = recur_back(q, k, v, strength, decay, g, own), q.shape[1]
    by_key_head = lambda x: reduce(  # noqa: E731
        torch.add, rearrange(x, "rows (keys group) d -> group rows keys d", keys=key_heads).unbind()
    )
    by_key = [(given.q, by_key_head(found.q)), (given.k, by_key_head(found.k))]
    return [*by_key, (given.v, found.v), (given.decay, found.decay), (given.strength, found.beta)]


def through_conv(g: Tensor, x: Tensor, conv: Conv, silu: bool, products: BackwardProducts, own: bool) -> Tensor:
    """The gradient of what is convolved, [rows, channels]: each position is read by itself and the next ones.

    silu  g is that of the activated result
    """
    weights = conv.weight.float().flip(0)  # of the row's own position first
    if silu:
        raw = x.new_zeros(x.shape)
        for shift, weight in enumerate(weights):
            raw[shift:] += weight * x[: len(x) - shift]
        raw = raw if conv.bias is None else raw + conv.bias.float()
        g = g * activation(raw, "silu", products)[1]
    out = g * weights[0]
    for shift, weight in enumerate([] if own else weights[1:], start=1):
        out[: max(0, len(g) - shift)] += weight * g[shift:]
    return out
