"""Scheduling: who runs when, with how many rows and pages. The bits are always the same."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.loop.admission import FIXED_WINDOW, Planner
from replaylens.engine.loop.lane import Job, Lane, Statistics, Window
from replaylens.engine.loop.loop import Loop
from replaylens.engine.loop.reservations import Reservations
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.prefix import PrefixIndex
from replaylens.engine.memory.tree import DRAFT
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from tests.devices import swept
from tests.engine.coin_engine import PROMPT
from tests.toy_model import VOCAB, Reference, continuation, engine, random_model, toy, watch_passes


def path(n: int, step: int = 7) -> list[int]:
    return [(step * i + 3) % VOCAB for i in range(n)]


def submit(branch: Branch, n: int, **options: object) -> Job:
    job = Job(branch.lane, n, **options)
    branch.engine.loop.submit(job)
    return job


def planted(subject: Engine, tokens: list[int]) -> Branch:
    """A root whose prompt is not computed yet."""
    return Branch(subject, subject.forest.plant(tokens, None))


def assert_right(branch: Branch, prompt: list[int], n: int, sampling: Sampling | None = None) -> None:
    assert branch.generated == continuation(toy(), prompt, n, sampling)
    assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])


# ---- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, 48])
def test_no_more_cached_prefixes_are_given_up_than_a_turn_lacks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The search for the oldest looks at those that it gives up, however many there are."""
    subject = engine(cache_tokens=16 * count + 64)  # 16 pages remain free
    for number in range(count):
        subject.prompt([*path(15, number + 1), number]).release()
    searches, looks, evict, rank = list[int](), [], PrefixIndex.evict, PrefixIndex._rank
    monkeypatch.setattr(PrefixIndex, "evict", lambda index, pages: searches.append(evict(index, pages)) or searches[-1])
    monkeypatch.setattr(PrefixIndex, "_rank", lambda index, entry: looks.append(entry) or rank(index, entry))
    branch = subject.prompt(path(9, 50)).generate(91, sampling=Sampling(ignore_eos=True))
    assert branch.generated == continuation(toy(), path(9, 50), 91)
    assert sum(searches) == 25 - 16 and set(searches) == {1}, "99 positions, a page whenever one is lacking"
    assert len(looks) <= count + 3 * sum(searches), "each prefix is listed once, after its branch was released"


def test_of_idle_branches_the_one_used_longest_ago_loses_its_pages() -> None:
    subject = engine(cache_tokens=64, page_size=4)
    old, recent, middle = (subject.prompt([step, *path(15, step)]) for step in (1, 2, 3))
    middle.force([5])
    recent.force([6])
    subject.prefix.clear()
    held = subject.prompt([4, *path(15, 4)])  # 16 + 17 + 17 + 16 of 64 positions
    assert old.lane.computed < 16 and recent.lane.computed == 17 and middle.lane.computed == 17
    subject.prompt([9, *path(19, 9)])
    assert middle.lane.computed < 17 and recent.lane.computed == 17 and held.lane.computed == 16
    for branch in (old, recent, middle, held):
        assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv)


def test_the_youngest_request_loses_its_pages_first() -> None:
    subject, lost = engine(cache_tokens=80, page_size=4), list[int]()
    branches = subject.prompts([[step, *path(15, step)] for step in (1, 2, 3, 4)])
    subject.prefix.clear()
    subject.loop.listeners.append(lambda event: lost.append(event["branch"]) if event["event"] == "preempt" else None)
    subject.generate(branches, 30, window=1)
    assert list(dict.fromkeys(lost)) == [branches[3].id, branches[2].id, branches[1].id], "page by page, until it has none"
    assert branches[0].id not in lost, "the oldest one loses nothing"
    for branch, step in zip(branches, (1, 2, 3, 4), strict=True):
        assert_right(branch, [step, *path(15, step)], 30)


def test_a_window_ends_with_a_stop_token() -> None:
    """Nothing follows it, so no time goes into drafts after it."""
    table, window = PageTable(), Window(at=5, count=4)
    window.add(7, (3,), table, 4)
    assert not window.full and window.num_missing == 3
    window.add(3, (3,), table, 4)
    assert window.full and window.num_missing == 0 and window.chain == [7, 3]


