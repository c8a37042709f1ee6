"""Random trees against each branch alone: any shape, any sharing, any order of forks, edits, rollouts, rollbacks and releases.

Unlike the sessions of `test_machine.py`, prefixes are longer than a block of keys, branches are many and go through passes
together, and shared keys are read once wherever they can be. After every step each live branch is compared byte by byte, in
KV and captured rows, with its path computed alone. `make soak` runs the same for hours.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.passes.batch import Batch
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.kernels.cpu_attention import HostRows
from replaylens.rollouts.plan import rollout_seed
from tests.engine.passes.test_prefixes import one_page_too_many
from tests.engine.reference import random_decoder, same_bits
from tests.engine.test_machine import AnyWindow, some
from tests.toy_model import SHAPE

CONFIG = ModelConfig(**{**SHAPE, "vocab_size": 17, "max_positions": 256, "windows": (0, 9)})
SITES = "STC"
LONG = tuple((i * i + i // 5) % CONFIG.vocab_size for i in range(200))
LONGEST, MOST = 180, 14
"""tokens of a path, live branches"""

seeds = st.integers(0, 10**6)
"""of what a step does; places drawn by hypothesis itself would nearly all lie at the start of a path"""


@dataclass(frozen=True)
class Change:
    """An edit of the residual stream that is a function of three numbers, so that paths with edits can be told apart."""

    start: int
    count: int
    layer: int

    def edit(self) -> Edit:
        vector = torch.linspace(-1, 1, CONFIG.d_model) * (1 + self.start % 3)
        return Edit(f"blocks.{self.layer}.hook_in", "add", vector, positions=slice(self.start, self.start + self.count))


@dataclass
class Known:
    """What the machine knows about a branch without asking the engine."""

    branch: Branch
    path: list[int]
    num_prompt: int
    changes: tuple[Change, ...] = ()
    captured: bool = True

    @property
    def exact(self) -> bool:
        """Whether the path alone says what its bits are."""
        return not self.changes


class Alone:
    """Every path on its own: an engine that holds one branch at a time and never shares."""

    def __init__(self, config: ModelConfig) -> None:
        self.engine = Engine(random_decoder(config), cache_tokens=1024, page_size=16)
        self._known: dict[tuple[tuple[int, ...], tuple[Change, ...]], tuple[Tensor, dict[str, Tensor]]] = {}

    def bits(self, path: Sequence[int], changes: tuple[Change, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """KV and captured rows of a path."""
        key = (tuple(path), changes)
        if key not in self._known:
            with self.branch(path, changes) as branch:
                self._note(branch, changes)
        return self._known[key]

    def _note(self, branch: Branch, changes: tuple[Change, ...]) -> None:
        if len(self._known) > 4000:
            self._known.clear()
        rows = {site: rows.clone() for site, rows in branch.activations.items()}
        self._known[tuple(branch.tokens), changes] = branch.kv(), rows

    def branch(self, path: Sequence[int], changes: tuple[Change, ...]) -> Branch:
        self.engine.prefix.clear()
        return self.engine.prompt(list(path), sites=SITES, edits=[change.edit() for change in changes])

    def continuation(self, path: Sequence[int], changes: tuple[Change, ...], n: int, sampling: Sampling) -> list[int]:
        with self.branch(path, changes) as branch:
            branch.generate(n, sampling=sampling, window=1, final=True)
            self._note(branch, changes)
            return branch.generated


@cache
def alone(config: ModelConfig) -> Alone:
    return Alone(config)


class Trees(RuleBasedStateMachine):
    """Trees that grow and are cut in any order, in a cache that they fill."""

    config: ClassVar[ModelConfig] = CONFIG
    operations: ClassVar[int] = 0
    preemptions: ClassVar[int] = 0
    sessions, steps = 40, 40

    def __init__(self) -> None:
        super().__init__()
        self.known: list[Known] = []

    @initialize(page_size=st.sampled_from([16, 4, 1, 64, 128]), tokens=st.sampled_from([4000, 1500, 700]), seed=seeds)
    def begin(self, page_size: int, tokens: int, seed: int) -> None:
        self.truth = alone(self.config)
        rows = random.Random(seed).choice([33, 64, 512])
        self.engine = Engine(self.truth.engine.runner.model, cache_tokens=tokens, page_size=page_size, max_rows=rows)
        self.engine.loop.admission.planner = AnyWindow(seed)
        self.engine.loop.listeners.append(self.count)
        self.room = tokens - 2 * page_size
        path = list(LONG[: 70 + seed % 70])
        root = self.engine.prompt(path, sites=SITES)
        self.welcome([Known(branch, list(path), len(path)) for branch in (root, *root.fork(4))])

    def count(self, event: dict[str, Any]) -> None:
        type(self).preemptions += event["event"] == "preempt"

    # ---- what users do --------------------------------------------------------------------------------------------

    @rule(seed=seeds, captured=st.booleans())
    def plant(self, seed: int, captured: bool) -> None:
        chance = random.Random(seed)
        start = chance.choice([0, 0, 0, 1])
        path = list(LONG[start : chance.randint(start + 60, 160)])
        changes = self.changes(chance, len(path))
        made = self.engine.prompt(path, sites=SITES if captured else None, edits=[change.edit() for change in changes])
        self.welcome([Known(made, path, len(path), changes, captured)])

    @rule(seed=seeds, n=st.integers(1, 6))
    @precondition(lambda self: self.known)
    def fork(self, seed: int, n: int) -> None:
        """Forks anywhere on a path, or near its end; a fork of forks makes a prefix of a prefix."""
        chance = random.Random(seed)
        parent = chance.choice(self.known)
        length = chance.choice([chance.randint(1, len(parent.path)), max(1, len(parent.path) - chance.randint(0, 3))])
        changes = self.changes(chance, length)
        made = parent.branch.fork(n, at=length, edits=[change.edit() for change in changes])
        prompt, every = min(parent.num_prompt, length), parent.changes + changes
        self.welcome([Known(branch, parent.path[:length], prompt, every, parent.captured) for branch in made])

    @rule(seed=seeds)
    @precondition(lambda self: self.open())
    def force_together(self, seed: int) -> None:
        chance = random.Random(seed)
        some = self.some(chance)
        new = [[chance.randrange(self.config.vocab_size) for _ in range(chance.choice([1, 2, 9, 70]))] for _ in some]
        self.engine.force_all([one.branch for one in some], new)
        for one, tokens in zip(some, new, strict=True):
            one.path += tokens

    @rule(seed=seeds, n=st.integers(1, 3), window=st.sampled_from([1, None, 3]))
    @precondition(lambda self: self.open())
    def generate_together(self, seed: int, n: int, window: int | None) -> None:
        chance = random.Random(seed)
        some = self.some(chance)
        how = [Sampling(temperature=(seed + i) % 3 / 2, seed=seed + i, ignore_eos=True) for i in range(len(some))]
        self.engine.generate([one.branch for one in some], n, sampling=how, window=window)
        for one, sampling in zip(some, how, strict=True):
            new = one.branch.tokens[len(one.path) :]
            assert new == self.truth.continuation(one.path, one.changes, n, sampling), f"tokens of branch {one.branch.id}"
            one.path += new

    @rule(seed=seeds, n=st.integers(1, 3), new=st.integers(1, 3), wave=st.sampled_from([None, 1, 4]))
    @precondition(lambda self: self.open())
    def resample(self, seed: int, n: int, new: int, wave: int | None) -> None:
        chance = random.Random(seed)
        one = chance.choice(self.open())
        places = sorted({chance.randint(1, len(one.path)) for _ in range(2)})
        how = Sampling(temperature=1.0, seed=seed, ignore_eos=True)
        found = one.branch.resample(n, at=places, sampling=how, max_new=new, sites="S", keep="all", wave=wave)
        for rollout in found:
            path = one.path[: rollout.position]
            own = Sampling(temperature=1.0, seed=rollout_seed(seed, rollout.position, rollout.number), ignore_eos=True)
            assert list(rollout.tokens) == self.truth.continuation(path, one.changes, new, own), "tokens of a rollout"
            _, rows = self.truth.bits([*path, *rollout.tokens], one.changes)
            for site, ours in rollout.states.items():
                assert same_bits(ours, rows[site][len(path) :]), f"{site} of a rollout at {rollout.position}"

    @rule(seed=seeds)
    @precondition(lambda self: self.known)
    def rollback(self, seed: int) -> None:
        chance = random.Random(seed)
        one = chance.choice(self.known)
        length = chance.randint(one.num_prompt, len(one.path))
        one.branch.rollback(length)
        del one.path[length:]

    @rule(seed=seeds, dropped=st.booleans(), forgotten=st.booleans())
    @precondition(lambda self: len(self.known) > 2)
    def release(self, seed: int, dropped: bool, forgotten: bool) -> None:
        """Parents before children or after them; by hand, or because nobody holds them."""
        chance = random.Random(seed)
        for _ in range(chance.randint(1, len(self.known) // 2)):
            gone = self.known.pop(chance.randrange(len(self.known)))
            if not dropped:
                gone.branch.release()
            del gone
        if forgotten:
            self.engine.prefix.clear()

    # ---- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def every_branch_is_as_it_is_alone(self) -> None:
        type(self).operations += 1
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        for one in self.known:
            assert one.branch.tokens == one.path
            kv, rows = self.truth.bits(one.path, one.changes)
            held = self.engine.forest.held_kv(one.branch.lane)
            assert same_bits(held, kv[: len(held)]), f"KV of branch {one.branch.id}"
            recording = one.branch.lane.recording
            assert (recording is not None) == one.captured
            for site in [] if recording is None or recording.end == recording.base else recording.sites():
                ours = one.branch.lane.recording[site]
                assert same_bits(ours, rows[site][recording.base : recording.end]), f"{site} of branch {one.branch.id}"

    # ---- helpers --------------------------------------------------------------------------------------------------

    def changes(self, chance: random.Random, length: int) -> tuple[Change, ...]:
        """Mostly none."""
        if chance.random() < 0.75:
            return ()
        return (Change(chance.randrange(length), chance.randint(1, 40), chance.randrange(self.config.num_layers)),)

    def open(self) -> list[Known]:
        return [one for one in self.known if len(one.path) < LONGEST]

    def some(self, chance: random.Random) -> list[Known]:
        """Some open branches in any order, as many as the cache has room for if they shared nothing."""
        there, left, found = self.open(), self.room, list[Known]()
        for one in chance.sample(there, min(chance.randint(2, 12), len(there))):
            left -= len(one.path) + 80
            if left >= 0 or not found:
                found.append(one)
        return found

    def welcome(self, new: list[Known]) -> None:
        self.known += new
        while len(self.known) > MOST:
            self.known.pop(0).branch.release()


# ---- the tests ---------------------------------------------------------------------------------------------------------


def short(sessions: int, steps: int) -> settings:
    return some(sessions, steps, report_multiple_bugs=False, phases=[Phase.generate])


@pytest.mark.parametrize("sessions", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_branch_of_a_random_tree_is_as_it_is_alone(sessions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    real = Batch.__dict__["paged"].func

    def counted(batch: Batch) -> HostRows:
        paged: HostRows = real(batch)
        used.append(len(paged.pages) - len(paged.pages[:, 0].unique()))
        return paged

    monkeypatch.setattr(Batch, "paged", property(counted))
    run_state_machine_as_test(Trees, settings=short(sessions, steps=20))
    assert sum(map(bool, used)) > 10, "control: pages were shared in many passes"


@pytest.mark.slow
def test_control_a_page_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions see keys that are read for a branch that does not have them."""
    monkeypatch.setattr(Batch, "paged", property(one_page_too_many))
    with pytest.raises(AssertionError, match=r"of branch|of a rollout"):
        run_state_machine_as_test(Trees, settings=short(sessions=40, steps=40))


@pytest.mark.parametrize("wrong", [False, True])
def test_control_a_page_too_many_is_found_in_a_session_that_needs_it(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches that leave each other after one block and have two."""
    if wrong:
        monkeypatch.setattr(Batch, "paged", property(one_page_too_many))
    session = Trees()
    session.begin(page_size=16, tokens=4000, seed=0)
    session.known.clear()
    for start in (0, 1):
        path = list(LONG[start : start + 70])
        forks = session.engine.prompt(path, sites=SITES).fork(3)
        session.welcome([Known(branch, list(path), len(path)) for branch in forks])
    new = [[(i + j) % 17 for j in range(70)] for i in range(len(session.known))]
    session.engine.force_all([one.branch for one in session.known], new)
    for one, tokens in zip(session.known, new, strict=True):
        one.path += tokens
    how = Sampling(ignore_eos=True)
    session.engine.generate([one.branch for one in session.known], 2, sampling=how, window=1)
    for one in session.known:
        one.path = one.branch.tokens
    if not wrong:
        session.every_branch_is_as_it_is_alone()
    else:
        with pytest.raises(AssertionError, match="of branch"):
            session.every_branch_is_as_it_is_alone()
