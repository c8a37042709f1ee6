"""`ResamplePlan`: everything that determines the bits of rollouts. Waves, workers and order of work are not part of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from math import comb
from struct import pack, unpack
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from replaylens.engine.display import Citable
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Text
from replaylens.engine.records import Count, Positive, build
from replaylens.engine.request.positions import ON_PATH, Position, forms
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_bool, as_float, as_instance, as_int, as_list, integer, short_repr
from replaylens.tasks.reading import Offset
from replaylens.tasks.tokenizer import path_offsets

# ---- seeds -----------------------------------------------------------------------------------------------------------
# The seed of each rollout. It depends on the sampling's seed, the fork position and the rollout's number, and on nothing
# else.
#
#     seed = first 8 bytes, little-endian, of BLAKE2b("replaylens rollout" || seed || position || number)
#
# with the three numbers as unsigned little-endian integers of 8 bytes. So a rollout has the same tokens however many others
# are drawn, in whatever waves and on whichever machine; rollouts with and without a replaced sentence have the same noise
# in pairs.

_DOMAIN = b"replaylens rollout"


def rollout_seed(seed: int, position: int, number: int) -> int:
    """The seed of rollout `number` at a fork position: a whole number below 2 ** 64.

    >>> rollout_seed(0, 7, 0), rollout_seed(0, 7, 1)
    (17589661133231612369, 4194808042954166979)
    """
    found: tuple[int] = unpack("<Q", blake2b(_DOMAIN + pack("<3Q", seed, position, number), digest_size=8).digest())
    return found[0]


# ---- sentences -------------------------------------------------------------------------------------------------------
# Where sentences begin: a rule of our own, small enough to be read.
#
# A sentence ends
#
# 1. after `.`, `!`, `?` or `…` (any number of them, with the quotes and brackets that close right after them), if white space
#    or the end of the text follows. Line breaks that follow belong to it; a space begins the next sentence, as in most
#    tokenizers
# 2. after a line break
#
# but not after the dot of
#
# * an abbreviation: e.g. i.e. cf. vs. Mr. Mrs. Ms. Dr. Prof. St. Fig. Eq. No. approx. etc.
# * a single capital letter, as in J. Smith
# * a number that begins a line, as in 1. or 12. of a list
#
# White space alone is no sentence: it belongs to the one before it. A dot within a number or a name has no space after it.

_END = re.compile(r"[.!?…]+[\"'”’)\]}*_]*(?=\s|\Z)|\n")
_BREAKS = re.compile(r"[ \t]*\n(?:[ \t]*\n)*")
_KEEPS = re.compile(
    r"(?:\b(?:e\.g|i\.e|cf|vs|Mr|Mrs|Ms|Dr|Prof|St|Fig|Eq|No|approx|etc)|\b[A-Z]|(?:^|\n)[ \t]*\d+)\.\Z", re.MULTILINE
)
_BEFORE = 32
"""characters before a dot that decide whether it ends a sentence"""


def sentence_spans(text: str) -> list[Offset]:
    """Characters [start, end) of each sentence. Together they are the whole text.

    >>> text = "Let x be 3.5. Dr. Lee says: no! So\\nwe stop."
    >>> [text[start:end] for start, end in sentence_spans(text)]
    ['Let x be 3.5.', ' Dr. Lee says: no!', ' So\\n', 'we stop.']
    """
    ends: list[int] = []
    for found in _END.finditer(text):
        if found[0] == "." and _KEEPS.search(text[max(0, found.end() - _BEFORE) : found.end()]):
            continue
        end = found.end()
        if more := _BREAKS.match(text, end):
            end = more.end()
        if ends and not text[ends[-1] : end].strip():
            ends[-1] = max(ends[-1], end)
        elif text[:end].strip():
            ends.append(end)
    if ends and not text[ends[-1] :].strip():
        ends[-1] = len(text)
    elif not ends or ends[-1] < len(text):
        ends.append(len(text))
    return [span for span in zip([0, *ends[:-1]], ends, strict=True) if span[0] < span[1]]


def sentence_starts(text: str, offsets: Sequence[Offset]) -> list[int]:
    """The number of the first token of each sentence, of tokens with these characters. A token that holds the end of one
    sentence and the start of the next belongs to the first."""
    starts: list[int] = []
    token = 0
    for start, _ in sentence_spans(text):
        while token < len(offsets) and (offsets[token][0] < start or (token and offsets[token][0] == offsets[token][1])):
            token += 1
        if token < len(offsets) and (not starts or starts[-1] < token):
            starts.append(token)
    return starts


def sentence_ends(text: str, offsets: Sequence[Offset]) -> list[int]:
    """The number of the last token of each sentence."""
    starts = sentence_starts(text, offsets)
    return [start - 1 for start in starts[1:]] + [len(offsets) - 1] if starts else []


# ---- answers ---------------------------------------------------------------------------------------------------------
# `Answer`: how the outcome of a rollout is read: by a regular expression, by choice tokens, or by a function.
#
# | kind     | outcome                                                                    | early stop |
# |----------|----------------------------------------------------------------------------|------------|
# | regex    | the first group of the first match in the generated text, or the match     | yes        |
# | choices  | the likeliest of some tokens as the next one, with the probability of each | no         |
# | function | what the function returns for the generated text                           | on request |
#
# A rollout stops early once its answer is certain. A match that ends where the text ends may still grow (a 4 may become a
# 42), so a rollout stops only when something follows the match. Its tokens up to there are the same as without the stop.

NO_ANSWER, OTHER = "no answer", "other"
"""the outcome of rollouts without an answer; the probability of all tokens besides the choices"""
_HALF = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class FoundAnswer:
    """An answer, and the number of characters of the text up to its end."""

    outcome: str
    end: int


@dataclass(frozen=True)
class Answer:
    """How to read the outcome of a rollout. Make one with `Answer.regex`, `Answer.choices` or `Answer.function`.

    >>> Answer.regex(r"answer is (\\d+)").read("So the answer is 42.")
    FoundAnswer(outcome='42', end=19)
    >>> Answer.regex(r"answer is (\\d+)").certain("So the answer is 4")
    False
    """

    pattern: str | None = None
    tokens: tuple[str | int, ...] = ()
    after: str = ""
    """of choices: text that is forced before the choice"""
    reader: Callable[[str], str | None] | None = None
    stop: bool = True
    """whether a rollout stops once its answer is certain"""

    @classmethod
    def regex(cls, pattern: str, *, stop: bool = True) -> Answer:
        """The first match in the generated text: its first group that took part, or all of it, without outer white space."""
        try:
            re.compile(as_instance("pattern", pattern, str, "a regular expression"))
        except re.error as error:
            raise BadRequest(f"Invalid regular expression {pattern!r:.60}: {error}.") from error
        return cls(pattern=pattern, stop=as_bool("stop", stop))

    @classmethod
    def choices(cls, choices: Sequence[str | int], *, after: str = "") -> Answer:
        """The probabilities of some tokens as the next one, read from the logits: exact, at temperature 1, without a sample.

        choices  two or more single tokens, as text (with its leading space, if it has one) or ids
        after    text that is forced at the end of the rollout before they are read, such as "\\nAnswer:"

        With max_new=0, the answer is forced right at the fork, and one rollout is all there is to know.
        """
        tokens = tuple(as_list("choices", choices, "a list of tokens, as text or ids"))
        if len(tokens) < 2 or len(set(tokens)) < len(tokens):
            raise BadRequest(f"Invalid choices={list(tokens)}. Give at least two different tokens.")
        return cls(tokens=tokens, after=as_instance("after", after, str, "a text"), stop=False)

    @classmethod
    def function(cls, reader: Callable[[str], str | None], *, stop: bool = False) -> Answer:
        """What a function makes of the generated text: the name of the outcome, or None.

        stop  also call it after every token, and stop the rollout at the first text for which it returns an outcome
        """
        if not callable(reader):
            raise BadRequest(f"Invalid function={reader!r:.60}. Give a function from the text to the outcome, or to None.")
        return cls(reader=reader, stop=as_bool("stop", stop))

    def read(self, text: str) -> FoundAnswer | None:
        """The answer in a finished text; None: there is none."""
        text = text.rstrip(_HALF)
        if self.pattern is not None:
            return _group(re.search(self.pattern, text))
        found = None if self.reader is None else self.reader(text)
        if found is None:
            return None
        return FoundAnswer(as_instance("outcome", found, str, "the name of the outcome as text, or None"), len(text))

    def certain(self, text: str) -> bool:
        """Whether a text that may go on has an answer that will not grow."""
        if self.pattern is None:
            return self.read(text) is not None
        text = text.rstrip(_HALF)
        found = re.search(self.pattern, text)
        return found is not None and found.end() < len(text)

    def to_json(self) -> dict[str, Any]:
        """Plain values. A function is known by its name alone."""
        if self.reader is not None:
            name = f"{getattr(self.reader, '__module__', '')}.{getattr(self.reader, '__qualname__', 'function')}"
            return {"function": name, "stop": self.stop}
        if self.pattern is not None:
            return {"regex": self.pattern, "stop": self.stop}
        return {"choices": list(self.tokens), "after": self.after}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Answer:
        """Inverse of `to_json`; BadRequest for a function, which is not in the file, and for other values."""
        match raw:
            case {"regex": str(pattern), "stop": bool(stop), **rest} if not rest:
                return cls.regex(pattern, stop=stop)
            case {"choices": [*tokens], "after": str(after), **rest} if not rest:
                return cls.choices(tokens, after=after)
            case {"function": name}:
                raise BadRequest(f"The answer is read by a function ({name}), which no file holds. Give it again.")
        raise BadRequest(f"Invalid answer={raw!r:.60}: neither a regular expression nor choices.")


def _group(found: re.Match[str] | None) -> FoundAnswer | None:
    if found is None:
        return None
    number = next((i for i, text in enumerate(found.groups(), 1) if text is not None), 0)
    return FoundAnswer(found[number].strip(), found.end(number))


# ---- settled ---------------------------------------------------------------------------------------------------------
# When enough rollouts were drawn: a sequential test of which answer is the likeliest, which may be looked at after every draw.


@lru_cache(4096)
def evidence(own: int, other: int) -> Fraction:
    """How many times likelier `own` draws of one answer and `other` of another are if the first is the likelier of the two,
    with a uniform prior on its share of both above 1/2, than if both are equally likely.

    2 * integral of t**own * (1 - t)**other over 1/2 < t < 1, times 2**(own + other), in whole numbers.

    >>> evidence(0, 0), evidence(3, 0), float(evidence(20, 5)) > 40
    (Fraction(1, 1), Fraction(15, 4), True)
    """
    total = own + other
    return Fraction(sum(comb(total + 1, i) for i in range(own + 1)), (total + 1) * comb(total, own))


class Race:
    """Which answer is the likeliest, from independent draws: `settled` names it once that is known with error `alpha`.

    **The rule.** Answers are numbered j = 1, 2, ... as they first occur. Answer j is settled once, of the draws after its
    first, `evidence(own, other) >= j * (j + 1) / alpha`, with `other` the number of the most frequent other answer.

    **The error.** Whatever the distribution, number of answers and rule of stopping, an answer that is not among the likeliest
    is ever settled with probability at most alpha. Proof: let m be a likeliest answer, and E_j the evidence of answer j against
    m from the draws after j's first; 1 before. A draw of neither changes nothing. A draw of j or m multiplies a point t > 1/2
    of the mixture by 2t or 2(1 - t). It is j's with probability q <= 1/2, so that on average the factor is
    2(qt + (1 - q)(1 - t)) <= 1: E_j is a supermartingale. So is the sum of E_j / (j (j + 1)) over j = 1, 2, ..., which starts
    at 1: by Ville's inequality it ever reaches 1 / alpha with probability at most alpha. If j is settled, it has: m occurred at
    most as often as the most frequent other answer, and evidence falls as `other` grows.

    The mixture is the prior-posterior-ratio martingale of Waudby-Smith and Ramdas (arXiv 2006.04347), for pairs of answers as
    in Jain et al. (arXiv 2109.05047); weights by order of occurrence make a list of the possible answers unnecessary.

    >>> race = Race(0.05)
    >>> [race.add(each) for each in ["7"] * 9][-2:]
    [None, '7']
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = as_float("settle", alpha, BadRequest)
        if not 0 < self.alpha < 1:
            raise BadRequest(f"Invalid settle={short_repr(alpha)}. Give the probability of an error, such as 0.05.")
        self.settled: str | None = None
        self._since: dict[str, Counter[str]] = {}

    def add(self, outcome: str | None) -> str | None:
        """Count one draw; None, a rollout without an answer, says nothing of answers. Returns the settled answer, if any."""
        if outcome is None:
            return self.settled
        for seen in self._since.values():
            seen[outcome] += 1
        own = self._since.setdefault(outcome, Counter())
        if self.settled is None and own[outcome]:
            number = list(self._since).index(outcome) + 1
            other = max((count for name, count in own.items() if name != outcome), default=0)
            if evidence(own[outcome], other) * Fraction(self.alpha) >= number * (number + 1):
                self.settled = outcome
        return self.settled


