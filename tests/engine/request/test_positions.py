"""Which positions are captured: slices agree with Python's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.capture import PositionSlice, before
from replaylens.engine.serving.request import chosen
from replaylens.engine.transformer_lens import slice_of

ENDS = st.one_of(st.none(), st.integers(-30, 30))


PARTS = st.sampled_from(["all", "prompt", "response"])


@given(PARTS, ENDS, ENDS, st.integers(1, 5), st.integers(1, 20), st.integers(0, 30), st.data())
def test_a_slice_is_pythons_slice_of_the_part(part, start, stop, step, num_prompt, more, data):
    if part != "prompt":
        start, stop = (None if end is None else abs(end) for end in (start, stop))
    length = num_prompt + more
    everything = list(range(length))
    own = {"all": everything, "prompt": everything[:num_prompt], "response": everything[num_prompt:]}[part]
    text = f"{part}[{'' if start is None else start}:{'' if stop is None else stop}:{step}]"
    where, expected = PositionSlice.parse(text), own[start:stop:step]
    assert PositionSlice.parse(str(where)) == where
    assert list(where.kept(0, length, num_prompt)) == expected
    cut = data.draw(st.integers(0, length))
    assert [*where.kept(0, cut, num_prompt), *where.kept(cut, length, num_prompt)] == expected
    assert before(where.kept(0, length, num_prompt), cut) == sum(p < cut for p in expected)


def test_a_start_before_the_text_is_its_first_position():
    """As in Python. Explicit, so that it does not depend on what is drawn."""
    for text, kept in (
        ("prompt[-9:]", [0, 1, 2]),
        ("prompt[-9:2]", [0, 1]),
        ("prompt[-9:-1:2]", [0]),
        ("prompt[-8::2]", [0, 2]),
    ):
        assert list(PositionSlice.parse(text).kept(0, 8, 3)) == kept, text
    assert list(PositionSlice.parse("prompt[-8::2]").kept(1, 8, 3)) == [2] and not list(
        PositionSlice.parse("prompt[:-9]").kept(0, 8, 3)
    )
    assert chosen(slice(-9, None), 3) == chosen(slice(-9, 9), 3) == [0, 1, 2] and chosen(slice(-2, None), 3) == [1, 2]
    assert slice_of(slice(-9, None), 3) == slice(0, 3, 1) and slice_of(slice(-9, -1), 3) == slice(0, 2, 1)
    assert slice_of(-1, 3) == slice(-1, None) and slice_of(-3, 3) == slice(-3, -2)
    for call in (lambda: chosen(-4, 3), lambda: chosen([0, 3], 3), lambda: chosen(slice(-9, -5), 3), lambda: slice_of(-4, 3)):
        with pytest.raises(BadRequest):
            call()


def test_names():
    assert list(PositionSlice.parse("last").kept(0, 20, 7)) == [6]
    assert list(PositionSlice.parse("prompt[-1]").kept(0, 20, 7)) == [6] and list(
        PositionSlice.parse("all[3]").kept(0, 20, 7)
    ) == [3]
    assert PositionSlice.parse("all").everything and not PositionSlice.parse("prompt").everything


@pytest.mark.parametrize(
    "text", ["", "some", "all[", "all[]", "response[-1]", "all[-3:]", "all[::0]", "all[::-1]", "all[a:b]", 3, None]
)
def test_anything_else_is_refused(text):
    with pytest.raises(BadRequest):
        PositionSlice.parse(text)
