"""coin: a coin starts on one face; actors flip it or leave it; which face shows? (the group Z2)"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from replaylens.tasks.errors import BadKnob
from replaylens.tasks.reading import Event, Label, Scene, Script, read_script
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

# ---- people ----------------------------------------------------------------------------------------------------------
# People: the actors' names, in two disjoint pools, so that names can be held out.
#
# No name of either pool is a prefix of another, so a name is known once its last letter is read.

TRAIN_PEOPLE = (
    "Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Kevin", "Liam",
    "Maria", "Nathan", "Olivia", "Peter", "Quinn", "Rachel", "Samuel", "Teresa", "Ursula", "Victor", "Wendy", "Xavier",
)  # fmt: skip
HELD_OUT_PEOPLE = (
    "Amir", "Bianca", "Cyrus", "Daphne", "Elias", "Fatima", "Goran", "Hana", "Ka", "Mei", "Sherrie", "Zoe",
)  # fmt: skip

POOLS = {"train": TRAIN_PEOPLE, "held-out": HELD_OUT_PEOPLE, "all": TRAIN_PEOPLE + HELD_OUT_PEOPLE}
ALL = POOLS["all"]


# ---- coin wording ----------------------------------------------------------------------------------------------------
# Coin wording: the renderings of a list of coin events, and the literals that the coin's script reads.
#
# All renderings but `symbols` share the actors' names. A keep is phrased with a negation ("does not flip") or without
# one ("leaves it alone"), so that the negation can be held out.

FACES = ("heads", "tails")
FLIP, KEEP = "flip", "keep"
RENDERINGS = ("picture", "states", "wei", "symbols", "steps")
VERBS = ("flip", "turn")
PHRASINGS = ("standard", "idle", "mixed")

SYMBOL_OF = {"heads": " H", "tails": " T", FLIP: " x", KEEP: " o"}
DISTRACTORS = (
    " Rain taps on the window.",
    " Music plays next door.",
    " Somebody makes tea.",
    " Outside, a dog barks.",
    " Dinner smells good.",
    " Trains pass now and then.",
)


@dataclass(frozen=True)
class Verb:
    """One phrase for an action: the word that decides it, then the words that follow."""

    action: str
    decides: str
    rest: str


@dataclass(frozen=True)
class Wording:
    """The fixed phrases of one rendering. `standard` and `idle` phrase a keep with and without a negation."""

    opening: str
    opened: str
    flip: Verb
    standard: Verb
    idle: Verb
    listed: bool
    """Actions share one sentence, joined by ", then", instead of one sentence each."""
    question: str
    ask: str

    @property
    def turn(self) -> str:
        """The question's first word: once it is read, no further action can come."""
        return self.question[: self.question.index(" ", 1)]

    @property
    def verbs(self) -> tuple[Verb, ...]:
        """Everything an actor can do; no deciding word is a prefix of another."""
        return self.flip, self.standard, self.idle

    def literals(self) -> list[str]:
        """Every phrase, for the vocabulary."""
        phrases = [self.opening, self.opened, self.question, self.ask]
        return phrases + [part for verb in self.verbs for part in (verb.decides, verb.rest)]


def _listed(question: str) -> Wording:
    return Wording(
        opening="A coin's state is",
        opened=".",
        flip=Verb(FLIP, " flips", ""),
        standard=Verb(KEEP, " does", " not flip"),
        idle=Verb(KEEP, " leaves", " it alone"),
        listed=True,
        question=question,
        ask=" A:",
    )


def _wei(flip: Verb, standard: Verb) -> Wording:
    idle = Verb(KEEP, " leaves", " the coin alone.")
    return Wording("A coin is", " up.", flip, standard, idle, False, " Is the coin still", " up? A:")


PICTURE = _listed(" What's the state?")
STEPS = _listed(" What's the state, step by step?")
STATES = Wording(
    opening="The coin starts at state",
    opened=".",
    flip=Verb(FLIP, " flips", " the coin."),
    standard=Verb(KEEP, " doesn't", " flip the coin."),
    idle=Verb(KEEP, " leaves", " the coin alone."),
    listed=False,
    question=" The final state of the coin is",
    ask="",
)
WEI = {
    "flip": _wei(Verb(FLIP, " flips", " the coin."), Verb(KEEP, " does", " not flip the coin.")),
    "turn": _wei(Verb(FLIP, " turns", " the coin over."), Verb(KEEP, " does", " not turn the coin over.")),
}


def wording_of(rendering: str, verb: str) -> Wording:
    """The phrases of any rendering but `symbols`, which has none."""
    return {"picture": PICTURE, "steps": STEPS, "states": STATES, "wei": WEI[verb]}[rendering]


