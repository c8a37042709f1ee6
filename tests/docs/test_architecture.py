"""docs/architecture.md matches the code: paths exist, rooms have the import test's order, and names are defined as stated."""

import re
from collections.abc import Iterator

from tests.docs.blocks import ROOT
from tests.test_imports import CORE, FACES, SATELLITES

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_PATH = re.compile(r"`([a-z_]+/[\w/]*(?:\.\w+)?)`")
_NAME = re.compile(r"`([\w.]+)`\s+\(`([\w/]+\.py)`\)")


def missing_paths(text: str) -> list[str]:
    """Paths in backticks that do not exist."""
    return [path for path in _PATH.findall(text) if not (ROOT / path).exists()]


def rooms() -> Iterator[str]:
    """Sub-packages and files of the engine, spelled as on the page."""
    for entry in sorted((ROOT / "engine").iterdir()):
        if entry.is_dir() and (entry / "__init__.py").exists():
            yield f"engine/{entry.name}/"
        elif entry.suffix == ".py" and entry.name != "__init__.py":
            yield f"engine/{entry.name}"


def undefined(text: str) -> list[str]:
    """Names given as `Class.method` (`file`) that are not fully defined in that file."""
    wrong = []
    for name, path in _NAME.findall(text):
        source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        if not all(re.search(rf"^\s*(?:def|class) {word}\b", source, re.MULTILINE) for word in name.split(".")):
            wrong.append(f"{name} ({path})")
    return wrong


def test_paths_exist() -> None:
    assert _PATH.findall(PAGE) and missing_paths(PAGE) == []


def test_every_room_has_a_line() -> None:
    lines = {line.split("|")[1].strip().strip("`") for line in PAGE.splitlines() if line.startswith("| `engine/")}
    assert lines == set(rooms())


def floors(text: str) -> list[set[str]]:
    """The rooms on each line of the page's diagram, from the bottom up."""
    (diagram,) = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [set(re.findall(r"([a-z_]+)(?:/|\.py)", line)) for line in reversed(diagram.splitlines())]


def test_the_diagram_is_the_table_of_the_import_test() -> None:
    core = [{room.removeprefix("engine/") for room in rooms} for rooms in CORE]
    satellites = {room.removeprefix("engine/") for room in SATELLITES}
    faces = {room for rooms in FACES for room in rooms} - {"errors", "__main__"}
    assert floors(PAGE) == [*core, satellites, faces]


def test_names_are_defined_where_the_page_says() -> None:
    assert len(_NAME.findall(PAGE)) > 20 and undefined(PAGE) == []


def test_control() -> None:
    """Negative control: a missing path, class or method is found."""
    text = "`engine/loop/nothing.py`, `Loop.step` (`engine/loop/loop.py`), `Loop.leap` (`engine/loop/loop.py`)"
    assert missing_paths(text) == ["engine/loop/nothing.py"]
    assert undefined(text) == ["Loop.leap (engine/loop/loop.py)"]
