"""The steps of canonical attention, which its kernels share: a block of keys, a run of blocks, merging, states in memory.

A partial softmax is (m, l, a): maximum, sum, weighted values. While its split is not complete, the sum is kept as `sums`: one
column per pair of keys of a block, added up by `closed` at the end of the split. The order is described in
`kernels/attention.py`.

Keys may have columns beyond those of their values (`other` of the queries meets them): latent attention, whose values are the
first HEAD columns of its keys. A score is then one dot over the first columns, continued by one over the rest.

ALiBi adds to a score the position of its key times the head's slope: which rows are computed together does not matter.

The state of a (row, query head) pair between two kernels is `state_width` numbers in float32 (`kernels/shared.py`): m and l of
the complete splits, m of the running one, a of the complete splits, a of the running one, its sums. Storing it moves no bit.
"""

import torch
import triton
import triton.language as tl

from replaylens.kernels.exact import exp, tanh


@triton.jit
def merge(m, l, a, m1, l1, a1, PORTABLE: tl.constexpr):
    """Merge two partial softmaxes. The order of the arguments is part of the canonical order."""
    top = tl.maximum(m, m1)
    safe = tl.where(top == float("-inf"), 0.0, top)  # both empty: exp2(-inf - 0) = 0, not NaN
    if PORTABLE:
        x, x1 = exp(m - safe), exp(m1 - safe)
        return top, tl.fma(l1, x1, l * x), tl.fma(a1, tl.broadcast_to(x1[:, None], a.shape), a * x[:, None])
    else:
        x, x1 = tl.exp2(m - safe), tl.exp2(m1 - safe)
        return top, l * x + l1 * x1, a * x[:, None] + a1 * x1[:, None]


@triton.jit
def quotient(a, l, PORTABLE: tl.constexpr):
    """Weighted values over the sum of weights."""
    if PORTABLE:
        return tl.div_rn(a, tl.broadcast_to(l[:, None], a.shape)) + 0.0  # no negative zero
    else:
        return a / l[:, None]


def in_kernel_units(scale: float, softcap: float, dtype: torch.dtype) -> tuple[float, float]:
    """(factor on scores, cap) as kernels take them: with the factors that exp2 needs, unless they compute in float32."""
    if dtype == torch.float32:
        return scale, softcap
    log2e = 1.4426950408889634
    return (2 * log2e * scale / softcap if softcap else log2e * scale), softcap * log2e


@triton.jit
def load_queries(Q, valid, d, HEAD: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr):
    """Queries at Q [pairs]: their first HEAD columns, and the REST, which meet columns beyond values (none: q again)."""
    q = tl.load(Q[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < HEAD), other=0.0)
    if REST > 0:
        e = tl.arange(0, REST_BLOCK)
        return q, tl.load(Q[:, None] + HEAD + e[None, :], mask=valid[:, None] & (e[None, :] < REST), other=0.0)
    else:
        return q, q


@triton.jit
def load_slopes(SLOPES, head, valid, SLOPED: tl.constexpr, PORTABLE: tl.constexpr):
    """What is added to the scores of each pair per position of a key; 0.0: nothing."""
    if SLOPED:
        slope = tl.load(SLOPES + head, mask=valid, other=0.0)
        return slope if PORTABLE else slope * 1.4426950408889634
    else:
        return 0.0


@triton.jit
def with_sink(m, l, a, SINKS, head, valid, PORTABLE: tl.constexpr):
    """The complete softmax of a row, merged with its head's sink: last of all, as one more partial, a score without a value."""
    sink = tl.load(SINKS + head, mask=valid, other=0.0).to(tl.float32)
    if not PORTABLE:
        sink = sink * 1.4426950408889634
    return merge(m, l, a, sink, tl.full(m.shape, 1.0, tl.float32), tl.zeros(a.shape, tl.float32), PORTABLE)


