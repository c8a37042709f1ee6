"""Causal tests: what the model uses moves its answer, what it does not use does not; saved probes; DAS."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from replaylens import tasks
from replaylens.engine.dump import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, EngineError, OtherFingerprint
from replaylens.probes.causal import ablate, interchange, steer
from replaylens.probes.errors import BadPosition, BadProbeFile, MissingLabel, NotLinear, ProbeError
from replaylens.probes.probe import LinearProbe, fit_probe, placebo_probes
from replaylens.probes.questions.forced import forced_rows
from replaylens.probes.report import Report
from replaylens.probes.stage import Stage, Subject
from replaylens.tasks import Example
from tests.toy_model import engine as toy_engine

N = 24


@pytest.fixture(scope="module")
def fresh(coin_dump: Dump) -> list[Example]:
    """Prompts that no probe was fitted on."""
    seen = set(coin_dump.index["root"])
    task = tasks.get("coin")(flips=(2, 5))
    return [e for e in task.examples(range(80, 400)) if e.root not in seen][:N]


@pytest.fixture(scope="module")
def probe(coin_dump: Dump) -> LinearProbe:
    return fit_probe(coin_dump, "face", layer=3, position="query", estimator="mass-mean")


def line(report: Report, what: str) -> dict[str, float]:
    return next(each for each in report.lines if each["what"] == what)


def test_steering_flips_the_answer(engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh: list[Example]) -> None:
    """Along the mass-mean direction the answer follows; along random ones of the same length it does not."""
    report = steer(engine, probe, fresh, untrained=placebo_probes(coin_dump, probe), placebos=3)
    assert line(report, "steer: probe")["accuracy"] > 0.9
    assert line(report, "steer: random direction")["accuracy"] < 0.1
    assert line(report, "steer: probe minus random direction")["low"] > 0.8
    assert line(report, "steer: probe minus untrained probe")["low"] > 0
    assert json.dumps(report.to_json()) == json.dumps(
        steer(engine, probe, fresh, untrained=placebo_probes(coin_dump, probe), placebos=3).to_json()
    ), "the same report twice"


def test_no_step_no_effect(engine: Engine, probe: LinearProbe, fresh: list[Example]) -> None:
    """Negative control: of length zero, every direction leaves every answer and every margin exactly as they were."""
    report = steer(engine, probe, fresh, factor=0.0, placebos=1)
    assert all(each["accuracy"] == 0 and each["nats"] == 0 for each in report.lines)


def test_steering_back_is_no_flip(engine: Engine, probe: LinearProbe, fresh: list[Example]) -> None:
    """Away from the other class the answer only grows surer: the sign of a direction counts."""
    report = steer(engine, probe, fresh, factor=-1.0, placebos=1)
    assert line(report, "steer: probe")["accuracy"] == 0


def test_ablation_and_refit(engine: Engine, probe: LinearProbe, fresh: list[Example]) -> None:
    report = ablate(engine, probe, fresh, placebos=2)
    before, after = line(report, "refit: site, before"), line(report, "refit: site, after")
    assert before["accuracy"] > 0.9 and after["accuracy"] < before["accuracy"]
    assert line(report, "ablate: probe")["nats"] > line(report, "ablate: random direction")["nats"] + 1
    assert any("refit at the last layer, after" in said for said in report.findings)


def test_interchange(engine: Engine, probe: LinearProbe, fresh: list[Example]) -> None:
    """The component along the direction carries the answer; a whole row carries it for sure."""
    report = interchange(engine, probe, fresh, placebos=2)
    assert line(report, "interchange: whole row")["accuracy"] > 0.9
    assert line(report, "interchange: probe")["accuracy"] > 0.8
    assert line(report, "interchange: random direction")["accuracy"] < 0.2
    assert report.notes == ["untrained probe: none was given"]


def test_stage_reads_the_model_itself(engine: Engine, fresh: list[Example]) -> None:
    """Without a change the answers are the model's own, and rows are those of a replay; the engine is left clean."""
    stage = Stage(engine, fresh[:4], "blocks.2.hook_in", "face", "step")
    words = fresh[0].maker.answers()
    for subject in stage.subjects:
        assert words[subject.answer] == subject.example.answer, "coin-plain answers short prompts rightly"
        assert len(subject.positions) == len(subject.example.events) == len(subject.classes)
        branch = engine.prompt(subject.tokens, sites=["blocks.2.hook_in"])
        assert torch.equal(branch.activations["blocks.2.hook_in"][subject.positions], subject.rows)
        branch.release()
    (outcome,) = stage.play([lambda subject: np.zeros(subject.rows.shape)])
    assert not outcome.flipped.any() and (outcome.pull == 0).all()
    lanes = len(engine.loop.lanes)
    stage.play([lambda subject: np.ones(subject.rows.shape)] * 2)
    assert len(engine.loop.lanes) == lanes


