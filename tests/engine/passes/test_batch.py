"""Packed passes: page tables, and neighbours in the same batch."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.errors import IntegrityError, InternalError
from replaylens.engine.memory.pages import NULL_PAGE, PagePool, PageTable
from replaylens.engine.passes import cpu
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.runner import Runner
from replaylens.engine.serving.branch import Branch
from replaylens.kernels.cpu_attention import HostRows
from tests.engine.canonical import SITES, assert_canonical, submit
from tests.toy_model import VOCAB, Reference, continuation, engine, random_model, toy, watch_passes


@pytest.mark.parametrize("offset", [0, 1, 7, 15, 63])
def test_verifier_attention_choosing_its_own_split(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over keys is split at fixed positions, however the rows are split into windows."""
    path = [(7 * i) % VOCAB for i in range(150)]
    truth = Reference(toy(), path)

    def windowed() -> tuple[Tensor, Tensor]:
        runner, table = Runner(toy(), 40, 4), PageTable()
        cuts = sorted({0, *range(offset, 150, 9), 150})
        logits = []
        for start, end in pairwise(cuts):
            runner.reserve(table, start, end)
            logits.append(runner.exact([Segment(table, start, path[start:end], end - start)]).logits)
        return torch.cat(logits), runner.cache.rows(runner.pool.slots(table, 0, 150))

    logits, kv = windowed()
    assert torch.equal(logits, truth.logits) and torch.equal(kv, truth.kv)
    right = cpu.attend

    def late(q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, *more: Any) -> Tensor:
        return right(q, keys, values, replace(rows, position=rows.position - (rows.position > 99).long()), *more)

    monkeypatch.setattr(cpu, "attend", late)
    assert not torch.equal(windowed()[0], truth.logits), "control: a key that is left out is seen"


def test_zeroed_page_table_entries() -> None:
    """No branch owns page 0: a zeroed entry is an error and is never freed into the pool."""
    subject = engine(cache_tokens=64, canary=True)
    branches = subject.prompts([[1, 2, 3], [4, 5, 6, 7, 8]])
    subject.generate(branches, 12, window=4)
    assert not subject.runner.cache.data[:, :, :, : subject.runner.pool.page_size].any(), "nothing was ever written there"
    table, pool = branches[0].lane.table, subject.runner.pool
    saved, table.pages[1] = table.pages[1], NULL_PAGE
    with pytest.raises(IntegrityError, match="page 0"):
        subject.check_integrity()
    with pytest.raises(InternalError, match="null page"):
        pool.truncate(table, 0)
    with pytest.raises(IntegrityError):
        branches[0].generate(2)
    assert pool.refcount(NULL_PAGE) == 0
    table.pages[1] = saved
    branches[0].rollback(branches[0].root_length)
    assert branches[0].generate(12).generated == continuation(toy(), [1, 2, 3], 12)
    taken = [pool.reserve(PageTable(), 0, 4) for _ in range(pool.num_free)]
    assert len(taken) and pool.refcount(NULL_PAGE) == 0, "the null page is never handed out"


def test_page_table_and_write_index_disagreeing() -> None:
    """A position is read from the slot it was written to, also after copy on write and with pages out of order."""
    pool = PagePool(16, 4)
    first, second = PageTable(), PageTable()
    for i in range(3):  # interleaved, so that neither table's pages are consecutive
        pool.reserve(first, 4 * i, 4 * i + 4)
        pool.reserve(second, 4 * i, 4 * i + 4)
    fork = pool.fork(first, 10)
    pool.reserve(fork, 10, 14)
    batch = Batch([Segment(fork, 10, [1, 2, 3]), Segment(second, 5, [4, 5])], pool)
    paged = batch.paged
    pages = paged.pages[paged.sequence, paged.position // 4]
    assert (pages * 4 + paged.position % 4).tolist() == batch.write_slots.tolist()
    assert sorted(paged.order.tolist()) == list(range(batch.num_rows))
    assert set(batch.write_slots.tolist()).isdisjoint(pool.slots(first, 0, 12)), "a fork writes to pages of its own"


def test_an_unrelated_prefill_of_9_or_10_tokens_changing_a_neighbours_bits() -> None:
    """Whatever is prefilled beside it, a decoding row keeps its bits."""
    truth = Reference(toy(), [1, 2, 3, *continuation(toy(), [1, 2, 3], 3)])
    for n in (1, 2, 9, 10, 15, 16, 17, 33, 64, 65):
        subject = engine()
        branch, beside = (
            subject.prompt([1, 2, 3]),
            Branch(subject, subject.forest.plant([(5 * i) % VOCAB for i in range(n)], None)),
        )
        jobs = [submit(branch, 3, window=1), submit(beside, 0)]
        passes = watch_passes(subject)
        subject.loop.step()
        assert [len(s.tokens) for s in passes[0]] == ([1, n] if n > 1 else [1, 1]), "one pass for both"
        subject.forest.wait(jobs)
        assert torch.equal(branch.kv(), truth.kv[:5])
        assert torch.equal(beside.kv(), Reference(toy(), beside.tokens).kv)


def test_a_scale_over_co_batched_tokens() -> None:
    """Neighbours with huge activations do not change a row's bits. With a scale over the whole batch they would."""
    model = random_model()
    model.embed[60] *= 1e4

    def rows_beside(token: int, per_tensor_scale: bool) -> Tensor:
        runner, tables = Runner(model, 8, 4), [PageTable(), PageTable()]
        for table in tables:
            runner.reserve(table, 0, 4)

        class Scaled:
            """A per-tensor scale as in 8-bit formats: the largest row sets the grid to which all rows are rounded."""

            def wants(self, site: str) -> bool:
                return per_tensor_scale and site.endswith(".hook_in")

            def __call__(self, site: str, value: Tensor) -> Tensor:
                step = value.abs().max() / 127
                return (value / step).round() * step

        runner.exact([Segment(tables[0], 0, [1, 2, 3, 4], 1), Segment(tables[1], 0, [token] * 4)], Scaled())
        return runner.cache.rows(runner.pool.slots(tables[0], 0, 4))

    assert torch.equal(rows_beside(5, False), rows_beside(60, False))
    assert not torch.equal(rows_beside(5, True), rows_beside(60, True)), "control"


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33])
def test_exactly_the_rows_of_a_request_are_captured(n: int) -> None:
    subject = engine()
    path = [(11 * i + 1) % VOCAB for i in range(n)]
    branch, beside = subject.prompts([path, [4, 5]], sites=SITES)
    for one, tokens in ((branch, path), (beside, [4, 5])):
        assert [len(one.activations[site]) for site in SITES] == [len(tokens)] * 3
        assert all(not row.equal(torch.zeros_like(row)) for site in SITES for row in one.activations[site])
        assert_canonical(one)
    rows = [[one.activations[site] for site in SITES] for one in (branch, beside)]  # held: freed memory is used again
    buffers = [{x.untyped_storage().data_ptr() for x in own} for own in rows]
    assert not buffers[0] & buffers[1], "no two recordings share a buffer"
