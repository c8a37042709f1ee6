"""Portable arithmetic on a CPU: the parts of which `kernels/cpu.py` is made, compiled by numba.

The same bits on every machine, because nothing is left to it. A product that is added to something is one fused
multiply-add, which IEEE 754 rounds once on every chip; other operations are single roundings too. Vectors, tiles and threads
run over *outputs*, never over parts of a sum. `kernels/definition.py` says in plain Python what every function computes.

Functions take addresses (`intp`) in place of arrays: one compiled form each, kept in numba's cache, and short calls.
"""

import hashlib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic

# ---- machine ---------------------------------------------------------------------------------------------------------

PARTS = 8
"""chains of a product, added as a tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Part of the definition"""
LANES = 64
"""chains of a row sum, added by halves. Part of the definition"""
SPAN = 4096
"""columns of a long row sum that are added on their own. Part of the definition"""


def _features() -> dict[str, bool]:
    return dict(llvmlite.binding.get_host_cpu_features())


def has_fma() -> bool:
    """Whether the machine has fused multiply-adds: every 64-bit ARM, and x86-64 since 2013."""
    found = _features()
    return not llvmlite.binding.get_process_triple().startswith("x86_64") or found.get("fma", False)


def _shape() -> tuple[int, int, int, int, int]:
    """(lanes of a vector, columns and rows of a product's tile, columns and rows of a tile of values) for this machine.

    Accumulators should fill the registers: 24 of 32 on ARM and with AVX-512. Moves no bit.
    """
    found = _features()
    if found.get("avx512f", False):
        return 16, 48, 8, 32, 8
    return (8, 16, 4, 16, 4) if found.get("avx2", False) else (4, 12, 8, 16, 4)


VECTOR, PANEL, TILE, STRIP, STRIP_ROWS = _shape()
KEYS = 8
"""keys whose scores are computed together, a multiple of `TILE`"""


_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
"""no fast math: every operation is rounded as it is written"""


