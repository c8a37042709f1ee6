"""Random sessions on the public API against the slow reference: a branch depends only on its path.

After every step the pages, the tree and the prefix index are recounted, and every live branch's KV and captured rows
are compared byte by byte with the rows of its path computed one at a time, alone. Some steps change the number of threads
or another mode of the library, call from another Python thread, or restart on an engine of other sizes.
`make soak` runs the same for hours, on wider models and in many processes.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from threadpoolctl import ThreadpoolController

from replaylens.engine.engine import Engine
from replaylens.engine.loop.admission import Planner
from replaylens.engine.loop.lane import Statistics
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.model.config import Latent, MixerConfig, MixtureConfig, ModelConfig, Routing
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from tests.engine.reference import Reference, differences, perturbed, random_decoder
from tests.toy_model import SHAPE

VOCAB = 13
CONFIG = ModelConfig(**{**SHAPE, "vocab_size": VOCAB, "max_positions": 128, "windows": (0, 9)})
LONG = tuple((i * i + i // 3) % VOCAB for i in range(61))
"""ends before the first block of keys does, so that branches cross the block boundary"""
LONGEST = 80
MOST = 8
"""maximum number of live branches"""

MODES: dict[str, Callable[[bool], object]] = {
    "flushed denormals": torch.set_flush_denormal,
    "no oneDNN": lambda on: setattr(torch.backends.mkldnn, "enabled", not on),
    "medium precision": lambda on: torch.set_float32_matmul_precision("medium" if on else "highest"),
    "deterministic algorithms": lambda on: torch.set_deterministic_debug_mode("error" if on else "default"),
}
"""switches of the library that a user may toggle"""
LIBRARIES = ThreadpoolController()
"""OpenMP and the BLAS libraries of the process"""
T = TypeVar("T")

picks = st.integers(0, 10**6)
page_sizes, row_sizes = st.sampled_from([1, 3, 4, 16]), st.sampled_from([16, 17, 21, 64, 512])
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy to 3": Sampling(stop_tokens=(3,)),
    "warm": Sampling(temperature=1.0, seed=5),
    "filtered to 7": Sampling(temperature=0.7, top_k=6, top_p=0.95, seed=11, stop_tokens=(7,)),
    "penalised": Sampling(temperature=0.4, repetition_penalty=1.2, presence_penalty=0.5, min_p=0.02, logit_bias={2: 1.0}),
}


@dataclass(frozen=True)
class How:
    """Options of a generation."""

    sampling: str
    drafter: str
    window: int | None
    final: bool
    keep_pages: bool

    def options(self) -> dict[str, Any]:
        return {**vars(self), "sampling": SAMPLINGS[self.sampling]}


hows = st.builds(
    How,
    st.sampled_from(list(SAMPLINGS)),
    st.sampled_from(["self", "model", "lens", "ngram", "tree"]),
    st.sampled_from([None, 1, 2, 3, 5]),
    st.booleans(),
    st.booleans(),
)


ENDS = (("warm", 3), ("greedy", None), ("penalised", 5), ("filtered to 7", 1))
"""samplings and windows of the requests that end a session"""


@dataclass
class Known:
    """What the machine knows about a branch without asking the engine."""

    branch: Branch
    path: list[int]
    num_prompt: int
    exact: bool = True
    ended: bool = False


class AnyWindow(Planner):
    """Windows from a seed instead of measured times, so that a failing session is reproducible."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def window(self, reproducible: bool, num_requests: int, statistics: Statistics, free: bool = False) -> int:
        return self.random.choice((1, 4, 8, 16, 32))


