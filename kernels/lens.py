"""The lens: what every layer's residual stream already predicts, without a [rows, vocab] tensor.

    z = unembed(norm(S))  (softcapped)      log_sum_exp, entropy, KL(p_final || p), top-k, log-probs of given tokens

**Vocabulary tiles.** A tile of z lives in registers only. Each (row, tile) leaves four float32 numbers behind:
m = max z, s = sum e^(z - m), t = sum e^(z - m) (z - m), u = sum e^(f - n) (f - z), where f is the final layer's logit and n
its maximum in the tile. Rows are then merged over tiles: with w_i = e^(m_i - M), S = sum w_i s_i, and v_i, V of the final
layer likewise,

    log_sum_exp = M + log S        entropy = log S - (sum w_i (t_i + (m_i - M) s_i)) / S
    kl = (sum v_i u_i) / V - log_sum_exp_final + log_sum_exp

Differences are taken before they are weighted, so nothing cancels when the layer agrees with the final one: there kl is 0.

**KL needs the final layer's logits beside each tile.** The vocabulary is taken in strips, and the final logits of one strip
at a time are written to a scratch small enough to stay in the second-level cache (`launch.strip_width`).

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
    strip_width,
)
from replaylens.kernels.matmul import ROW_GROUP, copyable, dot_tile, matmul, tile_at, tiles_of
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
    """[layers, rows] float32: KL(final || layer), what the final layer would lose by this layer's word"""
    top_ids: Tensor
    """[layers, rows, k] int64, largest first; ties: smallest id first"""
    top_log_probs: Tensor
    """[layers, rows, k] float32"""
    target_log_probs: Tensor | None
    """[layers, rows, targets] float32"""


