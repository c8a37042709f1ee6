"""Drawn tokens on a CPU, in portable arithmetic: Gumbel noise that is a function of seed, position and token, and `draw`."""

from typing import Any

import numpy as np

from replaylens.kernels.portable import compiled, double_bits, exp64, log64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@compiled("uint64(uint64)", within=True)
def _mix(x):
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled("uint64(uint64,uint64)", within=True)
def _stream(seed, position):
    return _mix(_mix(seed + _GOLDEN) + _GOLDEN * position)


@compiled("float64(uint64)")
def _noise(bits):
    """Of a token, from its hash."""
    return -log64(-log64((np.float64(bits >> np.uint64(12)) + 0.5) * 2.220446049250313e-16))


@compiled("void(uint64,uint64,float64[::1])")
def _gumbel(seed, position, out):
    stream = _stream(seed, position)
    for i in range(len(out)):
        out[i] = _noise(_mix(stream + _GOLDEN * np.uint64(i)))


def gumbel(seed: int, position: int, vocab: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Gumbel noise for the token at `position`: [vocab], float64. -log(-log u), u on the 2^52 midpoints of (0, 1)."""
    out = np.empty(vocab, np.float64)
    _gumbel(np.uint64(seed), np.uint64(position), out)
    return out


PER_BIT = 0.6931471805599453 * (1 + 2.0**-30)
"""what the noise of a token grows by at most if 1 - u halves: log 2, and more than both logarithms can err"""


@compiled("float64(uint64,float64)")
def _most_noise(bits, per_bit):
    """At least `_noise(bits)`: -log u is at least 1 - u, which is at least 2^-n, so the noise is at most n log 2. 1 - u, a
    midpoint like u, is exact, and its exponent is -n. Each logarithm errs by less than 2^-48 of its value."""
    left = (np.float64(~bits >> np.uint64(12)) + 0.5) * 2.220446049250313e-16
    return np.float64(np.int64(1023) - (double_bits(left) >> np.int64(52))) * per_bit


@compiled("intp(uint64,uint64,float64[::1],float64)")
def _draw(seed, position, scores, per_bit):
    stream, best, chosen = _stream(seed, position), -np.inf, 0
    for i in range(len(scores)):
        bits = _mix(stream + _GOLDEN * np.uint64(i))
        # Rounding keeps the order: the sum with the noise is no larger, and of equal scores the first wins. NaN goes on.
        if scores[i] + _most_noise(bits, per_bit) <= best:
            continue
        score = scores[i] + _noise(bits)
        if score > best:
            best, chosen = score, i
        elif score != score:
            return i
    return chosen


def draw(scores: "np.ndarray[Any, np.dtype[np.float64]]", seed: int, position: int) -> int:
    """`(scores + gumbel(seed, position, len(scores))).argmax()`, in a tenth of the time: the noise of a token that cannot win
    is only bounded."""
    return int(_draw(np.uint64(seed), np.uint64(position), np.ascontiguousarray(scores), PER_BIT))


@compiled("void(float64[::1],float64[::1])")
def _exponentials(x, out):
    for i in range(len(x)):
        out[i] = exp64(x[i])


def exponentials(x: "np.ndarray[Any, np.dtype[np.float64]]") -> "np.ndarray[Any, np.dtype[np.float64]]":
    """exp of numbers up to 0, float64."""
    out = np.empty(len(x), np.float64)
    _exponentials(np.ascontiguousarray(x), out)
    return out
