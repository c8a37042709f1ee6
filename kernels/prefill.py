"""Canonical attention of many rows on Hopper: one warpgroup loads keys and values, two multiply. Same bits as `attention`.

The steps of a row are those of `kernels/attention.py`, in the same order; only who takes them differs. A program has a tile of
128 (row, query head) pairs. Each multiplying warpgroup has 64 of them, so that one computes its softmax while the other keeps
the tensor cores busy. Within a warpgroup, the scores of a block are computed together with the values of the block before,
and its softmax runs while those are still being multiplied:

    scores of block i  |  values of block i - 1  ->  softmax of block i  ->  a <- a * shrink

The loading warpgroup walks over the pages and fills a ring of buffers. Keys that no row sees are zeros: a slot that was never
written may hold NaN, and 0 * NaN would reach the sum.

Triton's interpreter cannot run this kernel; the tests compare it on a device with the kernel that it can run.
"""

from functools import lru_cache
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

from replaylens.kernels.launch import EXACT, KV_BLOCK, KV_SPLIT

MAX_PAIRS = 128
"""(row, query head) pairs of a tile"""
_HEAD_SIZES = (64, 128)
_STAGES = 3
"""blocks of keys and values in the ring"""
_CACHE_BYTES = 40_000_000
"""of the second-level cache, for keys and values"""
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
    """Where column i is found among `_first_to_last` of `size` columns."""
    out = 0
    while size > 1:
        out, i, size = 2 * out + i % 2, i // 2, size // 2
    return out


