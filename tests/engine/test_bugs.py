"""Bugs that other engines had, and some that this one had: each is a test, named after the bug."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadPage, IntegrityError, KVCorruption, NonFinite
from replaylens.engine.loop.lane import Job
from replaylens.engine.memory.pages import NULL_PAGE, PagePool, PageTable
from replaylens.engine.memory.tree import ACCEPTED, DRAFT, PENDING, PROMPT, BranchStatus
from replaylens.engine.passes import cpu
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.runner import Runner
from replaylens.engine.proof.certificates import certificate_for
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from tests.toy_model import VOCAB, Reference, continuation, engine, random_model, scripted_model, toy, watch_passes

SITES = ("blocks.0.attn.hook_out", "blocks.1.hook_in", "blocks.1.hook_out")


def assert_canonical(branch: Branch) -> None:
    """Every committed row, in the cache and captured, is the one of the path computed alone."""
    model, lane = branch.engine.model, branch.lane
    truth = Reference(model, branch.tokens, SITES if lane.recording else ())
    assert torch.equal(branch.kv(), truth.kv[: lane.computed])
    if lane.recording:
        captured = lane.recording.positions()
        assert captured == list(range(len(captured)))
        assert all(torch.equal(lane.recording[site], truth.rows[site][: len(captured)]) for site in SITES)
    branch.engine.check_integrity()


def submit(branch: Branch, n: int, **options: object) -> Job:
    job = Job(branch.lane, n, **options)
    branch.engine.loop.submit(job)
    return job


# ---- bugs that others hit --------------------------------------------------------------------------------------------


def test_off_by_one_lengths_of_requests_that_were_not_rolled_back() -> None:
    """Some requests of a pass lose drafts, others lose none: every length is right after every step."""
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
            assert branch.states[-1] is PENDING
            assert branch.lane.computed == branch.lane.table.length == branch.length - 1
            assert_canonical(branch)
    assert [job.statistics.rejected for job in jobs] == [3, 0, 3, 0]


@pytest.mark.parametrize("offset", [0, 1, 7, 15, 63])
def test_verifier_attention_choosing_its_own_split(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over keys is cut at fixed positions, however the rows are cut into windows."""
    path = [(7 * i) % VOCAB for i in range(150)]
    truth = Reference(toy(), path)

    def windowed() -> tuple[Tensor, Tensor]:
        runner, table = Runner(toy(), certificate_for(toy()), 40, 4), PageTable()
        cuts = sorted({0, *range(offset, 150, 9), 150})
        logits = []
        for start, end in pairwise(cuts):
            runner.reserve(table, start, end)
            logits.append(runner.exact([Segment(table, start, path[start:end], end - start)]).logits)
        return torch.cat(logits), runner.cache.rows(runner.pool.slots(table, 0, 150))

    logits, kv = windowed()
    assert torch.equal(logits, truth.logits) and torch.equal(kv, truth.kv)
    monkeypatch.setattr(cpu, "KV_BLOCK", 32)
    assert not torch.equal(windowed()[0], truth.logits), "control: another split gives other bits"


def test_zeroed_page_table_entries() -> None:
    """Page 0 belongs to nobody: a zeroed entry is an error, is never freed into the pool, and padding reads zeros."""
    subject = engine(cache_tokens=64, canary=True)
    branches = subject.prompts([[1, 2, 3], [4, 5, 6, 7, 8]])
    subject.generate(branches, 12, drafter="tree", window=4)
    assert not subject.runner.cache.data[:, :, :, : subject.runner.pool.page_size].any(), "nothing was ever written there"
    table, pool = branches[0].lane.table, subject.runner.pool
    saved, table.pages[1] = table.pages[1], NULL_PAGE
    with pytest.raises(IntegrityError, match="page 0"):
        subject.check_integrity()
    with pytest.raises(BadPage, match="null page"):
        pool.truncate(table, 0)
    with pytest.raises(KVCorruption):
        branches[0].generate(2)
    assert pool.refcount(NULL_PAGE) == 0
    table.pages[1] = saved
    branches[0].rollback(branches[0].root_length)
    assert branches[0].generate(12).generated == continuation(toy(), [1, 2, 3], 12)
    taken = [pool.reserve(PageTable(), 0, 4) for _ in range(pool.num_free)]
    assert len(taken) and pool.refcount(NULL_PAGE) == 0, "the null page is never handed out"