class Sessions(RuleBasedStateMachine):
    """Prompts, forks, forced tokens, generations, cancels, rollbacks and releases in any order, in a small cache."""

    device = "cpu"
    config = CONFIG
    reference: Reference | None = None
    cache_tokens = 96
    operations = 0
    preemptions = 0
    """how often a request lost its pages to another"""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[Known] = []
        self.rejected: list[Known] = []
        self.users_threads, self.elsewhere = torch.get_num_threads(), False

    @initialize(page_size=page_sizes, max_rows=row_sizes, seed=picks)
    def begin(self, page_size: int, max_rows: int, seed: int) -> None:
        cls = type(self)
        cls.reference = cls.reference or Reference(random_decoder(cls.config).to(cls.device))
        self.truth, self.model = cls.reference, cls.reference.runner.model
        self.engine = self.new_engine(page_size, max_rows, seed)

    def new_engine(self, page_size: int, max_rows: int, seed: int) -> Engine:
        """An engine with a small cache, on any number of threads. One without a canary copies pages of a step together, and on
        a GPU decodes in bursts."""
        page_size = page_size if self.config.mixer is None or page_size != 3 else 8  # a hybrid's divides 64
        sizes = {"cache_tokens": self.cache_tokens, "page_size": page_size, "max_rows": max_rows, "capture_buffer": 1 << 22}
        engine = Engine(self.model, draft_model=perturbed(self.model, 0.02), canary=seed % 2 == 0, record=True, **sizes)
        engine.loop.admission.planner = AnyWindow(seed)
        engine.runner.worth_threads = 0
        engine.loop.listeners.append(self.count)
        return engine

    def count(self, event: dict[str, Any]) -> None:
        type(self).preemptions += event["event"] == "preempt"

    # ---- what users do --------------------------------------------------------------------------------------------

    @rule(
        threads=st.sampled_from([1, 2, 3, 8]),
        everywhere=st.booleans(),
        mode=st.sampled_from(sorted(MODES)),
        on=st.booleans(),
    )
    def change_modes(self, threads: int, everywhere: bool, mode: str, on: bool) -> None:
        """Set the number of threads by torch's own setter, or directly in every library of the process; set a mode."""
        if everywhere:
            LIBRARIES.limit(limits=threads)
        else:
            torch.set_num_threads(threads)
        MODES[mode](on)

    @rule(elsewhere=st.booleans())
    def move_to_a_thread(self, elsewhere: bool) -> None:
        self.elsewhere = elsewhere

    @rule(page_size=page_sizes, max_rows=row_sizes, seed=picks)
    @precondition(lambda self: self.known)
    def start_anew(self, page_size: int, max_rows: int, seed: int) -> None:
        """As after a crash: only the paths survive."""
        self.check_against_trace()
        self.engine, old = self.new_engine(page_size, max_rows, seed), self.known
        self.known, self.rejected = [], []
        for one in old:
            if one.exact:
                branch = self.engine.prompt(one.path[: one.num_prompt], sites="STCZ", keep_rejected=True)
                if rest := one.path[one.num_prompt :]:
                    branch.force(rest)
                self.welcome(Known(branch, one.path, one.num_prompt))

    @rule(start=st.integers(0, 3), length=st.integers(1, len(LONG) - 3), captured=st.sampled_from([True, True, False]))
    def prompt(self, start: int, length: int, captured: bool) -> None:
        path = list(LONG[start : start + length])
        sites = "STCZ" if captured else None
        branch = self.done(lambda: self.engine.prompt(path, sites=sites, keep_rejected=captured))
        self.welcome(Known(branch, path, length))

    @rule(pick=picks, at=picks)
    @precondition(lambda self: self.known)
    def fork(self, pick: int, at: int) -> None:
        self.welcome(self.child(self.pick(pick), at))

    @rule(pick=picks, at=picks)
    @precondition(lambda self: self.rejected)
    def fork_a_rejected_draft(self, pick: int, at: int) -> None:
        self.welcome(self.child(self.rejected[pick % len(self.rejected)], at))

    @rule(pick=picks, new=tokens)
    @precondition(lambda self: self.open())
    def force(self, pick: int, new: list[int]) -> None:
        one = self.pick_open(pick)
        self.done(lambda: one.branch.force(new))
        one.path += new
        assert one.branch.record.states[-1] in (TokenState.ACCEPTED, TokenState.PROMPT)
        assert one.branch.lane.computed == len(one.path)

    @rule(pick=picks, n=st.integers(1, 9), how=hows)
    @precondition(lambda self: self.open())
    def generate(self, pick: int, n: int, how: How) -> None:
        one = self.pick_open(pick)
        self.done(lambda: one.branch.generate(n, **how.options()))
        self.settle(one, n, how)

    @rule(picked=st.lists(picks, min_size=3, max_size=5), n=st.integers(1, 6), how=st.lists(hows, min_size=5, max_size=5))
    @precondition(lambda self: len(self.open()) > 1)
    def generate_together(self, picked: list[int], n: int, how: list[How]) -> None:
        some = list({id(one): one for one in map(self.pick_open, picked)}.values())
        streams = [one.branch.stream(n, **own.options()) for one, own in zip(some, how, strict=False)]
        for stream in streams:
            for _ in stream:
                pass
        for one, own in zip(some, how, strict=False):
            self.settle(one, n, own)

    @rule(
        lengths=st.lists(st.sampled_from([21, 29]), min_size=4, max_size=5),
        n=st.sampled_from([8, 11]),
        how=st.lists(hows, min_size=5, max_size=5),
        kept=st.integers(0, 1),
    )
    def crowd(self, lengths: list[int], n: int, how: list[How], kept: int) -> None:
        """Branches that share nothing outgrow the cache together: the younger ones lose their pages, drafts and all."""
        paths = [[i, *LONG[i : i + length - 1]] for i, length in enumerate(lengths)]
        made = [Known(self.engine.prompt(path, sites="STCZ"), path, len(path)) for path in paths]
        streams = [one.branch.stream(n, **own.options()) for one, own in zip(made, how, strict=False)]
        for stream in streams:
            for _ in stream:
                pass
        for one, own in zip(made, how, strict=False):
            self.settle(one, n, own)
            assert not one.exact or differences(one.branch, self.truth) == []
        for one in made[kept:]:
            one.branch.release()
            self.rejected = [other for other in self.rejected if other.branch.record.parent != one.branch.id]
        for one in made[:kept]:
            self.welcome(one)

    @rule(
        picked=st.lists(picks, min_size=2, max_size=4),
        n=st.integers(1, 6),
        how=st.lists(hows, min_size=4, max_size=4),
        seed=picks,
    )
    @precondition(lambda self: len(self.open()) > 1)
    def generate_in_threads(self, picked: list[int], n: int, how: list[How], seed: int) -> None:
        """The system schedules the threads, which decides drafts and windows: results that depend on them are dropped."""
        some = list({id(one): one for one in map(self.pick_open, picked)}.values())
        pairs = list(zip(some, how, strict=False))
        with ThreadPoolExecutor(len(pairs)) as pool:
            list(pool.map(lambda pair: pair[0].branch.generate(n, **pair[1].options()), pairs))
        self.engine.loop.admission.planner = AnyWindow(seed)
        noted = {other.branch.id for other in self.rejected}
        for one, own in pairs:
            for other in (draft for draft in one.branch.rejected if draft.id not in noted):
                assert not one.exact or differences(other, self.truth) == []
                other.release()
            self.settle(one, n, own)

    @rule(pick=picks, n=st.integers(2, 9), seen=st.integers(1, 4), how=hows)
    @precondition(lambda self: self.open())
    def stream_and_close(self, pick: int, n: int, seen: int, how: How) -> None:
        one = self.pick_open(pick)
        stream = one.branch.stream(n, **how.options())
        shown = [token for _, token in zip(range(seen), stream, strict=False)]
        stream.close()
        before = len(one.path)
        self.settle(one, n, how, cancelled=True)
        assert shown == one.path[before:], "nothing that was not yielded"

    @rule(pick=picks, n=st.integers(1, 5))
    @precondition(lambda self: self.open())
    def generate_without_promise(self, pick: int, n: int) -> None:
        one = self.pick_open(pick)
        one.branch.generate(n, deterministic=False)
        one.exact, one.path = False, one.branch.tokens
        assert not one.branch.certified

    @rule(pick=picks, to=picks)
    @precondition(lambda self: self.known)
    def rollback(self, pick: int, to: int) -> None:
        one = self.pick(pick)
        length = one.num_prompt + to % (len(one.path) - one.num_prompt + 1)
        one.branch.rollback(length)
        one.ended = False
        del one.path[length:]

    @rule(pick=picks)
    @precondition(lambda self: len(self.known) > 2)
    def release(self, pick: int) -> None:
        self.release_one(pick % len(self.known))

    @rule()
    @precondition(lambda self: len(self.rejected) > 12)
    def release_rejected_drafts(self) -> None:
        for one in self.rejected:
            one.branch.release()
        self.rejected.clear()

    # ---- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        type(self).operations += 1
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            assert not self.engine.loop.jobs

    @invariant()
    def every_branch_is_its_path(self) -> None:
        for one in self.known + self.rejected:
            assert one.branch.tokens == one.path
            assert one.branch.root_length == one.num_prompt
            assert one.branch.certified == one.exact
            if one.exact:
                assert differences(one.branch, self.truth) == []

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                how = [How(sampling, "self", window, final=True, keep_pages=False) for sampling, window in ENDS]
                self.crowd([21, 29, 29, 21], 9, how, kept=0)  # hypothesis leaves rules out of whole sessions
                self.check_against_trace()
        finally:
            LIBRARIES.limit(limits=self.users_threads)
            torch.set_num_threads(self.users_threads)
            for switch in MODES.values():
                switch(False)

    def check_against_trace(self) -> None:
        """The trace of the whole session, on an engine with a large cache, reproduces every branch and the rejected drafts."""
        replayed = Engine(self.model, cache_tokens=4096).replay_trace(self.engine.trace)
        for one in self.known + self.rejected:
            if one.branch.id not in replayed:
                assert not one.exact
                continue
            again = replayed[one.branch.id]
            assert again.tokens == one.path and again.finish_reason == one.branch.finish_reason
            if one.exact:
                assert again.states == one.branch.states
                assert differences(again, self.truth) == []
                recordings = [branch.lane.recording and branch.activations for branch in (one.branch, again)]
                assert len({recording and (recording.base, recording.end) for recording in recordings}) == 1

    # ---- helpers --------------------------------------------------------------------------------------------------

    def done(self, work: Callable[[], T]) -> T:
        """The result of the work, done here or in a new Python thread."""
        if not self.elsewhere:
            return work()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    def pick(self, number: int) -> Known:
        return self.known[number % len(self.known)]

    def open(self) -> list[Known]:
        """Branches that can continue."""
        return [one for one in self.known if not one.ended and len(one.path) < LONGEST]

    def pick_open(self, number: int) -> Known:
        some = self.open()
        return some[number % len(some)]

    def welcome(self, one: Known) -> None:
        """Add the branch, and drop the oldest if there are too many."""
        self.known.append(one)
        if len(self.known) > MOST:
            self.release_one(0)

    def release_one(self, number: int) -> None:
        """Release a known branch and the rejected drafts that hang off it."""
        gone = self.known.pop(number).branch
        gone.release()
        self.rejected = [one for one in self.rejected if one.branch.record.parent != gone.id]

    def child(self, parent: Known, at: int) -> Known:
        length = 1 + at % len(parent.path)
        (branch,) = parent.branch.fork(at=length)
        return Known(branch, parent.path[:length], min(parent.num_prompt, length), parent.exact)

    def settle(self, one: Known, n: int, how: How, cancelled: bool = False) -> None:
        """Check that the branch has the reference's tokens (all of them unless cancelled), then note its rejected drafts."""
        branch, before, sampling = one.branch, len(one.path), SAMPLINGS[how.sampling]
        if one.exact:
            truth = self.truth.continuation(one.path, n, sampling, one.num_prompt)
            assert branch.tokens[before:] == (truth[: branch.length - before] if cancelled else truth)
        one.path, one.ended = branch.tokens, branch.finish_reason is not None
        assert one.ended == (one.path[-1] in sampling.stop_tokens and len(one.path) > before)
        if how.final and not cancelled:
            assert branch.record.states[-1] is TokenState.ACCEPTED
            assert branch.lane.recording is None or branch.activations.end == len(one.path)
        noted = {other.branch.id for other in self.rejected}
        for other in branch.rejected:
            if other.id not in noted:
                self.rejected.append(Known(other, other.tokens, one.num_prompt, one.exact))


