"""`replaylens demo`: its output, its files, and its behaviour if the dump is damaged."""

import json
import re
import webbrowser
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.commands import demo
from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import Verification, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.probes import sweeps
from replaylens.probes.report import Report
from tests.dumps.damage import flip_bit

EXAMPLES = 20
HELD_OUT, PERMUTATIONS = 8, 19
SWEEP: dict[str, Any] = {"sites": "S", "layers": (0, 3), "estimators": "ridge"}
"""less than the demo takes"""


def invoke(out: Path, opened: list[str] | None = None) -> Result:
    """The demo; its page opens in the list, if there is one."""
    show = [] if opened is None else ["--open"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(webbrowser, "open", lambda page: opened is not None and (opened.append(page) or True))  # type: ignore[func-returns-value]
        patch.setattr(demo, "HELD_OUT", HELD_OUT)
        patch.setattr(demo, "PERMUTATIONS", PERMUTATIONS)
        patch.setattr(sweeps, "sweep", partial(sweeps.sweep, **SWEEP))
        return CliRunner().invoke(app, ["demo", "--examples", str(EXAMPLES), "--out", str(out), *show])


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="session")
def opened() -> list[str]:
    """The pages that the run of `shown` has opened."""
    return []


@pytest.fixture(scope="session")
def shown(out: Path, opened: list[str]) -> Iterator[str]:
    """The output of one run. Tests must not change its files."""
    result = invoke(out, opened)
    assert result.exit_code == 0, result.output
    yield result.output


STEPS = (
    "1/5 Load a model",
    "2/5 Replay stories",
    "3/5 Store all activations and check them",
    "4/5 Probe them",
    "5/5 Write a page",
)


def test_says_what_it_does_in_five_lines(shown: str) -> None:
    lines = shown.splitlines()
    assert [line.split(":")[0] for line in lines[:5]] == list(STEPS)
    assert all(len(line) < 140 and line.isascii() for line in lines[:4]) and not lines[5]


def test_ends_with_three_findings_in_words(shown: str, out: Path) -> None:
    """Sentences with the numbers of the reports, and none of the words that a newcomer would have to look up."""
    found = re.findall(r"^(\d)\. (.*)$", shown, re.M)
    assert [number for number, _ in found] == ["1", "2", "3"]
    swept, transferred, reach = (sentence for _, sentence in found)
    best = Report.load(out / "sweep").best("face")
    assert swept.startswith("The model's next answer ") and f"right in {best['accuracy']:.0%} of cases" in swept
    assert transferred.startswith("Drafts that were rejected") and reach.startswith("The model's skill ends with its training")
    assert "right in 100% of new stories about 8 people" in reach
    assert not re.search(r"\b(STCZ|dump|digest|logistic|p_family|[STC]\d)\b", " ".join(found[i][1] for i in range(3)))


def test_opens_the_page_on_request(shown: str, out: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened == [(out / "report.html").resolve().as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda page: False)
    with pytest.raises(BadRequest, match=r"No browser found\. Open file:///page\.html yourself"):
        demo._open("file:///page.html")


def test_dump_is_that_of_the_replay_and_verifies(shown: str, out: Path) -> None:
    dump = Dump.open(out / f"coin-{EXAMPLES}")
    assert f"verified: {EXAMPLES} examples replayed, {len(dump)} rows compared" in shown
    assert dump.manifest.plan.drafter == demo.DRAFTER and len(dump.where(accepted=False)) > 0
    assert verify(dump.url, Engine.load(demo.MODEL), sample=0.1)


def test_probes_are_about_that_dump(shown: str, out: Path) -> None:
    dump = Dump.open(out / f"coin-{EXAMPLES}")
    for kind in ("sweep", "transfer"):
        report = Report.load(out / kind)
        assert report.kind == kind and report.source["digest"] == dump.digest
    assert Report.load(out / "transfer").settings["estimator"] == "ridge"
    assert "untrained" in json.loads((out / "sweep" / "report.json").read_text())["rows"][0]


def test_page_is_there_and_holds_everything(shown: str, out: Path) -> None:
    page = out / "report.html"
    assert page.resolve().as_uri() in shown
    text = page.read_text()
    assert Dump.open(out / f"coin-{EXAMPLES}").digest in text
    assert all(
        f'id="{section}"' in text for section in ("found", "decoded", "overview", "certificate", "examples", "probes", "lens")
    )
    assert not re.search(r"(src|href)=[\"']https?:", text)


@pytest.mark.slow
def test_a_damaged_dump_is_found_and_a_second_run_repairs_it(shown: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one bit is flipped between writing and verifying. Exit code 1, and the page shows the mismatch."""
    digest = Dump.open(out / f"coin-{EXAMPLES}").digest
    shard = out / f"coin-{EXAMPLES}" / "shard-00000.safetensors"

    def damage_first(path: str, engine: Engine, **options: Any) -> Verification:
        flip_bit(shard)
        return verify(path, engine, **options)

    with monkeypatch.context() as patch:
        patch.setattr(demo, "verify", damage_first)
        result = invoke(out)
    assert result.exit_code == 1 and "mismatch" in result.output
    assert 'data-status="mismatch"' in (out / "report.html").read_text()

    again = invoke(out)
    assert again.exit_code == 0 and Dump.open(out / f"coin-{EXAMPLES}").digest == digest
    assert again.output == shown


def test_too_few_examples_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--examples", "3", "--out", str(tmp_path)])
    assert result.exit_code == 2 and not list(tmp_path.iterdir())
