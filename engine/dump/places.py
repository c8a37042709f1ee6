"""`NamedPlace`: positions of a path by name, which a plan can hold and a probe can ask for.

| spec | tokens |
|---|---|
| `text:Paris` | the token that ends each occurrence of the substring; spaces count |
| `label:subject` | every token where the label has a value |
| `3:7`, `-2:`, `:4` | a span of tokens; negative numbers count from the end of the prompt |

A substring is found in the texts of the tokens, one after the other, as the index shows them.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

FORMS = "text:SUBSTRING, label:NAME, or a span such as 3:7 or -2:"
_NAMED = re.compile(r"(?P<kind>text|label):(?P<name>.+)", re.DOTALL)
_SPAN = re.compile(r"\s*(?P<start>-?\d{1,9})?\s*:\s*(?P<stop>-?\d{1,9})?\s*")


@dataclass(frozen=True)
class NamedPlace:
    """A parsed spec."""

    kind: str
    """text, label or span"""
    name: str = ""
    """the substring, or the label"""
    start: int = 0
    stop: int | None = None

    @classmethod
    def parse(cls, spec: str) -> "NamedPlace | None":
        """The place of a spec; None if it is none of these forms."""
        if found := _NAMED.fullmatch(spec):
            return cls(found["kind"], found["name"])
        if found := _SPAN.fullmatch(spec):
            return cls("span", "", int(found["start"] or 0), int(found["stop"]) if found["stop"] else None)
        return None

    def span(self, num_prompt: int) -> tuple[int, float]:
        """First and last position (exclusive) of a span, on a path with a prompt of this many tokens."""
        start = self.start + num_prompt if self.start < 0 else self.start
        if self.stop is None:
            return start, float("inf")
        return start, self.stop + num_prompt if self.stop < 0 else self.stop


def ends_of(substring: str, pieces: Sequence[str]) -> list[int]:
    """The numbers of the pieces that hold the last character of an occurrence of the substring in their joint text."""
    text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
    found: dict[int, None] = {}
    at = text.find(substring)
    while at >= 0:
        found[bisect_left(ends, at + len(substring))] = None
        at = text.find(substring, at + 1)
    return list(found)
