"""`Heatmap`: layers by positions, with a stronger colour for higher values; tooltips show intervals and controls."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from replaylens.engine.pictures.html import tag


@dataclass(frozen=True)
class HeatmapCell:
    """One number; `shown` is the cell's text, `facts` its tooltip, one fact per line, with tabs between columns."""

    value: float
    shown: str
    facts: tuple[str, ...] = ()
    marked: bool = False
    """drawn with a frame"""
    small: str = ""
    """small text below, such as an interval"""


@dataclass(frozen=True)
class Heatmap:
    """Cells [rows][columns]; None for missing measurements."""

    title: str
    rows: tuple[str, ...]
    """from top to bottom"""
    columns: tuple[str, ...]
    cells: tuple[tuple[HeatmapCell | None, ...], ...]
    low: float
    high: float
    """ends of the colour scale"""
    note: str = ""
    controls: int = 0
    """number of control rows at the bottom, below a line"""

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.cells) and all(len(line) == len(self.columns) for line in self.cells)


def draw(heatmap: Heatmap) -> Markup:
    """The heatmap as a table, readable without colour."""
    head = tag("tr", tag("th"), *(tag("th", name) for name in heatmap.columns))
    first_control = len(heatmap.rows) - heatmap.controls
    lines = [
        tag("tr", tag("th", name), *(_cell(cell, heatmap) for cell in line), class_="rl-rule" if i == first_control else None)
        for i, (name, line) in enumerate(zip(heatmap.rows, heatmap.cells, strict=True))
    ]
    note = [tag("p", heatmap.note, class_="rl-quiet")] if heatmap.note else []
    table = tag("table", tag("thead", head), tag("tbody", *lines), class_="rl-heat")
    return tag("figure", tag("figcaption", heatmap.title), tag("div", table, class_="rl-scroll"), *note, class_="rl-figure")


def _cell(cell: HeatmapCell | None, heatmap: Heatmap) -> Markup:
    if cell is None or math.isnan(cell.value):
        return tag("td", class_="rl-none")
    share = (cell.value - heatmap.low) / (heatmap.high - heatmap.low) if heatmap.high > heatmap.low else 0.0
    share = min(1.0, max(0.0, share))
    look = f"rl-cell{' rl-strong' if share > 0.55 else ''}{' rl-marked' if cell.marked else ''}"
    small = tag("small", cell.small) if cell.small else ""
    return tag("td", cell.shown, small, class_=look, style=f"--v:{share:.0%}", title="\n".join(cell.facts) or None)


def span(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and largest number, ignoring NaN; (0, 1) if there is none."""
    known = [value for value in values if not math.isnan(value)]
    return (min(known), max(known)) if known else (0.0, 1.0)
