"""The snippets of docs/views.md run as written, and its pictures exist."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread, imsave

from replaylens.views.pictures import Timeline, Tree

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


def themed(picture: Path) -> float:
    """The share of a picture's edge that has the lightness of its theme."""
    pixels = imread(picture)[..., :3]
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).mean(-1)
    return float(((edge < 0.5) if "dark" in picture.name else (edge > 0.5)).mean())


@pytest.mark.parametrize("picture", sorted((DOCS / "img").glob("*-[dl]*[kt].png")), ids=lambda picture: picture.name)
def test_a_picture_has_the_colours_of_its_page_up_to_its_edges(picture: Path, tmp_path: Path) -> None:
    """A view on a page of the other theme would show that page at its edges, as the control does."""
    assert themed(picture) > 0.95
    pixels = imread(picture)[..., :3].copy()
    pixels[len(pixels) // 2 :] = float("dark" in picture.name)
    imsave(tmp_path / picture.name, pixels)
    assert themed(tmp_path / picture.name) < 0.8
