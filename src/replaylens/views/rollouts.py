"""`RolloutTree`: thousands of rollouts from forks along one path, folded where they say the same.

Above the text the outcome curve, below it one column per fork: a tile per folded branch, as wide as it is probable, in the
colours of its outcomes. A click opens the fork's tree, a click there its rollouts. All texts are in one compressed table,
each different unit once, which the page unpacks on the first click.
"""

import base64
import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from markupsafe import Markup
from scipy import stats

from replaylens.engine.display import is_stamped, visible
from replaylens.engine.errors import BadRequest
from replaylens.engine.files import write_file
from replaylens.views.html import asset, join, script, style, tag
from replaylens.views.page import document

# ---- outcomes --------------------------------------------------------------------------------------------------------
# Outcomes as colours and curves: what rollouts from each fork of a path end in.

FILLS = ("#4f9ddb", "#f0a23b", "#a6dcee", "#ee3a70", "#a6b8a6", "#dcdc28", "#8270ee", "#ee5eb8")
"""the first five as far apart as token states, with every common kind of colour blindness; dark text is readable on all"""
REST = "#85898d"
"""of outcomes beyond the eighth, and of no outcome at all"""
NEUTRAL = ("no answer", "other")
"""names of what is no outcome: rollouts without an answer, and answers that were not asked for"""
WIDTH, HEIGHT, LEFT, TOP = 1000, 150, 34, 8
"""size of the curve, and where its plot begins"""


def colours(outcomes: Sequence[str]) -> list[str]:
    """The fill of each outcome, in order."""
    fills = iter(FILLS)
    return [REST if name in NEUTRAL else next(fills, REST) for name in outcomes]


def variables(outcomes: Sequence[str]) -> str:
    """The fills as CSS custom properties: `--o0`, `--o1`, ..."""
    return "".join(f"--o{k}:{fill};" for k, fill in enumerate(colours(outcomes)))


def legend(outcomes: Sequence[str], shown: Sequence[str]) -> Markup:
    """A chip per outcome with its colour and a fact, such as a count."""
    chips = [
        tag("span", tag("b", visible(name)), f" {fact}", class_="rl-outcome", style=f"background:{fill}")
        for name, fact, fill in zip(outcomes, shown, colours(outcomes), strict=True)
    ]
    return tag("span", *chips, class_="rl-legend")


def curve_svg(texts: Sequence[str], outcomes: Sequence[str], value: np.ndarray, low: np.ndarray, high: np.ndarray) -> Markup:
    """Probability of each outcome [forks, outcomes] with its interval, and a legend. Readable without a script."""
    drawn = tag("svg", curve(texts, outcomes, value, low, high), viewBox=f"0 0 {WIDTH} {HEIGHT + 24}", role="img", width="100%")
    return join([legend(outcomes, [""] * len(outcomes)), drawn])


def columns(forks: int) -> np.ndarray:
    """[forks + 1]: left edges of the forks' columns, and the right end."""
    return np.linspace(LEFT, WIDTH, forks + 1)


