"""Outcomes as colours and curves: what rollouts from each fork of a path end in."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from replaylens.engine.pictures.html import join, tag
from replaylens.engine.pictures.paths import visible

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
