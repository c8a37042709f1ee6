"""Sweeps: the report is reproducible, resumed or not; controls work as documented; every bad setting raises a named error."""

import errno
import json
import math
import os
import re
import runpy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from typer.testing import CliRunner

from replaylens import tasks
from replaylens.cli import app
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, EngineError, FingerprintMismatch
from replaylens.extras.cluster import connected
from replaylens.probes import controls, groups, intervals, sweeps, tabulate
from replaylens.probes.controls import make_goal
from replaylens.probes.errors import BadFile, BadRows, MissingLabel, PlanMismatch, ProbeError
from replaylens.probes.heldout import held_out, residualised
from replaylens.probes.probe import cross_validate
from replaylens.probes.questions.forced import outcome_at_fork
from replaylens.probes.report import Report, summarise
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import by_length, by_root
from replaylens.probes.sweeps import complexity_curve, sweep
from replaylens.probes.verdicts import verdict_of
from tests.probes.synthetic import rows_of
from tests.processes import python_path
from tests.toy_model import engine as toy_engine

QUICK: dict[str, Any] = {"sites": "S", "positions": "query", "permutations": 19}
TWO_LAYERS: dict[str, Any] = QUICK | {"layers": [0, 4]}
"""where the face is not read, and where it is"""
RIDGE: dict[str, Any] = TWO_LAYERS | {"estimators": "ridge"}
"""the same in a quarter of the time, where the estimator does not matter"""


def body(report: Report) -> str:
    return json.dumps(report.to_json())


@pytest.fixture(scope="module")
def report(coin_dump: Dump) -> Report:
    """Of two layers, with code lengths. Tests must not change it."""
    return sweep(coin_dump, "face", **TWO_LAYERS, code_length=True)


def test_coin_model_tracks_the_face(coin_dump: Dump, engine: Engine) -> None:
    """The real model shows the face late, not in the embedding. Known zeros are not shown. The untrained model knows less."""
    report = sweep(coin_dump, ["face", "parity"], engine=engine, **(RIDGE | {"positions": ["query", "step"]}))
    at_query = report.table.query("label == 'face' and position == 'query'").set_index("layer")
    assert at_query.loc[4, "accuracy"] > 0.95 and at_query.loc[4, "p_family"] <= 0.05
    assert at_query.loc[0, "low"] < 0.6 and at_query.loc[4, "untrained"] < 0.75
    zeros = report.table[report.table["known_zero"]]
    assert len(zeros) == 6 and (zeros["p"] > 0.005).all()
    assert "Shown: face at query" in report.text() and "next_action" in " ".join(report.notes)


def test_same_report_twice(coin_dump: Dump, tmp_path: Path) -> None:
    """Reports are equal byte for byte, including the PNGs."""
    one, again, other = (sweep(coin_dump, "face", **RIDGE, seed=seed) for seed in (0, 0, 1))
    one.save(tmp_path / "a"), again.save(tmp_path / "b")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"report.json", "summary.txt", "table.csv", "heatmap-face-ridge.png", "curves-face-ridge.png"} <= set(files)
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert not one.table.equals(other.table), "another seed gives another report"


def test_resumed_sweep_is_the_same(coin_dump: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted sweep resumes from its finished parts without recomputing them, and gives the same bytes."""
    settings = RIDGE | {"positions": ["query", "query-1"], "permutations": 0}
    whole = sweep(coin_dump, "face", **settings)
    real, calls = sweeps.held_out, [0]

    def limited(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(sweeps, "held_out", limited)
    settings["resume"] = tmp_path
    with pytest.raises(KeyboardInterrupt):
        sweep(coin_dump, "face", **settings)
    calls[0] = 0
    assert body(sweep(coin_dump, "face", **settings)) == body(whole), "one part was left to compute"
    assert calls[0] == 1
    with pytest.raises(PlanMismatch):
        sweep(coin_dump, "parity", **settings)


def test_verify_computes_a_report_again_from_its_dump(coin_dump: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report whose numbers were changed, and its digest and summary with them, is found out where the dump is there; where it
    is not, the verdict says that the numbers are taken on trust. So are those of parts of a sweep."""

    def verified(*words: Any) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["verify", *map(str, words)])
        return done.exit_code, done.stdout + done.stderr

    monkeypatch.chdir(tmp_path)
    dumps, how = Path(coin_dump.url).parent, RIDGE | {"permutations": 0, "controls": False}
    made = sweep(coin_dump, "face", **how, resume=tmp_path / "parts")
    made.save("report")
    code, out = verified("report")
    assert code == 0 and "taken on trust: every number, because no dump" in out
    assert "curves-face-ridge.png, heatmap-face-ridge.png, summary.txt, table.csv: as written" in out
    code, out = verified("report", "--in", dumps)
    assert code == 0 and f"reproduced: every line, note and finding, from the rows of {coin_dump.url}" in out
    lines = [line | {"majority": 0.123} if line["layer"] == 0 else line for line in made.lines]
    replace(made, lines=lines).save("forged", figures=False)
    assert verified("forged")[0] == 0, "its digest was computed again, too"
    code, out = verified("forged", "--in", dumps)
    assert code == 1 and f"the same call on {coin_dump.url} gives another report, with digest {made.digest}" in out
    part = sweep(ProbeRows.of(coin_dump).accepted(), "face", **how)
    assert "it was made from a view of the dump" in str(sweeps.again(part, coin_dump))
    curve = complexity_curve(coin_dump, "face", layer=4, position="query", C=[0.1, 1.0])
    assert not isinstance(again := sweeps.again(curve, coin_dump), str) and again.digest == curve.digest
    code, out = verified("parts")
    assert (
        code == 0 and re.search(r"verified: sweep parts\n\d parts have the hash", out) and "taken on trust: every number" in out
    )
    (first, *_) = sorted((tmp_path / "parts").glob("*.npz"))
    first.write_bytes(first.read_bytes().replace(b"PK", b"KP", 1))
    code, out = verified("parts")
    assert code == 1 and first.name in out and "was changed" in out


@pytest.mark.slow
def test_verify_names_the_files_beside_a_report(tmp_path: Path) -> None:
    how = RIDGE | {"layers": [0, 1], "positions": "all", "permutations": 0, "controls": False}
    sweep(rows_of(roots=20), "face", **how).save(tmp_path)
    for name in ("summary.txt", "table.csv", "heatmap-face-ridge.png"):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(before[:-3] + b"7" + before[-2:])
        done = CliRunner().invoke(app, ["verify", str(tmp_path), "--in", str(tmp_path)])
        assert done.exit_code == 1 and f"{name} is not that of report.json" in done.stdout
        (tmp_path / name).write_bytes(before)
    assert CliRunner().invoke(app, ["verify", str(tmp_path), "--in", str(tmp_path)]).exit_code == 0


