"""Portable arithmetic on tensors of a CPU: products, norms, activations, rotations, log-probabilities.

Every function gives a row the same bits in any batch, on any number of threads and on any machine; what it computes is
written in `kernels/definition.py`. Threads divide outputs. Tensors are float32 with contiguous last dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replaylens.kernels.portable import (
    LANES,
    PANEL,
    PARTS,
    TILE,
    arguments,
    as_float,
    compiled,
    erf,
    exp,
    floats,
    fma,
    height,
    inlined,
    integers,
    largest,
    log,
    log64,
    pack_rows,
    row_sum,
    share,
    shorts,
    square_sum,
    tanh,
    task,
    tile,
    words,
)
from replaylens.kernels.threads import bits, divided

# ---- products --------------------------------------------------------------------------------------------------------

_BLOCK, _MOST_ROWS, _HELD = 64, 256, 1 << 17
"""rows whose tiles stay in the cache together: at least, at most, and how many numbers of theirs do. Weights are read again for
each such block. Moves no bit"""
_FEW_PANELS = 4
_NARROW = 16
"""rows up to which bfloat16 weights are widened within each tile (331 us at 8 rows), not panel by panel (502). Moves no bit"""


@compiled("boolean(intp,intp,intp,intp,intp)", within=True)
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


def require(fits: bool, what: str, x: Tensor) -> None:
    """Kernels read addresses: whatever does not fit is refused here, as is a tensor elsewhere, or without data (meta)."""
    if not (fits and x.is_cpu):
        raise ValueError(f"Expected {what} in float32 on the CPU, not {x.dtype} of shape {tuple(x.shape)} on {x.device}.")


def vector(x: Tensor | None, *shape: int) -> Tensor | None:
    """A bias or the weights of a norm as kernels read them: contiguous float32 of this shape."""
    if x is None:
        return None
    require(x.dtype == torch.float32 and tuple(x.shape) == shape, f"{list(shape)} numbers", x)
    return x.contiguous()


def require_rows(x: Tensor) -> None:
    """float32 on the CPU, with numbers of a row next to each other."""
    fits = x.dtype is torch.float32 and (x.stride(-1) == 1 or x.shape[-1] == 1 or x.numel() == 0)
    if not (fits and x.is_cpu):  # asked at every call of every kernel
        require(False, "rows with a contiguous last dimension", x)


def require_integers(x: Tensor) -> None:
    """Contiguous int64 on the CPU."""
    if x.dtype != torch.int64 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"Expected contiguous int64 on the CPU, not {x.dtype} on {x.device}.")


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight [inputs, outputs], or several [count, inputs, outputs], as panels of a few columns, in which products read it
    from first to last."""

    data: Tensor
    """[panels, inputs, PANEL], or [count, panels, inputs, PANEL], float32; bfloat16 if every weight is one, which halves what
    is read and moves no bit"""
    outputs: int

    @classmethod
    def of(cls, weight: Tensor) -> "Panels":
        """Any strides; float32."""
        require(weight.dtype == torch.float32 and weight.dim() in (2, 3) and not weight.is_cuda, "a weight", weight)
        *several, inputs, outputs = weight.shape
        each = weight.detach() if several else weight.detach()[None]
        short = all(_is_short(x.data_ptr(), *x.stride(), inputs, outputs) for x in each)
        count = -(-outputs // PANEL)
        data = torch.empty(*several, count, inputs, PANEL, dtype=torch.bfloat16 if short else torch.float32)
        for x, target in zip(each, data if several else data[None], strict=True):
            given = (x.data_ptr(), *x.stride(), target.data_ptr(), short, inputs, outputs)
            divided(_pack, 4.0 * inputs * outputs, count, *given)
        return cls(data, outputs)

    def __getitem__(self, index: int) -> "Panels":
        """One of several weights."""
        return Panels(self.data[index], self.outputs)

    @property
    def inputs(self) -> int:
        return self.data.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """of the weight"""
        return (*self.data.shape[:-3], self.inputs, self.outputs)

    def weight(self, turned: bool = False) -> Tensor:
        """The weight again, in float32, contiguous; turned: its transpose, [outputs, inputs]"""
        *several, inputs, outputs = self.shape
        out = torch.empty(*several, *((outputs, inputs) if turned else (inputs, outputs)), dtype=torch.float32)
        done, flat = 0, out.view(-1)
        for piece in self.pieces(turned):
            flat[done : done + piece.numel()] = piece.view(-1)
            done += piece.numel()
        return out

    def pieces(self, turned: bool = False) -> Iterator[Tensor]:
        """The rows of `weight`, a few at a time, which fit into a cache."""
        for one in self.data if self.data.dim() == 4 else (self.data,):  # [panels, inputs, PANEL]
            if turned:
                for first in range(0, len(one), _FEW_PANELS):
                    some = one[first : first + _FEW_PANELS].transpose(1, 2).reshape(-1, self.inputs)
                    yield some[: self.outputs - first * PANEL].float().contiguous()
            else:
                for rows in one.split(_BLOCK, dim=1):
                    yield rows.transpose(0, 1).reshape(rows.shape[1], -1)[:, : self.outputs].float().contiguous()

    def columns(self, at: Tensor) -> Tensor:
        """Some columns [n] of one weight, as rows: [n, inputs] float32"""
        return self.data[at // PANEL, :, at % PANEL].float()


@task
def _pack(given, index, count):
    """Some panels of a weight."""
    weight, by_input, by_output, target, short, inputs, outputs = arguments(given, 7)
    first, end = share(index, count, (outputs + PANEL - 1) // PANEL)
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
    return 1


@compiled("void(intp,intp,intp)", within=True)
def _widen(source, target, count):
    """bfloat16 to float32."""
    few, many = shorts(source, count), words(target, count)
    for i in range(count):
        many[i] = np.uint32(few[i]) << np.uint32(16)


@inlined
def _finish(source, lds, out, ldo, rows, width, bias, residual, ldr):
    """out [rows, width] = source, plus bias, plus residual, each if there is one. The source may be out itself."""
    for i in range(rows):
        v, y = floats(source + 4 * i * lds, width), floats(out + 4 * i * ldo, width)
        if source != out:
            for j in range(width):
                y[j] = v[j]
        if bias:
            more = floats(bias, width)
            for j in range(width):
                y[j] += more[j]
        if residual:
            other = floats(residual + 4 * i * ldr, width)
            for j in range(width):
                y[j] = other[j] + y[j]


@inlined
def _row_parts(rows, panels, count):
    """Into how many parts rows are divided among threads; the panels are divided among the rest. Each part packs its rows, so
    there are few until every thread has a block of its own, or panels do not go round."""
    parts = 1
    for more in range(2, count + 1):
        if count % more == 0 and (rows >= more * _BLOCK or (panels < count // parts and rows >= more * TILE)):
            parts = more
    return parts


@task
def _product(given, index, count):
    """Some rows and panels of a product. bias, residual: 0 if there is none"""
    x, ldx, panels, short, out, ldo, bias, residual, ldr, all_rows, inputs, outputs, parts = arguments(given, 13)
    num_panels = (outputs + PANEL - 1) // PANEL
    row_parts = _row_parts(all_rows, num_panels, count)
    first_panel, end_panel = share(index // row_parts, count // row_parts, num_panels)
    first_tile, end_tile = share(index % row_parts, row_parts, (all_rows + TILE - 1) // TILE)
    first, rows = first_tile * TILE, min(all_rows, end_tile * TILE) - first_tile * TILE
    x, out, residual = x + 4 * first * ldx, out + 4 * first * ldo, residual + 4 * first * ldr if residual else 0
    most = min(max(_BLOCK, min(_MOST_ROWS, _HELD // inputs // TILE * TILE)), (rows + TILE - 1) // TILE * TILE)
    packed = np.empty(most * inputs, np.float32)
    levels = np.empty(3 * most * PANEL, np.float32)
    edge = np.empty(most * PANEL, np.float32)
    widen, size = short and rows > _NARROW, 2 if short else 4
    wide = np.empty(inputs * PANEL if widen else 1, np.float32)
    held, sums, edges = np.intp(packed.ctypes.data), np.intp(levels.ctypes.data), np.intp(edge.ctypes.data)
    for block in range(0, rows, most):
        tiles = min(most, rows - block)
        done = 0
        while done < tiles:
            h = height(tiles - done, TILE)
            pack_rows(x + 4 * (block + done) * ldx, ldx, h, inputs, held + 4 * done * inputs)
            done += h
        for panel in range(first_panel, end_panel):
            b, column = panels + panel * inputs * PANEL * size, panel * PANEL
            width, y = min(PANEL, outputs - column), out + 4 * (block * ldo + column)
            if widen:
                _widen(b, np.intp(wide.ctypes.data), inputs * PANEL)
                b = np.intp(wide.ctypes.data)
            target, ldt = (y, ldo) if width == PANEL else (edges, PANEL)
            for part in range(parts):  # outside, so that a part of the panel (14 KB) stays in the first cache
                done = 0
                while done < tiles:
                    h = height(tiles - done, TILE)
                    a, c, sum_ = held + 4 * done * inputs, target + 4 * done * ldt, sums + 4 * 3 * done * PANEL
                    tile(part, h, a, b, short and not widen, inputs, parts, c, ldt, sum_)
                    done += h
            more = residual + 4 * (block * ldr + column) if residual else 0
            _finish(target, ldt, y, ldo, tiles, width, bias + 4 * column if bias else 0, more, ldr)
    packed[0] = levels[0] = edge[0] = np.float32(0.0)  # numba frees an array after its last use, whatever holds its address
    return 1


def product(
    x: Tensor, panels: Panels, bias: Tensor | None = None, residual: Tensor | None = None, parts: int = PARTS
) -> Tensor:
    """x [rows, inputs] times a weight [inputs, outputs], plus bias [outputs], plus residual [rows, outputs].

    parts  8, which defines the bits; 1: one chain, a little faster and less exact, for drafts
    """
    rows, inputs, outputs = x.shape[0], panels.inputs, panels.outputs  # len(x) takes microseconds
    require(x.shape[1:] == (inputs,), f"rows of {inputs} numbers", x)
    require_rows(x)
    bias = vector(bias, outputs)
    if residual is not None:
        require(residual.shape == (rows, outputs), "the rows of a residual stream", residual)
        require_rows(residual)
    out = torch.empty(rows, outputs, dtype=torch.float32)
    if not rows:
        return out
    short, pieces = panels.data.dtype == torch.bfloat16, panels.data.shape[0] * -(-rows // TILE)
    divided(
        _product, float(rows) * inputs * outputs, pieces, x.data_ptr(), x.stride(0), panels.data.data_ptr(), short,
        out.data_ptr(), outputs, 0 if bias is None else bias.data_ptr(),
        *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))), rows, inputs, outputs, parts,
    )  # fmt: skip
    return out


# ---- rows ------------------------------------------------------------------------------------------------------------
# Functions of single rows and numbers.


@task
def _norm(given, index, count):
    """Some rows of inner vectors; weight, bias, scale: 0 if there is none."""
    x, outer, inner_stride, inner, width, weight, weight_stride, bias, layer, out, eps_bits, scale, rows = arguments(given, 13)
    first, end = share(index, count, rows)
    eps = as_float(np.int32(eps_bits))
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
    return 1


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, scale: Tensor | None = None) -> Tensor:
    """RMSNorm ("rms") or LayerNorm ("layer") over the last dimension of x [rows, width] or [rows, heads, width].

    weight, bias  [width], or [heads, width]: each head has its own
    scale         if given, what the norm divides by: [..., 1]
    """
    require_rows(x)
    out = torch.empty(x.shape, dtype=torch.float32)
    inner, width = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    by_head = weight is not None and weight.dim() == 2
    weight, bias = (vector(each, *((inner, width) if by_head else (width,))) for each in (weight, bias))
    stride = width if by_head else 0
    if scale is not None:
        require_rows(scale)
    addresses = [0 if each is None else each.data_ptr() for each in (weight, bias, scale)]
    rows = x.shape[0] * inner
    divided(
        _norm, 4.0 * rows * width, rows, x.data_ptr(), x.stride(0), x.stride(1) if x.dim() == 3 else 0, inner, width,
        addresses[0], stride, addresses[1], kind == "layer", out.data_ptr(), bits(eps), addresses[2], rows,
    )  # fmt: skip
    return out


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
_ALPHA, _LIMIT = np.float32(1.702), np.float32(7.0)
_SQRT_HALF, _CUBE, _WIDE = np.float32(0.5**0.5), np.float32(0.044715), np.float32(-2 * (2 / np.pi) ** 0.5)


@task
def _activate(given, index, count):
    x, stride, width, kind, gated, out, rows = arguments(given, 7)
    first, end = share(index, count, rows)
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
    return 1


def activate(x: Tensor, kind: str, gated: bool) -> Tensor:
    """f(x) of x [..., width]; gated: x [rows, gate | up] -> f(gate) * up."""
    require_rows(x)
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    rows, width = flat.shape[0], flat.shape[1] // (2 if gated else 1)
    out = torch.empty(rows, width, dtype=torch.float32)
    given = flat.data_ptr(), flat.stride(0), width, ACTIVATIONS.index(kind), gated, out.data_ptr(), rows
    divided(_activate, 16.0 * rows * width, rows, *given)
    return out.view(*x.shape[:-1], width)


@task
def _pointwise(given, index, count):
    """out [rows, heads, width] of x and y, each with its strides by row and head; y of one number a head if `single`."""
    (
        kind, rows, heads, width, low, high, single, x, x_row, x_head, y, y_row, y_head, out, out_row, out_head,
    ) = arguments(given, 16)  # fmt: skip
    first, end = share(index, count, rows * heads)
    least, by = as_float(np.int32(low)), as_float(np.int32(high))
    for at in range(first, end):
        row, head = at // heads, at % heads
        a, b = floats(x + 4 * (row * x_row + head * x_head), width), floats(y + 4 * (row * y_row + head * y_head), width)
        c, one = floats(out + 4 * (row * out_row + head * out_head), width), b[0] if single else by
        if kind == 0:
            for i in range(width):
                c[i] = a[i]
        elif kind == 1 and single:
            for i in range(width):
                c[i] = a[i] + one
        elif kind == 1:
            for i in range(width):
                c[i] = a[i] + b[i]
        elif kind == 3 or single:
            for i in range(width):
                c[i] = a[i] * one
        elif kind == 2:
            for i in range(width):
                c[i] = a[i] * b[i]
        else:
            for i in range(width):
                c[i] = by if a[i] > by else (least if a[i] < least else a[i])
    return 1


_POINTWISE = ("copy", "add", "mul", "scale", "clamp")


def pointwise(kind: str, x: Tensor, y: Tensor | None, out: Tensor, factor: float = 1.0, least: float = -np.inf) -> Tensor:
    """Mutates and returns out [..., width], of at most three dimensions: x, x + y, x * y, x * factor, or x from `least` to
    `factor`. y may have fewer numbers than x, as in torch."""
    shape = [1] * (3 - x.dim()) + list(x.shape)
    single = y is not None and y.shape[-1] == 1 < x.shape[-1]
    for each in (x, out) if y is None else (x, y, out):
        require_rows(each)
    y = x if y is None else y.expand(x.shape)
    given = list[int]()
    for each in (x, y, out):
        require(each.shape == x.shape, f"{shape} numbers", each)
        given += each.data_ptr(), *([0] * (3 - x.dim()) + list(each.stride()))[:2]
    numbers = bits(least), bits(factor), int(single)
    divided(_pointwise, float(x.numel()), shape[0] * shape[1], _POINTWISE.index(kind), *shape, *numbers, *given)
    return out


_FUNCTIONS = ("exp", "tanh", "sigmoid", "log", "erf", "sqrt", "softplus")
_TINY, _FAR = np.float32(2.0**-25), np.float32(20.0)


@task
def _apply(given, index, threads):
    kind, x, out, count = arguments(given, 4)
    first, end = share(index, threads, count)
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
    elif kind == 4:
        for i in range(first, end):
            y[i] = erf(v[i])
    elif kind == 5:  # correctly rounded, as the library's is not on x86-64
        for i in range(first, end):
            y[i] = np.sqrt(v[i])
    else:
        for i in range(first, end):
            e = exp(v[i])
            near = e if e < _TINY else np.float32(log64(1.0 + np.float64(e)))
            y[i] = v[i] if v[i] > _FAR or v[i] != v[i] else near
    return 1


def apply(name: str, x: Tensor) -> Tensor:
    """exp, tanh, sigmoid, log, erf, sqrt or softplus of every number."""
    x = x.contiguous()
    require_rows(x)
    out, count = torch.empty(x.shape, dtype=torch.float32), x.numel()
    divided(_apply, 16.0 * count, count, _FUNCTIONS.index(name), x.data_ptr(), out.data_ptr(), count)
    return out


@compiled("void(intp,intp,intp,intp)")
def _row_sums(x, rows, width, out):
    lanes, y = np.empty(LANES, np.float32), floats(out, rows)
    for row in range(rows):
        y[row] = row_sum(floats(x + 4 * row * width, width), lanes)


def row_sums(x: Tensor) -> Tensor:
    """The sums over the last dimension: [..., 1]"""
    x = x.contiguous()
    require_rows(x)
    out = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    _row_sums(x.data_ptr(), out.numel(), x.shape[-1], out.data_ptr())
    return out


@task
def _rotate(given, index, count):
    x, stride, head_stride, heads, table, half, positions, rows = arguments(given, 8)
    first, end = share(index, count, rows)
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
    return 1


def rotate_(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Mutates and returns x [rows, heads, d_head]: pairs (a, b) of its dimensions become (a cos - b sin, b cos + a sin).

    table [positions, 2, half], contiguous; positions [rows] int64
    """
    rows, heads = x.shape[:2]
    require_rows(x)
    require(table.dtype == torch.float32 and table.is_contiguous(), "a contiguous table", table)
    require_integers(positions)
    given = x.data_ptr(), x.stride(0), x.stride(1), heads, table.data_ptr(), table.shape[-1], positions.data_ptr(), rows
    divided(_rotate, 8.0 * x.numel(), rows, *given)
    return x


# ---- log-probabilities -----------------------------------------------------------------------------------------------


@task
def _log_softmax(given, index, count):
    x, width, rows = arguments(given, 3)
    first, end = share(index, count, rows)
    lanes, weights = np.empty(LANES, np.float32), np.empty(width, np.float32)
    for row in range(first, end):
        v = floats(x + 4 * row * width, width)
        top = largest(v, lanes)
        for i in range(width):
            weights[i] = exp(v[i] - top)
        whole = top + log(row_sum(weights, lanes))
        for i in range(width):
            v[i] -= whole
    return 1


def log_softmax_(x: Tensor) -> Tensor:
    """Mutates and returns x [..., width], contiguous: x - (max + log(sum(exp(x - max))))."""
    require(x.dtype == torch.float32 and x.is_contiguous(), "contiguous rows", x)
    width = x.shape[-1]
    rows = x.numel() // width
    divided(_log_softmax, 24.0 * x.numel(), rows, x.data_ptr(), width, rows)
    return x


@task
def _spread(given, index, count):
    """Entropy and divergence of rows; final: the rows to compare with, by row."""
    log_p, final, width, entropy, kl, rows = arguments(given, 6)
    first, end = share(index, count, rows)
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
    return 1


def entropies(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """log_p [n, layers, vocab] -> entropies and KL(last layer || layer): [n, layers] each."""
    require(log_p.dtype == torch.float32 and log_p.is_contiguous(), "contiguous rows", log_p)
    n, layers, width = log_p.shape
    final = (torch.arange(n) * layers + layers - 1).repeat_interleave(layers)
    entropy, kl = torch.empty(n, layers, dtype=torch.float32), torch.empty(n, layers, dtype=torch.float32)
    given = log_p.data_ptr(), final.data_ptr(), width, entropy.data_ptr(), kl.data_ptr(), n * layers
    divided(_spread, 48.0 * log_p.numel(), n * layers, *given)
    return entropy, kl


@task
def _top(given, index, count):
    x, width, k, values, ids, rows = arguments(given, 6)
    first, end = share(index, count, rows)
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
    return 1


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of x [..., width], contiguous: (values, indices int64), ties by the lower index."""
    require(x.dtype == torch.float32 and x.is_contiguous(), "contiguous rows", x)
    width = x.shape[-1]
    rows, k = x.numel() // width, min(k, width)
    values, ids = torch.empty(*x.shape[:-1], k, dtype=torch.float32), torch.empty(*x.shape[:-1], k, dtype=torch.int64)
    divided(_top, 4.0 * x.numel(), rows, x.data_ptr(), width, k, values.data_ptr(), ids.data_ptr(), rows)
    return values, ids
