"""Portable edits of packed rows on a CPU: which row is edited, and how, is a table of numbers.

So a recorded pass serves any edits at the same sites (`engine/passes/recorded.py`). A row takes its edits one after another,
from its own numbers alone. `PlacedEdit.apply` (`engine/request/placed.py`) is the plain form; the bits are the same.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replaylens.kernels.cpu import require, require_integers, require_rows
from replaylens.kernels.portable import (
    LANES,
    PARTS,
    arguments,
    as_float,
    compiled,
    floats,
    fma,
    inlined,
    integers,
    row_sum,
    share,
    task,
)
from replaylens.kernels.threads import divided

SET, ADD, ZERO, MULTIPLY, PROJECT = range(5)
"""what an edit does"""
KINDS = {"add": ADD, "zero": ZERO, "reweight": MULTIPLY, "project_out": PROJECT}
"""by the operation of a placed edit; others set"""
FIELDS = 9
"""numbers of an edit: what it does, the address of its vector (or of its directions), the bits of its factor, how many
directions, the address of the edited heads' marks or 0, of the direction of its condition or 0, the bits of what the projection
on that must exceed, whether lengths are kept, whether the vector is scaled to the row's lengths"""
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@compiled("float32(intp,intp,intp)", within=True)
def _dot(x, y, count):
    """The product of a row with a column, in the order of `product`: eight chains, added as a tree."""
    v, w, sums = floats(x, count), floats(y, count), np.empty(PARTS, np.float32)
    for part in range(PARTS):
        total = _ZERO
        for i in range(part * count // PARTS, (part + 1) * count // PARTS):
            total = fma(v[i], w[i], total)
        sums[part] = total
    step = 1
    while step < PARTS:
        for part in range(0, PARTS, 2 * step):
            sums[part] += sums[part + step]
        step *= 2
    return sums[0]


@inlined
def _length(x, room, lanes):
    """Of a vector; each square is rounded before it is added."""
    for i in range(len(x)):
        room[i] = x[i] * x[i]
    return np.sqrt(row_sum(room, lanes))


@compiled("void(intp,intp,intp,intp,intp,intp)", within=True)
def _change(edit, row, heads, width, after, squares):
    """after [heads, width] = the row as one edit leaves it, all heads; the row stays. squares: room for a vector."""
    kind, vector, factor, count, _, _, _, keeps, scaled = arguments(edit, 9)
    lanes, room, all_ = np.empty(LANES, np.float32), floats(squares, width), heads * width
    x, y, by = floats(row, all_), floats(after, all_), as_float(np.int32(factor))
    if kind == ZERO:
        for i in range(all_):
            y[i] = _ZERO
    elif kind == PROJECT:
        for i in range(all_):
            y[i] = x[i]
        for direction in range(count):
            d = floats(vector + 4 * direction * all_, all_)
            along = _dot(after, vector + 4 * direction * all_, all_)
            for i in range(all_):
                y[i] = y[i] - along * d[i]
    elif scaled:
        for head in range(heads):
            v, own = floats(vector + 4 * head * width, width), floats(row + 4 * head * width, width)
            z, size = floats(after + 4 * head * width, width), _length(v, room, lanes)
            ratio = _length(own, room, lanes) / (size if size > _ZERO else _ONE)
            for i in range(width):
                z[i] = v[i] * ratio if kind == SET else own[i] + v[i] * ratio * by
    else:
        v = floats(vector, all_)
        if kind == SET:
            for i in range(all_):
                y[i] = v[i]
        elif kind == ADD:
            for i in range(all_):
                y[i] = x[i] + v[i] * by
        else:
            for i in range(all_):
                y[i] = x[i] * v[i]
    for head in range(heads if keeps else 0):
        own, z = floats(row + 4 * head * width, width), floats(after + 4 * head * width, width)
        ratio = _length(own, room, lanes) / _length(z, room, lanes)
        for i in range(width):
            z[i] *= ratio


@task
def _edit(given, index, count):
    """Some rows of x [rows, heads, width] -> out, contiguous. See `edit_rows`."""
    x, x_row, x_head, heads, width, table, site, out, rows = arguments(given, 9)
    first, end = share(index, count, rows)
    spaces = np.empty((heads + 1) * width, np.float32)
    after = np.intp(spaces.ctypes.data)
    here = table + 8 * integers(table, site + 1)[site]
    begins, edits = integers(here, rows + 1), here + 8 * (rows + 1)
    for row in range(first, end):
        for head in range(heads):
            source = floats(x + 4 * (row * x_row + head * x_head), width)
            y = floats(out + 4 * (row * heads + head) * width, width)
            for i in range(width):
                y[i] = source[i]
        own = out + 4 * row * heads * width
        for number in range(begins[row], begins[row + 1]):
            edit = edits + 8 * FIELDS * number
            _, _, _, _, marks, when, above, _, _ = arguments(edit, 9)
            if when and not _dot(own, when, heads * width) > as_float(np.int32(above)):
                continue
            _change(edit, own, heads, width, after, after + 4 * heads * width)
            for head in range(heads):
                if marks and not integers(marks, heads)[head]:
                    continue
                z, y = floats(after + 4 * head * width, width), floats(own + 4 * head * width, width)
                for i in range(width):
                    y[i] = z[i]
    spaces[0] = _ZERO  # numba frees an array after its last use, whatever holds its address
    return 1


def edit_table(sites: Sequence[tuple[Sequence[int], NDArray[np.int64]]], num_rows: int) -> Tensor:
    """The table of a pass: where each site's part begins; then for each site, where each row's edits begin, and the edits.

    sites  of each: the rows of its edits, in the order in which a row takes them, and the edits [edits, FIELDS]
    """
    parts, at = [np.zeros(len(sites), np.int64)], len(sites)
    for number, (rows, edits) in enumerate(sites):
        parts[0][number] = at
        order = np.argsort(rows, kind="stable")
        begins = np.searchsorted(np.asarray(rows)[order], np.arange(num_rows + 1))
        parts += [begins, edits[order].reshape(-1)]
        at += len(begins) + edits.size
    return torch.from_numpy(np.concatenate(parts))


def edit_rows(x: Tensor, table: Tensor, site: int) -> Tensor:
    """x [rows, width] or [rows, heads, width] after the edits that the table has for a site."""
    require_rows(x)
    require_integers(table)
    require(2 <= x.dim() <= 3, "rows of vectors, or of heads", x)
    out, heads, width = torch.empty(x.shape, dtype=torch.float32), x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    strides = x.stride(0), x.stride(1) if x.dim() == 3 else 0
    given = x.data_ptr(), *strides, heads, width, table.data_ptr(), site, out.data_ptr(), x.shape[0]
    divided(_edit, 4.0 * x.numel(), x.shape[0], *given)
    return out
