"""Portable attention on a CPU over a paged cache.

Keys are walked in blocks of 64 from position 0, blocks in splits of 512, as `kernels/attention.py` does on a GPU. Rows are
ordered by their pages: neighbours whose block lies in the same pages read it together, whether they belong to one sequence or
to branches of one prompt.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from replaylens.kernels.cpu import require, require_integers, require_rows, vector
from replaylens.kernels.portable import (
    STRIP,
    STRIP_ROWS,
    arguments,
    as_float,
    compiled,
    exp,
    floats,
    fma,
    height,
    integers,
    pack_rows,
    shorts,
    strip,
    tanh,
    task,
    words,
)
from replaylens.kernels.threads import bits, divided, threads_for

KV_BLOCK, KV_SPLIT = 64, 512
_SUMS = KV_BLOCK // 2
_PAIRS = 192
"""(row, query head) pairs that walk together. Moves no bit"""
_NONE, _ZERO = np.float32(-np.inf), np.float32(0.0)

# ---- blocks ----------------------------------------------------------------------------------------------------------
# Some pairs over one block of keys. Pairs lie one after another: scores [pairs, KV_BLOCK], sums of weights [pairs, _SUMS], sums
# of values [pairs, padded].


@compiled("void(intp,intp,float32)", within=True)
def _fill(target, count, value):
    out = floats(target, count)
    for i in range(count):
        out[i] = value


@compiled("void(intp,intp,intp,intp,intp,intp,intp)", within=True)
def _turn_keys(keys, pages, page_size, start, num, width, turned):
    """Keys [start, start + num) of a sequence with these pages -> turned [width, KV_BLOCK]"""
    out, own = floats(turned, width * KV_BLOCK), integers(pages, (start + num - 1) // page_size + 1)
    for j in range(num):
        slot = own[(start + j) // page_size] * page_size + (start + j) % page_size
        row = floats(keys + 4 * slot * width, width)
        for i in range(width):
            out[i * KV_BLOCK + j] = row[i]


@compiled("void(intp,intp,intp,intp,intp)", within=True)
def _pack_pairs(source, stride, pairs, target, columns):
    """source [pairs, columns] in tiles: for each, its columns one after the other."""
    done = 0
    while done < pairs:
        h = height(pairs - done, STRIP_ROWS)
        pack_rows(source + 4 * done * stride, stride, h, columns, target + 4 * done * columns)
        done += h


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _multiply(pairs, packed, columns, b, ldb, out, ldo, width, begun):
    """out [pairs, width] = (out if begun +) packed pairs [columns] times b [columns, width]; width a multiple of STRIP"""
    done = 0
    while done < pairs:
        h = height(pairs - done, STRIP_ROWS)
        for column in range(0, width, STRIP):
            a, c = packed + 4 * done * columns, out + 4 * (done * ldo + column)
            strip(h, a, b + 4 * column, ldb, columns, c, ldo, begun)
        done += h


@compiled("void(intp,intp,float32,float32,float32,intp,intp,intp)", within=True)
def _scored(scores, seen, scale, cap, slope, start, before, hidden):
    """Scores of one pair over a block: scaled, capped, biased; -inf for keys that the row does not see.

    seen, before  the row sees keys [before, seen) of the block
    """
    s, edges = floats(scores, KV_BLOCK), shorts(hidden, KV_BLOCK)
    for j in range(seen):
        s[j] *= scale
    if cap > _ZERO:
        for j in range(seen):
            s[j] = tanh(s[j] / cap) * cap
    if slope != _ZERO:
        for j in range(seen):
            s[j] = fma(slope, np.float32(start + j), s[j])
    if hidden:
        for j in range(seen):
            s[j] = _NONE if edges[j] else s[j]
    for j in range(seen, KV_BLOCK):
        s[j] = _NONE
    for j in range(before):
        s[j] = _NONE


@compiled("float32(intp,intp,float32,intp,intp,intp,intp)", within=True)
def _weighted(scores, seen, m, sums, values, width, room):
    """One pair: scores of a block become weights; sums and values shrink to the new maximum, which is returned.

    room  for half a block: the maximum is found by halves, since one comparison after another took half of a prompt's attention
    """
    s, total, a = floats(scores, KV_BLOCK), floats(sums, _SUMS), floats(values, width)
    count = (seen + STRIP - 1) // STRIP * STRIP
    most, half = floats(room, KV_BLOCK // 2), KV_BLOCK // 2
    for j in range(half):
        most[j] = s[j] if s[j] > s[j + half] else s[j + half]
    while half > 1:
        half //= 2
        for j in range(half):
            most[j] = most[j] if most[j] > most[j + half] else most[j + half]
    top = most[0] if most[0] > m else m
    safe = _ZERO if top == _NONE else top
    for j in range(count):
        s[j] = exp(s[j] - safe)
    for j in range(count, KV_BLOCK):
        s[j] = _ZERO  # exp(-inf)
    shrink = exp(m - safe)
    for j in range(_SUMS):
        total[j] = fma(total[j], shrink, s[2 * j] + s[2 * j + 1])
    if shrink != np.float32(1.0):
        for i in range(width):
            a[i] *= shrink
    return top


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _add_values(values, pages, page_size, start, num, stride, width, weights, pairs, packed, padding, sums, padded):
    """Add the values of keys [start, start + num), `stride` apart, times the pairs' weights to their sums.

    packed, padding  room for the weights in tiles, and for the values if they fill no panel
    """
    own, j = integers(pages, (start + num - 1) // page_size + 1), 0
    while j < num:  # values of consecutive slots together
        slot = own[(start + j) // page_size] * page_size + (start + j) % page_size
        some = min(num - j, page_size - (start + j) % page_size)
        while j + some < num and own[(start + j + some) // page_size] * page_size == slot + some:
            some += min(num - j - some, page_size)
        _pack_pairs(weights + 4 * j, KV_BLOCK, pairs, packed, some)
        source, apart = values + 4 * slot * stride, stride
        if padded != width:
            for k in range(some):
                line, room = floats(source + 4 * k * stride, width), floats(padding + 4 * k * padded, width)
                for i in range(width):
                    room[i] = line[i]
            source, apart = padding, padded
        _multiply(pairs, packed, some, source, apart, sums, padded, padded, 1)
        j += some


@compiled("void(intp,intp,float32,float32,intp,intp)", within=True)
def _merge(state, merged, m1, l1, values, width):
    """Merge a split (m1, l1, values) into a row's (m, l) at `state` and values at `merged`."""
    ml, a, b = floats(state, 2), floats(merged, width), floats(values, width)
    top = m1 if m1 > ml[0] else ml[0]
    safe = _ZERO if top == _NONE else top
    x, y = exp(ml[0] - safe), exp(m1 - safe)
    ml[0], ml[1] = top, fma(l1, y, ml[1] * x)
    for i in range(width):
        a[i] = fma(b[i], y, a[i] * x)


