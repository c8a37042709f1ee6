"""The benchmark harness: cases are declared, arms take turns, ratios and aims are right, results say where they are from."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench import baselines, harness, library, natural, natural_pages, workbench
from bench.harness import CASES, RESULTS, Case, Line, Lines, case, chosen, run
from bench.natural import (
    TINY,
    Subject,
    alone,
    coin_prompts,
    divergence,
    first_difference,
    flips,
    generated,
    load,
    story_prompts,
    tallied,
    windows,
)
from bench.subjects import seeded
from replaylens.engine.engine import Engine
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.runner import PassResult, Runner

command.declared()
ROOT = harness.RESULTS.parent.parent


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., Case]]:
    """`case`, for cases that are forgotten after the test."""
    monkeypatch.setattr(harness, "CASES", {})

    def made(**declared: Any) -> Callable[..., Case]:
        def decorate(set_up: Callable[..., Lines]) -> Case:
            case("planted", **{"ours": "a", "baseline": "b", **declared})(set_up)
            return harness.CASES["planted"]

        return decorate

    return made


@pytest.mark.parametrize("made", CASES.values(), ids=CASES.keys())
def test_declarations(made: Case) -> None:
    """Ours and the baseline are among the arms, an aim is a bound, the words are there, and the parameters fit into JSON."""
    assert made.about and made.name == made.name.lower() and (not made.ours or {made.ours, made.baseline} <= set(made.arms))
    assert not made.aim or harness.meets(1.0, made.aim) is not None
    json.dumps([made.parameters(False), made.parameters(True)])


def test_every_case_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["list"])
    said = capsys.readouterr().out
    assert all(name in said for name in CASES)


def test_names_and_patterns() -> None:
    assert [made.name for made in chosen(["hostwork-cpu"])] == ["hostwork-cpu"]
    assert {made.file for made in chosen(["generate-cpu"])} == {"generate-cpu"} and len(chosen(["generate-cpu"])) > 3
    assert len(chosen(["kernels-*"])) > 7
    with pytest.raises(SystemExit, match=r"no case 'hostwrok'; the cases are .*hostwork-cpu"):
        chosen(["hostwrok"])


def test_every_command_of_the_docs_is_a_case() -> None:
    """`python -m bench run NAME` in README, docs, notes and Makefile; and what docs/performance.md names a table by."""
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "notes").glob("*.md")]
    named = [w for page in pages for line in page.read_text().split("bench run ")[1:] for w in names(line)]
    tables = re.findall(
        r"`([a-z]+(?:-[a-z0-9]+)*-(?:cpu|gpu|cuda|solvers)(?:\.\w+)?)`", (ROOT / "docs/performance.md").read_text()
    )
    files = {name for name in tables if name.endswith(".json")}
    assert len(named) + len(tables) > 30 and all(chosen([name]) for name in {*named, *tables} - files - {"NAME"})
    assert files and all((RESULTS / name).is_file() for name in files)


def names(text: str) -> list[str]:
    """The cases at the beginning of a text, up to an option or the end of the command."""
    found = []
    for word in text.replace("`", " ` ").split():
        if word.startswith(("-", "`", "\\", "#")):
            break
        found.append(word.strip("'\""))
    return found


def test_arms_take_turns_and_the_ratio_is_theirs_over_ours(
    declare: Callable[..., Callable[..., Case]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is planted: `a` takes one second, `b` three, `c` half of one for each of four."""
    now, called = [0.0], []
    monkeypatch.setattr(harness.time, "process_time", lambda: now[0])

    def work(name: str, taken: float) -> str:
        called.append(name)
        now[0] += taken
        return name.upper()

    @declare(others=("c",), aim=">= 2", rounds=2, unit="s")
    def planted(size: int = 3) -> Lines:
        """Words."""
        arms = {name: lambda n=name, t=t: work(n, t) for name, t in (("a", 1.0), ("b", size), ("c", 0.5))}
        found = yield Line("planted", arms, per={"a": 1, "b": 1, "c": 4}, numbers={"size": size})
        assert found.results["b"] == "B"
        found.note(later=1)
        yield Line("counted", ratio=1.5, aim="<= 1.2")

    out = tmp_path / "out.json"
    assert run(planted, out=out)
    assert called == ["a", "b", "c", "b", "c", "a", "c", "a", "b"], "a warm-up round and two others, each begun by another arm"
    body = json.loads(out.read_text())
    first, second = body["rows"]
    assert (first["ratio"], first["lowest"], first["highest"], first["met"]) == (3, 3, 3, True)
    assert (first["a_s"], first["c_s"], first["later"]) == (1, 0.125, 1) and first["times_s"]["b"] == [3, 3]
    assert second["met"] is False and second["case"] == "planted"
    about = body["cases"]["planted"]
    assert about["parameters"] == {"size": 3} and about["about"] == "Words." and about["date"][:2] == "20"
    assert {"cpu", "architecture", "cores", "gpu", "torch", "threads", "canonical_version"} <= set(about["machine"])
    assert len(about["commit"].partition("+")[0]) == 40
    assert about["digest"] == harness.arithmetic_digest() and len(about["digest"]) == 64
    assert run(planted, out=out, given={"size": 1}) and [row["what"] for row in json.loads(out.read_text())["rows"]] == [
        "planted", "counted",
    ]  # fmt: skip
    assert json.loads(out.read_text())["rows"][0]["met"] is False, "a rerun replaces the rows of its case"


