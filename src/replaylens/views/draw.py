"""Trees as HTML, and trees and timelines for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup
from rich.text import Text

from replaylens.engine.display import visible
from replaylens.engine.memory.tree import TokenState
from replaylens.views.data import DrawnPath, Frame, LensLayer, Paths, Token
from replaylens.views.html import KINDS, NAMES, ORDINARY, join, tag

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
