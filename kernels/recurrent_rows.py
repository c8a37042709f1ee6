"""The memory of recurrences over pages in Triton, and the rows of decoding: one per sequence.

The arithmetic is portable float32 in every dtype: a model in bfloat16 rounds what goes in and what comes out. Per position an
entry, per page a state, as `kernels/cpu_recurrent.py` has them.

**Few rows** are one kernel: query and key are the two rows of its dots. **Many rows** wait for memory, and are three kernels.
One weighs what a row takes of the updates of its chunk, for heads that share keys together. One reads state and updates, four
columns of values per thread, each a chain of multiply-adds. One has something to do where a chunk ends.

**Terms that take no part** are -1 times 0: adding -0 changes no number, where adding +0 would turn -0 into +0.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from replaylens.kernels.definition import CHUNK
from replaylens.kernels.exact import exp
from replaylens.kernels.launch import EXACT, GemmTile, ceil_div, next_power_of_2, require
from replaylens.kernels.shared import PagedRows

FEW, WEIGH, READ, CLOSE = (
    GemmTile(2, 32, 64, 4, 1),
    GemmTile(2, CHUNK, 32, 2, 1),
    GemmTile(1, 128, 8, 1, 1),
    GemmTile(1, 64, 16, 4, 1),
)
"""of single rows: of few, and of the three kernels of many. Rows, columns of values, depth of a step along keys. They move no
bit"""
MANY = 1024
"""heads of single rows from which they count as many"""

# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RecurrentMemory:
    """One layer's part of the cache."""

    entries: Tensor
    """[slots of rooms, columns], float32: the inputs of the convolution, then keys, updates and log decays"""
    states: Tensor
    """[rooms, heads, d, width], float32"""
    at: tuple[int, int, int]
    """columns at which keys, updates and log decays begin"""
    entry_of: Tensor
    """page -> room of its entries, int32"""
    state_of: Tensor
    """page -> room of the state after it"""
    page_size: int

    def __post_init__(self) -> None:
        for name, x, dims in (("entries", self.entries, 2), ("states", self.states, 4)):
            fits = x.dtype == torch.float32 and x.dim() == dims and x.is_contiguous()
            require(fits, "{} are {} {}. Expected contiguous float32.", name, x.dtype, x.shape)


