"""Content: every cell and every bit counts in digests and differences, and nothing else does."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from replaylens.dumps import content
from replaylens.dumps.content import Content, Joiner, Layout, Pieces, concatenate, count_accepted, end_to_end, first_difference

ROWS = 6
ACCEPTED = [True, True, False, True, False, True]
COLUMNS: dict[str, list[Any]] = {
    "example": [0, 0, 0, 1, 1, 2],
    "branch": [0, 0, 1, 0, 1, 0],
    "position": [0, 1, 1, 0, 0, 0],
    "accepted": ACCEPTED,
    "text": ["a", None, "", "b\nc", "é", "a"],
    "logprob": [0.5, None, -1.0, 0.0, 2.0, 3.0],
    "label": [1, 2, None, 0, 1, 1],
    "flag": [True, False, None, True, False, True],
    "real": [0.5, 1.5, None, 2.5, 0.0, 1.0],
}
TYPES = {"logprob": pa.float32(), "real": pa.float64(), "label": pa.int32()}
OTHER = {"text": "z", "logprob": 9.0, "label": 9, "flag": None, "real": 9.5}


def table(**changed: list[Any]) -> pa.Table:
    return pa.table({name: pa.array(values, TYPES.get(name)) for name, values in (COLUMNS | changed).items()})


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(ROWS, 3, generator=draw)
    return {
        "blocks.1.hook_in": wide,
        "blocks.0.hook_out": wide.bfloat16(),
        "Z.top_ids": torch.arange(ROWS * 4).view(ROWS, 2, 2),
    }


def changes() -> Iterator[tuple[str, int, Content]]:
    """Every cell, and every tensor in every row, with another value: (name, row, content)."""
    for name, other in OTHER.items():
        for row in range(ROWS):
            values = list(COLUMNS[name])
            values[row] = other if values[row] != other else True
            yield name, row, Content(tensors(), table(**{name: values}))
    for name, x in tensors().items():
        for row in range(ROWS):
            changed = x.clone()
            content.bits_of(changed)[row].flatten()[-1] += 1  # the last bit
            yield name, row, Content(tensors() | {name: changed}, table())


def test_every_cell_counts() -> None:
    """In the digest, in that of accepted rows if it is accepted, and in the first difference, which names it."""
    here = Content(tensors(), table())
    digest, accepted = here.digests()
    seen = {digest}
    for name, row, there in changes():
        found = first_difference(here, there)
        assert found is not None and found.what.partition("[")[0] == name
        place = tuple(COLUMNS[key][row] for key in content.KEYS)
        assert (found.example, found.branch, found.position) == place and found.here != found.there
        assert found.layer == {"blocks.1.hook_in": 1, "blocks.0.hook_out": 0, "Z.top_ids": 1}.get(name)
        other, of_accepted = there.digests()
        assert other not in seen and (of_accepted != accepted) == ACCEPTED[row]
        seen.add(other)
        assert here.row_identifier(row).digest != there.row_identifier(row).digest
        assert all(here.row_identifier(k).digest == there.row_identifier(k).digest for k in range(ROWS) if k != row)
    assert first_difference(here, Content(tensors(), table())) is None


@pytest.mark.parametrize("name, values", [("label", [True, 2, None, 0, 1, 1]), ("flag", [1, 0, None, 1, 0, 1])])
def test_a_number_is_no_flag(name: str, values: list[Any]) -> None:
    """Equal as Python has it, and still another kind of value."""
    kinds, flags = (
        table().set_column(table().column_names.index(name), name, pa.array([v if v is None else kind(v) for v in values]))
        for kind in (int, bool)
    )
    found = first_difference(Content(tensors(), kinds), Content(tensors(), flags))
    assert found is not None and (found.what, found.here, found.there) == (name, str(int(values[0])), str(bool(values[0])))
    assert Content(tensors(), kinds).digests() != Content(tensors(), flags).digests()


def test_the_first_of_two_differences_is_named() -> None:
    """By row; in a row, index columns before sites, in their order. A missing row comes before all."""
    here = Content(tensors(), table())
    late, early = list(COLUMNS["text"]), list(COLUMNS["real"])
    late[3], early[3] = "z", 9.5
    found = first_difference(here, Content(tensors(), table(text=late, real=early)))
    assert found is not None and (found.what, found.example) == ("text", 1)
    early[1] = 9.5
    found = first_difference(here, Content(tensors(), table(text=late, real=early)))
    assert found is not None and (found.what, found.position) == ("real", 1)
    fewer = here.select(np.array([0, 1, 3, 4, 5]))
    for one, other, said in ((here, fewer, ("present", "missing")), (fewer, here, ("missing", "present"))):
        found = first_difference(one, other)
        assert found is not None and (found.example, found.branch, found.position) == (0, 1, 1)
        assert (found.what, found.here, found.there) == ("row", *said)
    other = first_difference(here, Content({"x": torch.zeros(ROWS)}, table()))
    assert other is not None and other.what == "sites" and "'x'" in other.there and "Z.top_ids" in other.here


@pytest.mark.parametrize("size", [1, 64, 1 << 20])
@pytest.mark.parametrize("pieces", [2, 23, 24, 40])
def test_rows_are_gathered_from_where_passes_left_them(size: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in any order out of pieces that hold other rows, too: few pieces of many runs each, and as many pieces as runs."""
    monkeypatch.setattr(content, "_BLOCK", size)
    draw = np.random.default_rng(pieces)
    held = [torch.from_numpy(draw.standard_normal((int(draw.integers(5, 9)), 2, 3))) for _ in range(pieces)]
    held[0] = held[0].mT.contiguous().mT  # a piece that is not contiguous
    runs = [(int(draw.integers(pieces)), int(draw.integers(3)), int(draw.integers(3))) for _ in range(95)]
    expected = torch.cat([held[piece][first : first + count] for piece, first, count in runs])
    layout = Layout(runs)
    blocks = [block.clone() for block in Joiner().blocks(held, layout)]
    assert torch.equal(torch.cat(blocks), expected) and len(blocks) == (1 if size > 1 << 16 else len(blocks)) <= len(runs)
    again = Layout(runs)
    made = Pieces({"x": (held, again), "y": ([2 * x for x in held], again)})
    assert torch.equal(made["y"], 2 * expected) and torch.equal(made["x"], expected) and again.rows == len(expected)
    made["x"].zero_()
    assert made["x"] is made["x"] and not made["x"].any() and any(x.any() for x in held), "the copy is its own"


