"""The lens: what every layer's residual stream already predicts, without a [rows, vocab] tensor.

    z = unembed(norm(S))  (softcapped)      log_sum_exp, entropy, KL(p || p_final), top-k, log-probs of given tokens

**Vocabulary tiles.** A tile of z lives in registers only. Each (row, tile) leaves four float32 numbers behind:
m = max z, s = sum e^(z - m), t = sum e^(z - m) (z - m), u = sum e^(z - m) (z - z_final). Rows are then merged over tiles:
with w_i = e^(m_i - M), S = sum w_i s_i,

    log_sum_exp = M + log S        entropy = log S - (sum w_i (t_i + (m_i - M) s_i)) / S
    kl = (sum w_i u_i) / S - log_sum_exp + log_sum_exp_final

Differences are taken before they are weighted, so nothing cancels when the layer agrees with the final one: there kl is 0.

**KL needs both tiles at once.** A program computes the final layer's tile first and keeps it in a scratch of its own that
stays in the second-level cache, then walks the other layers over the same rows and the same vocabulary tile.

**Top-k.** The k largest logits of a row lie in the k tiles with the largest maxima. Only those (row, tile) pairs are multiplied
again, grouped by tile: about k / tiles of the work, and since the product is canonical the logits are the same bits.

**Canonical.** The sums over a tile use `tl.sum`, so the launch shape is fixed (`launch.lens_shape`) whatever the number of
rows; tiles are merged by a fixed shape too. Logits are unrounded float32 accumulators, like those of `sample`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import (
    EXACT,
    LensShape,
    ceil_div,
    lens_shape,
    next_power_of_2,
    num_multiprocessors,
    require,
    require_float,
    require_rows,
    require_same,
    require_shape,
)
from replaylens.kernels.matmul import copyable, dot_tile, tiles_of
from replaylens.kernels.norm import norm
from replaylens.kernels.sample import softcap as cap_tile


@dataclass(frozen=True)
class LensStats:
    """Statistics of the lens distributions; leading dimensions [layers, rows]."""

    log_sum_exp: Tensor
    """[layers, rows] float32"""
    entropy: Tensor
    """[layers, rows] float32, in nats"""
    kl: Tensor | None
    """[layers, rows] float32: KL(layer || final)"""
    top_ids: Tensor
    """[layers, rows, k] int64, largest first; ties: smallest id first"""
    top_log_probs: Tensor
    """[layers, rows, k] float32"""
    target_log_probs: Tensor | None
    """[layers, rows, targets] float32"""


@triton.jit
def _tile_stats(
    z, n0, MAX, SUM, SHIFTED, APART, SCRATCH, at, live, is_final, vocab, cap, i,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """The four numbers of every row of a vocabulary tile that starts at n0."""
    j = tl.arange(0, WIDTH)
    if CAPPED:
        z = cap_tile(z, cap)
    inside = n0 + j[None, :] < vocab
    m = tl.max(tl.where(inside, z, -1.0e38), 1)  # finite: a tile past the vocabulary must not make NaN
    e = tl.where(inside, tl.exp2((z - m[:, None]) * 1.4426950408889634), 0.0)
    tl.store(MAX + at, m, mask=live)
    tl.store(SUM + at, tl.sum(e, 1), mask=live)
    tl.store(SHIFTED + at, tl.sum(e * (z - m[:, None]), 1), mask=live)
    if KL:
        keep = SCRATCH + i[:, None] * WIDTH + j[None, :]
        if is_final:
            tl.store(keep, z)
            tl.debug_barrier()  # whichever thread reads an element back sees it
        u = tl.sum(e * (z - tl.load(keep)), 1)
        tl.store(APART + at, u, mask=live)


@triton.jit(do_not_specialize=["rows", "layers", "final", "row_tiles"])
def _stats_kernel(
    X, W, MAX, SUM, SHIFTED, APART, SCRATCH, rows, vocab, K, stride_xm, stride_wk, stride_wn, layers, final, cap,
    tiles, row_tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr,
    COPY: tl.constexpr, W_TRANSPOSED: tl.constexpr, CAPPED: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """Program p takes the pairs of tiles p, p + PROGRAMS, ...; each with the final layer first, then the others in order."""
    program = tl.program_id(0)
    mine = (row_tiles * tl.cdiv(tiles, 2) - program + PROGRAMS - 1) // PROGRAMS
    i = tl.arange(0, ROWS)
    SCRATCH += program.to(tl.int64) * ROWS * COLUMNS
    for item in tl.range(0, mine * layers):
        index = program + (item // layers) * PROGRAMS
        step = item % layers  # 0: the final layer; then 0, 1, ... without it
        layer = tl.where(step == 0, final, step - 1 + (step - 1 >= final).to(tl.int32))
        tile = index // row_tiles
        first = (index % row_tiles) * ROWS
        m0, n0 = layer * rows + first, tile * COLUMNS
        if COPY:
            z = tl.zeros((ROWS, COLUMNS), tl.float32)
            for k in range(0, K, DEPTH):
                a = X.load([m0, k])
                b = W.load([n0, k]).T if W_TRANSPOSED else W.load([k, n0])
                z = tl.dot(a, b, z, input_precision="ieee")
        else:
            z = dot_tile(
                X, W, m0 + i, n0 + tl.arange(0, COLUMNS), layers * rows, vocab, K, stride_xm, stride_wk, stride_wn,
                ROWS, COLUMNS, DEPTH, False, False,
            )  # fmt: skip
        left, right = tl.split(tl.permute(tl.reshape(z, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        at = (m0 + i).to(tl.int64) * tiles + tile * 2
        live = first + i < rows
        _tile_stats(
            left, n0, MAX, SUM, SHIFTED, APART, SCRATCH, at, live, step == 0, vocab, cap, i,
            COLUMNS // 2, CAPPED, KL,
        )  # fmt: skip
        _tile_stats(
            right, n0 + COLUMNS // 2, MAX, SUM, SHIFTED, APART, SCRATCH + ROWS * COLUMNS // 2, at + 1,
            live & (tile * 2 + 1 < tiles), step == 0, vocab, cap, i, COLUMNS // 2, CAPPED, KL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["k"])
def _merge_kernel(
    MAX, SUM, SHIFTED, APART, LSE, ENTROPY, KL_OUT, TOP_TILES, tiles, k, BLOCK: tl.constexpr, KL: tl.constexpr
):  # fmt: skip
    """One row: merge its tiles, and name the k tiles with the largest maxima, lowest first among equals."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at, live = row * tiles + i, i < tiles
    m = tl.load(MAX + at, mask=live, other=-1.0e38)
    s = tl.load(SUM + at, mask=live, other=0.0)
    t = tl.load(SHIFTED + at, mask=live, other=0.0)
    top = tl.max(m, 0)
    w = tl.where(live, tl.exp2((m - top) * 1.4426950408889634), 0.0)
    total = tl.sum(w * s, 0)
    log_total = tl.log(total)
    tl.store(LSE + row, top + log_total)
    tl.store(ENTROPY + row, log_total - tl.sum(w * tl.where(live, t + (m - top) * s, 0.0), 0) / total)
    if KL:
        u = tl.load(APART + at, mask=live, other=0.0)
        tl.store(KL_OUT + row, tl.sum(w * u, 0) / total - (top + log_total))
    for n in range(k):
        best = tl.max(m, 0)
        where = tl.min(tl.where(m == best, i, BLOCK), 0)
        tl.store(TOP_TILES + row * k + n, where)
        m = tl.where(i == where, float("-inf"), m)


