"""Rows from dumps equal rows from runs, positions are the documented ones, and each root stays on one side of a split."""

import copy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from replaylens import tasks
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import FingerprintMismatch, UnknownSite
from replaylens.engine.lens import lens
from replaylens.probes import groups, splits
from replaylens.probes.causal import InterventionRunner
from replaylens.probes.controls import make_goal
from replaylens.probes.errors import BadPosition, BadRows, MissingLabel, OneClass, ProbeError, RootOnBothSides, TooFewGroups
from replaylens.probes.positions import Position
from replaylens.probes.probe import fit_probe
from replaylens.probes.rows import ProbeRows, make_target
from replaylens.probes.sweeps import sweep
from tests.probes.synthetic import rows_of
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
    sweep(run, "face", sites=["blocks.2.hook_in"], positions="step", permutations=0, controls=False)
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
    clean = sweep(run, "face", sites=["blocks.2.hook_in"], positions="step", residualise=["entropy"], permutations=0)
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
    stage = InterventionRunner(thinker, task.examples(8), "blocks.2.hook_in", "state", "query")
    assert [subject.positions for subject in stage.subjects] == [[p] for p in rows.at("query").frame["position"]]


def test_steps_of_rejected_branches(steps_dump: Dump) -> None:
    """Steps of a rejected branch are counted along its whole path: at most one step between two deciding words."""
    rejected = ProbeRows.of(steps_dump).rejected()
    at_steps = rejected.at("step").frame
    assert len(at_steps) > 20 and set(at_steps["text"]) == {" flips", " does"}
    known = rejected.frame[rejected.frame["since_step"].notna()]
    assert (known["since_step"] >= 0).all() and (known["since_step"] <= known["position"]).all()


@pytest.mark.parametrize("spec", ["", "steps", "step:x", "query:2", "step++1", "-3", "1.5"])
def test_bad_positions(spec: str) -> None:
    with pytest.raises(BadPosition, match="Use all"):
        Position.parse(spec)


def test_targets() -> None:
    """Text, booleans and few numbers are classes. Many numbers and fractions are numeric. Missing values are marked."""
    assert make_target("a", ["x", None, "y"]).present.tolist() == [True, False, True]
    assert make_target("a", [True, False]).classes.tolist() == ["False", "True"]
    assert make_target("a", pd.Series([1, 2, None], dtype="Int64")).kind == "class"
    assert make_target("a", [0.5, 1.5]).kind == "number"
    assert make_target("a", list(range(100))).kind == "number"
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


def test_a_split_across_branches_is_refused(rows: ProbeRows) -> None:
    """A split of accepted against rejected rows that ignores roots leaks, and is refused."""
    accepted = rows.frame["accepted"].to_numpy()
    with pytest.raises(RootOnBothSides, match="Branches of a prompt share its tokens"):
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
    for name, knobs in {"plain": {}, "idle": {"phrasing": "idle"}, "rare": {"p": 0.9}}.items():
        run = engine.replay(tasks.get("coin")(flips=(2, 3), **knobs).examples(40), sites=["blocks.2.hook_in"], drafter="lens")
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
    model = copy.deepcopy(engine.model)
    model.blocks[0].mlp.down.weight.data.mul_(1.5)
    other = Engine(model, engine.text)
    examples = tasks.get("coin")(flips=2).examples(4)
    mine, theirs = (ProbeRows.of(e.replay(examples, sites="S", drafter="ngram", rejected=False)) for e in (engine, other))
    with pytest.raises(FingerprintMismatch, match=r"'a' and 'b' come from different engines \(weights"):
        ProbeRows.join(a=mine, b=theirs)
    ProbeRows.join(a=mine, b=mine).require(engine)


def test_filtered_dumps_are_refused(coin_dump: Dump) -> None:
    with pytest.raises(ProbeError, match="whole dump"):
        ProbeRows.of(coin_dump.where(accepted=True))
