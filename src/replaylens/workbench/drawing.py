"""What results of the workbench share: heat maps for papers and notebooks, and `Metric`: what is measured."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor

from replaylens.engine.display import picture, plain, short, visible, word, wrapped
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.serving.branch import Branch
from replaylens.gradients.gradients import Divergence, LogitDifference, LogProbability, Named, named
from replaylens.views.html import fragment, tag
from replaylens.views.maps import Heatmap, HeatmapCell, draw, span

# ---- drawing ---------------------------------------------------------------------------------------------------------
# Heat maps of the workbench: as figures for papers, and as tables for notebooks.

MAX_COLUMNS = 64
"""of a table in a notebook; figures show all"""
_MAX_WORDS = 600
"""cells of a figure up to which their words are written"""
_MAX_WORD, _MAX_LABEL = 7, 24
"""characters of a cell's word, and of a column's name"""
_SIZE = 6.0
"""of a cell's word, in points"""


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
    ranks: bool = False
    """numbers from 0, the best, to tens of thousands: a logarithmic colour scale, strongest at 0"""
    facts: Callable[[int, int], tuple[str, ...]] | None = None
    """row, column -> the tooltip"""
    off_scale: int = 0
    """first rows that do not set the ends of the colour scale, such as the embedding, whose numbers are far from all others"""

    def limits(self) -> tuple[float, float]:
        """The ends of the colour scale."""
        kept = self.values[self.off_scale :] if len(self.values) > self.off_scale else self.values
        low, high = span([float(x) for x in kept.ravel() if np.isfinite(x)])
        if self.around is None:
            return low, high
        reach = max(high - self.around, self.around - low, 1e-9)
        return self.around - reach, self.around + reach


def figure(grids: Sequence[Grid], label: str, rows: str, columns: str) -> Figure:
    """One panel per grid, with a common colour scale."""
    widths = [max(2.0, 0.3 * len(grid.columns)) for grid in grids]
    height = min(0.24 * len(grids[0].rows), 14) + 2.2
    made = picture(min(sum(widths), 24) + 2.2, height)
    axes = made.subplots(1, len(grids), squeeze=False, width_ratios=widths)[0]
    scale, colours = _scale(grids)
    uneven = len({len(grid.rows) for grid in grids}) > 1
    for axis, grid, width in zip(axes, grids, widths, strict=True):
        image = axis.pcolormesh(grid.values, norm=scale, cmap=colours)  # shapes: a report page loads no images
        title = wrapped(plain(grid.title), width + (1.5 if len(grids) == 1 else 0), 12)
        axis.set(title=title, xlabel=columns, xticks=_middles(grid.columns), yticks=_middles(grid.rows))
        axis.set_xticklabels([plain(short(name, _MAX_LABEL)) for name in grid.columns], rotation=90, fontsize=7)
        axis.set_yticklabels([plain(name) for name in grid.rows] if axis is axes[0] or uneven else [], fontsize=7)
    axes[0].set_ylabel(rows)
    form = StrMethodFormatter("{x:.0f}") if grids[0].ranks else None
    made.colorbar(image, ax=list(axes), label=wrapped(plain(label), height - 1), format=form, extend=_beyond(grids, scale))
    layout = made.get_layout_engine()
    assert layout is not None
    layout.execute(made)  # cells have their widths
    for axis, grid in zip(axes, grids, strict=True):
        if grid.words is not None and grid.values.size <= _MAX_WORDS:
            _write_words(axis, grid, lambda value: image.cmap(image.norm(value)))
    return made


def _scale(grids: Sequence[Grid]) -> tuple[Normalize, str]:
    """The common colour scale, and its colours."""
    limits = [grid.limits() for grid in grids]
    low, high = min(each[0] for each in limits), max(each[1] for each in limits)
    if grids[0].ranks:  # linear up to 1, since 0 has no logarithm
        return SymLogNorm(1, vmin=0, vmax=max(high, 10), base=10), "viridis_r"
    return Normalize(low, high), "viridis" if grids[0].around is None else "RdBu_r"


def _beyond(grids: Sequence[Grid], scale: Normalize) -> str:
    """At which ends of the colour scale values lie beyond it, as matplotlib calls it."""
    assert scale.vmin is not None and scale.vmax is not None
    below = any((grid.values < scale.vmin).any() for grid in grids)
    above = any((grid.values > scale.vmax).any() for grid in grids)
    return {(True, True): "both", (True, False): "min", (False, True): "max"}.get((below, above), "neither")


def _middles(names: Sequence[str]) -> list[float]:
    return [i + 0.5 for i in range(len(names))]


