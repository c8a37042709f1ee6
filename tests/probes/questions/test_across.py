"""Joined rows: examples of the same number stay apart, and probes of one task read another where a direction is common."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from replaylens.probes.errors import BadRows, MissingLabel, ProbeError, SeveralTasks
from replaylens.probes.positions import add_places
from replaylens.probes.questions.transfer import transfer_across
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows, sequences
from replaylens.probes.sources import MemorySource
from replaylens.probes.sweeps import sweep
from tests.probes.synthetic import direction, rows_of


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


def line(report: Report, what: str) -> dict[str, Any]:
    return next(each for each in report.lines if each["what"] == what)


def test_a_common_direction_is_found() -> None:
    way = direction(5)
    joined = ProbeRows.join(coin=of_task("coin", way, 1), coins=of_task("coins", way, 2))
    report = transfer_across(joined, "face", fit_on="coin", test_on="coins", position="all")
    assert line(report, "S0: coin to coins")["accuracy"] > 0.8 and report.findings[-1].startswith("Shown")
    assert report.source["task"] == "coin+coins"


def test_sweeps_of_several_tasks() -> None:
    """A sweep over joined tasks skips what needs one task by name."""
    joined = ProbeRows.join(coin=of_task("coin", direction(5), 1), coins=of_task("coins", direction(5), 2))
    report = sweep(joined, "face", sites="S", positions="all", permutations=19)
    assert report.lines[0]["accuracy"] > 0.8
    assert any("known zeros" in note and "several tasks" in note for note in report.notes)


def test_each_task_with_a_direction_of_its_own_shares_none() -> None:
    one, two = np.eye(16)[:2]
    joined = ProbeRows.join(coin=of_task("coin", one, 1), coins=of_task("coins", two, 2))
    report = transfer_across(joined, "face", fit_on="coin", test_on="coins", position="all")
    assert line(report, "S0: coin to coin")["accuracy"] > 0.8 < line(report, "S0: coins to coins")["accuracy"]
    assert report.findings[-1].startswith("Not shown")


def test_tokens_that_tell_the_label_are_a_control() -> None:
    """Rows whose token names the class transfer without a direction of the state: not shown."""
    parts = {}
    for seed, task in enumerate(("coin", "coins"), 1):
        face = of_task(task, direction(5), seed).frame["face"]
        parts[task] = of_task(task, direction(5), seed, token=(face == "tails").astype(int).to_numpy())
    report = transfer_across(ProbeRows.join(**parts), "face", fit_on="coin", test_on="coins", position="all")
    assert line(report, "token alone, coin to coins")["accuracy"] == 1 and report.findings[-1].startswith("Not shown")


def test_rows_from_arrays() -> None:
    """Activations from elsewhere have parts too. Without tokens, that control is skipped by name."""
    parts = {}
    for seed, name in enumerate(("one", "two")):
        rows = of_task("coin", direction(5), seed)
        parts[name] = ProbeRows.of_arrays(rows.matrix("S", 0), {"face": rows.frame["face"].to_numpy()}, groups=rows.roots)
    report = transfer_across(ProbeRows.join(**parts), "face", fit_on="one", test_on="two", position="all", sites="X")
    assert report.findings[-1].startswith("Shown") and report.notes == [
        "Skipped the control 'token alone': these rows have no tokens."
    ]


def test_labels_that_only_one_task_has() -> None:
    coin, coins = of_task("coin", direction(), 1, parity=1), of_task("coins", direction(), 2)
    joined = ProbeRows.join(coin=coin, coins=coins)
    assert "parity" not in joined.frame and "face" in joined.frame
    with pytest.raises(SeveralTasks, match=r"several tasks \(coin\+coins\)"):
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
    again = add_places(frame, knows_steps=True)
    assert (again["steps"] == again["part"].map({"a": 3, "b": 2})).all()
    assert (again.groupby("part")["since_query"].min() == [-2, -1]).all()
