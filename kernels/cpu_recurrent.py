"""Portable recurrences on a CPU over a paged cache: short convolutions, gated delta nets, Mamba-2.

Per position the cache holds an entry: what a later row of its chunk needs. Of a page that ends with a chunk it holds the state
after it. So a row follows from its own pages, whatever was computed in which pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replaylens.kernels.cpu import require, require_integers, require_rows, vector
from replaylens.kernels.cpu_attention import HostRows
from replaylens.kernels.definition import CHUNK
from replaylens.kernels.portable import arguments, compiled, exp, floats, fma, inlined, integers, share, task
from replaylens.kernels.threads import divided

_ZERO, _ONE, _LARGEST = np.float32(0.0), np.float32(1.0), np.float32(np.finfo(np.float32).max)

# ---- entries ---------------------------------------------------------------------------------------------------------

UPDATES, STATES = 6, 7
"""what kernels tell if an update, or a state or what is read of it, is not finite"""


@task
def _keep(given, index, count):
    """Some rows."""
    x, stride, width, entries, pitch, slots, num_slots, column, told, what, rows = arguments(given, 11)
    first, end = share(index, count, rows)
    places, fine = integers(slots, rows), True
    for row in range(first, end):
        v = floats(x + 4 * row * stride, width)
        for i in range(width):
            fine = fine and abs(v[i]) <= _LARGEST
        if 0 <= places[row] < num_slots:
            y = floats(entries + 4 * (places[row] * pitch + column), width)
            for i in range(width):
                y[i] = v[i]
        else:
            integers(told, 1)[0] = 2
    if not fine:
        integers(told, 1)[0] = what
    return 1


def keep(x: Tensor, entries: Tensor, slots: Tensor, column: int, told: Tensor, what: int) -> None:
    """Mutates entries [slots, width of an entry]: x [rows, width] goes to `slots` [rows], from a column on.

    told  [1] int64: becomes `what` if a number is not finite, 2 if a slot does not exist
    """
    rows, width = x.shape
    for each in (x, entries):
        require_rows(each)
    require_integers(slots)
    require(column + width <= entries.shape[1] and len(slots) == rows, f"{rows} entries of {column + width} numbers", entries)
    divided(
        _keep, float(x.numel()), rows, x.data_ptr(), x.stride(0), width, entries.data_ptr(), entries.stride(0),
        slots.data_ptr(), entries.shape[0], column, told.data_ptr(), what, rows,
    )  # fmt: skip


# ---- short convolutions ----------------------------------------------------------------------------------------------


@task
def _short_conv(given, index, count):
    """Some rows; their inputs, and those before them, are the first columns of the entries."""
    entries, width, channels, weight, taps, bias, sequence, position, table, pages, page_size, out, rows = arguments(given, 13)
    first, end = share(index, count, rows)
    owner, places = integers(sequence, end), integers(position, end)
    w = floats(weight, taps * channels)
    for row in range(first, end):
        y, own = floats(out + 4 * row * channels, channels), integers(table + 8 * owner[row] * pages, pages)
        for i in range(channels):
            y[i] = _ZERO
        for tap in range(max(0, taps - 1 - places[row]), taps):
            at = places[row] - (taps - 1 - tap)
            x = floats(entries + 4 * width * (own[at // page_size] * page_size + at % page_size), channels)
            for i in range(channels):
                y[i] = fma(w[tap * channels + i], x[i], y[i])
        if bias:
            b = floats(bias, channels)
            for i in range(channels):
                y[i] += b[i]
    return 1


def require_pages(entries: Tensor, pages: Tensor, page_size: int) -> None:
    if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) < len(entries) // page_size:
        raise ValueError(f"Expected pages below {len(entries) // page_size}, not {int(pages.min())} to {int(pages.max())}.")


def short_conv(entries: Tensor, weight: Tensor, bias: Tensor | None, rows: HostRows) -> Tensor:
    """The convolution of each row's inputs with weight [taps, channels] over the positions up to its own: [rows, channels].

    entries  [slots, width], of which the first `channels` columns are the inputs, those of the rows included
    Precondition: `require_pages`.
    """
    taps, channels = weight.shape
    require_rows(entries)
    held, bias = vector(weight, taps, channels), vector(bias, channels)
    assert held is not None
    out, num = torch.empty(len(rows.position), channels, dtype=torch.float32), len(rows.position)
    divided(
        _short_conv, float(num) * taps * channels, num, entries.data_ptr(), entries.stride(0), channels, held.data_ptr(), taps,
        0 if bias is None else bias.data_ptr(), rows.sequence.data_ptr(), rows.position.data_ptr(), rows.pages.data_ptr(),
        rows.pages.shape[1], rows.page_size, out.data_ptr(), num,
    )  # fmt: skip
    return out


# ---- recurrences -----------------------------------------------------------------------------------------------------
# One head walks over the rows of a piece. Since the start of the chunk: turned keys [d, CHUNK], updates [CHUNK, width], decays.


@compiled("void(intp,intp,intp)", within=True)
def _turn(k, d, keys):
    """A key as a column of the turned ones."""
    some, out = floats(k, d), floats(keys, (d - 1) * CHUNK + 1)
    for a in range(d):
        out[a * CHUNK] = some[a]


@compiled("void(intp,intp,intp)", within=True)
def _decays(g, count, left):
    """left [count + 1]: of the state before `count` rows, and of each row, what is left at the last of them."""
    decay, out, total = floats(g, count), floats(left, count + 1), _ZERO
    out[count] = total
    for j in range(count - 1, -1, -1):
        total += decay[j]
        out[j] = total
    for j in range(count + 1):
        out[j] = exp(out[j])


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _read(start, keys, updates, left, count, x, d, width, scores, out):
    """out [width] = x [d] times the state: that at the start, then `count` rows since."""
    y, q, s, decay = floats(out, width), floats(x, d), floats(scores, CHUNK), floats(left, count + 1)
    for i in range(width):
        y[i] = _ZERO
    for a in range(d):
        row = floats(start + 4 * a * width, width)
        for i in range(width):
            y[i] = fma(q[a], row[i], y[i])
    for i in range(width):
        y[i] *= decay[0]
    for j in range(CHUNK):
        s[j] = _ZERO
    for a in range(d):
        some = floats(keys + 4 * a * CHUNK, count)
        for j in range(count):
            s[j] = fma(q[a], some[j], s[j])
    for j in range(count):
        weight, row = s[j] * decay[j + 1], floats(updates + 4 * j * width, width)
        for i in range(width):
            y[i] = fma(weight, row[i], y[i])


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _carry(start, keys, updates, left, count, d, width, out):
    """out [d, width] = the state after `count` rows; it may be `start` itself."""
    decay = floats(left, count + 1)
    for a in range(d):
        old, y, some = (
            floats(start + 4 * a * width, width),
            floats(out + 4 * a * width, width),
            floats(keys + 4 * a * CHUNK, count),
        )
        for i in range(width):
            y[i] = old[i] * decay[0]
        for j in range(count):
            weight, row = some[j] * decay[j + 1], floats(updates + 4 * j * width, width)
            for i in range(width):
                y[i] = fma(weight, row[i], y[i])


@inlined
def _finite(x, count):
    v, fine = floats(x, count), True
    for i in range(count):
        fine = fine and abs(v[i]) <= _LARGEST
    return fine


@task
def _recur(given, index, threads):
    """Some work items: one (piece, head) each. See `recur`."""
    (
        q, v, beta, entries, entry, at_key, at_update, at_decay, states, table, kept, pages, page_size, heads, group, d, width,
        pieces, out, told, items,
    ) = arguments(given, 21)  # fmt: skip
    first, end = share(index, threads, items)
    size = d * width
    spaces = np.zeros(CHUNK * (d + width + 2) + 2 * CHUNK + 8 + size + width, np.float32)
    keys = np.intp(spaces.ctypes.data)
    updates = keys + 4 * CHUNK * d
    g, scores = updates + 4 * CHUNK * width, updates + 4 * CHUNK * (width + 1)
    left, nothing = scores + 4 * CHUNK, scores + 4 * (2 * CHUNK + 8)
    read = nothing + 4 * size
    decays, line, fine, known = floats(g, CHUNK), floats(read, width), True, True
    for item in range(first, end):
        head, piece = item % heads, integers(pieces + 8 * 7 * (item // heads), 7)
        own, ends = integers(table + 8 * piece[0] * pages, pages), integers(kept + 8 * piece[0] * pages, pages)
        row, start, since, count = piece[1], piece[2], piece[4], 0
        state = piece[5] + 4 * head * size if piece[5] else nothing
        if since and not piece[5]:
            state = states + 4 * size * (ends[(since - 1) // page_size] * heads + head)
        for at in range(since, start + piece[3]):
            address = entries + 4 * entry * (own[at // page_size] * page_size + at % page_size)
            k, u = address + 4 * (at_key + head // group * d), floats(address + 4 * (at_update + head * width), width)
            _turn(k, d, keys + 4 * count)
            decays[count] = floats(address + 4 * (at_decay + head), 1)[0]
            count += 1
            if at >= start:
                value, strength = floats(v + 4 * (row * heads + head) * width, width), _ONE
                _decays(g, count, left)
                if beta:
                    strength = floats(beta + 4 * (row * heads + head), 1)[0]
                    _read(state, keys, updates, left, count - 1, k, d, width, scores, read)
                for i in range(width):
                    u[i] = strength * (value[i] - line[i]) if beta else value[i]
                    fine = fine and abs(u[i]) <= _LARGEST
            target = floats(updates + 4 * (count - 1) * width, width)
            for i in range(width):
                target[i] = u[i]
            if at < start:
                continue
            x, y = q + 4 * (row * (heads // group) + head // group) * d, out + 4 * (row * heads + head) * width
            _read(state, keys, updates, left, count, x, d, width, scores, y)
            known = known and _finite(y, width)
            row += 1
            if (at + 1) % CHUNK == 0:
                after = states + 4 * size * (ends[at // page_size] * heads + head)
                _carry(state, keys, updates, left, count, d, width, after)
                known = known and _finite(after, size)  # that no row has read a part of it yet does not make it finite
                state, count = after, 0
        if piece[6]:
            _decays(g, count, left)
            _carry(state, keys, updates, left, count, d, width, piece[6] + 4 * head * size)
    if not (fine and known):
        integers(told, 1)[0] = STATES if fine else UPDATES
    spaces[0] = _ZERO  # numba frees an array after its last use, whatever holds its address
    return 1


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive rows of one sequence, walked over from a known state."""

    sequence: int
    row: int
    """packed; its first"""
    start: int
    """position of that row"""
    count: int
    since: int
    """the position after the state that it begins with; between it and `start` no chunk ends, unless there are no rows"""
    initial: Tensor | None = None
    """that state [heads, d, width]; None: that of the page which ends there, or zeros at position 0"""
    final: Tensor | None = None
    """is filled with the state after the last row"""


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """One layer's part of the cache."""

    entries: Tensor
    """[slots, width of an entry]: the inputs of the convolution, then keys, updates and log decays"""
    states: Tensor
    """[pages, heads, d, width]"""
    at: tuple[int, int, int]
    """columns at which keys, updates and log decays begin"""
    key_heads: int