@triton.jit(do_not_specialize=["x_rows", "k", "pairs_per_row"])
def _top_kernel(
    X, W, PAIR, BLOCK_TILE, BLOCK_START, TILE_END, VALUES, IDS, vocab, K, k, pairs_per_row,
    stride_xm, stride_wk, stride_wn, cap, x_rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Up to ROWS pairs (row, tile) of one tile: their largest k logits and ids."""
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
        z = cap_tile(z, cap)
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
    """One row: the k best of the candidates from its tiles."""
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
    """One position, all its layers: log-probs of the position's own targets, whose columns of w are gathered."""
    position = tl.program_id(0)
    layer = tl.program_id(1) * LAYERS + tl.arange(0, LAYERS)
    j = tl.arange(0, COLUMNS)
    row = tl.where(layer < layers, layer * rows + position, layers * rows)
    column = tl.load(TARGETS + position.to(tl.int64) * targets + j, mask=j < targets, other=vocab).to(tl.int32)
    z = dot_tile(
        X, W, row, column, layers * rows, vocab, K, stride_xm, stride_wk, stride_wn, LAYERS, COLUMNS, DEPTH, False, False
    )  # fmt: skip
    if CAPPED:
        z = cap_tile(z, cap)
    log_sum_exp = tl.load(LSE + row, mask=layer < layers, other=0.0)
    mask = (layer[:, None] < layers) & (j[None, :] < targets)
    tl.store(OUT + row.to(tl.int64)[:, None] * targets + j[None, :], z - log_sum_exp[:, None], mask=mask)


def lens(
    x: Tensor,
    w: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    kind: str = "rms",
    final: int | None = None,
    targets: Tensor | None = None,
    k: int = 8,
    softcap: float = 0.0,
    shape: LensShape | None = None,
) -> LensStats:
    """Lens statistics of residual streams x [layers, rows, d] through the final norm and w [d, vocab].

    `final` is the index of the layer whose distribution is the final one (usually the last); None: no KL. targets [rows, n]
    int32 or int64: tokens whose log-probs are wanted, the same at every layer of a row. `shape` is canonical; other values
    are for tests.
    """
    layers, rows = _check_lens(x, w, final, targets, k)
    vocab = w.shape[1]
    h = norm(x.reshape(layers * rows, -1), norm_weight, norm_bias, eps, kind)
    shape = shape or lens_shape(x.dtype)
    tiles = ceil_div(vocab, shape.vocab_tile)
    k_tiles = min(k, tiles)
    arranged, a_layers, a_final = _arrange(h, layers, rows, final, shape)
    stats = _stats(arranged, w, a_layers, a_final, final is not None, softcap, shape)
    log_sum_exp, entropy, kl, top_tiles = _merge(stats, k_tiles, final is not None)
    if final is not None:  # kl so far lacks the final layer's log-sum-exp
        by_layer = log_sum_exp.view(a_layers, -1)
        kl = (kl.view(a_layers, -1) + by_layer[a_final]).flatten()
    log_sum_exp, entropy, kl, top_tiles = (y[-layers * rows :] for y in (log_sum_exp, entropy, kl, top_tiles))
    top_ids, top_log_probs = _top(h, w, top_tiles.contiguous(), log_sum_exp, k, softcap, shape)
    picked = None if targets is None else _targets(h, w, targets, log_sum_exp, layers, softcap)
    return LensStats(
        log_sum_exp.view(layers, rows),
        entropy.view(layers, rows),
        kl.view(layers, rows) if final is not None else None,
        top_ids.view(layers, rows, k),
        top_log_probs.view(layers, rows, k),
        picked.view(layers, rows, -1) if picked is not None else None,
    )


def _check_lens(x: Tensor, w: Tensor, final: int | None, targets: Tensor | None, k: int) -> tuple[int, int]:
    """(layers, rows), or an error that says what does not fit."""
    require(x.dim() == 3, "x has shape {}; expected [layers, rows, d]", x.shape)
    require_float("x", x)
    require_rows("x", x)
    require_shape("w", w, (x.shape[2], None))
    require_same("w", w, x)
    layers, rows = x.shape[:2]
    require(layers * rows > 0, "x has shape {}: nothing to look at", x.shape)
    require(final is None or 0 <= final < layers, "final layer {} is not one of the {} layers of x", final, layers)
    require(0 < k <= min(32, w.shape[1]), "k = {} must be between 1 and min(32, vocabulary {})", k, w.shape[1])
    if targets is not None:
        require_shape("targets", targets, (rows, None))
        require(targets.dtype in (torch.int32, torch.int64), "targets are {}; expected int32 or int64", targets.dtype)
        require(0 < targets.shape[1] <= 64, "{} targets per row; between 1 and 64 are possible", targets.shape[1])
    return layers, rows


def _arrange(h: Tensor, layers: int, rows: int, final: int | None, shape: LensShape) -> tuple[Tensor, int, int]:
    """(rows [layers' x rows', d], layers', final'): few rows per layer would leave tiles nearly empty.

    Then all rows become one layer, beside a copy of their final rows. Every sum is the same, bit for bit.
    """
    if final is None:
        return h, 1, 0
    if ceil_div(rows, shape.rows) * layers <= 2 * ceil_div(rows * layers, shape.rows):
        return h, layers, final
    last = h.view(layers, rows, -1)[final]
    return torch.cat([last.repeat(layers, 1), h]), 2, 0


def _stats(
    h: Tensor, w: Tensor, layers: int, final: int, kl: bool, softcap: float, shape: LensShape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Max, sum, shifted sum and distance to the final logits of every (row, tile)."""
    total, depth, vocab = h.shape[0], h.shape[1], w.shape[1]
    rows, tiles = total // layers, ceil_div(vocab, shape.vocab_tile)
    row_tiles = ceil_div(rows, shape.rows)
    programs = min(num_multiprocessors(h.device), row_tiles * ceil_div(tiles, 2))
    make = lambda n: torch.empty(n, dtype=torch.float32, device=h.device)  # noqa: E731
    found = (make((total, tiles)), make((total, tiles)), make((total, tiles)), make((total, tiles) if kl else 1))
    scratch = make(programs * shape.rows * shape.columns if kl else 1)
    copy = shape.copy and copyable(h, w)
    _stats_kernel[(programs,)](
        *(tiles_of(h, w, shape) if copy else (h, w)), *found, scratch, rows, vocab, depth,
        h.stride(0), w.stride(0), w.stride(1), layers, final, softcap or 1.0, tiles, row_tiles,
        shape.rows, shape.columns, shape.depth, programs, copy, w.stride(0) == 1, softcap > 0, kl,
        num_warps=shape.warps, num_stages=shape.stages, **EXACT,
    )  # fmt: skip
    return found


def _merge(stats: tuple[Tensor, Tensor, Tensor, Tensor], k: int, kl: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_sum_exp, entropy, kl without the final layer's log_sum_exp, the k most promising tiles of every row."""
    total, tiles = stats[0].shape
    make = lambda: torch.empty(total, dtype=torch.float32, device=stats[0].device)  # noqa: E731
    log_sum_exp, entropy, divergence = make(), make(), make() if kl else stats[0][:, 0]
    top_tiles = torch.empty(total, k, dtype=torch.int32, device=stats[0].device)
    _merge_kernel[(total,)](
        *stats, log_sum_exp, entropy, divergence, top_tiles, tiles, k, next_power_of_2(tiles), kl, num_warps=4, **EXACT
    )
    return log_sum_exp, entropy, divergence, top_tiles


def _top(
    h: Tensor, w: Tensor, top_tiles: Tensor, log_sum_exp: Tensor, k: int, softcap: float, shape: LensShape
) -> tuple[Tensor, Tensor]:
    """Multiply the promising (row, tile) pairs again, grouped by tile, and choose. No host synchronisation."""
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


def _targets(h: Tensor, w: Tensor, targets: Tensor, log_sum_exp: Tensor, layers: int, softcap: float) -> Tensor:
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