@dataclass(frozen=True)
class Telling:
    """The content of a text: start face, events, phrasing of each keep, and sentences in each gap."""

    start: str
    faces: tuple[str, ...]
    """The face after each event."""
    events: tuple[Event, ...]
    idle: tuple[bool, ...]
    """For each event: whether a keep is phrased without a negation."""
    gaps: tuple[str, ...]
    """Neutral sentences after the opening and after each sentence of actions."""

    @property
    def final(self) -> str:
        """The final face."""
        return self.faces[-1] if self.faces else self.start


def tell(telling: Telling, rendering: str, verb: str) -> tuple[str, str, str]:
    """Prompt, completion and answer of the events in one rendering."""
    if rendering == "symbols":
        shown = "".join(SYMBOL_OF[event.action] for event in telling.events)
        answer = SYMBOL_OF[telling.final]
        return f">{SYMBOL_OF[telling.start]}{shown} =", answer, answer
    words = wording_of(rendering, verb)
    clauses = [_clause(words, event, idle) for event, idle in zip(telling.events, telling.idle, strict=True)]
    opening = f"{words.opening} {telling.start}{words.opened}"
    sentences = [", then".join(clauses) + "."] if words.listed else clauses
    body = "".join(chain.from_iterable(zip(sentences, telling.gaps[1:], strict=False)))
    question = f"{words.question} {telling.start}" if rendering == "wei" else words.question
    prompt = f"{opening}{telling.gaps[0]}{body}{question}{words.ask}"
    answer = _answer(telling, rendering)
    thinking = _chain_of_thought(telling, clauses) if rendering == "steps" else ""
    return prompt, f"{thinking}{answer}.", answer


def _clause(words: Wording, event: Event, idle: bool) -> str:
    keep = words.idle if idle else words.standard
    verb = words.flip if event.action == FLIP else keep
    return f" {event.actor}{verb.decides}{verb.rest}"


def _answer(telling: Telling, rendering: str) -> str:
    if rendering == "wei":
        return " yes" if telling.final == telling.start else " no"
    return f" {telling.final}"


def _chain_of_thought(telling: Telling, clauses: Sequence[str]) -> str:
    told = "".join(f"{clause}: {face}." for clause, face in zip(clauses, telling.faces, strict=True))
    return f"{told} So the state is"


def coin_vocabulary() -> tuple[str, ...]:
    """Every word of every rendering, names of both pools included."""
    wordings = (PICTURE, STEPS, STATES, *WEI.values())
    phrases = chain.from_iterable(wording.literals() for wording in wordings)
    loose = (">", " =", ".", ",", ":", " then", " So the state is", " yes", " no")
    words = (f" {word}" for word in (*FACES, *ALL))
    return vocabulary_of((*phrases, *loose, *words, *SYMBOL_OF.values(), *DISTRACTORS))


# ---- coin scene ------------------------------------------------------------------------------------------------------
# Coin scene: reads a coin text in any rendering and tracks the true, the claimed and the implied face.
#
# true     follows from the events before the question
# claimed  the last face that the text states
# implied  the claimed face after the actions since: the belief of a reader who trusts the text
#
# The three agree until the text states a wrong face.

_NAMES = tuple(f" {name}" for name in ALL)
_FACES = tuple(f" {face}" for face in FACES)
_CONCLUSION = " So the state is"
_OTHER = dict(zip(FACES, reversed(FACES), strict=True))


def other(face: str) -> str:
    """The other side of the coin."""
    return _OTHER[face]


