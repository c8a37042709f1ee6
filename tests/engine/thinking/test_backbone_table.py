"""The job behind the tables of Thinking States: it trains and tests every run around a backbone, and says which are missing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import RESULTS
from benchmarks.thinking_jobs import Limits
from benchmarks.thinking_plans import TINY_PLAN
from benchmarks.thinking_tables import lines_of, merged, paper_table, rows_of, text_tables
from tests.engine.thinking.pretrained import write_backbone

ROOT = RESULTS.parent.parent


@pytest.mark.slow
def test_the_job(tmp_path: Path) -> None:
    backbone = str(write_backbone(tmp_path / "backbone"))
    plan = replace(TINY_PLAN, longest=(2,), width=160, steps=2, methods=("none", "thinking"), cut=True, backbone=backbone)
    lines = list(lines_of(plan.runs(), Limits(120.0, "cpu", at_once=1), None))
    assert [line.what for line in lines] == ["none-2", "thinking-cut-2"]
    for line in lines:
        (run,) = line.numbers["runs"]
        assert run["recipe"]["backbone"] == backbone and run["recipe"]["precision"] == "bf16"
        assert list(map(int, run["curve"])) == plan.lengths(2) and run["steps"] == run["planned"] == 2
    file = tmp_path / "out.json"
    file.write_text(json.dumps({"rows": [{"what": line.what, **line.numbers} for line in lines]}))
    assert [row["method"] for row in merged([file])] == ["none", "thinking-cut"] and len(paper_table(merged([file]))) == 9


def test_runs_that_do_not_end_are_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="1 of 1 runs failed or did not end in time"):
        list(lines_of(replace(TINY_PLAN, longest=(2,), methods=("none",)).runs(), Limits(0.0, "cpu", at_once=1), None))


def test_the_tables_of_the_docs_are_those_of_the_files() -> None:
    """Every line of the parity table in docs/results.md; the word problems' numbers are on file, too."""
    page = (ROOT / "docs" / "results.md").read_text().splitlines()
    parity = paper_table(merged([RESULTS / "thinking-parity-gpu.json", RESULTS / "thinking-parity-cut-gpu.json"]))
    assert len(parity) > 20 and [line for line in parity if line and line not in page] == []
    rows = rows_of(RESULTS / "thinking-texts-gpu.json")
    assert any("**99.8** (99.5, 100.0)" in line for line in text_tables(rows))