@gluon.jit
def _first_to_last(x, COLUMNS: gl.constexpr):
    """The columns of x, in the order that `_closed` adds them: all even ones, then all odd ones, and so on within them."""
    if COLUMNS == 1:
        return (gl.reshape(x, [x.shape[0]]),)
    else:
        even, odd = gl.split(gl.reshape(x, [x.shape[0], COLUMNS // 2, 2]))
        return _first_to_last(even, COLUMNS // 2) + _first_to_last(odd, COLUMNS // 2)


@gluon.jit
def _closed(sums, BLOCK: gl.constexpr, SCORES: gl.constexpr):
    """`closed` of `kernels/softmax.py`: a thread adds all columns of a row, from first to last."""
    whole: gl.constexpr = gl.BlockedLayout([1, BLOCK // 2], [32, 1], [4, 1], [1, 0])
    columns = _first_to_last(gl.convert_layout(sums, whole), BLOCK // 2)
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
    NUMBER: gl.constexpr, Q, OUT, POSITION, q_buffer, k_ring, v_ring, k_full, k_free, v_full, v_free,
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
    number = 0  # of the block in the ring
    for split in range(first // SPLIT, gl.cdiv(end, SPLIT)):
        begin, stop = gl.maximum(first, split * SPLIT), gl.minimum(end, (split + 1) * SPLIT)
        stage, phase = number % STAGES, (number // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q_buffer, k_ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        _barrier()  # all warps are done with the keys
        mbarrier.arrive(k_free.index(stage), count=1)
        m1 = gl.full([ROWS], float("-inf"), gl.float32, row)
        m1, sums, shrink, p = _softmax(
            s, m1, no_sums, position, clear, last, begin, scale, softcap, window, BLOCK, CAPPED, WINDOWED, SCORES
        )
        weights = gl.convert_layout(p.to(v_ring.dtype), WEIGHTS)
        a1 = no_values
        number += 1
        for start in range(begin + BLOCK, stop, BLOCK):
            stage, phase = number % STAGES, (number // STAGES) & 1
            before, phase_before = (number - 1) % STAGES, ((number - 1) // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(q_buffer, k_ring.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), phase_before)
            a1 = warpgroup_mma(weights, v_ring.index(before), a1, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            m1, sums, shrink, p = _softmax(
                s, m1, sums, position, clear, last, start, scale, softcap, window, BLOCK, CAPPED, WINDOWED, SCORES
            )
            a1, weights = warpgroup_mma_wait(0, deps=(a1, weights))
            _barrier()
            mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.arrive(v_free.index(before), count=1)
            weights = gl.convert_layout(p.to(v_ring.dtype), WEIGHTS)
            a1 = a1 * gl.convert_layout(shrink, value_row)[:, None]
            number += 1
        stage, phase = (number - 1) % STAGES, ((number - 1) // STAGES) & 1
        mbarrier.wait(v_full.index(stage), phase)
        a1 = warpgroup_mma(weights, v_ring.index(stage), a1, is_async=True)
        l1 = _closed(sums, BLOCK, SCORES)
        a1, weights = warpgroup_mma_wait(0, deps=(a1, weights))
        _barrier()
        mbarrier.arrive(v_free.index(stage), count=1)
        top = gl.maximum(m, m1)  # `merge` of kernels/softmax.py
        safe = gl.where(top == float("-inf"), 0.0, top)
        x, x1 = gl.exp2(m - safe), gl.exp2(m1 - safe)
        m, l = top, l * x + l1 * x1
        a = a * gl.convert_layout(x, value_row)[:, None] + a1 * gl.convert_layout(x1, value_row)[:, None]
    a = a / gl.convert_layout(gl.where(valid, l, 1.0), value_row)[:, None]  # padding pairs are not stored
    pair = NUMBER * ROWS + gl.arange(0, ROWS, value_row)
    d = gl.arange(0, HEAD, gl.SliceLayout(0, VALUES))
    at = (first_row + pair // GROUP).to(gl.int64) * stride_or + (kv_head * GROUP + pair % GROUP) * stride_oh
    gl.store(OUT + at[:, None] + d[None, :], a.to(OUT.dtype.element_ty), mask=(pair < num_rows * GROUP)[:, None])


@gluon.jit
def _slots(TABLE, start, end, key, kv_stride, PAGE: gl.constexpr):
    j = start + key
    page = gl.load(TABLE + j // PAGE, mask=j < end, other=0).to(gl.int64)
    return (page * PAGE + j % PAGE) * kv_stride


@gluon.jit
def _load(
    K, V, TABLE, k_ring, v_ring, k_full, k_free, v_full, v_free, first, end, kv_stride,
    HEAD: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warpgroup. A block is announced when the LAG blocks after it are on their way."""
    LAG: gl.constexpr = STAGES - 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    key = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    d = gl.arange(0, HEAD, gl.SliceLayout(0, layout))
    slot = _slots(TABLE, first, end, key, kv_stride, PAGE)
    number = 0
    for start in range(first, end, BLOCK):
        stage, phase = number % STAGES, (number // STAGES) & 1
        ready = (number + STAGES - LAG) % STAGES
        at = slot[:, None] + d[None, :]
        visible = (start + key < end)[:, None]  # the copy writes zeros for the others
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        async_copy.async_copy_global_to_shared(k_ring.index(stage), K + at, mask=visible)
        async_copy.commit_group()
        slot = _slots(TABLE, start + BLOCK, end, key, kv_stride, PAGE)  # of the next block
        _announce(k_full, ready, number >= LAG, 2 * LAG)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        async_copy.async_copy_global_to_shared(v_ring.index(stage), V + at, mask=visible)
        async_copy.commit_group()
        _announce(v_full, ready, number >= LAG, 2 * LAG)
        number += 1
    for i in gl.static_range(LAG):
        ready = (number + STAGES - LAG + i) % STAGES
        _announce(k_full, ready, number >= LAG - i, 0)
        _announce(v_full, ready, number >= LAG - i, 0)


@gluon.jit
def _announce(full, stage, there, PENDING: gl.constexpr):
    """Tell the multiplying warpgroups that a buffer is full, once all but the last PENDING copies are done."""
    async_copy.wait_group(PENDING)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(full.index(stage), count=1, pred=there)


@gluon.jit(do_not_specialize=["window", "stride_t"])
def _prefill_kernel(
    Q, K, V, OUT, TILES, SEQUENCE, POSITION, TABLES,
    stride_qr, stride_qh, kv_stride, head_stride, stride_or, stride_oh, stride_t, scale, softcap, window,
    GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, CAPPED: gl.constexpr, WINDOWED: gl.constexpr,
    HEADS_FIRST: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One tile: up to 128 (row, query head) pairs of one sequence and one KV head. A tile without rows does nothing."""
    ROWS: gl.constexpr = 64
    if HEADS_FIRST:
        kv_head, tile = gl.program_id(0), gl.program_id(1)
    else:
        tile, kv_head = gl.program_id(0), gl.program_id(1)
    first_row, num_rows = gl.load(TILES + tile * 2), gl.load(TILES + tile * 2 + 1)
    pair = gl.arange(0, 2 * ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    valid = pair < num_rows * GROUP
    position = gl.load(POSITION + first_row + pair // GROUP, mask=valid, other=-1)
    end = gl.max(position, axis=0) + 1
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
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)  # both multiplying warpgroups
        mbarrier.init(v_free.index(i), count=2)
    _barrier()
    gl.warp_specialize(
        [
            (_multiply, (0, Q, OUT, POSITION, q_buffer.index(0), k_ring, v_ring, k_full, k_free, v_full, v_free,
                         first_row, num_rows, kv_head, first, end, stride_qr, stride_qh, stride_or, stride_oh,
                         scale, softcap, window, GROUP, HEAD, ROWS, BLOCK, SPLIT, STAGES, CAPPED, WINDOWED)),
            (_multiply, (1, Q, OUT, POSITION, q_buffer.index(1), k_ring, v_ring, k_full, k_free, v_full, v_free,
                         first_row, num_rows, kv_head, first, end, stride_qr, stride_qh, stride_or, stride_oh,
                         scale, softcap, window, GROUP, HEAD, ROWS, BLOCK, SPLIT, STAGES, CAPPED, WINDOWED)),
            (_load, (K, V, TABLE, k_ring, v_ring, k_full, k_free, v_full, v_free, first, end, kv_stride,
                     HEAD, PAGE, BLOCK, STAGES)),
        ],
        [4, 4],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@lru_cache(maxsize=16)
def _is_hopper(device: torch.device) -> bool:
    """Whether the device has the instructions of this kernel, which its successors lack."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def can_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, pairs: int, kv_block: int, kv_split: int) -> bool:
    """Whether `prefill` takes tiles of up to `pairs` pairs of this kind, and can copy from these addresses."""
    return (
        _is_hopper(q.device)
        and q.dtype != torch.float32
        and q.shape[2] in _HEAD_SIZES
        and 0 < pairs <= MAX_PAIRS
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
    # the longest tiles of all heads should start first, but every tile reads all keys of its head
    heads_first = 4 * kv_heads * d_head * page_size * page_table.shape[1] <= _CACHE_BYTES
    _prefill_kernel[(kv_heads, len(tiles)) if heads_first else (len(tiles), kv_heads)](
        q, k_cache, v_cache, out, tiles, sequence, position, page_table,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), out.stride(0), out.stride(1), page_table.stride(0),
        scale, softcap, window, q.shape[1] // kv_heads, d_head, page_size, KV_BLOCK, KV_SPLIT, _STAGES,
        softcap > 0, window > 0, heads_first, _REGISTERS, _LOADER_REGISTERS, num_warps=4, **EXACT,
    )  # fmt: skip
