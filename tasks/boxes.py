"""boxes: each box holds one thing or nothing; things are put in, moved and removed; what is in one box?"""

from dataclasses import dataclass

from replaylens.tasks.reading import Event, Label, Scene, Script
from replaylens.tasks.task import Draws, Knobs, Story, Task, as_range, check_range, check_whole, knob
from replaylens.tasks.tokenizer import vocabulary_of

THINGS = (
    "apple", "bell", "candle", "dice", "egg", "feather", "glove", "hammer", "key", "lemon", "mirror", "needle",
    "orange", "pencil", "rope", "spoon",
)  # fmt: skip
MIN_BOXES, MAX_BOXES = 3, 7
NOTHING = "nothing"
PUT, MOVE, REMOVE = "put", "move", "remove"
KINDS = (PUT, MOVE, REMOVE)

_THINGS = tuple(f" {thing}" for thing in THINGS)
_VERBS = {" Put the": PUT, " Move the": MOVE, " Remove the": REMOVE}
_QUESTION = " What is in box"


@dataclass(frozen=True, kw_only=True)
class BoxesKnobs(Knobs):
    """Settings of the task `boxes`."""

    boxes: int = knob(4, "number of boxes, 3 to 7")
    moves: tuple[int, int] = knob((1, 6), "number of moves: one number or min,max", convert=as_range)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("boxes", self.boxes, least=MIN_BOXES, most=MAX_BOXES)
        check_range("moves", self.moves, least=1, most=10_000)


class Boxes(Task[BoxesKnobs]):
    """Boxes of capacity one. A thing is put into or moved to an empty box; only a thing in a box is moved or removed."""

    name = "boxes"
    description = "Things are put into boxes, moved and removed; what is in one box?"
    knobs_class = BoxesKnobs
    length_knob = "moves"
    state_label = "state"
    claims = ("held", "claimed")

    def write(self, draws: Draws) -> Story:
        inside = self._beginning(draws)
        told = "".join(f" Box {n} has the {thing}." if thing else f" Box {n} is empty." for n, thing in inside.items())
        events: list[Event] = []
        for t in range(draws.between(self.knobs.moves, "length")):
            event = _drawn(draws, t, inside)
            _apply(event, inside)
            events.append(event)
            told += _told(event)
        asked = 1 + draws.below(self.knobs.boxes, "asked")
        answer = f" {inside[asked] or NOTHING}"
        return Story(f"{told}{_QUESTION} {asked}? A:"[1:], f"{answer}.", answer, tuple(events))

    def _beginning(self, draws: Draws) -> dict[int, str | None]:
        things = draws.order(THINGS, "things")
        return {n: things[n] if draws.chance(0.5, "full", n) else None for n in range(1, self.knobs.boxes + 1)}

    def scene(self) -> Scene:
        return _BoxesScene(self.knobs.boxes)

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        numbers = tuple(f" {n}" for n in range(1, MAX_BOXES + 1))
        loose = ("Box", " Box", " has the", " is empty.", " into box", " from box", " to box", "? A:", f" {NOTHING}")
        return vocabulary_of((*loose, *numbers, *_VERBS, _QUESTION, *_THINGS))

    def answers(self) -> tuple[str, ...]:
        return (f" {NOTHING}", *_THINGS)

    def next_action_chance(self) -> float:
        return 1 / len(KINDS)


def _drawn(draws: Draws, t: int, inside: dict[int, str | None]) -> Event:
    """Draw a possible event; all possible kinds are equally likely."""
    full, empty = [n for n in inside if inside[n]], [n for n in inside if not inside[n]]
    possible = [kind for kind, can in ((PUT, empty), (MOVE, full and empty), (REMOVE, full)) if can]
    kind = draws.pick(possible, "kind", t)
    if kind == PUT:
        thing = draws.pick([thing for thing in THINGS if thing not in inside.values()], "thing", t)
        return Event(PUT, objects=(thing, str(draws.pick(empty, "to", t))))
    origin = draws.pick(full, "from", t)
    thing = inside[origin] or NOTHING
    target = (str(draws.pick(empty, "to", t)),) if kind == MOVE else ()
    return Event(kind, objects=(thing, str(origin), *target))


def _told(event: Event) -> str:
    thing, first, *more = event.objects
    if event.action == PUT:
        return f" Put the {thing} into box {first}."
    if event.action == MOVE:
        return f" Move the {thing} from box {first} to box {more[0]}."
    return f" Remove the {thing} from box {first}."


