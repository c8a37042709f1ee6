"""`RowOrder`: a shuffled order of rows, computed where it is needed: any part of it, in any process, without a table.

The order is a function of the number of rows, the seed and the epoch. It comes from integer arithmetic alone (a Feistel
network over row numbers), so that it is the same with every version of every library.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import shown, whole

SHUFFLES = ("rows", "blocks")
BLOCK_ROWS, POOL_BLOCKS = 256, 256
"""of shuffle="blocks": adjacent rows that are read together, and blocks whose rows are mixed"""
_CHUNK = 1 << 16
_ROUNDS = 8
_LEAST_BITS = 6
"""halves of fewer than 3 bits would favour some permutations"""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RowOrder:
    """The endless sequence of rows: one permutation of all rows per epoch, one epoch after the other."""

    count: int
    seed: int
    shuffle: str | None
    """rows: every row anywhere. blocks: blocks of adjacent rows anywhere, rows mixed within pools of blocks. None: as stored"""

    def __post_init__(self) -> None:
        whole("seed", self.seed, 0, _MASK)
        if self.shuffle not in (*SHUFFLES, None):
            raise BadRequest(f"Unknown shuffle={shown(self.shuffle)}. Use {', '.join(map(repr, SHUFFLES))} or None.")

    def rows(self, first: int, last: int) -> np.ndarray:
        """Row numbers at positions [first, last) of the sequence."""
        pieces = []
        while first < last:
            epoch, start = divmod(first, self.count)
            number, skipped = divmod(start, _CHUNK)
            piece = _chunk(self, epoch, number)[skipped : skipped + last - first]
            pieces.append(piece)
            first += len(piece)
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)

    def of_epoch(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Row numbers at some positions (uint64) of an epoch."""
        if self.shuffle is None:
            return positions.astype(np.int64)
        key = _mix(_mix(self.seed) ^ epoch)
        if self.shuffle == "rows":
            return permuted(positions, self.count, key).astype(np.int64)
        return self._in_pools(positions, key).astype(np.int64)

    def _in_pools(self, positions: np.ndarray, key: int) -> np.ndarray:
        """Blocks in a random order, cut into pools; the rows of each pool in a random order. The short block at the end of the
        dump stays last, so that every pool but the last has the same size."""
        full = self.count // BLOCK_ROWS
        pool_rows = BLOCK_ROWS * POOL_BLOCKS
        out = np.empty_like(positions)
        pools = positions // np.uint64(pool_rows)
        for pool in np.unique(pools).tolist():
            here, first = pools == pool, pool * pool_rows
            size = min(pool_rows, self.count - first)
            inside = permuted(positions[here] - np.uint64(first), size, _mix(key ^ (pool + 1))) + np.uint64(first)
            block, within = inside // np.uint64(BLOCK_ROWS), inside % np.uint64(BLOCK_ROWS)
            moved = block < full
            block[moved] = permuted(block[moved], full, key)
            out[here] = block * np.uint64(BLOCK_ROWS) + within
        return out


@lru_cache(8)
def _chunk(order: RowOrder, epoch: int, number: int) -> np.ndarray:
    """A part of an epoch; do not modify it. Kept, because batches are smaller than what is computed fast."""
    return order.of_epoch(epoch, np.arange(number * _CHUNK, min(order.count, (number + 1) * _CHUNK), dtype=np.uint64))


def permuted(places: np.ndarray, count: int, key: int) -> np.ndarray:
    """Where a permutation of range(count), chosen by the key, takes each of the places (uint64).

    A Feistel network permutes the next power of two. A place that leaves the range is sent on until it is back in it, which
    takes less than two steps on average.
    """
    bits = max(_LEAST_BITS, (count - 1).bit_length())
    low = bits // 2
    keys = [_mix(key + number) & 0xFFFFFFFF for number in range(1, _ROUNDS + 1)]
    out = _feistel(places, low, bits - low, keys)
    while (outside := np.flatnonzero(out >= count)).size:
        out[outside] = _feistel(out[outside], low, bits - low, keys)
    return out


def _feistel(x: np.ndarray, low_bits: int, high_bits: int, keys: list[int]) -> np.ndarray:
    """A permutation of [0, 2^(low_bits + high_bits)); each half has at most 32 bits."""
    low_mask, high_mask = np.uint32((1 << low_bits) - 1), np.uint32((1 << high_bits) - 1)
    low, high = x.astype(np.uint32) & low_mask, (x >> np.uint64(low_bits)).astype(np.uint32)
    for number, key in enumerate(keys):
        if number % 2:
            low ^= _hash(high, key) & low_mask
        else:
            high ^= _hash(low, key) & high_mask
    return (high.astype(np.uint64) << np.uint64(low_bits)) | low


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    """32 well-mixed bits of each value: the finalizer of MurmurHash3. 32-bit products are vectorised, 64-bit ones are not."""
    x = x ^ np.uint32(key)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)  # wraps around
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def _mix(value: int) -> int:
    """64 well-mixed bits of a whole number: the finalizer of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
