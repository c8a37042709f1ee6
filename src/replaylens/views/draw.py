"""Drawers of trees and timelines: layout, SVG, terminal, HTML."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from markupsafe import Markup
from rich.text import Text

from replaylens.engine.display import stamped, visible
from replaylens.engine.memory.tree import TokenState
from replaylens.views.data import Check, DrawnPath, Fill, Frame, LensLayer, Paths, Phase, Slot, Token
from replaylens.views.data import capacity as most_positions
from replaylens.views.html import KINDS, NAMES, ORDINARY, Attributes, join, svg_style, tag

# ---- layout ----------------------------------------------------------------------------------------------------------
# Layout of a tree: the row of each branch. Columns are positions, so branches can share a row.


@dataclass(frozen=True)
class Placement:
    """The place of a branch: its tokens are in `row`, from its fork position on; its line starts at `parent_row`."""

    path: DrawnPath
    row: int
    parent_row: int


def arrange(tree: Paths) -> list[Placement]:
    """Put the trunk in row 0, and every branch below its parent in the first row with room for it and its line.

    A branch takes the columns from the one before its fork, where its line is, to its last token.
    """
    taken: dict[int, list[tuple[int, int]]] = {0: [(0, tree.trunk.end)]}  # half-open columns by row
    places = [Placement(tree.trunk, 0, 0)]
    stack = [(child, 0) for child in reversed(tree.children[tree.trunk.branch])]
    while stack:
        path, parent_row = stack.pop()
        line, row = max(0, path.fork_position - 1), parent_row + 1
        while _hits(taken.get(row, []), line, path.end + 1):  # one empty column after it
            row += 1
        for between in range(parent_row + 1, row):
            taken.setdefault(between, []).append((line, line + 1))
        taken.setdefault(row, []).append((line, path.end + 1))
        places.append(Placement(path, row, parent_row))
        stack += [(child, row) for child in reversed(tree.children[path.branch])]
    return places


def _hits(intervals: list[tuple[int, int]], start: int, end: int) -> bool:
    return any(start < other_end and other_start < end for other_start, other_end in intervals)


# ---- svg -------------------------------------------------------------------------------------------------------------
# Frames of a timeline as SVG: the KV cylinder on the left, the token strip and the verifier's tokens on the right.

WIDTH, HEIGHT = 720, 232
LEFT, RIGHT = 150, 708
"""horizontal range of the token strip"""
BOX = 22
"""height of a token"""
PROMPT_BAR = 90
"""width of another request's prompt, of the 150 of its bar"""
CHARACTER = 7.3
"""width of a character at the tokens' font size"""
CROSS = 0.34
"""how far the strokes of a crossed-out token reach from its corners, of its width and height"""
CORNER = 6
"""and at most, along its width"""
GAP = 50
"""between a draft and the verifier's token below it: the draft's name, an arrow, the verdict"""
MAX_SIBLINGS = 2
_MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_SANS = "system-ui,'Segoe UI',Helvetica,Arial,sans-serif"


def document(frames: Sequence[Frame], capacity: int) -> str:
    """An SVG file with one or more frames, one below the other, and its identifier. Light or dark follows the viewer's system.

    It is no wider than the text of a README, where two frames side by side would be too small to read.
    """
    tops = list(accumulate(map(_height, frames), initial=0))
    panels = [
        tag("g", draw_frame(frame, capacity), transform=f"translate(0 {top})") for frame, top in zip(frames, tops, strict=False)
    ]
    size: Attributes = {"width": WIDTH, "height": tops[-1], "viewBox": f"0 0 {WIDTH} {tops[-1]}"}
    style = tag("style", Markup(svg_style()))
    page = tag("rect", class_="page", width="100%", height="100%")
    drawn = tag("svg", style, page, *panels, xmlns="http://www.w3.org/2000/svg", role="img", **size)
    return stamped(drawn.encode()).decode()


