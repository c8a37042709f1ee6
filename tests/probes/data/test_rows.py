"""Rows from dumps equal rows from runs, positions are the documented ones, and each root stays on one side of a split."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bench.calibrate import PLAINS, Effect, Noise, Plain
from replaylens import Run, cli, probes, tasks
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, FingerprintMismatch, UnknownSite
from replaylens.engine.passes import lens
from replaylens.features.features import SparseFeatures
from replaylens.probes import controls, groups, splits, sweeps
from replaylens.probes.causal import InterventionRunner
from replaylens.probes.controls import Goal, make_goal
from replaylens.probes.errors import (
    BadPosition,
    BadRows,
    MissingLabel,
    OneClass,
    ProbeError,
    SharedRows,
    TooFewGroups,
)
from replaylens.probes.heldout import held_out, score
from replaylens.probes.permutations import Null, why_no_exchange
from replaylens.probes.probe import fit_probe
from replaylens.probes.questions.forced import viable_branch
from replaylens.probes.rows import MAX_CLASSES, ProbeRows, make_target, with_features
from replaylens.probes.splits import Split
from replaylens.probes.sweeps import sweep
from replaylens.probes.verdicts import shown
from replaylens.tasks.errors import TaskError
from replaylens.views.report import ReportPage
from replaylens.weights import loading
from tests.devices import swept
from tests.features.tiny import COUNT, write
from tests.probes.synthetic import labelled_rows, rows_of
from tests.toy_model import engine as toy_engine


@pytest.fixture(scope="module")
def rows(coin_dump: Dump) -> ProbeRows:
    return ProbeRows.of(coin_dump)


def test_run_and_dump_give_the_same_rows(engine: Engine, rows: ProbeRows) -> None:
    """Rows and index are equal bit for bit, so fitting in a notebook equals fitting from disk."""
    run = engine.replay(tasks.get("coin")(flips=(2, 5)).examples(20), sites="SZ", drafter="lens")
    made = ProbeRows.of(run)
    some = rows.where(rows.frame["example"] < 20)
    for layer in range(5):
        assert np.array_equal(made.matrix("S", layer), some.matrix("S", layer))
    made.frame["logprob"]
    pd.testing.assert_frame_equal(made.frame, some.frame.drop(columns=["shard", "row"])[made.frame.columns], check_like=True)
    assert set(made.frame) == set(some.frame) - {"shard", "row"}


@pytest.mark.slow
def test_probabilities_are_computed_when_asked(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitting a probe on a run unembeds nothing. Reading log-probability or entropy, also of some rows, through a position or
    in a join, computes them once for the run, with the bits of a dump, and many texts a pass."""
    run = engine.replay(tasks.get("coin")(flips=(2, 5)).examples(12), sites=["blocks.2.hook_in"], drafter="lens")
    passes, unembedded = [], []
    planted, read = type(engine).planted, lens.next_token
    monkeypatch.setattr(type(engine), "planted", lambda self, *given: passes.append(given) or planted(self, *given))
    monkeypatch.setattr(lens, "next_token", lambda *given: unembedded.append(given) or read(*given))
    rows = ProbeRows.of(run)
    fit_probe(run, "face", site="blocks.2.hook_in", position="step")
    sweep(run, "face", sites=["blocks.2.hook_in"], positions="step", permutations=0, controls=False, estimators="ridge")
    assert not passes and not unembedded and "entropy" in rows.frame and "entropy" not in rows.frame.columns
    kept = ProbeRows.of(run.save(tmp_path / "dump"))
    passes.clear(), unembedded.clear()
    chosen = rows.at("step")
    assert chosen.frame["entropy"].equals(kept.at("step").frame["entropy"]) and len(passes) == len(unembedded) == 1
    assert rows.frame["logprob"].equals(kept.frame["logprob"]) and rows.frame["logprob"].notna().any()
    sure = ProbeRows.of(run).at(lambda frame: frame["entropy"] < 0.1)
    assert 0 < len(sure) == int((kept.frame["entropy"] < 0.1).sum())
    joined = ProbeRows.join(a=ProbeRows.of(run), b=kept)
    assert joined.frame["entropy"].notna().all() and joined.where(joined.frame["part"] == "a").frame["entropy"].equals(
        kept.frame["entropy"]
    )
    both = ProbeRows.join(a=ProbeRows.of(run), b=ProbeRows.of(run)).where(np.arange(2 * len(rows)) >= len(rows))
    assert both.frame["entropy"].equals(kept.frame["entropy"]) and len(passes) == 1, "once for the run"
    clean = sweep(
        run, "face", sites=["blocks.2.hook_in"], positions="step", residualise=["entropy"], permutations=0, estimators="ridge"
    )
    assert clean.lines and len(passes) == 1


def test_positions_of_a_text(rows: ProbeRows) -> None:
    """Positions follow from the words: a step is decided at 'flips' or 'does', the prompt ends with ':', the answer follows."""
    main = rows.accepted()
    words = {spec: set(main.at(spec).frame["text"]) for spec in ("step", "query", "query+1", "query-1", "0")}
    assert words["step"] == {" flips", " does"} and words["query"] == {":"} and words["query+1"] == {" heads", " tails"}
    assert words["query-1"] == {" A"} and words["0"] == {"A"}
    before = main.at("step-1").frame
    assert (before["text"].str.strip() == before["name"]).all(), "the word before the deciding one is the actor's name"
    third = main.at("step:3").frame
    assert (third["actions"] == 3).all() and third["example"].is_unique
    assert len(main.at("step:3-1")) == len(third) and (main.at("step:3-1").frame["actions"] == 2).all()
    assert len(main.at("all")) == len(main)


