"""Rotate q and k by their positions and write k and v to their pages, in one launch.

    (a, b) -> (a cos - b sin, b cos + a sin),  a = x[:rotary / 2], b = x[rotary / 2 : rotary];  the rest is unchanged

The arithmetic is float32 with one rounding at the end. It is elementwise, hence canonical. The table is indexed by
position, so a row's angle does not depend on its neighbours. Rows on page 0, the null page, are not written. Padding rows of
a captured graph point there, and the null page must stay zero because the attention reads it for keys that do not exist.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import (
    EXACT,
    PAGE_SIZE,
    ceil_div,
    next_power_of_2,
    norm_shape,
    require,
    require_float,
    require_rows,
    require_same,
    require_shape,
)
from replaylens.kernels.norm import moments
from replaylens.kernels.shared import PagedRows

# ---- rope ------------------------------------------------------------------------------------------------------------

_HEADS = 8  # per program


@triton.jit
def _turn(X, OUT, head, live, cos, sin, half_mask, e, stride_xh, stride_oh, HALF: tl.constexpr):
    """Rotate the first 2 HALF dimensions of the given heads."""
    at, to = X + head[:, None] * stride_xh + e[None, :], OUT + head[:, None] * stride_oh + e[None, :]
    mask = live[:, None] & half_mask[None, :]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if X.dtype.element_ty == tl.float32:  # as `kernels/definition.py` rounds
        cos, sin = tl.broadcast_to(cos, a.shape), tl.broadcast_to(sin, a.shape)
        tl.store(to, tl.fma(-b, sin, a * cos), mask=mask)
        tl.store(to + HALF, tl.fma(a, sin, b * cos), mask=mask)
    else:
        tl.store(to, (a * cos - b * sin).to(OUT.dtype.element_ty), mask=mask)
        tl.store(to + HALF, (b * cos + a * sin).to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _copy(X, OUT, head, live, d, keep, stride_xh, stride_oh):
    """Copy the dimensions that `keep` selects, unchanged."""
    mask = live[:, None] & keep[None, :]
    x = tl.load(X + head[:, None] * stride_xh + d[None, :], mask=mask, other=0.0)
    tl.store(OUT + head[:, None] * stride_oh + d[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["stride_p"])
def _rope_kernel(
    Q, K, V, Q_OUT, K_CACHE, V_CACHE, TABLE, SEQUENCE, POSITION, PAGES,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, kv_stride, head_stride, stride_p,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Program (row, i) handles HEADS heads: query heads first, then key and value heads."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(POSITION + row)
    e, d = tl.arange(0, HALF_BLOCK), tl.arange(0, HEAD_BLOCK)
    turned, rest = e < HALF, (d >= 2 * HALF) & (d < HEAD)
    angle = TABLE + position.to(tl.int64) * 2 * HALF + e
    cos = tl.load(angle, mask=turned, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF, mask=turned, other=0.0).to(tl.float32)[None, :]
    query_parts = (QUERY_HEADS + HEADS - 1) // HEADS
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        live = head < QUERY_HEADS
        to = Q_OUT + row * QUERY_HEADS * HEAD
        _turn(Q + row * stride_q, to, head, live, cos, sin, turned, e, stride_qh, HEAD, HALF)
        if 2 * HALF < HEAD:
            _copy(Q + row * stride_q, to, head, live, d, rest, stride_qh, HEAD)
    else:
        head = (part - query_parts) * HEADS + tl.arange(0, HEADS)
        live = head < KV_HEADS
        if STORE:
            page = tl.load(PAGES + tl.load(SEQUENCE + row).to(tl.int64) * stride_p + position // PAGE).to(tl.int64)
            slot = (page * PAGE + position % PAGE) * kv_stride
            live = live & (page > 0)
            _turn(K + row * stride_k, K_CACHE + slot, head, live, cos, sin, turned, e, stride_kh, head_stride, HALF)
            if 2 * HALF < HEAD:
                _copy(K + row * stride_k, K_CACHE + slot, head, live, d, rest, stride_kh, head_stride)
            _copy(V + row * stride_v, V_CACHE + slot, head, live, d, d < HEAD, stride_vh, head_stride)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    rows: PagedRows,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int = PAGE_SIZE,
) -> Tensor:
    """Rotate q and k, write k and v of every row to its slot, and return the rotated q.

    q [rows, heads, d_head], k and v [rows, kv_heads, d_head] may be views of one packed product. table [positions, 2,
    rotary / 2] float32.
    """
    return _launch(q, k, v, table, rows, (k_cache, v_cache), page_size)


def rotate(x: Tensor, table: Tensor, rows: PagedRows) -> Tensor:
    """Rotate x [rows, heads, d_head], with the arithmetic of `rotate_and_store` but without pages."""
    return _launch(x, x[:, :0], x[:, :0], table, rows, None, PAGE_SIZE)


def store(k: Tensor, v: Tensor, rows: PagedRows, k_cache: Tensor, v_cache: Tensor, page_size: int = PAGE_SIZE) -> None:
    """Write k and v [rows, kv_heads, d_head] to their slots unrotated."""
    _launch(k[:, :0], k, v, None, rows, (k_cache, v_cache), page_size)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    rows: PagedRows,
    caches: tuple[Tensor, Tensor] | None,
    page_size: int,
) -> Tensor:
    num_rows, heads, d_head = q.shape
    kv_heads, half = k.shape[1], 0 if table is None else table.shape[2]
    check_heads(q, k, v, table, rows, caches)
    q_out = torch.empty(num_rows, heads, d_head, dtype=q.dtype, device=q.device)
    parts = ceil_div(heads, _HEADS) + ceil_div(kv_heads, _HEADS)
    if num_rows:
        k_cache, v_cache = caches or (k, v)
        _rope_kernel[(num_rows, parts)](
            q, k, v, q_out, k_cache, v_cache,
            table if table is not None else q, rows.sequence, rows.position, rows.page_table,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_cache.stride(0), k_cache.stride(1), rows.page_table.stride(0),
            heads, kv_heads, d_head, next_power_of_2(d_head), half, next_power_of_2(max(half, 1)), page_size, _HEADS,
            caches is not None, num_warps=4, **EXACT,
        )  # fmt: skip
    return q_out


def check_heads(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, rows: PagedRows, caches: tuple[Tensor, Tensor] | None
) -> None:
    """Raise ValueError if heads, rotary table and caches do not fit together."""
    num_rows, _, d_head = q.shape
    require_float("q", q)
    require_shape("rows.position", rows.position, (num_rows,))
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_shape(name, x, (num_rows, q.shape[1] if name == "q" else k.shape[1], d_head))
        require_same(name, x, q)
        require_rows(name, x)
    if table is not None:
        require_shape("table", table, (None, 2, None))
        require(table.dtype == torch.float32 and table.is_contiguous(), "The rotary table must be contiguous float32.")
        require(2 * table.shape[2] <= d_head, "The rotary table rotates {} of {} dimensions.", 2 * table.shape[2], d_head)
    for name, cache in zip(("k_cache", "v_cache"), caches or (), strict=False):
        require_shape(name, cache, (None, k.shape[1], d_head))
        require_same(name, cache, q)
        require_rows(name, cache)
        assert caches is not None
        require(cache.stride() == caches[0].stride(), "k_cache and v_cache must have the same strides.")


# ---- norm rope -------------------------------------------------------------------------------------------------------
# Norm the heads of q and k, rotate them by their positions and write k and v to their pages, in one launch.
#
#     y = round(x / sqrt(mean(x^2) + eps) * weight)        (a, b) -> (a cos - b sin, b cos + a sin),  a, b: the halves of y
#
# To the bit, `norm` of both and `rotate_and_store` after it. The sum of a head's squares depends on the layout of threads,
# so a program has the tile of `norm` (`launch.norm_shape`); the rotation is elementwise. Normed values are rounded to the
# storage dtype before they are rotated, exactly as if they were written to memory.


@triton.jit
def _normed(X, WEIGHT, head, live, d, width, eps, stride_h, LAYER: tl.constexpr, HEADS: tl.constexpr):
    """The norm of the given heads, as `_norm_kernel` computes it: [heads, width], rounded."""
    at = X + head.to(tl.int64)[:, None] * stride_h
    x = tl.load(at + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    if X.dtype.element_ty == tl.float32:
        mean, root = moments(at, live[:, None], width, eps, LAYER, HEADS)
        if LAYER:
            x = x - mean
        spread = tl.div_rn(tl.full((HEADS, 1), 1.0, tl.float32), root)
    else:
        if LAYER:
            x = x - (tl.sum(x, 1) / width)[:, None]
        spread = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    y = x * spread * tl.load(WEIGHT + d).to(tl.float32)[None, :]
    return y.to(X.dtype.element_ty)


@triton.jit
def _store_turned(y, OUT, head, live, cos, sin, e, stride_h, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotate y [HEADS, 2 HALF] and store it."""
    a, b = tl.split(tl.permute(tl.reshape(y, (HEADS, 2, HALF)), (0, 2, 1)))
    a, b = a.to(tl.float32), b.to(tl.float32)
    to = OUT + head[:, None] * stride_h + e[None, :]
    if OUT.dtype.element_ty == tl.float32:
        cos, sin = tl.broadcast_to(cos, a.shape), tl.broadcast_to(sin, a.shape)
        tl.store(to, tl.fma(-b, sin, a * cos), mask=live[:, None])
        tl.store(to + HALF, tl.fma(a, sin, b * cos), mask=live[:, None])
    else:
        tl.store(to, (a * cos - b * sin).to(OUT.dtype.element_ty), mask=live[:, None])
        tl.store(to + HALF, (b * cos + a * sin).to(OUT.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["stride_p"])
def _norm_rope_kernel(
    Q, K, V, Q_WEIGHT, K_WEIGHT, Q_OUT, K_CACHE, V_CACHE, TABLE, SEQUENCE, POSITION, PAGES, width, eps,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, kv_stride, head_stride, stride_p,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    LAYER: tl.constexpr,
):  # fmt: skip
    """Program (row, i) handles HEADS heads: query heads first, then key and value heads."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(POSITION + row)
    e, d = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    angle = TABLE + position.to(tl.int64) * 2 * HALF + e
    cos, sin = tl.load(angle).to(tl.float32)[None, :], tl.load(angle + HALF).to(tl.float32)[None, :]
    query_parts = (QUERY_HEADS + HEADS - 1) // HEADS
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        live = head < QUERY_HEADS
        y = _normed(Q + row * stride_q, Q_WEIGHT, head, live, d, width, eps, stride_qh, LAYER, HEADS)
        _store_turned(y, Q_OUT + row * QUERY_HEADS * 2 * HALF, head, live, cos, sin, e, 2 * HALF, HEADS, HALF)
    else:
        head = (part - query_parts) * HEADS + tl.arange(0, HEADS)
        live = head < KV_HEADS
        y = _normed(K + row * stride_k, K_WEIGHT, head, live, d, width, eps, stride_kh, LAYER, HEADS)
        page = tl.load(PAGES + tl.load(SEQUENCE + row).to(tl.int64) * stride_p + position // PAGE).to(tl.int64)
        slot = (page * PAGE + position % PAGE) * kv_stride
        stored = live & (page > 0)  # page 0 must stay zero
        _store_turned(y, K_CACHE + slot, head, stored, cos, sin, e, head_stride, HEADS, HALF)
        v = tl.load(V + row * stride_v + head[:, None] * stride_vh + d[None, :], mask=live[:, None], other=0.0)
        tl.store(V_CACHE + slot + head[:, None] * head_stride + d[None, :], v, mask=stored[:, None])


def can_fuse(d_head: int, table: Tensor) -> bool:
    """Whether one launch can norm and rotate heads: all dimensions are rotated, and there are a power of two of them."""
    return d_head == 2 * table.shape[2] and d_head == next_power_of_2(d_head)


def norm_rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    kind: str,
    table: Tensor,
    rows: PagedRows,
    k_cache: Tensor,
    v_cache: Tensor,
    page_size: int = PAGE_SIZE,
) -> Tensor:
    """`norm` of q and k by head, and `rotate_and_store`. Precondition: `can_fuse`.

    q [rows, heads, d_head], k and v [rows, kv_heads, d_head] may be views of one packed product. weights: of q and k, [d_head]
    each. table [positions, 2, d_head / 2] float32.
    """
    num_rows, heads, d_head = q.shape
    kv_heads = k.shape[1]
    require(kind in ("rms", "layer"), "Unknown norm {!r}. Use rms or layer.", kind)
    require(can_fuse(d_head, table), "{} dimensions with a table of {} cannot be fused.", d_head, table.shape)
    check_heads(q, k, v, table, rows, (k_cache, v_cache))
    for name, w in zip(("weight of q", "weight of k"), weights, strict=True):
        require_shape(name, w, (d_head,))
        require_same(name, w, q)
    q_out = torch.empty(num_rows, heads, d_head, dtype=q.dtype, device=q.device)
    if num_rows:
        shape = norm_shape(d_head)
        parts = ceil_div(heads, shape.rows) + ceil_div(kv_heads, shape.rows)
        _norm_rope_kernel[(num_rows, parts)](
            q, k, v, *weights, q_out, k_cache, v_cache, table, rows.sequence, rows.position, rows.page_table, d_head, eps,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_cache.stride(0), k_cache.stride(1), rows.page_table.stride(0),
            heads, kv_heads, d_head // 2, page_size, shape.rows, kind == "layer", num_warps=shape.warps, **EXACT,
        )  # fmt: skip
    return q_out
