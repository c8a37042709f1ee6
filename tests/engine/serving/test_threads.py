"""Threads that share an engine each get the bits they would get alone, whichever thread drives, fails or is interrupted."""

import gc
import linecache
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens import tasks
from replaylens.dumps.maker import ShardMaker, make_plan
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, ClosedBranch, EngineError
from replaylens.engine.loop.loop import Loop
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving import forest
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.lock import EngineLock
from replaylens.engine.terminal import defer_interrupt
from replaylens.tasks import WordTokenizer
from tests.toy_model import VOCAB, continuation, engine, random_model, toy, watch_passes

SECONDS = 120
"""a thread still running after this time hangs"""
Seen = list[tuple[str, Any]]
"""what a story observes, by name"""


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads switch a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def all_at_once(*works: Callable[[], Any]) -> list[Any]:
    """The result or exception of each work, all started together in their own threads."""
    ready, out = threading.Barrier(len(works)), [None] * len(works)

    def run(i: int) -> None:
        try:
            ready.wait(SECONDS)
            out[i] = works[i]()
        except BaseException as error:
            out[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    return out


def rows_of(branch: Branch) -> dict[str, Tensor]:
    return {site: branch.activations[site] for site in branch.activations}


def story(subject: Engine, seed: int) -> Seen:
    """A user's session: prompts, requests of all kinds, forks, rollbacks and streams, with reads of everything in between."""
    draw, seen = random.Random(seed), []
    for turn in range(2):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice((3, 9, 17)))]
        edits = [Edit("blocks.1.hook_in", "add", torch.linspace(-1, 1, 32), positions=2)] if draw.random() < 0.4 else []
        first = subject.prompt(prompt, sites=draw.choice(("S", "STCZ", None)), edits=edits)
        (fork,) = first.fork(at=draw.randrange(1, len(prompt) + 1))
        how = {"drafter": draw.choice(("self", "lens", "tree", "ngram")), "window": draw.choice((1, 3, None))}
        subject.generate([first, fork], draw.randrange(1, 9), **how)
        fork.force([draw.randrange(VOCAB), 7])
        streamed = list(fork.stream(4, window=2))
        kv = first.kv()
        first.rollback(len(prompt)).generate(3, **how)
        seen += [(f"{turn} {name}", value) for name, value in [
            ("first", first.tokens), ("fork", fork.tokens), ("streamed", streamed), ("kv", kv), ("fork kv", fork.kv()),
            ("certified", first.certified and fork.certified), ("drafts", TokenState.DRAFT in first.record.states),
        ]]  # fmt: skip
        for branch in (first, fork):
            if branch.lane.capture is not None:
                seen += [(f"{turn} {site}", rows) for site, rows in rows_of(branch).items()]
            branch.release()
    return seen


def differences(seen: Any, truth: Seen) -> list[str]:
    """Names of what differs. An exception counts as a difference."""
    if isinstance(seen, BaseException):
        return [f"{type(seen).__name__}: {seen}"]
    if [name for name, _ in seen] != [name for name, _ in truth]:
        return ["another story"]
    pairs = zip(seen, truth, strict=True)
    return [n for (n, a), (_, b) in pairs if not (torch.equal(a, b) if isinstance(a, Tensor) else a == b)]


# ---- many threads, one engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"cache_tokens": 160, "max_rows": 24}], ids=["room", "preempted"]
)
def test_every_thread_gets_what_it_would_get_alone(options: dict[str, Any]) -> None:
    truths = [story(engine(), seed) for seed in range(3)]
    subject = engine(canary=True, **options)
    for again in range(2):  # the second run finds prefixes that the first one left
        seen = all_at_once(*(lambda seed=seed: story(subject, seed) for seed in range(3)))
        assert [differences(mine, truth) for mine, truth in zip(seen, truths, strict=True)] == [[]] * 3, again
        assert subject.loop.jobs == [] and subject.loop.lanes == {}
        subject.check_integrity()
    assert differences(story(subject, 0), truths[0]) == [], "nothing wrong was left behind for later"