def recur(
    q: Tensor,
    v: Tensor,
    beta: Tensor | None,
    memory: LayerMemory,
    pieces: Sequence[Piece],
    pages: Tensor,
    ends: Tensor,
    page_size: int,
) -> Tensor | None:
    """Mutates the memory: the updates of all rows of the pieces, and the states of chunks that end with one of them.

    Returns [rows, heads, width], what rows of the pieces read with q [rows, key heads, d]; None if an update is not finite.
    v [rows, heads, width]; beta [rows, heads]: without it, an update is v itself. Keys and log decays are in the memory.
    pages, ends [sequences, pages]: of each page of a sequence, where its entries and the state after it are
    """
    require_pages(memory.entries, pages, page_size)
    require_pages(memory.states, ends, 1)
    address = lambda x: 0 if x is None else x.data_ptr()  # noqa: E731
    listed = [(p.sequence, p.row, p.start, p.count, p.since, address(p.initial), address(p.final)) for p in pieces]
    told, rows = torch.zeros(1, dtype=torch.int64), sum(max(1, piece.count) for piece in pieces)
    table = torch.tensor(listed, dtype=torch.int64)
    out = recur_table(q, v, beta, memory, table, rows, pages, ends, page_size, told)
    return None if int(told) == UPDATES else out