def stepper(frames: Sequence[Frame], title: str) -> Markup:
    """All frames for a page, whose script shows one at a time, with buttons and a slider."""
    full = most_positions(frames)
    drawn = [tag("div", inline(frame, full), class_="rl-frame", data_phase=frame.phase.value) for frame in frames]
    return tag("div", tag("div", tag("b", title), class_="rl-head"), *drawn, class_="rl-timeline")


def inline(frame: Frame, capacity: int) -> Markup:
    """One frame for a page with the views' style."""
    size: Attributes = {"width": WIDTH, "height": _height(frame), "viewBox": f"0 0 {WIDTH} {_height(frame)}"}
    return tag("svg", draw_frame(frame, capacity), role="img", aria_label=f"{frame.phase.value}: {frame.caption}", **size)


def draw_frame(frame: Frame, capacity: int) -> Markup:
    """The picture of one frame; `capacity` positions fill the cylinder."""
    return join([_cylinder(frame.kv, capacity), *_heading(frame), *_strip(frame), *_others(frame)])


def _height(frame: Frame) -> int:
    """Chains other than the verified one need their own rows below the verifier's tokens."""
    return HEIGHT + (2 * BOX + 6 if frame.phase is Phase.VERIFY and frame.siblings else 0)


def _heading(frame: Frame) -> Iterable[Markup]:
    yield _text(LEFT, 26, frame.phase.value.capitalize(), size=17, weight=600)
    yield _text(LEFT, 45, frame.caption, size=12.5, look="quiet")


# ---- the cylinder ----------------------------------------------------------------------------------------------------


def cylinder(fill: Fill, capacity: int, unit: str = "pages") -> Markup:
    """The cylinder alone, for a page with the views' style."""
    return tag("svg", _cylinder(fill, capacity, unit), role="img", width=140, height=206, viewBox="0 0 140 206")


def _cylinder(fill: Fill, capacity: int, unit: str = "KV slots") -> Markup:
    """The prompt on top, then accepted tokens, then drafts; the dashed outline is the capacity."""
    x, top, width, full, bulge = 28, 26, 84, 150, 9
    scale = full / max(capacity, 1)
    edges, bottom = [], float(top)
    for kind, count in fill.by_kind():
        edges.append((kind, bottom, bottom + max(count * scale, 3)))
        bottom = edges[-1][2]
    outline = f"M{x} {top}V{top + full}A{width / 2} {bulge} 0 0 0 {x + width} {top + full}V{top}"
    parts = [tag("path", d=outline, fill="none", class_="line", stroke_dasharray="3 3")]
    for kind, start, end in reversed(edges):
        arc = f"{width / 2} {bulge} 0 0"
        d = f"M{x} {start:.1f}V{end:.1f}A{arc} 0 {x + width} {end:.1f}V{start:.1f}A{arc} 1 {x} {start:.1f}Z"
        parts.append(tag("path", d=d, class_=f"{kind} edge", stroke_width=1.2))
    parts.append(
        tag("ellipse", cx=x + width / 2, cy=top, rx=width / 2, ry=bulge, class_=f"{edges[0][0]} edge", stroke_width=1.2)
        if edges
        else tag("ellipse", cx=x + width / 2, cy=top, rx=width / 2, ry=bulge, fill="none", class_="line")
    )
    beside = float(top)  # where the last number beside the cylinder stands
    for (_, count), (_, start, end) in zip(fill.by_kind(), edges, strict=True):
        middle = (start + end) / 2 + bulge + 4
        if end - start >= 12:
            parts.append(_text(x + width / 2, middle, count, size=11, look="ink", anchor="middle"))
        else:  # too thin to hold its number
            beside = max(middle - bulge, beside + 12)
            parts.append(_text(x + width + 4, beside, count, size=11, look="text"))
    parts.append(_text(x + width / 2, top + full + 26, f"{fill.total} of {capacity} {unit}", 12, "quiet", "middle"))
    return tag("g", *parts)


# ---- the tokens ------------------------------------------------------------------------------------------------------


