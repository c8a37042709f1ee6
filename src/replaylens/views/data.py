"""What pictures show, as plain data: lens readings, paths with their branches, and the steps of a request."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from replaylens.engine.display import visible
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.request.capture import Recording
from replaylens.views.html import KINDS, ORDINARY, kind_of

if TYPE_CHECKING:
    pass

# ---- readings --------------------------------------------------------------------------------------------------------
# `Readings`: the logit lens (Z) of consecutive rows: log-probabilities of tokens, and each layer's next-token guesses.

GUESSES = 3
"""tokens shown per layer"""
Decode = Callable[[int], str]


@dataclass(frozen=True)
class LensGuess:
    """A next token, and the probability that a layer gives it."""

    token: str
    probability: float


@dataclass(frozen=True)
class LensLayer:
    """The next-token guesses of one layer."""

    site: str
    """name of the residual stream that was read"""
    guesses: tuple[LensGuess, ...]
    """most likely first"""


@dataclass(frozen=True)
class Readings:
    """Z at some positions; for its parts and their shapes see `lens.read`."""

    row_of: Mapping[int, int]
    """position -> row of z"""
    z: Mapping[str, np.ndarray]
    decode: Decode

    @classmethod
    def of(cls, recording: Recording | None, decode: Decode) -> "Readings | None":
        """The readings of captured rows; None if Z was not captured."""
        if recording is None or "Z.entropy" not in recording.sites():
            return None
        names = ("Z.entropy", "Z.kl", "Z.emitted", "Z.top_ids", "Z.top_logprobs")
        rows = {position: row for row, position in enumerate(recording.positions())}
        return cls(rows, {name: recording.peek(name).cpu().numpy() for name in names}, decode)

    def has(self, position: int) -> bool:
        return position in self.row_of

    def entropy(self, position: int) -> float | None:
        """Entropy of the model's next-token distribution at this position."""
        return float(self.z["Z.entropy"][self.row_of[position], -1]) if self.has(position) else None

    def emitted(self, position: int) -> float | None:
        """Log-probability of the token after this position on the same path."""
        value = float(self.z["Z.emitted"][self.row_of[position], -1]) if self.has(position) else math.nan
        return None if math.isnan(value) else value

    def logprob(self, position: int, token: int) -> float | None:
        """Log-probability of a token after this position; None if it is not among the top k."""
        if not self.has(position):
            return None
        row = self.row_of[position]
        found = np.flatnonzero(self.z["Z.top_ids"][row, -1] == token)
        return float(self.z["Z.top_logprobs"][row, -1, found[0]]) if len(found) else None

    def layers(self, position: int) -> tuple[LensLayer, ...]:
        """Next-token guesses of each layer; the model's output comes last."""
        if not self.has(position):
            return ()
        row = self.row_of[position]
        ids, shares = self.z["Z.top_ids"][row, :, :GUESSES], np.exp(self.z["Z.top_logprobs"][row, :, :GUESSES])
        return tuple(
            LensLayer(layer_name(i, len(ids)), tuple(map(self._guess, ids[i], shares[i])))  # [layers, k]
            for i in range(len(ids))
        )

    def _guess(self, token: Any, share: Any) -> LensGuess:
        return LensGuess(self.decode(int(token)), float(share))


def layer_name(i: int, count: int) -> str:
    """S0 enters block 0; the last entry of Z is the model's output."""
    return "output" if i == count - 1 else f"S{i}"


# ---- paths -----------------------------------------------------------------------------------------------------------
# `Paths`: a path and its branches as plain data, for the drawers.


@dataclass(frozen=True)
class Token:
    """One token of a path, with its readings and labels."""

    text: str
    position: int
    state: TokenState
    logprob: float | None = None
    """of this token, read off the row before"""
    entropy: float | None = None
    """of the next-token distribution"""
    lens: tuple[LensLayer, ...] = ()
    """each layer's next-token guesses at this row"""
    labels: tuple[tuple[str, str], ...] = ()
    """the task's labels here"""
    why: str = ""
    """why nothing is promised of it; empty: it is certified"""
    thought: tuple[str, ...] = ()
    """what a Thinking-States model thought after it, including <EOS>"""

    @property
    def kind(self) -> str:
        """Its look: that of its state, or that of an ordinary token."""
        return kind_of(self.state, self.why)

    @property
    def standing(self) -> str:
        """Its state in words."""
        return self.why if self.kind == ORDINARY else self.state.value

    @property
    def visible(self) -> str:
        """The text with invisible characters made visible, except spaces next to other characters."""
        return visible(self.text)


@dataclass(frozen=True)
class DrawnPath:
    """One branch, with its tokens from `fork_position` on."""

    branch: int
    parent: int | None
    fork_position: int
    status: str
    tokens: tuple[Token, ...]

    @property
    def end(self) -> int:
        """The position after its last token. A dump may hold only some of its tokens."""
        return self.tokens[-1].position + 1 if self.tokens else self.fork_position


@dataclass(frozen=True)
class Paths:
    """Paths with parents before children; the first is the trunk, whose tokens start at position 0."""

    paths: tuple[DrawnPath, ...]
    title: str = ""
    left_out: int = 0
    """number of branches not drawn"""

    @property
    def trunk(self) -> DrawnPath:
        return self.paths[0]

    @property
    def kinds(self) -> list[str]:
        """The kinds of tokens for a legend: all states, and ordinary tokens if there are any."""
        found = {token.kind for path in self.paths for token in path.tokens}
        return [kind for kind in KINDS if kind != ORDINARY or kind in found]

    @cached_property
    def children(self) -> dict[int, list[DrawnPath]]:
        """Children of each branch, latest fork first, so that no lines cross."""
        found: dict[int, list[DrawnPath]] = {path.branch: [] for path in self.paths}
        for path in self.paths[1:]:
            assert path.parent is not None
            found[path.parent].append(path)
        return {branch: sorted(paths, key=lambda p: -p.fork_position) for branch, paths in found.items()}

    def walk(self) -> Iterator[tuple[DrawnPath, int]]:
        """Paths with their depth, in order of creation, each before its children."""
        stack = [(self.trunk, 0)]
        while stack:
            path, depth = stack.pop()
            yield path, depth
            stack += [(child, depth + 1) for child in sorted(self.children[path.branch], key=lambda p: -p.branch)]


# ---- frames ----------------------------------------------------------------------------------------------------------
# `Frame`: one step of a request as plain data: its tokens, its KV slots, and the verifier's checks.


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
    pending: int = 0
    """committed tokens that are computed together with the drafts after them"""

    @property
    def total(self) -> int:
        return self.prompt + self.accepted + self.ordinary + self.pending + self.draft

    def by_kind(self) -> list[tuple[str, int]]:
        """Non-empty sections, in order of position."""
        sections = [
            (TokenState.PROMPT.value, self.prompt),
            (TokenState.ACCEPTED.value, self.accepted),
            (ORDINARY, self.ordinary),
            (TokenState.PENDING.value, self.pending),
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