def test_rows_of_two_cases_with_the_same_words_are_kept(tmp_path: Path) -> None:
    report = harness.Report(tmp_path / "out.json")
    for name, ratio in (("one", 1.0), ("two", 2.0), ("two", 3.0)):
        report.add({"what": "a step", "case": name, "ratio": ratio, "aim": "", "met": None})
    kept = harness.Report(tmp_path / "out.json").body["rows"]
    assert [(row["case"], row["ratio"]) for row in kept] == [("one", 1), ("two", 3)]


def test_costs_and_the_best_round(declare: Callable[..., Callable[..., Case]]) -> None:
    @declare(cost=True, best=True, aim="<= 0.5")
    def planted() -> Lines:
        """Words."""
        yield Line("", times={"a": [3.0, 1.0], "b": [4.0, 8.0]})

    row = harness.measure(planted, next(planted.set_up())).row
    assert (row["ratio"], row["lowest"], row["highest"], row["met"]) == (0.25, 0.125, 0.75, True)


def test_what_is_wrong_is_not_timed(
    declare: Callable[..., Callable[..., Case]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed check leaves no number, a failing set-up leaves the lines before it, and both fail the run."""
    timed, cleaned = [], []

    @declare()
    def planted(fail: bool = False) -> Lines:
        """Words."""
        yield Line("wrong", {"a": lambda: timed.append(1), "b": lambda: None}, check=False)
        try:
            yield Line("broken", {"a": lambda: 1 / 0, "b": lambda: None})
        finally:
            cleaned.append(1)

    assert not run(planted, out=tmp_path / "out.json")
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["what"] == "wrong" and not row["check"] and "a_ms" not in row and not timed and cleaned
    assert "CHECK FAILED" in (told := capsys.readouterr().out) and "ZeroDivisionError" in told


def test_declarations_that_are_refused(declare: Callable[..., Callable[..., Case]]) -> None:
    def planted(n: int = 1) -> Lines:
        """Words."""
        yield Line("")

    for wrong in ({"baseline": ""}, {"baseline": "a"}, {"others": ("b",)}, {"quick": {"m": 1}}):
        with pytest.raises(ValueError, match="planted: "):
            declare(**wrong)(planted)
    made = declare()(planted)
    with pytest.raises(SystemExit, match="planted has no parameter m; it has n"):
        run(made, given={"m": 1})
    with pytest.raises(AssertionError, match="declares no arms"):
        harness.measure(made, Line("", {"c": lambda: None}))
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device found"):
            run(CASES["kernels-norm"])


def rows(name: str, out: Path) -> list[dict[str, Any]]:
    """The rows of a quick run, which has a tiny model on the CPU."""
    assert run(CASES[name], quick=True, out=out)
    found: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return found


def test_the_grid_of_patches_and_its_cells(tmp_path: Path) -> None:
    grid, cells, gradients, _ = rows("workbench-gpu", tmp_path / "out.json")
    assert grid["cells"] == 3 * 6 and grid["met"] and cells["met"] and cells["apart"] == 0 and gradients["certified"]


def test_a_cell_with_other_bits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = workbench.grid
    monkeypatch.setattr(workbench, "grid", lambda *given: torch.nextafter(honest(*given), torch.tensor(9.0)))
    _, cells, *_ = rows("workbench-gpu", tmp_path / "out.json")
    assert not cells["met"] and cells["apart"] == workbench.CHECKED


# ---- baselines -------------------------------------------------------------------------------------------------------
# The benchmark against baselines, tiny and on the CPU: it runs, checks the results it times, and writes its measurements.


@pytest.mark.slow
def test_all_parts(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert all(run(made, quick=True, out=out) for made in chosen(["baselines-gpu"]))
    rows = {row["what"]: row for row in json.loads(out.read_text())["rows"]}
    count = {word: sum(word in what for what in rows) for word in ("before", "prompts,", "capture", "host", "mixed", "Hugging")}
    assert count == {"before": 2, "prompts,": 2 + 7 + 2, "capture": 2, "host": 6, "mixed": 12, "Hugging": 4}
    assert rows["mixed load, at once, 0 % deterministic"]["ratio"] == 1.0
    assert len(rows["mixed load, spread, 50 % deterministic"]["rounds"]) == 1


@pytest.mark.parametrize(("section", "rows"), [(baselines.prompt_passes, None), (baselines.decode_steps, 1)])
def test_a_library_that_computes_something_else_is_not_timed(
    section: Callable[[bool], Lines], rows: int | None, monkeypatch: pytest.MonkeyPatch
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
        next(section(True))


def test_every_way_to_ask_for_an_attention_is_the_same() -> None:
    q, k, v = torch.randn(3, 1, 4, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    first, *others = [attend(q, k, v, 0.3) for attend in library.ways(1, "cpu").values()]
    assert others and all(torch.allclose(first, other, atol=1e-6) for other in others)


def test_rows_that_differ_are_found() -> None:
    """Negative control: the check before timing capture finds rows that differ."""
    tokens, rows = {"tokens": torch.arange(3)}, {"a": torch.ones(2), "b": torch.ones(2)}
    found = {arm: dict(tokens) for arm in baselines.ARMS}
    for arm in baselines.ARMS:
        found[arm] |= {"no capture": {}, "S": {"a": torch.ones(2)}}.get(arm.partition(", on")[0], rows)
    baselines._check(found)
    found["S, on the device"]["a"] = torch.tensor([1.0, 1.0 + 2**-20])
    with pytest.raises(AssertionError, match="S, on the device: other tokens or rows"):
        baselines._check(found)


# ---- natural ---------------------------------------------------------------------------------------------------------
# The measurements of natural mismatches, with a fast path that is often wrong: what they count is what happened.

ROOT_OF_NATURAL = RESULTS.parent.parent
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
    engine, own = Engine.load("coin-plain", record=True), seeded(4, 1.0)
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


@pytest.mark.slow
def test_no_wrong_draft_reaches_a_committed_token(wrong_drafts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sections on a CPU: ordinary requests diverge, drafts flip, and deterministic tokens differ nowhere."""
    monkeypatch.setattr(natural, "TEMPERATURES", (1.0,))
    sizes = replace(TINY, batches=(4,), windows=(8,), groups=(4,), load_tokens=4)
    subject = Subject(Engine.load("coin-plain"), "coin-plain", PROMPTS, sizes, sizes.length)
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
    subject = Subject(Engine.load("coin-plain"), "coin-plain", PROMPTS, TINY, 12)
    subject.story(1.0)
    monkeypatch.setattr(Runner, "exact", lambda self, segments, tap=None, stop_at_layer=None: self.fast(segments, tap))
    subject.compare(1.0, generated(subject.engine, PROMPTS, seeded(4, 1.0), 12, window=4))
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
    """docs/notes/natural.md is made from bench/results/natural-gpu.json."""
    rows, page = (
        natural_pages.read(RESULTS / "natural-gpu.json"),
        (ROOT_OF_NATURAL / "docs" / "notes" / "natural.md").read_text(),
    )
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
        assert (ROOT_OF_NATURAL / "docs" / "img" / f"natural-{kind}.svg").read_text() == natural_pages.first_round(told)
