"""`Lane`: what is live of a branch (pages, edits, captured rows), and `Job`: the work to do on it.

Its record in the `BranchTree` holds the tokens of the branch, and outlives its lane.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

from replaylens.engine.errors import BadRequest
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.path import Mark, PathView
from replaylens.engine.memory.prefix import Trail
from replaylens.engine.memory.tree import BranchRecord
from replaylens.engine.request.capture import CaptureSpec, Recording
from replaylens.engine.request.edits import Hook
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.sampling import Sampling

# ---- window ----------------------------------------------------------------------------------------------------------
# `Window`: drafts that a deterministic request collects from the fast path, one per step, until they are verified together.
#
# They are no tokens of the branch: nobody sees them before the verification, and dropping them costs only time.


@dataclass(eq=False)
class Window:
    """Up to `count` drafts after position `at` - 1, the last token of the path."""

    at: int
    """the first draft's position"""
    count: int
    chain: list[int] = field(default_factory=list)
    ended: bool = False
    """whether nothing can follow the chain, or the fast path failed"""
    _pages: list[int] | None = None
    """the pages that hold the KV of the rows run so far; None: no row was run"""

    @property
    def full(self) -> bool:
        """Whether the drafts wait for their verification."""
        return self.ended or len(self.chain) >= self.count

    @property
    def num_missing(self) -> int:
        """The steps until it is full."""
        return 0 if self.full else self.count - len(self.chain)

    def num_rows(self, table: PageTable, page_size: int) -> int:
        """The rows that the next draft takes: one, or all again if the KV of earlier rows is gone."""
        return 1 if self._kept(table, page_size) else 1 + len(self.chain)

    def rows(self, path: PathView, table: PageTable, page_size: int) -> tuple[int, list[int]]:
        """(first position, tokens) of the rows that the next draft takes."""
        if self._kept(table, page_size):
            return self.at - 1 + len(self.chain), self.chain[-1:]
        return self.at - 1, [path[-1], *self.chain]

    def add(self, token: int, stop_tokens: tuple[int, ...], table: PageTable, page_size: int) -> None:
        """Mutates: one more draft. Precondition: its rows were run into the pages of `table`."""
        self.chain.append(token)
        self.ended = token in stop_tokens
        self._pages = table.pages[(self.at - 1) // page_size :]

    def lose_rows(self) -> None:
        """Mutates: the next draft runs all rows again."""
        self._pages = None

    def _kept(self, table: PageTable, page_size: int) -> bool:
        """Whether the KV of earlier rows is where it was written. A page that was shared in the meantime is replaced."""
        return self._pages is not None and self._pages == table.pages[(self.at - 1) // page_size :]


# ---- lane ------------------------------------------------------------------------------------------------------------


@dataclass
class Statistics:
    """Counts of drafted, accepted and rejected tokens, of one request or of a branch."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    tokens: int = 0

    def count(self, drafted: int, accepted: int, gained: int) -> None:
        """Mutates: adds one verification."""
        self.passes += 1
        self.drafted += drafted
        self.accepted += accepted
        self.rejected += drafted - accepted
        self.tokens += gained

    def add(self, other: "Statistics") -> None:
        """Mutates: adds the counts of `other`."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def acceptance(self) -> float:
        """The share of drafts that were accepted; nan before the first."""
        return self.accepted / self.drafted if self.drafted else float("nan")


@dataclass(eq=False)
class Lane:
    """The pages of a branch, and what is recorded on it.

    | positions             | KV                                                       |
    |-----------------------|----------------------------------------------------------|
    | [0, computed)         | canonical and committed (fast path if not `exact`)       |
    | [computed, length)    | provisional, from drafts; overwritten by the next pass   |
    """

    record: BranchRecord
    """its tokens and their states"""
    table: PageTable
    computed: int = 0
    exact: bool = True
    """False once it has a token or KV entry of the fast path: then no bit of it is promised"""
    recording: Recording | None = None
    capture: CaptureSpec | None = None
    edits: tuple[PlacedEdit, ...] = ()
    hooks: tuple[Hook, ...] = ()
    carried: Any = None
    """what another kind of model than a decoder keeps about the prompt; forks and rejected branches inherit it"""
    last_used: int = 0
    queued: int = 0
    """the number of its unfinished job; 0: it is idle"""
    listed: int | None = None
    """where `Reservations` has it: 0 among the idle, or under the number of its job, negative among those that share their
    last pages; None: nowhere"""
    parked: dict[int, None] | None = None
    """where it waits for others to let go of its last pages; see `PagePool.park`"""
    statistics: Statistics = field(default_factory=Statistics)
    """of all its requests that ended"""
    rejected: list[int] = field(default_factory=list)
    """its rejected branches that keep rows or pages, in order"""
    template: Recording | None = None
    """if the lane itself keeps no rows: the empty recording that its forks start from"""
    traced: bool = True
    """whether its events go into the engine's trace"""
    streamed: "Job | None" = None
    """the last request whose tokens a stream yields"""
    offered: tuple[Trail, Mark] | None = None
    """where its last offer to the prefix index ended, and whether its path is still the same up to there"""
    drawn: dict[tuple[object, ...], int] = field(default_factory=dict)
    """what its forks sampled with: fork position, edits and sampling -> the fork that did so first, -1 once it was warned of"""
    lifetime: "ReferenceType[object] | None" = None
    """what the handles on it share; once that is gone, nobody can use it, and it is released"""

    def __post_init__(self) -> None:
        self.branch = self.record.id

    @property
    def certified(self) -> bool:
        """Whether its bits are a function of weights, path and edits. A hook function may compute anything."""
        return self.exact and not self.hooks

    @property
    def unread(self) -> bool:
        """Whether its open stream has more tokens to yield. How many is a matter of the clock, so nothing may build on them."""
        return self.streamed is not None and self.streamed.generated > self.streamed.num_yielded

    def first_missing(self, num_tokens: int) -> int:
        """The first position to compute for all `num_tokens` to have KV and captured rows.

        It may lie before `computed`: Z holds the log-probability of the next token, so a row that was read at the tip is
        computed and read again once a token follows. Its other sites and its KV get the same bits.
        """
        if self.recording is None or self.capture is None:
            return self.computed
        end = self.recording.end
        if self.recording.open_end and num_tokens > end:
            end -= 1
        return min(self.computed, end) if end < num_tokens else self.computed

    def kept(self, start: int, end: int) -> Sequence[int]:
        """The positions of [start, end) that it captures."""
        assert self.capture is not None
        return self.capture.positions.kept(start, end, self.record.root_length)

    def tokens_gone(self, num_tokens: int) -> None:
        """Mutates: drops the captured rows that depend on tokens from `num_tokens` on, which were removed."""
        if self.recording is not None and self.capture is not None:
            self.recording.truncate(self.recording.num_valid(num_tokens, self.capture.lag))


@dataclass(eq=False)
class Job:
    """Bring a lane up to date with its tokens, then generate `new_tokens` more."""

    lane: Lane
    new_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    drafter: str = "self"
    window: int | None = None
    """rows per verification, including the last token's own; 1: direct decoding; None: the planner chooses"""
    exact: bool = True
    final: bool = False
    """also compute the last token's row, so that every token has KV and activations"""
    keep_pages: bool = False
    """keep the pages of rejected drafts, so that they can be forked and continued"""
    forced_drafts: dict[int, list[list[int]]] | None = None
    """for the `forced` drafter: given or recorded chains by their start position"""
    until: Callable[[Sequence[int]], bool] | None = None
    """whether to end the job, with reason "answer", given all tokens that it generated so far; asked after each of them"""
    cancel_at: int | None = None
    """to replay a cancelled job: cancel after this many tokens, with windows planned for `new_tokens`"""
    number: int = 0
    """among all jobs of the queue, by age; 0: it was not queued"""
    rank: int | None = None
    """where it waits for its turn: 0 among those that lack one row, 1 among those that lack more; None: it had a turn"""
    counted: tuple[CaptureSpec | None, bool] = (None, False)
    """what the queue counted of it: its capture, and whether it has hook functions"""
    generated: int = 0
    num_yielded: int = 0
    """tokens that its stream, if it has one, has yielded"""
    finish_reason: str | None = None
    error: Exception | None = None
    done: bool = False
    statistics: Statistics = field(default_factory=Statistics)
    rejected: list[int] = field(default_factory=list)
    """branches of rejected drafts, in order"""
    window_open: Window | None = None
    """drafts of the fast path that are not verified yet"""
    lifetime: object | None = field(init=False, repr=False)
    """keeps the branch open, also if only the job, or a stream of it, is held"""

    def __post_init__(self) -> None:
        self.lifetime = None if self.lane.lifetime is None else self.lane.lifetime()
        for name, value, least in (("n", self.new_tokens, 0), ("window", self.window, 1)):
            if value is not None and (type(value) is not int or value < least):
                raise BadRequest(f"Invalid {name}={value!r}. Give a whole number of at least {least}.")

    @property
    def remaining(self) -> int:
        return 0 if self.finish_reason else self.new_tokens - self.generated

    @property
    def certain(self) -> bool:
        """Whether its number of tokens is known, and no stream yields them as they come, or did when it was recorded."""
        ends = self.sampling.stop_tokens or self.sampling.stop or self.until is not None or self.cancel_at is not None
        return not ends and self.lane.streamed is not self

    def first_row(self, num_tokens: int) -> int:
        """Where the next pass over a path of `num_tokens` starts. Choosing the next token takes the last token's row, even if
        its KV is known."""
        first = self.lane.first_missing(num_tokens)
        return min(first, num_tokens - 1) if self.remaining else first

    def num_waiting(self, num_tokens: int) -> int:
        """The number of tokens, of `num_tokens`, whose rows it still needs."""
        return num_tokens - self.first_row(num_tokens)


def raise_first(jobs: Sequence[Job]) -> None:
    """Raise the first error among jobs that have ended. Mutates: they let go of their errors.

    The frames of an error's traceback hold its job. If the job held the error, too, both would stay until Python looks for
    cycles, and the engine with them.
    """
    errors = [job.error for job in jobs if job.error is not None]
    for job in jobs:
        job.error = None
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()


# ---- turn ------------------------------------------------------------------------------------------------------------
# `Turn`: what one job does in one step of the loop.


@dataclass(eq=False)
class Turn:
    """Rows [start, end) of the job's branch, followed by sibling chains of drafts.

    `tables[i]` has private room for the rows and chain i. tables[0] is the lane's own; the others belong to the turn and are
    released when it ends.
    """

    job: Job
    start: int
    rows: list[int]
    complete: bool
    """whether the rows reach the branch's last token, so that the next one can be chosen"""
    num_drafts: int = 0
    drafting: bool = False
    """whether it takes one row of the fast batch, for the next draft of the job's open window, and decides nothing"""
    burst: int = 0
    """direct decode steps that the device takes on its own; 0: an ordinary pass"""
    tables: list[PageTable] = field(default_factory=list)
    chains: list[list[int]] = field(default_factory=lambda: [[]])
    segments: list[int] = field(default_factory=list)
    """the index of each chain's segment in the packed pass"""
    closed: bool = False
    """whether the turn is committed or abandoned"""

    @property
    def end(self) -> int:
        """The position after the last row; the first draft's position."""
        return self.start + len(self.rows)

    @property
    def deciding(self) -> bool:
        """Whether the pass decides what comes next."""
        return self.complete and self.job.remaining > 0 and not self.drafting

    @property
    def first_to_record(self) -> int:
        """Where recording goes on: computing KV again leaves recorded rows alone. Precondition: the lane keeps rows."""
        recording = self.job.lane.recording
        assert recording is not None
        return max(self.start, recording.end - recording.open_end)