def recur_table(
    q: Tensor,
    v: Tensor,
    beta: Tensor | None,
    memory: LayerMemory,
    pieces: Tensor,
    rows: int,
    pages: Tensor,
    ends: Tensor,
    page_size: int,
    told: Tensor,
) -> Tensor:
    """`recur` of pieces [n, 7], as numbers: the fields of `Piece`, addresses or 0 for tensors. Precondition: `require_pages`.

    rows  of all pieces, for the division of work
    told  [1] int64: becomes `UPDATES` or `STATES`
    """
    heads, d, width = memory.states.shape[1:]
    for each in (pages, ends, pieces):
        require_integers(each)
    require(ends.shape == pages.shape, f"states of {tuple(pages.shape)} pages", ends)
    for x, shape in ((q, (memory.key_heads, d)), (v, (heads, width)), *(() if beta is None else ((beta, (heads,)),))):
        require(x.dtype == torch.float32 and x.is_contiguous() and x.shape[1:] == shape, f"contiguous rows of {shape}", x)
    require(memory.entries.is_contiguous() and memory.states.is_contiguous(), "a contiguous memory", memory.states)
    out, items = torch.empty(v.shape, dtype=torch.float32), len(pieces) * heads
    divided(
        _recur, 2.0 * rows * heads * (d + CHUNK) * width, items, q.data_ptr(), v.data_ptr(),
        0 if beta is None else beta.data_ptr(), memory.entries.data_ptr(), memory.entries.shape[1], *memory.at,
        memory.states.data_ptr(), pages.data_ptr(), ends.data_ptr(), pages.shape[1], page_size, heads,
        heads // memory.key_heads, d, width, pieces.data_ptr(), out.data_ptr(), told.data_ptr(), items,
    )  # fmt: skip
    return out


