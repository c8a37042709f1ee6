"""Coin scene: reads a coin text in any rendering and tracks the true, the claimed and the implied face.

true     follows from the events before the question
claimed  the last face that the text states
implied  the claimed face after the actions since: the belief of a reader who trusts the text

The three agree until the text states a wrong face.
"""

from replaylens.tasks.coin_wording import DISTRACTORS, FACES, FLIP, SYMBOL_OF, Verb, Wording, wording_of
from replaylens.tasks.people import ALL
from replaylens.tasks.reading import Event, Label
from replaylens.tasks.script import Scene, Script

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
