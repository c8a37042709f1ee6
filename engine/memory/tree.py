"""`BranchTree`: the tokens of each branch, their states, and where the branch left its parent. No torch, no KV.

Every branch has its full path, so rolling a parent back below a child's fork position does not affect the child. Tokens are
shared, not copied (`TokenPath`). The child is still drawn under its parent, at the position where it forked. `common_prefix`
compares the tokens that two branches have now.

The tree keeps a record until its branch is released. Afterwards the record lives as long as something refers to it: a
handle, a result, its forks or, for a rejected branch, the branch it was cut from. A long-running engine thus keeps only
records that are in use.

The states of a path follow one order: prompt, accepted, at most one pending, drafts. Rejected tokens come last, and only
on branches that a rollback kept.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple
from weakref import WeakValueDictionary

from replaylens.engine.errors import BadRange, BadRequest, ClosedBranch, IntegrityError, InternalError
from replaylens.engine.memory.path import PathHistory, PathStates, TokenPath
from replaylens.engine.memory.path import TokenState as TokenState

PROMPT, ACCEPTED, PENDING, DRAFT, REJECTED = TokenState
_ORDER = {state: order for order, state in enumerate(TokenState)}
ORDINARY, HOOKED = "ordinary: not verified", "hook functions: not certified"
"""why nothing is promised of a token: it is of the fast path, or hook functions had a part in it"""
TRANSITIONS = {DRAFT: (ACCEPTED,), PENDING: (ACCEPTED,)}
"""the changes that `mark` may make; only `rollback` turns drafts into rejected tokens, and prompt tokens never change"""


class BranchStatus(Enum):
    """What may still happen to a branch: only an open one grows."""

    OPEN = "open"
    FINISHED = "finished"
    REJECTED = "rejected"
    RELEASED = "released"


class Forced(NamedTuple):
    """Positions [start, end) that were given, not generated, and the earlier ones below them. Forks share the chain."""

    start: int
    end: int
    below: "Forced | None"


@dataclass(slots=True, eq=False, weakref_slot=True)
class BranchRecord:
    """The record of one branch. Only `BranchTree` changes it."""

    id: int
    parent: int | None
    fork_position: int
    """number of tokens taken from the parent (0 for a root)"""
    tokens: TokenPath
    states: PathStates
    root_length: int
    """number of prompt tokens; no rollback goes below it"""
    status: BranchStatus = BranchStatus.OPEN
    finish_reason: str | None = None
    forks: "WeakValueDictionary[int, BranchRecord]" = field(default_factory=WeakValueDictionary)
    """forks of this branch that are still referenced"""
    cut: "list[BranchRecord]" = field(default_factory=list)
    """rejected branches that rollbacks kept, in order"""
    above: "tuple[BranchRecord, ...]" = ()
    """of a fork: its parent, and the branch that a rejected parent was cut from; kept alive so that they can be drawn"""
    base: TokenPath = field(default_factory=TokenPath)
    """tokens[:fork_position] as they were at the fork, to detect later changes"""
    seal: int | None = None
    """hash of all tokens and states, set when the branch becomes immutable"""
    uncertified_from: int | None = None
    """the first position of which nothing is promised; None: there is none. Once there is one, later tokens are not certified
    either, whatever computes them"""
    uncertified_why: str = ""
    """ORDINARY or HOOKED, in words for pictures"""
    forced: Forced | None = None
    """the last tokens after the prompt that were given, not generated"""
    past: PathHistory = field(init=False)
    """what is known about the path, extended as it grows"""

    def __post_init__(self) -> None:
        self.past = PathHistory(self.tokens)

    def words(self) -> list[str]:
        """What each token is: prompt, forced, generated, pending (generated, its row not computed yet), draft or rejected."""
        found = ["generated" if state is ACCEPTED else state.value for state in self.states]
        span = self.forced
        while span is not None:
            for at in range(span.start, min(span.end, self.states.num_committed)):
                found[at] = "forced"
            span = span.below
        return found

    @property
    def children(self) -> "list[BranchRecord]":
        """Forks and rejected branches, in order of creation."""
        return sorted([*self.forks.values(), *self.cut], key=lambda branch: branch.id)


@dataclass(frozen=True)
class TreeNumbers:
    """The counts of `BranchTree.check_integrity`."""

    branches: dict[str, int]
    tokens: dict[str, int]

    def __str__(self) -> str:
        def listed(counts: dict[str, int]) -> str:
            return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"

        return f"tree: {sum(self.branches.values())} branches ({listed(self.branches)}); tokens: {listed(self.tokens)}"


class BranchTree:
    """All branches by id. Ids count up from 0 and are never reused.

    A fork or a kept rejected branch copies no token.
    """

    def __init__(self) -> None:
        self._live: dict[int, BranchRecord] = {}
        self._released: WeakValueDictionary[int, BranchRecord] = WeakValueDictionary()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._released)

    def branch(self, branch_id: int) -> BranchRecord:
        """The record itself, for reading only. A released branch is found as long as something refers to it."""
        record = self._live.get(branch_id) or self._released.get(branch_id)
        if record is None:
            raise BadRequest(
                f"No branch {branch_id}. {len(self)} branches are known, with ids below {self._next_id}. "
                "It was never created, or it was released and nothing refers to it."
            )
        return record

    def plant(self, tokens: Sequence[int]) -> int:
        """A new root whose tokens are all prompt tokens. The caller releases it."""
        states = PathStates()
        states.append(PROMPT, len(tokens))
        return self._add(None, 0, TokenPath(tokens), states, len(tokens))

    def append(self, branch_id: int, tokens: Sequence[int], state: TokenState, forced: bool = False) -> None:
        """Append tokens to an open branch, all or none. Raises InternalError if `state` may not follow the last token.

        forced  a caller gave them; nothing has chosen them
        """
        branch = self._changeable(branch_id, BranchStatus.OPEN)
        if not tokens:
            return
        last = branch.states.last
        too_many = state is PENDING and (last is PENDING or len(tokens) > 1)
        if state is REJECTED or _ORDER[state] < _ORDER[last] or too_many:
            raise InternalError(
                f"Branch {branch_id}: {len(tokens)} {state.value} tokens cannot follow a {last.value} token. "
                "The order is prompt, accepted, one pending, drafts. Mark tokens or roll back first."
            )
        branch.tokens.extend(tokens)
        branch.states.append(state, len(tokens))
        if forced:
            branch.forced = Forced(len(branch.tokens) - len(tokens), len(branch.tokens), branch.forced)
        if state is PROMPT:
            branch.root_length = len(branch.tokens)

    def mark(self, branch_id: int, start: int, end: int, state: TokenState) -> None:
        """Change the state of positions [start, end) as TRANSITIONS allows, all or none. All below must be committed."""
        branch = self._changeable(branch_id, BranchStatus.OPEN, BranchStatus.FINISHED)
        if not 0 <= start <= end <= len(branch.tokens):
            raise BadRange(f"Branch {branch_id} has {len(branch.tokens)} tokens. Cannot mark [{start}, {end}).")
        for position in (start, end - 1) if start < end else ():  # states are in order: those between are in between
            old = branch.states[position]
            if state not in TRANSITIONS.get(old, ()):
                first = max(start, branch.states.index(old))
                raise InternalError(f"Branch {branch_id}, position {first}: {old.value} cannot become {state.value}.")
        if start < end and start > 0 and branch.states[start - 1] in (PENDING, DRAFT):
            raise InternalError(
                f"Branch {branch_id}: position {start - 1} is still {branch.states[start - 1].value}. "
                "Accept tokens from the left, without gaps."
            )
        branch.states.accept(end - start)

    def uncertify(self, branch_id: int, position: int, why: str) -> None:
        """Note that nothing is promised of the tokens from `position` on. Mutates the branch; prompt tokens are as given."""
        branch = self.branch(branch_id)
        first = max(position, branch.root_length)
        branch.uncertified_from = first if branch.uncertified_from is None else min(first, branch.uncertified_from)
        branch.uncertified_why = branch.uncertified_why or why

    def fork(self, branch_id: int, length: int | None = None) -> int:
        """A new open branch with the first `length` tokens (default: all) and their states. The caller releases it.

        The parent may be open, finished or rejected and is not changed. The child has no finish reason; the caller must
        derive it again. Rejected tokens of the parent become accepted in the child, because forking there asks for them.
        They become drafts if a token before them is not committed yet.
        """
        parent = self._changeable(branch_id, BranchStatus.OPEN, BranchStatus.FINISHED, BranchStatus.REJECTED)
        length = len(parent.tokens) if length is None else length
        if not 0 <= length <= len(parent.tokens):
            raise BadRange(f"Branch {branch_id} has {len(parent.tokens)} tokens. Cannot fork it at {length}.")
        root_length = min(parent.root_length, length)
        states, forced = parent.states.first(length), _forced_before(parent.forced, length)
        if REJECTED in states:
            forced = Forced(parent.fork_position, length, _forced_before(forced, parent.fork_position))
            states.truncate(cut := parent.fork_position)
            committed = states.num_committed == cut
            states.append(ACCEPTED if committed else DRAFT, length - cut)
        child = self._live[self._add(branch_id, length, parent.tokens.fork(length), states, root_length)]
        if parent.uncertified_from is not None:
            child.uncertified_from, child.uncertified_why = min(parent.uncertified_from, length), parent.uncertified_why
        child.forced = forced
        parent.forks[child.id] = child
        child.above = (parent,)
        if parent.status is BranchStatus.REJECTED and parent.parent is not None:
            child.above = (parent, self.branch(parent.parent))
        return child.id

    def rollback(self, branch_id: int, length: int, keep: bool = False, pending: bool = False) -> int | None:
        """Remove the tokens from `length` on. Mutates the branch.

        The branch is open again and has no finish reason, even if nothing was removed: the caller must derive it again.
        With `keep`, the removed tokens are kept as a child branch of status REJECTED. Its id is returned, or None if
        nothing was removed; the caller releases it. Children that forked beyond `length` are not changed.
        With `pending`, the last token that is left waits for its KV again, as a generated token does.
        """
        branch = self._changeable(branch_id, BranchStatus.OPEN, BranchStatus.FINISHED)
        if not branch.root_length <= length <= len(branch.tokens):
            raise BadRequest(
                f"Branch {branch_id}: cannot roll back to {length}. Use {branch.root_length} (its prompt) to "
                f"{len(branch.tokens)} (its tip), or fork it within the prompt."
            )
        kept_id = self._keep(branch, length) if keep and length < len(branch.tokens) else None
        branch.tokens.truncate(length)
        branch.states.truncate(length)
        if pending:
            branch.states.reopen_last()
        branch.forced = _forced_before(branch.forced, length)
        branch.past.cut(length)
        if branch.uncertified_from is not None:
            branch.uncertified_from = min(branch.uncertified_from, length)
        if length < branch.fork_position:  # the branch now leaves its parent earlier
            branch.fork_position, branch.base = length, branch.tokens.fork(length)
        branch.status, branch.finish_reason = BranchStatus.OPEN, None
        return kept_id

    def finish(self, branch_id: int, reason: str) -> None:
        """Mark an open branch as finished. It accepts no more tokens until a rollback reopens it."""
        branch = self._changeable(branch_id, BranchStatus.OPEN)
        branch.status, branch.finish_reason = BranchStatus.FINISHED, reason

    def release(self, branch_id: int) -> None:
        """Close a branch, and the rejected branches cut from it, for good. Forks are not changed.

        The tree no longer keeps their records: they live as long as something else refers to them.
        """
        branch = self._changeable(branch_id, BranchStatus.OPEN, BranchStatus.FINISHED, BranchStatus.REJECTED)
        for rejected in branch.cut:
            if rejected.status is BranchStatus.REJECTED:
                self.release(rejected.id)
        branch.status, branch.seal = BranchStatus.RELEASED, _seal(branch)
        self._released[branch_id] = self._live.pop(branch_id)

    def discard(self, branch_id: int) -> None:
        """Remove a rejected branch from the branch it was cut from, and release it unless it is released already."""
        branch = self.branch(branch_id)
        assert branch.parent is not None  # the branch it was cut from
        self.branch(branch.parent).cut.remove(branch)
        if branch.status is BranchStatus.REJECTED:
            self.release(branch_id)

    def path(self, branch_id: int) -> list[int]:
        """A copy of the branch's tokens from position 0."""
        return self.branch(branch_id).tokens[:]

    def common_prefix(self, first: int, second: int) -> int:
        """How many leading tokens two branches have in common now."""
        left, right = self.branch(first).tokens, self.branch(second).tokens
        pairs = enumerate(zip(left, right, strict=False))
        return next((position for position, (a, b) in pairs if a != b), min(len(left), len(right)))

    def children(self, branch_id: int) -> list[int]:
        """Ids of forks and rejected branches, in order of creation."""
        return [child.id for child in self.branch(branch_id).children]

    def roots(self) -> list[int]:
        return [branch.id for branch in self._all().values() if branch.parent is None]

    def check_integrity(self) -> TreeNumbers:
        """Check every record and every link. Raises IntegrityError with the first fault; changes nothing."""
        every = self._all()
        for key, branch in every.items():
            if key != branch.id or key >= self._next_id:
                raise IntegrityError(f"Branch {branch.id} is stored under id {key}; the next id is {self._next_id}.")
            if (key in self._released) != (branch.status is BranchStatus.RELEASED):
                raise IntegrityError(f"Branch {branch.id} is {branch.status.value} but stored under another status.")
        for branch in every.values():
            _check_links(branch, every)
            _check_tokens(branch)
        statuses = Counter(branch.status.value for branch in every.values())
        states = Counter(state.value for branch in every.values() for state in branch.states)
        return TreeNumbers(dict(statuses), dict(states))

    def _all(self) -> dict[int, BranchRecord]:
        """Every record that still exists, in order of creation."""
        return dict(sorted([*self._live.items(), *self._released.items()]))

    def _add(self, parent: int | None, fork_position: int, tokens: TokenPath, states: PathStates, root_length: int) -> int:
        branch = BranchRecord(self._next_id, parent, fork_position, tokens, states, root_length)
        branch.base = tokens.fork(fork_position)
        self._next_id += 1
        self._live[branch.id] = branch
        return branch.id

    def _keep(self, branch: BranchRecord, length: int) -> int:
        states = branch.states.first(length)
        states.append(REJECTED, len(branch.tokens) - length)
        kept_id = self._add(branch.id, length, branch.tokens.fork(len(branch.tokens)), states, branch.root_length)
        self._live[kept_id].forced = _forced_before(branch.forced, length)
        kept = self._live[kept_id]
        kept.uncertified_from, kept.uncertified_why = branch.uncertified_from, branch.uncertified_why
        kept.status, kept.seal = BranchStatus.REJECTED, _seal(kept)
        branch.cut.append(kept)
        return kept_id

    def _changeable(self, branch_id: int, *allowed: BranchStatus) -> BranchRecord:
        branch = self.branch(branch_id)
        if branch.status not in allowed:
            advice = {
                BranchStatus.FINISHED: "Roll it back or fork it to continue.",
                BranchStatus.REJECTED: "Fork it to continue with its tokens.",
            }.get(branch.status, "Use a live branch.")
            raise ClosedBranch(f"Branch {branch_id} is {branch.status.value}. {advice}")
        return branch


