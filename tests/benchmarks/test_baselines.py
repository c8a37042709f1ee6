"""The benchmark against baselines, tiny and on the CPU: it runs, checks the results it times, and writes its measurements."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.baselines import __main__ as baselines
from benchmarks.baselines import capture, library, passes
from benchmarks.baselines.subject import TINY, Subject, make_subject
from benchmarks.table import Table


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return make_subject(True, Table("tiny", "", out=tmp_path / "out.json"))


def run(out: Path, *sections: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the command's measurements."""
    monkeypatch.setattr(sys, "argv", ["baselines", "--tiny", "--out", str(out), "--sections", *sections])
    baselines.main()
    return [row["what"] for row in json.loads(out.read_text())["rows"]]


def test_all_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    found = run(out, *baselines.SECTIONS, monkeypatch=monkeypatch)
    assert len(found) == len(set(found))
    count = {
        word: sum(word in what for what in found) for word in ("before", "prompts,", "capture", "host", "mixed", "Hugging")
    }
    assert count == {"before": 2, "prompts,": 2 + 6 + 2, "capture": 2, "host": 6, "mixed": 10, "Hugging": 4}
    printed = capsys.readouterr().out.splitlines()
    assert [line[: len(what)] for line, what in zip(printed[-len(found) :], found, strict=True)] == found, (
        "the table comes last"
    )
    rows = {row["what"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["mixed load, at once, 0 % deterministic"]["ratio"] == 1.0
    assert len(rows["mixed load, spread, 50 % deterministic"]["rounds"]) == TINY.rounds


def test_a_section_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other sections still run, and each line is written as soon as it is measured, so a kill loses nothing."""
    out = tmp_path / "out.json"

    def broken(subject: Subject) -> None:
        subject.table.add("measured before it failed", ratio=1.0)
        assert json.loads(out.read_text())["rows"][0]["what"] == "measured before it failed"
        raise RuntimeError("planted")

    monkeypatch.setitem(baselines.SECTIONS, "decode", broken)
    with pytest.raises(SystemExit, match="failed: decode"):
        run(out, "decode", "prompts", monkeypatch=monkeypatch)
    assert len(json.loads(out.read_text())["rows"]) == 1 + len(TINY.prompts)
    assert "RuntimeError: planted" in capsys.readouterr().out


@pytest.mark.parametrize(("section", "rows"), [(passes.prompt_passes, None), (passes.decode_steps, 1)])
def test_a_library_that_computes_something_else_is_not_timed(
    section: Callable[[Subject], None], rows: int | None, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: attention with another scale (for steps, only in the steps) is refused."""
    ways = library.ways

    def scaled(attend: library.Attend) -> library.Attend:
        return lambda q, k, v, scale: attend(q, k, v, 30 * scale)

    def wrong(asked: int, device: str) -> dict[str, library.Attend]:
        right = ways(asked, device)
        return {name: scaled(attend) for name, attend in right.items()} if rows in (None, asked) else right

    monkeypatch.setattr(library, "ways", wrong)
    with pytest.raises(AssertionError, match="computes something else"):
        section(subject)
    assert subject.table.rows == []


def test_every_way_to_ask_for_an_attention_is_the_same(subject: Subject) -> None:
    q, k, v = torch.randn(3, 1, 4, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    first, *others = [attend(q, k, v, 0.3) for attend in library.ways(1, "cpu").values()]
    assert others and all(torch.allclose(first, other, atol=1e-6) for other in others)


def test_rows_that_differ_are_found() -> None:
    """Negative control: the check before timing capture finds rows that differ."""
    tokens, rows = {"tokens": torch.arange(3)}, {"a": torch.ones(2), "b": torch.ones(2)}
    found = {arm: dict(tokens) for arm in capture.ARMS}
    for arm in capture.ARMS:
        found[arm] |= {"no capture": {}, "S": {"a": torch.ones(2)}}.get(arm.partition(", on")[0], rows)
    capture._check(found)
    found["S, on the device"]["a"] = torch.tensor([1.0, 1.0 + 2**-20])
    with pytest.raises(AssertionError, match="S, on the device: other tokens or rows"):
        capture._check(found)
