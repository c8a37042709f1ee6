"""A dump as a Hugging Face dataset: the same rows and index; the package is optional."""

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylens.engine.dump.maker import write_dump
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import MissingPackage

SITE = "blocks.1.hook_in"


def test_rows_and_index(reference: Dump) -> None:
    """All rows, or those of a filter, with nested sites and the columns of the index."""
    for dump in (reference, reference.where(accepted=False)):
        made, index = dump.to_dataset([SITE, "Z.top_ids", ("Z.kl", 1)]), dump.index
        assert len(made) == len(dump) and made.column_names == [*dump.columns, SITE, "Z.top_ids", "Z.kl.1"]
        assert made["token"][:] == index["token"].tolist() and made["face"][:] == index["face"].replace({np.nan: None}).tolist()
        arrays = made.with_format("torch", columns=[SITE, "Z.top_ids", "Z.kl.1"])[:]
        assert torch.equal(arrays[SITE], dump.to_torch(SITE))
        assert torch.equal(arrays["Z.top_ids"].to(torch.int32), dump.to_torch("Z.top_ids"))
        assert torch.equal(arrays["Z.kl.1"], dump.to_torch("Z.kl", 1))


def test_activations_are_not_copied(reference: Dump) -> None:
    """Arrow's buffers lie where the shards are mapped; those of filtered rows do not."""

    def mapped(made: Any) -> bool:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".safetensors" in line]
        ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines]
        chunks = made.data.column(SITE).chunks
        return all(any(a <= chunk.flatten().buffers()[1].address < b for a, b in ranges) for chunk in chunks)

    assert mapped(reference.to_dataset([SITE]))
    assert not mapped(reference.where(accepted=True).to_dataset([SITE]))


def test_fingerprints_tell_contents_apart(reference: Dump) -> None:
    made = [
        view.to_dataset(sites)._fingerprint
        for view in (reference, reference.where(accepted=True))
        for sites in ([SITE], ["Z.kl"])
    ]
    assert len(set(made)) == 4 and made[0] == Dump.open(reference.url).to_dataset([SITE])._fingerprint


def test_bfloat16_becomes_float32(engine: Engine, planned: Callable[..., DumpPlan], tmp_path: Path) -> None:
    dump = write_dump(engine, planned(dtype="bfloat16", examples=4), tmp_path)
    assert dump is not None
    found = dump.to_dataset([SITE]).with_format("torch", columns=[SITE])[:][SITE]
    assert found.dtype == torch.float32 and torch.equal(found, dump.to_torch(SITE).float())


def test_without_the_package(reference: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingPackage, match="pip install datasets"):
        reference.to_dataset([SITE])
