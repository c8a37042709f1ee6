"""words: word problems. A sequence of group elements; what is their product? Tokens carry the running product."""

from dataclasses import dataclass

from replaylens.tasks.draws import Draws
from replaylens.tasks.groups import NAMES, ORDER, group
from replaylens.tasks.knobs import Knobs, as_range, check_choice, check_range, knob
from replaylens.tasks.reading import Event, Label
from replaylens.tasks.script import Scene, Script
from replaylens.tasks.task import Story, Task
from replaylens.tasks.tokenizer import vocabulary_of

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
