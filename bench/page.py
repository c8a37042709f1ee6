"""`python -m bench page`: the pages whose numbers are those of result files, from templates in `bench/templates`.

A template is Markdown with expressions. `rows("FILE")` looks rows up by what they say, a row's numbers are its attributes, and
`aim` says its target and whether it was missed, from the unrounded number:

    {% set step = rows("engine-gpu")("deterministic decode, batch 1") %}
    | decode step | {{ step.exact_ms | f(2) }} ms | {{ step.ratio | f(2) }} | {{ aim(step) }} |

    {{ source() }}

A row that is shown without its target is an error, and so is a target that is looser than the file's. `source()` says of which
commit, date, machine and arithmetic the rows since the last one are.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.harness import AIM, RESULTS, meets

ROOT = RESULTS.parent.parent
TEMPLATES = Path(__file__).parent / "templates"
PAGES = (
    ("docs/performance.md", "performance.md", ""),
    ("README.md", "speed.md", "## Four numbers of speed"),
    ("docs/determinism.md", "compared.md", "## What was compared"),
    ("docs/determinism.md", "differs.md", "## How often ordinary inference differs"),
)
"""page, its template, and the section that it is; empty: the whole page, whose rows need their targets and sources"""
PUBLISHED = {"2.66 (GSM8K)": ">= 2.66"}
"""targets that are a published number"""
OWN = ("commit", "date", "machine")
"""what a row may say itself, if it was measured apart from the others of its case"""
BEFORE = "arithmetic from before portable-1"
"""of files that do not say: the harness writes it since then"""


class Row:
    """A row of a result file. Its numbers are attributes; reading one notes that the row is shown."""

    def __init__(self, book: "Book", file: str, body: dict[str, Any]) -> None:
        self._book, self._file, self._body = book, file, body

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._body:
            raise ValueError(f"{self._file}: the row {self._body['what']!r} has no {name}. It has {', '.join(self._body)}.")
        self._book.shown.append(self)
        return self._body[name]

    def any(self, *names: str) -> Any:
        """The first of several numbers that the row has: what a case notes today, and what it noted once."""
        return getattr(self, next((name for name in names if name in self._body), names[0]))


class Book:
    """The result files, and what a page shows of them."""

    def __init__(self, results: Path = RESULTS) -> None:
        self.results = results
        self.files: dict[str, dict[str, Any]] = {}
        self.shown: list[Row] = []
        """since the last `source`"""
        self.read: dict[str, dict[str, None]] = {}
        """origins of the numbers of files without rows that were read since then, by file"""
        self.aimed: set[int] = set()
        """bodies of rows whose target is said"""
        self.every: list[Row] = []

    def file(self, name: str) -> dict[str, Any]:
        if name not in self.files:
            self.files[name] = json.loads((self.results / f"{name}.json").read_text(encoding="utf-8"))
        return self.files[name]

    def rows(self, name: str, case: str | None = None) -> Callable[[str], Row]:
        """Rows of a file by what they say, or by how that begins. KeyError unless there is exactly one.

        case  those of a case; of a file that has none of it, those that were written before rows named their case
        """
        body = self.file(name)
        of = case if self.has(name, case=case) else None

        def one(what: str) -> Row:
            of_case = [row for row in body["rows"] if case is None or row.get("case") == of]
            found = [row for row in of_case if row["what"] == what] or [row for row in of_case if row["what"].startswith(what)]
            if len(found) != 1:
                raise KeyError(f"{name}: {len(found)} rows begin with {what!r}")
            return Row(self, name, found[0])

        return one

    def has(self, name: str, what: str = "", case: str | None = None) -> bool:
        """Whether there is a file, and it has a row that says just this, or any of a case."""
        if not (self.results / f"{name}.json").exists():
            return False
        found = (row for row in self.file(name).get("rows", [{"what": ""}]) if case in (None, row.get("case")))
        return any(what in ("", row["what"]) for row in found)

    def number(self, file: str, *keys: str | int) -> Any:
        """A number of a file that has no rows. Its first key names a part, which may say its commit, machine and arithmetic."""
        found: Any = self.file(file)
        part = found[keys[0]]
        if isinstance(part, dict) and "commit" in part:
            arithmetic, machine = part.get("arithmetic", "arithmetic not on record"), part["machine"].partition(",")[0]
            origin = f"{part['commit'][:8]} of {found['date'][:10]}, {arithmetic}, {machine}"
        else:
            origin = "commit not on record"
        self.read.setdefault(file, {})[origin] = None
        for key in keys:
            found = found[key]
        return found

    def aim(self, row: Row, declared: str = "", value: float | None = None) -> str:
        """The target of a row, and whether it was missed.

        declared  where the file has none, or a stricter one: of `value`, or else of the row's ratio
        """
        self.aimed.add(id(row._body))
        target = row._body.get("aim", "").removesuffix(": missed")
        if not declared and not target:
            raise ValueError(f"{row._file}: {row._body['what']!r} has no target. Give one.")
        if declared and target and not stricter(declared, target):
            raise ValueError(f"{row._file}: {declared!r} is looser than the target of {row._body['what']!r}, {target!r}")
        judged = value if value is not None else row._body.get("ratio")
        limit = PUBLISHED.get(target, declared or target)
        met = None if judged is None else meets(judged, bound(limit))
        if met is None:
            met = row._body["met"] if not declared else None
        if met is None:
            raise ValueError(
                f"{row._file}: {row._body['what']!r} has no number for the target {declared or target!r}. Give one."
            )
        return (declared or target) + ("" if met else ": missed")

    def judged(self, value: float, target: str) -> str:
        """A target of a number that is no row's ratio, and whether it was missed."""
        return target + ("" if meets(value, bound(target)) else ": missed")

    def every_ratio(self, name: str, parts: tuple[str, ...]) -> list[float]:
        """The ratios of a file's rows that say one of the parts, not as the beginning of a longer word."""
        found = [
            row for row in self.file(name)["rows"] if any(re.search(rf"{re.escape(part)}\b", row["what"]) for part in parts)
        ]
        return [Row(self, name, row).ratio for row in found if row.get("check", True)]

    def aims(self, *rows: Row) -> str:
        """The targets of several rows: one if all say the same, or else in their order."""
        said = [self.aim(row) for row in rows]
        return said[0] if len(set(said)) == 1 else "; ".join(said)

    def source(self) -> str:
        """Where the rows that were shown since the last call are from."""
        origins: dict[str, dict[str, list[Row]]] = {}
        for row in self.shown:
            origins.setdefault(row._file, {}).setdefault(self.origin(row), []).append(row)
        self.every += self.shown
        self.shown = []
        files: dict[str, list[str]] = {}
        for name, found in origins.items():
            parts = list(found)
            if len(parts) > 1:  # the most common origin goes without the words of its rows
                parts.sort(key=lambda origin: -len({id(row._body) for row in found[origin]}))
                parts[1:] = [f"{origin}: {words(found[origin])}" for origin in parts[1:]]
            files.setdefault("; ".join(parts), []).append(f"`{name}.json`")
        for name, read in self.read.items():
            files.setdefault("; ".join(read), []).append(f"`{name}.json`")
        self.read = {}
        return "*From " + ", ".join(f"{', '.join(names)} ({origin})" for origin, names in files.items()) + ".*"

    def origin(self, row: Row) -> str:
        """Commit, date, arithmetic with its digest, and machine of a row, as its file has them."""
        own = self.record(row)
        machine = own["machine"]
        arithmetic = str(machine.get("canonical_version") or "").partition(":")[0]
        arithmetic = f"cuda{arithmetic}" if arithmetic.isdigit() else arithmetic
        if "commit" not in own:
            return f"commit not on record, {arithmetic or BEFORE}, {self.place(row)}"
        commit = own["commit"][:8] + ("+" if "+" in own["commit"] else "")
        digest = f" with digest {own['digest'][:8]}" if "digest" in own else ""
        return f"{commit} of {own['date'][:10]}, {arithmetic or 'arithmetic not on record'}{digest}, {self.place(row)}"

    def record(self, row: Row) -> dict[str, Any]:
        """What the file says of the run of a row: the row itself, its case, or the whole file."""
        body = self.file(row._file)
        case = body.get("cases", {}).get(row._body.get("case"), {})
        return {"machine": body.get("machine", {}), **case, **{key: row._body[key] for key in OWN if key in row._body}}

    def place(self, row: Row) -> str:
        """The device of a row: the GPU where the case has one, or else the architecture and the number of threads."""
        machine = self.record(row)["machine"]
        if re.search("gpu|cuda|kernels", row._file):
            of_file = re.search(r"NVIDIA \w+", self.file(row._file).get("about", ""))
            return machine.get("gpu") or machine.get("device") or (of_file[0] if of_file else "a GPU")
        threads = machine["threads"]
        return f"{machine.get('architecture') or machine['machine']}, {threads} thread{'s' * (threads != 1)}"