class Experts(Sessions):
    """A mixture of experts."""

    config = replace(CONFIG, mixture=MixtureConfig(5, 20, Routing(2), d_shared=12))
    reference = None


class Latents(Sessions):
    """Latent attention."""

    config = replace(CONFIG, latent=Latent(rank=14, d_value=5), windows=(), num_kv_heads=4, d_head=14, rotary_dim=6)
    reference = None


class GatedConvs(Sessions):
    """Short convolutions beside attention."""

    config = replace(CONFIG, mixer=MixerConfig("conv", 3, 32), parts=("mixer mlp", "attn mlp"))
    reference = None


class DeltaNets(Sessions):
    """A gated delta net before gated attention."""

    config = replace(CONFIG, mixer=MixerConfig("delta", 4, 44, 4, 2, 5, 6), parts=("mixer mlp", "attn mlp"), attn_gate=True)
    reference = None


class StateSpaces(Sessions):
    """Mamba-2 alone: no attention, no MLP."""

    config = replace(CONFIG, mixer=MixerConfig("ssd", 4, 44, 4, 2, 5, 6, conv_bias=True), parts=("mixer", "mixer"))
    reference = None


class SidesAlike(Sessions):
    """Mamba-2 beside attention in one layer, an MLP alone in the other."""

    config = replace(
        CONFIG, mixer=MixerConfig("ssd", 2, 34, 4, 1, 5, 6, norm_groups=2), parts=("mixer attn", "mlp"), windows=()
    )
    reference = None


