"""The seed of each rollout. It depends on the sampling's seed, the fork position and the rollout's number, and on nothing else.

    seed = first 8 bytes, little-endian, of BLAKE2b("replaylens rollout" || seed || position || number)

with the three numbers as unsigned little-endian integers of 8 bytes. So a rollout has the same tokens however many others are
drawn, in whatever waves and on whichever machine; rollouts with and without a replaced sentence have the same noise in pairs.
"""

from hashlib import blake2b
from struct import pack, unpack

_DOMAIN = b"replaylens rollout"


def rollout_seed(seed: int, position: int, number: int) -> int:
    """The seed of rollout `number` at a fork position: a whole number below 2 ** 64.

    >>> rollout_seed(0, 7, 0), rollout_seed(0, 7, 1)
    (17589661133231612369, 4194808042954166979)
    """
    found: tuple[int] = unpack("<Q", blake2b(_DOMAIN + pack("<3Q", seed, position, number), digest_size=8).digest())
    return found[0]