@pytest.mark.slow
def test_query_of_padded_prompts() -> None:
    """A model that reads whole chunks pads its prompts. The query is the last word, the answer is next, padding is neither."""
    thinker, task = Engine.load("coin-thinking"), tasks.get("coin")(rendering="picture")
    rows = ProbeRows.of(thinker.replay(task.examples(8), sites="S")).accepted()
    prompts = rows.frame[rows.frame["token_state"] == "prompt"].groupby("example")
    padded = prompts["since_query"].agg(lambda since: since.isna().any())
    assert padded.all()
    for spec, words in (("query", {":"}), ("query-1", {" A"}), ("query+1", {" heads", " tails"})):
        here = rows.at(spec)
        assert set(here.frame["text"]) == words and len(here) == 8 and here.target("state").present.all()
    for spec in ("query", "text: A:"):
        stage = InterventionRunner(thinker, task.examples(8), "blocks.2.hook_in", "state", spec)
        assert [subject.positions for subject in stage.subjects] == [[p] for p in rows.at(spec).frame["position"]]


def test_steps_of_rejected_branches(steps_dump: Dump) -> None:
    """Steps of a rejected branch are counted along its whole path: at most one step between two deciding words."""
    rejected = ProbeRows.of(steps_dump).rejected()
    at_steps = rejected.at("step").frame
    assert len(at_steps) > 20 and set(at_steps["text"]) == {" flips", " does"}
    known = rejected.frame[rejected.frame["since_step"].notna()]
    assert (known["since_step"] >= 0).all() and (known["since_step"] <= known["position"]).all()


def test_targets() -> None:
    """Text, booleans and few numbers are classes. Many numbers and fractions are numeric. Missing values are marked."""
    assert make_target("a", ["x", None, "y"]).present.tolist() == [True, False, True]
    assert make_target("a", [True, False]).classes.tolist() == ["False", "True"]
    assert make_target("a", pd.Series([1, 2, None], dtype="Int64")).kind == "class"
    assert make_target("a", [0.5, 1.5]).kind == "number"
    assert [make_target("a", list(range(count))).kind for count in (MAX_CLASSES, MAX_CLASSES + 1)] == ["class", "number"]
    with pytest.raises(ProbeError, match="'class' or 'number'"):
        make_target("a", [1], "thing")


def test_state_is_the_tasks_own(rows: ProbeRows) -> None:
    here = rows.accepted().at("query")
    assert np.array_equal(here.target("state").values, here.target("face").values)


# Splits


def all_splits(rows: ProbeRows) -> list[splits.Split]:
    return [
        splits.by_root(rows),
        splits.by_acceptance(rows),
        splits.by_acceptance(rows, "rejected"),
        splits.by_depth(rows, 1),
        splits.by_length(rows, 3),
    ]


def test_no_root_on_both_sides(rows: ProbeRows) -> None:
    rows = groups.independent(rows).rows
    for split in all_splits(rows):
        for train, test in split:
            assert not set(rows.roots[train]) & set(rows.roots[test])
    covered = splits.by_root(rows).test.sum(0)
    assert (covered == 1).all(), "cross-validation tests every row once"


def test_depths_and_lengths_are_whole_numbers_of_tokens_and_steps(rows: ProbeRows) -> None:
    """A row just as deep, or a prompt just as long, as the split says is fitted on; the next one is tested."""
    rows = groups.independent(rows).rows
    for column, split in ("depth", splits.by_depth(rows, 1)), ("steps", splits.by_length(rows, 3)):
        fitted, tested = (rows.frame[column][mask.any(0)] for mask in (split.train, split.test))
        most = {"depth": 1, "steps": 3}[column]
        assert fitted.max() == most and tested.min() == most + 1


def test_sides_of_every_split_by_definition(rows: ProbeRows) -> None:
    """Fold by fold: fitted are rows of other folds' groups that the split fits on, tested those of its own that it tests."""
    rows = groups.independent(rows).rows
    rows = replace(rows, frame=rows.frame.assign(correct=[root < "8" for root in rows.roots]))
    frame, own = rows.frame, groups.groups_of(rows)
    accepted, right = frame["accepted"].to_numpy(bool), frame["correct"].to_numpy(bool)
    shallow, every = (frame["depth"] <= 1).to_numpy(), np.ones(len(rows), bool)
    made = {
        "root": (splits.by_root(rows, 4, 3), every, every),
        "fitted on accepted": (splits.by_acceptance(rows, folds=4, seed=3), accepted, ~accepted),
        "fitted on rejected": (splits.by_acceptance(rows, "rejected", 4, 3), ~accepted, accepted),
        "depth above 1": (splits.by_depth(rows, 1, 4, 3), shallow, ~shallow),
        "right answers": (splits.by_answer(rows, 4, 3), right, every),
    }
    ranked = sorted(set(own), key=lambda group: hashlib.sha256(f"3:{group}".encode()).hexdigest())
    fold = np.array([ranked.index(group) % 4 for group in own])
    for name, (split, fit, test) in made.items():
        assert split.name == name and len(split) == 4
        for number, (fitted, tested) in enumerate(split):
            assert np.array_equal(fitted, (fold != number) & fit) and np.array_equal(tested, (fold == number) & test), name
    steps = frame["steps"].to_numpy()
    (fitted, tested), split = next(iter(splits.by_length(rows, 3))), splits.by_length(rows, 3)
    assert np.array_equal(fitted, steps <= 3) and np.array_equal(tested, steps > 3) and split.name == "length above 3"
    digests = {each.digest for each, *_ in made.values()} | {split.digest, splits.by_root(rows, 4, 4).digest}
    assert len(digests) == 7 and splits.by_root(rows, 4, 3).digest == made["root"][0].digest


