"""The sections of the report page: what was found, probe reports, results of the workbench and of attribution."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from markupsafe import Markup

from replaylens import tasks
from replaylens.engine.errors import BadRequest, InternalError
from replaylens.engine.request.values import as_list
from replaylens.engine.request.values import short_repr as in_words
from replaylens.probes.report import CONTROLS, Report
from replaylens.probes.verdicts import BELOW, SHOWN, UNDECIDED, best_of, verdict_of, verdicts
from replaylens.views import draw
from replaylens.views import maps as heatmap
from replaylens.views.examples import DumpedExample
from replaylens.views.html import join, script, style, tag
from replaylens.views.maps import Heatmap, HeatmapCell, span
from replaylens.views.summary import fact_list

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ---- opening ---------------------------------------------------------------------------------------------------------
# The first section of the report page: what was found, with the controls it is held against, and one example.

OPENING_LINES = 12
"""limit of best cells"""
ORDER = ("found", "decoded", "examples", "probes", "lens")
"""sections that come first; then those that it does not name; last what the page rests on"""
LAST = ("overview", "certificate", "cite")


def rank(key: str) -> int:
    """The place of a section on the page."""
    if key in LAST:
        return len(ORDER) + 1 + LAST.index(key)
    return ORDER.index(key) if key in ORDER else len(ORDER)


def draw_opening(probes: Sequence[Report], run: str = "", example: DumpedExample | None = None) -> Markup:
    """The findings of all reports in their first lines, the best cells of sweeps, and one example's tree.

    run      what was replayed, in words
    example  the example to show
    """
    headlines = [line for report in probes for line in _headlines(report)]
    points = [tag("p", run)] if run else []
    points += [tag("ul", *(tag("li", line) for line in headlines), class_="rl-headline")] if headlines else []
    cells = [line for report in probes if report.kind == "sweep" for line in _best(report)]
    table = [_opening_table(cells[:OPENING_LINES])] if cells else []
    tree = [tag("div", draw.draw_tree(example.tree), class_="rl-one")] if example is not None else []
    return join([*points, *table, *tree])


def better(one: DumpedExample | None, other: DumpedExample) -> DumpedExample:
    """The example to show: the first that is right and has a rejected branch; failing that, the first of all."""
    tells = other.num_rejected > 0 and other.correct is not False
    return other if one is None or (tells and not (one.num_rejected > 0 and one.correct is not False)) else one


VERDICTS = ("Shown", "Undecided", "Inverted", "Readable, ", "Not shown:")  # the last two: of earlier versions


def _headlines(report: Report) -> list[str]:
    """A report's first finding; of a sweep, one for each label; of a transfer, accepted to rejected rows with its verdict."""
    lines = [line for line in report.summary() if not line.startswith(" ")]
    told = [line for line in lines if line.startswith(tuple(VERDICTS))]
    if report.kind == "transfer" and (best := _accepted_to_rejected(report)):
        score = next(line for line in lines if line.startswith(f"{best['what']}: "))
        return [f"transfer, accepted → rejected: {told[0]} {score}"]
    by_label: dict[str, str] = {}
    for line in sorted(told, key=lambda line: not line.startswith("Shown:")):  # what is shown comes first
        by_label.setdefault(line.split(" at ")[0].partition(": ")[2], line)
    return list(by_label.values()) if report.kind == "sweep" and told else [f"{report.kind}: {line}" for line in lines[:1]]


# ---- findings in words ------------------------------------------------------------------------------------------------

BEFORE = ("step", "query")
"""positions where an answer is decided and not yet written"""
GLOSSARY = {
    "S": "residual stream: the vector that every block reads and adds to; S0 enters block 0",
    "T": "attention output: what a block's attention adds to the residual stream",
    "C": "MLP output: what a block's MLP adds to the residual stream",
    "Z": "logit lens: the next token that a layer would predict, read through the model's last layer",
    "control task": "control: a random label for each kind of text; a probe that learns it, too, has learned the texts",
    "shown": "verdict: significant over the whole grid, and above every control",
    "below": "verdict: the effect is shown to be smaller than what would count",
    "undecided": "verdict: neither shown nor shown to be small; more independent texts would tell",
}
"""words of the page -> what they mean: a name, then a sentence"""


