"""The logit lens (Z): the predictions of every layer's residual stream (S), without a [rows, vocab] tensor.

    z = unembed(norm(S))  (softcapped)      log_sum_exp, entropy, KL(p_final || p), top-k, log-probs of given tokens

**Vocabulary tiles.** A tile of z lives in registers only. Each (row, tile) is reduced to four float32 numbers:
m = max z, s = sum e^(z - m), t = sum e^(z - m) (z - m), c = sum q (z - m), where q = e^(f - n), f is the final layer's logit
and n its maximum in the tile. Rows are then merged over tiles. With w_i = e^(m_i - M), W = sum w_i s_i, and for the final
layer v_i = e^(n_i - N), V = sum v_i s'_i,

    log_sum_exp = M + log W        entropy = log W - (sum w_i (t_i + (m_i - M) s_i)) / W
    kl = log W - (sum v_i (c_i + (m_i - M) s'_i)) / V - entropy of the final layer

The sums of kl are float64: they nearly cancel if a layer agrees with the final one.

**KL needs the final layer beside each tile.** The vocabulary is processed in strips. q of one strip at a time is written to a
scratch tensor small enough for the second-level cache (`launch.strip_width`). The exponentials of the final layer are thus
computed once instead of once per layer, and its own numbers come from there, too.

**Top-k.** The k largest logits of a row lie in the k tiles with the largest maxima. Only those (row, tile) pairs are multiplied
again, grouped by tile. This is about k / tiles of the work, and the logits have the same bits because the product is canonical.

**Canonical.** The sums over a tile use `tl.sum`, so the launch shape is the same at any number of rows (`launch.lens_shape`),
and so is the shape of the merge. Logits are unrounded float32 accumulators, like those that tokens are sampled from.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.gpus import num_multiprocessors
from replaylens.kernels.launch import (
    EXACT,
    LensShape,
    ceil_div,
    lens_shape,
    next_power_of_2,
    require,
    require_float,
    require_rows,
    require_same,
    require_shape,
    strip_width,
)
from replaylens.kernels.matmul import ROW_GROUP, copyable, dot_tile, matmul, tile_at, tiles_of
from replaylens.kernels.norm import norm

# ---- lens stats ------------------------------------------------------------------------------------------------------
# The logit lens (Z), first part: statistics over the vocabulary. Formulas and order: `kernels/lens.py`.


@triton.jit
def capped(z, cap):
    """cap tanh(z / cap), with one exponential and one division."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(z * (2.8853900817779268 / cap)))


@triton.jit
def _softmax_parts(z, inside, EVEN: tl.constexpr):
    """m, (z - m) log2(e) and e^(z - m) of a tile of logits [rows, columns]. EVEN: all columns are inside the vocabulary."""
    m = tl.max(z if EVEN else tl.where(inside, z, -1.0e30), 1)  # finite: a tile past the vocabulary must not give NaN
    shift = tl.broadcast_to((m * -1.4426950408889634)[:, None], z.shape)
    y = tl.fma(z, tl.full(z.shape, 1.4426950408889634, tl.float32), shift)
    if EVEN:
        return m, y, tl.exp2(y)
    y = tl.where(inside, y, 0.0)
    return m, y, tl.where(inside, tl.exp2(y), 0.0)


