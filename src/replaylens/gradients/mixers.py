"""The derivative of the recurrent parts of hybrids over one whole path: gated convolutions, gated delta nets, Mamba-2.

Mirrors `model/mixers.py`. What has no site of its own (the convolution before its activation, the rates before theirs) is
computed again from what has one. On a CPU only: the walk back over a recurrence is a kernel (`kernels/cpu_recurrent.py`).
"""

from collections.abc import Callable
from functools import reduce

import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.layers import Conv, Linear
from replaylens.engine.model.mixers import DeltaNet, GatedConv, Mamba2, Mixer
from replaylens.gradients.derivatives import AtSite, BackwardProducts, activation, norm_factor, through_norm

SiteValue = Callable[[str], Tensor]
"""the value at a site, in float32"""


def needed_mixer(config: ModelConfig) -> tuple[str, ...]:
    """The sites within a block with a recurrent part whose values are read."""
    assert config.mixer is not None
    names = ["conv.hook_in", "conv.hook_out", "hook_gate"]
    if config.mixer.kind != "conv":
        names += [f"hook_{part}" for part in ("q", "k", "v", "log_decay", "read")]
    names += ["hook_beta"] if config.mixer.kind == "delta" else []
    return tuple(f"mixer.{name}" for name in names)


def through_mixer(
    mixer: Mixer, g: Tensor, x: Tensor, value: SiteValue, at: AtSite, products: BackwardProducts, own: bool = False
) -> Tensor:
    """g [rows, width], of what the output product reads -> the gradient of the normed stream x, [rows, d_model].

    own  nothing passes from one position to another
    """
    if isinstance(mixer, DeltaNet):
        return _delta_net(mixer, g, x, value, at, products, own)
    if isinstance(mixer, Mamba2):
        return _mamba2(mixer, g, x, value, at, products, own)
    assert isinstance(mixer, GatedConv)
    before, _, inner = _ahead(x, mixer.up, products).chunk(3, dim=-1)
    g = at(mixer.z_site, g)
    by_gate = at(mixer.gate_site, g * value(mixer.conv_site))
    by_conv = at(mixer.conv_site, g * value(mixer.gate_site))
    by_in = at(mixer.conv_in_site, _through_conv(by_conv, mixer.conv, own))
    return products.linear(torch.cat([by_in * inner, by_gate, by_in * before], dim=-1), mixer.up)


def _delta_net(
    net: DeltaNet, g: Tensor, x: Tensor, value: SiteValue, at: AtSite, products: BackwardProducts, own: bool
) -> Tensor:
    m, read, gate = net.mixer, value(net.read_site), value(net.gate_site)
    g = at(net.z_site, rearrange(g, "rows (heads d) -> rows heads d", heads=m.heads))
    open_, slope = activation(gate, "silu", products)
    by_gate = at(net.gate_site, g * (read * norm_factor(read, net.norm, products) * net.norm.weight) * slope)
    by_read = at(net.read_site, through_norm(g * open_, read, net.norm, products))
    dq, dk, dv, by_beta, by_decay = _recurrence(net, by_read, value, at, own)
    raw_q, raw_k, _ = value(net.conv_site).split([net.keys, net.keys, net.values], dim=-1)
    by_head = lambda x: rearrange(x, "rows (heads d) -> rows heads d", heads=m.key_heads)  # noqa: E731
    dq = through_norm(dq / m.d_key, by_head(raw_q), net.unit_norm, products)
    dk = through_norm(dk * m.d_key**-0.5, by_head(raw_k), net.unit_norm, products)
    mixed = _convolution(net, torch.cat([x.flatten(1) for x in (dq, dk, dv)], dim=-1), value, at, products, own)
    strength, step = _ahead(x, net.rates, products).chunk(2, dim=-1)
    open_ = products.apply("sigmoid", strength)
    assert by_beta is not None
    rates = [by_beta * (m.beta_scale * open_ * (1 - open_)), _by_step(by_decay, step + net.step_bias, net.a_log, products)]
    return products.linear(torch.cat([mixed, by_gate.flatten(1)], dim=-1), net.up) + products.linear(
        torch.cat(rates, dim=-1), net.rates
    )


