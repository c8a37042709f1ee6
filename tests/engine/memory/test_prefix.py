"""`PrefixIndex`: the right pages or none, whatever the hash; eviction frees pages; faults are found by name."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replaylens.engine.errors import BadRange, IntegrityError, OutOfPages
from replaylens.engine.memory import prefix
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.memory.path import PathHistory, PathStates, TokenPath, TokenState
from replaylens.engine.memory.prefix import ROOT_KEY, PrefixIndex, Trail, chain_key
from replaylens.engine.memory.tree import BranchTree
from replaylens.engine.request.sampling import Sampling
from tests.devices import swept
from tests.toy_model import engine

SIZE = 2
Path = tuple[tuple[tuple[int, ...], bytes], ...]


def path_of(tokens: list[int], edit_keys: list[bytes] | None, num_pages: int) -> Path:
    """Everything that the bits of page num_pages - 1 depend on."""
    keys = edit_keys or [b""] * num_pages
    return tuple((tuple(tokens[i * SIZE : (i + 1) * SIZE]), keys[i]) for i in range(num_pages))


class PrefixMachine(RuleBasedStateMachine):
    """Requests come and go. `contents` maps each page to the path it was computed for."""

    hash_bytes = 32

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix, "chain_key", lambda *args: chain_key(*args)[: self.hash_bytes])

    def teardown(self) -> None:
        self.patch.undo()

    @initialize()
    def begin(self) -> None:
        self.pool = PagePool(14, SIZE)
        self.index = PrefixIndex(self.pool)
        self.tables: list[PageTable] = []
        self.trails: dict[PageTable, tuple[list[int], list[bytes] | None, Trail]] = {}
        self.contents: dict[int, Path] = {}
        self.indexed: dict[Path, int] = {}  # what an index with a perfect hash holds: path -> last use
        self.clock = 0

    def expected(self, tokens: list[int], edits: list[bytes] | None, limit: int) -> int:
        num_pages = 0
        while (num_pages + 1) * SIZE <= limit and path_of(tokens, edits, num_pages + 1) in self.indexed:
            num_pages += 1
        return num_pages

    def touch(self, tokens: list[int], edits: list[bytes] | None, num_pages: int) -> None:
        self.clock += 1
        for number in range(1, num_pages + 1):
            self.indexed[path_of(tokens, edits, number)] = self.clock

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        edits=st.none() | st.lists(st.sampled_from([b"", b"e"]), min_size=5, max_size=5),
        cut=st.integers(0, 3),
    )
    def request(self, tokens: list[int], edits: list[bytes] | None, cut: int) -> None:
        """Adopt cached pages, compute the rest and offer it, as the engine does with a prompt."""
        table = self.index.adopt(tokens, edits, limit=len(tokens) - 1)
        num_adopted = self.expected(tokens, edits, len(tokens) - 1)
        assert [self.contents[page] for page in table.pages] == [
            path_of(tokens, edits, number + 1) for number in range(len(table.pages))
        ]
        if self.hash_bytes == 32:
            assert table.length == num_adopted * SIZE
        self.touch(tokens, edits, table.length // SIZE)
        try:
            assert self.pool.reserve(table, table.length, len(tokens)) == []  # only whole pages are shared
        except OutOfPages:
            return self.pool.release(table)
        self.tables.append(table)
        self.trails[table] = (tokens, edits, Trail())
        self.offer(table, max(0, len(tokens) - cut))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), cut=st.integers(0, 3))
    def offer_again(self, data: st.DataObject, cut: int) -> None:
        """From where the last offer ended, whatever was evicted meanwhile."""
        table = data.draw(st.sampled_from(self.tables))
        self.offer(table, max(0, len(self.trails[table][0]) - cut))

    def offer(self, table: PageTable, upto: int) -> None:
        tokens, edits, trail = self.trails[table]
        for number in range(len(tokens) // SIZE):
            if table.pages[number] not in self.index.pages():
                self.contents[table.pages[number]] = path_of(tokens, edits, number + 1)
        num_new = self.index.offer(table, tokens, upto, edits, trail)
        if self.hash_bytes == 32:
            assert trail.num_pages == upto // SIZE
            assert num_new == upto // SIZE - self.expected(tokens, edits, upto)
            self.touch(tokens, edits, upto // SIZE)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule(num_pages=st.integers(-1, 6))
    def evict(self, num_pages: int) -> None:
        before, held = self.pool.num_free, {page for table in self.tables for page in table.pages}
        page_of = {self.contents[page]: page for page in self.index.pages()}
        num_freed = self.index.evict(num_pages)
        assert self.pool.num_free - before == num_freed <= max(0, num_pages)
        if num_freed < num_pages:  # nothing left to free
            assert all(entry.page in held or entry.num_children for entry in self.index._entries.values())
        if self.hash_bytes == 32:
            for _ in range(num_freed):
                leaves = [path for path in self.indexed if not any(path == other[:-1] for other in self.indexed)]
                oldest = min((self.indexed[path], path) for path in leaves if page_of[path] not in held)
                del self.indexed[oldest[1]]

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.indexed.clear()
        assert len(self.index) == 0

    @invariant()
    def consistent(self) -> None:
        numbers = self.index.check_integrity()
        assert numbers.num_entries == len(self.index) == len(set(self.index.pages()))
        self.pool.check_integrity(self.tables, retained=self.index.pages())
        if self.hash_bytes == 32:
            assert {self.contents[page] for page in self.index.pages()} == set(self.indexed)


class OneBitHash(PrefixMachine):
    """Half of all pages collide."""

    hash_bytes = 1

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr(prefix, "chain_key", lambda *args: bytes([chain_key(*args)[0] & 1]))


class NoHash(PrefixMachine):
    """All pages collide."""

    hash_bytes = 0


TestPrefix = PrefixMachine.TestCase
TestOneBitHash = OneBitHash.TestCase
TestNoHash = NoHash.TestCase
TestPrefix.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestOneBitHash.settings = TestNoHash.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)


def indexed(index: PrefixIndex, tokens: list[int], edit_keys: list[bytes] | None = None, keep: bool = False) -> PageTable:
    """Offer freshly computed pages of `tokens`, and release the table unless `keep` is set."""
    table = PageTable()
    index.pool.reserve(table, 0, len(tokens))
    index.offer(table, tokens, len(tokens), edit_keys)
    if not keep:
        index.pool.release(table)
    return table


def test_whole_pages_within_the_limit() -> None:
    index = PrefixIndex(PagePool(8, 4))
    indexed(index, list(range(10)))
    assert index.match(list(range(10))) == [1, 2]  # positions 8 and 9 fill no page
    assert index.match(list(range(8)), limit=7) == [1]
    assert index.match([0, 1, 2, 3, 4, 5, 6, 99, 8]) == [1]
    assert index.match([1, 2, 3, 4]) == index.match([]) == index.match(list(range(8)), limit=0) == []
    assert index.match([4, 5, 6, 7]) == []  # the same tokens, but not at the start
    assert str(index.check_integrity()) == ("prefix index: 2 pages on 1 paths, 2 not used elsewhere, 0 shared with tables")


def test_adopted_pages_are_shared_and_never_written() -> None:
    pool = PagePool(8, 4)
    index = PrefixIndex(pool)
    indexed(index, list(range(8)))
    table = index.adopt(list(range(9)), limit=8)
    assert (table.pages, table.length, pool.refcount(1)) == ([1, 2], 8, 2)
    assert pool.reserve(table, 8, 9) == []
    pool.truncate(table, 6)
    [copy] = pool.reserve(table, 6, 8)  # rolling back into a shared page takes a copy
    assert copy.source == 2 and index.match(list(range(8))) == [1, 2]
    pool.check_integrity([table], retained=index.pages())


def test_the_first_of_two_equal_pages_stays() -> None:
    pool = PagePool(8, 2)
    index = PrefixIndex(pool)
    first, second = PageTable(), PageTable()
    for table in (first, second):
        pool.reserve(table, 0, 4)
    assert index.offer(first, [1, 2, 3, 4], 2) == 1
    assert index.offer(second, [1, 2, 3, 4], 4) == 1  # its second page is new, its first is not
    assert index.match([1, 2, 3, 4]) == [first.pages[0], second.pages[1]]
    pool.check_integrity([first, second], retained=index.pages())
    index.check_integrity()


def test_edits_separate() -> None:
    index = PrefixIndex(PagePool(12, 2))
    tokens = [1, 2, 3, 4]
    indexed(index, tokens)
    indexed(index, tokens, [b"", b"steer"])
    indexed(index, tokens, [b"steer", b""])
    assert index.match(tokens) == [1, 2]
    assert index.match(tokens, [b"", b"steer"]) == [1, 4]  # shared up to the first edited page
    assert index.match(tokens, [b"steer", b""]) == [2 + 1, 5]  # an edit separates all pages after it
    assert index.match(tokens, [b"other", b""]) == []
    with pytest.raises(BadRange, match="1 edit keys for 2 whole pages"):
        index.match(tokens, [b""])


def test_keys_do_not_run_together() -> None:
    key = ROOT_KEY
    keys = {
        chain_key(key, [1, 2], b""),
        chain_key(key, [2, 1], b""),
        chain_key(key, [1, 2], b"\0"),
        chain_key(key, [1, 2], b"\0" * 8),
        chain_key(chain_key(key, [1, 2], b""), [1, 2], b""),
    }
    assert len(keys) == 5


@pytest.mark.parametrize("constant", [b"", b"same"])
def test_a_planted_collision_does_not_match(monkeypatch: pytest.MonkeyPatch, constant: bytes) -> None:
    monkeypatch.setattr(prefix, "chain_key", lambda *_: constant)
    monkeypatch.setattr(prefix, "ROOT_KEY", constant)
    pool = PagePool(12, 2)
    index = PrefixIndex(pool)
    indexed(index, [1, 2, 1, 2])
    assert index.match([1, 2]) == [1]
    assert index.match([1, 2, 1, 2]) == [1]  # the second page has the same hash and tokens, but another prefix
    assert index.match([3, 4]) == index.match([1, 2], [b"edit"]) == []
    assert index.adopt([3, 4]).pages == []
    indexed(index, [3, 4])  # the place is already taken
    assert index.match([3, 4]) == [] and len(index) == 1
    pool.check_integrity([], retained=index.pages())
    index.check_integrity()


def test_eviction_takes_the_least_recently_used_leaf_and_never_a_parent() -> None:
    pool = PagePool(10, 2)
    index = PrefixIndex(pool)
    indexed(index, [1, 1, 2, 2, 3, 3])  # pages 1 2 3
    indexed(index, [1, 1, 4, 4])  # page 1 again, and its own leaf
    indexed(index, [5, 5])
    pool.release(index.adopt([1, 1, 2, 2, 3, 3]))
    free = pool.num_free
    assert index.evict(1) == 1 and index.match([1, 1, 4, 4]) == [1]
    assert index.evict(1) == 1 and index.match([5, 5]) == []
    assert index.evict(2) == 2 and index.match([1, 1, 2, 2, 3, 3]) == [1]
    assert index.evict(9) == 1 and index.evict(1) == 0
    assert pool.num_free == free + 5 == 10


def test_a_prefix_is_as_recent_as_what_was_after_it() -> None:
    """A long path was just used, and another one before it. Once its end is evicted, its beginning is not the oldest."""
    pool = PagePool(10, 2)
    index = PrefixIndex(pool)
    indexed(index, [1, 1, 2, 2, 3, 3])
    indexed(index, [5, 5])
    indexed(index, [6, 6])
    busy = index.adopt([5, 5])
    pool.release(index.adopt([1, 1, 2, 2, 3, 3]))  # now the most recent, after 6, 6
    assert index.evict(1) == 1 and index.match([6, 6]) == []
    indexed(index, [7, 7])
    assert index.evict(1) == 1 and len(index.match([1, 1, 2, 2, 3, 3])) == 2
    indexed(index, [8, 8])
    pool.release(busy)
    assert index.evict(1) == 1 and index.match([5, 5]) == []
    assert len(index.match([1, 1, 2, 2])) == 2, "used after 5, 5, so evicted after it, end first"
    assert index.evict(2) == 2 and index.match([1, 1]) == [] and index.match([7, 7]) and index.match([8, 8])


def test_what_was_used_since_it_was_listed_is_not_the_oldest() -> None:
    """An eviction lists what could go. What is adopted and let go of afterwards still has its old rank there."""
    pool = PagePool(10, 2)
    index = PrefixIndex(pool)
    for token in (1, 2, 3):
        indexed(index, [token, token])
    assert index.evict(1) == 1 and index.match([1, 1]) == []
    pool.release(index.adopt([2, 2]))
    assert index.evict(1) == 1 and index.match([3, 3]) == [] and index.match([2, 2]) != []


def test_bad_ranges() -> None:
    pool = PagePool(6, 2)
    index, table = PrefixIndex(pool), PageTable()
    pool.reserve(table, 0, 4)
    for tokens, upto in (([1] * 9, 5), ([1] * 3, 4), ([1] * 4, -1)):
        with pytest.raises(BadRange, match="Cannot offer"):
            index.offer(table, tokens, upto)
    with pytest.raises(BadRange, match="limit is -1"):
        index.match([1, 2], limit=-1)
    assert len(index) == 0


FAULTS: dict[str, tuple[Callable[[PrefixIndex, Any, Any], object], str]] = {
    "tokens": (lambda index, first, second: setattr(second, "tokens", (2, 9)), "its tokens and edits do not hash to its key"),
    "edit": (lambda index, first, second: setattr(second, "edit_key", b"edit"), r"do not hash to its key \(stale\)"),
    "parent": (lambda index, first, second: index._entries.pop(first.key), "the entry before it, [0-9a-f]{8}, is gone"),
    "children": (lambda index, first, second: setattr(second, "num_children", 3), "3 children counted, 1 found"),
    "page": (lambda index, first, second: setattr(second, "page", 1), "its page also belongs to entry [0-9a-f]{8}"),
    "freed": (lambda index, first, second: setattr(second, "page", 6), "its page is not in use"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    index = PrefixIndex(PagePool(6, 2))
    indexed(index, [1, 1, 2, 2, 3, 3])
    index.check_integrity()
    first, second, _ = index._entries.values()
    plant, text = FAULTS[fault]
    plant(index, first, second)
    with pytest.raises(IntegrityError, match=rf"\(page {second.page}\): {'.*' if fault == 'edit' else ''}{text}"):
        index.check_integrity()


def test_forks_do_not_hash_their_prefix_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork continues where the index knows its path, also if it is cut within it. After a rollback, nothing wrong is kept."""
    subject = engine(cache_tokens=4096)
    root = subject.prompt([3 + i % 7 for i in range(100)])
    hashed = []
    real = prefix.chain_key
    monkeypatch.setattr(prefix, "chain_key", lambda *given: (hashed.append(1), real(*given))[1])
    forks = [*root.fork(5), *root.fork(5, at=50)]
    subject.generate(forks, 2, sampling=Sampling(ignore_eos=True))
    assert len(hashed) <= len(forks), "at most the page that a fork completed"
    for fork in forks:
        fork.rollback(to=fork.length - 2).force([9] * 40)
    subject.check_integrity()
    assert forks[0].kv().equal(engine(cache_tokens=4096).prompt(forks[0].tokens).kv())


