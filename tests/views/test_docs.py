"""The snippets of docs/views.md run as written, and its pictures exist."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

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


@pytest.mark.parametrize(
    "picture", sorted((DOCS / "img").glob("*-dark.png")) + sorted((DOCS / "img").glob("*-light.png")), ids=str
)
def test_a_picture_has_the_colours_of_its_page_up_to_its_edges(picture: Path) -> None:
    """A view on a page of the other theme would show a frame of it."""
    pixels = imread(picture)[..., :3]
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).mean(-1)
    assert (edge.max() < 0.75) if "dark" in picture.name else (edge.min() > 0.25)
