"""docs/five_things.md: its calls are those of notebook 8, which runs them; its numbers are those of the result file."""

import json
import re

from tests.docs.blocks import ROOT, blocks

PAGE = "docs/five_things.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
SOURCE = (ROOT / "notebooks" / "8_five_things.py").read_text(encoding="utf-8")
ROWS = json.loads((ROOT / "benchmarks" / "results" / "workbench-cpu.json").read_text())["rows"]


def missing(text: str) -> list[str]:
    """Python lines of a page that the notebook does not have."""
    lines = set(SOURCE.splitlines())
    return [line for b in blocks(PAGE, text) if b.language == "python" for line in b.text.splitlines() if line not in lines]


def test_the_calls_are_those_of_the_notebook() -> None:
    assert missing(TEXT) == [] and len([b for b in blocks(PAGE, TEXT) if b.language == "python"]) == 6
    planted = TEXT.replace('token=" Mary"', 'token=" Marie"')
    assert missing(planted) == ['seen = rl.lens(engine, clean, token=" Marie")'], "control"


def test_the_table_is_the_result_file() -> None:
    """One line per job: milliseconds here and there (in a batch, where that is possible), and the ratio, as in the table."""
    stated = re.findall(
        r"^\| (lens|patch|steer|resample|ablate)\b.*?\| ([\d,.]+) \| ([\d,.]+)\b.*?\| ([\d.]+) \|", TEXT, re.MULTILINE
    )
    measured = []
    for row in ROWS:  # against the batched form where there is one
        theirs = row.get("batched_ms", row["hooks_ms"])
        measured.append(
            (row["what"].split(":")[0], f"{row['ours_ms']:,.0f}", f"{theirs:,.0f}", f"{theirs / row['ours_ms']:.1f}")
        )
    assert sorted(stated) == sorted(measured)