def _strip(frame: Frame) -> Iterable[Markup]:
    shown, hidden = _window(frame.generated)
    x, y = float(LEFT), 62.0
    prompt = f"prompt {frame.kv.prompt}"
    yield from _box(x, y, _width(prompt), prompt, TokenState.PROMPT.value)
    x += _width(prompt) + 4
    if hidden:
        kinds = [slot.kind for slot in frame.generated[:hidden]]
        yield from _box(x, y, _width(f"+{hidden}"), f"+{hidden}", ORDINARY if ORDINARY in kinds else kinds[-1])
        x += _width(f"+{hidden}") + 4
    places: dict[tuple[int, bool], tuple[float, float]] = {}
    for slot in shown:
        wide = _slot_width(slot, frame.checks)
        places[slot.number, slot.drafted] = (x, wide)
        yield from _box(x, y, wide, slot.visible, slot.kind)
        yield _text(x + wide / 2, y + BOX + 13, slot.name, 11, "quiet", "middle")
        x += wide + 4
    below = y + 1.6 * BOX + 10
    if frame.phase is Phase.VERIFY:
        yield from _verdicts(frame, places, x, y + BOX + GAP)
        below = y + 2 * BOX + GAP + 22
    for number, chain in enumerate(frame.siblings[:MAX_SIBLINGS]):
        yield from _sibling(chain, places, below + number * (BOX + 6))


def _verdicts(frame: Frame, places: dict[tuple[int, bool], tuple[float, float]], end: float, y: float) -> Iterable[Markup]:
    """The verifier's token under each draft, with an arrow: ticked up to the first mismatch, crossed out after it."""
    yield _text(LEFT, y + 15, "verifier", 12, "quiet")
    for check in frame.checks:
        said = check.verifier or check.draft
        assert said is not None
        x, wide = places.get((said.number, True), (end, _slot_width(said, frame.checks)))
        if (said.number, True) in places:
            yield _arrow(x + wide / 2, y - GAP + 17, y - 18)
        if check.verifier is None:
            yield _text(x + wide / 2, y + 16, "✗", 15, "text", "middle")
            continue
        yield from _box(x, y, wide, check.verifier.visible, check.verifier.kind)
        yield _text(x + wide / 2, y - 5, check.mark, 11, "text", "middle")
        yield _text(x + wide / 2, y + BOX + 13, check.verifier.name, 11, "quiet", "middle")


def _arrow(x: float, start: float, end: float) -> Markup:
    """From a draft down to the verifier's token."""
    d = f"M{x:.1f} {start:.1f}V{end:.1f}M{x - 3:.1f} {end - 4:.1f}L{x:.1f} {end:.1f}L{x + 3:.1f} {end - 4:.1f}"
    return tag("path", class_="line arrow", d=d, fill="none", stroke_width=1.3)


def _sibling(chain: Sequence[Slot], places: dict[tuple[int, bool], tuple[float, float]], y: float) -> Iterable[Markup]:
    x = places.get((chain[0].number, True), (LEFT, 0.0))[0]
    for slot in chain:
        wide = _width(slot.visible)
        yield from _box(x, y, wide, slot.visible, slot.kind)
        x += wide + 4


def _window(slots: Sequence[Slot]) -> tuple[Sequence[Slot], int]:
    """The last tokens that fit, and the number of tokens before them."""
    room, count = RIGHT - LEFT - 150.0, 0
    for slot in reversed(slots):
        room -= _width(slot.visible) + 4
        if room < 0:
            break
        count += 1
    count = max(count, 1)
    return slots[len(slots) - count :] if slots else [], max(0, len(slots) - count)


def _slot_width(slot: Slot, checks: Sequence[Check]) -> float:
    """Wide enough for the token and for the verifier's token below it."""
    own = [check for check in checks if check.draft is not None and slot.drafted and check.draft.number == slot.number]
    texts = [slot.visible, *(check.verifier.visible for check in own if check.verifier)]
    return max(map(_width, texts))


def _width(text: str) -> float:
    return max(26.0, min(len(text), 24) * CHARACTER + 12)


