"""The task of docs/extending.md, which the package does not have: the symmetries of a square, from the page's own block."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from replaylens.tasks import registry
from tests.docs.blocks import ROOT, blocks

PAGE = "docs/extending.md"


def file_of_page(name: str) -> str:
    """The text of a file that a block of the page is."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    return next(block.text for block in blocks(PAGE, text) if block.file == name)


def square_module() -> ModuleType:
    """The page's square.py, run as a module of its own. Its class is not registered when this returns."""
    module = ModuleType("square_of_the_page")
    with own_registry():
        exec(compile(file_of_page("square.py"), PAGE, "exec"), module.__dict__)
    return module


@contextmanager
def own_registry() -> Iterator[dict[str, Any]]:
    """An empty registry besides the built-in tasks, until the block ends."""
    before, registry._REGISTERED = registry._REGISTERED, {}
    try:
        yield registry._REGISTERED
    finally:
        registry._REGISTERED = before


def write_files(folder: Path) -> None:
    """square.py and square.toml of the page, in a folder."""
    for name in ("square.py", "square.toml"):
        (folder / name).write_text(file_of_page(name), encoding="utf-8")