def glossary() -> Markup:
    """The words to hover."""
    return join(["Glossary (hover): ", Markup(" · ").join(map(word, GLOSSARY))])


def word(text: str) -> str:
    """A word of the glossary, which explains itself on hover; other words as they are."""
    about = GLOSSARY.get(text)
    return text if about is None else tag("abbr", text, title=about.replace(": ", "\n", 1), tabindex=0, class_="rl-word")


def finding(report: Report) -> str:
    """What a sweep or a transfer found, in a sentence for readers who know neither; empty for other reports."""
    return _swept(report) if report.kind == "sweep" else _transferred(report) if report.kind == "transfer" else ""


_READ = {SHOWN: "can be read", BELOW: "is shown to be hardly readable", UNDECIDED: "may or may not be readable"}


def _swept(report: Report) -> str:
    cell = max(_best(report), key=lambda each: (each["verdict"] == SHOWN, each["accuracy"]), default=None)
    if cell is None:
        return ""
    task, subject = report.source.get("task"), f"The label {cell['label']!r}"
    before = cell["position"] in BEFORE
    if task in tasks.names() and cell["label"] == tasks.get(task).state_label:
        subject = f"The model's {'next ' * before}answer"
    read = _READ.get(cell["verdict"], "is not shown to be readable")
    scored = "is right in {:.0%} of cases" if cell["metric"] == "accuracy" else f"scores {{:.2f}} ({cell['metric']})"
    known = [
        (float(cell[name]), name.replace("_", " ").replace("untrained", "an untrained model"))
        for name in CONTROLS
        if _known(cell.get(name))
    ]
    against = f". The best control ({max(known)[1]}) {scored.format(max(known)[0])}" if known else ""
    score = (
        f"a probe of {_place(_where(cell))}, tested on examples that it was not fitted on, {scored.format(cell['accuracy'])}"
    )
    return f"{subject} {read} from its activations{' before it is written' * before}: {score}{against}."


def _transferred(report: Report) -> str:
    best = _accepted_to_rejected(report)
    if best is None:
        return ""
    shown = any(line.startswith("Shown:") for line in report.summary())
    read = "can be read as well" if shown else "are not shown to be readable"
    text = [line["accuracy"] for line in report.lines if line["what"].endswith(_WAY) and line.get("site") is None]
    against = f". A guess from tokens or position is right in {max(text):.0%}" if text else ""
    probe = f"a probe of {_place(best['what'].removesuffix(_WAY))}, fitted on accepted tokens alone,"
    score = f"is right in {best['accuracy']:.0%} of rejected cases"
    return f"Drafts that were rejected, so that they never happened, {read}: {probe} {score}{against}."


def _place(cell: str) -> str:
    """A cell such as S1 in words."""
    return f"the {GLOSSARY[cell[0]].split(':')[0]} in layer {cell[1:]}" if re.fullmatch(r"[STC]\d+", cell) else cell


_WAY = ": accepted to rejected"


def _accepted_to_rejected(report: Report) -> Mapping[str, Any] | None:
    """The line of a transfer's best cell; None: the report has no verdict."""
    told = (re.search(r"rejected ones, best at ([^\s,]+?)[,.]", line) for line in report.summary())
    cell = next((found[1] for found in told if found), "")
    return next((line for line in report.lines if cell and line["what"] == f"{cell}{_WAY}"), None)


# ---- the best cells ---------------------------------------------------------------------------------------------------


