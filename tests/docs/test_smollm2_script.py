"""The SmolLM2 script on the embedded model: the same functions with small sizes and no download."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import replaylens as rl
from tests.docs.blocks import ROOT


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module, with the layers of the embedded model."""
    spec = importlib.util.spec_from_file_location("smollm2_script", ROOT / "docs" / "examples" / "smollm2.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LAYERS = (1, 3)
    module.STREAM = ["blocks.1.hook_in", "blocks.3.hook_in"]
    module.SITES = [*module.STREAM, "blocks.1.mlp.hook_out"]
    return module


@pytest.fixture(scope="module")
def engine() -> rl.Engine:
    return rl.Engine.load("coin-plain")


def test_openings_part_at_the_lie(script: Any) -> None:
    """The truthful opening is the chain's own. In the lying one, truth and text differ, and only the first face changes."""
    for example in rl.tasks.get("coin")(rendering="steps", flips=(2, 4)).examples(20):
        true, lied = script.opening(example, False), script.opening(example, True)
        assert example.completion.startswith(true) and true.endswith(":")
        labels = example.read(lied).labels_after(len(example.prompt + lied))
        assert labels["face"] != labels["implied"] and {labels["face"], labels["implied"]} == {"heads", "tails"}
        assert sum(a != b for a, b in zip(true.split(), lied.split(), strict=True)) == 1


def test_questions_are_balanced(script: Any) -> None:
    asked = script.balanced(script.questions("turn", 3), 10)
    assert [e.answer for e in asked].count(" yes") == 5 and len({e.root for e in asked}) == 10
    shown = script.shots("turn")
    assert shown.count(" yes.") == shown.count(" no.") == 2 and " turns the coin over." in shown and "flip" not in shown


def test_interval(script: Any) -> None:
    assert script.row(0.5, 100) == "50.0% | 40% to 60%" and script.row(1.0, 10).startswith("100.0% | 72% to 100%")


def test_forks_on_a_model_that_follows_the_text(script: Any, engine: rl.Engine, tmp_path: Path) -> None:
    """Known outcomes: the embedded model states the right face on truthful forks, and believes the lie on the others."""
    report = script.forks(engine, 40, tmp_path, print)
    found = {line["what"]: line["accuracy"] for line in report.lines}
    assert found["truthful fork: the model's next face is right"] == 1.0
    assert found["lied fork: the model's next face follows the text"] > 0.7
    assert (tmp_path / "forks" / "report.json").is_file()


def test_probes_of_sites_by_name_have_a_page(script: Any, engine: rl.Engine, tmp_path: Path) -> None:
    """A site probed by name, without a layer, is drawn too."""
    run = engine.replay(rl.tasks.get("coin")(flips=(1, 3)).examples(30), sites=script.STREAM)
    report = rl.probes.sweep(run, "face", sites=script.STREAM, positions="query", estimators="ridge")
    page = script.ReportPage(None, (report,)).save(tmp_path / "page.html").read_text()
    assert all(site in page for site in script.STREAM)


def test_dump_and_lens(script: Any, engine: rl.Engine, tmp_path: Path) -> None:
    """A dump with forced answers is written and verified. Its Z prefers the right answer at the end, not at the start."""
    said: list[str] = []
    task = script.questions("flip", (1, 4))  # the verb it was trained on, with the same stories
    dump = script.write(engine, task, 8, tmp_path / "look", said.append, sites="SZ", drafter="lens", targets=script.ANSWERS)
    assert dump.digest in said[0] and "verified: " in said[0]
    assert dump.to_numpy("Z.targets").shape[1:] == (5, 2)
    script.lens(engine, dump, said.append)
    assert re.search(r"\(8 prompts\): 1: \d+%, 3: \d+%, 4: 100%", said[-1])  # the model answers without error
