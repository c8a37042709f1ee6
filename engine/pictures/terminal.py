"""Trees and timelines as coloured lines for a terminal. Every run of tokens also has its state's mark and count."""

from collections.abc import Iterator
from itertools import groupby

from rich.text import Text

from replaylens.engine.pictures.frames import Frame
from replaylens.engine.pictures.palette import KINDS, NAMES, ORDINARY
from replaylens.engine.pictures.paths import DrawnPath, Paths, Token, visible


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


def legend() -> Text:
    """The colours and marks of all kinds of tokens."""
    parts: list[tuple[str, str]] = []
    for kind, look in KINDS.items():
        parts += [(f"{look.ascii} ", "dim"), (f" {NAMES.get(kind, kind)} ", look.terminal), ("  ", "")]
    return Text.assemble(*parts)


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