@pytest.mark.parametrize("seed", range(8))
def test_groups_are_what_shared_rows_connect(seed: int) -> None:
    """Against a search: roots with a common key, also through others, are one group, named after its first root."""
    generator = np.random.default_rng(seed)
    roots, keys = (np.array([f"{x:02d}" for x in generator.integers(count, size=24)]) for count in (16, 14))
    found = groups.groups_of(SimpleNamespace(frame=pd.DataFrame({"root": roots}), roots=roots), keys, roots)  # type: ignore[arg-type]
    for i in range(24):
        reached, grown = {roots[i]}, set[str]()
        while reached != grown:
            grown = set(reached)
            reached |= set(roots[np.isin(keys, keys[np.isin(roots, list(reached))])])
        assert found[i] == min(reached)


@pytest.mark.parametrize("tolerance", [0.0, 0.3, 0.6])
def test_near_duplicates_are_linked_by_chains(tolerance: float) -> None:
    X = np.random.default_rng(1).normal(size=(30, 3))
    X[20:] = X[:10]
    reach = tolerance * np.median(np.linalg.norm(X - X.mean(0), axis=1))
    close = np.linalg.norm(X[:, None] - X[None], axis=-1) <= reach
    for _ in range(30):
        close = close @ close
    found = groups.near_duplicates(X, tolerance)
    assert np.array_equal(found[:, None] == found[None], close) and 1 < len(set(found)) <= 20


def test_a_split_across_branches_is_refused(rows: ProbeRows) -> None:
    """A split of accepted against rejected rows that ignores roots leaks, and is refused."""
    accepted = rows.frame["accepted"].to_numpy()
    with pytest.raises(SharedRows, match="Branches of a prompt share its tokens"):
        splits.by_mask(rows, "naive", accepted, ~accepted)


def test_folds_do_not_depend_on_the_rows(rows: ProbeRows) -> None:
    """A root has the same fold at every position of a sweep, whatever the order of rows. Another seed gives another fold."""
    roots = rows.roots
    fold = dict(zip(roots, splits.fold_of_groups(roots, 5), strict=True))
    again = dict(zip(roots[::-1], splits.fold_of_groups(roots[::-1], 5), strict=True))
    assert fold == again
    assert fold != dict(zip(roots, splits.fold_of_groups(roots, 5, seed=1), strict=True))


def test_parts_and_shifts(engine: Engine) -> None:
    """Two dumps joined: fitted on one wording, tested on the other, and every root is on its task's own side."""
    made = {}
    for name, knobs in {"plain": {}, "idle": {"phrasing": "idle"}}.items():
        run = engine.replay(tasks.get("coin")(flips=(2, 3), **knobs).examples(24), sites=["blocks.2.hook_in"], drafter="lens")
        made[name] = ProbeRows.of(run)
    joined = groups.distinct(ProbeRows.join(**made).accepted())
    split = splits.by_part(joined, "plain", "idle")
    assert set(joined.frame["part"][split.train[0]]) == {"plain"} and set(joined.frame["part"][split.test[0]]) == {"idle"}
    assert len(joined.matrix("blocks.2.hook_in")) == len(joined)
    phrase = splits.by_phrase(joined, " not")
    assert not (joined.frame["text"][phrase.train[0]] == " not").any()
    with pytest.raises(ProbeError, match="parts 'x'"):
        splits.by_part(joined, "x", "idle")


def test_names_held_out() -> None:
    rows = rows_of(roots=30, name=np.repeat(["Ann", "Bob", "Cid"] * 10, 2))
    split = splits.by_names(rows, {"Cid"})
    assert set(rows.frame["name"][split.test[0]]) == {"Cid"} and set(rows.frame["name"][split.train[0]]) == {"Ann", "Bob"}


@pytest.mark.parametrize("position", ["step:1", "query"])
@pytest.mark.parametrize("kind", ["names", "phrase"])
def test_what_prompts_hold_is_read_off_all_of_them(rows: ProbeRows, kind: str, position: str) -> None:
    """A sweep splits the rows of one position; a held-out word elsewhere in the prompt still keeps it out of the fit."""
    frame = rows.frame
    held = set(sorted(frame["name"].dropna().unique())[::2])
    has = frame["name"].isin(held) if kind == "names" else frame["text"] == " not"
    seen: list[tuple[ProbeRows, splits.Split]] = []

    def spied(here: ProbeRows) -> splits.Split:
        seen.append((here, splits.by_names(here, held) if kind == "names" else splits.by_phrase(here, " not")))
        return seen[0][1]

    sweep(rows, "face", sites="S", layers=[3], positions=position, estimators="ridge", split=spied, controls=False)
    ((here, split),) = seen
    fitted, tested = (set(here.roots[mask[0]]) for mask in (split.train, split.test))
    assert fitted and not fitted & set(frame[has]["root"]), "no held-out word anywhere in a prompt that is fitted on"
    assert tested <= set(frame[has & frame["accepted"]]["root"])


def test_held_out_words_need_whole_paths(coin_dump: Dump) -> None:
    rows = ProbeRows.of(coin_dump).at("step")
    holes = ProbeRows(rows.frame, rows.source, rows.numbers)
    for make in (lambda: splits.by_phrase(holes, " not"), lambda: splits.by_names(holes, {"Alice"})):
        with pytest.raises(BadRows, match="whole paths"):
            make()


# Refused