def _forced_before(span: Forced | None, length: int) -> Forced | None:
    """The forced ones of the first `length` tokens."""
    while span is not None and span.start >= length:
        span = span.below
    return span if span is None or span.end <= length else span._replace(end=length)


def _check_links(branch: BranchRecord, every: dict[int, BranchRecord]) -> None:
    """Raise IntegrityError unless the branch, its parent and its children know each other."""
    if branch.parent is not None:
        parent = every.get(branch.parent)
        gone = parent is None and branch.status is BranchStatus.RELEASED and not branch.above  # nothing refers to its parent
        if not gone and (parent is None or branch.parent >= branch.id):  # parents are older, so there are no cycles
            raise IntegrityError(f"Branch {branch.id}: parent {branch.parent} is unknown or younger.")
        if parent is not None and parent.children.count(branch) != 1 and branch.status is not BranchStatus.RELEASED:
            raise IntegrityError(f"Branch {branch.id} is not among its parent's children.")
    for child in branch.children:
        if every.get(child.id) is not child or child.parent != branch.id:
            raise IntegrityError(f"Branch {branch.id}: child {child.id} is unknown or has another parent.")


def _seal(branch: BranchRecord) -> int:
    """A number that changes, in all likelihood, if a token or a state does."""
    return hash((branch.tokens.seal(), tuple(branch.states.counts)))