# ---- path ------------------------------------------------------------------------------------------------------------
# `TokenPath` and `PathStates` against plain lists, over any order of forks, additions and cuts.

ACCEPTED, DRAFT, PENDING, PROMPT = TokenState.ACCEPTED, TokenState.DRAFT, TokenState.PENDING, TokenState.PROMPT


@pytest.mark.parametrize("seed", swept(range(20), 0, 1, 2, 3, 4))
def test_paths_are_the_lists_that_they_would_be(seed: int) -> None:
    chance = random.Random(seed)
    paths: list[tuple[TokenPath, list[int]]] = [(TokenPath(range(9)), list(range(9)))]
    for _ in range(200):
        path, plain = chance.choice(paths)
        match chance.choice(["fork", "extend", "extend", "truncate", "drop"]):
            case "fork":
                length = chance.choice([len(plain), chance.randint(0, len(plain))])
                paths.append((path.fork(length), plain[:length]))
            case "extend":
                new = [chance.randrange(1000) for _ in range(chance.choice([1, 1, 2, 30]))]
                path.extend(new)
                plain.extend(new)
            case "truncate":
                length = max(0, len(plain) - chance.choice([0, 1, 3, 40]))
                path.truncate(length)
                del plain[length:]
            case "drop" if len(paths) > 6:
                paths.remove((path, plain))
        for path, plain in paths:
            path.check_integrity("path")
            first, last = sorted(chance.randint(0, len(plain) + 2) for _ in range(2))
            assert len(path) == len(plain) and path == plain and list(path) == plain
            assert path[first:last] == plain[first:last] and path[last:first] == plain[last:first]
            assert path[::3] == plain[::3] and path[-3:] == plain[-3:]
            for index in {-len(plain), -1, 0, len(plain) - 1, chance.randint(0, 400)}:
                if -len(plain) <= index < len(plain):
                    assert path[index] == plain[index]
                else:
                    with pytest.raises(IndexError):
                        path[index]


