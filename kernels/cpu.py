"""Portable arithmetic on tensors of a CPU: products, norms, activations, rotations, attention, log-probabilities, noise.

Every function gives a row the same bits in any company, on any number of threads and on any machine; what it computes is
written in `kernels/definition.py`. Threads divide outputs. Tensors are float32 with contiguous last dimension.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylens.kernels.portable import (
    LANES,
    PANEL,
    PARTS,
    TILE,
    compiled,
    erf,
    exp,
    exp64,
    floats,
    fma,
    half_tile,
    height,
    integers,
    log,
    log64,
    pack_rows,
    row_sum,
    shorts,
    square_sum,
    tanh,
    tile,
    words,
)
from replaylens.kernels.threads import divided, share

# ---- products --------------------------------------------------------------------------------------------------------

_BLOCK = 64
"""rows whose tiles stay in the cache together. Moves no bit"""


@compiled("boolean(intp,intp,intp,intp,intp)")
def _is_short_rows(weight, by_row, by_column, rows, columns):
    for row in range(rows):
        line = words(weight + 4 * row * by_row, (columns - 1) * by_column + 1)
        rest = np.uint32(0)
        for column in range(columns):
            rest |= line[column * by_column]
        if rest & np.uint32(0xFFFF):
            return False
    return True


@compiled("boolean(intp,intp,intp,intp,intp)")
def _is_short(weight, by_input, by_output, inputs, outputs):
    """Whether every weight is a bfloat16: the lower 16 bits are zero."""
    if by_output > by_input:
        return _is_short_rows(weight, by_output, by_input, outputs, inputs)
    return _is_short_rows(weight, by_input, by_output, inputs, outputs)


def _require(fits: bool, what: str, x: Tensor) -> None:
    """Kernels read addresses: whatever does not fit is refused here."""
    if not fits:
        raise ValueError(f"Expected {what} in float32 on the CPU, not {x.dtype} of shape {tuple(x.shape)} on {x.device}.")


def _vector(x: Tensor | None, *shape: int) -> Tensor | None:
    """A bias or the weights of a norm as kernels read them: contiguous float32 of this shape."""
    if x is None:
        return None
    _require(x.dtype == torch.float32 and tuple(x.shape) == shape and not x.is_cuda, f"{list(shape)} numbers", x)
    return x.contiguous()


def _require_rows(x: Tensor) -> None:
    """float32 on the CPU, with numbers of a row next to each other."""
    fits = x.dtype == torch.float32 and not x.is_cuda and (x.numel() == 0 or x.shape[-1] == 1 or x.stride(-1) == 1)
    _require(fits, "rows with a contiguous last dimension", x)


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight [inputs, outputs] as panels of a few columns, in which products read it from first to last."""

    data: Tensor
    """[panels, inputs, PANEL], float32; bfloat16 if every weight is one, which halves what is read and moves no bit"""
    inputs: int
    outputs: int

    @classmethod
    def of(cls, weight: Tensor) -> "Panels":
        """Any strides; float32."""
        _require(weight.dtype == torch.float32 and weight.dim() == 2 and not weight.is_cuda, "a weight", weight)
        inputs, outputs = weight.shape
        count = -(-outputs // PANEL)
        short = bool(_is_short(weight.data_ptr(), *weight.stride(), inputs, outputs))
        data = torch.empty(count, inputs, PANEL, dtype=torch.bfloat16 if short else torch.float32)
        fixed = (weight.data_ptr(), *weight.stride(), data.data_ptr(), short, inputs, outputs)
        divided(lambda i, n: _pack(*fixed, *share(i, n, count)), 4.0 * inputs * outputs, count)
        return cls(data, inputs, outputs)

    def weight(self) -> Tensor:
        """The weight again: [inputs, outputs] float32"""
        return self.data.permute(1, 0, 2).reshape(self.inputs, -1)[:, : self.outputs].float()


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp)")
def _pack(weight, by_input, by_output, target, short, inputs, outputs, first, end):
    """Panels [first, end) of a weight."""
    for panel in range(first, end):
        width = min(PANEL, outputs - panel * PANEL)
        at = panel * inputs * PANEL
        few, many = shorts(target + 2 * at, inputs * PANEL), words(target + 4 * at, inputs * PANEL)
        for k in range(inputs):
            source = words(weight + 4 * (k * by_input + panel * PANEL * by_output), (width - 1) * by_output + 1)
            for j in range(PANEL):
                bits = source[j * by_output] if j < width else np.uint32(0)
                if short:
                    few[k * PANEL + j] = np.uint16(bits >> np.uint32(16))
                else:
                    many[k * PANEL + j] = bits