def test_bad_rows_and_labels(rows: ProbeRows) -> None:
    with pytest.raises(MissingLabel, match=r"'nose'.*face, final, parity"):
        rows.target("nose")
    with pytest.raises(UnknownSite):
        rows.cells("T")
    with pytest.raises(TooFewGroups, match="for 5 folds"):
        splits.by_root(rows.where(rows.frame["example"] < 3), 5)
    early = rows.accepted().at("step:1-1")
    with pytest.raises(OneClass, match="only '0'"):
        make_goal(early.target("parity")).check(splits.by_root(early).train)
    with pytest.raises(BadRows, match="has no value"):
        make_goal(rows.accepted().at("2").target("parity"))


def test_rows_that_are_not_finite() -> None:
    rows = rows_of(roots=10)
    rows.source.tensors["blocks.1.hook_in"][3, 0] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(BadRows, match="1 of 20 rows contain NaN or infinity, the first at row 3"):
        rows.matrix("S", 1)


def test_rows_of_another_engine(rows: ProbeRows) -> None:
    with pytest.raises(FingerprintMismatch, match="weights"):
        rows.require(toy_engine())


def test_rows_of_two_models_are_not_joined(engine: Engine) -> None:
    """Models that differ in one weight are different models. Rows of the same engine can be joined."""
    model = loading.load(engine.model)
    model.ln_final.weight.data.mul_(1.5)
    other = Engine(model, engine.text)
    examples = tasks.get("coin")(flips=2).examples(4)
    mine, theirs = (ProbeRows.of(e.replay(examples, sites="S", drafter="ngram", rejected=False)) for e in (engine, other))
    with pytest.raises(FingerprintMismatch, match=r"'a' and 'b' come from different engines \(weights"):
        ProbeRows.join(a=mine, b=theirs)
    ProbeRows.join(a=mine, b=mine).require(engine)


def test_filtered_dumps_are_refused(coin_dump: Dump) -> None:
    with pytest.raises(ProbeError, match="whole dump"):
        ProbeRows.of(coin_dump.where(accepted=True))


# ---- groups ----------------------------------------------------------------------------------------------------------
# Rows with the same path are one observation. Nothing that is tested has been seen, whichever way a split was made.


@pytest.fixture(scope="module")
def coin(engine: Engine) -> ProbeRows:
    """Short prompts, many of which begin alike."""
    return ProbeRows.of(engine.replay(tasks.get("coin")(flips=2).examples(200), sites=["blocks.3.hook_in"])).accepted()


def repeated(split: Split, rows: ProbeRows, cell: str = "blocks.3.hook_in") -> float:
    """Share of tested rows that have a bit-identical fitted row."""
    x = np.ascontiguousarray(rows.matrix(cell))
    bits = x.view(f"V{x.shape[1] * x.itemsize}")[:, 0]
    return float(np.mean([np.isin(bits[test], bits[train]).mean() for train, test in split]))


@pytest.mark.parametrize("position", swept(["step:1", "step", "query"], "query"))
def test_no_tested_row_has_been_fitted(coin: ProbeRows, position: str) -> None:
    """Cross-validation over groups separates equal rows; over roots it does not. Distinct rows have no equals at all."""
    here = coin.at(position)
    assert repeated(splits.by_root(here), here) == 0
    alone = groups.independent(here).rows
    assert repeated(splits.by_root(alone), alone) == 0 and len(np.unique(groups.path_keys(alone))) == len(alone)
    if position != "query":  # the control: roots differ where rows are equal
        fold = splits.fold_of_groups(here.roots, 5)
        naive = Split("by root alone", np.arange(5)[:, None] != fold, np.arange(5)[:, None] == fold, here.roots)
        assert repeated(naive, here) > 0.3


def test_a_label_of_the_path_is_not_shown(coin: ProbeRows) -> None:
    """A random bit of each path can be learnt by heart from rows of the same path, and from nothing else."""
    here = coin.at("step:1")
    paths = groups.histories(here)
    assert paths is not None
    bit = [hashlib.sha256(path.tobytes()).digest()[0] % 2 for path in paths]
    labelled = replace(here, frame=here.frame.assign(bit=bit))
    report = sweep(labelled, "bit", sites=["blocks.3.hook_in"], positions="step:1", permutations=39, estimators="ridge")
    line = report.best("bit")
    assert line["verdict"] != "shown" and line["low"] < 0.5
    assert line["distinct"] == line["groups"] < line["rows"] == len(here), "what repeats is counted, but not as evidence"


def test_groups_join_roots_that_share_a_row() -> None:
    """Roots 0 and 1 share their first row, 1 and 2 their second: all three are one group, and 3 is another."""
    x = np.zeros((1, 8, 2))
    x[0, :, 0] = [1, 2, 1, 3, 4, 3, 5, 6]
    rows = labelled_rows(x, np.repeat(np.arange(4), 2), np.arange(8) % 2, token=0)
    keys = np.array(["a", "b", "a", "c", "d", "c", "e", "f"])
    found = groups.groups_of(rows, keys)
    assert len(set(found[:6])) == 1 and found[6] == found[7] != found[0]
    assert found[0] == min(rows.roots[:6]), "named after its first root, whatever the order"


def test_shared_beginnings_are_left_out(coin: ProbeRows) -> None:
    """All prompts begin with one word, which makes one group. Without it there are enough, and the report says so."""
    here = groups.independent(coin)
    assert here.begins_at > 0 and len(np.unique(here.groups)) >= groups.MIN_GROUPS
    assert (here.rows.frame["position"] >= here.begins_at).all() and here.note is not None
    with pytest.raises(TooFewGroups, match="1 independent groups"):
        splits.by_root(coin)
    report = sweep(
        coin, "face", sites=["blocks.3.hook_in"], positions="all", permutations=0, controls=False, estimators="ridge"
    )
    assert any("share the rows before token" in note for note in report.notes)
    assert groups.independent(coin.at("query")).begins_at == 0


