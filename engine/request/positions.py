"""Positions of a path: the forms that captures, dumps, probes, logits and resampling take, and what they choose.

| form | tokens |
|---|---|
| `all`, `prompt`, `response` | every token; those of the prompt; those after it, also called `generated` or `tokens` |
| `7`; `3:7`, `:4`, `-2:` | the token at position 7; a span, whose negative ends count from the end of the prompt |
| `response[:32]`, `all[::4]`, `prompt[-3:]` | a slice of a part; only a prompt has an end to count from |
| `last`, `last-1` | the last token of the prompt, in a dump that of each branch; the one before |
| `text:Paris` | the token that ends each occurrence of the substring, as the tokens spell it; spaces count |
| `label:subject` | every token where the label has a value |
| `steps`; `sentences` | the tokens that end a step of the task; the first token of each sentence after the prompt |
| `step`, `step+2`, `step-1` | where a step of the task is decided; two tokens later; the token before |
| `step:3`, `step:3+1` | the same, of the third step only |
| `query`, `query-1`, `query+1` | the prompt's last token with labels; before it; the answer's first token |
| a function | from what is known there to the tokens |
| a number, several, a slice | of a branch, as in Python: negative numbers count from its last token |

Each place takes the forms that follow from what it knows, and its errors list them.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Self

from replaylens.engine.errors import BadRequest, EngineError
from replaylens.engine.request.values import as_int, as_list, integer, short_repr

# ---- forms -----------------------------------------------------------------------------------------------------------

FORMS = {
    "tokens": "all, prompt, response, 7, 3:7, -2:, response[:32]",
    "last": "last",
    "steps": "steps",
    "sentences": "sentences",
    "step": "step, step+1, step:3",
    "query": "query, query-1",
    "text": "text:SUBSTRING",
    "label": "label:NAME",
    "custom": "a function",
}
"""kind -> its forms"""
CAPTURED = ("tokens", "last")
ON_PATH = (*CAPTURED, "text")
"""what follows from the tokens of a path"""
CUSTOM = "custom:"
"""begins the spec of a function"""
TokenTexts = Callable[[], Iterable[str]]
"""gives the texts of a path's tokens"""
_INT = r"(-?\d{1,18})"
_TOKENS = re.compile(r"(all|prompt|response|generated|tokens)(?:\[(.+)\])?|(.+)")
_ENDS = re.compile(rf"{_INT}|{_INT}?:{_INT}?(?::(\d{{1,18}}))?")
_ANCHOR = re.compile(r"(last|query|step)(?:(?<=step):(\d{1,18}))?([+-]\d{1,18})?")
_NAMED = re.compile(r"(text|label):(.+)", re.DOTALL)


def forms(kinds: Iterable[str]) -> str:
    """The forms of some kinds, for errors and help."""
    return " or ".join(", ".join(FORMS[kind] for kind in kinds).rsplit(", ", 1))


