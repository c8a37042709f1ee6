"""The derivative of one layer's attention over one whole path."""

from typing import NamedTuple

import torch
from torch import Tensor

from replaylens.engine.gradients.products import BackwardProducts
from replaylens.engine.gradients.rowwise import through_softcap
from replaylens.engine.model.ops import AttentionSpec
from replaylens.engine.model.torch_ops import position_bias, softcap, visible

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
    rows, heads, _ = q.shape
    kv_heads = len(k)
    group = heads // kv_heads
    by_head = lambda x: x.reshape(rows, kv_heads, group, -1).permute(1, 2, 0, 3)  # noqa: E731
    fold = lambda x: by_head(x).reshape(kv_heads, group * rows, -1)  # noqa: E731
    back = lambda x: x.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)  # noqa: E731
    g, q, unseen = fold(g), fold(q) * spec.scale, hidden.repeat(group, 1)
    product = products.batched
    raw = product(q, k.transpose(1, 2))
    scores = softcap(raw, spec.softcap)
    if bias is not None:
        scores = scores + bias.view(kv_heads, group, 1, -1).expand(-1, -1, rows, -1).reshape(scores.shape)
    p = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    dp = product(g, v.transpose(1, 2)).masked_fill_(unseen, 0.0)
    ds = through_softcap(torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype), raw, spec.softcap)
    return back(product(ds, k).mul_(spec.scale)), product(ds.transpose(1, 2), q), product(p.transpose(1, 2), g), back(dp)
