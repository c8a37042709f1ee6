"""Causal tests: only directions that the model uses move its answer. Also saved probes and DAS."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta

from replaylens import tasks
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, EngineError, FingerprintMismatch, UnknownSite
from replaylens.probes import causal
from replaylens.probes.causal import Effect, InterventionRunner, Subject, Variant, _probe, ablate, interchange, steer
from replaylens.probes.errors import BadFile, BadPosition, BadRows, MissingLabel, ProbeError
from replaylens.probes.probe import LinearProbe, TokenScores, fit_probe, placebo_probes
from replaylens.probes.questions.forced import forced_rows
from replaylens.probes.report import Report
from replaylens.probes.rows import Cell
from replaylens.tasks import Example
from tests.toy_model import engine as toy_engine

N = 24


@pytest.fixture(scope="module")
def fresh(coin_dump: Dump) -> list[Example]:
    """Prompts on which no probe was fitted."""
    seen = set(coin_dump.index["root"])
    task = tasks.get("coin")(flips=(2, 5))
    return [e for e in task.examples(range(80, 400)) if e.root not in seen][:N]


@pytest.fixture(scope="module")
def probe(coin_dump: Dump) -> LinearProbe:
    return fit_probe(coin_dump, "face", layer=3, position="query", estimator="mass-mean")


def line(report: Report, what: str) -> dict[str, float]:
    return next(each for each in report.lines if each["what"] == what)


@pytest.mark.slow
def test_steering_flips_the_answer(engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh: list[Example]) -> None:
    """Steering along the mass-mean direction flips the answer. Random directions of the same length do not."""
    report = steer(engine, probe, fresh, untrained=placebo_probes(coin_dump, probe, 16))
    assert line(report, "steer: probe")["accuracy"] > 0.9
    assert line(report, "steer: random direction")["accuracy"] < 0.1
    placebo = 0.025 ** (1 / 8)  # eight random directions without a flip leave room for a population in which some flip
    probe_low = beta.ppf(0.025, N + 0.5, 0.5)  # Jeffreys' interval of N prompts that all flip
    assert line(report, "steer: probe minus random direction")["low"] == pytest.approx(probe_low - (1 - placebo))
    assert line(report, "steer: probe minus untrained probe")["low"] > 0


def test_the_same_report_twice(engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh: list[Example]) -> None:
    one, other = (
        json.dumps(steer(engine, probe, fresh[:8], untrained=placebo_probes(coin_dump, probe, 2), placebos=2).to_json())
        for _ in range(2)
    )
    assert one == other


@pytest.mark.slow
def test_intervals_know_that_placebos_are_a_sample(
    engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh: list[Example]
) -> None:
    """An untrained probe flips all prompts or none: few of them give no verdict, and no interval has width zero."""
    few = [-1, 1, 1, 1]  # three placebos equal to the probe, one with its sign reversed
    untrained = [replace(probe, weight=sign * probe.weight) for sign in few]
    report = steer(engine, probe, fresh, untrained=untrained, placebos=2)
    difference = line(report, "steer: probe minus untrained probe")
    assert difference["accuracy"] == 0.25 and difference["low"] <= 0 and difference["high"] > 0.5
    assert any(said.startswith("Not shown") and "untrained" in said for said in report.findings)
    assert all(each["low"] < each["high"] and each["nats_low"] < each["nats_high"] for each in report.lines)
    one = steer(engine, probe, fresh, untrained=untrained[:1], placebos=1)
    assert [note for note in one.notes if "only one" in note] == [
        f"Skipped the spread between placebos: only one {name} was given." for name in ("random direction", "untrained probe")
    ]


def test_prompts_that_the_probe_knows(engine: Engine, probe: LinearProbe, fresh: list[Example], tmp_path: Path) -> None:
    """A note counts the prompts that are not held out, also for a loaded probe. For older files it says that it cannot know."""
    known = tasks.get("coin")(flips=(2, 5)).examples(3)
    loaded = LinearProbe.load(probe.save(tmp_path / "face"))
    for each in (probe, loaded):
        (note,) = [n for n in steer(engine, each, [*known, *fresh[:4]], placebos=2).notes if "held out" in n]
        assert note == "3 of 7 prompts are not held out: the probe was fitted on them."
        assert not [n for n in steer(engine, each, fresh[:4], placebos=2).notes if "held out" in n]
    (note,) = [n for n in steer(engine, replace(probe, roots=()), fresh[:4], placebos=2).notes if "held out" in n]
    assert "does not record" in note


def test_a_probe_is_one_line(probe: LinearProbe) -> None:
    shown = repr(probe)
    assert len(shown) < 160 and "face at S3 (blocks.3.hook_in), query: heads, tails; mass-mean" in shown


@pytest.mark.parametrize("kept", ["dump", "run"])
def test_layers_that_are_not_there(engine: Engine, coin_dump: Dump, kept: str) -> None:
    """The message lists the available layers. No command accepts negative layers."""
    given = coin_dump if kept == "dump" else engine.replay(tasks.get("coin")(flips=(2, 5)).examples(12), sites="SZ")
    for layer, message in ((99, "No layer 99. S"), (-1, "No layer -1. S"), (None, "needs a layer")):
        with pytest.raises(UnknownSite, match=f"{message}.*0, 1, 2, 3, 4"):
            fit_probe(given, "face", layer=layer)
    with pytest.raises(UnknownSite, match="layers 0 to 4"):
        fit_probe(given, "face", site="Z.entropy", layer=99)
    with pytest.raises(UnknownSite, match="letter to choose"):
        fit_probe(given, "face", site="blocks.2.hook_in", layer=1)
    with pytest.raises(UnknownSite, match="T was not captured"):
        fit_probe(given, "face", site="T", layer=0)


def test_no_step_no_effect(engine: Engine, probe: LinearProbe, fresh: list[Example]) -> None:
    """Negative control: steps of length zero leave every answer and every margin exactly unchanged."""
    report = steer(engine, probe, fresh, factor=0.0, placebos=1)
    assert all(each["accuracy"] == 0 and each["nats"] == 0 for each in report.lines)


def test_steering_back_is_no_flip(engine: Engine, probe: LinearProbe, fresh: list[Example]) -> None:
    """Steering away from the other class makes the answer more certain: the sign of a direction matters."""
    report = steer(engine, probe, fresh, factor=-1.0, placebos=1)
    assert line(report, "steer: probe")["accuracy"] == 0


@pytest.mark.slow
def test_ablation_and_refit(engine: Engine, probe: LinearProbe, fresh: list[Example]) -> None:
    report = ablate(engine, probe, fresh, placebos=2)
    before, after = line(report, "refit: site, before"), line(report, "refit: site, after")
    assert before["accuracy"] > 0.9 and after["accuracy"] < before["accuracy"]
    assert line(report, "ablate: probe")["nats"] > line(report, "ablate: random direction")["nats"] + 1
    assert any("refit at the last layer, after" in said for said in report.findings)


def test_interchange(engine: Engine, probe: LinearProbe, fresh: list[Example]) -> None:
    """Exchanging the component along the direction changes the answer; exchanging the whole row always does."""
    report = interchange(engine, probe, fresh, placebos=2)
    assert line(report, "interchange: whole row")["accuracy"] > 0.9
    assert line(report, "interchange: probe")["accuracy"] > 0.8
    assert line(report, "interchange: random direction")["accuracy"] < 0.2
    assert report.notes == ["Skipped the comparison with untrained probes: none was given."]


def test_prompts_are_one_group_if_they_are_alike_up_to_the_changed_row(engine: Engine) -> None:
    """The changed row's own token counts: it is what the row depends on last. What follows does not."""
    begun: dict[tuple[str, str | None], dict[str, list[Example]]] = {}  # face and first name -> first action -> prompts
    for example in tasks.get("coin")(flips=2).examples(200):
        key = example.prompt.split(".")[0], example.events[0].actor
        begun.setdefault(key, {}).setdefault(example.events[0].action, []).append(example)
    alike, other = next(
        sorted(each.values(), key=len)[::-1] for each in begun.values() if len(each) == 2 and max(map(len, each.values())) > 1
    )
    stage = InterventionRunner(engine, [*alike[:2], other[0]], "blocks.2.hook_in", "face", "step:1")
    one, same, different = stage.groups
    assert one == same != different and len({tuple(s.tokens[: s.positions[-1]]) for s in stage.subjects}) == 1


