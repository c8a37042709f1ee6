"""coins: several coins of different colours; each actor flips one or leaves it; which face does one of them show?

Copying a coin's start is right if the coin did not change. The labels `changed` and `touched` exist per coin, so that
changed coins can be scored separately.
"""

from dataclasses import dataclass

from replaylens.tasks.coin import ALL, FACES, FLIP, KEEP, POOLS, other
from replaylens.tasks.reading import Event, Label, Scene, Script
from replaylens.tasks.task import (
    Draws,
    Knobs,
    Story,
    Task,
    as_range,
    check_choice,
    check_probability,
    check_range,
    check_whole,
    knob,
)
from replaylens.tasks.tokenizer import vocabulary_of

COLOURS = ("red", "blue", "green", "white", "black", "yellow")

_FACES = tuple(f" {face}" for face in FACES)
_NAMES = tuple(f" {name}" for name in ALL)
_ACTIONS = {" flips the": FLIP, " does not flip the": KEEP}
_QUESTION = " What's the state of the"


@dataclass(frozen=True, kw_only=True)
class CoinsKnobs(Knobs):
    """Settings of the task `coins`."""

    coins: int = knob(3, "number of coins, 2 to 6")
    flips: tuple[int, int] = knob((1, 8), "number of actors: one number or min,max", convert=as_range)
    p: float = knob(0.5, "probability that an actor flips")
    names: str = knob("train", "actors' names: train, held-out or all", wording=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("coins", self.coins, least=2, most=len(COLOURS))
        check_range("flips", self.flips, least=1, most=10_000)
        check_probability("p", self.p)
        check_choice("names", self.names, tuple(POOLS))


class Coins(Task[CoinsKnobs]):
    """Several coins, each starting on a random face; the question asks about one of them."""

    name = "coins"
    description = "Several coloured coins; each actor flips one of them or not; which face does one show?"
    knobs_class = CoinsKnobs
    length_knob = "flips"
    state_label = "face"
    claims = ("face", "claimed")

    def write(self, draws: Draws) -> Story:
        knobs = self.knobs
        colours = COLOURS[: knobs.coins]
        faces = {colour: draws.pick(FACES, "start", place) for place, colour in enumerate(colours)}
        told = [f" The {colour} coin is {face}." for colour, face in faces.items()]
        events: list[Event] = []
        for t in range(draws.between(knobs.flips, "length")):
            actor, colour = draws.pick(POOLS[knobs.names], "name", t), draws.pick(colours, "coin", t)
            flips = draws.chance(knobs.p, "flip", t)
            events.append(Event(FLIP if flips else KEEP, actor, (colour,)))
            faces[colour] = other(faces[colour]) if flips else faces[colour]
            told.append(f" {actor} {'flips' if flips else 'does not flip'} the {colour} coin.")
        asked = draws.pick(colours, "asked")
        answer = f" {faces[asked]}"
        prompt = f"{''.join(told)}{_QUESTION} {asked} coin? A:"
        return Story(prompt[1:], f"{answer}.", answer, tuple(events))

    def scene(self) -> Scene:
        return _CoinsScene(COLOURS[: self.knobs.coins])

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        loose = ("The", " The", " coin is", " coin.", " coin? A:", _QUESTION, *_ACTIONS, *_FACES, *_NAMES)
        return vocabulary_of((*loose, *(f" {colour}" for colour in COLOURS)))

    def answers(self) -> tuple[str, ...]:
        return _FACES

    def next_action_chance(self) -> float:
        return max(self.knobs.p, 1 - self.knobs.p)


class _CoinsScene(Scene):
    """One face per colour. From the question on, `face` and `claimed` belong to the coin asked about."""

    def __init__(self, colours: tuple[str, ...]) -> None:
        super().__init__()
        self.colours = colours
        per_coin = tuple(f"{kind}.{colour}" for colour in colours for kind in ("face", "start", "changed", "touched"))
        self.label_names = (
            "face", "claimed", "asked", "flips", "actions", "last_action", "last_coin", "name", *per_coin,
        )  # fmt: skip
        self.start: dict[str, str] = {}
        self.faces: dict[str, str] = {}
        self.claims: dict[str, str] = {}
        self.touched: set[str] = set()
        self.asked = ""
        self.name: str | None = None

    def labels(self) -> dict[str, Label]:
        events = [event for event, _, _ in self.told]
        labels: dict[str, Label] = {
            "face": self.faces.get(self.asked),
            "claimed": self.claims.get(self.asked),
            "asked": self.asked or None,
            "flips": sum(event.action == FLIP for event in events),
            "actions": len(events),
            "last_action": events[-1].action if events else None,
            "last_coin": events[-1].objects[0] if events else None,
            "name": self.name,
        }
        for colour in self.colours:
            known = colour in self.faces
            labels[f"face.{colour}"] = self.faces.get(colour)
            labels[f"start.{colour}"] = self.start.get(colour)
            labels[f"changed.{colour}"] = self.faces[colour] != self.start[colour] if known else None
            labels[f"touched.{colour}"] = colour in self.touched if known else None
        return labels

    def thought(self) -> str:
        colour = self.told[-1][0].objects[0]
        return f" {colour} {self.faces[colour]}"

    def script(self) -> Script:
        for place, colour in enumerate(self.colours):
            yield (f"{' ' if place else ''}The {colour} coin is",)
            face = (yield _FACES)[1:]
            self.start[colour] = self.faces[colour] = self.claims[colour] = face
            yield (".",)
        offered = tuple(f" {colour}" for colour in self.colours)
        while (piece := (yield (*_NAMES, _QUESTION) if self.told else _NAMES)) != _QUESTION:
            self.name = piece[1:]
            action = _ACTIONS[(yield tuple(_ACTIONS))]
            self._act(action, (yield offered)[1:])
            yield (" coin.",)
        self.asked = (yield offered)[1:]
        yield (" coin? A:",)
        self.claims[self.asked] = (yield _FACES)[1:]
        yield (".",)

    def _act(self, action: str, colour: str) -> None:
        if action == FLIP:
            self.faces[colour] = other(self.faces[colour])
            self.touched.add(colour)
        # The verb gives the action and the colour completes the event: two pieces after the name.
        self.happen(Event(action, self.name or "", (colour,)), pieces=3, telling=2)