def _best(report: Report) -> Iterable[dict[str, Any]]:
    """The best cell of each label, estimator and position, with all its controls."""
    table = report.table
    if table.empty or "p_family" not in table:
        return
    main = table[~table["known_zero"].astype(bool)].copy()
    main["verdict"] = verdicts(main)
    for _, part in main.groupby(["label", "estimator", "position"], sort=False):
        if part["accuracy"].notna().any():
            yield dict(best_of(part))


def _opening_table(cells: Sequence[Mapping[str, Any]]) -> Markup:
    controls = [name for name in CONTROLS if any(_known(cell.get(name)) for cell in cells)]
    names = ["label", "position", "probe", "best at", "score, 95 %", *(name.replace("_", " ") for name in controls), "verdict"]
    head = tag("tr", *(tag("th", word(name)) for name in names))
    caption = tag("p", "The best cells, next to every control that was run:", class_="rl-quiet")
    body = (tag("tr", *(tag("td", value) for value in _line(cell, controls))) for cell in cells)
    return join([caption, tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="rl-scroll")])


def _line(cell: Mapping[str, Any], controls: Sequence[str]) -> list[str]:
    score = f"{cell['metric']} {cell['accuracy']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"
    against = [f"{cell[name]:.3f}" if _known(cell.get(name)) else "" for name in controls]
    verdict = word(str(cell["verdict"]))
    return [cell["label"], str(cell["position"]), cell["estimator"], _where(cell), score, *against, verdict]


def _where(cell: Mapping[str, Any]) -> str:
    return f"{cell['site']}{int(cell['layer']) if _known(cell['layer']) else ''}"


def _known(value: Any) -> bool:
    return value is not None and value == value


# ---- probe section ---------------------------------------------------------------------------------------------------
# Probe reports for the report page: heatmaps of sweeps with intervals and controls, tables for all other kinds.

MAX_LINES = 200
"""limit per table"""
_BESIDE = ("p_family", "q", "selectivity", "control_task", "v_information", "calibration_error", "rows", "roots")
"""further columns in a cell's tooltip"""


def draw_probe(report: Report, digest: str | None) -> Markup:
    """One report. `digest`: that of the page's dump; a report on other rows gets a notice."""
    source = report.source
    parts: list[str] = [tag("ul", *(tag("li", point) for point in _points(report.summary())))]
    if digest is not None and source.get("digest") != digest:
        other = f"digest {source['digest']}" if source.get("digest") else "of a run, not of a dump"
        parts.insert(0, tag("p", f"About other rows: {other}", class_="rl-verdict", data_status="mismatch"))
    parts.append(_sweep(report.table) if report.kind == "sweep" else _table(report.lines))
    facts = {name: str(value) for name, value in (source | report.settings).items() if value is not None}
    parts.append(tag("details", tag("summary", "Rows and settings"), fact_list(facts)))
    return join([tag("h3", report.kind), *parts])


def _points(lines: Iterable[str]) -> list[str]:
    """Join indented lines with the line before."""
    points: list[str] = []
    for line in lines:
        if line.startswith(" ") and points:
            points[-1] += f" {line.strip()}"
        else:
            points.append(line)
    return points


# ---- sweeps -----------------------------------------------------------------------------------------------------------


def _sweep(table: "pd.DataFrame") -> Markup:
    """One heatmap per label, estimator and site; framed cells are shown, a question mark is undecided, as the report says."""
    main = table[~table["known_zero"].astype(bool)].copy()
    if main.empty:
        return tag("p", "No lines.", class_="rl-quiet")
    main["verdict"] = verdicts(main)
    made = []
    for (label, estimator), part in main.groupby(["label", "estimator"], sort=False):
        low, high = span([*part["accuracy"].astype(float), *_controls(part)])
        maps = [_map(str(site), own, low, max(high, 1.0)) for site, own in part.groupby("site", sort=False)]
        head = tag("h4", f"{label} ({estimator}, {part['metric'].iloc[0]})")
        made.append(join([head, tag("div", *map(heatmap.draw, maps), class_="rl-beside")]))
    note = (
        "Framed: shown, significant over the whole grid and above every control; a question mark: undecided. Below the line: "
    )
    note += "the controls."
    return join([*made, tag("p", note, class_="rl-quiet")])