def test_stage_reads_the_model_itself(engine: Engine, fresh: list[Example]) -> None:
    """Without an edit the stage gives the model's own answers and the rows of a replay, and leaves the engine clean."""
    stage = InterventionRunner(engine, fresh[:4], "blocks.2.hook_in", "face", "step")
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
    """Refused edits, labels and continuations leave no branch and no allocated page behind."""
    before = _held(engine)
    with pytest.raises(BadEdit):
        steer(engine, probe, fresh[:4], factor=1e39, placebos=1)
    with pytest.raises(MissingLabel):
        InterventionRunner(engine, fresh[:4], "blocks.2.hook_in", "nose")
    with pytest.raises(EngineError):
        forced_rows(engine, fresh[:4], [" heads."] * 3 + [" heads" * 4000])
    stage = InterventionRunner(engine, fresh[:4], "blocks.2.hook_in", "face")
    with pytest.raises(ValueError, match="second"):
        stage.play([lambda subject: np.zeros(subject.rows.shape), _refuse])
    assert _held(engine) == before


def _held(engine: Engine) -> tuple[int, int]:
    """Branches, and pages that a branch holds. Pages that only the prefix index holds are free for whoever needs them."""
    pool, cached = engine.runner.pool, engine.prefix.check_integrity().num_evictable
    return len(engine.loop.lanes), pool.num_pages - pool.num_free - cached


