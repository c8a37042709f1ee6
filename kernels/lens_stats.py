"""The logit lens (Z), first part: statistics over the vocabulary. Formulas and order: `kernels/lens.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.launch import (
    EXACT,
    LensShape,
    ceil_div,
    next_power_of_2,
    num_multiprocessors,
    strip_width,
)
from replaylens.kernels.matmul import ROW_GROUP, copyable, dot_tile, matmul, tile_at, tiles_of


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
