"""Short convolutions and recurrences in Triton, over pages: the bits of `kernels/cpu_recurrent.py`, whatever rows a pass has.

The arithmetic is portable float32 in every dtype: a model in bfloat16 rounds what goes in and what comes out. Per position an
entry, per page a state, as `kernels/cpu_recurrent.py` has them.

**One program walks over the rows of a sequence**, for one head and some columns of its values, whose sums do not mix, 16 rows
of a chunk at a time. It computes only what has an order: a delta net's updates, and the states at the ends of chunks. How much
a row takes of each update (`_weigh_kernel`) is computed before, and what rows read (`_read_kernel`) after it, side by side.
Where every sequence has one row, as in decoding, `kernels/recurrent_rows.py` takes it.

**Terms that take no part** are -1 times 0: adding -0 changes no number, where adding +0 would turn -0 into +0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.definition import CHUNK
from replaylens.kernels.exact import activate as portable_activation
from replaylens.kernels.exact import exp
from replaylens.kernels.launch import EXACT, GemmTile, ceil_div, next_power_of_2, require, require_rows, require_shape
from replaylens.kernels.norm import activate
from replaylens.kernels.recurrent_rows import RecurrentMemory, close, recur_single, slot_of, slots, state_of
from replaylens.kernels.shared import PagedRows

WALK = GemmTile(16, 32, 32, 4, 1)
"""of the rows of a sequence: rows, columns of values, depth of a step along keys. It moves no bit"""
_BLOCK = 256

# ---- entries ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stride_t", "at"])
def _put_kernel(
    X, ENTRIES, ENTRY_OF, SEQUENCE, POSITION, TABLES, width, stride_x, entry, at, stride_t,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(POSITION + row)
    TABLE = TABLES + tl.load(SEQUENCE + row).to(tl.int64) * stride_t
    slot = slot_of(TABLE, ENTRY_OF, position, PAGE)
    x = tl.load(X + row * stride_x + column, mask=column < width).to(tl.float32)
    tl.store(ENTRIES + slot * entry + at + column, x, mask=column < width)


def _put(x: Tensor, memory: RecurrentMemory, at: int, rows: PagedRows) -> None:
    """Mutates: x [rows, width] becomes the columns of the rows' entries from `at` on."""
    require_rows("x", x)
    require_shape("rows.sequence", rows.sequence, (len(x),))
    entries, table = memory.entries, rows.page_table
    _put_kernel[(len(x), ceil_div(x.shape[1], _BLOCK))](
        x, entries, memory.entry_of, rows.sequence, rows.position, table, x.shape[1], x.stride(0), entries.stride(0), at,
        table.stride(0), memory.page_size, _BLOCK, num_warps=4, **EXACT,
    )  # fmt: skip


