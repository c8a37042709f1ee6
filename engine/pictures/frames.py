"""`Frame`: one step of a request as plain data: its tokens, its KV slots, and the verifier's checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.pictures.palette import ORDINARY, kind_of
from replaylens.engine.pictures.paths import visible


class Phase(Enum):
    """The kind of step; values are headings."""

    PREFILL = "prefill"
    FORK = "fork"
    FORCE = "force"
    DIRECT = "direct"
    ORDINARY = "ordinary"
    DECODE = "decode"
    VERIFY = "verify"
    ACCEPT = "accept"
    ROLLBACK = "rollback"


@dataclass(frozen=True)
class Slot:
    """One generated token in a frame. `number` counts from T0; drafts have a prime."""

    text: str
    state: TokenState
    number: int
    drafted: bool = False
    why: str = ""
    """why nothing is promised of it; empty: it is certified"""
    label: str = ""
    """its name, if it is not a token of the path but a thought"""

    @property
    def visible(self) -> str:
        return visible(self.text)

    @property
    def kind(self) -> str:
        """Its look: that of its state, or that of an ordinary token."""
        return kind_of(self.state, self.why)

    @property
    def name(self) -> str:
        return self.label or f"T{self.number}{'′' if self.drafted else ''}"


@dataclass(frozen=True)
class Fill:
    """Number of positions in the request's KV slots, by kind."""

    prompt: int
    accepted: int = 0
    draft: int = 0
    ordinary: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.accepted + self.ordinary + self.draft

    def by_kind(self) -> list[tuple[str, int]]:
        """Non-empty sections, in order of position."""
        sections = [
            (TokenState.PROMPT.value, self.prompt),
            (TokenState.ACCEPTED.value, self.accepted),
            (ORDINARY, self.ordinary),
            (TokenState.DRAFT.value, self.draft),
        ]
        return [(kind, count) for kind, count in sections if count]


@dataclass(frozen=True)
class Check:
    """The verifier's check of one draft."""

    draft: Slot | None
    """None for a token of the verifier beyond the drafts"""
    verifier: Slot | None
    """None after the first mismatch in traces of earlier versions, which do not hold it"""

    @property
    def void(self) -> bool:
        """Whether it comes after the first mismatch: the verifier's token follows a draft that was rejected."""
        return self.verifier is None or self.verifier.state is TokenState.REJECTED

    @property
    def accepted(self) -> bool:
        """Whether the draft is accepted: the verdict, which texts do not tell, since different tokens may read the same."""
        return self.draft is not None and self.verifier is not None and self.verifier.state is TokenState.ACCEPTED

    @property
    def mark(self) -> str:
        """Equal to the draft, instead of it, in addition to all drafts, or void."""
        return "✗" if self.void else "✓ =" if self.accepted else "✓ ≠" if self.draft is not None else "✓ free"


@dataclass(frozen=True)
class Frame:
    """The state of the request after one step."""

    phase: Phase
    caption: str
    kv: Fill
    generated: tuple[Slot, ...] = ()
    """tokens after the prompt, including the drafts of the followed chain"""
    checks: tuple[Check, ...] = ()
    siblings: tuple[tuple[Slot, ...], ...] = ()
    """other chains drafted at the same position"""
    others: int = 0
    """number of other running requests"""
    ordinary: int = 0
    """how many of them are ordinary: nothing is promised of their tokens"""
    ended: int = 0
    """other requests that have ended since the frame before"""
    waiting: int = 0
    """other requests that were prefilled since the frame before, and have nothing to generate yet"""

    @property
    def beside(self) -> str:
        """The other requests in words, with the reason if there are fewer than on the frame before; empty: there are none."""
        running = f"{self.others or 'no'} other request{'s' * (self.others != 1)} running"
        running += f", {self.ordinary} of them ordinary" if self.ordinary else ""
        ended = f"{self.ended} ha{'s' if self.ended == 1 else 've'} ended" if self.ended else ""
        prompt = "has its prompt and waits" if self.waiting == 1 else "have their prompts and wait"
        waiting = f"{self.waiting} {prompt}" if self.waiting else ""
        return "; ".join(filter(None, (running, ended, waiting))) if self.others or ended or waiting else ""


def capacity(frames: Sequence[Frame]) -> int:
    """The largest number of KV positions in any frame."""
    return max((frame.kv.total for frame in frames), default=0)