@dataclass(frozen=True)
class PositionSlice:
    """A slice of the positions of a path, of its prompt, or of its response."""

    part: Literal["all", "prompt", "response"] = "all"
    start: int = 0
    """counted from the first position of the part; negative: from the prompt's end"""
    stop: int | None = None
    step: int = 1

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The slice that a text spells; None: it spells none."""
        if (found := _TOKENS.fullmatch(text)) is None:
            return None
        name, cut, bare = found.groups()
        part: Any = "response" if name in ("generated", "tokens") else name or "all"
        if name and not cut:
            return cls(part)
        if (ends := _ENDS.fullmatch(cut or bare)) is None or (ends[4] and not int(ends[4])):
            return None
        start, stop = int(ends[1] or ends[2] or 0), int(ends[3]) if ends[3] else None
        if (start < 0 or (stop or 0) < 0) and (name != "prompt" if name else ends[1]):
            return None  # only a prompt has an end to count from
        if ends[1]:
            stop = start + 1 or None
        return cls(part, start, stop, int(ends[4] or 1))

    def kept(self, first: int, end: int, num_prompt: int) -> range:
        """The chosen positions of [first, end), on a path whose first `num_prompt` tokens are its prompt."""
        low, high = (num_prompt, None) if self.part == "response" else (0, num_prompt if self.part == "prompt" else None)
        start = low + self.start if self.start >= 0 else max(0, num_prompt + self.start)
        if self.stop is not None:
            stop = low + self.stop if self.stop >= 0 else num_prompt + self.stop
            high = stop if high is None else min(high, stop)
        last = end if high is None else min(end, high)
        if start < first:  # the first position of the slice that is not before `first`
            start += -(-(first - start) // self.step) * self.step
        return range(start, max(start, last), self.step)


@dataclass(frozen=True)
class Position:
    """A parsed form."""

    spec: str
    kind: str
    """a key of `FORMS`"""
    tokens: PositionSlice | None = None
    """of what follows from the number of tokens alone"""
    name: str = ""
    """the substring, or the label"""
    shift: int = 0
    which: int | None = None
    function: Callable[..., Any] | None = None

    @classmethod
    def parse(cls, given: Any, kinds: Sequence[str], name: str = "positions", error: type[Exception] = BadRequest) -> Self:
        """The position of a text, number or function; the error, which lists the forms, if it is of none of these kinds."""
        found = cls._parsed(given)
        if found is None or found.kind not in kinds:
            raise error(f"Unknown {name} {given!r:.60}. Use {forms(kinds)}.")
        return found

    @classmethod
    def _parsed(cls, given: Any) -> Self | None:
        if callable(given) and not isinstance(given, type):
            return cls(CUSTOM + getattr(given, "__qualname__", "function"), "custom", function=given)
        if not isinstance(given, str):
            given = "" if (number := integer(given)) is None else str(number)
        if given.startswith(CUSTOM):
            return cls(given, "custom")
        if found := _NAMED.fullmatch(given):
            return cls(given, found[1], name=found[2])
        spec = "".join(given.split())
        if spec in ("steps", "sentences"):
            return cls(spec, spec)
        if found := _ANCHOR.fullmatch(spec):
            shift, which = int(found[3] or 0), int(found[2]) if found[2] else None
            last = PositionSlice("prompt" if shift < 1 else "response", shift - 1, shift or None)
            return cls(spec, found[1], last if found[1] == "last" else None, "", shift, which)
        tokens = PositionSlice.parse(spec)
        return None if tokens is None else cls(spec, "tokens", tokens)

    def on(self, length: int, num_prompt: int, pieces: TokenTexts) -> Sequence[int]:
        """Its positions on a path, ascending. Precondition: the kind is in `ON_PATH`."""
        return ends_of(self.name, [*pieces()]) if self.tokens is None else self.tokens.kept(0, length, num_prompt)


def ends_of(substring: str, pieces: Sequence[str]) -> list[int]:
    """The numbers of the pieces that hold the last character of an occurrence of the substring in their joint text."""
    text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
    found: dict[int, None] = {}
    at = text.find(substring)
    while at >= 0:
        found[bisect_left(ends, at + len(substring))] = None
        at = text.find(substring, at + 1)
    return list(found)


# ---- numbers ---------------------------------------------------------------------------------------------------------
# Positions of a branch as in Python, where negative numbers count from its last token.

Positions = int | slice | Sequence[int] | None
At = str | Positions


def numbers(name: str, given: Any, error: type[EngineError] = BadRequest) -> Positions:
    """Positions as plain Python numbers."""
    if isinstance(given, slice):
        ends = [None if end is None else as_int(name, end, error=error) for end in (given.start, given.stop, given.step)]
        if ends[2] == 0:
            raise error(f"Invalid {name}={short_repr(given)}. Give a step other than 0.")
        return slice(*ends)
    if given is None or (single := integer(given)) is not None:
        return None if given is None else single
    return [as_int(name, each, error=error) for each in as_list(name, given, "whole numbers, or a slice", error)]


def chosen(
    positions: At, length: int, num_prompt: int = 0, pieces: TokenTexts | None = None, error: type[EngineError] = BadRequest
) -> list[int]:
    """Positions of a path of `length` tokens, counted from 0; None: all. The error for one that it does not have.

    pieces  where forms are taken, too: as in `Position.on`
    """
    if isinstance(positions, str) and pieces is not None:
        found = [*Position.parse(positions, ON_PATH, error=error).on(length, num_prompt, pieces)]
    else:
        given = numbers("positions", slice(None) if positions is None else positions, error)
        several = range(length)[given] if isinstance(given, slice) else [given] if isinstance(given, int) else given or ()
        found = [as_int("positions", each, -length, length - 1, error) % length for each in several]
    if not found:
        raise error(f"positions={positions} chooses none of {length} tokens. Give at least one.")
    return found
