"""`BranchTree` against a naive model, both worked examples of decode - verify - rollback, and faults found by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replaylens.engine.errors import BadRange, BadRequest, ClosedBranch, IntegrityError, InternalError
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.memory.path import PathStates, TokenPath
from replaylens.engine.memory.tree import HOOKED, ORDINARY, BranchRecord, BranchStatus, BranchTree, TokenState

PROMPT, DRAFT = TokenState.PROMPT, TokenState.DRAFT
ACCEPTED, PENDING, REJECTED = TokenState.ACCEPTED, TokenState.PENDING, TokenState.REJECTED
LETTERS = {"P": PROMPT, "A": ACCEPTED, "~": PENDING, "D": DRAFT, "R": REJECTED}


def letters(branch: BranchRecord) -> str:
    names = {state: letter for letter, state in LETTERS.items()}
    return "".join(names[state] for state in branch.states)


def legal(text: str) -> bool:
    """The order of states, implemented differently from the tree's own."""
    return "".join(sorted(text, key="PA~DR".index)) == text and text.count("~") <= 1


@dataclass
class Naive:
    """A branch as pairs (token, state letter)."""

    parent: int | None
    left_at: int
    pairs: list[tuple[int, str]]
    status: str = "open"
    reason: str | None = None
    children: list[int] = field(default_factory=list)
    held: BranchRecord | None = None
    """the tree's own record, as a handle would hold it"""
    given: set[int] = field(default_factory=set)
    """positions that a caller forced"""
    doubt: tuple[int, str] | None = None
    """from where on nothing is promised, and why"""

    @property
    def text(self) -> str:
        return "".join(letter for _, letter in self.pairs)

    def words(self) -> list[str]:
        names = dict(zip("PA~DR", ("prompt", "generated", "pending", "draft", "rejected"), strict=True))
        return ["forced" if i in self.given and c in "PA" else names[c] for i, c in enumerate(self.text)]

    def up_to(self, length: int) -> dict[str, Any]:
        """What a branch that begins with these tokens inherits."""
        doubt = None if self.doubt is None else (min(self.doubt[0], length), self.doubt[1])
        return {"given": {at for at in self.given if at < length}, "doubt": doubt}