def _refuse(subject: Subject) -> np.ndarray:
    raise ValueError("second")


def test_saved_probe(probe: LinearProbe, coin_dump: Dump, tmp_path: Path) -> None:
    """A saved probe loads with the same bits and the dump's digest, and executes nothing. A damaged file is refused."""
    path = probe.save(tmp_path / "face")
    loaded = LinearProbe.load(path)
    assert np.array_equal(loaded.weight, probe.weight) and loaded.classes == probe.classes and loaded.cell == probe.cell
    assert loaded.source["digest"] == coin_dump.digest and loaded.site == "blocks.3.hook_in"
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    about = json.loads(path.with_suffix(".json").read_text())
    odd: list[dict[str, object]] = [{"cell": ["S", "3"]}, {"classes": "ab"}, {"classes": [1, 2]}, {"label": 5}, {"source": []}]
    for change in ({"schema": 99}, {"classes": ["a", "b", "c"]}, {"cell": 3}, *odd):
        path.with_suffix(".json").write_text(json.dumps(about | change))
        with pytest.raises(BadFile):
            LinearProbe.load(path)
    for content in ("[" * 100_000, "[]", ""):
        path.with_suffix(".json").write_text(content)
        with pytest.raises(BadFile):
            LinearProbe.load(path)
    path.with_suffix(".safetensors").write_bytes(b"nonsense")
    with pytest.raises(BadFile):
        LinearProbe.load(path)
    with pytest.raises(BadFile):
        LinearProbe.load(tmp_path / "nothing")


def test_what_cannot_be_tested(engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh: list[Example]) -> None:
    with pytest.raises(ProbeError, match="mlp has no direction"):
        fit_probe(coin_dump, "face", layer=2, estimator="mlp")
    with pytest.raises(FingerprintMismatch):
        steer(toy_engine(), probe, fresh)
    with pytest.raises(ProbeError, match="placebo"):
        steer(engine, probe, fresh, placebos=0)
    with pytest.raises(ProbeError, match="No examples"):
        steer(engine, probe, [])
    with pytest.raises(BadPosition):
        steer(engine, probe, fresh, position="step:9")
    with pytest.raises(ProbeError, match="Unknown class 'edge'"):
        probe.direction("heads", "edge")


def test_three_classes_have_directions() -> None:
    """The direction between two classes is the difference of their weight rows. The class of the highest score is predicted."""
    weight = np.eye(3)
    rest = dict(label="x", site="s", cell=None, position="all", estimator="ridge", source={})
    probe = LinearProbe(weight, np.zeros(3), weight, ("a", "b", "c"), **rest)  # type: ignore[arg-type]
    assert np.allclose(probe.direction("a", "c"), np.array([-1, 0, 1]) / np.sqrt(2))
    assert probe.predict(np.array([[0, 5.0, 1]])).tolist() == ["b"] and probe.basis.shape == (2, 3)


def test_a_subspace_is_exchanged_as_a_whole(engine: Engine, probe: LinearProbe, fresh: list[Example], tmp_path: Path) -> None:
    """A probe may have more dimensions to exchange than its scores depend on. All dimensions are the whole row."""
    wide = replace(probe, subspace=np.eye(probe.weight.shape[1]))
    loaded = LinearProbe.load(wide.save(tmp_path / "wide"))
    assert loaded.subspace is not None and np.array_equal(loaded.subspace, np.eye(len(loaded.basis)))
    report = interchange(engine, loaded, fresh[:8], placebos=1)
    whole, own = line(report, "interchange: whole row"), line(report, "interchange: probe")
    assert own["accuracy"] == whole["accuracy"] and own["nats"] == pytest.approx(whole["nats"], rel=1e-3)
    narrow = replace(probe, subspace=np.eye(probe.weight.shape[1])[:1])
    found = line(interchange(engine, narrow, fresh[:8], placebos=1), "interchange: probe")
    assert found["nats"] < 0.1 * whole["nats"], "one coordinate is not the row"