def _write_words(axis: Axes, grid: Grid, colour: Callable[[float], tuple[float, ...]]) -> None:
    """The words of the cells, white on dark colours, as many characters as fit; none into cells that are too low or narrow."""
    assert grid.words is not None
    box = axis.get_window_extent().transformed(axis.figure.dpi_scale_trans.inverted())
    wide, high = 72 * box.width / len(grid.columns), 72 * box.height / len(grid.rows)
    if high < 1.2 * _SIZE:
        return
    for i, line in enumerate(grid.words):
        for j, cell in enumerate(line):
            red, green, blue = colour(float(grid.values[i, j]))[:3]
            ink = "white" if np.isfinite(grid.values[i, j]) and 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
            text = _fitting(cell.strip() or cell, wide)
            axis.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=_SIZE, color=ink)


def _fitting(word: str, wide: float) -> str:
    """As many characters of a word as fit, so many points wide; empty where none does."""
    for most in range(_MAX_WORD, 0, -1):
        text = plain(short(word, most))
        if _points(text) <= wide:
            return text if text != "…" else ""
    return ""


@cache
def _points(text: str) -> float:
    """The width of a cell's word."""
    return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=_SIZE), ismath=False)[0])


def view(grids: Sequence[Grid], *more: Markup, note: str = "") -> str:
    """The grids as tables for a notebook, the first row at the bottom as in the figures."""
    return fragment(*(draw(table(grid, note)) for grid in grids), *more)


def table(grid: Grid, note: str = "") -> Heatmap:
    """A grid as a table, its first row at the bottom."""
    columns = min(len(grid.columns), MAX_COLUMNS)
    cut = f" The first {columns} of {len(grid.columns)} columns." if columns < len(grid.columns) else ""
    cells = tuple(tuple(_cell(grid, i, j) for j in range(columns)) for i in reversed(range(len(grid.rows))))
    names = tuple(map(visible, grid.columns[:columns]))
    low, high = grid.limits()
    if grid.around is not None:  # a table shades by size; the sign is in the number
        low, high = 0.0, high - grid.around
    if grid.ranks:
        low, high = -float(np.log1p(high)), 0.0
    return Heatmap(grid.title, tuple(reversed([visible(row) for row in grid.rows])), names, cells, low, high, note + cut)


def _cell(grid: Grid, i: int, j: int) -> HeatmapCell:
    value = float(grid.values[i, j])
    word = f"{value:.2f}" if grid.words is None else visible(grid.words[i][j])
    shade = value if grid.around is None else abs(value - grid.around)
    shade = -np.log1p(value) if grid.ranks else shade
    return HeatmapCell(shade, word, grid.facts(i, j) if grid.facts else (f"{value:.4g}",))


def paragraph(text: str) -> Markup:
    return tag("p", text, class_="rl-quiet")


# ---- metric ----------------------------------------------------------------------------------------------------------
# `Metric`: one number per row of logits, from the metrics that gradients know, or from a function.

RowsFunction = Callable[[Tensor], Tensor]


def one_name(names: Iterable[str]) -> str:
    """What metrics of several prompts are called together: by their name, by the kind that they share, or metric."""
    called = set(names)
    kinds = {name.partition(" '")[0] for name in called}  # "logit difference" of "logit difference ' Mary' - ' John'"
    return min(called) if len(called) == 1 else min(kinds) if len(kinds) == 1 else "metric"


MetricTokens = str | int | Sequence[str | int]
RowMetric = MetricTokens | RowsFunction | Named | Branch


@dataclass(frozen=True, eq=False)
class Metric:
    """A function of logits, with its name."""

    name: str
    function: RowsFunction

    @classmethod
    def of(cls, engine: Engine, given: "RowMetric | Metric") -> "Metric":
        """A metric in any of its forms; BadRequest for others."""
        if isinstance(given, Metric):
            return given
        forms = "logits [rows, vocab] that returns [rows]"
        found = named(Divergence(given.logits()) if isinstance(given, Branch) else given, forms)
        if not isinstance(found, Named):
            return cls(getattr(found, "__name__", "metric"), found)
        function = found.function(engine._target)
        exact = isinstance(found, LogitDifference)  # a difference needs no more digits than its logits have
        return cls(_name(engine, found), function if exact else lambda logits: function(logits.float()))

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [rows, vocab] -> [rows]; BadRequest if the function returns something else, or numbers that are not finite."""
        found: Any = self.function(logits)
        if not isinstance(found, Tensor) or found.shape != logits.shape[:1]:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise BadRequest(f"The metric {self.name} returned {got}. Return one number per row: shape ({len(logits)},).")
        values = found.detach().to("cpu", torch.float32)
        if bad := int((~values.isfinite()).sum()):
            raise BadRequest(
                f"The metric {self.name} is NaN or infinite in {bad} of {len(values)} rows. Return finite numbers."
            )
        return values


def _name(engine: Engine, metric: Named) -> str:
    shown = lambda token: repr(word(engine.text, engine._target(token)))  # noqa: E731
    match metric:
        case LogitDifference():
            return f"logit difference {shown(metric.right)} - {shown(metric.wrong)}"
        case LogProbability():
            return f"log p({shown(metric.token)})"
    return "KL divergence"


def words(engine: Engine, path: Sequence[int]) -> tuple[str, ...]:
    """The text of each token."""
    return tuple(word(engine.text, token) for token in path)
