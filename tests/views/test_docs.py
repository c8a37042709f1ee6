"""The snippets of docs/views.md run as written, and its pictures exist."""

import re
from pathlib import Path

import pytest

from replaylens.engine.pictures.timeline import Timeline
from replaylens.engine.pictures.tree import Tree

DOCS = Path(__file__).parents[2] / "docs"


def test_snippets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All code blocks run in sequence. The last lines of each match the page."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "views.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, "docs/views.md", "exec"), names)
    run, root = names["run"], names["root"]
    assert isinstance(run.tree(1), Tree) and isinstance(run.timeline(1), Timeline)  # type: ignore[attr-defined]
    assert len(root.tree().paths) >= 3  # type: ignore[attr-defined]
    assert str(names["told"]) == str(names["wrong"].timeline())  # type: ignore[attr-defined]


def test_pictures_are_there() -> None:
    text = (DOCS / "views.md").read_text()
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert pictures and all((DOCS / picture).is_file() for picture in pictures)
