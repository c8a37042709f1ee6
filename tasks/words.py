"""words: word problems. A sequence of group elements; what is their product? Tokens carry the running product."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

from replaylens.tasks.reading import Event, Label, Scene, Script
from replaylens.tasks.task import Draws, Knobs, Story, Task, as_range, check_choice, check_range, knob
from replaylens.tasks.tokenizer import vocabulary_of

# ---- groups ----------------------------------------------------------------------------------------------------------
# Groups of order 60 for the word problems, each built from its definition.
#
# A5: even permutations of five points. Z60: the integers mod 60. A4xZ5: pairs of an even permutation of four points and
# an integer mod 5. Size and text are the same; only the algebra differs: Z60 is commutative, A4xZ5 solvable, A5 neither.

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


# ---- words -----------------------------------------------------------------------------------------------------------

# Opaque, of one length (so none is a prefix of another) and the same for all groups: the text never reveals the group.
SYMBOLS = tuple(f" g{number:02}" for number in range(ORDER))


@dataclass(frozen=True, kw_only=True)
class WordsKnobs(Knobs):
    """Settings of the task `words`."""

    group: str = knob("A5", "group of order 60: A5, Z60 or A4xZ5")
    length: tuple[int, int] = knob((4, 16), "number of elements: one number or min,max", convert=as_range)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("group", self.group, NAMES)
        check_range("length", self.length, least=1, most=10_000)


class Words(Task[WordsKnobs]):
    """Products in a group. Element number 0 is the identity; the left of two permutations is applied first."""

    name = "words"
    description = "A sequence of elements of a group of order 60; what is their product?"
    knobs_class = WordsKnobs
    length_knob = "length"
    state_label = "product"
    claims = ("product", "claimed")

    def write(self, draws: Draws) -> Story:
        chosen = group(self.knobs.group)
        numbers = [draws.below(ORDER, "element", t) for t in range(draws.between(self.knobs.length, "length"))]
        result = 0
        for number in numbers:
            result = chosen.times(result, number)
        told = "".join(SYMBOLS[number] for number in numbers)
        events = tuple(Event(SYMBOLS[number][1:]) for number in numbers)
        return Story(f">{told} =", SYMBOLS[result], SYMBOLS[result], events)

    def scene(self) -> Scene:
        return _WordsScene(self.knobs.group)

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        return vocabulary_of((">", " =", *SYMBOLS))

    def answers(self) -> tuple[str, ...]:
        return SYMBOLS

    def next_action_chance(self) -> float:
        return 1 / ORDER


class _WordsScene(Scene):
    """The running product, and the one that the text claims at its end."""

    label_names = ("product", "actions", "last_action", "claimed")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.group = group(name)
        self.product = 0
        self.claimed: str | None = None

    def labels(self) -> dict[str, Label]:
        return {
            "product": SYMBOLS[self.product][1:],
            "actions": len(self.told),
            "last_action": self.told[-1][0].action if self.told else None,
            "claimed": self.claimed,
        }

    def thought(self) -> str:
        return SYMBOLS[self.product]

    def script(self) -> Script:
        yield (">",)
        while (piece := (yield (*SYMBOLS, " =") if self.told else SYMBOLS)) != " =":
            self.product = self.group.times(self.product, SYMBOLS.index(piece))
            self.happen(Event(piece[1:]), pieces=1)
        self.claimed = (yield SYMBOLS)[1:]