class SessionsOnCuda(Sessions):
    """The same on a CUDA device, which draws tokens, compares drafts and replays steps from graphs."""

    device = "cuda"
    reference = None


HYBRIDS = (GatedConvs, DeltaNets, StateSpaces, SidesAlike)


def some(sessions: int, steps: int, **more: Any) -> settings:
    """The same sessions on every run."""
    same: dict[str, Any] = dict(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    return settings(max_examples=sessions, stateful_step_count=steps, **same, **more)


@pytest.mark.parametrize(
    "machine, sessions, steps",
    [(Sessions, 1, 25), (Experts, 1, 20), (DeltaNets, 1, 20)]
    + [
        pytest.param(*full, marks=pytest.mark.slow)
        for full in ((Sessions, 5, 40), (Experts, 2, 20), (Latents, 2, 20), *((hybrid, 4, 40) for hybrid in HYBRIDS))
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else None,
)
def test_random_sessions(machine: type[Sessions], sessions: int, steps: int) -> None:
    class Counted(machine):  # type: ignore[misc, valid-type]
        preemptions = 0

    run_state_machine_as_test(Counted, settings=some(sessions, steps))
    assert Counted.preemptions >= 2 * sessions, "control: requests lost their pages to others, many times"


SessionsOnCuda.TestCase.settings = some(sessions=24, steps=40)
TestSessionsOnCuda = pytest.mark.gpu(SessionsOnCuda.TestCase)
