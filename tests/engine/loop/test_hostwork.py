"""The host's work per token does not grow with the path; the benchmark of the same name measures it at 64,000 positions."""

import pytest
import torch

from benchmarks.hostwork import WAYS, branches, generate, host_engine, microseconds
from replaylens.engine.loop.commit import Committer, Outcome
from replaylens.engine.loop.turn import Turn
from replaylens.engine.request.sampling import Sampling
from tests.toy_model import Reference, engine, toy

SHORT, LONG = 500, 20_000
FLAT = [name for name in WAYS if name != "drafter ngram"]
"""a rejected draft copies its path: not constant yet"""


def growth(name: str, rounds: int = 3) -> float:
    """CPU time per token at 20,000 positions relative to 500, the best of several rounds."""
    best = microseconds(name, (SHORT, LONG), count=6, rounds=rounds)
    return best[LONG] / best[SHORT]


@pytest.mark.parametrize("name", FLAT)
def test_a_token_costs_the_same_at_any_position(name: str) -> None:
    measured = growth(name)
    assert measured < 1.7, f"{name}: {measured:.2f} times as long at {LONG} positions as at {SHORT}"


def test_a_copy_of_the_path_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Committer._accept_kv

    def copying(self: Committer, turn: Turn, outcome: Outcome) -> None:
        accept(self, turn, outcome)
        lane = turn.job.lane
        self.runner.cache.seal(self.tree.path(lane.branch), self.runner.pool.slots(lane.table, 0, lane.computed), turn.start)

    monkeypatch.setattr(Committer, "_accept_kv", copying)
    assert growth("greedy", rounds=1) > 3


def test_the_stand_in_generates_what_it_should() -> None:
    """Otherwise its times would say nothing: every branch commits a token per step, with rows and pages."""
    subject = host_engine(2048, 4096)
    given = branches(subject, 100, 3, sites="S")
    assert generate(subject, given) == 48
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