@compiled("void(intp,intp,intp)")
def _widen(source, target, count):
    """bfloat16 to float32."""
    few, many = shorts(source, count), words(target, count)
    for i in range(count):
        many[i] = np.uint32(few[i]) << np.uint32(16)


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)")
def _product(x, ldx, panels, short, out, ldo, bias, residual, ldr, rows, inputs, outputs, parts, first_panel, end_panel):
    """The columns of some panels. bias, residual: 0 if there is none"""
    xs, ys = floats(x, (rows - 1) * ldx + inputs), floats(out, (rows - 1) * ldo + outputs)
    bs, rs = floats(bias, outputs), floats(residual, (rows - 1) * ldr + outputs)
    packed = np.empty(_BLOCK * inputs, np.float32)
    levels = np.empty(_BLOCK * 4 * PANEL, np.float32)
    wide = np.empty((inputs // parts + 1) * PANEL, np.float32)
    size = 2 if short else 4
    widen = short and rows > TILE
    for block in range(0, rows, _BLOCK):
        count = min(_BLOCK, rows - block)
        done = 0
        while done < count:
            h = height(count - done)
            pack_rows(xs, ldx, block + done, h, 0, inputs, packed[done * inputs :])
            done += h
        for panel in range(first_panel, end_panel):
            for part in range(parts):
                begin, end = part * inputs // parts, (part + 1) * inputs // parts
                depth = 0
                while (part >> depth) & 1:
                    depth += 1
                b = panels + (panel * inputs + begin) * PANEL * size
                if widen:
                    _widen(b, wide.ctypes.data, (end - begin) * PANEL)
                    b = wide.ctypes.data
                done = 0
                while done < count:
                    h = height(count - done)
                    a = packed.ctypes.data + (done * inputs + begin * h) * 4
                    level = levels.ctypes.data + done * 4 * PANEL * 4
                    target = level + (3 if part == parts - 1 else depth) * h * PANEL * 4
                    if short and not widen:
                        half_tile(h, a, b, PANEL, end - begin, target, PANEL, 0, level, depth)
                    else:
                        tile(h, a, b, PANEL, end - begin, target, PANEL, 0, level, depth)
                    done += h
            column = panel * PANEL
            width = min(PANEL, outputs - column)
            done = 0
            while done < count:
                h = height(count - done)
                for i in range(h):
                    at, source = (block + done + i) * ldo + column, (done * 4 + 3 * h + i) * PANEL
                    for j in range(width):
                        ys[at + j] = levels[source + j]
                    if bias:
                        for j in range(width):
                            ys[at + j] += bs[column + j]
                    if residual:
                        other = (block + done + i) * ldr + column
                        for j in range(width):
                            ys[at + j] = rs[other + j] + ys[at + j]
                done += h


def product(
    x: Tensor, panels: Panels, bias: Tensor | None = None, residual: Tensor | None = None, parts: int = PARTS
) -> Tensor:
    """x [rows, inputs] times a weight [inputs, outputs], plus bias [outputs], plus residual [rows, outputs].

    parts  8, which defines the bits; 1: one chain, a little faster and less exact, for drafts
    """
    rows, outputs = len(x), panels.outputs
    _require(x.shape[1:] == (panels.inputs,), f"rows of {panels.inputs} numbers", x)
    _require_rows(x)
    bias = _vector(bias, outputs)
    if residual is not None:
        _require(residual.shape == (rows, outputs), "the rows of a residual stream", residual)
        _require_rows(residual)
    out = torch.empty(rows, outputs, dtype=torch.float32)
    if not rows:
        return out
    count = len(panels.data)
    fixed = (x.data_ptr(), x.stride(0), panels.data.data_ptr(), panels.data.dtype == torch.bfloat16, out.data_ptr(), outputs)
    more = (
        0 if bias is None else bias.data_ptr(),
        *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))),
    )
    work = lambda i, n: _product(*fixed, *more, rows, panels.inputs, outputs, parts, *share(i, n, count))  # noqa: E731
    divided(work, float(rows) * panels.inputs * outputs, count)
    return out


