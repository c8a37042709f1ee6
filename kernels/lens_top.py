"""The logit lens (Z), second part: the likeliest tokens and given ones, from the same logits multiplied again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import (
    EXACT,
    LensShape,
    ceil_div,
    next_power_of_2,
)
from replaylens.kernels.lens_stats import capped
from replaylens.kernels.matmul import dot_tile


@triton.jit(do_not_specialize=["x_rows", "k", "pairs_per_row"])
def _top_kernel(
    X, W, PAIR, BLOCK_TILE, BLOCK_START, TILE_END, VALUES, IDS, vocab, K, k, pairs_per_row,
    stride_xm, stride_wk, stride_wn, cap, x_rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The k largest logits and their ids, for up to ROWS (row, tile) pairs of one tile."""
    block = tl.program_id(0)
    tile = tl.load(BLOCK_TILE + block)
    start = tl.load(BLOCK_START + block) + tl.arange(0, ROWS)
    live = start < tl.load(TILE_END + tile, mask=tile >= 0, other=0)
    if tile < 0:
        return
    pair = tl.load(PAIR + start, mask=live, other=0)
    row = tl.where(live, pair // pairs_per_row, x_rows)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    z = dot_tile(X, W, row, column, x_rows, vocab, K, stride_xm, stride_wk, stride_wn, ROWS, COLUMNS, DEPTH, False, False)
    if CAPPED:
        z = capped(z, cap)
    z = tl.where(column[None, :] < vocab, z, float("-inf"))
    at = pair.to(tl.int64) * k
    for n in range(k):
        best = tl.max(z, 1)
        token = tl.min(tl.where(z == best[:, None], column[None, :], 2147483647), 1)
        tl.store(VALUES + at + n, best, mask=live)
        tl.store(IDS + at + n, token, mask=live)
        z = tl.where(column[None, :] == token[:, None], float("-inf"), z)


@triton.jit(do_not_specialize=["k", "candidates"])
def _choose_kernel(VALUES, IDS, LSE, TOP_IDS, TOP_LOG_PROBS, candidates, k, BLOCK: tl.constexpr):
    """One row: the k best candidates from its tiles."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    z = tl.load(VALUES + row * candidates + i, mask=i < candidates, other=float("-inf"))
    token = tl.load(IDS + row * candidates + i, mask=i < candidates, other=2147483647)
    log_sum_exp = tl.load(LSE + row)
    for n in range(k):
        best = tl.max(z, 0)
        chosen = tl.min(tl.where(z == best, token, 2147483647), 0)
        tl.store(TOP_IDS + row * k + n, chosen.to(tl.int64))
        tl.store(TOP_LOG_PROBS + row * k + n, best - log_sum_exp)
        z = tl.where(token == chosen, float("-inf"), z)


@triton.jit(do_not_specialize=["rows", "targets", "layers"])
def _target_kernel(
    X, W, TARGETS, LSE, OUT, rows, vocab, K, targets, layers, stride_xm, stride_wk, stride_wn, cap,
    LAYERS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Log-probs of one position's targets at all its layers, from gathered columns of w."""
    position = tl.program_id(0)
    layer = tl.program_id(1) * LAYERS + tl.arange(0, LAYERS)
    j = tl.arange(0, COLUMNS)
    row = tl.where(layer < layers, layer * rows + position, layers * rows)
    column = tl.load(TARGETS + position.to(tl.int64) * targets + j, mask=j < targets, other=vocab).to(tl.int32)
    z = dot_tile(
        X, W, row, column, layers * rows, vocab, K, stride_xm, stride_wk, stride_wn, LAYERS, COLUMNS, DEPTH, False, False
    )  # fmt: skip
    if CAPPED:
        z = capped(z, cap)
    log_sum_exp = tl.load(LSE + row, mask=layer < layers, other=0.0)
    mask = (layer[:, None] < layers) & (j[None, :] < targets)
    tl.store(OUT + row.to(tl.int64)[:, None] * targets + j[None, :], z - log_sum_exp[:, None], mask=mask)


def top(
    h: Tensor, w: Tensor, top_tiles: Tensor, log_sum_exp: Tensor, k: int, softcap: float, shape: LensShape
) -> tuple[Tensor, Tensor]:
    """Top-k ids and log-probs: multiply the listed (row, tile) pairs again, grouped by tile. No host synchronisation."""
    total, k_tiles = top_tiles.shape
    vocab, group = w.shape[1], shape.top_rows
    tiles, device = ceil_div(vocab, shape.vocab_tile), h.device
    sorted_tiles, pair = torch.sort(top_tiles.flatten().long())
    end = torch.searchsorted(sorted_tiles, torch.arange(tiles, device=device), right=True)
    start = torch.cat([end.new_zeros(1), end[:-1]])
    blocks_end = ((end - start + group - 1) // group).cumsum(0)
    num_blocks = ceil_div(total * k_tiles, group) + min(tiles, total * k_tiles)  # an upper bound known on the host
    block = torch.arange(num_blocks, device=device)
    tile = torch.searchsorted(blocks_end, block, right=True)
    used = tile < tiles
    tile = tile.clamp(max=tiles - 1)
    within = block - torch.where(tile > 0, blocks_end[(tile - 1).clamp(min=0)], 0)
    block_start = start[tile] + within * group
    values = torch.empty(total, k_tiles * k, dtype=torch.float32, device=device)
    ids = torch.empty(total, k_tiles * k, dtype=torch.int32, device=device)
    _top_kernel[(num_blocks,)](
        h, w, pair, torch.where(used, tile, -1), block_start, end, values, ids, vocab, h.shape[1], k, k_tiles,
        h.stride(0), w.stride(0), w.stride(1), softcap or 1.0, total,
        group, shape.vocab_tile, shape.depth, softcap > 0, num_warps=shape.top_warps, num_stages=3, **EXACT,
    )  # fmt: skip
    top_ids = torch.empty(total, k, dtype=torch.int64, device=device)
    top_log_probs = torch.empty(total, k, dtype=torch.float32, device=device)
    _choose_kernel[(total,)](
        values, ids, log_sum_exp, top_ids, top_log_probs, k_tiles * k, k, next_power_of_2(k_tiles * k), num_warps=1, **EXACT
    )
    return top_ids, top_log_probs


def target_log_probs(h: Tensor, w: Tensor, targets: Tensor, log_sum_exp: Tensor, layers: int, softcap: float) -> Tensor:
    """Log-probs of each row's targets: [layers x rows, n]."""
    rows, n = targets.shape
    out = torch.empty(layers * rows, n, dtype=torch.float32, device=h.device)
    block = min(64, next_power_of_2(max(16, layers)))
    _target_kernel[(rows, ceil_div(layers, block))](
        h, w, targets.contiguous(), log_sum_exp, out, rows, w.shape[1], h.shape[1], n, layers,
        h.stride(0), w.stride(0), w.stride(1), softcap or 1.0,
        block, max(16, next_power_of_2(n)), 32 if h.dtype == torch.float32 else 128, softcap > 0,
        num_warps=4, num_stages=3, **EXACT,
    )  # fmt: skip
    return out