class TreeMachine(RuleBasedStateMachine):
    """The tree and the naive model do the same, or refuse the same and change nothing."""

    @initialize()
    def begin(self) -> None:
        self.tree = BranchTree()
        self.model: dict[int, Naive] = {}
        self.num_made = 0
        self.gone: list[int] = []

    def pick(self, data: st.DataObject, *statuses: str) -> tuple[int, Naive, bool]:
        branch_id = data.draw(st.sampled_from(sorted(self.model)[-5:]))  # few, so that histories become deep
        return branch_id, self.model[branch_id], self.model[branch_id].status in statuses

    def made(self, branch_id: int | None, record: Naive) -> None:
        assert branch_id == self.num_made
        record.held = self.tree.branch(branch_id)
        self.model[self.num_made] = record
        if record.parent is not None:
            self.model[record.parent].children.append(self.num_made)
        self.num_made += 1

    def refused(self, error: type[Exception], call: Any, *args: Any) -> None:
        with pytest.raises(error):
            call(*args)

    @precondition(lambda self: len(self.model) < 3)
    @rule(tokens=st.lists(st.integers(0, 3), max_size=5))
    def plant(self, tokens: list[int]) -> None:
        self.made(self.tree.plant(tokens), Naive(None, 0, [(token, "P") for token in tokens]))

    @precondition(lambda self: self.model)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 3), max_size=4),
        letter=st.sampled_from("PAA~~DDDR"),
        forced=st.booleans(),
    )
    def append(self, data: st.DataObject, tokens: list[int], letter: str, forced: bool) -> None:
        branch_id, record, allowed = self.pick(data, "open")
        if not allowed:
            return self.refused(ClosedBranch, self.tree.append, branch_id, tokens, LETTERS[letter])
        if tokens and (letter == "R" or not legal(record.text + letter * len(tokens))):
            return self.refused(InternalError, self.tree.append, branch_id, tokens, LETTERS[letter])
        self.tree.append(branch_id, tokens, LETTERS[letter], forced)
        record.pairs += [(token, letter) for token in tokens]
        record.given |= set(range(len(record.pairs) - len(tokens), len(record.pairs))) if forced else set()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), why=st.sampled_from([ORDINARY, HOOKED]))
    def uncertify(self, data: st.DataObject, why: str) -> None:
        branch_id, record, _ = self.pick(data)
        position = data.draw(st.integers(0, len(record.pairs)))
        self.tree.uncertify(branch_id, position, why)
        first = max(position, record.text.count("P"))
        record.doubt = (first, why) if record.doubt is None else (min(first, record.doubt[0]), record.doubt[1])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), letter=st.sampled_from("AAAAAPD~R"), leftmost=st.booleans())
    def mark(self, data: st.DataObject, letter: str, leftmost: bool) -> None:
        branch_id, record, allowed = self.pick(data, "open", "finished")
        committed = len(record.text.rstrip("~DR"))
        start = committed if leftmost else data.draw(st.integers(0, len(record.pairs)))
        end = data.draw(st.integers(start, len(record.pairs)))
        new = record.text[:start] + letter * (end - start) + record.text[end:]
        if not allowed:
            return self.refused(ClosedBranch, self.tree.mark, branch_id, start, end, LETTERS[letter])
        if start < end and (letter != "A" or set(record.text[start:end]) - set("D~") or not legal(new)):
            return self.refused(InternalError, self.tree.mark, branch_id, start, end, LETTERS[letter])
        self.tree.mark(branch_id, start, end, LETTERS[letter])
        record.pairs = [(token, letter) for (token, _), letter in zip(record.pairs, new, strict=True)]

    @precondition(lambda self: 0 < len(self.model) < 12)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        branch_id, record, allowed = self.pick(data, "open", "finished", "rejected")
        if not allowed:
            return self.refused(ClosedBranch, self.tree.fork, branch_id)
        length = data.draw(st.none() | st.integers(0, len(record.pairs)))
        left_at = len(record.pairs) if length is None else length
        wanted = "D" if "~" in record.text or "D" in record.text else "A"
        pairs = [(token, letter.replace("R", wanted)) for token, letter in record.pairs[:left_at]]
        child = Naive(branch_id, left_at, pairs, **record.up_to(left_at))
        if "R" in record.text[:left_at]:  # who forks there asks for them
            child.given = {at for at in child.given if at < record.left_at} | set(range(record.left_at, left_at))
        self.made(self.tree.fork(branch_id, length), child)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), keep=st.booleans(), reopen=st.booleans())
    def rollback(self, data: st.DataObject, keep: bool, reopen: bool) -> None:
        branch_id, record, allowed = self.pick(data, "open", "finished")
        length = data.draw(st.integers(-1, len(record.pairs) + 1))
        if not allowed:
            return self.refused(ClosedBranch, self.tree.rollback, branch_id, length, keep)
        if not record.text.count("P") <= length <= len(record.pairs):
            return self.refused(BadRequest, self.tree.rollback, branch_id, length, keep)
        reopen = reopen and record.text[:length].endswith("A")
        kept_id = self.tree.rollback(branch_id, length, keep, reopen)
        cut = record.pairs[length:]
        if keep and cut:
            pairs = record.pairs[:length] + [(token, "R") for token, _ in cut]
            rejected = Naive(branch_id, length, pairs, "rejected", doubt=record.doubt, given=record.up_to(length)["given"])
            self.made(kept_id, rejected)
        else:
            assert kept_id is None
        del record.pairs[length:]
        record.pairs[-1:] = [(record.pairs[-1][0], "~")] if reopen else record.pairs[-1:]
        record.given, record.doubt = record.up_to(length)["given"], record.up_to(length)["doubt"]
        record.status, record.reason, record.left_at = "open", None, min(record.left_at, length)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), reason=st.sampled_from(["eos", "stop", "length"]))
    def finish(self, data: st.DataObject, reason: str) -> None:
        branch_id, record, allowed = self.pick(data, "open")
        if not allowed:
            return self.refused(ClosedBranch, self.tree.finish, branch_id, reason)
        self.tree.finish(branch_id, reason)
        record.status, record.reason = "finished", reason

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        branch_id, record, allowed = self.pick(data, "open", "finished", "rejected")
        if not allowed:
            return self.refused(ClosedBranch, self.tree.release, branch_id)
        self.tree.release(branch_id)
        record.status = "released"
        for child in (self.model[each] for each in record.children):
            child.status = "released" if child.status == "rejected" else child.status
        self.drop()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """Drop the handle of a branch: once released, the branch goes, except for what other branches still need."""
        _, record, _ = self.pick(data)
        record.held = None
        self.drop()

    def drop(self) -> None:
        """The naive model of which branches keep which, to a fixed point."""
        kept = {i for i, record in self.model.items() if record.held or record.status != "released"}
        while True:
            above = {self.model[i].parent for i in kept if "R" not in self.model[i].text}
            above |= {self.model[i].parent for i in above if i is not None and "R" in self.model[i].text}
            cut = {child for i in kept for child in self.model[i].children if "R" in self.model[child].text}
            more = {i for i in above | cut if i is not None} - kept
            if not more:
                break
            kept |= more
        for branch_id in [i for i in self.model if i not in kept]:
            del self.model[branch_id]
            self.gone.append(branch_id)
        for record in self.model.values():
            record.children = [child for child in record.children if child in self.model]

    @invariant()
    def same(self) -> None:
        tree, model = self.tree, self.model
        for branch_id, record in model.items():
            branch = tree.branch(branch_id)
            assert tree.path(branch_id) == [token for token, _ in record.pairs]
            assert letters(branch) == record.text
            assert (branch.parent, branch.fork_position) == (record.parent, record.left_at)
            assert (branch.status.value, branch.finish_reason) == (record.status, record.reason)
            assert tree.children(branch_id) == record.children
            assert [cut.id for cut in branch.cut] == [child for child in record.children if "R" in model[child].text]
            assert branch.root_length == record.text.count("P")
            assert branch.words() == record.words()
            doubt = None if branch.uncertified_from is None else (branch.uncertified_from, branch.uncertified_why)
            assert doubt == record.doubt
        assert tree.roots() == [branch_id for branch_id, record in model.items() if record.parent is None]
        for branch_id in [*self.gone[-2:], self.num_made]:
            self.refused(BadRequest, tree.path, branch_id)
        assert sum(tree.check_integrity().branches.values()) == len(tree) == len(model)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