def _mamba2(net: Mamba2, g: Tensor, x: Tensor, value: SiteValue, at: AtSite, products: BackwardProducts, own: bool) -> Tensor:
    m, gate = net.mixer, value(net.gate_site)
    inner = value(net.conv_site)[:, : net.values].unflatten(1, (m.heads, m.d_value))
    read = (value(net.read_site) + net.skip[:, None] * inner).flatten(1)
    by_gate, by_out = _gated(net, at(net.z_site, g), read, gate, products)
    by_gate, by_out = at(net.gate_site, by_gate), by_out.unflatten(1, (m.heads, m.d_value))
    dq, dk, dv, _, by_decay = _recurrence(net, at(net.read_site, by_out), value, at, own)
    before = _ahead(x, net.up, products)[:, -m.heads :] + net.step_bias
    free = products.apply("softplus", before)
    step = free.clamp(m.min_step, m.max_step or None)
    passes = (free == step).float()  # a step size at its bound does not change with what it is made of
    by_step = products.total(dv * inner)[..., 0] * products.apply("sigmoid", before) * passes
    by_step = by_step + _by_step(by_decay, before, net.a_log, products) * passes
    by_inner = dv * step[..., None] + net.skip[:, None] * by_out
    mixed = _convolution(net, torch.cat([x.flatten(1) for x in (by_inner, dk, dq)], dim=-1), value, at, products, own)
    return products.linear(torch.cat([by_gate, mixed, by_step], dim=-1), net.up)


def _gated(net: Mamba2, g: Tensor, x: Tensor, gate: Tensor, products: BackwardProducts) -> tuple[Tensor, Tensor]:
    """The gradients of gate and x, from that of x times the activated gate, normed before or after: [rows, width] each."""
    norm, (open_, slope) = net.norm, activation(gate, "silu", products)
    if norm is None:
        return g * x * slope, g * open_
    grouped = lambda x: x.view(len(x), *norm.weight.shape) if norm.by_head else x  # noqa: E731
    back = lambda g, x: through_norm(grouped(g), grouped(x), norm, products).flatten(1)  # noqa: E731
    if net.mixer.gate_first:
        g = back(g, x * open_)
        return g * x * slope, g * open_
    normed = (grouped(x) * norm_factor(grouped(x), norm, products) * norm.weight).flatten(1)
    return g * normed * slope, back(g * open_, x)


def _recurrence(
    mixer: Mixer, g: Tensor, value: SiteValue, at: AtSite, own: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients before their edits of queries, keys, values, strengths of update (if any) and log decays."""
    from replaylens.kernels.cpu_recurrent import recur_back  # compiled for hybrids only

    q, k, v, decay = (value(site) for site in (mixer.q_site, mixer.k_site, mixer.v_site, mixer.decay_site))
    beta = value(mixer.strength_site) if isinstance(mixer, DeltaNet) else None
    found, key_heads = recur_back(q, k, v, beta, decay, g, own), q.shape[1]
    by_key_head = lambda x: reduce(  # noqa: E731
        torch.add, rearrange(x, "rows (keys group) d -> group rows keys d", keys=key_heads).unbind()
    )
    dq, dk = at(mixer.q_site, by_key_head(found.q)), at(mixer.k_site, by_key_head(found.k))
    by_beta = None if beta is None else at(mixer.strength_site, found.beta)
    return dq, dk, at(mixer.v_site, found.v), by_beta, at(mixer.decay_site, found.decay)


def _by_step(by_decay: Tensor, step: Tensor, a_log: Tensor, products: BackwardProducts) -> Tensor:
    """The gradient of step, from that of the log decay -exp(a_log) softplus(step): [rows, heads] each."""
    return by_decay * (-products.apply("exp", a_log.float()) * products.apply("sigmoid", step))


def _convolution(mixer: Mixer, g: Tensor, value: SiteValue, at: AtSite, products: BackwardProducts, own: bool) -> Tensor:
    """The gradient of what is convolved and then activated: [rows, channels] each."""
    conv, x = mixer.conv, value(mixer.conv_in_site)
    raw = x.new_zeros(x.shape)
    for shift, weight in enumerate(conv.weight.float().flip(0)):
        raw[shift:] += weight * x[: len(x) - shift]
    raw = raw if conv.bias is None else raw + conv.bias.float()
    g = at(mixer.conv_site, g) * activation(raw, "silu", products)[1]
    return at(mixer.conv_in_site, _through_conv(g, conv, own))


def _through_conv(g: Tensor, conv: Conv, own: bool) -> Tensor:
    """The gradient of what is convolved, [rows, channels]: each position is read by itself and the next ones."""
    weights = conv.weight.float().flip(0)  # of the row's own position first
    out = g * weights[0]
    for shift, weight in enumerate([] if own else weights[1:], start=1):
        out[: max(0, len(g) - shift)] += weight * g[shift:]
    return out


def _ahead(x: Tensor, linear: Linear, products: BackwardProducts) -> Tensor:
    """x [rows, inputs] -> [rows, outputs]"""
    out = products.ahead(x, linear)
    return out if linear.bias is None else out + linear.bias.float()
