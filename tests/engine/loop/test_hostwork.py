"""The host's work per token does not grow with the path; the benchmark of the same name measures it at 64,000 positions.

Here the elements are counted that a step reads from the lists that grow with a path. Counts do not depend on the machine.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.hostwork import WAYS, branches, generate, host_engine
from replaylens.engine.loop.admission import Planner
from replaylens.engine.loop.commit import Committer, Outcome
from replaylens.engine.loop.lane import Turn
from replaylens.engine.memory.path import PathStates, TokenPath
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from tests.toy_model import Reference, engine, toy

SHORT, LONG = 500, 8_000
FLAT = [name for name in WAYS if name != "drafter ngram"]
"""a rejected draft copies its path: not constant yet"""


class Counted(list[Any]):
    """A list that counts the elements read from it."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Counted.reads += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            Counted.reads += 1
            yield element


class CountedPath(TokenPath):
    """A path that counts the tokens read from it."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Counted.reads += len(found) if isinstance(index, slice) else 1
        return found


class CountedStates(PathStates):
    """States that count those that are listed."""

    def __iter__(self) -> Iterator[Any]:
        for state in super().__iter__():
            Counted.reads += 1
            yield state


def count(branch: Branch) -> None:
    """Mutates: replaces everything of the branch that grows with its path by something that counts what is read."""
    record, table = branch.record, branch.lane.table
    record.tokens = record.past.tokens = CountedPath(record.tokens)
    record.states, table.pages = CountedStates(record.states.counts), Counted(table.pages)
    if branch.lane.recording is not None:
        branch.lane.recording.chunks = Counted(branch.lane.recording.chunks)


def reads(name: str, length: int) -> int:
    """How many elements a second round of steps reads. The first makes what later ones extend."""
    work, sites = WAYS[name]
    subject = host_engine(LONG + 1024, 2 * LONG)
    given = branches(subject, length, 3, sites)
    work(subject, given)
    for branch in given:
        count(branch)
    Counted.reads = 0
    work(subject, given)
    return Counted.reads


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafts that depend on timings."""
    monkeypatch.setattr(Planner, "window", lambda *_: 1)


@pytest.mark.parametrize("name", FLAT)
def test_a_token_costs_the_same_at_any_position(name: str) -> None:
    short, long = reads(name, SHORT), reads(name, LONG)
    assert 0 < long <= 1.1 * short, f"{name}: {long} elements read at {LONG} positions, {short} at {SHORT}"


def test_a_copy_of_the_path_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Committer._accept_kv

    def copying(self: Committer, turn: Turn, outcome: Outcome) -> None:
        accept(self, turn, outcome)
        self.tree.path(turn.job.lane.branch)

    monkeypatch.setattr(Committer, "_accept_kv", copying)
    assert reads("greedy", LONG) > 10 * reads("greedy", SHORT)


def test_the_stand_in_generates_what_it_should() -> None:
    """Otherwise its times would say nothing: every branch commits a token per step, with rows and pages."""
    subject = host_engine(2048, 4096)
    given = branches(subject, 100, 3, sites="S")
    generate(subject, given)
    for branch in given:
        assert branch.tokens[100:] == [(position * 17 + 5) % 61 for position in range(99, 115)]
        assert branch.activations.positions() == list(range(branch.lane.computed))
    subject.check_integrity()


def test_pages_offered_after_a_rollback_hold_their_own_path() -> None:
    """A lane offers only what came since its last offer: a rollback below that starts over."""
    subject = engine(canary=True)
    branch = subject.prompt([1, 2, 3, 4, 5]).generate(12)
    first = branch.tokens
    branch.rollback(6).generate(16, sampling=Sampling(temperature=2.0, seed=5))
    assert branch.tokens[:12] != first[:12]
    for path in ([*first[:-1], 1], [*branch.tokens[:-1], 1]):
        again = subject.prompt(path)
        assert torch.equal(again.kv(), Reference(toy(), path).kv)
    assert again.lane.table.pages[3] == branch.lane.table.pages[3], "what was offered is shared"
    subject.check_integrity()