@triton.jit
def _values(V, slot, d, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """The values of a block of keys."""
    if HEAD == HEAD_BLOCK:
        return tl.load(V + slot[:, None] + d[None, :])
    else:
        return tl.load(V + slot[:, None] + d[None, :], mask=d[None, :] < HEAD, other=0.0)


@triton.jit
def _block(
    q, other, m, sums, a, K, V, TABLE, start, position, slope, d, kv_stride, scale, softcap, window, ROWS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, REST: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Accumulate the keys [start, start + BLOCK). Not MASKED: every row of the tile sees all of them."""
    j = start + tl.arange(0, BLOCK)
    if MASKED:
        page = tl.load(TABLE + j // PAGE, mask=j <= tl.max(position, 0), other=0).to(tl.int64)
    else:
        page = tl.load(TABLE + j // PAGE).to(tl.int64)
    slot = (page * PAGE + j % PAGE) * kv_stride
    if HEAD == HEAD_BLOCK:
        k = tl.load(K + slot[:, None] + d[None, :])
    else:
        k = tl.load(K + slot[:, None] + d[None, :], mask=d[None, :] < HEAD, other=0.0)
    LATE: tl.constexpr = q.dtype == tl.float32 and HEAD_BLOCK > 128  # wide values and their keys fill too much shared memory
    v = k  # of latents, the values are columns of the keys
    if REST == 0 and not LATE:
        v = _values(V, slot, d, HEAD, HEAD_BLOCK)
    s = tl.dot(q, k.T, input_precision="ieee")
    if REST > 0:
        e = tl.arange(0, other.shape[1])
        r = tl.load(K + slot[:, None] + HEAD + e[None, :], mask=e[None, :] < REST, other=0.0)
        s = tl.dot(other, r.T, s, input_precision="ieee")
    s = s * scale
    if CAPPED:
        if q.dtype == tl.float32:
            s = tanh(tl.div_rn(s, tl.zeros_like(s) + softcap)) * softcap
        else:  # tanh(u) = 1 - 2 / (1 + exp(2u)); here scale holds 2 log2(e) / cap and softcap holds cap log2(e)
            s = softcap - 2.0 * softcap / (1.0 + tl.exp2(s))
    if SLOPED:
        s = tl.fma(tl.broadcast_to(slope[:, None], s.shape), tl.broadcast_to(j.to(tl.float32)[None, :], s.shape), s)
    if MASKED:
        seen = j[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (j[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    if q.dtype == tl.float32:
        shrink, p = exp(m - safe), exp(s - safe[:, None])
    else:
        shrink, p = tl.exp2(m - safe), tl.exp2(s - safe[:, None])
    even, odd = tl.split(tl.reshape(p, (ROWS, BLOCK // 2, 2)))  # neighbours: always in one thread
    if q.dtype == tl.float32:
        sums = tl.fma(sums, tl.broadcast_to(shrink[:, None], sums.shape), even + odd)
    else:
        sums = sums * shrink[:, None] + (even + odd)
    if REST == 0 and LATE:
        v = _values(V, slot, d, HEAD, HEAD_BLOCK)
    a = tl.dot(p.to(v.dtype), v, a * shrink[:, None], input_precision="ieee")
    return top, sums, a


@triton.jit
def empty(ROWS: tl.constexpr, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """The partial result of no key: (m, sums, a)."""
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    return m, tl.zeros((ROWS, BLOCK // 2), tl.float32), tl.zeros((ROWS, HEAD_BLOCK), tl.float32)


@triton.jit
def walk(
    q, other, m, sums, a, K, V, TABLE, first, end, position, clear, slope, d, kv_stride, scale, softcap, window,
    ROWS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    REST: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Continue a partial result with the keys [first, end) of one split; `first` is a multiple of BLOCK.

    Blocks up to `clear`, the last position that every row sees, need no mask unless a window hides some of their keys.
    Masking a fully visible block changes nothing, so the boundaries between the loops affect speed only.
    """
    middle = first
    if WINDOWED:
        middle = tl.minimum(tl.maximum(tl.cdiv(tl.max(position, 0) - window + 1, BLOCK) * BLOCK, first), end)
        for start in tl.range(first, middle, BLOCK):
            m, sums, a = _block(
                q, other, m, sums, a, K, V, TABLE, start, position, slope, d, kv_stride, scale, softcap, window, ROWS,
                PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, WINDOWED, True, SLOPED,
            )  # fmt: skip
    last = tl.minimum(tl.maximum((clear + 1) // BLOCK * BLOCK, middle), end)
    for start in tl.range(middle, last, BLOCK):
        m, sums, a = _block(
            q, other, m, sums, a, K, V, TABLE, start, position, slope, d, kv_stride, scale, softcap, window, ROWS,
            PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, WINDOWED, False, SLOPED,
        )  # fmt: skip
    for start in tl.range(last, end, BLOCK):
        m, sums, a = _block(
            q, other, m, sums, a, K, V, TABLE, start, position, slope, d, kv_stride, scale, softcap, window, ROWS,
            PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, WINDOWED, True, SLOPED,
        )  # fmt: skip
    return m, sums, a


@triton.jit
def walk_seen(
    q, other, m, sums, a, K, V, TABLE, first, end, slope, d, kv_stride, scale, softcap, ROWS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, REST: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """`walk` over keys that every row sees; `end` is a multiple of BLOCK, too."""
    for start in tl.range(first, end, BLOCK):
        m, sums, a = _block(
            q, other, m, sums, a, K, V, TABLE, start, 0, slope, d, kv_stride, scale, softcap, 0, ROWS,
            PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, False, False, SLOPED,
        )  # fmt: skip
    return m, sums, a


@triton.jit
def closed(sums, BLOCK: tl.constexpr):
    """The sum l of a complete split."""
    ones = tl.full((BLOCK // 2, 16), 1.0, tl.float32)
    return tl.max(tl.dot(sums, ones, input_precision="ieee"), 1)  # sixteen equal columns


@triton.jit
def store_partial(P, i, m, l, a, pair, d, valid, mask, ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    P += i * ROWS * (HEAD_BLOCK + 2)
    tl.store(P + pair, m, mask=valid)
    tl.store(P + ROWS + pair, l, mask=valid)
    tl.store(P + 2 * ROWS + pair[:, None] * HEAD_BLOCK + d[None, :], a, mask=mask)


@triton.jit
def load_partial(P, i, pair, d, valid, mask, ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Bypass the first-level cache, which may be stale: another program wrote the values."""
    P += i * ROWS * (HEAD_BLOCK + 2)
    m = tl.load(P + pair, mask=valid, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(P + ROWS + pair, mask=valid, other=0.0, cache_modifier=".cg")
    a = tl.load(P + 2 * ROWS + pair[:, None] * HEAD_BLOCK + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return m, l, a


@triton.jit
def load_merged(STATE, at, d, mask, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """(m, l, a) of the complete splits of pairs whose states lie at `at`; of nothing where `mask` is false."""
    P = STATE + at
    m = tl.load(P, mask=mask, other=float("-inf"))
    l = tl.load(P + 1, mask=mask, other=0.0)
    return m, l, tl.load(P[:, None] + 3 + d[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def load_running(STATE, at, d, mask, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """(m, sums, a) of the split that is not complete; of nothing where `mask` is false."""
    P = STATE + at
    m = tl.load(P + 2, mask=mask, other=float("-inf"))
    a = tl.load(P[:, None] + 3 + HEAD_BLOCK + d[None, :], mask=mask[:, None], other=0.0)
    half = tl.arange(0, BLOCK // 2)
    return m, tl.load(P[:, None] + 3 + 2 * HEAD_BLOCK + half[None, :], mask=mask[:, None], other=0.0), a


@triton.jit
def store_merged(STATE, at, m, l, a, d, mask, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    P = STATE + at
    tl.store(P, m, mask=mask)
    tl.store(P + 1, l, mask=mask)
    tl.store(P[:, None] + 3 + d[None, :], a, mask=mask[:, None])


@triton.jit
def store_running(STATE, at, m, sums, a, d, mask, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    P = STATE + at
    tl.store(P + 2, m, mask=mask)
    tl.store(P[:, None] + 3 + HEAD_BLOCK + d[None, :], a, mask=mask[:, None])
    half = tl.arange(0, BLOCK // 2)
    tl.store(P[:, None] + 3 + 2 * HEAD_BLOCK + half[None, :], sums, mask=mask[:, None])