def test_a_probe_reads_every_token(engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh: list[Example]) -> None:
    """Scores of texts are those of their captured rows, for tensors of any kind too; the last token's class is the answer."""
    texts = [example.prompt for example in fresh[:6]]
    run, found = engine.replay(texts, sites="S"), probe.apply(engine, texts)
    for i, result in enumerate(run):
        rows = result.activations[probe.site]
        assert np.array_equal(found.scores[i], probe.scores(rows)) and len(found.tokens[i]) == len(result.tokens)
        for given in (rows.requires_grad_(), rows.detach().tolist(), rows.detach().numpy(), list(rows)):
            assert np.array_equal(probe.predict(given[-1:]), probe.predict(rows[-1:]))
    table = found.table
    assert list(table) == ["text", "position", "token", "score", "predicted"] and table["text"].nunique() == 6
    assert "".join(table[table["text"] == 2]["token"]) == texts[2] and repr(found).startswith("TokenScores(face: 6 texts, ")
    said = table.groupby("text")["predicted"].last()
    assert np.mean([word == example.answer.strip() for word, example in zip(said, fresh, strict=False)]) > 0.8
    axes = found.plot(2).axes[0]
    assert np.array_equal(axes.lines[0].get_ydata(), found.scores[2]) and len(axes.get_xticklabels()) == len(found.tokens[2])
    three = replace(probe, weight=np.eye(3, 128), bias=np.zeros(3), means=np.zeros((3, 128)), classes=("a", "b", "c"))
    many = three.apply(engine, texts[0])
    assert many.scores[0].shape == (len(found.tokens[0]), 3) and many.table["predicted"].tolist() == list(
        np.array(["a", "b", "c"])[many.scores[0].argmax(1)]
    )
    with pytest.raises(BadRows, match=r"shape \[128\].*Give numbers \[rows, 128\]"):
        probe.predict(run[0].activations[probe.site][-1])
    with pytest.raises(FingerprintMismatch):
        replace(probe, source=probe.source | {"fingerprint": "other"}).apply(engine, texts)


def test_a_subspace_reads_three_classes() -> None:
    """Rows far from zero in which one direction of the subspace tells three classes apart, and another direction, outside of
    it, is noise: all are read. A subspace of the noise reads a third of them."""
    generator = np.random.default_rng(0)
    names = np.repeat(["a", "b", "c"], 20)
    rows = generator.normal(size=(60, 6)) * np.array([0.1, 8, 1, 1, 1, 1]) + 5
    rows[:, 0] += np.repeat([0.0, 3, 9], 20)
    subjects = [SimpleNamespace(classes=[name], rows=torch.from_numpy(x)[None]) for name, x in zip(names, rows, strict=True)]
    stage: Any = SimpleNamespace(
        subjects=subjects, roots=np.arange(60).astype(str), label="face", site="x", position=SimpleNamespace(spec="query")
    )
    found = _probe(stage, np.eye(6)[:1], Cell("S", 0), {})
    assert (found.predict(rows) == names).all() and found.predict(found.means).tolist() == ["a", "b", "c"]
    assert found.direction("a", "c") @ np.eye(6)[0] == pytest.approx(1) and found.basis.shape == (1, 6)
    assert np.mean(_probe(stage, np.eye(6)[2:3], Cell("S", 0), {}).predict(rows) == names) < 0.6
    two: Any = SimpleNamespace(**(vars(stage) | {"subjects": subjects[20:], "roots": stage.roots[20:]}))
    assert (_probe(two, np.eye(6)[:1], Cell("S", 0), {}).predict(rows[20:]) == names[20:]).all()


@pytest.mark.slow  # importing TransformerLens takes ten seconds
def test_direction_found_by_transformer_lens(engine: Engine) -> None:
    """DAS on a bridge with the same weights finds a direction; exchanging along it flips our engine's answers."""
    from bench.subjects import bridge, hugging_face
    from replaylens.probes.causal import find_direction

    task = tasks.get("coin")(flips=3, p=1.0)
    examples = task.examples(64)
    found = find_direction(engine, bridge(hugging_face(engine.model)), examples, "face", layer=3, epochs=15)
    report = interchange(engine, found, task.examples(range(64, 84)), placebos=2)
    assert line(report, "interchange: probe")["accuracy"] > 0.8
    assert line(report, "interchange: random direction")["accuracy"] < 0.2
    assert found.classes == ("heads", "tails") and found.basis.shape[0] == 1


