"""Portable mixtures of experts on a CPU: which experts a row goes to, with what weights, and the products with their weights.

What is chosen is data: kernels read it, so that a recorded pass serves any choice (`engine/passes/recorded.py`). Threads divide
the panels of whatever experts are chosen, an expert with many rows counting as many times as it has tiles of them.
"""

import numpy as np
import torch
from torch import Tensor

from replaylens.kernels.cpu import Panels, require, require_integers, require_rows, vector
from replaylens.kernels.portable import (
    PANEL,
    PARTS,
    TILE,
    arguments,
    as_float,
    exp,
    floats,
    height,
    inlined,
    integers,
    pack_rows,
    share,
    task,
    tile,
)
from replaylens.kernels.threads import bits, divided

_ZERO, _ONE, _NONE = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)

# ---- choice ----------------------------------------------------------------------------------------------------------


@inlined
def _take_highest(values, count, taken):
    """Mark with 1 the `count` highest values of those marked 0; ties go to the lower index, and NaN is higher than any."""
    for _ in range(count):
        best = -1
        for i in range(len(values)):
            if taken[i] == 0:
                x, y = values[i], values[best]
                if best < 0 or x > y or (x != x and y == y):
                    best = i
        taken[best] = 1


@task
def _choose(given, index, threads):
    """Some rows. barred: an expert with a lower score adds nothing to its group"""
    scores, stride, experts, top, groups, kept, best, barred, chosen, rows = arguments(given, 10)
    first, end = share(index, threads, rows)
    size, limit = experts // groups, as_float(np.int32(barred))
    own, worth = np.empty(experts, np.float32), np.empty(groups, np.float32)
    taken, open_groups = np.empty(experts, np.int64), np.empty(groups, np.int64)
    for row in range(first, end):
        score, out = floats(scores + 4 * row * stride, experts), integers(chosen + 8 * row * top, top)
        for i in range(experts):
            own[i], taken[i] = score[i], 0
        for group in range(groups if groups > 1 else 0):
            begin, total = group * size, _ZERO
            for number in range(best):  # from the highest on
                at = -1
                for i in range(begin, begin + size):
                    x, y = own[i], own[at]
                    if taken[i] == 0 and (at < 0 or x > y or (x != x and y == y)):
                        at = i
                taken[at] = 1
                value = _ZERO if own[at] < limit else own[at]
                total = value if number == 0 else total + value
                if number == 0:
                    open_groups[group] = 1 if own[at] < limit else 0
            worth[group] = _NONE if open_groups[group] else total
        if groups > 1:
            for group in range(groups):
                open_groups[group] = 0
            _take_highest(worth, kept, open_groups)
            for i in range(experts):
                taken[i] = 0
                if not open_groups[i // size]:
                    own[i] = _NONE
        _take_highest(own, top, taken)
        number = 0
        for i in range(experts):
            if taken[i]:
                out[number] = i
                number += 1
    return 1


def choose(scores: Tensor, top: int, groups: int = 1, kept: int = 1, best: int = 1, barred: float = -np.inf) -> Tensor:
    """The experts with the highest scores [rows, experts], by index: [rows, top] int64. See `choose` of `model/config.py`."""
    require_rows(scores)
    rows, experts = scores.shape
    require(experts % groups == 0 and top <= experts, f"scores of {top} experts or more", scores)
    out = torch.empty(rows, top, dtype=torch.int64)
    given = scores.data_ptr(), scores.stride(0), experts, top, groups, kept, best, bits(barred), out.data_ptr(), rows
    divided(_choose, 2.0 * rows * experts * (top + best), rows, *given)
    return out


# ---- weights ---------------------------------------------------------------------------------------------------------

KINDS = ("softmax", "sigmoid", "sparsemixer")


@inlined
def _whole(x):
    """A number in [0, 1] in units of 2^-40: sums of these are exact in any order."""
    return np.int64(np.float64(x) * 1099511627776.0)


@inlined
def _single(total):
    return np.float32(np.float64(total) * 9.094947017729282e-13)


@inlined
def _exponents(x, out):
    """exp(x - max(x)) -> their sum"""
    most, total = x[0], np.int64(0)
    for i in range(len(x)):
        most = x[i] if x[i] > most or x[i] != x[i] else most
    for i in range(len(x)):
        out[i] = exp(x[i] - most)
        total += _whole(out[i])
    return _single(total)


@task
def _weigh(given, index, threads):
    """Some rows."""
    logits, stride, experts, chosen, top, kind, normalised, scale, floor, far, out, rows = arguments(given, 12)
    first, end = share(index, threads, rows)
    by, more, limit = as_float(np.int32(scale)), as_float(np.int32(floor)), as_float(np.int32(far))
    some, every, left = np.empty(top, np.float32), np.empty(experts, np.float32), np.empty(experts, np.float32)
    for row in range(first, end):
        x, own = floats(logits + 4 * row * stride, experts), integers(chosen + 8 * row * top, top)
        w = floats(out + 4 * row * top, top)
        if kind == 2:
            for i in range(experts):
                left[i] = x[i]
            better = 1 if x[own[1]] > x[own[0]] else 0
            for number in range(2):
                at = better if number == 0 else 1 - better
                highest = x[own[at]]
                for i in range(experts):
                    size = abs(x[i])
                    size = highest if highest > size else size
                    every[i] = _NONE if (highest - x[i]) / size > limit else left[i]
                total = _exponents(every, every)
                w[at] = every[own[at]] / total
                left[own[at]] = _NONE
            continue
        if kind == 1:
            total = np.int64(0)
            for j in range(top):
                w[j] = _ONE / (_ONE + exp(-x[own[j]]))
                total += _whole(w[j])
            if normalised:
                whole = _single(total) + more
                for j in range(top):
                    w[j] = w[j] / whole
        elif normalised:
            for j in range(top):
                some[j] = x[own[j]]
            whole = _exponents(some, w)
            for j in range(top):
                w[j] = w[j] / whole
        else:
            whole = _exponents(x, every)
            for j in range(top):
                w[j] = every[own[j]] / whole
        if by != _ONE:
            for j in range(top):
                w[j] *= by
    return 1


def weigh(
    logits: Tensor, chosen: Tensor, kind: str, normalised: bool, scale: float, floor: float = 0.0, jitter: float = 0.0
) -> Tensor:
    """The weights of the chosen experts [rows, top], from logits [rows, experts]: [rows, top]. See `weigh` of
    `model/config.py`."""
    require_rows(logits)
    require_integers(chosen)
    (rows, experts), top = logits.shape, chosen.shape[1]
    require(chosen.shape[0] == rows, f"logits of {chosen.shape[0]} rows", logits)
    out = torch.empty(rows, top, dtype=torch.float32)
    divided(
        _weigh, 32.0 * rows * experts, rows, logits.data_ptr(), logits.stride(0), experts, chosen.data_ptr(), top,
        KINDS.index(kind), normalised, bits(scale), bits(floor), bits(2 * jitter), out.data_ptr(), rows,
    )  # fmt: skip
    return out


# ---- products --------------------------------------------------------------------------------------------------------

_TOGETHER = 8
"""tiles of rows that are packed at once. Moves no bit"""


@task
def _product(given, index, threads):
    """Some panels of the chosen experts. Pair i is the i-th of `chosen`; its inputs are row i // per of x."""
    x, ldx, per, chosen, pairs, experts, panels, short, bias, out, inputs, outputs, parts = arguments(given, 13)
    num_panels, own = (outputs + PANEL - 1) // PANEL, integers(chosen, pairs)
    begins, places = np.zeros(experts + 1, np.int64), np.empty(pairs, np.int64)
    for i in range(pairs):
        begins[own[i] + 1] += 1
    units = np.int64(0)
    for expert in range(experts):
        units += (begins[expert + 1] + TILE - 1) // TILE * num_panels
        begins[expert + 1] += begins[expert]
    filled = begins.copy()
    for i in range(pairs):  # by expert, ascending
        places[filled[own[i]]] = i
        filled[own[i]] += 1
    first, end = share(index, threads, units)
    some = _TOGETHER * TILE
    lines, packed = np.empty(TILE * inputs, np.float32), np.empty(some * inputs, np.float32)
    levels, sums = np.empty(3 * TILE * PANEL, np.float32), np.empty(TILE * PANEL, np.float32)
    line, held, found = np.intp(lines.ctypes.data), np.intp(packed.ctypes.data), np.intp(sums.ctypes.data)
    before = np.int64(0)
    for expert in range(experts):
        rows = begins[expert + 1] - begins[expert]
        tiles = (rows + TILE - 1) // TILE
        if not rows:
            continue
        first_panel = max(0, (first - before + tiles - 1) // tiles)
        end_panel = min(num_panels, (end - before + tiles - 1) // tiles)
        before += tiles * num_panels
        for block in range(begins[expert], begins[expert + 1] if first_panel < end_panel else begins[expert], some):
            count, done = min(some, begins[expert + 1] - block), 0
            while done < count:
                h = height(count - done, TILE)
                for i in range(h):
                    source = floats(x + 4 * ldx * (places[block + done + i] // per), inputs)
                    target = floats(line + 4 * i * inputs, inputs)
                    for k in range(inputs):
                        target[k] = source[k]
                pack_rows(line, inputs, h, inputs, held + 4 * done * inputs)
                done += h
            for panel in range(first_panel, end_panel):
                width = min(PANEL, outputs - panel * PANEL)
                b = panels + (expert * num_panels + panel) * inputs * PANEL * (2 if short else 4)
                done = 0
                while done < count:
                    h = height(count - done, TILE)
                    for part in range(parts):
                        tile(
                            part, h, held + 4 * done * inputs, b, short, inputs, parts, found, PANEL,
                            np.intp(levels.ctypes.data),
                        )  # fmt: skip
                    for i in range(h):
                        y, v = (
                            floats(out + 4 * (places[block + done + i] * outputs + panel * PANEL), width),
                            found + 4 * i * PANEL,
                        )
                        z = floats(v, width)
                        for j in range(width):
                            y[j] = z[j]
                        if bias:
                            more = floats(bias + 4 * (expert * outputs + panel * PANEL), width)
                            for j in range(width):
                                y[j] += more[j]
                    done += h
    lines[0] = packed[0] = levels[0] = sums[0] = _ZERO  # numba frees an array after its last use, whatever holds its address
    return 1


def expert_products(x: Tensor, chosen: Tensor, panels: Panels, bias: Tensor | None = None, parts: int = PARTS) -> Tensor:
    """Every row times the weights of its chosen experts [rows, top]: [rows, top, outputs]. See `expert_products` of
    `model/layers.py`.

    x       [rows, inputs], or [rows, top, inputs] with inputs of their own for each expert
    panels  of weights [experts, inputs, outputs]; bias [experts, outputs]
    """
    require_rows(x)
    require_integers(chosen)
    (rows, top), (experts, inputs, outputs) = chosen.shape, panels.shape
    x = x.reshape(-1, x.shape[-1]) if x.dim() == 3 else x
    require(x.shape[1] == inputs and len(x) in (rows, rows * top), f"rows of {inputs} numbers", x)
    bias = vector(bias, experts, outputs)
    out = torch.empty(rows, top, outputs, dtype=torch.float32)
    pieces = min(rows * top, experts) * panels.data.shape[1]
    divided(
        _product, float(rows) * top * inputs * outputs, pieces, x.data_ptr(), x.stride(0), rows * top // max(1, len(x)),
        chosen.data_ptr(), rows * top, experts, panels.data.data_ptr(), panels.data.dtype == torch.bfloat16,
        0 if bias is None else bias.data_ptr(), out.data_ptr(), inputs, outputs, parts,
    )  # fmt: skip
    return out


@task
def _combine(given, index, threads):
    """Some rows. residual: 0 if there is none"""
    outs, weights, top, width, residual, ldr, out, rows = arguments(given, 8)
    first, end = share(index, threads, rows)
    for row in range(first, end):
        y, w = floats(out + 4 * row * width, width), floats(weights + 4 * row * top, top)
        for j in range(top):
            x, by = floats(outs + 4 * (row * top + j) * width, width), w[j]
            if j == 0:
                for i in range(width):
                    y[i] = x[i] * by
            else:
                for i in range(width):
                    y[i] += x[i] * by
        if residual:
            other = floats(residual + 4 * row * ldr, width)
            for i in range(width):
                y[i] = other[i] + y[i]
    return 1


def combine(outs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """The experts' outputs [rows, top, width] times their weights [rows, top], added in order, plus the residual stream."""
    rows, top, width = outs.shape
    for each in (outs, weights, *(() if residual is None else (residual,))):
        require_rows(each)
    require(outs.is_contiguous() and weights.is_contiguous() and weights.shape == (rows, top), "contiguous outputs", outs)
    out = torch.empty(rows, width, dtype=torch.float32)
    divided(
        _combine, 2.0 * rows * top * width, rows, outs.data_ptr(), weights.data_ptr(), top, width,
        *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))), out.data_ptr(), rows,
    )  # fmt: skip
    return out


@task
def _spread(given, index, threads):
    """Some rows: weights by expert, or `back`, the other way."""
    wide, stride, experts, chosen, top, narrow, back, rows = arguments(given, 8)
    first, end = share(index, threads, rows)
    for row in range(first, end):
        all_, own = floats(wide + 4 * row * stride, experts), integers(chosen + 8 * row * top, top)
        some = floats(narrow + 4 * row * top, top)
        if not back:
            for i in range(experts):
                all_[i] = _ZERO
        for j in range(top):
            if back:
                some[j] = all_[own[j]]
            else:
                all_[own[j]] = some[j]
    return 1


def spread(weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """Weights [rows, top] by expert: [rows, experts], 0 for those that are not chosen."""
    require(weights.is_contiguous(), "contiguous weights", weights)
    out = torch.empty(len(weights), experts, dtype=torch.float32)
    given = out.data_ptr(), experts, experts, chosen.data_ptr(), chosen.shape[1], weights.data_ptr(), False, len(weights)
    divided(_spread, float(out.numel()), len(weights), *given)
    return out


def gathered(wide: Tensor, chosen: Tensor) -> Tensor:
    """The numbers [rows, experts] of the chosen experts: [rows, top]"""
    require_rows(wide)
    out = torch.empty(chosen.shape, dtype=torch.float32)
    given = wide.data_ptr(), wide.stride(0), wide.shape[1], chosen.data_ptr(), chosen.shape[1], out.data_ptr(), True, len(wide)
    divided(_spread, float(wide.numel()), len(wide), *given)
    return out
