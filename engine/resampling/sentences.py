"""Where sentences begin: a rule of our own, small enough to be read.

A sentence ends

1. after `.`, `!`, `?` or `…` (any number of them, with the quotes and brackets that close right after them), if white space or
   the end of the text follows. Line breaks that follow belong to it; a space begins the next sentence, as in most tokenizers
2. after a line break

but not after the dot of

* an abbreviation: e.g. i.e. cf. vs. Mr. Mrs. Ms. Dr. Prof. St. Fig. Eq. No. approx. etc.
* a single capital letter, as in J. Smith
* a number that begins a line, as in 1. or 12. of a list

White space alone is no sentence: it belongs to the one before it. A dot within a number or a name has no space after it.
"""

import re
from collections.abc import Sequence

from replaylens.tasks.reading import Offset

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
