"""`replaylens demo`: its output, its files, and its behaviour if the dump is damaged."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.commands import demo
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import Verification, verify
from replaylens.engine.engine import Engine
from replaylens.probes import sweeps
from replaylens.probes.report import Report
from tests.engine.dump.damage import flip_bit

EXAMPLES = 20
HELD_OUT, PERMUTATIONS = 8, 19
SWEEP: dict[str, Any] = {"sites": "S", "layers": (0, 3), "estimators": "ridge"}
"""less than the demo takes"""


def invoke(out: Path) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "HELD_OUT", HELD_OUT)
        patch.setattr(demo, "PERMUTATIONS", PERMUTATIONS)
        patch.setattr(sweeps, "sweep", partial(sweeps.sweep, **SWEEP))
        return CliRunner().invoke(app, ["demo", "--examples", str(EXAMPLES), "--out", str(out), "--quiet"])


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="session")
def shown(out: Path) -> Iterator[str]:
    """The output of one run. Tests must not change its files."""
    result = invoke(out)
    assert result.exit_code == 0, result.output
    yield result.output


def test_says_what_it_does_in_order(shown: str) -> None:
    titles = ["1/5 The model", "2/5 Replayed", "3/5 Dumped and verified", "4/5 Probed", "5/5 Look at it"]
    places = [shown.index(title) for title in titles]
    assert places == sorted(places)


def test_shows_accuracy_by_length_and_the_lens_by_layer(shown: str) -> None:
    for face in demo.FACES:
        (row,) = re.findall(rf"│ {face} │.*", shown)
        assert len(re.findall(r"\d+%", row)) == len(demo.LENGTHS) and row.count("100%") >= 5
    assert [f"blocks.{i}.hook_in" in shown for i in range(4)] == [True] * 4 and shown.count("blocks.3.hook_out") == 1


def test_dump_is_that_of_the_replay_and_verifies(shown: str, out: Path) -> None:
    dump = Dump.open(out / f"coin-{EXAMPLES}")
    assert f"digest {dump.digest}" in shown and f"{EXAMPLES} examples replayed, {len(dump)} rows compared" in shown
    assert dump.manifest.plan.drafter == demo.DRAFTER and len(dump.where(accepted=False)) > 0
    assert verify(dump.url, Engine.load(demo.MODEL), sample=0.1)


def test_probes_are_about_that_dump(shown: str, out: Path) -> None:
    dump = Dump.open(out / f"coin-{EXAMPLES}")
    for kind in ("sweep", "transfer"):
        report = Report.load(out / kind)
        assert report.kind == kind and report.source["digest"] == dump.digest
        assert report.summary()[0] in shown
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
