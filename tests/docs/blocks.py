"""Splits pages into fenced blocks, links and headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
NOTES = sorted(f"{folder}/{p.name}" for folder in ("docs/notes", "bench/studies") for p in (ROOT / folder).glob("*.md"))
"""records of what was measured: their links are checked, their snippets are not run"""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block. `language` is sh, python, or another one, which is not run."""

    page: str
    line: int
    """line number of its first line, from 1"""
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block is, if its first line is a comment with the file's name."""
        found = re.match(r"# (\w+\.\w+)\n", self.text)
        return None if found is None else found[1]


def blocks(page: str, text: str) -> Iterator[Block]:
    """The blocks of a page in order. A fence without a language that starts with our command is a shell block."""
    for found in _FENCE.finditer(text):
        language, body = found[1], found[2]
        if not language and body.startswith("replaylens "):
            language = "sh"
        yield Block(page, text.count("\n", 0, found.start()) + 2, language, body)


def links(text: str) -> list[str]:
    """Targets of links and images."""
    return [a or b for a, b in _LINK.findall(_FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """Anchors that a link may use after #: headings as GitHub spells them."""
    heads = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
