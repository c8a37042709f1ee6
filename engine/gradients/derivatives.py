"""The derivative of every op of a decoder: norms, activations, products, attention, mixtures of experts."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from replaylens.engine.model.config import Activation, Routing, barred, sigmoid, weigh, without_barred
from replaylens.engine.model.decoder import LatentAttention, Mixture, SharedExpert
from replaylens.engine.model.layers import Linear, Norm, Rotary, expert_products
from replaylens.engine.model.ops import AttentionSpec, position_bias, softcap, visible

# ---- rowwise ---------------------------------------------------------------------------------------------------------
# Derivatives of norms, activations, rotations and soft caps. `g` is always the gradient of what the op returns.


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


# ---- products --------------------------------------------------------------------------------------------------------
# The products of a backward pass: by the CPU's library, or by the kernels of a GPU.

_FEW_ROWS = 64
"""up to which the CPU's product runs with the weight in front"""


class BackwardProducts(Protocol):
    """Gradients are float32. A product's bits depend on the path alone."""

    @property
    def certified(self) -> bool:
        """False: a product was found whose bits are not promised."""
        ...

    def linear(self, g: Tensor, linear: Linear) -> Tensor:
        """The gradient of a product [rows, outputs] -> of its input [rows, inputs]."""
        ...

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, n] times weight [n, m], in float32"""
        ...

    def unembed(self, g: Tensor, table: Tensor) -> Tensor:
        """g [rows, vocab] times table [vocab, d_model]"""
        ...

    def batched(self, x: Tensor, w: Tensor) -> Tensor:
        """x [batch, m, k] times w [batch, k, n], both float32"""
        ...


class HostProducts:
    """The library's products, on one thread, in shapes that follow from the path."""

    certified = True

    def linear(self, g: Tensor, linear: Linear) -> Tensor:
        """The order of the factors depends on the number of rows only, as bits must."""
        if len(g) <= _FEW_ROWS:  # CPU libraries take half as long again for few rows times a transposed weight
            return torch.mm(linear.weight, g.t()).t().contiguous()
        return torch.mm(g, linear.weight.t())

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, weight)

    def unembed(self, g: Tensor, table: Tensor) -> Tensor:
        return torch.mm(g, table)

    def batched(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x, w)


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
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, want_pattern: bool, products: BackwardProducts
) -> AttentionGradients:
    """g [rows, heads, d_value] is the gradient of z = p v with p = softmax(cap(scale q k^T)), rows at positions 0, 1, ...

    dv = p^T g,  dp = g v^T,  ds = p (dp - sum(dp p)) cap',  dq = scale ds k,  dk = scale ds^T q
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
        dq[part], by_k, by_v, dp = _through_rows(g[part], q[part], k[:, keys], v[:, keys], spec, hidden, bias, products)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g, q [rows, heads, width], k, v [kv_heads, keys, width], hidden [rows, keys], bias [heads, keys]
    -> dq, dk, dv as these, dp [rows, heads, keys]"""
    (rows, heads, _), kv_heads = q.shape, len(k)
    fold = lambda x: rearrange(x, "rows (kv group) d -> kv (group rows) d", kv=kv_heads)  # noqa: E731
    back = lambda x: rearrange(x, "kv (group rows) d -> rows (kv group) d", rows=rows)  # noqa: E731
    unseen = repeat(hidden, "rows keys -> (group rows) keys", group=heads // kv_heads)
    g, q = fold(g), fold(q) * spec.scale
    product = products.batched
    raw = product(q, k.transpose(1, 2))
    scores = softcap(raw, spec.softcap)
    if bias is not None:
        scores = scores + repeat(bias, "(kv group) keys -> kv (group rows) keys", kv=kv_heads, rows=rows)
    p = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    dp = product(g, v.transpose(1, 2)).masked_fill_(unseen, 0.0)
    ds = through_softcap(torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype), raw, spec.softcap)
    return back(product(ds, k).mul_(spec.scale)), product(ds.transpose(1, 2), q), product(p.transpose(1, 2), g), back(dp)


