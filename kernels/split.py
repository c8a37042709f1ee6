"""Attention of the fast path: keys divided among as many programs as keep the device busy. It is not canonical.

    out = sum_j softmax(q . k[j] * scale)[j] v[j],   j <= position

The length of a split depends on how many rows are in the pass and on the longest of them, as in the decode kernels of serving
engines. So the order of a row's sum depends on the other requests, and with it the last bits. The compiler may fuse
multiplications with additions. Only drafts and ordinary requests use it; the canonical kernel (`kernels/attention.py`) has one
order per row. Both take the same steps within a block of keys (`kernels/softmax.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.attention import Workspace, checked_caches, require_slopes
from replaylens.kernels.gpus import gpu_of, num_multiprocessors
from replaylens.kernels.launch import (
    KV_BLOCK,
    PAGE_SIZE,
    attention_tile,
    ceil_div,
    next_power_of_2,
    require,
    require_shape,
)
from replaylens.kernels.shared import PagedRows
from replaylens.kernels.softmax import (
    empty,
    in_kernel_units,
    load_partial,
    load_queries,
    load_slopes,
    merge,
    quotient,
    store_partial,
    walk,
    with_sink,
)

_PROGRAMS_EACH = 2
"""programs per multiprocessor; more gain nothing"""


@triton.jit(do_not_specialize=["window", "split", "max_splits", "stride_t"])
def _split_kernel(
    Q, K, V, OUT, PARTIAL, COUNT, TILES, SEQUENCE, POSITION, TABLES, SINKS, SLOPES,
    stride_qr, stride_qh, kv_stride, head_stride, stride_or, stride_oh, stride_t,
    scale, softcap, window, split, max_splits,
    GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROWS: tl.constexpr, TILED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, HAS_SINKS: tl.constexpr,
    REST: tl.constexpr, REST_BLOCK: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """One split of a tile: up to ROWS (row, query head) pairs of one sequence and one KV head. The last to finish merges."""
    tile, kv_head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if TILED:
        first_row, num_rows = tl.load(TILES + tile * 2), tl.load(TILES + tile * 2 + 1)
    else:
        first_row, num_rows = tile, 1
    if num_rows == 0:
        return
    pair = tl.arange(0, ROWS)
    valid = pair < num_rows * GROUP
    row = (first_row + pair // GROUP).to(tl.int64)
    head = kv_head * GROUP + pair % GROUP
    position = tl.load(POSITION + row, mask=valid, other=-1)
    d = tl.arange(0, HEAD_BLOCK)
    mask = valid[:, None] & (d[None, :] < HEAD)
    q, other = load_queries(Q + row * stride_qr + head * stride_qh, valid, d, HEAD, REST, REST_BLOCK)
    end = tl.max(position, 0) + 1
    clear = tl.min(tl.where(valid, position, 2147483647), 0)  # every row sees the keys up to here
    first = 0
    if WINDOWED:  # the first key that any row of the tile sees
        first = tl.maximum(clear - window + 1, 0) // BLOCK * BLOCK
    begin, count = first + number * split, tl.cdiv(end - first, split)
    if begin >= end:
        return
    m, sums, a = empty(ROWS, BLOCK, HEAD_BLOCK)
    m, sums, a = walk(
        q, other, m, sums, a, K + kv_head * head_stride, V + kv_head * head_stride,
        TABLES + tl.load(SEQUENCE + first_row).to(tl.int64) * stride_t, begin, tl.minimum(end, begin + split), position,
        clear, load_slopes(SLOPES, head, valid, SLOPED, Q.dtype.element_ty == tl.float32), d, kv_stride, scale, softcap, window,
        ROWS, PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, WINDOWED, SLOPED,
    )  # fmt: skip
    l = tl.sum(sums, 1)
    write = count == 1
    if count > 1:
        work = (tile * tl.num_programs(1) + kv_head).to(tl.int64)
        PARTIAL += work * max_splits * ROWS * (HEAD_BLOCK + 2)
        store_partial(PARTIAL, number, m, l, a, pair, d, valid, mask, ROWS, HEAD_BLOCK)
        tl.debug_barrier()  # every thread has stored its part before the count goes up
        write = tl.atomic_add(COUNT + work, 1, sem="acq_rel") == count - 1
        if write:
            tl.store(COUNT + work, 0)
            m, l, a = load_partial(PARTIAL, 0, pair, d, valid, mask, ROWS, HEAD_BLOCK)
            for i in tl.range(1, count):
                m1, l1, a1 = load_partial(PARTIAL, i, pair, d, valid, mask, ROWS, HEAD_BLOCK)
                m, l, a = merge(m, l, a, m1, l1, a1, Q.dtype.element_ty == tl.float32)
    if write:
        if HAS_SINKS:
            m, l, a = with_sink(m, l, a, SINKS, head, valid, Q.dtype.element_ty == tl.float32)
        out = OUT + row[:, None] * stride_or + head[:, None] * stride_oh + d[None, :]
        l = tl.where(valid, l, 1.0)  # padding pairs saw no key
        tl.store(out, quotient(a, l, Q.dtype.element_ty == tl.float32).to(OUT.dtype.element_ty), mask=mask)


def split_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: PagedRows,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    page_size: int = PAGE_SIZE,
    kv_block: int = KV_BLOCK,
    split: int | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """q [rows, heads, d_head], caches [slots, kv_heads, d_head] -> [rows, heads, d_head]; arguments as in `attention`.

    split  keys per program, a multiple of `kv_block`; default: what keeps the device busy. It moves bits.
    """
    num_rows, heads = q.shape[:2]
    k_cache, v_cache, rest = checked_caches(q, k_cache, v_cache)
    kv_heads, d_head = v_cache.shape[1:]
    require_shape("rows.sequence", rows.sequence, (num_rows,))
    if sinks is not None:
        require_shape("sinks", sinks, (heads,))
    require_slopes(slopes, q)
    group, out = heads // kv_heads, torch.empty(num_rows, heads, d_head, dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    num_tiles = num_rows if rows.tiles is None else rows.tiles.shape[0]
    pairs = (1 if rows.tiles is None else rows.per_tile) * group or 128
    keys = rows.max_keys or rows.page_table.shape[1] * page_size
    if window:
        keys = min(keys, window + kv_block + (0 if rows.tiles is None else pairs))
    if split is None:
        split = split_length(num_tiles * kv_heads, keys, kv_block, num_multiprocessors(q.device))
    require(split % kv_block == 0, "split {} is not a multiple of kv_block {}.", split, kv_block)
    splits = ceil_div(keys, split)
    tile = attention_tile(pairs, d_head, q.dtype, gpu_of(q.device), group, splits > 1)
    if splits > 1:
        space = Workspace.of(num_tiles, kv_heads, splits, tile.rows, d_head, q.device)
    else:  # not used, but the kernel is compiled for both
        space = Workspace(torch.empty(1, dtype=torch.float32, device=q.device), rows.position)
    scale, softcap = in_kernel_units(scale, softcap, q.dtype)
    _split_kernel[(num_tiles, kv_heads, splits)](
        q, k_cache, v_cache, out, space.partial, space.count, rows.tiles if rows.tiles is not None else rows.position,
        rows.sequence, rows.position, rows.page_table, q if sinks is None else sinks, q if slopes is None else slopes,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), out.stride(0), out.stride(1),
        rows.page_table.stride(0), scale, softcap, window, split, splits,
        group, d_head, next_power_of_2(max(d_head, 16)), tile.rows, rows.tiles is not None,
        page_size, kv_block, softcap > 0, window > 0, sinks is not None, rest, next_power_of_2(max(rest, 16)),
        slopes is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def split_length(programs: int, keys: int, kv_block: int, multiprocessors: int) -> int:
    """Keys per program: `programs` is their number without splits. The more requests, the longer the splits."""
    splits = max(1, min(ceil_div(_PROGRAMS_EACH * multiprocessors, programs), ceil_div(keys, kv_block)))
    return ceil_div(ceil_div(keys, splits), kv_block) * kv_block
