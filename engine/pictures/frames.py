"""`Frame`: one step of a request as plain data: its tokens, its KV slots, and the verifier's checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.pictures.paths import visible


class Phase(Enum):
    """The kind of step; values are headings."""

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
    """One generated token in a frame. `number` counts from T0; drafts have a prime."""

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
    """Number of positions in the request's KV slots, by kind."""

    prompt: int
    accepted: int = 0
    draft: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.accepted + self.draft

    def by_state(self) -> list[tuple[TokenState, int]]:
        """Non-empty sections, in order of position."""
        sections = [
            (TokenState.PROMPT, self.prompt),
            (TokenState.ACCEPTED, self.accepted),
            (TokenState.DRAFT, self.draft),
        ]
        return [(state, count) for state, count in sections if count]


@dataclass(frozen=True)
class Check:
    """The verifier's check of one draft. `verifier` is None after the first mismatch."""

    draft: Slot | None
    """None for the extra token that the verifier adds when it accepts every draft"""
    verifier: Slot | None

    @property
    def accepted(self) -> bool:
        return self.draft is not None and self.verifier is not None and self.draft.text == self.verifier.text


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


def capacity(frames: Sequence[Frame]) -> int:
    """The largest number of KV positions in any frame."""
    return max((frame.kv.total for frame in frames), default=0)
