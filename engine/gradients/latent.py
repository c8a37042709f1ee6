"""The derivative of latent attention over one whole path, in its plain form: with the keys and values of every head.

The forward pass computes without them; the backward pass reads them as they are shown at their sites. Both forms have the same
derivative, and the plain one gives that of the pattern as well.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from replaylens.engine.gradients.attention import through_attention
from replaylens.engine.gradients.products import BackwardProducts
from replaylens.engine.gradients.rowwise import through_norm, through_rotary
from replaylens.engine.model.latent import LatentAttention
from replaylens.engine.model.rotary import Rotary

AtSite = Callable[[str, Tensor], Tensor]
"""a site and the gradient of its value after edits -> of its value before them"""

NEEDED = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.kv_a_layernorm.hook_in")
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
    g = products.linear(torch.cat([plain, turned], dim=-1).flatten(1), attn.q)
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
    by_head = torch.cat([plain, dv], dim=-1).flatten(1)  # [rows, heads * (plain + d_value)]
    weight = torch.cat([attn.k.weight, attn.v.weight], dim=-1).transpose(1, 2).flatten(0, 1)  # [..., rank]
    latent = at(attn.latent_site, products.batched(by_head[None], weight[None])[0])
    latent = at(attn.kv_a_site, through_norm(latent, value(attn.kv_a_site), attn.kv_a_norm))
    return products.linear(torch.cat([latent, shared], dim=-1), attn.kv_a)
