"""The first section of the report page: what was found, with the controls it is held against, and one example."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from replaylens.engine.pictures import tree_html
from replaylens.engine.pictures.html import join, tag
from replaylens.probes.reports.report import Report
from replaylens.probes.reports.summary import CONTROLS, best_of, shown
from replaylens.views.dumped import DumpedExample

MAX_LINES = 12
"""limit of best cells"""
ORDER = ("found", "decoded", "examples", "probes", "lens")
"""sections that come first; then those that it does not name; last what the page rests on"""
LAST = ("overview", "certificate")


def rank(key: str) -> int:
    """The place of a section on the page."""
    if key in LAST:
        return len(ORDER) + 1 + LAST.index(key)
    return ORDER.index(key) if key in ORDER else len(ORDER)


def draw(probes: Sequence[Report], run: str = "", example: DumpedExample | None = None) -> Markup:
    """The findings of all reports in their first lines, the best cells of sweeps, and one example's tree.

    run      what was replayed, in words
    example  the example to show
    """
    headlines = [line for report in probes for line in _headlines(report)]
    points = [tag("p", run)] if run else []
    points += [tag("ul", *(tag("li", line) for line in headlines), class_="rl-headline")] if headlines else []
    cells = [line for report in probes if report.kind == "sweep" for line in _best(report)]
    table = [_table(cells[:MAX_LINES])] if cells else []
    tree = [tag("div", tree_html.draw(example.tree), class_="rl-one")] if example is not None else []
    return join([*points, *table, *tree])


def better(one: DumpedExample | None, other: DumpedExample) -> DumpedExample:
    """The example to show: the first that is right and has a rejected branch; failing that, the first of all."""
    tells = other.num_rejected > 0 and other.correct is not False
    return other if one is None or (tells and not (one.num_rejected > 0 and one.correct is not False)) else one


def _headlines(report: Report) -> list[str]:
    """A report's first finding; of a sweep, one for each label."""
    lines = [line for line in report.summary() if not line.startswith(" ")]
    told = [line for line in lines if line.startswith(("Shown:", "Readable, ", "Not shown:"))]
    by_label: dict[str, str] = {}
    for line in sorted(told, key=lambda line: not line.startswith("Shown:")):  # what is shown comes first
        by_label.setdefault(line.split(" at ")[0].partition(": ")[2], line)
    return list(by_label.values()) if report.kind == "sweep" and told else [f"{report.kind}: {line}" for line in lines[:1]]


def _best(report: Report) -> Iterable[dict[str, Any]]:
    """The best cell of each label, estimator and position, with all its controls."""
    table = report.table
    if table.empty or "p_family" not in table:
        return
    main = table[~table["known_zero"].astype(bool)].copy()
    main["shown"] = shown(main)
    for _, part in main.groupby(["label", "estimator", "position"], sort=False):
        if part["accuracy"].notna().any():
            yield dict(best_of(part))


def _table(cells: Sequence[Mapping[str, Any]]) -> Markup:
    controls = [name for name in CONTROLS if any(_known(cell.get(name)) for cell in cells)]
    names = ["label", "position", "probe", "best at", "score, 95 %", *(name.replace("_", " ") for name in controls), "shown"]
    head = tag("tr", *(tag("th", name) for name in names))
    caption = tag("p", "The best cells, beside every control that was run:", class_="rl-quiet")
    body = (tag("tr", *(tag("td", value) for value in _line(cell, controls))) for cell in cells)
    return join([caption, tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="rl-scroll")])


def _line(cell: Mapping[str, Any], controls: Sequence[str]) -> list[str]:
    layer = cell["layer"] if _known(cell["layer"]) else None
    score = f"{cell['metric']} {cell['accuracy']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"
    against = [f"{cell[name]:.3f}" if _known(cell.get(name)) else "" for name in controls]
    where = f"{cell['site']}{'' if layer is None else int(layer)}"
    return [cell["label"], str(cell["position"]), cell["estimator"], where, score, *against, "yes" if cell["shown"] else "no"]


def _known(value: Any) -> bool:
    return value is not None and value == value