# ---- backward --------------------------------------------------------------------------------------------------------
# One head walks back over a whole path. A state lies by columns of values here, [width, d]: each is independent of the others.

_LANES = 8
"""chains of a sum over a column, added by halves"""


@inlined
def _dot(x, y, lanes):
    for i in range(_LANES):
        lanes[i] = _ZERO
    for first in range(0, len(x), _LANES):
        for i in range(min(_LANES, len(x) - first)):
            lanes[i] = fma(x[first + i], y[first + i], lanes[i])
    half = _LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@compiled("void(intp,intp,intp,float32,float32,intp,intp,intp,intp,intp,intp,intp)", within=True)
def _onward(before, k, v, left, strength, delta, d, width, missing, update, after, lanes):
    """The state after a row, and on the way what the state lacks of v and the row's update: [width] each."""
    keys, given, some = floats(k, d), floats(v, width), floats(lanes, _LANES)
    r, u = floats(missing, width), floats(update, width)
    for i in range(width):
        old, new = floats(before + 4 * i * d, d), floats(after + 4 * i * d, d)
        r[i] = given[i] - left * _dot(old, keys, some) if delta else given[i]
        u[i] = strength * r[i]
        for a in range(d):
            new[a] = fma(keys[a], u[i], left * old[a])


@compiled(
    "void(intp,intp,intp,intp,intp,intp,intp,intp,float32,float32,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)",
    within=True,
)
def _backward(before, after, flow, q, k, g, missing, update, left, strength, delta, own, d, width, dq, dk, dv, db, dg, lanes):
    """Mutates flow, the gradient of the state after a row: that of the state before it, or zeros if `own`.

    y = S' q, S' = left S + u k, u = strength (v - left S k); g is the gradient of y. Of a Mamba-2, u = v.
    """
    x, keys, up, r, u = floats(q, d), floats(k, d), floats(g, width), floats(missing, width), floats(update, width)
    by_q, by_k, by_v, some = floats(dq, d), floats(dk, d), floats(dv, width), floats(lanes, _LANES)
    by_strength, by_decay = _ZERO, _ZERO
    for a in range(d):
        by_q[a], by_k[a] = _ZERO, _ZERO
    for i in range(width):
        old, new, f = floats(before + 4 * i * d, d), floats(after + 4 * i * d, d), floats(flow + 4 * i * d, d)
        for a in range(d):
            f[a] = fma(x[a], up[i], f[a])
        by_update = _dot(f, keys, some)
        by_strength = fma(by_update, r[i], by_strength)
        by_v[i] = strength * by_update
        back = left * by_v[i] if delta else _ZERO
        for a in range(d):
            by_q[a] = fma(new[a], up[i], by_q[a])
            by_k[a] = fma(f[a], u[i], by_k[a])
        if delta:
            for a in range(d):
                by_k[a] = fma(-old[a], back, by_k[a])
                f[a] = fma(-keys[a], by_v[i], f[a])
        by_decay += _dot(f, old, some)
        for a in range(d):
            f[a] = _ZERO if own else left * f[a]
    floats(db, 1)[0], floats(dg, 1)[0] = by_strength, left * by_decay