def test_without_the_lock_the_checker_finds_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a barrier puts two threads inside a step at once."""
    both, admit = threading.Barrier(2), Loop.admit

    def together(loop: Loop) -> Any:
        turns = admit(loop)
        with suppress(threading.BrokenBarrierError):  # the other thread is done
            both.wait(SECONDS)
        return turns

    def alone(_: EngineLock, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return work(*args, **kwargs)

    def drive(_: EngineLock, step: Callable[[], object], until: Callable[[], bool], watch: object = None) -> None:
        while not until() and not over.is_set():
            step()

    over = threading.Event()
    monkeypatch.setattr(Loop, "admit", together)
    monkeypatch.setattr(EngineLock, "alone", alone)
    monkeypatch.setattr(EngineLock, "drive", drive)
    subject, prompts = engine(), [[1, 2, 3], [4, 2, 3]]

    def generated(prompt: list[int]) -> list[int]:
        try:
            return subject.prompt(prompt).generate(8, window=1).generated
        finally:
            both.abort()  # nobody waits for a thread that is done

    try:
        seen = all_at_once(*(lambda p=p: generated(p) for p in prompts))
    finally:
        over.set()  # what is broken may never end by itself
    assert seen != [continuation(toy(), p, 8) for p in prompts]


def test_requests_of_two_threads_share_a_pass() -> None:
    """The second thread arrives while the first is inside a pass. The next pass serves both."""
    subject = engine()
    first, second = subject.prompts([[1, 2, 3], [4, 5, 6]])
    other = threading.Thread(target=second.generate, args=(6,), kwargs={"window": 1}, daemon=True)
    passes, exact = watch_passes(subject), subject.runner.exact

    def start_other(*args: Any) -> Any:
        subject.runner.exact = exact
        other.start()
        wait_for(lambda: in_line(subject))
        return exact(*args)

    subject.runner.exact = start_other
    first.generate(6, window=1)
    other.join(SECONDS)
    assert not other.is_alive()
    assert [len(segments) for segments in passes] == [1, 2, 2, 2, 2, 2, 1]
    assert first.generated == continuation(toy(), [1, 2, 3], 6) and second.generated == continuation(toy(), [4, 5, 6], 6)


def in_line(subject: Engine) -> bool:
    """Whether a thread waits for the current step to end."""
    free = subject.lock._next.acquire(blocking=False)
    if free:
        subject.lock._next.release()
    return not free


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(SECONDS * 1000):
        if condition():
            return
        pause.wait(0.001)
    pytest.fail("it never came to this")


@pytest.mark.usefixtures("watched")
def test_progress_is_shown_by_the_thread_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar of a waiting thread advances in its own thread, and to the end, whichever thread drives."""
    subject = engine()
    branches = subject.prompts([[1, 2, 3], [4, 5, 6]])
    shown: dict[int, list[float]] = {}

    class Bar(forest.tqdm):  # type: ignore[misc, name-defined]
        def update(self, n: float = 1) -> None:
            shown.setdefault(threading.get_ident(), []).append(n)
            super().update(n)

    monkeypatch.setattr(forest, "tqdm", Bar)
    all_at_once(*(lambda b=b: b.generate(6, window=1, progress=True) for b in branches))
    assert len(shown) == 2 and all(sum(steps) == 6 for steps in shown.values())


def test_nobody_sees_the_middle_of_a_step() -> None:
    """A thread that reads while a pass verifies drafts gets the tokens after the pass, although the record holds drafts."""
    subject = engine()
    branch = subject.prompt([1, 2, 3])
    seen: list[Any] = []
    reader = threading.Thread(target=lambda: seen.append((branch.tokens, branch.states)), daemon=True)
    exact = subject.runner.exact

    def read(*args: Any) -> Any:
        subject.runner.exact = exact
        assert TokenState.DRAFT in branch.record.states and branch.length > 4, "in its own thread, a hook may look"
        reader.start()
        wait_for(lambda: in_line(subject))
        return exact(*args)

    subject.runner.exact = read
    branch.generate(9, drafter="forced", drafts={3: [[9, 9, 9]]}, window=4)
    reader.join(SECONDS)
    tokens, states = seen[0]
    assert "draft" not in states and tokens == branch.tokens[: len(tokens)] and len(tokens) > 3