def test_a_fork_copies_no_tokens() -> None:
    root = TokenPath(range(5000))
    forks = [root.fork(5000) for _ in range(3)]
    assert len({id(fork._parts[0]) for fork in (root, *forks)}) == 1


def test_pieces_stay_few() -> None:
    """A path that is forked after every token has about as many pieces as its length has digits in base two."""
    path, kept = TokenPath(), []
    for token in range(1000):
        path.extend([token])
        kept.append(path.fork(len(path)))
    count, piece = 0, path._parts[0]
    while piece is not None:
        count, piece = count + 1, piece.below
    assert count <= 11 and path == list(range(1000)) and kept[500] == list(range(501))


def test_a_seal_sees_a_changed_token() -> None:
    path = TokenPath([1, 2, 3])
    path.fork(3)
    path.extend([4])
    before = path.seal()
    path.truncate(3)
    path.extend([5])
    assert path.seal() != before


@pytest.mark.parametrize("seed", range(10))
def test_states_are_the_list_that_they_would_be(seed: int) -> None:
    chance, states, plain = random.Random(seed), PathStates(), list[TokenState]()
    for _ in range(150):
        last = plain[-1] if plain else PROMPT
        match chance.choice(["append", "append", "truncate", "accept", "reopen"]):
            case "append":
                later = [
                    s for s in (PROMPT, ACCEPTED, PENDING, DRAFT) if list(TokenState).index(s) >= list(TokenState).index(last)
                ]
                state = chance.choice(later)
                count = 1 if state is PENDING else chance.randint(1, 4)
                if not (state is last is PENDING):
                    states.append(state, count)
                    plain += [state] * count
            case "truncate":
                length = chance.randint(max(0, len(plain) - 5), len(plain))
                states.truncate(length)
                del plain[length:]
            case "accept" if {PENDING, DRAFT} & set(plain):
                first = next(i for i, s in enumerate(plain) if s in (PENDING, DRAFT))
                count = chance.randint(1, len(plain) - first)
                states.accept(count)
                plain[first : first + count] = [ACCEPTED] * count
            case "reopen" if last is ACCEPTED:
                states.reopen_last()
                plain[-1] = PENDING
        assert list(states) == plain and len(states) == len(plain) and states == plain
        assert states.num_committed == plain.count(PROMPT) + plain.count(ACCEPTED)
        for state in TokenState:
            assert states.count(state) == plain.count(state) and (state in states) == (state in plain)
            if state in plain:
                assert states.index(state) == plain.index(state)
        length = chance.randint(0, len(plain))
        assert list(states.first(length)) == plain[:length] and states[-2:] == plain[-2:]
        assert not plain or (states[-1], states[0], states.last) == (plain[-1], plain[0], plain[-1])
    assert all(a is b or list(TokenState).index(a) < list(TokenState).index(b) for a, b in pairwise(states))