def test_how_content_is_laid_out_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a column, its width, the order of columns and tensors, strides, pieces and blocks of any size."""
    expected = Content(tensors(), table()).digests()
    parts = [table().slice(0, 2), table().slice(2, 3), table().slice(5, 1)]
    wide = table().set_column(table().column_names.index("label"), "label", table().column("label").cast(pa.int64()))
    turned = table().select(list(reversed(table().column_names)))
    pieces = Pieces({name: end_to_end(*x.split([1, 2, 3])) for name, x in tensors().items()})
    strided = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in reversed(tensors().items())}
    for made in (
        Content(tensors(), concatenate(parts)), Content(tensors(), wide), Content(pieces, turned), Content(strided, table()),
    ):  # fmt: skip
        assert made.digests() == expected
    for size in (1, 9, 40):
        monkeypatch.setattr(content, "_BLOCK", size)
        assert Content(Pieces({name: end_to_end(*x.split(1)) for name, x in tensors().items()}), table()).digests() == expected
    whole = Content(tensors(), table())
    assert whole.select(np.array(ACCEPTED)).digests() == whole.accepted().digests() and count_accepted(table()) == 4
    assert whole.of_examples([2, 0]).index.column("example").to_pylist() == [0, 0, 0, 2]
    assert torch.equal(whole.of_examples([1]).tensors["blocks.1.hook_in"], tensors()["blocks.1.hook_in"][3:5])