def test_page_table_and_write_index_disagreeing() -> None:
    """A position is read from the slot it was written to, also after copy on write and in pages out of order."""
    pool = PagePool(16, 4)
    first, second = PageTable(), PageTable()
    for i in range(3):  # interleaved, so that neither table's pages are consecutive
        pool.reserve(first, 4 * i, 4 * i + 4)
        pool.reserve(second, 4 * i, 4 * i + 4)
    fork = pool.fork(first, 10)
    pool.reserve(fork, 10, 14)
    batch = Batch([Segment(fork, 10, [1, 2, 3]), Segment(second, 5, [4, 5])], pool, (1, 2, 4, 8))
    read = {}
    for group in batch.groups:
        for piece, rows in enumerate(group.rows.tolist()):
            keys = group.slots[piece * group.num_keys : (piece + 1) * group.num_keys].tolist()
            for row, position in zip(rows, group.positions[piece].tolist(), strict=True):
                if row < batch.padded:
                    read[row] = keys[position]
    assert [read[row] for row in range(batch.num_rows)] == batch.write_slots.tolist()
    assert set(batch.write_slots.tolist()).isdisjoint(pool.slots(first, 0, 12)), "a fork writes to pages of its own"


def test_finish_reason_not_cleared_after_rollback() -> None:
    """The finish goes with the token that caused it, and comes back with it."""
    subject, sampling = engine(scripted_model({6: 40})), Sampling(stop_tokens=(40,))
    branch = subject.prompt([1, 2, 3]).generate(20, sampling=sampling, window=4)
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 40], "eos")
    branch.rollback(branch.length - 1)
    assert branch.finish_reason is None and branch.status is BranchStatus.OPEN
    branch.generate(20, sampling=sampling, window=2)
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 40], "eos")
    branch.rollback(branch.length).generate(3)  # reopened where it stands: nothing cut, but the finish derived anew
    assert branch.generated == [4, 5, 6, 40, 41, 42, 43] and branch.finish_reason is None


@pytest.mark.parametrize("chain", [[40], [5, 40], [9, 40], [5, 6, 40]])
def test_eos_inside_the_rejected_part(chain: list[int]) -> None:
    """An EOS that was only drafted ends nothing."""
    branch = engine(scripted_model({})).prompt([1, 2, 3])
    drafts = {4: [chain]}
    branch.generate(8, sampling=Sampling(stop_tokens=(40,)), drafter="forced", drafts=drafts)
    assert branch.generated == [4, 5, 6, 7, 8, 9, 10, 11]
    assert branch.finish_reason is None and branch.status is BranchStatus.OPEN


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("window", [1, 2, 8])
def test_drafts_after_an_accepted_eos(window: int, final: bool) -> None:
    """What was drafted after the end is rejected, even though the verifier would have said the same."""
    branch = engine(scripted_model({6: 40})).prompt([1, 2, 3], sites=SITES)
    drafts = {3: [[4, 5, 6, 40, 41, 42, 43][: window - 1]]}
    branch.generate(20, sampling=Sampling(stop_tokens=(40,)), drafter="forced", drafts=drafts, final=final)
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 40], "eos")
    assert branch.lane.computed == branch.length - (0 if final or window == 8 else 1)
    assert_canonical(branch)


def test_a_rejected_stop_string() -> None:
    """A stop string completed by a draft stops only if the draft stands; then nothing stays after it."""
    subject, sampling = engine(scripted_model({})), Sampling(stop=("7 50", "8 9"))
    branch = subject.prompt([1, 2, 3])
    branch.generate(20, sampling=sampling, drafter="forced", drafts={6: [[7, 50, 51]]})
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 7, 8, 9], "stop"), "7 50 was drafted, not said"
    right = subject.prompt([1, 2, 3]).generate(20, sampling=sampling, drafter="forced", drafts={6: [[7, 8, 9, 10, 11]]})
    assert (right.generated, right.finish_reason) == (branch.generated, "stop"), "10 and 11 were right, but after the end"


def test_cancelled_requests_still_in_a_verify_batch() -> None:
    """After a cancel no pass touches the request's pages, and others may have them."""
    subject = engine()
    gone, stays = subject.prompts([[1, 2, 3], [4, 5, 6]])
    cancelled, job = submit(gone, 20, drafter="lens", window=4), submit(stays, 20, drafter="lens", window=4)
    subject.loop.step()
    passes = watch_passes(subject)
    subject.cancel(cancelled)
    tokens, table = gone.tokens, gone.lane.table
    assert_canonical(gone)  # what it committed stays
    subject.loop.step()
    assert passes and all(segment.table is not table for segments in passes for segment in segments)
    assert gone.tokens == tokens and DRAFT not in gone.states
    gone.release()
    while not job.done:
        subject.loop.step()
    assert stays.generated == continuation(toy(), [4, 5, 6], 20)
    assert_canonical(stays)