def test_accepted_rows_stand_for_rejected_ones() -> None:
    """Of equal rows the accepted one is kept."""
    rows = rows_of(roots=10, per_root=1)
    twice = ProbeRows.join(a=rows.where(np.ones(10, dtype=bool)), b=rows)
    frame = twice.frame.assign(accepted=np.arange(20) >= 10)
    kept = groups.distinct(replace(twice, frame=frame))
    assert len(kept) == 10 and kept.frame["accepted"].all()


# Splits that leak


def by_rows(rows: ProbeRows) -> Split:
    """A split over rows that hides their roots."""
    test = np.arange(2)[:, None] == np.arange(len(rows)) % 2
    return Split("rows", ~test, test, np.arange(len(rows)).astype(str))


def test_a_split_over_rows_is_refused() -> None:
    """The rows' own roots count, not those that a split claims."""
    with pytest.raises(SharedRows, match="Split 'rows', fold 0"):
        sweep(rows_of(roots=20), "face", sites="S", positions="all", split=by_rows, permutations=0)
    with pytest.raises(ProbeError, match=r"has masks \(1, 5\), but there are 40 rows"):
        sweep(
            rows_of(roots=20),
            "face",
            sites="S",
            positions="all",
            split=lambda rows: Split("short", np.eye(1, 5, dtype=bool), np.eye(1, 5, 1, dtype=bool), np.arange(5).astype(str)),
        )


def test_a_shared_row_is_named(coin: ProbeRows) -> None:
    here = coin.at("step:1")
    fit = np.isin(here.roots, np.unique(here.roots)[::2])
    with pytest.raises(SharedRows, match=r"row \d+ \(root \w+\) is fitted and row \d+ \(root \w+\) is tested"):
        splits.by_mask(here, "every second prompt", fit, ~fit)
    alone = groups.distinct(here)
    fit = np.isin(alone.roots, np.unique(alone.roots)[::2])
    assert len(splits.by_mask(alone, "distinct", fit, ~fit)) == 1, "the control: distinct rows may be split so"


# Positions and labels that cannot be probed


@pytest.mark.slow
def test_a_position_without_values_is_skipped(coin: ProbeRows) -> None:
    """There is no next action at the query. The other position is probed, and a note says what is missing."""
    how = dict(sites=["blocks.3.hook_in"], permutations=0, controls=False, estimators="ridge")
    report = sweep(coin, "next_action", positions=("step", "query"), **how)
    assert {line["position"] for line in report.lines} == {"step"}
    assert any("label 'next_action' at position 'query'" in note for note in report.notes)
    with pytest.raises(BadRows, match="No label can be probed at any position"):
        sweep(coin, "next_action", positions="query", **how)
    both = sweep(coin, ["next_action", "face"], positions="query", **how)
    assert {line["label"] for line in both.lines} == {"face"}


# Verdicts


@pytest.mark.slow
def test_noise_is_shown_in_one_of_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small part of `make calibrate`: 60 sweeps over six cells of noise. Without new fits it errs more often."""
    noise = Noise("ridge", groups=50, width=32, estimator="ridge", permutations=39)
    found = sum(noise.found(seed) for seed in range(60))
    assert found <= 8  # 5 % of 60 is 3; more than 8 in 0.4 % of cases

    def fixed(estimator: str, x: Tensor, goal: Goal, orders: np.ndarray, split: Split, *, nuisance: None = None) -> Null:
        said = held_out(estimator, x, [goal], split.train, split.test)
        every = np.ones(len(goal.codes), dtype=bool)
        said = said.of(0, goal, every)
        scores = [score(said, replace(goal, codes=goal.codes[order]), every) for order in [np.arange(len(every)), *orders]]
        return Null(scores[0], np.stack(scores[1:]))

    monkeypatch.setattr(sweeps, "refitted", fixed)
    assert sum(noise.found(seed) for seed in range(60)) > max(found, 3)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [each for each in PLAINS if each.groups <= 60], ids=lambda plain: plain.name)
def test_plain_arrays(plain: Plain) -> None:
    """A small part of `make calibrate`: arrays and a baseline that share no code with the probes."""
    *errors, coverage, power = plain.rates(40)
    assert all(error.rate <= 0.15 for error in errors) and coverage.rate >= 0.85 and power.rate >= power.aim[0] - 0.2


@pytest.mark.slow
def test_power_with_controls() -> None:
    """A label that is read at 74 % from 100 groups is shown, with every control on, and noise beside it is not."""
    drawn = [Effect(1.75, 0.95).one(seed) for seed in range(2)]
    assert all(found and not other for found, other, _ in drawn)


def test_selectivity_is_part_of_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label that is a function of the context is no finding, even where no other control can read it."""
    monkeypatch.setattr(controls, "token_identity", lambda codes, *others: np.zeros(len(codes)))
    monkeypatch.setattr(controls, "bags", lambda paths: np.zeros((len(paths), 1)))
    generator = np.random.default_rng(0)
    token = generator.integers(40, size=200)
    x = generator.normal(size=(40, 64))[token][None] + 0.01 * generator.normal(size=(1, 200, 64))
    rows = labelled_rows(x, np.arange(200), generator.integers(2, size=40)[token], token=token)
    table = sweep(rows, "label", sites="S", positions="all", permutations=39).table
    assert table["p_family"][0] <= 0.05 and table["accuracy"][0] > 0.9
    assert not shown(table)[0] and table["margin_over"][0] == "control_task"
    assert table["selectivity_low"][0] < table["selectivity"][0] < table["selectivity_high"][0]


# Rows as they come: documents of any length, rows that disagree, columns of any size


