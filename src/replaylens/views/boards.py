"""Boards of a request: the frames of a timeline as SVG, in a file or on a page.

Each frame is a panel: the KV cylinder on top, then the step in words, then the sequence from top to bottom with the verifier's
tokens beside its drafts, then the other requests. On a board, time runs from left to right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap
from typing import NamedTuple

from markupsafe import Markup

from replaylens.engine.display import short, stamped
from replaylens.engine.memory.tree import TokenState
from replaylens.views.data import Check, Fill, Frame, Phase, Slot
from replaylens.views.data import capacity as most_positions
from replaylens.views.html import ORDINARY, Attributes, join, svg_style, tag

WIDTH = 830
"""of a board at most: the text of a README"""
PANEL, EDGE = 136, 10
"""least width of a panel, and the room around it"""
BROAD, MANY = 172, 80
"""and with so many letters to say"""
TOP, HEAD = 12, 246
"""where the cylinder begins, and the name of the step below it"""
BOX, STEP = 22, 28
"""height of a token, and from one to the next"""
NAME = 34
"""room for a token's name, left of it"""
ACROSS = 26
"""between a draft and the verifier's token beside it: an arrow"""
SAID = 74
"""right of the names of the verifier's tokens: ticks and crosses, and which are accepted"""
LINE = 15
"""of words"""
LONGEST = 12
"""characters of a token; more would make four panels wider than a page"""
MOST_TOKENS = 7
"""of a sequence in one panel, unless more are drafted"""
PROMPT_BAR, BAR = 66, 110
"""width of another request's prompt, and of its whole bar"""
CHARACTER, LETTER, SMALL = 7.3, 6.8, 6.2
"""width of a character of a token, of words, and of names"""
CROSS = 0.34
"""how far the strokes of a crossed-out token reach from its corners, of its width and height"""
CORNER = 6
"""and at most, along its width"""
MAX_SIBLINGS = 2
_MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_SANS = "system-ui,'Segoe UI',Helvetica,Arial,sans-serif"
_CACHE = {
    Phase.VERIFY: "during verify",
    Phase.ACCEPT: "after accepting all",
    Phase.FORCE: "after forcing",
    Phase.DIRECT: "after decode",
    Phase.ORDINARY: "after decode",
}
"""when a cylinder is as it is; for other steps, after them"""


class _Size(NamedTuple):
    """What the panels of one line have in common: lines of words, tokens, and lines about other requests."""

    words: int
    rows: int
    beside: int

    @property
    def tokens(self) -> float:
        """Where the sequence begins."""
        return HEAD + 8 + self.words * LINE + 26

    @property
    def others(self) -> float:
        """Where the other requests begin."""
        return self.tokens + self.rows * STEP + 8

    @property
    def height(self) -> float:
        return self.others + (32 + self.beside * LINE if self.beside else 0) + EDGE


@dataclass(frozen=True)
class _Panel:
    """One frame. `skipped` steps before it are not drawn."""

    frame: Frame
    request: str
    """what is promised of it"""
    skipped: int = 0

    @cached_property
    def shown(self) -> Sequence[Slot]:
        return _window(self.frame.generated)

    @property
    def hidden(self) -> Sequence[Slot]:
        """The tokens before those that are shown."""
        return self.frame.generated[: len(self.frame.generated) - len(self.shown)]

    @property
    def lead(self) -> list[tuple[str, str]]:
        """What stands before the tokens shown, with its look: the prompt, and the number of those that are not."""
        kinds = [slot.kind for slot in self.hidden]
        prompt = (f"prompt {self.frame.kv.prompt}", TokenState.PROMPT.value)
        return [prompt, *([(f"+{len(kinds)}", ORDINARY if ORDINARY in kinds else kinds[-1])] if kinds else [])]

    @property
    def siblings(self) -> Sequence[Sequence[Slot]]:
        return self.frame.siblings[:MAX_SIBLINGS]

    @cached_property
    def columns(self) -> list[float]:
        """Widths: of the sequence, and of each chain that was drafted beside it."""
        own = [*(text for text, _ in self.lead), *(slot.visible for slot in self.shown)]
        return [max(map(_width, own)), *(max(_width(slot.visible) for slot in chain) for chain in self.siblings)]

    @property
    def verifier(self) -> float:
        """Where the verifier's tokens begin."""
        return NAME + sum(self.columns) + 6 * (len(self.columns) - 1) + ACROSS

    @property
    def verified(self) -> float:
        """The width of the verifier's tokens."""
        return max((_width(check.verifier.visible) for check in self.frame.checks if check.verifier), default=0.0)

    @property
    def ticks(self) -> float:
        """Where ticks and crosses stand, right of the verifier's tokens and their names."""
        names = (len(_compared(check)) for check in self.frame.checks)
        return self.verifier + self.verified + 12 + SMALL * max(names, default=0)

    @property
    def rejected(self) -> set[int]:
        """The numbers of the drafts that the verifier rejects."""
        return {check.draft.number for check in self.frame.checks if check.draft and not check.accepted}

    @property
    def width(self) -> float:
        tokens = self.ticks + SAID if self.frame.checks else self.verifier - ACROSS
        wordy = len(self.frame.caption) >= MANY or self.frame.phase is Phase.ACCEPT
        return max(BROAD if wordy else PANEL, tokens) + EDGE

    @property
    def words(self) -> list[str]:
        """What happens, in lines."""
        return wrap(self.frame.caption, self._letters)

    @property
    def beside(self) -> list[str]:
        """The other requests, in lines."""
        return wrap(self.frame.beside, self._letters)

    @property
    def _letters(self) -> int:
        return int((self.width - EDGE) / LETTER)

    def row(self, number: int) -> int:
        """The row of the token with this number: those shown follow each other."""
        slots = [*self.shown, *(slot for check in self.frame.checks for slot in _said(check))]
        return len(self.lead) + number - slots[0].number

    @property
    def rows(self) -> int:
        checks = [self.row(slot.number) + 1 for check in self.frame.checks for slot in _said(check)]
        return max([len(self.lead) + len(self.shown), *checks])


