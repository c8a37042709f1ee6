"""Hook of mkdocs: README becomes the first page, and files outside docs/ that pages link to appear below repository/.

Links in the sources are those of the repository, so that they work there; here they are turned into those of the site.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
HOME = ROOT / "README.md"
EXTRA = (HOME, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "bench" / "studies").glob("*.md")))
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\(|(?:src|srcset|href)=\")([^)\s\"#:]+)((?:#[^)\s\"]*)?[)\"])")


def place(path: Path) -> str:
    """Where a file of the repository is in the site's sources."""
    if path == HOME:
        return "index.md"
    return (path.relative_to(DOCS) if path.is_relative_to(DOCS) else "repository" / path.relative_to(ROOT)).as_posix()


def targets(path: Path) -> list[Path]:
    """The files that a page links to."""
    found = [match[1] for part in _FENCE.split(path.read_text())[::2] for match in _LINK.findall(part)]
    return [(path.parent / link).resolve() for link in found]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README, and whatever is reached from the pages by links and lies outside docs/."""
    waiting, seen = [*EXTRA, *(DOCS / file.src_uri for file in files.documentation_pages())], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += targets(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page into those of the site. Pages from outside docs/ come last in a search."""
    source = page.file.src_uri
    if source.startswith("repository/"):
        page.meta.setdefault("search", {"boost": 0.2})
    origin = HOME if source == "index.md" else ROOT / source.removeprefix("repository/")
    if not source.startswith("repository/") and origin != HOME:
        origin = DOCS / source

    def turned(match: re.Match[str]) -> str:
        target = (origin.parent / match[2]).resolve()
        if not target.is_relative_to(ROOT):
            return match[0]
        return match[1] + os.path.relpath(place(target), os.path.dirname(source) or ".") + match[3]

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(turned, part) for part in parts[::2]]
    return "".join(parts)
