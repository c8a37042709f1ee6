"""Reading: matrices for scikit-learn, filters, streams, TransformerLens, other tools, and ten million rows."""

import json
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from replaylens import tasks
from replaylens.dumps import files
from replaylens.dumps.content import combine
from replaylens.dumps.files import Filter
from replaylens.dumps.maker import ShardMaker, make_plan, write_dump
from replaylens.dumps.manifest import IndexEntry, Manifest, ShardEntry, SiteEntry, shard_name
from replaylens.dumps.plan import DumpPlan, compact
from replaylens.dumps.reader import Dump
from replaylens.dumps.store import Store
from replaylens.dumps.verify import verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadDump, BadRequest, UnknownSite
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes import lens
from replaylens.engine.passes.lens import TunedLens, unembed_hash
from replaylens.replay.run import Run
from replaylens.tasks import WordTokenizer
from replaylens.tasks.task import AnyTask
from tests.dumps.conftest import EXAMPLES, NEW, in_memory, written
from tests.dumps.damage import flip_bit
from tests.toy_model import scripted_model

Planned = Callable[..., DumpPlan]


@pytest.fixture(params=["disk", "memory"])
def dump(request: pytest.FixtureRequest, reference: Dump) -> Dump:
    """The reference, memory-mapped from disk and fetched from a remote store."""
    return reference if request.param == "disk" else in_memory(reference, "memory://reader")


def test_without_our_code(reference: Dump) -> None:
    """json, safetensors and parquet are enough to join rows and labels."""
    folder = Path(reference.url)
    manifest = json.loads((folder / "manifest.json").read_text())
    index = pq.read_table(folder / "index.parquet").to_pandas()
    shards = [load_file(folder / entry["name"]) for entry in manifest["shards"]]
    for site, entry in manifest["sites"].items():
        rows = torch.cat([shard[site] for shard in shards])
        assert list(rows.shape) == [manifest["rows"], *entry["shape"]] and str(rows.dtype) == f"torch.{entry['dtype']}"
        assert torch.equal(rows.nan_to_num(), reference.to_torch(site).nan_to_num())
    line = index.iloc[77]
    row = shards[line["shard"]]["blocks.1.hook_in"][line["row"]]
    assert torch.equal(row, reference.to_torch("S", 1)[77])


def test_rows_are_the_engine_s_own(engine: Engine, coin: AnyTask, dump: Dump) -> None:
    """Rows equal those of a branch with the same path. Tokens and texts are those of the path."""
    example = coin.example(6)
    rows = dump.where(example=6, branch=0)
    tokens = rows.index["token"].tolist()
    assert engine.text.decode(tokens).startswith(example.prompt) and "".join(rows.index["text"]) == engine.text.decode(tokens)
    branch = engine.prompt(tokens, sites="STC")
    for letter in "STC":
        for layer in range(2 + (letter == "S")):
            assert torch.equal(rows.to_torch(letter, layer), branch.activations[dump.resolve(letter, layer)[0]])
    branch.release()


def test_matrix(dump: Dump) -> None:
    X, y, groups = dump.matrix("S", layer=1, label="face")
    assert X.shape == (len(y), 32) and X.dtype == np.float32 and len(groups) == len(y)
    assert set(y) == {"heads", "tails"}, "rows without the label are left out"
    index = dump.index
    has = index["face"].notna()
    assert y.tolist() == index["face"][has].tolist() and groups.tolist() == index["root"][has].tolist()
    assert np.array_equal(X, dump.to_numpy("blocks.1.hook_in")[has.to_numpy()])
    assert dump.matrix("S", 1).y is None and len(dump.matrix("S", 1).X) == len(dump)


def test_matrix_fits_scikit_learn(dump: Dump) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold, cross_val_score

    X, y, groups = dump.where(accepted=True).matrix("S", 1, label="last_action")
    scores = cross_val_score(LogisticRegression(max_iter=50), X, y, groups=groups, cv=GroupKFold(3))
    assert scores.shape == (3,)


def test_label_types_survive(dump: Dump) -> None:
    """Integers stay integers, even if some rows have no value."""
    parity = dump.matrix("T", 0, label="parity").y
    assert parity is not None and parity.dtype == np.int64 and set(parity) == {0, 1}
    assert dump.where(parity=1).index["parity"].tolist() == [1] * int((parity == 1).sum())
    assert dump.matrix("T", 0, label="token").y.dtype.kind == "i" and dump.matrix("T", 0, label="accepted").y.dtype == bool


