"""`Lane`: the live side of a branch, and `Job`: the work to do on it."""

from dataclasses import dataclass, field

from replaylens.engine.errors import BadRequest
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.request.capture import CaptureSpec, Recording
from replaylens.engine.request.edits import Hook, PlacedEdit
from replaylens.engine.request.sampling import Sampling


@dataclass
class Statistics:
    """What drafting gained, on one request or on a branch."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    tokens: int = 0

    def count(self, drafted: int, accepted: int, gained: int) -> None:
        """Mutates: one more verification."""
        self.passes += 1
        self.drafted += drafted
        self.accepted += accepted
        self.rejected += drafted - accepted
        self.tokens += gained

    def add(self, other: "Statistics") -> None:
        """Mutates: all that another one counted, too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def acceptance(self) -> float:
        """Share of drafts that stood; nan before the first."""
        return self.accepted / self.drafted if self.drafted else float("nan")


@dataclass(eq=False)
class Lane:
    """Where a branch's KV lies. The tokens themselves are in the `BranchTree`.

    | positions             | KV                                                    |
    |-----------------------|-------------------------------------------------------|
    | [0, computed)         | canonical and committed (fast-path if not `exact`)    |
    | [computed, length)    | drafts, not promised; overwritten by the next pass    |
    """

    branch: int
    table: PageTable
    computed: int = 0
    exact: bool = True
    """False once a fast-path token or KV entry is in it: nothing of it is promised then"""
    recording: Recording | None = None
    capture: CaptureSpec | None = None
    edits: tuple[PlacedEdit, ...] = ()
    hooks: tuple[Hook, ...] = ()
    thoughts: object | None = None
    """what a model that thinks keeps along the prompt, passed on to what is forked or cut from it; read by `thoughts_of`"""
    last_used: int = 0
    statistics: Statistics = field(default_factory=Statistics)
    """of all requests on it that ended"""
    rejected: list[int] = field(default_factory=list)
    """rejected branches that were cut from it and kept rows or pages, in order"""
    template: Recording | None = None
    """where the lane itself keeps no rows: what the recordings of its forks begin as"""
    traced: bool = True
    """False: what happens to it is no part of the engine's trace"""

    @property
    def certified(self) -> bool:
        """Whether its bits are a function of weights, path and edits. A hook function could be anything."""
        return self.exact and not self.hooks

    def first_missing(self, num_tokens: int, final: bool) -> int:
        """The first position that a pass has to compute so that all `num_tokens` have KV and captured rows.

        Not `final`: the rows at the tip whose capture waits for the next token are not missed.
        """
        if self.recording is None or self.capture is None:
            return self.computed
        wanted = num_tokens if final else num_tokens - self.capture.lag
        end = self.recording.end
        if self.recording.open_end and num_tokens > end:
            end -= 1
        return min(self.computed, end) if end < wanted else self.computed

    def tokens_gone(self, num_tokens: int) -> None:
        """Mutates: tokens from `num_tokens` on are no more; captured rows that looked at them go too."""
        if self.recording is not None and self.capture is not None and not self.recording.open_end:
            self.recording.truncate(num_tokens - self.capture.lag)


@dataclass(eq=False)
class Job:
    """Bring a lane up to date with its tokens, then generate `new_tokens` more."""

    lane: Lane
    new_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    drafter: str = "self"
    window: int | None = None
    """rows per verification, the last token's own included; 1: direct decoding; None: the planner chooses"""
    exact: bool = True
    final: bool = False
    """compute the last token's row too, so that every token has KV and activations"""
    keep_rejected: bool = False
    """keep the pages of rejected drafts, so that they can be forked and continued"""
    forced_drafts: dict[int, list[list[int]]] | None = None
    """given or recorded chains by the position they start at, for the `forced` drafter"""
    cancel_at: int | None = None
    """cancelled once it has generated so many, its windows as if it went on: to replay one that was cancelled"""
    generated: int = 0
    finish_reason: str | None = None
    error: Exception | None = None
    done: bool = False
    statistics: Statistics = field(default_factory=Statistics)
    rejected: list[int] = field(default_factory=list)
    """branches of rejected drafts, in order"""

    def __post_init__(self) -> None:
        for name, value, least in (("n", self.new_tokens, 0), ("window", self.window, 1)):
            if value is not None and (type(value) is not int or value < least):
                raise BadRequest(f"{name}={value!r}: give a whole number of at least {least}")

    @property
    def remaining(self) -> int:
        return 0 if self.finish_reason else self.new_tokens - self.generated