@triton.jit
def slot_of(TABLE, ENTRY_OF, at, PAGE: tl.constexpr):
    """The slot of position `at` in the room of its page's entries."""
    room = tl.load(ENTRY_OF + tl.load(TABLE + at // PAGE)).to(tl.int64)
    return room * PAGE + at % PAGE


@triton.jit
def slots(TABLE, ENTRY_OF, at, known, PAGE: tl.constexpr):
    """The slots of positions `at`; of those that are not known, in room 0."""
    page = tl.load(TABLE + at // PAGE, mask=known, other=0)
    return tl.load(ENTRY_OF + page, mask=known, other=0).to(tl.int64) * PAGE + at % PAGE


@triton.jit
def state_of(TABLE, STATE_OF, at, PAGE: tl.constexpr):
    """The room of the state after the page of position `at`."""
    return tl.load(STATE_OF + tl.load(TABLE + at // PAGE)).to(tl.int64)


@triton.jit
def _carry(
    START, AFTER, KEYS, slot, OWN, own, u, whole, left, base, c, inside, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The state after a chunk with updates u [CHUNK, columns]; what is left of it is `whole`, of the rows `left` [1, CHUNK].

    The key of row `own` is not stored yet, but at OWN. In few rows at a time: they happen seldom, and hold many registers."""
    j = tl.arange(0, slot.shape[0])
    for first in tl.range(0, D, 16):
        a = first + tl.arange(0, 16)
        place, real = a[:, None] * WIDTH + c[None, :], (a[:, None] < D) & inside[None, :]
        state = tl.load(START + place, mask=(base > 0) & real, other=0.0) * whole
        k = tl.load(KEYS + slot[None, :] + a[:, None], mask=(j != own)[None, :] & (a[:, None] < D), other=0.0)
        mine = tl.load(OWN + a, mask=(a < D) & (own >= 0), other=0.0).to(tl.float32)
        k = tl.where((j == own)[None, :], mine[:, None], k)
        tl.store(AFTER + place, tl.dot(k * left, u, state, input_precision="ieee"), mask=real)


@triton.jit
def close(
    TABLE, ENTRIES, STATES, ENTRY_OF, STATE_OF, base, head, entry, at_key, at_update, at_decay, whole, c,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Columns c of the state after the chunk from `base` on, whose entries are stored. whole: left of the state before"""
    j, inside = tl.arange(0, CHUNK), c < WIDTH
    lane = CHUNK - 1 - j
    slot = slots(TABLE, ENTRY_OF, base + j, j >= 0, PAGE) * entry
    g = tl.load(ENTRIES + at_decay + head + slots(TABLE, ENTRY_OF, base + lane, j >= 0, PAGE) * entry)[None, :]
    left = exp(tl.dot(g, (lane[:, None] > j[None, :]).to(tl.float32), input_precision="ieee"))  # [1, CHUNK]
    u = tl.load(ENTRIES + at_update + head * WIDTH + slot[:, None] + c[None, :], mask=inside[None, :], other=0.0)
    START = STATES + (state_of(TABLE, STATE_OF, tl.maximum(base - 1, 0), PAGE) * HEADS + head) * D * WIDTH
    AFTER = STATES + (state_of(TABLE, STATE_OF, base + CHUNK - 1, PAGE) * HEADS + head) * D * WIDTH
    KEYS = ENTRIES + at_key + head // GROUP * D
    _carry(START, AFTER, KEYS, slot, KEYS, -1, u, whole, left, base, c, inside, D, WIDTH)


@triton.jit
def _placed(SEQUENCE, POSITION, TABLES, row, stride_t, CHUNK: tl.constexpr):
    """A row's page table, its position, how many rows of its chunk are before it, and where the chunk begins."""
    position = tl.load(POSITION + row)
    begun = position % CHUNK
    return TABLES + tl.load(SEQUENCE + row).to(tl.int64) * stride_t, position, begun, position - begun


# ---- few rows --------------------------------------------------------------------------------------------------------


@triton.jit
def _picked(x, chosen, AXIS: tl.constexpr):
    """The only row or column of x that is chosen."""
    return tl.max(tl.where(chosen, x, float("-inf")), AXIS)


@triton.jit(do_not_specialize=["stride_t"])
def _step_kernel(
    Q, V, BETA, ENTRIES, STATES, OUT, ENTRY_OF, STATE_OF, SEQUENCE, POSITION, TABLES, entry, at_key, at_update, at_decay,
    stride_t, K, DECAY, stride_q, stride_k, stride_v,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """One row, the only one of its sequence. Rows of the dots: its query, and its key."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j, depth = tl.arange(0, 2)[:, None], tl.arange(0, CHUNK), tl.arange(0, DEPTH)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < WIDTH
    TABLE, position, begun, base = _placed(SEQUENCE, POSITION, TABLES, row, stride_t, CHUNK)
    KEYS = ENTRIES + at_key + head // GROUP * D
    UPDATES = ENTRIES + at_update + head * WIDTH
    QUERY, KEY = Q + row * stride_q + head // GROUP * D, K + row * stride_k + head // GROUP * D
    slot = slots(TABLE, ENTRY_OF, base + j, j <= begun, PAGE) * entry
    place = slot_of(TABLE, ENTRY_OF, position, PAGE) * entry
    START = STATES + (state_of(TABLE, STATE_OF, tl.maximum(base - 1, 0), PAGE) * HEADS + head) * D * WIDTH
    u = tl.load(UPDATES + slot[:, None] + c[None, :], mask=(j < begun)[:, None] & inside[None, :], other=0.0)

    lane = CHUNK - 1 - j  # log decays are added from the row's own back
    earlier = slots(TABLE, ENTRY_OF, base + lane, lane < begun, PAGE) * entry
    g = tl.load(ENTRIES + at_decay + head + earlier, mask=lane < begun, other=0.0)
    decay = tl.load(DECAY + row * HEADS + head)
    g = tl.where(lane == begun, decay, g)[None, :]
    left = exp(tl.dot(g, (lane[:, None] > j[None, :]).to(tl.float32), input_precision="ieee"))  # [1, CHUNK]
    whole = exp(tl.dot(g, tl.full((CHUNK, 16), 1.0, tl.float32), input_precision="ieee"))  # sixteen equal columns
    whole = tl.max(whole)

    total = tl.zeros((2, COLUMNS), tl.float32)
    score = tl.zeros((2, CHUNK), tl.float32)
    for first in tl.range(0, D, DEPTH):
        a = first + depth
        real = a < D
        k = tl.load(KEY + a, mask=real, other=-1.0).to(tl.float32)
        q = tl.load(QUERY + a, mask=real, other=-1.0).to(tl.float32)
        x = tl.where(i == 0, q[None, :], k[None, :])
        state = tl.load(START + a[:, None] * WIDTH + c[None, :], mask=(base > 0) & real[:, None] & inside[None, :], other=0.0)
        seen = tl.load(KEYS + slot[None, :] + a[:, None], mask=(j < begun)[None, :] & real[:, None], other=0.0)
        seen = tl.where((j == begun)[None, :] & real[:, None], k[:, None], seen)
        total = tl.dot(x, state, total, input_precision="ieee")
        score = tl.dot(x, seen, score, input_precision="ieee")
    weight = score * left
    total = tl.dot(tl.where((j < begun)[None, :], weight, -1.0), u, total * whole, input_precision="ieee")
    new = tl.load(V + row * stride_v + head * WIDTH + c, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        strength = tl.load(BETA + row * HEADS + head).to(tl.float32)
        new = strength * (new - _picked(total, i == 1, 0))
    by = tl.max(tl.where((i == 0) & (j == begun)[None, :], weight, float("-inf")))
    read = tl.fma(tl.zeros_like(new) + by, new, _picked(total, i == 0, 0))
    tl.store(OUT + (row * HEADS + head) * WIDTH + c, read.to(OUT.dtype.element_ty), mask=inside)
    tl.store(UPDATES + place + c, new, mask=inside)
    if tl.program_id(2) == 0:
        tl.store(ENTRIES + at_decay + head + place, decay)
        if head % GROUP == 0:
            for first in tl.range(0, D, DEPTH):
                a = first + depth
                tl.store(KEYS + place + a, tl.load(KEY + a, mask=a < D).to(tl.float32), mask=a < D)
    if begun == CHUNK - 1:
        u = tl.where((j == begun)[:, None], new[None, :], u)
        AFTER = STATES + (state_of(TABLE, STATE_OF, position, PAGE) * HEADS + head) * D * WIDTH
        _carry(START, AFTER, KEYS, slot, KEY, begun, u, whole, left, base, c, inside, D, WIDTH)


# ---- many rows -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stride_t"])
def _weigh_rows_kernel(
    Q, K, DECAY, ENTRIES, ENTRY_OF, SEQUENCE, POSITION, TABLES, WEIGHTS, WHOLE, entry, at_key, at_decay, stride_t,
    stride_q, stride_k,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, SOME: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """What a row takes of the updates of its chunk, by its query and by its key, [rows, heads, 2, CHUNK], and what is left of
    the state before, [rows, heads], for SOME heads with the same key. Stores key and log decays."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SOME + tl.arange(0, SOME)
    key = tl.program_id(1) * SOME // GROUP
    i, j, depth = tl.arange(0, 2)[:, None], tl.arange(0, CHUNK), tl.arange(0, DEPTH)
    TABLE, position, begun, base = _placed(SEQUENCE, POSITION, TABLES, row, stride_t, CHUNK)
    KEYS = ENTRIES + at_key + key * D
    QUERY, KEY = Q + row * stride_q + key * D, K + row * stride_k + key * D
    slot = slots(TABLE, ENTRY_OF, base + j, j < begun, PAGE) * entry
    place = slot_of(TABLE, ENTRY_OF, position, PAGE) * entry

    lane = CHUNK - 1 - j  # log decays are added from the row's own back
    earlier = slots(TABLE, ENTRY_OF, base + lane, lane < begun, PAGE) * entry
    known = (lane < begun)[None, :] & (head >= 0)[:, None]
    g = tl.load(ENTRIES + at_decay + earlier[None, :] + head[:, None], mask=known, other=0.0)
    decay = tl.load(DECAY + row * HEADS + head)
    g = tl.where((lane == begun)[None, :], decay[:, None], g)  # [SOME, CHUNK]
    later = (lane[:, None] > j[None, :]) | (j == CHUNK - 1)[None, :]  # nothing decays the last row: its column adds up all
    left = exp(tl.dot(g, later.to(tl.float32), input_precision="ieee"))
    whole = _picked(left, (j == CHUNK - 1)[None, :], 1)
    left = tl.where((j == CHUNK - 1)[None, :], 1.0, left)

    score = tl.zeros((2, CHUNK), tl.float32)
    for first in tl.range(0, D, DEPTH):
        a = first + depth
        real = a < D
        k = tl.load(KEY + a, mask=real, other=-1.0).to(tl.float32)
        q = tl.load(QUERY + a, mask=real, other=-1.0).to(tl.float32)
        seen = tl.load(KEYS + slot[None, :] + a[:, None], mask=(j < begun)[None, :] & real[:, None], other=0.0)
        seen = tl.where((j == begun)[None, :] & real[:, None], k[:, None], seen)
        score = tl.dot(tl.where(i == 0, q[None, :], k[None, :]), seen, score, input_precision="ieee")
        if tl.program_id(1) * SOME % GROUP == 0:
            tl.store(KEYS + place + a, k, mask=real)
    own = row * HEADS + head
    weight = score[None, :, :] * left[:, None, :]
    tl.store(WEIGHTS + own[:, None, None] * 2 * CHUNK + i[None, :, :] * CHUNK + j[None, None, :], weight)
    tl.store(WHOLE + own, whole)
    tl.store(ENTRIES + at_decay + place + head, decay)


@triton.jit
def _take(read, told, by, shares, line, DELTA: tl.constexpr):
    """(read + by line, told + shares line) of scalars and a row."""
    read = tl.fma(tl.zeros_like(read) + by, line, read)
    if DELTA:
        told = tl.fma(tl.zeros_like(told) + shares, line, told)
    return read, told


@triton.jit(do_not_specialize=["stride_t"])
def _read_rows_kernel(
    Q, K, V, BETA, ENTRIES, STATES, OUT, ENTRY_OF, STATE_OF, SEQUENCE, POSITION, TABLES, WEIGHTS, WHOLE, entry, at_update,
    stride_t, stride_q, stride_k, stride_v,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """What a row reads, and its update. DEPTH rows of the state, then of the updates, are on their way at a time."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < WIDTH
    TABLE, position, begun, base = _placed(SEQUENCE, POSITION, TABLES, row, stride_t, CHUNK)
    UPDATES = ENTRIES + at_update + head * WIDTH
    QUERY, KEY = Q + row * stride_q + head // GROUP * D, K + row * stride_k + head // GROUP * D
    START = STATES + (state_of(TABLE, STATE_OF, tl.maximum(base - 1, 0), PAGE) * HEADS + head) * D * WIDTH
    own = row * HEADS + head
    BY = WEIGHTS + own * 2 * CHUNK
    read = tl.zeros((COLUMNS,), tl.float32)
    told = read
    for first in tl.range(0, D, DEPTH):
        lines = ()
        for n in tl.static_range(DEPTH):
            there = inside & (base > 0) & (first + n < D)
            lines = lines + (tl.load(START + (first + n) * WIDTH + c, mask=there, other=0.0),)  # type: ignore[assignment]
        for n in tl.static_range(DEPTH):
            q = tl.load(QUERY + first + n, mask=first + n < D, other=-1.0).to(tl.float32)
            k = tl.load(KEY + first + n, mask=first + n < D, other=-1.0).to(tl.float32)
            read, told = _take(read, told, q, k, lines[n], DELTA)
    whole = tl.load(WHOLE + own)
    read, told = read * whole, told * whole
    for first in tl.range(0, begun, DEPTH):
        lines = ()
        for n in tl.static_range(DEPTH):
            slot = slot_of(TABLE, ENTRY_OF, tl.minimum(base + first + n, position), PAGE) * entry
            there = inside & (first + n < begun)
            lines = lines + (tl.load(UPDATES + slot + c, mask=there, other=0.0),)  # type: ignore[assignment]
        for n in tl.static_range(DEPTH):
            by = tl.load(BY + first + n, mask=first + n < begun, other=-1.0)
            shares = tl.load(BY + CHUNK + first + n, mask=first + n < begun, other=-1.0)
            read, told = _take(read, told, by, shares, lines[n], DELTA)
    new = tl.load(V + row * stride_v + head * WIDTH + c, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        new = tl.load(BETA + own).to(tl.float32) * (new - told)
    read = tl.fma(tl.zeros_like(new) + tl.load(BY + begun), new, read)
    tl.store(OUT + own * WIDTH + c, read.to(OUT.dtype.element_ty), mask=inside)
    tl.store(UPDATES + slot_of(TABLE, ENTRY_OF, position, PAGE) * entry + c, new, mask=inside)


@triton.jit(do_not_specialize=["stride_t"])
def _close_kernel(
    ENTRIES, STATES, ENTRY_OF, STATE_OF, SEQUENCE, POSITION, TABLES, WHOLE, entry, at_key, at_update, at_decay, stride_t,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(POSITION + row)
    if position % CHUNK != CHUNK - 1:
        return
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    TABLE = TABLES + tl.load(SEQUENCE + row).to(tl.int64) * stride_t
    whole = tl.load(WHOLE + row * HEADS + head)
    close(
        TABLE, ENTRIES, STATES, ENTRY_OF, STATE_OF, position - CHUNK + 1, head, entry, at_key, at_update, at_decay, whole, c,
        HEADS, GROUP, D, WIDTH, PAGE, CHUNK,
    )  # fmt: skip


def recur_single(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, memory: RecurrentMemory, rows: PagedRows
) -> Tensor:
    """`recur` of rows that are the only ones of their sequences. Mutates the memory. Precondition: rows of q, k and v are
    contiguous, decay and beta whole."""
    num_rows, key_heads = q.shape[:2]
    heads, d, width = memory.states.shape[1:]
    group, delta, rule = heads // key_heads, beta is not None, v if beta is None else beta
    of, placed = (memory.entry_of, memory.state_of), (rows.sequence, rows.position, rows.page_table)
    entry, at, stride = memory.entries.stride(0), memory.at, rows.page_table.stride(0)
    paged, strides = (memory.page_size, CHUNK), (q.stride(0), k.stride(0), v.stride(0))
    empty = lambda *shape, dtype=torch.float32: torch.empty(num_rows, heads, *shape, dtype=dtype, device=q.device)  # noqa: E731
    out, held = empty(width, dtype=q.dtype), (memory.entries, memory.states)

    def launch(tile: GemmTile) -> tuple[int, tuple[int, int, int], dict[str, Any]]:
        columns = min(tile.columns, next_power_of_2(width))
        return columns, (num_rows, heads, ceil_div(width, columns)), dict(num_warps=tile.warps, num_stages=tile.stages, **EXACT)

    deep = next_power_of_2(max(d, 16))
    if num_rows * heads < MANY:
        columns, grid, options = launch(FEW)
        _step_kernel[grid](
            q, v, rule, *held, out, *of, *placed, entry, *at, stride, k, decay, *strides, heads, group, d, min(FEW.depth, deep),
            width, columns, *paged, delta, **options,
        )  # fmt: skip
        return out
    weights, whole, some = empty(2, CHUNK), empty(), gcd(group, 2)  # of four, registers spill
    _, _, options = launch(WEIGH)
    _weigh_rows_kernel[(num_rows, heads // some)](
        q, k, decay, memory.entries, of[0], *placed, weights, whole, entry, at[0], at[2], stride, *strides[:2], heads, group, d,
        min(WEIGH.depth, deep), some, *paged, **options,
    )  # fmt: skip
    columns, grid, options = launch(READ)
    _read_rows_kernel[grid](
        q, k, v, rule, *held, out, *of, *placed, weights, whole, entry, at[1], stride, *strides, heads, group, d, READ.depth,
        width, columns, *paged, delta, **options,
    )  # fmt: skip
    columns, grid, options = launch(CLOSE)
    _close_kernel[grid](
        *held, *of, *placed, whole, entry, *at, stride, heads, group, d, width, columns, *paged, **options,
    )  # fmt: skip
    return out
