"""Random sessions that mix exact and fast passes: what calls itself certified is, and so is what a later prompt is handed.

After every step, each branch that says `certified`, and every page of the prefix index, is compared bit by bit with its path
computed alone, in an engine of its own. Whether a branch may say so is predicted from what was asked of it and of those that it
was forked from. The fast path is wrong on purpose, so that a page of it cannot pass for a canonical one. `make soak` runs more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.capture import Rows
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.kernels.definition import CHUNK
from replaylens.thinking.core import ThinkingEngine
from replaylens.thinking.model import ThinkingDecoder
from tests.devices import swept
from tests.engine.reference import random_decoder, same_bits, wrong_fast_path
from tests.engine.test_machine import CONFIG, DeltaNets, some
from tests.thinking.reference import BASE, random_prompt, thinking_model

SITES = "STCZ"
ON = Sampling(ignore_eos=True)
KEY = 16
"""bytes of an edit's key"""
EDITS = (
    Edit("blocks.0.hook_out", "add", torch.linspace(-1, 1, CONFIG.d_model), positions=slice(5, None)),
    Edit("blocks.0.attn.hook_z", "zero", positions=[2, 3], heads=[1]),
    Edit("blocks.1.mlp.hook_out", "zero", positions=slice(7, 9)),
)
"""no two of one row, so that their order is of no account"""
LAST_EDITED = 9
STATE_EDITS = (
    Edit("blocks.0.mixer.hook_state", "add", torch.ones(4, 5, 6), positions=5),
    Edit("blocks.0.mixer.hook_k", "zero", positions=[2, 3]),
    Edit("blocks.1.mlp.hook_out", "zero", positions=slice(7, 9)),
)
"""for a model with recurrent layers"""

picks = st.integers(0, 10**6)
chains = st.lists(
    st.lists(st.integers(2, 12), min_size=1, max_size=4), min_size=1, max_size=5, unique_by=lambda chain: chain[0]
)


@dataclass(frozen=True)
class Truth:
    """A path computed alone."""

    kv: Tensor
    """[positions, layers, 2, kv_heads, d_head]"""
    rows: Rows
    entries: dict[int, Tensor]
    """position -> what recurrent layers hold of it"""
    states: dict[int, Tensor]
    """last position of a chunk -> the state after it"""


@dataclass(eq=False)
class Held:
    """What the machine knows about a branch without asking the engine."""

    branch: Branch
    path: list[int]
    exact: bool = True
    edits: tuple[PlacedEdit, ...] = ()
    along: int = 0
    """the tokens, of the path, that were a prompt of a model that thinks"""


def truth_of(branch: Branch) -> Truth:
    """What the only branch of its engine holds."""
    rows = {site: branch.activations[site] for site in branch.activations.sites()}
    kv, length, runner = branch.kv(), branch.length, branch.engine.runner
    recurrent = recurrent_of(runner, runner.pool.slots(branch.lane.table, 0, length))
    return Truth(kv, rows, *recurrent)