def _said(check: Check) -> list[Slot]:
    return [slot for slot in (check.verifier, check.draft) if slot is not None][:1]


def _compared(check: Check) -> str:
    """The name of the verifier's token, compared with the draft's as long as all drafts before it are accepted."""
    (slot,) = _said(check)
    return f"{slot.name} {check.mark[2:]} {check.draft.name}" if check.draft and not check.void else slot.name


def document(frames: Sequence[Frame], capacity: int, title: str = "", told: Sequence[Frame] = ()) -> str:
    """An SVG file with one or more frames, from left to right, and its identifier. Light or dark follows the viewer's system.

    It is no wider than the text of a README: further frames begin a new line. Title and description tell readers who cannot
    see it what happens. `told`: every step; the board says where it leaves some out.
    """
    drawn, wide, top = list[Markup](), 0.0, 0.0
    for line in _lines(_panels(frames, told)):
        left, size = 0.0, _size(line)
        for panel in line:
            drawn.append(tag("g", _drawn(panel, capacity, size), transform=f"translate({left:g} {top:g})"))
            left += panel.width
        wide, top = max(wide, left), top + size.height
    if rest := _after(frames, told):
        drawn.append(_text(EDGE, top + LINE, f"… {_steps(rest)} after these not drawn", 12, "quiet"))
        top += 2 * LINE
    box: Attributes = {"width": f"{wide:g}", "height": f"{top:g}", "viewBox": f"0 0 {wide:g} {top:g}"}
    steps = ", ".join(frame.phase.value for frame in frames)
    words = tag("title", f"{title or 'A request'}: {steps}"), tag("desc", "\n".join(told_in_words(frames)))
    page = tag("rect", class_="page", width="100%", height="100%")
    box |= {"xmlns": "http://www.w3.org/2000/svg", "role": "img"}
    return stamped(tag("svg", *words, tag("style", Markup(svg_style())), page, *drawn, **box).encode()).decode()


def stepper(frames: Sequence[Frame], title: str) -> Markup:
    """All frames for a page, whose script shows one at a time, with buttons and a slider."""
    full = most_positions(frames)
    panels = _panels(frames, ())
    size, wide = _size(panels), max((panel.width for panel in panels), default=0.0)
    phases, pictures = [frame.phase.value for frame in frames], [_inline(panel, full, size, wide) for panel in panels]
    drawn = [tag("div", each, class_="rl-frame", data_phase=name) for each, name in zip(pictures, phases, strict=True)]
    return tag("div", tag("div", tag("b", title), class_="rl-head"), *drawn, class_="rl-timeline")


def _inline(panel: _Panel, capacity: int, size: _Size, wide: float) -> Markup:
    """One frame for a page with the views' style. All of a timeline have one size, so that the page stands still."""
    box: Attributes = {"width": f"{wide:g}", "height": f"{size.height:g}", "viewBox": f"0 0 {wide:g} {size.height:g}"}
    (said,) = told_in_words([panel.frame])
    return tag("svg", _drawn(panel, capacity, size), role="img", aria_label=said, **box)