@pytest.mark.slow
def test_subspaces_at_any_position_by_transformer_lens(engine: Engine) -> None:
    """DAS of rank 2 at the word of the first face: exchanging there flips the answer. A label may have several classes."""
    from bench.subjects import bridge, hugging_face
    from replaylens.probes.causal import find_direction

    task = tasks.get("coin")(flips=2, p=1.0)
    same, theirs = task.examples(84), bridge(hugging_face(engine.model))
    found = find_direction(engine, theirs, same[:64], "face", layer=1, position="4", rank=2, epochs=15)
    assert found.basis.shape == (2, 128) and found.position == "4"
    report = interchange(engine, found, same[64:], placebos=4)
    assert line(report, "interchange: probe")["accuracy"] > 0.8
    assert line(report, "interchange: random direction")["accuracy"] < 0.2
    named = find_direction(engine, theirs, same[:32], "name", layer=1, position="step:1", rank=1, epochs=1)
    assert len(named.classes) > 2 and set(named.predict(named.means)) <= set(named.classes)
    with pytest.raises(BadRows, match="several rows per prompt"):
        find_direction(engine, theirs, same[:8], "face", layer=2, position="step")
    with pytest.raises(BadRows, match="rank=0"):
        find_direction(engine, theirs, same[:8], "face", layer=2, rank=0)


# ---- placebos --------------------------------------------------------------------------------------------------------
# Placebos move rows exactly as far as the probe does: otherwise a smaller effect could just mean a smaller step.


@pytest.fixture(scope="module")
def fresh_of_placebos(coin_dump: Dump) -> list[Example]:
    seen = set(coin_dump.index["root"])
    return [e for e in tasks.get("coin")(flips=(2, 5)).examples(range(80, 200)) if e.root not in seen][:4]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Collects, for each variant played, how far it moves the last row of every subject."""
    found: list[np.ndarray] = []
    play = InterventionRunner.play

    def watched(self: InterventionRunner, variants: Sequence[Variant]) -> list[Effect]:
        found.extend(np.array([np.linalg.norm(v(subject)[-1]) for subject in self.subjects]) for v in variants)
        return play(self, variants)

    monkeypatch.setattr(InterventionRunner, "play", watched)
    return found


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_every_direction_is_steered_equally_far(
    engine: Engine,
    coin_dump: Dump,
    probe: LinearProbe,
    fresh_of_placebos: list[Example],
    steps: list[np.ndarray],
    factor: float,
) -> None:
    untrained = placebo_probes(coin_dump, probe, 2)
    wanted = factor * probe.gap("heads", "tails")
    assert all(other.gap("heads", "tails") < 0.9 * probe.gap("heads", "tails") for other in untrained), "the control"
    steer(engine, probe, fresh_of_placebos, untrained=untrained, placebos=2, factor=factor)
    assert len(steps) == 1 + 2 + 2
    for far in steps:
        assert far == pytest.approx(np.full(len(fresh_of_placebos), wanted), rel=1e-6)


def test_every_direction_is_exchanged_equally_far(
    engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh_of_placebos: list[Example], steps: list[np.ndarray]
) -> None:
    """Placebos exchange as much as the probe's own component differs. The whole row, the ceiling, moves farther."""
    interchange(engine, probe, fresh_of_placebos, untrained=placebo_probes(coin_dump, probe, 2), placebos=2)
    own, *placebos, ceiling = steps
    assert len(placebos) == 4 and (own > 0).all() and (ceiling > own).all()
    for far in placebos:
        assert far == pytest.approx(own, rel=1e-6)


# ---- probes by hand --------------------------------------------------------------------------------------------------

MADE = np.random.default_rng(3).normal(size=(3, 5))


