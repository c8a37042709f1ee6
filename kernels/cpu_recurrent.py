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
from replaylens.kernels.portable import compiled, exp, floats, fma, integers
from replaylens.kernels.threads import divided, share

_ZERO, _ONE, _LARGEST = np.float32(0.0), np.float32(1.0), np.float32(np.finfo(np.float32).max)

# ---- short convolutions ----------------------------------------------------------------------------------------------


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)")
def _short_conv(entries, width, channels, weight, taps, bias, sequence, position, table, pages, page_size, out, first, end):
    """Rows [first, end); their inputs, and those before them, are the first columns of the entries."""
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


def _require_pages(entries: Tensor, pages: Tensor, page_size: int) -> None:
    if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) < len(entries) // page_size:
        raise ValueError(f"Expected pages below {len(entries) // page_size}, not {int(pages.min())} to {int(pages.max())}.")


def short_conv(entries: Tensor, weight: Tensor, bias: Tensor | None, rows: HostRows) -> Tensor:
    """The convolution of each row's inputs with weight [taps, channels] over the positions up to its own: [rows, channels].

    entries  [slots, width], of which the first `channels` columns are the inputs, those of the rows included
    """
    taps, channels = weight.shape
    require_rows(entries)
    _require_pages(entries, rows.pages, rows.page_size)
    held, bias = vector(weight, taps, channels), vector(bias, channels)
    assert held is not None
    out, num = torch.empty(len(rows.position), channels, dtype=torch.float32), len(rows.position)
    fixed = (
        entries.data_ptr(), entries.stride(0), channels, held.data_ptr(), taps, 0 if bias is None else bias.data_ptr(),
        rows.sequence.data_ptr(), rows.position.data_ptr(), rows.pages.data_ptr(), rows.pages.shape[1], rows.page_size,
        out.data_ptr(),
    )  # fmt: skip
    divided(lambda i, n: _short_conv(*fixed, *share(i, n, num)), float(num) * taps * channels, num)
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


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)")
def _recur(
    q, v, beta, entries, entry, at_key, at_update, at_decay, states, table, kept, pages, page_size, heads, group, d, width,
    pieces, out, bad, first, end,
):  # fmt: skip
    """Work items [first, end): one (piece, head) each. See `recur`."""
    size = d * width
    spaces = np.zeros(CHUNK * (d + width + 2) + 2 * CHUNK + 8 + size + width, np.float32)
    keys = np.intp(spaces.ctypes.data)
    updates = keys + 4 * CHUNK * d
    g, scores = updates + 4 * CHUNK * width, updates + 4 * CHUNK * (width + 1)
    left, nothing = scores + 4 * CHUNK, scores + 4 * (2 * CHUNK + 8)
    read = nothing + 4 * size
    decays, line, fine = floats(g, CHUNK), floats(read, width), True
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
                given, strength = floats(v + 4 * (row * heads + head) * width, width), _ONE
                _decays(g, count, left)
                if beta:
                    strength = floats(beta + 4 * (row * heads + head), 1)[0]
                    _read(state, keys, updates, left, count - 1, k, d, width, scores, read)
                for i in range(width):
                    u[i] = strength * (given[i] - line[i]) if beta else given[i]
                    fine = fine and abs(u[i]) <= _LARGEST
            target = floats(updates + 4 * (count - 1) * width, width)
            for i in range(width):
                target[i] = u[i]
            if at < start:
                continue
            x, y = q + 4 * (row * (heads // group) + head // group) * d, out + 4 * (row * heads + head) * width
            _read(state, keys, updates, left, count, x, d, width, scores, y)
            row += 1
            if (at + 1) % CHUNK == 0:
                after = states + 4 * size * (ends[at // page_size] * heads + head)
                _carry(state, keys, updates, left, count, d, width, after)
                state, count = after, 0
        if piece[6]:
            _decays(g, count, left)
            _carry(state, keys, updates, left, count, d, width, piece[6] + 4 * head * size)
    if not fine:
        integers(bad, 1)[0] = 1
    spaces[0] = _ZERO  # numba frees an array after its last use, whatever holds its address


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
    heads, d, width = memory.states.shape[1:]
    require_integers(pages)
    require_integers(ends)
    require(ends.shape == pages.shape, f"states of {tuple(pages.shape)} pages", ends)
    _require_pages(memory.entries, pages, page_size)
    _require_pages(memory.states, ends, 1)
    for x, shape in ((q, (memory.key_heads, d)), (v, (heads, width)), *(() if beta is None else ((beta, (heads,)),))):
        require(x.dtype == torch.float32 and x.is_contiguous() and x.shape[1:] == shape, f"contiguous rows of {shape}", x)
    require(memory.entries.is_contiguous() and memory.states.is_contiguous(), "a contiguous memory", memory.states)
    address = lambda x: 0 if x is None else x.data_ptr()  # noqa: E731
    listed = [(p.sequence, p.row, p.start, p.count, p.since, address(p.initial), address(p.final)) for p in pieces]
    table, bad, out = np.array(listed, np.int64), np.zeros(1, np.int64), torch.empty(v.shape, dtype=torch.float32)
    fixed = (
        q.data_ptr(), v.data_ptr(), address(beta), memory.entries.data_ptr(), memory.entries.shape[1], *memory.at,
        memory.states.data_ptr(), pages.data_ptr(), ends.data_ptr(), pages.shape[1], page_size, heads,
        heads // memory.key_heads, d, width, table.ctypes.data, out.data_ptr(), bad.ctypes.data,
    )  # fmt: skip
    items, rows = len(pieces) * heads, sum(max(1, piece.count) for piece in pieces)
    divided(lambda i, n: _recur(*fixed, *share(i, n, items)), 2.0 * rows * heads * (d + CHUNK) * width, items)
    return None if bad[0] else out