def test_probes_of_a_command_replace_no_foreign_file(coin_dump: Dump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so before the work; with room for neither, a full disk names file, reason and what to do, as `dump` does."""
    words = ["probe", coin_dump.url, "--label", "face", "--sites", "S", "--layers", "4", "--positions", "query", "--quiet"]
    words += ["--estimators", "ridge", "--permutations", "0", "--no-controls"]
    (tmp_path / "face.safetensors").write_bytes(b"mine")
    (tmp_path / "heatmap-face-ridge.png").write_bytes(b"mine")
    (tmp_path / "sweep.key").write_bytes(b"mine")  # or the whole folder is refused
    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "sweep", lambda *_, **__: pytest.fail("the work has begun"))
        for option in ("--save-probes", "--out"):
            done = CliRunner().invoke(app, [*words, option, str(tmp_path)])
            assert done.exit_code == 2 and "is a file that replaylens did not write" in done.stderr
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"mine"}

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for option, kept in (("--resume", "Finished parts are kept"), ("--out", "as it was"), ("--save-probes", "as it was")):
        done = CliRunner().invoke(app, [*words, option, str(tmp_path / "new")])
        assert done.exit_code == 3 and done.stderr.startswith("DumpWriteFailed: Cannot write "), done.stderr
        assert str(tmp_path / "new") in done.stderr and "No space left on device" in done.stderr
        assert kept in done.stderr and "Make room" in done.stderr


def test_figures_tell_a_control_from_the_label_of_its_name(report: Report) -> None:
    """The column `shuffled` is the control of a label; the label `shuffled` is a known zero with lines of its own."""
    assert "known zero" in report.heatmap("shuffled").get_suptitle()
    drawn = report.curves("face")
    assert "known zero" not in drawn.get_suptitle()
    said = {text.get_text() for text in drawn.legends[0].get_texts()}
    assert "labels exchanged" in said and "shuffled" not in said


FOREIGN: dict[str, Callable[[Path, Dump, Path], Any]] = {
    "a dump": lambda folder, dump, report: shutil.copytree(dump.url, folder),
    "a dump with a report": lambda folder, dump, report: (shutil.copytree(dump.url, folder), shutil.copy(report, folder)),
    "a note": lambda folder, dump, report: (folder.mkdir(), (folder / "notes.txt").write_text("mine")),
    "a note beside parts": lambda folder, dump, report: (parts_of(folder / "parts"), (folder / "notes.txt").write_text("mine")),
    "json of somebody": lambda folder, dump, report: (folder.mkdir(), (folder / "state.json").write_text('{"format": "mine"}')),
}
"""folders that no sweep wrote"""
OWN: dict[str, Callable[[Path, Path], Any]] = {
    "empty": lambda folder, report: folder.mkdir(),
    "left by a stopped writer": lambda folder, report: (folder.mkdir(), (folder / "sweep.key.1-2.tmp").touch()),
    "a report": lambda folder, report: (folder.mkdir(), shutil.copy(report, folder)),
    "parts": lambda folder, report: parts_of(folder),
    "parts below": lambda folder, report: parts_of(folder / "parts"),
}


def parts_of(folder: Path) -> None:
    """The folder of a sweep that was stopped before its first part."""
    folder.mkdir(parents=True)
    (folder / "sweep.key").touch()


@pytest.mark.slow
def test_a_sweep_writes_into_no_folder_of_somebody_else(
    coin_dump: Dump, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump, a folder with a note: refused before the work, and as it was. New, empty and own folders are taken."""
    saved = report.save(tmp_path / "given", figures=False) / "report.json"

    def begin(*given: Any, **options: Any) -> None:
        raise BadRequest("The work has begun.")

    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "sweep", begin)
        for option in ("--out", "--resume", "--save-probes"):
            for number, (what, make) in enumerate(FOREIGN.items()):
                make(folder := tmp_path / f"{option}{number}", coin_dump, saved)
                before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
                done = CliRunner().invoke(app, ["probe", coin_dump.url, option, str(folder)])
                assert done.exit_code == 2 and "Give a new or an empty folder" in done.stderr, (what, done.stderr)
                assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
            for number, (what, make_own) in enumerate(OWN.items()):
                make_own(folder := tmp_path / f"own{option}{number}", saved)
                done = CliRunner().invoke(app, ["probe", coin_dump.url, "--label", "face", option, str(folder)])
                assert "The work has begun." in done.stderr, (what, done.stderr)
    FOREIGN["a note"](tmp_path / "mine", coin_dump, saved)
    with pytest.raises(BadRequest, match=r"holds 'notes\.txt'"):
        sweep(coin_dump, "face", **RIDGE, resume=tmp_path / "mine")


def test_parts_of_another_split_are_not_used(tmp_path: Path) -> None:
    """Two splits share a name, as lambdas do. The second is computed, and the first is still found."""
    settings = QUICK | {"positions": "all", "controls": False, "estimators": "ridge", "permutations": 0}
    rows, makes = rows_of(roots=40), [lambda rows: by_root(rows, 2, 0), lambda rows: by_root(rows, 5, 7)]
    fresh = [body(sweep(rows, "face", split=make, **settings)) for make in makes]
    assert fresh[0] != fresh[1]
    for make, report in zip([*makes, makes[0]], [*fresh, fresh[0]], strict=True):
        assert body(sweep(rows, "face", split=make, resume=tmp_path, **settings)) == report


