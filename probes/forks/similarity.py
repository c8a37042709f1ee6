"""Whether two units of text say the same. Any function of two texts will do, such as one that compares embeddings."""

import re
from collections import Counter
from collections.abc import Callable

from replaylens.probes.errors import ProbeError

Similar = Callable[[str, str], bool]
_WORD = re.compile(r"\w+")


def exact(one: str, other: str) -> bool:
    """The same words in the same order, whatever their case and the characters between them.

    >>> exact("So x = 3.", " so X = 3 ")
    True
    """
    return _words(one) == _words(other)


def overlap(least: float = 0.6) -> Similar:
    """A function: whether two units have at least this share of their words in common, by number (Dice coefficient).

    >>> overlap()("the answer is four", "the answer is five"), overlap(0.8)("the answer is four", "the answer is five")
    (True, False)
    """
    if not 0 < least <= 1:
        raise ProbeError(f"least={least} is no share of words. Give a number above 0 and at most 1.")

    def similar(one: str, other: str) -> bool:
        a, b = Counter(_words(one)), Counter(_words(other))
        total = a.total() + b.total()
        return 2 * (a & b).total() >= least * total if total else True

    return similar


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
