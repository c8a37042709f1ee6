"""Sites as arrays on disk: mapped without a copy, rows in any order, from the disk and from a remote store."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylens.engine.dump import files
from replaylens.engine.dump.maker import write_dump
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.store import Store
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, UnknownSite


@pytest.fixture(params=["disk", "memory", "too many shards to map"])
def dump(request: pytest.FixtureRequest, reference: Dump, monkeypatch: pytest.MonkeyPatch) -> Dump:
    if request.param == "memory":
        store = Store("memory://array")
        for name in reference.files.store.sizes():
            store.write(name, reference.files.store.read(name, 1 << 30))
        return Dump.open("memory://array")
    if request.param == "too many shards to map":
        monkeypatch.setattr(files, "_MAX_MAPPED", 0)
    return reference


@pytest.fixture(scope="module")
def truth(reference: Dump) -> dict[str, torch.Tensor]:
    """Every site, put together by safetensors alone."""
    from safetensors.torch import load_file

    shards = [load_file(Path(reference.url, shard.name)) for shard in reference.manifest.shards]
    return {name: torch.cat([shard[name] for shard in shards]).nan_to_num() for name in reference.sites}


def indices(count: int) -> dict[str, Any]:
    order = np.random.default_rng(0).permutation(count)
    return {
        "all": slice(None),
        "a permutation": order,
        "as a tensor": torch.from_numpy(order),
        "some, twice": [7, 3, 7, count - 1, 0],
        "from the end": [-1, -count],
        "a slice over shards": slice(count // 3, count - 5),
        "backwards": slice(None, None, -3),
        "none": [],
        "a mask": np.arange(count) % 3 == 1,
        "one run": range(5, 9),
    }


@pytest.mark.parametrize("which", indices(9))
def test_indexing(dump: Dump, truth: dict[str, torch.Tensor], which: str) -> None:
    """What is read is what indexing the whole tensor gives, at every kind of site."""
    rows = indices(len(dump))[which]
    chosen = rows if isinstance(rows, slice | np.ndarray) else np.array(list(rows), dtype=np.int64)
    wanted = np.arange(len(dump))[chosen].copy()  # torch takes no negative strides
    for site in ("blocks.1.hook_in", "Z.top_ids", "Z.emitted"):
        found = dump.array(site)[rows]
        assert torch.equal(found.nan_to_num(), truth[site][wanted]) and found.dtype == truth[site].dtype
    for layer in (0, 2, -1):
        assert torch.equal(dump.array("Z.top_ids", layer)[rows], truth["Z.top_ids"][wanted][:, layer])
    taken = dump.take(rows, ["blocks.0.hook_in", ("C", 1), "T", ("Z.kl", 1)])
    names = ["blocks.0.hook_in", "blocks.1.mlp.hook_out", "blocks.0.attn.hook_out", "blocks.1.attn.hook_out"]
    assert list(taken) == [*names, "Z.kl.1"]
    assert all(torch.equal(taken[name], truth[name][wanted]) for name in names)
    assert torch.equal(taken["Z.kl.1"], truth["Z.kl"][wanted][:, 1])


def test_take_counts_rows_of_the_view(dump: Dump) -> None:
    """Row numbers are those of the index that the caller sees, filtered or not."""
    view = dump.where(accepted=False)
    rows = [4, 0, -1]
    assert torch.equal(view.take(rows, "S")["blocks.1.hook_in"], view.to_torch("S", 1)[rows])
    assert list(dump.take([0])) == list(dump.sites) and len(view.array("S", 0)) == len(view) < len(dump)


def test_invalid_rows_and_sites(dump: Dump) -> None:
    acts = dump.array("S", 0)
    for rows in ([len(dump)], [-len(dump) - 1], [[1]], [1.5], ["a"], [True], slice("a"), None):
        with pytest.raises(BadRequest, match="row"):
            acts[rows]  # type: ignore[index]
    for sites, error in (
        ([], BadRequest),
        (["Q"], UnknownSite),
        ([("S", 9)], UnknownSite),
        (3, BadRequest),
        ([3], UnknownSite),
    ):
        with pytest.raises(error):
            dump.take([0], sites)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="slow"):
        iter(acts)


def test_looks_like_an_array(dump: Dump) -> None:
    acts = dump.array("S", 1)
    assert acts.shape == (len(dump), 32) and acts.ndim == 2 and acts.dtype == torch.float32 and "hook_in" in repr(acts)
    assert acts[3].shape == (32,) and np.array_equal(np.asarray(acts), dump.to_numpy("S", 1))
    assert np.asarray(acts, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="only by reading"):
        np.array(acts, copy=False)


def mapped_addresses(name: str) -> list[tuple[int, int]]:
    """Ranges of this process's addresses where a file is mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(name)]
    return [(int(a, 16), int(b, 16)) for a, b in (line[0].split("-") for line in lines)]


def test_pieces_are_the_files_themselves(reference: Dump, truth: dict[str, torch.Tensor]) -> None:
    """No copy: every tensor lies within the addresses where its shard is mapped. A copy does not."""
    pieces = reference.array("S", 1).pieces()
    assert torch.equal(torch.cat(pieces), truth["blocks.1.hook_in"]) and len(pieces) == len(reference.manifest.shards)
    for piece, shard in zip(pieces, reference.manifest.shards, strict=True):
        ranges = mapped_addresses(f"{reference.url}/{shard.name}")
        assert any(a <= piece.data_ptr() < b for a, b in ranges)
        assert not any(a <= piece.clone().data_ptr() < b for a, b in ranges)