def _box(x: float, y: float, width: float, text: str, kind: str) -> Iterable[Markup]:
    shown = text if len(text) <= 24 else text[:23] + "…"
    dash = {TokenState.DRAFT.value: "3 2", ORDINARY: "1 2"}.get(kind)
    shape: Attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": BOX, "rx": 3}
    yield tag("rect", class_=f"{kind} edge", stroke_dasharray=dash, stroke_width=1, **shape)
    if kind == TokenState.PENDING.value:
        yield tag("path", class_="check", d=_checks(x + 1, y + 1, width - 2, BOX - 2))
        plate = len(shown) * CHARACTER + 4
        yield tag(
            "rect",
            class_="pending",
            x=f"{x + (width - plate) / 2:.1f}",
            y=f"{y + 4:.1f}",
            width=f"{plate:.1f}",
            height=14,
            opacity=0.8,
        )
    yield _text(x + width / 2, y + 15, shown, 12, "ink", "middle", mono=True)
    if kind == TokenState.REJECTED.value:
        yield tag("path", class_="cross", d=_cross(x, y, width))


def _cross(x: float, y: float, width: float) -> str:
    """Strokes from the corners towards the middle, which stays free: a line through it would make ÷ of a colon.

    In a wide box they end before its word begins.
    """
    along, down = min(CROSS * width, CORNER), CROSS * BOX
    left = f"M{x:.1f} {y:.1f}l{along:.1f} {down:.1f}M{x:.1f} {y + BOX:.1f}l{along:.1f} {-down:.1f}"
    return left + f"M{x + width:.1f} {y:.1f}l{-along:.1f} {down:.1f}M{x + width:.1f} {y + BOX:.1f}l{-along:.1f} {-down:.1f}"


def _checks(x: float, y: float, width: float, height: float, size: float = 5.0) -> str:
    """The darker squares of a checkered pattern."""
    squares = []
    for row in range(int(height / size) + 1):
        for column in range(row % 2, int(width / size) + 1, 2):
            wide, high = min(size, width - column * size), min(size, height - row * size)
            if wide > 0 and high > 0:
                squares.append(f"M{x + column * size:.1f} {y + row * size:.1f}h{wide:.1f}v{high:.1f}h{-wide:.1f}z")
    return "".join(squares)


def _others(frame: Frame) -> Iterable[Markup]:
    """Other running requests as bars: grey, and ordinary ones, the last, as ordinary tokens look.

    Their prompts are plain. What they decode during this request's drafts is checkered until a round has ended, then plain.
    """
    bars, bottom = min(frame.others, 3), _height(frame)
    grey = min(frame.others - frame.ordinary, bars - bool(frame.ordinary))  # an ordinary one is seen, however many others run
    for i in range(bars):
        x, y = LEFT + i * 5, bottom - 34 + i * 5
        wide = PROMPT_BAR if frame.phase in (Phase.PREFILL, Phase.FORK) else 150
        place: Attributes = {"x": x, "y": y, "width": wide, "height": 10, "rx": 2}
        if i < grey:
            yield tag("rect", class_="other", opacity=1 - i * 0.25, **place)
        else:
            yield tag("rect", class_="ordinary edge", stroke_dasharray="1 2", **place)
        if frame.phase in (Phase.DECODE, Phase.VERIFY):
            yield tag("path", class_="pending", d=f"M{x + PROMPT_BAR} {y}h{150 - PROMPT_BAR}v10h{PROMPT_BAR - 150}z")
            yield tag("path", class_="check beside", d=_checks(x + PROMPT_BAR, y, 150 - PROMPT_BAR, 10))
    if frame.beside:
        yield _text(LEFT + (176 if frame.others else 0), bottom - 19, frame.beside, 12, "quiet")


def _text(
    x: float,
    y: float,
    text: str | int,
    size: float = 12,
    look: str = "text",
    anchor: str | None = None,
    weight: int | None = None,
    mono: bool = False,
) -> Markup:
    font: Attributes = {
        "font_family": _MONO if mono else _SANS,
        "font_size": size,
        "font_weight": weight,
        "text_anchor": anchor,
    }
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=look, style="white-space:pre", **font)