# ---- walk ------------------------------------------------------------------------------------------------------------


@compiled("boolean(intp,intp,intp,intp,intp,intp)", within=True)
def _same_pages(table, pages, one, other, first, end):
    """Whether two sequences have the same pages [first, end)."""
    if one == other:
        return True
    x, y = integers(table + 8 * one * pages, pages), integers(table + 8 * other * pages, pages)
    for i in range(first, min(pages, end)):
        if x[i] != y[i]:
            return False
    return first < pages


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _take_queries(q, by_row, by_head, order, rows, head, group, width, out):
    """The queries of `group` heads, from `head` on, of the rows in this order -> [rows * group, width]"""
    rank = integers(order, rows)
    for r in range(rows):
        for g in range(group):
            source = floats(q + 4 * (rank[r] * by_row + (head + g) * by_head), width)
            target = floats(out + 4 * (r * group + g) * width, width)
            for i in range(width):
                target[i] = source[i]


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _end_split(pairs, maxima, sums, values, state, merged, padded, sinks, group):
    """Merge the pairs' splits into what they have, or their heads' sinks, if given: `values` is zero then."""
    m, sink = floats(maxima, pairs), floats(sinks, group)
    for pair in range(pairs):
        if sinks:
            _merge(state + 8 * pair, merged + 4 * pair * padded, sink[pair % group], np.float32(1.0), values, padded)
            continue
        total, own = _ZERO, floats(sums + 4 * pair * _SUMS, _SUMS)
        for j in range(_SUMS):
            total += own[j]
        _merge(state + 8 * pair, merged + 4 * pair * padded, m[pair], total, values + 4 * pair * padded, padded)


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _give(order, rows, heads, head, group, width, state, merged, out):
    """The pairs' values by their weights' sums -> out [all rows, heads, width]"""
    rank, padded = integers(order, rows), (width + STRIP - 1) // STRIP * STRIP
    for pair in range(rows * group):
        total, source = floats(state + 8 * pair, 2)[1], floats(merged + 4 * pair * padded, width)
        y = floats(out + 4 * (rank[pair // group] * heads + head + pair % group) * width, width)
        for i in range(width):
            y[i] = source[i] / total + _ZERO  # whether keys are skipped moves a zero's sign


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,float32,float32,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _weigh(
    block, first, pairs, group, order, position, heads, head, scale, cap, slopes, window, start, num, scores, hidden, keys,
    sums_and_values,
):  # fmt: skip
    """The raw scores of pairs over a block become their weights.

    order            of the rows whose pairs these are
    scores, hidden   [all rows, heads, keys], or 0: as `attend`'s
    sums_and_values  addresses of the pairs' maxima, sums and values, the width of the latter, and room for half a block
    """
    rank, places, slope = integers(order, (first + pairs - 1) // group + 1), integers(position, 1 << 40), floats(slopes, heads)
    m, held = floats(integers(sums_and_values, 5)[0], first + pairs), integers(sums_and_values, 5)
    for pair in range(first, first + pairs):
        row, own = rank[pair // group], head + pair % group
        edges, address = (row * heads + own) * keys + start, block + 4 * pair * KV_BLOCK
        added, seen = slope[own] if slopes else _ZERO, max(0, min(num, places[row] + 1 - start))
        before = min(seen, max(0, places[row] - window + 1 - start)) if window else 0
        _scored(address, seen, scale, cap, added, start, before, hidden + 2 * edges if hidden else 0)
        if scores:
            shown, s = floats(scores + 4 * edges, num), floats(address, num)
            for j in range(seen):
                shown[j] = s[j]
        m[pair] = _weighted(address, seen, m[pair], held[1] + 4 * pair * _SUMS, held[2] + 4 * pair * held[3], held[3], held[4])


@task
def _attend(given, index, count):
    """Every `count`-th work item, from `index` on: one (chunk of rows, key head) each. Later rows of a prompt see more keys, so
    that the last of 16 consecutive shares was 1.94 times the mean. See `attend`.

    scores  where scores go, [rows, heads, scores_width], or 0
    hidden  [rows, heads, scores_width] uint16: edges that the softmax does not see, or 0
    """
    (
        q, q_row, q_head, keys, values, kv_head_stride, key_width, value_width, heads, group, rows, per_chunk, order, sequence,
        position, table, pages, page_size, out, window, slopes, scale_bits, cap_bits, sinks, scores, scores_width, hidden,
    ) = arguments(given, 27)  # fmt: skip
    scale, cap, kv_heads = as_float(np.int32(scale_bits)), as_float(np.int32(cap_bits)), heads // group
    owner, places = integers(sequence, rows), integers(position, rows)
    room, padded = per_chunk * group, (value_width + STRIP - 1) // STRIP * STRIP
    spaces = np.empty(2 * room * key_width + key_width * KV_BLOCK + KV_BLOCK * padded, np.float32)
    queries = spaces.ctypes.data
    packed, turned = queries + 4 * room * key_width, queries + 8 * room * key_width
    padding = turned + 4 * key_width * KV_BLOCK
    pair_spaces = np.empty(room * (2 * KV_BLOCK + 3 + _SUMS + 2 * padded) + KV_BLOCK // 2, np.float32)
    block = pair_spaces.ctypes.data
    block_packed, m = block + 4 * room * KV_BLOCK, block + 8 * room * KV_BLOCK
    sums, state = m + 4 * room, m + 4 * room * (1 + _SUMS)
    a, merged = state + 8 * room, state + 4 * room * (2 + padded)
    packed_to, held = np.empty(room, np.int64), np.empty(5, np.int64)
    held[0], held[1], held[2], held[3], held[4] = m, sums, a, padded, merged + 4 * room * padded
    _fill(padding, KV_BLOCK * padded, _ZERO)
    for item in range(index, (rows + per_chunk - 1) // per_chunk * kv_heads, count):
        chunk, kv_head = item // kv_heads, item % kv_heads
        low, high = chunk * per_chunk, min(rows, (chunk + 1) * per_chunk)
        rank, pairs, head = integers(order + 8 * low, high - low), (high - low) * group, kv_head * group
        last, begin = 0, np.int64(1) << 40
        for r in range(high - low):
            last = max(last, places[rank[r]])
            begin = min(begin, max(0, places[rank[r]] - window + 1) if window else 0)
        _take_queries(q, q_row, q_head, order + 8 * low, high - low, head, group, key_width, queries)
        for pair in range(pairs):
            packed_to[pair] = -1
            floats(state + 8 * pair, 2)[0], floats(state + 8 * pair, 2)[1] = _NONE, _ZERO
        _fill(merged, pairs * padded, _ZERO)
        start = begin // KV_BLOCK * KV_BLOCK
        fresh = True
        while start <= last:
            if fresh:
                _fill(m, pairs, _NONE)
                _fill(sums, pairs * _SUMS, _ZERO)
                _fill(a, pairs * padded, _ZERO)
                fresh = False
            r = 0
            while r < high - low:  # rows whose block lies in the same pages
                own = table + 8 * owner[rank[r]] * pages
                first_page, end_page = start // page_size, (start + KV_BLOCK - 1) // page_size + 1
                stop, deepest = r + 1, places[rank[r]]
                while stop < high - low and _same_pages(table, pages, owner[rank[r]], owner[rank[stop]], first_page, end_page):
                    deepest = max(deepest, places[rank[stop]])
                    stop += 1
                num, one, some = min(KV_BLOCK, deepest + 1 - start), r * group, (stop - r) * group
                r = stop
                if num <= 0:
                    continue
                if packed_to[one] != one + some:
                    _pack_pairs(queries + 4 * one * key_width, key_width, some, packed + 4 * one * key_width, key_width)
                    for pair in range(one, one + some):
                        packed_to[pair] = -1
                    packed_to[one] = one + some
                base = 4 * kv_head * kv_head_stride
                _turn_keys(keys + base, own, page_size, start, num, key_width, turned)
                target, wide = block + 4 * one * KV_BLOCK, (num + STRIP - 1) // STRIP * STRIP
                _multiply(some, packed + 4 * one * key_width, key_width, turned, KV_BLOCK, target, KV_BLOCK, wide, 0)
                _weigh(
                    block, one, some, group, order + 8 * low, position, heads, head, scale, cap, slopes, window, start, num,
                    scores, hidden, scores_width, held.ctypes.data,
                )  # fmt: skip
                _add_values(
                    values + base, own, page_size, start, num, key_width, value_width, target, some, block_packed, padding,
                    a + 4 * one * padded, padded,
                )  # fmt: skip
            start += KV_BLOCK
            if start % KV_SPLIT == 0 or start > last:
                _end_split(pairs, m, sums, a, state, merged, padded, 0, group)
                fresh = True
        if sinks:
            _fill(a, padded, _ZERO)
            _end_split(pairs, m, sums, a, state, merged, padded, sinks + 4 * head, group)
        _give(order + 8 * low, high - low, heads, head, group, value_width, state, merged, out)
    spaces[0] = pair_spaces[0] = _ZERO  # numba frees an array after its last use, whatever holds its address
    return 1


# ---- cache -----------------------------------------------------------------------------------------------------------

_INFINITE = np.uint32(0x7F800000)
"""the exponent of infinity and NaN"""


@task
def _store(given, index, count):
    """In one part. `told` becomes 1, and nothing is written, if a number is not finite; 2 if a slot does not exist."""
    kv, by_row, by_head, planes, by_plane, slots, num_slots, rows, heads, width, told = arguments(given, 11)
    places, ended = integers(slots, rows), integers(told, 1)
    for row in range(rows):
        largest = np.uint32(0)
        for head in range(heads):
            source = words(kv + 4 * (row * by_row + head * by_head), width)
            for i in range(width):
                largest = max(largest, source[i] & _INFINITE)
        if largest == _INFINITE or places[row] < 0 or places[row] >= num_slots:
            ended[0] = 1 if largest == _INFINITE else 2
            return 1
    for head in range(heads):
        for row in range(rows):
            source = words(kv + 4 * (row * by_row + head * by_head), width)
            target = words(planes + 4 * (head * by_plane + places[row] * width), width)
            for i in range(width):
                target[i] = source[i]
    return 1


def store(kv: Tensor, planes: Tensor, slots: Tensor, told: Tensor | None = None) -> bool:
    """Mutates planes [heads, slots, width], contiguous: kv [rows, heads, width] goes to `slots` [rows] int64.

    False, and nothing is written, if a number is not finite. told: [1] int64, zero, is filled with 1 then
    """
    require_rows(kv)
    require_integers(slots)
    rows, heads, width = kv.shape
    fits = planes.dtype == torch.float32 and planes.is_contiguous() and planes.shape[::2] == (heads, width)
    require(fits and slots.shape == (rows,), f"{heads} planes of vectors of {width}", planes)
    told = torch.zeros(1, dtype=torch.int64) if told is None else told
    given = kv.data_ptr(), kv.stride(0), kv.stride(1), planes.data_ptr(), planes.stride(0), slots.data_ptr(), planes.shape[1]
    divided(_store, 0.0, 1, *given, rows, heads, width, told.data_ptr())
    ended = ctypes.c_int64.from_address(told.data_ptr()).value  # a tenth of int(told)
    if ended == 2:
        raise ValueError(f"Expected slots below {planes.shape[1]}, not {int(slots.min())} to {int(slots.max())}.")
    return ended == 0


# ---- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HostRows:
    """The rows of a pass and the pages of their keys."""

    sequence: Tensor
    """[rows] int64: index into `pages`"""
    position: Tensor
    """[rows] int64"""
    pages: Tensor
    """[sequences, pages] int64"""
    page_size: int
    order: Tensor
    """[rows] int64: rows by the pages of their sequences, so that those which share keys are neighbours"""

    @cached_property
    def keys_seen(self) -> float:
        """of all rows together"""
        return float(self.position.sum()) + len(self.position)

    def __post_init__(self) -> None:
        for x in (self.sequence, self.position, self.pages, self.order):
            require_integers(x)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: HostRows,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scores: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """q [rows, heads, width of keys] over the keys 0..position of each row -> [rows, heads, width of values].

    keys    [kv_heads, slots, width], values likewise, or the first columns of the keys
    slopes  [heads]: what is added to a score for each position of its key
    sinks   [heads]: scores that belong to no key
    scores  [rows, heads, keys]: filled with the scores that a row sees
    hidden  [rows, heads, keys] uint16: edges that the softmax does not see
    """
    for each in (q, keys, values):
        require_rows(each)
    require(q.shape[-1] == keys.shape[-1] and values.shape[:2] == keys.shape[:2], "queries as wide as keys", q)
    num, heads = q.shape[:2]
    slopes, sinks = vector(slopes, heads), vector(sinks, heads)
    kv_heads, width = keys.shape[0], values.shape[-1]
    group = heads // kv_heads
    out = torch.empty(num, heads, width, dtype=torch.float32)
    if not num:
        return out
    room = 0 if scores is None and hidden is None else (scores if scores is not None else hidden).shape[-1]  # type: ignore[union-attr]
    address = lambda x: 0 if x is None else x.data_ptr()  # noqa: E731
    cost = 2.0 * rows.keys_seen * heads * keys.shape[-1]
    per_chunk = max(1, min(_PAIRS // group, num * kv_heads // threads_for(cost, num * kv_heads)))
    divided(
        _attend, cost, -(-num // per_chunk) * kv_heads, q.data_ptr(), q.stride(0), q.stride(1), keys.data_ptr(),
        values.data_ptr(), keys.stride(0), keys.stride(1), width, heads, group, num, per_chunk, rows.order.data_ptr(),
        rows.sequence.data_ptr(), rows.position.data_ptr(), rows.pages.data_ptr(), rows.pages.shape[1], rows.page_size,
        out.data_ptr(), window, address(slopes), bits(scale), bits(cap), address(sinks), address(scores), room,
        address(hidden),
    )  # fmt: skip
    return out
