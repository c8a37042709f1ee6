"""Which requests and how many rows a verification contains."""

import pytest
import torch

from replaylens.engine.memory.tree import DRAFT, PENDING
from tests.engine.canonical import assert_canonical, submit
from tests.toy_model import VOCAB, Reference, continuation, engine, toy, watch_passes


def test_off_by_one_lengths_of_requests_that_were_not_rolled_back() -> None:
    """Some requests of a pass lose drafts and others do not. Every length is right after every step."""
    subject = engine()
    prompts = [[5, 6, 7], [8, 9], [1, 2, 3, 4], [30, 31, 32]]
    truths = [continuation(toy(), p, 10) for p in prompts]
    branches = subject.prompts(prompts)
    jobs = []
    for i, (branch, truth) in enumerate(zip(branches, truths, strict=True)):
        at, chain = branch.length + 1, [t if i % 2 else (t + 1) % VOCAB for t in truth[1:4]]
        jobs.append(submit(branch, 10, drafter="forced", forced_drafts={at: [chain]}))
    while not all(job.done for job in jobs):
        subject.loop.step()
        for branch, prompt, truth in zip(branches, prompts, truths, strict=True):
            assert branch.tokens == (prompt + truth)[: branch.length]
            assert branch.record.states[-1] is PENDING
            assert branch.lane.computed == branch.lane.table.length == branch.length - 1
            assert_canonical(branch)
    assert [job.statistics.rejected for job in jobs] == [3, 0, 3, 0]


def test_cancelled_requests_still_in_a_verify_batch() -> None:
    """After a cancel no pass touches the request's pages, and other requests may take them."""
    subject = engine()
    gone, stays = subject.prompts([[1, 2, 3], [4, 5, 6]])
    cancelled, job = submit(gone, 20, drafter="lens", window=4), submit(stays, 20, drafter="lens", window=4)
    subject.loop.step()
    passes = watch_passes(subject)
    subject.cancel(cancelled)
    tokens, table = gone.tokens, gone.lane.table
    assert_canonical(gone)  # committed tokens stay
    subject.loop.step()
    assert passes and all(segment.table is not table for segments in passes for segment in segments)
    assert gone.tokens == tokens and DRAFT not in gone.record.states
    gone.release()
    while not job.done:
        subject.loop.step()
    assert stays.generated == continuation(toy(), [4, 5, 6], 20)
    assert_canonical(stays)


def test_preempted_requests_still_in_a_verify_batch() -> None:
    """A preempted request is in no pass until it has pages again, and is recomputed to the same bits."""
    subject = engine(cache_tokens=48)  # 12 pages; each request ends up needing 8
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    branches = subject.prompts(prompts)
    preempted: list[int] = []
    subject.loop.listeners.append(lambda e: preempted.append(e["branch"]) if e["event"] == "preempt" else None)
    jobs = [submit(branch, 28, drafter="lens", window=4) for branch in branches]
    while not all(job.done for job in jobs):
        turns = subject.loop.draft(subject.loop.admit())
        written = [slot for turn in turns for slot in subject.runner.pool.slots(turn.tables[0], turn.start, turn.end)]
        assert len(set(written)) == len(written), "no slot belongs to two requests of a pass"
        subject.loop.verify(turns, exact=True)
        subject.check_integrity()
    assert preempted, "control: the pages did run out"
    for branch, prompt in zip(branches, prompts, strict=True):
        assert branch.generated == continuation(toy(), prompt, 28)
        assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])


@pytest.mark.parametrize("drafter", ["self", "lens", "ngram", "tree", "forced"])
def test_more_unverified_tokens_than_the_window(drafter: str) -> None:
    """Between drafting and verifying there are at most window - 1 drafts, and never more than the request still needs."""
    subject = engine()
    branch = subject.prompt([1, 2, 1, 2, 1, 2])
    truth = continuation(toy(), branch.tokens, 7)
    given = {at: [truth[at - 6 :] + [0] * 9] for at in range(6, 13)} if drafter == "forced" else None
    job = submit(branch, 7, drafter=drafter, window=4, forced_drafts=given)
    while not job.done:
        turns = subject.loop.draft(subject.loop.admit())
        unverified = branch.record.states.count(DRAFT)
        assert unverified <= job.remaining - 1
        assert unverified <= 3 or drafter == "forced", "given chains are their own window"
        assert unverified <= turns[0].num_drafts == branch.lane.table.length - turns[0].end
        subject.loop.verify(turns, exact=True)
    assert branch.generated == truth


def test_the_planner_choosing_a_window_larger_than_a_pass() -> None:
    subject = engine(max_rows=16)
    for drafter in ("self", "lens", "tree"):
        branch = subject.prompt([1, 2, 3]).generate(30, drafter=drafter)
        assert branch.generated == continuation(toy(), [1, 2, 3], 30)
        assert_canonical(branch)