# ---- latent ----------------------------------------------------------------------------------------------------------
# The derivative of latent attention over one whole path, in its plain form: with the keys and values of every head.
#
# The forward pass computes without them; the backward pass reads them as they are shown at their sites. Both forms have the
# same derivative, and the plain one gives that of the pattern as well.

AtSite = Callable[[str, Tensor], Tensor]
"""a site and the gradient of its value after edits -> of its value before them"""

NEEDED_LATENT = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.kv_a_layernorm.hook_in")
"""the sites within a block whose values are read"""


def through_latent(
    attn: LatentAttention,
    g: Tensor,
    rotary: Rotary,
    value: Callable[[str], Tensor],
    at: AtSite,
    want_pattern: bool,
    products: BackwardProducts,
) -> tuple[Tensor, Tensor | None]:
    """g [rows, heads, d_value], of the heads' outputs -> the gradient of the normed stream [rows, d_model], and of the pattern.

    value  the value at a site, in float32
    """
    q, k, v = (value(site) for site in (attn.q_site, attn.k_site, attn.v_site))
    dq, dk, dv, pattern = through_attention(g, q, k, v, attn.spec, want_pattern, products)
    return _queries(attn, dq, rotary, value, at, products) + _keys(attn, dk, dv, rotary, value, at, products), pattern


def _queries(
    attn: LatentAttention, dq: Tensor, rotary: Rotary, value: Callable[[str], Tensor], at: AtSite, products: BackwardProducts
) -> Tensor:
    """[rows, heads, d_head] -> [rows, d_model]"""
    plain, turned = at(attn.q_site, dq).split([attn.plain, attn.turned], dim=-1)
    turned = through_rotary(at(attn.rotated_q_site, turned), rotary)
    g = products.linear(rearrange(torch.cat([plain, turned], dim=-1), "rows heads d -> rows (heads d)"), attn.q)
    if attn.q_a is None or attn.q_a_norm is None:
        return g
    g = through_norm(at(attn.q_latent_site, g), value(attn.q_a_site), attn.q_a_norm)
    return products.linear(at(attn.q_a_site, g), attn.q_a)


def _keys(
    attn: LatentAttention,
    dk: Tensor,
    dv: Tensor,
    rotary: Rotary,
    value: Callable[[str], Tensor],
    at: AtSite,
    products: BackwardProducts,
) -> Tensor:
    """Keys [rows, heads, d_head] and values [rows, heads, d_value] -> [rows, d_model]"""
    plain, turned = dk.split([attn.plain, attn.turned], dim=-1)
    shared = through_rotary(at(attn.rotated_k_site, turned.sum(1, keepdim=True)), rotary)[:, 0]
    by_head = rearrange(torch.cat([plain, dv], dim=-1), "rows heads d -> rows (heads d)")  # d = plain + d_value
    weight = rearrange(torch.cat([attn.k.weight, attn.v.weight], dim=-1), "heads rank d -> (heads d) rank")
    latent = at(attn.latent_site, products.batched(by_head[None], weight[None])[0])
    latent = at(attn.kv_a_site, through_norm(latent, value(attn.kv_a_site), attn.kv_a_norm))
    return products.linear(torch.cat([latent, shared], dim=-1), attn.kv_a)


# ---- mixture ---------------------------------------------------------------------------------------------------------
# The derivative of a mixture of experts. Which experts a row goes to is constant; their weights are not, as in transformers.
#
#     out = sum_e w[e] y[e] + shared        dy[e] = w[e] g,    dw[e] = y[e] . g,    and from the weights to the router's logits
#
# What lies inside an expert before its activation has no site, so it is computed again.

NEEDED_MIXTURE = (
    "gate.hook_out",
    "gate.hook_choice",
    "gate.hook_expert_indices",
    "gate.hook_expert_weights",
    "experts.hook_expert_out",
)
NEEDED_SHARED = ("shared_expert.hook_out", "shared_expert_gate.hook_out")
"""the sites within a mixture whose values are read; the latter if it has them"""


