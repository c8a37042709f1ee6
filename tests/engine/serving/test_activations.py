"""`Branch.activations`: one row for every committed token, whatever is captured and whatever was computed so far."""

from collections.abc import Callable

import pytest
import torch

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from tests.engine.serving.test_kv import crowd_out
from tests.toy_model import continuation, engine, toy

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
EDIT = Edit("blocks.0.hook_in", "add", torch.linspace(-1, 1, 32), positions=4)
S = "blocks.1.hook_in"


def num_committed(branch: Branch) -> int:
    return sum(state in (TokenState.PROMPT, TokenState.ACCEPTED) for state in branch.record.states)


def assert_complete(branch: Branch) -> None:
    """All rows, those of a fresh engine that computes the whole path; Z.emitted is known unless no token follows."""
    rows = branch.activations
    assert rows.positions() == list(range(num_committed(branch)))
    fresh = engine().prompt(branch.tokens, sites="STCZ", edits=[EDIT] if branch.lane.edits else [])
    for site, x in rows.items():
        y = fresh.activations[site][: len(x)]
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), site
    unknown = rows["Z.emitted"].isnan().all(-1).tolist()
    assert unknown == [p + 1 == branch.length for p in range(len(unknown))]


def test_asking_for_z_drops_no_row() -> None:
    subject = engine()
    plain, read = subject.prompt(PROMPT, sites="S"), subject.prompt(PROMPT, sites="STCZ")
    assert len(plain.activations[S]) == len(read.activations[S]) == len(read.activations["Z.kl"]) == 9
    assert torch.equal(plain.activations[S], read.activations[S])
    assert read.activations["Z.emitted"][-1].isnan().all() and not read.activations["Z.emitted"][:-1].isnan().any()


STORIES: dict[str, Callable[[Branch], Branch]] = {
    "prompt": lambda b: b,
    "generate": lambda b: b.generate(3),
    "generate, final": lambda b: b.generate(3, final=True),
    "generate twice, final": lambda b: b.generate(3, final=True).generate(2, drafter="lens", window=3),
    "force": lambda b: b.force([5, 6]),
    "force thrice": lambda b: b.force([5]).force([6]).force([7, 8]),
    "rollback": lambda b: b.generate(5).rollback(11),
    "rollback to the prompt": lambda b: b.generate(5).rollback(9),
    "rollback to the tip": lambda b: b.generate(2).rollback(11),
    "rollback of the open row": lambda b: b.force([5, 6]).rollback(10),
    "fork": lambda b: b.fork()[0],
    "fork within": lambda b: b.fork(at=6)[0],
    "fork of a fork": lambda b: b.fork(at=6)[0].fork()[0].force([1]),
    "fork and generate": lambda b: b.fork()[0].generate(2),
    "fork of a generated one": lambda b: b.generate(4).fork(at=11)[0],
    "edited fork": lambda b: b.fork(edits=[EDIT])[0],
    "edited fork of a generated one": lambda b: b.generate(3).fork(edits=[EDIT])[0],
    "edited fork, generated": lambda b: b.fork(edits=[EDIT])[0].generate(2),
}


@pytest.mark.parametrize("story", STORIES)
def test_every_committed_token_has_its_row(story: str) -> None:
    subject = engine(canary=True)
    branch = subject.prompt(PROMPT, sites="STCZ")
    told = STORIES[story](branch)
    states = told.states
    assert_complete(told)
    assert told.states == states, "a pending token stays pending"
    if told is not branch:
        assert_complete(branch)
    subject.check_integrity()
    length = told.length
    assert_complete(told.generate(2))
    if not told.lane.edits:
        assert told.tokens[length:] == continuation(toy(), told.tokens[:length], 2)


def test_a_recording_in_hand_is_completed_with_the_branch() -> None:
    branch = engine().prompt(PROMPT, sites="SZ")
    rows = branch.activations
    (fork,) = branch.fork(edits=[EDIT])
    held = fork.lane.recording
    assert held is not None and held.end == 4, "control: nothing is computed before somebody looks"
    assert fork.activations is held and held.end == 9
    branch.generate(2)
    assert branch.activations is rows and rows.end == 10


def test_rows_of_a_fork_of_a_rejected_draft() -> None:
    subject = engine()
    branch = subject.prompt(PROMPT, sites="STCZ", keep_rejected=True).generate(8, drafter="tree", window=4)
    rejected = branch.rejected[0]
    assert rejected.activations.positions() == list(range(rejected.record.fork_position, rejected.length))
    (fork,) = rejected.fork()
    assert_complete(fork)
    subject.check_integrity()


def test_rows_that_are_there_are_not_computed_again() -> None:
    subject = engine(cache_tokens=32)
    branch = subject.prompt(PROMPT, sites="SZ")
    crowd_out(subject, branch)
    assert branch.activations.end == 9 and branch.lane.computed == 0


def test_a_released_branch_shows_what_it_had() -> None:
    (fork,) = engine().prompt(PROMPT, sites="S").fork(edits=[EDIT])
    fork.release()
    assert fork.activations.end == 4


def test_chosen_positions() -> None:
    subject = engine()
    (fork,) = subject.prompt(PROMPT, sites="SZ", positions="all[::4]").fork(edits=[EDIT])
    assert fork.activations.positions() == [0, 4, 8] and len(fork.activations["Z.kl"]) == 3


def test_rows_of_a_branch_that_is_streamed() -> None:
    subject = engine()
    (fork,) = subject.prompt(PROMPT, sites="SZ").fork(edits=[EDIT])
    stream = fork.stream(4, window=1)
    assert fork.activations.end == 9, "no step was made yet"
    assert len(list(stream)) == 4 and fork.activations.end == 12
    subject.check_integrity()