def test_a_window_is_opened_without_asking_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning a step of n branches costs in proportion to n."""
    asked = 0
    missing = Window.num_missing.fget

    def counted(window: Window) -> int:
        nonlocal asked
        asked += 1
        return missing(window)

    monkeypatch.setattr(Window, "num_missing", property(counted))
    subject = engine(max_rows=512)
    branches = subject.prompt(path(20)).fork(60)
    subject.generate(branches, 4, sampling=[Sampling(temperature=1.0, seed=i, ignore_eos=True) for i in range(60)], window=3)
    assert 0 < asked < 60 * 4 * 4


@pytest.mark.parametrize("max_rows", [16, 17, 32, 100])
def test_prefills_are_cut_into_chunks_beside_decoding_requests(max_rows: int) -> None:
    """No pass has more than `max_rows` rows. A long prompt does not delay a request that waits for one token."""
    subject = engine(max_rows=max_rows)
    decoding = subject.prompt([1, 2, 3])
    long = path(90)
    jobs = [submit(decoding, 12, window=1), submit(planted(subject, long), 3)]
    passes = watch_passes(subject)
    while not jobs[0].done:
        before = decoding.length
        subject.loop.step()
        assert decoding.length == before + 1, "a token in every step"
    subject.forest.wait(jobs)
    assert max(sum(len(s.tokens) for s in segments) for segments in passes) <= max_rows
    assert_right(decoding, [1, 2, 3], 12)
    assert_right(Branch(subject, jobs[1].lane), long, 3)


@pytest.mark.parametrize("window", [4, None])
@pytest.mark.parametrize("drafter", swept(["self", "lens", "tree"], "self"))
def test_no_pass_has_more_rows_than_allowed(drafter: str, window: int | None) -> None:
    subject = engine(max_rows=20)
    branches = subject.prompts([[i, i + 1] for i in range(7)])
    passes = watch_passes(subject)
    subject.generate(branches, 10, drafter=drafter, window=window)
    assert max(sum(len(s.tokens) for s in segments) for segments in passes) <= 20
    for i, branch in enumerate(branches):
        assert_right(branch, [i, i + 1], 10)


# ---- fairness --------------------------------------------------------------------------------------------------------


def test_no_request_starves_in_a_stream_of_short_ones() -> None:
    """Decoding newcomers would take every row. The long prompt before them still gets its turns."""
    subject = engine(max_rows=16)
    root = subject.prompt([1, 2, 3])
    old = submit(planted(subject, path(100)), 4, window=1)
    newcomers: list[Job] = []
    steps = 0
    while not old.done:
        while sum(not job.done for job in newcomers) < 4:  # four windows of 4 rows fill every pass
            newcomers.append(submit(root.fork()[0], 8, window=4))
        subject.loop.step()
        steps += 1
        assert steps < 40, "100 rows in passes of 16, every other one its own"
    assert len(newcomers) > 4, "control: they kept coming"
    assert_right(Branch(subject, old.lane), path(100), 4)


def test_equal_requests_are_served_in_the_order_they_came() -> None:
    """With room for two windows at a time, no request waits longer than for those before it."""
    subject = engine(max_rows=16)
    branches = subject.prompts([[i] for i in range(8)])
    jobs = [submit(branch, 8, window=8, drafter="forced", forced_drafts={}) for branch in branches]
    done: list[int] = []
    for _ in range(8 * 8):
        subject.loop.step()
        done += [i for i, job in enumerate(jobs) if job.done and i not in done]
    assert done == list(range(8))


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "drafter", "window", "capture"), [(10, "self", None, True), (14, "tree", 4, False), (24, "ngram", 1, True)]
)
def test_when_pages_run_out_requests_wait_or_are_computed_again_to_the_same_bits(
    pages: int, drafter: str, window: int | None, capture: bool
) -> None:
    """Five requests of up to 36 positions, 9 pages each; the cache has room for one to two of them."""
    subject = engine(cache_tokens=4 * pages)
    prompts = [path(4 * i + 4, i + 2) for i in range(5)]
    branches = subject.prompts(prompts, sites=["blocks.1.hook_in"] if capture else None)
    jobs = [submit(branch, 16, drafter=drafter, window=window) for branch in branches]
    while not all(job.done for job in jobs):
        subject.loop.step()
        subject.check_integrity()
    for branch, prompt in zip(branches, prompts, strict=True):
        assert_right(branch, prompt, 16)
        if capture:
            rows = branch.activations["blocks.1.hook_in"]
            assert torch.equal(
                rows, Reference(toy(), branch.tokens, ["blocks.1.hook_in"]).rows["blocks.1.hook_in"][: len(rows)]
            )
            assert len(rows) == branch.length - 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [6, 22, 36, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(300, 500))])
def test_the_oldest_request_finds_the_pages_of_all_others(seed: int) -> None:
    """Requests that fit alone fit together, in any order and after any past. A job that had taken its first page while the
    reservation looked for one was asked for nothing after that, and the oldest was told that it can never fit."""
    draw = random.Random(seed)
    pages = draw.randint(5, 10)
    subject, most = engine(cache_tokens=4 * pages, page_size=4, max_rows=draw.choice([16, 32, 64])), 4 * pages - 2
    for _ in range(4):
        made, streams = list[Branch](), list[Any]()
        for _ in range(draw.randint(2, 5)):
            length = draw.randint(1, most - 3)
            tokens = [draw.randrange(60) for _ in range(length)]
            made.append(subject.prompt(tokens, sites=draw.choice([None, "S"])))
            how = {"drafter": draw.choice(["self", "ngram"]), "deterministic": draw.random() < 0.7}
            streams.append((iter(made[-1].stream(new := draw.randint(1, most - length), **how)), tokens, new, how))
        left = [stream for stream, *_ in streams]
        while left:
            stream = draw.choice(left)
            if next(stream, None) is None:
                left.remove(stream)
        for branch, (_, tokens, new, how) in zip(made, streams, strict=True):
            assert not how["deterministic"] or branch.generated == continuation(toy(), tokens, new)
            if draw.random() < 0.6:
                branch.release()


def looks(monkeypatch: pytest.MonkeyPatch, subject: Engine, forks: list[Branch], walk: bool = False) -> tuple[int, int]:
    """(how often lanes and jobs are read, rows computed) while each fork generates two tokens.

    walk  the mechanism to be found: every reservation looks at all lanes
    """
    passes, count, reserve = watch_passes(subject), 0, Reservations._reserve

    def read(self: object, name: str) -> object:
        nonlocal count
        count += 1
        return object.__getattribute__(self, name)

    def walking(self: Reservations, *given: Any) -> None:
        assert min(lane.last_used for lane in self.lanes.values()) >= 0
        reserve(self, *given)

    with monkeypatch.context() as patch:
        if walk:
            patch.setattr(Reservations, "_reserve", walking)
        patch.setattr(Lane, "__getattribute__", read)
        patch.setattr(Job, "__getattribute__", read)
        subject.generate(forks, 2, sampling=Sampling(ignore_eos=True), window=1)
    return count, sum(len(s.tokens) for segments in passes for s in segments)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [160, 1 << 16])
def test_a_token_takes_no_longer_beside_more_branches(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Two tokens on each fork of one prompt, with room for 39 of their tails and for all. No row is computed twice: forks are
    served in waves that fit, and the prompt's pages stay."""
    found, controls = list[float](), list[float]()
    for count in (80, 320):
        for walk, costs in ((False, found), (True, controls)):
            subject = engine(cache_tokens=tokens, page_size=4, max_rows=64)
            forks = subject.prompt(path(6)).fork(count)
            reads, rows = looks(monkeypatch, subject, forks, walk)
            assert rows == 2 * count
            costs.append(reads / count)
            assert {tuple(fork.generated) for fork in forks} == {tuple(continuation(toy(), path(6), 2))}
            assert all(torch.equal(fork.kv(), Reference(toy(), fork.tokens).kv[:7]) for fork in forks[:: count // 4])
            subject.check_integrity()
    assert found[1] < 1.1 * found[0]
    assert controls[1] > 1.5 * controls[0], "the control: such a walk is seen"


def test_idle_branches_give_up_what_they_share_together() -> None:
    """The first of them that is asked frees nothing, and keeps what it has until the one that was used last is asked."""
    subject = engine(cache_tokens=64)  # 16 pages
    own, root = subject.prompt(path(16, 5)), subject.prompt(path(16))
    forks = root.fork(3)
    subject.prefix.clear()
    wide = subject.prompt(path(36, 9))  # 8 free pages, and one
    assert own.lane.computed == 12 and {branch.lane.computed for branch in (root, *forks)} == {16}
    wide.force([1] * 12)
    assert own.lane.computed == 0
    wide.force([1] * 4)
    assert {branch.lane.computed for branch in (root, *forks)} == {12}
    for branch in (root, *forks, own, wide):
        assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv)
    subject.check_integrity()


def test_the_oldest_request_takes_what_waiting_ones_share() -> None:
    """It needs nearly the whole cache. The others wait, share a prompt, and can free it together only."""
    subject = engine(cache_tokens=64)  # 16 pages
    root, oldest = subject.prompt(path(20)), subject.prompt([9, 8])
    subject.prefix.clear()
    forks, jobs = root.fork(4), [submit(oldest, 58, window=1, sampling=Sampling(ignore_eos=True))]
    while not jobs[0].done:
        before = oldest.length
        if before == 42:  # its 11 pages and the prompt's 5
            jobs += [submit(fork, 3, window=1) for fork in forks]
        assert (before <= 45) == (root.lane.computed == 20)
        subject.loop.step()
        subject.check_integrity()
        assert oldest.length == before + 1, "the oldest never waits"
    subject.forest.wait(jobs)
    assert oldest.generated == continuation(toy(), [9, 8], 58)
    for fork in forks:
        assert_right(fork, path(20), 3)


def test_a_request_that_must_wait_takes_nothing() -> None:
    """It lacks more pages than younger requests have: these keep theirs, and compute nothing again."""
    subject, lost = engine(cache_tokens=64), list[int]()
    oldest, younger = subject.prompts([path(28), path(7, 3)])
    subject.forest.force(younger.lane, [1, 2])  # it lacks as many rows as the one before it, which goes first
    subject.prefix.clear()
    subject.loop.listeners.append(lambda event: lost.append(event["branch"]) if event["event"] == "preempt" else None)
    long = planted(subject, path(41, 5))
    jobs = [submit(oldest, 4, window=1), submit(long, 2, window=1), submit(younger, 8, window=1)]
    subject.loop.step()
    assert jobs[1].lane.computed == 0 and younger.lane.computed == 9 and lost == []
    subject.forest.wait(jobs)
    assert_right(oldest, path(28), 4)
    assert_right(long, path(41, 5), 2)
    assert younger.tokens[9:] == continuation(toy(), [*path(7, 3), 1, 2], 8)


def test_a_window_that_can_never_fit_does_not_hold_up_the_others() -> None:
    """The older request's window exceeds the cache. It runs without drafts, and the younger one's prefill gets through."""
    subject = engine(cache_tokens=64, page_size=16, max_rows=16)
    older, younger = path(31), path(30, 5)
    branches = [planted(subject, older), planted(subject, younger)]
    jobs = [submit(branches[0], 4, drafter="tree", window=4), submit(branches[1], 2, window=1)]
    for _ in range(60):
        subject.loop.step()
    assert all(job.done for job in jobs)
    assert_right(branches[0], older, 4)
    assert_right(branches[1], younger, 2)


def test_memory_is_the_prefix_and_the_tails() -> None:
    """64 forks of a prefix of 30 tokens in pages of 4: 8 pages for the prefix, and a tail for each fork."""
    subject = engine()
    pool = subject.runner.pool
    root = subject.prompt(path(30))
    used = lambda: pool.num_pages - pool.num_free  # noqa: E731
    assert used() == 8
    forks = root.fork(64)
    assert used() == 8, "a fork takes no page"
    for i, fork in enumerate(forks):
        fork.force([i % VOCAB, i // VOCAB])
    assert used() == 8 + 64, "positions 28 to 31: the page that the prefix does not fill, once for each"
    subject.generate(forks, 4)
    subject.prefix.evict(pool.num_pages)  # pages that only the index holds can be reclaimed
    assert used() == 8 + 64 * 2, "positions 32 to 34 (the last token's row is pending)"
    for fork in forks:
        assert fork.lane.table.pages[:7] == root.lane.table.pages[:7]
        fork.release()
    subject.prefix.clear()
    assert used() == 8
    assert torch.equal(root.kv(), Reference(toy(), path(30)).kv)
    subject.check_integrity()


def test_a_fork_of_4000_tokens_copies_no_full_page() -> None:
    """The fork copies nothing. Its first own token copies the one page that is not full."""
    model = random_model(num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, d_mlp=16, max_positions=4096)
    subject = engine(model, page_size=16, cache_tokens=2 * 4096)
    root = subject.prompt([i % VOCAB for i in range(4001)])
    pool, copies = subject.runner.pool, []
    copy = subject.runner.cache.copy
    subject.runner.cache.copy = lambda asked: copies.extend(asked) or copy(asked)
    free = pool.num_free
    (fork,) = root.fork()
    assert pool.num_free == free and fork.lane.table.pages == root.lane.table.pages
    fork.force([5])
    assert [page.num_slots for page in copies] == [1], "4001 = 250 pages and one position"
    assert pool.num_free == free - 1 and fork.lane.table.pages[:-1] == root.lane.table.pages[:-1]


# ---- cancelling ------------------------------------------------------------------------------------------------------


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["self", "lens", "tree"])
def test_a_stream_yields_committed_tokens_in_order(drafter: str) -> None:
    """Each token comes once, in order, and is never taken back: `lens` and `tree` guess wrong most of the time."""
    subject = engine()
    branch = subject.prompt([1, 2, 3])
    truth = continuation(toy(), [1, 2, 3], 20)
    seen = []
    for token in branch.stream(20, drafter=drafter, window=6):
        seen.append(token)
        assert seen == truth[: len(seen)]
        assert branch.tokens[3 : 3 + len(seen)] == seen and DRAFT not in branch.record.states
    assert seen == truth and branch.statistics.tokens == 20
    assert branch.statistics.rejected > 0 or drafter == "self", "control: there was something to take back"


def test_streams_lose_nothing_when_others_step_the_loop() -> None:
    """Two streams are read in turn, with other work before the first token and between tokens: every token comes out."""
    subject = engine()
    first, second = subject.prompts([[1, 2, 3], [4, 5]])
    streams = [first.stream(12, window=3), second.stream(12, window=4)]
    subject.prompt([7, 7]).generate(5, window=2)
    seen: list[list[int]] = [[], []]
    for _ in range(12):
        for stream, tokens in zip(streams, seen, strict=True):
            tokens.extend(token for token in [next(stream, None)] if token is not None)
    assert seen == [continuation(toy(), [1, 2, 3], 12), continuation(toy(), [4, 5], 12)]


# ---- ordinary requests -----------------------------------------------------------------------------------------------


def test_ordinary_requests_beside_deterministic_ones() -> None:
    """Ordinary requests take the fast path's tokens immediately and are marked. Deterministic ones are not affected."""
    subject = engine()
    exact, ordinary = subject.prompts([[1, 2, 3], [1, 2, 3]])
    jobs = [submit(exact, 20, drafter="lens", window=4), submit(ordinary, 20, exact=False)]
    subject.forest.wait(jobs)
    assert_right(exact, [1, 2, 3], 20)
    assert exact.certified and not ordinary.certified
    assert len(ordinary.generated) == 20 and DRAFT not in ordinary.record.states
    truth = Reference(toy(), ordinary.tokens).kv[: ordinary.lane.computed]
    assert not torch.equal(ordinary.kv(), truth), "control: the fast path has other bits"
    assert torch.allclose(ordinary.kv(), truth, atol=1e-3), "though it computes the same function"
    (fork,) = ordinary.fork()
    assert not fork.generate(3).certified, "nothing that stands on it is promised either"
    fresh = subject.prompt(ordinary.tokens)
    assert fresh.certified and torch.equal(fresh.kv(), Reference(toy(), fresh.tokens).kv), "nor is it ever shared"


# ---- the planner -----------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that the test controls."""
    now = [0.0]
    monkeypatch.setattr("replaylens.engine.loop.admission.time.thread_time", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def test_before_any_measurement_larger_passes_cost_more() -> None:
    """A fixed part and a small part per row: a window is planned as if rows were cheap, but not free."""
    small, large = (Planner()._pass_cost(rows) for rows in (1, 1024))
    assert small < large < 100 * small and Planner()._draft_cost(1) == small


def measured(clock: Callable[[float], None], draft: float, verify: float) -> Planner:
    planner = Planner()
    with planner.timing("draft", 1):
        clock(draft)
    with planner.timing("exact", 16):
        clock(verify)
    with planner.timing("exact", 32):
        clock(verify)
    return planner


def test_the_planner_believes_its_latest_measurement(clock: Callable[[float], None]) -> None:
    """A window that was planned before does not outlive the costs that it was planned with."""
    good = Statistics(drafted=1000, accepted=1000)
    planner = measured(clock, draft=0.01, verify=1.0)
    assert planner.window(False, 1, good) == 32
    for _ in range(30):
        with planner.timing("draft", 1):
            clock(5.0)
    assert planner.window(False, 1, good) == 1


def test_the_planner_scales_the_cost_of_drafts_with_the_requests(clock: Callable[[float], None]) -> None:
    planner = measured(clock, draft=0.02, verify=1.0)
    assert planner._draft_cost(1) == pytest.approx(0.02) and planner._draft_cost(7) == pytest.approx(0.14)
    with planner.timing("draft", 10):
        clock(0.5)
    assert planner._draft_cost(10) == pytest.approx(0.5) and planner._draft_cost(20) == pytest.approx(1.0), "from the nearest"
    assert planner._step_cost(4, 10) == pytest.approx(planner._pass_cost(40) + 3 * 0.5)


def test_the_planner_takes_long_windows_where_drafts_are_cheap_and_right(clock: Callable[[float], None]) -> None:
    good, bad = Statistics(drafted=1000, accepted=1000), Statistics(drafted=1000, accepted=0, rejected=1000)
    cheap, dear = measured(clock, draft=0.01, verify=1.0), measured(clock, draft=1.0, verify=1.0)
    assert cheap.window(False, 1, good) == 32
    assert cheap.window(False, 1, bad) == 1
    assert dear.window(False, 1, good) == 1
    assert 1 < cheap.window(False, 1, Statistics(drafted=1000, accepted=700, rejected=300)) < 32
    assert {cheap.window(True, n, s) for n in (1, 9) for s in (good, bad)} == {FIXED_WINDOW}, (
        "timings never decide what is rejected"
    )


@pytest.mark.parametrize("draft", [None, 0.97, 1.0, 1.03])
def test_drafts_that_cost_a_direct_step_are_not_taken(clock: Callable[[float], None], draft: float | None) -> None:
    """On a CPU a draft costs what a direct step costs, so its verification is lost, whatever was measured or not. Drafts that
    are known already pay; few of them accepted, they do not."""
    planner, good = Planner(), Statistics(drafted=1000, accepted=1000)
    for rows, seconds in ((1, 1.0), (8, 1.6), (32, 4.0)):
        assert draft is not None or planner.window(False, 1, good) == 1
        with planner.timing("exact", rows):
            clock(seconds)
    if draft is not None:
        with planner.timing("draft", 1):
            clock(draft)
    assert planner.window(False, 1, good) == 1 and planner.window(False, 1, good, True) == 32
    assert planner.window(False, 1, Statistics(drafted=1000, accepted=40, rejected=960), True) == 1


@pytest.mark.parametrize("drafter", ["self", "lens", "ngram"])
def test_drafts_that_are_handed_over_are_no_measurement(drafter: str) -> None:
    """Only steps of the fast path cost what a draft costs. A window that is handed over for its verification takes no time, and
    other drafters have windows of their own: neither makes the planner believe that drafts are cheap."""
    subject = engine()
    samples: list[tuple[str, int]] = []
    timing = subject.loop.admission.planner.timing
    subject.loop.admission.planner.timing = lambda kind, rows: samples.append((kind, rows)) or timing(kind, rows)  # type: ignore
    branch = subject.prompt([1, 2, 3]).generate(9, drafter=drafter, window=4)
    assert sum(kind == "draft" for kind, _ in samples) == (branch.statistics.drafted if drafter == "self" else 0)


def test_free_drafts_of_a_path_that_repeats_itself_are_taken() -> None:
    """The planner decodes this path directly, but verifies what follows from its repetition many tokens at a time."""
    branch = engine().prompt([1, 2, 3])
    branch.generate(60, sampling=Sampling(logit_bias={7: 1000.0}))
    assert branch.generated == [7] * 60
    assert branch.statistics.passes < 30 < branch.statistics.accepted


# ---- progress --------------------------------------------------------------------------------------------------------


# ---- admission -------------------------------------------------------------------------------------------------------
# Admission: turns, drafts and faults.


def test_a_fault_in_the_admission_ends_the_jobs_and_not_the_engine(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = served.prompt(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "admit", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            branch.generate(2)
    assert served.loop.jobs == [] and branch.generate(2).length == served.prompt(PROMPT).length + 2
    served.check_integrity()


# ---- siblings --------------------------------------------------------------------------------------------------------
# Sibling chains: each is judged on its own path, whichever is right.

PROMPTS = [[(7 * i + k) % VOCAB for i in range(5)] for k in range(6)]
PENALISED = {
    "repetition": Sampling(repetition_penalty=4.0),
    "presence": Sampling(presence_penalty=50.0),
    "drawn": Sampling(temperature=0.7, presence_penalty=50.0, seed=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PENALISED)
def test_the_second_chain_is_judged_on_its_own_path(name: str) -> None:
    """Chain 0 starts with the token that is right only after chain 1's first one.

    Judged on chain 0's path, the penalty would fall on the wrong token.
    """
    sampling, told_apart = PENALISED[name], 0
    for prompt in PROMPTS:
        truth = continuation(toy(), prompt, 8, sampling)
        first, second, third = truth[:3]
        chains = [[second, first, third], [first, second, third]]
        logits = Reference(toy(), [*prompt, first]).logits[-1].numpy()
        told_apart += sampling.choose(logits, [*prompt, second], len(prompt)) != second
        branch = engine().prompt(prompt)
        branch.generate(8, sampling=sampling, drafter="forced", drafts={len(prompt): chains})
        assert branch.generated == truth
        assert branch.statistics.accepted == 3, "chain 1 was right"
        assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])
    assert told_apart, "the control: on chain 0's path another token would be chosen"


# ---- lone rows -------------------------------------------------------------------------------------------------------
# Passes of prompts alone may be wide; nobody else waits for a wide pass, and none captures. Bits stay the same.

LONG = " ".join([PROMPT] * 6)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every canonical pass from here on."""
    from replaylens.engine.passes.runner import Runner

    seen: list[int] = []
    exact = Runner.exact

    def counted(self, segments, *given, **options):
        seen.append(sum(len(segment.tokens) for segment in segments))
        return exact(self, segments, *given, **options)

    monkeypatch.setattr(Runner, "exact", counted)
    return seen


def narrow() -> Engine:
    return Engine.load("coin-plain", max_rows=16)


def wide() -> Engine:
    engine = narrow()
    engine.loop.admission.lone_rows = 1024
    return engine


def test_a_prompt_alone_has_wide_passes_and_the_same_bits(passes: list[int]) -> None:
    usual = narrow().prompt(LONG)
    assert max(passes) == 16
    passes.clear()
    lone = wide().prompt(LONG)
    assert passes == [usual.length], "one pass for all rows"
    assert torch.equal(lone.kv(), usual.kv()) and torch.equal(lone.logits(), usual.logits())


def test_nobody_waits_for_a_wide_pass(passes: list[int]) -> None:
    engine = wide()
    stream = engine.prompt(PROMPT).stream(40, sampling=Sampling(ignore_eos=True))
    next(stream)
    passes.clear()
    long = engine.prompt(LONG)
    assert max(passes) <= 16 and sum(passes) >= long.length - 16
    stream.close()
    passes.clear()
    engine.prefix.clear()
    engine.prompt(LONG)
    assert max(passes) > 16, "the control: nobody decodes any more"


@pytest.mark.parametrize(
    ("sites", "buffer", "most"),
    [("S", 1 << 30, 1024), ("S", 1, 16), ("blocks.0.attn.hook_pattern", 1 << 30, 16), ("Z", 1 << 30, 16)],
)
def test_captured_passes_are_wide_if_their_rows_fit_the_buffer(passes: list[int], sites: str, buffer: int, most: int) -> None:
    """Rows whose size is not known in advance, and those of the lens, are taken for too large."""
    engine = wide()
    engine.runner.capture_buffer = buffer
    branch = engine.prompt(LONG, sites=sites)
    assert max(passes) == min(most, branch.length)
    alone = Engine.load("coin-plain", max_rows=1024).prompt(LONG, sites=sites)
    for site, rows in alone.activations.items():
        assert torch.equal(branch.activations[site].nan_to_num(), rows.nan_to_num()), site  # no token follows the last row