def told_in_words(frames: Sequence[Frame]) -> list[str]:
    """One line per frame: the step, the tokens with their states, the verdicts, the cache, the other requests."""
    found = []
    for frame in frames:
        rejected = [check.draft for check in frame.checks if check.draft and not check.accepted]
        states = [f"{slot.kind}, rejected" if slot in rejected else slot.kind for slot in frame.generated]
        tokens = ", ".join(f"{s.name} {s.visible.strip()} ({state})" for s, state in zip(frame.generated, states, strict=True))
        checks = [(slot, "rejected" if check.void else "accepted") for check in frame.checks for slot in _said(check)]
        verifier = ", ".join(f"{slot.name} {slot.visible.strip()} ({verdict})" for slot, verdict in checks)
        parts = [frame.caption, f"prompt of {frame.kv.prompt} tokens", tokens, verifier and f"verifier: {verifier}"]
        parts += [f"{frame.kv.total} KV slots in use", frame.beside]
        found.append(f"{frame.phase.value.capitalize()}: {'; '.join(filter(None, parts))}")
    return found


def _panels(frames: Sequence[Frame], told: Sequence[Frame]) -> list[_Panel]:
    """Frames with the number of steps of `told` that are left out before each."""
    promised = all(not slot.why for frame in told or frames for slot in frame.generated)
    request = "deterministic request" if promised else "request, not certified"
    places = {id(frame): number for number, frame in enumerate(told)}
    numbers = [places.get(id(frame)) for frame in frames]
    found, last = list[_Panel](), -1
    for frame, number in zip(frames, numbers, strict=True):
        found.append(_Panel(frame, request, 0 if number is None else max(0, number - last - 1)))
        last = last if number is None else max(last, number)
    return found


def _after(frames: Sequence[Frame], told: Sequence[Frame]) -> int:
    """The number of steps of `told` after the last of the frames."""
    drawn = set(map(id, frames))
    last = max((number for number, frame in enumerate(told) if id(frame) in drawn), default=None)
    return 0 if last is None else len(told) - 1 - last


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _lines(panels: Sequence[_Panel]) -> list[list[_Panel]]:
    """Panels in lines that fit on a page."""
    lines: list[list[_Panel]] = []
    for panel in panels:
        if not lines or sum(each.width for each in lines[-1]) + panel.width > WIDTH:
            lines.append([])
        lines[-1].append(panel)
    return lines


def _size(panels: Sequence[_Panel]) -> _Size:
    each = [(len(panel.words), panel.rows, len(panel.beside)) for panel in panels]
    return _Size(*map(max, zip(*each, strict=True))) if each else _Size(0, 0, 0)


def _drawn(panel: _Panel, capacity: int, size: _Size) -> Markup:
    """The picture of one frame; `capacity` positions fill the cylinder."""
    phase = panel.frame.phase
    when = f"KV cache {_CACHE.get(phase, f'after {phase.value}')}"
    cache = tag("g", _cylinder(panel.frame.kv, capacity), transform=f"translate(-4 {TOP})")
    return join([_text(EDGE, TOP + 4, when, 11, "quiet"), cache, *_heading(panel), *_strip(panel, size), *_others(panel, size)])


def _heading(panel: _Panel) -> Iterable[Markup]:
    if panel.skipped:
        yield _text(EDGE, HEAD - 17, f"… {_steps(panel.skipped)} not drawn", 11, "quiet")
    yield _text(EDGE, HEAD + 4, panel.frame.phase.value.capitalize(), size=17, weight=600)
    for number, line in enumerate(panel.words):
        yield _text(EDGE, HEAD + 8 + (number + 1) * LINE, line, size=12, look="quiet")


# ---- the cylinder ----------------------------------------------------------------------------------------------------


def cylinder(fill: Fill, capacity: int, unit: str = "pages") -> Markup:
    """The cylinder alone, for a page with the views' style."""
    said = f"{fill.total} of {capacity} {unit} in use"
    box: Attributes = {"width": 140, "height": 206, "viewBox": "0 0 140 206"}
    return tag("svg", _cylinder(fill, capacity, unit), role="img", aria_label=said, **box)


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


def _strip(panel: _Panel, size: _Size) -> Iterable[Markup]:
    """The sequence from top to bottom, chains drafted beside it, and the verifier's tokens."""
    top, wide = size.tokens, panel.columns[0]
    if panel.frame.phase in (Phase.PREFILL, Phase.FORK):
        yield _text(EDGE, top - 6, panel.request, 11, "quiet")
    for row, (text, kind) in enumerate(panel.lead):
        yield from _box(NAME, top + row * STEP, wide, text, kind)
    for row, slot in enumerate(panel.shown, len(panel.lead)):
        yield from _box(NAME, top + row * STEP, wide, slot.visible, slot.kind, slot.drafted and slot.number in panel.rejected)
        yield _text(NAME - 5, top + row * STEP + 15, slot.name, 11, "quiet", "end")
    left = NAME + wide + 6
    for chain, broad in zip(panel.siblings, panel.columns[1:], strict=True):
        for slot in chain:
            yield from _box(left, top + panel.row(slot.number) * STEP, broad, slot.visible, slot.kind)
        left += broad + 6
    yield from _verdicts(panel, top)