def test_preempted_requests_still_in_a_verify_batch() -> None:
    """Who lost its pages is in no pass before it has others, and is computed again to the same bits."""
    subject = engine(cache_tokens=48)  # 12 pages; each request needs 8 in the end
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
    """Between drafting and verifying there are at most window - 1 drafts, and never more than are still wanted."""
    subject = engine()
    branch = subject.prompt([1, 2, 1, 2, 1, 2])
    truth = continuation(toy(), branch.tokens, 7)
    given = {at: [truth[at - 6 :] + [0] * 9] for at in range(6, 13)} if drafter == "forced" else None
    job = submit(branch, 7, drafter=drafter, window=4, forced_drafts=given)
    while not job.done:
        turns = subject.loop.draft(subject.loop.admit())
        unverified = branch.states.count(DRAFT)
        assert unverified <= job.remaining - 1
        assert unverified <= 3 or drafter == "forced", "given chains are their own window"
        assert unverified <= turns[0].num_drafts == branch.lane.table.length - turns[0].end
        subject.loop.verify(turns, exact=True)
    assert branch.generated == truth


def test_captures_keyed_by_slot_when_accepted_kv_is_moved() -> None:
    """A sibling chain that stands brings its own pages; captured rows go by position and do not notice."""
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
    """A request that finds its beginning in the index has the tokens and KV of one that computes it."""
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


def test_an_unrelated_prefill_of_9_or_10_tokens_changing_a_neighbours_bits() -> None:
    """Whatever is prefilled beside it, a decoding row keeps its bits."""
    truth = Reference(toy(), [1, 2, 3, *continuation(toy(), [1, 2, 3], 3)])
    for n in (*range(1, 20), 31, 32, 33, 63, 64, 65):
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
    """Neighbours with huge activations do not move a row's bits; with a scale over the whole batch they would."""
    model = random_model()
    model.embed[60] *= 1e4

    def rows_beside(token: int, per_tensor_scale: bool) -> Tensor:
        runner, tables = Runner(model, certificate_for(model), 8, 4), [PageTable(), PageTable()]
        for table in tables:
            runner.reserve(table, 0, 4)

        class Scaled:
            """A per-tensor scale, as 8-bit formats have it: rows are rounded to a grid that the largest of them sets."""

            def wants(self, site: str) -> bool:
                return per_tensor_scale and site.endswith(".hook_in")

            def __call__(self, site: str, value: Tensor) -> Tensor:
                step = value.abs().max() / 127
                return (value / step).round() * step

        runner.exact([Segment(tables[0], 0, [1, 2, 3, 4], 1), Segment(tables[1], 0, [token] * 4)], Scaled())
        return runner.cache.rows(runner.pool.slots(tables[0], 0, 4))

    assert torch.equal(rows_beside(5, False), rows_beside(60, False))
    assert not torch.equal(rows_beside(5, True), rows_beside(60, True)), "control"


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 32, 33, 47])
def test_padding_overrunning_a_captured_buffer(n: int) -> None:
    """A pass is padded to whole tiles; what is captured is the request's rows, all of them and no others."""
    subject = engine()
    path = [(11 * i + 1) % VOCAB for i in range(n)]
    branch, beside = subject.prompts([path, [4, 5]], sites=SITES)
    for one, tokens in ((branch, path), (beside, [4, 5])):
        assert [len(one.activations[site]) for site in SITES] == [len(tokens)] * 3
        assert all(not row.equal(torch.zeros_like(row)) for site in SITES for row in one.activations[site])
        assert_canonical(one)
    buffers = [{one.activations[site].untyped_storage().data_ptr() for site in SITES} for one in (branch, beside)]
    assert not buffers[0] & buffers[1], "no two recordings share a buffer"


def test_a_rolled_back_bonus_token_leaving_its_kv() -> None:
    """T4 came free, was computed, and is rolled back: its slot is gone with it, and another token there has its own KV."""
    branch = engine().prompt([1, 2, 3], sites=SITES)
    truth = continuation(toy(), [1, 2, 3], 6)
    branch.generate(5, drafter="forced", drafts={4: [truth[1:4]]}, final=True)
    assert branch.states == [PROMPT] * 3 + [ACCEPTED] * 5
    branch.rollback(7)
    assert branch.lane.table.length == branch.lane.computed == 7
    assert len(branch.activations[SITES[0]]) == 7
    branch.force([(truth[4] + 1) % VOCAB])
    assert_canonical(branch)
    branch.rollback(7).generate(2)
    assert branch.generated == truth
    assert_canonical(branch)


