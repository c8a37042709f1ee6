"""`Frame`: one step of a request, as plain data: its tokens, its KV slots, what the verifier said."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.pictures.paths import visible


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


def capacity(frames: Sequence[Frame]) -> int:
    """The most positions that were ever held."""
    return max((frame.kv.total for frame in frames), default=0)
