"""Probes on given texts: the last token by default, positions by name, a function, and reports that do not repeat the texts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from replaylens import Dump, Engine, Run, cli, probes, tasks
from replaylens.probes.errors import BadPosition, BadRows
from replaylens.probes.questions.forced import viable_branch
from replaylens.probes.rows import ProbeRows
from replaylens.tasks.errors import NotForTexts
from replaylens.views.report import ReportPage

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


def test_a_probe_reads_the_answer_at_the_last_token(run: Run, dump: Dump) -> None:
    report = probes.sweep(dump, "answer", **HOW)
    (line,) = [line for line in report.lines if line["label"] == "answer"]
    assert line["position"] == "last" and line["accuracy"] > 0.9 > max(line["majority"], line["bag_of_tokens"])
    assert any(line["label"] == "shuffled" and line["known_zero"] for line in report.lines)
    assert report.source["knobs"]["texts"].startswith("60 texts, SHA-256") and run[0].example.prompt not in report.text()
    again = probes.sweep(run, "answer", **HOW)
    assert [line["accuracy"] for line in again.lines] == [line["accuracy"] for line in report.lines]
    with pytest.raises(NotForTexts, match="labels answer, flips, start, and none of them is the state"):
        probes.sweep(run, **HOW)


def test_positions_by_name(run: Run, dump: Dump) -> None:
    for rows in (ProbeRows.of(run), ProbeRows.of(dump)):
        last = rows.at("last").frame
        assert len(last) == 60 and set(last["text"]) == {":"} and len(rows.at("last-1")) == 60
        assert set(rows.at("text: state").frame["text"]) == {" state"} and len(rows.at("text: state")) == 120
        assert set(rows.at("text:coin's state").frame["position"]) == {2}, "the token that ends it"
        assert set(rows.at("label:start").frame["text"]) == {" heads", " tails"} and len(rows.at("label:start")) == 60
        assert set(rows.at("2:4").frame["position"]) == {2, 3} and len(rows.at("-3:")) == 180
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
        with pytest.raises(BadPosition, match=r"given texts or from arrays, which have no .* Use all, .* Also: text:"):
            rows.at(position)
    with pytest.raises(BadPosition, match="did you mean 'start'"):
        rows.at("label:strat")
    with pytest.raises(BadPosition, match="Pass the function"):
        rows.at("custom:colon")
    with pytest.raises(BadRows, match="Give one boolean per row"):
        rows.at(lambda frame: np.arange(len(frame)))
    with pytest.raises(NotForTexts, match="They have no claims"):
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
