"""What the digest covers, what it does not, and where two contents differ."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from replaylens.engine.dump.content import Content, combine, first_difference
from replaylens.engine.dump.reader import Dump


@pytest.fixture
def content(reference: Dump) -> Content:
    return reference.files.content(0)


def with_column(content: Content, name: str, row: int, value: object) -> Content:
    """The content with one cell of the index changed."""
    values = content.index.column(name).to_pylist()
    values[row] = value
    place = content.index.column_names.index(name)
    return replace(content, index=content.index.set_column(place, name, pa.array(values, content.index.column(name).type)))


def accepted_row(content: Content, accepted: bool = True) -> int:
    return content.index.column("accepted").to_pylist().index(accepted)


def test_one_label_changes_the_digest(content: Content) -> None:
    row = content.index.column("face").to_pylist().index("heads")
    changed = with_column(content, "face", row, "tails")
    assert changed.digests() != content.digests()
    found = first_difference(content, changed)
    assert found is not None and (found.what, found.here, found.there) == ("face", "heads", "tails")
    assert found.position == content.index.column("position")[row].as_py()


@pytest.mark.parametrize("name", ["token", "root", "text", "logprob", "entropy", "shuffled", "correct", "fork_position"])
def test_every_column_counts(content: Content, name: str) -> None:
    row = accepted_row(content) + 1
    value = content.index.column(name)[row].as_py()
    other = not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else (value or 0) + 1
    changed = with_column(content, name, row, other)
    found = first_difference(content, changed)
    assert changed.digests()[1] != content.digests()[1] and found is not None and found.what == name


def test_one_bit_changes_the_digest(content: Content) -> None:
    """In an accepted row both digests change. In a rejected row the accepted digest does not."""
    for accepted in (True, False):
        row = accepted_row(content, accepted)
        x = content.tensors["blocks.1.hook_in"].clone()
        x.view(torch.int32)[row, 5] ^= 1
        changed = Content({**content.tensors, "blocks.1.hook_in": x}, content.index)
        (digest, accepted_digest), before = changed.digests(), content.digests()
        assert digest != before[0] and (accepted_digest != before[1]) is accepted
        found = first_difference(content, changed)
        assert found is not None and (found.what, found.layer) == ("blocks.1.hook_in[5]", 1)
        assert found.here != found.there, "as many digits as it takes"


@pytest.mark.parametrize("kind", [pa.float32(), pa.int64(), pa.string(), pa.bool_()])
def test_a_missing_value_is_not_an_empty_one(kind: pa.DataType) -> None:
    empty = {pa.float32(): 0.0, pa.int64(): 0, pa.string(): "", pa.bool_(): False}[kind]
    keys = {"accepted": [True] * 2, "example": [0] * 2, "branch": [0] * 2, "position": [0, 1]}
    there, gone = (Content({}, pa.table({**keys, "label": pa.array([empty, value], kind)})) for value in (empty, None))
    assert there.digests() != gone.digests()
    found = first_difference(there, gone)
    assert found is not None and (found.what, found.position, found.here, found.there) == ("label", 1, str(empty), "None")


def test_minus_zero_is_not_zero() -> None:
    index = pa.table({"accepted": [True], "example": [0], "branch": [0], "position": [0]})
    plus, minus = (Content({"x": torch.tensor([[value]])}, index) for value in (0.0, -0.0))
    assert plus.digests() != minus.digests()
    found = first_difference(plus, minus)
    assert found is not None and (found.here, found.there) == ("0", "-0")


@pytest.mark.parametrize(
    "values",
    [
        ([0, None, 3], [0, 0, 3], [None, 0, 3]),
        ([False, None, True], [False, False, True], [None, False, True]),
        (["a", None, ""], ["a", "", ""], [None, "a", ""], ["a", "", None]),
        ([0.0, None, 1.5], [0.0, 0.0, 1.5], [None, 0.0, 1.5]),
    ],
    ids=["whole", "flag", "text", "number"],
)
def test_a_missing_value_is_none_that_is_there(values: tuple[list[object], ...]) -> None:
    """A missing value differs from zero and from an empty text, and its position matters."""
    keys = {"accepted": [True] * 3, "example": [0] * 3, "branch": [0] * 3, "position": [0, 1, 2]}
    contents = [Content({}, pa.table({**keys, "label": pa.array(column)})) for column in values]
    assert len({content.digests() for content in contents}) == len(contents)
    for other in contents[1:]:
        found = first_difference(contents[0], other)
        assert found is not None and found.what == "label"


def test_nan_equals_itself(content: Content) -> None:
    assert content.tensors["Z.emitted"].isnan().any()
    assert first_difference(content, Content({k: x.clone() for k, x in content.tensors.items()}, content.index)) is None


def test_order_counts(content: Content) -> None:
    swapped = content.select(np.array([1, 0, *range(2, len(content))]))
    assert swapped.digests() != content.digests()
    assert first_difference(content, swapped) is not None


def test_layout_does_not_count(content: Content) -> None:
    """The digest covers values. Chunks, dictionaries, number widths and column order do not change it."""
    index = pa.concat_tables([content.index.slice(0, 3), content.index.slice(3)])
    index = index.set_column(1, "root", pc.dictionary_encode(index.column("root")).cast(pa.string()))
    index = index.set_column(2, "branch", index.column("branch").cast(pa.int64()))
    index = index.select(sorted(index.column_names, reverse=True))
    tensors = {name: content.tensors[name].t().contiguous().t() if content.tensors[name].ndim == 2 else content.tensors[name]
               for name in reversed(list(content.tensors))}  # fmt: skip
    assert Content(tensors, index).digests() == content.digests()


def test_names_dtypes_and_shapes_count(content: Content) -> None:
    x = content.tensors["blocks.0.hook_in"]
    rest = {name: y for name, y in content.tensors.items() if name != "blocks.0.hook_in"}
    for changed in ({"renamed": x}, {"blocks.0.hook_in": x.view(torch.int32)}, {"blocks.0.hook_in": x.view(len(x), 2, -1)}):
        other = Content({**rest, **changed}, content.index)
        assert other.digests() != content.digests()
        assert first_difference(content, other) is not None


def test_a_column_without_values_is_of_no_kind() -> None:
    """Text in the same column of another shard must not change this shard's digest."""
    rest = {"accepted": [True, False], "example": [0, 0], "branch": [0, 1], "position": [0, 1]}
    digests = {
        Content({}, pa.table({**rest, "label": pa.array([None, None], kind)})).digests()
        for kind in (pa.null(), pa.string(), pa.int64(), pa.bool_())
    }
    assert len(digests) == 1
    assert Content({}, pa.table({**rest, "label": ["", None]})).digests() not in digests


def test_missing_row_is_named(content: Content) -> None:
    fewer = content.select(np.array([i for i in range(len(content)) if i != 6]))
    found = first_difference(content, fewer)
    assert found is not None and (found.what, found.here, found.there) == ("row", "present", "missing")
    assert found.position == content.index.column("position")[6].as_py()
    assert str(found).startswith(f"example {found.example}, branch 0, position {found.position}: row")


def test_combined_digest_is_of_all_in_order() -> None:
    assert len({combine(["a", "b"]), combine(["b", "a"]), combine(["a"]), combine(["ab"])}) == 4