def _check_tokens(branch: BranchRecord) -> None:
    """Raise IntegrityError if tokens, states and status contradict each other, or if a closed branch has changed."""
    tokens, states, status, left_at = branch.tokens, branch.states, branch.status, branch.fork_position
    released, num_rejected = status is BranchStatus.RELEASED, states.count(REJECTED)
    sealed = status in (BranchStatus.REJECTED, BranchStatus.RELEASED)
    faults = {
        f"{len(tokens)} tokens but {len(states)} states": len(tokens) != len(states),
        f"fork position {left_at} of {len(tokens)} tokens": not 0 <= left_at <= len(tokens),
        f"its first {left_at} tokens changed after the fork": branch.base != tokens[:left_at],
        f"root length {branch.root_length}, {states.count(PROMPT)} prompt tokens": (branch.root_length != states.count(PROMPT)),
        f"status {status.value} with {num_rejected} rejected tokens, forked at {left_at} of {len(tokens)}": (
            (not released and (status is BranchStatus.REJECTED) != (num_rejected > 0))
            or num_rejected not in (0, len(tokens) - left_at)
        ),
        f"status {status.value} with finish reason {branch.finish_reason!r}": (
            not released and (status is BranchStatus.FINISHED) != (branch.finish_reason is not None)
        ),
        f"changed after it was {status.value}": sealed and branch.seal != _seal(branch),
    }
    for text, found in faults.items():
        if found:
            raise IntegrityError(f"Branch {branch.id}: {text}.")
    if states.count(PENDING) > 1:  # every other order is right by construction
        position = states.index(PENDING)
        raise IntegrityError(f"Branch {branch.id}: pending at {position} before pending at {position + 1}.")
    tokens.check_integrity(f"Branch {branch.id}")
