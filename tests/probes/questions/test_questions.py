"""Branch questions on the embedded model: each gives a report and refuses what it cannot answer."""

from typing import Any

import numpy as np
import pytest

from replaylens import tasks
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.intervals import Estimate
from replaylens.probes.questions.erasure import steering_reach
from replaylens.probes.questions.forced import forced_rows, outcome_at_fork, outcome_target, text_or_truth, viable_branch
from replaylens.probes.questions.judge import judge
from replaylens.probes.questions.transfer import transfer
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows
from tests.probes.synthetic import rows_of

coin = tasks.get("coin")


def line(report: Report, what: str) -> dict[str, Any]:
    return next(each for each in report.lines if each["what"] == what)


def width(scored: dict[str, Any]) -> float:
    return float(scored["high"] - scored["low"])


def test_transfer(steps_dump: Dump) -> None:
    """Probes of the implied state transfer to rejected branches. Probes of the truth, which their text left, do much less."""
    implied, truth = (transfer(steps_dump, label, layers=[1]) for label in ("implied", "face"))
    assert line(implied, "S1: accepted to rejected")["accuracy"] > 0.8
    assert line(truth, "S1: accepted to rejected")["accuracy"] < line(implied, "S1: accepted to rejected")["accuracy"] - 0.1
    assert len(implied.lines) == 6 and implied.findings


def test_transfer_needs_both_kinds(steps_dump: Dump) -> None:
    with pytest.raises(BadRows, match="accepted and of rejected"):
        transfer(ProbeRows.of(steps_dump).accepted(), "face")


def test_text_or_truth(engine: Engine) -> None:
    """Probes are right on truthful chains. After a lie they follow either the text or the truth, never both."""
    report = text_or_truth(engine, coin(flips=(3, 4), rendering="steps").examples(80), layers=[1, 4])
    for layer in (1, 4):
        text, truth = (line(report, f"S{layer}: after the lie, follows the {name}") for name in ("text", "truth"))
        assert text["accuracy"] + truth["accuracy"] == pytest.approx(1)
    assert line(report, "S1: truthful chains, truth")["accuracy"] > 0.8
    with pytest.raises(ProbeError, match="rendering='steps'"):
        text_or_truth(engine, coin(flips=3).examples(40))
    with pytest.raises(ProbeError, match="counted from 1"):
        text_or_truth(engine, coin(flips=3, rendering="steps").examples(40), lie_at=0)


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
    assert report.findings[-1].startswith(("Shown", "Not shown"))
    name = "S3 minus state and steps"
    assert width(line(report, name)) > 1.05 * width(line(outcome_at_fork(coin_dump, layers=[3]), name)), "one of two cells"
    with pytest.raises(ProbeError, match="Use coin"):
        other = rows_of(roots=10)
        other.about.knobs.clear()
        object.__setattr__(other.source, "about", type(other.about)("fork", {}, "", None))
        outcome_at_fork(other)


def test_judge(coin_dump: Dump) -> None:
    """Areas lie between 0 and 1. The verdict compares against all baselines together."""
    report = judge(coin_dump, draft_layer=2, layers=[3])
    for what in ("kl alone", "kl, entropy, logprob, token", "judge at S3"):
        assert 0 <= line(report, what)["accuracy"] <= 1
    assert line(report, "kl, entropy, logprob")["accuracy"] > 0.7
    assert report.findings[-1].startswith(("Shown", "Not shown"))
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


def test_viable_branch(engine: Engine, coin_dump: Dump) -> None:
    """The model answers prompts beyond its training length wrongly. There, the probe of right answers reads less truth."""
    run = engine.replay(coin(flips=(8, 12)).examples(100), sites=["blocks.3.hook_out"], drafter="ngram", rejected=False)
    report = viable_branch(run, sites=["blocks.3.hook_out"], positions=["query"])
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


def test_steering_reach(engine: Engine, coin_dump: Dump) -> None:
    """Steering works at the query in a late layer. The report has a finding for every place."""
    examples = coin(flips=3, seed=3).examples(12)
    report = steering_reach(engine, coin_dump, examples, "face", layers=[3])
    assert line(report, "S3 at query: steer: probe")["accuracy"] > 0.8
    assert len(report.findings) == 4 and "S3 at query: within reach" in report.findings[-1]
    with pytest.raises(ProbeError, match="prompts of one length"):
        steering_reach(engine, coin_dump, coin(flips=(2, 3)).examples(9), "face", layers=[3])
    with pytest.raises(ProbeError, match="are among the rows"):
        seen = [e for e in coin(flips=(2, 5)).examples(80) if len(e.events) == 3]
        steering_reach(engine, coin_dump, seen, "face", layers=[3])


def test_reports_are_saved(steps_dump: Dump, report_folder: Any) -> None:
    transfer(steps_dump, "face", layers=[1]).save(report_folder)
    assert {path.name for path in report_folder.iterdir()} == {"report.json", "summary.txt", "table.csv", "transfer.png"}
    assert Report.load(report_folder).kind == "transfer"