# The worked examples: prompt, T0, drafts T1' T2' T3', one verify pass, with pages of two positions


def drafted() -> tuple[BranchTree, int, PagePool, PageTable]:
    """Prompt of 3 and T0 = 10, drafts 11 12 13; KV exists for all 7 positions."""
    tree, pool, table = BranchTree(), PagePool(8, 2), PageTable()
    root = tree.plant([1, 2, 3])
    tree.append(root, [10], PENDING)
    tree.append(root, [11, 12, 13], DRAFT)
    pool.reserve(table, 0, 7)
    assert letters(tree.branch(root)) == "PPP~DDD" and table.pages == [1, 2, 3, 4]
    return tree, root, pool, table


def test_all_match_and_the_next_token_comes_free() -> None:
    tree, root, pool, table = drafted()
    tree.mark(root, 3, 7, ACCEPTED)
    assert tree.rollback(root, 7, keep=True) is None
    tree.append(root, [14], PENDING)
    assert (tree.path(root), letters(tree.branch(root))) == ([1, 2, 3, 10, 11, 12, 13, 14], "PPPAAAA~")
    assert table.length == len(tree.path(root)) - 1  # the pending token has no KV yet
    pool.check_integrity([table])


def test_a_mismatch_restores_to_the_last_accepted_token() -> None:
    tree, root, pool, table = drafted()
    tree.mark(root, 3, 5, ACCEPTED)  # T0 and T1; the verifier says 20 instead of 12
    rejected = tree.rollback(root, 5, keep=True)
    pool.truncate(table, 5)
    tree.append(root, [20], PENDING)
    assert (tree.path(root), letters(tree.branch(root))) == ([1, 2, 3, 10, 11, 20], "PPPAA~")
    assert (table.pages, table.length, pool.num_free) == ([1, 2, 3], 5, 5)
    assert rejected is not None and tree.children(root) == [rejected]
    assert (tree.path(rejected), letters(tree.branch(rejected))) == ([1, 2, 3, 10, 11, 12, 13], "PPPAARR")
    assert str(tree.check_integrity()) == (
        "tree: 2 branches (1 open, 1 rejected); tokens: 6 prompt, 4 accepted, 1 pending, 2 rejected"
    )


