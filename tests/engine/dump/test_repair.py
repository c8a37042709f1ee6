"""A damaged dump is repaired to its original digest or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replaylens import Engine
from replaylens.engine.dump.content import Content
from replaylens.engine.dump.maker import ShardMaker, write_dump
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.errors import ReplayMismatch, UnfinishedDump
from tests.engine.dump.damage import flip_bit

Planned = Callable[..., DumpPlan]
DAMAGED = "shard-00001.safetensors"


def test_a_repair_gives_the_digest_that_was(engine: Engine, planned: Planned, reference: Dump, copy: Path) -> None:
    flip_bit(copy / DAMAGED)
    repaired = write_dump(engine, planned(), copy, resume=True)
    assert repaired is not None and repaired.digest == reference.digest
    assert (copy / DAMAGED).read_bytes() == Path(reference.url, DAMAGED).read_bytes()


@pytest.mark.parametrize("row", [0, -1])
def test_a_repair_that_gives_other_bits_is_refused(
    engine: Engine, planned: Planned, reference: Dump, copy: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """One bit of one row comes out otherwise: the dump is not finished under another digest, and the error names both."""
    flip_bit(copy / DAMAGED)
    with monkeypatch.context() as patch:
        patch.setattr(ShardMaker, "make", _with_a_flipped_bit(ShardMaker.make, row))
        with pytest.raises(ReplayMismatch, match=f"before, it was {reference.digest}"):
            write_dump(engine, planned(), copy, resume=True)
    assert not (copy / "manifest.json").exists()
    with pytest.raises(UnfinishedDump):
        Dump.open(copy)


@pytest.mark.parametrize("name", ["part-00000.parquet", "shard-00000.safetensors", "part-00000.json"])
def test_a_shard_of_an_unfinished_dump_counts_only_whole(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The tensors, index or note of a finished shard are damaged before the dump is finished: only that shard is rewritten."""
    folder, made, original = tmp_path / "unfinished", list[int](), ShardMaker.make

    def interrupted(self: ShardMaker, number: int, *given: Any) -> Content:
        made.append(number)
        if len(made) == 3:
            raise KeyboardInterrupt
        return original(self, number, *given)

    monkeypatch.setattr(ShardMaker, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_dump(engine, planned(), folder)
    flip_bit(folder / name, 0)
    resumed = write_dump(engine, planned(), folder, resume=True)
    assert resumed is not None and resumed.digest == reference.digest
    assert made == [0, 1, 2, 0, 2]


def _with_a_flipped_bit(original: Callable[..., Content], row: int) -> Callable[..., Content]:
    def make(self: ShardMaker, *given: Any) -> Content:
        content = original(self, *given)
        content.tensors["blocks.1.hook_in"].view(torch.int32)[row, 0] ^= 1
        return content

    return make