def arrays(x: np.ndarray, label: np.ndarray, group: np.ndarray) -> ProbeRows:
    return ProbeRows.of_arrays(x, label, group)


def test_documents_of_unequal_length() -> None:
    """Sequences of unequal length are cut to those of four others before they are exchanged, and a note counts the rows that
    are left out. Where that leaves out most of them, a t test finds the label."""
    for sizes, test, skipped in (
        (np.arange(5, 35), "refitted permutation", "Skipped 60 of 585 rows in the permutation test of 'label'"),
        (np.round(2 * 1.4 ** np.arange(16)).astype(int), "corrected t", "Skipped the permutation test of 'label'"),
    ):
        generator, group = np.random.default_rng(0), np.repeat(np.arange(len(sizes)), sizes)
        label = generator.integers(2, size=len(group))
        x = generator.normal(size=(len(group), 8)) + 5 * label[:, None]
        report = sweep(arrays(x, label, group), "label", permutations=39)
        line = report.best("label")
        assert line["test"] == test and report.text().startswith("Shown:") and line["shuffled"] < 0.7
        assert line["rows"] == len(group) and any(note.startswith(skipped) for note in report.notes)


def skipped_test(label: np.ndarray, group: np.ndarray) -> str:
    """The note on the permutation test that is skipped; empty if it is made."""
    x = np.random.default_rng(0).normal(size=(len(group), 4))
    report = sweep(arrays(x, label, group), "label", estimators="ridge", permutations=39)
    (line,) = [note for note in report.notes if note.startswith("Skipped the permutation test")] or [""]
    assert (report.table["test"][0] == "corrected t") == bool(line)
    return line


def test_why_labels_cannot_be_exchanged() -> None:
    """One group of both labels, and groups of different sizes: these are in the way, not labels that are alike."""
    generator = np.random.default_rng(0)
    sizes = np.array([800, *generator.integers(2, 10, size=53)])
    group = np.repeat(np.arange(54), sizes)
    label = generator.integers(2, size=54)[group]
    assert skipped_test(label[800:], group[800:]) == "", "one label per group: groups of any size exchange it"
    label[:800] = np.arange(800) % 2
    note = skipped_test(label, group)
    assert "1 of 54 groups have several labels, so that only groups with equally many rows can exchange theirs" in note
    assert "from 2 to 800 rows" in note and "a test takes 70 %" in note and "similar" not in note
    assert note.endswith("give groups of one size, or a label with one value per group. A t test is made instead.")


