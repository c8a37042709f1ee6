"""Heat maps of the workbench: as figures for papers, and as tables for notebooks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from replaylens.engine.pictures.html import fragment, tag
from replaylens.engine.pictures.paths import visible
from replaylens.probes.reports.figures import Picture
from replaylens.views.heatmap import Heatmap, HeatmapCell, draw, span

MAX_COLUMNS = 64
"""of a table in a notebook; figures show all"""
_MAX_WORDS = 600
"""cells of a figure up to which their words fit"""


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers in rows, from the bottom up, and columns."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    """[rows, columns]"""
    words: Sequence[Sequence[str]] | None = None
    """[rows][columns]: text of the cells; None: the numbers"""
    around: float | None = None
    """the middle of a diverging colour scale; None: an ordinary scale from low to high"""
    facts: Callable[[int, int], tuple[str, ...]] | None = None
    """row, column -> the tooltip"""

    def limits(self) -> tuple[float, float]:
        """The ends of the colour scale."""
        low, high = span([float(x) for x in self.values.ravel() if np.isfinite(x)])
        if self.around is None:
            return low, high
        reach = max(high - self.around, self.around - low, 1e-9)
        return self.around - reach, self.around + reach


def figure(grids: Sequence[Grid], label: str, rows: str, columns: str) -> Figure:
    """One panel per grid, with a common colour scale."""
    width = sum(max(2.0, 0.3 * len(grid.columns)) for grid in grids)
    made = Picture(figsize=(min(width, 24) + 2.2, min(0.24 * len(grids[0].rows), 14) + 2.2), layout="constrained")
    widths = [max(2.0, 0.3 * len(grid.columns)) for grid in grids]
    axes = made.subplots(1, len(grids), squeeze=False, width_ratios=widths)[0]
    limits = [grid.limits() for grid in grids]
    low, high = min(each[0] for each in limits), max(each[1] for each in limits)
    uneven = len({len(grid.rows) for grid in grids}) > 1
    colours = "viridis" if grids[0].around is None else "RdBu_r"
    for axis, grid in zip(axes, grids, strict=True):
        image = axis.pcolormesh(grid.values, vmin=low, vmax=high, cmap=colours)  # shapes: a report page loads no images
        axis.set(title=plain(grid.title), xlabel=columns, xticks=_middles(grid.columns), yticks=_middles(grid.rows))
        axis.set_xticklabels([plain(name) for name in grid.columns], rotation=90, fontsize=7)
        axis.set_yticklabels([plain(name) for name in grid.rows] if axis is axes[0] or uneven else [], fontsize=7)
        if grid.words is not None and grid.values.size <= _MAX_WORDS:
            _write_words(axis, grid, low, high)
    axes[0].set_ylabel(rows)
    made.colorbar(image, ax=list(axes), label=label)
    return made


def _middles(names: Sequence[str]) -> list[float]:
    return [i + 0.5 for i in range(len(names))]


def _write_words(axis, grid: Grid, low: float, high: float) -> None:  # type: ignore[no-untyped-def]
    assert grid.words is not None
    for i, line in enumerate(grid.words):
        for j, word in enumerate(line):
            dark = high > low and (grid.values[i, j] - low) / (high - low) < 0.5
            colour = "white" if dark and grid.around is None else "black"
            axis.text(j + 0.5, i + 0.5, plain(word), ha="center", va="center", fontsize=6, color=colour)


def plain(text: str) -> str:
    """Text for matplotlib: a dollar sign would start a formula."""
    return visible(text).replace("$", r"\$")


def view(grids: Sequence[Grid], *more: Markup, note: str = "") -> str:
    """The grids as tables for a notebook, the first row at the bottom as in the figures."""
    return fragment(*(draw(_table(grid, note)) for grid in grids), *more)


def _table(grid: Grid, note: str) -> Heatmap:
    columns = min(len(grid.columns), MAX_COLUMNS)
    cut = f" The first {columns} of {len(grid.columns)} columns." if columns < len(grid.columns) else ""
    cells = tuple(tuple(_cell(grid, i, j) for j in range(columns)) for i in reversed(range(len(grid.rows))))
    names = tuple(map(visible, grid.columns[:columns]))
    low, high = grid.limits()
    if grid.around is not None:  # a table shades by size; the sign is in the number
        low, high = 0.0, high - grid.around
    return Heatmap(grid.title, tuple(reversed([visible(row) for row in grid.rows])), names, cells, low, high, note + cut)


def _cell(grid: Grid, i: int, j: int) -> HeatmapCell:
    value = float(grid.values[i, j])
    word = f"{value:.2f}" if grid.words is None else visible(grid.words[i][j])
    shade = value if grid.around is None else abs(value - grid.around)
    return HeatmapCell(shade, word, grid.facts(i, j) if grid.facts else (f"{value:.4g}",))


def paragraph(text: str) -> Markup:
    return tag("p", text, class_="rl-quiet")
