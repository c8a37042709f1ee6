"""Portable arithmetic in Triton: what float32 kernels are made of (`kernels/definition.py` says what every function computes).

Kernels are compiled without contraction (`launch.EXACT`), so that a product is fused with an addition exactly where `tl.fma` or
`tl.dot` says so; a float32 dot is a chain of fused multiply-adds in the order of k, whatever the tile. Functions are written
with the operations of `kernels/portable.py`, one by one.
"""

import triton
import triton.language as tl


@triton.jit
def _poly(p, x, c):
    return tl.fma(p, x, tl.full(x.shape, c, tl.float32))


@triton.jit
def exp(x):
    """exp of a float32 tensor. Below the smallest normal number the result is 0, above the largest infinity; NaN stays."""
    v = tl.minimum(tl.maximum(x, -87.33654), 88.72283)
    turns = _poly(v, tl.full(x.shape, 1.4426950408889634, tl.float32), 12582912.0) - 12582912.0
    r = tl.fma(turns, tl.full(x.shape, -0.693145751953125, tl.float32), v)
    r = tl.fma(turns, tl.full(x.shape, -1.428606765330187e-06, tl.float32), r)
    p = _poly(tl.full(x.shape, 0.0013942160876467824, tl.float32), r, 0.008363775908946991)
    p = _poly(p, r, 0.041666362434625626)
    p = _poly(p, r, 0.16666573286056519)
    p = _poly(p, r, 0.5)
    p = tl.fma(p, r * r, r) + 1.0
    whole = turns.to(tl.int32)
    half = whole >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    y = p * first * second
    y = tl.where(x < -87.33654, 0.0, y)
    y = tl.where(x > 88.72283, float("inf"), y)
    return tl.where(x == x, y, x)


@triton.jit
def tanh(x):
    """Below 0.625 a polynomial, beyond it 1 - 2 / (1 + exp(2 |x|))."""
    u, size = x * x, tl.abs(x)
    p = _poly(tl.full(x.shape, -0.0060622370801866055, tl.float32), u, 0.02097501792013645)
    p = _poly(p, u, -0.05384669825434685)
    p = _poly(p, u, 0.13332746922969818)
    p = _poly(p, u, -0.333333283662796)
    near = tl.fma(p, u * x, x)
    far = 1.0 - divided(tl.full(x.shape, 2.0, tl.float32), 1.0 + exp(size + size))
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def erf(x):
    """Up to 1 a polynomial, beyond it 1 - exp(-p(|x|)) with |x| at most 4."""
    u, size = x * x, tl.minimum(tl.abs(x), 4.0)
    near = _poly(tl.full(x.shape, 7.889119297033176e-05, tl.float32), u, -0.0008020841050893068)
    near = _poly(near, u, 0.005189535208046436)
    near = _poly(near, u, -0.026854444295167923)
    near = _poly(near, u, 0.11283600330352783)
    near = _poly(near, u, -0.3761262595653534)
    near = _poly(near, u, 1.1283791065216064) * x
    p = _poly(tl.full(x.shape, 1.6974578898043546e-07, tl.float32), size, 1.9262735804659314e-05)
    p = _poly(p, size, -0.00042650540126487613)
    p = _poly(p, size, 0.004153775982558727)
    p = _poly(p, size, -0.025101762264966965)
    p = _poly(p, size, 0.10827848315238953)
    p = _poly(p, size, 0.6333328485488892)
    p = _poly(p, size, 1.1295273303985596)
    p = _poly(p, size, -0.00017812415899243206)
    far = 1.0 - exp(-p)
    return tl.where(size < 1.0, near, tl.where(x < 0.0, -far, far))


@triton.jit
def divided(x, y):
    """x / y, correctly rounded."""
    return tl.div_rn(x, y)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """f(x) in float32."""
    if KIND == "silu":
        return divided(x, 1.0 + exp(-x))
    elif KIND == "gelu":
        half = 0.5 * x
        return tl.fma(half, erf(x * 0.7071067690849304), half)
    elif KIND == "gelu_tanh":
        u = tl.fma(x * x * 0.044714998453855515, x, x)
        return divided(x, 1.0 + exp(u * -1.5957691669464111))
    elif KIND == "exp":
        return exp(x)
    elif KIND == "tanh":
        return tanh(x)
    elif KIND == "sigmoid":
        return divided(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))
    elif KIND == "softplus":
        y = exp(x)
        near = tl.where(y < 2.9802322387695312e-08, y, log64(1.0 + y.to(tl.float64)).to(tl.float32))
        return tl.where((x > 20.0) | (x != x), x, near)
    elif KIND == "relu2":
        above = tl.where(x < 0.0, 0.0, x)
        return above * above
    else:
        return tl.where(x < 0.0, 0.0, x)


@triton.jit
def activate_gated(gate, up, KIND: tl.constexpr):
    """f(gate) * up in float32."""
    if KIND == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1.0) * divided(gate, 1.0 + exp(gate * -1.7020000219345093))
    else:
        return activate(gate, KIND) * up


@triton.jit
def _halved(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """[ROWS, 2 HALF] -> [ROWS, HALF]: column i and column i + HALF."""
    a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    return a + b


@triton.jit
def folded(lanes, ROWS: tl.constexpr):
    """The sum of 64 chains [ROWS, 64], added by halves: [ROWS, 1]."""
    s = _halved(lanes, ROWS, 32)
    s = _halved(s, ROWS, 16)
    s = _halved(s, ROWS, 8)
    s = _halved(s, ROWS, 4)
    s = _halved(s, ROWS, 2)
    return _halved(s, ROWS, 1)


@triton.jit
def row_sum(X, valid, minus, width, SQUARES: tl.constexpr, ROWS: tl.constexpr):
    """Sums of rows at the addresses X [ROWS, 1], or of the squares of their numbers minus `minus`: [ROWS, 1]."""
    i = tl.arange(0, 64)[None, :]
    total = tl.zeros((ROWS, 1), tl.float32)
    for begin in range(0, width, 4096):
        lanes = tl.zeros((ROWS, 64), tl.float32)
        for first in range(begin, tl.minimum(width, begin + 4096), 64):
            inside = valid & (first + i < width)
            v = tl.load(X + first + i, mask=inside, other=0.0)
            if SQUARES:
                v = tl.where(inside, v - minus, 0.0)
                lanes = tl.fma(v, v, lanes)
            else:
                lanes = lanes + v
        total += folded(lanes, ROWS)
    return total


@triton.jit
def log64(x):
    """log of a positive, normal float64 tensor: with s = f / (2 + f), log(1 + f) = 2 s + s^3 (2/3 + 2/5 s^2 + ...)."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 2047) - 1022
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    low = m < 0.7071067811865476
    m = tl.where(low, m + m, m)
    e = tl.where(low, exponent - 1, exponent).to(tl.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    u = s * s
    p = tl.full(x.shape, 2.0 / 23.0, tl.float64)
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 21.0, tl.float64))
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 19.0, tl.float64))
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 17.0, tl.float64))
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 15.0, tl.float64))
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 13.0, tl.float64))
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 11.0, tl.float64))
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 9.0, tl.float64))
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 7.0, tl.float64))
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 5.0, tl.float64))
    p = tl.fma(p, u, tl.full(x.shape, 2.0 / 3.0, tl.float64))
    half = 0.5 * f * f
    rest = s * tl.fma(u, p, half)
    rest = tl.fma(e, tl.full(x.shape, 1.9082149292705877e-10, tl.float64), rest)
    return tl.fma(e, tl.full(x.shape, 0.6931471803691238, tl.float64), f - (half - rest))
