"""counts: word problems. People gain, lose and double what they have; how many has one of them? Every step is an equation.

All counts have two digits and all changes one, so that a number is known once its last digit is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from replaylens.tasks.coin import TRAIN_PEOPLE
from replaylens.tasks.reading import Event, Label, Scene, Script
from replaylens.tasks.task import Draws, Knobs, Story, Task, as_range, check_range, check_whole, knob
from replaylens.tasks.tokenizer import vocabulary_of

ITEMS = ("apples", "books", "coins", "eggs", "pens", "shells")
MAX_PEOPLE = 4
LEAST, MIN_MOST, MAX_MOST = 10, 30, 99
"""every count is from 10 to the knob `most`"""
MIN_CHANGE, MAX_CHANGE = 2, 9
"""1 would need a singular"""
ADD, SUBTRACT, DOUBLE = "add", "subtract", "double"
KINDS = (ADD, SUBTRACT, DOUBLE)

_VERBS: dict[str, dict[str, str]] = {
    ADD: {" buys": " more.", " finds": " more {items}.", " gets": " {items} as a gift."},
    SUBTRACT: {" loses": " {items}.", " sells": " of them.", " gives": " away."},
    DOUBLE: {" doubles": " that number.", " now": " has twice as many."},
}
"""by kind: verb -> what ends its sentence, after the number if there is one"""
_KINDS = {verb: kind for kind, verbs in _VERBS.items() for verb in verbs}
_SIGNS = {ADD: "+", SUBTRACT: "-", DOUBLE: "*"}
_QUESTION, _END = " How many", " have? A:"


@dataclass(frozen=True, kw_only=True)
class CountsKnobs(Knobs):
    """Settings of the task `counts`."""

    operations: tuple[int, int] = knob((1, 6), "number of operations: one number or min,max", convert=as_range)
    people: int = knob(1, f"number of people who have something, 1 to {MAX_PEOPLE}")
    most: int = knob(40, f"largest count, {MIN_MOST} to {MAX_MOST}; the smallest is {LEAST}")
    change: int = knob(5, f"largest number gained or lost at once, {MIN_CHANGE} to {MAX_CHANGE}; the smallest is {MIN_CHANGE}")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("operations", self.operations, least=1, most=10_000)
        check_whole("people", self.people, least=1, most=MAX_PEOPLE)
        check_whole("most", self.most, least=MIN_MOST, most=MAX_MOST)
        check_whole("change", self.change, least=MIN_CHANGE, most=MAX_CHANGE)


class Counts(Task[CountsKnobs]):
    """Templates in the manner of school word problems. Person, kind, verb and number are drawn independently, among the kinds
    that leave the count within its bounds."""

    name = "counts"
    description = "Word problems: people gain, lose and double what they have; how many has one of them?"
    knobs_class = CountsKnobs
    length_knob = "operations"
    state_label = "state"
    claims = ("count", "claimed")

    def write(self, draws: Draws) -> Story:
        knobs, items = self.knobs, draws.pick(ITEMS, "items")
        names = draws.order(TRAIN_PEOPLE, "people")[: knobs.people]
        held = {name: draws.between((LEAST, knobs.most), "start", n) for n, name in enumerate(names)}
        told = "".join(f" {name} has {number} {items}." for name, number in held.items())
        events: list[Event] = []
        for t in range(draws.between(knobs.operations, "length")):
            event = self._drawn(draws, t, held)
            held[event.actor] = _after(event, held[event.actor])
            events.append(event)
            verb = draws.pick(tuple(_VERBS[event.action]), "verb", t)
            told += f" {event.actor}{verb}{_number(event)}{_ending(verb, items)}"
        asked = draws.pick(names, "asked")
        answer = f" {held[asked]}"
        return Story(f"{told}{_QUESTION} {items} does {asked}{_END}"[1:], f"{answer}.", answer, tuple(events))

    def _drawn(self, draws: Draws, t: int, held: Mapping[str, int]) -> Event:
        """Draw a possible event; all possible kinds are equally likely, and so are all possible numbers."""
        actor = draws.pick(tuple(held), "actor", t)
        now, knobs = held[actor], self.knobs
        kind = draws.pick(_possible(now, knobs.most), "kind", t)
        if kind == DOUBLE:
            return Event(DOUBLE, actor=actor)
        room = knobs.most - now if kind == ADD else now - LEAST
        return Event(kind, actor=actor, objects=(str(draws.between((MIN_CHANGE, min(knobs.change, room)), "number", t)),))

    def scene(self) -> Scene:
        return _CountsScene(self.knobs.people, self.knobs.most)

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        names = TRAIN_PEOPLE
        numbers = (f" {number}" for number in (*range(MIN_CHANGE, MAX_CHANGE + 1), *range(LEAST, MAX_MOST + 1)))
        endings = (_ending(verb, item) for verb in _KINDS for item in ITEMS)
        loose = (" has", " does", " =", *(f" {sign}" for sign in _SIGNS.values()), _QUESTION, _END)
        named = (*names, *(f" {name}" for name in names), *(f" {item}" for item in ITEMS))
        return vocabulary_of((*loose, *numbers, *endings, *_KINDS, *named))

    def answers(self) -> tuple[str, ...]:
        return _numbers(LEAST, self.knobs.most)

    def next_action_chance(self) -> float:
        return 1 / len(KINDS)


def _possible(now: int, most: int) -> tuple[str, ...]:
    """The kinds that leave a count within its bounds; there is always one, since a count that cannot shrink can grow."""
    can = {ADD: now + MIN_CHANGE <= most, SUBTRACT: now - MIN_CHANGE >= LEAST, DOUBLE: 2 * now <= most}
    return tuple(kind for kind in KINDS if can[kind])


def _after(event: Event, now: int) -> int:
    if event.action == DOUBLE:
        return 2 * now
    return now + int(event.objects[0]) * (1 if event.action == ADD else -1)


def _number(event: Event) -> str:
    return f" {event.objects[0]}" if event.objects else ""


def _ending(verb: str, items: str) -> str:
    return _VERBS[_KINDS[verb]][verb].format(items=items)


def _numbers(least: int, most: int) -> tuple[str, ...]:
    return tuple(f" {number}" for number in range(least, most + 1))


class _CountsScene(Scene):
    """Everyone's count. An operation happens at its number, a doubling at its verb. `consistent` turns False when a count
    leaves its bounds, which no text of the task does."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__()
        self.size, self.most = size, most
        per_person = tuple(f"{kind}.{n}" for n in range(1, size + 1) for kind in ("count", "touched"))
        self.label_names = (
            "state", "count", "claimed", "asked", "actor", "result", "operand", "actions", "last_action", "consistent",
            *per_person,
        )  # fmt: skip
        self.held: dict[str, int] = {}
        self.touched: set[str] = set()
        self.actor: str | None = None
        self.subject: str | None = None
        """the person named at the beginning of a sentence, until the operation is told"""
        self.asked: str | None = None
        self.claimed: int | None = None
        self.before = 0
        self.items = ""

    def labels(self) -> dict[str, Label]:
        last = self.told[-1][0] if self.told else None
        labels: dict[str, Label] = {
            "state": " ".join(map(str, self.held.values())) if len(self.held) == self.size else None,
            "count": None if self.asked is None else self.held[self.asked],
            "claimed": self.claimed,
            "asked": self.asked,
            "actor": self.actor,
            "result": self.held[last.actor] if last else None,
            "operand": self.before if last else None,
            "actions": len(self.told),
            "last_action": last.action if last else None,
            "consistent": all(LEAST <= number <= self.most for number in self.held.values()),
        }
        names = list(self.held)
        for n in range(self.size):
            name = names[n] if n < len(names) else None
            labels[f"count.{n + 1}"] = None if name is None else self.held[name]
            labels[f"touched.{n + 1}"] = None if name is None else name in self.touched
        return labels

    def next_action_open(self) -> bool:
        """All kinds must be possible, hence equally likely: for the person named, or for everyone before one is named."""
        counts = self.held.values() if self.subject is None else (self.held[self.subject],)
        return len(self.held) == self.size and all(_possible(now, self.most) == KINDS for now in counts)

    def thought(self) -> str:
        event = self.told[-1][0]
        by = event.objects[0] if event.objects else 2
        return f" {event.actor} {self.before} {_SIGNS[event.action]} {by} = {self.held[event.actor]}"

    def script(self) -> Script:
        yield from self._beginning()
        names, verbs = tuple(f" {name}" for name in self.held), tuple(_KINDS)
        while (piece := (yield (*names, _QUESTION) if self.told else names)) != _QUESTION:
            self.actor = self.subject = piece[1:]
            verb = yield verbs
            number = "" if _KINDS[verb] == DOUBLE else (yield _numbers(MIN_CHANGE, MAX_CHANGE))[1:]
            self._happen(_KINDS[verb], self.actor, number)
            yield (_ending(verb, self.items),)
        yield (f" {self.items} does",)
        self.asked = (yield names)[1:]
        yield (_END,)
        self.claimed = int((yield _numbers(LEAST, MAX_MOST)))
        yield (".",)

    def _beginning(self) -> Script:
        for n in range(self.size):
            name = yield tuple(f"{' ' if n else ''}{name}" for name in TRAIN_PEOPLE if name not in self.held)
            yield (" has",)
            number = int((yield _numbers(LEAST, self.most)))
            self.held[name.strip()] = number
            self.items = (yield (f" {self.items}",) if n else tuple(f" {item}" for item in ITEMS))[1:]
            yield (".",)

    def _happen(self, kind: str, actor: str, number: str) -> None:
        event = Event(kind, actor=actor, objects=(number,) if number else ())
        self.before = self.held[actor]
        self.held[actor] = _after(event, self.before)
        self.touched.add(actor)
        self.subject = None
        self.happen(event, pieces=3 if number else 2, telling=2 if number else 1)