# ---- rows ------------------------------------------------------------------------------------------------------------
# Functions of single rows and numbers.


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,float32,intp,intp,intp)")
def _norm(x, outer, inner_stride, inner, width, weight, weight_stride, bias, layer, out, eps, scale, first, end):
    """Rows [first, end) of inner vectors; weight, bias, scale: 0 if there is none."""
    lanes, one = np.empty(LANES, np.float32), np.float32(1.0)
    for row in range(first, end):
        v = floats(x + 4 * (row // inner * outer + row % inner * inner_stride), width)
        y = floats(out + 4 * row * width, width)
        if layer:
            mean = row_sum(v, lanes) / np.float32(width)
            for i in range(width):
                y[i] = v[i] - mean
            root = np.sqrt(square_sum(y, lanes) / np.float32(width) + eps)
        else:
            root = np.sqrt(square_sum(v, lanes) / np.float32(width) + eps)
            for i in range(width):
                y[i] = v[i]
        if scale:
            floats(scale + 4 * row, 1)[0] = root
        turn = one / root
        for i in range(width):
            y[i] *= turn
        if weight:
            at = row % inner * weight_stride
            w, b = floats(weight + 4 * at, width), floats(bias + 4 * at, width)
            if bias:
                for i in range(width):
                    y[i] = fma(y[i], w[i], b[i])
            else:
                for i in range(width):
                    y[i] *= w[i]


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, scale: Tensor | None = None) -> Tensor:
    """RMSNorm ("rms") or LayerNorm ("layer") over the last dimension of x [rows, width] or [rows, heads, width].

    weight, bias  [width], or [heads, width]: each head has its own
    scale         if given, what the norm divides by: [..., 1]
    """
    _require_rows(x)
    out = torch.empty(x.shape, dtype=torch.float32)
    inner, width = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    by_head = weight is not None and weight.dim() == 2
    weight, bias = (_vector(each, *((inner, width) if by_head else (width,))) for each in (weight, bias))
    stride = width if by_head else 0
    addresses = [0 if each is None else each.data_ptr() for each in (weight, bias, scale)]
    rows = x.shape[0] * inner
    fixed = (x.data_ptr(), x.stride(0), x.stride(1) if x.dim() == 3 else 0, inner, width, addresses[0], stride, addresses[1])
    work = lambda i, n: _norm(*fixed, kind == "layer", out.data_ptr(), eps, addresses[2], *share(i, n, rows))  # noqa: E731
    divided(work, 4.0 * rows * width, rows)
    return out


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
_ALPHA, _LIMIT = np.float32(1.702), np.float32(7.0)
_SQRT_HALF, _CUBE, _WIDE = np.float32(0.5**0.5), np.float32(0.044715), np.float32(-2 * (2 / np.pi) ** 0.5)


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp)")
def _activate(x, stride, width, kind, gated, out, first, end):
    zero, half, one = np.float32(0.0), np.float32(0.5), np.float32(1.0)
    for row in range(first, end):
        v, up = floats(x + 4 * row * stride, width), floats(x + 4 * (row * stride + width), width)
        y = floats(out + 4 * row * width, width)
        if kind == 0:
            for i in range(width):
                y[i] = v[i] / (one + exp(-v[i]))
        elif kind == 1:
            for i in range(width):
                h = half * v[i]
                y[i] = fma(h, erf(v[i] * _SQRT_HALF), h)
        elif kind == 2:
            for i in range(width):
                u = fma(v[i] * v[i] * _CUBE, v[i], v[i])
                y[i] = v[i] / (one + exp(u * _WIDE))
        elif kind == 3:
            for i in range(width):
                y[i] = zero if v[i] < zero else v[i]
        elif kind == 4:
            for i in range(width):
                above = zero if v[i] < zero else v[i]
                y[i] = above * above
        else:
            for i in range(width):
                gate = _LIMIT if v[i] > _LIMIT else v[i]
                u = _LIMIT if up[i] > _LIMIT else up[i]
                u = -_LIMIT if u < -_LIMIT else u
                y[i] = (u + one) * (gate / (one + exp(gate * -_ALPHA)))
        if gated and kind != 5:
            for i in range(width):
                y[i] *= up[i]


def activate(x: Tensor, kind: str, gated: bool) -> Tensor:
    """f(x) of x [..., width]; gated: x [rows, gate | up] -> f(gate) * up."""
    _require_rows(x)
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    rows, width = len(flat), flat.shape[1] // (2 if gated else 1)
    out = torch.empty(rows, width, dtype=torch.float32)
    fixed = (flat.data_ptr(), flat.stride(0), width, ACTIVATIONS.index(kind), gated, out.data_ptr())
    divided(lambda i, n: _activate(*fixed, *share(i, n, rows)), 16.0 * rows * width, rows)
    return out.view(*x.shape[:-1], width)