# ---- path history ----------------------------------------------------------------------------------------------------
# `PathHistory`: what it knows about a path after any history is what the path itself says.

VOCAB = 7
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=5)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "roll back", "draft", "ask", "mark"]),
        TOKENS,
        st.integers(0, 30),
    )
)


def continued(path: list[int], size: int, count: int) -> list[int] | None:
    """What followed the latest earlier occurrence of the last `size` tokens, by search."""
    for at in range(len(path) - size - 1, -1, -1):
        if path[at : at + size] == path[-size:]:
            return path[at + size : at + size + count]
    return None


@settings(max_examples=30, deadline=None)
@given(prompt=TOKENS.filter(bool), steps=STEPS, tail=TOKENS)
def test_facts_after_any_history(prompt: list[int], steps: list[tuple[str, list[int], int]], tail: list[int]) -> None:
    tree = BranchTree()
    branch = tree.plant(prompt)
    record = tree.branch(branch)
    marks = []
    for what, tokens, number in [*steps, ("ask", [], 0)]:
        match what:
            case "append":
                tree.append(branch, tokens, TokenState.DRAFT)
            case "roll back":
                tree.rollback(branch, max(len(prompt), len(record.tokens) - number))
            case "draft":  # as a verification does: drafts are written, judged, and cut off
                tree.append(branch, tokens, TokenState.DRAFT)
                tree.rollback(branch, len(record.tokens) - len(tokens))
            case "mark":
                length = min(number, len(record.tokens))
                marks.append((record.past.mark(length), record.tokens[:length]))
            case "ask":
                path, plain = record.past.path(len(record.tokens), tail), [*record.tokens, *tail]
                for start in (0, len(prompt), len(plain)):
                    assert set(path.distinct(start).tolist()) == set(plain[start:])
                bare = record.past.path(len(record.tokens))
                for size in range(1, min(4, len(bare))):
                    assert bare.continuation(size, 3) == continued(record.tokens, size, 3)
        for mark, tokens_then in marks:
            assert record.tokens[: mark.length] == tokens_then[: mark.length], "a mark never covers a changed token"