def _verdicts(panel: _Panel, top: float) -> Iterable[Markup]:
    """The verifier's tokens, each beside its draft: ticked up to the first mismatch, crossed out after it."""
    x, wide = panel.verifier, panel.verified
    rows: dict[bool, list[int]] = {False: [], True: []}
    for check in panel.frame.checks:
        (slot,) = _said(check)
        row = panel.row(slot.number)
        y = top + row * STEP
        rows[check.void].append(row)
        if check.draft is not None:
            yield _arrow(x - ACROSS + 3, x - 3, y + BOX / 2)
        if check.verifier is not None:
            yield from _box(x, y, wide, slot.visible, slot.kind)
            yield _text(x + wide + 5, y + 15, _compared(check), 11, "quiet")
        yield _text(panel.ticks, y + 16, check.mark[0], 13, "text", "middle")
    if panel.frame.checks:
        yield _text(x, top + min(rows[False] + rows[True]) * STEP - 6, "verifier", 11, "quiet")
    for void, word in ((False, "accepted"), (True, "rejected")):
        if rows[void]:
            yield from _bracket(panel.ticks + 10, top + min(rows[void]) * STEP, top + max(rows[void]) * STEP + BOX, word)


def _arrow(start: float, end: float, y: float) -> Markup:
    """From a draft to the verifier's token."""
    d = f"M{start:.1f} {y:.1f}H{end:.1f}M{end - 4:.1f} {y - 3:.1f}L{end:.1f} {y:.1f}L{end - 4:.1f} {y + 3:.1f}"
    return tag("path", class_="line arrow", d=d, fill="none", stroke_width=1.3)


def _bracket(x: float, start: float, end: float, word: str) -> Iterable[Markup]:
    """Tokens of one verdict, which stands right of them."""
    yield tag("path", class_="line arrow", d=f"M{x:.1f} {start:.1f}h4V{end:.1f}h-4", fill="none", stroke_width=1.3)
    for line, text in enumerate((word, "tokens")):
        yield _text(x + 8, (start + end) / 2 - 2 + 13 * line, text, 11, "text")


def _window(slots: Sequence[Slot]) -> Sequence[Slot]:
    """The last tokens, and all drafts."""
    most = max(MOST_TOKENS, sum(slot.drafted for slot in slots) + 1)
    return slots[max(0, len(slots) - most) :]


def _width(text: str) -> float:
    return max(26.0, min(len(text), LONGEST) * CHARACTER + 10)


def _box(x: float, y: float, width: float, text: str, kind: str, crossed: bool = False) -> Iterable[Markup]:
    """One token. A rejected one is crossed out, as is a draft beside the verdict that rejects it."""
    shown = short(text, LONGEST)
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
    if crossed or kind == TokenState.REJECTED.value:
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


def _others(panel: _Panel, size: _Size) -> Iterable[Markup]:
    """Other running requests as bars: grey, and ordinary ones, the last, as ordinary tokens look.

    Their prompts are plain. What they decode during this request's drafts is checkered until a round has ended, then plain.
    """
    frame, top = panel.frame, size.others
    bars = min(frame.others, 3)
    grey = min(frame.others - frame.ordinary, bars - bool(frame.ordinary))  # an ordinary one is seen, however many others run
    for i in range(bars):
        x, y = EDGE + i * 5, top + i * 5
        wide = PROMPT_BAR if frame.phase in (Phase.PREFILL, Phase.FORK) else BAR
        place: Attributes = {"x": x, "y": f"{y:g}", "width": wide, "height": 10, "rx": 2}
        if i < grey:
            yield tag("rect", class_="other", opacity=1 - i * 0.25, **place)
        else:
            yield tag("rect", class_="ordinary edge", stroke_dasharray="1 2", **place)
        if frame.phase in (Phase.DECODE, Phase.VERIFY):
            yield tag("path", class_="pending", d=f"M{x + PROMPT_BAR} {y:g}h{BAR - PROMPT_BAR}v10h{PROMPT_BAR - BAR}z")
            yield tag("path", class_="check beside", d=_checks(x + PROMPT_BAR, y, BAR - PROMPT_BAR, 10))
    for number, line in enumerate(panel.beside):
        yield _text(EDGE, top + 36 + number * LINE, line, 12, "quiet")


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
