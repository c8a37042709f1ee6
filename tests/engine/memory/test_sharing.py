"""Shared pages, moved pages and captured rows."""

import torch

from replaylens.engine.loop.lane import Job
from tests.engine.canonical import SITES, assert_canonical, submit
from tests.toy_model import VOCAB, continuation, engine, toy


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
    subject.loop.room.drop_pages(branch.lane)
    subject.prompt([8] * 7)
    branch.generate(6)
    assert branch.lane.table.pages[: len(before)] != before, "control: the KV did move"
    assert all(torch.equal(branch.activations[site][: len(rows[site])], rows[site]) for site in SITES)
    assert_canonical(branch)


def test_a_prefix_cache_hit_changing_bits() -> None:
    """A request whose prefix is cached has the tokens and KV of one that computes it."""
    path = [(3 * i) % VOCAB for i in range(37)]
    subject = engine()
    subject.prompt(path).generate(5)
    for n in (5, 16, 17, 36, 37):
        hit = subject.prompt(path[:n])
        fresh = engine().prompt(path[:n])
        shared = [page for page in hit.lane.table.pages if subject.runner.pool.refcount(page) > 1]
        assert len(shared) >= (n - 1) // 4 > 0, "control: it is a hit"
        assert torch.equal(hit.kv(), fresh.kv())
        hit.generate(8), fresh.generate(8)
        assert hit.tokens == fresh.tokens and torch.equal(hit.kv(), fresh.kv())
        assert_canonical(hit)


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
