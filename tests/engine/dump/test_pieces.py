"""Rows in pieces: the same digest and file as joined rows, no copy on the way to the file, and no tensor shared with a run."""

import io
from collections.abc import Iterator

import pytest
import torch

import replaylens as rl
from replaylens.engine.dump import content as module
from replaylens.engine.dump.content import Content, Pieces, first_difference
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.shard import write_shard
from replaylens.engine.dump.store import HashingFile
from replaylens.probes.rows import ProbeRows


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whether pieces count as small, and are joined at once."""
    monkeypatch.setattr(module, "_LARGE", 1 << 40 if request.param == "small" else 1)
    yield request.param


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 30]])
def test_pieces_have_the_digest_and_the_file_of_joined_rows(reference: Dump, size: str, cuts: list[int]) -> None:
    content = reference.files.content(0)
    cut = Content(
        Pieces({site: list(x.tensor_split(cuts)) for site, x in content.tensors.items()}),
        content.index,
    )
    assert cut.digests() == content.digests()
    files = [HashingFile(io.BytesIO()) for _ in range(2)]
    for file, each in zip(files, (content, cut), strict=True):
        write_shard(file, each.tensors)
    assert files[0].sha256 == files[1].sha256 and files[0].num_bytes == files[1].num_bytes
    assert first_difference(content, cut) is None
    assert cut.digests() == content.digests()


def test_large_pieces_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGE", 1)
    rows = list(torch.arange(12.0).view(6, 2).split(2))
    kept = Pieces({"S": rows})
    assert [piece.data_ptr() for piece in kept.pieces("S")] == [row.data_ptr() for row in rows]


def test_small_pieces_between_large_ones_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in dumps of long prompts with a few tokens generated one by one: the prompts' rows must not be copied for them."""
    monkeypatch.setattr(module, "_LARGE", 100)
    rows = [torch.full((n, 4), float(i)) for i, n in enumerate([1, 2, 50, 1, 1, 1, 70])]
    kept = Pieces({"S": rows})
    assert [len(piece) for piece in kept.pieces("S")] == [3, 50, 3, 70]
    assert kept.pieces("S")[1].data_ptr() == rows[2].data_ptr() and kept.pieces("S")[3].data_ptr() == rows[6].data_ptr()
    assert torch.equal(kept["S"], torch.cat(rows))


def test_rows_of_a_probe_are_its_own(size: str) -> None:
    """What is done to them does not reach the activations of the run, nor rows made from it later."""
    engine = rl.Engine.load("coin-plain")
    run = engine.replay(rl.tasks.get("coin")().examples(1), sites="S")
    before = run[0].activations["blocks.1.hook_in"]
    for _ in range(2):
        rows = ProbeRows.of(run)
        x = rows.source.tensors["blocks.1.hook_in"]  # type: ignore[attr-defined]
        assert torch.equal(x[: len(before)], before)
        x += 1
    assert torch.equal(run[0].activations["blocks.1.hook_in"], before)
