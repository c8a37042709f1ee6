"""Ordinary requests and drafts of deterministic ones share the fast batch, one token each per step; none of them starves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replaylens.engine.engine import Engine
from replaylens.engine.errors import NonFinite
from replaylens.engine.loop.lane import Job
from replaylens.engine.passes.batch import Segment
from replaylens.engine.serving.branch import Branch
from tests.engine.test_machine import some
from tests.toy_model import VOCAB, Reference, continuation, engine, toy, watch_passes

PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11, 12]]


def submit(branch: Branch, n: int, **options: Any) -> Job:
    job = Job(branch.lane, n, **options)
    branch.engine.loop.submit(job)
    return job


def watch_fast(subject: Engine) -> list[list[Segment]]:
    """A list that collects the segments of every fast pass from now on."""
    passes: list[list[Segment]] = []
    fast = subject.runner.fast

    def watched(segments: list[Segment], tap: Any = None) -> Any:
        passes.append(segments)
        return fast(segments, tap)

    subject.runner.fast = watched
    return passes


def right(branch: Branch, prompt: list[int], n: int) -> bool:
    same = torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])
    return branch.generated == continuation(toy(), prompt, n) and same


# ---- one fast batch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 4, 8])
def test_a_deterministic_request_and_an_ordinary_one_come_on_alike(window: int) -> None:
    """Neither is ever more than a window ahead of the other."""
    subject = engine()
    exact, ordinary = subject.prompts(PROMPTS[:2])
    jobs = [submit(exact, 24, window=window), submit(ordinary, 24, exact=False)]
    while not jobs[0].done and not jobs[1].done:
        subject.loop.step()
        assert abs(jobs[0].generated - jobs[1].generated) <= window
    subject.forest.wait(jobs)
    assert right(exact, PROMPTS[0], 24) and exact.certified and not ordinary.certified


def test_every_step_decodes_all_of_them_in_one_fast_pass() -> None:
    """One row of each ordinary request and one of each draft; the verification is a canonical pass of the full windows."""
    subject = engine()
    branches = subject.prompts(PROMPTS)
    jobs = [submit(b, 33, window=4) for b in branches[:2]] + [submit(b, 33, exact=False) for b in branches[2:]]
    fast, exact = watch_fast(subject), watch_passes(subject)
    subject.loop.step()
    assert [len(s.tokens) for s in exact[0]] == [1, 1], "T0 comes out of a canonical pass"
    for _ in range(8):
        subject.loop.step()
    assert [len(segments) for segments in fast] == [2, 4, 4, 4, 2, 4, 4, 4, 2]
    assert all(len(s.tokens) == 1 for segments in fast for s in segments)
    assert [[len(s.tokens) for s in segments] for segments in exact[1:]] == [[4, 4], [4, 4]]
    assert [job.generated for job in jobs[2:]] == [9, 9], "a token in every step"
    subject.forest.wait(jobs)
    assert right(branches[0], PROMPTS[0], 33) and right(branches[1], PROMPTS[1], 33)


def test_a_request_that_comes_later_is_soon_verified_with_the_others() -> None:
    """Its first window is shorter, so that both take one canonical pass instead of two."""
    subject = engine()
    first, second = subject.prompts(PROMPTS[:2])
    jobs = [submit(first, 40, window=8)]
    for _ in range(4):
        subject.loop.step()
    jobs.append(submit(second, 40, window=8))
    for _ in range(20):
        subject.loop.step()
    passes = watch_passes(subject)
    subject.forest.wait(jobs)
    assert len([segments for segments in passes if len(segments) == 2]) >= len(passes) - 2
    assert right(first, PROMPTS[0], 40) and right(second, PROMPTS[1], 40)


# ---- what happens in the middle of a window --------------------------------------------------------------------------------


def midway(window: int = 8, steps: int = 4, **options: Any) -> tuple[Engine, Branch, Job]:
    """A request with some drafts, not verified yet."""
    subject = engine(**options)
    branch = subject.prompt(PROMPTS[0])
    job = submit(branch, 24, window=window)
    for _ in range(steps):
        subject.loop.step()
    assert job.window_open is not None and len(job.window_open.chain) == steps - 1, "control: it is in the middle"
    return subject, branch, job


def test_cancelled() -> None:
    subject, branch, job = midway()
    subject.cancel(job)
    assert branch.generated == continuation(toy(), PROMPTS[0], 1)
    assert branch.lane.table.length == branch.lane.computed, "the drafts' pages are free again"
    assert branch.generate(23).generated == continuation(toy(), PROMPTS[0], 24)


def test_forked_so_that_its_pages_are_shared() -> None:
    """The next draft writes to a copy of the page, which lacks the drafts' KV: they are run again."""
    subject, branch, job = midway(page_size=16)
    (fork,) = branch.fork()
    fast = watch_fast(subject)
    subject.loop.step()
    assert [s.tokens for s in fast[0]] == [[branch.tokens[-1], *job.window_open.chain[:-1]]]
    subject.forest.wait([job])
    assert right(branch, PROMPTS[0], 24) and job.statistics.rejected == 0
    assert fork.generate(5).generated == continuation(toy(), PROMPTS[0], 6)


def test_preempted() -> None:
    subject, branch, job = midway()
    subject.loop.reservations.drop_pages(branch.lane)
    subject.loop.queue.preempted(job)
    subject.forest.wait([job])
    assert right(branch, PROMPTS[0], 24)


