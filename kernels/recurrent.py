"""Short convolutions and recurrences in Triton, over pages: the bits of `kernels/cpu_recurrent.py`, whatever rows a pass has.

The arithmetic is portable float32 in every dtype: a model in bfloat16 rounds what goes in and what comes out. Per position an
entry, per page a state, as `kernels/cpu_recurrent.py` has them.

**One program walks over the rows of a sequence**, for one head and some columns of its values, whose sums do not mix. It takes
up to `_ROWS` rows of a chunk at a time. What they read from the state at the start of the chunk and from its earlier rows are
dots; among themselves, a row's update is followed by one multiply-add of every later row.

**Terms that take no part** are -1 times 0: adding -0 changes no number, where adding +0 would turn -0 into +0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.definition import CHUNK
from replaylens.kernels.exact import exp
from replaylens.kernels.launch import EXACT, ceil_div, next_power_of_2, require, require_rows, require_shape
from replaylens.kernels.shared import PagedRows

_ROWS = 16
"""rows of a tile. Moves no bit"""
_COLUMNS = 32
"""columns of values of a program. Moves no bit"""
_BLOCK = 256

# ---- entries ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stride_t", "at"])
def _put_kernel(
    X, ENTRIES, SEQUENCE, POSITION, TABLES, width, stride_x, entry, at, stride_t, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(POSITION + row)
    page = tl.load(TABLES + tl.load(SEQUENCE + row).to(tl.int64) * stride_t + position // PAGE).to(tl.int64)
    x = tl.load(X + row * stride_x + column, mask=column < width).to(tl.float32)
    tl.store(ENTRIES + (page * PAGE + position % PAGE) * entry + at + column, x, mask=column < width)


def put(x: Tensor, entries: Tensor, at: int, rows: PagedRows, page_size: int) -> None:
    """Mutates: x [rows, width] becomes the columns of the rows' entries from `at` on."""
    require_rows("x", x)
    _require_entries(entries)
    require_shape("rows.sequence", rows.sequence, (len(x),))
    require(at + x.shape[1] <= entries.shape[1], "{} columns from {} on do not fit into an entry.", x.shape[1], at)
    if len(x):
        _put_kernel[(len(x), ceil_div(x.shape[1], _BLOCK))](
            x, entries, rows.sequence, rows.position, rows.page_table, x.shape[1], x.stride(0), entries.stride(0), at,
            rows.page_table.stride(0), page_size, _BLOCK, num_warps=4, **EXACT,
        )  # fmt: skip


def _require_entries(entries: Tensor) -> None:
    fits = entries.dtype == torch.float32 and entries.dim() == 2 and entries.is_contiguous()
    require(fits, "entries are {} {}. Expected contiguous float32, [slots, columns].", entries.dtype, entries.shape)