def words(rows: list[Row]) -> str:
    """What the rows say, each once."""
    return ", ".join(dict.fromkeys('"' + row._body["what"].partition(":")[0] + '"' for row in rows))


def bound(aim: str) -> str:
    """A target as `meets` reads it: without its unit and condition."""
    found = re.match(r"(?:>=|<=|>|<) [\d.]+", aim)
    return found[0] if found else aim


def stricter(declared: str, target: str) -> bool:
    """Whether whatever meets `declared` meets `target`."""
    mine, theirs = AIM.match(bound(declared)), AIM.match(bound(target))
    if not mine or not theirs or mine[1][0] != theirs[1][0]:
        return declared == target
    return float(mine[2]) >= float(theirs[2]) if mine[1][0] == ">" else float(mine[2]) <= float(theirs[2])


def fixed(value: float, digits: int = 2) -> str:
    """A number with so many digits after the point, and commas between thousands."""
    return f"{value:,.{digits}f}"


def rendered(template: str, whole: bool = True, book: Book | None = None, folder: Path = TEMPLATES) -> str:
    """A template with its numbers. whole: ValueError names rows that are shown without their target, or without a source."""
    book = book or Book()
    loader = FileSystemLoader(folder)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"f": fixed, "percent": lambda value, digits=0: fixed(100 * value, digits)}
    environment.globals |= {
        "rows": book.rows,
        "has": book.has,
        "number": book.number,
        "every": book.every_ratio,
        "place": book.place,
    }
    environment.globals |= {"aim": book.aim, "aims": book.aims, "judged": book.judged, "source": book.source}
    text = environment.get_template(template).render()
    if whole and (book.shown or book.read):
        raise ValueError(f"{template}: rows without a source: {words(book.shown) or ', '.join(book.read)}")
    silent = [row for row in book.every if row._body.get("aim") and id(row._body) not in book.aimed]
    if whole and silent:
        raise ValueError(f"{template}: rows without their target: {words(silent)}")
    return text.rstrip("\n") + "\n"


def sections(text: str, heading: str) -> tuple[str, str, str]:
    """(before, the section with its heading, after); all of the text for an empty heading."""
    if not heading:
        return "", text, ""
    before, found, rest = text.partition(f"{heading}\n")
    if not found:
        raise ValueError(f"no section {heading!r}")
    inside, line, after = rest.partition("\n## ")
    return before, f"{heading}\n{inside}\n", line.removeprefix("\n") + after


def made() -> dict[str, str]:
    """The text that templates and result files give, by page."""
    texts: dict[str, str] = {}
    for page, template, heading in PAGES:
        text = texts.get(page) or (ROOT / page).read_text(encoding="utf-8")
        before, _, after = sections(text, heading)
        texts[page] = before + rendered(template, whole=not heading) + ("\n" + after if after else "")
    return texts


def write() -> list[str]:
    """Rewrite the pages; returns those that changed."""
    changed = {page: text for page, text in made().items() if text != (ROOT / page).read_text(encoding="utf-8")}
    for page, text in changed.items():
        (ROOT / page).write_text(text, encoding="utf-8")
    return list(changed)
