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
    KEYS,
    PANEL,
    STRIP,
    STRIP_ROWS,
    VECTOR,
    arguments,
    as_float,
    compiled,
    exp,
    floats,
    fma,
    height,
    integers,
    score,
    shorts,
    strip,
    tanh,
    task,
    turn,
    weigh,
    words,
)
from replaylens.kernels.threads import bits, divided, threads_for

KV_BLOCK, KV_SPLIT = 64, 512
_SUMS = KV_BLOCK // 2
_PAIRS = 192
"""(row, query head) pairs that walk together. Moves no bit"""
_NONE, _ZERO = np.float32(-np.inf), np.float32(0.0)

# ---- blocks ----------------------------------------------------------------------------------------------------------
# Some pairs over one block of keys. A panel of pairs lies in vectors: scores [KV_BLOCK, PANEL]. So do all pairs' queries
# [width, lanes], maxima [lanes] and sums of weights [_SUMS, lanes], with room for a panel from any pair on: a lane that is not
# a panel's own sees no key, which changes nothing of the pair it belongs to. Sums of values: [pairs, padded].


@compiled("void(intp,intp,float32)", within=True)
def _fill(target, count, value):
    out = floats(target, count)
    for i in range(count):
        out[i] = value


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _find_keys(keys, pages, page_size, start, num, width, room, places):
    """Where keys [start, start + num) of a sequence with these pages lie: every `KEYS` of them one after another -> places.

    room  [KV_BLOCK, width] for those that do not lie so
    """
    own, found = integers(pages, (start + num - 1) // page_size + 1), integers(places, KV_BLOCK // KEYS)
    for first in range(0, num, KEYS):
        at, some = start + first, min(KEYS, num - first)
        if some == KEYS and at % page_size + KEYS <= page_size:
            found[first // KEYS] = keys + 4 * (own[at // page_size] * page_size + at % page_size) * width
            continue
        found[first // KEYS] = room + 4 * first * width
        for j in range(some):
            slot = own[(at + j) // page_size] * page_size + (at + j) % page_size
            row, target = floats(keys + 4 * slot * width, width), floats(room + 4 * (first + j) * width, width)
            for i in range(width):
                target[i] = row[i]
        _fill(room + 4 * (first + some) * width, (KEYS - some) * width, _ZERO)


@compiled("void(intp,intp,intp,intp,intp)", within=True)
def _hide(scores, lanes, num, seen, before):
    """-inf for keys below `num` that a lane does not see: seen, before [lanes] float32, it sees keys [before, seen)"""
    end, begin = floats(seen, lanes), floats(before, lanes)
    for j in range(num):
        s, at = floats(scores + 4 * j * PANEL, lanes), np.float32(j)
        for lane in range(lanes):
            s[lane] = _NONE if (at >= end[lane]) | (at < begin[lane]) else s[lane]


@compiled("void(intp,intp,float32,float32,intp,intp)", within=True)
def _change(scores, num, scale, cap, slopes, start):
    """Scores [num, PANEL], scaled, capped and biased by [PANEL] slopes"""
    s, slope = floats(scores, num * PANEL), floats(slopes, PANEL)
    for i in range(num * PANEL):
        s[i] *= scale
    if cap > _ZERO:
        for i in range(num * PANEL):
            s[i] = tanh(s[i] / cap) * cap
    for j in range(num):
        line, at = floats(scores + 4 * j * PANEL, PANEL), np.float32(start + j)
        for lane in range(PANEL):
            line[lane] = line[lane] if slope[lane] == _ZERO else fma(slope[lane], at, line[lane])


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _add_values(values, pages, page_size, start, num, stride, width, weights, lanes, seen, padding, sums, padded):
    """Add the values of keys [start, start + num), `stride` apart, times weights [num, PANEL] to the sums of a panel's pairs.

    seen     [lanes] float32: how many keys each sees
    padding  room for the values if they fill no panel
    """
    own, ends, j = integers(pages, (start + num - 1) // page_size + 1), floats(seen, lanes), 0
    while j < num:  # values of consecutive slots together
        slot = own[(start + j) // page_size] * page_size + (start + j) % page_size
        some = min(num - j, page_size - (start + j) % page_size)
        while j + some < num and own[(start + j + some) // page_size] * page_size == slot + some:
            some += min(num - j - some, page_size)
        source, apart = values + 4 * slot * stride, stride
        if padded != width:
            for k in range(some):
                line, room = floats(source + 4 * k * stride, width), floats(padding + 4 * k * padded, width)
                for i in range(width):
                    room[i] = line[i]
            source, apart = padding, padded
        done = 0
        while done < lanes:
            h, most = height(lanes - done, STRIP_ROWS), _ZERO
            for lane in range(done, done + h):
                most = max(most, ends[lane])
            count = min(some, int(most) - j)
            if count > 0:
                for column in range(0, padded, STRIP):
                    a, c = weights + 4 * (j * PANEL + done), sums + 4 * (done * padded + column)
                    strip(h, a, source + 4 * column, apart, count, c, padded)
            done += h
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


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _take_queries(q, by_row, by_head, order, rows, head, group, width, room, out, lanes):
    """The queries of `group` heads, from `head` on, of the rows in this order -> [width, lanes]. room: [lanes, width]"""
    rank, pairs, whole = integers(order, rows), rows * group, width // VECTOR * VECTOR
    for r in range(rows):
        for g in range(group):
            source = floats(q + 4 * (rank[r] * by_row + (head + g) * by_head), width)
            target = floats(room + 4 * (r * group + g) * width, width)
            for i in range(width):
                target[i] = source[i]
    for first in range(0, pairs, VECTOR):
        for i in range(0, whole, VECTOR):
            turn(room + 4 * (first * width + i), width, out + 4 * (i * lanes + first), lanes)
    taken, turned = floats(room, pairs * width), floats(out, width * lanes)
    for i in range(whole, width):
        for pair in range(pairs):
            turned[i * lanes + pair] = taken[pair * width + i]


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _end_split(pairs, maxima, sums, lanes, values, state, merged, padded, sinks, group):
    """Merge the pairs' splits into what they have, or their heads' sinks, if given: `values` is zero then."""
    m, sink, total = floats(maxima, pairs), floats(sinks, group), floats(sums, pairs)
    for pair in range(pairs):
        if sinks:
            _merge(state + 8 * pair, merged + 4 * pair * padded, sink[pair % group], np.float32(1.0), values, padded)
    if sinks:
        return
    for j in range(1, _SUMS):
        more = floats(sums + 4 * j * lanes, pairs)
        for pair in range(pairs):
            total[pair] += more[pair]
    for pair in range(pairs):
        _merge(state + 8 * pair, merged + 4 * pair * padded, m[pair], total[pair], values + 4 * pair * padded, padded)


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _give(order, rows, heads, head, group, width, state, merged, out):
    """The pairs' values by their weights' sums -> out [all rows, heads, width]"""
    rank, padded = integers(order, rows), (width + STRIP - 1) // STRIP * STRIP
    for pair in range(rows * group):
        total, source = floats(state + 8 * pair, 2)[1], floats(merged + 4 * pair * padded, width)
        y = floats(out + 4 * (rank[pair // group] * heads + head + pair % group) * width, width)
        for i in range(width):
            y[i] = source[i] / total + _ZERO  # whether keys are skipped moves a zero's sign


@compiled("boolean(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _sight(order, position, first, lanes, group, slopes, window, start, num, seen, before, slope):
    """What the lanes of a panel, from pair `first` on, see of a block's `num` keys -> whether any lane does not see some of
    those that another sees. seen, before, slope: filled, [PANEL] float32; lanes without a pair see nothing"""
    rank, places = integers(order, (first + lanes - 1) // group + 1), integers(position, 1 << 40)
    end, begin, by, by_head = floats(seen, PANEL), floats(before, PANEL), floats(slope, PANEL), floats(slopes, group)
    uneven = lanes % VECTOR != 0
    for lane in range(PANEL):
        end[lane] = begin[lane] = by[lane] = _ZERO
    for lane in range(lanes):
        place = places[rank[(first + lane) // group]]
        here = max(0, min(num, place + 1 - start))
        hidden = min(here, max(0, place - window + 1 - start)) if window else 0
        end[lane], begin[lane], by[lane] = here, hidden, by_head[(first + lane) % group] if slopes else _ZERO
        uneven = uneven or here != end[0] or hidden > 0
    return uneven


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _exchange(block, lanes, order, first, group, heads, head, seen, start, keys, scores, hidden):
    """Hide edges of a panel's scores, and show them. scores, hidden: as `attend`'s, or 0"""
    rank, end = integers(order, (first + lanes - 1) // group + 1), floats(seen, lanes)
    s = floats(block, KV_BLOCK * PANEL)
    for lane in range(lanes):
        row, own, count = rank[(first + lane) // group], head + (first + lane) % group, int(end[lane])
        at = (row * heads + own) * keys + start
        edges, shown = shorts(hidden + 2 * at, count), floats(scores + 4 * at, count)
        if hidden:
            for j in range(count):
                s[j * PANEL + lane] = _NONE if edges[j] else s[j * PANEL + lane]
        if scores:
            for j in range(count):
                shown[j] = s[j * PANEL + lane]


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
    changed, shared = cap > _ZERO or slopes != 0 or scores != 0 or hidden != 0, np.float32(1.0)
    owner, places = integers(sequence, rows), integers(position, rows)
    room, padded = per_chunk * group, (value_width + STRIP - 1) // STRIP * STRIP
    lanes = (room + VECTOR - 1) // VECTOR * VECTOR + VECTOR
    key_spaces = np.empty((2 * lanes + KV_BLOCK) * key_width + KV_BLOCK * padded + VECTOR, np.float32)
    queries = (key_spaces.ctypes.data + 63) // 64 * 64
    taken, copied = queries + 4 * lanes * key_width, queries + 8 * lanes * key_width
    padding = copied + 4 * KV_BLOCK * key_width
    pair_spaces = np.empty((KV_BLOCK + 4) * PANEL + (1 + _SUMS) * lanes + 2 * room * (1 + padded) + VECTOR, np.float32)
    block = (pair_spaces.ctypes.data + 63) // 64 * 64
    shrinks = block + 4 * KV_BLOCK * PANEL
    seen, before, slope = shrinks + 4 * PANEL, shrinks + 8 * PANEL, shrinks + 12 * PANEL
    m = shrinks + 16 * PANEL
    sums, a = m + 4 * lanes, m + 4 * lanes * (1 + _SUMS)
    merged, state = a + 4 * room * padded, a + 8 * room * padded
    found = np.empty(KV_BLOCK // KEYS, np.int64)
    ends, shrink = floats(seen, PANEL), floats(shrinks, PANEL)
    _fill(queries, 2 * lanes * key_width, _ZERO)  # lanes without a pair are computed, and denormal numbers are slow
    _fill(padding, KV_BLOCK * padded, _ZERO)
    for item in range(index, (rows + per_chunk - 1) // per_chunk * kv_heads, count):
        chunk, kv_head = item // kv_heads, item % kv_heads
        low, high = chunk * per_chunk, min(rows, (chunk + 1) * per_chunk)
        ranks, pairs, head = order + 8 * low, (high - low) * group, kv_head * group
        rank, base = integers(ranks, high - low), 4 * kv_head * kv_head_stride
        last, begin = 0, np.int64(1) << 40
        for r in range(high - low):
            last = max(last, places[rank[r]])
            begin = min(begin, max(0, places[rank[r]] - window + 1) if window else 0)
        _take_queries(q, q_row, q_head, ranks, high - low, head, group, key_width, taken, queries, lanes)
        for pair in range(pairs):
            floats(state + 8 * pair, 2)[0], floats(state + 8 * pair, 2)[1] = _NONE, _ZERO
        _fill(merged, pairs * padded, _ZERO)
        start = begin // KV_BLOCK * KV_BLOCK
        fresh = True
        while start <= last:
            if fresh:
                _fill(m, lanes, _NONE)
                _fill(sums, lanes * _SUMS, _ZERO)
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
                num, one, end = min(KV_BLOCK, deepest + 1 - start), r * group, stop * group
                r = stop
                if num <= 0:
                    continue
                _find_keys(keys + base, own, page_size, start, num, key_width, copied, found.ctypes.data)
                for first in range(one, end, PANEL):
                    some = min(PANEL, end - first)
                    by_head = slopes + 4 * head if slopes else 0
                    uneven = _sight(ranks, position, first, some, group, by_head, window, start, num, seen, before, slope)
                    most = 0
                    for lane in range(some):
                        most = max(most, int(ends[lane]))
                    if most == 0:
                        continue
                    for key in range(0, most, KEYS):
                        place = found[key // KEYS]
                        score(place, key_width, queries + 4 * first, lanes, some, block + 4 * key * PANEL)
                    if changed:
                        _change(block, most, scale, cap, slope, start)
                    wide, whole = (some + VECTOR - 1) // VECTOR * VECTOR, (most + 3) // 4 * 4
                    if uneven or whole > most:
                        _hide(block, wide, whole, seen, before)
                    if scores or hidden:
                        _exchange(block, some, ranks, first, group, heads, head, seen, start, scores_width, scores, hidden)
                    for lane in range(0, wide, VECTOR):
                        weigh(
                            block + 4 * lane, whole, shared if changed else scale, m + 4 * (first + lane),
                            sums + 4 * (first + lane), lanes, _SUMS, shrinks + 4 * lane,
                        )  # fmt: skip
                    for lane in range(some):
                        if shrink[lane] != np.float32(1.0):
                            line = floats(a + 4 * (first + lane) * padded, padded)
                            for i in range(padded):
                                line[i] *= shrink[lane]
                    _add_values(
                        values + base, own, page_size, start, most, key_width, value_width, block, some, seen, padding,
                        a + 4 * first * padded, padded,
                    )  # fmt: skip
            start += KV_BLOCK
            if start % KV_SPLIT == 0 or start > last:
                _end_split(pairs, m, sums, lanes, a, state, merged, padded, 0, group)
                fresh = True
        if sinks:
            _fill(a, padded, _ZERO)
            _end_split(pairs, m, sums, lanes, a, state, merged, padded, sinks + 4 * head, group)
        _give(ranks, high - low, heads, head, group, value_width, state, merged, out)
    key_spaces[0] = pair_spaces[0] = _ZERO  # numba frees an array after its last use, whatever holds its address
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