# ---- counts ----------------------------------------------------------------------------------------------------------
# `OutcomeCounts`: how often each outcome followed each fork. What statistics of forks start from.


@dataclass(frozen=True, eq=False)
class OutcomeCounts(Citable):
    """Counts of outcomes at each fork position. Immutable; the arrays must not be changed.

    >>> counts = OutcomeCounts([4, 9], ["heads", "tails"], np.array([[3, 1], [0, 4]]), [" Alice flips.", " Bob flips."])
    >>> counts.shares.tolist()
    [[0.75, 0.25], [0.0, 1.0]]
    """

    positions: list[int]
    """fork positions: the number of tokens that the rollouts share with the path"""
    outcomes: list[str]
    """the names of the outcomes"""
    counts: NDArray[np.int64]
    """[positions, outcomes]: rollouts with this outcome. With choice tokens, rollouts whose likeliest choice it is"""
    texts: list[str]
    """the text of the unit of the path, such as a sentence, that starts at each position; "" at its end"""
    probabilities: NDArray[np.float64] | None = None
    """[positions, outcomes]: with choice tokens, the mean probability of each choice over the rollouts; otherwise None"""

    def __post_init__(self) -> None:
        shape = (len(self.positions), len(self.outcomes))
        for name in ("counts", "probabilities"):
            given = getattr(self, name)
            if given is not None and np.shape(given) != shape:
                raise BadRequest(f"{name} is of shape {np.shape(given)}, for {shape[0]} positions and {shape[1]} outcomes.")
        if not np.issubdtype(np.asarray(self.counts).dtype, np.integer) or (np.asarray(self.counts) < 0).any():
            raise BadRequest("counts are numbers of rollouts. Give an array of whole numbers of at least 0.")
        if any(later <= earlier for earlier, later in pairwise(self.positions)):
            raise BadRequest(f"Positions {self.positions[:8]} are not in ascending order. Sort them, each once.")
        if len(self.texts) != shape[0]:
            raise BadRequest(f"Got {len(self.texts)} texts for {shape[0]} positions. Give one for each.")

    @property
    def shares(self) -> NDArray[np.float64]:
        """The estimated outcome distribution at each position: [positions, outcomes]. nan where nothing was drawn."""
        if self.probabilities is not None:
            return self.probabilities
        with np.errstate(invalid="ignore"):
            return np.asarray(self.counts / self.counts.sum(1, keepdims=True))