@task
def _recur_back(given, index, threads):
    """Some heads. See `recur_back`. States are kept at the ends of chunks, and computed again within one."""
    q, k, v, beta, decay, g, dq, dk, dv, db, dg, rows, heads, group, d, width, own = arguments(given, 17)
    first, end = share(index, threads, heads)
    size, chunks, delta = d * width, (rows + CHUNK - 1) // CHUNK, 1 if beta else 0
    spaces = np.zeros(size * (chunks + CHUNK + 3) + 2 * CHUNK * width + _LANES, np.float32)
    ends = np.intp(spaces.ctypes.data)
    states, flow = ends + 4 * size * (chunks + 1), ends + 4 * size * (chunks + CHUNK + 2)
    missing = flow + 4 * size
    update, lanes = missing + 4 * CHUNK * width, missing + 4 * 2 * CHUNK * width
    for head in range(first, end):
        key = 4 * (head // group) * d
        pitch, own_key, own_value = 4 * (heads // group) * d, 4 * head * d, 4 * head * width
        nothing, grown = floats(ends, size), floats(flow, size)
        for i in range(size):
            nothing[i] = grown[i] = _ZERO
        for lap in range(2 * chunks):  # onward over all chunks, then back
            chunk = lap if lap < chunks else 2 * chunks - 1 - lap
            begin, count = chunk * CHUNK, min(CHUNK, rows - chunk * CHUNK)
            old, new = floats(ends + 4 * size * chunk, size), floats(states, size)
            for i in range(size):
                new[i] = old[i]
            for j in range(count):
                row = begin + j
                number, strength = row * heads + head, _ONE
                if beta:
                    strength = floats(beta + 4 * number, 1)[0]
                _onward(
                    states + 4 * size * j, k + row * pitch + key, v + row * 4 * heads * width + own_value,
                    exp(floats(decay + 4 * number, 1)[0]), strength, delta, d, width,
                    missing + 4 * j * width, update + 4 * j * width, states + 4 * size * (j + 1), lanes,
                )  # fmt: skip
            if lap < chunks:
                old, new = floats(states + 4 * size * count, size), floats(ends + 4 * size * (chunk + 1), size)
                for i in range(size):
                    new[i] = old[i]
                continue
            for j in range(count - 1, -1, -1):
                row = begin + j
                number, strength = row * heads + head, _ONE
                if beta:
                    strength = floats(beta + 4 * number, 1)[0]
                wide, narrow = row * 4 * heads * width + own_value, row * 4 * heads * d + own_key
                _backward(
                    states + 4 * size * j, states + 4 * size * (j + 1), flow, q + row * pitch + key, k + row * pitch + key,
                    g + wide, missing + 4 * j * width, update + 4 * j * width,
                    exp(floats(decay + 4 * number, 1)[0]), strength, delta, own, d, width,
                    dq + narrow, dk + narrow, dv + wide, db + 4 * number, dg + 4 * number, lanes,
                )  # fmt: skip
    spaces[0] = _ZERO  # see `_recur`
    return 1


@dataclass(frozen=True, eq=False)
class RecurrenceGradients:
    """Gradients of what `recur_back` was given; those of queries and keys are by head, not yet added up."""

    q: Tensor
    """[rows, heads, d]"""
    k: Tensor
    """[rows, heads, d]"""
    v: Tensor
    """[rows, heads, width]"""
    beta: Tensor
    """[rows, heads]; without meaning if there are none"""
    decay: Tensor
    """[rows, heads]"""


def recur_back(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor, g: Tensor, own: bool = False
) -> RecurrenceGradients:
    """The derivative of `recur` over a whole path, from position 0: g [rows, heads, width] is the gradient of what it returns.

    q, k [rows, key heads, d]; v [rows, heads, width]; beta, decay [rows, heads], the latter as logarithms
    own  a row gets what it does to itself alone, so that no row's gradient depends on another row's
    """
    q, k, v, decay, g = (x.float().contiguous() for x in (q, k, v, decay, g))
    beta = None if beta is None else beta.float().contiguous()
    (rows, heads, width), (key_heads, d) = v.shape, k.shape[1:]
    by_key = q.new_empty(2, rows, heads, d)
    found = RecurrenceGradients(by_key[0], by_key[1], torch.empty_like(v), torch.empty_like(decay), torch.empty_like(decay))
    divided(
        _recur_back, 10.0 * rows * heads * d * width, heads, q.data_ptr(), k.data_ptr(), v.data_ptr(),
        0 if beta is None else beta.data_ptr(), decay.data_ptr(), g.data_ptr(), found.q.data_ptr(), found.k.data_ptr(),
        found.v.data_ptr(), found.beta.data_ptr(), found.decay.data_ptr(), rows, heads, heads // key_heads, d, width, int(own),
    )  # fmt: skip
    return found