def curve(texts: Sequence[str], outcomes: Sequence[str], value: np.ndarray, low: np.ndarray, high: np.ndarray) -> Markup:
    """The curve without its frame: grid, bands of the intervals, lines, marks."""
    edges = columns(len(texts))
    centre = (edges[:-1] + edges[1:]) / 2
    parts = [_grid()]
    for k, fill in enumerate(colours(outcomes)):
        known = np.flatnonzero(~np.isnan(value[:, k]))
        x, (y, bottom, top) = centre[known], (_height(array[known, k]) for array in (value, low, high))
        if len(known) == 1:  # a band of one fork has no width
            x, y, bottom, top = (np.repeat(array, 2) for array in (x, y, bottom, top))
            x = x + np.array([-12.0, 12.0])
        band = [*zip(x, top, strict=True), *zip(x[::-1], bottom[::-1], strict=True)]
        parts.append(tag("polygon", points=_points(band), fill=fill, opacity=0.25))
        parts.append(tag("polyline", points=_points(list(zip(x, y, strict=True))), fill="none", stroke=fill, stroke_width=2.4))
        if len(known) <= 80:
            parts += [
                tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r=3.2, fill=fill, class_="edge") for a, b in zip(x, y, strict=True)
            ]
    step = max(1, -(-len(texts) // 25))
    parts += [_label(centre[i], HEIGHT + 16, str(i + 1), "middle") for i in range(0, len(texts), step)]
    return join(parts)


def _grid() -> Markup:
    lines = []
    for share in (0, 0.5, 1):
        y = float(_height(np.array([share]))[0])
        lines.append(tag("line", x1=LEFT, x2=WIDTH, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="line", opacity=0.5, stroke_width=1))
        lines.append(_label(LEFT - 6, y + 4, f"{share:g}", "end"))
    return join(lines)


def _height(share: np.ndarray) -> np.ndarray:
    found: np.ndarray = TOP + (HEIGHT - TOP - 4) * (1 - share)
    return found


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _label(x: float, y: float, text: str, anchor: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, font_size=12, class_="quiet")


# ---- rollout tree ----------------------------------------------------------------------------------------------------

MAX_TILES, MAX_BRANCHES = 3000, 8
"""of all columns together, and of one column; the rarest branches of a fork share a tile"""
TILE = 66
"""height of a column of tiles"""
_LEVEL = 0.95
_CAPTION = (
    "Curve: outcomes of rollouts from before each unit, with 95 % intervals. Tiles: the branches of each fork, as wide as they "
    "are probable, in the colours of their outcomes; framed: the path itself. Click a column or a unit to open its tree."
)


class HasHtml(Protocol):
    """Anything that draws itself in a notebook, such as the result of `lens`."""

    def _repr_html_(self) -> str: ...


@dataclass(frozen=True, repr=False)
class RolloutTree:
    """Rollouts as a picture: draws itself in a notebook; `save` writes a page that loads nothing."""

    texts: tuple[str, ...]
    """the path's unit at each fork"""
    outcomes: tuple[str, ...]
    fork: tuple[int, ...]
    """[rollouts]: number of the fork"""
    units: tuple[tuple[str, ...], ...]
    """[rollouts]: what it says from there, unit by unit"""
    outcome: tuple[int, ...]
    """[rollouts]: number of its outcome"""
    title: str = ""
    prompt: str = ""
    """the text before the first fork"""
    lenses: Mapping[int, HasHtml] = field(default_factory=dict)
    """rollout -> what is drawn when it is opened, such as its lens"""
    source: str = ""
    """identifier of the rollouts; empty: they have none"""

    def __post_init__(self) -> None:
        if not len(self.fork) == len(self.units) == len(self.outcome):
            raise BadRequest(
                f"{len(self.fork)} forks, {len(self.units)} texts, {len(self.outcome)} outcomes. Give one of each per rollout."
            )
        for what, numbers, most in (("fork", self.fork, len(self.texts)), ("outcome", self.outcome, len(self.outcomes))):
            if numbers and (min(numbers) < 0 or max(numbers) >= most):
                raise BadRequest(f"Numbers of the {what} go from 0 to {most - 1}; given: {min(numbers)} to {max(numbers)}.")

    def __repr__(self) -> str:
        return f"RolloutTree({len(self.fork)} rollouts from {len(self.texts)} forks, {', '.join(self.outcomes)})"

    def _repr_html_(self) -> str:
        return join([style(), rollout_style(), tag("div", self.draw(), class_="rl-view"), script(), rollout_script()])

    def save(self, path: str | Path) -> Path:
        """Write one HTML file, as a whole or not at all, over an older one only. Equal rollouts give equal bytes."""
        target = Path(path)
        if not target.name or target.is_dir():
            raise BadRequest(f"{path} is a folder. Name the file to write, such as {target / 'tree.html'}.")
        return write_file(target, _page(self), is_stamped)

    def counts(self) -> np.ndarray:
        """int64 [forks, outcomes]"""
        table = np.zeros((len(self.texts), len(self.outcomes)), dtype=np.int64)
        np.add.at(table, (np.array(self.fork, dtype=np.int64), np.array(self.outcome, dtype=np.int64)), 1)
        return table

    def draw(self) -> Markup:
        """The picture without style and script."""
        table = self.counts()
        facts = [f"{count}" for count in table.sum(0)]
        head = tag("div", tag("b", self.title or repr(self)), legend(self.outcomes, facts), class_="rl-head")
        overview = tag(
            "svg",
            _curve(self, table),
            *_tiles(self, table),
            viewBox=f"0 0 {WIDTH} {HEIGHT + 30 + TILE}",
            role="img",
            aria_label="outcome curve and branches of each fork",
            class_="rl-overview",
        )
        panels = [tag("div", class_=name, aria_live="polite") for name in ("rl-fork", "rl-list", "rl-one")]
        parts = [head, overview, tag("p", _CAPTION, class_="rl-quiet"), _text(self, table), *panels, *_data(self)]
        look, names = variables(self.outcomes), json.dumps(self.outcomes)
        return tag("div", *parts, class_="rl-rollouts", style=look, data_outcomes=names, data_first=_largest_change(table))


# ---- the overview -----------------------------------------------------------------------------------------------------


def _curve(tree: RolloutTree, table: np.ndarray) -> Markup:
    total = table.sum(1, keepdims=True)
    value = np.divide(table, total, out=np.full(table.shape, np.nan), where=total > 0)
    tail = (1 - _LEVEL) / 2
    low = np.where(table > 0, stats.beta.ppf(tail, table + 0.5, total - table + 0.5), 0.0)
    high = np.where(table < total, stats.beta.ppf(1 - tail, table + 0.5, total - table + 0.5), 1.0)
    return curve(tree.texts, tree.outcomes, value, low, high)


def _largest_change(table: np.ndarray) -> int:
    """The fork whose unit changes the outcomes most: the one that is open at first."""
    total = table.sum(1, keepdims=True)
    share = np.divide(table, total, out=np.zeros(table.shape), where=total > 0)
    moved = np.abs(np.diff(share, axis=0)).sum(1) * (total[1:, 0] > 0) * (total[:-1, 0] > 0)
    return int(moved.argmax()) if len(moved) and moved.max() > 0 else int((total[:, 0] > 0).argmax()) if len(table) else 0


def _tiles(tree: RolloutTree, table: np.ndarray) -> list[Markup]:
    """One column per fork: a tile per folded branch, split by outcome; the path's own branch comes first, with a frame."""
    edges, top, most = columns(len(tree.texts)), HEIGHT + 24, min(MAX_BRANCHES, max(1, MAX_TILES // max(table.size, 1)))
    branches: list[Counter[tuple[str, int]]] = [Counter() for _ in tree.texts]
    for fork, units, outcome in zip(tree.fork, tree.units, tree.outcome, strict=True):
        branches[fork][units[0] if units else "", outcome] += 1
    made = []
    for fork, found in enumerate(branches):
        left, wide = edges[fork] + 0.08 * (edges[1] - edges[0]), 0.84 * (edges[1] - edges[0])
        parts = _column(tree, fork, found, int(table[fork].sum()), left, wide, top, most)
        column = tag(
            "rect", x=f"{edges[fork]:.1f}", y=0, width=f"{edges[1] - edges[0]:.1f}", height=top + TILE, class_="rl-hit"
        )
        made.append(tag("g", *parts, column, data_fork=fork, data_tip=_facts(tree, fork, table[fork]), class_="rl-column"))
    return made


def _column(
    tree: RolloutTree, fork: int, found: "Counter[tuple[str, int]]", total: int, left: float, wide: float, top: float, most: int
) -> list[Markup]:
    sizes: Counter[str] = Counter()
    for (unit, _), count in found.items():
        sizes[unit] += count
    own = tree.texts[fork]
    ranked = sorted(sizes, key=lambda unit: (unit != own, -sizes[unit], unit))
    shown, rest = ranked[:most], ranked[most:]
    parts, x = [], left
    for tile in [*([unit] for unit in shown), *([rest] if rest else [])]:
        mine = {k: sum(found[unit, k] for unit in tile) for k in range(len(tree.outcomes))}
        size, y = sum(mine.values()), top
        width = wide * size / total
        for k, count in mine.items():
            if count:
                high = TILE * count / size
                parts.append(_tile(x, y, width, high, f"fill:var(--o{k})"))
                y += high
        if tile == [own]:
            parts.append(_tile(x, top, width, TILE, None, class_="rl-own"))
        x += width
    return parts


def _tile(x: float, y: float, width: float, height: float, look: str | None, class_: str = "rl-tile") -> Markup:
    gap = min(0.6, width / 6)
    return tag(
        "rect",
        x=f"{x:.1f}",
        y=f"{y:.1f}",
        width=f"{max(width - gap, 0.3):.1f}",
        height=f"{height:.1f}",
        style=look,
        class_=class_,
    )


def _facts(tree: RolloutTree, fork: int, counts: np.ndarray) -> str:
    total = max(int(counts.sum()), 1)
    lines = [f"{visible(name)}\t{count / total:.1%}\t{count}" for name, count in zip(tree.outcomes, counts, strict=True)]
    return "\n".join([f"before unit {fork + 1}: {visible(tree.texts[fork])[:80]}", *lines])


# ---- the text ---------------------------------------------------------------------------------------------------------


def _text(tree: RolloutTree, table: np.ndarray) -> Markup:
    """The path, unit by unit, underlined with the outcome that most rollouts from before it have."""
    before = [tag("span", tree.prompt, class_="rl-quiet")] if tree.prompt else []
    made = []
    for fork, text in enumerate(tree.texts):
        mostly = int(table[fork].argmax())
        look = f"border-color:var(--o{mostly})" if table[fork].any() else None
        number = tag("sup", fork + 1)
        made.append(
            tag(
                "span",
                number,
                text,
                class_="rl-unit",
                style=look,
                data_fork=fork,
                tabindex=0,
                role="button",
                data_tip=_facts(tree, fork, table[fork]),
            )
        )
    return tag("p", *before, *made, class_="rl-path")


# ---- data, style, script ----------------------------------------------------------------------------------------------


def _data(tree: RolloutTree) -> list[Markup]:
    """Rollouts with every different unit once, and the lenses, compressed."""
    number: dict[str, int] = {}
    flat = [number.setdefault(unit, len(number)) for units in tree.units for unit in units]
    content = {
        "units": list(number),
        "fork": tree.fork,
        "outcome": tree.outcome,
        "lengths": [len(u) for u in tree.units],
        "flat": flat,
    }
    blocks = [_packed(content, "rl-rollout-data")]
    if tree.lenses:
        blocks.append(_packed({str(n): drawn._repr_html_() for n, drawn in tree.lenses.items()}, "rl-rollout-lenses"))
    return blocks


def _packed(content: object, look: str) -> Markup:
    packed = gzip.compress(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(), mtime=0)
    return tag("script", base64.b64encode(packed).decode(), type="text/plain", class_=look)


def rollout_style() -> Markup:
    """The style of this view, besides that of all views."""
    return Markup(f"<style>{asset('rollouts.css')}</style>")


def rollout_script() -> Markup:
    """The script of this view, besides that of all views. Running it twice is safe."""
    return Markup(f"<script>{asset('rollouts.js')}</script>")


def _page(tree: RolloutTree) -> str:
    """A page of its own."""
    theme = tag("button", "light / dark", type="button", class_="rl-theme")
    head = [tag("title", tree.title or repr(tree)), style(), rollout_style()]
    return document(asset("view.js") + asset("rollouts.js"), head, [theme, tree.draw()], "rl-view rl-alone", tree.source)
