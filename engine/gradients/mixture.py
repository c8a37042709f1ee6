"""The derivative of a mixture of experts. Which experts a row goes to is constant; their weights are not, as in transformers.

    out = sum_e w[e] y[e] + shared        dy[e] = w[e] g,    dw[e] = y[e] . g,    and from the weights to the router's logits

What lies inside an expert before its activation has no site, so it is computed again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from replaylens.engine.gradients.latent import AtSite
from replaylens.engine.gradients.products import BackwardProducts
from replaylens.engine.gradients.rowwise import activated, through_activation
from replaylens.engine.model.config import Activation
from replaylens.engine.model.experts import expert_products
from replaylens.engine.model.mixture import Mixture, SharedExpert
from replaylens.engine.model.routing import Routing, barred, sigmoid, weigh, without_barred

NEEDED = (
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
