"""`docs/examples/decided.py`: its parts, and that the page says what its result files do."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

import replaylens as rl

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decided_script", ROOT / "docs" / "examples" / "decided.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["decided_script"] = module
    spec.loader.exec_module(module)
    return module


def result(model: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((ROOT / "benchmarks" / "results" / f"decided-{model}.json").read_text())
    return found


@pytest.mark.parametrize("model", ["coin-plain", "smollm2"])
def test_the_page_has_the_shares_of_the_result_files(model: str, script: ModuleType) -> None:
    lines = script.tables(result(model)).splitlines()
    rows = [line.split("|", 2)[2].strip() for line in lines if line.startswith("| sentence")]
    assert rows and all(row in PAGE for row in rows), rows


def test_the_page_has_the_change_points() -> None:
    for text in result("coin-plain")["tokens"]["texts"]:  # type: ignore[index]
        (change,) = text["changes"]
        assert change["text"] == " Is" and f"[{change['low']}, {change['high']}], size {change['size']:.2f}" in PAGE


def test_a_false_sentence_differs_in_its_face_only(script: ModuleType) -> None:
    assert script.false_of(" Irene flips: heads.") == " Irene flips: tails."
    assert script._face("A coin is tails up. Al flips the coin. Bo does not flip the coin.") == "heads"


def test_forks_of_one_chain(script: ModuleType) -> None:
    """Before each sentence, and after each false step: states, outcomes, and what was said last."""
    engine, examples = rl.Engine.load("coin-plain"), script.coin("steps", 2, 2, seed=4)
    forks = script.steps_forks(engine, examples[:1], "", (1, 2), script.FINAL, 2, 30)
    assert forks.false == [False] * 3 + [True] * 2 and forks.sentence == [0, 1, 2, 0, 1]
    assert forks.right[:3] == [1.0, 1.0, 1.0], "the model makes no mistakes of its own"
    assert forks.stated[0] == "" and forks.stated[3] == script.OTHER[forks.stated[1]]
    assert all(rows.shape == (2, engine.config.d_model) for rows in forks.states)
