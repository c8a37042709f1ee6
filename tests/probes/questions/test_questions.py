"""Branch questions on the embedded model: each gives a report and refuses what it cannot answer."""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from replaylens import tasks
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import FingerprintMismatch
from replaylens.probes import causal, groups, sweeps
from replaylens.probes.errors import BadRows, MissingLabel, ProbeError, SharedRows
from replaylens.probes.forks import outcome_probe
from replaylens.probes.forks.outcome_probe import GAIN, LOSS
from replaylens.probes.forks.tokens import DraftAgreement
from replaylens.probes.groups import distinct, histories
from replaylens.probes.intervals import Estimate
from replaylens.probes.positions import add_places
from replaylens.probes.probe import fit_probe
from replaylens.probes.questions import erasure, forced
from replaylens.probes.questions import transfer as transfer_module
from replaylens.probes.questions.erasure import _Eraser, _say_amnesic, amnesic, steering_reach
from replaylens.probes.questions.forced import (
    _own_words,
    forced_rows,
    outcome_at_fork,
    outcome_target,
    text_or_truth,
    viable_branch,
)
from replaylens.probes.questions.judge import MINUS, judge
from replaylens.probes.questions.judge import _say as _say_judged
from replaylens.probes.questions.transfer import ALL_CONTROLS, transfer, transfer_across
from replaylens.probes.report import Report
from replaylens.probes.rows import Cell, ProbeRows, sequences
from replaylens.probes.sources import MemorySource
from replaylens.probes.splits import apart, unseen
from replaylens.probes.sweeps import sweep
from replaylens.tasks import Example
from tests.devices import swept
from tests.probes.synthetic import direction, rows_of
from tests.toy_model import engine as toy_engine

coin = tasks.get("coin")


def line(report: Report, what: str) -> dict[str, Any]:
    return next(each for each in report.lines if each["what"] == what)


def width(scored: dict[str, Any]) -> float:
    return float(scored["high"] - scored["low"])


NOT = ("Undecided", "Shown to be below")
"""how findings begin that show nothing"""


@pytest.fixture(scope="module")
def transfers(steps_dump: Dump) -> dict[str, Report]:
    """Those of both labels at S1, made once."""
    return {label: transfer(steps_dump, label, layers=[1], estimator="ridge") for label in ("implied", "face")}


@pytest.mark.slow
def test_transfer(transfers: dict[str, Report]) -> None:
    """Probes of the implied state transfer to rejected branches. Probes of the truth, which their text left, do much less."""
    implied, truth = transfers.values()
    assert line(implied, "S1: accepted to rejected")["accuracy"] > 0.8
    assert line(truth, "S1: accepted to rejected")["accuracy"] < line(implied, "S1: accepted to rejected")["accuracy"] - 0.1
    assert implied.findings[-1] == (
        "Shown: a probe of 'implied' fitted on accepted rows reads rejected ones, best at S1, against 5 of 6 controls "
        "(without: untrained model), p < 0.001 over 1 test."
    )
    for report in (implied, truth):  # leakage is what the same roots add, row by row
        gain = (
            line(report, "S1: accepted to rejected, same roots")["accuracy"]
            - line(report, "S1: accepted to rejected")["accuracy"]
        )
        assert line(report, "S1: leakage")["accuracy"] == pytest.approx(gain)
    assert line(truth, "S1: leakage")["accuracy"] != 0.0, "accepted rows of the same roots were fitted on"


