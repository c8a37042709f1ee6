"""`PagePool` against a naive model that writes real contents into simulated pages. Each fault is found by name."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRange, BadRequest, IntegrityError, InternalError, OutOfPages
from replaylens.engine.loop.lane import Job
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import NULL_PAGE, PageCopy, PagePool, PageTable, page_matrix
from replaylens.engine.request.capture import Recording
from replaylens.engine.serving.branch import Branch
from replaylens.kernels.cpu_attention import store
from replaylens.tasks import get
from tests.engine.canonical import SITES, assert_canonical, submit
from tests.engine.reference import same_bits
from tests.toy_model import VOCAB, Reference, continuation, engine, toy

ZERO, POISON = 0, -1


class Memory:
    """The slots of all pages. Free pages are poisoned, so that reading a page freed too early shows."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.slots = [ZERO] * pool.page_size + [POISON] * (pool.num_pages * pool.page_size)

    def carry_out(self, copies: list[PageCopy]) -> None:
        size = self.pool.page_size
        for copy in copies:
            for offset in range(copy.num_slots):
                self.slots[copy.target * size + offset] = self.slots[copy.source * size + offset]

    def write(self, table: PageTable, start: int, contents: list[int]) -> None:
        for slot, content in zip(self.pool.slots(table, start, start + len(contents)), contents, strict=True):
            self.slots[slot] = content

    def read(self, table: PageTable) -> list[int]:
        return [self.slots[self.pool.slot(table, position)] for position in range(table.length)]

    def poison_free_pages(self) -> None:
        size = self.pool.page_size
        for page in range(1, self.pool.num_pages + 1):
            if self.pool.refcount(page) == 0:
                self.slots[page * size : (page + 1) * size] = [POISON] * size


