"""hops: who feels what about whom is told as facts; a question follows a chain of them. Every hop has an exact value.

With two hops, the default, the answer takes the person between: who is feared by the one whom Alice trusts?
"""

from dataclasses import dataclass
from itertools import count

from replaylens.tasks.coin import TRAIN_PEOPLE
from replaylens.tasks.reading import Event, Label, Scene, Script
from replaylens.tasks.task import Draws, Knobs, Story, Task, as_range, check_range, check_whole, knob
from replaylens.tasks.tokenizer import vocabulary_of

MIN_PEOPLE, MAX_PEOPLE = 4, 12  # among three, one lookup answers half of the questions
MIN_RELATIONS = 2
RELATIONS = ("trusts", "fears", "likes", "envies")

_NAMES = tuple(f" {name}" for name in TRAIN_PEOPLE)
_QUESTION, _END = " Question:", ". Who is it? A:"


@dataclass(frozen=True, kw_only=True)
class HopsKnobs(Knobs):
    """Settings of the task `hops`."""

    hops: tuple[int, int] = knob((2, 2), "number of hops of the question: one number or min,max", convert=as_range)
    people: int = knob(5, f"number of people, {MIN_PEOPLE} to {MAX_PEOPLE}")
    relations: int = knob(2, f"number of relations, {MIN_RELATIONS} to {len(RELATIONS)}; a fact for each and every person")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("hops", self.hops, least=1, most=1000)
        check_whole("people", self.people, least=MIN_PEOPLE, most=MAX_PEOPLE)
        check_whole("relations", self.relations, least=MIN_RELATIONS, most=len(RELATIONS))


class Hops(Task[HopsKnobs]):
    """Chains of facts. Each relation maps the people onto themselves, one to one and nobody to themselves, so every name is
    told equally often: how often, where or next to whom a name occurs says nothing about the answer."""

    name = "hops"
    description = "Facts about people; who is at the end of a chain of two (or more) of them?"
    knobs_class = HopsKnobs
    length_knob = "hops"
    state_label = "person"
    claims = ("person", "claimed")

    def write(self, draws: Draws) -> Story:
        knobs = self.knobs
        names = draws.order(TRAIN_PEOPLE, "people")[: knobs.people]
        relations = RELATIONS[: knobs.relations]
        facts = {relation: dict(zip(names, _others(draws, names, relation), strict=True)) for relation in relations}
        told = [f" {name} {relation} {facts[relation][name]}." for relation in relations for name in names]
        at = first = draws.pick(names, "first")
        events: list[Event] = []
        for t in range(draws.between(knobs.hops, "length")):
            relation = draws.pick(relations, "relation", t)
            events.append(Event(relation, actor=at, objects=(facts[relation][at],)))
            at = facts[relation][at]
        asked = ", who".join(f" {event.action} someone" for event in events)
        prompt = f"Facts:{''.join(draws.order(told, 'order'))}{_QUESTION} {first}{asked}{_END}"
        return Story(prompt, f" {at}.", f" {at}", tuple(events))

    def scene(self) -> Scene:
        return _HopsScene(self.knobs.people, RELATIONS[: self.knobs.relations])

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        return vocabulary_of(("Facts:", _QUESTION, _END, ", who", " someone", *_NAMES, *(f" {name}" for name in RELATIONS)))

    def answers(self) -> tuple[str, ...]:
        return _NAMES

    def next_action_chance(self) -> float:
        return 1 / self.knobs.relations


def _others(draws: Draws, names: list[str], relation: str) -> list[str]:
    """The names in an order that leaves none in its place, all such orders equally likely."""
    tries = (draws.order(names, f"{relation} {number}") for number in count())
    return next(order for order in tries if all(a != b for a, b in zip(names, order, strict=True)))


class _HopsScene(Scene):
    """The facts so far, and the person that the question has reached. `person` is None while no hop is told, and from a hop
    on whose fact the text did not state."""

    label_names = (
        "person", "before", "first", "claimed", "facts", "actions", "last_action", "last_name", "repeats",
    )  # fmt: skip

    def __init__(self, size: int, relations: tuple[str, ...]) -> None:
        super().__init__()
        self.size, self.relations = size, relations
        self.facts: dict[tuple[str, str], str] = {}
        self.person: str | None = None
        self.before: str | None = None
        self.first: str | None = None
        self.claimed: str | None = None
        self.last_name: str | None = None
        self.seen: set[str] = set()
        self.repeats = 0

    def labels(self) -> dict[str, Label]:
        return {
            "person": self.person if self.told else None,
            "before": self.before,
            "first": self.first,
            "claimed": self.claimed,
            "facts": len(self.facts),
            "actions": len(self.told),
            "last_action": self.told[-1][0].action if self.told else None,
            "last_name": self.last_name,
            "repeats": self.repeats,
        }

    def thought(self) -> str:
        return f" {self.person}" if self.person else ""

    def script(self) -> Script:
        relations = tuple(f" {relation}" for relation in self.relations)
        yield ("Facts:",)
        yield from self._facts(relations)
        self.first = self.person = self.last_name = (yield _NAMES)[1:]
        self.seen.add(self.first)
        while True:
            self._hop((yield relations)[1:])
            yield (" someone",)
            if (yield (", who", _END)) == _END:
                break
        self.claimed = (yield _NAMES)[1:]
        yield (".",)

    def _facts(self, relations: tuple[str, ...]) -> Script:
        """Any number of facts, of which the last about a person and a relation counts."""
        while (piece := (yield (*_NAMES, _QUESTION) if self.facts else _NAMES)) != _QUESTION:
            self.last_name = piece[1:]
            relation = (yield relations)[1:]
            other = (yield _NAMES)[1:]
            self.facts[piece[1:], relation] = self.last_name = other
            yield (".",)

    def _hop(self, relation: str) -> None:
        """The relation alone decides a hop."""
        self.before, reached = self.person, self.facts.get((self.person or "", relation))
        self.person = reached
        self.repeats += reached in self.seen
        self.seen |= {reached} if reached else set()
        objects = (reached,) if reached else ()
        self.happen(Event(relation, actor=self.before or "", objects=objects), pieces=1)