def _apply(event: Event, inside: dict[int, str | None]) -> None:
    """Carry out the event, even an impossible one: the thing leaves its box and ends up where the text says."""
    thing = event.objects[0]
    for n in inside:
        inside[n] = None if inside[n] == thing else inside[n]
    if event.action != REMOVE:
        inside[int(event.objects[-1])] = thing


class _BoxesScene(Scene):
    """The content of each box. `consistent` turns False at the first impossible event."""

    def __init__(self, boxes: int) -> None:
        super().__init__()
        self.numbers = tuple(range(1, boxes + 1))
        per_box = tuple(f"{kind}.{n}" for n in self.numbers for kind in ("box", "touched"))
        self.label_names = (
            "state", "held", "claimed", "asked", "actions", "last_action", "consistent", *per_box,
        )  # fmt: skip
        self.inside: dict[int, str | None] = {}
        self.touched: set[int] = set()
        self.asked: int | None = None
        self.claimed: str | None = None
        self.consistent = True

    def labels(self) -> dict[str, Label]:
        named = {n: thing or NOTHING for n, thing in self.inside.items()}
        laid = len(named) == len(self.numbers)
        labels: dict[str, Label] = {
            "state": " ".join(named.values()) if laid else None,
            "held": None if self.asked is None else named[self.asked],
            "claimed": self.claimed,
            "asked": self.asked,
            "actions": len(self.told),
            "last_action": self.told[-1][0].action if self.told else None,
            "consistent": self.consistent,
        }
        for n in self.numbers:
            labels[f"box.{n}"] = named.get(n)
            labels[f"touched.{n}"] = n in self.touched if n in named else None
        return labels

    def next_action_open(self) -> bool:
        """All three kinds are possible, and equally likely, only if one box is full and one is empty."""
        things = [self.inside.get(n) for n in self.numbers]
        return len(self.inside) == len(self.numbers) and any(things) and not all(things)

    def thought(self) -> str:
        event = self.told[-1][0]
        boxes = [int(place) for place in event.objects[1:] if place]
        return "".join(f" box {n} {self.inside[n] or NOTHING}" for n in boxes) or f" {NOTHING}"

    def script(self) -> Script:
        yield from self._beginning()
        while (verb := (yield (*_VERBS, _QUESTION) if self.told else tuple(_VERBS))) != _QUESTION:
            thing = (yield _THINGS)[1:]
            yield from {PUT: self._put, MOVE: self._move, REMOVE: self._remove}[_VERBS[verb]](thing)
            yield (".",)
        self.asked = int((yield self._boxes()))
        yield ("? A:",)
        self.claimed = (yield (f" {NOTHING}", *_THINGS))[1:]
        yield (".",)

    def _beginning(self) -> Script:
        for n in self.numbers:
            name = f"{' ' if n > 1 else ''}Box {n}"
            if (yield (f"{name} has the", f"{name} is empty")).endswith("empty"):
                self.inside[n] = None
            else:
                self.inside[n] = (yield [thing for thing in _THINGS if thing[1:] not in self.inside.values()])[1:]
            yield (".",)

    def _put(self, thing: str) -> Script:
        yield (" into box",)
        target = int((yield self._boxes()))
        possible = thing not in self.inside.values() and self.inside[target] is None
        self._happen(Event(PUT, objects=(thing, str(target))), possible, pieces=4)

    def _move(self, thing: str) -> Script:
        yield (" from box",)
        origin = int((yield self._boxes()))
        yield (" to box",)
        target = int((yield self._boxes()))
        possible = self.inside[origin] == thing and self.inside[target] is None
        self._happen(Event(MOVE, objects=(thing, str(origin), str(target))), possible, pieces=6)

    def _remove(self, thing: str) -> Script:
        """The thing alone determines the event, since its box is known."""
        place = next((str(n) for n, held in self.inside.items() if held == thing), "")
        self._happen(Event(REMOVE, objects=(thing, place)), bool(place), pieces=2)
        yield (" from box",)
        self.consistent = (yield self._boxes()) == f" {place}" and self.consistent

    def _happen(self, event: Event, possible: bool, pieces: int) -> None:
        self.consistent = possible and self.consistent
        _apply(event, self.inside)
        self.touched.update(int(place) for place in event.objects[1:] if place)
        self.happen(event, pieces=pieces, telling=pieces)

    def _boxes(self) -> tuple[str, ...]:
        return tuple(f" {n}" for n in self.numbers)