def _controls(part: "pd.DataFrame") -> list[float]:
    return [float(value) for name in CONTROLS if name in part for value in part[name].dropna()]


def _map(site: str, own: "pd.DataFrame", low: float, high: float) -> Heatmap:
    """Layers, the last one on top, then the best value of each control."""
    positions = list(dict.fromkeys(own["position"]))
    layers = sorted({_layer(layer) for layer in own["layer"]}, key=lambda x: -1 if x is None else x)
    lines = {(_layer(line["layer"]), line["position"]): line for line in own.to_dict("records")}
    rows = [tuple(_cell(lines.get((layer, position))) for position in positions) for layer in reversed(layers)]
    names = ["all" if layer is None else f"{site}{layer}" if len(site) == 1 else str(layer) for layer in reversed(layers)]
    controls = [name for name in CONTROLS if name in own and own[name].notna().any()]
    for name in controls:
        best = own.groupby("position", sort=False)[name].max()
        rows.append(tuple(_control(name, float(best[position])) for position in positions))
        names.append(word(name.replace("_", " ")))
    return Heatmap(word(site), tuple(names), tuple(map(str, positions)), tuple(rows), low, high, controls=len(controls))


def _layer(value: Any) -> int | None:
    """None for a site by name. The table has NaN there, or None if no line has a layer."""
    return None if value is None or value != value else int(value)


def _cell(line: Mapping[str, Any] | None) -> HeatmapCell | None:
    if line is None or line["accuracy"] != line["accuracy"]:
        return None
    facts = [f"{line['label']} at {line['position']}", f"{line['metric']}\t{line['accuracy']:.4f}"]
    facts.append(f"95 %\t{line['low']:.4f} to {line['high']:.4f}")
    for name in (*CONTROLS, *_BESIDE):
        value = line.get(name)
        if value is not None and value == value:
            facts.append(f"{name.replace('_', ' ')}\t{value:.4g}")
    facts.append(f"verdict\t{verdict_of(line)}")
    small = f"{line['low']:.2f}–{line['high']:.2f}{' ?' * (line['verdict'] == UNDECIDED)}"
    return HeatmapCell(float(line["accuracy"]), f"{line['accuracy']:.2f}", tuple(facts), line["verdict"] == SHOWN, small)


def _control(name: str, value: float) -> HeatmapCell | None:
    if math.isnan(value):
        return None
    return HeatmapCell(value, f"{value:.2f}", (f"control: {name.replace('_', ' ')}", f"best\t{value:.4f}"))


# ---- everything else --------------------------------------------------------------------------------------------------


def _table(lines: list[dict[str, Any]]) -> Markup:
    """The report's lines, with rounded numbers, scores and intervals as bars, and without empty columns."""
    used = dict.fromkeys(name for line in lines for name, value in line.items() if value is not None)
    names = [name for name in used if name not in ("accuracy", "low", "high")]
    head = tag("tr", *(tag("th", name.replace("_", " ")) for name in names), tag("th", "score, 95 %"), tag("th"))
    body = [tag("tr", *(_value(line.get(name)) for name in names), *_score(line)) for line in lines[:MAX_LINES]]
    more = len(lines) - len(body)
    rest = [tag("p", f"and {more} more lines", class_="rl-quiet")] if more > 0 else []
    return join([tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="rl-scroll"), *rest])


