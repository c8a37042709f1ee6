"""Sparse features in dumps: stored as the strongest of each row, covered by the digest, replayed by verify."""

import builtins
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.dumps.maker import ShardMaker
from replaylens.dumps.plan import DumpPlan, StoredFeatures, to_rows, to_tensors
from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import MISMATCH, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadDump, BadRequest, MissingPackage, UnknownSite
from replaylens.engine.request.edits import Edit
from replaylens.features.features import SparseFeatures
from replaylens.features.rows import FeatureRows
from replaylens.probes import fit_probe
from replaylens.probes.rows import ProbeRows, with_features
from replaylens.replay.run import Run
from replaylens.tasks.task import AnyTask
from tests.dumps.conftest import written
from tests.dumps.damage import edit_manifest, forge_digests, forge_shard
from tests.features.tiny import COUNT, HOOK, write

Planned = Callable[..., DumpPlan]
INDICES, VALUES, COUNTS = (f"features.sae.{part}" for part in ("indices", "values", "counts"))


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> SparseFeatures:
    return SparseFeatures.load(write(tmp_path_factory.mktemp("sae"), "standard"))


@pytest.fixture(scope="module")
def dump(engine: Engine, planned: Planned, sae: SparseFeatures, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """All features of every row, beside the stream that they are read from."""
    made = written(engine, planned(sites="S", features={"sae": sae}, keep=COUNT), tmp_path_factory.mktemp("d") / "d")
    return made


def test_a_dump_holds_the_features_of_its_rows(dump: Dump, sae: SparseFeatures) -> None:
    """The features that encoding the stored stream gives, also under `where`. Control: another stream has others."""
    expected, found = sae.encode(dump.to_torch("S", 1)), dump.features("sae")
    for name in ("offsets", "indices", "values"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert found.width == COUNT and torch.equal(dump.to_torch(COUNTS), expected.counts.to(torch.int32))
    accepted = dump.where(accepted=True)
    assert torch.equal(accepted.features("sae").dense(), sae.encode(accepted.to_torch("S", 1)).dense())
    assert not torch.equal(sae.encode(dump.to_torch("S", 0)).dense(), expected.dense())
    with pytest.raises(BadRequest, match="Unknown features 'other'"):
        dump.features("other")


def test_the_strongest_are_kept(engine: Engine, planned: Planned, sae: SparseFeatures, dump: Dump, tmp_path: Path) -> None:
    """In ascending order, with the number that were active. Without any site the dump holds features alone."""
    few = written(engine, planned(sites="", features={"sae": sae}, keep=3), tmp_path / "few")
    assert list(few.sites) == [INDICES, VALUES, COUNTS]
    every, kept = dump.features("sae").dense(), few.features("sae").dense()
    assert torch.equal(few.to_torch(COUNTS), dump.to_torch(COUNTS)) and int(few.to_torch(COUNTS).max()) > 3
    assert torch.equal(kept.topk(3).values, every.topk(3).values) and int((kept > 0).sum(1).max()) == 3
    indices = few.to_torch(INDICES)
    there = indices >= 0
    assert bool((indices.diff()[there[:, 1:]] > 0).all()) and bool((few.to_torch(VALUES)[~there] == 0).all())
    assert verify(few.url, engine, sample="all", features={"sae": sae})


def test_ties_and_empty_rows() -> None:
    stored = StoredFeatures("sae", "x", "0" * 64, 9, 2)
    found = FeatureRows.of_dense([torch.tensor([[0, 2, 2, 2, 5.0, 0, 0, 0, 0], [0] * 9, [0, 0, 0, 0, 0, 0, 0, 1, 0]])], 9)
    made = to_tensors(stored, found)
    assert made[INDICES].tolist() == [[1, 4], [-1, -1], [7, -1]] and made[COUNTS].tolist() == [4, 0, 1]
    assert to_rows(stored, made[INDICES], made[VALUES]).dense()[0].tolist() == [0, 2, 0, 0, 5, 0, 0, 0, 0]
    none = to_tensors(stored, FeatureRows.of_dense([], 9))
    assert [list(x.shape) for x in none.values()] == [[0, 2], [0, 2], [0]]


def test_verify_replays_features(engine: Engine, dump: Dump, sae: SparseFeatures, tmp_path: Path) -> None:
    """It needs their weights, and no others. Control: one changed activation is found."""
    assert verify(dump.url, engine, sample="all", features={"sae": sae})
    with pytest.raises(BadRequest, match="Pass them: features="):
        verify(dump.url, engine)
    other = SparseFeatures.load(write(tmp_path / "other", "topk"))
    with pytest.raises(BadRequest, match=r"but \w+ in the plan"):
        verify(dump.url, engine, features={"sae": other})


def test_a_changed_activation_is_a_mismatch(engine: Engine, planned: Planned, sae: SparseFeatures, tmp_path: Path) -> None:
    made = written(engine, planned(sites="", features={"sae": sae}), tmp_path / "d")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[VALUES][1, 0] *= 2

    forge_shard(Path(made.url), 0, change)
    forge_digests(Path(made.url))  # so that only the replay can find it
    found = verify(made.url, engine, sample="all", features={"sae": sae})
    assert found.status == MISMATCH and found.difference is not None and VALUES in str(found.difference)


def test_the_digest_covers_features(engine: Engine, planned: Planned, sae: SparseFeatures, dump: Dump) -> None:
    """Plans without features keep their digests and their files."""
    plan = planned(sites="S", features={"sae": sae}, keep=COUNT)
    with_them = ShardMaker(engine, plan).make(0)
    without = ShardMaker(engine, planned(sites="S")).make(0)
    assert with_them.digests() != without.digests()
    stripped = replace(with_them, tensors={name: x for name, x in with_them.tensors.items() if name in without.tensors})
    assert stripped.digests() == without.digests()
    assert "features" not in planned().to_json() and "encoders" not in plan.to_json()
    again = DumpPlan.from_json(plan.to_json())
    assert again == plan and plan.differences(again) == [] and "features: " in plan.differences(planned(sites="S"))[0]


def test_a_run_saves_the_same(engine: Engine, coin: AnyTask, sae: SparseFeatures, tmp_path: Path) -> None:
    """From its own site, or from the stream entering the next block, unless that is edited."""
    examples = coin.examples(4)
    saved = {}
    for sites in ("S", [HOOK]):
        run = engine.replay(examples, sites=sites, max_new=3)
        saved[str(sites)] = run.save(tmp_path / str(len(saved)), features={"sae": sae}).features("sae")
    first, second = saved.values()
    assert torch.equal(first.dense(), second.dense()) and len(first) > 0
    with pytest.raises(UnknownSite, match="was not captured"):
        engine.replay(examples, sites="T", max_new=1).save(tmp_path / "t", features={"sae": sae})
    edited = engine.replay(examples, sites="S", max_new=1, edits=[Edit("blocks.1.hook_in", "zero")])
    with pytest.raises(UnknownSite, match="was not captured"):
        edited.save(tmp_path / "e", features={"sae": sae})


def test_stored_features_are_columns_of_probes(dump: Dump, sae: SparseFeatures) -> None:
    rows = ProbeRows.of(dump)
    stored, encoded = with_features(rows, "sae", [7, 3]), with_features(rows, sae, [7, 3])
    assert np.array_equal(stored.matrix("features"), encoded.matrix("features")) and stored.matrix("features").any()
    with pytest.raises(BadRequest, match="Unknown features 'none'"):
        with_features(rows, "none")
    with pytest.raises(BadRequest, match="columns"):
        with_features(rows, "sae", [COUNT])


def test_a_damaged_manifest_is_refused(engine: Engine, planned: Planned, sae: SparseFeatures, tmp_path: Path) -> None:
    made = written(engine, planned(sites="", features={"sae": sae}, keep=4), tmp_path / "d")
    edit_manifest(Path(made.url), lambda raw: raw["plan"]["features"][0].update(keep=5))
    with pytest.raises(BadDump, match="not stored as planned"):
        Dump.open(made.url)


@pytest.mark.parametrize("features, match", [([], "give a dict"), ({"a b": None}, "SparseFeatures.load"), ({"x": 3}, "x")])
def test_bad_features(planned: Planned, features: object, match: str) -> None:
    with pytest.raises(BadRequest, match=match):
        planned(features=features)


def test_bad_names_and_sizes(planned: Planned, sae: SparseFeatures) -> None:
    with pytest.raises(BadRequest, match="Invalid name"):
        planned(features={"a b": sae})
    with pytest.raises(BadRequest, match="keep"):
        planned(features={"sae": sae}, keep=0)
    with pytest.raises(BadRequest, match="stores nothing"):
        planned(sites="")


def test_from_the_shell(sae: SparseFeatures, model_folder: Path, tmp_path: Path) -> None:
    """`dump` and `verify` take the folder of the features; without it, verify says what to pass."""
    folder, out = write(tmp_path / "sae", "standard"), tmp_path / "d"
    runner, given = CliRunner(), ["--features", f"sae={folder}"]
    made = runner.invoke(
        app,
        ["dump", "--model", str(model_folder), "--n", "3", "--sites", "S", "--out", str(out), "--quiet", "--keep", "4", *given],
    )
    assert made.exit_code == 0, made.output
    assert Dump.open(out).manifest.plan.features[0].keep == 4
    command = ["verify", str(out), "--model", str(model_folder), "--all", "--quiet"]
    assert runner.invoke(app, [*command, *given]).exit_code == 0
    refused = runner.invoke(app, command)
    assert refused.exit_code == 2 and "Pass them" in refused.output
    assert runner.invoke(app, [*command, "--features", "sae"]).exit_code == 2
    page = ["report", str(out), "--model", str(model_folder), "--out", str(tmp_path / "page.html"), "--verify", "1", "--quiet"]
    assert runner.invoke(app, [*page, *given]).exit_code == 0 and "verified" in (tmp_path / "page.html").read_text()
    assert runner.invoke(app, page).exit_code == 2, "a page does not call verified what could not be computed again"


def test_a_feature_number_out_of_range(dump: Dump, tmp_path: Path) -> None:
    """Forged with every digest corrected: a named error, before any of it is used. Control: the last feature is fine."""
    folder = tmp_path / "forged"
    shutil.copytree(dump.url, folder)
    for number, fine in ((COUNT - 1, True), (COUNT, False), (-2, False)):

        def forge(tensors: dict[str, torch.Tensor], number: int = number) -> None:
            tensors[INDICES][0, -1] = number

        forge_shard(folder, 0, forge)
        forge_digests(folder)
        if fine:
            Dump.open(folder).features("sae").dense()
            continue
        with pytest.raises(BadDump, match=rf"'sae'.* {number}.*{COUNT} features"):
            Dump.open(folder).features("sae")


# ---- export ----------------------------------------------------------------------------------------------------------
# A dump as a Hugging Face dataset: the same rows and index; the package is optional.

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
    dump = written(engine, planned(stored_dtype="bfloat16", examples=4), tmp_path)
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


# ---- layers ----------------------------------------------------------------------------------------------------------
# A layer number is that of the model, even if only some layers are stored: in dumps, runs and probe reports.

SOME = {("S", 1): "blocks.1.hook_in", ("S", 2): "blocks.1.hook_out", ("T", 1): "blocks.1.attn.hook_out"}


@pytest.fixture(scope="module")
def run(engine: Engine, coin: AnyTask) -> Run:
    found = engine.replay(coin.examples(12), sites=list(SOME.values()), max_new=4)
    assert isinstance(found, Run)
    return found


@pytest.fixture(scope="module")
def dump_of_layers(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    return run.save(tmp_path_factory.mktemp("layers") / "d")


def test_a_dump_of_some_layers(dump_of_layers: Dump) -> None:
    for (letter, layer), name in SOME.items():
        assert dump_of_layers.resolve(letter, layer) == (name, None)
        assert torch.equal(dump_of_layers.to_torch(letter, layer), dump_of_layers.to_torch(name))
    assert dump_of_layers.resolve("S", -1) == ("blocks.1.hook_out", None)
    for layer in (0, 3, None):
        with pytest.raises(UnknownSite, match=r"S is stored at layers 1, 2\. Choose"):
            dump_of_layers.to_torch("S", layer)
    with pytest.raises(UnknownSite, match=r"T is stored at layers 1\."):
        dump_of_layers.matrix("T", 0)


@pytest.mark.parametrize("kind", ["dump", "run"])
def test_probes_of_some_layers(dump_of_layers: Dump, run: Run, kind: str) -> None:
    """Tables and figures label the layers with these cells."""
    rows = ProbeRows.of(dump_of_layers if kind == "dump" else run)
    assert [str(cell) for cell in rows.cells("ST")] == ["S1", "S2", "T1"]
    assert [str(cell) for cell in rows.cells("ST", layers=[2])] == ["S2"]
    for (letter, layer), name in SOME.items():
        assert (rows.matrix(letter, layer) == rows.matrix(name)).all()
        assert fit_probe(rows, "parity", site=letter, layer=layer, estimator="ridge").site == name
    with pytest.raises(UnknownSite, match=r"T is stored at layers 1\. Choose one of them, not 0"):
        rows.matrix("T", 0)
    with pytest.raises(UnknownSite, match=r"No layer 0\. S is stored at layers 1, 2; T is stored at layers 1\."):
        rows.cells("ST", layers=[0, 1])


def test_all_layers_are_numbered_as_ever(reference: Dump) -> None:
    for letter in "STC":
        assert list(reference.manifest.layers(letter).items()) == list(enumerate(reference.manifest.letter(letter)))
