"""`viable_branch`: chance of the classes, the model's own wrong claim, and positions that contain the answer."""

from typing import Any

import numpy as np
import pytest
import torch

from replaylens.probes.errors import BadRows
from replaylens.probes.questions.forced import viable_branch
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows
from replaylens.probes.sources import MemorySource
from tests.probes.synthetic import rows_of

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


def line(report: Report, end: str) -> dict[str, Any]:
    return next(each for each in report.lines if each["what"].endswith(end))


@pytest.mark.parametrize("classes", [2, 8])
@pytest.mark.parametrize(
    "held, verdict",
    [
        ("truth", "the truth is still readable"),
        ("claim", "the wrong branch is held instead"),
        ("nothing", "neither the truth nor the wrong branch is readable"),
    ],
)
def test_verdicts(classes: int, held: str, verdict: str) -> None:
    report = viable_branch(answered(classes, held))
    assert report.findings[0].endswith(f"{verdict}.") and len(report.findings) == 1
    truth, claim = line(report, "wrong answers"), line(report, "wrong answers, the model's own claim")
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
    assert line(report, "query+1: wrong answers, the model's own claim")["accuracy"] > 0.9
    assert line(report, "query+1: wrong answers, the model's own claim, by the answer's token")["accuracy"] > 0.95
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
