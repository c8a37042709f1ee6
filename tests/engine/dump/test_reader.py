"""Reading: matrices for scikit-learn, filters, streams, TransformerLens, other tools, and ten million rows."""

import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from replaylens.engine.dump.content import combine
from replaylens.engine.dump.maker import write_dump
from replaylens.engine.dump.manifest import IndexEntry, Manifest, ShardEntry, SiteEntry, shard_name
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.store import Store
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, UnknownSite
from replaylens.tasks.task import AnyTask

Planned = Callable[..., DumpPlan]


@pytest.fixture(params=["disk", "memory"])
def dump(request: pytest.FixtureRequest, reference: Dump) -> Dump:
    """The reference, memory-mapped from disk and fetched from a remote store."""
    if request.param == "disk":
        return reference
    from replaylens.engine.dump.store import Store

    store = Store("memory://reader")
    for name in reference.files.store.sizes():
        store.write(name, reference.files.store.read(name, 1 << 30))
    return Dump.open("memory://reader")


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
    dump = write_dump(engine, planned(positions="last", examples=4), tmp_path)
    assert dump is not None
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
    assert "10 examples" in repr(reference) and len(reference) == reference.manifest.rows
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


def test_a_layer_streams_in_bounded_memory(reference: Dump, tmp_path: Path) -> None:
    """Half a million rows, 128 MB of them, go by; what stays is a few shards' index and one batch."""
    dump = Dump.open(large(reference, tmp_path, 5, with_index=True), check=False)
    seen, most, start = 0, 0, anonymous_memory()
    for x, frame in dump.stream("S", 0, batch_rows=8192):
        assert len(x) == len(frame) <= 8192
        seen, most = seen + len(x), max(most, anonymous_memory())
    assert seen == len(dump) == 5 * ROWS
    assert most - start < 500e6