def test_writing_into_pieces_stays_there(reference: Dump) -> None:
    before = Path(reference.url, reference.manifest.shards[0].name).read_bytes()
    first = reference.array("S", 1).pieces()[0]
    kept = first.clone()
    first.zero_()
    assert torch.equal(reference.array("S", 1).pieces()[0], kept) and torch.equal(reference.to_torch("S", 1)[: len(kept)], kept)
    assert Path(reference.url, reference.manifest.shards[0].name).read_bytes() == before and kept.any()


def test_pieces_need_whole_local_shards(reference: Dump) -> None:
    with pytest.raises(BadRequest, match="filtered"):
        reference.where(accepted=True).array("S", 0).pieces()
    remote = Store("memory://pieces")
    for name in reference.files.store.sizes():
        remote.write(name, reference.files.store.read(name, 1 << 30))
    with pytest.raises(BadRequest, match="local disk"):
        Dump.open("memory://pieces").array("S", 0).pieces()


def test_bfloat16_and_odd_offsets(engine: Engine, planned: Callable[..., DumpPlan], tmp_path: Path) -> None:
    """Two-byte rows, one position per path: offsets of the sites after them need not be multiples of four."""
    from safetensors.torch import load_file

    dump = write_dump(engine, planned(dtype="bfloat16", positions="last", examples=9), tmp_path)
    assert dump is not None and dump.array("S", 0).dtype == torch.bfloat16
    shards = [load_file(tmp_path / shard.name) for shard in dump.manifest.shards]
    order = torch.randperm(len(dump), generator=torch.Generator().manual_seed(0))
    for name in dump.sites:
        whole = torch.cat([shard[name] for shard in shards]).float().nan_to_num()
        assert torch.equal(dump.array(name)[order].float().nan_to_num(), whole[order])
        assert torch.equal(torch.cat(dump.array(name).pieces()).float().nan_to_num(), whole)


def test_arrays_go_to_other_processes(reference: Dump) -> None:
    acts = reference.array("S", 0)
    sent = pickle.loads(pickle.dumps(acts))  # noqa: S301
    assert torch.equal(sent[[5, 2]], acts[[5, 2]])


@pytest.mark.parametrize("block", [2048, 50, 1])
def test_statistics(dump: Dump, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against NumPy, whether the rows are one block, some (of which the last is smaller), or one each."""
    monkeypatch.setattr(files, "_BLOCK", block)
    found, x = dump.statistics("S", 1), dump.to_numpy("S", 1).astype(np.float64)
    assert found.rows == len(dump) and found.mean.dtype == torch.float64
    np.testing.assert_allclose(found.mean.numpy(), x.mean(0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found.std.numpy(), x.std(0), rtol=1e-12)
    assert found.mean_norm == pytest.approx(np.linalg.norm(x, axis=1).mean(), rel=1e-13)
    assert found.unit_scale == pytest.approx(32**0.5 / found.mean_norm)
    with pytest.raises(BadRequest, match="No row"):
        dump.where(example=10**6).statistics("S", 1)


@pytest.mark.parametrize("block", [1, 3, 50, 10_000])
def test_statistics_of_rows_whose_blocks_differ(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that drift: each block has its own mean, far from the others', so merging them decides the result."""
    monkeypatch.setattr(files, "_BLOCK", block)
    rows = torch.arange(150, dtype=torch.float64)[:, None] * torch.tensor([40.0, -3.0, 0.0]) + torch.tensor([0.0, 1e6, 7.0])
    found = files.statistics(rows)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.mean.numpy(), rows.mean(0).numpy(), rtol=1e-13)
    np.testing.assert_allclose(found.std.numpy(), rows.numpy().std(0), rtol=1e-9, atol=1e-9)
    assert float(found.std[0]) == pytest.approx(40 * ((150**2 - 1) / 12) ** 0.5)
    assert found.rows == 150 and found.mean_norm == pytest.approx(float(rows.norm(dim=1).mean()))


def test_statistics_do_not_depend_on_shards(
    reference: Dump, engine: Engine, planned: Callable[..., DumpPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits from shards of 4 and of 3 examples, on one thread and on two; other rows give other bits."""
    monkeypatch.setattr(files, "_BLOCK", 50)  # so that there are several blocks
    other = write_dump(engine, planned(examples_per_shard=3), tmp_path)
    assert other is not None and len(other.manifest.shards) > len(reference.manifest.shards)
    mine, yours = reference.statistics("S", 1), other.statistics("S", 1)
    torch.set_num_threads(2)
    threaded = reference.statistics("S", 1)
    torch.set_num_threads(1)
    for found in (yours, threaded):
        assert torch.equal(mine.mean, found.mean) and torch.equal(mine.std, found.std) and mine.mean_norm == found.mean_norm
    fewer = reference.where(accepted=True).statistics("S", 1)
    assert not torch.equal(mine.mean, fewer.mean)