def compiled(signature: str, within: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for one signature, kept on disk.

    within  only other compiled functions call it: without the wrapper for Python, it compiles in less time
    """

    def made(function: Callable[..., Any]) -> Any:
        kernel = njit(no_cpython_wrapper=within, no_cfunc_wrapper=True, **_OPTIONS)(_named(function))
        _compile(kernel, signature)
        kernel.disable_compile()
        return kernel

    return made


def task(function: Callable[..., Any]) -> CFunc:
    """Compile `function(given, index, count) -> 1`, one thread's part of some work, to be called by its `address`.

    given         the address of its arguments, which `arguments` reads
    index, count  of the threads
    """
    kernel = CFunc(_named(function), normalize_signature("intp(intp,intp,intp)"), {}, dict(_OPTIONS))
    _compile(kernel)
    return kernel


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """numba finds a kernel by its name and by the age of its own file, and inlines the functions of this one."""
    function.__qualname__ += f"_{_SOURCE}"
    return function


def _compile(kernel: Any, *signature: str) -> None:
    try:
        kernel.enable_caching()
    except RuntimeError:
        _warn_not_kept()
    try:
        kernel.compile(*signature)
    except Exception:  # a damaged file raises anything, as does a full disk
        try:
            kernel._cache.flush()
        except OSError:
            kernel._cache = NullCache()
        kernel.compile(*signature)


@cache
def _warn_not_kept() -> None:
    """Once."""
    warnings.warn(
        "No folder for compiled kernels can be written, so that every process compiles them, which takes about 15 seconds. "
        "Set NUMBA_CACHE_DIR to a folder that can.",
        stacklevel=3,
    )


_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


inlined = njit(inline="never", no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)
"""of functions that only compiled ones call, compiled anew for each of them"""


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@intrinsic(prefer_literal=True)
def arguments(_context: Any, address: Any, count: Any) -> Any:
    """The first `count`, a literal, int64 at an address, as a tuple."""
    kind = types.UniTuple(types.intp, count.literal_value)

    def codegen(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        first = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
        read = [builder.load(builder.gep(first, [ir.Constant(ir.IntType(64), i)])) for i in range(kind.count)]
        return context.make_tuple(builder, kind, read)

    return kind(address, count), codegen


@inlined
def floats(address, count):
    """`count` float32 at an address, as an array."""
    return carray(_pointer(address), (count,), np.float32)


@inlined
def integers(address, count):
    """`count` int64 at an address, as an array."""
    return carray(_pointer(address), (count,), np.int64)


@inlined
def share(index, count, total):
    """[first, end) of one thread's share of `total` outputs."""
    return index * total // count, (index + 1) * total // count


@inlined
def words(address, count):
    """`count` uint32 at an address, as an array."""
    return carray(_pointer(address), (count,), np.uint32)


@inlined
def shorts(address, count):
    """`count` uint16 at an address, as an array."""
    return carray(_pointer(address), (count,), np.uint16)


# ---- functions -------------------------------------------------------------------------------------------------------
# exp, tanh, erf and log as polynomials of fused multiply-adds: about as exact as the library's, and the same everywhere.


@intrinsic
def fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; float32 or float64."""

    def codegen(_cg: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FloatType() if signature.return_type == types.float32 else ir.DoubleType()
        name = f"llvm.fma.{'f32' if signature.return_type == types.float32 else 'f64'}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return builder.call(function, arguments)

    return a(a, a, a), codegen


@intrinsic
def as_float(_context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return types.float32(types.int32), lambda _cg, builder, _signature, arguments: builder.bitcast(arguments[0], ir.FloatType())


@intrinsic
def as_double(_context: Any, bits: Any) -> Any:
    """The float64 with these 64 bits."""
    return types.float64(types.int64), lambda _cg, builder, _signature, arguments: builder.bitcast(
        arguments[0], ir.DoubleType()
    )


@intrinsic
def double_bits(_context: Any, x: Any) -> Any:
    """The 64 bits of a float64."""
    return types.int64(types.float64), lambda _cg, builder, _signature, arguments: builder.bitcast(arguments[0], ir.IntType(64))


def _single(text: str) -> np.float32:
    return np.float32(float.fromhex(text))


_ZERO, _HALF, _ONE, _TWO, _INF = (np.float32(x) for x in (0.0, 0.5, 1.0, 2.0, np.inf))
_LOG2E, _ROUND = np.float32(1.4426950408889634), np.float32(1.5 * 2**23)
_LN2_HIGH, _LN2_LOW = np.float32(-0.693145751953125), np.float32(-1.428606765330187e-06)
_EXP_MAX, _EXP_MIN = np.float32(88.72283), np.float32(-87.33654)
_E0, _E1, _E2, _E3, _E4 = map(_single, ("0x1p-1", "0x1.5554d8p-3", "0x1.5554b2p-5", "0x1.12107p-7", "0x1.6d7c42p-10"))


@inlined
def exp(x):
    """exp of a float32. Below the smallest normal number the result is 0, above the largest infinity; NaN stays."""
    v = min(max(x, _EXP_MIN), _EXP_MAX)
    turns = fma(v, _LOG2E, _ROUND) - _ROUND
    r = fma(turns, _LN2_LOW, fma(turns, _LN2_HIGH, v))
    p = fma(fma(fma(fma(fma(_E4, r, _E3), r, _E2), r, _E1), r, _E0), r * r, r) + _ONE
    whole = np.int32(turns)
    half = whole >> np.int32(1)  # in two steps: 2**128 is no float32
    first, second = as_float((half + np.int32(127)) << np.int32(23)), as_float((whole - half + np.int32(127)) << np.int32(23))
    y = p * first * second
    y = _ZERO if x < _EXP_MIN else y
    y = _INF if x > _EXP_MAX else y
    return y if x == x else x


_T0, _T1, _T2, _T3, _T4 = map(_single, ("-0x1.555552p-2", "0x1.110dfep-3", "-0x1.b91cb6p-5", "0x1.57a79ap-6", "-0x1.8d4b76p-8"))
_SMALL = np.float32(0.625)


@inlined
def tanh(x):
    """tanh of a float32: a polynomial near 0, elsewhere 1 - 2 / (1 + exp(2 |x|))."""
    u, size = x * x, abs(x)
    near = fma(fma(fma(fma(fma(_T4, u, _T3), u, _T2), u, _T1), u, _T0), u * x, x)
    far = _ONE - _TWO / (_ONE + exp(size + size))
    far = -far if x < _ZERO else far
    return near if size < _SMALL else far


_F0, _F1, _F2, _F3, _F4, _F5, _F6 = map(
    _single,
    ("0x1.20dd74p+0", "-0x1.81273ep-2", "0x1.ce2d2p-4", "-0x1.b7fbb4p-6", "0x1.5419f4p-8", "-0x1.a485e8p-11", "0x1.4ae4c6p-14"),
)
_G0, _G1, _G2, _G3, _G4, _G5, _G6, _G7, _G8 = map(
    _single,
    (
        "-0x1.758daep-13", "0x1.2128b4p+0", "0x1.444434p-1", "0x1.bb8238p-4", "-0x1.9b446cp-6",
        "0x1.1038ccp-8", "-0x1.bf392cp-12", "0x1.432cd2p-16", "0x1.6c86bcp-23",
    ),
)  # fmt: skip
_FOUR = np.float32(4.0)


@inlined
def erf(x):
    """erf of a float32: a polynomial up to 1, beyond it 1 - exp(-P(|x|)), which is 1 from 4 on."""
    u, size = x * x, min(abs(x), _FOUR)
    near = fma(fma(fma(fma(fma(fma(_F6, u, _F5), u, _F4), u, _F3), u, _F2), u, _F1), u, _F0) * x
    p = fma(fma(fma(fma(fma(_G8, size, _G7), size, _G6), size, _G5), size, _G4), size, _G3)
    p = fma(fma(fma(p, size, _G2), size, _G1), size, _G0)
    far = _ONE - exp(-p)
    far = -far if x < _ZERO else far
    return near if size < _ONE else far


_SQRT_HALF, _LN2 = 0.7071067811865476, 0.6931471805599453
_LN2_HIGH64, _LN2_LOW64 = 0.6931471803691238, 1.9082149292705877e-10


@inlined
def log64(x):
    """log of a positive, normal float64: with s = f / (2 + f), log(1 + f) = 2 s + s^3 (2/3 + 2/5 s^2 + ...)."""
    bits = double_bits(x)
    exponent = ((bits >> np.int64(52)) & np.int64(2047)) - np.int64(1022)
    m = as_double((bits & np.int64(0x000FFFFFFFFFFFFF)) | np.int64(0x3FE0000000000000))  # [0.5, 1)
    low = m < _SQRT_HALF
    m = m + m if low else m
    e = np.float64(exponent - np.int64(1)) if low else np.float64(exponent)
    f = m - 1.0
    s = f / (2.0 + f)
    u = s * s
    p = 2.0 / 23.0
    p = fma(p, u, 2.0 / 21.0)
    p = fma(p, u, 2.0 / 19.0)
    p = fma(p, u, 2.0 / 17.0)
    p = fma(p, u, 2.0 / 15.0)
    p = fma(p, u, 2.0 / 13.0)
    p = fma(p, u, 2.0 / 11.0)
    p = fma(p, u, 2.0 / 9.0)
    p = fma(p, u, 2.0 / 7.0)
    p = fma(p, u, 2.0 / 5.0)
    p = fma(p, u, 2.0 / 3.0)
    half = 0.5 * f * f
    return fma(e, _LN2_HIGH64, f - (half - fma(e, _LN2_LOW64, s * fma(u, p, half))))


@inlined
def exp64(x):
    """exp of a float64 up to 0; below -700 it is 0."""
    v = max(x, -700.0)
    turns = np.rint(v * 1.4426950408889634)
    r = fma(-turns, _LN2_LOW64, fma(-turns, _LN2_HIGH64, v))
    p = 1.0
    for i in range(13, 0, -1):
        p = fma(p, r / np.float64(i), 1.0)
    y = p * as_double((np.int64(turns) + np.int64(1023)) << np.int64(52))
    return 0.0 if x < -700.0 else y


@inlined
def log(x):
    """log of a positive, normal float32."""
    return np.float32(log64(np.float64(x))) if x == x else x


# ---- row sums --------------------------------------------------------------------------------------------------------


@inlined
def folded(lanes):
    """The sum of `LANES` chains, added by halves: lane i and lane i + 32, then i and i + 16, down to one. Overwrites them."""
    half = LANES // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@inlined
def row_sum(x, lanes):
    """The sum of a row: element i goes to chain i mod 64; a row above `SPAN` is summed span by span. lanes: 64 float32."""
    total, n = _ZERO, len(x)
    for begin in range(0, n, SPAN):
        end = min(n, begin + SPAN)
        for i in range(LANES):
            lanes[i] = _ZERO
        for first in range(begin, end, LANES):
            for i in range(min(LANES, end - first)):
                lanes[i] += x[first + i]
        total += folded(lanes)
    return total


@inlined
def square_sum(x, lanes):
    """The sum of the squares of a row, in the order of `row_sum`; a square and its addition are one rounding."""
    total, n = _ZERO, len(x)
    for begin in range(0, n, SPAN):
        end = min(n, begin + SPAN)
        for i in range(LANES):
            lanes[i] = _ZERO
        for first in range(begin, end, LANES):
            for i in range(min(LANES, end - first)):
                lanes[i] = fma(x[first + i], x[first + i], lanes[i])
        total += folded(lanes)
    return total


# ---- tiles -----------------------------------------------------------------------------------------------------------
# The inner loop of every product: a tile of rows times a few vectors of columns, one chain per output.


def _make_tile(rows: int, width: int, half: bool = False, by_row: bool = False, tree: bool = False) -> Any:
    """A tile of `rows` rows and `width` columns.

    half    the columns are stored in bfloat16
    by_row  the numbers of a row lie next to each other, not those of a step of k
    tree    sums of a tree are added
    """
    vectors, lanes, cells = width // VECTOR, VECTOR, rows * (width // VECTOR)
    single, i64, i32, i16 = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(16)
    vector, wide, short = (ir.VectorType(kind, lanes) for kind in (single, i32, i16))
    four = ir.VectorType(single, 4)
    number = lambda n: ir.Constant(i64, n)  # noqa: E731
    nothing, zero = ir.Constant(vector, ir.Undefined), ir.Constant(vector, [0.0] * lanes)

    def spread(builder: Any, source: Any, index: int, undefined: Any) -> Any:
        return builder.shuffle_vector(source, undefined, ir.Constant(ir.VectorType(i32, lanes), [index] * lanes))

    def columns(builder: Any, b: Any, at: Any) -> list[Any]:
        """The vectors of one step of k."""
        found = []
        for v in range(vectors):
            where = builder.gep(b, [builder.add(at, number(v * lanes))])
            if half:  # the upper 16 bits of a float32
                stored = builder.load(builder.bitcast(where, short.as_pointer()), align=2)
                found.append(builder.bitcast(builder.shl(builder.zext(stored, wide), ir.Constant(wide, [16] * lanes)), vector))
            else:
                found.append(builder.load(builder.bitcast(where, vector.as_pointer()), align=4))
        return found

    def multipliers(builder: Any, a: Any, lda: Any, step: Any) -> list[Any]:
        """The rows' numbers of one step of k, each in all lanes: ARM multiplies by a lane, x86-64 spreads while it loads."""
        if by_row:
            found = [builder.load(builder.gep(a, [builder.add(builder.mul(lda, number(i)), step)])) for i in range(rows)]
            return [spread(builder, builder.insert_element(nothing, x, ir.Constant(i32, 0)), 0, nothing) for x in found]
        at = builder.mul(step, lda)
        if rows % 4 == 0 and lanes == 4:
            places = [builder.gep(a, [builder.add(at, number(4 * q))]) for q in range(rows // 4)]
            loaded = [builder.load(builder.bitcast(p, four.as_pointer()), align=4) for p in places]
            return [spread(builder, loaded[i // 4], i % 4, ir.Constant(four, ir.Undefined)) for i in range(rows)]
        found = [builder.load(builder.gep(a, [builder.add(at, number(i))])) for i in range(rows)]
        return [spread(builder, builder.insert_element(nothing, x, ir.Constant(i32, 0)), 0, nothing) for x in found]

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        a, lda, b, ldb, k, c, ldc, begun, levels, depth = arguments
        ap, cp, lp = (builder.inttoptr(x, single.as_pointer()) for x in (a, c, levels))
        bp = builder.inttoptr(b, (i16 if half else single).as_pointer())
        multiply_add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
        )
        place = lambda p, n: builder.bitcast(builder.gep(p, [n]), vector.as_pointer())  # noqa: E731
        cell = lambda n: place(cp, builder.add(builder.mul(ldc, number(n // vectors)), number(n % vectors * lanes)))  # noqa: E731

        def joined(values: list[tuple[list[Any], Any]]) -> list[Any]:
            """One phi per accumulator, of (values, block they come from)."""
            found = [builder.phi(vector) for _ in range(cells)]
            for some, block in values:
                for phi, value in zip(found, some, strict=True):
                    phi.add_incoming(value, block)
            return found

        entered = builder.block
        going_on, start, loop, done = (builder.append_basic_block(n) for n in ("begun", "start", "loop", "done"))
        builder.cbranch(builder.icmp_signed("!=", begun, number(0)), going_on, start)
        builder.position_at_end(going_on)
        loaded = [builder.load(cell(n), align=4) for n in range(cells)]
        builder.branch(start)
        builder.position_at_end(start)
        first = joined([([zero] * cells, entered), (loaded, going_on)])
        builder.cbranch(builder.icmp_signed(">", k, number(0)), loop, done)

        builder.position_at_end(loop)
        step = builder.phi(i64)
        step.add_incoming(number(0), start)
        sums = joined([(first, start)])
        bs, xs = columns(builder, bp, builder.mul(step, ldb)), multipliers(builder, ap, lda, step)
        new = [builder.call(multiply_add, [xs[n // vectors], bs[n % vectors], sums[n]]) for n in range(cells)]
        after = builder.add(step, number(1))
        step.add_incoming(after, loop)
        for phi, value in zip(sums, new, strict=True):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", after, k), loop, done)

        builder.position_at_end(done)
        now = joined([(first, start), (new, loop)])
        for level in range(3 if tree else 0):
            before = builder.block
            adding, added = builder.append_basic_block("adding"), builder.append_basic_block("added")
            builder.cbranch(builder.icmp_signed(">", depth, number(level)), adding, added)
            builder.position_at_end(adding)
            others = [builder.load(place(lp, number(level * rows * width + n * lanes)), align=4) for n in range(cells)]
            together = [builder.fadd(x, y) for x, y in zip(others, now, strict=True)]
            builder.branch(added)
            builder.position_at_end(added)
            now = joined([(now, before), (together, adding)])
        for n, value in enumerate(now):
            builder.store(value, cell(n), align=4)
        return context.get_dummy_value()

    @intrinsic
    def tile(
        _context: Any, a: Any, lda: Any, b: Any, ldb: Any, k: Any, c: Any, ldc: Any, begun: Any, levels: Any, depth: Any
    ) -> Any:
        return types.void(*[types.intp] * 10), codegen

    return tile


_tile_8, _tile_4, _tile_2, _tile_1 = (_make_tile(rows, PANEL, tree=True) for rows in (8, 4, 2, 1))
_half_8, _half_4, _half_2, _half_1 = (_make_tile(rows, PANEL, half=True, tree=True) for rows in (8, 4, 2, 1))
_strip_most, _strip_4, _strip_2, _strip_1 = (_make_tile(rows, STRIP) for rows in (STRIP_ROWS, 4, 2, 1))


@inlined
def _part(part, k, parts):
    """(first input of a part, its inputs, how many sums of the tree wait for it: ones at the end of its number)"""
    begin, depth = part * k // parts, 0
    while (part >> depth) & 1:
        depth += 1
    return begin, (part + 1) * k // parts - begin, depth


@compiled("void(intp,intp,intp,intp,intp,intp,intp,intp,intp,intp)", within=True)
def tile(part, rows, a, b, short, k, parts, c, ldc, levels):
    """One part of c[rows, PANEL] = a[k, rows] times b[k, PANEL]: `parts` chains over k, one after another, added as a tree.

    short   b is in bfloat16
    ldc     elements between rows of c
    levels  room for [3, rows, PANEL]: sums of the tree that wait for their other half
    """
    begin, size, depth = _part(part, k, parts)
    x, w = a + 4 * begin * rows, b + (2 if short else 4) * begin * PANEL
    y, ldy = (c, ldc) if part == parts - 1 else (levels + 4 * depth * rows * PANEL, PANEL)
    if short:
        if rows == 8:
            _half_8(x, 8, w, PANEL, size, y, ldy, 0, levels, depth)
        elif rows == 4:
            _half_4(x, 4, w, PANEL, size, y, ldy, 0, levels, depth)
        elif rows == 2:
            _half_2(x, 2, w, PANEL, size, y, ldy, 0, levels, depth)
        else:
            _half_1(x, 1, w, PANEL, size, y, ldy, 0, levels, depth)
    elif rows == 8:
        _tile_8(x, 8, w, PANEL, size, y, ldy, 0, levels, depth)
    elif rows == 4:
        _tile_4(x, 4, w, PANEL, size, y, ldy, 0, levels, depth)
    elif rows == 2:
        _tile_2(x, 2, w, PANEL, size, y, ldy, 0, levels, depth)
    else:
        _tile_1(x, 1, w, PANEL, size, y, ldy, 0, levels, depth)


_all_pairs = _make_tile(TILE, PANEL, by_row=True)
_some_pairs = _make_tile(KEYS, VECTOR, by_row=True)


@compiled("void(intp,intp,intp,intp,intp,intp)", within=True)
def score(keys, width, queries, ldq, lanes, scores):
    """scores [KEYS, PANEL] of keys [KEYS, width] and queries [width, lanes], or up to a whole vector of them: chains"""
    if lanes > PANEL - VECTOR:
        for first in range(0, KEYS, TILE):
            _all_pairs(keys + 4 * first * width, width, queries, ldq, width, scores + 4 * first * PANEL, PANEL, 0, 0, 0)
    else:
        for first in range(0, lanes, VECTOR):
            _some_pairs(keys, width, queries + 4 * first, ldq, width, scores + 4 * first, PANEL, 0, 0, 0)


@compiled("void(intp,intp,intp,intp,intp,intp,intp)", within=True)
def strip(rows, a, b, ldb, k, c, ldc):
    """c[rows, STRIP] goes on by chains over k of a[k, PANEL], of which the first rows, and b[k, STRIP]."""
    if rows == STRIP_ROWS:
        _strip_most(a, PANEL, b, ldb, k, c, ldc, 1, 0, 0)
    elif rows == 4:
        _strip_4(a, PANEL, b, ldb, k, c, ldc, 1, 0, 0)
    elif rows == 2:
        _strip_2(a, PANEL, b, ldb, k, c, ldc, 1, 0, 0)
    else:
        _strip_1(a, PANEL, b, ldb, k, c, ldc, 1, 0, 0)


# ---- weights ---------------------------------------------------------------------------------------------------------
# A softmax in vectors of pairs: scores [keys, pairs].


def _vectors(builder: Any) -> tuple[Any, Callable[..., Any], Callable[[Any], Any]]:
    """(type of a vector, fma, a number in all lanes)"""
    vector = ir.VectorType(ir.FloatType(), VECTOR)
    call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{VECTOR}f32")
    return vector, lambda *x: builder.call(call, x), lambda x: ir.Constant(vector, [float(x)] * VECTOR)


def _exp_of(builder: Any, x: Any) -> Any:
    """`exp` of a vector without numbers above 0, so that one multiplication by a power of 2 is enough."""
    _, multiply_add, full = _vectors(builder)
    whole = ir.VectorType(ir.IntType(32), VECTOR)
    low = builder.fcmp_ordered("<", x, full(_EXP_MIN))
    v = builder.select(low, full(_EXP_MIN), x)
    turns = multiply_add(v, full(_LOG2E), full(_ROUND))
    n = builder.fsub(turns, full(_ROUND))
    r = multiply_add(n, full(_LN2_LOW), multiply_add(n, full(_LN2_HIGH), v))
    q = full(_E4)
    for each in (_E3, _E2, _E1, _E0):
        q = multiply_add(q, r, full(each))
    p = builder.fadd(multiply_add(q, builder.fmul(r, r), r), full(_ONE))
    shifted = builder.shl(builder.bitcast(turns, whole), ir.Constant(whole, [23] * VECTOR))  # n: `_ROUND` has zeros there
    power = builder.bitcast(builder.add(shifted, ir.Constant(whole, [127 << 23] * VECTOR)), x.type)
    return builder.select(low, full(_ZERO), builder.fmul(p, power))


@intrinsic
def weigh(_context: Any, scores: Any, num: Any, scale: Any, maxima: Any, sums: Any, ldm: Any, count: Any, shrinks: Any) -> Any:
    """Scores [num, PANEL] of `VECTOR` pairs over a block become weights; num: a multiple of 4.

    maxima   [VECTOR], and sums [count, ldm] of the weights of two keys each: are carried on
    shrinks  [VECTOR]: filled with what sums so far are multiplied by
    """
    i64 = ir.IntType(64)
    number = lambda n: ir.Constant(i64, n)  # noqa: E731

    def codegen(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        scores, num, scale, maxima, sums, ldm, count, shrinks = given
        vector, multiply_add, full = _vectors(builder)
        nothing = ir.Constant(vector, ir.Undefined)
        by = builder.insert_element(nothing, scale, ir.Constant(ir.IntType(32), 0))
        by = builder.shuffle_vector(by, nothing, ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [0] * VECTOR))
        place = lambda address, n: builder.inttoptr(builder.add(address, builder.mul(n, number(4))), vector.as_pointer())  # noqa: E731
        at = lambda j, more: place(scores, builder.mul(builder.add(j, number(more)), number(PANEL)))  # noqa: E731
        scaled = lambda j, more: builder.fmul(builder.load(at(j, more), align=4), by)  # noqa: E731
        larger = lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y)  # noqa: E731
        before = builder.load(place(maxima, number(0)), align=4)
        tops = [cgutils.alloca_once_value(builder, before) for _ in range(4)]
        with cgutils.for_range_slice(builder, number(0), num, number(4), inc=True) as (j, _):
            for i, top in enumerate(tops):
                builder.store(larger(scaled(j, i), builder.load(top)), top)
        a, b, c, d = (builder.load(each) for each in tops)
        top = larger(larger(a, b), larger(c, d))
        safe = builder.select(builder.fcmp_ordered("==", top, full(-_INF)), full(_ZERO), top)
        shrink = _exp_of(builder, builder.fsub(before, safe))
        builder.store(top, place(maxima, number(0)), align=4)
        builder.store(shrink, place(shrinks, number(0)), align=4)
        half = builder.ashr(num, number(1))
        with cgutils.for_range_slice(builder, number(0), half, number(1), inc=True) as (i, _):
            j, both = builder.mul(i, number(2)), []
            for one in range(2):
                both.append(_exp_of(builder, builder.fsub(scaled(j, one), safe)))
                builder.store(both[-1], at(j, one), align=4)
            sum_ = place(sums, builder.mul(i, ldm))
            builder.store(multiply_add(builder.load(sum_, align=4), shrink, builder.fadd(*both)), sum_, align=4)
        with cgutils.for_range_slice(builder, half, count, number(1), inc=True) as (i, _):  # keys nobody sees
            sum_ = place(sums, builder.mul(i, ldm))
            builder.store(builder.fmul(builder.load(sum_, align=4), shrink), sum_, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 2, types.float32, *[types.intp] * 5), codegen


@intrinsic
def turn(_context: Any, source: Any, lds: Any, target: Any, ldt: Any) -> Any:
    """target [VECTOR, VECTOR] = source transposed; rows lie lds and ldt apart."""

    def codegen(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        vector, i64 = ir.VectorType(ir.FloatType(), VECTOR), ir.IntType(64)
        where = lambda address, ld, i: builder.inttoptr(  # noqa: E731
            builder.add(address, builder.mul(ld, ir.Constant(i64, 4 * i))), vector.as_pointer()
        )
        rows = [builder.load(where(given[0], given[1], i), align=4) for i in range(VECTOR)]
        half, kind = VECTOR // 2, ir.VectorType(ir.IntType(32), VECTOR)
        masks = [ir.Constant(kind, [i // 2 + first + i % 2 * VECTOR for i in range(VECTOR)]) for first in (0, half)]
        for _ in range(VECTOR.bit_length() - 1):
            rows = [builder.shuffle_vector(rows[i // 2], rows[i // 2 + half], masks[i % 2]) for i in range(VECTOR)]
        for i, row in enumerate(rows):
            builder.store(row, where(given[2], given[3], i), align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


@inlined
def largest(x, lanes):
    """The largest number that is no NaN. lanes: room for LANES. Comparing one after another takes four times as long"""
    for i in range(LANES):
        lanes[i] = -_INF
    whole = len(x) // LANES * LANES
    for start in range(0, whole, LANES):
        for i in range(LANES):
            lanes[i] = x[start + i] if x[start + i] > lanes[i] else lanes[i]
    for i in range(whole, len(x)):
        lanes[0] = x[i] if x[i] > lanes[0] else lanes[0]
    half = LANES
    while half > 1:
        half //= 2
        for i in range(half):
            lanes[i] = lanes[i] if lanes[i] > lanes[i + half] else lanes[i + half]
    return lanes[0]


@inlined
def height(rows, most):
    """Rows of the next tile if so many are left, at most `most`."""
    if rows >= most:
        return most
    if rows >= 4:
        return 4
    return 2 if rows >= 2 else 1


@inlined
def pack_rows(x, stride, rows, columns, packed):
    """Rows [rows, columns] at address x, `stride` apart, column by column -> address `packed`"""
    out = floats(packed, rows * columns)
    for i in range(rows):
        row = floats(x + 4 * i * stride, columns)
        for k in range(columns):
            out[k * rows + i] = row[k]