def test_what_fails_leaves_nothing_behind(engine: Engine, probe: LinearProbe, fresh: list[Example]) -> None:
    """Refused edits, labels and continuations: no branch stays, no page stays taken."""
    before = len(engine.loop.lanes), engine.runner.pool.num_free
    with pytest.raises(BadEdit):
        steer(engine, probe, fresh[:4], factor=1e39, placebos=1)
    with pytest.raises(MissingLabel):
        Stage(engine, fresh[:4], "blocks.2.hook_in", "nose")
    with pytest.raises(EngineError):
        forced_rows(engine, fresh[:4], [" heads."] * 3 + [" heads" * 4000])
    stage = Stage(engine, fresh[:4], "blocks.2.hook_in", "face")
    with pytest.raises(ValueError, match="second"):
        stage.play([lambda subject: np.zeros(subject.rows.shape), _refuse])
    assert (len(engine.loop.lanes), engine.runner.pool.num_free) == before


def _refuse(subject: Subject) -> np.ndarray:
    raise ValueError("second")


def test_saved_probe(probe: LinearProbe, coin_dump: Dump, tmp_path: Path) -> None:
    """It comes back with the same bits and the dump's digest, and without executing anything; damage is refused."""
    path = probe.save(tmp_path / "face")
    loaded = LinearProbe.load(path)
    assert np.array_equal(loaded.weight, probe.weight) and loaded.classes == probe.classes and loaded.cell == probe.cell
    assert loaded.source["digest"] == coin_dump.digest and loaded.site == "blocks.3.hook_in"
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    about = json.loads(path.with_suffix(".json").read_text())
    for change in ({"schema": 99}, {"classes": ["a", "b", "c"]}, {"cell": 3}):
        path.with_suffix(".json").write_text(json.dumps(about | change))
        with pytest.raises(BadProbeFile):
            LinearProbe.load(path)
    path.with_suffix(".safetensors").write_bytes(b"nonsense")
    with pytest.raises(BadProbeFile):
        LinearProbe.load(path)
    with pytest.raises(BadProbeFile):
        LinearProbe.load(tmp_path / "nothing")


def test_what_cannot_be_tested(engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh: list[Example]) -> None:
    with pytest.raises(NotLinear, match="mlp has no direction"):
        fit_probe(coin_dump, "face", layer=2, estimator="mlp")
    with pytest.raises(OtherFingerprint):
        steer(toy_engine(), probe, fresh)
    with pytest.raises(ProbeError, match="placebo"):
        steer(engine, probe, fresh, placebos=0)
    with pytest.raises(ProbeError, match="no examples"):
        steer(engine, probe, [])
    with pytest.raises(BadPosition):
        steer(engine, probe, fresh, position="step:9")
    with pytest.raises(ProbeError, match="no class 'edge'"):
        probe.direction("heads", "edge")


def test_three_classes_have_directions() -> None:
    """From one class to another: the difference of their lines; predictions are the highest score."""
    weight = np.eye(3)
    rest = dict(label="x", site="s", cell=None, position="all", estimator="ridge", source={})
    probe = LinearProbe(weight, np.zeros(3), weight, ("a", "b", "c"), **rest)  # type: ignore[arg-type]
    assert np.allclose(probe.direction("a", "c"), np.array([-1, 0, 1]) / np.sqrt(2))
    assert probe.predict(np.array([[0, 5.0, 1]])).tolist() == ["b"] and probe.basis.shape == (2, 3)


@pytest.mark.slow  # importing TransformerLens takes ten seconds
def test_direction_found_by_transformer_lens(engine: Engine) -> None:
    """DAS on a bridge of the same weights gives a direction whose exchange flips our engine's answers."""
    from benchmarks.dump import bridge, hugging_face
    from replaylens.probes.das import find_direction

    task = tasks.get("coin")(flips=3, p=1.0)
    examples = task.examples(64)
    found = find_direction(engine, bridge(hugging_face(engine.model)), examples, "face", layer=3, epochs=15)
    report = interchange(engine, found, task.examples(range(64, 84)), placebos=2)
    assert line(report, "interchange: probe")["accuracy"] > 0.8
    assert line(report, "interchange: random direction")["accuracy"] < 0.2
