"""`ResamplePlan`: everything that determines the bits of rollouts. Waves, workers and order of work are not part of it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Text
from replaylens.engine.records import Count, Positive, build
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import integer, items, shown, whole
from replaylens.engine.resampling.answers import Answer
from replaylens.engine.resampling.seeds import rollout_seed
from replaylens.engine.resampling.sentences import sentence_starts
from replaylens.tasks.labels import path_offsets

PLACES = ("fork", "sentences", "answer", "last", "all")
AT = "'sentences', 'tokens', a position, several, or a function of position and token text"
KEEP = f"some of {', '.join(map(repr, PLACES))}, or numbers of generated tokens (0 is the first, -1 the last)"
MAX_ROLLOUTS = 1 << 20
ForkPositions = str | int | Sequence[int] | Callable[[int, str], bool] | None
KeptPlaces = str | int | Sequence[str | int]


@dataclass(frozen=True)
class ResamplePlan:
    """Which rollouts to draw, and what to keep of them. Equal plans under equal fingerprints give equal rollouts."""

    fingerprint: str
    tokens: tuple[int, ...]
    """the path that is resampled"""
    num_prompt: int
    positions: tuple[int, ...]
    """fork positions, ascending: a rollout keeps that many tokens of the path"""
    texts: tuple[str, ...]
    """the text from each position to the next, or to the end"""
    n: int
    """rollouts at each position"""
    max_new: int
    sampling: Sampling
    answer: Answer | None = None
    sites: tuple[str, ...] = ()
    """what is captured, as it was asked for"""
    keep: tuple[str | int, ...] = ("last",)
    """the places whose rows are kept"""
    replace: tuple[tuple[int, ...], ...] = ()
    """for each position the tokens that come instead of the path's; empty: none do"""
    edits: tuple[tuple[dict[str, Any], ...], ...] = ()
    """for each position the edits of its rollouts; empty: there are none"""

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
        place, number = self.rollout(index)
        return replace(self.sampling, seed=rollout_seed(self.sampling.seed, self.positions[place], number))

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        answer = None if self.answer is None else self.answer.to_json()
        raw = {**vars(self), "sampling": self.sampling.to_json(), "answer": answer}
        plain: dict[str, Any] = json.loads(json.dumps(raw))
        return plain

    @classmethod
    def from_json(cls, raw: Any) -> "ResamplePlan":
        """Inverse of `to_json`, but for an answer that is read by a function: the file does not hold it, so there is none."""
        read = build(ResamplePlanRecord, raw, "The plan of the rollouts", BadRequest)
        answer = None if read.answer is None or "function" in read.answer else Answer.from_json(read.answer)
        return cls(**{**vars(read), "sampling": Sampling.from_json(read.sampling), "answer": answer})

    @property
    def digest(self) -> str:
        """SHA-256 of the plan."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def differences(self, raw: Any) -> list[str]:
        """The names of the options that differ from those of a plan as JSON values. Functions are compared by their names."""
        mine, theirs = self.to_json(), {**ResamplePlan.from_json(raw).to_json(), "answer": raw["answer"]}
        return [name for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True)
class ResamplePlanRecord:
    """A plan as a file spells it."""

    fingerprint: str
    tokens: tuple[Count, ...]
    num_prompt: Count
    positions: tuple[Positive, ...]
    texts: tuple[str, ...]
    n: Positive
    max_new: Count
    sampling: dict[str, Any]
    answer: dict[str, Any] | None
    sites: tuple[str, ...]
    keep: tuple[str | int, ...]
    replace: tuple[tuple[Count, ...], ...]
    edits: tuple[tuple[dict[str, Any], ...], ...]


def positions_of(at: ForkPositions, tokens: Sequence[int], num_prompt: int, text: Text) -> tuple[int, ...]:
    """The fork positions that `at` chooses on a path, ascending. BadRequest if it chooses none, or one outside the path."""
    length, first = len(tokens), max(1, num_prompt)
    if at is None:
        return (length,)
    if integer(at) is not None:
        return (whole("at", at, 1, length),)
    if isinstance(at, str) or callable(at):
        if isinstance(at, str) and at not in ("sentences", "tokens"):
            raise BadRequest(f"Invalid at={shown(at)}. Give {AT}.")
        if first >= length:
            raise BadRequest(
                f"at={shown(at)} looks at the tokens after the prompt, and there are none. Generate or force them first, or "
                "give positions."
            )
        found = _chosen(at, tokens, first, text)
    else:
        found = sorted({whole("at", each, 1, length) for each in items("at", at, AT)})
    if not found:
        raise BadRequest(f"at={shown(at)} chooses no position of {length} tokens. Choose at least one.")
    return tuple(found)


def _chosen(at: str | Callable[[int, str], bool], tokens: Sequence[int], first: int, text: Text) -> list[int]:
    if at == "sentences":
        return [first + start for start in sentence_starts(*offsets_of(text, tokens[first:]))]
    if isinstance(at, str):
        return list(range(first, len(tokens)))
    return [position for position in range(first, len(tokens)) if at(position, text.token(tokens[position]))]


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
    given = [keep] if isinstance(keep, str) or integer(keep) is not None else items("keep", keep, KEEP)
    found: list[str | int] = []
    for each in given:
        number = integer(each)
        if number is None and (not isinstance(each, str) or each not in PLACES):
            raise BadRequest(f"Invalid keep={shown(each)}. Give {KEEP}.")
        found.append(str(each) if number is None else number)
    if not found:
        raise BadRequest(f"keep is empty, but sites are captured. Give {KEEP}.")
    return tuple(dict.fromkeys(found))
