"""coin: a coin starts on one face; actors flip it or leave it; which face shows? (the group Z2)"""

from dataclasses import dataclass

from replaylens.tasks.coin_scene import CoinScene, other
from replaylens.tasks.coin_wording import (
    DISTRACTORS,
    FACES,
    FLIP,
    KEEP,
    PHRASINGS,
    RENDERINGS,
    SYMBOL_OF,
    VERBS,
    Telling,
    coin_vocabulary,
    tell,
)  # fmt: skip
from replaylens.tasks.draws import Draws
from replaylens.tasks.errors import BadKnob
from replaylens.tasks.knobs import Knobs, as_range, check_choice, check_probability, check_range, check_whole, knob
from replaylens.tasks.people import POOLS
from replaylens.tasks.reading import Event
from replaylens.tasks.script import read_script
from replaylens.tasks.task import Story, Task

STARTS = ("random", *FACES)


@dataclass(frozen=True, kw_only=True)
class CoinKnobs(Knobs):
    """Settings of the task `coin`."""

    flips: tuple[int, int] = knob((1, 8), "number of actors: one number or min,max", convert=as_range)
    p: float = knob(0.5, "probability that an actor flips")
    start: str = knob("random", "start face: random, heads or tails")
    names: str = knob("train", "actors' names: train, held-out or all", wording=True)
    phrasing: str = knob("standard", "phrasing of a keep: standard (with 'not'), idle (without) or mixed", wording=True)
    distractors: int = knob(0, "maximum number of neutral sentences in each gap", wording=True)
    rendering: str = knob("picture", "text form: picture, states, wei, symbols or steps", wording=True)
    verb: str = knob("flip", "rendering wei only: 'flips the coin' or 'turns the coin over' (flip, turn)", wording=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("flips", self.flips, least=1, most=10_000)
        check_probability("p", self.p)
        check_choice("start", self.start, STARTS)
        check_choice("names", self.names, tuple(POOLS))
        check_choice("phrasing", self.phrasing, PHRASINGS)
        check_choice("rendering", self.rendering, RENDERINGS)
        check_choice("verb", self.verb, VERBS)
        check_whole("distractors", self.distractors, least=0, most=len(DISTRACTORS))
        self._check_together()

    def _check_together(self) -> None:
        if self.rendering == "symbols" and self.phrasing != "standard":
            raise BadKnob("phrasing", self.phrasing, "The rendering 'symbols' has no phrasings. Use 'standard'.")
        if self.rendering == "symbols" and self.distractors:
            raise BadKnob("distractors", self.distractors, "The rendering 'symbols' has no sentences. Use 0.")
        if self.rendering != "wei" and self.verb != "flip":
            raise BadKnob("verb", self.verb, "Only the rendering 'wei' has a choice of verb. Use 'flip'.")


def p_even(p: float, n: int) -> float:
    """Probability of an even number of flips among n actions, each a flip with probability p."""
    return (1 + (1 - 2 * p) ** n) / 2


class Coin(Task[CoinKnobs]):
    """One coin, flipped or not by each actor in turn."""

    name = "coin"
    description = "A coin starts on one face; each actor flips it or not; which face shows?"
    knobs_class = CoinKnobs
    length_knob = "flips"
    state_label = "face"
    claims = ("face", "claimed")

    def write(self, draws: Draws) -> Story:
        telling = self._telling(draws)
        prompt, completion, answer = tell(telling, self.knobs.rendering, self.knobs.verb)
        return Story(prompt, completion, answer, telling.events)

    def _telling(self, draws: Draws) -> Telling:
        knobs = self.knobs
        start = draws.pick(FACES, "start") if knobs.start == "random" else knobs.start
        events: list[Event] = []
        faces: list[str] = []
        face = start
        for t in range(draws.between(knobs.flips, "length")):
            flips = draws.chance(knobs.p, "flip", t)
            actor = "" if knobs.rendering == "symbols" else draws.pick(POOLS[knobs.names], "name", t)
            events.append(Event(FLIP if flips else KEEP, actor))
            face = other(face) if flips else face
            faces.append(face)
        idle = tuple(knobs.phrasing == "idle" or self._mixed(draws, t) for t in range(len(events)))
        gaps = tuple(self._gap(draws, t) for t in range(len(events) + 1))
        return Telling(start, tuple(faces), tuple(events), idle, gaps)

    def _mixed(self, draws: Draws, t: int) -> bool:
        return self.knobs.phrasing == "mixed" and draws.chance(0.5, "phrasing", t)

    def _gap(self, draws: Draws, t: int) -> str:
        # Drawn per gap: the number of sentences must not reveal how many actors follow.
        if not self.knobs.distractors:
            return ""
        count = draws.below(self.knobs.distractors + 1, "gap size", t)
        return "".join(draws.order(DISTRACTORS, f"gap {t}")[:count])

    def scene(self) -> CoinScene:
        return CoinScene(self.knobs.rendering, self.knobs.verb)

    @classmethod
    def vocabulary(cls) -> tuple[str, ...]:
        return coin_vocabulary()

    def answers(self) -> tuple[str, ...]:
        if self.knobs.rendering == "wei":
            return " yes", " no"
        if self.knobs.rendering == "symbols":
            return tuple(SYMBOL_OF[face] for face in FACES)
        return tuple(f" {face}" for face in FACES)

    def next_action_chance(self) -> float:
        return max(self.knobs.p, 1 - self.knobs.p)

    def outcomes(self, text: str) -> dict[str, float]:
        """Exact probability of each final face, given the whole words of the text so far and this task's knobs.

        If the text has more actors than the knobs allow, no further ones are assumed.
        """
        scene = self.scene()
        read_script(scene, text, f"task {self.name!r}")
        told = len(scene.told)
        same = 1.0 if scene.closed else self._p_same(told, told + scene.announced)
        now = scene.face(told)
        here = self._p_start() if now is None else {now: 1.0, other(now): 0.0}
        return {face: here[face] * same + here[other(face)] * (1 - same) for face in FACES}

    def _p_start(self) -> dict[str, float]:
        if self.knobs.start == "random":
            return dict.fromkeys(FACES, 0.5)
        return {face: float(face == self.knobs.start) for face in FACES}

    def _p_same(self, told: int, certain: int) -> float:
        """Probability of an even number of flips after the first `told` actors, given at least `certain` in total."""
        least, most = self.knobs.flips
        lengths = range(max(least, certain), max(most, certain) + 1)
        return sum(p_even(self.knobs.p, n - told) for n in lengths) / len(lengths)