def made_probe(classes: int) -> LinearProbe:
    k = 1 if classes == 2 else classes
    about = {"label": "face", "site": "blocks.1.hook_in", "cell": Cell("S", 1), "position": "query", "estimator": "ridge"}
    names = tuple("abc"[:classes])
    return LinearProbe(MADE[:k], np.arange(k) / 4, MADE[::-1][:classes] * 2, names, source={}, roots=("x", "y"), **about)  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_directions_and_gaps(classes: int) -> None:
    """Of two classes one line, positive for the second; else a line per class, and the largest decides."""
    probe, X = made_probe(classes), np.random.default_rng(4).normal(size=(6, 5))
    scores = np.array([[float(np.dot(row, w)) + b for w, b in zip(probe.weight, probe.bias, strict=True)] for row in X])
    found = probe.scores(X)
    assert np.allclose(found, scores[:, 0] if classes == 2 else scores) and found.ndim == classes - 1
    best = ["ab"[int(score[0] > 0)] if classes == 2 else "abc"[int(np.argmax(score))] for score in scores]
    assert probe.predict(X).tolist() == best and len(set(best)) > 1
    assert probe.predict(np.zeros((1, 5))).tolist() == ["a" if classes == 2 else "c"], "a score of zero is the first's"
    for origin in probe.classes:
        for target in set(probe.classes) - {origin}:
            i, j = "abc".index(origin), "abc".index(target)
            way = probe.weight[0] * (1 if j > i else -1) if classes == 2 else probe.weight[j] - probe.weight[i]
            assert np.allclose(probe.direction(origin, target), way / np.linalg.norm(way))
            assert probe.gap(origin, target) == pytest.approx(np.linalg.norm(probe.means[j] - probe.means[i]))
    assert (
        repr(probe)
        == f"LinearProbe(face at S1 (blocks.1.hook_in), query: {', '.join('abc'[:classes])}; ridge on 2 roots, d = 5)"
    )
    table = TokenScores("face", probe.classes, [["p", "q"], ["r"]], [found[:2], found[2:3]]).table
    assert (
        table["text"].tolist() == [0, 0, 1]
        and table["position"].tolist() == [0, 1, 0]
        and table["token"].tolist() == ["p", "q", "r"]
    )
    assert table["predicted"].tolist() == best[:3]
    columns = ["score"] if classes == 2 else ["score a", "score b", "score c"]
    assert np.allclose(table[columns].to_numpy(), scores[:3])


@pytest.mark.parametrize("name", ["weight", "bias", "means"])
def test_a_saved_probe_has_finite_numbers_only(name: str, tmp_path: Path) -> None:
    probe = made_probe(3)
    assert LinearProbe.load(probe.save(tmp_path / "good")).roots == ("x", "y")
    for value in (np.nan, np.inf):
        broken = getattr(probe, name).copy()
        broken.flat[-1] = value
        with pytest.raises(BadFile, match=f"{name} has shape"):
            LinearProbe.load(replace(probe, **{name: broken}).save(tmp_path / "bad"))
    with pytest.raises(BadFile, match=f"{name} has shape"):
        LinearProbe.load(replace(probe, **{name: getattr(probe, name)[:2]}).save(tmp_path / "bad"))


def test_lines_of_effects_by_hand() -> None:
    """Rates and pulls are means over prompts, and over placebos; rows are prompts, however many placebos there are."""
    generator, roots = np.random.default_rng(5), np.array([f"r{i // 2}" for i in range(12)])
    effects = [Effect(generator.integers(2, size=12).astype(float), generator.normal(size=12)) for _ in range(4)]
    own, placebos = effects[0], effects[1:]
    one, several = causal.line_of("own", own, roots), causal.line_of_placebos("others", placebos, roots, 0)
    (apart,) = causal.differences([causal.EffectDifference("apart", own, placebos, roots)], 0)
    flips, pulls = np.stack([each.flipped for each in placebos]), np.stack([each.pull for each in placebos])
    assert (one["what"], one["metric"], one["rows"]) == ("own", "flip rate", 12) and several["rows"] == apart["rows"] == 12
    assert (one["accuracy"], one["nats"]) == pytest.approx((own.flipped.mean(), own.pull.mean()))
    assert (several["accuracy"], several["nats"]) == pytest.approx((flips.mean(), pulls.mean()))
    assert (apart["accuracy"], apart["nats"]) == pytest.approx(
        (own.flipped.mean() - flips.mean(), own.pull.mean() - pulls.mean())
    )
    for found in (one, several, apart):
        assert found["low"] < found["accuracy"] < found["high"] and found["nats_low"] < found["nats"] < found["nats_high"]
    sure = Effect(np.ones(12), own.pull)
    (certain,), other = (
        causal.differences([causal.EffectDifference("sure", sure, placebos, roots)], 0),
        causal.line_of("sure", sure, roots),
    )
    assert (certain["low"], certain["high"]) == pytest.approx((other["low"] - several["high"], other["high"] - several["low"]))
