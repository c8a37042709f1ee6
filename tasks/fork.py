"""fork: two chains of roads leave the start; both are locally valid, one reaches the target. Which way?

The branch whose road comes first in the text is called "first". Nothing before the target reveals which branch is
viable, so the known zero `next_action` is the branch that the target will make viable.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from replaylens.tasks.reading import Event, Label, Scene, Script
from replaylens.tasks.task import Draws, Knobs, Story, Task, as_range, check_range, knob
from replaylens.tasks.tokenizer import vocabulary_of

# Syllables of two letters: none is a prefix of another or a word of the text.
PLACES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou" if a + b not in ("to", "go"))
BRANCHES = ("first", "second")
MAX_DEPTH = (len(PLACES) - 1) // 2

_PLACES = tuple(f" {place}" for place in PLACES)
_OPENING, _ROADS, _TARGET, _PATH = "Start at", ". Roads:", " Go to", ". Path:"


@dataclass(frozen=True, kw_only=True)
class ForkKnobs(Knobs):
    """Settings of the task `fork`."""

    depth: tuple[int, int] = knob((1, 3), "roads in each chain: one number or min,max", convert=as_range)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("depth", self.depth, least=1, most=MAX_DEPTH)


class Fork(Task[ForkKnobs]):
    """A two-way fork. The answer is the first place after the start; the rest of the path follows it."""

    name = "fork"
    description = "Two chains of roads leave the start and one reaches the target; which way to go?"
    knobs_class = ForkKnobs
    length_knob = "depth"
    state_label = "viable"
    step_label = "hops"
    claims = ("viable", "chosen")

    def write(self, draws: Draws) -> Story:
        depth = draws.between(self.knobs.depth, "depth")
        start, *rest = draws.order(PLACES, "places")[: 2 * depth + 1]
        viable, dead = rest[:depth], rest[depth:]
        chains = ([start, *viable], [start, *dead])
        roads = draws.order([road for chain in chains for road in pairwise(chain)], "roads")
        told = ",".join(f" {a} to {b}" for a, b in roads)
        prompt = f"{_OPENING} {start}{_ROADS}{told}.{_TARGET} {viable[-1]}{_PATH} {start},"
        branch = BRANCHES[roads.index((start, viable[0])) > roads.index((start, dead[0]))]
        hops = (Event(b, objects=(a, b)) for a, b in pairwise(chains[0]))
        events = (Event(branch, objects=(viable[-1],)), *hops)
        return Story(prompt, f" {', '.join(viable)}.", f" {viable[0]}", events)

    def scene(self) -> Scene:
        return _ForkScene()

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        return vocabulary_of((_OPENING, _ROADS, _TARGET, _PATH, " to", ",", *_PLACES))

    def answers(self) -> tuple[str, ...]:
        return _PLACES

    def next_action_chance(self) -> float:
        return 1 / len(BRANCHES)


class _ForkScene(Scene):
    """The roads, the target and the path so far. A hop without a road is readable too and sets `valid` to False."""

    label_names = ("viable", "chosen", "target", "node", "hops", "on_track", "valid", "roads", "last_action")

    def __init__(self) -> None:
        super().__init__()
        self.start: str | None = None
        self.roads: list[tuple[str, str]] = []
        self.target: str | None = None
        self.viable: str | None = None
        self.path: list[str] = []
        self.valid: bool | None = None

    def labels(self) -> dict[str, Label]:
        here = self.path[-1] if self.path else None
        on_track = None if here is None or self.target is None else self.target in self._reached(here)
        return {
            "viable": self.viable,
            "chosen": self._branch([self.path[1]]) if len(self.path) > 1 else None,
            "target": self.target,
            "node": here,
            "hops": max(len(self.path) - 1, 0),
            "on_track": on_track,
            "valid": self.valid,
            "roads": len(self.roads),
            "last_action": self.told[-1][0].action if self.told else None,
        }

    def next_action_open(self) -> bool:
        return self.target is None

    def thought(self) -> str:
        """After the target: the way to take. After a hop: the place reached."""
        if len(self.path) > 1:
            return f" {self.path[-1]}"
        return next((f" {way}" for way in self._ways() if self.target in self._reached(way)), "")

    def script(self) -> Script:
        yield (_OPENING,)
        self.start = (yield _PLACES)[1:]
        yield (_ROADS,)
        piece = ","
        while piece == ",":
            origin = (yield _PLACES)[1:]
            yield (" to",)
            self.roads.append((origin, (yield _PLACES)[1:]))
            piece = yield (",", ".")
        yield (_TARGET,)
        self._aim((yield _PLACES)[1:])
        yield (_PATH,)
        self.path.append((yield (f" {self.start}",))[1:])
        piece = yield (",",)
        while piece == ",":
            self._hop((yield _PLACES)[1:])
            piece = yield (",", ".")

    def _aim(self, target: str) -> None:
        self.target = target
        self.viable = self._branch(way for way in self._ways() if target in self._reached(way))
        self.happen(Event(self.viable, objects=(target,)), pieces=2)

    def _hop(self, place: str) -> None:
        road = (self.path[-1], place)
        self.valid = road in self.roads
        self.path.append(place)
        self.happen(Event(place, objects=road), pieces=1)

    def _ways(self) -> list[str]:
        """The first places of the branches, in text order."""
        return [end for origin, end in self.roads if origin == self.start][: len(BRANCHES)]

    def _branch(self, places: Iterable[str]) -> str:
        """Which branches begin with these places: one of BRANCHES or, in a text written elsewhere, "neither" or "both"."""
        wanted = set(places)
        named = [branch for branch, way in zip(BRANCHES, self._ways(), strict=False) if way in wanted]
        return {0: "neither", 1: "".join(named)}.get(len(named), "both")

    def _reached(self, place: str) -> set[str]:
        """Every place reachable from this one, itself included."""
        reached, found = {place}, [place]
        while found:
            here = found.pop()
            for origin, end in self.roads:
                if origin == here and end not in reached:
                    reached.add(end)
                    found.append(end)
        return reached
