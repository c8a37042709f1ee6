"""The measurements of natural mismatches, with a fast path that is often wrong: what they count is what happened."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import natural, natural_pages
from benchmarks.harness import RESULTS
from benchmarks.natural import (
    TINY,
    Subject,
    alone,
    coin_prompts,
    divergence,
    first_difference,
    flips,
    generated,
    load,
    samplings,
    story_prompts,
    tallied,
    windows,
)
from replaylens.engine.engine import Engine
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.runner import PassResult, Runner

ROOT = RESULTS.parent.parent
PROMPTS = coin_prompts("steps", 4)


@pytest.fixture
def wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast path with noise on its logits, so that one draft in a few is wrong."""
    fast, generator = Runner.fast, torch.Generator().manual_seed(0)

    def noisy(self: Runner, segments: list[Segment], tap: object = None) -> PassResult:
        result = fast(self, segments, tap)  # type: ignore[arg-type]
        result.logits = result.logits + 8 * torch.randn(result.logits.shape, generator=generator)
        return result

    monkeypatch.setattr(Runner, "fast", noisy)


def test_the_tally_is_that_of_the_trace(wrong_drafts: None) -> None:
    engine, own = Engine.load("coin-plain", record=True), samplings(4, 1.0)
    with tallied(engine) as tally:
        generated(engine, PROMPTS, own, 24, window=4)
    drafted = [len(e["chains"][0]) for e in engine.trace.events if e["event"] == "draft"]
    verdicts = [e for e in engine.trace.events if e["event"] == "verdict"]
    accepted = sum(e["accepted"] for e in verdicts)
    assert tally.verified == len(verdicts) == len(drafted) and tally.accepted == accepted > 0
    assert tally.rejected == sum(drafted) - accepted
    assert tally.flips == sum(bool(e["rejected"]) for e in verdicts) and 0 < tally.flips < tally.verified
    assert tally.per_thousand == 1000 * tally.flips / (accepted + tally.flips)
    assert tally.committed == accepted + sum(len(e["pending"]) for e in verdicts)
    assert tally not in engine.loop.listeners


def test_no_wrong_draft_reaches_a_committed_token(wrong_drafts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sections on a CPU: ordinary requests diverge, drafts flip, and deterministic tokens differ nowhere."""
    monkeypatch.setattr(natural, "TEMPERATURES", (1.0,))
    sizes = replace(TINY, batches=(4,), windows=(8,), groups=(4,), load_tokens=4)
    subject = Subject(Engine.load("coin-plain"), "coin-plain", PROMPTS, sizes, float("inf"), sizes.length)
    lines = [line for part in (divergence, flips, load, windows, alone) for line in part(subject)]
    rows = {line.what: {**line.numbers, "ratio": line.ratio, "met": line.met} for line in lines}
    assert subject.compared > 100 and not subject.differing
    assert rows["coin-plain, deterministic tokens in any company: differing"]["met"]
    assert all(row["never"] < 1 for what, row in rows.items() if "against deterministic" in what)
    assert all(row["flips"] > 0 for what, row in rows.items() if "flipped" in what or "recomputed" in what)
    assert rows["coin-plain, load, draft and verify, W=4, 50 % deterministic"]["ordinary_token_ms"] > 0
    named = {what.replace("coin-plain", natural_pages.STORY): row for what, row in rows.items()}
    made = {name: make(named) for name, make in natural_pages.TABLES.items()}
    assert [len(table) for table in made.values()] == [4, 4, 4, 7, 3]
    assert all(len(line) == len(table[0]) for table in made.values() for line in table)


def test_a_missed_rollback_would_be_counted(wrong_drafts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the noisy fast path in place of the verifier, tokens differ."""
    subject = Subject(Engine.load("coin-plain"), "coin-plain", PROMPTS, TINY, float("inf"), 12)
    subject.story(1.0)
    monkeypatch.setattr(Runner, "exact", lambda self, segments, tap=None, stop_at_layer=None: self.fast(segments, tap))
    subject.compare(1.0, generated(subject.engine, PROMPTS, samplings(4, 1.0), 12, window=4))
    assert subject.differing > 0


def test_boards_are_drawn_from_records(wrong_drafts: None) -> None:
    """Records go through JSON. The second draft's mismatch: one accepted, the verifier's in its place, two void."""
    engine = Engine.load("coin-plain", record=True)
    found, looked = natural_pages.record(engine, PROMPTS, 1.0, 5.0)
    found = json.loads(json.dumps(found))
    assert set(found) == set(natural_pages.KINDS.values()) and looked >= 6
    for kind, kept in found.items():
        told = natural_pages.told(kept, kind)
        checks = next(frame.checks for frame in told.frames if frame.checks)
        accepted = next(n for n, name in natural_pages.KINDS.items() if name == kind)
        assert [check.accepted for check in checks] == [i < accepted for i in range(4)]
        assert [check.void for check in checks] == [i > accepted for i in range(4)]
        board = natural_pages.first_round(told)
        assert ("Rollback" in board) is (kind != natural_pages.ACCEPT) and "7 other requests" in board


def test_prompts_differ_and_differences_are_found():
    assert len(set(story_prompts(128))) == 128
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2 and first_difference([1, 2], [1, 2, 3]) is None


def test_the_page_shows_the_numbers_on_file():
    """docs/natural.md is made from benchmarks/results/natural-gpu.json."""
    rows, page = natural_pages.read(RESULTS / "natural-gpu.json"), (ROOT / "docs" / "natural.md").read_text()
    assert natural_pages.rewritten(page, rows) == page and page.count("<!-- end -->") == len(natural_pages.TABLES)
    changed = {what: {**row, "per_1000": 99.0} if "per_1000" in row else row for what, row in rows.items()}
    assert natural_pages.rewritten(page, changed) != page


def test_boards_in_the_docs_are_those_on_file():
    """Natural rollbacks of a trained model. Requests that finish in the pass of a verification were verified beside it."""
    records = json.loads((RESULTS / "natural-boards.json").read_text())
    assert set(records) == set(natural_pages.KINDS.values())
    for kind, kept in records.items():
        told = natural_pages.told(kept, kind)
        assert next(frame.others for frame in told.frames if frame.checks) == 7
        assert (ROOT / "docs" / "img" / f"natural-{kind}.svg").read_text() == natural_pages.first_round(told)