CONDITIONS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "equality": ({"face": "heads"}, lambda f: f.face == "heads"),
    "a flag": ({"accepted": False}, lambda f: ~f.accepted),
    "a token state": ({"token_state": "rejected"}, lambda f: f.branch > 0),
    "a set": ({"example": {1, 4, 99}}, lambda f: f.example.isin([1, 4])),
    "a list": ({"token_state": ["prompt", "accepted"]}, lambda f: f.accepted),
    "a range": ({"position": range(3, 9)}, lambda f: (f.position >= 3) & (f.position < 9)),
    "a range with steps": ({"position": range(0, 20, 5)}, lambda f: f.position.isin([0, 5, 10, 15])),
    "an open range": ({"position": slice(20, None)}, lambda f: f.position >= 20),
    "a range of floats": ({"logprob": slice(-4.5, -4.0)}, lambda f: (f.logprob >= -4.5) & (f.logprob < -4.0)),
    "no value": ({"face": None}, lambda f: f.face.isna()),
    "depth": ({"depth": 2}, lambda f: (f.branch > 0) & (f.position == f.fork_position + 1)),
    "depth 0": ({"depth": 0}, lambda f: f.accepted),
    "a whole number label": ({"actions": 2}, lambda f: (f.actions == 2).fillna(False)),
    "a branch": ({"branch": 1}, lambda f: f.branch == 1),
    "several": ({"accepted": True, "position": slice(None, 4)}, lambda f: f.accepted & (f.position < 4)),
    "nothing left": ({"example": 10**6}, lambda f: f.example < 0),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_where(dump: Dump, name: str) -> None:
    given, expected = CONDITIONS[name]
    mask = np.asarray(expected(dump.index), dtype=bool)
    chosen = dump.where(**given)
    assert len(chosen) == mask.sum() and (name == "nothing left") == (not mask.any())
    assert chosen.index["row"].tolist() == dump.index["row"][mask].tolist()
    assert torch.equal(chosen.to_torch("C", 1), dump.to_torch("C", 1)[mask.tolist()])
    assert chosen.matrix("C", 1).X.tolist() == dump.matrix("C", 1, where=given).X.tolist()


def test_where_with_functions_and_chains(dump: Dump) -> None:
    chosen = dump.where(lambda f: f.parity == 1).where(accepted=True, position=range(5, 50))
    assert (chosen.index["parity"] == 1).all() and chosen.index["accepted"].all() and len(chosen)
    assert len(dump.where(lambda f: np.zeros(len(f), dtype=bool))) == 0
    with pytest.raises(BadRequest, match="one boolean per row"):
        len(dump.where(lambda f: f.position))
    with pytest.raises(BadRequest, match="position is no text"):
        dump.where(position="last")  # a position of probes, not of the index: it would select nothing


@pytest.mark.parametrize(
    "column, ends", [("face", range(3)), ("face", slice(1, 2)), ("position", slice("a", None)), ("position", slice(0, 9, 2))]
)
def test_ends_of_another_kind(dump: Dump, column: str, ends: Any) -> None:
    with pytest.raises(BadRequest, match=f"^{column}=.* in `where`"):
        len(dump.where(**{column: ends}))


def test_unknown_names(dump: Dump) -> None:
    with pytest.raises(BadRequest, match=r"no column 'colour'. It has .*face"):
        dump.where(colour="red")
    with pytest.raises(BadRequest, match="Unknown label 'colour'"):
        dump.matrix("S", 0, label="colour")
    for site, layer in (("S", None), ("S", 3), ("Q", 0), ("blocks.7.hook_in", None), ("blocks.1.hook_in", 0), ("Z.kl", 9)):
        with pytest.raises(UnknownSite):
            dump.matrix(site, layer)


def test_names_and_letters(dump: Dump) -> None:
    """Letters count layers. S has one more, the model's output. Aliases are those of TransformerLens."""
    assert dump.resolve("S", 2) == dump.resolve("S", -1) == ("blocks.1.hook_out", None)
    assert dump.resolve("T", 1) == ("blocks.1.attn.hook_out", None)
    assert dump.resolve("blocks.1.hook_resid_pre") == ("blocks.1.hook_in", None) == dump.resolve("blocks.1.hook_in", 1)
    assert dump.to_torch("Z.top_ids").shape[1:] == (3, 8) and dump.to_torch("Z.top_ids", 2).shape[1:] == (8,)
    assert dump.matrix("Z.top_logprobs").X.shape[1] == 24 and dump.matrix("Z.entropy", 0).X.shape[1] == 1


def test_stream(dump: Dump) -> None:
    """A stream gives the same rows as one read, in chunks of bounded size."""
    for view in (dump, dump.where(accepted=False, position=range(9, 40))):
        pieces = list(view.stream("T", 0, batch_rows=17))
        assert max(len(x) for x, _ in pieces) == 17 and all(len(x) == len(frame) for x, frame in pieces)
        assert torch.equal(torch.cat([x for x, _ in pieces]), view.to_torch("T", 0))
        assert [p for _, frame in pieces for p in frame["position"]] == view.index["position"].tolist()
    with pytest.raises(BadRequest, match="batch_rows"):
        next(iter(dump.stream("T", 0, batch_rows=0)))


