"""Canonical attention over pages: one order of summation per row, in prefill, decode and verification alike.

    s[j] = q . k[j] * scale        (softcap: s <- c tanh(s / c))        out = sum_j softmax(s)[j] v[j],   j <= position

**The order.** Keys are summed in blocks of `KV_BLOCK` counted from position 0, never from the start of a window or batch.
Every `KV_SPLIT` keys form a separate partial result (max m, sum l, sum a). Partial results are merged from first to last.
This order depends on the row's position alone. A masked key has p = 0, and a block or split without visible keys leaves m,
l and a unchanged to the bit (exp2(0) = 1, x * 1 + 0 = x). It therefore does not matter which rows share a tile or whether an
empty block is skipped: decode, a prefill cut anywhere and a full prefill agree.

**Row sums end in a dot with ones.** A `tl.sum` over a tile axis adds in an order that depends on the thread layout, hence on
the tile; elementwise additions and dots do not. p is first added in pairs (columns 2i and 2i + 1), the pairs are accumulated
elementwise over the blocks of a split, and a float32 dot with ones sums them once per split. Maxima are exact in any order.

**Two schedules, same bits.** With few tiles, each split runs in its own program (`split` below), and the last one to finish
merges all partial results in order. With many tiles, one program loops over the splits and merges as it goes.

**A third for many rows on Hopper.** `kernels/prefill.py` takes the same steps with specialised warpgroups, which overlap the
softmax with products.

**Shared keys.** Where rows of several sequences read the same pages, `kernels/shared.py` walks over them once for all rows, and
each row continues from the state it left.

**Sinks.** A sink is a score without a key. It is one more partial result, merged after all others, in any schedule.

**Slopes** (ALiBi). A head's slope times the position of a key is added to its score: s <- s + slope * j.

**Latents.** Values may be the first columns of their keys: the absorbed form of latent attention, with one KV head for all
query heads. A key is then read once for both. Wide values leave room for few query heads per program (`heads_together`): the
heads are divided among several programs, which read the same keys.

**Pages.** Slot of key j of sequence s: `page_table[s, j // page_size] * page_size + j % page_size`. Page 0 is the null page.
It is all zeros and never written. A table may hold 0 for positions that no row reads.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.gpus import gpu_of, num_multiprocessors
from replaylens.kernels.launch import (
    EXACT,
    KV_BLOCK,
    KV_SPLIT,
    PAGE_SIZE,
    AttentionTile,
    attention_tile,
    ceil_div,
    heads_together,
    next_power_of_2,
    require,
    require_float,
    require_rows,
    require_same,
    require_shape,
)
from replaylens.kernels.prefill import MAX_PAIRS, can_prefill, prefill
from replaylens.kernels.shared import PagedRows, shared_states
from replaylens.kernels.softmax import (
    closed,
    empty,
    in_kernel_units,
    load_merged,
    load_partial,
    load_queries,
    load_running,
    load_slopes,
    merge,
    quotient,
    store_partial,
    walk,
    with_sink,
)

MAX_VALUES, MAX_REST = 512, 64
"""columns of keys that are also values, and of the rest of them: what fits into shared memory next to the queries"""


@triton.jit(do_not_specialize=["window", "max_splits", "stride_t", "stride_s"])
def _attention_kernel(
    Q, K, V, OUT, PARTIAL, COUNT, TILES, SEQUENCE, POSITION, TABLES, STATE, BEGUN, SINKS, SLOPES,
    stride_qr, stride_qh, kv_stride, head_stride, stride_or, stride_oh, stride_t, stride_s,
    scale, softcap, window, max_splits,
    GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROWS: tl.constexpr, TILED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, SPLIT_GRID: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SHARED: tl.constexpr, HAS_SINKS: tl.constexpr, REST: tl.constexpr,
    REST_BLOCK: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """One tile: up to ROWS (row, query head) pairs of one sequence and one KV head."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
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
    slope = load_slopes(SLOPES, head, valid, SLOPED, Q.dtype.element_ty == tl.float32)
    TABLE = TABLES + tl.load(SEQUENCE + first_row).to(tl.int64) * stride_t
    K += kv_head * head_stride
    V += kv_head * head_stride

    end = tl.max(position, 0) + 1
    clear = tl.min(tl.where(valid, position, 2147483647), 0)  # every row sees the keys up to here
    first = 0
    if WINDOWED:  # the first key that any row of the tile sees
        first = tl.maximum(clear - window + 1, 0) // BLOCK * BLOCK
    if SHARED:  # the keys before `first` are in the state of the rows
        first, level = tl.load(BEGUN + first_row * 2), tl.load(BEGUN + first_row * 2 + 1)
        begun = valid & (first > 0)
        at = level * stride_s + (row * (tl.num_programs(1) * GROUP) + head) * (3 + 2 * HEAD_BLOCK + BLOCK // 2)
    low, high = first // SPLIT, tl.cdiv(end, SPLIT)
    write = high > low
    if SPLIT_GRID:
        split = low + tl.program_id(2)
        if split >= high:
            return
        if SHARED:
            m, sums, a = load_running(STATE, at, d, begun & (split == low), BLOCK, HEAD_BLOCK)
        else:
            m, sums, a = empty(ROWS, BLOCK, HEAD_BLOCK)
        m, sums, a = walk(
            q, other, m, sums, a, K, V, TABLE, tl.maximum(first, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT), position,
            clear, slope, d, kv_stride, scale, softcap, window, ROWS, PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, WINDOWED,
            SLOPED,
        )  # fmt: skip
        l = closed(sums, BLOCK)
        if high - low > 1:
            work = (tile * tl.num_programs(1) + kv_head).to(tl.int64)
            PARTIAL += work * max_splits * ROWS * (HEAD_BLOCK + 2)
            store_partial(PARTIAL, split - low, m, l, a, pair, d, valid, mask, ROWS, HEAD_BLOCK)
            tl.debug_barrier()  # every thread has stored its part before the count goes up
            write = tl.atomic_add(COUNT + work, 1, sem="acq_rel") == high - low - 1
            if write:  # the last program to finish merges
                tl.store(COUNT + work, 0)
                m, l, a = load_partial(PARTIAL, 0, pair, d, valid, mask, ROWS, HEAD_BLOCK)
                if SHARED:
                    m0, l0, a0 = load_merged(STATE, at, d, begun, BLOCK, HEAD_BLOCK)
                    m, l, a = merge(m0, l0, a0, m, l, a, Q.dtype.element_ty == tl.float32)
                for i in tl.range(1, high - low):
                    m1, l1, a1 = load_partial(PARTIAL, i, pair, d, valid, mask, ROWS, HEAD_BLOCK)
                    m, l, a = merge(m, l, a, m1, l1, a1, Q.dtype.element_ty == tl.float32)
        elif SHARED:
            m0, l0, a0 = load_merged(STATE, at, d, begun, BLOCK, HEAD_BLOCK)
            m, l, a = merge(m0, l0, a0, m, l, a, Q.dtype.element_ty == tl.float32)
    else:
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        a = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
        start = low
        if SHARED:  # the first split continues the running one
            m1, sums, a1 = load_running(STATE, at, d, begun, BLOCK, HEAD_BLOCK)
            m1, sums, a1 = walk(
                q, other, m1, sums, a1, K, V, TABLE, first, tl.minimum(end, (low + 1) * SPLIT), position, clear, slope, d,
                kv_stride, scale, softcap, window, ROWS, PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, WINDOWED, SLOPED,
            )  # fmt: skip
            m, l, a = load_merged(STATE, at, d, begun, BLOCK, HEAD_BLOCK)
            m, l, a = merge(m, l, a, m1, closed(sums, BLOCK), a1, Q.dtype.element_ty == tl.float32)
            start = low + 1
        for split in tl.range(start, high):
            m1, sums, a1 = empty(ROWS, BLOCK, HEAD_BLOCK)
            m1, sums, a1 = walk(
                q, other, m1, sums, a1, K, V, TABLE, tl.maximum(first, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT),
                position, clear, slope, d, kv_stride, scale, softcap, window, ROWS, PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED,
                WINDOWED, SLOPED,
            )  # fmt: skip
            m, l, a = merge(m, l, a, m1, closed(sums, BLOCK), a1, Q.dtype.element_ty == tl.float32)
    if write:
        if HAS_SINKS:
            m, l, a = with_sink(m, l, a, SINKS, head, valid, Q.dtype.element_ty == tl.float32)
        out = OUT + row[:, None] * stride_or + head[:, None] * stride_oh + d[None, :]
        l = tl.where(valid, l, 1.0)  # padding pairs saw no key
        tl.store(out, quotient(a, l, Q.dtype.element_ty == tl.float32).to(OUT.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Workspace:
    """Partial results of the split schedule. One per stream: concurrent passes must not share one."""

    partial: Tensor
    """float32"""
    count: Tensor
    """int32, all zero between launches"""

    @classmethod
    def of(cls, tiles: int, kv_heads: int, splits: int, tile_rows: int, d_head: int, device: torch.device) -> "Workspace":
        size = tiles * kv_heads * splits * tile_rows * (next_power_of_2(max(d_head, 16)) + 2)
        partial = torch.empty(size, dtype=torch.float32, device=device)
        return cls(partial, torch.zeros(tiles * kv_heads, dtype=torch.int32, device=device))

    def check(self, tiles: int, kv_heads: int, splits: int, tile_rows: int, d_head: int) -> None:
        """Raise ValueError if a launch of this size would write past the end."""
        size = tiles * kv_heads * splits * tile_rows * (next_power_of_2(max(d_head, 16)) + 2)
        fits = self.partial.numel() >= size and self.count.numel() >= tiles * kv_heads
        require(fits, "The workspace is too small for {} tiles, {} splits and {} rows per tile.", tiles, splits, tile_rows)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: PagedRows,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    page_size: int = PAGE_SIZE,
    tile: AttentionTile | None = None,
    split: bool | None = None,
    kv_block: int = KV_BLOCK,
    kv_split: int = KV_SPLIT,
    shared_tile: AttentionTile | None = None,
    split_shared: bool | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    specialised: bool | None = None,
) -> Tensor:
    """q [rows, heads, d_head], caches [slots, kv_heads, d_head] -> [rows, heads, d_head].

    v_cache  may be the first d_value columns of `k_cache`, which has one head then: the result is [rows, heads, d_value]
    sinks    [heads]: scores that take part in the softmax of every row and belong to no key
    slopes   [heads] float32: what is added to a score for each position of its key (ALiBi)

    The keys and values of the rows themselves must be in the cache. `window` counts the visible positions, the row
    included. 0 disables `softcap` or `window`. `tile` and `split` choose a schedule, for shared keys `shared_tile` and
    `split_shared`; `specialised` chooses the kernel of `kernels/prefill.py` (None: where it is faster). They move no bit.
    `kv_block` and `kv_split` are canonical: only tests that show that bits move pass other values.
    """
    num_rows, heads = q.shape[:2]
    k_cache, v_cache, rest = checked_caches(q, k_cache, v_cache)
    kv_heads, d_head = v_cache.shape[1:]
    require_shape("rows.sequence", rows.sequence, (num_rows,))
    require(kv_split % kv_block == 0, "kv_split {} is not a multiple of kv_block {}.", kv_split, kv_block)
    require(scale > 0, "scale is {}. It must be positive.", scale)
    require(softcap >= 0 and window >= 0, "softcap is {} and window {}. Neither may be negative.", softcap, window)
    group = heads // kv_heads
    if out is None:
        out = torch.empty(num_rows, heads, d_head, dtype=q.dtype, device=q.device)
    require_shape("out", out, (num_rows, heads, d_head))
    require_rows("out", out)
    if sinks is not None:
        require_shape("sinks", sinks, (heads,))
        require_same("sinks", sinks, q)
    require_slopes(slopes, q)
    if not num_rows:
        return out
    if specialised is None and (tile is not None or split is not None):
        specialised = False  # the caller chose a schedule of this kernel
    plain = sinks is None and slopes is None and not rest
    special = _specialises(q, k_cache, v_cache, rows, window, page_size, kv_block, kv_split, plain, specialised)
    tile, split, splits = _schedule(rows, group, d_head, q.dtype, window, page_size, kv_split, kv_heads, tile, split)
    num_tiles = num_rows if rows.tiles is None else rows.tiles.shape[0]
    scale, softcap = in_kernel_units(scale, softcap, q.dtype)
    if rows.tiles is not None and special:
        tiles, places = rows.tiles, (rows.sequence, rows.position, rows.page_table)
        prefill(q, k_cache, v_cache, out, tiles, *places, scale, softcap, window, page_size)
        return out
    if split:
        workspace = workspace or Workspace.of(num_tiles, kv_heads, splits, tile.rows, d_head, q.device)
        workspace.check(num_tiles, kv_heads, splits, tile.rows, d_head)
    partial, count = (workspace.partial, workspace.count) if split and workspace is not None else (q, q)
    shared = None if window else rows.shared  # a window bounds what a row reads
    state, begun, level_stride = q, rows.position, 0
    if shared is not None:
        pairs = max(level.pairs for level in shared.levels)
        tall = shared_tile or attention_tile(pairs, d_head, q.dtype, gpu_of(q.device), group, False)
        state = shared_states(
            q,
            k_cache,
            v_cache,
            shared,
            rows.sequence,
            rows.page_table,
            scale,
            softcap,
            page_size,
            kv_block,
            kv_split,
            tall,
            split_shared,
            rest,
            slopes,
        )
        begun, level_stride = shared.begun, state.stride(0)
    _attention_kernel[(num_tiles, kv_heads, splits if split else 1)](
        q, k_cache, v_cache, out, partial, count, rows.tiles if rows.tiles is not None else rows.position,
        rows.sequence, rows.position, rows.page_table, state, begun, q if sinks is None else sinks,
        q if slopes is None else slopes, q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), out.stride(0),
        out.stride(1), rows.page_table.stride(0), level_stride, scale, softcap, window, splits,
        group, d_head, next_power_of_2(max(d_head, 16)), tile.rows, rows.tiles is not None,
        page_size, kv_block, kv_split, split, softcap > 0, window > 0, shared is not None, sinks is not None, rest,
        next_power_of_2(max(rest, 16)), slopes is not None,
        num_warps=tile.warps, num_stages=tile.stages, **EXACT,
    )  # fmt: skip
    return out


def _schedule(
    rows: PagedRows, group: int, d_head: int, dtype: torch.dtype, window: int, page_size: int, kv_split: int, kv_heads: int,
    tile: AttentionTile | None, split: bool | None,
) -> tuple[AttentionTile, bool, int]:  # fmt: skip
    """(tile, whether each split has its own program, the most splits a row can have)."""
    per_tile, gpu = 1 if rows.tiles is None else rows.per_tile, gpu_of(rows.position.device)
    pairs = per_tile * group or 128
    height = (tile or attention_tile(pairs, d_head, dtype, gpu, group)).rows
    fits = height >= max(1, per_tile) * group
    require(fits, "A tile of {} pairs cannot hold {} rows of {} query heads.", height, per_tile or 1, group)
    keys = rows.max_keys or rows.page_table.shape[1] * page_size
    if window:
        keys = min(keys, window + kv_split + (0 if rows.tiles is None else height))
    splits = ceil_div(keys, kv_split) + (1 if window else 0)
    if split is None:  # more than two programs per multiprocessor gain nothing
        num_tiles = len(rows.position) if rows.tiles is None else len(rows.tiles)
        split = splits > 1 and num_tiles * kv_heads < 2 * num_multiprocessors(rows.position.device)
    short = rows.shared is not None and not window
    return tile or attention_tile(pairs, d_head, dtype, gpu, group, split, short), split, splits


def _specialises(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: PagedRows,
    window: int,
    page_size: int,
    kv_block: int,
    kv_split: int,
    plain: bool,
    wanted: bool | None,
) -> bool:
    """Whether `kernels/prefill.py` computes these rows: if it can, and if they keep all multiprocessors busy.

    plain  neither sinks nor slopes nor keys wider than their values
    """
    if wanted is False or (rows.tiles is None and not wanted):
        return False
    shares = rows.shared is not None and not window
    group, per_tile = q.shape[1] // k_cache.shape[1], 0 if rows.tiles is None or shares else rows.per_tile
    can = plain and can_prefill(q, k_cache, v_cache, per_tile * group, page_size, kv_block, kv_split)
    require(
        can or not wanted,
        "specialised=True needs a Hopper GPU, bfloat16 or float16, head size 64 or 128, and tiles of at most {} pairs without "
        "shared keys, sinks, slopes and latents. q is {} {} on {}.",
        MAX_PAIRS,
        q.dtype,
        q.shape,
        q.device,
    )
    if wanted or not can or rows.tiles is None:
        return can
    tall = 2 * per_tile * group > MAX_PAIRS
    return tall and len(rows.tiles) * k_cache.shape[1] >= num_multiprocessors(q.device)


def require_slopes(slopes: Tensor | None, q: Tensor) -> None:
    """ValueError unless there are none, or one for each head of q."""
    if slopes is not None:
        require_shape("slopes", slopes, (q.shape[1],))
        same = slopes.dtype == torch.float32 and slopes.device == q.device and slopes.is_contiguous()
        require(same, "slopes is {} on {}. Expected contiguous float32 on {}.", slopes.dtype, slopes.device, q.device)


def checked_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, int]:
    """The caches with as many KV heads as programs divide the query heads into, and the columns of keys beyond their values.

    Raises ValueError if the tensors do not fit together.
    """
    require(q.dim() == 3, "q has shape {}. Expected [rows, heads, d_head].", q.shape)
    require_float("q", q)
    require_rows("q", q)
    heads, d_key = q.shape[1:]
    require_shape("k_cache", k_cache, (None, None, d_key))
    kv_heads, rest = k_cache.shape[1], d_key - v_cache.shape[-1]
    require_shape("v_cache", v_cache, (k_cache.shape[0], kv_heads, d_key - max(rest, 0)))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_same(name, cache, q)
        require_rows(name, cache)
        same = cache.stride() == k_cache.stride()
        require(same, "{} has strides {}, but k_cache has {}.", name, cache.stride(), k_cache.stride())
    require(heads % kv_heads == 0, "{} query heads are not a multiple of {} KV heads.", heads, kv_heads)
    parts = heads // kv_heads // heads_together(heads, kv_heads, d_key - max(rest, 0), q.dtype, gpu_of(q.device))
    if not rest:
        require(d_key <= 256, "d_head is {}. At most 256 is supported.", d_key)
        return (k_cache, v_cache, 0) if parts == 1 else (k_cache.expand(-1, parts, -1), v_cache.expand(-1, parts, -1), 0)
    columns = kv_heads == 1 and v_cache.data_ptr() == k_cache.data_ptr()
    require(columns, "v_cache is narrower than k_cache. It must then be its first columns, with one KV head.")
    fits = d_key - rest <= MAX_VALUES and rest <= MAX_REST
    most = f"At most {MAX_VALUES} and {MAX_REST} are supported."
    require(fits, "Values have {} columns and keys {} more. {}", d_key - rest, rest, most)
    return k_cache.expand(-1, parts, -1), v_cache.expand(-1, parts, -1), rest