# Known bugs of other engines


def test_finish_reason_is_cleared_by_a_rollback() -> None:
    tree = BranchTree()
    root = tree.plant([1])
    tree.append(root, [2, 99], DRAFT)  # 99: end of text, in the part that is rejected
    tree.finish(root, "eos")
    child = tree.fork(root)
    tree.rollback(root, 2)
    branch = tree.branch(root)
    assert (branch.status, branch.finish_reason) == (BranchStatus.OPEN, None)
    assert tree.branch(child).finish_reason is None  # nor does a fork inherit it
    tree.append(root, [3], DRAFT)
    with pytest.raises(ClosedBranch, match=r"finished\. Roll it back or fork it"):
        tree.finish(root, "length")
        tree.append(root, [4], DRAFT)


def test_rollback_of_a_parent_below_a_fork_does_not_hurt_the_child() -> None:
    tree = BranchTree()
    root = tree.plant([1, 2])
    tree.append(root, [3, 4], ACCEPTED)
    child = tree.fork(root)
    tree.rollback(root, 2)
    tree.append(root, [3, 9], ACCEPTED)
    assert tree.path(child) == [1, 2, 3, 4] and tree.branch(child).fork_position == 4
    assert tree.common_prefix(root, child) == 3
    assert tree.common_prefix(child, child) == 4
    tree.rollback(child, 3)  # the child itself goes below: it now forks there
    assert tree.branch(child).fork_position == 3
    tree.check_integrity()


def test_a_path_that_another_begins_with_is_all_that_they_share() -> None:
    tree = BranchTree()
    root = tree.plant([1, 2, 3, 4])
    child = tree.fork(root, 2)
    assert tree.common_prefix(root, child) == tree.common_prefix(child, root) == 2
    whole, part = tree.branch(root).past, tree.branch(child).past
    assert whole.mark(4).common(part.path(2)) == 2 and whole.mark(1).common(part.path(2)) == 1


def test_a_rejected_branch_can_be_forked_and_gone_on_with() -> None:
    tree, root, _, _ = drafted()
    tree.mark(root, 3, 5, ACCEPTED)
    rejected = tree.rollback(root, 5, keep=True)
    assert rejected is not None
    whole, part, before = tree.fork(rejected), tree.fork(rejected, 6), tree.fork(rejected, 4)
    assert [letters(tree.branch(child)) for child in (whole, part, before)] == ["PPPAAAA", "PPPAAA", "PPPA"]
    tree.append(whole, [14], PENDING)
    assert letters(tree.branch(rejected)) == "PPPAARR" and tree.children(root) == [rejected]
    tree.check_integrity()