@triton.jit
def _tile_stats(
    z, row, n0, N, MAX, SUM, SHIFTED, APART, at, live, FINAL, final_rows, final_stride, cap,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """The four numbers of every row of a vocabulary tile that starts at column n0 of the strip."""
    j = n0 + tl.arange(0, WIDTH)
    inside = j[None, :] < N
    if CAPPED:
        z = cap_tile(z, cap)
    m = tl.max(tl.where(inside, z, -1.0e30), 1)  # finite: a tile past the vocabulary must not make NaN
    e = tl.where(inside, tl.exp2((z - m[:, None]) * 1.4426950408889634), 0.0)
    tl.store(MAX + at, m, mask=live)
    tl.store(SUM + at, tl.sum(e, 1), mask=live)
    tl.store(SHIFTED + at, tl.sum(e * (z - m[:, None]), 1), mask=live)
    if KL:
        at_final = FINAL + (row % final_rows).to(tl.int64)[:, None] * final_stride + j[None, :]
        final = tl.load(at_final, mask=inside, other=0.0)
        if CAPPED:
            final = cap_tile(final, cap)
        n = tl.max(tl.where(inside, final, -1.0e30), 1)
        weight = tl.where(inside, tl.exp2((final - n[:, None]) * 1.4426950408889634), 0.0)
        tl.store(APART + at, tl.sum(weight * (final - z), 1), mask=live)


@triton.jit(do_not_specialize=["M", "tiles", "first_tile", "final_rows"])
def _stats_kernel(
    X, W, MAX, SUM, SHIFTED, APART, FINAL, M, N, K, stride_xm, stride_wk, stride_wn,
    tiles, first_tile, final_rows, final_stride, cap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
    COPY: tl.constexpr, W_TRANSPOSED: tl.constexpr, CAPPED: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """Two vocabulary tiles at a time, of a strip of the vocabulary, for all rows."""
    half: tl.constexpr = COLUMNS // 2
    for index in tl.range(tl.program_id(0), tl.cdiv(M, ROWS) * tl.cdiv(N, COLUMNS), PROGRAMS):
        m0, n0 = tile_at(index, M, N, ROWS, COLUMNS, GROUP)
        row = m0 + tl.arange(0, ROWS)
        if COPY:
            z = tl.zeros((ROWS, COLUMNS), tl.float32)
            for k in range(0, K, DEPTH):
                a = X.load([m0, k])
                b = W.load([n0, k]).T if W_TRANSPOSED else W.load([k, n0])
                z = tl.dot(a, b, z, input_precision="ieee")
        else:
            z = dot_tile(
                X, W, row, n0 + tl.arange(0, COLUMNS), M, N, K, stride_xm, stride_wk, stride_wn,
                ROWS, COLUMNS, DEPTH, False, False,
            )  # fmt: skip
        left, right = tl.split(tl.permute(tl.reshape(z, (ROWS, 2, half)), (0, 2, 1)))
        tile = first_tile + n0 // half
        at = row.to(tl.int64) * tiles + tile
        _tile_stats(
            left, row, n0, N, MAX, SUM, SHIFTED, APART, at, row < M, FINAL, final_rows, final_stride, cap,
            half, CAPPED, KL,
        )  # fmt: skip
        _tile_stats(
            right, row, n0 + half, N, MAX, SUM, SHIFTED, APART, at + 1, (row < M) & (tile + 1 < tiles),
            FINAL, final_rows, final_stride, cap, half, CAPPED, KL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["k", "final_rows", "first_final"])
def _merge_kernel(
    MAX, SUM, SHIFTED, APART, LSE, ENTROPY, KL_OUT, TOP_TILES, tiles, k, final_rows, first_final,
    BLOCK: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """One row: merge its tiles, and name the k tiles with the largest maxima, lowest first among equals."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at, live = row * tiles + i, i < tiles
    m = tl.load(MAX + at, mask=live, other=-1.0e30)
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
        at_final = (first_final + row % final_rows) * tiles + i  # the same position's row of the final layer
        n = tl.load(MAX + at_final, mask=live, other=-1.0e30)
        v = tl.where(live, tl.exp2((n - tl.max(n, 0)) * 1.4426950408889634), 0.0)
        mass = tl.sum(v * tl.load(SUM + at_final, mask=live, other=0.0), 0)
        tl.store(KL_OUT + row, tl.sum(v * u, 0) / mass - (tl.max(n, 0) + tl.log(mass)) + (top + log_total))
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
    last = None if final is None else h.view(layers, rows, -1)[final]
    log_sum_exp, entropy, kl, top_tiles = _merge(_stats(h, w, last, softcap, shape), k_tiles, rows, final)
    top_ids, top_log_probs = _top(h, w, top_tiles, log_sum_exp, k, softcap, shape)
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


def _stats(
    h: Tensor, w: Tensor, final: Tensor | None, softcap: float, shape: LensShape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Max, sum, shifted sum and distance to the final logits of every (row, vocabulary tile), strip by strip."""
    total, depth, vocab = h.shape[0], h.shape[1], w.shape[1]
    tiles = ceil_div(vocab, shape.vocab_tile)
    make = lambda *n: torch.empty(n, dtype=torch.float32, device=h.device)  # noqa: E731
    found = (make(total, tiles), make(total, tiles), make(total, tiles), make(total, tiles if final is not None else 1))
    copy = shape.copy and copyable(h, w)
    width = vocab if final is None else strip_width(len(final), vocab, shape.columns)
    z_final = make(1 if final is None else len(final), width)
    for start in range(0, vocab, width):
        strip = w[:, start : start + width]
        columns = strip.shape[1]
        if final is not None:
            matmul(final, strip, out_dtype=torch.float32, out=z_final[:, :columns])
        programs = min(num_multiprocessors(h.device), ceil_div(total, shape.rows) * ceil_div(columns, shape.columns))
        _stats_kernel[(programs,)](
            *(tiles_of(h, strip, shape) if copy else (h, strip)), *found, z_final, total, columns, depth,
            h.stride(0), w.stride(0), w.stride(1), tiles, start // shape.vocab_tile, len(z_final), width,
            softcap or 1.0, shape.rows, shape.columns, shape.depth, programs, ROW_GROUP, copy, w.stride(0) == 1,
            softcap > 0, final is not None, num_warps=shape.warps, num_stages=shape.stages, **EXACT,
        )  # fmt: skip
    return found


def _merge(
    stats: tuple[Tensor, Tensor, Tensor, Tensor], k: int, rows: int, final: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_sum_exp, entropy, kl (where there is a final layer), the k most promising tiles of every row."""
    total, tiles = stats[0].shape
    make = lambda: torch.empty(total, dtype=torch.float32, device=stats[0].device)  # noqa: E731
    log_sum_exp, entropy, divergence = make(), make(), make() if final is not None else stats[0][:, 0]
    top_tiles = torch.empty(total, k, dtype=torch.int32, device=stats[0].device)
    _merge_kernel[(total,)](
        *stats, log_sum_exp, entropy, divergence, top_tiles, tiles, k, rows, rows * (final or 0),
        next_power_of_2(tiles), final is not None, num_warps=4, **EXACT,
    )  # fmt: skip
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
