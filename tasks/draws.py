"""Stateless randomness: every draw is a hash of its purpose.

A draw depends only on the key (task, knobs, seed), the example's index, the purpose in words and a running number, not
on earlier draws, the platform or the Python version. Adding a draw never shifts the others.
"""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_BITS = 64


class Draws:
    """All draws of one example. Immutable: the same purpose and place always give the same value."""

    __slots__ = ("_base",)

    def __init__(self, key: str, index: int) -> None:
        self._base = hashlib.blake2b(f"{key}\n{index}".encode(), digest_size=_BITS // 8, person=b"replaylens.tasks")

    def bits(self, purpose: str, place: int = 0) -> int:
        """An integer, uniform on [0, 2**64)."""
        drawn = self._base.copy()
        drawn.update(f"\n{purpose}\n{place}".encode())
        return int.from_bytes(drawn.digest(), "big")

    def below(self, n: int, purpose: str, place: int = 0) -> int:
        """An integer, uniform on [0, n) up to a bias of n / 2**64."""
        return self.bits(purpose, place) * n >> _BITS

    def between(self, bounds: tuple[int, int], purpose: str, place: int = 0) -> int:
        """An integer, uniform on the closed interval `bounds`."""
        low, high = bounds
        return low + self.below(high - low + 1, purpose, place)

    def chance(self, p: float, purpose: str, place: int = 0) -> bool:
        """True with probability p: never for p = 0, always for p = 1."""
        return (self.bits(purpose, place) >> 11) * 2.0**-53 < p  # 53 bits: the comparison is exact in a double

    def pick(self, options: Sequence[T], purpose: str, place: int = 0) -> T:
        """One of the options, each equally likely."""
        return options[self.below(len(options), purpose, place)]

    def order(self, items: Sequence[T], purpose: str) -> list[T]:
        """The items in a uniformly random order; the first k of them are a random sample."""
        left = list(items)
        return [left.pop(self.below(len(left), purpose, place)) for place in range(len(items))]
