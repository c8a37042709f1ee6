"""Probe reports for the report page: heatmaps of sweeps with intervals and controls, tables for all other kinds."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from replaylens.engine.pictures.html import join, tag
from replaylens.engine.pictures.summary import fact_list
from replaylens.probes.reports.report import Report
from replaylens.probes.reports.summary import CONTROLS, shown
from replaylens.views import heatmap
from replaylens.views.heatmap import Heatmap, HeatmapCell, span

if TYPE_CHECKING:
    import pandas as pd

MAX_LINES = 200
"""limit per table"""
_BESIDE = ("p_family", "q", "selectivity", "control_task", "v_information", "calibration_error", "rows", "roots")
"""further columns in a cell's tooltip"""


def draw(report: Report, digest: str | None) -> Markup:
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
    """One heatmap per label, estimator and site; framed cells are "shown" in the sense of the report."""
    main = table[~table["known_zero"].astype(bool)].copy()
    if main.empty:
        return tag("p", "No lines.", class_="rl-quiet")
    main["shown"] = shown(main)
    made = []
    for (label, estimator), part in main.groupby(["label", "estimator"], sort=False):
        low, high = span([*part["accuracy"].astype(float), *_controls(part)])
        maps = [_map(str(site), own, low, max(high, 1.0)) for site, own in part.groupby("site", sort=False)]
        head = tag("h4", f"{label} ({estimator}, {part['metric'].iloc[0]})")
        made.append(join([head, tag("div", *map(heatmap.draw, maps), class_="rl-beside")]))
    note = "Framed: significant over the whole grid, with an interval above every control. Below the line: the controls."
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
        names.append(name.replace("_", " "))
    return Heatmap(site, tuple(names), tuple(map(str, positions)), tuple(rows), low, high, controls=len(controls))


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
    small = f"{line['low']:.2f}–{line['high']:.2f}"
    return HeatmapCell(float(line["accuracy"]), f"{line['accuracy']:.2f}", tuple(facts), bool(line["shown"]), small)


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


def draw_all(reports: Iterable[Report], digest: str | None) -> Markup:
    """All reports of the page."""
    return join(draw(report, digest) for report in reports)