# ---- plan ------------------------------------------------------------------------------------------------------------

PLACES = ("fork", "sentences", "answer", "last", "all")
KINDS = (*ON_PATH, "sentences", "custom")
AT = f"positions, or {forms(KINDS)}"
KEEP = f"some of {', '.join(map(repr, PLACES))}, or numbers of generated tokens (0 is the first, -1 the last)"
MAX_ROLLOUTS = 1 << 20
ForkPositions = str | int | Sequence[int] | Callable[[int, str], bool] | None
KeptPlaces = str | int | Sequence[str | int]


SamplingOf = TypeVar("SamplingOf")
AnswerOf = TypeVar("AnswerOf")


@dataclass(frozen=True)
class ResamplePlanRecord(Generic[SamplingOf, AnswerOf]):
    """The options of rollouts, which their files hold all."""

    fingerprint: str
    tokens: tuple[Count, ...]
    """the path that is resampled"""
    num_prompt: Count
    positions: tuple[Positive, ...]
    """fork positions, ascending: a rollout keeps that many tokens of the path"""
    texts: tuple[str, ...]
    """the text from each position to the next, or to the end"""
    n: Positive
    """rollouts at each position"""
    max_new: Count
    sampling: SamplingOf
    answer: AnswerOf
    sites: tuple[str, ...]
    """what is captured, as it was asked for"""
    keep: tuple[str | int, ...]
    """the places whose rows are kept"""
    replace: tuple[tuple[Count, ...], ...]
    """for each position the tokens that come instead of the path's; empty: none do"""
    edits: tuple[tuple[dict[str, Any], ...], ...]
    """for each position the edits of its rollouts; empty: there are none"""