def test_few_groups_hold_a_label() -> None:
    """One label per group, one of them in a single long group; and six groups, of which one in six keeps its place."""
    group = np.repeat(np.arange(40), [40, *[4] * 39])
    assert "few of the 40 groups hold most rows" in why_no_exchange((group == 0).astype(int), group, 0.7)
    label = np.random.default_rng(0).integers(2, size=600)
    assert "6 groups are few" in why_no_exchange(label, np.arange(600) // 100, 0.78)
    assert why_no_exchange(np.zeros(8), np.arange(8), 0.0) == "the label has only one value"


@pytest.mark.parametrize("sizes", [[4] * 30, [2, 4, 6] * 10])
def test_labels_that_are_alike_in_all_groups(sizes: list[int]) -> None:
    """The same sequence in every group, of equal or different length: exchanging it changes nothing."""
    group = np.repeat(np.arange(30), sizes)
    note = skipped_test(np.concatenate([np.arange(size) % 2 for size in sizes]), group)
    assert "groups have similar sequences of labels" in note and "equally many rows" not in note


@pytest.mark.slow
def test_a_label_that_goes_with_the_size_of_a_group() -> None:
    """Noise whose longer documents are of one class: exchanged labels have other frequencies, which is no finding."""
    found = 0
    for seed in range(12):
        generator = np.random.default_rng(seed)
        kind = generator.integers(2, size=60)
        group = np.repeat(np.arange(60), np.where(kind == 1, 3, 1))
        rows = arrays(generator.normal(size=(len(group), 4)), kind[group], group)
        found += bool(shown(sweep(rows, "label", estimators="ridge", permutations=19, seed=seed).table).any())
    assert found <= 2


def test_rows_that_disagree_are_all_kept() -> None:
    """Thirty rows occur with both labels: no probe reads more than 63 % of the rows, whichever comes first."""
    generator = np.random.default_rng(0)
    base = generator.normal(size=(40, 8))
    x = np.vstack([base, base[:30], generator.normal(size=(10, 8)) + 3])
    label, order = np.repeat(["pos", "neg"], 40), np.arange(80)
    for way in (order, order[::-1]):
        report = sweep(arrays(x[way], label[way], order), "label", permutations=39)
        line = report.best("label")
        assert line["accuracy"] < 0.66 and (line["rows"], line["distinct"]) == (80, 50)
        assert any("60 rows share their path with a row of another label" in note for note in report.notes)


def test_columns_far_from_zero() -> None:
    """A constant of 1e8 in every column changes neither keys nor tests."""
    generator = np.random.default_rng(0)
    label = generator.integers(2, size=100)
    x = generator.normal(size=(100, 8)) + 3 * label[:, None]
    near, far = (sweep(arrays(x + c, label, np.arange(100)), "label", permutations=39).best("label") for c in (0, 1e8))
    assert near["p"] == far["p"] == 1 / 40 and near["distinct"] == far["distinct"] == 100


def test_every_letter_tells_rows_apart() -> None:
    """Rows with the same embedding differ in a deeper site of another letter."""
    generator, word = np.random.default_rng(0), np.arange(60) % 12
    sites = {("S", 0): generator.normal(size=(12, 4))[word], ("C", 5): generator.normal(size=(60, 4))}
    assert len(groups.distinct(ProbeRows.of_arrays(sites, word % 2, np.arange(60)))) == 60


def test_what_is_residualised_is_not_coded() -> None:
    """The online code reads the same rows as the probe: without the position, a label of the position costs a bit."""
    rows = rows_of(roots=60, per_root=2)
    place = np.arange(120) % 2
    rows = replace(rows, frame=rows.frame.assign(late=place))
    rows.source.tensors["blocks.0.hook_in"][:, 0] += 6 * torch.from_numpy(place)  # type: ignore[attr-defined]
    how = dict(sites="S", layers=[0], positions="all", permutations=0, controls=False, code_length=True)
    plain, clean = (sweep(rows, "late", residualise=names, **how).lines[0] for names in ((), ("position",)))
    assert plain["code_bits"] < 0.6 and clean["code_bits"] > 0.9


# ---- texts -----------------------------------------------------------------------------------------------------------
# Probes on given texts: the last token by default, positions by name, a function, and reports that do not repeat the texts.

HOW: dict[str, Any] = {"sites": "S", "layers": [3], "estimators": "ridge"}


@pytest.fixture(scope="module")
def run() -> Run:
    """Coins in words, as texts of somebody who knows nothing of the task."""
    examples = tasks.get("coin")(flips=(1, 4)).examples(60)
    labels: dict[str, list[Any]] = {
        "answer": [example.answer.strip() for example in examples],
        "flips": [len(example.events) for example in examples],
        "start": [[{"start": 18, "end": 23, "value": example.prompt[18:23]}] for example in examples],
    }
    return Engine.load("coin-plain").replay([example.prompt for example in examples], labels=labels, sites="S", drafter="lens")


@pytest.fixture(scope="module")
def dump(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    return run.save(tmp_path_factory.mktemp("probed") / "d")


@pytest.mark.slow
def test_a_probe_reads_the_answer_at_the_last_token(run: Run, dump: Dump) -> None:
    report = probes.sweep(dump, "answer", permutations=19, **HOW)
    (line,) = [line for line in report.lines if line["label"] == "answer"]
    assert line["position"] == "last" and line["accuracy"] > 0.9 > max(line["majority"], line["bag_of_tokens"])
    assert any(line["label"] == "shuffled" and line["known_zero"] for line in report.lines)
    assert report.source["knobs"]["texts"].startswith("60 texts, SHA-256") and run[0].example.prompt not in report.text()
    again = probes.sweep(run, "answer", permutations=0, **HOW)
    assert [line["accuracy"] for line in again.lines] == [line["accuracy"] for line in report.lines]
    with pytest.raises(TaskError, match="labels answer, flips, start, and none of them is the state"):
        probes.sweep(run, **HOW)


def test_positions_by_name(run: Run, dump: Dump) -> None:
    for rows in (ProbeRows.of(run), ProbeRows.of(dump)):
        last = rows.at("last").frame
        assert len(last) == 60 and set(last["text"]) == {":"} and len(rows.at("last-1")) == 60
        assert set(rows.at("text: state").frame["text"]) == {" state"} and len(rows.at("text: state")) == 120
        assert set(rows.at("label:start").frame["text"]) == {" heads", " tails"} and len(rows.at("label:start")) == 60
        assert rows.at("-3:-1").frame["since_last"].tolist() == [-2.0, -1.0] * 60
        assert len(rows.at(lambda frame: frame["text"] == " state")) == 120
        odd = rows.where(rows.frame["position"].to_numpy() % 2 == 1)
        assert len(odd.at("text:coin's state")) == 0 and len(odd.at("text:A coin's")) == 60, "found on whole paths"


def test_a_sweep_takes_places_and_functions(run: Run) -> None:
    def colon(frame: Any) -> Any:
        return frame["text"] == ":"

    places = ["last", "text: A:", colon]
    report = probes.sweep(run, "answer", positions=places, permutations=0, controls=False, **HOW)
    scores = {line["position"]: line["accuracy"] for line in report.lines}
    assert len(scores) == 3 and len(set(scores.values())) == 1 and any("colon" in name for name in scores)


def test_positions_that_texts_do_not_have(run: Run) -> None:
    rows = ProbeRows.of(run)
    for position in ("query", "step", "step:2+1"):
        with pytest.raises(BadPosition, match=r"Unknown position of given texts or arrays .* Use all, .* last, text:"):
            rows.at(position)
    with pytest.raises(BadPosition, match="did you mean 'start'"):
        rows.at("label:strat")
    with pytest.raises(BadPosition, match="Pass the function"):
        rows.at("custom:colon")
    with pytest.raises(BadRows, match="Give one boolean per row"):
        rows.at(lambda frame: np.arange(len(frame)))
    with pytest.raises(TaskError, match="They have no claims"):
        viable_branch(run)


def test_rows_of_a_task_know_places_too() -> None:
    examples = tasks.get("coin")(flips=2).examples(4)
    rows = ProbeRows.of(Engine.load("coin-plain").replay(examples, sites="S"))
    assert set(rows.at("text: flips").frame["text"]) <= {" flips"} and len(rows.at("label:face")) > 0
    assert len(rows.at("-1:0")) == 0 and rows.at("-1:").accepted().frame["since_query"].min() == 0


def test_the_report_of_texts(dump: Dump, tmp_path: Path) -> None:
    page = ReportPage(dump).html()
    assert "60 texts, SHA-256" in page and "example 3, " not in page
    assert '"right answers"' not in page and ", wrong" not in page


def test_the_commands(dump: Dump) -> None:
    def command(*words: str) -> str:
        done = CliRunner().invoke(cli.app, ["probe", dump.url, "--layers", "3", "--estimators", "ridge", "--quiet", *words])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    found = json.loads(command("--label", "answer", "--positions", 'last, "text: A:"', "--permutations", "0", "--json"))
    assert {line["position"] for line in found["rows"]} == {"last", "text: A:"}


# ---- feature columns -------------------------------------------------------------------------------------------------
# Features as one more site of rows from dumps, runs and arrays: the columns that encoding the rows gives, to the bit.

D = 128
"""width of the coin model"""


def load(folder: Path, hook: str) -> SparseFeatures:
    return SparseFeatures.load(write(folder, "standard", d_in=D, hook=hook))


def test_columns_of_a_dump(coin_dump: Dump, tmp_path: Path) -> None:
    """The stream leaving block 1 is S at layer 2. Narrowing keeps the site. Negative control: another layer differs."""
    rows = ProbeRows.of(coin_dump)
    made = with_features(rows, load(tmp_path, "blocks.1.hook_resid_post"), [7, 3])
    expected = load(tmp_path, "blocks.1.hook_resid_post").encode(torch.from_numpy(rows.matrix("S", 2))).columns([7, 3])
    assert np.array_equal(made.matrix("features"), expected.numpy()) and made.source.sites() == [
        "S",
        *rows.source.sites()[1:],
        "features",
    ]
    few = made.at("query")
    assert np.array_equal(few.matrix("features"), expected.numpy()[few.numbers])
    assert np.array_equal(few.matrix("S", 1), rows.at("query").matrix("S", 1))
    other = with_features(rows, load(tmp_path, "blocks.2.hook_resid_post"), [7, 3])
    assert not np.array_equal(other.matrix("features"), made.matrix("features"))
    assert made.about.digest != rows.about.digest != "" and made.about.digest.startswith(rows.about.digest)


def test_a_sweep_over_features(coin_dump: Dump, tmp_path: Path) -> None:
    """Features of random directions keep enough of the stream that a probe finds the coin's face in them."""
    rows = with_features(ProbeRows.of(coin_dump), load(tmp_path, "blocks.3.hook_resid_post"))
    table = sweep(rows, "face", sites="features", positions="query", estimators="ridge").table
    table = table[table["label"] == "face"]
    assert list(table["site"]) == ["features"] and float(table["accuracy"].iloc[0]) > float(table["majority"].iloc[0])
    assert rows.matrix("features").shape[1] == COUNT


def test_columns_of_a_run_and_of_arrays(engine: Engine, tmp_path: Path) -> None:
    """A site by its older name, and arrays under the hook's own name."""
    run = engine.replay(tasks.get("coin")(flips=2).examples(3), sites=["blocks.1.mlp.hook_post", "C"])
    rows = ProbeRows.of(run)
    features = SparseFeatures.load(write(tmp_path / "c", "standard", d_in=D, hook="blocks.1.hook_mlp_out"))
    expected = features.encode(torch.from_numpy(rows.matrix("C", 1))).dense().numpy()
    assert np.array_equal(with_features(rows, features).matrix("features"), expected)
    post = rows.matrix("blocks.1.mlp.out.hook_in")
    wide = SparseFeatures.load(write(tmp_path / "post", "standard", d_in=post.shape[1], hook="blocks.1.mlp.hook_post"))
    assert np.array_equal(with_features(rows, wide).matrix("features"), wide.encode(torch.from_numpy(post)).dense().numpy())
    arrays = ProbeRows.of_arrays({"blocks.1.hook_mlp_out": rows.matrix("C", 1)}, rows.roots, rows.roots)
    assert np.array_equal(with_features(arrays, features, name="sae").matrix("sae"), expected)


def test_what_is_refused(coin_dump: Dump, tmp_path: Path) -> None:
    rows = ProbeRows.of(coin_dump)
    features = load(tmp_path / "a", "blocks.1.hook_resid_post")
    with pytest.raises(UnknownSite, match=r"do not hold blocks.1.hook_mlp_out.*They hold S"):
        with_features(rows, load(tmp_path / "b", "blocks.1.hook_mlp_out"))
    for name in ("S", "Z.kl"):
        with pytest.raises(BadRows, match="already have a site"):
            with_features(rows, features, name=name)
    with pytest.raises(BadRows, match="No features were chosen"):
        with_features(rows, features, [])
    with pytest.raises(BadRequest, match="between 0 and 47"):
        with_features(rows, features, [48])
    with pytest.raises(BadRequest, match="ProbeRows"):
        with_features(coin_dump, features)  # type: ignore[arg-type]
    with pytest.raises(UnknownSite, match="has no layers"):
        with_features(rows, features).matrix("features", 2)


# ---- joined texts ----------------------------------------------------------------------------------------------------
# Dumps of texts that are joined: the coins of equal numbers must not be equal in all parts.


def test_coins_of_parts_are_independent(tmp_path: Path) -> None:
    """A number stands for something, such as the fork of a rollout: `shuffled` must not follow from it."""
    engine = Engine.load("coin-plain")
    task = engine.texts(["A coin's state is heads.", "A coin's state is tails.", "A coin's state is heads. Alice flips."])
    dump = write_dump(
        engine, make_plan(engine, task, 3, sites=["blocks.0.hook_in"], max_new=0, positions="last"), tmp_path / "d"
    )
    joined = ProbeRows.join(**{f"c{i}": ProbeRows.of(dump) for i in range(40)})
    alone = ProbeRows.of(dump).frame["shuffled"].to_numpy().astype(int)
    turned = joined.frame["shuffled"].to_numpy().reshape(40, 3).astype(int) ^ alone
    assert (turned == turned[:, :1]).all(), "a part is turned over as a whole"
    assert 8 <= turned[:, 0].sum() <= 32, "about half of them are"
