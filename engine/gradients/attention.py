"""The derivative of one layer's attention over one whole path."""

from typing import NamedTuple

import torch
from torch import Tensor

from replaylens.engine.gradients.rowwise import through_softcap
from replaylens.engine.model.ops import AttentionSpec, softcap, visible

_MAX_SCORES = 1 << 22
"""scores computed together; beyond, key heads are taken one after another. Depends on the path's length only, as bits must"""


class AttentionGradients(NamedTuple):
    """Gradients of the inputs of an attention."""

    q: Tensor
    """[rows, heads, d_head], after the rotation"""
    k: Tensor
    """[rows, kv_heads, d_head], after the rotation"""
    v: Tensor
    """[rows, kv_heads, d_head]"""
    pattern: Tensor | None
    """[rows, heads, keys], 0 where a row does not see a key; None unless asked for"""


def through_attention(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, want_pattern: bool
) -> AttentionGradients:
    """g [rows, heads, d_head] is the gradient of z = p v with p = softmax(cap(scale q k^T)), rows at positions 0, 1, ...

    dv = p^T g,  dp = g v^T,  ds = p (dp - sum(dp p)) cap',  dq = scale ds k,  dk = scale ds^T q
    """
    rows, heads, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    by_head = lambda x: x.view(rows, kv_heads, group, d).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, d)  # noqa: E731
    g, q, k, v = by_head(g), by_head(q), k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    hidden = ~visible(torch.arange(rows, device=q.device), rows, spec.window).repeat(group, 1)  # [group * rows, keys]
    together = kv_heads if heads * rows * rows <= _MAX_SCORES else 1
    by_piece = zip(g.split(together), q.split(together), k.split(together), v.split(together), strict=True)
    pieces = [_through_heads(a, b, c, d, spec, hidden, want_pattern) for a, b, c, d in by_piece]
    dq, dk, dv, dp = (torch.cat(found) for found in zip(*pieces, strict=True))
    back = lambda x: x.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)  # noqa: E731
    return AttentionGradients(back(dq), dk.transpose(0, 1), dv.transpose(0, 1), back(dp) if want_pattern else None)


def _through_heads(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, hidden: Tensor, want_pattern: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g and q [kv_heads, group * rows, d], k and v [kv_heads, rows, d]"""
    raw = torch.bmm(q * spec.scale, k.transpose(1, 2))
    p = softcap(raw, spec.softcap).masked_fill(hidden, -torch.inf).softmax(-1)
    dv = torch.bmm(p.transpose(1, 2), g)
    dp = torch.bmm(g, v.transpose(1, 2)).masked_fill_(hidden, 0.0)
    ds = through_softcap(p * (dp - (dp * p).sum(-1, keepdim=True)), raw, spec.softcap).mul_(spec.scale)
    return torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), q), dv, dp if want_pattern else dp.new_empty(len(dp), 0)
