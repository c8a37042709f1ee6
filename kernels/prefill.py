"""Canonical attention of many rows on Hopper: one warpgroup loads keys and values, two multiply. Same bits as `attention`.

The steps of a row are those of `kernels/attention.py`, in the same order; only who takes them differs. A program has a tile of
128 (row, query head) pairs. Each multiplying warpgroup has 64 of them, so that one computes its softmax while the other keeps
the tensor cores busy. Step i of a warpgroup computes the scores of block i together with the values of block i - 1, and the
softmax of block i while those values are still being multiplied. A split ends within a step: the scores of the next split are
computed while its sums are closed.

The loading warpgroup walks over the pages and fills a ring of buffers: step i needs the keys of block i and the values of
block i - 1. Keys that no row sees are zeros: a slot that was never written may hold NaN, and 0 * NaN would reach the sum.

Triton's interpreter cannot run this kernel; the tests compare it on a device with the kernel that it can run.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from replaylens.kernels.gpus import gpu_of
from replaylens.kernels.launch import EXACT, KV_BLOCK, KV_SPLIT

MAX_PAIRS = 128
"""(row, query head) pairs of a tile"""
_HEAD_SIZES = (64, 128)
_PAGE_SIZES = (16, 32, 64)
"""they divide a block, and a round of copies fits into one"""
_CACHE_BYTES = 40_000_000
"""of the second-level cache, for keys and values"""
_STAGES = 3
"""blocks of keys and values in the ring"""
_REGISTERS, _LOADER_REGISTERS = 216, 72
"""registers per thread of a multiplying and of the loading warpgroup; two of the former and one of the latter fill 504"""
_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed in Triton 3.7


@gluon.jit
def _softmax(
    s, m, sums, position, clear, last, start, scale, softcap, window, BLOCK: gl.constexpr, CAPPED: gl.constexpr,
    WINDOWED: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """The softmax of `kernels/softmax.py`'s `_block`. clear, last: the least and greatest position of the warpgroup's rows"""
    s = s * scale
    if CAPPED:
        s = softcap - 2.0 * softcap / (1.0 + gl.exp2(s))
    hidden = start + BLOCK - 1 > clear
    if WINDOWED:
        hidden = hidden | (start <= last - window)
    if hidden:  # some row does not see all keys of the block
        j = start + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
        seen = j[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (j[None, :] > position[:, None] - window)
        s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, axis=1))
    safe = gl.where(top == float("-inf"), 0.0, top)
    shrink = gl.exp2(m - safe)
    p = gl.exp2(s - safe[:, None])
    even, odd = gl.split(gl.reshape(p, [s.shape[0], BLOCK // 2, 2]))
    sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None] + (even + odd)
    return top, sums, shrink, p


@gluon.constexpr_function
def _reversed_bits(i, size):
    """Where column i is found among `_columns` of `size` columns."""
    out = 0
    while size > 1:
        out, i, size = 2 * out + i % 2, i // 2, size // 2
    return out


@gluon.jit
def _columns(x, COLUMNS: gl.constexpr):
    """The columns of x: all even ones, then all odd ones, and so on within them."""
    if COLUMNS == 1:
        return (gl.reshape(x, [x.shape[0]]),)
    else:
        even, odd = gl.split(gl.reshape(x, [x.shape[0], COLUMNS // 2, 2]))
        return _columns(even, COLUMNS // 2) + _columns(odd, COLUMNS // 2)


@gluon.jit
def _closed(sums, BLOCK: gl.constexpr, SCORES: gl.constexpr):
    """`closed` of `kernels/softmax.py`: a thread adds all columns of a row, from first to last."""
    whole: gl.constexpr = gl.BlockedLayout([1, BLOCK // 2], [16, 2], [4, 1], [1, 0])  # rows stay in their warp
    columns = _columns(gl.convert_layout(sums, whole), BLOCK // 2)
    l = columns[0]
    for i in gl.static_range(1, BLOCK // 2):
        l = l + columns[_reversed_bits(i, BLOCK // 2)]
    return gl.convert_layout(l, gl.SliceLayout(1, SCORES))


@gluon.jit
def _load_queries(
    Q,
    buffer,
    first_row,
    valid_pairs,
    kv_head,
    stride_qr,
    stride_qh,
    GROUP: gl.constexpr,
    HEAD: gl.constexpr,
    NUMBER: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    pair = NUMBER * buffer.shape[0] + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, layout))
    d = gl.arange(0, HEAD, gl.SliceLayout(0, layout))
    at = (first_row + pair // GROUP).to(gl.int64) * stride_qr + (kv_head * GROUP + pair % GROUP) * stride_qh
    buffer.store(gl.load(Q + at[:, None] + d[None, :], mask=(pair < valid_pairs)[:, None], other=0.0))
    fence_async_shared()  # the tensor cores read what the threads wrote
    _barrier()


@gluon.jit
def _multiply(
    NUMBER: gl.constexpr, Q, OUT, POSITION, q_buffer, k_ring, v_ring, full, free,
    first_row, num_rows, kv_head, first, end, stride_qr, stride_qh, stride_or, stride_oh, scale, softcap, window,
    GROUP: gl.constexpr, HEAD: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Warpgroup NUMBER of two: its ROWS pairs over all keys of the tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    row: gl.constexpr = gl.SliceLayout(1, SCORES)
    value_row: gl.constexpr = gl.SliceLayout(1, VALUES)
    _load_queries(Q, q_buffer, first_row, num_rows * GROUP, kv_head, stride_qr, stride_qh, GROUP, HEAD, NUMBER)
    pair = NUMBER * ROWS + gl.arange(0, ROWS, row)
    valid = pair < num_rows * GROUP
    position = gl.load(POSITION + first_row + pair // GROUP, mask=valid, other=-1)
    clear = gl.min(gl.where(valid, position, 2147483647), axis=0)
    last = gl.max(position, axis=0)
    no_scores = gl.full([ROWS, BLOCK], 0.0, gl.float32, SCORES)
    no_values = gl.full([ROWS, HEAD], 0.0, gl.float32, VALUES)
    no_sums, _ = gl.split(gl.reshape(no_scores, [ROWS, BLOCK // 2, 2]))

    m = gl.full([ROWS], float("-inf"), gl.float32, row)
    l = gl.full([ROWS], 0.0, gl.float32, row)
    a = no_values
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(q_buffer, k_ring.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    _barrier()  # all warps are done with the keys
    mbarrier.arrive(free.index(0), count=1)
    number = 1  # of the step: block `number` of the keys, block `number - 1` of the values
    for split in range(first // SPLIT, gl.cdiv(end, SPLIT)):
        begin, stop = gl.maximum(first, split * SPLIT), gl.minimum(end, (split + 1) * SPLIT)
        m1 = gl.full([ROWS], float("-inf"), gl.float32, row)
        m1, sums, shrink, p = _softmax(
            s, m1, no_sums, position, clear, last, begin, scale, softcap, window, BLOCK, CAPPED, WINDOWED, SCORES
        )
        weights = gl.convert_layout(p.to(v_ring.dtype), WEIGHTS)
        a1 = no_values
        for start in range(begin + BLOCK, stop, BLOCK):
            stage, before = number % STAGES, (number - 1) % STAGES
            mbarrier.wait(full.index(stage), (number // STAGES) & 1)
            s = warpgroup_mma(q_buffer, k_ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            a1 = warpgroup_mma(weights, v_ring.index(before), a1, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            m1, sums, shrink, p = _softmax(
                s, m1, sums, position, clear, last, start, scale, softcap, window, BLOCK, CAPPED, WINDOWED, SCORES
            )
            a1, weights = warpgroup_mma_wait(0, deps=(a1, weights))
            _barrier()
            mbarrier.arrive(free.index(stage), count=1)
            weights = gl.convert_layout(p.to(v_ring.dtype), WEIGHTS)
            a1 = a1 * gl.convert_layout(shrink, value_row)[:, None]
            number += 1
        stage, before = number % STAGES, (number - 1) % STAGES
        mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        s = warpgroup_mma(q_buffer, k_ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        a1 = warpgroup_mma(weights, v_ring.index(before), a1, is_async=True)
        l1 = _closed(sums, BLOCK, SCORES)
        top = gl.maximum(m, m1)  # `merge` of kernels/softmax.py
        safe = gl.where(top == float("-inf"), 0.0, top)
        x, x1 = gl.exp2(m - safe), gl.exp2(m1 - safe)
        m, l = top, l * x + l1 * x1
        s, a1, weights = warpgroup_mma_wait(0, deps=(s, a1, weights))
        _barrier()
        mbarrier.arrive(free.index(stage), count=1)
        a = a * gl.convert_layout(x, value_row)[:, None] + a1 * gl.convert_layout(x1, value_row)[:, None]
        number += 1
    a = a / gl.convert_layout(gl.where(valid, l, 1.0), value_row)[:, None]  # padding pairs are not stored
    pair = NUMBER * ROWS + gl.arange(0, ROWS, value_row)
    d = gl.arange(0, HEAD, gl.SliceLayout(0, VALUES))
    at = (first_row + pair // GROUP).to(gl.int64) * stride_or + (kv_head * GROUP + pair % GROUP) * stride_oh
    gl.store(OUT + at[:, None] + d[None, :], a.to(OUT.dtype.element_ty), mask=(pair < num_rows * GROUP)[:, None])


@gluon.jit
def _load(
    K, V, TABLE, k_ring, v_ring, full, free, first, end, kv_stride,
    HEAD: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warpgroup. Step i loads block i of the keys and block i - 1 of the values: one step more than blocks.

    A step is announced when the LAG steps after it are on their way.
    """
    LAG: gl.constexpr = STAGES - 2
    PAGES: gl.constexpr = BLOCK // PAGE
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // HEAD, HEAD // 8], [1, 4, 1], [2, 1, 0])
    turn = gl.arange(0, PAGES, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    key = gl.arange(0, PAGE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    d = gl.arange(0, HEAD, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    within = key.to(gl.int64)[None, :, None] * kv_stride + d[None, None, :]
    j = turn[:, None, None] * PAGE + key[None, :, None]
    at = gl.full([PAGES], 0, gl.int64, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    number = 0
    for start in range(first, end + BLOCK, BLOCK):
        stage, before = number % STAGES, (number + STAGES - 1) % STAGES
        at_before = at
        page = gl.load(TABLE + start // PAGE + turn, mask=start + turn * PAGE < end, other=0)
        at = page.to(gl.int64) * (PAGE * kv_stride)
        mbarrier.wait(free.index(stage), ((number // STAGES) & 1) ^ 1)
        k_to, v_to = k_ring.index(stage).reshape([PAGES, PAGE, HEAD]), v_ring.index(before).reshape([PAGES, PAGE, HEAD])
        k_at, v_at = K + (at[:, None, None] + within), V + (at_before[:, None, None] + within)
        if (start + BLOCK <= end) & (number > 0):
            async_copy.async_copy_global_to_shared(k_to, k_at)
            async_copy.async_copy_global_to_shared(v_to, v_at)
        else:  # keys that no row sees become zeros; there are no values of a block before the first
            async_copy.async_copy_global_to_shared(k_to, k_at, mask=start + j < end)
            async_copy.async_copy_global_to_shared(v_to, v_at, mask=(start - BLOCK + j < end) & (number > 0))
        async_copy.commit_group()
        _announce(full, (number + STAGES - LAG) % STAGES, number >= LAG, LAG)
        number += 1
    for i in gl.static_range(LAG):
        _announce(full, (number + STAGES - LAG + i) % STAGES, number >= LAG - i, 0)


@gluon.jit
def _announce(full, stage, there, PENDING: gl.constexpr):
    """Tell the multiplying warpgroups that a step is loaded, once all but the last PENDING steps are."""
    async_copy.wait_group(PENDING)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(full.index(stage), count=1, pred=there)


@gluon.jit(do_not_specialize=["window", "stride_t", "num_tiles", "together"])
def _prefill_kernel(
    Q, K, V, OUT, TILES, SEQUENCE, POSITION, TABLES,
    stride_qr, stride_qh, kv_stride, head_stride, stride_or, stride_oh, stride_t, scale, softcap, window, num_tiles, together,
    GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One tile: up to 128 (row, query head) pairs of one sequence and one KV head.

    together  KV heads that run side by side
    """
    ROWS: gl.constexpr = 64
    program = gl.program_id(0)
    tile = program % (num_tiles * together) // together
    kv_head = program // (num_tiles * together) * together + program % together
    first_row, num_rows = gl.load(TILES + tile * 2), gl.load(TILES + tile * 2 + 1)
    pair = gl.arange(0, 2 * ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    valid = pair < num_rows * GROUP
    position = gl.load(POSITION + first_row + pair // GROUP, mask=valid, other=-1)
    end = gl.max(position, axis=0) + 1  # 0 if the tile has no rows
    first = 0
    if WINDOWED:  # the first block that any row of the tile sees
        clear = gl.min(gl.where(valid, position, 2147483647), axis=0)
        first = gl.where(num_rows > 0, gl.maximum(clear - window + 1, 0) // BLOCK * BLOCK, 0)
    TABLE = TABLES + gl.load(SEQUENCE + first_row).to(gl.int64) * stride_t
    K += kv_head * head_stride
    V += kv_head * head_stride
    dtype: gl.constexpr = K.dtype.element_ty
    block: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, HEAD], dtype)
    queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD], dtype)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD], block)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD], block)
    q_buffer = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD], queries)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)  # both multiplying warpgroups
    _barrier()
    gl.warp_specialize(
        [
            (_multiply, (0, Q, OUT, POSITION, q_buffer.index(0), k_ring, v_ring, full, free,
                         first_row, num_rows, kv_head, first, end, stride_qr, stride_qh, stride_or, stride_oh,
                         scale, softcap, window, GROUP, HEAD, ROWS, BLOCK, SPLIT, STAGES, CAPPED, WINDOWED)),
            (_multiply, (1, Q, OUT, POSITION, q_buffer.index(1), k_ring, v_ring, full, free,
                         first_row, num_rows, kv_head, first, end, stride_qr, stride_qh, stride_or, stride_oh,
                         scale, softcap, window, GROUP, HEAD, ROWS, BLOCK, SPLIT, STAGES, CAPPED, WINDOWED)),
            (_load, (K, V, TABLE, k_ring, v_ring, full, free, first, end, kv_stride, HEAD, PAGE, BLOCK, STAGES)),
        ],
        [4, 4],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


def can_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, pairs: int, page_size: int, kv_block: int, kv_split: int) -> bool:
    """Whether `prefill` takes tiles of up to `pairs` pairs of this kind, and can copy from these addresses."""
    return (
        q.device.type == "cuda"
        and gpu_of(q.device).specialises
        and q.dtype != torch.float32
        and q.shape[2] in _HEAD_SIZES
        and 0 < pairs <= MAX_PAIRS
        and page_size in _PAGE_SIZES
        and (kv_block, kv_split) == (KV_BLOCK, KV_SPLIT)
        and all(x.data_ptr() % 16 == x.stride(0) % 16 == x.stride(1) % 16 == 0 for x in (q, k_cache, v_cache))
    )


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    tiles: Tensor,
    sequence: Tensor,
    position: Tensor,
    page_table: Tensor,
    scale: float,
    softcap: float,
    window: int,
    page_size: int,
) -> None:
    """Mutates `out`. Arguments as in `attention`, which checks them; `scale` and `softcap` in the kernel's units."""
    kv_heads, d_head = k_cache.shape[1:]
    _prefill_kernel[(len(tiles) * kv_heads,)](
        q, k_cache, v_cache, out, tiles, sequence, position, page_table,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), out.stride(0), out.stride(1), page_table.stride(0),
        scale, softcap, window, len(tiles), _heads_together(kv_heads, d_head, page_table.shape[1] * page_size),
        q.shape[1] // kv_heads, d_head, page_size, KV_BLOCK, KV_SPLIT, _STAGES,
        softcap > 0, window > 0, _REGISTERS, _LOADER_REGISTERS, num_warps=4, **EXACT,
    )  # fmt: skip


def _heads_together(kv_heads: int, d_head: int, keys: int) -> int:
    """How many KV heads run side by side: their keys and values should fit into the second-level cache. It divides kv_heads.

    The longest tiles of all heads should start first, since they end last; but every tile reads all keys of its head.
    """
    fit = max(1, _CACHE_BYTES // (4 * d_head * keys))
    return max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fit)