def test_transfer_is_held_against_controls(steps_dump: Dump, engine: Engine, transfers: dict[str, Report]) -> None:
    """A coin per root is not shown, nor is a class that the row's token or an untrained model tells as well."""
    rows = ProbeRows.of(steps_dump)
    assert transfer(rows, "shuffled", layers=[1], estimator="ridge").findings[-1].startswith(NOT)
    odd = replace(rows, frame=rows.frame.assign(odd=rows.frame["token"] % 2))
    told = transfer(odd, "odd", layers=[0, 1], position="all", estimator="ridge")
    assert line(told, "token alone: accepted to rejected")["accuracy"] > 0.95
    assert line(told, "S0: accepted to rejected")["accuracy"] > 0.95 and told.findings[-1].startswith(NOT)
    placed = replace(rows, frame=rows.frame.assign(place=[["a", "b"][p // 3 % 2] for p in rows.frame["position"]]))
    read = transfer(placed, "place", layers=[2], estimator="ridge")
    older = [name for name in ALL_CONTROLS if name not in ("position alone", "untrained model")]
    assert all(line(read, f"S2: accepted to rejected minus {name}")["low"] > 0 for name in older)
    assert read.findings[-1].startswith(NOT) and "; decided by position alone, p" in read.findings[-1]
    implied = transfer(rows, "implied", layers=[1], engine=engine, estimator="ridge")
    gains = [name for name in ALL_CONTROLS if line(implied, f"S1: accepted to rejected minus {name}")["low"] > 0]
    assert gains == list(ALL_CONTROLS) and not implied.notes
    assert transfers["implied"].notes[-1] == "Skipped the control 'untrained model': no engine was given."


def test_transfer_needs_both_kinds(steps_dump: Dump) -> None:
    with pytest.raises(BadRows, match="accepted and of rejected"):
        transfer(ProbeRows.of(steps_dump).accepted(), "face")
    rows = ProbeRows.of(steps_dump)
    with pytest.raises(BadRows, match="is a number, and a transfer needs classes"):
        transfer(replace(rows, frame=rows.frame.assign(number=np.linspace(0, 1, len(rows)))), "number")
    nowhere = replace(rows, frame=rows.frame.assign(side=np.where(rows.frame["accepted"], "a", None)))
    with pytest.raises(BadRows, match=r"with a value of 'side' .* 0 rejected. Give another label"):
        transfer(nowhere, "side")


@pytest.mark.slow
def test_text_or_truth(engine: Engine) -> None:
    """Probes are right on truthful chains. After a lie they follow either the text or the truth, never both."""
    report = text_or_truth(engine, coin(flips=(3, 4), rendering="steps").examples(40), layers=[1, 4])
    for layer in (1, 4):
        text, truth = (line(report, f"S{layer}: after the lie, follows the {name}") for name in ("text", "truth"))
        assert text["accuracy"] + truth["accuracy"] == pytest.approx(1)
    assert line(report, "S1: truthful chains, truth")["accuracy"] > 0.8
    with pytest.raises(ProbeError, match="rendering='steps'"):
        text_or_truth(engine, coin(flips=3).examples(40))
    with pytest.raises(ProbeError, match="counted from 1"):
        text_or_truth(engine, coin(flips=3, rendering="steps").examples(40), lie_at=0)
    with pytest.raises(ProbeError, match="comes after the lie"):
        text_or_truth(engine, coin(flips=2, rendering="steps").examples(40), position="step:1", layers=[3])


@pytest.mark.parametrize("lie_at", [1, 2])
def test_the_lie_is_not_among_the_models_own_words(lie_at: int) -> None:
    """The first face that the model states is the one after the forced ones, the last of which is a lie."""
    told = []
    for example, own in enumerate(["heads heads", "tails heads", "heads tails", "heads tails"]):
        said = [*["heads"] * (lie_at - 1), "tails", *own.split()]  # the truth is heads throughout
        told += [(example, f"r{example}", f" {face}", place, "heads", face) for place, face in enumerate(said, 1)]
        told.append((example, f"r{example}", " tails", -3, "heads", "tails"))  # in the prompt
    frame = pd.DataFrame(told, columns=["example", "root", "text", "since_query", "face", "claimed"])
    lines, notes = _own_words(SimpleNamespace(frame=frame), lie_at)  # type: ignore[arg-type]
    assert {each["what"]: each["accuracy"] for each in lines} == {
        "next face that the model states: wrong": 0.25,
        "its answer: wrong": 0.5,
    }
    assert not notes and {each["rows"] for each in lines} == {4}


def test_the_judge_with_the_surest_gain_decides() -> None:
    """The intervals hold for all cells jointly, so that one above zero is enough, wherever the largest gain is."""
    good, frame = np.array([True, False]), pd.DataFrame({"accepted": [True, False]})
    gains = [("S1", 0.3, 0.2, "undecided"), ("S2", 0.1, 0.01, "shown"), ("S3", 0.2, 0.04, "shown")]
    lines = [
        scored(f"judge at {cell}{MINUS}", value, 0.0, 1.0, p_family=p, verdict=verdict) for cell, value, p, verdict in gains
    ]
    for some, verdict, end in (
        (lines, "Shown", "S2, p = 0.010 over 3 tests"),
        (lines[:1], "Undecided", "S1, p = 0.200 over 1 test"),
    ):
        said = _say_judged(some, good, SimpleNamespace(frame=frame))[-1]  # type: ignore[arg-type]
        assert said.startswith(f"{verdict}: ") and said.endswith(f"(judge at {end}).")


def test_forced_lie_parts_text_and_truth(engine: Engine) -> None:
    """Labels of a forced path: after a wrong face, the implied face differs from the true one."""
    (example,) = [e for e in coin(flips=2, rendering="steps").examples(1)]
    pieces = example.completion.split(".")
    face = pieces[0].rsplit(" ", 1)[1]
    wrong = {"heads": "tails", "tails": "heads"}[face]
    rows = forced_rows(engine, [example], [f"{pieces[0].removesuffix(face)}{wrong}."], more=2)
    told = rows.frame[rows.frame["since_query"] > 0]
    stated = told[told["text"] == f" {wrong}"].iloc[0]
    assert stated["face"] == face and stated["claimed"] == stated["implied"] == wrong
    assert len(rows.frame) == len(rows.matrix("S", 2))


def test_forced_answers_are_judged_as_replayed_ones(engine: Engine) -> None:
    """A forced answer is correct if the replayed one would be, with or without a full stop, whatever follows."""
    examples = coin(flips=2).examples(4)
    run = engine.replay(examples, drafter="ngram")
    assert all(result.correct for result in run.results), "coin-plain answers short prompts rightly"
    other = {" heads": " tails", " tails": " heads"}
    for more in (0, 3):
        for end in ("", "."):
            right = forced_rows(engine, examples, [f"{e.answer}{end}" for e in examples], more=more)
            wrong = forced_rows(engine, examples, [f"{other[e.answer]}{end}" for e in examples], more=more)
            assert right.frame["correct"].all() and not wrong.frame["correct"].any()


def test_outcomes(coin_dump: Dump) -> None:
    """The target is the task's exact outcome probability given the text so far. The report has all baselines and layers."""
    rows = ProbeRows.of(coin_dump).accepted()
    target = outcome_target(rows, "query")
    now = rows.at("query").frame["face"]
    assert np.array_equal(target.values, (now == "heads").astype(float)), "once the question is asked nothing is open"
    report = outcome_at_fork(coin_dump, layers=[0, 3])
    assert line(report, "state alone")["accuracy"] > line(report, "S0")["accuracy"]
    assert report.findings[-1].startswith(("Shown", "Undecided"))
    name = "S3 minus state and steps"
    assert width(line(report, name)) > 1.05 * width(line(outcome_at_fork(coin_dump, layers=[3]), name)), "one of two cells"
    with pytest.raises(ProbeError, match="Use coin"):
        other = rows_of(roots=10)
        other.about.knobs.clear()
        object.__setattr__(other.source, "about", type(other.about)("fork", {}, "", None))
        outcome_at_fork(other)


def test_outcomes_are_those_of_accepted_rows(steps_dump: Dump) -> None:
    """Rejected drafts, which end at steps too, have no part in it."""
    rows = ProbeRows.of(steps_dump)
    assert (~rows.at("step").frame["accepted"].astype(bool)).any()
    found, alone = (outcome_at_fork(given, layers=[1]) for given in (steps_dump, rows.accepted()))
    assert found.lines == alone.lines and found.lines[0]["rows"] == len(groups.independent(rows.accepted().at("step")).rows)


def test_judge(coin_dump: Dump) -> None:
    """Areas lie between 0 and 1. The verdict compares against all baselines together."""
    report = judge(coin_dump, draft_layer=2, layers=[3])
    for what in ("kl alone", "kl, entropy, logprob, token", "judge at S3"):
        assert 0 <= line(report, what)["accuracy"] <= 1
    assert line(report, "kl, entropy, logprob")["accuracy"] > 0.7
    assert report.findings[-1].startswith(("Shown", "Undecided"))
    name = "judge at S3 and the three, minus the three and the token"
    one, three = line(report, name), line(judge(coin_dump, draft_layer=2, layers=[0, 1, 3]), name)
    assert one["accuracy"] == three["accuracy"] and width(three) > 1.05 * width(one), "the best of three must lead by more"


def test_joined_parts_are_judged_apart(coin_dump: Dump) -> None:
    """Parts have examples of the same numbers. The row before a draft token is that of its own part."""
    whole = ProbeRows.of(coin_dump)
    odd = whole.frame["example"] % 2 == 1
    one, two = whole.where(~odd).renumbered(), whole.where(odd).renumbered()
    two = ProbeRows(two.frame.assign(example=two.frame["example"] - 1), two.source, two.numbers)
    apart, joined = judge(coin_dump, draft_layer=2, layers=[3]), judge(ProbeRows.join(a=one, b=two), draft_layer=2, layers=[3])
    for name in ("kl alone", "entropy alone", "logprob alone"):
        assert line(joined, name)["accuracy"] == pytest.approx(line(apart, name)["accuracy"], abs=1e-12)
    assert line(joined, "judge at S3")["rows"] == line(apart, "judge at S3")["rows"]


def test_judge_needs_the_lens(steps_dump: Dump) -> None:
    with pytest.raises(BadRows, match="part of Z"):
        judge(steps_dump, draft_layer=2)


@pytest.mark.slow
def test_viable_branch(engine: Engine, coin_dump: Dump) -> None:
    """The model answers prompts beyond its training length wrongly. There, the probe of right answers reads less truth."""
    run = engine.replay(coin(flips=(8, 12)).examples(80), sites=["blocks.3.hook_out"], drafter="ngram", rejected=False)
    report = viable_branch(run, sites=["blocks.3.hook_out"], positions=["query"], estimator="ridge")
    right, wrong, claim = report.lines
    assert right["accuracy"] > 0.8 > wrong["accuracy"]
    assert claim["rows"] == wrong["rows"], "every wrong answer of the model is the other face"
    with pytest.raises(BadRows, match=r"All \d+ answers are right"):
        viable_branch(coin_dump)


def test_wrong_answers_are_read_by_probes_of_other_roots() -> None:
    """A right and a wrong run share prompts, and rows are noise: only a probe that saw the prompt could beat chance."""
    right = rows_of(roots=80, per_root=1, width=128)
    wrong = ProbeRows(right.frame.assign(correct=False), right.source, right.numbers)
    report = viable_branch(ProbeRows.join(greedy=right, sampled=wrong), layers=[0], positions=["all"])
    assert all(0.5 in Estimate(each["accuracy"], each["low"], each["high"]) for each in report.lines)
    assert [each["rows"] for each in report.lines] == [80, 80]


@pytest.mark.slow
def test_steering_reach(engine: Engine, coin_dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steering works at the query in a late layer. The report has a finding for every place. Rows of other prompts that begin
    as the steered ones do are left out of the fits, and the report says so."""
    seen: list[ProbeRows] = []
    monkeypatch.setattr(erasure, "fit_probe", lambda rows, *args, **more: seen.append(rows) or fit_probe(rows, *args, **more))
    examples = coin(flips=3, seed=3).examples(12)
    report = steering_reach(engine, coin_dump, examples, "face", layers=[3])
    assert line(report, "S3 at query: steer: probe")["accuracy"] > 0.8
    assert len(report.findings) == 4 and "S3 at query: within reach" in report.findings[-1]
    prompts = [engine.text.encode(example.prompt) for example in examples]
    for rows in seen:
        for path in histories(rows) or []:
            assert path.tolist() not in [prompt[: len(path)] for prompt in prompts]
    assert len(seen) >= 2 and any(note.startswith("step: Left out") for note in report.notes)
    with pytest.raises(ProbeError, match="prompts of one length"):
        steering_reach(engine, coin_dump, coin(flips=(2, 3)).examples(9), "face", layers=[3])
    with pytest.raises(ProbeError, match="are among the rows"):
        seen = [e for e in coin(flips=(2, 5)).examples(80) if len(e.events) == 3]
        steering_reach(engine, coin_dump, seen, "face", layers=[3])


def test_reports_are_saved(transfers: dict[str, Report], report_folder: Any) -> None:
    transfers["face"].save(report_folder)
    assert {path.name for path in report_folder.iterdir()} == {"report.json", "summary.txt", "table.csv", "transfer.png"}
    assert Report.load(report_folder).kind == "transfer"


# ---- across ----------------------------------------------------------------------------------------------------------
# Joined rows: examples of the same number stay apart, and probes of one task read another where a direction is common.


def of_task(task: str, way: np.ndarray, seed: int, effect: float = 3.0, **columns: Any) -> ProbeRows:
    """Rows of a task that hold `face` along a direction; tokens tell nothing."""
    rows = rows_of(roots=60, per_root=1, seed=seed, **columns)
    generator = np.random.default_rng([seed, 1])
    sign = np.where(rows.frame["face"] == "tails", 0.5, -0.5)
    x = generator.normal(size=(60, len(way))) + effect * np.outer(sign, way)
    source = MemorySource(
        {"blocks.0.hook_in": torch.from_numpy(x)}, {"S": ["blocks.0.hook_in"]}, replace(rows.about, task=task)
    )
    return ProbeRows(rows.frame, source, rows.numbers)


def test_a_common_direction_is_found() -> None:
    way = direction(5)
    joined = ProbeRows.join(coin=of_task("coin", way, 1), coins=of_task("coins", way, 2))
    report = transfer_across(joined, "face", fit_on="coin", test_on="coins", position="all", estimator="ridge")
    assert line(report, "S0: coin to coins")["accuracy"] > 0.8 and report.findings[-1].startswith("Shown:")
    assert report.source["task"] == "coin+coins"


def test_sweeps_of_several_tasks() -> None:
    """A sweep over joined tasks skips what needs one task by name."""
    joined = ProbeRows.join(coin=of_task("coin", direction(5), 1), coins=of_task("coins", direction(5), 2))
    report = sweep(joined, "face", sites="S", positions="all", permutations=19, estimators="ridge")
    assert report.lines[0]["accuracy"] > 0.8
    assert any("known zeros" in note and "several tasks" in note for note in report.notes)


def test_each_task_with_a_direction_of_its_own_shares_none() -> None:
    one, two = np.eye(16)[:2]
    joined = ProbeRows.join(coin=of_task("coin", one, 1), coins=of_task("coins", two, 2))
    report = transfer_across(joined, "face", fit_on="coin", test_on="coins", position="all", estimator="ridge")
    assert line(report, "S0: coin to coin")["accuracy"] > 0.8 < line(report, "S0: coins to coins")["accuracy"]
    assert report.findings[-1].startswith(NOT)


def test_tokens_that_tell_the_label_are_a_control() -> None:
    """Rows whose token names the class transfer without a direction of the state: not shown."""
    parts = {}
    for seed, task in enumerate(("coin", "coins"), 1):
        face = of_task(task, direction(5), seed).frame["face"]
        parts[task] = of_task(task, direction(5), seed, token=(face == "tails").astype(int).to_numpy())
    report = transfer_across(ProbeRows.join(**parts), "face", fit_on="coin", test_on="coins", position="all", estimator="ridge")
    assert line(report, "token alone, coin to coins")["accuracy"] == 1 and report.findings[-1].startswith(NOT)


def test_rows_from_arrays() -> None:
    """Activations from elsewhere have parts too. Without tokens, that control is skipped by name."""
    parts = {}
    for seed, name in enumerate(("one", "two")):
        rows = of_task("coin", direction(5), seed)
        parts[name] = ProbeRows.of_arrays(rows.matrix("S", 0), {"face": rows.frame["face"].to_numpy()}, groups=rows.roots)
    report = transfer_across(ProbeRows.join(**parts), "face", fit_on="one", test_on="two", position="all", sites="X")
    assert report.findings[-1].startswith("Shown:") and report.notes == [
        "Skipped the control 'token alone': these rows have no tokens."
    ]


def test_labels_that_only_one_task_has() -> None:
    coin, coins = of_task("coin", direction(), 1, parity=1), of_task("coins", direction(), 2)
    joined = ProbeRows.join(coin=coin, coins=coins)
    assert "parity" not in joined.frame and "face" in joined.frame
    with pytest.raises(ProbeError, match=r"several tasks \(coin\+coins\)"):
        joined.about.make_task()
    with pytest.raises(MissingLabel, match="parity"):
        joined.target("parity")
    with pytest.raises(ProbeError, match="parts of these rows: coin, coins"):
        transfer_across(joined, "face", fit_on="coin", test_on="dice", position="all")
    other = of_task("coins", direction(), 2, face="edge")
    with pytest.raises(BadRows, match="common classes none"):
        transfer_across(ProbeRows.join(coin=coin, coins=other), "face", fit_on="coin", test_on="coins", position="all")


def test_examples_of_joined_parts_stay_apart() -> None:
    """Both parts have examples 0 to 9. Sequences and places of the joined rows are those of the parts."""
    a, b = (rows_of(roots=10, per_root=3, seed=seed) for seed in (1, 2))
    joined = ProbeRows.join(a=a, b=b)
    X, target, roots = sequences(joined, "face", "S", 1, ["0", "2"])
    apart = [sequences(part, "face", "S", 1, ["0", "2"]) for part in (a, b)]
    assert np.array_equal(X, np.concatenate([each[0] for each in apart])) and len(target.values) == len(roots) == 20
    shorter = b.where(b.frame["position"] < 2)
    frame = ProbeRows.join(a=a, b=ProbeRows(shorter.frame, shorter.source, shorter.numbers)).frame
    again = add_places(frame, "actions")
    assert (again["steps"] == again["part"].map({"a": 3, "b": 2})).all()
    assert (again.groupby("part")["since_query"].min() == [-2, -1]).all()


# ---- amnesic ---------------------------------------------------------------------------------------------------------
# `amnesic`: erasing what the model uses costs answers, erasing nothing or a known zero does not; prompts are held out.


@pytest.fixture(scope="module")
def fresh() -> list[Example]:
    return tasks.get("coin")(flips=(2, 5)).examples(range(100, 124))


@pytest.mark.slow
def test_erasing_the_state_costs_answers(engine: Engine, coin_dump: Dump, fresh: list[Example]) -> None:
    report = amnesic(engine, coin_dump, fresh, "face", layers=[3], erasers=["leace"], placebos=8)
    nothing, erased, random, more = report.lines[:4]
    assert nothing["accuracy"] == 0 and nothing["nats"] == 0, "coin-plain is right on short prompts, and no edit moves no bit"
    assert erased["accuracy"] > 0.3 > random["accuracy"] and erased["nats"] > 0.5 and erased["rank"] == 1
    assert more["low"] > 0 < more["nats_low"] and all(said.startswith("Shown:") for said in report.findings[1:])


@pytest.mark.slow
def test_erasing_a_known_zero_costs_nothing(engine: Engine, coin_dump: Dump, fresh: list[Example]) -> None:
    """`shuffled` is in no row: its eraser does no more than random ones."""
    report = amnesic(engine, coin_dump, fresh[:16], "shuffled", layers=[3], erasers=["leace"], placebos=4)
    assert all(said.startswith(NOT) for said in report.findings[1:])


@pytest.mark.slow
def test_both_erasers_are_compared_and_each_says_the_same_alone(engine: Engine, coin_dump: Dump, fresh: list[Example]) -> None:
    rows = ProbeRows.of(coin_dump).where(ProbeRows.of(coin_dump).frame["example"] < 40)
    both = amnesic(engine, rows, fresh[:6], "face", layers=[2], placebos=1)
    assert {line["what"].split(":")[0] for line in both.lines} == {"S2 leace", "S2 inlp"}
    alone = amnesic(engine, rows, fresh[:6], "face", layers=[2], erasers=["leace"], placebos=1)
    assert alone.lines == [line for line in both.lines if "leace" in line["what"]]
    assert len(both.findings) == 6 and alone.findings == [said for said in both.findings if "leace" in said]


@pytest.mark.parametrize("left, verdict", [(0.4, "Shown to be below 0.1"), (0.8, "No verdict, since 'face' is still readable")])
def test_a_label_that_is_left_gives_no_verdict(left: float, verdict: str) -> None:
    """A model that does not suffer does without the label only if the label is gone."""
    rates = dict(accuracy=0.0, low=-0.1, high=0.08, nats=0.0, nats_low=-0.1, nats_high=0.09)
    rates |= dict(verdict="below", bound=0.1, needed=None, nats_verdict="below", nats_needed=None)
    after = dict(what="refit: site, after", accuracy=0.9, low=left, high=1.0, majority=0.5)
    said = _say_amnesic("S3 inlp", "face", 1, [*(dict(what=str(i), **rates) for i in range(4)), after])
    assert [each.split(":")[0] for each in said[1:]] == [verdict] * 2


@pytest.mark.parametrize("name", ["leace", "inlp"])
def test_erasers_keep_the_mean(name: str) -> None:
    """Only variation is removed, also by placebos, which have the same rank."""
    rows = rows_of(roots=80, per_root=1)
    shifted = MemorySource({"x": torch.from_numpy(rows.matrix("S", 1) + 5.0)}, {"S": ["x"]}, rows.about)
    eraser = _Eraser(ProbeRows(rows.frame, shifted, rows.numbers), Cell("S", 0), "face", name)
    for change in (eraser.change, eraser.placebo(0, 1)):
        moved = change(eraser.X)
        assert np.allclose(change(eraser.mean[None]), 0) and np.allclose(moved.mean(0), 0)
        assert np.linalg.matrix_rank(moved, tol=1e-6) == eraser.rank


def test_rows_that_begin_a_prompt_are_left_out(engine: Engine, coin_dump: Dump) -> None:
    """A prompt that is among the rows, and one that only shares its first step with them."""
    rows = ProbeRows.of(coin_dump).accepted().at("step:1")
    known = tasks.get("coin")(flips=(2, 5)).examples(4)
    kept, notes = unseen(rows, engine, known)
    begun = {tuple(engine.text.encode(example.prompt)[:end]) for example in known for end in range(1, 60)}
    assert not {tuple(path) for path in _paths(kept)} & begun
    assert {tuple(path) for path in _paths(rows)} & begun and len(rows) - len(kept) > 4, "also rows of other prompts"
    assert notes == [f"Left out {len(rows) - len(kept)} of {len(rows)} rows to fit on: their paths begin one of the prompts."]
    with pytest.raises(BadRows, match="All 4 rows"):
        unseen(rows.where(rows.frame["example"] < 4), engine, known)


def _paths(rows: ProbeRows) -> list[list[int]]:
    frame = rows.whole.frame
    frame = frame[frame["branch"] == 0]
    found = []
    for example, position in zip(rows.frame["example"], rows.frame["position"], strict=True):
        path = frame[(frame["example"] == example) & (frame["position"] <= position)].sort_values("position")
        found.append(path["token"].tolist())
    return found


def test_what_is_refused(engine: Engine, coin_dump: Dump, fresh: list[Example]) -> None:
    with pytest.raises(ProbeError, match=r"Unknown eraser.*leace, inlp"):
        amnesic(engine, coin_dump, fresh, "face", layers=[3], erasers=["rlace"])
    with pytest.raises(FingerprintMismatch, match="another engine"):
        amnesic(toy_engine(), coin_dump, fresh, "face", layers=[3])


# ---- question groups -------------------------------------------------------------------------------------------------
# Every question counts an activation once and never reads one that it fitted on.

ASKED: dict[str, Callable[[ProbeRows], Report]] = {
    "transfer": lambda rows: transfer(rows, "implied", layers=[1], estimator="ridge"),
    "outcome_at_fork": lambda rows: outcome_at_fork(rows, layers=[3]),
    "judge": lambda rows: judge(rows, draft_layer=2, layers=[3]),
    "viable_branch": viable_branch,
}


@pytest.mark.parametrize("name", ASKED)
def test_a_copy_of_the_rows_is_no_evidence(name: str, coin_dump: Dump, steps_dump: Dump) -> None:
    """Rows joined with themselves give the lines that they give alone: same rows, same scores, same intervals."""
    rows = {"transfer": lambda: ProbeRows.of(steps_dump), "viable_branch": lambda: answered(2, "truth")}.get(
        name, lambda: ProbeRows.of(coin_dump)
    )()
    alone, twice = ASKED[name](rows).lines, ASKED[name](ProbeRows.join(a=rows, b=rows)).lines
    for mine, other in zip(alone, twice, strict=True):
        assert {key: other[key] for key in ("what", "rows", "groups")} == {key: mine[key] for key in ("what", "rows", "groups")}
        assert [other[key] for key in ("accuracy", "low", "high")] == pytest.approx(
            [mine[key] for key in ("accuracy", "low", "high")]
        )


@pytest.mark.slow
def test_prompts_that_begin_alike_are_one_group(engine: Engine) -> None:
    """At the first step, prompts with the same beginning are one row. Its outcome is counted once."""
    run = engine.replay(tasks.get("coin")(flips=2, p=0.3).examples(90), sites="S", drafter="ngram", rejected=False)
    rows = ProbeRows.of(run)
    report = outcome_at_fork(rows, layers=[3], position="step:1")
    once = len(distinct(rows.accepted().at("step:1")))
    with pytest.raises(BadRows, match=r"The outcome has probability 0\.5 at all"):
        fair = engine.replay(tasks.get("coin")(flips=2).examples(30), sites="S", drafter="ngram", rejected=False)
        outcome_at_fork(fair, layers=[3], position="step:1")
    assert once < 90 and {line["rows"] for line in report.lines} == {line["groups"] for line in report.lines} == {once}


def test_one_activation_in_two_tasks(coin_dump: Dump) -> None:
    """Parts with the same rows have nothing to transfer: each row is in one part only, once."""
    rows = ProbeRows.of(coin_dump)
    odd = rows.frame["example"].to_numpy() % 2 == 1
    joined = ProbeRows.join(a=rows.where(odd), b=rows)
    report = transfer_across(joined, "face", fit_on="a", test_on="b", position="query", layers=[3])
    sizes = {line["what"]: line["rows"] for line in report.lines}
    assert sizes["S3: a to a"] + sizes["S3: a to b"] == len(distinct(rows.accepted().at("query")))


def test_a_leak_names_two_rows(coin_dump: Dump) -> None:
    rows = ProbeRows.of(coin_dump).accepted().at("step:1")
    apart(rows.where(rows.frame["example"] == 0), rows.where(~np.isin(_keys(rows), _keys(rows)[:1])))
    with pytest.raises(SharedRows, match=r"row 0 \(root [0-9a-f]+\) is fitted on and row 0 \(root"):
        apart(rows.where(rows.frame["example"] == 0), rows)


def _keys(rows: ProbeRows) -> np.ndarray:
    return np.array([x.tobytes() for x in rows.matrix("S", 4)])


# ---- viable branch ---------------------------------------------------------------------------------------------------
# `viable_branch`: chance of the classes, the model's own wrong claim, and positions that contain the answer.

ROOTS, WIDTH = 160, 12


def answered(classes: int, held: str, seed: int = 0) -> ProbeRows:
    """Prompts of one token with their answer; half are answered wrongly, by a class that the truth does not determine.

    held  what the query's row holds, on wrong answers: the truth, the claim, or nothing
    """
    generator = np.random.default_rng(seed)
    truth = generator.integers(classes, size=ROOTS)
    right = np.arange(ROOTS) % 2 == 0
    claim = np.where(right, truth, (truth + generator.integers(1, classes, size=ROOTS)) % classes)
    word = np.array([f"class{i}" for i in range(classes)])
    columns: dict[str, Any] = dict(
        token_state=np.tile(["prompt", "accepted"], ROOTS),
        face=np.repeat(word[truth], 2),
        claimed=np.stack([np.full(ROOTS, None), word[claim]], 1).reshape(-1),
        correct=np.repeat(right, 2),
        token=np.stack([np.full(ROOTS, 99), claim], 1).reshape(-1),
    )
    rows = rows_of(ROOTS, per_root=2, seed=seed, **columns)
    shown = {"truth": truth, "claim": claim, "nothing": generator.integers(classes, size=ROOTS)}[held]
    query = np.eye(WIDTH)[np.where(right, truth, shown)]
    answer = np.eye(WIDTH)[claim]
    x = 4 * np.stack([query, answer], 1).reshape(-1, WIDTH) + generator.normal(size=(2 * ROOTS, WIDTH))
    tensors = {"blocks.0.hook_in": torch.from_numpy(x)}
    return ProbeRows(rows.frame, MemorySource(tensors, {"S": list(tensors)}, rows.about), rows.numbers)


def line_of_viable_branch(report: Report, end: str) -> dict[str, Any]:
    return next(each for each in report.lines if each["what"].endswith(end))


@pytest.mark.parametrize("classes", swept([2, 8], 2))
@pytest.mark.parametrize(
    "held, verdict",
    [
        ("truth", ("Shown: the truth is still readable.", "{}: the wrong branch is held.")),
        ("claim", ("{}: the truth is still readable.", "Shown: the wrong branch is held.")),
        ("nothing", ("{}: the truth is still readable.", "{}: the wrong branch is held.")),
    ],
)
def test_verdicts(classes: int, held: str, verdict: tuple[str, str]) -> None:
    report = viable_branch(answered(classes, held))
    nothing = r"(Undecided: n would have to be about \d+|Shown to be below 0\.1)"
    pattern = " ".join(re.escape(each).replace(r"\{\}", nothing) for each in verdict)
    assert re.search(rf"\. {pattern}$", report.findings[0]), report.findings[0]
    assert len(report.findings) == 1
    truth, claim = (
        line_of_viable_branch(report, "wrong answers"),
        line_of_viable_branch(report, "wrong answers, the model's own claim"),
    )
    assert truth["chance"] == claim["chance"] == 1 / classes
    assert {"truth": truth, "claim": claim}.get(held, {"accuracy": 1})["accuracy"] > 0.9
    if held == "nothing" and classes == 8:
        assert truth["low"] < 1 / 8 < truth["high"] < 0.5, "below one half is not yet the wrong branch"


def test_the_default_position_comes_before_the_answer() -> None:
    report = viable_branch(answered(2, "nothing"))
    assert {each["position"] for each in report.lines} == {"query"}


@pytest.mark.parametrize("classes", [2, 8])
def test_the_answer_itself_is_no_evidence(classes: int) -> None:
    """At the answer the row holds the claim because the token is there. The token alone does as well: the finding says so."""
    report = viable_branch(answered(classes, "truth"), positions=["query", "query+1"])
    assert line_of_viable_branch(report, "query+1: wrong answers, the model's own claim")["accuracy"] > 0.9
    assert (
        line_of_viable_branch(report, "query+1: wrong answers, the model's own claim, by the answer's token")["accuracy"] > 0.95
    )
    assert not [each for each in report.lines if "query:" in each["what"] and "token" in each["what"]]
    said = report.findings[1]
    assert "contains the answer" in said and "no more than the answer's token" in said and "held instead" not in said


def test_claims_that_are_not_there() -> None:
    """Without rows of the answer the agreement with the claim is skipped by name, and no wrong branch is reported."""
    rows = answered(2, "claim")
    bare = ProbeRows(rows.frame.drop(columns="claimed"), rows.source, rows.numbers)
    report = viable_branch(bare)
    assert "own claim" in report.notes[0] and "wrong branch is held" not in report.findings[0]
    with pytest.raises(BadRows, match=r"All \d+ answers are right"):
        viable_branch(ProbeRows(rows.frame.assign(correct=True), rows.source, rows.numbers))


# ---- findings --------------------------------------------------------------------------------------------------------
# What reports say, word for word, of made-up lines. A bound of exactly zero, or of exactly chance, shows nothing.


NOTHING = {"bound": 0.1, "needed": None, "decided_by": "token alone"}
VERDICTS: list[tuple[dict[str, Any], str]] = [
    (NOTHING | {"verdict": "shown"}, "Shown"),
    (NOTHING | {"verdict": "undecided", "needed": 120}, "Undecided: n would have to be about 120"),
    (NOTHING | {"verdict": "below"}, "Shown to be below 0.1"),
    (NOTHING | {"verdict": "inverted"}, "Inverted"),
]
"""columns of a line, and how its finding begins"""


def scored(what: str, value: float, low: float, high: float, **more: Any) -> dict[str, Any]:
    return {"what": what, "accuracy": value, "low": low, "high": high, **more}


def test_findings_of_the_judge() -> None:
    good, frame = np.array([True, False, True, False]), pd.DataFrame({"accepted": [True, False, False, False]})
    told = dict(p_family=0.2, verdict="undecided", bound=0.1, needed=150)
    lines = [scored("kl alone", 0.5, 0.4, 0.6), scored(f"judge at S1 and the three{MINUS}", 0.1, 0.0, 0.2, **told)]
    assert _say_judged(lines, good, SimpleNamespace(frame=frame)) == [  # type: ignore[arg-type]
        "4 draft tokens, 50.0% good; of 3 rejected ones 33.3% good.",
        "kl alone: 0.500 [0.400, 0.600].",
        f"judge at S1 and the three{MINUS}: 0.100 [0.000, 0.200].",
        "Undecided: n would have to be about 150: a linear judge knows more than divergence, entropy, log-probability and "
        "token "
        "(judge at S1 and the three, p = 0.200 over 1 test).",
    ]


@pytest.mark.parametrize(("verdict", "head"), VERDICTS)
def test_findings_of_a_transfer(verdict: dict[str, Any], head: str) -> None:
    """Of the cell that is shown, else of the one with the smallest p."""
    ways = ("accepted to accepted", "accepted to rejected", "leakage")
    lines = [scored("token alone: accepted to rejected", 0.5, 0.4, 0.6, majority=0.55, rows=40)]
    for layer, values, p in ((1, (0.9, 0.9, 0.2), 0.9), (2, (0.8, 0.7, 0.1), 0.03)):
        for way, value, share in zip(ways, values, (0.5, 0.55, None), strict=True):
            told = {"p_family": p, **(verdict if p < 0.5 else VERDICTS[1][0])} if way == "accepted to rejected" else {}
            lines.append(scored(f"S{layer}: {way}", value, 0.5, 0.95, majority=share, rows=40, **told))
        for name in ("control task", "token alone"):
            lines.append(scored(f"S{layer}: accepted to rejected minus {name}", 0.4, 0.3, 0.6, majority=None))
    decided = "" if verdict["verdict"] == "shown" else "; decided by token alone"
    assert transfer_module._say(lines, "face") == [
        "token alone: accepted to rejected: 50.0 % [40.0, 60.0], majority 55.0 %, 40 rows.",
        "S2: accepted to accepted: 80.0 % [50.0, 95.0], majority 50.0 %, 40 rows.",
        "S2: accepted to rejected: 70.0 % [50.0, 95.0], majority 55.0 %, 40 rows.",
        "S2: leakage: 10.0 % [50.0, 95.0].",
        "S2: above token alone by 40.0 % [30.0, 60.0].",
        "S2: above control task by 40.0 % [30.0, 60.0].",
        f"{head}: a probe of 'face' fitted on accepted rows reads rejected ones, best at S2, against 2 of 6 controls "
        f"(without: shuffled labels, position alone, bag of tokens, untrained model){decided}, p = 0.030 over 2 tests.",
    ]


@pytest.mark.parametrize(("verdict", "head"), VERDICTS)
def test_findings_of_a_transfer_across(verdict: dict[str, Any], head: str) -> None:
    way = "a to b"
    lines = [scored(f"token alone, {way}", 0.55, 0.5, 0.6)]
    for cell, p in (("S1", 0.9), ("S2", 0.03)):
        told = verdict if cell == "S2" else VERDICTS[1][0]
        lines += [scored(f"{cell}: {way}", 0.8, 0.7, 0.9, chance=0.5, p_family=p, **told)]
        lines += [scored(f"{cell}: {way} minus {name}", 0.4, 0.3, 0.6) for name in ("shuffled labels", "token alone")]
    said = transfer_module._say_across(lines, way, "face")
    assert said[0] == "token alone, a to b: 55.0 % [50.0, 60.0]." and said[1] == "S2: a to b: 80.0 % [70.0, 90.0]."
    assert len(said) == 5 and all(line.startswith("S2: a to b") for line in said[1:4])
    decided = "" if verdict["verdict"] == "shown" else ", decided by token alone"
    assert said[-1] == f"{head}: a probe of 'face' reads a to b, best at S2 (chance 50.0 %){decided}, p = 0.030 over 2 tests."


def test_findings_of_lies_and_outcomes() -> None:
    lines = [scored(f"S{i}: follows the text", 0.9, 0.5, 0.95, **verdict) for i, (verdict, _) in enumerate(VERDICTS, 1)] + [
        scored("S1: right", 1.0, 0.9, 1.0)
    ]
    more = "90.0 % [50.0, 95.0] of rows agree with the text."
    assert forced._say_text_or_truth(lines, [scored("own words follow the text", 0.75, 0.5, 0.875)]) == [
        f"Shown: S1 follows the text: {more}",
        f"Undecided: n would have to be about 120: S2 follows one side more than the other: {more}",
        f"Shown to be below 0.1: S3 follows one side more than the other: {more}",
        f"Shown: S4 follows the truth: {more}",
        "own words follow the text in 75.0 % [50.0, 87.5].",
    ]
    gains = [
        scored(f"S{i} minus", value, -0.1, 0.5, metric="gain", p_family=p, **VERDICTS[1][0])
        for i, value, p in ((1, 0.3, 0.2), (2, 0.4, 0.4))
    ]
    assert forced._say_outcome([scored("state", 0.25, 0.1, 0.5, metric="r2"), *gains]) == [
        "state: r2 0.250 [0.100, 0.500].",
        "Undecided: n would have to be about 120: rows explain more than state and number of steps side by side; best S1 "
        "minus: "
        "+0.300 [-0.100, +0.500], p = 0.200 over 2 tests.",
    ]


@pytest.mark.parametrize(("verdict", "head"), VERDICTS)
@pytest.mark.parametrize("claim", [None, "shown"])
@pytest.mark.parametrize("token", [False, True])
def test_findings_of_a_viable_branch(verdict: dict[str, Any], head: str, claim: str | None, token: bool) -> None:
    more = {"chance": 0.5, "groups": forced.MIN_GROUPS}
    told = verdict | {"decided_by": "token" if token else "p_family"}
    lines = [
        scored("S1 at query: right answers", 0.9, 0.8, 1.0, **more),
        scored("S1 at query: wrong answers", 0.6, 0.4, 0.7, **more, **told),
    ]
    if claim:
        lines.append(scored(f"S1 at query: {forced.CLAIM}", 0.6, 0.5, 0.7, **more, **VERDICTS[0][0]))
    if token:
        lines.append(scored(f"S1 at query: wrong answers{forced.TOKEN}", 0.6, 0.5, 0.7, **more))
    (said,) = forced._say_viable(lines)
    assert said.startswith(
        "S1 at query: 90.0 % [80.0, 100.0] on right answers, 60.0 % [40.0, 70.0] on wrong ones (chance 50.0 %)"
    )
    rest = ", no more than the answer's token tells" if token else ""
    end = f"{head}: the truth is still readable{rest}." + (" Shown: the wrong branch is held." if claim else "")
    assert said.endswith(end) and ("; the position contains the answer" in said) is token
    assert ("agree with the model's own claim" in said) is (claim is not None)
    for few in ({"groups": forced.MIN_GROUPS - 1}, {"chance": 1.0}):
        bare = {name: value for name, value in lines[1].items() if name != "verdict"}
        assert "No verdict: wrong answers of" in forced._say_viable([lines[0], bare | few])[0]


@pytest.mark.parametrize(("verdict", "head"), VERDICTS)
def test_findings_of_interventions(verdict: dict[str, Any], head: str) -> None:
    pull = {"nats": 1.234, "nats_low": 0.5, "nats_high": 2.0}
    about = {"label": "face", "site": "S3", "position": "query", "estimator": "ridge"}
    lines = [
        scored("probe's direction", 0.8, 0.7, 0.9, **pull),
        scored("probe minus random direction", 0.5, 0.1, 0.75, **verdict),
    ]
    assert causal._say("steering", lines, about) == [
        "probe's direction, face at S3, query (ridge): answer flipped in 80.0 % [70.0, 90.0], 1.23 nats [0.50, 2.00].",
        f"{head}: steering along the probe's direction flips more answers than the random direction: 50.0 % [10.0, 75.0] more.",
    ]
    rates = [
        scored(name, value, value - 0.05, value + 0.1) for name, value in (("nothing", 0.1), ("own", 0.6), ("random", 0.2))
    ]
    told = verdict | {"nats_verdict": verdict["verdict"], "nats_needed": verdict["needed"]}
    rates += [scored("more", 0.4, 0.1, 0.5, **pull, **told), scored("refit: site, after", 0.5, 0.45, 0.6, majority=0.45)]
    assert _say_amnesic("leace", "face", 2, rates) == [
        "leace (rank 2): 10.0 % [5.0, 20.0] wrong answers with nothing erased, 60.0 % [55.0, 70.0] without 'face', 20.0 "
        "% [15.0, 30.0] without "
        "random directions; a new probe at the site reads 'face' in 50.0 % [45.0, 60.0] (majority 45.0 %).",
        f"{head}: leace: the model needs 'face' there: 40.0 % [10.0, 50.0] more wrong answers than random directions cost.",
        f"{head}: leace: erasing 'face' changes what follows more than random directions do: +1.23 nats [+0.5, +2].",
    ]
    reach = [
        {"site": "S", "layer": 2, "position": "step", **scored("S2: probe minus random direction", 0.5, 0.1, 0.75, **verdict)},
        lines[0],
    ]
    assert erasure._say_reach(reach) == [
        f"{head}: S2 at step is within reach: 50.0 % [10.0, 75.0] more flips than random directions."
    ]


def test_findings_of_a_curve() -> None:
    """The first of the strongest regularisations that is not worse; p of exactly one half of a tenth is."""
    lines = [
        scored(f"C = {c}", value, value - 0.1, value + 0.1, p_worse=p, complexity=complexity, majority=0.5)
        for c, value, p, complexity in (
            (0.01, 0.5, 0.01, 0.1),
            (0.1, 0.7, 0.05, 0.2),
            (1, 0.75, 0.0501, 0.3),
            (10, 0.8, 1.0, 0.4),
        )
    ]
    assert sweeps._say(lines, "face") == [
        "face: best accuracy 80.0 % [70.0, 90.0] at C = 10, complexity 40.0 %.",
        "The strongest regularisation that is not worse (p > 0.05) is C = 1: accuracy 75.0 % [65.0, 85.0], complexity 30.0 % "
        "(share of exchanged labels that it fits; the majority class is 50.0 %).",
    ]


def test_findings_of_outcome_probes_and_drafts() -> None:
    """The lowest bound decides, which need not be that of the least gain; both are named then."""
    loss = [scored("S1", 0.4, 0.3, 0.5, metric=LOSS, state=None, share_explained=0.625, **VERDICTS[1][0])]
    gains = [("position", 0.2, 0.1, 0.3), ("text", 0.3, 0.0, 0.5)]
    lines = [scored(f"S1 against {name}", value, low, high, metric=GAIN, state="S1") for name, value, low, high in gains]
    begins = "tells more of the coming outcomes than every baseline. Loss 0.400 nats, 62% of what can be explained; least gain"
    begins += " +0.200"
    (said,) = outcome_probe._say([*loss, *lines])
    assert said == (
        f"Undecided: n would have to be about 120: S1 {begins} nats over position (+0.100 to +0.300). The lowest bound "
        f"decides: +0.000 over text "
        f"(gain +0.300)."
    )
    loss[0] |= VERDICTS[0][0]
    assert outcome_probe._say([*loss, lines[0]]) == [f"Shown: S1 {begins} nats over position (+0.100 to +0.300)."]
    found, mass = Estimate(0.5, 0.25, 0.75), Estimate(0.125, 0.0, 0.25)
    for p, low, verdict in ((0.05, 0.001, "Shown"), (0.0501, 0.001, "Undecided"), (0.05, 0.0, "Undecided")):
        made = DraftAgreement(found=found, mass=mass, control=0.0625, gain=Estimate(0.1, low, 0.2), p=p, forks=7)
        head, told = str(made).split(": rejected")
        assert head.split(":")[0] == verdict and f": rejected{told}" == (
            ": rejected drafts are among the resamples not taken. 7 forks; found 0.500 [0.250, 0.750], share of "
            f"resamples 0.125 [0.000, 0.250], other forks' drafts 0.062, p = {p:.3f}."
        )
    assert 0.25 in found and 0.75 in found and 0.76 not in found