@settings(max_examples=30, deadline=None)
@given(
    own=TOKENS,
    tail=TOKENS,
    first=st.integers(-9, 9),
    last=st.integers(-9, 9),
    step=st.sampled_from([None, 1, 2, -1]),
)
def test_a_path_reads_as_a_list(own: list[int], tail: list[int], first: int, last: int, step: int | None) -> None:
    plain = [*own, *tail]
    path = PathHistory([*own, 5, 5]).path(len(own), tail)  # later tokens of the branch do not belong to it
    assert len(path) == len(plain) and list(path) == plain and path == plain
    assert path[first:last:step] == plain[first:last:step] and path[first:] == plain[first:]
    assert [path[i] for i in range(-len(plain), len(plain))] == plain + plain
    with pytest.raises(IndexError):
        path[len(plain)]


@settings(max_examples=30, deadline=None)
@given(own=TOKENS.filter(bool), tail=TOKENS, num_prompt=st.integers(0, 4), seed=st.integers(0, 3))
def test_sampling_chooses_as_from_a_list(own: list[int], tail: list[int], num_prompt: int, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
    for temperature in (0.0, 0.9):
        sampling = Sampling(temperature=temperature, seed=seed, repetition_penalty=1.7, presence_penalty=0.8)
        path, num = PathHistory(own).path(len(own), tail), min(num_prompt, len(own))
        assert sampling.choose(logits, path, num) == sampling.choose(logits, [*own, *tail], num)


def test_a_mark_of_another_branch_compares_tokens() -> None:
    mark = PathHistory([1, 2, 3, 4]).mark(3)
    other = PathHistory([1, 2, 9, 4])
    assert mark.common(other.path(4)) == 2 and mark.common(PathHistory([1, 2, 3, 4]).path(4)) == 3


def test_what_was_removed_is_not_continued() -> None:
    """A branch was asked, rolled back, and grew as long as before, with other tokens."""
    tree = BranchTree()
    record = tree.branch(branch := tree.plant([1]))
    tree.append(branch, [2, 3, 1, 5, 9], TokenState.DRAFT)
    assert record.past.path(6).continuation(1, 2) is None and set(record.past.path(6).distinct().tolist()) == {1, 2, 3, 5, 9}
    tree.rollback(branch, 1)
    tree.append(branch, [4, 4, 4, 4, 1], TokenState.DRAFT)
    assert record.past.path(6).continuation(1, 2) == [4, 4], "after the 1 that is there, not after the one that was"
    assert set(record.past.path(6).distinct().tolist()) == {1, 4}


def test_a_trail_is_cut_where_it_is_asked_to_be() -> None:
    """And is no longer than it was, however many pages are asked for."""
    pool = PagePool(8, 2)
    index, table, tokens, trail = PrefixIndex(pool), PageTable(), [1, 2, 3, 4, 5, 6], Trail()
    pool.reserve(table, 0, 6)
    assert index.offer(table, tokens, 6, None, trail) == 3 and trail.num_pages == 3
    for asked in range(6):
        cut = trail.upto(asked)
        assert cut.num_pages == min(asked, 3)
        assert (cut.entry.tokens if cut.entry else ()) == tuple(tokens[2 * cut.num_pages - 2 : 2 * cut.num_pages])
    assert index.offer(table, tokens, 6, None, trail.upto(5)) == 0
