"""Forms of positions: parsed, printed and resolved, on paths and in frames, as a plain reading of the table says."""

from typing import Any

import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.request.capture import before
from replaylens.engine.request.positions import CAPTURED, FORMS, ON_PATH, Position, PositionSlice, chosen
from replaylens.probes import positions as of_rows

ENDS = st.one_of(st.none(), st.integers(-30, 30))
PARTS = {"all": slice(None), "prompt": slice(None, 9), "response": slice(9, None), "generated": slice(9, None)}
"""of a path whose prompt has 9 tokens"""
SPELLED = st.text("ab ", min_size=1, max_size=4)


def in_words(*ends: int | None) -> str:
    return ":".join("" if end is None else str(end) for end in ends)


@given(st.sampled_from([*PARTS]), ENDS, ENDS, st.integers(1, 5), st.integers(9, 30), st.integers(0, 30))
@example("prompt", -12, None, 1, 20, 1)
@example("prompt", -12, -4, 2, 20, 3)
@example("prompt", -11, None, 2, 20, 1)
@example("prompt", None, -12, 1, 20, 0)
@example("all", 2, 17, 3, 20, 4)
def test_a_slice_is_pythons_slice_of_the_part(part: str, start: Any, stop: Any, step: int, length: int, cut: int) -> None:
    """In whatever pieces its path is committed. A start before the text is its first position."""
    if part != "prompt":
        start, stop = (None if end is None else abs(end) for end in (start, stop))
    own, at = list(range(length))[PARTS[part]], start or 0
    agree(f"{part}[{in_words(start, stop, step)}]", length, own[start:stop:step], cut)
    agree(f"{part}[{at}]", length, own[at : at + 1 or None], cut)
    agree(part, length, own, cut)


@given(ENDS, ENDS, st.integers(-12, 12), st.integers(9, 30), st.integers(0, 30))
def test_spans_and_single_positions(start: Any, stop: Any, shift: int, length: int, cut: int) -> None:
    low, high = (None if end is None else end + 9 * (end < 0) for end in (start, stop))
    agree(in_words(start, stop), length, [p for p in range(length) if p >= (low or 0) and (high is None or p < high)], cut)
    agree(f"last{shift:+}", length, [p for p in range(length) if p == 8 + shift], cut)
    agree(str(shift + 12), length, [p for p in range(length) if p == shift + 12], cut)


@given(SPELLED, st.lists(SPELLED, min_size=9, max_size=20))
@example("aa", ["a", "a", "a", "b"] * 3)
@example("aba", ["ab", "ab", "a"] * 3)
def test_a_substring_ends_where_its_last_character_is(substring: str, pieces: list[str]) -> None:
    """Also where occurrences overlap; a token that ends several of them is named once."""
    text, token = "".join(pieces), [i for i, piece in enumerate(pieces) for _ in piece]
    found = {token[at + len(substring) - 1] for at in range(len(text)) if text[at:].startswith(substring)}
    agree(f"text:{substring}", len(pieces), sorted(found), pieces=pieces)


def agree(form: str, length: int, expected: list[int], cut: int = 0, pieces: list[str] | None = None) -> None:
    """A form gives these positions of a path, of its pieces, of the rows of a frame and of what logits are asked for."""
    place, words = Position.parse(form, ON_PATH), pieces or ["x"] * length
    assert list(place.on(length, 9, lambda: words)) == expected and Position.parse(place.spec, ON_PATH) == place
    if (tokens := place.tokens) is not None:
        assert PositionSlice.parse(str(tokens)) == tokens and tokens.everything is (tokens == PositionSlice())
        cut = min(cut, length)
        assert [*tokens.kept(0, cut, 9), *tokens.kept(cut, length, 9)] == expected
        assert before(tokens.kept(0, length, 9), cut) == sum(p < cut for p in expected)
    frame = pd.DataFrame({"position": range(length), "text": words, "example": 0, "branch": 0, "fork_position": 0})
    frame["token_state"] = ["prompt"] * 9 + ["accepted"] * (length - 9)
    assert of_rows.Position.parse(form).mask(frame).nonzero()[0].tolist() == expected
    if expected:
        assert chosen(form, length, 9, lambda: words) == expected
    else:
        with pytest.raises(BadRequest, match="chooses none"):
            chosen(form, length, 9, lambda: words)


def test_other_forms() -> None:
    steps = [Position.parse(form, ("step", "query")) for form in ("step", "step : 3+1", "query-1", "step-2")]
    assert [(each.spec, each.kind, each.which, each.shift) for each in steps] == [
        ("step", "step", None, 0),
        ("step:3+1", "step", 3, 1),
        ("query-1", "query", None, -1),
        ("step-2", "step", None, -2),
    ]
    label, function = Position.parse("label: a", FORMS), Position.parse(steps.append, FORMS)
    assert (label.name, label.spec) == (" a", "label: a") and function.function is not None
    assert function.spec == "custom:list.append" and Position.parse(function.spec, FORMS).function is None


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


@pytest.mark.parametrize("form", ["query", "step:3", "text:a", "label:a", "sentences", "steps", len])
def test_a_place_names_the_forms_that_it_takes(form: Any) -> None:
    with pytest.raises(BadEdit, match=r"Unknown positions .* Use all, .*\[:32\] or last\."):
        Position.parse(form, CAPTURED, error=BadEdit)


def test_numbers_count_from_the_end_as_in_python() -> None:
    assert chosen(slice(-9, None), 3) == chosen(slice(-9, 9), 3) == chosen(None, 3) == [0, 1, 2]
    assert chosen(slice(None, None, -2), 3) == [2, 0] == chosen([-1, 0], 3) and chosen(-2, 3) == [1]
    for bad in (-4, [0, 3], slice(-9, -5), slice(0, 3, 0), slice(1.5, 3), "last", "all", 1.5, [None]):
        with pytest.raises(BadEdit):
            chosen(bad, 3, error=BadEdit)  # type: ignore[arg-type]