# ---- terminal --------------------------------------------------------------------------------------------------------
# Trees and timelines as coloured lines for a terminal. Every run of tokens also has its state's mark and count.


def tree_lines(tree: Paths) -> Iterator[Text]:
    """One line per branch, below its parent: number, fork position, status, and tokens in runs of one state."""
    for path, depth in tree.walk():
        guide = "   " * (depth - 1) + "└─ " if depth else ""
        yield Text.assemble((guide, "dim"), _head(path), *_runs(path.tokens))
    if tree.left_out:
        yield Text(f"and {tree.left_out} more branches", style="dim")


def _head(path: DrawnPath) -> tuple[str, str]:
    left = "" if path.parent is None else f" @{path.fork_position}"
    return f"#{path.branch}{left} {path.status}", "bold"


def _runs(tokens: tuple[Token, ...]) -> Iterator[Text | tuple[str, str]]:
    for (kind, standing), run in groupby(tokens, key=lambda token: (token.kind, token.standing)):
        some = list(run)
        yield f" {KINDS[kind].ascii}{len(some)} ", "dim"
        if kind == ORDINARY:
            yield f"[{standing}]", "dim"
        yield Text("".join(token.visible + _thought(token) for token in some), style=KINDS[kind].terminal)


def _thought(token: Token) -> str:
    return f"{{Z {' '.join(map(visible, token.thought))}}}" if token.thought else ""


def frame_lines(frames: list[Frame], width: int = 24) -> Iterator[Text]:
    """One line per frame: the phase, the cache as a bar, the tokens, the caption."""
    most = max((frame.kv.total for frame in frames), default=1) or 1
    for number, frame in enumerate(frames, 1):
        line = Text.assemble((f"{number:>3} ", "dim"), (f"{frame.phase.value:<9}", "bold"))
        filled = 0
        for kind, count in frame.kv.by_kind():
            cells = round((filled + count) * width / most) - round(filled * width / most)
            line.append("█" * cells, KINDS[kind].colour)
            filled += count
        line.append("░" * (width - round(filled * width / most)), "dim")
        line.append(f" {frame.kv.total:>4}  ")
        for slot in frame.generated[-12:]:
            line.append(slot.visible, KINDS[slot.kind].terminal)
        for check in frame.checks:
            if check.verifier is not None and not check.accepted:
                line.append(f" {check.mark}{check.verifier.visible}", KINDS[check.verifier.kind].terminal)
        beside = f"; {frame.beside}" if frame.beside else ""
        line.append(f"  {frame.caption}{beside}", "dim")
        yield line


# ---- tree html -------------------------------------------------------------------------------------------------------
# A `Tree` as HTML: the shared prefix as flowing text, then grids with one column per position, as wide as a page.

MAX_WIDTH = 1000
"""pixels of a grid; a longer path goes on in a further one"""
_CHARACTER, _EDGES = 7.3, 15
"""width of a character, and of the edges of a token with the gap after it"""


def draw_tree(tree: Paths) -> Markup:
    """The tree with its title and legend."""
    stem = _stem_length(tree)
    parts = [tag("div", tag("b", tree.title), legend_html(tree.kinds), class_="rl-head")]
    if before := [chip(token, tree.trunk) for token in tree.trunk.tokens if token.position < stem]:
        parts.append(tag("div", *before, class_="rl-stem"))
    places = arrange(tree)
    grids = [tag("div", *_grid(places, *band), class_="rl-grid") for band in _bands(places, stem)]
    parts += [tag("div", grid, class_="rl-scroll") for grid in grids]
    if tree.left_out:
        parts.append(tag("p", f"and {tree.left_out} more branches", class_="rl-quiet"))
    return tag("div", *parts, class_="rl-tree")