_FUNCTIONS = ("exp", "tanh", "sigmoid", "log", "erf")


@compiled("void(intp,intp,intp,intp,intp)")
def _apply(kind, x, out, first, end):
    v, y, one = floats(x, end), floats(out, end), np.float32(1.0)
    if kind == 0:
        for i in range(first, end):
            y[i] = exp(v[i])
    elif kind == 1:
        for i in range(first, end):
            y[i] = tanh(v[i])
    elif kind == 2:
        for i in range(first, end):
            y[i] = one / (one + exp(-v[i]))
    elif kind == 3:
        for i in range(first, end):
            y[i] = log(v[i])
    else:
        for i in range(first, end):
            y[i] = erf(v[i])


def apply(name: str, x: Tensor) -> Tensor:
    """exp, tanh, sigmoid, log or erf of every number."""
    x = x.contiguous()
    _require_rows(x)
    out, count = torch.empty(x.shape, dtype=torch.float32), x.numel()
    fixed = (_FUNCTIONS.index(name), x.data_ptr(), out.data_ptr())
    divided(lambda i, n: _apply(*fixed, *share(i, n, count)), 16.0 * count, count)
    return out


@compiled("void(intp,intp,intp,intp)")
def _row_sums(x, rows, width, out):
    lanes, y = np.empty(LANES, np.float32), floats(out, rows)
    for row in range(rows):
        y[row] = row_sum(floats(x + 4 * row * width, width), lanes)


def row_sums(x: Tensor) -> Tensor:
    """The sums over the last dimension: [..., 1]"""
    x = x.contiguous()
    _require_rows(x)
    out = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    _row_sums(x.data_ptr(), out.numel(), x.shape[-1], out.data_ptr())
    return out


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp)")
def _rotate(x, stride, head_stride, heads, table, half, positions, first, end):
    places = integers(positions, end)
    for row in range(first, end):
        cos = floats(table + 8 * places[row] * half, half)
        sin = floats(table + 8 * places[row] * half + 4 * half, half)
        for head in range(heads):
            at = x + 4 * (row * stride + head * head_stride)
            a, b = floats(at, half), floats(at + 4 * half, half)
            for i in range(half):
                p, q = a[i], b[i]
                a[i] = fma(-q, sin[i], p * cos[i])
                b[i] = fma(p, sin[i], q * cos[i])


