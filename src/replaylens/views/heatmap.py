"""`Heatmap`: layers by positions, one number a cell, a stronger colour for more; intervals and controls show on hover."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from replaylens.engine.pictures.html import tag


@dataclass(frozen=True)
class HeatmapCell:
    """One number; `shown` is what stands in the cell, `facts` what a hover adds: a line a fact, tabs between columns."""

    value: float
    shown: str
    facts: tuple[str, ...] = ()
    marked: bool = False
    """set off by a frame"""
    small: str = ""
    """below it, such as an interval"""


@dataclass(frozen=True)
class Heatmap:
    """rows x columns of cells; None where nothing was measured."""

    title: str
    rows: tuple[str, ...]
    """from top to bottom"""
    columns: tuple[str, ...]
    cells: tuple[tuple[HeatmapCell | None, ...], ...]
    low: float
    high: float
    """values at which the colour ends"""
    note: str = ""
    controls: int = 0
    """how many rows at the bottom are controls, set apart by a line"""

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.cells) and all(len(line) == len(self.columns) for line in self.cells)


def draw(heatmap: Heatmap) -> Markup:
    """A table, so that it can be read and copied without colour."""
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
    """The smallest and the largest number, NaN left out; (0, 1) where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return (min(known), max(known)) if known else (0.0, 1.0)