# ---- short convolutions ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stride_t"])
def _short_conv_kernel(
    ENTRIES, WEIGHT, BIAS, OUT, SEQUENCE, POSITION, TABLES, channels, entry, stride_t,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    position = tl.load(POSITION + row)
    TABLE = TABLES + tl.load(SEQUENCE + row).to(tl.int64) * stride_t
    y = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        at = position - (TAPS - 1 - tap)
        seen = inside & (at >= 0)
        page = tl.load(TABLE + tl.maximum(at, 0) // PAGE).to(tl.int64)
        x = tl.load(ENTRIES + (page * PAGE + tl.maximum(at, 0) % PAGE) * entry + column, mask=seen, other=0.0)
        w = tl.load(WEIGHT + tap * channels + column, mask=inside, other=0.0).to(tl.float32)
        y = tl.where(seen, tl.fma(w, x, y), y)
    if HAS_BIAS:
        y += tl.load(BIAS + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * channels + column, y.to(OUT.dtype.element_ty), mask=inside)


def short_conv(entries: Tensor, weight: Tensor, bias: Tensor | None, rows: PagedRows, page_size: int) -> Tensor:
    """The convolution of each row's inputs with weight [taps, channels] over the positions up to its own: [rows, channels].

    entries  [slots, columns], of which the first `channels` are the inputs, those of the rows included
    """
    taps, channels = weight.shape
    _require_entries(entries)
    require(weight.is_contiguous(), "weight must be contiguous.")
    num_rows = len(rows.position)
    out = torch.empty(num_rows, channels, dtype=weight.dtype, device=weight.device)
    if num_rows:
        _short_conv_kernel[(num_rows, ceil_div(channels, _BLOCK))](
            entries, weight, weight if bias is None else bias, out, rows.sequence, rows.position, rows.page_table,
            channels, entries.stride(0), rows.page_table.stride(0), taps, bias is not None, page_size, _BLOCK,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return out


# ---- recurrences -----------------------------------------------------------------------------------------------------


@triton.jit
def _slots(TABLE, at, known, PAGE: tl.constexpr):
    """The slots of positions `at`; of those that are not known, in the null page."""
    page = tl.load(TABLE + at // PAGE, mask=known, other=0).to(tl.int64)
    return page * PAGE + at % PAGE


@triton.jit
def _picked(x, chosen, AXIS: tl.constexpr):
    """The only row or column of x that is chosen."""
    return tl.max(tl.where(chosen, x, float("-inf")), AXIS)


@triton.jit
def _decays(G, TABLE, base, t, end, entry, PAGE: tl.constexpr, CHUNK: tl.constexpr):
    """What is left at rows t [ROWS] of a chunk of each of its rows, [ROWS, CHUNK], and of the state before it, [ROWS].

    G  addresses of log decays, without their slots. They are added from a row's own back: dots over lanes from last to first
    """
    lane = CHUNK - 1 - tl.arange(0, CHUNK)
    j = tl.arange(0, CHUNK)
    g = tl.load(G + _slots(TABLE, base + lane, lane < end, PAGE) * entry, mask=lane < end, other=0.0)
    seen = tl.where(lane[None, :] <= t[:, None], g[None, :], 0.0)
    after = tl.dot(seen, (lane[:, None] > j[None, :]).to(tl.float32), input_precision="ieee")
    whole = tl.max(tl.dot(seen, tl.full((CHUNK, 16), 1.0, tl.float32), input_precision="ieee"), 1)  # sixteen equal columns
    return exp(after), exp(whole)


@triton.jit(do_not_specialize=["rows", "at_key", "at_update", "at_decay", "stride_t"])
def _recur_kernel(
    Q, V, BETA, ENTRIES, STATES, OUT, SEQUENCE, POSITION, TABLES, rows, entry, at_key, at_update, at_decay, stride_t,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    mine = tl.load(SEQUENCE + row)
    if (row > 0) & (tl.load(SEQUENCE + tl.maximum(row - 1, 0)) == mine):
        return  # the program of the sequence's first row takes all of them
    i, j, a = tl.arange(0, ROWS), tl.arange(0, CHUNK), tl.arange(0, D_BLOCK)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < WIDTH
    TABLE = TABLES + mine.to(tl.int64) * stride_t
    KEYS = ENTRIES + at_key + head // GROUP * D
    UPDATES = ENTRIES + at_update + head * WIDTH
    position = tl.load(POSITION + row)
    going = True
    while going:
        base = position // CHUNK * CHUNK
        t = position - base + i
        valid = (row + i < rows) & (t < CHUNK)
        valid = valid & (tl.load(SEQUENCE + row + i, mask=valid, other=-1) == mine)
        valid = valid & (tl.load(POSITION + row + i, mask=valid, other=-1) == position + i)  # not so of a graph's padding
        count = tl.sum(valid.to(tl.int32), 0)
        begun = position - base
        end = begun + count
        known = j < end
        slot = _slots(TABLE, base + j, known, PAGE) * entry
        k = tl.load(KEYS + slot[None, :] + a[:, None], mask=known[None, :] & (a[:, None] < D), other=0.0)  # [D, CHUNK]
        left, whole = _decays(ENTRIES + at_decay + head, TABLE, base, t, end, entry, PAGE, CHUNK)
        page = tl.load(TABLE + tl.maximum(base - 1, 0) // PAGE).to(tl.int64)
        START = STATES + (page * HEADS + head) * D * WIDTH + a[:, None] * WIDTH + c[None, :]
        state = tl.load(START, mask=(base > 0) & (a[:, None] < D) & inside[None, :], other=0.0)
        u = tl.load(UPDATES + slot[:, None] + c[None, :], mask=(j < begun)[:, None] & inside[None, :], other=0.0)

        own = (row + i).to(tl.int64)
        real = valid[:, None] & (a[None, :] < D)
        q = tl.load(Q + (own[:, None] * (HEADS // GROUP) + head // GROUP) * D + a[None, :], mask=real, other=0.0)
        q = tl.where(a[None, :] < D, q.to(tl.float32), -1.0)
        read = tl.dot(q, state, input_precision="ieee") * whole[:, None]
        weight = tl.dot(q, k, input_precision="ieee") * left  # [ROWS, CHUNK]
        read = tl.dot(tl.where((j < begun)[None, :], weight, -1.0), u, read, input_precision="ieee")
        if DELTA:
            x = tl.load(KEYS + _slots(TABLE, base + t, valid, PAGE)[:, None] * entry + a[None, :], mask=real, other=0.0)
            x = tl.where(a[None, :] < D, x, -1.0)
            told = tl.dot(x, state, input_precision="ieee") * whole[:, None]
            share = tl.dot(x, k, input_precision="ieee") * left
            told = tl.dot(tl.where((j < begun)[None, :], share, -1.0), u, told, input_precision="ieee")
        for n in tl.range(0, count):
            at = ((row + n).to(tl.int64) * HEADS + head) * WIDTH
            new = tl.load(V + at + c, mask=inside, other=0.0).to(tl.float32)
            if DELTA:
                strength = tl.load(BETA + (row + n).to(tl.int64) * HEADS + head).to(tl.float32)
                new = strength * (new - _picked(told, i[:, None] == n, 0))
                by = _picked(share, j[None, :] == begun + n, 1)
                more = tl.fma(tl.broadcast_to(by[:, None], told.shape), tl.broadcast_to(new[None, :], told.shape), told)
                told = tl.where(i[:, None] > n, more, told)
            by = _picked(weight, j[None, :] == begun + n, 1)
            more = tl.fma(tl.broadcast_to(by[:, None], read.shape), tl.broadcast_to(new[None, :], read.shape), read)
            read = tl.where(i[:, None] >= n, more, read)
            place = tl.load(TABLE + (position + n) // PAGE).to(tl.int64) * PAGE + (position + n) % PAGE
            tl.store(UPDATES + place * entry + c, new, mask=inside)
        OWN = OUT + (own[:, None] * HEADS + head) * WIDTH + c[None, :]
        tl.store(OWN, read.to(OUT.dtype.element_ty), mask=valid[:, None] & inside[None, :])
        tl.debug_barrier()  # every thread has stored its updates before others read them
        if end == CHUNK:
            last = (t == CHUNK - 1) & valid
            u = tl.load(UPDATES + slot[:, None] + c[None, :], mask=inside[None, :], other=0.0)
            state = state * tl.max(tl.where(last, whole, float("-inf")), 0)
            state = tl.dot(k * _picked(left, last[:, None], 0)[None, :], u, state, input_precision="ieee")
            page = tl.load(TABLE + (base + CHUNK - 1) // PAGE).to(tl.int64)
            AFTER = STATES + (page * HEADS + head) * D * WIDTH + a[:, None] * WIDTH + c[None, :]
            tl.store(AFTER, state, mask=(a[:, None] < D) & inside[None, :])
            tl.debug_barrier()
        row += count
        position = tl.load(POSITION + tl.minimum(row, rows - 1))
        going = (row < rows) & (tl.load(SEQUENCE + tl.minimum(row, rows - 1)) == mine)


def recur(
    q: Tensor,
    v: Tensor,
    beta: Tensor | None,
    entries: Tensor,
    states: Tensor,
    at: tuple[int, int, int],
    rows: PagedRows,
    page_size: int,
) -> Tensor:
    """Mutates entries and states: the updates of all rows, and the states of chunks that end with one of them.

    q        [rows, key heads, d]
    v        [rows, heads, width]
    beta     [rows, heads]; None: an update is v itself
    entries  [slots, columns], with the keys and log decays of the rows
    states   [pages, heads, d, width]
    at       columns of an entry at which keys, updates and log decays begin

    Returns what the rows read, in the dtype of q: [rows, heads, width]. A sequence's rows are neighbours, in order of position.
    """
    num_rows, key_heads = q.shape[:2]
    heads, d, width = states.shape[1:]
    _require_entries(entries)
    require(
        states.dtype == torch.float32 and states.is_contiguous(), "states are {}. Expected contiguous float32.", states.dtype
    )
    require_shape("q", q, (num_rows, None, d))
    require_shape("v", v, (num_rows, heads, width))
    if beta is not None:
        require_shape("beta", beta, (num_rows, heads))
    q, v, beta = q.contiguous(), v.contiguous(), None if beta is None else beta.contiguous()
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if num_rows:
        _recur_kernel[(num_rows, heads, ceil_div(width, _COLUMNS))](
            q, v, v if beta is None else beta, entries, states, out, rows.sequence, rows.position, rows.page_table,
            num_rows, entries.stride(0), *at, rows.page_table.stride(0), heads, heads // key_heads, d,
            next_power_of_2(max(d, 16)), width, _COLUMNS, _ROWS, page_size, CHUNK, beta is not None,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return out
