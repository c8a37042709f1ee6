"""Heatmaps: numbers by layer and position, and those of the logit lens (Z)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from replaylens.engine.display import visible
from replaylens.engine.memory.tree import TokenState
from replaylens.views.data import Token, layer_name
from replaylens.views.examples import DumpedExample
from replaylens.views.html import tag

# ---- heatmap ---------------------------------------------------------------------------------------------------------
# `Heatmap`: layers by positions, with a stronger colour for higher values; tooltips show intervals and controls.


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


# ---- lens map --------------------------------------------------------------------------------------------------------
# Heatmaps of the logit lens (Z): each layer's next token for one example, and averages over a dump.

MAX_COLUMNS = 40
MIN_LAYERS = 3
"""up to this many layers, none is left out of the colour scale"""
MEASURES = {
    "Z.emitted": "log-prob of the next token",
    "Z.entropy": "entropy, nats",
    "Z.kl": "KL divergence from the model's output, nats",
}


def example_maps(tokens: tuple[Token, ...]) -> tuple[Heatmap | None, Heatmap | None]:
    """(the prompt's map, the answer's map). The answer's starts at the row that predicts its first token. Of a text without an
    answer, the second is the map of the text; None: the dump has no Z there."""
    prompt = sum(token.state is TokenState.PROMPT for token in tokens)
    if prompt in (0, len(tokens)):
        return None, example_map(tokens)
    return example_map(tokens[: prompt - 1]), example_map(tokens[prompt - 1 :])


def example_map(tokens: tuple[Token, ...]) -> Heatmap | None:
    """The lens along one path: one column per token, one row per layer, the output on top; None without Z."""
    tokens = tuple(token for token in tokens if token.lens)
    if not tokens:
        return None
    names = [layer.site for layer in tokens[0].lens]
    cells = tuple(tuple(_word(token, layer) for token in tokens) for layer in reversed(range(len(names))))
    columns = tuple(visible(token.text) for token in tokens)
    _, high = clipped([cell.value for line in cells for cell in line])
    note = f"Each cell shows the most likely next token; a stronger colour means a higher probability, up to {high:.2f}."
    return Heatmap("Lens", tuple(reversed(names)), columns, cells, 0.0, high, note)


def _word(token: Token, layer: int) -> HeatmapCell:
    said = token.lens[layer]
    best = said.guesses[0]
    facts = (
        f"{said.site} after position {token.position}",
        *(f"{g.probability:.3f}\t{visible(g.token)}" for g in said.guesses),
    )
    return HeatmapCell(best.probability, visible(best.token), facts)


@dataclass
class LensAverages:
    """Sums of the lens measures, by root and by offset from the first generated token; negative within the prompt."""

    sums: dict[tuple[str, int, str], np.ndarray] = field(default_factory=dict)
    """(measure, offset, root) -> [layers], summed over the root's examples"""
    counts: dict[tuple[str, int, str], int] = field(default_factory=dict)

    def add(self, example: DumpedExample) -> None:
        """Mutates: add the accepted path of one example."""
        reading = example.readings
        if reading is None:
            return
        prompt = sum(token.state is TokenState.PROMPT for token in example.tree.trunk.tokens)
        for name in MEASURES:
            for position, row in reading.row_of.items():
                values = reading.z[name][row]  # [layers]
                key = (name, position - prompt, example.root)
                if not np.isnan(values).any():
                    self.sums[key] = self.sums.get(key, 0) + values.astype(np.float64)
                    self.counts[key] = self.counts.get(key, 0) + 1

    def maps(self) -> list[Heatmap]:
        """One heatmap per measure, without columns that few roots reach."""
        return [made for name, title in MEASURES.items() if (made := self._map(name, title))]

    def _map(self, name: str, title: str) -> Heatmap | None:
        by_offset: dict[int, list[np.ndarray]] = {}
        for (measure, offset, root), total in self.sums.items():
            if measure == name:
                by_offset.setdefault(offset, []).append(total / self.counts[measure, offset, root])
        offsets = _well_filled(by_offset)
        if not offsets:
            return None
        means = {offset: np.stack(by_offset[offset]) for offset in offsets}  # [roots, layers]
        layers = next(iter(means.values())).shape[1]
        inner = slice(1, -1) if layers > MIN_LAYERS else slice(None)  # the ends are extreme or trivial
        low, high = clipped([float(x) for m in means.values() for x in m.mean(0)[inner]])
        cells = tuple(tuple(_average(means[o], layer) for o in offsets) for layer in reversed(range(layers)))
        names = tuple(layer_name(layer, layers) for layer in reversed(range(layers)))
        note = (
            f"Columns count tokens from the first generated one (+0). Colours go from {low:.2f} to {high:.2f}, where most "
            "values of the inner layers lie; values beyond have the colour of that end. Hover for the 95 % interval over roots."
        )
        return Heatmap(title, names, tuple(f"{o:+d}" for o in offsets), cells, low, high, note)


def _well_filled(by_offset: dict[int, list[np.ndarray]]) -> list[int]:
    """Offsets with at least a fifth as many roots as the fullest one, at most MAX_COLUMNS: from the row that predicts the first
    generated token on; the last of the prompt where nothing is generated."""
    most = max(map(len, by_offset.values()), default=0)
    good = sorted(offset for offset, found in by_offset.items() if len(found) * 5 >= most)
    answer = [offset for offset in good if offset >= -1]
    return answer[:MAX_COLUMNS] if any(offset >= 0 for offset in good) else good[-MAX_COLUMNS:]


def _average(values: np.ndarray, layer: int) -> HeatmapCell:
    mean, count = float(values[:, layer].mean()), len(values)
    facts = [f"mean\t{mean:.4f}", f"roots\t{count}"]
    if count > 1:
        half = 1.96 * float(values[:, layer].std(ddof=1)) / math.sqrt(count)
        facts.insert(1, f"95 %\t{mean - half:.4f} to {mean + half:.4f}")
    return HeatmapCell(mean, f"{mean:.2f}", tuple(facts))


def clipped(values: Sequence[float]) -> tuple[float, float]:
    """The ends of a colour scale: the 5th and 95th percentile, so that a few extreme values do not make all others look alike.
    The range of all values, if these are equal."""
    known = np.array([value for value in values if not math.isnan(value)])
    if not len(known):
        return 0.0, 1.0
    low, high = (float(x) for x in np.percentile(known, (5, 95)))
    return (low, high) if high > low else span(known.tolist())


def averages(examples: Iterable[DumpedExample]) -> LensAverages:
    """Averages over all examples."""
    made = LensAverages()
    for example in examples:
        made.add(example)
    return made