@triton.jit
def _tile_stats(
    z, row, n0, N, MAX, SUM, SHIFTED, CROSS, at, live, Q, final_rows, stride_q, cap,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr, KL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The four numbers of every row of the vocabulary tile at column n0 of the strip."""
    j = n0 + tl.arange(0, WIDTH)
    inside = j[None, :] < N
    m, y, e = _softmax_parts(capped(z, cap) if CAPPED else z, inside, EVEN)
    tl.store(MAX + at, m, mask=live)
    tl.store(SUM + at, tl.sum(e, 1), mask=live)
    tl.store(SHIFTED + at, tl.sum(e * y, 1) * 0.6931471805599453, mask=live)
    if KL:
        at_q = Q + (row % final_rows).to(tl.int64)[:, None] * stride_q + j[None, :]
        q = tl.load(at_q) if EVEN else tl.load(at_q, mask=inside, other=0.0)
        tl.store(CROSS + at, tl.sum(q * y, 1) * 0.6931471805599453, mask=live)


@triton.jit(do_not_specialize=["M", "tiles", "first_tile", "final_rows"])
def _stats_kernel(
    X, W, MAX, SUM, SHIFTED, CROSS, Q, M, N, K, stride_xm, stride_wk, stride_wn,
    tiles, first_tile, final_rows, stride_q, cap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
    COPY: tl.constexpr, W_TRANSPOSED: tl.constexpr, CAPPED: tl.constexpr, KL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The statistics of all rows on a strip of the vocabulary, two vocabulary tiles at a time."""
    half: tl.constexpr = COLUMNS // 2
    # flattened: the next tile is loaded while the statistics of this one are computed
    for index in tl.range(tl.program_id(0), tl.cdiv(M, ROWS) * tl.cdiv(N, COLUMNS), PROGRAMS, flatten=COPY):
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
            left, row, n0, N, MAX, SUM, SHIFTED, CROSS, at, row < M, Q, final_rows, stride_q, cap, half, CAPPED, KL, EVEN
        )
        _tile_stats(
            right, row, n0 + half, N, MAX, SUM, SHIFTED, CROSS, at + 1, (row < M) & (tile + 1 < tiles),
            Q, final_rows, stride_q, cap, half, CAPPED, KL, EVEN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "first_tile"])
def _final_kernel(Z, MAX, SUM, SHIFTED, N, tiles, first_tile, stride_z, cap, WIDTH: tl.constexpr, CAPPED: tl.constexpr):
    """One (row, tile) of the final layer: store its numbers, and replace its logits in the scratch tensor by e^(f - n)."""
    row, tile = tl.program_id(0), tl.program_id(1)
    j = tile * WIDTH + tl.arange(0, WIDTH)
    at_z = Z + row.to(tl.int64) * stride_z + j
    z = tl.load(at_z, mask=j < N, other=0.0)[None, :]
    n, y, q = _softmax_parts(capped(z, cap) if CAPPED else z, (j < N)[None, :], False)
    tl.store(at_z[None, :], q, mask=(j < N)[None, :])
    at = row.to(tl.int64) * tiles + first_tile + tile + tl.arange(0, 1)
    tl.store(MAX + at, n)
    tl.store(SUM + at, tl.sum(q, 1))
    tl.store(SHIFTED + at, tl.sum(q * y, 1) * 0.6931471805599453)


@triton.jit
def _merged(MAX, SUM, SHIFTED, row, i, tiles):
    """For one row: the maxima of its tiles, the largest of them, the tiles' weights and sums, log W, and the entropy."""
    at, live = row * tiles + i, i < tiles
    m = tl.load(MAX + at, mask=live, other=-1.0e30)
    s = tl.load(SUM + at, mask=live, other=0.0)
    t = tl.load(SHIFTED + at, mask=live, other=0.0)
    top = tl.max(m, 0)
    w = tl.where(live, tl.exp2((m - top) * 1.4426950408889634), 0.0)
    total = tl.sum(w * s, 0)
    log_total = tl.log(total)
    return m, top, w, s, log_total, log_total - tl.sum(w * tl.where(live, t + (m - top) * s, 0.0), 0) / total


