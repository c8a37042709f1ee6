"""The rule of sentences, on characters and on tokens."""

import random

import pytest

from replaylens.engine.resampling.plan import sentence_ends, sentence_spans, sentence_starts

CASES = {
    "": [],
    "  ": ["  "],
    "No end": ["No end"],
    "One. Two! Three? Four… five": ["One.", " Two!", " Three?", " Four…", " five"],
    "Pi is 3.14. So": ["Pi is 3.14.", " So"],
    'He said "yes." She (too.) left?!': ['He said "yes."', " She (too.)", " left?!"],
    "See e.g. this, i.e. that. J. Smith and Dr. Lee vs. me.": ["See e.g. this, i.e. that.", " J. Smith and Dr. Lee vs. me."],
    "List:\n1. one\n 12. two. Three\n": ["List:\n", "1. one\n", " 12. two.", " Three\n"],
    "A thought.\n\nAnother one. \n \nEnd.": ["A thought.\n\n", "Another one. \n \n", "End."],
    "\n\nStart. End": ["\n\nStart.", " End"],
    "x = a.b(c) + f.g. Done": ["x = a.b(c) + f.g.", " Done"],
}


@pytest.mark.parametrize("text", CASES)
def test_spans(text: str) -> None:
    assert [text[start:end] for start, end in sentence_spans(text)] == CASES[text]


def test_spans_cover_any_text() -> None:
    draw = random.Random(3)
    for _ in range(300):
        text = "".join(draw.choice('aB1. \n!?)"e.g') for _ in range(draw.randrange(30)))
        spans = sentence_spans(text)
        assert "".join(text[start:end] for start, end in spans) == text
        assert len(spans) <= 1 or all(text[start:end].strip() for start, end in spans)


def test_tokens() -> None:
    """A sentence begins with the first token that starts in it. One that starts in no token of its own begins nowhere."""
    pieces = ["One", ".", " Two", ".\n\n", "3", "!", " a. b", ". c"]
    text = "".join(pieces)
    ends = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
    offsets = list(zip([0, *ends[:-1]], ends, strict=True))
    assert sentence_starts(text, offsets) == [0, 2, 4, 6, 7]
    assert sentence_ends(text, offsets) == [1, 3, 5, 6, 7]
    assert sentence_starts("", []) == [] == sentence_ends("", [])


def test_tokens_without_characters() -> None:
    """A special token belongs to what comes before it."""
    assert sentence_starts("A b. C", [(0, 1), (1, 4), (4, 4), (4, 6)]) == [0, 3]
