"""Frames of a timeline as SVG: the KV cylinder on the left, the token strip and the verifier's tokens on the right."""

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.pictures.frames import Check, Fill, Frame, Phase, Slot
from replaylens.engine.pictures.frames import capacity as most_positions
from replaylens.engine.pictures.html import Attributes, join, tag
from replaylens.engine.pictures.palette import ORDINARY, svg_style

WIDTH, HEIGHT = 720, 232
LEFT, RIGHT = 150, 708
"""horizontal range of the token strip"""
BOX = 22
"""height of a token"""
CHARACTER = 7.3
"""width of a character at the tokens' font size"""
CROSS = 0.34
"""how far the strokes of a crossed-out token reach from its corners, of its width and height"""
MAX_SIBLINGS = 2
_MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_SANS = "system-ui,'Segoe UI',Helvetica,Arial,sans-serif"


def document(frames: Sequence[Frame], capacity: int) -> str:
    """An SVG file with one or more frames, two per row. Light or dark follows the viewer's system."""
    columns = min(2, len(frames))
    rows = -(-len(frames) // 2)
    panels = [
        tag("g", draw(frame, capacity), transform=f"translate({i % 2 * WIDTH} {i // 2 * HEIGHT})")
        for i, frame in enumerate(frames)
    ]
    size: Attributes = {"width": columns * WIDTH, "height": rows * HEIGHT, "viewBox": f"0 0 {columns * WIDTH} {rows * HEIGHT}"}
    style = tag("style", Markup(svg_style()))
    page = tag("rect", class_="page", width="100%", height="100%")
    return tag("svg", style, page, *panels, xmlns="http://www.w3.org/2000/svg", role="img", **size)


def stepper(frames: Sequence[Frame], title: str) -> Markup:
    """All frames for a page, whose script shows one at a time, with buttons and a slider."""
    full = most_positions(frames)
    drawn = [tag("div", inline(frame, full), class_="rl-frame", data_phase=frame.phase.value) for frame in frames]
    return tag("div", tag("div", tag("b", title), class_="rl-head"), *drawn, class_="rl-timeline")


def inline(frame: Frame, capacity: int) -> Markup:
    """One frame for a page with the views' style."""
    size: Attributes = {"width": WIDTH, "height": HEIGHT, "viewBox": f"0 0 {WIDTH} {HEIGHT}"}
    return tag("svg", draw(frame, capacity), role="img", aria_label=f"{frame.phase.value}: {frame.caption}", **size)


def draw(frame: Frame, capacity: int) -> Markup:
    """The picture of one frame; `capacity` positions fill the cylinder."""
    return join([_cylinder(frame.kv, capacity), *_heading(frame), *_strip(frame), *_others(frame)])


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
    if frame.phase is Phase.VERIFY:
        yield from _verdicts(frame, places, x, y + BOX + 34)
    for number, chain in enumerate(frame.siblings[:MAX_SIBLINGS]):
        yield from _sibling(chain, places, y + (3 if frame.phase is Phase.VERIFY else 1.6) * BOX + 10 + number * (BOX + 6))


def _verdicts(frame: Frame, places: dict[tuple[int, bool], tuple[float, float]], end: float, y: float) -> Iterable[Markup]:
    """The verifier's token under each draft: ticked up to the first mismatch, crossed out after it."""
    yield _text(LEFT, y + 15, "verifier", 12, "quiet")
    for check in frame.checks:
        said = check.verifier or check.draft
        assert said is not None
        x, wide = places.get((said.number, True), (end, _slot_width(said, frame.checks)))
        if check.verifier is None:
            yield _text(x + wide / 2, y + 16, "✗", 15, "text", "middle")
            continue
        yield from _box(x, y, wide, check.verifier.visible, check.verifier.kind)
        yield _text(x + wide / 2, y - 5, check.mark, 11, "text", "middle")
        yield _text(x + wide / 2, y + BOX + 13, check.verifier.name, 11, "quiet", "middle")


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
    """Strokes from the corners towards the middle, which stays free: a line through it would make ÷ of a colon."""
    along, down = CROSS * width, CROSS * BOX
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
    """Other running requests as bars: grey, and ordinary ones, the last, as ordinary tokens look."""
    bars = min(frame.others, 3)
    grey = min(frame.others - frame.ordinary, bars - bool(frame.ordinary))  # an ordinary one is seen, however many others run
    for i in range(bars):
        place: Attributes = {"x": LEFT + i * 5, "y": HEIGHT - 34 + i * 5, "width": 150, "height": 10, "rx": 2}
        if i < grey:
            yield tag("rect", class_="other", opacity=1 - i * 0.25, **place)
        else:
            yield tag("rect", class_="ordinary edge", stroke_dasharray="1 2", **place)
    if frame.beside:
        yield _text(LEFT + (176 if frame.others else 0), HEIGHT - 19, frame.beside, 12, "quiet")


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