class CoinScene(Scene):
    """One coin. In a chain of thought the labels step through the events again; `final` stays the same."""

    label_names = (
        "face", "final", "parity", "flips", "actions", "last_action", "start", "name", "claimed", "implied",
    )  # fmt: skip

    def __init__(self, rendering: str, verb: str) -> None:
        super().__init__()
        self.rendering = rendering
        self.verb = verb
        self.start: str | None = None
        self.claimed: str | None = None
        self.implied: str | None = None
        self.name: str | None = None
        self.flips = [0]  # flips[t]: how many of the first t actions were flips
        self.at = 0  # number of the current action: the last one told, except in a chain of thought
        self.asked: str | None = None  # rendering wei: the face that "still" asks about
        self.announced = False  # an actor is named, or ", then" is read, but the action is still open
        self.closed = False  # no further action can come

    def labels(self) -> dict[str, Label]:
        begun, at = self.start is not None, self.at
        face, flips = self.face(at), self.flips[at]
        return {
            "face": face,
            "final": face if at == len(self.told) else self.face(len(self.told)),
            "parity": flips % 2 if begun else None,
            "flips": flips if begun else None,
            "actions": at if begun else None,
            "last_action": self.told[at - 1][0].action if at else None,
            "start": self.start,
            "name": self.name,
            "claimed": self.claimed,
            "implied": self.implied,
        }

    def face(self, at: int) -> str | None:
        """The true face after `at` actions."""
        if self.start is None:
            return None
        return other(self.start) if self.flips[at] % 2 else self.start

    def thought(self) -> str:
        face = self.face(self.at)
        assert face is not None
        return SYMBOL_OF[face] if self.rendering == "symbols" else f" {face}"

    def script(self) -> Script:
        if self.rendering == "symbols":
            return self._symbols()
        return self._sentences(wording_of(self.rendering, self.verb))

    def claim(self, face: str) -> None:
        """The text states a face."""
        self.claimed = self.implied = face

    def act(self, action: str, pieces: int) -> None:
        """The text states the next action."""
        self.flips.append(self.flips[-1] + (action == FLIP))
        self.happen(Event(action, self.name or ""), pieces=pieces)
        self.at += 1
        self.announced = False
        self._imply(action)

    def _imply(self, action: str) -> None:
        if action == FLIP and self.implied is not None:
            self.implied = other(self.implied)

    def _symbols(self) -> Script:
        meaning = {symbol: word for word, symbol in SYMBOL_OF.items()}
        faces = tuple(SYMBOL_OF[face] for face in FACES)
        actions = tuple(symbol for symbol in meaning if symbol not in faces)
        yield (">",)
        self.start = meaning[(yield faces)]
        self.claim(self.start)
        while (piece := (yield (*actions, " =") if self.told else actions)) != " =":
            self.act(meaning[piece], pieces=1)
        self.closed = True
        self.claim(meaning[(yield faces)])

    def _sentences(self, words: Wording) -> Script:
        yield (words.opening,)
        self.start = (yield _FACES)[1:]
        self.claim(self.start)
        yield (words.opened,)
        piece = yield (*_NAMES, *DISTRACTORS)
        while piece != words.turn:
            if piece in _NAMES:
                yield from (self._list(words, piece) if words.listed else self._actor(words, piece))
            over = words.listed and bool(self.told)
            following = (*DISTRACTORS, *(() if over else _NAMES), *((words.turn,) if self.told else ()))
            piece = yield following
        yield from self._finish(words)

    def _actor(self, words: Wording, name: str) -> Script:
        self.name, self.announced = name[1:], True
        verb = _verb(words, (yield [verb.decides for verb in words.verbs]))
        self.act(verb.action, pieces=2)
        if verb.rest:
            yield (verb.rest,)

    def _list(self, words: Wording, name: str) -> Script:
        """Actions joined by ", then"; a face may be stated after any of them ("Alice flips, tails, then Bob ...")."""
        while True:
            yield from self._actor(words, name)
            piece = yield (",", ".")
            while piece == ",":
                self.announced = True
                piece = yield (" then", *_FACES)
                if piece in _FACES:
                    self.claim(piece[1:])
                    self.announced = False
                    piece = yield (",", ".")
            if piece == ".":
                self.closed = True
                return
            name = yield _NAMES

    def _finish(self, words: Wording) -> Script:
        self.closed = True
        yield (words.question.removeprefix(words.turn),)
        if self.rendering == "wei":
            self.asked = (yield _FACES)[1:]
        if words.ask:
            yield (words.ask,)
        if self.rendering == "steps":
            yield from self._walk(words)
        answers = (" yes", " no") if self.rendering == "wei" else _FACES
        self.claim(self._stated((yield answers)))
        yield (".",)

    def _stated(self, answer: str) -> str:
        """The face that an answer states: by name, or as yes or no to the face asked about."""
        if self.asked is None:
            return answer[1:]
        return self.asked if answer == " yes" else other(self.asked)

    def _walk(self, words: Wording) -> Script:
        """A chain of thought. Its recited actions move `implied`; the truth depends on the prompt alone."""
        piece = yield (*_NAMES, _CONCLUSION)
        if piece in _NAMES:
            self.at, self.implied = 0, self.start
        while piece in _NAMES:
            self.name = piece[1:]
            verb = _verb(words, (yield [verb.decides for verb in words.verbs]))
            self.at = min(self.at + 1, len(self.told))
            self._imply(verb.action)
            yield (f"{verb.rest}:",)
            self.claim((yield _FACES)[1:])
            yield (".",)
            piece = yield (*_NAMES, _CONCLUSION)
        self.at = len(self.told)


def _verb(words: Wording, decides: str) -> Verb:
    return next(verb for verb in words.verbs if verb.decides == decides)


# ---- coin ------------------------------------------------------------------------------------------------------------

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
