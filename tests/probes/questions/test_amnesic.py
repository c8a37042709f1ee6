"""`amnesic`: erasing what the model uses costs answers, erasing nothing or a known zero does not; prompts are held out."""

import numpy as np
import pytest
import torch

from replaylens import tasks
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import FingerprintMismatch
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.questions.erasure import _Eraser, _say_amnesic, amnesic
from replaylens.probes.rows import Cell, ProbeRows
from replaylens.probes.sources import MemorySource
from replaylens.probes.splits import unseen
from replaylens.tasks import Example
from tests.probes.synthetic import rows_of
from tests.toy_model import engine as toy_engine


@pytest.fixture(scope="module")
def fresh() -> list[Example]:
    return tasks.get("coin")(flips=(2, 5)).examples(range(100, 124))


def test_erasing_the_state_costs_answers(engine: Engine, coin_dump: Dump, fresh: list[Example]) -> None:
    report = amnesic(engine, coin_dump, fresh, "face", layers=[3], erasers=["leace"])
    nothing, erased, random, more = report.lines[:4]
    assert nothing["accuracy"] == 0 and nothing["nats"] == 0, "coin-plain is right on short prompts, and no edit moves no bit"
    assert erased["accuracy"] > 0.3 > random["accuracy"] and erased["nats"] > 0.5 and erased["rank"] == 1
    assert more["low"] > 0 < more["nats_low"] and all(said.startswith("Shown") for said in report.findings[1:])


def test_erasing_a_known_zero_costs_nothing(engine: Engine, coin_dump: Dump, fresh: list[Example]) -> None:
    """`shuffled` is in no row: its eraser does no more than random ones."""
    report = amnesic(engine, coin_dump, fresh, "shuffled", layers=[3], erasers=["leace"], placebos=4)
    assert all(said.startswith("Not shown") for said in report.findings[1:])


def test_both_erasers_are_compared(engine: Engine, coin_dump: Dump, fresh: list[Example]) -> None:
    report = amnesic(engine, coin_dump, fresh[:12], "face", layers=[2], placebos=1)
    assert {line["what"].split(":")[0] for line in report.lines} == {"S2 leace", "S2 inlp"}
    assert len(report.findings) == 6


@pytest.mark.parametrize("eraser", ["leace", pytest.param("inlp", marks=pytest.mark.slow)])
def test_the_same_report_twice(engine: Engine, coin_dump: Dump, fresh: list[Example], eraser: str) -> None:
    one, other = (
        amnesic(engine, coin_dump, fresh[:6], "face", layers=[2], erasers=[eraser], placebos=1).to_json() for _ in range(2)
    )
    assert one == other


@pytest.mark.parametrize("left, verdict", [(0.4, "Not shown"), (0.8, "No verdict, since 'face' is still readable")])
def test_a_label_that_is_left_gives_no_verdict(left: float, verdict: str) -> None:
    """A model that does not suffer does without the label only if the label is gone."""
    rates = dict(accuracy=0.1, low=-0.1, high=0.3, nats=0.0, nats_low=-0.1, nats_high=0.1)
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
