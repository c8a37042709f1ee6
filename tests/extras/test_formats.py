"""lmprobe reads what we write and we read what it writes; ProbeBench bundles and Hugging Face datasets go there and back; a
foreign, truncated or pickled file is refused by name, and nothing of it runs."""

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import replaylens as rl
from replaylens.engine.errors import BadDump, BadRequest, DumpWriteFailed
from replaylens.extras.bridges.formats import INDEX, from_lmprobe, from_probebench, to_lmprobe, to_probebench
from replaylens.probes import ProbeRows, fit_probe
from replaylens.probes.errors import BadFile
from tests.test_files import watched

MODEL = "replaylens/coin-plain"
ABOUT = {
    "id": "us/coin",
    "name": "Coin",
    "author": "us",
    "category": "state",
    "modelId": MODEL,
    "license": "MIT",
    "tasks": ["coin"],
}


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> rl.Dump:
    folder = tmp_path_factory.mktemp("formats") / "dump"
    rl.Engine.load("coin-plain").replay(rl.tasks.get("coin")(flips=(1, 3)).examples(12), sites="SC").save(folder)
    return rl.Dump.open(folder)


@pytest.fixture(scope="module")
def written(dump: rl.Dump, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_lmprobe(dump, tmp_path_factory.mktemp("formats") / "lmprobe", model=MODEL, label="face")


class _Trap:
    """Unpickled, it would make a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


# Hugging Face datasets


def test_a_dataset_of_a_dump_has_its_rows(dump: rl.Dump) -> None:
    """Exported and imported, the rows and labels to probe are those of the dump."""
    pytest.importorskip("datasets")
    chosen = dump.where(accepted=True)
    made = chosen.to_dataset([("S", 2)])
    rows = ProbeRows.of_dataset(made, {("S", 2): "blocks.2.hook_in"}, "face", "root", prompt="example", position="position")
    assert np.array_equal(rows.matrix("S", 2), chosen.to_numpy("S", 2))
    assert rows.frame["face"].tolist() == chosen.index["face"].tolist()


# lmprobe


def test_the_dataset_comes_back(dump: rl.Dump, written: Path) -> None:
    """Every row of every layer, in the order of the paths."""
    rows = from_lmprobe(written)
    index = dump.where(accepted=True).index
    texts = index.groupby("example")["text"].agg("".join)
    assert len(rows.frame.groupby("example")) == texts.nunique()
    first = index["example"].isin(texts.drop_duplicates().index).to_numpy()
    for block, site in ((0, "blocks.1.hook_in"), (3, "blocks.3.hook_out")):
        found = rows.matrix(f"blocks.{block}.hook_out")
        assert np.array_equal(found, dump.where(accepted=True).to_numpy(site)[first])
    some = from_lmprobe(written, layers=[2], labels=list(range(texts.nunique())))
    assert np.array_equal(some.matrix("blocks.2.hook_out"), rows.matrix("blocks.2.hook_out"))
    assert some.frame["label"].nunique() == texts.nunique()
    with pytest.raises(BadDump, match="no layer 9"):
        from_lmprobe(written, layers=[9])
    again = to_lmprobe(dump, written.parent / "again", model=MODEL)
    with pytest.raises(BadRequest, match="no labels"):
        from_lmprobe(again)
    with pytest.raises(BadRequest, match="not empty"):
        to_lmprobe(dump, again, model=MODEL)
    with pytest.raises(BadRequest, match="no label"):
        to_lmprobe(dump, written.parent / "third", model=MODEL, label="tail")


def test_a_dataset_appears_whole_or_not_at_all(dump: rl.Dump, written: Path, tmp_path: Path) -> None:
    """The disk refuses each step in turn: nothing is left, neither under the folder's name nor beside it."""
    with watched(lambda step: None) as disk:
        to_lmprobe(dump, tmp_path / "whole", model=MODEL, label="face")
    assert disk.done > 20, "the steps were not counted"
    for bad in (0, 1, 2, disk.done // 2, disk.done - 3, disk.done - 2):

        def refuse(step: int, bad: int = bad) -> None:
            if step == bad:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with watched(refuse), pytest.raises(DumpWriteFailed, match=r"Cannot write .*Make room"):
            to_lmprobe(dump, tmp_path / "part", model=MODEL, label="face")
        assert [path.name for path in tmp_path.iterdir()] == ["whole"], bad
    (tmp_path / "part").mkdir()
    to_lmprobe(dump, tmp_path / "part", model=MODEL, label="face")
    names = sorted(path.relative_to(written) for path in written.rglob("*") if path.is_file())
    for folder in ("whole", "part"):
        assert sorted(path.relative_to(tmp_path / folder) for path in (tmp_path / folder).rglob("*") if path.is_file()) == names
        assert all((tmp_path / folder / name).read_bytes() == (written / name).read_bytes() for name in names)


def test_lmprobe_reads_what_we_write(dump: rl.Dump, written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """lmprobe's own readers, with the hub's download taken from the folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    lmprobe = pytest.importorskip("lmprobe")
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, **_: str(written / name))
    about = lmprobe.fetch_dataset_metadata("us/coin")
    assert (about.model_name, about.available_layers, about.format_version) == (MODEL, [0, 1, 2, 3], "2.0")
    rows = from_lmprobe(written)
    last = rows.frame.groupby("example").tail(1).index.to_numpy()
    acts, labels = lmprobe.load_activations("us/coin", return_labels=True, show_progress=False)
    assert labels.tolist() == rows.frame.loc[last, "label"].tolist()
    for layer in range(4):
        assert np.array_equal(acts[layer], rows.matrix(f"blocks.{layer}.hook_out")[last])


def test_we_read_what_lmprobe_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """lmprobe's own writer, without the upload, in both of its layouts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    pytest.importorskip("lmprobe")
    from lmprobe import cache, sharing

    rng = torch.Generator().manual_seed(0)
    texts = [f"prompt {number}" for number in range(5)]
    raw = {text: torch.randn(1, 2 + number, 16, generator=rng) for number, text in enumerate(texts)}  # two layers of 8
    for text, acts in raw.items():
        cache.save_prompt_activations("us/toy", text, [1, 3], acts, torch.ones(1, acts.shape[1], dtype=torch.long))
        cache.save_prompt_pooled_activations("us/toy", text, [1, 3], acts[:, -1], "mean")
    for kind in ("raw", "pooled"):
        types = {"pooled": {"mean": [1, 3]}, "has_logits": False, "logits_top_k": None}
        types |= {"raw_layers": [1, 3]} if kind == "raw" else {}
        folder, hidden, lines = sharing._consolidate_and_shard(
            "us/toy", texts, list(range(5)), types, [0, 1, 0, 1, 1], 200, "us/toy", tmpdir=tmp_path / kind
        )
        sharing._write_parquet_index(folder, lines, {"format_version": "2.0", "model": {"name": "us/toy"}, "tensors": hidden})
        rows = from_lmprobe(folder)
        order = [line["text"] for line in lines]
        wanted = torch.cat([raw[text][0] if kind == "raw" else raw[text][0, -1:] for text in order])
        for half, block in enumerate((1, 3)):
            found = rows.matrix(f"blocks.{block}.hook_out")
            assert np.array_equal(found, wanted[:, 8 * half : 8 * half + 8])
        assert rows.frame.groupby("example")["label"].first().tolist() == [[0, 1, 0, 1, 1][texts.index(text)] for text in order]


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


SHARD = Path("tensors") / "hidden_layer002_shard000.safetensors"
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no index": lambda folder: (folder / INDEX).unlink(),
    "truncated index": lambda folder: _cut(folder / INDEX),
    "foreign index": lambda folder: (folder / INDEX).write_text("text,label\na,1\n"),
    "truncated shard": lambda folder: _cut(folder / SHARD),
    "missing shard": lambda folder: (folder / SHARD).unlink(),
    "short shard": lambda folder: save_file({"hidden.layer_2": torch.zeros(2, 128)}, folder / SHARD),
    "pickle": lambda folder: (folder / SHARD).write_bytes(pickle.dumps(_Trap(folder / "ran"))),
    "whole numbers": lambda folder: _changed(folder, lambda x: x.long()),
    "NaN": lambda folder: _changed(folder, lambda x: x * torch.nan),
    "beyond float32": lambda folder: _changed(folder, lambda x: x.double() * 1e300),
    "a huge header": lambda folder: (folder / SHARD).write_bytes((1 << 62).to_bytes(8, "little")),
    "a huge width": lambda folder: _indexed(folder, {"dim": 10**15}),
    "a layer twice": lambda folder: _indexed(folder, {"layers": [1, 1]}),
    "a path as layer": lambda folder: _indexed(folder, {"layers": ["../x"]}),
    "a huge count": lambda folder: _indexed(folder, {}, num_tokens=2**31 - 1),
    "a huge count alone": lambda folder: _indexed(folder, {}, num_tokens=2**31 - 1, token_shard_ids=None),
    "a huge shard": lambda folder: _indexed(folder, {}, token_shard_ids=[2**40]),
}


def _changed(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    save_file({name: change(x) for name, x in load_file(folder / SHARD).items()}, folder / SHARD)


def _indexed(folder: Path, hidden: dict[str, Any], **columns: Any) -> None:
    """Change the metadata, and columns to one value; None: without the column."""
    table = pq.read_table(folder / INDEX)
    about = {key.decode(): json.loads(value) for key, value in table.schema.metadata.items()}
    about["lmprobe:tensors"]["hidden_layers"] |= hidden
    lines = table.to_pydict() | {name: [value] * len(table) for name, value in columns.items()}
    made = pa.table({name: lines[name] for name in lines if columns.get(name, 0) is not None})
    pq.write_table(made.replace_schema_metadata({key: json.dumps(value) for key, value in about.items()}), folder / INDEX)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_dataset_is_refused(damage: str, written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(written, folder)
    assert from_lmprobe(folder), "the control"
    DAMAGE[damage](folder)
    with pytest.raises(BadDump, match="Nothing of it was used"):
        from_lmprobe(folder)
    assert not (folder / "ran").exists()


# ProbeBench


def test_a_bundle_has_the_probes_scores(dump: rl.Dump, tmp_path: Path) -> None:
    """Read back, and as the classifier and scaler of scikit-learn that ProbeBench scores with."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    probe = fit_probe(dump, "face", layer=3, position="query", estimator="mass-mean")
    folder = to_probebench(probe, tmp_path / "bundle", ABOUT)
    rows = dump.to_numpy("S", 3)
    again = from_probebench(folder)
    assert (
        np.array_equal(again.scores(rows), probe.scores(rows)) and again.classes == probe.classes and again.site == probe.site
    )
    stored = load_file(folder / "probe.safetensors")
    scaler, classifier = StandardScaler(), LogisticRegression()
    scaler.mean_, scaler.scale_ = stored["scaler.mean"].numpy(), stored["scaler.scale"].numpy()
    classifier.coef_, classifier.intercept_, classifier.classes_ = (
        stored["coef"].numpy(),
        stored["intercept"].numpy(),
        np.arange(2),
    )
    likely = classifier.predict_proba(scaler.transform(rows))[:, 1]
    assert np.allclose(likely, 1 / (1 + np.exp(-probe.scores(rows))), atol=1e-12)


def test_a_scaled_bundle_reads_rows_as_they_are(dump: rl.Dump, tmp_path: Path) -> None:
    """A bundle of another's, with a scaler that does something and no fields of ours."""
    rng = np.random.default_rng(0)
    coef, mean, scale = rng.normal(size=(1, 128)), rng.normal(size=128), rng.uniform(0.5, 2, size=128)
    numbers = {"coef": coef, "intercept": np.array([0.3]), "scaler.mean": mean, "scaler.scale": scale}
    save_file({name: torch.from_numpy(x) for name, x in numbers.items()}, tmp_path / "probe.safetensors")
    about = {name: ABOUT.get(name, "x") for name in ("id", "name", "author", "category", "tasks")} | {
        "modelId": MODEL,
        "layer": 2,
    }
    about |= {"license": "MIT", "artifactSha256": sha256((tmp_path / "probe.safetensors").read_bytes()).hexdigest()}
    (tmp_path / "meta.json").write_text(json.dumps(about))
    rows = dump.to_numpy("S", 2)
    assert np.allclose(from_probebench(tmp_path).scores(rows), ((rows - mean) / scale) @ coef[0] + 0.3)


WRONG: list[tuple[str, Any]] = [
    *(("layer", value) for value in ("3", True, -1, 1.5, 10**30)),
    *(("tasks", value) for value in ("coin", [], [1], None)),
    *(("artifactSha256", value) for value in (None, "Z" * 64)),
    *(("id", value) for value in (3, " ", None)),
    *(("classes", value) for value in ("ab", ["a", "a"], ["a", "b", "c"], [1, 2])),
    ("probeType", "sae"),
    ("auroc", "high"),
    ("paper", 3),
    ("site", 3),
    ("label", None),
]
checked = ("layer", "tasks", "id", "probeType", "auroc", "paper")
"""what the writer takes from its caller"""


def _line(**changes: Any) -> dict[str, Any]:
    good = {"coef": torch.ones(1, 4), "intercept": torch.ones(1), "scaler.mean": torch.zeros(4), "scaler.scale": torch.ones(4)}
    return good | {name.replace("_", "."): value for name, value in changes.items()}


LINES: dict[str, dict[str, Any]] = {
    "whole numbers": _line(coef=torch.ones(1, 4, dtype=torch.int64)),
    "complex numbers": _line(coef=torch.ones(1, 4, dtype=torch.complex64)),
    "two lines": _line(coef=torch.ones(2, 4)),
    "no numbers": _line(coef=torch.ones(1, 0), scaler_mean=torch.ones(0), scaler_scale=torch.ones(0)),
    "another width": _line(scaler_mean=torch.ones(3)),
    "a scale of 0": _line(scaler_scale=torch.tensor([1.0, 0, 1, 1])),
    "NaN": _line(coef=torch.tensor([[1.0, float("nan"), 1, 1]])),
}


@pytest.mark.parametrize("lines", LINES)
def test_a_bundle_of_other_tensors_is_refused(lines: str, tmp_path: Path) -> None:
    def written(tensors: dict[str, Any]) -> Path:
        save_file(tensors, tmp_path / "probe.safetensors")
        own = {"layer": 2, "artifactSha256": sha256((tmp_path / "probe.safetensors").read_bytes()).hexdigest()}
        (tmp_path / "meta.json").write_text(json.dumps(ABOUT | own))
        return tmp_path

    assert from_probebench(written(_line())).weight.tolist() == [[1.0] * 4], "the control"
    with pytest.raises(BadFile):
        from_probebench(written(LINES[lines]))


def test_a_bad_bundle_is_refused(dump: rl.Dump, tmp_path: Path) -> None:
    """No bundle, a changed weight, a missing field, a pickle; nothing runs. Probes that do not fit are not written."""
    probe = fit_probe(dump, "face", layer=3, position="query", estimator="mass-mean")
    for name, damage in {
        "empty": lambda folder: (folder / "meta.json").unlink(),
        "cut": lambda folder: _cut(folder / "probe.safetensors"),
        "changed": lambda folder: save_file({"coef": torch.zeros(1, 128)}, folder / "probe.safetensors"),
        "field": lambda folder: (folder / "meta.json").write_text("{}"),
        "pickle": lambda folder: (folder / "probe.safetensors").rename(folder / "probe.joblib"),
        "trap": lambda folder: (folder / "probe.safetensors").write_bytes(pickle.dumps(_Trap(tmp_path / "ran"))),
    }.items():
        folder = to_probebench(probe, tmp_path / name, ABOUT)
        damage(folder)
        with pytest.raises(BadFile):
            from_probebench(folder)
    assert not (tmp_path / "ran").exists()
    for name, value in WRONG:
        folder = to_probebench(probe, tmp_path / "wrong", ABOUT)
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | {name: value}))
        with pytest.raises(BadFile, match=name):
            from_probebench(folder)
        if name in checked:
            with pytest.raises(BadRequest, match=name):
                to_probebench(probe, tmp_path / "never", ABOUT | {name: value})
    assert not (tmp_path / "never").exists()
    with pytest.raises(BadRequest, match="Invalid `about`"):
        to_probebench(probe, tmp_path / "never", ABOUT | {"more": object()})
    other = fit_probe(dump, "face", site="blocks.1.mlp.hook_out", position="query", estimator="mass-mean")
    with pytest.raises(BadRequest, match="belong to a layer"):
        to_probebench(other, tmp_path / "other", ABOUT)
    with pytest.raises(BadRequest, match="requires category"):
        to_probebench(probe, tmp_path / "other", {name: value for name, value in ABOUT.items() if name != "category"})
