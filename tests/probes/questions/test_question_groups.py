"""Every question counts an activation once and never reads one that it fitted on."""

from collections.abc import Callable

import numpy as np
import pytest

from replaylens import tasks
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.probes.errors import BadRows, SharedRows
from replaylens.probes.groups import distinct, histories
from replaylens.probes.probe import fit_probe
from replaylens.probes.questions.erasure import steering_reach
from replaylens.probes.questions.forced import outcome_at_fork, viable_branch
from replaylens.probes.questions.judge import judge
from replaylens.probes.questions.transfer import transfer, transfer_across
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import apart
from tests.probes.questions.test_viable_branch import answered

ASKED: dict[str, Callable[[ProbeRows], Report]] = {
    "transfer": lambda rows: transfer(rows, "implied", layers=[1]),
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


def test_prompts_that_begin_alike_are_one_group(engine: Engine) -> None:
    """At the first step, prompts with the same beginning are one row. Its outcome is counted once."""
    run = engine.replay(tasks.get("coin")(flips=2, p=0.3).examples(150), sites="S", drafter="ngram", rejected=False)
    rows = ProbeRows.of(run)
    report = outcome_at_fork(rows, layers=[3], position="step:1")
    once = len(distinct(rows.accepted().at("step:1")))
    with pytest.raises(BadRows, match=r"The outcome has probability 0\.5 at all"):
        fair = engine.replay(tasks.get("coin")(flips=2).examples(40), sites="S", drafter="ngram", rejected=False)
        outcome_at_fork(fair, layers=[3], position="step:1")
    assert once < 150 and {line["rows"] for line in report.lines} == {line["groups"] for line in report.lines} == {once}


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


def test_steering_is_fitted_on_other_beginnings(engine: Engine, coin_dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other prompts that begin as the steered ones do are left out of the fits, and the report says so."""
    from replaylens.probes.questions import erasure

    seen: list[ProbeRows] = []
    monkeypatch.setattr(erasure, "fit_probe", lambda rows, *args, **more: seen.append(rows) or fit_probe(rows, *args, **more))
    examples = tasks.get("coin")(flips=3, seed=3).examples(6)
    report = steering_reach(engine, coin_dump, examples, "face", layers=[3], placebos=1)
    prompts = [engine.text.encode(example.prompt) for example in examples]
    for rows in seen:
        for path in histories(rows) or []:
            assert path.tolist() not in [prompt[: len(path)] for prompt in prompts]
    assert len(seen) >= 2 and any(note.startswith("step: Left out") for note in report.notes)
