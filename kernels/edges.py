"""Attention of single (row, head) pairs over pages, with edges that edits hide or replace.

    s[j] = q . k[j] * scale (+ slope j), or -inf if the edge is hidden
    out = sum_j w[j] v[j],  w[j] = softmax(s)[j], or what replaces it

Only pairs with a changed edge come here; all others keep the result of `kernels/attention.py`, so that an edit changes no other
row or head. Each pair has a program of its own, which sums over blocks of `KV_BLOCK` keys from position 0 on, in one launch
shape. Its bits depend on the row alone. It is slower than the tiled kernel by the number of rows and heads that share a tile
there.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import (
    EXACT,
    KV_BLOCK,
    PAGE_SIZE,
    next_power_of_2,
    require,
    require_float,
    require_rows,
    require_same,
    require_shape,
)
from replaylens.kernels.shared import PagedRows

_WIDE_BLOCK = 16
"""canonical: keys per step if heads are wider than 256: as many as registers hold"""

HIDDEN, REPLACED = 1, 2
"""bits of an edge: hidden from the softmax; its weight replaced after the softmax"""


@dataclass(frozen=True)
class CutPairs:
    """(row, head) pairs with changed edges."""

    row: Tensor
    """[pairs] int32"""
    head: Tensor
    """[pairs] int32"""
    edges: Tensor
    """[pairs, keys] uint8: HIDDEN, REPLACED, both or 0; keys at least up to every row's position"""
    weights: Tensor | None = None
    """[pairs, keys] float32: the weights of replaced edges; None: zero"""


@triton.jit(do_not_specialize=["window", "stride_t", "stride_e"])
def _edges_kernel(
    Q, K, V, OUT, ROW, HEADS, EDGES, WEIGHTS, SEQUENCE, POSITION, TABLES, SINKS, SLOPES,
    stride_qr, stride_qh, kv_stride, head_stride, stride_or, stride_oh, stride_t, stride_e, scale, softcap, window,
    GROUP: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, HEAD_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SETS: tl.constexpr, HAS_SINKS: tl.constexpr,
    SLOPED: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row, head = tl.load(ROW + pair).to(tl.int64), tl.load(HEADS + pair)
    position = tl.load(POSITION + row)
    d = tl.arange(0, HEAD_BLOCK)
    inside, of_value = d < HEAD, d < VALUE
    q = tl.load(Q + row * stride_qr + head * stride_qh + d, mask=inside, other=0.0).to(tl.float32)
    TABLE = TABLES + tl.load(SEQUENCE + row).to(tl.int64) * stride_t
    at_head = (head // GROUP) * head_stride
    m = tl.full((1,), float("-inf"), tl.float32)
    l = tl.zeros((1,), tl.float32)
    a = tl.zeros((HEAD_BLOCK,), tl.float32)
    b = tl.zeros((HEAD_BLOCK,), tl.float32)  # of the weights that are set, which no softmax scales
    for start in tl.range(0, position + 1, BLOCK):
        j = start + tl.arange(0, BLOCK)
        known = j <= position
        page = tl.load(TABLE + j // PAGE, mask=known, other=0).to(tl.int64)
        slot = (page * PAGE + j % PAGE) * kv_stride + at_head
        k = tl.load(K + slot[:, None] + d[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        s = tl.sum(q[None, :] * k, 1) * scale
        if CAPPED:  # as in `attention`: scale holds 2 log2(e) / cap and softcap holds cap log2(e)
            s = softcap - 2.0 * softcap / (1.0 + tl.exp2(s))
        if SLOPED:
            s += tl.load(SLOPES + head) * 1.4426950408889634 * j.to(tl.float32)
        edge = tl.load(EDGES + pair * stride_e + j, mask=known, other=0)
        if WINDOWED:
            known = known & (j > position - window)
        s = tl.where(known & ((edge & 1) == 0), s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.exp2(m - safe)
        p = tl.exp2(s - safe)
        l = l * shrink + tl.sum(p, 0)
        v = tl.load(V + slot[:, None] + d[None, :], mask=of_value[None, :], other=0.0).to(tl.float32)
        replaced = (edge & 2) != 0
        a = a * shrink + tl.sum(tl.where(replaced, 0.0, p)[:, None] * v, 0)
        if SETS:
            weight = tl.load(WEIGHTS + pair * stride_e + j, mask=known & replaced, other=0.0)
            b += tl.sum(weight[:, None] * v, 0)
        m = top
    if HAS_SINKS:  # last of all, as in `attention`: a score without a value
        sink = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.exp2(sink - top)
        a = a * shrink
    out = a / l + b  # also where no weight is set: adding zero turns -0 into 0, in every launch or in none
    tl.store(OUT + row * stride_or + head * stride_oh + d, out.to(OUT.dtype.element_ty), mask=of_value)


def cut_edges(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: PagedRows,
    cut: CutPairs,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    page_size: int = PAGE_SIZE,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Overwrite `out` [rows, heads, d_value], the result of `attention` with the same arguments, at the pairs of `cut`.

    A row without any visible key gets NaN.
    """
    num_rows, heads, d_head = q.shape
    require_float("q", q)
    for name, x in (("q", q), ("out", out), ("k_cache", k_cache), ("v_cache", v_cache)):
        require_same(name, x, q)
        require_rows(name, x)
    d_value = v_cache.shape[-1]
    require_shape("out", out, (num_rows, heads, d_value))
    require_shape("k_cache", k_cache, (None, None, d_head))
    require(
        k_cache.stride() == v_cache.stride(), "k_cache and v_cache have strides {} and {}.", k_cache.stride(), v_cache.stride()
    )
    require_shape("rows.position", rows.position, (num_rows,))
    if sinks is not None:
        require_shape("sinks", sinks, (heads,))
    if slopes is not None:
        require_shape("slopes", slopes, (heads,))
    pairs = len(cut.row)
    require_shape("cut.head", cut.head, (pairs,))
    require_shape("cut.edges", cut.edges, (pairs, None))
    kinds = cut.row.dtype == cut.head.dtype == torch.int32 and cut.edges.dtype == torch.uint8
    require(kinds, "cut has {}, {} and {}. Expected int32, int32 and uint8.", cut.row.dtype, cut.head.dtype, cut.edges.dtype)
    require_rows("cut.edges", cut.edges)
    if cut.weights is not None:
        require_shape("cut.weights", cut.weights, cut.edges.shape)
        same = cut.weights.dtype == torch.float32 and cut.weights.stride() == cut.edges.stride()
        require(same, "cut.weights is {}. Expected float32, with the strides of cut.edges.", cut.weights.dtype)
    if pairs:
        log2e = 1.4426950408889634
        _edges_kernel[(pairs,)](
            q, k_cache, v_cache, out, cut.row, cut.head, cut.edges, cut.edges if cut.weights is None else cut.weights,
            rows.sequence, rows.position, rows.page_table, q if sinks is None else sinks, q if slopes is None else slopes,
            q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), out.stride(0), out.stride(1),
            rows.page_table.stride(0), cut.edges.stride(0),
            2 * log2e * scale / softcap if softcap else log2e * scale, softcap * log2e, window,
            heads // k_cache.shape[1], d_head, d_value, next_power_of_2(d_head), page_size,
            KV_BLOCK if d_head <= 256 else _WIDE_BLOCK, softcap > 0, window > 0, cut.weights is not None, sinks is not None,
            slopes is not None, num_warps=4, **EXACT,
        )  # fmt: skip