@pytest.mark.slow
def test_batches_change_nothing_that_counts(coin_dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells solved one at a time or all together give the same predictions, hence the same scores, intervals and tests."""
    together = sweep(coin_dump, "face", **TWO_LAYERS).table
    monkeypatch.setattr(sweeps, "MEMORY_MB", 0)
    alone = sweep(coin_dump, "face", **TWO_LAYERS).table
    assert alone.equals(together)


@pytest.mark.slow
def test_estimators_fitted_apart() -> None:
    """lda and sparse give the same lines, run in sequence or in two threads, and find the planted layer."""
    rows, settings = rows_of(roots=50), QUICK | {"positions": "all", "estimators": ["lda", "sparse"], "controls": False}
    settings["permutations"] = 0
    report = sweep(rows, "face", **settings)
    assert body(sweep(rows, "face", jobs=2, backend="threading", **settings)) == body(report)
    table = report.table.query("label == 'face'")
    assert (table[table["layer"] == 1]["accuracy"] > 0.85).all() and (table[table["layer"] == 0]["accuracy"] < 0.7).all()
    assert sorted(set(table["estimator"])) == ["lda", "sparse"]


def test_the_spread_of_control_tasks_is_that_of_their_mean() -> None:
    """Five draws say more about the mean of all random control tasks than one: their variance counts by a fifth."""
    generator, groups = np.random.default_rng(0), np.arange(60)
    own, drawn = generator.random((1, 60)), generator.random((5, 1, 60)) + generator.normal(size=(5, 1, 1))
    place = SimpleNamespace(goals=[None] * 5)
    block = SimpleNamespace(
        place=place, groups=groups, folds=1, said=lambda number: drawn[number], gains=lambda said, goal: said
    )
    found: list[dict[str, float]] = [{}]
    tabulate._selectivity(block, own, list(range(5)), found, 0.05)  # type: ignore[arg-type]
    alone = intervals.difference_over_groups((own - drawn.mean(0))[0], groups, folds=1)
    wide, narrow = found[0]["selectivity_high"] - found[0]["selectivity_low"], alone.high - alone.low
    between = float(drawn[:, 0].mean(1).var(ddof=1)) / 5
    within = float((own - drawn.mean(0))[0].var(ddof=1)) / 60
    assert wide / narrow == pytest.approx(np.sqrt(1 + between / within), rel=0.05)


@pytest.mark.slow
def test_a_grid_with_two_kinds_of_tests_gives_each_half_of_the_error() -> None:
    """Permutation tests beside t tests: both corrections are doubled, so that all lines together err in 5 % of grids."""

    def table(*estimators: str) -> pd.DataFrame:
        how = QUICK | {"positions": "all", "controls": False, "estimators": estimators}
        return sweep(rows_of(), "face", **how).table.query("label == 'face'")

    alone, both = {each: table(each) for each in ("ridge", "lda")}, table("ridge", "lda")
    assert set(both["test"]) == {"refitted permutation", "corrected t"}
    for name, own in alone.items():
        found = both[both["estimator"] == name]
        assert found["p"].tolist() == own["p"].tolist()
        assert found["p_family"].tolist() == np.minimum(1, 2 * own["p_family"]).tolist()
        assert (own["p_family"] < 0.5).any()


@pytest.mark.slow
def test_ray_backend_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    plain = sweep(rows_of(roots=40), "face", estimators="lda", **(QUICK | {"positions": "all"}))
    with connected("local"):
        spread = sweep(rows_of(roots=40), "face", estimators="lda", backend="ray", jobs=2, **(QUICK | {"positions": "all"}))
    assert body(spread) == body(plain)


def test_numbers_are_regressed_on() -> None:
    """A number planted in the rows has r2 near 1 there and near 0 in noise. Classifiers refuse it."""
    rows = rows_of()
    value = rows.matrix("S", 1)[:, 2] + 0.1 * np.random.default_rng(0).normal(size=len(rows))
    rows = ProbeRows(rows.frame.assign(height=value), rows.source, rows.numbers)
    table = sweep(rows, "height", estimators="ridge", **(QUICK | {"positions": "all"})).table.query("label == 'height'")
    assert table.set_index("layer").loc[1, "accuracy"] > 0.95 and (table["metric"] == "r2").all()
    assert table.set_index("layer").loc[1, "p_family"] == 0.05
    with pytest.raises(ProbeError, match="Use ridge"):
        sweep(rows, "height", **(QUICK | {"positions": "all"}))
    noted = sweep(rows, "height", estimators="ridge", metric="auroc", **(QUICK | {"positions": "all"}))
    assert any("auroc of 'height'" in str(note) and "r2" in str(note) for note in noted.notes)
    with pytest.raises(ProbeError, match=r"metric='auroc' is for classes, and label .* holds numbers, which have r2"):
        cross_validate(rows.matrix("S", 1), value, rows.roots, estimator="ridge", metric="auroc")


def test_length_generalisation(coin_dump: Dump) -> None:
    """Fitted on short prompts and tested on longer ones: there is one fold, and the sizes match."""
    table = sweep(coin_dump, "face", split="length:3", **RIDGE).table.query("label == 'face'")
    rows = ProbeRows.of(coin_dump).accepted().at("query")
    assert set(table["rows"]) == {int(by_length(rows, 3).test.sum())}


@pytest.mark.slow
def test_splits_by_branch(steps_dump: Dump) -> None:
    """Splits from accepted to rejected, back, and by depth include rejected rows by default, on other roots."""
    settings = QUICK | {"positions": "step", "layers": [1], "controls": False, "estimators": "ridge"}
    rejected = len(ProbeRows.of(steps_dump).rejected().at("step"))
    for split in ("accepted-rejected", "depth:0"):
        line = sweep(steps_dump, "implied", split=split, **settings).best("implied")
        assert 0 < line["distinct"] <= rejected and line["accuracy"] > 0.7
    assert sweep(steps_dump, "implied", split="rejected-accepted", **settings).best("implied")["distinct"] > rejected


def test_a_known_zero_without_a_tested_row_is_skipped(steps_dump: Dump) -> None:
    """A rejected draft has no next action: the control is left out, and the report says so."""
    found = sweep(steps_dump, "implied", split="accepted-rejected", **RIDGE | {"positions": "step", "layers": [1]})
    assert found.best("implied")["accuracy"] > 0.7
    assert "Skipped known zero 'next_action' at position 'step': no tested row has a value." in found.notes


@pytest.mark.slow
def test_untrained_rows_of_some_examples(coin_dump: Dump, engine: Engine) -> None:
    """On part of a dump the untrained model reads the same paths, and the report's lines equal those without it."""
    rows = ProbeRows.of(coin_dump)
    some = rows.where(rows.frame["example"] >= 30)
    with_it, without = (sweep(some, "face", engine=e, **RIDGE).table for e in (engine, None))
    assert with_it["accuracy"].equals(without["accuracy"]) and with_it["untrained"].notna().any()
    blank = controls.untrained_rows(some.renumbered(), engine, ["S"])
    path = some.frame[(some.frame["example"] == 31) & some.frame["accepted"]]
    other = controls.untrained_rows(rows, engine, ["S"])
    mine, theirs = blank.where(path_mask(blank, path)), other.where(path_mask(other, path))
    assert np.array_equal(mine.matrix("S", 3), theirs.matrix("S", 3))


def path_mask(rows: ProbeRows, path: pd.DataFrame) -> np.ndarray:
    return (rows.frame["example"] == path["example"].iloc[0]).to_numpy() & rows.frame["accepted"].to_numpy()


def test_code_length_and_information(report: Report) -> None:
    """Labels compress where the face is linearly readable, and not elsewhere."""
    table = report.table.query("label == 'face'").set_index("layer")
    assert table.loc[4, "compression"] > 1.5 > 1.1 > table.loc[0, "compression"]
    assert table.loc[4, "control_compression"] < 1.1 and (table["control_code_bits"] > 0).all()
    assert table.loc[4, "v_information"] > 0.8 and abs(table.loc[0, "v_information"]) < 0.1
    assert table.loc[4, "calibration_error"] < 0.1


def test_residualised_rows_lose_the_nuisance() -> None:
    """A layer that shows the label only through the row's position shows nothing once position is removed."""
    rows = rows_of(per_root=2)
    place = rows.frame["position"].to_numpy(dtype=float)
    target = make_goal(rows.target("actions"))
    x = torch.from_numpy(rows.matrix("S", 0))[None].clone()
    x[0, :, 0] += torch.from_numpy(5 * place)
    split = by_root(rows)
    plain = held_out("logistic", x, [target], split.train, split.test).predicted[0, 0]
    clean = held_out("logistic", x, [target], split.train, split.test, nuisance=place[:, None]).predicted[0, 0]
    assert np.mean(plain == target.codes) > 0.95 and np.mean(clean == target.codes) < 0.6
    left = residualised(x, place[:, None], split.train[0])
    fitted = left[0, torch.from_numpy(split.train[0])]
    assert abs(float(fitted[:, 0] @ torch.from_numpy(place[split.train[0]]))) < 1e-6


# Controls


def test_majority_is_no_worse_than_a_constant() -> None:
    """With a row held out, the rest hold more of the other class: a majority guess is always wrong, a constant is not."""
    codes, alone = np.array([0, 1] * 5), np.eye(10, dtype=bool)
    assert (controls.token_identity(codes, np.zeros(10, int), ~alone, alone) != codes).all()
    assert controls.majority(codes, ~alone, alone) == 0.5
    some = np.array([0, 0, 1, -1, 1, 0, -1, 0])  # two rows without a class
    one = np.arange(8)[None] < 4
    assert controls.majority(some, ~one, one) == 2 / 3


def test_an_unseen_token_takes_the_most_frequent_class() -> None:
    """By hand: token 5 was seen once with class 2, token 7 twice with 1 and once with 0, token 9 never: class 1 leads there."""
    codes, tokens = np.array([1, 1, 0, 2, 1, 0, 0, 0]), np.array([7, 7, 7, 5, 3, 9, 5, 7])
    fit = np.arange(8)[None] < 5
    assert controls.token_identity(codes, tokens, fit, ~fit).tolist() == [-1, -1, -1, -1, -1, 1, 2, 1]
    other = np.array([2, 2, 2, 0, 1, 0, 0, 0])
    assert controls.token_identity(other, tokens, fit, ~fit).tolist()[5:] == [2, 0, 2], "whichever class leads"


@pytest.mark.parametrize("seed", range(4))
def test_controls_by_loops(seed: int) -> None:
    """Guesses of the frequent class, by token, and shares by value: fold by fold, from the fitted rows alone."""
    generator = np.random.default_rng(seed)
    codes, tokens, fold = (generator.integers(count, size=40) for count in (3, 6, 4))
    test = np.arange(4)[:, None] == fold
    train = ~test & (generator.random((4, 40)) < 0.8)
    guesses, said, shares = np.empty(40), np.empty(40), np.empty((40, 3))
    for row in range(40):
        fitted = np.flatnonzero(train[fold[row]])
        counts = [int((codes[fitted] == k).sum()) for k in range(3)]
        own = [int(((codes == k) & (tokens == tokens[row]))[fitted].sum()) for k in range(3)]
        guesses[row] = counts.index(max(counts)) == codes[row]
        said[row] = own.index(max(own)) if sum(own) else counts.index(max(counts))
        shares[row] = [(own[k] + counts[k] / len(fitted)) / (sum(own) + 1) for k in range(3)]
    assert controls.majority(codes, train, test) == pytest.approx(max(guesses.mean(), np.bincount(codes).max() / 40))
    assert np.array_equal(controls.token_identity(codes, tokens, train, test), said)
    assert np.allclose(controls.shares_of(codes, tokens, train, test, 3), shares)
    paths = [generator.integers(5, size=generator.integers(1, 6)) * 7 for _ in range(10)]
    names = sorted({int(token) for path in paths for token in path})
    assert controls.bags(paths).tolist() == [[path.tolist().count(token) for token in names] for path in paths]


def test_bins_of_positions() -> None:
    """Few values as they are; many in bins, a value at a border in the upper one; nothing if there is nothing to tell."""
    few = pd.Series([3, 1, 2, 3])
    assert controls.position_bins(few, np.ones(4, bool)).tolist() == [3, 1, 2, 3]  # type: ignore[union-attr]
    assert controls.position_bins(few, np.array([True, False, False, True])) is None
    assert controls.position_bins(pd.Series([3, None, 2, 3]), np.ones(4, bool)) is None
    many = np.repeat(np.arange(30), 20)
    bins = controls.position_bins(pd.Series(many), np.ones(600, bool))
    places = [599 * k / controls.POSITION_BINS for k in range(1, controls.POSITION_BINS)]
    borders = {many[int(at)] + (many[int(at) + 1] - many[int(at)]) * (at - int(at)) for at in places}
    assert bins is not None and bins.tolist() == [sum(border <= value for border in borders) for value in many]
    assert any(border in many for border in borders)
    edge = pd.Series(np.arange(controls.POSITION_BINS))
    assert np.array_equal(controls.position_bins(edge, np.ones(len(edge), bool)), edge)  # type: ignore[arg-type]


def test_control_labels_by_hand() -> None:
    """Types get the class that most rows still lack, so that classes are as frequent as the real ones; -1 stays -1."""
    types, codes = np.repeat(np.arange(6), 4), np.repeat([0, 1, 2], 8)
    for seed in range(5):
        labels = controls.control_labels(types, codes, seed)
        assert np.bincount(labels).tolist() == [8, 8, 8]
    missing = np.where(np.arange(24) % 4 == 0, -1, codes)
    assert ((controls.control_labels(types, missing) == -1) == (missing == -1)).all()
    paths = [np.array([1, 2, i % 4, i % 3]) for i in range(12)]
    found = controls.contexts(paths)
    assert found is not None and found[1] == 2 and found[0].max() + 1 == 12, "one token has 3 types, two have 12"
    assert controls.contexts(paths[:3]) is None


def test_bags_count_the_path(steps_dump: Dump) -> None:
    """The token counts of a row, rejected or not, cover exactly the tokens on its own path."""
    every = ProbeRows.of(steps_dump)
    chosen = every.rejected().at("step")
    paths = groups.histories(chosen)
    assert paths is not None
    bags = controls.bags(paths)
    frame, tokens = every.frame, np.unique(np.concatenate(paths))
    for i in (0, len(chosen) // 2, len(chosen) - 1):
        row = chosen.frame.iloc[i]
        own = frame[(frame["example"] == row["example"]) & (frame["branch"] == row["branch"])]
        main = frame[(frame["example"] == row["example"]) & (frame["branch"] == 0)]
        path = [*main[main["position"] < row["fork_position"]]["token"], *own[own["position"] <= row["position"]]["token"]]
        assert len(path) == row["position"] + 1
        assert bags[i].tolist() == [path.count(token) for token in tokens]


def test_control_task_is_a_function_of_the_context(coin_dump: Dump) -> None:
    """Equal contexts have equal control labels. Their classes are about as frequent as the real ones."""
    every = ProbeRows.of(coin_dump)
    here = every.accepted().at("step")
    types, length = controls.contexts(groups.histories(here) or []) or (np.zeros(0), 0)
    goal = make_goal(here.target("face"))
    labels = controls.control_labels(types, goal.codes)
    assert length >= 2 and len(np.unique(types)) >= controls.MIN_TYPES
    assert all(len(set(labels[types == t])) == 1 for t in np.unique(types))
    assert not np.array_equal(labels, controls.control_labels(types, goal.codes, seed=1))


@pytest.mark.slow
def test_controls_of_the_path_need_the_whole_path(coin_dump: Dump) -> None:
    """A dump of step rows lacks the tokens in between: controls that need the path are skipped with a note, the others run.

    Rows selected from a whole dump still know their paths.
    """
    every = ProbeRows.of(coin_dump).accepted()
    narrow = every.at("step")
    kept = ProbeRows(narrow.frame, narrow.source, narrow.numbers)
    how = RIDGE | {"positions": "step:2", "permutations": 0}
    whole, part, steps = (sweep(rows, "face", **how) for rows in (every, narrow, kept))
    assert part.table.equals(whole.table)
    for report, there in ((whole, True), (steps, False)):
        main = report.table.query("label == 'face'")
        for name in ("bag_of_tokens", "control_task", "selectivity"):
            assert main[name].notna().all() == main[name].notna().any() == there
        assert main["token_identity"].notna().all() and any("paths have holes" in note for note in report.notes) != there
    assert "Controls not run: bag_of_tokens" in steps.text()
    with pytest.raises(BadRows, match="whole texts"):
        outcome_at_fork(kept)


def test_controls_of_joined_rows(coin_dump: Dump) -> None:
    """Parts use the same example numbers, but their paths are kept apart."""
    rows = ProbeRows.of(coin_dump)
    alone = groups.histories(rows.at("query"))
    for both in (ProbeRows.join(a=rows, b=rows).at("query"), ProbeRows.join(a=rows.at("query"), b=rows.at("query"))):
        paths = groups.histories(both)
        assert paths is not None and alone is not None
        assert all(np.array_equal(mine, own) for mine, own in zip(paths, [*alone, *alone], strict=True))
        assert np.array_equal(both.matrix("S", 2), np.tile(rows.at("query").matrix("S", 2), (2, 1)))


def test_memorised_tokens_are_no_finding(coin_dump: Dump) -> None:
    """An action, probed at the token that states it, is read perfectly but not shown: token identity does as well."""
    report = sweep(coin_dump, "last_action", **(RIDGE | {"positions": "step", "layers": [0]}))
    assert report.best("last_action")["accuracy"] == 1 and report.best("last_action")["token_identity"] == 1
    verdict = report.best("last_action")["verdict"]
    assert verdict == "below" and report.text().startswith("Shown to be below 0.1 above what decides: last_action at step")


# Refused


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"estimators": "magic"}, ProbeError, "Known: logistic"),
        ({"estimators": "ccs"}, ProbeError, "does not take rows"),
        ({"positions": "4"}, BadRows, "position '4': 2 independent groups"),
        ({"positions": "400"}, BadRows, "position '400': there is no row"),
        ({"split": "shuffle"}, ProbeError, "Use root, length:8"),
        ({"folds": 1000}, BadRows, "for 1000 folds"),
        ({"branches": "some"}, ProbeError, "Use one of accepted"),
        ({"precision": "half"}, ProbeError, "double, single"),
        ({"permutations": 3}, ProbeError, "at least 19"),
        ({"residualise": ("nosuch",)}, MissingLabel, "'nosuch'.*position"),
        ({"residualise": ("face",)}, MissingLabel, "column of numbers"),
        ({"residualise": ("since_step", "until_step")}, BadRows, "'until_step': 80 of 80 rows have no value"),
        ({"device": "cuda:99"}, ProbeError, "'cuda:99' not found"),
        ({"device": "toaster"}, ProbeError, "'toaster' not found"),
        ({"jobs": 0}, ProbeError, "jobs=0 runs nothing"),
    ],
)
def test_bad_settings(coin_dump: Dump, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sweep(coin_dump, "parity", **(QUICK | options))


def test_engine_of_another_dump(coin_dump: Dump) -> None:
    with pytest.raises(FingerprintMismatch):
        sweep(coin_dump, "face", engine=toy_engine(), **QUICK)


def test_report_on_disk(coin_dump: Dump, report: Report, report_folder: Path) -> None:
    """A report loads as it was saved. Anything else raises a named error."""
    report.save(report_folder, figures=False)
    loaded = Report.load(report_folder)
    assert loaded.to_json() == report.to_json() and loaded.source["digest"] == coin_dump.digest
    assert "NaN" not in (report_folder / "report.json").read_text()
    (report_folder / "report.json").write_text("{}")
    with pytest.raises(BadFile):
        Report.load(report_folder)
    with pytest.raises(ProbeError, match="No lines for label"):
        report.heatmap("nose")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": -1}, "Invalid layers=-1. Give a list of layers"),
        ({"layers": 2}, "Invalid layers=2. Give a list of layers"),
        ({"layers": "2"}, "Invalid layers='2'. Give a list of layers"),
        ({"layers": [1.5]}, "Invalid layers=1.5"),
        ({"layers": [-1]}, "No layer -1. S is stored at layers 0, 1, 2, 3, 4. Give one of these"),
        ({"positions": 1.5}, "Unknown position of a task 1.5. Use all, prompt"),
    ],
)
def test_options_that_cannot_be_meant(coin_dump: Dump, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        sweep(coin_dump, "face", sites="S", **options)


def test_a_folder_is_not_a_dump() -> None:
    with pytest.raises(ProbeError, match=r"Cannot probe a str.*Dump\.open\('dumps/x'\)"):
        sweep("dumps/x", "face")  # type: ignore[arg-type]


def test_a_verdict_names_the_controls_that_it_lacks() -> None:
    """Where paths have holes, the bag of tokens cannot be built; "Shown" must not read as if it had been beaten."""
    table = sweep(rows_of(roots=40), "face", **(RIDGE | {"layers": [1], "positions": "all"})).table
    assert not any("without" in line for line in summarise(table))
    assert any("without bag of tokens" in line for line in summarise(table.assign(bag_of_tokens=np.nan)))


def sweep_line(label: str, layer: float, accuracy: float, p_family: float, **more: Any) -> dict[str, Any]:
    """One line of a sweep's table, with controls below its score unless told."""
    own = {"label": label, "estimator": "logistic", "site": "S", "layer": layer, "position": "query", "metric": "accuracy"}
    own |= {"accuracy": accuracy, "low": accuracy - 0.04, "high": accuracy + 0.03, "p_family": p_family, "known_zero": False}
    own |= {"majority": 0.5, "token_identity": 0.52, "bag_of_tokens": 0.61, "control_task": 0.4, "chance": 0.5}
    own |= {"margin": 0.02, "margin_over": "bag_of_tokens", "margin_without_task": 0.02, "test": "permutation"}
    return own | {"rows": 90, "distinct": 90, "groups": 30} | more


def test_a_sweep_in_words() -> None:
    """Every number and name of the text, of a table that has all verdicts and both kinds of tests."""
    readable = {"margin": -0.05, "margin_over": "control_task", "margin_without_task": 0.1, "control_task": 0.79}
    area = {"auroc": 0.77, "auroc_low": 0.71, "auroc_high": 0.83}
    nothing = dict.fromkeys(["majority", "token_identity", "bag_of_tokens", "control_task", "margin", "margin_over"])
    lines = [
        sweep_line("face", 0, 0.97, 0.2),
        sweep_line("face", 1, 0.7, 0.0004, distinct=41, **area),
        sweep_line("face", 2, 0.8, 0.05, selectivity=0.41, selectivity_low=0.2, selectivity_high=0.6),
        sweep_line("face", 3, 0.9, 0.001, margin=0.0, margin_high=0.09),
        sweep_line("own", 1, 0.81, 0.0123, **readable),
        sweep_line("own", 2, 0.85, 0.01, margin=-0.2, margin_over="token_identity", token_identity=0.84),
        sweep_line("guess", 4, 0.5, 0.01, metric="balanced_accuracy", low_family=0.45, high_family=0.59, cells=9),
        sweep_line("guess", 3, 0.45, 0.01),
        sweep_line("late", math.nan, 0.66, 0.04, estimator="ridge", metric="auroc", test="corrected t", **nothing),
        sweep_line("coin", 0, 0.6, math.nan, known_zero=True, low=0.5),
        sweep_line("coin", 1, 0.37, math.nan, known_zero=True, high=0.49),
        sweep_line("coin", 2, 0.5, math.nan, known_zero=True),
    ]
    assert summarise(pd.DataFrame(lines), {"permutations": 199}, {"query": "prompts that share a row are one"}) == [
        "Shown: face at query (logistic): cells 2 of 4 shown, 1 of 4 below, 1 of 4 undecided; best accuracy 0.800 [0.760, "
        "0.830] "
        "at S2, best control 0.610 (bag of tokens), p = 0.050 over the grid (permutation; 90 rows of 30 groups).",
        "  decided by the margin over bag of tokens: lower bound +0.020, above 0.",
        "  selectivity there 0.410 [0.200, 0.600] (control task 0.400).",
        "Undecided: own at query (logistic): cells 2 of 2 undecided; best accuracy 0.850 [0.810, 0.880] at S2, best control "
        "0.840 "
        "(token identity), p = 0.010 over the grid (permutation; 90 rows of 30 groups).",
        "  decided by the margin over token identity: lower bound -0.200, not above 0.",
        "  The words alone tell the label in these texts. Test on words that were held out: sweep(groups=).",
        "Shown to be below 0.1 above what decides: guess at query (logistic): cells 1 of 2 below, 1 of 2 undecided; best "
        "balanced "
        "accuracy 0.500 [0.450, 0.590] for the best of 9 cells at S4, best control 0.610 (bag of tokens), p = 0.010 over the "
        "grid "
        "(permutation; 90 rows of 30 groups).",
        "  decided by the majority, which scores as well.",
        "Shown: late at query (ridge): cells 1 of 1 shown; best AUROC 0.660 [0.620, 0.690] at S, no controls, p = 0.040 over "
        "the "
        "grid (corrected t; 90 rows of 30 groups).",
        "  decided by p over the grid <= 0.05.",
        "Known zero coin at query: chance 0.500 inside 2 of 3 intervals (at 95 %, about one in twenty falls outside); farthest "
        "0.370.",
        "Controls not run: position_only, shuffled, untrained.",
        "Grid of 9 cells (1 site, 5 layers, 1 position, 4 labels, 2 estimators). Tests: permutation (199 permutations: no p is "
        "below 0.005), corrected by the maximum statistic over the grid; corrected t, with Bonferroni's correction over the "
        "grid; margins over controls: one-sided, 5 % over the grid.",
        "Groups: prompts that share a row are one.",
        "A probe shows that a label can be read off, not that the model uses it. Test the direction causally.",
    ]
    (lone,) = (line for line in summarise(pd.DataFrame(lines[4:5])) if line.startswith("  Readable"))
    assert lone == "  Readable, but the probe learns a random class per context as well."
    words = summarise(pd.DataFrame([sweep_line("own", 2, 0.85, 0.01, margin=-0.2, margin_over="bag_of_tokens")]))
    assert words[2] == "  The words alone tell the label in these texts. Test on words that were held out: sweep(groups=)."
    given = summarise(pd.DataFrame(lines), {"permutations": 199, "groups": "topic"})
    assert not any("sweep(groups=)" in line for line in given), "nobody is told to give what was given"
    alone = summarise(pd.DataFrame(lines[:2]))
    assert (
        "1 of 2 shown" in alone[0] and "p < 0.001 over the grid (permutation; 90 rows, 41 distinct of 30 groups)." in alone[0]
    )
    assert alone[2] == "  AUROC there 0.770 [0.710, 0.830]." and "Tests: permutation, corrected" in alone[-2]
    alone = summarise(pd.DataFrame(lines[:1]).assign(bag_of_tokens=math.nan, margin=math.nan))
    assert (
        "best control 0.520 (token identity), without bag of tokens, p = 0.200" in alone[0] and "1 of 1 undecided" in alone[0]
    )
    assert alone[1] == "  decided by p over the grid > 0.05." and alone[-2].endswith("statistic over the grid.")
    assert summarise(pd.DataFrame()) == summarise(pd.DataFrame([{"accuracy": 1.0}])) == ["No lines."]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"known_zero": True}, None),
        ({"p_family": math.nan}, ("undecided", "no test")),
        ({"p_family": None}, ("undecided", "no test")),
        ({"p_family": None, "high_family": 0.59}, ("below", "no test")),
        ({"p_family": 0.0501}, ("undecided", "p_family")),
        ({"p_family": 0.0501, "high_family": 0.61}, ("undecided", "p_family")),
        ({"p_family": 0.0501, "high_family": 0.59}, ("below", "p_family")),
        ({"p_family": 0.0501, "high_family": 0.59, "shuffled": 0.48}, ("undecided", "p_family")),
        ({"p_family": 0.0501, "high_family": 0.59, "bound": 0.05}, ("undecided", "p_family")),
        ({"accuracy": 0.5}, ("undecided", "majority")),
        ({"accuracy": 0.5, "majority": None, "chance": 0.4}, ("shown", "bag_of_tokens")),
        ({"margin": math.nan}, ("shown", "p_family")),
        ({"margin": 0.0}, ("undecided", "bag_of_tokens")),
        ({"margin": 0.0, "margin_high": 0.1}, ("undecided", "bag_of_tokens")),
        ({"margin": 0.0, "margin_high": 0.09}, ("below", "bag_of_tokens")),
        ({"margin": 0.0, "margin_over": "control_task"}, ("undecided", "control_task")),
    ],
)
def test_verdicts_at_their_bounds(more: dict[str, Any], said: tuple[str, str] | None) -> None:
    line = sweep_line("face", 1, 0.9, 0.05)
    assert told(line) == ("shown", "bag_of_tokens") and told(line | more) == said


