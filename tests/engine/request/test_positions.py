"""Forms of positions: parsed, printed and resolved, on paths and in frames, as a plain reading of the table says."""

from typing import Any

import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.request.capture import before
from replaylens.engine.request.positions import CAPTURED, FORMS, ON_PATH, Position, chosen
from replaylens.probes import positions as of_rows

ENDS = st.one_of(st.just(""), st.integers(-30, 30))
SPELLED = st.text("ab ", min_size=1, max_size=4)
NUM_PROMPT = 9


def agree(form: str, pieces: list[str], expected: list[int], cut: int = 0) -> None:
    """A form gives these positions of a path, of its two parts, of the rows of a frame and of a branch's logits."""
    place, length = Position.parse(form, ON_PATH), len(pieces)
    assert list(place.on(length, NUM_PROMPT, lambda: pieces)) == expected and Position.parse(place.spec, ON_PATH) == place
    if (tokens := place.tokens) is not None:
        assert [*tokens.kept(0, cut, NUM_PROMPT), *tokens.kept(cut, length, NUM_PROMPT)] == expected
        assert before(tokens.kept(0, length, NUM_PROMPT), cut) == sum(p < cut for p in expected)
    frame = pd.DataFrame({"position": range(length), "text": pieces, "example": 0, "branch": 0, "fork_position": 0})
    frame["token_state"] = ["prompt"] * NUM_PROMPT + ["accepted"] * (length - NUM_PROMPT)
    assert of_rows.RowPosition.parse(form).mask(frame).nonzero()[0].tolist() == expected
    if expected:
        assert chosen(form, length, NUM_PROMPT, lambda: pieces) == expected
    else:
        with pytest.raises(BadRequest, match="chooses none"):
            chosen(form, length, NUM_PROMPT, lambda: pieces)


@pytest.mark.slow
@given(
    st.sampled_from(["all", "prompt", "response", "generated"]), ENDS, ENDS, st.integers(1, 5), st.integers(9, 30), st.data()
)
@example("prompt", -12, -4, 2, 20, None)
@example("prompt", -11, "", 2, 20, None)
@example("prompt", "", -12, 1, 20, None)
@example("all", 2, 17, 3, 20, None)
def test_slices_and_spans(part: str, start: Any, stop: Any, step: int, length: int, data: Any) -> None:
    """A slice is Python's of its part, in whatever pieces the path is committed; a start before the text is its first position.
    Negative ends of a span count from the end of the prompt."""
    path, cut = ["x"] * length, data.draw(st.integers(0, length)) if data else 4
    low, high = (end and end + NUM_PROMPT * (end < 0) for end in (start, stop))
    agree(f"{start}:{stop}", path, [p for p in range(length) if p >= (low or 0) and (high == "" or p < high)], cut)
    shift = start or 0
    agree(f"last{shift:+}", path, [p for p in range(length) if p == NUM_PROMPT - 1 + shift], cut)
    if part != "prompt":
        start, stop = (end and abs(end) for end in (start, stop))
    own = list(range(length))[{"all": slice(None), "prompt": slice(NUM_PROMPT)}.get(part, slice(NUM_PROMPT, None))]
    at = start or 0
    agree(
        f"{part}[{start}:{stop}:{step}]", path, own[None if start == "" else start : None if stop == "" else stop : step], cut
    )
    agree(f"{part}[{at}]", path, own[at : at + 1 or None], cut)
    agree(part, path, own, cut)
    agree(str(abs(at)), path, [p for p in range(length) if p == abs(at)], cut)


@given(SPELLED, st.lists(SPELLED, min_size=NUM_PROMPT, max_size=20))
@example("aa", ["a", "a", "a", "b"] * 3)
@example("aba", ["ab", "ab", "a"] * 3)
def test_a_substring_ends_where_its_last_character_is(substring: str, pieces: list[str]) -> None:
    """Also where occurrences overlap; a token that ends several of them is named once."""
    text, token = "".join(pieces), [i for i, piece in enumerate(pieces) for _ in piece]
    found = {token[at + len(substring) - 1] for at in range(len(text)) if text[at:].startswith(substring)}
    agree(f"text:{substring}", pieces, sorted(found))


@pytest.mark.parametrize(
    ("form", "parsed"),
    [
        ("step : 3+1", Position("step:3+1", "step", shift=1, which=3)),
        ("query-1", Position("query-1", "query", shift=-1)),
        ("label: a", Position("label: a", "label", name=" a")),
        (len, Position("custom:len", "custom", function=len)),
        ("custom:len", Position("custom:len", "custom")),
    ],
)
def test_other_forms(form: Any, parsed: Position) -> None:
    """Where they are not known, the error names the forms that are."""
    assert Position.parse(form, FORMS) == parsed
    with pytest.raises(BadEdit, match=r"Unknown positions .* Use all, .*\[:32\] or last\."):
        Position.parse(form, CAPTURED, error=BadEdit)


@pytest.mark.parametrize(
    "form",
    [
        *("", "some", "all[", "all[]", "response[-1]", "all[-3:]", "all[::0]", "all[::-1]", "all[a:b]", "prompt[-]", "[3:7]"),
        *("-3", "1.5", 1.5, "text:", "label:", "query:2", "last:1", "step++1", "step:x", "stepsize", None, list, [3], "3:7]"),
    ],
)
def test_anything_else_is_refused(form: Any) -> None:
    with pytest.raises(BadRequest, match=r"Unknown at .* Use all, .* step:3, .* or a function\."):
        Position.parse(form, FORMS, "at")


def test_numbers_count_from_the_end_as_in_python() -> None:
    assert chosen(slice(-9, None), 3) == chosen(slice(-9, 9), 3) == chosen(None, 3) == [0, 1, 2]
    assert chosen(slice(None, None, -2), 3) == [2, 0] == chosen([-1, 0], 3) and chosen(-2, 3) == [1]
    for bad in (-4, [0, 3], slice(-9, -5), slice(0, 3, 0), slice(1.5, 3), "last", 1.5, [None], []):
        with pytest.raises(BadEdit):
            chosen(bad, 3, error=BadEdit)  # type: ignore[arg-type]