# ---- bugs of our own -------------------------------------------------------------------------------------------------


def test_a_private_copy_of_a_page_without_its_last_row() -> None:
    """A turn copies the shared page whose last row it will write anew, then has to wait and is cancelled: the row
    was never written, so it does not count as computed."""
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


def test_an_interrupt_leaving_drafts_behind() -> None:
    """Drafts are in the tree while a pass runs; interrupted there, they must not pass for tokens later on."""
    subject = engine()
    branch, waiting = subject.prompts([[1, 2, 3], [4, 5, 6]])
    exact = subject.runner.exact

    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    subject.runner.exact = interrupted
    with pytest.raises(KeyboardInterrupt):
        subject.generate([branch, waiting], 8, window=4)
    subject.runner.exact = exact
    assert (branch.tokens, waiting.tokens) == ([1, 2, 3], [4, 5, 6])
    assert subject.loop.jobs == []
    assert branch.generate(8).generated == continuation(toy(), [1, 2, 3], 8)
    assert waiting.generate(8).generated == continuation(toy(), [4, 5, 6], 8)
    assert_canonical(branch)


@pytest.fixture
def poisoned() -> Iterator[Engine]:
    """An engine whose token 7 has activations that overflow."""
    model = random_model(norm="layer")
    model.embed[7] = 3e38
    yield engine(model)


def test_one_request_with_nan_failing_its_neighbours(poisoned: Engine) -> None:
    good, bad = poisoned.prompts([[1, 2, 3], [4, 5, 6]])
    truth = continuation(poisoned.model, [1, 2, 3], 8)
    jobs = [submit(good, 8, window=4), submit(bad, 8, sampling=Sampling(logit_bias={7: 1e9}))]
    while not all(job.done for job in jobs):
        poisoned.loop.step()
    assert isinstance(jobs[1].error, NonFinite) and jobs[0].error is None
    assert bad.tokens == [4, 5, 6, 7], "7 was said; what follows it cannot be"
    assert good.generated == truth
    assert_canonical(good)
    assert bad.rollback(3).generate(3).generated == continuation(poisoned.model, [4, 5, 6], 3)


def test_a_draft_with_nan_failing_its_request(poisoned: Engine) -> None:
    """A masked key still multiplies its value by zero, and zero times NaN is NaN: such a draft is dropped."""
    branch = poisoned.prompt([1, 2, 3])
    branch.generate(8, drafter="forced", drafts={3: [[7, 7]], 5: [[1, 7]]})
    assert branch.generated == continuation(poisoned.model, [1, 2, 3], 8)
    assert_canonical(branch)


def test_nan_in_a_prompt_reaching_the_prefix_index(poisoned: Engine) -> None:
    """Rows before the NaN in the same pass are spoiled too, and their page has a key that others ask for."""
    with pytest.raises(NonFinite):
        poisoned.prompt([1, 2, 3, 4, 7])
    branch = poisoned.prompt([1, 2, 3, 4, 9])
    assert branch.generate(4).generated == continuation(poisoned.model, [1, 2, 3, 4, 9], 4)
    assert_canonical(branch)


def test_a_stop_string_in_forced_text_ending_the_generation() -> None:
    """Only what the model says can stop it; a stop string may begin in forced text, but must end after it."""
    subject = engine(scripted_model({}))
    branch = subject.prompt([1, 2, 3]).force([20, 21, 22])
    branch.generate(4, sampling=Sampling(stop=("20 21",)))
    assert (branch.generated, branch.finish_reason) == ([20, 21, 22, 23, 24, 25, 26], None)
    across = subject.prompt([1, 2, 3]).force([20, 21]).generate(9, sampling=Sampling(stop=("21 22",)))
    assert (across.generated, across.finish_reason) == ([20, 21, 22], "stop")


def test_the_planner_choosing_a_window_larger_than_a_pass() -> None:
    subject = engine(max_rows=16)
    for drafter in ("self", "lens", "tree"):
        branch = subject.prompt([1, 2, 3]).generate(30, drafter=drafter)
        assert branch.generated == continuation(toy(), [1, 2, 3], 30)
        assert_canonical(branch)