def recurrent_of(runner: Runner, slots: list[int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """What recurrent layers hold of a path in these slots, as far as its pages have rooms: entries and states."""
    cache, size = runner.cache, runner.pool.page_size
    if runner.model.config.mixer is None:
        return {}, {}
    pages, rooms = [slot // size for slot in slots], cache.rooms
    there = [i for i, page in enumerate(pages) if rooms is None or (rooms.entries.of[page] and rooms.whole[page])]
    ends = [i for i in range(CHUNK - 1, len(slots), CHUNK) if cache.state_of[pages[i]]]
    entries = dict(zip(there, cache.mixed_rows([slots[i] for i in there]), strict=True))
    return entries, {i: cache.states[:, int(cache.state_of[pages[i]])].clone() for i in ends}


def as_alone(held: tuple[dict[int, Tensor], dict[int, Tensor]], truth: Truth) -> bool:
    """Whether recurrent layers hold what they do of the path alone."""
    return all(
        same_bits(own, alone[position])
        for some, alone in zip(held, (truth.entries, truth.states), strict=True)
        for position, own in some.items()
    )


class Certified(RuleBasedStateMachine):
    """Prompts, forks with and without edits, exact requests with forced drafts, fast ones, rollbacks, in any order."""

    known: ClassVar[list[Any]] = []
    operations = preemptions = 0
    sessions, steps = 20, 40
    edits: ClassVar[Sequence[Edit]] = EDITS
    """those that forks may add"""
    longest = 44
    """tokens of a branch that still grows"""
    most = 6
    """branches that are held at a time"""
    laundered = 0
    """how often something uncertified held other bits than its path has"""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.rejected: list[Held] = []
        self.placed: dict[bytes, PlacedEdit] = {}
        """by key: all that a lane with indexed pages ever had"""
        self.patched = ExitStack()

    @initialize(page_size=st.sampled_from([3, 4, 1]), cache_tokens=st.sampled_from([512, 96]), captured=st.booleans())
    def begin(self, page_size: int, cache_tokens: int, captured: bool) -> None:
        self.patched.enter_context(wrong_fast_path())
        self.engine, self.captured = self.new_engine(page_size=page_size, cache_tokens=cache_tokens), captured
        queue = self.engine.loop.queue
        offer = queue._offer

        def noted(lane: Any, keys: Any) -> None:
            self.placed |= {edit.key: edit for edit in lane.edits}
            offer(lane, keys)

        queue._offer = noted  # type: ignore[method-assign]

    def teardown(self) -> None:
        self.patched.close()

    # ---- the model ------------------------------------------------------------------------------------------------

    model: ClassVar[Callable[[], Any]] = staticmethod(cache(lambda: random_decoder(CONFIG)))

    @classmethod
    def new_engine(cls, **options: Any) -> Engine:
        return Engine(cls.model(), **options)

    @classmethod
    def tokens(cls, start: int, length: int) -> list[int]:
        """The prompt of this length."""
        return [(start + i * i + i // 3) % CONFIG.vocab_size for i in range(length)]

    @classmethod
    def alone(cls, one: Held) -> Truth:
        return cls.plain(tuple(one.path), one.edits)

    @classmethod
    def plain(cls, path: tuple[int, ...], edits: tuple[PlacedEdit, ...]) -> Truth:
        """A path under placed edits, in a fresh engine."""
        key = path, *(edit.key for edit in edits)
        if key not in cls.truths:
            cls.truths[key] = truth_of(cls.planted(path, edits))
        return cls.truths[key]

    truths: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def planted(cls, path: tuple[int, ...], edits: tuple[PlacedEdit, ...]) -> Branch:
        engine = cls.fresh_plain()
        lane = engine.forest.plant(list(path), engine.capture_spec(SITES), edits)
        engine.forest.compute([lane])
        return engine.handle(lane)

    @classmethod
    def lone(cls, one: Held) -> Branch:
        """The same path and edits, in a fresh engine."""
        return cls.planted(tuple(one.path), one.edits)

    @classmethod
    def following(cls, one: Held) -> tuple[int, ...]:
        """The tokens that an exact request would add."""
        key = "following", one.along, tuple(one.path), *(edit.key for edit in one.edits)
        if key not in cls.truths:
            cls.truths[key] = tuple(cls.lone(one).generate(8, window=1, sampling=ON).tokens[len(one.path) :])
        return cls.truths[key]

    @classmethod
    def fresh_plain(cls) -> Engine:
        return Engine(cls.model(), page_size=1, cache_tokens=128, max_rows=16)

    # ---- steps ----------------------------------------------------------------------------------------------------

    @rule(start=st.integers(0, 1), length=st.sampled_from([2, 7, 12, 18]))
    def prompt(self, start: int, length: int) -> None:
        path = self.tokens(start, length)
        sites = SITES if self.captured else None
        branch = self.engine.prompt(path, sites=sites, keep_rejected=self.captured)
        self.welcome(Held(branch, path, along=self.thought(len(path))))
        self.note_rejected(self.held[-1])

    def thought(self, length: int) -> int:
        """The number of prompt tokens with thoughts, of the first `length`."""
        return 0

    @precondition(lambda self: self.held)
    @rule(pick=picks, at=picks, of_rejected=st.booleans(), number=st.sampled_from([None, 0, 1, 2]))
    def fork(self, pick: int, at: int, of_rejected: bool, number: int | None = None) -> None:
        one = self.pick(pick, of_rejected)
        which = None if number is None or not self.edits else self.edits[number]
        at = 1 + at % len(one.path)
        kept = tuple(edit for edit in one.edits if edit.needs <= at)
        new = () if which is None or at <= LAST_EDITED else tuple(self.engine.placed([which], at))
        new = tuple(edit for edit in new if edit.key not in {each.key for each in kept})
        (branch,) = one.branch.fork(at=at, edits=[which] if which is not None and new else ())
        self.welcome(Held(branch, one.path[:at], one.exact, kept + new, min(one.along, self.thought(at))))

    @precondition(lambda self: self.open())
    @rule(
        pick=picks,
        n=st.integers(2, 6),
        later=st.integers(0, 2),
        drafts=st.lists(chains, min_size=2, max_size=2),
        keep=st.booleans(),
    )
    def generate(self, pick: int, n: int, later: int, drafts: list[list[list[int]]], keep: bool) -> None:
        """An exact request. The first of its first chains begins with the right token, if that is known."""
        one = self.pick(pick, of=self.open())
        before, first = len(one.path), [list(chain) for chain in drafts[0]]
        expected = self.following(one)[:n] if one.exact else None
        if expected is not None and expected[0] not in {chain[0] for chain in first}:
            first[-1] = [*expected[:2], *first[-1]][:5]
        given = {before + 1 + later: drafts[1], before: first}
        one.branch.generate(n, sampling=ON, drafter="forced", drafts=given, keep_pages=keep)
        one.path = one.branch.tokens
        assert expected is None or tuple(one.path[before:]) == expected
        self.note_rejected(one)

    @precondition(lambda self: self.open())
    @rule(pick=picks, n=st.integers(1, 5))
    def generate_fast(self, pick: int, n: int) -> None:
        one = self.pick(pick, of=self.open())
        one.branch.generate(n, sampling=ON, deterministic=False)
        one.path, one.exact = one.branch.tokens, False

    @precondition(lambda self: len(self.open()) > 1)
    @rule(
        picked=st.lists(picks, min_size=2, max_size=4),
        fast=st.lists(st.booleans(), min_size=4, max_size=4),
        n=st.integers(1, 6),
        drafter=st.sampled_from(["self", "tree", "ngram"]),
    )
    def generate_together(self, picked: list[int], fast: list[bool], n: int, drafter: str) -> None:
        """Exact and fast requests share steps, and in a small cache take pages from each other."""
        some = list({id(one): one for one in (self.pick(pick, of=self.open()) for pick in picked)}.values())
        how = [{"deterministic": False} if each else {"drafter": drafter, "window": 3} for each in fast]
        before = [self.following(one)[:n] if one.exact and not each else None for one, each in zip(some, fast, strict=False)]
        streams = [one.branch.stream(n, sampling=ON, keep_pages=True, **each) for one, each in zip(some, how, strict=False)]
        for stream in streams:
            list(stream)
        for one, each, expected in zip(some, fast, before, strict=False):
            length, one.path = len(one.path), one.branch.tokens
            assert expected is None or tuple(one.path[length:]) == expected
            one.exact = one.exact and not each
            self.note_rejected(one)

    @precondition(lambda self: self.open())
    @rule(pick=picks, to=picks, n=st.integers(1, 5))
    def go_back_and_fast(self, pick: int, to: int, n: int) -> None:
        """The same tokens again, most likely, from the other path: rejected drafts and forks do not take them over."""
        self.rollback(pick, to)
        self.generate_fast(pick, n)

    @precondition(lambda self: self.open())
    @rule(pick=picks, new=st.lists(st.integers(2, 12), min_size=1, max_size=4))
    def force(self, pick: int, new: list[int]) -> None:
        one = self.pick(pick, of=self.open())
        one.branch.force(new)
        one.path = [*one.path, *new]

    @precondition(lambda self: self.held)
    @rule(pick=picks, to=picks)
    def rollback(self, pick: int, to: int) -> None:
        one = self.pick(pick)
        first = one.branch.root_length
        length = first + to % (len(one.path) - first + 1)
        one.branch.rollback(length)
        one.path = one.path[:length]

    @precondition(lambda self: self.held)
    @rule(pick=picks, of_rejected=st.booleans())
    def read(self, pick: int, of_rejected: bool) -> None:
        """What a branch lacks is computed on a twin, and becomes its own."""
        branch = self.pick(pick, of_rejected).branch
        branch.kv()
        _ = branch.lane.recording and branch.activations

    @precondition(lambda self: len(self.held) > 2)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.let_go(self.pick(pick))

    # ---- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def what_says_certified_is(self) -> None:
        type(self).operations += 1
        for one in self.held + self.rejected:
            assert one.branch.tokens == one.path
            assert one.branch.certified == one.exact
            assert (one.branch.record.uncertified_from is None) == one.exact
            wrong = self.differences(one)
            assert not one.exact or wrong == []
            type(self).laundered += not one.exact and bool(wrong)

    @invariant()
    def what_a_prompt_is_handed_is_as_alone(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            for path, edits, pages in self.indexed():
                pool, truth = self.engine.runner.pool, self.plain(path, edits)
                slots = [page * pool.page_size + i for page in pages for i in range(pool.page_size)]
                said = f"of {path}, {len(edits)} edits"
                assert same_bits(self.engine.runner.cache.rows(slots), truth.kv), f"indexed KV {said}"
                assert as_alone(recurrent_of(self.engine.runner, slots), truth), f"indexed recurrent memory {said}"

    def indexed(self) -> Iterator[tuple[tuple[int, ...], tuple[PlacedEdit, ...], list[int]]]:
        """The longest paths of the prefix index: (tokens, edits, pages)."""
        for entry in self.engine.prefix._entries.values():
            chain, at = [], entry if entry.num_children == 0 else None
            while at is not None:
                chain, at = [at, *chain], at.parent
            keys = [each.edit_key[i : i + KEY] for each in chain for i in range(0, len(each.edit_key), KEY)]
            if chain:
                tokens = tuple(token for each in chain for token in each.tokens)
                yield tokens, tuple(self.placed[key] for key in dict.fromkeys(keys)), [each.page for each in chain]

    def differences(self, one: Held) -> list[str]:
        """What a branch holds that is not as its path is alone."""
        truth, lane = self.alone(one), one.branch.lane
        held = self.engine.forest.held_kv(lane)
        found = [] if same_bits(held, truth.kv[: lane.computed]) else ["KV"]
        recurrent = recurrent_of(self.engine.runner, self.engine.runner.pool.slots(lane.table, 0, lane.computed))
        found += [] if as_alone(recurrent, truth) else ["recurrent memory"]
        if (rows := lane.recording) is not None:
            part = slice(rows.base, rows.end)
            both = [site for site in rows.sites() if site in truth.rows]
            found += [site for site in both if not same_bits(rows[site], truth.rows[site][part])]
        return found

    # ---- helpers --------------------------------------------------------------------------------------------------

    def open(self) -> list[Held]:
        return [one for one in self.held if len(one.path) < self.longest]

    def pick(self, number: int, of_rejected: bool = False, of: list[Held] | None = None) -> Held:
        some = self.rejected if of_rejected and self.rejected else of or self.held
        return some[number % len(some)]

    def welcome(self, one: Held) -> None:
        self.held.append(one)
        if len(self.held) > self.most:
            self.let_go(self.held[0])

    def let_go(self, one: Held) -> None:
        self.held.remove(one)
        one.branch.release()
        self.rejected = [other for other in self.rejected if other.branch.record.parent != one.branch.id]

    def note_rejected(self, one: Held) -> None:
        noted = {other.branch.id for other in self.rejected}
        for branch in one.branch.rejected:
            if branch.id not in noted:
                made = replace(one, branch=branch, path=branch.tokens)
                if branch.record.fork_position < one.along:  # after a wrong guess of a thought, with the state that it leaves
                    made.edits, made.along = branch.lane.edits, 0
                self.rejected.append(made)


class CertifiedThoughts(Certified):
    """A model that thinks on its prompts: rejected drafts and forks inherit thoughts and the states that they leave."""

    edits = ()
    truths: ClassVar[dict[Any, Any]] = {}
    model: ClassVar[Callable[[], ThinkingDecoder]] = staticmethod(cache(lambda: thinking_model(BASE)))

    @classmethod
    def new_engine(cls, **options: Any) -> Engine:
        return ThinkingEngine(cls.model(), **options)

    @classmethod
    def fresh_plain(cls) -> Engine:
        return Engine(cls.model().backbone, page_size=1, cache_tokens=128, max_rows=16)

    @classmethod
    def tokens(cls, start: int, length: int) -> list[int]:
        return random_prompt(-(-length // cls.model().thinking.chunk), seed=start)

    def thought(self, length: int) -> int:
        chunk = self.model().thinking.chunk
        return length // chunk * chunk

    @classmethod
    def alone(cls, one: Held) -> Truth:
        """Thought along chunk by chunk, then forced."""
        if not one.along:
            return cls.plain(tuple(one.path), one.edits)
        key = tuple(one.path), one.along
        if key not in cls.truths:
            cls.truths[key] = truth_of(cls.lone(one))
        return cls.truths[key]

    @classmethod
    def lone(cls, one: Held) -> Branch:
        if not one.along:
            return super().lone(one)
        fresh = ThinkingEngine(cls.model(), guess="sequential", cache_tokens=128).prompt(one.path[: one.along], sites=SITES)
        return fresh.force(rest) if (rest := one.path[one.along :]) else fresh

    @precondition(lambda self: any(len(one.path) == one.along < 24 for one in self.held))
    @rule(pick=picks, chunks=st.integers(1, 3))
    def extend(self, pick: int, chunks: int) -> None:
        one = self.pick(pick, of=[one for one in self.held if len(one.path) == one.along < 24])
        branch = one.branch.extend(random_prompt(chunks, seed=chunks))
        self.welcome(replace(one, branch=branch, path=branch.tokens, along=branch.length))
        self.note_rejected(self.held[-1])


class CertifiedStates(Certified):
    """A recurrent layer before attention: paths end around the end of a chunk, after which a state is kept."""

    edits = STATE_EDITS
    longest = CHUNK + 32
    truths: ClassVar[dict[Any, Any]] = {}
    model: ClassVar[Callable[[], Any]] = staticmethod(cache(lambda: random_decoder(DeltaNets.config)))

    @classmethod
    def new_engine(cls, page_size: int, cache_tokens: int) -> Engine:
        """Some pages have room for what recurrent layers hold, in a cache for paths of this length."""
        size, rows = 16 if page_size == 3 else page_size, 32
        return Engine(cls.model(), page_size=size, max_rows=rows, cache_tokens=4 * cache_tokens, state_tokens=rows + 4 * CHUNK)

    @classmethod
    def tokens(cls, start: int, length: int) -> list[int]:
        return super().tokens(start, CHUNK - 14 + length)


MACHINES = (Certified, CertifiedThoughts, CertifiedStates)


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("sessions", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_what_calls_itself_certified_is(machine: type[Certified], sessions: int) -> None:
    how = some(sessions, steps=25, report_multiple_bugs=False, phases=[Phase.generate])
    run_state_machine_as_test(machine, settings=how)


FIRST, LAST = 0, -1
WRONG = [[[3, 4], [5], [6, 7, 8]], [[2], [9, 9]]]
"""chains of drafts; most are rejected"""


@pytest.mark.parametrize(
    ("machine", "captured"),
    swept(product(MACHINES, [False, True]), (Certified, True)),
)
def test_a_session_that_goes_to_and_fro(machine: type[Certified], captured: bool) -> None:
    """What random sessions find by luck: the ways in which something uncertified could pass for certified."""
    session = machine()
    session.most = 20
    session.begin(page_size=3, cache_tokens=512, captured=captured)

    def after(step: Callable[..., None], *given: Any, **more: Any) -> Held:
        step(*given, **more)
        session.what_says_certified_is()
        session.what_a_prompt_is_handed_is_as_alone()
        return session.held[LAST]

    def exact(one: Held) -> None:
        after(session.generate, session.held.index(one), 5, 1, WRONG, keep=True)

    def fork(one: Held, at: int | None = None, number: int | None = None) -> Held:
        rejected = one in session.rejected
        among = session.rejected if rejected else session.held
        return after(session.fork, among.index(one), (len(one.path) if at is None else at) - 1, rejected, number)

    try:
        root = after(session.prompt, 0, 12)
        start = len(root.path)
        exact(root)
        cut = session.rejected[LAST]
        edited = fork(root, start, FIRST)  # what the index holds of it has the edit in its key
        exact(edited)
        exact(fork(session.rejected[LAST]))
        assert root.exact and edited.exact and session.held[LAST].exact

        other = fork(root)  # goes back behind pages that the index has of it, and on with other tokens
        exact(other)
        after(session.rollback, session.held.index(other), 0)
        after(session.force, session.held.index(other), [5, 5, 6, 6] * 4)
        exact(other)

        before = len(root.path)
        after(session.rollback, session.held.index(root), 0)
        after(session.generate_fast, session.held.index(root), before - root.branch.root_length)
        assert root.path[: start + 1] == cut.path[: start + 1], "the fast path has other KV, but writes the same tokens here"
        after(session.read, 0, of_rejected=True)
        assert fork(cut).exact, "cut off before: it takes over nothing that its branch computed since"
        exact(session.held[LAST])

        assert not fork(root).exact
        exact(session.held[LAST])
        dirty = session.rejected[LAST]
        assert not dirty.exact
        for one in (dirty, fork(dirty), fork(session.held[LAST], start)):
            exact(again := fork(one))
            assert not again.exact and not again.branch.certified, "exact passes do not clean what they read"
        if isinstance(session, CertifiedThoughts):
            longer = after(session.extend, session.held.index(fork(root, start)), 3)
            assert not longer.branch.certified and bool(longer.branch.rejected) == captured
        after(session.prompt, 0, 12 + len(dirty.path) - start)
        assert session.held[LAST].exact
        assert session.laundered > 0, "control: without the promise, other bits"
    finally:
        session.teardown()