def test_a_fork_of_what_was_rejected_unverified_starts_with_drafts() -> None:
    tree, root, _, _ = drafted()
    rejected = tree.rollback(root, 5, keep=True)  # T0 is still pending, T1' still a draft
    assert rejected is not None
    assert letters(tree.branch(tree.fork(rejected))) == "PPP~DDD"
    tree.check_integrity()
    tree, root, _, _ = drafted()
    rejected = tree.rollback(root, 4, keep=True)  # T0 alone is pending
    assert rejected is not None and letters(tree.branch(rejected)) == "PPP~RRR"
    assert letters(tree.branch(tree.fork(rejected))) == "PPP~DDD"


# Refusals


def test_rollback_stays_between_prompt_and_tip() -> None:
    tree = BranchTree()
    root = tree.plant([1, 2])
    tree.append(root, [3], DRAFT)
    for length in (-1, 1, 4):
        with pytest.raises(BadRequest, match=r"Use 2 \(its prompt\) to 3 \(its tip\)"):
            tree.rollback(root, length)
    child = tree.fork(root, 1)  # leaving within the prompt is a fork
    assert tree.branch(child).root_length == 1


def test_tokens_are_accepted_from_the_left() -> None:
    tree = BranchTree()
    root = tree.plant([1])
    tree.append(root, [2], PENDING)
    tree.append(root, [3, 4], DRAFT)
    for start, left in ((2, "position 1 is still pending"), (3, "position 2 is still draft")):
        with pytest.raises(InternalError, match=left):
            tree.mark(root, start, 4, ACCEPTED)
    with pytest.raises(InternalError, match="position 0: prompt cannot become accepted"):
        tree.mark(root, 0, 4, ACCEPTED)
    with pytest.raises(InternalError, match="position 1: pending cannot become rejected"):
        tree.mark(root, 1, 2, REJECTED)
    with pytest.raises(InternalError, match="1 accepted tokens cannot follow a draft token"):
        tree.append(root, [9], ACCEPTED)
    assert letters(tree.branch(root)) == "P~DD"


def test_ranges_are_checked() -> None:
    tree = BranchTree()
    root = tree.plant([1, 2])
    for call in (
        lambda: tree.fork(root, 3),
        lambda: tree.fork(root, -1),
        lambda: tree.mark(root, 0, 3, ACCEPTED),
        lambda: tree.mark(root, 2, 1, ACCEPTED),
    ):
        with pytest.raises(BadRange):
            call()


def test_closed_and_unknown_branches() -> None:
    tree = BranchTree()
    root = tree.plant([1])
    tree.append(root, [2], DRAFT)
    rejected = tree.rollback(root, 1, keep=True)
    assert rejected is not None
    with pytest.raises(ClosedBranch, match=r"rejected\. Fork it to continue with its tokens"):
        tree.append(rejected, [3], DRAFT)
    held = tree.branch(root)
    tree.release(root)
    for closed in (root, rejected):  # its rejected part goes with it
        with pytest.raises(ClosedBranch, match="released"):
            tree.fork(closed)
    assert tree.path(root) == held.tokens == [1] and tree.children(root) == [rejected]
    del held
    with pytest.raises(BadRequest, match=r"No branch 0\. 0 branches are known, with ids below 2"):
        tree.path(root)
    assert tree.plant([1]) == 2  # ids are never reused


# What keeps a record alive


def test_a_fork_keeps_those_above_it() -> None:
    """A fork keeps its ancestors, also if it was forked from their rejected part. They go with it."""
    tree, root, _, _ = drafted()
    rejected = tree.rollback(root, 5, keep=True)
    assert rejected is not None
    fork = tree.fork(tree.fork(rejected))
    for released in (root, tree.branch(fork).parent):
        assert released is not None
        tree.release(released)
    assert len(tree) == 4 and tree.children(root) == [rejected]
    tree.check_integrity()
    tree.release(fork)
    assert len(tree) == 0


def test_a_released_fork_that_nobody_holds_is_no_child_any_more() -> None:
    tree = BranchTree()
    root = tree.plant([1, 2])
    for _ in range(1000):
        tree.release(tree.fork(root))
    assert tree.children(root) == [] and len(tree) == 1


