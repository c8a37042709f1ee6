"""What every view must satisfy: tags nest, nothing is loaded from elsewhere, and text stays text."""

import re
from html.parser import HTMLParser

import numpy as np
from matplotlib.figure import Figure

VOID = {"meta", "input", "br", "img", "link", "hr"}


class _Nesting(HTMLParser):
    """Collects tags, text and attributes, and reports tags that do not nest."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if len({name for name, _ in attributes}) < len(attributes):
            self.faults.append(f"<{tag}> has an attribute twice")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)


def parsed(html: str) -> _Nesting:
    """The page as a parser sees it. Fails if tags do not nest."""
    parser = _Nesting()
    parser.feed(html)
    parser.close()
    assert parser.faults == [] and parser.open == [], (parser.faults[:3], parser.open)
    return parser


def assert_harmless(html: str, scripts: int) -> _Nesting:
    """The page has only our own scripts, no handlers, and nothing that a browser would fetch."""
    found = parsed(html)
    assert found.tags.count("script") == scripts
    assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & set(found.tags)
    names = {name for name, _ in found.attributes}
    assert not [name for name in names if name.startswith("on")] and "src" not in names
    targets = [value or "" for name, value in found.attributes if name in ("href", "action", "formaction")]
    assert all(target.startswith("#") for target in targets)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", html)
    return found


def meshes(figure: Figure) -> list[np.ndarray]:
    """The numbers of the heat maps, without those of colour bars."""
    found = [mesh for axis in figure.axes for mesh in axis.collections if hasattr(mesh, "get_coordinates") and axis.get_title()]
    return [np.asarray(mesh.get_array()) for mesh in found]
