"""`portable-1`: what every committed number is, in plain NumPy. Slow, and right by definition.

Whoever computes these steps has these bits, on any machine. The rules:

* Numbers are float32, rounded to nearest even; denormal numbers are kept; infinities and NaN follow IEEE 754.
* `fma(a, b, c)` is a * b + c, rounded once. Where no fma is written, every operation is rounded on its own.
* Every sum has one order. A *chain* adds from first to last, beginning with 0.
* A product is a tree of eight chains. Part p holds the terms from p k // 8 up to (p + 1) k // 8, so that 2, 4 or 8 ranks which
  hold equal contiguous shares of k compute whole subtrees. Parts may be empty.
* A row is summed in 64 chains, element i in chain i mod 64, which are added by halves; a row above 4,096 elements is summed
  in spans of 4,096, whose sums are a chain.
* Attention walks over keys in blocks of 64 from position 0 and in splits of 512; keys that a row does not see take no part.
* A recurrent state is carried over chunks of 64 positions from position 0. A row follows from the state at the start of its
  chunk and the rows of the chunk up to itself, so that it does not depend on how the path is cut into passes.
* exp, tanh, erf, log, cos and sin are those of this page and of `kernels/portable.py`, never a library's. Division and square
  root are correctly rounded.

`kernels/cpu.py` computes it on a CPU. Tests compare both to the bit.
"""

import math
from decimal import ROUND_HALF_EVEN, Context, Decimal, DivisionByZero, InvalidOperation, Overflow
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
F = np.float32
PARTS, LANES, SPAN, KV_BLOCK, KV_SPLIT, CHUNK = 8, 64, 4096, 64, 512, 64


