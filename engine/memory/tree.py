"""`BranchTree`: which tokens each branch has, in which state, and where it left its parent. No torch, no KV.

Every branch holds its full path, so that a rollback of a parent below a child's fork position cannot hurt the child.
The tree is then drawn as before: the child under its parent, at the position where it left. How far the two agree
*now* is `common_prefix`, which compares tokens.

The states of a path stand in one order: prompt, accepted, at most one pending, drafts; rejected tokens stand at the
end, and only on branches that a rollback kept.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from replaylens.engine.errors import (
    BadRange,
    BadRollback,
    BadTransition,
    BranchInUse,
    ClosedBranch,
    IntegrityError,
    UnknownBranch,
)


class TokenState(Enum):
    """What is promised about a token. The order of the members is the order in which they stand on a path."""

    PROMPT = "prompt"
    ACCEPTED = "accepted"
    PENDING = "pending"  # in the sequence, its KV not computed yet
    DRAFT = "draft"
    REJECTED = "rejected"

    __hash__ = object.__hash__  # members are singletons; Enum would hash their names, ten times slower


PROMPT, ACCEPTED, PENDING, DRAFT, REJECTED = TokenState
_ORDER = {state: order for order, state in enumerate(TokenState)}
TRANSITIONS = {DRAFT: (ACCEPTED,), PENDING: (ACCEPTED,)}
"""what `mark` may do; draft to rejected happens in `rollback` only, and a prompt token stays one"""


class BranchStatus(Enum):
    OPEN = "open"
    FINISHED = "finished"
    REJECTED = "rejected"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class BranchRecord:
    """The record of one branch. Readers may look at everything; only `BranchTree` changes it."""

    id: int
    parent: int | None
    fork_position: int
    """tokens below it were the parent's when the branch left (0 for a root)"""
    tokens: list[int]
    states: list[TokenState]
    root_length: int
    """how many prompt tokens it has; no rollback goes below"""
    status: BranchStatus = BranchStatus.OPEN
    finish_reason: str | None = None
    children: list[int] = field(default_factory=list)
    prefix_hash: int = 0
    """of tokens[:fork_position], so that a later change of them is found"""
    seal: int | None = None
    """of all tokens and states, once the branch may not change any more"""


@dataclass(frozen=True)
class TreeNumbers:
    """What `check_integrity` counted."""

    branches: dict[str, int]
    tokens: dict[str, int]

    def __str__(self) -> str:
        def listed(counts: dict[str, int]) -> str:
            return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"

        return f"tree: {sum(self.branches.values())} branches ({listed(self.branches)}); tokens: {listed(self.tokens)}"