def rotate_(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Mutates and returns x [rows, heads, d_head]: pairs (a, b) of its dimensions become (a cos - b sin, b cos + a sin).

    table [positions, 2, half], contiguous; positions [rows] int64
    """
    rows, heads = x.shape[:2]
    _require_rows(x)
    _require(table.dtype == torch.float32 and table.is_contiguous(), "a contiguous table", table)
    fixed = (x.data_ptr(), x.stride(0), x.stride(1), heads, table.data_ptr(), table.shape[-1], positions.data_ptr())
    divided(lambda i, n: _rotate(*fixed, *share(i, n, rows)), 8.0 * x.numel(), rows)
    return x


# ---- attention -------------------------------------------------------------------------------------------------------
# Keys are walked in blocks of 64 from position 0, blocks in splits of 512, as `kernels/attention.py` does on a GPU. Rows are
# ordered by their pages: neighbours whose block lies in the same pages read it together, whether they belong to one sequence
# or to branches of one prompt.

KV_BLOCK, KV_SPLIT = 64, 512
_PAIRS = 64
"""(row, query head) pairs that walk together. Moves no bit"""
_NONE = np.float32(-np.inf)


@compiled("void(intp,intp,intp,intp,intp)")
def _transpose(source, stride, width, count, target):
    """source [count, width] -> target [width, KV_BLOCK]"""
    out = floats(target, width * KV_BLOCK)
    for j in range(count):
        row = floats(source + 4 * j * stride, width)
        for i in range(width):
            out[i * KV_BLOCK + j] = row[i]


@compiled("void(intp,intp,intp,intp,intp,intp)")
def _pack_pairs(source, stride, pairs, width, target, columns):
    """source [pairs, width] in tiles: for each, its columns one after the other."""
    done = 0
    while done < pairs:
        h = height(pairs - done)
        out = floats(target + 4 * done * columns, h * columns)
        for i in range(h):
            row = floats(source + 4 * (done + i) * stride, width)
            for k in range(columns):
                out[k * h + i] = row[k]
        done += h


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp)")
def _multiply(pairs, packed, columns, b, ldb, out, ldo, width, begun):
    """out [pairs, width] = (out if begun +) packed pairs [columns] times b [columns, width]; width a multiple of PANEL"""
    done = 0
    while done < pairs:
        h = height(pairs - done)
        for column in range(0, width, PANEL):
            a, c = packed + 4 * done * columns, out + 4 * (done * ldo + column)
            tile(h, a, b + 4 * column, ldb, columns, c, ldo, begun, 0, 0)
        done += h


@compiled("void(intp,intp,float32,float32,float32,intp,intp,intp,intp,intp)")
def _scored(scores, count, scale, cap, slope, start, position, window, hidden, first_key):
    """Scores of one pair over a block: scaled, capped, biased; -inf for keys that the row does not see."""
    s, edges = floats(scores, KV_BLOCK), shorts(hidden, KV_BLOCK)
    for j in range(count):
        s[j] *= scale
    if cap > np.float32(0.0):
        for j in range(count):
            s[j] = tanh(s[j] / cap) * cap
    if slope != np.float32(0.0):
        for j in range(count):
            s[j] = fma(slope, np.float32(start + j), s[j])
    if hidden:
        for j in range(count):
            s[j] = _NONE if edges[j] else s[j]
    last = min(KV_BLOCK, max(0, position + 1 - start))
    for j in range(last, KV_BLOCK):
        s[j] = _NONE
    if window:
        for j in range(min(last, max(0, position - window + 1 - start))):
            s[j] = _NONE


@compiled("float32(intp,float32,intp,intp,intp)")
def _weighted(scores, m, sums, values, width):
    """One pair: scores of a block become weights; sums and values shrink to the new maximum, which is returned."""
    s, zero = floats(scores, KV_BLOCK), np.float32(0.0)
    total, a = floats(sums, KV_BLOCK // 2), floats(values, width)
    top = m
    for j in range(KV_BLOCK):
        top = s[j] if s[j] > top else top
    safe = zero if top == _NONE else top
    for j in range(KV_BLOCK):
        s[j] = exp(s[j] - safe)
    shrink = exp(m - safe)
    for j in range(KV_BLOCK // 2):
        total[j] = fma(total[j], shrink, s[2 * j] + s[2 * j + 1])
    for i in range(width):
        a[i] *= shrink
    return top


@compiled("void(intp,intp,float32,float32,intp,intp)")
def _merge(state, merged, m1, l1, values, width):
    """Merge a split (m1, l1, values) into a row's (m, l) at `state` and values at `merged`."""
    ml, a, b, zero = floats(state, 2), floats(merged, width), floats(values, width), np.float32(0.0)
    top = m1 if m1 > ml[0] else ml[0]
    safe = zero if top == _NONE else top
    x, y = exp(ml[0] - safe), exp(m1 - safe)
    ml[0], ml[1] = top, fma(l1, y, ml[1] * x)
    for i in range(width):
        a[i] = fma(b[i], y, a[i] * x)


@compiled("boolean(intp,intp,intp,intp,intp,intp)")
def _same_pages(table, pages, one, other, first, end):
    """Whether two sequences have the same pages [first, end)."""
    if one == other:
        return True
    x, y = integers(table + 8 * one * pages, pages), integers(table + 8 * other * pages, pages)
    for i in range(first, min(pages, end)):
        if x[i] != y[i]:
            return False
    return first < pages


@compiled(
    "void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,intp,float32,float32,"
    "intp,intp,intp,intp,intp,intp)"
)
def _attend(
    q, q_row, q_head, keys, values, kv_head_stride, key_width, value_width, heads, group, rows, order, sequence, position,
    table, pages, page_size, out, window, slopes, scale, cap, sinks, scores, scores_width, hidden, first, end,
):  # fmt: skip
    """Work items [first, end): one (chunk of rows, key head) each. See `attend`.

    scores  where scores go, [rows, heads, scores_width], or 0
    hidden  [rows, heads, scores_width] uint16: edges that the softmax does not see, or 0
    """
    kv_heads = heads // group
    per_chunk = max(1, _PAIRS // group)
    rank, owner, places = integers(order, rows), integers(sequence, rows), integers(position, rows)
    slope_of, sink_of = floats(slopes, heads), floats(sinks, heads)
    room, padded = per_chunk * group, (value_width + PANEL - 1) // PANEL * PANEL
    queries = np.empty(room * key_width, np.float32)
    packed = np.empty(room * key_width, np.float32)
    packed_to = np.empty(room + 1, np.int64)
    turned = np.empty(key_width * KV_BLOCK, np.float32)
    padding = np.zeros((KV_BLOCK, padded), np.float32)
    block = np.empty((room, KV_BLOCK), np.float32)
    block_packed = np.empty(room * KV_BLOCK, np.float32)
    m, sums = np.empty(room, np.float32), np.empty((room, KV_BLOCK // 2), np.float32)
    a, merged, state = (
        np.empty((room, padded), np.float32),
        np.empty((room, padded), np.float32),
        np.empty((room, 2), np.float32),
    )
    for item in range(first, end):
        chunk, kv_head = item // kv_heads, item % kv_heads
        low, high = chunk * per_chunk, min(rows, (chunk + 1) * per_chunk)
        count = high - low
        last, begin = 0, np.int64(1) << 40
        for r in range(low, high):
            place = places[rank[r]]
            last = max(last, place)
            begin = min(begin, max(0, place - window + 1) if window else 0)
            for g in range(group):
                source = floats(q + 4 * (rank[r] * q_row + (kv_head * group + g) * q_head), key_width)
                at = ((r - low) * group + g) * key_width
                for i in range(key_width):
                    queries[at + i] = source[i]
        packed_to[:] = -1
        for pair in range(count * group):
            state[pair, 0], state[pair, 1] = _NONE, np.float32(0.0)
            merged[pair, :] = np.float32(0.0)
        k_base, v_base = keys + 4 * kv_head * kv_head_stride, values + 4 * kv_head * kv_head_stride
        start = begin // KV_BLOCK * KV_BLOCK
        fresh = True
        while start <= last:
            if fresh:
                for pair in range(count * group):
                    m[pair] = _NONE
                    sums[pair, :] = np.float32(0.0)
                    a[pair, :] = np.float32(0.0)
                fresh = False
            # rows whose block lies in the same pages
            r = low
            while r < high:
                own = integers(table + 8 * owner[rank[r]] * pages, pages)
                stop, deepest = r + 1, places[rank[r]]
                while stop < high and _same_pages(
                    table, pages, owner[rank[r]], owner[rank[stop]], start // page_size, (start + KV_BLOCK - 1) // page_size + 1
                ):
                    deepest = max(deepest, places[rank[stop]])
                    stop += 1
                num = min(KV_BLOCK, deepest + 1 - start)
                first_pair, pairs = (r - low) * group, (stop - r) * group
                if num > 0:
                    if packed_to[first_pair] != first_pair + pairs:
                        _pack_pairs(
                            queries.ctypes.data + 4 * first_pair * key_width, key_width, pairs, key_width,
                            packed.ctypes.data + 4 * first_pair * key_width, key_width,
                        )  # fmt: skip
                        packed_to[first_pair : first_pair + pairs] = -1
                        packed_to[first_pair] = first_pair + pairs
                    j = 0
                    while j < num:
                        slot = own[(start + j) // page_size] * page_size + (start + j) % page_size
                        some = min(num - j, page_size - (start + j) % page_size)
                        _transpose(k_base + 4 * slot * key_width, key_width, key_width, some, turned.ctypes.data + 4 * j)
                        j += some
                    _multiply(
                        pairs, packed.ctypes.data + 4 * first_pair * key_width, key_width, turned.ctypes.data, KV_BLOCK,
                        block.ctypes.data + 4 * first_pair * KV_BLOCK, KV_BLOCK, KV_BLOCK, 0,
                    )  # fmt: skip
                    for pair in range(first_pair, first_pair + pairs):
                        row, head = rank[low + pair // group], kv_head * group + pair % group
                        edges = (row * heads + head) * scores_width + start
                        address = block.ctypes.data + 4 * pair * KV_BLOCK
                        _scored(
                            address, num, scale, cap, slope_of[head] if slopes else np.float32(0.0), start, places[row], window,
                            hidden + 2 * edges if hidden else 0, 0,
                        )  # fmt: skip
                        if scores:
                            shown = floats(scores + 4 * edges, num)
                            for j in range(min(num, places[row] + 1 - start)):
                                shown[j] = block[pair, j]
                        m[pair] = _weighted(
                            address, m[pair], sums.ctypes.data + 4 * pair * (KV_BLOCK // 2),
                            a.ctypes.data + 4 * pair * padded, padded,
                        )  # fmt: skip
                    j = 0
                    while j < num:  # values of consecutive slots together
                        slot = own[(start + j) // page_size] * page_size + (start + j) % page_size
                        some = min(num - j, page_size - (start + j) % page_size)
                        while j + some < num and own[(start + j + some) // page_size] * page_size == slot + some:
                            some += min(num - j - some, page_size)
                        _pack_pairs(
                            block.ctypes.data + 4 * (first_pair * KV_BLOCK + j), KV_BLOCK, pairs, some,
                            block_packed.ctypes.data, some,
                        )  # fmt: skip
                        source, stride = v_base + 4 * slot * key_width, key_width
                        if padded != value_width:
                            for jj in range(some):
                                line = floats(source + 4 * jj * key_width, value_width)
                                for i in range(value_width):
                                    padding[jj, i] = line[i]
                            source, stride = padding.ctypes.data, padded
                        _multiply(
                            pairs, block_packed.ctypes.data, some, source, stride,
                            a.ctypes.data + 4 * first_pair * padded, padded, padded, 1,
                        )  # fmt: skip
                        j += some
                r = stop
            start += KV_BLOCK
            if start % KV_SPLIT == 0 or start > last:
                for pair in range(count * group):
                    total = np.float32(0.0)
                    for j in range(KV_BLOCK // 2):
                        total += sums[pair, j]
                    _merge(
                        state.ctypes.data + 8 * pair, merged.ctypes.data + 4 * pair * padded, m[pair], total,
                        a.ctypes.data + 4 * pair * padded, padded,
                    )  # fmt: skip
                fresh = True
        if sinks:
            a[0, :] = np.float32(0.0)
            for pair in range(count * group):
                sink = sink_of[kv_head * group + pair % group]
                _merge(
                    state.ctypes.data + 8 * pair, merged.ctypes.data + 4 * pair * padded, sink, np.float32(1.0),
                    a.ctypes.data, padded,
                )  # fmt: skip
        for pair in range(count * group):
            row, head = rank[low + pair // group], kv_head * group + pair % group
            y = floats(out + 4 * (row * heads + head) * value_width, value_width)
            for i in range(value_width):
                y[i] = merged[pair, i] / state[pair, 1] + np.float32(0.0)  # whether keys are skipped moves a zero's sign


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

    def __post_init__(self) -> None:
        for x in (self.sequence, self.position, self.pages, self.order):
            if x.dtype != torch.int64 or not x.is_contiguous() or x.is_cuda:
                raise ValueError(f"Expected contiguous int64 on the CPU, not {x.dtype} on {x.device}.")


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
        _require_rows(each)
    _require(q.shape[-1] == keys.shape[-1] and values.shape[:2] == keys.shape[:2], "queries as wide as keys", q)
    num, heads = q.shape[:2]
    slopes, sinks = _vector(slopes, heads), _vector(sinks, heads)
    kv_heads, width = len(keys), values.shape[-1]
    group = heads // kv_heads
    out = torch.empty(num, heads, width, dtype=torch.float32)
    if not num:
        return out
    room = 0 if scores is None and hidden is None else (scores if scores is not None else hidden).shape[-1]  # type: ignore[union-attr]
    address = lambda x: 0 if x is None else x.data_ptr()  # noqa: E731
    fixed = (
        q.data_ptr(), q.stride(0), q.stride(1), keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1), width,
        heads, group, num, rows.order.data_ptr(), rows.sequence.data_ptr(), rows.position.data_ptr(), rows.pages.data_ptr(),
        rows.pages.shape[1], rows.page_size, out.data_ptr(), window, address(slopes), scale, cap, address(sinks),
        address(scores), room, address(hidden),
    )  # fmt: skip
    items = -(-num // max(1, _PAIRS // group)) * kv_heads
    cost = 2.0 * float(rows.position.sum()) * heads * keys.shape[-1]
    divided(lambda i, n: _attend(*fixed, *share(i, n, items)), cost, items)
    return out


# ---- log-probabilities -----------------------------------------------------------------------------------------------


@compiled("void(intp,intp,intp,intp)")
def _log_softmax(x, width, first, end):
    lanes, weights = np.empty(LANES, np.float32), np.empty(width, np.float32)
    for row in range(first, end):
        v = floats(x + 4 * row * width, width)
        top = _NONE
        for i in range(width):
            top = v[i] if v[i] > top else top
        for i in range(width):
            weights[i] = exp(v[i] - top)
        whole = top + log(row_sum(weights, lanes))
        for i in range(width):
            v[i] -= whole


def log_softmax_(x: Tensor) -> Tensor:
    """Mutates and returns x [..., width], contiguous: x - (max + log(sum(exp(x - max))))."""
    width = x.shape[-1]
    rows = x.numel() // width
    divided(lambda i, n: _log_softmax(x.data_ptr(), width, *share(i, n, rows)), 24.0 * x.numel(), rows)
    return x


@compiled("void(intp,intp,intp,intp,intp,intp,intp)")
def _spread(log_p, final, width, entropy, kl, first, end):
    """Entropy and divergence of rows; final: the rows to compare with, by row."""
    lanes, parts = np.empty(LANES, np.float32), np.empty(width, np.float32)
    h, d, others = floats(entropy, end), floats(kl, end), integers(final, end)
    for row in range(first, end):
        v = floats(log_p + 4 * row * width, width)
        for i in range(width):
            parts[i] = exp(v[i]) * v[i]
        h[row] = -row_sum(parts, lanes)
        if kl:
            f = floats(log_p + 4 * others[row] * width, width)
            for i in range(width):
                parts[i] = exp(f[i]) * (f[i] - v[i])
            d[row] = row_sum(parts, lanes)


def entropies(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """log_p [n, layers, vocab] -> entropies and KL(last layer || layer): [n, layers] each."""
    n, layers, width = log_p.shape
    final = (torch.arange(n) * layers + layers - 1).repeat_interleave(layers)
    entropy, kl = torch.empty(n, layers, dtype=torch.float32), torch.empty(n, layers, dtype=torch.float32)
    fixed = (log_p.data_ptr(), final.data_ptr(), width, entropy.data_ptr(), kl.data_ptr())
    divided(lambda i, k: _spread(*fixed, *share(i, k, n * layers)), 48.0 * log_p.numel(), n * layers)
    return entropy, kl


@compiled("void(intp,intp,intp,intp,intp,intp,intp)")
def _top(x, width, k, values, ids, first, end):
    for row in range(first, end):
        v = floats(x + 4 * row * width, width)
        best, where = floats(values + 4 * row * k, k), integers(ids + 8 * row * k, k)
        held = 0
        for i in range(width):
            if held == k and not v[i] > best[k - 1]:
                continue
            at = held if held < k else k - 1
            while at > 0 and v[i] > best[at - 1]:
                best[at], where[at] = best[at - 1], where[at - 1]
                at -= 1
            best[at], where[at] = v[i], i
            held = min(k, held + 1)


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of x [..., width], contiguous: (values, indices int64), ties by the lower index."""
    width = x.shape[-1]
    rows, k = x.numel() // width, min(k, width)
    values, ids = torch.empty(*x.shape[:-1], k, dtype=torch.float32), torch.empty(*x.shape[:-1], k, dtype=torch.int64)
    fixed = (x.data_ptr(), width, k, values.data_ptr(), ids.data_ptr())
    divided(lambda i, n: _top(*fixed, *share(i, n, rows)), 4.0 * x.numel(), rows)
    return values, ids


# ---- noise -----------------------------------------------------------------------------------------------------------

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@compiled("uint64(uint64)")
def _mix(x):
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled("void(uint64,uint64,float64[::1])")
def _gumbel(seed, position, out):
    stream = _mix(_mix(seed + _GOLDEN) + _GOLDEN * position)
    for i in range(len(out)):
        bits = _mix(stream + _GOLDEN * np.uint64(i)) >> np.uint64(12)
        out[i] = -log64(-log64((np.float64(bits) + 0.5) * 2.220446049250313e-16))


def gumbel(seed: int, position: int, vocab: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Gumbel noise for the token at `position`: [vocab], float64. -log(-log u), u on the 2^52 midpoints of (0, 1)."""
    out = np.empty(vocab, np.float64)
    _gumbel(np.uint64(seed), np.uint64(position), out)
    return out


@compiled("void(float64[::1],float64[::1])")
def _exponentials(x, out):
    for i in range(len(x)):
        out[i] = exp64(x[i])


def exponentials(x: "np.ndarray[Any, np.dtype[np.float64]]") -> "np.ndarray[Any, np.dtype[np.float64]]":
    """exp of numbers up to 0, float64."""
    out = np.empty(len(x), np.float64)
    _exponentials(np.ascontiguousarray(x), out)
    return out
