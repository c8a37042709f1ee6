"""shell: coloured balls under cups; cups are swapped, or only touched; what is under one cup? (S3 and S5)

Touching moves nothing. Without touches, the parity of the permutation would equal that of the number of moves.
"""

from dataclasses import dataclass
from itertools import combinations

from replaylens.tasks.errors import BadKnob
from replaylens.tasks.reading import Event, Label, Scene, Script
from replaylens.tasks.task import Draws, Knobs, Story, Task, as_range, check_choice, check_probability, check_range, knob
from replaylens.tasks.tokenizer import vocabulary_of

COLOURS = ("red", "blue", "green", "white", "black")
CUPS = (3, 5)
STARTS = ("random", "fixed")
SWAP, TOUCH = "swap", "touch"

_VERBS = {" Swap cups": SWAP, " Touch cups": TOUCH}
_OPENING, _QUESTION = "Under the cups:", " What is under cup"


@dataclass(frozen=True, kw_only=True)
class ShellKnobs(Knobs):
    """Settings of the task `shell`."""

    cups: int = knob(3, "number of cups: 3 (the group S3) or 5 (S5)")
    swaps: tuple[int, int] = knob((1, 8), "number of moves: one number or min,max", convert=as_range)
    p: float = knob(0.75, "probability that a move swaps; otherwise it only touches")
    start: str = knob("random", "initial order of the balls: random or fixed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cups, bool) or self.cups not in CUPS:
            raise BadKnob("cups", self.cups, "Use 3 or 5.")
        check_range("swaps", self.swaps, least=1, most=10_000)
        check_probability("p", self.p)
        check_choice("start", self.start, STARTS)


class Shell(Task[ShellKnobs]):
    """The shell game."""

    name = "shell"
    description = "Coloured balls under 3 or 5 cups; pairs of cups are swapped or only touched; what is under one?"
    knobs_class = ShellKnobs
    length_knob = "swaps"
    state_label = "state"
    claims = ("held", "claimed")

    def write(self, draws: Draws) -> Story:
        knobs = self.knobs
        balls = list(COLOURS[: knobs.cups])
        if knobs.start == "random":
            balls = draws.order(balls, "start")
        opening = f"{_OPENING} {', '.join(balls)}."
        pairs = tuple(combinations(range(knobs.cups), 2))
        events: list[Event] = []
        told = ""
        for t in range(draws.between(knobs.swaps, "length")):
            i, j = draws.pick(pairs, "pair", t)
            verb = " Swap cups" if draws.chance(knobs.p, "swap", t) else " Touch cups"
            if _VERBS[verb] == SWAP:
                balls[i], balls[j] = balls[j], balls[i]
            told += f"{verb} {i + 1} and {j + 1}."
            events.append(_event(_VERBS[verb], i + 1, j + 1))
        asked = draws.below(knobs.cups, "asked")
        answer = f" {balls[asked]}"
        return Story(f"{opening}{told}{_QUESTION} {asked + 1}? A:", f"{answer}.", answer, tuple(events))

    def scene(self) -> Scene:
        return _ShellScene(self.knobs.cups)

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        loose = (_OPENING, _QUESTION, *_VERBS, ",", ".", " and", "? A:")
        return vocabulary_of((*loose, *(f" {n + 1}" for n in range(max(CUPS))), *(f" {ball}" for ball in COLOURS)))

    def answers(self) -> tuple[str, ...]:
        return tuple(f" {ball}" for ball in COLOURS[: self.knobs.cups])

    def next_action_chance(self) -> float:
        pairs = self.knobs.cups * (self.knobs.cups - 1) // 2
        return max(self.knobs.p, 1 - self.knobs.p) / pairs


def _event(verb: str, i: int, j: int) -> Event:
    return Event(f"{verb} {i} {j}", objects=(str(i), str(j)))


class _ShellScene(Scene):
    """`state` is the order of the balls now; `permutation` and `parity` are relative to the order at the start."""

    label_names = (
        "state", "permutation", "parity", "first_cup", "swaps", "actions", "last_action", "asked", "held", "claimed",
    )  # fmt: skip

    def __init__(self, cups: int) -> None:
        super().__init__()
        self.cups = cups
        self.start: list[str] = []
        self.balls: list[str] = []
        self.swaps = 0
        self.asked: int | None = None
        self.claimed: str | None = None

    def labels(self) -> dict[str, Label]:
        laid = len(self.start) == self.cups
        return {
            "state": " ".join(self.balls) if laid else None,
            "permutation": "".join(str(self.start.index(ball) + 1) for ball in self.balls) if laid else None,
            "parity": self.swaps % 2 if laid else None,
            "first_cup": self.balls[0] if self.balls else None,
            "swaps": self.swaps,
            "actions": len(self.told),
            "last_action": self.told[-1][0].action if self.told else None,
            "asked": self.asked,
            "held": None if self.asked is None else self.balls[self.asked - 1],
            "claimed": self.claimed,
        }

    def thought(self) -> str:
        return "".join(f" {ball}" for ball in self.balls)

    def script(self) -> Script:
        cups = tuple(f" {n + 1}" for n in range(self.cups))
        yield (_OPENING,)
        for n in range(self.cups):
            ball = yield [f" {ball}" for ball in COLOURS[: self.cups] if ball not in self.start]
            self.start.append(ball[1:])
            self.balls.append(ball[1:])
            yield ("," if n + 1 < self.cups else ".",)
        while (verb := (yield (*_VERBS, _QUESTION) if self.told else tuple(_VERBS))) != _QUESTION:
            first = yield cups
            second = yield [f" and{cup}" for cup in cups if cup != first]
            self._move(_VERBS[verb], int(first), int(second.removeprefix(" and")))
            yield (".",)
        self.asked = int((yield cups))
        yield ("? A:",)
        self.claimed = (yield [f" {ball}" for ball in COLOURS[: self.cups]])[1:]
        yield (".",)

    def _move(self, verb: str, i: int, j: int) -> None:
        if verb == SWAP:
            self.balls[i - 1], self.balls[j - 1] = self.balls[j - 1], self.balls[i - 1]
            self.swaps += 1
        self.happen(_event(verb, i, j), pieces=3, telling=3)