@dataclass(frozen=True)
class ResamplePlan(ResamplePlanRecord[Sampling, Answer | None]):
    """Which rollouts to draw, and what to keep of them. Equal plans under equal fingerprints give equal rollouts."""

    def __len__(self) -> int:
        """The number of rollouts."""
        return len(self.positions) * self.n

    def rollout(self, index: int) -> tuple[int, int]:
        """(number of the position, number of the rollout there) of rollout `index`, in canonical order."""
        return divmod(index, self.n)

    def prefix(self, place: int) -> list[int]:
        """The tokens before the first generated one, at the position with this number."""
        return [*self.tokens[: self.positions[place]], *(self.replace[place] if self.replace else ())]

    def length(self, index: int, new: int) -> int:
        """The number of tokens on the path of rollout `index`, of which `new` are generated."""
        place = self.rollout(index)[0]
        return self.positions[place] + (len(self.replace[place]) if self.replace else 0) + new

    def sampling_of(self, index: int) -> Sampling:
        """The sampling of rollout `index`, with its own seed."""
        return self.sampling.derived(seed=self.seed_of(index))

    def seed_of(self, index: int) -> int:
        """The seed of rollout `index`."""
        place, number = self.rollout(index)
        return rollout_seed(self.sampling.seed, self.positions[place], number)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        answer = None if self.answer is None else self.answer.to_json()
        raw = {**vars(self), "sampling": self.sampling.to_json(), "answer": answer}
        plain: dict[str, Any] = json.loads(json.dumps(raw))
        return plain

    @classmethod
    def from_json(cls, raw: Any) -> ResamplePlan:
        """Inverse of `to_json`, but for an answer that is read by a function: the file does not hold it, so there is none."""
        read = build(ResamplePlanRecord[dict[str, Any], dict[str, Any] | None], raw, "The plan of the rollouts", BadRequest)
        answer = None if read.answer is None or "function" in read.answer else Answer.from_json(read.answer)
        return cls(**{**vars(read), "sampling": Sampling.from_json(read.sampling), "answer": answer})

    @property
    def digest(self) -> str:
        """SHA-256 of the plan."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def differences(self, raw: Any) -> list[str]:
        """The options that differ from those of a plan as JSON values, with both. Functions are compared by their names."""
        mine, theirs = self.to_json(), {**ResamplePlan.from_json(raw).to_json(), "answer": raw["answer"]}
        return [f"{name}={theirs[name]!r:.60}, not {mine[name]!r:.60}" for name in mine if mine[name] != theirs[name]]


def positions_of(at: ForkPositions, tokens: Sequence[int], num_prompt: int, text: Text) -> tuple[int, ...]:
    """The fork positions that `at` chooses on a path, ascending. BadRequest if it chooses none, or one outside the path."""
    length = len(tokens)
    if isinstance(at, str) or callable(at):
        place = Position.parse(at, KINDS if callable(at) else KINDS[:-1], "at")
        found = _chosen(place, tokens, num_prompt, text) - {0}
    else:
        several = [length if at is None else at] if at is None or integer(at) is not None else as_list("at", at, AT)
        found = {as_int("at", each, 1, length) for each in several}
    if not found:
        missing = "there are none after the prompt: generate or force them first" if num_prompt >= length else "choose one"
        raise BadRequest(f"at={short_repr(at)} chooses no position of {length} tokens; {missing}.")
    return tuple(sorted(found))


def _chosen(place: Position, tokens: Sequence[int], num_prompt: int, text: Text) -> set[int]:
    first = max(1, num_prompt)
    if place.kind == "sentences":
        return {first + start for start in sentence_starts(*offsets_of(text, tokens[first:]))} if tokens[first:] else set()
    if place.function is not None:
        return {position for position in range(first, len(tokens)) if place.function(position, text.token(tokens[position]))}
    return {*place.on(len(tokens), num_prompt, lambda: map(text.token, tokens))}


def unit_texts(positions: Sequence[int], tokens: Sequence[int], text: Text) -> tuple[str, ...]:
    """The text from each position to the next, or to the end of the path."""
    ends = [*positions[1:], len(tokens)]
    return tuple(text.decode(tokens[a:b]) if a < b else "" for a, b in zip(positions, ends, strict=True))


def offsets_of(text: Text, tokens: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of some tokens, and the characters of each; BadRequest without a tokenizer."""
    if text.tokenizer is None:
        raise BadRequest("Without a tokenizer, tokens have no sentences. Give positions, or load the engine with a tokenizer.")
    return path_offsets(text.tokenizer, list(tokens))


def places_kept(keep: KeptPlaces) -> tuple[str | int, ...]:
    """The places of `keep`, checked."""
    given = [keep] if isinstance(keep, str) or integer(keep) is not None else as_list("keep", keep, KEEP)
    found: list[str | int] = []
    for each in given:
        number = integer(each)
        if number is None and (not isinstance(each, str) or each not in PLACES):
            raise BadRequest(f"Invalid keep={short_repr(each)}. Give {KEEP}.")
        found.append(str(each) if number is None else number)
    if not found:
        raise BadRequest(f"keep is empty, but sites are captured. Give {KEEP}.")
    return tuple(dict.fromkeys(found))