def test_the_fast_path_fails_for_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has drafted so far is verified, and all others go on."""
    subject, branch, job = midway()
    beside = Branch(subject, subject.forest.plant([4], None))
    other = submit(beside, 24, exact=False)
    told: list[dict[str, Any]] = []
    subject.loop.listeners.append(told.append)
    fast = subject.runner.fast

    def failing(segments: list[Segment], tap: Any = None) -> Any:
        if any(s.table is branch.lane.table for s in segments):
            raise NonFinite("the fast path's logits")
        return fast(segments, tap)

    monkeypatch.setattr(subject.runner, "fast", failing)
    subject.loop.step()
    assert [e["event"] for e in told if "fail" in e["event"]] == ["draft_failed"] and other.generated == 1
    subject.loop.step()
    assert job.generated == 1 + 3 + 1, "T0, the drafts so far and the free token"
    subject.forest.wait([job, other])
    assert right(branch, PROMPTS[0], 24)


# ---- no mix starves anyone -------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A request, and when it last came on."""

    branch: Branch
    prompt: list[int]
    job: Job
    seen: tuple[int, ...] = ()
    waited: int = 0

    def progress(self) -> tuple[int, ...]:
        window = self.job.window_open
        return self.job.generated, self.branch.lane.computed, len(window.chain) if window is not None else 0


class Mixes(RuleBasedStateMachine):
    """Requests of all kinds come, go and are cancelled, with too few rows and pages for all of them at once."""

    running: list[Running]

    @initialize(rows=st.sampled_from([16, 24, 64]), pages=st.sampled_from([14, 24, 200]))
    def start(self, rows: int, pages: int) -> None:
        self.subject = engine(max_rows=rows, cache_tokens=4 * pages, canary=True)
        self.running, self.idle = [], []

    @rule(
        length=st.integers(1, 30),
        n=st.integers(1, 12),
        drafter=st.sampled_from(["self", "self", "self", "lens", "tree", "ngram"]),
        window=st.sampled_from([None, 1, 2, 4]),
        exact=st.sampled_from([True, True, False]),
    )
    @precondition(lambda self: len(self.running) < 7)
    def come(self, length: int, n: int, drafter: str, window: int | None, exact: bool) -> None:
        prompt = [(7 * i + 3 * length) % VOCAB for i in range(length)]
        branch = Branch(self.subject, self.subject.forest.plant(prompt, None))
        job = submit(branch, n, drafter=drafter, window=window, exact=exact)
        self.running.append(Running(branch, prompt, job))

    @rule(pick=st.integers(0, 6))
    @precondition(lambda self: self.running)
    def cancel(self, pick: int) -> None:
        one = self.running.pop(pick % len(self.running))
        self.subject.cancel(one.job)
        truth = continuation(toy(), one.prompt, 12)
        assert not one.job.exact or one.branch.generated == truth[: len(one.branch.generated)]
        one.branch.release()

    @rule(pick=st.integers(0, 6))
    @precondition(lambda self: self.running)
    def fork(self, pick: int) -> None:
        """Shares pages in the middle of whatever it does."""
        one = self.running[pick % len(self.running)]
        one.branch.fork()[0].release()

    @rule(count=st.integers(1, 6))
    @precondition(lambda self: self.running)
    def step(self, count: int) -> None:
        for _ in range(count):
            self.subject.loop.step()
            self.subject.check_integrity()
            self.settle()
            if self.running:
                self.the_oldest_never_waits_long(self.running[0])

    def the_oldest_never_waits_long(self, one: Running) -> None:
        """It comes on at least in every other step: it gains a token, a row of KV or a draft."""
        now = one.progress()
        one.waited, one.seen = (one.waited + 1 if now == one.seen else 0), now
        assert one.waited < 3, f"waited for {one.waited} steps at {now}"

    def settle(self) -> None:
        for one in [one for one in self.running if one.job.done]:
            assert one.job.error is None, one.job.error
            assert not one.job.exact or right(one.branch, one.prompt, one.job.new_tokens)
            assert one.branch.certified == one.job.exact
            self.running.remove(one)
            one.branch.release()

    @invariant()
    def drafts_are_nobodys_tokens(self) -> None:
        for one in getattr(self, "running", []):
            assert len(one.branch.generated) == one.job.generated

    def teardown(self) -> None:
        """Everybody gets everything, in a number of steps that their sizes bound."""
        work = sum(len(one.prompt) + 3 * one.job.new_tokens for one in getattr(self, "running", []))
        for _ in range(3 * work):
            if not self.running:
                break
            self.subject.loop.step()
            self.settle()
        assert not getattr(self, "running", [])


Mixes.TestCase.settings = some(sessions=8, steps=20)
TestMixes = Mixes.TestCase


def test_the_machine_would_see_starvation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with a scheduler that forgets the oldest request, its watch fails."""
    subject = Mixes()
    subject.start(16, 200)
    admission, loop = subject.subject.loop.admission, subject.subject.loop
    admit: Callable[..., Any] = admission._admit
    monkeypatch.setattr(admission, "_admit", lambda job, *given: 0 if job is loop.queue.oldest else admit(job, *given))
    subject.come(5, 8, "self", 4, True)
    subject.come(6, 8, "self", 4, False)
    with pytest.raises(AssertionError, match="waited for 3 steps"):
        subject.step(6)
