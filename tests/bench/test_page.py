"""Pages with the numbers of result files: they are what the files give, and nothing missed, stale or unsourced gets through."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import page
from bench.harness import RESULTS, arithmetic_digest
from bench.page import PAGES, ROOT, TEMPLATES, Book, made, rendered, stricter
from replaylens.engine.proof.fingerprint import PORTABLE

TEXT = (ROOT / "docs/performance.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name, text", made().items())
def test_every_page_has_the_numbers_of_its_files(name: str, text: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == text, "run `python -m bench page`"


def planted(folder: Path, *rows: dict[str, Any], **body: Any) -> Book:
    """A result file "planted" with these rows."""
    whole = [{"what": "a step", "ratio": 1.0, "aim": "", "met": None, **row} for row in rows]
    machine = {"architecture": "z80", "threads": 2, "canonical_version": "portable-1", "gpu": None}
    given = {"rows": whole, "machine": machine, **body}
    (folder / "planted.json").write_text(json.dumps(given))
    return Book(folder)


def render(folder: Path, text: str, *rows: dict[str, Any], **body: Any) -> str:
    (folder / "template.md").write_text('{% set r = rows("planted") %}\n' + text + "\n{{ source() }}\n")
    return rendered("template.md", book=planted(folder, *rows, **body), folder=folder)


def test_a_number_that_moves_moves_on_the_page(tmp_path: Path) -> None:
    """Each number of the first table comes from its file: another file, another page."""
    shutil.copytree(RESULTS, tmp_path / "results")
    file = tmp_path / "results" / "workbench-cpu.json"
    body = json.loads(file.read_text())
    for row in body["rows"]:
        row["ours_ms"] *= 100
        row["ratio"] /= 100
    file.write_text(json.dumps(body))
    text = rendered("performance.md", book=Book(tmp_path / "results"))
    changed = [line for line in text.splitlines() if line not in TEXT.splitlines()]
    assert [line.split(":")[0] for line in changed] == ["| lens", "| patch", "| steer", "| resample", "| ablate"]
    assert [">= 8x: missed" in line for line in changed] == [False, True, False, False, True]


@pytest.mark.parametrize(
    "row, call, said",
    [
        ({"ratio": 1.104, "aim": "<= 1.1"}, "aim(row)", "<= 1.1: missed"),  # 1.10 as it is printed
        ({"ratio": 1.1, "aim": "<= 1.1"}, "aim(row)", "<= 1.1"),
        ({"ratio": 0.749, "aim": ">= 0.75"}, "aim(row)", ">= 0.75: missed"),
        ({"ratio": 9.0, "aim": ">= 8x"}, "aim(row)", ">= 8x"),
        ({"ratio": None, "aim": "<= 3 %", "met": False}, "aim(row)", "<= 3 %: missed"),
        ({"ratio": None, "aim": "< 3 s"}, "aim(row, value=2.9)", "< 3 s"),
        ({"ratio": 0.9, "aim": ">= 0.8"}, 'aim(row, ">= 1.0")', ">= 1.0: missed"),
        ({"ratio": 0.9, "aim": ""}, 'aim(row, ">= 0.8")', ">= 0.8"),
        ({"ratio": 2.5, "aim": "2.66 (GSM8K)"}, "aim(row)", "2.66 (GSM8K): missed"),
        ({"ratio": 3.0, "aim": "<= 1.01: missed"}, "aim(row)", "<= 1.01: missed"),
    ],
)
def test_missed_follows_from_the_unrounded_number(row: dict[str, Any], call: str, said: str, tmp_path: Path) -> None:
    text = render(tmp_path, '{% set row = r("a step") %}\n{{ row.what }}|{{ ' + call + " }}|", row)
    assert text.split("|")[1] == said


@pytest.mark.parametrize(
    "text, rows, message",
    [
        ('{{ r("a step").ratio }}', [{"aim": ">= 2"}], 'rows without their target: "a step"'),
        ('{{ aim(r("a step")) }}', [{}], "'a step' has no target"),
        ('{{ aim(r("a step"), ">= 1") }}', [{"aim": ">= 2"}], "'>= 1' is looser than the target of 'a step', '>= 2'"),
        ('{{ aim(r("a step"), "<= 1 s") }}', [{"ratio": None}], "'a step' has no number for the target '<= 1 s'"),
        ('{{ r("a").ratio }}', [{}, {"what": "another"}], "planted: 2 rows begin with 'a'"),
        ('{{ r("a leap").ratio }}', [{}], "planted: 0 rows begin with 'a leap'"),
        ('{{ source() }}\n{{ r("a step").speed }}', [{}], "the row 'a step' has no speed"),
    ],
)
def test_what_a_template_may_not_do(text: str, rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, KeyError), match=re.escape(message)):
        render(tmp_path, text, *rows)


def test_rows_need_a_source(tmp_path: Path) -> None:
    (tmp_path / "template.md").write_text('{{ rows("planted")("a step").ratio }}')
    with pytest.raises(ValueError, match='rows without a source: "a step"'):
        rendered("template.md", book=planted(tmp_path, {}), folder=tmp_path)
    assert rendered("template.md", whole=False, book=planted(tmp_path, {}), folder=tmp_path) == "1.0\n"


def test_numbers_of_a_file_without_rows_need_a_source(tmp_path: Path) -> None:
    part = {"commit": "fedcba9876", "machine": "a Z80, beside others", "speed": 3.5}
    (tmp_path / "apart.json").write_text(json.dumps({"date": "2026-11-18T00:00:00", "of it": part, "later": {"speed": 4.5}}))
    (tmp_path / "template.md").write_text('{{ number("apart", "of it", "speed") }}')
    with pytest.raises(ValueError, match="rows without a source: apart"):
        rendered("template.md", book=Book(tmp_path), folder=tmp_path)
    (tmp_path / "template.md").write_text('{{ number("apart", "of it", "speed") }} {{ source() }} {{ source() }}')
    said = "3.5 *From `apart.json` (fedcba98 of 2026-11-18, arithmetic not on record, a Z80).*"
    assert rendered("template.md", book=Book(tmp_path), folder=tmp_path) == f"{said} *From .*\n", "each source is said once"
    (tmp_path / "template.md").write_text('{{ number("apart", "later", "speed") }} {{ source() }}')
    assert "(commit not on record)" in rendered("template.md", book=Book(tmp_path), folder=tmp_path)


def test_every_number_of_the_readme_is_of_a_row_on_the_page() -> None:
    book = Book()
    rendered("performance.md", book=book)
    there = {id(row._body) for row in book.every}
    rendered("speed.md", whole=False, book=book)
    assert len(book.shown) > 20 and [row._body["what"] for row in book.shown if id(row._body) not in there] == []


def test_a_source_is_what_the_file_says(tmp_path: Path) -> None:
    """Of its own case; without a commit it is said to have none; a row that was measured apart is named."""
    text = '{% for row in ("a step", "another: s", "third") %}{{ r(row).ratio }}{% endfor %}'
    cases = {"planted": {"commit": "0123456789+changes", "date": "2026-11-17T00:00:00", "digest": "feedbeef00"}}
    rows = [{"case": "planted"}, {"what": "another: s", "case": "planted"}, {"what": "third: t"}]
    said = render(tmp_path, text, *rows, cases=cases)
    first = "01234567+ of 2026-11-17, portable-1 with digest feedbeef, z80, 2 threads"
    assert said.endswith(f'*From `planted.json` ({first}; commit not on record, portable-1, z80, 2 threads: "third").*\n')
    old = render(tmp_path, '{{ r("a step").ratio }}', {}, machine={"machine": "z80", "threads": 1})
    assert old.endswith("(commit not on record, arithmetic from before portable-1, z80, 1 thread).*\n")


def test_rows_of_a_case_are_preferred_to_older_ones(tmp_path: Path) -> None:
    """A case that is run again under other words leaves old rows in its file, which are not shown any more."""
    old, new, other = {"ratio": 1.0}, {"ratio": 2.0, "case": "planted.new"}, {"ratio": 3.0, "case": "planted.other"}
    found = {}
    for name, given in (("before", [old, other]), ("after", [old, new, other])):
        found[name] = planted(tmp_path, *given).rows("planted", "planted.new")("a step").ratio
    assert found == {"before": 1.0, "after": 2.0}
    with pytest.raises(KeyError, match="3 rows"):
        planted(tmp_path, old, new, other).rows("planted")("a step")


def test_stricter() -> None:
    assert stricter(">= 2", ">= 1.5") and stricter("<= 1", "<= 1.1") and stricter(">= 8x", ">= 8x")
    assert not stricter(">= 1", ">= 1.5") and not stricter("<= 1", ">= 0.5") and not stricter("verified", "0")


OWN = (
    "Llama-3.1-8B", "Qwen2.5-0.5B", "DeepSeek-V2", "6.4 million", "16.1 GB", "17.1 GB", "4.2 GB", "7.7 MB", "/ 0.7 / 1",
    '"0.7"', "T = 0 /", "| 10 %; 50 % |", "| 100 %, ",
)  # fmt: skip
"""decimals of a template that are no measurement: names, sizes that a case declares, and what is computed and not run"""
TARGET = re.compile(r"\"(?:>=|<=) [\d.]+")


@pytest.mark.parametrize("template", [name for _, name, _ in PAGES])
def test_no_number_is_written_by_hand(template: str) -> None:
    """Outside of expressions a template has no decimals, percentages, or times; targets, which it declares, aside. What the
    section on memory says is a formula."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    memory = text.partition("## Memory")
    text = memory[0] + memory[2].partition("\n## ")[2]
    for own in OWN:
        text = text.replace(own, "")
    outside = re.sub(r"\{[{%].*?[%}]\}", "", text)
    assert re.findall(r"\d+\.\d+|\b\d+(?:,\d+)? ?(?:ms|µs|%|tokens/s)(?!\w)", outside) == []
    inside = TARGET.sub("", "".join(re.findall(r"\{[{%].*?[%}]\}", text)))
    assert re.findall(r"\d+\.\d+", inside) == []


def test_portable_results_are_of_todays_arithmetic() -> None:
    """A digest of portable arithmetic is one on every machine: a file with another was measured before a change."""
    bodies = {file.name: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    records = [(name, case) for name, body in bodies.items() for case in body.get("cases", {}).values()]
    portable = [(name, case) for name, case in records if case["machine"].get("canonical_version") == PORTABLE]
    today = arithmetic_digest(True)
    assert len(portable) > 10 and [name for name, case in portable if case.get("digest", today) != today] == []


@pytest.mark.slow
def test_the_command_rewrites_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the section that is generated, and the rest of the page stays."""
    for name in {name for name, _, _ in PAGES}:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    readme = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text(readme.replace("| transformers: ", "| transformers: 9"))
    command.main(["page"])
    assert capsys.readouterr().out == "README.md\n" and (tmp_path / "README.md").read_text() == readme
    command.main(["page"])
    assert capsys.readouterr().out.startswith("every page")
    (tmp_path / "README.md").write_text("# replaylens\n")
    with pytest.raises(ValueError, match="no section '## Four numbers of speed'"):
        command.main(["page"])
