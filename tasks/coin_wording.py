"""Coin wording: the renderings of a list of coin events, and the literals that the coin's script reads.

All renderings but `symbols` share the actors' names. A keep is phrased with a negation ("does not flip") or without
one ("leaves it alone"), so that the negation can be held out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from replaylens.tasks.people import ALL
from replaylens.tasks.reading import Event
from replaylens.tasks.tokenizer import vocabulary_of

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