class PoolMachine(RuleBasedStateMachine):
    """Every table reads back exactly what was written through it, whatever other tables do."""

    @initialize(num_pages=st.integers(1, 12), page_size=st.integers(1, 4))
    def begin(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.memory = Memory(self.pool)
        self.tables: list[tuple[PageTable, list[int]]] = []
        self.retained: list[tuple[int, list[int]]] = []
        self.next_content = 1

    def pick(self, data: st.DataObject) -> tuple[PageTable, list[int]]:
        return data.draw(st.sampled_from(self.tables))

    def state(self) -> tuple[object, ...]:
        tables = [(list(table.pages), table.length, table.closed) for table, _ in self.tables]
        return tables, list(self.pool._refcounts), list(self.pool._free)

    def owners(self) -> Counter[int]:
        return Counter([page for table, _ in self.tables for page in table.pages] + [page for page, _ in self.retained])

    @precondition(lambda self: len(self.tables) < 6)
    @rule()
    def new(self) -> None:
        self.tables.append((PageTable(), []))

    @precondition(lambda self: 0 < len(self.tables) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, contents = self.pick(data)
        length = data.draw(st.none() | st.integers(0, len(contents)))
        num_free = self.pool.num_free
        child = self.pool.fork(table, length)
        assert self.pool.num_free == num_free
        self.tables.append((child, contents[:length]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        table, contents = self.pick(data)
        start = data.draw(st.integers(0, len(contents)))
        end = start + data.draw(st.integers(0, 3 * self.pool.page_size))
        touched = {position // self.pool.page_size for position in range(start, end)}
        owners = self.owners()
        needed = sum(index >= len(table.pages) or owners[table.pages[index]] > 1 for index in touched)
        before = self.state()
        assert self.pool.num_needed(table, start, end) == needed
        if needed > self.pool.num_free:
            with pytest.raises(OutOfPages) as caught:
                self.pool.reserve(table, start, end)
            assert (caught.value.needed, caught.value.free) == (needed, self.pool.num_free)
            assert self.state() == before
            return
        self.memory.carry_out(self.pool.reserve(table, start, end))
        new = list(range(self.next_content, self.next_content + end - start))
        self.next_content += len(new)
        self.memory.write(table, start, new)
        contents[start:end] = new

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table, contents = self.pick(data)
        length = data.draw(st.integers(0, len(contents)))
        self.pool.truncate(table, length)
        del contents[length:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        before = self.state()
        with pytest.raises(InternalError):
            self.pool.release(table)
        assert self.state() == before and (table.pages, table.length) == ([], 0)

    @precondition(lambda self: any(len(contents) >= self.pool.page_size for _, contents in self.tables))
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        table, contents = data.draw(st.sampled_from([pair for pair in self.tables if len(pair[1]) >= self.pool.page_size]))
        index = data.draw(st.integers(0, len(contents) // self.pool.page_size - 1))
        self.pool.retain(table.pages[index])
        whole = contents[index * self.pool.page_size : (index + 1) * self.pool.page_size]
        self.retained.append((table.pages[index], whole))

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page, _ = self.retained.pop(data.draw(st.integers(0, len(self.retained) - 1)))
        self.pool.drop(page)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        table, contents = self.pick(data)
        before, beyond = self.state(), len(contents) + data.draw(st.integers(1, 9))
        for call in (
            lambda: self.pool.reserve(table, beyond, beyond + 1),
            lambda: self.pool.reserve(table, -1, 1),
            lambda: self.pool.reserve(table, 1, 0),
            lambda: self.pool.truncate(table, beyond),
            lambda: self.pool.truncate(table, -1),
            lambda: self.pool.fork(table, beyond),
            lambda: self.pool.slot(table, len(contents)),
            lambda: self.pool.slot(table, -1),
            lambda: self.pool.slots(table, 0, beyond),
        ):
            with pytest.raises(BadRange):
                call()
        assert self.state() == before

    @invariant()
    def all_read_back(self) -> None:
        self.memory.poison_free_pages()
        size = self.pool.page_size
        for table, contents in self.tables:
            assert self.memory.read(table) == contents
        for page, whole in self.retained:
            assert self.memory.slots[page * size : (page + 1) * size] == whole
        assert self.memory.slots[:size] == [ZERO] * size
        numbers = self.pool.check_integrity([table for table, _ in self.tables], [page for page, _ in self.retained])
        assert numbers.num_free == self.pool.num_pages - len(self.owners())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


def filled(pool: PagePool, length: int) -> PageTable:
    table = PageTable()
    assert pool.reserve(table, 0, length) == []
    return table


# Copies that `reserve` requests


def test_a_fresh_table_takes_the_lowest_pages_and_copies_nothing() -> None:
    pool = PagePool(5, 4)
    table = filled(pool, 9)
    assert (table.pages, table.length, pool.num_free) == ([1, 2, 3], 9, 2)


def test_a_shared_tail_is_copied_up_to_start_only() -> None:
    pool = PagePool(5, 4)
    table = filled(pool, 7)
    child = pool.fork(table)
    assert pool.reserve(child, 6, 8) == [PageCopy(source=2, target=3, num_slots=2, first=4)]  # position 6 is overwritten
    assert (child.pages, child.length, table.pages, table.length) == ([1, 3], 8, [1, 2], 7)
    assert pool.reserve(table, 7, 8) == []  # the last owner writes in place


def test_a_wholly_overwritten_shared_page_is_replaced_without_a_copy() -> None:
    pool = PagePool(6, 4)
    table = filled(pool, 8)
    child = pool.fork(table)
    assert pool.reserve(child, 4, 8) == []
    assert child.pages == [1, 3]


def test_freed_pages_come_back_lowest_first_whatever_the_order_of_freeing() -> None:
    for order in ([0, 1, 2], [2, 0, 1]):
        pool = PagePool(3, 1)
        tables = [filled(pool, 1) for _ in range(3)]
        for index in order:
            pool.release(tables[index])
        assert filled(pool, 3).pages == [1, 2, 3]


def test_out_of_pages_counts_copies_and_says_what_to_do() -> None:
    pool = PagePool(3, 2)
    table = filled(pool, 5)
    child = pool.fork(table)
    with pytest.raises(OutOfPages, match=r"1 pages needed, 0 of 3 free\. Evict"):
        pool.reserve(child, 5, 6)
    pool.check_integrity([table, child])
    pool.release(child)
    assert pool.reserve(table, 5, 6) == []


@pytest.mark.parametrize("num_pages, page_size", [(0, 16), (-1, 16), (4, 0)])
def test_a_pool_without_pages_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(BadRequest, match="at least 1"):
        PagePool(num_pages, page_size)


def test_a_released_table_is_of_no_use() -> None:
    pool = PagePool(3, 2)
    table = filled(pool, 3)
    pool.release(table)
    for call in (pool.fork, pool.release, lambda t: pool.reserve(t, 0, 1), lambda t: pool.truncate(t, 0)):
        with pytest.raises(InternalError):
            call(table)


def test_share_must_fit() -> None:
    pool = PagePool(3, 2)
    table = filled(pool, 4)
    for length in (2, 5, -1):
        with pytest.raises(BadRange):
            pool.share(table.pages, length)


# Known bugs of other engines


def test_a_zeroed_table_entry_never_looks_like_a_page() -> None:
    pool = PagePool(4, 2)
    table = filled(pool, 6)
    table.pages[1] = 0
    for call in (pool.release, pool.fork, lambda t: pool.reserve(t, 2, 4), lambda t: pool.truncate(t, 1)):
        with pytest.raises(InternalError, match="null page"):
            call(table)
    with pytest.raises(IntegrityError, match="Table 0: entry 1 is page 0"):
        pool.check_integrity([table])
    table.pages[1] = 2
    pool.check_integrity([table])  # nothing was freed meanwhile
    assert NULL_PAGE not in filled(pool, 2).pages


def test_reads_and_writes_use_one_translation() -> None:
    pool = PagePool(8, 4)
    first = filled(pool, 4)
    table = filled(pool, 6)
    pool.reserve(first, 4, 8)
    pool.reserve(table, 6, 11)
    assert table.pages == [2, 3, 5]  # not contiguous
    assert pool.slots(table, 3, 10) == [pool.slot(table, position) for position in range(3, 10)]
    assert pool.slots(table, 3, 10) == [11, 12, 13, 14, 15, 20, 21]
    assert pool.slots(table, 5, 5) == []


def test_a_rolled_back_bonus_token_leaves_no_kv() -> None:
    pool = PagePool(6, 4)
    memory, table = Memory(pool), filled(pool, 9)
    memory.write(table, 0, list(range(1, 10)))  # the bonus token is 9, alone on its page
    pool.truncate(table, 8)
    assert (len(table.pages), pool.num_free) == (2, 4)
    with pytest.raises(BadRange):
        pool.slot(table, 8)
    pool.truncate(table, 7)  # now one within a page
    child = pool.fork(table)
    [copy] = pool.reserve(child, 7, 8)
    assert copy.num_slots == 3  # rolled-back positions are not copied


def test_a_page_cannot_be_freed_twice() -> None:
    pool = PagePool(3, 2)
    table = filled(pool, 2)
    page = table.pages[0]
    pool.retain(page)
    pool.release(table)
    pool.drop(page)
    for call in (pool.drop, pool.retain):
        for bad in (page, NULL_PAGE, 4, -1):
            with pytest.raises(InternalError):
                call(bad)
    assert str(pool.check_integrity([])) == (
        "pool: 3 pages of 2 = 3 free + 0 used (0 shared); references: 0 from 0 tables of 0 positions + 0 retained"
    )


# Our own bugs are found and named


FAULTS: dict[str, Callable[[PagePool, PageTable], object]] = {
    "Page 2: reference count 2, but 1 references found": lambda pool, table: pool._refcounts.__setitem__(2, 2),
    "Free list: page 2 has reference count 0 but is not listed": lambda pool, table: pool._refcounts.__setitem__(2, 0),
    "The null page 0 has 1 references": lambda pool, table: pool._refcounts.__setitem__(0, 1),
    "Free list: page 2 has reference count 1": lambda pool, table: pool._free.append(2),
    "Free list: page 6 occurs 2 times": lambda pool, table: pool._free.append(6),
    "Free list: page 0 is outside 1..6": lambda pool, table: pool._free.append(0),
    "Free list: page 6 has reference count 0 but is not listed": lambda pool, table: pool._free.remove(6),
    "Page 1: reference count 1, but 0 references found": lambda pool, table: table.pages.__setitem__(0, 5),
    "Table 0: entry 0 is page 7, outside 1..6": lambda pool, table: table.pages.__setitem__(0, 7),
    "Table 0: page 2 occurs 2 times": lambda pool, table: table.pages.__setitem__(0, 2),
    "Table 0: length 3 with 3 pages of 2": lambda pool, table: setattr(table, "length", 3),
    "Table 0 is closed but has 3 pages and length 5": lambda pool, table: setattr(table, "closed", True),
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_fault_is_named(said: str) -> None:
    pool = PagePool(6, 2)
    table, other = filled(pool, 5), filled(pool, 3)
    pool.check_integrity([table, other])
    FAULTS[said](pool, table)
    with pytest.raises(IntegrityError, match=said):
        pool.check_integrity([table, other])


@pytest.mark.parametrize("fault", ["holders", "pages", "forgotten"])
def test_a_fault_of_a_run_is_named(fault: str) -> None:
    pool = PagePool(8, 2)
    table = filled(pool, 5)
    child = pool.fork(table, 3)
    tables = [table, child]
    pool.check_integrity(tables)
    assert child.run is not None and child.run.holders == 2
    if fault == "holders":
        child.run.holders += 1
    elif fault == "pages":
        child.pages[0] = 5
    else:
        tables.remove(child)
    with pytest.raises(IntegrityError, match="not those of the run" if fault == "pages" else r"holders counted, \d found"):
        pool.check_integrity(tables)


def test_a_fork_and_its_release_count_no_page() -> None:
    """Whatever the length of the table: its pages become a run once, and forks hold that."""
    pool = PagePool(600, 16)
    table = filled(pool, 4096)
    pool.release(pool.fork(table))

    class Watched(list[int]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Watched.reads += 1
            return super().__getitem__(index)

    pool._refcounts = Watched(pool._refcounts)
    forks = [pool.fork(table, length) for length in (4096, 4096, 4000)]
    for fork in forks:
        pool.release(fork)
    assert Watched.reads == 0
    pool.check_integrity([table])
    forks = [pool.fork(table) for _ in range(3)]
    assert pool.sharers(table, 0) == 4 and pool.refcount(table.pages[0]) == 1
    pool.release(table)
    assert pool.num_free == 600 - 256, "forks keep the pages"


def test_sharers_of_every_page() -> None:
    """A fork shares the pages up to its length; the page after a common run is its owner's alone. Pages are numbered from the
    null page to the last."""
    pool = PagePool(9, 2)
    table = filled(pool, 10)
    forks = [pool.fork(table, length) for length in (4, 4, 8)]
    assert [pool.sharers(table, index) for index in range(5)] == [4, 4, 2, 2, 1]
    assert [pool.sharers(forks[2], index) for index in range(4)] == [4, 4, 2, 2]
    assert pool.refcount(0) == pool.refcount(9) == 0 and pool.refcount(table.pages[4]) == 1
    for page in (-1, 10):
        with pytest.raises(InternalError, match="Pages are 0 to 9"):
            pool.refcount(page)


def test_a_forgotten_table_or_retainer_is_found() -> None:
    pool = PagePool(4, 2)
    table = filled(pool, 4)
    pool.retain(1)
    pool.check_integrity([table], retained=[1])
    with pytest.raises(IntegrityError, match="Page 1: reference count 2, but 1"):
        pool.check_integrity([table])
    with pytest.raises(IntegrityError, match="Page 1: reference count 2, but 1"):
        pool.check_integrity([], retained=[1])


def test_pages_are_one_line_per_table() -> None:
    tables = [PageTable([4, 2, 7], 5), PageTable([], 0), PageTable([1], 2)]
    found = page_matrix(tables, (4, 4), rest=9)
    assert found.tolist() == [[4, 2, 7, 9], [9, 9, 9, 9], [1, 9, 9, 9], [9, 9, 9, 9]]
    assert found.dtype == np.int32 and found.flags.c_contiguous
    assert page_matrix(tables).tolist() == [[4, 2, 7], [0, 0, 0], [1, 0, 0]]


# ---- cache -----------------------------------------------------------------------------------------------------------
# The KV cache takes memory for the slots that were written, not for those that may be.

PAGES = 1 << 17
"""about 1 GiB of KV in the toy model"""


def resident() -> int:
    """Bytes of this process that are in memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def test_slots_that_nobody_writes_take_no_memory() -> None:
    before = resident()
    cache = KVCache(toy().config, PagePool(PAGES, 16), torch.float32)
    assert cache.num_bytes > 1 << 28
    assert resident() - before < cache.num_bytes / 16
    data = cache.data[0, 0, 0]
    data.fill_(1.0)
    assert resident() - before > data.numel() * 4 * 0.9, "control: written slots do"


def test_a_new_cache_holds_zeros_and_can_be_written() -> None:
    cache = KVCache(toy().config, PagePool(4, 16), torch.float32)
    assert cache.data.is_contiguous() and not cache.data.any()
    k = torch.randn(3, cache.data.shape[2], cache.data.shape[4])
    planes = cache.data[0].flatten(0, 1)
    assert store(torch.cat([k, -k], dim=1), planes, torch.tensor([17, 18, 40]))
    assert torch.equal(cache.rows([17, 18, 40])[:, 0, 0], k)
    assert torch.equal(cache.rows([17, 18, 40])[:, 0, 1], -k)
    before = cache.data.clone()
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = torch.cat([k, k], dim=1)
        broken[-1, -1, -1] = bad
        assert not store(broken, planes, torch.tensor([17, 18, 40])) and torch.equal(cache.data, before)
    for slot in (-1, planes.shape[1]):
        with pytest.raises(ValueError, match="Expected slots below"):
            store(torch.cat([k, k], dim=1), planes, torch.tensor([17, 18, slot]))
    assert torch.equal(cache.data, before)


def test_the_canary_of_a_page_that_is_used_again_is_that_of_its_copy() -> None:
    """A fork in the middle of a page copies it into one that held another path before."""
    subject = engine(page_size=4, cache_tokens=16, canary=True)
    for first in (1, 2, 3):  # every page has held something else
        subject.prompt([first] * 12).release()
        subject.prefix.clear()
    branch = subject.prompt([5, 6, 7, 8, 9, 10])
    (fork,) = branch.fork(at=6)
    fork.force([11])  # copies the second page, and its canary
    branch.force([12])
    for one in (branch, fork):
        one.force([13])
        assert torch.equal(one.kv(), Reference(toy(), one.tokens).kv)
    subject.check_integrity()


# ---- aliases ---------------------------------------------------------------------------------------------------------
# What an engine returns is the caller's own: changing it changes nothing that is committed.

SITE = "blocks.1.hook_in"


def captured(subject: Engine) -> Branch:
    """A branch whose rows are in one chunk, the case in which an alias shows."""
    return subject.prompt([1, 2, 3, 4, 5], sites="STCZ", keep_rejected=True)


def spoil(x: Tensor) -> None:
    """Centre the rows in place, as is usual before fitting a probe."""
    x -= x.float().mean(0).to(x.dtype) + 1


def test_rows_changed_in_place_change_no_branch() -> None:
    subject = engine()
    branch = captured(subject)
    (fork,) = branch.fork()
    for site in branch.activations:
        truth = branch.activations[site].clone()
        spoil(branch.activations[site])
        assert same_bits(branch.activations[site], truth) and same_bits(fork.activations[site], truth), site
    for site, rows in branch.activations.items():
        truth = rows.clone()
        spoil(rows)
        assert same_bits(branch.activations[site], truth), site
    fresh = captured(engine())
    grown = fork.generate(4, drafter="lens").activations
    truths = fresh.generate(4, drafter="lens").activations
    assert all(same_bits(grown[site], truths[site]) for site in truths)


def test_rows_of_a_site_do_not_keep_the_other_sites_in_memory() -> None:
    branch = captured(engine())
    rows = branch.activations[SITE]
    assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()


def test_the_checker_finds_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows returned without a copy are changed by their reader."""
    monkeypatch.setattr(Recording, "__getitem__", Recording.peek)
    branch = captured(engine())
    truth = branch.activations[SITE].clone()
    spoil(branch.activations[SITE])
    assert not torch.equal(branch.activations[SITE], truth)


def test_kv_changed_in_place_changes_no_branch() -> None:
    branch = captured(engine())
    truth = branch.kv().clone()
    branch.kv().zero_()
    assert torch.equal(branch.kv(), truth)
    assert branch.generate(5).tokens == captured(engine()).generate(5).tokens


def test_rejected_paths_are_copies() -> None:
    subject = engine()
    branch = captured(subject).generate(12, drafter="tree", window=4, keep_pages=True)
    assert branch.rejected
    for other in branch.rejected:
        rows, kv = other.activations[SITE].clone(), other.kv().clone()
        spoil(other.activations[SITE])
        spoil(other.kv())
        assert torch.equal(other.activations[SITE], rows) and torch.equal(other.kv(), kv)


def test_results_of_a_run_and_its_dump_are_copies(tmp_path: Any) -> None:
    """A run centred in place is saved, and read back, as it was computed."""
    subject = Engine.load("coin-plain")
    examples = get("coin")(flips=2).examples(3)
    run, untouched = (subject.replay(examples, sites="SZ", drafter="lens", window=4) for _ in range(2))
    for result in run:
        for recording in [result.activations, *(path.activations for path in result.rejected)]:
            for site in recording:
                spoil(recording[site])
    dump = run.save(tmp_path / "spoilt")
    assert dump.digest == untouched.save(tmp_path / "untouched").digest
    reads: dict[str, Callable[[Dump], Any]] = {
        "to_torch": lambda d: d.to_torch("S", 1),
        "to_torch of some": lambda d: d.where(accepted=True).to_torch("S", 1),
        "to_numpy": lambda d: d.to_numpy("S", 1),
        "X": lambda d: d.matrix("S", 1, label="face").X,
        "y": lambda d: d.matrix("S", 1, label="face").y,
        "groups": lambda d: d.matrix("S", 1, label="face").groups,
        "stream": lambda d: next(iter(d.stream("S", 1)))[0],
        "cache": lambda d: d.to_activation_cache(0)["blocks.1.hook_in"],
        "index": lambda d: d.index["position"].to_numpy(copy=False),
        "stream index": lambda d: next(iter(d.stream("S", 1)))[1]["position"].to_numpy(copy=False),
    }
    for name, read in reads.items():
        first = read(dump)
        truth = first.clone() if isinstance(first, Tensor) else first.copy()
        try:
            first[:] = first[::-1].copy() if not isinstance(first, Tensor) else first.flip(0) + 1
        except ValueError:
            continue  # pandas gives out read-only arrays
        again = read(dump)
        same = torch.equal(again, truth) if isinstance(again, Tensor) else (again == truth).all()
        assert same, name
    assert Dump.open(tmp_path / "spoilt").digest == dump.digest


def test_thoughts_are_copies() -> None:
    """A state that a reader zeroes is still passed to the next chunk as it was thought."""
    subject, fresh = (Engine.load("coin-thinking") for _ in range(2))
    text = "A coin's state is heads. Alice flips, then Bob does not flip."
    branch, truth = subject.prompt(text, sites="STCZ"), fresh.prompt(text, sites="STCZ")
    assert any(not thought.empty for thought in branch.thoughts.chunks) and branch.thoughts.states
    for thought in branch.thoughts.chunks:
        for x in (thought.hidden, thought.compressed, thought.state, *thought.distribution.values()):
            x.zero_()
    for edit in branch.thoughts.states.values():
        assert edit.value is not None
        edit.value.zero_()
    more = ", then Carol flips."
    mine, yours = branch.extend(more), truth.extend(more)
    assert [t.tokens for t in mine.thoughts.chunks] == [t.tokens for t in yours.thoughts.chunks]
    assert torch.equal(mine.kv(), yours.kv())
    for site in yours.activations:
        assert same_bits(mine.activations[site], yours.activations[site]), site
    for site in truth.activations:
        assert same_bits(branch.activations[site], truth.activations[site]), site


# ---- sharing ---------------------------------------------------------------------------------------------------------
# Shared pages, moved pages and captured rows.


def test_captures_keyed_by_slot_when_accepted_kv_is_moved() -> None:
    """An accepted sibling chain brings its own pages. Captured rows go by position and are not affected."""
    subject = engine()
    branch = subject.prompt([1, 2, 3], sites=SITES, keep_rejected=True)
    truth = continuation(toy(), [1, 2, 3], 9)
    chains = [[(truth[1] + 1) % VOCAB, truth[2], truth[3]], truth[1:4]]
    subject.loop.submit(job := Job(branch.lane, 9, drafter="forced", forced_drafts={4: chains}))
    subject.loop.step()
    before = list(branch.lane.table.pages)
    while not job.done:
        subject.loop.step()
    assert branch.generated == truth
    assert branch.lane.table.pages[: len(before)] != before, "control: the KV did move"
    assert_canonical(branch)


def test_captures_survive_that_their_kv_is_dropped_and_computed_again() -> None:
    subject = engine()
    branch = subject.prompt([1, 2, 3, 4, 5], sites=SITES).generate(6)
    subject.prompt([9] * 7)  # takes the lowest free pages next
    rows = {site: branch.activations[site].clone() for site in SITES}
    before = list(branch.lane.table.pages)
    subject.loop.reservations.drop_pages(branch.lane)
    subject.prompt([8] * 7)
    branch.generate(6)
    assert branch.lane.table.pages[: len(before)] != before, "control: the KV did move"
    assert all(torch.equal(branch.activations[site][: len(rows[site])], rows[site]) for site in SITES)
    assert_canonical(branch)


def test_a_private_copy_of_a_page_without_its_last_row() -> None:
    """A turn copies the shared page whose last row it will rewrite, then has to wait and is cancelled.

    The row was never written, so it does not count as computed.
    """
    subject = engine(cache_tokens=32)  # 8 pages
    root = subject.prompt([1, 2, 3, 4, 5, 6])
    (fork,) = root.fork()
    big = subject.prompt([(2 * i) % VOCAB for i in range(15)])
    subject.prefix.clear()
    holder = submit(big, 4, window=1)
    job = submit(fork, 8, drafter="tree", window=6)
    subject.loop.step()
    assert not holder.done and not job.done and job.generated == 0, "control: it has to wait"
    subject.cancel(job)
    assert_canonical(fork)
    fork.force([7])
    assert_canonical(fork)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("chance", range(6))
def test_copies_made_together_are_those_made_one_by_one(chance: int, kernels: bool) -> None:
    """Pages that are freed and taken again within the block are sources and targets more than once."""
    random = np.random.default_rng(chance)
    caches = [KVCache(toy().config, PagePool(40, 4), torch.float32, kernels=kernels) for _ in range(2)]
    for cache in caches:
        cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(chance)))
    before, few = caches[0].data.clone(), 12 + 13 * (chance % 3)  # of few pages many are used twice
    copies = [PageCopy(*map(int, random.choice(few, 2, replace=False) + 1), int(random.integers(1, 5)), 0) for _ in range(90)]
    with caches[0].copying_together():
        for first in range(0, len(copies), 3):
            caches[0].copy(copies[first : first + 3])
    caches[1].copy(copies[:1])
    for copy in copies[1:]:
        caches[1].copy([copy])
    assert torch.equal(caches[0].data, caches[1].data) and not torch.equal(caches[0].data, before)


def test_copies_of_a_block_that_fails_are_made() -> None:
    cache = KVCache(toy().config, PagePool(4, 4), torch.float32)
    cache.data.copy_(torch.randn(cache.data.shape))
    with pytest.raises(OutOfPages), cache.copying_together():
        cache.copy([PageCopy(1, 2, 4, 0), PageCopy(1, 3, 2, 0)])
        raise OutOfPages(1, 0, 4)
    held = cache.data.narrow(cache.slot_dim, 4, 4)
    assert torch.equal(cache.data.narrow(cache.slot_dim, 8, 4), held)
    assert torch.equal(cache.data.narrow(cache.slot_dim, 12, 2), held.narrow(cache.slot_dim, 0, 2))
