"""`Timeline`: one request step by step: prefill, decode, verify, accept or rollback. It draws itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replaylens.engine.pictures import html, svg, terminal
from replaylens.engine.pictures.frames import Frame, Phase, capacity

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True, repr=False)
class Timeline:
    """Frames of one request. Draws itself in a notebook and in a terminal; `still` and `board` are SVG files."""

    frames: tuple[Frame, ...]
    title: str = ""

    @property
    def capacity(self) -> int:
        """The largest number of KV positions in any frame."""
        return capacity(self.frames)

    @property
    def interest(self) -> int:
        """How much of the protocol it shows: most with a verification that accepts some drafts and rejects others."""
        return max(map(_interest, self.frames), default=0)

    def first(self, *phases: Phase) -> list[Frame]:
        """One frame per phase, if there is one; decode, verify and rollback come from the most informative round."""
        best = max(range(len(self.frames)), key=lambda i: (_interest(self.frames[i]), -i), default=0)
        chosen = self.frames[max(0, best - 1) : best + 2]  # decode, verify, result
        found = (next((f for f in (*chosen, *self.frames) if f.phase is phase), None) for phase in phases)
        return [frame for frame in found if frame is not None]

    def still(self, frame: Frame) -> str:
        """One frame as an SVG file."""
        return svg.document([frame], self.capacity)

    def board(self, frames: Sequence[Frame] | None = None) -> str:
        """Several frames as one SVG file, two per row; default: one of each kind of step, but either accept or rollback."""
        found = {frame.phase for frame in self.frames}
        hidden = {Phase.ACCEPT} if Phase.ROLLBACK in found else set()
        return svg.document(list(frames or self.first(*(phase for phase in Phase if phase not in hidden))), self.capacity)

    def save(self, folder: str | Path) -> list[Path]:
        """Write every frame as an SVG file; returns the paths."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        files = [Path(folder) / f"{i:03d}-{frame.phase.value}.svg" for i, frame in enumerate(self.frames)]
        for file, frame in zip(files, self.frames, strict=True):
            file.write_text(self.still(frame))
        return files

    def __str__(self) -> str:
        return "\n".join(line.plain for line in terminal.frame_lines(list(self.frames)))

    __repr__ = __str__

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield from terminal.frame_lines(list(self.frames))

    def _repr_html_(self) -> str:
        return html.fragment(svg.stepper(self.frames, self.title))


def _interest(frame: Frame) -> int:
    """How informative a verification is: best with accepted and rejected drafts, then with accepted ones only."""
    kept = sum(check.accepted for check in frame.checks)
    return 2 * (0 < kept < sum(check.draft is not None for check in frame.checks)) + bool(kept)