def _score(line: Mapping[str, Any]) -> tuple[Markup, Markup]:
    """The score as text, and as a mark with its interval on a scale from 0 to 1; a thin line marks the majority baseline."""
    value, low, high = (line.get(name) for name in ("accuracy", "low", "high"))
    if value is None or value != value:
        return tag("td"), tag("td")
    if low is None or high is None:
        return tag("td", f"{value:.3f}"), tag("td")
    start, end, at = (min(1.0, max(0.0, x)) for x in (low, high, value))
    bar = tag("i", style=f"left:{start:.1%};width:{max(end - start, 0.004):.1%}")
    control = line.get("majority")
    beside = tag("u", style=f"left:{control:.1%}") if control is not None and control == control else ""
    scale = tag("div", bar, beside, tag("b", style=f"left:{at:.1%}"), class_="rl-scale")
    return tag("td", f"{value:.3f} [{low:.3f}, {high:.3f}]", class_="rl-number"), tag("td", scale)


def _value(value: Any) -> Markup:
    if value is None or value != value:
        return tag("td")
    if isinstance(value, float):
        return tag("td", f"{value:.4g}", class_="rl-number")
    return tag("td", str(value), class_="rl-number" if isinstance(value, int) and not isinstance(value, bool) else None)


def draw_probes(reports: Iterable[Report], digest: str | None) -> Markup:
    """All reports of the page."""
    return join(draw_probe(report, digest) for report in reports)


# ---- result section --------------------------------------------------------------------------------------------------
# Results of the workbench and of attribution for the report page: their figures as SVG, and their tables.

_SALT = "replaylens"
"""names of shapes in an SVG are hashes: with a fixed salt, equal figures give equal bytes"""
_DROPPED = re.compile(r"<metadata.*?</metadata>|<defs>\s*<style.*?</defs>|<!--.*?-->", re.S)


@runtime_checkable
class Reportable(Protocol):
    """What a verb returns: lens, patch, path_patch, ablate, steer, attention, and the two attributions."""

    @property
    def frame(self) -> "pd.DataFrame": ...

    def plot(self) -> "Figure | Axes": ...

    def _repr_html_(self) -> str: ...


def checked(results: Any) -> tuple[Reportable, ...]:
    """The results; BadRequest names what is none."""
    found = as_list("results", results, "a list of results, such as [patch(...)]")
    if bad := [each for each in found if isinstance(each, type) or not isinstance(each, Reportable)]:
        raise BadRequest(
            f"Invalid results: {in_words(bad[0])} is no result. Give what lens, patch, ablate, steer or attention return."
        )
    return tuple(found)


def draw_results(results: Iterable[Reportable]) -> Markup:
    """All results of the page, in order."""
    return join(_draw(result) for result in results)


def _draw(result: Reportable) -> Markup:
    """One result: its figure, and below it the view that a notebook shows."""
    kind = re.sub(r"(?<!^)([A-Z])", r" \1", type(result).__name__.removesuffix("Result")).lower()
    view = result._repr_html_().removeprefix(style()).removesuffix(script())
    drawn: Any = result.plot()
    figure = tag("figure", svg(getattr(drawn, "figure", drawn)), class_="rl-figure")  # of axes, their figure
    about = tag("p", repr(result), class_="rl-quiet")
    return join([tag("h3", kind), about, figure, tag("details", tag("summary", "Table"), Markup(view))])


def svg(figure: "Figure", letters: Literal["path", "none"] = "path") -> Markup:
    """The figure as an SVG element that loads nothing. Equal figures give equal bytes.

    letters  "path": drawn as shapes, alike everywhere; "none": text in the viewer's own font, a fifth of the size

    Nothing is clipped, because clipping refers to shapes by URL, which the page's checks forbid.
    """
    import matplotlib

    for artist in figure.findobj():
        artist.set_clip_on(False)
        artist.set_rasterized(False)
    made = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": _SALT, "svg.fonttype": letters}):
        figure.savefig(made, format="svg", metadata={"Date": None, "Creator": None})
    text = _DROPPED.sub("", made.getvalue())
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    if "url(" in text or "data:" in text or "<image" in text:
        raise InternalError("A figure holds an image, which a page cannot load. Draw it with shapes.")
    return Markup(text.replace("<svg", '<svg style="max-width:100%;height:auto;stroke-linejoin:round;background:white"', 1))
