"""coin-resets: a coin that actors flip, leave, or set to a face. A set erases the past."""

from dataclasses import dataclass

from replaylens.tasks.coin import ALL, FACES, FLIP, KEEP, POOLS, other
from replaylens.tasks.reading import Event, Label, Scene, Script
from replaylens.tasks.task import Draws, Knobs, Story, Task, as_range, check_choice, check_probability, check_range, knob
from replaylens.tasks.tokenizer import vocabulary_of

STARTS = ("random", *FACES)
SET = "set "

_FACES = tuple(f" {face}" for face in FACES)
_NAMES = tuple(f" {name}" for name in ALL)
_FLIPS, _KEEPS, _SETS = " flips", " does", " sets it to"
_KEPT = " not flip"
_OPENING, _QUESTION = "A coin's state is", " What's the state? A:"


@dataclass(frozen=True, kw_only=True)
class CoinResetsKnobs(Knobs):
    """Settings of the task `coin-resets`."""

    flips: tuple[int, int] = knob((1, 8), "number of actors: one number or min,max", convert=as_range)
    p: float = knob(0.5, "probability that an actor who does not set the coin flips it")
    reset: float = knob(0.25, "probability that an actor sets the coin; both faces are equally likely")
    start: str = knob("random", "start face: random, heads or tails")
    names: str = knob("train", "actors' names: train, held-out or all", wording=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("flips", self.flips, least=1, most=10_000)
        check_probability("p", self.p)
        check_probability("reset", self.reset)
        check_choice("start", self.start, STARTS)
        check_choice("names", self.names, tuple(POOLS))


class CoinResets(Task[CoinResetsKnobs]):
    """One coin with flips, keeps and sets."""

    name = "coin-resets"
    description = "A coin is flipped, left, or set to a face (which erases the past); which face shows?"
    knobs_class = CoinResetsKnobs
    length_knob = "flips"
    state_label = "face"
    claims = ("face", "claimed")

    def write(self, draws: Draws) -> Story:
        knobs = self.knobs
        start = draws.pick(FACES, "start") if knobs.start == "random" else knobs.start
        face = start
        events: list[Event] = []
        for t in range(draws.between(knobs.flips, "length")):
            action = self._action(draws, t)
            events.append(Event(action, draws.pick(POOLS[knobs.names], "name", t)))
            face = _after(face, action)
        told = ", then".join(f" {event.actor}{_told(event.action)}" for event in events)
        return Story(f"{_OPENING} {start}.{told}.{_QUESTION}", f" {face}.", f" {face}", tuple(events))

    def _action(self, draws: Draws, t: int) -> str:
        if draws.chance(self.knobs.reset, "reset", t):
            return SET + draws.pick(FACES, "reset to", t)
        return FLIP if draws.chance(self.knobs.p, "flip", t) else KEEP

    def scene(self) -> Scene:
        return _CoinResetsScene()

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        return vocabulary_of((_OPENING, _QUESTION, _FLIPS, _KEEPS, _KEPT, _SETS, ", then", ".", *_FACES, *_NAMES))

    def answers(self) -> tuple[str, ...]:
        return _FACES

    def next_action_chance(self) -> float:
        p, reset = self.knobs.p, self.knobs.reset
        return max((1 - reset) * p, (1 - reset) * (1 - p), reset / len(FACES))


def _told(action: str) -> str:
    return {FLIP: _FLIPS, KEEP: _KEEPS + _KEPT}.get(action) or f"{_SETS} {action.removeprefix(SET)}"


def _after(face: str, action: str) -> str:
    if action.startswith(SET):
        return action.removeprefix(SET)
    return other(face) if action == FLIP else face


class _CoinResetsScene(Scene):
    """The true face, the last stated face (`claimed`), and that face after the actions since (`implied`)."""

    label_names = (
        "face", "start", "start_matters", "flips", "flips_since_set", "sets", "actions", "last_action", "name",
        "claimed", "implied",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.start: str | None = None
        self.face: str | None = None
        self.claimed: str | None = None
        self.implied: str | None = None
        self.name: str | None = None

    def labels(self) -> dict[str, Label]:
        actions = [event.action for event, _, _ in self.told]
        sets = [t for t, action in enumerate(actions) if action.startswith(SET)]
        since = actions[sets[-1] + 1 :] if sets else actions
        return {
            "face": self.face,
            "start": self.start,
            "start_matters": not sets,
            "flips": actions.count(FLIP),
            "flips_since_set": since.count(FLIP),
            "sets": len(sets),
            "actions": len(actions),
            "last_action": actions[-1] if actions else None,
            "name": self.name,
            "claimed": self.claimed,
            "implied": self.implied,
        }

    def thought(self) -> str:
        return f" {self.face}"

    def script(self) -> Script:
        yield (_OPENING,)
        self.start = self.face = self._claim((yield _FACES))
        yield (".",)
        piece = ", then"
        while piece == ", then":
            self.name = (yield _NAMES)[1:]
            verb = yield (_FLIPS, _KEEPS, _SETS)
            if verb == _SETS:
                self._act(SET + (yield _FACES)[1:], telling=2)
            else:
                self._act(FLIP if verb == _FLIPS else KEEP, telling=1)
            if verb == _KEEPS:
                yield (_KEPT,)
            piece = yield (", then", ".", *(f",{face}" for face in _FACES))
            if piece[1:] in _FACES:
                self._claim(piece[1:])
                piece = yield (", then", ".")
        yield (_QUESTION,)
        self._claim((yield _FACES))
        yield (".",)

    def _claim(self, word: str) -> str:
        self.claimed = self.implied = word[1:]
        return word[1:]

    def _act(self, action: str, telling: int) -> None:
        assert self.face is not None and self.implied is not None
        self.face, self.implied = _after(self.face, action), _after(self.implied, action)
        self.happen(Event(action, self.name or ""), pieces=1 + telling, telling=telling)