def told(line: dict[str, Any]) -> tuple[str, str | None] | None:
    found = verdict_of(line)
    return None if found is None else (found.outcome, found.decided_by)


# Metrics and verdicts


def unequal(seed: int, effect: float = 1.8, count: int = 160, share: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two classes, of which one has a tenth; its AUROC is about .9 with an effect of 1.8. Plain numpy."""
    generator = np.random.default_rng([seed, 9])
    y = (generator.permutation(count) < share * count).astype(int)
    return generator.normal(size=(count, 4)) + effect * np.eye(1, 4) * y[:, None], y


@pytest.mark.slow
def test_a_rare_class_is_shown_by_its_area() -> None:
    """At 90 : 10 accuracy cannot tell an area of .9 from a constant guess. By default the area decides, in p and interval."""
    found: dict[str, int] = {"auto": 0, "accuracy": 0}
    for seed in range(6):
        X, y = unequal(seed)
        rows = ProbeRows.of_arrays(X, y, np.arange(len(y)))
        for metric in found:
            report = sweep(rows, "label", metric=metric, permutations=39)
            found[metric] += report.lines[0]["verdict"] == "shown"
    assert found["auto"] == 6 > found["accuracy"]
    line = report.lines[0]
    assert line["metric"] == "accuracy" and report.settings["metric"] == "accuracy"
    line = sweep(rows, "label", permutations=19).lines[0]
    assert line["metric"] == "auroc" and line["majority"] == 0.5 and line["low"] < line["accuracy"] == line["auroc"]
    assert (line["auroc_low"], line["auroc_high"]) == (line["low"], line["high"])


def test_equal_classes_are_scored_by_accuracy() -> None:
    X, y = unequal(0, share=0.5)
    rows = ProbeRows.of_arrays(X, y, np.arange(len(y)))
    assert sweep(rows, "label", permutations=19).lines[0]["metric"] == "accuracy"
    balanced = sweep(rows, "label", permutations=19, metric="balanced_accuracy").lines[0]
    assert balanced["accuracy"] == pytest.approx(balanced["balanced_accuracy"]) and balanced["low"] < balanced["accuracy"]
    with pytest.raises(ProbeError, match="metric"):
        sweep(rows, "label", metric="precision")


def words(seed: int = 1, effect: float = 3.0) -> tuple[ProbeRows, np.ndarray]:
    """(rows that hold their word and, in a direction of its own, a label that is the same in all rows of a word; words)"""
    generator = np.random.default_rng(seed)
    word = np.arange(240) % 24
    X = generator.normal(size=(24, 24))[word] + 0.2 * generator.normal(size=(240, 24))
    X[:, 0] = effect * (word % 2) + generator.normal(size=240)
    how: dict[str, Any] = dict(tokens=word, positions=np.zeros(240, dtype=int), keys=np.arange(240).astype(str))
    return ProbeRows.of_arrays(X, {"label": word % 2, "own": generator.integers(2, size=240)}, np.arange(240), **how), word


def test_a_label_that_the_control_task_reads_as_well_is_readable() -> None:
    """The row's own coin is in the rows, but so are the words: a random class per word is read better still."""
    rows, word = words()
    own = rows.frame["own"].to_numpy()
    X = rows.matrix("X").copy()
    X[:, 1] = 2.7 * own + np.random.default_rng(2).normal(size=240)
    how: dict[str, Any] = dict(tokens=word, positions=np.zeros(240, dtype=int), keys=np.arange(240).astype(str))
    report = sweep(ProbeRows.of_arrays(X, {"own": own}, np.arange(240), **how), "own", permutations=19)
    line = report.lines[0]
    assert line["accuracy"] < line["control_task"] and line["margin_without_task"] > 0 and line["p_family"] <= 0.05
    assert line["verdict"] in ("below", "undecided") and line["decided_by"] == "control_task"
    assert "Readable, but the probe learns a random class" in report.text() and "sweep(groups=)" in report.text()
    found = verdict_of(line | {"p_family": 0.2})
    assert found is not None and found.decided_by == "p_family"


def test_held_out_words_leave_the_control_task_nothing() -> None:
    """With words in one fold each, a random class per word cannot be learned; the label, a direction of its own, can."""
    rows, word = words(effect=8.0)
    free, held = (sweep(rows, "label", permutations=19, groups=groups).lines[0] for groups in (None, word))
    assert free["control_task"] > 0.9 and free["verdict"] != "shown"
    assert held["groups"] == 24 and held["control_task"] < 0.75 and held["accuracy"] > 0.8 and held["verdict"] == "shown"
    with pytest.raises(BadRows, match="one per example"):
        sweep(rows, "label", groups=[1, 2, 3])
    with pytest.raises(BadRows, match="column of groups"):
        sweep(rows, "label", groups="topic")


def test_prompts_without_a_value_are_groups_of_their_own() -> None:
    """Prompts that share a value, also through others, are one group; a missing value is shared by none."""
    topic = np.array(["a", "a", "a", "b", None, None, None, None, "b", "c"], dtype=object)
    rows = groups.grouped(rows_of(roots=5, topic=topic), "topic")  # two rows a root
    first, second, third, fourth, fifth = (set(rows.roots[i : i + 2]) for i in range(0, 10, 2))
    assert first == second == fifth and len(first | third | fourth) == 3


def test_position_alone_is_a_control() -> None:
    """A label that follows from the place in the prompt is not shown, whatever the rows hold of it."""
    place = np.tile(np.arange(4), 50)
    generator = np.random.default_rng(0)
    X = np.eye(4)[place] + 0.1 * generator.normal(size=(200, 4))
    rows = ProbeRows.of_arrays(X, place % 2, np.repeat(np.arange(50), 4), positions=place)
    line = sweep(rows, "label", permutations=0).lines[0]
    assert line["position_only"] == 1.0 and line["accuracy"] > 0.95 and line["verdict"] != "shown"


@pytest.mark.slow
def test_untrained_model_of_a_run(engine: Engine) -> None:
    """True takes the run's own engine; other values are refused before anything is computed."""
    run = engine.replay(tasks.get("coin")(flips=(1, 3)).examples(30), sites="S")
    how: dict[str, Any] = dict(sites="S", layers=[3], positions="query", estimators="ridge", permutations=19)
    assert body(sweep(run, "face", untrained=True, **how)) == body(sweep(run, "face", engine=engine, **how))
    with pytest.raises(ProbeError, match="untrained=True needs the engine"):
        sweep(ProbeRows.of(run), "face", untrained=True, **how)
    with pytest.raises(ProbeError, match="Invalid untrained"):
        sweep(run, "face", untrained="yes", **how)  # type: ignore[arg-type]


def test_a_report_says_how_it_decided(report: Report) -> None:
    """The grid, the correction, the permutations with the smallest p, and what decided."""
    text = report.text()
    assert "Grid of 2 cells (1 site, 2 layers, 1 position, 1 label, 1 estimator)" in text and "maximum statistic" in text
    assert "19 permutations: no p is below 0.050" in text and "  decided by the margin over" in text
    assert "  AUROC there" in text and {"verdict", "decided_by"} <= set(report.table)


def test_the_best_cell_is_one_that_is_shown(report: Report) -> None:
    """A cell with a higher score that a control explains is not the best one."""
    line = report.best("face")
    higher = line | {"layer": 9, "accuracy": 1.1, "margin": -0.1, "margin_without_task": -0.1}
    both = Report("sweep", [higher, line], {}, {})
    assert both.best("face")["layer"] == line["layer"] and f"at S{line['layer']}" in both.text()


# ---- curve -----------------------------------------------------------------------------------------------------------
# The complexity-accuracy curve: a label that is read is accurate before a probe can memorise, a label that is not never is.

ROWS = rows_of(roots=60, width=24)
PATH = [1e-4, 1e-2, 1.0, 100.0]


@pytest.mark.slow
def test_curve_of_a_planted_label(tmp_path: Path) -> None:
    """Complexity rises with C, the planted label is read, noise never is; the report has its figure."""
    planted = complexity_curve(ROWS, "face", layer=1, position="all", C=PATH)
    noise = complexity_curve(ROWS, "face", layer=0, position="all", C=PATH).table
    table = planted.table
    assert table["C"].tolist() == PATH and table["norm"].is_monotonic_increasing
    assert table["complexity"].iloc[0] + 0.1 < table["complexity"].iloc[-1]
    assert table["complexity"].iloc[-1] > 0.65, "at the weak end a probe memorises exchanged labels"
    assert (table["accuracy"].iloc[1:] > 0.9).all() and (table["auroc"].iloc[1:] > 0.95).all()
    assert (noise["low"] < 0.5).all() and noise["train"].iloc[-1] > 0.65
    assert table["p_worse"].iloc[0] < 0.05 < table["p_worse"].iloc[2] and "not worse (p > 0.05) is C = 1:" in planted.text()
    planted.complexity()
    planted.save(tmp_path)
    assert (tmp_path / "complexity_curve.png").exists() and Report.load(tmp_path).lines == planted.to_json()["rows"]


@pytest.mark.parametrize("estimator", ["logistic", "ridge"])
def test_points_are_those_of_single_fits(estimator: str) -> None:
    """Every accuracy is that of a fit at this C alone, on the same folds; equal input gives equal lines."""
    report = complexity_curve(ROWS, "face", layer=1, position="all", estimator=estimator, C=[1.0, 0.01])
    assert report.lines == complexity_curve(ROWS, "face", layer=1, position="all", estimator=estimator, C=[0.01, 1.0]).lines
    if estimator == "logistic":
        split, X, y = by_root(ROWS), ROWS.matrix("S", 1), ROWS.target("face").values
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, tol=1e-10))
        right = sum(int((probe.fit(X[fit], y[fit]).predict(X[held]) == y[held]).sum()) for fit, held in split)
        assert report.lines[0]["accuracy"] == pytest.approx(right / len(y))


