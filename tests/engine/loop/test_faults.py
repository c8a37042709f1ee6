"""Planted faults: each is found and named, in the pass that would read it or in the next integrity check. None is served.

All faults are planted into the same session. Without a fault the session gives the reference's bits, so the check finds the
fault and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import EngineError, IntegrityError
from replaylens.engine.loop.commit import Committer, Outcome
from replaylens.engine.loop.drafters import Chains, DraftCall
from replaylens.engine.loop.lane import Turn
from replaylens.engine.memory.pages import PagePool
from replaylens.engine.serving.branch import Branch
from tests.engine.reference import decoder, differences, reference_of

FAMILY = "llama"
PROMPT = tuple((i * i + 3 * i) % 97 for i in range(22))
PAGE = 4


@dataclass
class Session:
    """An engine in debug mode with a captured branch, a plain one, and a former prompt that only the prefix index holds."""

    engine: Engine
    branch: Branch
    plain: Branch

    @property
    def pages(self) -> list[int]:
        return self.branch.lane.table.pages

    @property
    def pool(self) -> PagePool:
        return self.engine.runner.pool

    def slot(self, position: int) -> int:
        return self.pool.slot(self.branch.lane.table, position)

    def flip(self, position: int, layer: int = 0, kind: int = 0) -> None:
        """Flip the lowest bit of one number, the smallest possible change."""
        entry = self.engine.runner.cache.data[layer, kind, 0, self.slot(position)]
        entry.view(torch.int32)[0] ^= 1

    def go_on(self) -> None:
        """More work on both branches, and the former prompt again."""
        for branch in (self.branch, self.plain):
            branch.force([1, 2, 3])
            branch.generate(3, drafter="lens", window=3, final=True)
        self.engine.prompt(FORMER).generate(2)

    def recount(self) -> None:
        self.engine.check_integrity()


FORMER = tuple((5 * i + 1) % 97 for i in range(13))


@pytest.fixture
def session() -> Session:
    engine = Engine(decoder(FAMILY), page_size=PAGE, cache_tokens=256, canary=True)
    engine.prompt(FORMER).release()  # its pages stay in the prefix index
    branch = engine.prompt(PROMPT, sites="STCZ", keep_rejected=True)
    plain = engine.prompt(PROMPT[::-1])
    for one in (branch, plain):
        one.generate(6, drafter="lens", window=3, final=True)
    engine.check_integrity()
    return Session(engine, branch, plain)


Fault = Callable[[Session], str]
"""plants the fault and returns what the error must say"""


def flipped_first_key(s: Session) -> str:
    s.flip(0, layer=0, kind=0)
    return rf"slot {s.slot(0)} \(page {s.pages[0]}\), position 0, token {PROMPT[0]} changed"


def flipped_last_value(s: Session) -> str:
    s.flip(23, layer=2, kind=1)
    return rf"slot {s.slot(23)} \(page {s.pages[5]}\), position 23, token {s.branch.tokens[23]} changed"


def swapped_entries(s: Session) -> str:
    s.pages[1], s.pages[3] = s.pages[3], s.pages[1]
    return rf"Slot {s.slot(4)} \(page {s.pages[1]}\) does not hold position 4, token {PROMPT[4]}"


def foreign_entry(s: Session) -> str:
    s.pages[2] = s.plain.lane.table.pages[2]
    return rf"Slot {s.slot(8)} \(page {s.pages[2]}\) does not hold position 8, token {PROMPT[8]}"


def entry_with_another_past(s: Session) -> str:
    """The same tokens at the same positions, but of a prompt with another beginning."""
    other = s.engine.prompt((PROMPT[0] ^ 1, *PROMPT[1:13]))
    s.pages[2] = other.lane.table.pages[2]
    return rf"Slot {s.slot(8)} \(page {s.pages[2]}\) does not hold position 8, token {PROMPT[8]}"


def forgotten_rollback(s: Session) -> str:
    """The tokens are cut, but their rows still count as computed."""
    s.engine.tree.rollback(s.plain.id, 26)
    return rf"Slot {s.pool.slot(s.plain.lane.table, 26)} \(page \d+\) does not hold position 26, token 1 of this path"


def overwritten_prefix(s: Session) -> str:
    """A write to a page that the prefix index holds for an earlier prompt."""
    page = s.engine.prefix.match(FORMER)[1]
    slots = [page * PAGE + i for i in range(PAGE)]
    s.engine.runner.cache.chain[slots[0]] = 0  # type: ignore[index]
    s.engine.runner.cache.seal([*FORMER[:4], 8, 8, 8, 8], [0] * 4 + slots, 5)
    return rf"Slot {slots[0]} \(page {page}\) does not hold position 4, token {FORMER[4]}"


def flipped_prefix(s: Session) -> str:
    page = s.engine.prefix.match(FORMER)[2]
    s.engine.runner.cache.data[1, 1, 1, page * PAGE + 3].view(torch.int32)[0] ^= 1
    return rf"slot {page * PAGE + 3} \(page {page}\), position 11, token {FORMER[11]} changed"


def dropped_row(s: Session) -> str:
    chunk = s.branch.activations.chunks[0]
    chunk.end, chunk.positions = chunk.end - 1, chunk.positions[:-1]
    return rf"Captured rows: position {chunk.end + 1} follows {chunk.end - 1}; expected {chunk.end}"


def dropped_row_of_one_site(s: Session) -> str:
    chunk = s.branch.activations.chunks[0]
    chunk.rows = {site: chunk.piece(site)[site == "blocks.1.mlp.hook_out" :] for site in chunk.rows}
    return rf"Captured rows of blocks.1.mlp.hook_out: {chunk.end - 1} rows for positions \[0, {chunk.end}\)"


IN_THE_NEXT_PASS: dict[Fault, type[EngineError]] = {
    flipped_first_key: IntegrityError,
    flipped_last_value: IntegrityError,
    swapped_entries: IntegrityError,
    foreign_entry: IntegrityError,
    entry_with_another_past: IntegrityError,
    forgotten_rollback: IntegrityError,
    overwritten_prefix: IntegrityError,
    flipped_prefix: IntegrityError,
    dropped_row: IntegrityError,
    dropped_row_of_one_site: IntegrityError,
}


def owned_too_often(s: Session) -> str:
    s.pool._refcounts[s.pages[3]] += 1
    return rf"Page {s.pages[3]}: reference count 3, but 2 references found"


def owned_too_seldom(s: Session) -> str:
    s.pool._refcounts[s.pages[3]] -= 1
    return rf"Page {s.pages[3]}: reference count 1, but 2 references found"


def free_while_used(s: Session) -> str:
    s.pool._free.append(s.pages[0])
    return rf"Free list: page {s.pages[0]} has reference count"


def leaked(s: Session) -> str:
    return f"Free list: page {s.pool._free.pop()} has reference count 0 but is not listed"


def zeroed_entry(s: Session) -> str:
    s.pages[2] = 0
    return r"entry 2 is page 0, outside"


def entry_of_another_branch(s: Session) -> str:
    lost, s.pages[2] = s.pages[2], s.plain.lane.table.pages[2]
    return rf"Page {lost}: reference count \d, but \d references found|Page {s.pages[2]}: reference count"


def computed_beyond_the_tokens(s: Session) -> str:
    """A rollback that does not cut the KV."""
    s.engine.tree.rollback(s.branch.id, 24)
    return rf"Branch {s.branch.id}: 28 computed positions"


def stale_prefix_entry(s: Session) -> str:
    entry = next(iter(s.engine.prefix._entries.values()))
    entry.tokens = entry.tokens[::-1]
    return rf"Prefix entry \w+ \(page {entry.page}\): its tokens and edits do not hash to its key \(stale\)"


def prefix_entry_of_a_freed_page(s: Session) -> str:
    page = s.engine.prefix.match(FORMER)[0]
    s.pool.drop(page)
    return rf"Page {page}: reference count 0, but 1 references found"


IN_THE_NEXT_RECOUNT: tuple[Fault, ...] = (
    owned_too_often,
    owned_too_seldom,
    free_while_used,
    leaked,
    zeroed_entry,
    entry_of_another_branch,
    computed_beyond_the_tokens,
    stale_prefix_entry,
    prefix_entry_of_a_freed_page,
)


def test_without_a_fault_nothing_is_found(session: Session) -> None:
    session.go_on()
    session.recount()
    assert differences(session.branch, reference_of(FAMILY)) == []
    assert session.branch.tokens[-3:] == reference_of(FAMILY).continuation(session.branch.tokens[:-3], 3)


@pytest.mark.parametrize("fault", IN_THE_NEXT_PASS, ids=lambda fault: fault.__name__)
def test_the_next_pass_finds(session: Session, fault: Fault) -> None:
    said = fault(session)
    with pytest.raises(IN_THE_NEXT_PASS[fault], match=said):
        session.go_on()


@pytest.mark.parametrize("fault", IN_THE_NEXT_RECOUNT, ids=lambda fault: fault.__name__)
def test_the_next_recount_finds(session: Session, fault: Fault) -> None:
    said = fault(session)
    with pytest.raises(IntegrityError, match=said):
        session.recount()


@pytest.mark.parametrize("fault", [flipped_first_key, swapped_entries, dropped_row], ids=lambda fault: fault.__name__)
def test_nothing_of_a_broken_branch_is_served_and_its_neighbours_go_on(session: Session, fault: Fault) -> None:
    engine, before = session.engine, session.branch.tokens
    healthy = engine.prompt(PROMPT[5:14])
    fault(session)
    with pytest.raises(IntegrityError):
        engine.generate([session.branch, healthy], 5)
    assert session.branch.tokens == before
    assert healthy.generated == reference_of(FAMILY).continuation(PROMPT[5:14], 5)
    assert differences(healthy, reference_of(FAMILY)) == []
    assert not engine.loop.jobs


def test_a_dropped_last_row_is_computed_again(session: Session) -> None:
    session.branch.activations.chunks.pop()
    session.branch.force([5])
    assert differences(session.branch, reference_of(FAMILY)) == []
    assert session.branch.activations.positions() == list(range(session.branch.length))


# ---- a verification that forgets to roll back ------------------------------------------------------------------------


def test_rejected_drafts_that_stay_in_the_cache_are_found(monkeypatch: pytest.MonkeyPatch, session: Session) -> None:
    accept = Committer._accept_kv

    def forgetful(self: Committer, turn: Turn, outcome: Outcome) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.runner.pool, "truncate", lambda table, length: None)
            accept(self, turn, outcome)
        turn.job.lane.computed = min(turn.job.lane.table.length, turn.end + len(turn.chains[0]))

    monkeypatch.setattr(Committer, "_accept_kv", forgetful)
    branch, length = session.plain, session.plain.length
    stream = branch.stream(4, drafter="forced", drafts={length: [[0, 0, 0]]})
    next(stream)
    stream.close()
    with pytest.raises(IntegrityError, match=rf"Branch {branch.id}: {length + 3} computed positions"):
        session.recount()
    monkeypatch.undo()
    with pytest.raises(IntegrityError, match=rf"does not hold position {length}, token \d+"):
        branch.force([1, 2, 3])


# ---- drafters ---------------------------------------------------------------------------------------------------------


class Vandal:
    """Writes KV where a drafter must not: `distance` positions before the last token."""

    width, reproducible = 1, True

    def __init__(self, engine: Engine, distance: int) -> None:
        self.runner, self.distance = engine.runner, distance

    def propose(self, calls: list[DraftCall]) -> list[Chains]:
        for call in calls:
            position = len(call.path) - 1 - self.distance
            self.runner.cache.data[..., self.runner.pool.slot(call.tables[0], position), :] += 1
        return [[[0] * call.count] for call in calls]


@pytest.mark.parametrize("distance", [1, 5, 27])
def test_a_drafter_that_writes_before_the_last_token_is_found(session: Session, distance: int) -> None:
    position = session.branch.length - 1 - distance
    session.engine.loop.drafters["vandal"] = Vandal(session.engine, distance)
    with pytest.raises(IntegrityError) as found:
        session.branch.generate(3, drafter="vandal", window=3)
    assert f"slot {session.slot(position)} (page {session.pages[position // PAGE]}), position {position}," in str(found.value)


@pytest.mark.parametrize("distance", [0, -1])
def test_a_drafter_that_writes_where_it_may_is_not(session: Session, distance: int) -> None:
    session.engine.loop.drafters["vandal"] = Vandal(session.engine, distance)
    session.branch.generate(3, drafter="vandal", window=3, final=True)
    assert differences(session.branch, reference_of(FAMILY)) == []


def flipped(chain: list[int], where: int) -> list[int]:
    return [token ^ 1 if i == where else token for i, token in enumerate(chain)]


ADVERSARIES: dict[str, Callable[[list[int], DraftCall], Chains]] = {
    "right": lambda chain, call: [chain],
    "first flipped": lambda chain, call: [flipped(chain, 0)],
    "second flipped": lambda chain, call: [flipped(chain, 1)],
    "last flipped": lambda chain, call: [flipped(chain, len(chain) - 1)],
    "longer than asked": lambda chain, call: [chain + chain],
    "nothing": lambda chain, call: [[]],
    "no chain": lambda chain, call: [],
    "more chains than tables": lambda chain, call: [flipped(chain, 0), chain],
    "the same twice": lambda chain, call: [chain, chain],
    "last token again": lambda chain, call: [call.path[-1:] * call.count],
}


class Adversary:
    """Knows the next token, and proposes another one."""

    width, reproducible = 1, True

    def __init__(self, twist: Callable[[list[int], DraftCall], Chains]) -> None:
        self.twist = twist

    def propose(self, calls: list[DraftCall]) -> list[Chains]:
        truth = reference_of(FAMILY).continuation
        return [self.twist(truth(call.path[:], call.count, call.sampling, call.num_prompt), call) for call in calls]


def test_no_adversary_changes_the_output(session: Session) -> None:
    expected = session.branch.tokens + reference_of(FAMILY).continuation(session.branch.tokens, 9)
    for name, twist in ADVERSARIES.items():
        (branch,) = session.branch.fork()
        session.engine.loop.drafters["adversary"] = Adversary(twist)
        branch.generate(9, drafter="adversary", window=4, final=True)
        session.recount()
        assert branch.tokens == expected, name
        assert [d for one in (branch, *branch.rejected) for d in differences(one, reference_of(FAMILY))] == [], name