def test_a_long_line_of_forks_goes_at_once() -> None:
    tree = BranchTree()
    branch_id = tree.plant([1, 2])
    for _ in range(20_000):
        branch_id, parent = tree.fork(branch_id), branch_id
        tree.release(parent)
    assert len(tree) == 20_001
    tree.release(branch_id)
    assert len(tree) == 0


def test_a_discarded_branch_is_gone() -> None:
    tree, root, _, _ = drafted()
    rejected = tree.rollback(root, 5, keep=True)
    assert rejected is not None
    tree.discard(rejected)
    assert tree.children(root) == [] and len(tree) == 1


# Our own bugs are found and named


Record = BranchRecord
FAULTS: list[tuple[Callable[[Record, Record, Record], object], str]] = [
    (lambda root, child, gone: setattr(child, "parent", 99), "Branch 0: child 1 is unknown or has another parent"),
    (lambda root, child, gone: setattr(child, "parent", 2), "Branch 0: child 1 is unknown or has another parent"),
    (lambda root, child, gone: root.forks.pop(1), "Branch 1 is not among its parent's children"),
    (lambda root, child, gone: root.cut.append(STRANGE), "Branch 0: child 77 is unknown"),
    (
        lambda root, child, gone: setattr(child, "tokens", TokenPath([55, *child.tokens[1:]])),
        "Branch 1: its first 2 tokens changed after the fork",
    ),
    (
        lambda root, child, gone: child.base._parts[0].tokens.__setitem__(0, 55),
        "Branch 0: its shared tokens 0 to 1 changed",
    ),
    (lambda root, child, gone: setattr(child, "fork_position", 9), "Branch 1: fork position 9 of 5 tokens"),
    (lambda root, child, gone: child.states.truncate(4), "Branch 1: 5 tokens but 4 states"),
    (
        lambda root, child, gone: setattr(child, "states", PathStates([2, 0, 2, 1, 0])),
        "Branch 1: pending at 2 before pending at 3",
    ),
    (
        lambda root, child, gone: setattr(child, "states", PathStates([2, 0, 1, 1, 1])),
        "Branch 1: status open with 1 rejected tokens",
    ),
    (lambda root, child, gone: setattr(child, "root_length", 1), "Branch 1: root length 1, 2 prompt tokens"),
    (lambda root, child, gone: setattr(child, "finish_reason", "eos"), "Branch 1: status open with finish reason 'eos'"),
    (lambda root, child, gone: gone.tokens._parts[2].__setitem__(-1, 55), "Branch 2: changed after it was released"),
    (lambda root, child, gone: setattr(child, "id", 5), "Branch 5 is stored under id 1"),
]
STRANGE = BranchRecord(77, 0, 0, TokenPath(), PathStates(), 0)


@pytest.mark.parametrize(("plant", "text"), FAULTS, ids=[text for _, text in FAULTS])
def test_a_fault_is_named(plant: Callable[[Record, Record, Record], object], text: str) -> None:
    tree = BranchTree()
    root = tree.plant([1, 2])
    child, gone = tree.fork(root), tree.fork(root)
    tree.append(child, [3], PENDING)
    tree.append(child, [4, 5], DRAFT)
    tree.append(gone, [3], ACCEPTED)
    held = tree.branch(gone)
    tree.release(gone)
    tree.check_integrity()
    assert held.status is BranchStatus.RELEASED
    plant(*(tree.branch(each) for each in (root, child, gone)))
    with pytest.raises(IntegrityError, match=text):
        tree.check_integrity()


def test_an_orphan_is_named() -> None:
    tree = BranchTree()
    root = tree.plant([1])
    child = tree.fork(root)
    tree.branch(root).forks.clear()
    tree.branch(child).parent = 99
    with pytest.raises(IntegrityError, match="Branch 1: parent 99 is unknown or younger"):
        tree.check_integrity()