# ---- a driver that fails ---------------------------------------------------------------------------------------------


def test_an_interrupted_driver_is_followed_by_another() -> None:
    """The driver's own request is cancelled and keeps its commits. The other requests continue in one of their own threads."""
    subject = engine()
    mine, other = subject.prompts([[1, 2, 3], [4, 5, 6]])
    exact, count = subject.runner.exact, 0
    waiting = threading.Thread(target=other.generate, args=(9,), kwargs={"window": 3}, daemon=True)

    def interrupted(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 1:
            waiting.start()
            wait_for(lambda: in_line(subject))
        if count == 3 and threading.current_thread() is threading.main_thread():
            assert len(subject.loop.jobs) == 2
            raise KeyboardInterrupt
        return exact(*args)

    subject.runner.exact = interrupted
    with pytest.raises(KeyboardInterrupt):
        mine.generate(9, window=1)
    waiting.join(SECONDS)
    assert not waiting.is_alive() and count > 3
    assert other.generated == continuation(toy(), [4, 5, 6], 9)
    truth, done = continuation(toy(), [1, 2, 3], 9), len(mine.generated)
    assert mine.generated == truth[:done]
    assert 2 <= done < count, "none by the pass that failed; one by each that the other makes before the request is cancelled"
    assert mine.generate(9 - done).generated == truth and subject.loop.jobs == []
    subject.check_integrity()


@pytest.mark.usefixtures("ctrl_c")
def test_a_waiting_thread_that_is_interrupted_takes_its_request_along() -> None:
    subject = engine()
    mine, other = subject.prompts([[1, 2, 3], [4, 5, 6]])
    exact, begun, resume, count = subject.runner.exact, threading.Event(), threading.Event(), 0

    def slow(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 1:
            begun.set()
            wait_for(lambda: in_line(subject))
        if count == 2:  # the main thread has submitted, and waits
            assert len(subject.loop.jobs) == 2
            wait_for(lambda: len(subject.lock._waiting) == 2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            resume.wait(0.2)
        return exact(*args)

    driver = threading.Thread(target=other.generate, args=(9,), kwargs={"window": 1}, daemon=True)
    subject.runner.exact = slow
    driver.start()
    assert begun.wait(SECONDS)
    with pytest.raises(KeyboardInterrupt):
        mine.generate(9, window=1)
    driver.join(SECONDS)
    assert not driver.is_alive() and subject.loop.jobs == []
    assert other.generated == continuation(toy(), [4, 5, 6], 9)
    assert mine.generate(3).generated == continuation(toy(), [1, 2, 3], mine.length - 3)


@pytest.mark.parametrize("where", ["a pass", "a drafter's pass"])
def test_a_hook_that_raises_fails_its_own_request_alone(where: str) -> None:
    subject = engine()
    good, plain = subject.prompts([[1, 2, 3], [4, 5, 6]])
    calls = 0

    def hook(value: Tensor, context: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise ZeroDivisionError("mine")

    (bad,) = plain.fork(hooks=[("blocks.0.hook_in", hook)])
    window = 1 if where == "a pass" else 5
    seen = all_at_once(lambda: good.generate(12, window=window).generated, lambda: bad.generate(12, window=window))
    assert seen[0] == continuation(toy(), [1, 2, 3], 12) and good.certified
    assert isinstance(seen[1], ZeroDivisionError)
    assert subject.loop.jobs == []
    subject.check_integrity()


def test_a_hook_cannot_run_its_own_engine() -> None:
    """A hook may read. If it requests work, the engine refuses instead of waiting for itself."""
    subject = engine()
    branch = subject.prompt([1, 2, 3])
    found: list[Any] = []

    def hook(value: Tensor, context: Any) -> None:
        found.append(branch.tokens)
        works = (lambda: subject.prompt([5]), lambda: branch.generate(2), lambda: branch.rollback(3), branch.fork)
        for call in (*works, branch.release):
            with pytest.raises(BadRequest, match="may only read"):
                call()

    (hooked,) = branch.fork(hooks=[("blocks.0.hook_in", hook)])
    hooked.generate(2, window=1)
    assert found and set(map(tuple, found)) == {(1, 2, 3)}
    subject.check_integrity()


def test_a_branch_released_under_a_request_says_so() -> None:
    subject = engine()
    branch = subject.prompt([1, 2, 3])
    exact = subject.runner.exact
    other = threading.Thread(target=branch.release, daemon=True)

    def release(*args: Any) -> Any:
        subject.runner.exact = exact
        other.start()
        wait_for(lambda: in_line(subject))
        return exact(*args)

    subject.runner.exact = release
    with pytest.raises(ClosedBranch, match="released by another thread"):
        branch.generate(9, window=1)
    other.join(SECONDS)
    subject.check_integrity()
    assert subject.loop.jobs == [] and subject.loop.lanes == {}


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


class At:
    """A tracer that raises Ctrl-C at the n-th line that the main thread runs in the engine's loop and serving code.

    Two kinds of traced lines do not count, because no signal is handled there: `try:`, which does nothing, and a further visit
    of a `with` line, which comes before the call that releases the lock.
    """

    ROOMS = (str(Path("engine", "loop")), str(Path("engine", "serving")), str(Path("engine", "interrupts.py")))

    def __init__(self, n: int) -> None:
        self.n, self.lines = n, 0
        self.entered: set[tuple[int, int]] = set()
        """frames and lines of `with` blocks"""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not any(room in frame.f_code.co_filename for room in self.ROOMS):
            return None
        if event == "call":
            self.entered = {place for place in self.entered if place[0] != id(frame)}
        elif event == "line" and not self._passes(frame):
            self.lines += 1
            if self.lines == self.n:
                signal.raise_signal(signal.SIGINT)
        return self

    def _passes(self, frame: FrameType) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if not line.startswith("with "):
            return line == "try:"
        place = (id(frame), frame.f_lineno)
        again = place in self.entered
        self.entered.add(place)
        return again


def interrupted_at(n: int) -> tuple[int, bool]:
    """Runs a request with Ctrl-C at line n beside another thread's. Returns the lines run, and whether it was interrupted."""
    subject = engine()
    mine, other = subject.prompts([[1, 2, 3], [4, 5, 6]])
    answers: list[list[int]] = []
    beside = threading.Thread(target=lambda: answers.append(other.generate(5, window=2).generated), daemon=True)
    tracer, came = At(n), False
    beside.start()
    try:
        sys.settrace(tracer)
        mine.generate(4, drafter="lens", window=2)
        mine.fork()[0].release()
        sys.settrace(None)
    except KeyboardInterrupt:
        sys.settrace(None)
        came = True
    beside.join(SECONDS)
    assert not beside.is_alive(), f"line {n}: the other thread hangs"
    assert answers == [continuation(toy(), [4, 5, 6], 5)], f"line {n}"
    truth = continuation(toy(), [1, 2, 3], 9)
    assert mine.generated == truth[: len(mine.generated)], f"line {n}"
    assert mine.generate(9 - len(mine.generated)).generated == truth, f"line {n}"
    subject.check_integrity()
    assert subject.loop.jobs == [], f"line {n}"
    return tracer.lines, came


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_anywhere_leaves_a_whole_engine_and_the_others_working() -> None:
    lines = max(interrupted_at(0)[0] for _ in range(4))  # fewer where the other thread drives
    assert lines > 300
    places = range(1, lines, max(1, lines // 24))
    came = sum(interrupted_at(n)[1] for n in places)
    for n in [*places] * 9:  # those behind the lines that are run come too late: where the other thread drives, nearly all
        if came > len(places) // 5:
            break
        came += interrupted_at(n)[1]
    assert came > len(places) // 5


# ---- streams, replays, dumps -----------------------------------------------------------------------------------------


def test_streams_and_requests_side_by_side() -> None:
    subject = engine()
    branches = subject.prompts([[1, 2, i] for i in range(5)])
    works = [lambda b=b: list(b.stream(12, window=3)) for b in branches[:3]]
    works += [lambda b=b: b.generate(12, drafter="lens").generated for b in branches[3:]]
    assert all_at_once(*works) == [continuation(toy(), [1, 2, i], 12) for i in range(5)]


def test_a_stream_dropped_anywhere_is_cancelled() -> None:
    """Its finalizer may run inside a step or in a waiting thread, so the next caller does the work."""
    subject = engine()
    first, second = subject.prompts([[1, 2, 3], [4, 5, 6]])
    streams = [first.stream(20, window=1)]
    next(streams[0])
    exact = subject.runner.exact

    def drop(*args: Any) -> Any:
        subject.runner.exact = exact
        streams.clear()
        gc.collect()
        return exact(*args)

    subject.runner.exact = drop
    assert second.generate(4, window=1).generated == continuation(toy(), [4, 5, 6], 4)
    assert subject.loop.jobs == []
    assert first.generated == continuation(toy(), [1, 2, 3], len(first.generated))
    assert first.rollback(3).generate(2).generated == continuation(toy(), [1, 2, 3], 2)
    subject.check_integrity()


def test_a_trace_of_threads_replays() -> None:
    """Events of many threads interleave. Replayed on one thread, they give the same rows."""
    subject = engine(record=True)

    def work(first: int) -> list[Branch]:
        root = subject.prompt([first, 2, 3], sites="S", keep_rejected=True).generate(6, drafter="tree", window=3)
        stream = root.stream(20, drafter="lens", window=3)
        next(stream)
        stream.close()
        return [root, root.fork(at=5)[0].generate(3)]

    made = [branch for branches in all_at_once(*(lambda i=i: work(i) for i in range(4))) for branch in branches]
    replayed = engine().replay_trace(subject.trace)
    for branch in made:
        again = replayed[branch.id]
        assert again.tokens == branch.tokens and torch.equal(again.kv(), branch.kv())
        assert differences(list(rows_of(again).items()), list(rows_of(branch).items())) == []


def test_traces_dumps_and_caches_in_threads_of_their_own() -> None:
    """A replay that ends at its cancel, a dump and TransformerLens's method, beside generating threads."""
    coin = tasks.get("coin")(flips=(1, 2))
    words = WordTokenizer(tasks.get("coin").vocabulary())
    model = random_model(vocab_size=words.vocab_size)

    def fresh(**options: Any) -> Engine:
        return Engine(model, words, page_size=4, **options)

    recorded = fresh(record=True)
    stream = recorded.prompt([1, 2, 3], sites="S").stream(20, drafter="lens", window=6)
    next(stream)
    stream.close()

    def dumped(subject: Engine) -> str:
        plan = make_plan(subject, coin, 4, sites="SZ", drafter="lens", max_new=4, examples_per_shard=4)
        return ShardMaker(subject, plan).make(0).digests()[0]

    def replayed(subject: Engine) -> list[int]:
        (branch,) = subject.replay_trace(recorded.trace).values()
        return branch.tokens

    works: list[Callable[[Engine], Any]] = [
        dumped,
        replayed,
        lambda subject: subject.run_with_cache([[5, 6, 7, 8]])[0].tolist(),
        lambda subject: subject.prompt([9, 8, 7]).generate(9, drafter="tree").tokens,
        lambda subject: [result.tokens for result in subject.replay(coin.examples(3), drafter="ngram")],
    ]
    truths = [work(fresh()) for work in works]
    subject = fresh()
    seen = all_at_once(*(lambda work=work: work(subject) for work in works))
    assert seen == truths
    subject.check_integrity()


def test_thinking_in_threads() -> None:
    texts = [f"A coin's state is {face}. Alice flips, then Bob flips." for face in ("heads", "tails")]

    def thought(subject: Engine, text: str) -> Seen:
        branch = subject.prompt(text, sites="STCZ").generate(2)
        return [("tokens", branch.tokens), ("kv", branch.kv()), *rows_of(branch).items()]

    truths = [thought(Engine.load("coin-thinking"), text) for text in texts]
    subject = Engine.load("coin-thinking")
    seen = all_at_once(*(lambda text=text: thought(subject, text) for text in texts))
    assert [differences(mine, truth) for mine, truth in zip(seen, truths, strict=True)] == [[], []]
    subject.check_integrity()


def test_errors_stay_with_their_thread() -> None:
    subject = engine()
    branches = subject.prompts([[1, 2, i] for i in range(4)])
    works = [lambda b=b: b.generate(8).generated for b in branches]
    works += [lambda: subject.generate([branches[0], branches[0]], 3), lambda: subject.prompt([VOCAB])]
    seen = all_at_once(*works)
    assert seen[:4] == [continuation(toy(), [1, 2, i], 8) for i in range(4)]
    assert all(isinstance(error, EngineError) for error in seen[4:])


def test_dropped_forks_do_not_stop_other_threads() -> None:
    """What finalizers left is done before a step, while other threads wait for the engine. Neither may wait for the other."""
    subject = engine()
    root, end = subject.prompt([3, 4, 5]), threading.Event()

    def fork() -> None:
        for _ in range(30):
            root.fork()  # dropped at once
            subject.prompt([5, 6]).generate(1)
        end.set()

    def until_end(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            while not end.is_set():
                work()

        return run

    works = [fork, until_end(lambda: root.tokens), until_end(lambda: subject.prompt([7, 8]).generate(2))]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert end.is_set() and not any(thread.is_alive() for thread in threads), "deadlock"
    subject.check_integrity()


def test_an_interrupt_within_two_blocks_is_raised_after_the_outer_one() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), defer_interrupt() as outer:
        with defer_interrupt() as inner:
            seen.append((outer(), inner()))
            signal.raise_signal(signal.SIGINT)
            seen.append((outer(), inner()))
        with defer_interrupt() as later:
            seen.append((outer(), later()))  # a loop that stops at an interrupt would never end if it had seen this one
    assert seen == [(False, False), (True, True), (True, False)]
    with defer_interrupt() as again:
        assert not again()


def test_pages_of_a_twin_that_another_request_takes_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kv` and captured rows are computed on a twin, which is idle before they are read."""
    served, roomy = (Engine(random_model(num_layers=1), cache_tokens=tokens, page_size=4) for tokens in (256, 4096))
    path = [j % VOCAB for j in range(90)]
    branch = served.prompt(path, sites="S")
    edit, compute, rounds = Edit("blocks.0.hook_out", "zero", positions=slice(5, 6)), served.forest.compute, [0]

    def crowded(lanes: Sequence[Any]) -> None:
        compute(lanes)
        rounds[0] += 1
        if rounds[0] == 1:
            monkeypatch.setattr(served.forest, "compute", compute)
            served.prompt([(j + 1) % VOCAB for j in range(240)]).release()
            monkeypatch.setattr(served.forest, "compute", crowded)

    expected = roomy.prompt(path, sites="S", edits=[edit])
    for read in (lambda fork: fork.kv(), lambda fork: fork.activations["blocks.0.hook_out"]):
        (fork,) = branch.fork(edits=[edit])
        rounds[0] = 0
        monkeypatch.setattr(served.forest, "compute", crowded)
        assert torch.equal(read(fork), read(expected)) and rounds[0] == 2
        monkeypatch.setattr(served.forest, "compute", compute)
        fork.release()
    served.check_integrity()