@triton.jit(do_not_specialize=["k", "final_rows", "first_final"])
def _merge_kernel(
    MAX, SUM, SHIFTED, CROSS, LSE, ENTROPY, KL_OUT, TOP_TILES, tiles, k, final_rows, first_final,
    BLOCK: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """One row: merge its tiles and list the k tiles with the largest maxima. Ties: lowest tile first."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    m, top, _, _, log_total, entropy = _merged(MAX, SUM, SHIFTED, row, i, tiles)
    tl.store(LSE + row, top + log_total)
    tl.store(ENTROPY + row, entropy)
    if KL:
        at_final = first_final + row % final_rows  # the same position's row of the final layer
        _, _, v, s, _, final_entropy = _merged(MAX, SUM, SHIFTED, at_final, i, tiles)
        c = tl.load(CROSS + row * tiles + i, mask=(i < tiles) & (row != at_final), other=0.0)
        mass, below = v.to(tl.float64) * s, (m - top).to(tl.float64)
        expected = tl.sum(v * c.to(tl.float64) + tl.where(i < tiles, mass * below, 0.0), 0) / tl.sum(mass, 0)
        apart = (log_total.to(tl.float64) - expected - final_entropy).to(tl.float32)
        tl.store(KL_OUT + row, tl.where((row == at_final) | (apart < 0), 0.0, apart))
    for n in range(k):
        best = tl.max(m, 0)
        where = tl.min(tl.where(m == best, i, BLOCK), 0)
        tl.store(TOP_TILES + row * k + n, where)
        m = tl.where(i == where, float("-inf"), m)


def stats(
    h: Tensor, w: Tensor, rows: int, final: int | None, softcap: float, known: Tensor | None, shape: LensShape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four numbers of every (row, vocabulary tile), strip by strip. The final layer itself has no fourth."""
    total, vocab = h.shape[0], w.shape[1]
    tiles = ceil_div(vocab, shape.vocab_tile)
    make = lambda *n: torch.empty(n, dtype=torch.float32, device=h.device)  # noqa: E731
    found = (make(total, tiles), make(total, tiles), make(total, tiles), make(total, tiles if final is not None else 1))
    width = vocab if final is None else strip_width(rows, vocab, shape.columns)
    scratch = make(1 if final is None else rows, width)
    last = slice(total, total) if final is None else slice(final * rows, (final + 1) * rows)
    others = [piece for piece in (slice(0, last.start), slice(last.stop, total)) if piece.stop > piece.start]
    for start in range(0, vocab, width):
        strip, first_tile = w[:, start : start + width], start // shape.vocab_tile
        if final is not None:
            logits = scratch[:, : strip.shape[1]]
            if known is None:
                matmul(h[last], strip, out_dtype=torch.float32, out=logits)
            else:
                logits.copy_(known[:, start : start + width])
            _final_kernel[(rows, ceil_div(strip.shape[1], shape.vocab_tile))](
                logits, *(x[last] for x in found[:3]), strip.shape[1], tiles, first_tile, width, softcap or 1.0,
                shape.vocab_tile, softcap > 0, num_warps=1, **EXACT,
            )  # fmt: skip
        for piece in others:
            _strip_stats(h[piece], strip, [x[piece] for x in found], scratch, first_tile, softcap, final is not None, shape)
    return found


def _strip_stats(
    h: Tensor, strip: Tensor, found: list[Tensor], scratch: Tensor, first_tile: int, softcap: float, kl: bool, shape: LensShape
) -> None:
    """The numbers of the rows h on one strip of the vocabulary. Writes to `found`."""
    (total, depth), columns = h.shape, strip.shape[1]
    copy = shape.copy and copyable(h, strip)
    programs = min(num_multiprocessors(h.device), ceil_div(total, shape.rows) * ceil_div(columns, shape.columns))
    _stats_kernel[(programs,)](
        *(tiles_of(h, strip, shape) if copy else (h, strip)), *found, scratch, total, columns, depth,
        h.stride(0), strip.stride(0), strip.stride(1), found[0].shape[1], first_tile, len(scratch), scratch.shape[1],
        softcap or 1.0, shape.rows, shape.columns, shape.depth, programs, ROW_GROUP, copy, strip.stride(0) == 1,
        softcap > 0, kl, columns % shape.columns == 0, num_warps=shape.warps, num_stages=shape.stages, **EXACT,
    )  # fmt: skip


def merge(
    stats: tuple[Tensor, Tensor, Tensor, Tensor], k: int, rows: int, final: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_sum_exp, entropy, kl (if there is a final layer), and the k tiles with the largest maxima of every row."""
    total, tiles = stats[0].shape
    make = lambda: torch.empty(total, dtype=torch.float32, device=stats[0].device)  # noqa: E731
    log_sum_exp, entropy, divergence = make(), make(), make() if final is not None else stats[0][:, 0]
    top_tiles = torch.empty(total, k, dtype=torch.int32, device=stats[0].device)
    _merge_kernel[(total,)](
        *stats, log_sum_exp, entropy, divergence, top_tiles, tiles, k, rows, rows * (final or 0),
        next_power_of_2(tiles), final is not None, num_warps=4, **EXACT,
    )  # fmt: skip
    return log_sum_exp, entropy, divergence, top_tiles


# ---- lens top --------------------------------------------------------------------------------------------------------
# The logit lens (Z), second part: the likeliest tokens and given ones, from the same logits multiplied again.


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


# ---- lens ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LensStats:
    """Statistics of the lens distributions. The leading dimensions are [layers, rows]."""

    log_sum_exp: Tensor
    """[layers, rows] float32"""
    entropy: Tensor
    """[layers, rows] float32, in nats"""
    kl: Tensor | None
    """[layers, rows] float32, in nats: KL(final || layer)"""
    top_ids: Tensor
    """[layers, rows, k] int64, largest first; ties: smallest id first"""
    top_log_probs: Tensor
    """[layers, rows, k] float32"""
    target_log_probs: Tensor | None
    """[layers, rows, targets] float32"""


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
    logits: Tensor | None = None,
    shape: LensShape | None = None,
) -> LensStats:
    """Lens statistics of residual streams x [layers, rows, d] through the final norm and w [d, vocab].

    final    index of the layer with the final distribution, usually the last; None: no KL
    targets  [rows, n] int32 or int64, tokens whose log-probs are computed at every layer of a row
    logits   [rows, vocab] float32: those of the final layer before softcap, if they are known already
    shape    canonical; only tests pass other values
    """
    layers, rows = _check_lens(x, w, final, targets, k)
    if logits is not None:
        require(final is not None, "logits are those of the final layer, but final is {}.", final)
        require_shape("logits", logits, (rows, w.shape[1]))
    vocab = w.shape[1]
    h = norm(x.reshape(layers * rows, -1), norm_weight, norm_bias, eps, kind)
    shape = shape or lens_shape(x.dtype)
    tiles = ceil_div(vocab, shape.vocab_tile)
    k_tiles = min(k, tiles)
    log_sum_exp, entropy, kl, top_tiles = merge(stats(h, w, rows, final, softcap, logits, shape), k_tiles, rows, final)
    top_ids, top_log_probs = top(h, w, top_tiles, log_sum_exp, k, softcap, shape)
    picked = None if targets is None else target_log_probs(h, w, targets, log_sum_exp, layers, softcap)
    return LensStats(
        log_sum_exp.view(layers, rows),
        entropy.view(layers, rows),
        kl.view(layers, rows) if final is not None else None,
        top_ids.view(layers, rows, k),
        top_log_probs.view(layers, rows, k),
        picked.view(layers, rows, -1) if picked is not None else None,
    )


def _check_lens(x: Tensor, w: Tensor, final: int | None, targets: Tensor | None, k: int) -> tuple[int, int]:
    """(layers, rows). Raises ValueError if the arguments do not fit together."""
    require(x.dim() == 3, "x has shape {}. Expected [layers, rows, d].", x.shape)
    require_float("x", x)
    require_rows("x", x)
    require_shape("w", w, (x.shape[2], None))
    require_same("w", w, x)
    layers, rows = x.shape[:2]
    require(layers * rows > 0, "x has shape {}. It must not be empty.", x.shape)
    require(final is None or 0 <= final < layers, "The final layer {} is not one of the {} layers of x.", final, layers)
    require(0 < k <= min(32, w.shape[1]), "k is {}. Use 1 to {}.", k, min(32, w.shape[1]))
    if targets is not None:
        require_shape("targets", targets, (rows, None))
        require(targets.dtype in (torch.int32, torch.int64), "targets are {}. Expected int32 or int64.", targets.dtype)
        require(0 < targets.shape[1] <= 64, "There are {} targets per row. Give 1 to 64.", targets.shape[1])
    return layers, rows
