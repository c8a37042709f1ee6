"""`Timeline`: one request step by step, prefill - decode - verify - rollback. Plain data that draws itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.pictures.tree import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class Phase(Enum):
    """What a frame shows; the values are captions."""

    PREFILL = "prefill"
    FORK = "fork"
    FORCE = "force"
    DIRECT = "direct"
    DECODE = "decode"
    VERIFY = "verify"
    ACCEPT = "accept"
    ROLLBACK = "rollback"


@dataclass(frozen=True)
class Slot:
    """One generated token in a frame. `number` counts from T0; drafts carry a prime."""

    text: str
    state: TokenState
    number: int
    drafted: bool = False

    @property
    def visible(self) -> str:
        return visible(self.text)

    @property
    def name(self) -> str:
        return f"T{self.number}{'′' if self.drafted else ''}"


@dataclass(frozen=True)
class Fill:
    """What the request's KV slots hold, in positions."""

    prompt: int
    accepted: int = 0
    draft: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.accepted + self.draft

    def by_state(self) -> list[tuple[TokenState, int]]:
        """Sections in the order of the positions; empty ones left out."""
        sections = [
            (TokenState.PROMPT, self.prompt),
            (TokenState.ACCEPTED, self.accepted),
            (TokenState.DRAFT, self.draft),
        ]
        return [(state, count) for state, count in sections if count]


@dataclass(frozen=True)
class Check:
    """What the verifier said about one draft. `verifier` is None after the first mismatch: nobody asked."""

    draft: Slot | None
    """None for the token that comes free when every draft stood"""
    verifier: Slot | None

    @property
    def stands(self) -> bool:
        return self.draft is not None and self.verifier is not None and self.draft.text == self.verifier.text


@dataclass(frozen=True)
class Frame:
    """The state of the request after one step."""

    phase: Phase
    caption: str
    kv: Fill
    generated: tuple[Slot, ...] = ()
    """the tokens after the prompt, drafts of the chain that is followed included"""
    checks: tuple[Check, ...] = ()
    siblings: tuple[tuple[Slot, ...], ...] = ()
    """other chains that were drafted at the same place"""
    others: int = 0
    """requests that were running beside it"""


@dataclass(frozen=True)
class Timeline:
    """Frames of one request. Draws itself in a notebook and in a terminal; `still` and `board` are SVG files."""

    frames: tuple[Frame, ...]
    title: str = ""

    @property
    def capacity(self) -> int:
        """The most positions that it ever held."""
        return max((frame.kv.total for frame in self.frames), default=0)

    def first(self, *phases: Phase) -> list[Frame]:
        """For each phase one frame, if there is any: decode, verify and rollback from the round that shows most."""
        best = max(range(len(self.frames)), key=lambda i: (_interest(self.frames[i]), -i), default=0)
        telling = self.frames[max(0, best - 1) : best + 2]  # decode, verify, what came of it
        found = (next((f for f in (*telling, *self.frames) if f.phase is phase), None) for phase in phases)
        return [frame for frame in found if frame is not None]

    def still(self, frame: Frame) -> str:
        """One frame as an SVG file."""
        from replaylens.engine.pictures import svg

        return svg.document([frame], self.capacity)

    def board(self, frames: Sequence[Frame] | None = None) -> str:
        """Several frames as one SVG file, two in a row; default: prefill, decode, verify, and what came of it."""
        from replaylens.engine.pictures import svg

        ends = Phase.ROLLBACK if any(frame.phase is Phase.ROLLBACK for frame in self.frames) else Phase.ACCEPT
        four = self.first(Phase.PREFILL, Phase.DECODE, Phase.VERIFY, ends)
        return svg.document(list(frames or four), self.capacity)

    def save(self, folder: str | Path) -> list[Path]:
        """Write every frame as a still; returns the files."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        files = [Path(folder) / f"{i:03d}-{frame.phase.value}.svg" for i, frame in enumerate(self.frames)]
        for file, frame in zip(files, self.frames, strict=True):
            file.write_text(self.still(frame))
        return files

    def __str__(self) -> str:
        from replaylens.engine.pictures import terminal

        return "\n".join(line.plain for line in terminal.frame_lines(list(self.frames)))

    __repr__ = __str__

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from replaylens.engine.pictures import terminal

        yield from terminal.frame_lines(list(self.frames))

    def _repr_html_(self) -> str:
        from replaylens.engine.pictures import html, svg

        return html.fragment(svg.stepper(self))


def _interest(frame: Frame) -> int:
    """How much a verification has to tell: drafts that stood, and one that did not, after them."""
    stood = sum(check.stands for check in frame.checks)
    return 2 * (0 < stood < sum(check.draft is not None for check in frame.checks)) + bool(stood)