def test_pareto_front_is_not_dominated() -> None:
    table = complexity_curve(ROWS, "face", layer=0, position="all", C=PATH).table
    for line in table.itertuples():
        others = table[(table["accuracy"] >= line.accuracy) & (table["complexity"] <= line.complexity)]
        better = others[(others["accuracy"] > line.accuracy) | (others["complexity"] < line.complexity)]
        assert line.pareto == (len(better) == 0)
    assert table.loc[table["accuracy"].idxmax(), "p_worse"] == 1, "the best is not worse than itself"


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ProbeError, match="Use logistic or ridge"):
        complexity_curve(ROWS, "face", layer=1, position="all", estimator="lda")
    with pytest.raises(ProbeError, match="above 0"):
        complexity_curve(ROWS, "face", layer=1, position="all", C=[0.0, 1.0])


# ---- commands --------------------------------------------------------------------------------------------------------
# `replaylens probe` and `steer`, and the scripts that users copy.

ROOT = Path(__file__).parents[3]
SCRIPTS = ("layer_sweep", "branch_question")


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.mark.slow
def test_probe_and_steer(coin_dump: Dump, tmp_path: Path) -> None:
    """A sweep writes a report and a saved probe. The probe is then tested causally on prompts that are not in the dump."""
    folder, probes = tmp_path / "report", tmp_path / "probes"
    where = ("--label", "state", "--sites", "S", "--positions", "query", "--layers", "0,3")
    where += ("--permutations", "19", "--quiet")
    done = call("probe", coin_dump.url, *where, "--out", str(folder), "--save-probes", str(probes))
    assert done.exit_code == 0, done.output
    assert "Shown: state at query" in done.output
    report = json.loads((folder / "report.json").read_text())
    assert report["source"]["digest"] == coin_dump.digest and {row["layer"] for row in report["rows"]} == {0, 3}
    assert (probes / "state.safetensors").exists()
    done = call("steer", coin_dump.url, "--probe", str(probes / "state"), "--n", "10", "--placebos", "2", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kind"] == "steer"


def test_list() -> None:
    done = call("probe", "--list")
    assert done.exit_code == 0 and "mass-mean-whitened" in done.output and "from Python only" in done.output
    assert {each["name"] for each in json.loads(call("probe", "--list", "--json").stdout)} >= {"logistic", "leace"}


@pytest.mark.parametrize(
    "words, message",
    [
        (("probe",), "No dump given"),
        (("probe", "/nowhere"), "BadDump"),
        (("probe", "DUMP", "--sites", "S", "--label", "nose"), "MissingLabel"),
        (("probe", "DUMP", "--layers", "one"), "--layers one"),
        (("probe", "DUMP", "--estimators", "magic"), "ProbeError"),
        (("probe", "DUMP", "--sites", "S", "--layers", "-1"), "layers 0, 1, 2, 3, 4"),
        (("probe", "DUMP", "--sites", "S", "--jobs", "0"), "--jobs 0 runs nothing"),
        (("report", "DUMP", "probes/none"), "probes/none does not exist"),
        (("steer", "DUMP"), "Give one of 0, 1, 2, 3, 4"),
        (("steer", "DUMP", "--layer", "-1"), "layers 0, 1, 2, 3, 4"),
        (("steer", "DUMP", "--test", "tickle"), "Use one of steer"),
        (("steer", "DUMP", "--layer", "3", "--model", "coin-draft"), "FingerprintMismatch"),
    ],
)
def test_bad_input_is_one_line(coin_dump: Dump, words: tuple[str, ...], message: str) -> None:
    done = call(*(coin_dump.url if word == "DUMP" else word for word in words), *(["--quiet"] if words[0] == "probe" else []))
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The scripts are short, and run from scratch to their reports."""
    path = ROOT / "docs" / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 60
    runpy.run_path(str(path))["main"](tmp_path, 40)
    assert "hown" in capsys.readouterr().out
    assert list(tmp_path.rglob("report.json"))


def test_an_area_of_few_rows() -> None:
    """Folds of one row each have no area, and no control has one. With a row more, some folds of some repetitions have."""
    for count in (5, 7):
        x = np.random.default_rng(0).normal(size=(count, 6))
        rows = ProbeRows.of_arrays(x, {"y": np.arange(count) % 2 == 1}, range(count), tokens=[str(i % 3) for i in range(count)])
        report = sweep(rows, "y", metric="auroc", permutations=0, estimators="ridge")
        (line,) = report.lines
        if count == 5:
            assert np.isnan(line["accuracy"]) and line["token_identity"] is None and line["verdict"] == "undecided"
            assert "Controls not run: token_identity" in str(report)
        else:
            assert 0 <= line["token_identity"] <= 1 and np.isfinite(line["margin"])
