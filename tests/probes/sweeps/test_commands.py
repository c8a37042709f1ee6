"""`replaylens probe` and `steer`, and the scripts that users copy."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.engine.dump.reader import Dump

ROOT = Path(__file__).parents[3]
SCRIPTS = ("layer_sweep", "branch_question")


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_probe_and_steer(coin_dump: Dump, tmp_path: Path) -> None:
    """A sweep writes a report and a saved probe. The probe is then tested causally on prompts that are not in the dump."""
    folder, probes = tmp_path / "report", tmp_path / "probes"
    where = ("--label", "state", "--sites", "S", "--positions", "query", "--layers", "0,3")
    done = call("probe", coin_dump.url, *where, "--quiet", "--out", str(folder), "--save-probes", str(probes))
    assert done.exit_code == 0, done.output
    assert "Shown: state at query" in done.output
    report = json.loads((folder / "report.json").read_text())
    assert report["source"]["digest"] == coin_dump.digest and {row["layer"] for row in report["rows"]} == {0, 3}
    assert (probes / "state.safetensors").exists()
    done = call("steer", coin_dump.url, "--probe", str(probes / "state"), "--n", "10", "--placebos", "2", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kind"] == "steer"


def test_list() -> None:
    done = call("probe", "--list")
    assert done.exit_code == 0 and "mass-mean-whitened" in done.output and "from Python only" in done.output
    assert {each["name"] for each in json.loads(call("probe", "--list", "--json").stdout)} >= {"logistic", "leace"}


@pytest.mark.parametrize(
    "words, message",
    [
        (("probe",), "No dump given"),
        (("probe", "/nowhere"), "BadDump"),
        (("probe", "DUMP", "--sites", "S", "--label", "nose"), "MissingLabel"),
        (("probe", "DUMP", "--layers", "one"), "--layers one"),
        (("probe", "DUMP", "--estimators", "magic"), "UnknownEstimator"),
        (("probe", "DUMP", "--sites", "S", "--layers", "-1"), "layers 0, 1, 2, 3, 4"),
        (("probe", "DUMP", "--sites", "S", "--jobs", "0"), "jobs=0"),
        (("report", "DUMP", "probes/none"), "probes/none does not exist"),
        (("steer", "DUMP"), "Give one of 0, 1, 2, 3, 4"),
        (("steer", "DUMP", "--layer", "-1"), "layers 0, 1, 2, 3, 4"),
        (("steer", "DUMP", "--test", "tickle"), "Use one of steer"),
        (("steer", "DUMP", "--layer", "3", "--model", "coin-draft"), "FingerprintMismatch"),
    ],
)
def test_bad_input_is_one_line(coin_dump: Dump, words: tuple[str, ...], message: str) -> None:
    done = call(*(coin_dump.url if word == "DUMP" else word for word in words), *(["--quiet"] if words[0] == "probe" else []))
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The scripts are short, and run from scratch to their reports."""
    path = ROOT / "docs" / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 60
    runpy.run_path(str(path))["main"](tmp_path, 40)
    assert "hown: " in capsys.readouterr().out
    assert list(tmp_path.rglob("report.json"))