class BranchTree:
    """All branches by id. Ids count up from 0 and are never used twice.

    A fork, and a rejected branch kept, copies the path as a list: about 0.1 ms and 64 kB at 4k tokens.
    """

    def __init__(self) -> None:
        self._branches: dict[int, BranchRecord] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._branches)

    def branch(self, branch_id: int) -> BranchRecord:
        """The record itself, to read, not to change; also of a released branch until it is forgotten."""
        try:
            return self._branches[branch_id]
        except KeyError:
            raise UnknownBranch(
                f"no branch {branch_id}: {len(self)} are known, ids below {self._next_id}; "
                f"it was never made, or forgotten after its release"
            ) from None

    def plant(self, tokens: Sequence[int]) -> int:
        """A new root whose tokens are all prompt. The caller releases it."""
        return self._add(None, 0, list(tokens), [PROMPT] * len(tokens), len(tokens))

    def append(self, branch_id: int, tokens: Sequence[int], state: TokenState) -> None:
        """Add tokens at the tip of an open branch, all or none. BadTransition where `state` may not stand there."""
        branch = self._changeable(branch_id, BranchStatus.OPEN)
        if not tokens:
            return
        last = branch.states[-1] if branch.states else PROMPT
        too_many = state is PENDING and (last is PENDING or len(tokens) > 1)
        if state is REJECTED or _ORDER[state] < _ORDER[last] or too_many:
            raise BadTransition(
                f"branch {branch_id}: {len(tokens)} {state.value} tokens cannot follow a {last.value} token; "
                f"a path is prompt, accepted, one pending, drafts: mark or roll back first"
            )
        branch.tokens.extend(tokens)
        branch.states.extend([state] * len(tokens))
        if state is PROMPT:
            branch.root_length = len(branch.tokens)

    def mark(self, branch_id: int, start: int, end: int, state: TokenState) -> None:
        """Change the state of positions [start, end) along TRANSITIONS, all or none. All below must be committed."""
        branch = self._changeable(branch_id, BranchStatus.OPEN, BranchStatus.FINISHED)
        if not 0 <= start <= end <= len(branch.tokens):
            raise BadRange(f"branch {branch_id}: cannot mark [{start}, {end}) of {len(branch.tokens)} tokens")
        for position in range(start, end):
            old = branch.states[position]
            if state not in TRANSITIONS.get(old, ()):
                raise BadTransition(f"branch {branch_id}, position {position}: {old.value} cannot become {state.value}")
        if start < end and start > 0 and branch.states[start - 1] in (PENDING, DRAFT):
            raise BadTransition(
                f"branch {branch_id}: position {start - 1} is still {branch.states[start - 1].value}; "
                f"tokens are accepted from the left, without holes"
            )
        branch.states[start:end] = [state] * (end - start)

    def fork(self, branch_id: int, length: int | None = None) -> int:
        """A new open branch with the first `length` tokens (default: all) and their states. The caller releases it.

        The parent may be open, finished or rejected and is not changed; the child has no finish reason, it must be
        derived anew. Tokens that were rejected in the parent are accepted in the child, for whoever forks there wants
        them; they are drafts where something before them is not committed yet.
        """
        parent = self._changeable(branch_id, BranchStatus.OPEN, BranchStatus.FINISHED, BranchStatus.REJECTED)
        length = len(parent.tokens) if length is None else length
        if not 0 <= length <= len(parent.tokens):
            raise BadRange(f"branch {branch_id} has {len(parent.tokens)} tokens: cannot fork it at {length}")
        root_length = min(parent.root_length, length)
        states = parent.states[:length]
        if states and states[-1] is REJECTED:
            cut = parent.fork_position
            committed = cut == 0 or states[cut - 1] in (PROMPT, ACCEPTED)
            states[cut:] = [ACCEPTED if committed else DRAFT] * (length - cut)
        return self._add(branch_id, length, parent.tokens[:length], states, root_length)

    def rollback(self, branch_id: int, length: int, keep: bool = False) -> int | None:
        """Cut the tokens from `length` on. Mutates the branch: it is open again and has no finish reason, even where
        nothing was cut, for whoever rolls back must derive the finish anew.

        With `keep` the cut tokens live on as a child branch of status REJECTED, whose id is returned (None where
        nothing was cut); the caller releases it. Children that left beyond `length` are not touched.
        """
        branch = self._changeable(branch_id, BranchStatus.OPEN, BranchStatus.FINISHED)
        if not branch.root_length <= length <= len(branch.tokens):
            raise BadRollback(
                f"branch {branch_id}: cannot roll back to {length}; possible are {branch.root_length} (its prompt) "
                f"to {len(branch.tokens)} (its tip). Fork it to leave within the prompt"
            )
        kept_id = self._keep(branch, length) if keep and length < len(branch.tokens) else None
        del branch.tokens[length:]
        del branch.states[length:]
        if length < branch.fork_position:  # it now leaves its parent earlier
            branch.fork_position, branch.prefix_hash = length, hash(tuple(branch.tokens))
        branch.status, branch.finish_reason = BranchStatus.OPEN, None
        return kept_id

    def finish(self, branch_id: int, reason: str) -> None:
        """Mark an open branch as finished. It takes no more tokens until a rollback reopens it."""
        branch = self._changeable(branch_id, BranchStatus.OPEN)
        branch.status, branch.finish_reason = BranchStatus.FINISHED, reason

    def release(self, branch_id: int) -> None:
        """Close a branch for good; its record stays for the tree view until `forget`. Children stay as they are."""
        branch = self._changeable(branch_id, BranchStatus.OPEN, BranchStatus.FINISHED, BranchStatus.REJECTED)
        branch.status, branch.seal = BranchStatus.RELEASED, _seal(branch)

    def forget(self, branch_id: int) -> None:
        """Drop the record of a released branch without children."""
        branch = self.branch(branch_id)
        if branch.status is not BranchStatus.RELEASED or branch.children:
            raise BranchInUse(
                f"branch {branch_id} is {branch.status.value} and has {len(branch.children)} children: "
                f"release it, and forget its children, first"
            )
        if branch.parent is not None:
            self._branches[branch.parent].children.remove(branch_id)
        del self._branches[branch_id]

    def path(self, branch_id: int) -> list[int]:
        """A copy of the branch's tokens from position 0."""
        return list(self.branch(branch_id).tokens)

    def common_prefix(self, first: int, second: int) -> int:
        """How many tokens two branches have in common now, by comparing them."""
        mine, yours = self.branch(first).tokens, self.branch(second).tokens
        pairs = enumerate(zip(mine, yours, strict=False))
        return next((position for position, (a, b) in pairs if a != b), min(len(mine), len(yours)))

    def children(self, branch_id: int) -> list[int]:
        """In order of creation, rejected ones included."""
        return list(self.branch(branch_id).children)

    def roots(self) -> list[int]:
        return [branch.id for branch in self._branches.values() if branch.parent is None]

    def check_integrity(self) -> TreeNumbers:
        """Check every record and every link. Raises IntegrityError with the first fault; changes nothing."""
        for key, branch in self._branches.items():
            if key != branch.id or key >= self._next_id:
                raise IntegrityError(f"branch {branch.id} is filed under {key}, next id {self._next_id}")
            self._check_links(branch)
            _check_tokens(branch)
        statuses = Counter(branch.status.value for branch in self._branches.values())
        states = Counter(state.value for branch in self._branches.values() for state in branch.states)
        return TreeNumbers(dict(statuses), dict(states))

    def _check_links(self, branch: BranchRecord) -> None:
        if branch.parent is not None:
            parent = self._branches.get(branch.parent)
            if parent is None or branch.parent >= branch.id:  # parents are older, so there are no circles
                raise IntegrityError(f"branch {branch.id}: parent {branch.parent} is unknown or younger")
            if parent.children.count(branch.id) != 1:
                raise IntegrityError(f"branch {branch.id}: parent {branch.parent} has children {parent.children}")
        for child in branch.children:
            if child not in self._branches or self._branches[child].parent != branch.id:
                raise IntegrityError(f"branch {branch.id}: child {child} is unknown or has another parent")

    def _add(
        self, parent: int | None, fork_position: int, tokens: list[int], states: list[TokenState], root_length: int
    ) -> int:
        branch = BranchRecord(self._next_id, parent, fork_position, tokens, states, root_length)
        branch.prefix_hash = hash(tuple(tokens[:fork_position]))
        self._next_id += 1
        self._branches[branch.id] = branch
        if parent is not None:
            self._branches[parent].children.append(branch.id)
        return branch.id

    def _keep(self, branch: BranchRecord, length: int) -> int:
        states = branch.states[:length] + [REJECTED] * (len(branch.tokens) - length)
        kept_id = self._add(branch.id, length, list(branch.tokens), states, branch.root_length)
        kept = self._branches[kept_id]
        kept.status, kept.seal = BranchStatus.REJECTED, _seal(kept)
        return kept_id

    def _changeable(self, branch_id: int, *allowed: BranchStatus) -> BranchRecord:
        branch = self.branch(branch_id)
        if branch.status not in allowed:
            advice = {
                BranchStatus.FINISHED: "roll it back or fork it to go on",
                BranchStatus.REJECTED: "fork it to go on with its tokens",
            }.get(branch.status, "it was released; use a live branch")
            raise ClosedBranch(f"branch {branch_id} is {branch.status.value}: {advice}")
        return branch


def _seal(branch: BranchRecord) -> int:
    return hash((tuple(branch.tokens), tuple(branch.states)))


def _check_tokens(branch: BranchRecord) -> None:
    tokens, states, status, left_at = branch.tokens, branch.states, branch.status, branch.fork_position
    released, num_rejected = status is BranchStatus.RELEASED, states.count(REJECTED)
    sealed = status in (BranchStatus.REJECTED, BranchStatus.RELEASED)
    faults = {
        f"{len(tokens)} tokens but {len(states)} states": len(tokens) != len(states),
        f"fork position {left_at} of {len(tokens)} tokens": not 0 <= left_at <= len(tokens),
        f"its first {left_at} tokens are not those it left with": branch.prefix_hash != hash(tuple(tokens[:left_at])),
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
            raise IntegrityError(f"branch {branch.id}: {text}")
    for position, (left, right) in enumerate(pairwise(states)):
        if _ORDER[left] > _ORDER[right] or left is right is PENDING:
            raise IntegrityError(f"branch {branch.id}: {left.value} at {position} before {right.value} at {position + 1}")