def _stem_length(tree: Paths) -> int:
    """Number of first tokens drawn as flowing text: prompt tokens before every fork, except the last, which is in the grid."""
    prompt = sum(token.state is TokenState.PROMPT for token in tree.trunk.tokens)
    return max(0, min([prompt, *(path.fork_position for path in tree.paths[1:])]) - 1)


def _bands(places: Sequence[Placement], stem: int) -> list[tuple[int, int]]:
    """Positions [stem, end) in pieces that fit on a page. A fork stays next to the token before it, where its line begins."""
    wide: dict[int, float] = {}
    for token in (token for place in places for token in place.path.tokens if token.position >= stem):
        wide[token.position] = max(wide.get(token.position, 0.0), len(token.visible) * _CHARACTER + _EDGES)
    forks = {place.path.fork_position for place in places if place.path.parent is not None}
    end, bands, start = max(wide, default=stem) + 1, [], stem
    while start < end:
        room, stop = float(MAX_WIDTH), start
        while stop < end and (stop == start or room >= wide.get(stop, 0.0)):
            room, stop = room - wide.get(stop, 0.0), stop + 1
        last = stop
        while stop < end and stop in forks and stop - 1 > start:
            stop -= 1
        stop = last if stop in forks and stop < end else stop  # forks at every position: one is cut off from its line
        bands.append((start, stop))
        start = stop
    return bands


def _grid(places: Sequence[Placement], start: int, end: int) -> Iterator[Markup]:
    """The tokens at positions [start, end). Rows without any are left out."""
    here = {place.row for place in places if any(start <= token.position < end for token in place.path.tokens)}
    here |= {place.row for place in places if not place.path.tokens and start <= place.path.fork_position <= end}
    rows = {row: number for number, row in enumerate(sorted(here))}
    for place in (place for place in places if place.row in rows):
        column = place.path.fork_position - start
        if place.path.parent is not None and 0 <= column < end - start + (not place.path.tokens) and place.parent_row in rows:
            line = f"grid-row:{rows[place.parent_row] + 2}/{rows[place.row] + 2};grid-column:{max(1, column)}"
            yield tag("i", class_="rl-line", style=line)
        for token in place.path.tokens:
            if start <= token.position < end:
                yield chip(token, place.path, f"grid-row:{rows[place.row] + 1};grid-column:{token.position - start + 1}")


def chip(token: Token, path: DrawnPath, place: str | None = None) -> Markup:
    """One token in its colour. Its title lists facts, one per line, with tabs between columns."""
    thought = tag("small", f"Z {' '.join(map(visible, token.thought))}", class_="rl-said") if token.thought else ""
    return tag(
        "span",
        token.visible,
        thought,
        class_=f"rl-token rl-{token.kind}",
        style=place,
        title="\n".join(_facts(token, path)),
        tabindex=0,
    )


def _facts(token: Token, path: DrawnPath) -> Iterator[str]:
    yield f"{KINDS[token.kind].mark} {visible(token.text)}"
    yield f"position\t{token.position}"
    yield f"state\t{token.standing}, branch {path.branch}"
    if token.thought:
        yield f"thought\t{' '.join(map(visible, token.thought))}"
    if token.logprob is not None:
        yield f"log-prob\t{token.logprob:.3f}"
    if token.entropy is not None:
        yield f"entropy\t{token.entropy:.3f} nats"
    yield from (f"{name}\t{visible(value)}" for name, value in token.labels)
    if token.lens:
        yield "next token, layer by layer"
        yield from map(_layer, token.lens)


def _layer(layer: LensLayer) -> str:
    return "\t".join([layer.site, *(f"{visible(guess.token)} {guess.probability:.2f}" for guess in layer.guesses)])


def legend_html(kinds: Iterable[str]) -> Markup:
    """The colours and marks of kinds of tokens."""
    chips = (tag("span", f"{KINDS[kind].mark} {NAMES.get(kind, kind)}", class_=f"rl-token rl-{kind}") for kind in kinds)
    return tag("span", join(chips), class_="rl-legend")