def fma(a: Any, b: Any, c: Any) -> Floats:
    """a * b + c, rounded once: exact products in float64, sums rounded to odd, which float32 then rounds right."""
    product, c = np.multiply(np.float64(a), np.float64(b)), np.float64(c)
    total = np.asarray(product + c)
    back = total - product
    rest = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    away = np.where((rest > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    return np.asarray(np.where(inexact, bits + away, bits).view(np.float64)).astype(F)


# ---- sums ------------------------------------------------------------------------------------------------------------


def product(x: Floats, w: Floats) -> Floats:
    """x [rows, k] times w [k, columns]"""
    k, parts = len(w), []
    for p in range(PARTS):
        total = np.zeros((len(x), w.shape[1]), F)
        for i in range(p * k // PARTS, (p + 1) * k // PARTS):
            total = fma(x[:, i : i + 1], w[i], total)
        parts.append(total)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def row_sum(x: Floats, squares: bool = False) -> Any:
    """The sum of a row, or of its squares."""
    total: Any = F(0)
    for begin in range(0, len(x), SPAN):
        lanes = np.zeros(LANES, F)
        for first in range(begin, min(len(x), begin + SPAN), LANES):
            some = x[first : min(first + LANES, begin + SPAN)]
            lanes[: len(some)] = fma(some, some, lanes[: len(some)]) if squares else lanes[: len(some)] + some
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        total = total + lanes[0]
    return total


# ---- functions -------------------------------------------------------------------------------------------------------


def _polynomial(x: Any, *coefficients: str) -> Any:
    """Horner's scheme, the highest coefficient first."""
    p: Any = F(float.fromhex(coefficients[0]))
    for each in coefficients[1:]:
        p = fma(p, x, F(float.fromhex(each)))
    return p


def exp(x: Any) -> Any:
    """2^n (1 + r + r^2 q(r)) with n = round(x / ln 2), r = x - n ln 2. Below -87.33654 it is 0, above 88.72283 infinity."""
    x = np.asarray(x, F)
    v = np.clip(x, F(-87.33654), F(88.72283))
    n = fma(v, F(1.4426950408889634), F(1.5 * 2**23)) - F(1.5 * 2**23)
    r = fma(n, F(-1.428606765330187e-06), fma(n, F(-0.693145751953125), v))
    q = _polynomial(r, "0x1.6d7c42p-10", "0x1.12107p-7", "0x1.5554b2p-5", "0x1.5554d8p-3", "0x1p-1")
    half = np.floor(np.nan_to_num(n) / 2)
    y = (fma(q, r * r, r) + F(1)) * np.exp2(half).astype(F) * np.exp2(np.nan_to_num(n) - half).astype(F)
    return np.where(x < F(-87.33654), F(0), np.where(x > F(88.72283), F(np.inf), y)).astype(F)


def tanh(x: Any) -> Any:
    """Below 0.625 a polynomial, beyond it 1 - 2 / (1 + exp(2 |x|))"""
    x = np.asarray(x, F)
    u, size = x * x, np.abs(x)
    p = _polynomial(u, "-0x1.8d4b76p-8", "0x1.57a79ap-6", "-0x1.b91cb6p-5", "0x1.110dfep-3", "-0x1.555552p-2")
    far = F(1) - F(2) / (F(1) + exp(size + size))
    return np.where(size < F(0.625), fma(p, u * x, x), np.where(x < 0, -far, far)).astype(F)


def erf(x: Any) -> Any:
    """Up to 1 a polynomial, beyond it 1 - exp(-p(|x|)) with |x| at most 4"""
    x = np.asarray(x, F)
    u, size = x * x, np.minimum(np.abs(x), F(4))
    near = _polynomial(
        u, "0x1.4ae4c6p-14", "-0x1.a485e8p-11", "0x1.5419f4p-8", "-0x1.b7fbb4p-6", "0x1.ce2d2p-4", "-0x1.81273ep-2",
        "0x1.20dd74p+0",
    ) * x  # fmt: skip
    p = _polynomial(
        size, "0x1.6c86bcp-23", "0x1.432cd2p-16", "-0x1.bf392cp-12", "0x1.1038ccp-8", "-0x1.9b446cp-6", "0x1.bb8238p-4",
        "0x1.444434p-1", "0x1.2128b4p+0", "-0x1.758daep-13",
    )  # fmt: skip
    far = F(1) - exp(-p)
    return np.where(size < F(1), near, np.where(x < 0, -far, far)).astype(F)


def log(x: Any) -> Any:
    """The natural logarithm of positive numbers, in float64 and then rounded: log(2^e (1 + f)) with s = f / (2 + f)."""
    return np.vectorize(_log, otypes=[F])(x)


def _log(x: float) -> np.float32:
    m, e = math.frexp(float(x))
    m, e = (m + m, e - 1) if m < 0.7071067811865476 else (m, e)
    f = m - 1.0
    s = f / (2.0 + f)
    p, half = 2.0 / 23.0, 0.5 * f * f
    for odd in range(21, 1, -2):
        p = _fma64(p, s * s, 2.0 / odd)
    rest = _fma64(e, 1.9082149292705877e-10, s * _fma64(s * s, p, half))
    return F(_fma64(e, 0.6931471803691238, f - (half - rest)))


def softplus(x: Any) -> Any:
    """log(1 + exp(x)): x itself above 20, exp(x) where that is below 2^-25, else the sum and its logarithm in float64"""
    x, y, far = np.asarray(x, F), exp(x), ~(np.asarray(x) <= 20)
    near = np.vectorize(lambda each: _log(1.0 + float(each)), otypes=[F])(np.where(far, F(0), y))
    return np.where(far, x, np.where(y < F(2**-25), y, near)).astype(F)


def _fma64(a: float, b: float, c: float) -> float:
    """a * b + c in float64, rounded once."""
    return float(Fraction(a) * Fraction(b) + Fraction(c))


_FORTY = Context(40, ROUND_HALF_EVEN, -999999, 999999, 1, 0, [], [DivisionByZero, InvalidOperation, Overflow])
"""forty digits, rounded to nearest: not the caller's context, which may round otherwise or raise"""


def power(base: float, exponent: float) -> float:
    """base ** exponent, the same on every machine: the C library's differs between systems in the last bit."""
    return float(_FORTY.power(Decimal(base), Decimal(exponent)))


def logarithm(x: float) -> float:
    """The natural logarithm, the same on every machine."""
    return float(_FORTY.ln(Decimal(x)))


_QUARTER = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
"""a quarter turn in three parts: multiples of the first two by whole numbers below 2 ** 20 are exact"""


def turn(angle: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """cos and sin of angles up to 1e6, the same on every machine: sums and products of single numbers, each rounded once."""
    quarters = np.rint(angle * (2 / math.pi))
    r = ((angle - quarters * _QUARTER[0]) - quarters * _QUARTER[1]) - quarters * _QUARTER[2]
    u = r * r
    sin, cos = np.zeros_like(r), np.zeros_like(r)
    for n in range(8, 0, -1):  # Taylor's series up to r ** 17
        sin = (1.0 - sin) * (u / ((2 * n) * (2 * n + 1)))
        cos = (1.0 - cos) * (u / ((2 * n - 1) * (2 * n)))
    sin, cos = (1.0 - sin) * r, 1.0 - cos
    which = quarters.astype(np.int64) & 3
    swapped = (which & 1).astype(bool)
    return (
        np.where(swapped, sin, cos) * np.where((which == 1) | (which == 2), -1.0, 1.0),
        np.where(swapped, cos, sin) * np.where(which >= 2, -1.0, 1.0),
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def norm(x: Floats, weight: Floats, bias: Floats | None, eps: float, kind: str) -> Floats:
    """RMSNorm or LayerNorm of a row"""
    width = F(len(x))
    if kind == "layer":
        x = x - row_sum(x) / width
    y = x * (F(1) / np.sqrt(row_sum(x, squares=True) / width + F(eps)))
    return y * weight if bias is None else fma(y, weight, bias)


def activate(x: Floats, kind: str) -> Any:
    """An activation; gated ones multiply the result of the gate with `up`"""
    match kind:
        case "silu":
            return x / (F(1) + exp(-x))
        case "gelu":
            half = F(0.5) * x
            return fma(half, erf(x * F(0.5**0.5)), half)
        case "gelu_tanh":
            u = fma(x * x * F(0.044715), x, x)
            return x / (F(1) + exp(u * F(-2 * (2 / np.pi) ** 0.5)))
        case "relu" | "relu2":
            above = np.where(x < 0, F(0), x)
            return above if kind == "relu" else above * above
    raise ValueError(kind)


def clamped_swiglu(gate: Floats, up: Floats) -> Any:
    """GPT-OSS's activation"""
    gate, up = np.minimum(gate, F(7)), np.clip(up, F(-7), F(7))
    return (up + F(1)) * (gate / (F(1) + exp(gate * F(-1.702))))


def rotate(a: Floats, b: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
    """Pairs of dimensions, turned"""
    return fma(-b, sin, a * cos), fma(a, sin, b * cos)


def log_softmax(x: Floats) -> Floats:
    """x - (max + log(sum(exp(x - max))))"""
    top = x.max()
    return x - F(top + log(row_sum(exp(x - top))))


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(
    q: Floats, keys: Floats, values: Floats, position: int, scale: float, cap: float = 0.0, window: int = 0,
    slope: float = 0.0, sink: float | None = None,
) -> Floats:  # fmt: skip
    """One query [d] at a position over its keys [n, d] and values [n, width], from position 0 on"""
    width = values.shape[1]
    whole = (F(-np.inf), F(0), np.zeros(width, F))
    first = max(0, position + 1 - window) if window else 0
    for begin in range(first // KV_SPLIT * KV_SPLIT, position + 1, KV_SPLIT):
        m, sums, a = F(-np.inf), np.zeros(KV_BLOCK // 2, F), np.zeros(width, F)
        for start in range(begin, min(begin + KV_SPLIT, position + 1), KV_BLOCK):
            seen = np.arange(max(first, start), min(position + 1, start + KV_BLOCK))
            if not len(seen):
                continue
            s = np.full(KV_BLOCK, -np.inf, F)
            s[seen - start] = _scores(q, keys[seen], seen, scale, cap, slope)
            top = max(m, s.max())
            shrink, p = exp(m - top), exp(s - top)
            sums, a, m = fma(sums, shrink, p[::2] + p[1::2]), a * shrink, top
            for j in seen:
                a = fma(p[j - start], values[j], a)
        total: Any = F(0)
        for each in sums:
            total = total + each
        whole = _merged(whole, (m, total, a))
    if sink is not None:
        whole = _merged(whole, (F(sink), F(1), np.zeros(width, F)))
    return whole[2] / whole[1] + F(0)  # no negative zero: adding what a row does not see could change its sign


def _scores(q: Floats, keys: Floats, places: Any, scale: float, cap: float, slope: float) -> Any:
    """Of one query with each key [n, d]: a chain over d"""
    total: Any = np.zeros(len(keys), F)
    for a, b in zip(q, keys.T, strict=True):
        total = fma(a, b, total)
    s = total * F(scale)
    s = tanh(s / F(cap)) * F(cap) if cap else s
    return fma(F(slope), places.astype(F), s) if slope else s


def _merged(one: Any, other: Any) -> Any:
    """Two partial softmaxes (maximum, sum, weighted values) as one"""
    top = max(one[0], other[0])
    safe = F(0) if top == -np.inf else top
    x, y = exp(one[0] - safe), exp(other[0] - safe)
    return top, fma(other[1], y, one[1] * x), fma(other[2], y, one[2] * x)


# ---- recurrences -----------------------------------------------------------------------------------------------------


def short_conv(inputs: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    """The last of inputs [n, channels], from position 0 on, with those before it: a chain over weight [taps, channels], whose
    last row is that of the position itself. Positions below 0 take no part; the bias is added last."""
    total = np.zeros(inputs.shape[1], F)
    seen = inputs[-len(weight) :]
    for w, x in zip(weight[len(weight) - len(seen) :], seen, strict=True):
        total = fma(w, x, total)
    return total if bias is None else total + bias


def gated_delta(q: Floats, k: Floats, v: Floats, g: Floats, beta: Floats | None) -> tuple[Floats, Floats]:
    """One head over all rows from position 0 on: q, k [n, d], v [n, width], log decays g [n], beta [n]. Also the last state.

    S_t = exp(g_t) S_(t-1) + k_t u_t^T and o_t = S_t^T q_t, with u_t = beta_t (v_t - (exp(g_t) S_(t-1))^T k_t); without beta,
    u_t = v_t, which is Mamba-2's recurrence (`ssd`).
    """
    state, u, out = np.zeros((k.shape[1], v.shape[1]), F), np.zeros_like(v), np.zeros_like(v)
    for t in range(len(q)):
        first, decay = t - t % CHUNK, decays(g[t - t % CHUNK : t + 1])
        before, own = slice(first, t), slice(first, t + 1)
        u[t] = v[t] if beta is None else beta[t] * (v[t] - _read(state, k[before], u[before], decay[:-1], k[t]))
        out[t] = _read(state, k[own], u[own], decay, q[t])
        if (t + 1) % CHUNK == 0 or t + 1 == len(q):
            state = carried(state, k[own], u[own], decay)
    return out, state


def ssd(q: Floats, k: Floats, v: Floats, g: Floats) -> tuple[Floats, Floats]:
    """Mamba-2's recurrence: q is C, k is B, v is dt x."""
    return gated_delta(q, k, v, g, None)


def decays(g: Floats) -> Any:
    """What is left at the last row of g [n] of the state before the first, and of each row: exp of sums from the last back"""
    sums = [F(0)]
    for each in g[::-1]:
        sums.append(sums[-1] + each)
    return exp(np.array(sums[::-1]))


def _read(start: Floats, k: Floats, u: Floats, decay: Floats, x: Floats) -> Any:
    """x [d] times the state: that at the start, then the rows since, each with what is left of it"""
    total: Any = np.zeros(start.shape[1], F)
    for a, row in zip(x, start, strict=True):
        total = fma(a, row, total)
    total = total * decay[0]
    for score, left, row in zip(_scores(x, k, None, 1.0, 0.0, 0.0), decay[1:], u, strict=True):
        total = fma(score * left, row, total)
    return total


def carried(start: Floats, k: Floats, u: Floats, decay: Floats) -> Any:
    """The state after rows k [n, d] and u [n, width]"""
    total = start * decay[0]
    for key, left, row in zip(k, decay[1:], u, strict=True):
        total = fma((key * left)[:, None], row, total)
    return total
