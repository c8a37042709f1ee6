"""docs/tasks.md matches the code: samples parse and are true, and all labels and knobs are listed."""

from dataclasses import fields
from pathlib import Path

import pytest

from replaylens import tasks

DOC = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    return DOC.split(f"\n## {name}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", tasks.names())
def test_labels_and_knobs_are_documented(name: str) -> None:
    task = tasks.get(name)()
    for label in task.label_names:
        assert f"`{label.split('.')[0]}" in section(name) or label == "shuffled", label
    for spec in fields(task.knobs_class):
        assert f"`{spec.name}`" in section(name) or spec.name == "seed", spec.name


@pytest.mark.parametrize("name", [name for name in tasks.names() if name != "coin"])
def test_samples_are_true(name: str) -> None:
    quoted = [line[2:].strip() for line in section(name).splitlines() if line.startswith("> ")]
    text = " ".join(quoted).replace("\\>", ">")
    reading = tasks.get(name)().read(text)
    labels = reading.labels_after(len(text))
    truth, claim = tasks.get(name).claims
    assert reading.complete and labels[truth] == labels[claim] is not None


def test_coin_renderings_are_those_of_index_3() -> None:
    for line in section("coin").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].strip("`") in ("picture", "states", "wei", "symbols", "steps"):
            example = tasks.get("coin")(rendering=cells[0].strip("`")).example(3)
            assert (cells[1], cells[2]) == (example.prompt, example.completion.strip())
