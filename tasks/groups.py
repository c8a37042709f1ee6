"""Groups of order 60 for the word problems, each built from its definition.

A5: even permutations of five points. Z60: the integers mod 60. A4xZ5: pairs of an even permutation of four points and
an integer mod 5. Size and text are the same; only the algebra differs: Z60 is commutative, A4xZ5 solvable, A5 neither.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

ORDER = 60
NAMES = ("A5", "Z60", "A4xZ5")

Permutation = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """A group by its multiplication table over element numbers; number 0 is the identity."""

    name: str
    elements: tuple[Hashable, ...]
    table: tuple[tuple[int, ...], ...]

    def times(self, a: int, b: int) -> int:
        """The number of a * b."""
        return self.table[a][b]


@cache
def group(name: str) -> Group:
    """The group of this name (one of NAMES)."""
    if name == "A5":
        fives = _even_permutations(5)
        return _group(name, fives, [[_then(a, b) for b in fives] for a in fives])
    if name == "Z60":
        numbers = range(ORDER)
        return _group(name, numbers, [[(a + b) % ORDER for b in numbers] for a in numbers])
    assert name == "A4xZ5", name
    pairs = list(product(_even_permutations(4), range(5)))
    return _group(name, pairs, [[(_then(a, b), (m + n) % 5) for b, n in pairs] for a, m in pairs])


def _group(name: str, elements: Sequence[Hashable], products: Sequence[Sequence[Hashable]]) -> Group:
    number = {element: place for place, element in enumerate(elements)}
    return Group(name, tuple(elements), tuple(tuple(number[element] for element in row) for row in products))


def _then(a: Permutation, b: Permutation) -> Permutation:
    """The permutation that applies a first, then b."""
    return tuple(b[point] for point in a)


def _even_permutations(points: int) -> list[Permutation]:
    """In lexicographic order, so the identity comes first."""
    return [p for p in permutations(range(points)) if _inversions(p) % 2 == 0]


def _inversions(p: Permutation) -> int:
    return sum(p[i] > p[j] for i in range(len(p)) for j in range(i + 1, len(p)))