def through_mixture(
    mixture: Mixture, g: Tensor, x: Tensor, value: Callable[[str], Tensor], at: AtSite, products: BackwardProducts
) -> Tensor:
    """g [rows, d_model], of what the mixture returns -> the gradient of its input x [rows, d_model].

    value  the value at a site, in float32
    """
    chosen = value(mixture.chosen_site).long()
    mixed, outs = at(mixture.experts_site, g), value(mixture.each_site)
    weights = value(mixture.weights_site).gather(-1, chosen)
    dx = _experts(mixture, weights[..., None] * mixed[:, None], x, chosen, at, products)
    spread = g.new_zeros(len(g), mixture.num_experts).scatter(-1, chosen, (outs * mixed[:, None]).sum(-1))
    dw = at(mixture.weights_site, spread).gather(-1, chosen)
    logits, scores = value(mixture.logits_site), value(mixture.choice_site)
    dx = dx + products.linear(at(mixture.logits_site, _weights(dw, logits, scores, chosen, mixture.routing)), mixture.router)
    return dx if mixture.shared is None else dx + _shared(mixture, mixture.shared, g, x, value, at, products)


def _experts(mixture: Mixture, g: Tensor, x: Tensor, chosen: Tensor, at: AtSite, products: BackwardProducts) -> Tensor:
    """g [rows, top, d_model], of the chosen experts' outputs -> [rows, d_model]"""
    experts = mixture.experts
    g = expert_products(at(mixture.each_site, g), chosen, experts.down.transpose(1, 2), None, products.plain)
    bias = None if experts.up_bias is None else experts.up_bias.float()
    wide = expert_products(x, chosen, experts.up, bias, products.plain)
    g = _through_gate(at(mixture.post_site, g), wide, mixture.kind, experts.gated)
    return expert_products(g, chosen, experts.up.transpose(1, 2), None, products.plain).sum(1)


def _shared(
    mixture: Mixture,
    shared: SharedExpert,
    g: Tensor,
    x: Tensor,
    value: Callable[[str], Tensor],
    at: AtSite,
    products: BackwardProducts,
) -> Tensor:
    """g [rows, d_model], of what the shared expert adds -> [rows, d_model]"""
    dx = x.new_zeros(x.shape)
    if mixture.shared_gate is not None:
        open_ = sigmoid(value(mixture.shared_gate_site))
        slope = (g * value(mixture.shared_site)).sum(-1, keepdim=True) * open_ * (1 - open_)
        dx = products.linear(at(mixture.shared_gate_site, slope), mixture.shared_gate)
        g = g * open_
    wide = products.plain(x, shared.up.weight)
    wide = wide if shared.up.bias is None else wide + shared.up.bias.float()
    g = products.linear(at(mixture.shared_site, g), shared.down)
    return dx + products.linear(_through_gate(g, wide, shared.kind, shared.gated), shared.up)


def _through_gate(g: Tensor, wide: Tensor, kind: Activation, gated: bool) -> Tensor:
    """The gradient of what an activation reads; gated: of gate | up."""
    if not gated:
        return through_activation(g, wide, kind)
    gate, up = wide.chunk(2, dim=-1)
    return torch.cat([through_activation(g * up, gate, kind), activated(gate, kind) * g], dim=-1)


def _weights(g: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
    """g [rows, top], of the weights -> the gradient of the logits [rows, experts], by autograd on the host.

    scores  what the experts were chosen by
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = logits.to("cpu", copy=True).requires_grad_()
        there, by = chosen.to("cpu", copy=True), scores.to("cpu", copy=True)
        weights = weigh(without_barred(leaf, by, there), there, routing).masked_fill(barred(by, there), 0.0)
        (found,) = torch.autograd.grad(weights, leaf, g.to("cpu", copy=True))
    return found.to(g.device)
