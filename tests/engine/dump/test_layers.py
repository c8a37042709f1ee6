"""A layer number is that of the model, even if only some layers are stored: in dumps, runs and probe reports."""

import pytest
import torch

from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import UnknownSite
from replaylens.engine.replay.run import Run
from replaylens.probes import fit_probe
from replaylens.probes.rows import ProbeRows
from replaylens.tasks.task import AnyTask

SOME = {("S", 1): "blocks.1.hook_in", ("S", 2): "blocks.1.hook_out", ("T", 1): "blocks.1.attn.hook_out"}


@pytest.fixture(scope="module")
def run(engine: Engine, coin: AnyTask) -> Run:
    found = engine.replay(coin.examples(12), sites=list(SOME.values()), max_new=4)
    assert isinstance(found, Run)
    return found


@pytest.fixture(scope="module")
def dump(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    return run.save(tmp_path_factory.mktemp("layers") / "d")


def test_a_dump_of_some_layers(dump: Dump) -> None:
    for (letter, layer), name in SOME.items():
        assert dump.resolve(letter, layer) == (name, None)
        assert torch.equal(dump.to_torch(letter, layer), dump.to_torch(name))
    assert dump.resolve("S", -1) == ("blocks.1.hook_out", None)
    for layer in (0, 3, None):
        with pytest.raises(UnknownSite, match=r"S is stored at layers 1, 2\. Choose"):
            dump.to_torch("S", layer)
    with pytest.raises(UnknownSite, match=r"T is stored at layers 1\."):
        dump.matrix("T", 0)


@pytest.mark.parametrize("kind", ["dump", "run"])
def test_probes_of_some_layers(dump: Dump, run: Run, kind: str) -> None:
    """Tables and figures label the layers with these cells."""
    rows = ProbeRows.of(dump if kind == "dump" else run)
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