def test_activation_cache(dump: Dump) -> None:
    """TransformerLens finds every activation under its name, for the accepted path and for a whole rejected branch."""
    line = dump.where(branch=1).index.iloc[0]
    example, fork = int(line["example"]), int(line["fork_position"])
    path, branch = dump.to_activation_cache(example), dump.to_activation_cache(example, branch=1)
    assert torch.equal(path["resid_pre", 1][0], dump.where(example=example, branch=0).to_torch("S", 1))
    assert torch.equal(branch["mlp_out", 0][:, :fork], path["mlp_out", 0][:, :fork])
    assert torch.equal(branch["mlp_out", 0][0, fork:], dump.where(example=example, branch=1).to_torch("C", 0))
    with pytest.raises(BadRequest, match="no branch 77"):
        dump.to_activation_cache(example, branch=77)
    with pytest.raises(BadRequest, match="not in this dump"):
        dump.to_activation_cache(10**6)


def test_cache_needs_all_positions(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    dump = written(engine, planned(positions="last", examples=4), tmp_path)
    with pytest.raises(BadRequest, match="needs all positions"):
        dump.to_activation_cache(0)


def test_other_processes_can_have_it(reference: Dump) -> None:
    """A dump that is sent to a worker opens its own files there."""
    sent = pickle.loads(pickle.dumps(reference.where(accepted=True)))  # noqa: S301
    assert (sent.matrix("S", 0).X == reference.where(accepted=True).matrix("S", 0).X).all()


def test_results_are_the_caller_s_own(dump: Dump) -> None:
    """Writing into a result changes neither the files nor later results."""
    for make in (lambda: dump.to_torch("S", 0), lambda: dump.where(accepted=True).to_torch("S", 0)):
        first = make()
        kept = first.clone()
        first.zero_()
        assert torch.equal(make(), kept) and kept.any()


def test_repr_and_length(reference: Dump) -> None:
    assert f"{EXAMPLES} examples" in repr(reference) and len(reference) == reference.manifest.rows
    assert "filtered" in repr(reference.where(accepted=True))


# ---- ten million rows -----------------------------------------------------------------------------------------------

ROWS, WIDTH = 100_000, 64


def large(reference: Dump, folder: Path, num_shards: int, with_index: bool) -> Path:
    """A dump of many rows whose shards are sparse files: gigabytes of zeros that take no disk space."""
    name, size = "blocks.0.hook_in", ROWS * WIDTH * 4
    header = json.dumps({name: {"dtype": "F32", "shape": [ROWS, WIDTH], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    for number in range(num_shards):
        with open(folder / shard_name(number), "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
    if with_index:
        lines = reference.files.lines(0, reference.columns).take(pa.array([0] * ROWS))
        with pq.ParquetWriter(folder / "index.parquet", lines.schema) as writer:
            for number in range(num_shards):
                own = {"example": np.full(ROWS, 10 * number), "shard": np.full(ROWS, number), "row": np.arange(ROWS)}
                for column, values in own.items():
                    place, kind = lines.column_names.index(column), lines.schema.field(column).type
                    lines = lines.set_column(place, column, pa.array(values, kind))
                writer.write_table(lines, row_group_size=ROWS)
    else:
        with open(folder / "index.parquet", "wb") as file:
            file.truncate(1 << 30)
    few = {"examples": {"start": 0, "stop": num_shards * 10}, "lens": None, "sites": [name], "examples_per_shard": 10}
    plan = DumpPlan.from_json({**reference.manifest.plan.to_json(), **few})
    none, whole = combine([]), 8 + len(header) + size
    shards = tuple(
        ShardEntry(shard_name(i), 10 * i, 10 * i + 9, ROWS, ROWS, whole, none, none, none) for i in range(num_shards)
    )
    sha256 = Store(folder).sha256("index.parquet") if with_index else none
    index = IndexEntry(num_shards * ROWS, (folder / "index.parquet").stat().st_size, sha256)
    sites = {name: SiteEntry("float32", (WIDTH,), 0, "S", ())}
    manifest = Manifest(plan, reference.manifest.fingerprint, sites, dict(reference.manifest.labels), index, shards)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return folder


def anonymous_memory() -> int:
    """Memory of this process in bytes, without mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def test_ten_million_rows_open_in_under_a_second(reference: Dump, tmp_path: Path) -> None:
    """Opening reads neither rows nor index: the index here is a sparse gigabyte."""
    folder = large(reference, tmp_path, 100, with_index=False)
    begin = time.perf_counter()
    dump = Dump.open(folder, check=False)  # its hashes are made up
    seconds = time.perf_counter() - begin
    assert len(dump) == 10_000_000 and seconds < 1.0
    assert torch.equal(dump.files.shard(99).rows("blocks.0.hook_in", slice(99_990, 99_999)), torch.zeros(9, WIDTH))


@pytest.mark.slow
def test_a_layer_streams_in_bounded_memory(reference: Dump, tmp_path: Path) -> None:
    """Half a million rows, 128 MB of them, go by; what stays is a few shards' index and one batch."""
    dump = Dump.open(large(reference, tmp_path, 5, with_index=True), check=False)
    seen, most, start = 0, 0, anonymous_memory()
    for x, frame in dump.stream("S", 0, batch_rows=8192):
        assert len(x) == len(frame) <= 8192
        seen, most = seen + len(x), max(most, anonymous_memory())
    assert seen == len(dump) == 5 * ROWS
    assert most - start < 500e6


# ---- array -----------------------------------------------------------------------------------------------------------
# Sites as arrays on disk: mapped without a copy, rows in any order, from the disk and from a remote store.


@pytest.fixture(params=["disk", "memory", "too many shards to map"])
def dump_of_array(request: pytest.FixtureRequest, reference: Dump, monkeypatch: pytest.MonkeyPatch) -> Dump:
    if request.param == "memory":
        return in_memory(reference, "memory://array")
    if request.param == "too many shards to map":
        monkeypatch.setattr(files, "_MAX_MAPPED", 0)
    return reference


@pytest.fixture(scope="module")
def truth(reference: Dump) -> dict[str, torch.Tensor]:
    """Every site, put together by safetensors alone."""
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
def test_indexing(dump_of_array: Dump, truth: dict[str, torch.Tensor], which: str) -> None:
    """What is read is what indexing the whole tensor gives, at every kind of site."""
    rows = indices(len(dump_of_array))[which]
    chosen = rows if isinstance(rows, slice | np.ndarray) else np.array(list(rows), dtype=np.int64)
    wanted = np.arange(len(dump_of_array))[chosen].copy()  # torch takes no negative strides
    for site in ("blocks.1.hook_in", "Z.top_ids", "Z.emitted"):
        found = dump_of_array.array(site)[rows]
        assert torch.equal(found.nan_to_num(), truth[site][wanted]) and found.dtype == truth[site].dtype
    for layer in (0, 2, -1):
        assert torch.equal(dump_of_array.array("Z.top_ids", layer)[rows], truth["Z.top_ids"][wanted][:, layer])
    taken = dump_of_array.take(rows, ["blocks.0.hook_in", ("C", 1), "T", ("Z.kl", 1)])
    names = ["blocks.0.hook_in", "blocks.1.mlp.hook_out", "blocks.0.attn.hook_out", "blocks.1.attn.hook_out"]
    assert list(taken) == [*names, "Z.kl.1"]
    assert all(torch.equal(taken[name], truth[name][wanted]) for name in names)
    assert torch.equal(taken["Z.kl.1"], truth["Z.kl"][wanted][:, 1])


@pytest.mark.parametrize("site", [("S", 1), ("Z.top_ids", 2)])
def test_single_rows_cost_few_calls(reference: Dump, copy: Path, site: tuple[str, int]) -> None:
    """A row of an array, of a filtered one too, is the row of `load_file`; what a list of rows needs is not done for it."""
    dump = Dump.open(copy)
    name = reference.resolve(*site)[0]
    stored = torch.cat([load_file(copy / shard.name)[name] for shard in dump.manifest.shards])
    stored = stored if site[0] == "S" else stored[:, site[1]]
    accepted = torch.tensor(reference.index["accepted"].tolist())
    for array, wanted in ((dump.array(*site), stored), (dump.where(accepted=True).array(*site), stored[accepted])):
        array[0], array[-1], array[len(array) // 2]  # opens the shards
        for row in (0, 1, len(wanted) // 2, len(wanted) - 1, -1, -len(wanted)):
            assert torch.equal(array[row], wanted[row]) and array[row].is_contiguous()
        calls = 0

        def count(frame: Any, event: str, given: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            taken = array[1]
        finally:
            sys.setprofile(None)
        assert calls < 120, "in a list of rows it takes hundreds"
        taken.zero_()
        assert torch.equal(array[1], wanted[1]), "the caller owns it"
        with pytest.raises(BadRequest, match="There is no row"):
            array[len(wanted)]
    flip_bit(copy / shard_name(0), -40)
    with pytest.raises(BadDump):
        Dump.open(copy).array(*site)[0]


def test_take_counts_rows_of_the_view(dump_of_array: Dump) -> None:
    """Row numbers are those of the index that the caller sees, filtered or not."""
    view = dump_of_array.where(accepted=False)
    rows = [4, 0, -1]
    assert torch.equal(view.take(rows, "S")["blocks.1.hook_in"], view.to_torch("S", 1)[rows])
    assert list(dump_of_array.take([0])) == list(dump_of_array.sites) and len(view.array("S", 0)) == len(view) < len(
        dump_of_array
    )


def test_invalid_rows_and_sites(dump_of_array: Dump) -> None:
    acts = dump_of_array.array("S", 0)
    for rows in ([len(dump_of_array)], [-len(dump_of_array) - 1], [[1]], [1.5], ["a"], [True], slice("a"), None):
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
            dump_of_array.take([0], sites)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="slow"):
        iter(acts)


def test_looks_like_an_array(dump_of_array: Dump) -> None:
    acts = dump_of_array.array("S", 1)
    assert acts.shape == (len(dump_of_array), 32) and acts.ndim == 2 and acts.dtype == torch.float32 and "hook_in" in repr(acts)
    assert acts[3].shape == (32,) and np.array_equal(np.asarray(acts), dump_of_array.to_numpy("S", 1))
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
    with pytest.raises(BadRequest, match="local disk"):
        in_memory(reference, "memory://pieces").array("S", 0).pieces()


def test_bfloat16_and_odd_offsets(engine: Engine, planned: Callable[..., DumpPlan], tmp_path: Path) -> None:
    """Two-byte rows, one position per path: offsets of the sites after them need not be multiples of four."""
    dump = written(engine, planned(stored_dtype="bfloat16", positions="last", examples=9), tmp_path)
    assert dump.array("S", 0).dtype == torch.bfloat16
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
def test_statistics(dump_of_array: Dump, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against NumPy, whether the rows are one block, some (of which the last is smaller), or one each."""
    monkeypatch.setattr(files, "_BLOCK", block)
    found, x = dump_of_array.statistics("S", 1), dump_of_array.to_numpy("S", 1).astype(np.float64)
    assert found.rows == len(dump_of_array) and found.mean.dtype == torch.float64
    np.testing.assert_allclose(found.mean.numpy(), x.mean(0), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found.std.numpy(), x.std(0), rtol=1e-12)
    assert found.mean_norm == pytest.approx(np.linalg.norm(x, axis=1).mean(), rel=1e-13)
    assert found.unit_scale == pytest.approx(32**0.5 / found.mean_norm)
    with pytest.raises(BadRequest, match="No row"):
        dump_of_array.where(example=10**6).statistics("S", 1)


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
    """The same bits from shards of 3 and of 2 examples, on one thread and on two; other rows give other bits."""
    monkeypatch.setattr(files, "_BLOCK", 50)  # so that there are several blocks
    other = written(engine, planned(examples_per_shard=2), tmp_path)
    assert len(other.manifest.shards) > len(reference.manifest.shards)
    mine, yours = reference.statistics("S", 1), other.statistics("S", 1)
    torch.set_num_threads(2)
    threaded = reference.statistics("S", 1)
    torch.set_num_threads(1)
    for found in (yours, threaded):
        assert torch.equal(mine.mean, found.mean) and torch.equal(mine.std, found.std) and mine.mean_norm == found.mean_norm
    fewer = reference.where(accepted=True).statistics("S", 1)
    assert not torch.equal(mine.mean, fewer.mean)


# ---- rows ------------------------------------------------------------------------------------------------------------
# The content of a row: kept positions, dtypes, probabilities, branch numbers, and labels of right and wrong paths.


# ---- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_positions(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Each selector keeps exactly its rows, bit for bit those of the full dump."""
    full = reference.index
    last = full.groupby(["example", "branch"])["position"].transform("max") == full["position"]
    prompt = full["token_state"] == "prompt"
    third = (full["position"] % 3 == 0).to_numpy()
    expected: dict[str, Any] = {"all": np.ones(len(full), bool), "generated": ~prompt, "last": last}
    for name, mask in expected.items():
        check_positions(written(engine, planned(positions=name), tmp_path / name), reference, np.asarray(mask))

    def every_third(path: Any) -> list[int]:
        return [position for position in range(len(path.tokens)) if position % 3 == 0]

    custom = written(engine, planned(positions=every_third), tmp_path / "custom")
    check_positions(custom, reference, third)
    assert custom.manifest.plan.positions.startswith("custom:") and "every_third" in custom.manifest.plan.positions


def check_positions(dump: Dump, reference: Dump, mask: np.ndarray) -> None:
    assert len(dump) == mask.sum() > 0
    keys = ["example", "branch", "position", "token", "logprob", "entropy", "face", "token_state"]
    ours, theirs = dump.index[keys], reference.index[mask][keys].reset_index(drop=True)
    assert ours.astype(object).fillna("none").equals(theirs.astype(object).fillna("none"))
    for site in reference.sites:
        assert torch.equal(dump.to_torch(site).nan_to_num(7), reference.to_torch(site)[mask.tolist()].nan_to_num(7))


def test_step_ends(engine: Engine, coin: AnyTask, planned: Planned, tmp_path: Path) -> None:
    """One row per event of the prompt: the token from which the event can be inferred. Labels give the state from there on."""
    dump = written(engine, planned(positions="steps", sites="S"), tmp_path)
    for number in range(EXAMPLES):
        example, rows = coin.example(number), dump.where(example=number, branch=0).index
        steps = [step for step in example.steps if step.end <= len(example.prompt)]
        assert rows["actions"].tolist() == list(range(1, len(steps) + 1))
        offsets = engine.text.tokenizer.encode_with_offsets(example.prompt)[1]
        assert rows["position"].tolist() == [next(i for i, (_, end) in enumerate(offsets) if end >= s.end) for s in steps]


def test_impossible_positions(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="positions 'some'"):
        planned(positions="some")
    with pytest.raises(BadRequest, match="chose position 999"):
        write_dump(engine, planned(positions=lambda path: [999]), tmp_path)


def test_no_rows_at_all(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    """A selector that keeps no rows, in one shard or in all, gives a valid dump."""
    none = written(engine, planned(positions=lambda path: []), tmp_path / "none")
    assert len(none) == 0 and len(none.index) == 0 and none.to_torch("S", 0).shape == (0, 32)
    assert none.to_torch("Z.top_ids").shape == (0, 3, 8) and len(none.where(accepted=True).matrix("S", 0).X) == 0

    def middle(path: Any) -> list[int]:
        return [2, 3] if 3 <= path.example.index < 6 else []

    some = written(engine, planned(positions=middle), tmp_path / "some")
    assert [shard.rows for shard in some.manifest.shards] == [0, 6, 0]
    assert some.index["example"].tolist() == [3, 3, 4, 4, 5, 5] and len(some.to_torch("S", 0)) == 6
    assert [len(x) for x, _ in some.stream("S", 0)] == [6]


# ---- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, dtype: torch.dtype) -> None:
    """Sites are rounded to nearest even. bfloat16 stays bfloat16 on disk. Z and the index are not converted."""
    name = str(dtype).removeprefix("torch.")
    dump = written(engine, planned(stored_dtype=name), tmp_path / "a")
    assert dump.digest == written(engine, planned(stored_dtype=name), tmp_path / "b", batch=3).digest
    assert torch.equal(dump.to_torch("S", 1), reference.to_torch("S", 1).to(dtype))
    assert dump.to_torch("Z.kl").dtype is torch.float32 and dump.to_torch("Z.top_ids").dtype is torch.int32
    assert dump.index["entropy"].equals(reference.index["entropy"])
    x = dump.to_numpy("S", 1)
    assert x.dtype == (np.float32 if dtype is torch.bfloat16 else np.float16)
    assert (torch.from_numpy(x).to(dtype) == dump.to_torch("S", 1)).all()


def test_values_too_large_for_float16(model: Decoder, tokenizer: WordTokenizer, coin: AnyTask, tmp_path: Path) -> None:
    loud = Decoder(model.config).requires_grad_(False)
    loud.load_state_dict(model.state_dict())
    loud.embed.mul_(1e7)
    engine = Engine(loud, tokenizer)
    with pytest.raises(BadRequest, match=r"too large for float16\. Use bfloat16"):
        write_dump(engine, make_plan(engine, coin, 2, sites="S", stored_dtype="float16", max_new=2), tmp_path)
    with pytest.raises(BadRequest, match="dtype 'float64'"):
        make_plan(engine, coin, 2, stored_dtype="float64")
    with pytest.warns(DeprecationWarning, match="dtype of make_plan.* is now called stored_dtype"):
        assert make_plan(engine, coin, 2, dtype="float16").dtype == "float16"  # type: ignore[call-arg]


# ---- probabilities --------------------------------------------------------------------------------------------------


def test_probabilities_are_those_of_z(reference: Dump) -> None:
    """A token's log-probability is the last entry of Z one row earlier. The entropy is that of its own row."""
    rows = reference.where(branch=0)
    index, emitted = rows.index, rows.to_torch("Z.emitted")[:, -1].numpy()
    follows = index["position"].to_numpy()[1:] > 0
    assert (index["logprob"].to_numpy()[1:][follows] == emitted[:-1][follows]).all()
    assert index["logprob"].isna().equals(index["position"] == 0)
    assert (reference.index["entropy"].to_numpy() == reference.to_torch("Z.entropy")[:, -1].numpy()).all()


def test_probabilities_without_z(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    dump = written(engine, planned(sites="T"), tmp_path)
    assert dump.index["logprob"].equals(reference.index["logprob"]) and dump.index["entropy"].equals(reference.index["entropy"])


def test_without_probabilities(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Both columns are null, all else is the same, nothing is unembedded, and the dump verifies."""
    plan = planned(probabilities=False, sites="STC")
    made = ShardMaker(engine, plan).make(0)
    full = reference.files.content(0)
    for name in ("logprob", "entropy"):
        assert made.index.column(name).null_count == len(made) and full.index.column(name).null_count < len(full)
        assert made.index.schema.field(name).type == full.index.schema.field(name).type
    rest = [name for name in full.index.column_names if name not in ("logprob", "entropy")]
    assert made.index.select(rest).equals(full.index.select(rest))
    assert made.tensors and all(torch.equal(x, full.tensors[name]) for name, x in made.tensors.items())
    dump = written(engine, plan, tmp_path / "dump")
    assert verify(dump.url, engine, sample="all")
    assert DumpPlan.from_json(plan.to_json()) == dump.manifest.plan == plan
    assert plan.differences(planned(sites="STC")) == ["probabilities: False here, True there"]
    assert "probabilities" not in reference.manifest.plan.to_json() and reference.manifest.plan.probabilities
    with pytest.raises(BadRequest, match="probabilities"):
        planned(probabilities="no")


def test_without_probabilities_the_unembedding_is_not_run(
    engine: Engine, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("next_token was called")

    monkeypatch.setattr("replaylens.engine.passes.lens.next_token", refuse)
    maker = ShardMaker(engine, planned(probabilities=False, sites="T"))
    assert maker.wanted == list(engine.sites.per_layer("T"))
    assert len(maker.make(0)) and maker.make(0).index.column("entropy").null_count
    with pytest.raises(AssertionError, match="next_token"):
        ShardMaker(engine, planned(sites="T")).make(0)


def test_first_rejected_token_has_the_probability_that_the_model_gave_it(engine: Engine, reference: Dump) -> None:
    """The last accepted row before it judges the token: under greedy decoding it is less likely than the accepted token."""
    heads = reference.where(depth=1).index
    assert len(heads) and heads["logprob"].notna().all()
    accepted = reference.where(branch=0).index.set_index(["example", "position"])
    for line in heads.itertuples():
        if (line.example, line.position) in accepted.index:
            stood = accepted.loc[(line.example, line.position)]
            assert stood["token"] != line.token and stood["logprob"] >= line.logprob
    line = heads.iloc[0]
    path = accepted.loc[line["example"]].sort_index()["token"].tolist()[: int(line["fork_position"])]
    branch = engine.prompt(path, sites=["blocks.1.hook_out"])
    log_p = lens.log_softmax(engine.runner.logits(branch.activations["blocks.1.hook_out"][-1:]))
    assert np.float32(log_p[0, int(line["token"])]) == np.float32(line["logprob"])
    branch.release()


# ---- branches -------------------------------------------------------------------------------------------------------


def test_order_and_numbers_of_branches(reference: Dump) -> None:
    """Rows by (example, branch, position). The accepted path is branch 0. Rejected ones follow by fork position and tokens."""
    index = reference.index
    keys = list(zip(index["example"], index["branch"], index["position"], strict=True))
    assert keys == sorted(keys) and len(set(keys)) == len(keys)
    for _, rows in index.groupby("example"):
        branches = [
            (part["fork_position"].iloc[0], part["token"].tolist()) for _, part in rows[rows["branch"] > 0].groupby("branch")
        ]
        assert branches == sorted(branches) and sorted(set(rows["branch"])) == list(range(len(branches) + 1))
        assert rows[rows["branch"] == 0]["position"].tolist() == list(range((rows["branch"] == 0).sum()))
    assert (index["branch"] > 0).equals(~index["accepted"]) and (index["branch"] > 0).equals(index["parent"].notna())
    assert index["parent"].isna().equals(index["branch"] == 0)
    assert set(index["token_state"]) == {"prompt", "accepted", "rejected"}


def test_same_rejected_path_twice_is_one_branch(engine: Engine, coin: AnyTask, tmp_path: Path) -> None:
    run = engine.replay(coin.examples(3), sites="S", drafter="lens", max_new=NEW)
    assert isinstance(run, Run)
    once = run.save(tmp_path / "once")
    for result in run:
        result.rejected.extend(result.rejected[::-1])
    assert run.save(tmp_path / "twice").digest == once.digest


def test_labels_follow_each_branch(tokenizer: WordTokenizer, tmp_path: Path) -> None:
    """The model lies: the accepted path claims the wrong face, the rejected one the right face."""
    ids = tokenizer.id
    lie = {ids(" A"): ids(":"), ids(":"): ids(" tails"), ids(" tails"): ids("."), ids(" heads"): ids(".")}
    model = scripted_model(lie, vocab=tokenizer.vocab_size, d_model=128)
    task = tasks.get("coin")(flips=1, start="heads", p=0.0)
    assert task.example(0).completion.startswith(" heads")
    engine = Engine(model, tokenizer)
    branch = engine.prompt(task.example(0).prompt, sites="S", keep_rejected=True)
    right = [ids(" heads"), ids(".")]
    engine.generate([branch], 3, drafter="forced", drafts={branch.length: [right]}, window=4, final=True)
    assert engine.text.decode(branch.generated).startswith(" tails.")
    from replaylens.replay.replayer import ReplayOptions, result_of

    run = Run(engine, [result_of(engine, task.example(0), branch)], ReplayOptions(sites="S", drafter="forced"))
    dump = run.save(tmp_path)
    said = dump.where(token_state="accepted").index.iloc[0]
    rejected = dump.where(token_state="rejected").index.iloc[0]
    assert (said["text"], said["face"], said["claimed"]) == (" tails", "heads", "tails")
    assert (rejected["text"], rejected["face"], rejected["claimed"]) == (" heads", "heads", "heads")
    assert not dump.index["correct"].any() and rejected["depth"] == 1


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_plans_that_cannot_be(engine: Engine, planned: Planned) -> None:
    for changes, complaint in (
        ({"examples": 0}, "no examples"),
        ({"examples": [1, 1]}, "occurs twice"),
        ({"examples": [-1]}, "whole number of at least 0"),
        ({"examples_per_shard": 0}, "examples_per_shard"),
        ({"drafter": "oracle"}, "Unknown drafter 'oracle'"),
        ({"sites": ["blocks.0.attn.hook_pattern"]}, "its width is the number of keys"),
    ):
        with pytest.raises(BadRequest, match=complaint):
            planned(**changes)
    with pytest.raises(UnknownSite):
        planned(sites="blocks.9.hook_in")


def test_compact() -> None:
    assert compact([3, 1, 2]) == range(1, 4) and compact([5, 1]) == (1, 5) and compact([]) == ()


def test_plan_spells_out_what_rejected_branches_depend_on(engine: Engine, planned: Planned) -> None:
    assert planned(drafter="tree").drafter_settings == {"layer": 1, "width": 3}
    assert set(planned(drafter="model").drafter_settings) == {"weights"}
    assert planned().window == 8 and planned(drafter="self").window is None
    assert planned().reproducible and not planned(drafter="self").reproducible


def test_other_sites(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    """Any site of the table, by its name or an alias. Per-head sites have their own shape."""
    plan = planned(sites=["blocks.0.hook_resid_mid", "blocks.1.attn.hook_q", "unembed.hook_out"], examples=3)
    dump = written(engine, plan, tmp_path)
    assert set(dump.sites) == {"blocks.0.ln2.hook_in", "blocks.1.attn.q.hook_out", "unembed.hook_out"}
    assert dump.to_torch("blocks.1.attn.hook_q").shape[1:] == (4, 8)
    assert dump.to_torch("unembed.hook_out").shape[1:] == (engine.config.vocab_size,)


def test_tuned_lens(model: Decoder, tokenizer: WordTokenizer, coin: AnyTask, tmp_path: Path) -> None:
    """Z through a tuned lens: the plan names the lens, the bits do not depend on the batch, other engines need it too."""
    made = torch.Generator().manual_seed(0)
    lens = TunedLens(torch.randn(2, 32, 32, generator=made) / 9, torch.randn(2, 32, generator=made), unembed_hash(model))
    engine = Engine(model, tokenizer)
    plan = make_plan(engine, coin, 4, sites="SZ", max_new=3, lens=lens)
    dump = written(engine, plan, tmp_path / "a", batch=1)
    assert dump.manifest.plan.lens is not None and dump.manifest.plan.lens.tuned == lens.digest
    assert dump.digest == written(engine, plan, tmp_path / "b", batch=4).digest
    plain = written(engine, make_plan(engine, coin, 4, sites="SZ", max_new=3), tmp_path / "c")
    assert torch.equal(plain.to_torch("S", 1), dump.to_torch("S", 1))
    assert torch.equal(plain.to_torch("Z.kl", -1), dump.to_torch("Z.kl", -1)), "the last entry is the model's own"
    assert not torch.equal(plain.to_torch("Z.entropy", 0), dump.to_torch("Z.entropy", 0))
    other = Engine(model, tokenizer)
    with pytest.raises(BadRequest, match=lens.digest[:16]):
        verify(tmp_path / "a", other)
    other.capture_spec("Z", lens=lens)
    assert verify(tmp_path / "a", other, sample="all")


def test_memory_does_not_grow_with_the_dump(model: Decoder, tokenizer: WordTokenizer, planned: Planned, tmp_path: Path) -> None:
    """After each shard the engine holds no branch, no lane and no trace of it."""
    engine = Engine(model, tokenizer, record=True)
    written(engine, planned(engine=engine, drafter="tree", sites="S"), tmp_path)
    assert (len(engine.tree), engine.loop.lanes, engine.trace.events) == (0, {}, [])
    engine.check_integrity()


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (None, lambda x: x is None),
        (2, lambda x: x == 2),
        ([1, 3], lambda x: x in (1, 3)),
        ({2}, lambda x: x == 2),
        (slice(2, None), lambda x: x is not None and x >= 2),
        (slice(None, 2), lambda x: x is not None and x < 2),
        (slice(1, 3), lambda x: x in (1, 2)),
        (slice(None), lambda x: x is not None),
        (range(1, 3), lambda x: x in (1, 2)),
        (range(0, 4, 3), lambda x: x in (0, 3)),
    ],
)
def test_conditions_on_a_column_with_missing_values(wanted: Any, fits: Callable[[Any], bool]) -> None:
    """A missing value fits nothing but None; a range ends before its end. Also of a column without any value."""
    values = [0, 1, None, 2, 3, None]
    for column in (pd.array(values, dtype="Int64"), pd.array([None] * 6, dtype="Int64")):
        frame = pd.DataFrame({"x": column})
        own = [None if value is pd.NA else int(value) for value in column]
        assert Filter("x", wanted).mask(frame).tolist() == [bool(fits(value)) for value in own]
    several = pd.DataFrame({"x": pd.array(values, dtype="Int64")})
    assert Filter(None, lambda f: f.x > 1).mask(several).tolist() == [False, False, False, True, True, False]


def test_a_stored_name_comes_before_an_alias(reference: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """One site has another's name among its aliases: in a cache each stored name has its own rows."""
    first, second = list(reference.manifest.sites)[:2]
    sites = dict(reference.manifest.sites)
    sites[second] = replace(sites[second], aliases=(first, "other"))
    fake = SimpleNamespace(manifest=SimpleNamespace(sites=sites, plan=SimpleNamespace(positions="all")))
    rows = {first: torch.zeros(3, 2), second: torch.ones(3, 2)}
    fake._path_rows = lambda example, branch: rows
    cache = Dump.to_activation_cache(fake, 0)  # type: ignore[arg-type]
    assert not cache[first].any() and cache[second].all() and cache["other"].all() and cache[first].shape == (1, 3, 2)
