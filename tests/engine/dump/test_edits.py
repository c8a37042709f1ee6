"""Dumps of edited runs: the plan holds the interventions, so these dumps resume, verify and diff like any other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replaylens.engine.dump.maker import write_dump
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import VERIFIED, diff, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.replay.run import Run
from replaylens.engine.request.edits import Edit
from replaylens.tasks import WordTokenizer
from replaylens.tasks.task import AnyTask
from tests.engine.dump.conftest import EXAMPLES, NEW, PER_SHARD

Planned = Callable[..., DumpPlan]


@pytest.fixture(scope="module")
def edits(engine: Engine) -> list[Edit]:
    torch.manual_seed(4)
    width = engine.config.d_model
    return [
        Edit("S", "add", torch.randn(width), positions=slice(-3, None), layers=[1], factor=2.0),
        Edit("blocks.0.mlp.hook_out", "project_out", torch.randn(2, width), positions=[2, 4]),
        Edit("blocks.1.attn.hook_out", "zero", positions=-1),
    ]


@pytest.fixture(scope="module")
def edited(engine: Engine, planned: Planned, edits: list[Edit], tmp_path_factory: pytest.TempPathFactory) -> Dump:
    dump = write_dump(engine, planned(edits=edits), tmp_path_factory.mktemp("edited") / "d", batch=3)
    assert dump is not None
    return dump


def test_edits_change_the_dump_and_its_plan_says_so(edited: Dump, reference: Dump) -> None:
    assert edited.accepted_digest != reference.accepted_digest
    remarks = diff(edited, reference).remarks
    assert any("other interventions" in line for line in remarks)


@pytest.mark.parametrize("batch", [1, 64])
def test_batch_changes_nothing(
    engine: Engine, planned: Planned, edits: list[Edit], edited: Dump, tmp_path: Path, batch: int
) -> None:
    again = write_dump(engine, planned(edits=edits), tmp_path / "d", batch=batch)
    assert again is not None and again.digest == edited.digest


def test_it_is_verified_from_its_own_plan(engine: Engine, edited: Dump) -> None:
    opened = Dump.open(edited.url)
    assert opened.manifest.plan == edited.manifest.plan and len(opened.manifest.plan.edits) == 3
    assert verify(edited.url, engine, sample="all").status == VERIFIED


def test_rejected_paths_are_recomputed_under_the_edits(
    engine: Engine, model: Decoder, tokenizer: WordTokenizer, planned: Planned, edits: list[Edit], tmp_path: Path
) -> None:
    """A verifier without that drafter takes rejected paths from the dump. Edits before the end of the prompt affect them."""
    dump = write_dump(engine, planned(edits=edits, drafter="model", window=5, examples=4), tmp_path)
    assert dump is not None and dump.manifest.accepted_rows < dump.manifest.rows, "the test needs rejected rows"
    verdict = verify(tmp_path, Engine(model, tokenizer), sample="all")
    assert verdict and verdict.rows == dump.manifest.rows and not verdict.notes, verdict


def test_a_saved_run_is_the_same_dump(engine: Engine, coin: AnyTask, edits: list[Edit], edited: Dump, tmp_path: Path) -> None:
    run = engine.replay(coin.examples(EXAMPLES), sites="STCZ", drafter="lens", max_new=NEW, edits=edits)
    assert isinstance(run, Run)
    assert run.save(tmp_path / "d", examples_per_shard=PER_SHARD).digest == edited.digest


def test_an_edited_run_without_the_last_stream_cannot_be_saved(
    engine: Engine, coin: AnyTask, edits: list[Edit], tmp_path: Path
) -> None:
    run = engine.replay(coin.examples(2), sites="T", drafter="lens", max_new=NEW, edits=edits)
    assert isinstance(run, Run)
    with pytest.raises(BadRequest, match="Capture S, too"):
        run.save(tmp_path / "d")


def test_edits_survive_json(edits: list[Edit]) -> None:
    for edit in edits:
        back = Edit.from_json(edit.to_json())
        assert back.to_json() == edit.to_json()
        assert (back.value is None) == (edit.value is None)
        assert edit.value is None or torch.equal(back.value, edit.value)
    with pytest.raises(BadEdit, match="Not an edit"):
        Edit.from_json({"site": "S"})