# ---- short convolutions ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stride_x", "stride_t"])
def _short_conv_kernel(
    X, ENTRIES, ENTRY_OF, WEIGHT, BIAS, OUT, SEQUENCE, POSITION, TABLES, channels, stride_x, entry, stride_t,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    position, mine = tl.load(POSITION + row), tl.load(SEQUENCE + row)
    TABLE = TABLES + mine.to(tl.int64) * stride_t
    y = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        at, other = position - (TAPS - 1 - tap), row - (TAPS - 1 - tap)
        # the rows of this pass are read from X: their entries are being written
        here = (other >= 0) & (tl.load(SEQUENCE + tl.maximum(other, 0)) == mine)
        here = here & (tl.load(POSITION + tl.maximum(other, 0)) == at)
        KEPT = ENTRIES + slot_of(TABLE, ENTRY_OF, tl.maximum(at, 0), PAGE) * entry
        before = tl.load(KEPT + column, mask=inside & (at >= 0) & (here == 0), other=0.0)
        now = tl.load(X + other * stride_x + column, mask=inside & here, other=0.0).to(tl.float32)
        x = tl.where(here, now, before)
        w = tl.load(WEIGHT + tap * channels + column, mask=inside, other=0.0).to(tl.float32)
        y = tl.where(inside & (at >= 0), tl.fma(w, x, y), y)
        if tap == TAPS - 1:
            tl.store(KEPT + column, x, mask=inside)
    if HAS_BIAS:
        y += tl.load(BIAS + column, mask=inside, other=0.0).to(tl.float32)
    y = y.to(OUT.dtype.element_ty)
    if SILU:  # of the rounded number, as if it had been stored
        y = activate(y.to(tl.float32), "silu", OUT.dtype.element_ty == tl.float32).to(OUT.dtype.element_ty)
    tl.store(OUT + row * channels + column, y, mask=inside)


def short_conv(
    x: Tensor, memory: RecurrentMemory, weight: Tensor, bias: Tensor | None, rows: PagedRows, silu: bool = False
) -> Tensor:
    """The convolution of x [rows, channels] with weight [taps, channels] over the positions up to each row's own, activated if
    asked to: [rows, channels]. Mutates: x becomes the first columns of the rows' entries, which have the inputs of earlier
    passes. A sequence's rows are neighbours, in order of position.
    """
    (taps, channels), entries = weight.shape, memory.entries
    require_rows("x", x)
    require(weight.is_contiguous(), "weight must be contiguous.")
    num_rows = len(rows.position)
    require_shape("x", x, (num_rows, channels))
    out = torch.empty(num_rows, channels, dtype=weight.dtype, device=weight.device)
    if num_rows:
        _short_conv_kernel[(num_rows, ceil_div(channels, _BLOCK))](
            x, entries, memory.entry_of, weight, weight if bias is None else bias, out, rows.sequence, rows.position,
            rows.page_table, channels, x.stride(0), entries.stride(0), rows.page_table.stride(0), taps, bias is not None,
            silu, memory.page_size, _BLOCK, num_warps=4, **EXACT,
        )  # fmt: skip
    return out


# ---- rates -----------------------------------------------------------------------------------------------------------


@triton.jit
def _rates_kernel(
    X, A_LOG, STEP_BIAS, DECAY, STRENGTH, heads, stride_x, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    inside = head < heads
    x = tl.load(X + row * stride_x + head, mask=inside, other=0.0).to(tl.float32)
    strength = portable_activation(x, "sigmoid").to(STRENGTH.dtype.element_ty)
    if SCALED:
        strength = (strength.to(tl.float32) * scale).to(STRENGTH.dtype.element_ty)
    tl.store(STRENGTH + row * heads + head, strength, mask=inside)
    step = tl.load(X + row * stride_x + heads + head, mask=inside, other=0.0).to(tl.float32)
    step += tl.load(STEP_BIAS + head, mask=inside, other=0.0).to(tl.float32)
    if STEP_BIAS.dtype.element_ty == X.dtype.element_ty:  # a sum of two such numbers is one
        step = step.to(X.dtype.element_ty).to(tl.float32)
    decay = -exp(tl.load(A_LOG + head, mask=inside, other=0.0).to(tl.float32)) * portable_activation(step, "softplus")
    tl.store(DECAY + row * heads + head, decay, mask=inside)


def rates(x: Tensor, a_log: Tensor, step_bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of x [rows, strengths | steps]: scale sigmoid(strength), in its dtype, and -exp(a_log) softplus(step + step_bias), in
    float32: [rows, heads] each."""
    require_rows("x", x)
    heads = x.shape[1] // 2
    for name, w in (("a_log", a_log), ("step_bias", step_bias)):
        require_shape(name, w, (heads,))
    strength = torch.empty(len(x), heads, dtype=x.dtype, device=x.device)
    decay = torch.empty(len(x), heads, dtype=torch.float32, device=x.device)
    if len(x):
        _rates_kernel[(len(x),)](
            x, a_log, step_bias, decay, strength, heads, x.stride(0), scale, scale != 1.0, next_power_of_2(heads),
            num_warps=1, **EXACT,
        )  # fmt: skip
    return strength, decay


# ---- recurrences -----------------------------------------------------------------------------------------------------


@triton.jit
def _decays(G, TABLE, ENTRY_OF, base, t, end, entry, PAGE: tl.constexpr, CHUNK: tl.constexpr):
    """What is left at rows t [ROWS] of a chunk of each of its rows, [ROWS, CHUNK], and of the state before it, [ROWS].

    G  addresses of log decays, without their slots. They are added from a row's own back: dots over lanes from last to first
    """
    lane = CHUNK - 1 - tl.arange(0, CHUNK)
    j = tl.arange(0, CHUNK)
    g = tl.load(G + slots(TABLE, ENTRY_OF, base + lane, lane < end, PAGE) * entry, mask=lane < end, other=0.0)
    seen = tl.where(lane[None, :] <= t[:, None], g[None, :], 0.0)
    after = tl.dot(seen, (lane[:, None] > j[None, :]).to(tl.float32), input_precision="ieee")
    whole = tl.max(tl.dot(seen, tl.full((CHUNK, 16), 1.0, tl.float32), input_precision="ieee"), 1)  # sixteen equal columns
    return exp(after), exp(whole)


@triton.jit
def _follows(SEQUENCE, POSITION, row):
    """Whether a row goes on with the sequence of the row before it; padding of a graph does not."""
    one, other = tl.maximum(row - 1, 0), tl.maximum(row, 0)
    same = tl.load(SEQUENCE + one) == tl.load(SEQUENCE + other)
    return (row > 0) & same & (tl.load(POSITION + one) + 1 == tl.load(POSITION + other))


@triton.jit
def _tile(SEQUENCE, POSITION, row, rows, ROWS: tl.constexpr):
    """The rows of a sequence from `row` on that lie in the same tile of positions: (position, valid [ROWS], their number).

    Tiles of ROWS positions are counted from 0, so that none crosses the end of a chunk."""
    i = tl.arange(0, ROWS)
    position = tl.load(POSITION + row)
    valid = (row + i < rows) & (position % ROWS + i < ROWS)
    valid = valid & (tl.load(SEQUENCE + row + i, mask=valid, other=-1) == tl.load(SEQUENCE + row))
    valid = valid & (tl.load(POSITION + row + i, mask=valid, other=-1) == position + i)  # not so of a graph's padding
    return position, valid, tl.sum(valid.to(tl.int32), 0)


@triton.jit(do_not_specialize=["rows", "stride_t"])
def _weigh_kernel(
    Q, ENTRIES, ENTRY_OF, SEQUENCE, POSITION, TABLES, WEIGHTS, SHARES, WHOLE, entry, at_key, at_update, at_decay, stride_t,
    rows, stride_q, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """What rows take of the updates of their chunk: by their queries and, of a delta net, by their keys, each [rows, heads,
    CHUNK]; and what is left of the state before it, [rows, heads]. No row waits for another."""
    row, head = tl.program_id(0), tl.program_id(1)
    if _follows(SEQUENCE, POSITION, row) & (tl.load(POSITION + row) % ROWS != 0):
        return  # the program of the tile's first row takes all of them
    i, j, depth = tl.arange(0, ROWS), tl.arange(0, CHUNK), tl.arange(0, DEPTH)
    position, valid, count = _tile(SEQUENCE, POSITION, row, rows, ROWS)
    base = position // CHUNK * CHUNK
    t = position - base + i
    end = position - base + count
    TABLE = TABLES + tl.load(SEQUENCE + row).to(tl.int64) * stride_t
    KEYS = ENTRIES + at_key + head // GROUP * D
    slot = slots(TABLE, ENTRY_OF, base + j, j < end, PAGE) * entry
    own = (row + i).to(tl.int64)
    QUERY = Q + own * stride_q + head // GROUP * D
    KEY = KEYS + slots(TABLE, ENTRY_OF, base + t, valid, PAGE) * entry
    weight = tl.zeros((ROWS, CHUNK), tl.float32)
    share = weight
    for first in tl.range(0, D, DEPTH):
        a = first + depth
        real = a < D
        k = tl.load(KEYS + slot[None, :] + a[:, None], mask=(j < end)[None, :] & real[:, None], other=0.0)  # [DEPTH, CHUNK]
        q = tl.load(QUERY[:, None] + a[None, :], mask=valid[:, None] & real[None, :], other=0.0).to(tl.float32)
        weight = tl.dot(tl.where(real[None, :], q, -1.0), k, weight, input_precision="ieee")
        if DELTA:
            x = tl.load(KEY[:, None] + a[None, :], mask=valid[:, None] & real[None, :], other=0.0)
            share = tl.dot(tl.where(real[None, :], x, -1.0), k, share, input_precision="ieee")
    left, whole = _decays(ENTRIES + at_decay + head, TABLE, ENTRY_OF, base, t, end, entry, PAGE, CHUNK)
    place = (own * HEADS + head)[:, None] * CHUNK + j[None, :]
    tl.store(WEIGHTS + place, weight * left, mask=valid[:, None])
    if DELTA:
        tl.store(SHARES + place, share * left, mask=valid[:, None])
    tl.store(WHOLE + own * HEADS + head, whole, mask=valid)


@triton.jit(do_not_specialize=["rows", "stride_t"])
def _walk_kernel(
    V, BETA, ENTRIES, STATES, ENTRY_OF, STATE_OF, SEQUENCE, POSITION, TABLES, SHARES, WHOLE, TOLD,
    entry, at_key, at_update, at_decay, stride_t, rows, stride_v,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """The updates of all rows of a sequence, tile by tile, and the states at the ends of chunks. TOLD [rows, heads, WIDTH] is
    room for what rows are told of earlier ones."""
    row, head = tl.program_id(0), tl.program_id(1)
    if _follows(SEQUENCE, POSITION, row):
        return  # the program of the sequence's first row takes all of them
    i, j = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < WIDTH
    TABLE = TABLES + tl.load(SEQUENCE + row).to(tl.int64) * stride_t
    KEYS = ENTRIES + at_key + head // GROUP * D
    UPDATES = ENTRIES + at_update + head * WIDTH
    going = True
    while going:
        position, valid, count = _tile(SEQUENCE, POSITION, row, rows, ROWS)
        begun = position % CHUNK
        base = position - begun
        slot = slots(TABLE, ENTRY_OF, base + j, j < begun + count, PAGE) * entry
        START = STATES + (state_of(TABLE, STATE_OF, tl.maximum(base - 1, 0), PAGE) * HEADS + head) * D * WIDTH
        own = ((row + i).to(tl.int64) * HEADS + head)[:, None]
        first = row.to(tl.int64) * HEADS + head
        VALUES = V + row.to(tl.int64) * stride_v + head * WIDTH + c
        mine = slots(TABLE, ENTRY_OF, position + i, valid, PAGE)[:, None] * entry
        real = valid[:, None] & inside[None, :]
        if DELTA:
            told = _from_state(KEYS + mine, START, valid, base, c, inside, D, DEPTH, WIDTH)
            told = told * tl.load(WHOLE + own, mask=valid[:, None], other=0.0)
            u = tl.load(UPDATES + slot[:, None] + c[None, :], mask=(j < begun)[:, None] & inside[None, :], other=0.0)
            share = tl.load(SHARES + own * CHUNK + j[None, :], mask=valid[:, None] & (j < begun)[None, :], other=-1.0)
            tl.store(TOLD + own * WIDTH + c[None, :], tl.dot(share, u, told, input_precision="ieee"), mask=real)
            tl.debug_barrier()  # every thread has stored its part before others read it
            lines, values, places, made = (), (), (), ()
            for n in tl.static_range(ROWS):  # all loads before the first store, of which they might read
                there = inside & (n < count)
                lines = lines + (tl.load(TOLD + (first + n * HEADS) * WIDTH + c, mask=there, other=0.0),)  # type: ignore[assignment]
                values = values + (tl.load(VALUES + n * stride_v, mask=there, other=0.0).to(tl.float32),)  # type: ignore[assignment]
                place = slot_of(TABLE, ENTRY_OF, tl.minimum(position + n, position + count - 1), PAGE)
                places = places + (place * entry,)  # type: ignore[assignment]
            for n in tl.static_range(ROWS):
                told = lines[n]
                for m in tl.static_range(n):
                    by = tl.load(SHARES + (first + n * HEADS) * CHUNK + begun + m, mask=n < count, other=0.0)
                    told = tl.fma(tl.zeros_like(told) + by, made[m], told)
                strength = tl.load(BETA + first + n * HEADS, mask=n < count, other=0.0).to(tl.float32)
                made = made + (strength * (values[n] - told),)  # type: ignore[assignment]
            for n in tl.static_range(ROWS):
                tl.store(UPDATES + places[n] + c, made[n], mask=inside & (n < count))
        else:
            new = tl.load(VALUES[None, :] + i[:, None] * stride_v, mask=real, other=0.0).to(tl.float32)
            tl.store(UPDATES + mine + c[None, :], new, mask=real)
        tl.debug_barrier()
        if begun + count == CHUNK:
            whole = tl.load(WHOLE + first + (count - 1) * HEADS)
            close(
                TABLE, ENTRIES, STATES, ENTRY_OF, STATE_OF, base, head, entry, at_key, at_update, at_decay, whole, c,
                HEADS, GROUP, D, WIDTH, PAGE, CHUNK,
            )  # fmt: skip
            tl.debug_barrier()
        row += count
        going = (row < rows) & _follows(SEQUENCE, POSITION, tl.minimum(row, rows - 1))


@triton.jit
def _from_state(X, START, valid, base, c, inside, D: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """Rows at the addresses X [ROWS, 1] times the state before a chunk: [ROWS, columns]"""
    total = tl.zeros((valid.shape[0], c.shape[0]), tl.float32)
    for first in tl.range(0, D, DEPTH):
        a = first + tl.arange(0, DEPTH)
        real = a < D
        state = tl.load(START + a[:, None] * WIDTH + c[None, :], mask=(base > 0) & real[:, None] & inside[None, :], other=0.0)
        x = tl.load(X + a[None, :], mask=valid[:, None] & real[None, :], other=0.0).to(tl.float32)
        total = tl.dot(tl.where(real[None, :], x, -1.0), state, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows", "stride_t"])
def _read_kernel(
    Q, ENTRIES, STATES, OUT, ENTRY_OF, STATE_OF, SEQUENCE, POSITION, TABLES, WEIGHTS, WHOLE, entry, at_update, stride_t, rows,
    stride_q,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What the rows of a tile read. All updates and states are known, and no row waits for another."""
    row, head = tl.program_id(0), tl.program_id(1)
    if _follows(SEQUENCE, POSITION, row) & (tl.load(POSITION + row) % ROWS != 0):
        return
    i, j = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < WIDTH
    position, valid, count = _tile(SEQUENCE, POSITION, row, rows, ROWS)
    begun = position % CHUNK
    base = position - begun
    TABLE = TABLES + tl.load(SEQUENCE + row).to(tl.int64) * stride_t
    UPDATES = ENTRIES + at_update + head * WIDTH
    START = STATES + (state_of(TABLE, STATE_OF, tl.maximum(base - 1, 0), PAGE) * HEADS + head) * D * WIDTH
    own = ((row + i).to(tl.int64) * HEADS + head)[:, None]
    QUERY = Q + (row + i).to(tl.int64)[:, None] * stride_q + head // GROUP * D
    read = _from_state(QUERY, START, valid, base, c, inside, D, DEPTH, WIDTH)
    read = read * tl.load(WHOLE + own, mask=valid[:, None], other=0.0)
    slot = slots(TABLE, ENTRY_OF, base + j, j < begun, PAGE) * entry
    u = tl.load(UPDATES + slot[:, None] + c[None, :], mask=(j < begun)[:, None] & inside[None, :], other=0.0)
    weight = tl.load(WEIGHTS + own * CHUNK + j[None, :], mask=valid[:, None] & (j < begun)[None, :], other=-1.0)
    read = tl.dot(weight, u, read, input_precision="ieee")
    for m in tl.static_range(ROWS):
        place = slot_of(TABLE, ENTRY_OF, tl.minimum(position + m, position + count - 1), PAGE)
        new = tl.load(UPDATES + place * entry + c, mask=inside, other=0.0)[None, :]
        by = tl.load(WEIGHTS + own * CHUNK + begun + m, mask=valid[:, None] & (i >= m)[:, None], other=0.0)
        more = tl.fma(tl.broadcast_to(by, read.shape), tl.broadcast_to(new, read.shape), read)
        read = tl.where(i[:, None] >= m, more, read)
    real = valid[:, None] & inside[None, :]
    tl.store(OUT + own * WIDTH + c[None, :], read.to(OUT.dtype.element_ty), mask=real)


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    memory: RecurrentMemory,
    rows: PagedRows,
) -> Tensor:
    """Mutates the memory: keys, updates and log decays of all rows, and the states of chunks that end with one of them.

    q, k   [rows, key heads, d]
    v      [rows, heads, width]
    decay  [rows, heads]: logarithms, float32
    beta   [rows, heads]; None: an update is v itself

    Returns what the rows read, in the dtype of q: [rows, heads, width]. A sequence's rows are neighbours, in order of position.
    """
    num_rows, key_heads = q.shape[:2]
    heads, d, width = memory.states.shape[1:]
    for name, x in (("q", q), ("k", k)):
        require_shape(name, x, (num_rows, key_heads, d))
    require_shape("v", v, (num_rows, heads, width))
    for name, y in (("decay", decay), ("beta", beta)):
        if y is not None:
            require_shape(name, y, (num_rows, heads))
    if not num_rows:
        return torch.empty(v.shape, dtype=q.dtype, device=q.device)
    q, k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v))  # rows may lie apart
    decay, beta = decay.contiguous(), None if beta is None else beta.contiguous()
    if rows.single:
        return recur_single(q, k, v, decay, beta, memory, rows)
    delta, rule, out = beta is not None, v if beta is None else beta, torch.empty(v.shape, dtype=q.dtype, device=q.device)
    tile, table = WALK, rows.page_table
    sizes = (heads, heads // key_heads, d, min(tile.depth, next_power_of_2(max(d, 16))), width, tile.columns)
    grid, options = (num_rows, heads, ceil_div(width, tile.columns)), dict(num_warps=tile.warps, num_stages=tile.stages)
    of, placed = (memory.entry_of, memory.state_of), (rows.sequence, rows.position, table)
    entry, at, stride = memory.entries.stride(0), memory.at, table.stride(0)
    paged, strides = (memory.page_size, CHUNK), (q.stride(0), k.stride(0), v.stride(0))
    _put(k.flatten(1), memory, at[0], rows)
    _put(decay, memory, at[2], rows)
    empty = lambda *shape: torch.empty(num_rows, heads, *shape, dtype=torch.float32, device=q.device)  # noqa: E731
    weights, whole = empty(CHUNK), empty()
    shares, told = (empty(CHUNK), empty(width)) if delta else (weights, weights)
    _weigh_kernel[grid[:2]](
        q, memory.entries, of[0], *placed, weights, shares, whole, entry, *at, stride, num_rows, strides[0], *sizes[:4],
        tile.rows, *paged, delta, **options, **EXACT,
    )  # fmt: skip
    _walk_kernel[grid](
        v, rule, memory.entries, memory.states, *of, *placed, shares, whole, told, entry, *at, stride, num_rows, strides[2],
        *sizes, tile.rows, *paged, delta, **options, **EXACT,
    )  # fmt: skip
    _read_kernel[grid](
        q, memory.entries, memory.states, out, *of, *placed, weights, whole, entry, at[1], stride, num_rows, strides[0], *sizes,
        tile.rows, *paged, **options, **EXACT,
    )  # fmt: skip
    return out
