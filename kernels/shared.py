"""Attention over keys that many rows share: read once for all of them, with the bits of each row alone.

Branches of one prompt have the same pages in their tables. A tile of this kernel holds rows of different sequences whose tables
agree on a range of keys. It walks over the range in the canonical order (`kernels/attention.py`) and leaves the state of every
(row, query head) pair in memory: the merged splits and the split that is not complete. `attention` continues from there with
the keys that a row does not share. Where a prefix divides again, tiles of the next level continue from the states of the last
one. A row takes the same steps on the same numbers as it does alone, so sharing affects speed only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from replaylens.kernels.gpus import Gpu, num_multiprocessors
from replaylens.kernels.launch import (
    EXACT,
    AttentionTile,
    attention_tile,
    heads_together,
    next_power_of_2,
    require,
    require_shape,
)
from replaylens.kernels.softmax import (
    closed,
    empty,
    load_merged,
    load_partial,
    load_queries,
    load_running,
    load_slopes,
    merge,
    store_merged,
    store_partial,
    store_running,
    walk_seen,
)

# ---- shared ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedLevel:
    """Tiles that can run at the same time. Every row is in at most one of them."""

    tiles: Tensor
    """[tiles, 4] int32: (first place in `order`, number of rows, first key, end of the keys). Both keys are multiples of a
    block, and the first is where the previous level ended. Empty tiles have no rows."""
    order: Tensor
    """[rows] int32: the rows of the tiles, one tile after another"""
    pairs: int
    """the most (row, query head) pairs per KV head in a tile"""
    max_keys: int
    """the most keys of a tile"""


@dataclass(frozen=True)
class SharedKeys:
    """Which rows of a pass share keys."""

    levels: tuple[SharedLevel, ...]
    begun: Tensor
    """[rows, 2] int32: (number of keys in the row's state, its level); 0 keys: the row shares nothing"""


@triton.jit(do_not_specialize=["stride_t", "stride_s", "max_splits"])
def _shared_kernel(
    Q, K, V, STATE, PARTIAL, COUNT, TILES, ORDER, SEQUENCE, TABLES, SLOPES,
    stride_qr, stride_qh, kv_stride, head_stride, stride_t, stride_s, scale, softcap, max_splits,
    GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, SPLIT_GRID: tl.constexpr,
    CAPPED: tl.constexpr, LEVEL: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """One tile and KV head; with SPLIT_GRID, one split of it."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    place, num_rows = tl.load(TILES + tile * 4), tl.load(TILES + tile * 4 + 1)
    begin, end = tl.load(TILES + tile * 4 + 2), tl.load(TILES + tile * 4 + 3)
    if num_rows == 0:
        return
    pair = tl.arange(0, ROWS)
    valid = pair < num_rows * GROUP
    row = tl.load(ORDER + place + pair // GROUP, mask=valid, other=0).to(tl.int64)
    head = kv_head * GROUP + pair % GROUP
    d = tl.arange(0, HEAD_BLOCK)
    mask = valid[:, None] & (d[None, :] < HEAD)
    q, other = load_queries(Q + row * stride_qr + head * stride_qh, valid, d, HEAD, REST, REST_BLOCK)
    slope = load_slopes(SLOPES, head, valid, SLOPED, Q.dtype.element_ty == tl.float32)
    TABLE = TABLES + tl.load(SEQUENCE + tl.load(ORDER + place)).to(tl.int64) * stride_t
    K += kv_head * head_stride
    V += kv_head * head_stride
    at = (row * (tl.num_programs(1) * GROUP) + head) * (3 + 2 * HEAD_BLOCK + BLOCK // 2)
    OUT = STATE + LEVEL * stride_s
    low, high = begin // SPLIT, tl.cdiv(end, SPLIT)

    if SPLIT_GRID:
        split = low + tl.program_id(2)
        if split >= high:
            return
        if LEVEL > 0:
            m, sums, a = load_running(OUT - stride_s, at, d, valid & (split == low), BLOCK, HEAD_BLOCK)
        else:
            m, sums, a = empty(ROWS, BLOCK, HEAD_BLOCK)
        m, sums, a = walk_seen(
            q, other, m, sums, a, K, V, TABLE, tl.maximum(begin, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT), slope, d,
            kv_stride, scale, softcap, ROWS, PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, SLOPED,
        )  # fmt: skip
        work = (tile * tl.num_programs(1) + kv_head).to(tl.int64)
        PARTIAL += work * max_splits * ROWS * (HEAD_BLOCK + 2)
        if (split + 1) * SPLIT <= end:
            store_partial(PARTIAL, split - low, m, closed(sums, BLOCK), a, pair, d, valid, mask, ROWS, HEAD_BLOCK)
        else:
            store_running(OUT, at, m, sums, a, d, valid, BLOCK, HEAD_BLOCK)
        tl.debug_barrier()  # every thread has stored its part before the count goes up
        if tl.atomic_add(COUNT + work, 1, sem="acq_rel") == high - low - 1:  # the last program to finish merges
            tl.store(COUNT + work, 0)
            m, l, a = load_merged(OUT - stride_s, at, d, valid & (LEVEL > 0), BLOCK, HEAD_BLOCK)
            for i in tl.range(0, end // SPLIT - low):
                m1, l1, a1 = load_partial(PARTIAL, i, pair, d, valid, mask, ROWS, HEAD_BLOCK)
                m, l, a = merge(m, l, a, m1, l1, a1, Q.dtype.element_ty == tl.float32)
            store_merged(OUT, at, m, l, a, d, valid, BLOCK, HEAD_BLOCK)
            if end % SPLIT == 0:
                m, sums, a = empty(ROWS, BLOCK, HEAD_BLOCK)
                store_running(OUT, at, m, sums, a, d, valid, BLOCK, HEAD_BLOCK)
    else:
        m, l, a = load_merged(OUT - stride_s, at, d, valid & (LEVEL > 0), BLOCK, HEAD_BLOCK)
        m1, sums, a1 = load_running(OUT - stride_s, at, d, valid & (LEVEL > 0), BLOCK, HEAD_BLOCK)
        start = begin
        for split in tl.range(low, end // SPLIT):
            m1, sums, a1 = walk_seen(
                q, other, m1, sums, a1, K, V, TABLE, start, (split + 1) * SPLIT, slope, d,
                kv_stride, scale, softcap, ROWS, PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, SLOPED,
            )  # fmt: skip
            m, l, a = merge(m, l, a, m1, closed(sums, BLOCK), a1, Q.dtype.element_ty == tl.float32)
            m1, sums, a1 = empty(ROWS, BLOCK, HEAD_BLOCK)
            start = (split + 1) * SPLIT
        store_merged(OUT, at, m, l, a, d, valid, BLOCK, HEAD_BLOCK)
        m1, sums, a1 = walk_seen(
            q, other, m1, sums, a1, K, V, TABLE, start, end, slope, d,
            kv_stride, scale, softcap, ROWS, PAGE, BLOCK, HEAD, HEAD_BLOCK, REST, CAPPED, SLOPED,
        )  # fmt: skip
        store_running(OUT, at, m1, sums, a1, d, valid, BLOCK, HEAD_BLOCK)


def state_width(d_head: int, kv_block: int) -> int:
    """float32 numbers of the state of a (row, query head) pair."""
    return 3 + 2 * next_power_of_2(max(d_head, 16)) + kv_block // 2


def shared_states(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    shared: SharedKeys,
    sequence: Tensor,
    page_table: Tensor,
    scale: float,
    softcap: float,
    page_size: int,
    kv_block: int,
    kv_split: int,
    tile: AttentionTile,
    split: bool | None,
    rest: int,
    slopes: Tensor | None,
) -> Tensor:
    """The states of the rows after the keys that they share: [levels, rows, heads, state_width].

    Arguments as in `attention`, which checks them; `scale` and `softcap` in the kernel's units. rest: columns of keys beyond
    their values. Level i holds the states of the rows in the tiles of level i alone.
    """
    num_rows, heads = q.shape[:2]
    kv_heads, d_head = v_cache.shape[1:]
    head_block = next_power_of_2(max(d_head, 16))
    state = torch.empty(
        len(shared.levels), num_rows, heads, state_width(d_head, kv_block), dtype=torch.float32, device=q.device
    )
    for number, level in enumerate(shared.levels):
        num_tiles, splits = len(level.tiles), -(-level.max_keys // kv_split) + 1
        fits = tile.rows >= level.pairs
        require(fits, "A tile of {} pairs cannot hold {} pairs.", tile.rows, level.pairs)
        own = num_tiles * kv_heads <= num_multiprocessors(q.device) // 3 if split is None else split
        partial = count = q
        if own:
            size = num_tiles * kv_heads * splits * tile.rows * (head_block + 2)
            partial = torch.empty(size, dtype=torch.float32, device=q.device)
            count = torch.zeros(num_tiles * kv_heads, dtype=torch.int32, device=q.device)
        _shared_kernel[(num_tiles, kv_heads, splits if own else 1)](
            q, k_cache, v_cache, state, partial, count, level.tiles, level.order, sequence, page_table,
            q if slopes is None else slopes,
            q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), page_table.stride(0), state.stride(0),
            scale, softcap, splits, heads // kv_heads, d_head, head_block, tile.rows,
            page_size, kv_block, kv_split, own, softcap > 0, number, rest, next_power_of_2(max(rest, 16)),
            slopes is not None,
            num_warps=tile.warps, num_stages=tile.stages, **EXACT,
        )  # fmt: skip
    return state


# ---- paged -----------------------------------------------------------------------------------------------------------
# `PagedRows`: the rows of a pass and the pages of their keys; `plan_tiles`: which rows share a program.


@dataclass(frozen=True)
class PagedRows:
    """The rows of a pass and the pages of their keys. Immutable, but the tensors may be refilled between graph replays."""

    sequence: Tensor
    """[rows] int32: index into `page_table`"""
    position: Tensor
    """[rows] int32"""
    page_table: Tensor
    """[sequences, pages] int32"""
    tiles: Tensor | None = None
    """[tiles, 2] int32 (first row, number of rows), from `plan_tiles`; None: one tile per row"""
    max_keys: int = 0
    """upper bound on position + 1; 0: as many as the page table can hold"""
    per_tile: int = 0
    """rows per tile that `tiles` was planned for; 0: the most that any plan has"""
    shared: SharedKeys | None = None
    """keys that are read once for many rows; None: every row reads its own"""
    single: bool = False
    """whether every sequence has one row, except padding: a recurrence then takes them side by side"""

    def __post_init__(self) -> None:
        require_shape("position", self.position, tuple(self.sequence.shape))
        require(self.sequence.dim() == 1, "sequence has shape {}. Expected [rows].", self.sequence.shape)
        require(self.page_table.dim() == 2, "page_table has shape {}. Expected [sequences, pages].", self.page_table.shape)
        for name in ("sequence", "position", "page_table", "tiles"):
            x = getattr(self, name)
            if x is not None:
                require(x.dtype == torch.int32, "{} is {}. Expected int32.", name, x.dtype)
                require(x.is_contiguous(), "{} must be contiguous.", name)
                same = x.device == self.sequence.device
                require(same, "{} is on {}, but sequence is on {}.", name, x.device, self.sequence.device)


def rows_per_tile(heads: int, kv_heads: int, d_head: int, dtype: torch.dtype, longest: int, gpu: Gpu) -> int:
    """How many rows of one sequence share a tile if no sequence has more than `longest` rows. d_head: of values"""
    group = heads_together(heads, kv_heads, d_head, dtype, gpu)
    return max(1, attention_tile(longest * group, d_head, dtype, gpu, group).rows // group)


def plan_tiles(sequences: Sequence[int] | NDArray[np.integer[Any]], per_tile: int, capacity: int = 0) -> Tensor:
    """Split packed rows into tiles of one sequence each: [tiles, 2] int32 on the CPU, padded with empty tiles to `capacity`.

    sequences  the sequence of each row

    Tiles with the most keys come last in a sequence. The plan is reversed so that their programs start first.
    """
    owner = np.asarray(sequences)
    edges = np.concatenate([[0], np.flatnonzero(owner[1:] != owner[:-1]) + 1, [len(owner)]])
    counts = -(-np.diff(edges) // per_tile)  # tiles of each sequence
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    first = np.repeat(edges[:-1], counts) + per_tile * number
    rows = np.minimum(per_tile, np.repeat(edges[1:], counts) - first)
    require(not capacity or len(first) <= capacity, "{} tiles do not fit into a plan of {}.", len(first), capacity)
    tiles = np.zeros((max(capacity, len(first)), 2), dtype=np.int32)
    tiles[: len(first)] = np.stack([first, rows], axis=1)[::-1]
    return torch.from_numpy(tiles)
