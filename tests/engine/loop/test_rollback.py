"""Rollbacks: what remains of rejected drafts, ends of text and interrupts."""

import pytest

from replaylens.engine.memory.tree import ACCEPTED, PROMPT, BranchStatus
from replaylens.engine.request.sampling import Sampling
from tests.engine.canonical import SITES, assert_canonical
from tests.toy_model import VOCAB, continuation, engine, scripted_model, toy


def test_finish_reason_not_cleared_after_rollback() -> None:
    """The finish reason goes with the token that caused it, and comes back with it."""
    subject, sampling = engine(scripted_model({6: 40})), Sampling(stop_tokens=(40,))
    branch = subject.prompt([1, 2, 3]).generate(20, sampling=sampling, window=4)
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 40], "eos")
    branch.rollback(branch.length - 1)
    assert branch.finish_reason is None and branch.status is BranchStatus.OPEN
    branch.generate(20, sampling=sampling, window=2)
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 40], "eos")
    branch.rollback(branch.length).generate(3)  # reopened in place: nothing is cut, but the finish reason is derived again
    assert branch.generated == [4, 5, 6, 40, 41, 42, 43] and branch.finish_reason is None


@pytest.mark.parametrize("chain", [[40], [5, 40], [9, 40], [5, 6, 40]])
def test_eos_inside_the_rejected_part(chain: list[int]) -> None:
    """A drafted EOS that is rejected ends nothing."""
    branch = engine(scripted_model({})).prompt([1, 2, 3])
    drafts = {4: [chain]}
    branch.generate(8, sampling=Sampling(stop_tokens=(40,)), drafter="forced", drafts=drafts)
    assert branch.generated == [4, 5, 6, 7, 8, 9, 10, 11]
    assert branch.finish_reason is None and branch.status is BranchStatus.OPEN


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("window", [1, 2, 8])
def test_drafts_after_an_accepted_eos(window: int, final: bool) -> None:
    """Drafts after the end are rejected, even if the verifier would have said the same."""
    branch = engine(scripted_model({6: 40})).prompt([1, 2, 3], sites=SITES)
    drafts = {3: [[4, 5, 6, 40, 41, 42, 43][: window - 1]]}
    branch.generate(20, sampling=Sampling(stop_tokens=(40,)), drafter="forced", drafts=drafts, final=final)
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 40], "eos")
    assert branch.lane.computed == branch.length - (0 if final else 1)
    assert_canonical(branch)


def test_a_rejected_stop_string() -> None:
    """A stop string completed by a draft ends the request only if the draft is accepted. Nothing after it remains."""
    subject, sampling = engine(scripted_model({})), Sampling(stop=("7 50", "8 9"))
    branch = subject.prompt([1, 2, 3])
    branch.generate(20, sampling=sampling, drafter="forced", drafts={6: [[7, 50, 51]]})
    assert (branch.generated, branch.finish_reason) == ([4, 5, 6, 7, 8, 9], "stop"), "7 50 was drafted, not said"
    right = subject.prompt([1, 2, 3]).generate(20, sampling=sampling, drafter="forced", drafts={6: [[7, 8, 9, 10, 11]]})
    assert (right.generated, right.finish_reason) == (branch.generated, "stop"), "10 and 11 were right, but after the end"


def test_a_rolled_back_bonus_token_leaving_its_kv() -> None:
    """The bonus token T4 is computed and rolled back: its slot is freed, and another token at that position has its own KV."""
    branch = engine().prompt([1, 2, 3], sites=SITES)
    truth = continuation(toy(), [1, 2, 3], 6)
    branch.generate(5, drafter="forced", drafts={4: [truth[1:4]]}, final=True)
    assert branch.record.states == [PROMPT] * 3 + [ACCEPTED] * 5
    branch.rollback(7)
    assert branch.lane.table.length == branch.lane.computed == 7
    assert len(branch.activations[SITES[0]]) == 7
    branch.force([(truth[4] + 1) % VOCAB])
    assert_canonical(branch)
    branch.rollback(7).generate(2)
    assert branch.generated == truth
    assert_canonical(branch)


def test_an_interrupt_leaving_drafts_behind() -> None:
    """Drafts are in the tree during a pass. If the pass is interrupted, they must not count as tokens later."""
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


def test_a_stop_string_in_forced_text_ending_the_generation() -> None:
    """Only the model's own text can stop it. A stop string may begin in forced text, but must end after it."""
    subject = engine(scripted_model({}))
    branch = subject.prompt([1, 2, 3]).force([20, 21, 22])
    branch.generate(4, sampling=Sampling(stop=("20 21",)))
    assert (branch.generated, branch.finish_reason) == ([20, 21, 22, 23, 24, 25, 26], None)
    across = subject.prompt([1, 2, 3]).force([20, 21]).generate(9, sampling=Sampling(stop=("21 22",)))
    assert (across.generated, across.finish_reason) == ([20, 21, 22], "stop")


@pytest.mark.parametrize("window", [1, 4])
def test_every_token_is_called_what_it_is(window: int) -> None:
    """Nobody verified a forced token, and nobody drafted a sampled one: none of them is "accepted". The words follow from the
    path and the calls, not from drafts."""
    branch = engine().prompt([1, 2]).generate(2, window=window).force([9, 9]).generate(2, window=window)
    words = ["prompt"] * 2 + ["generated"] * 2 + ["forced"] * 2 + ["generated", "pending"]
    assert branch.states == words
    (early,), (late,) = branch.fork(at=5), branch.fork(at=7)
    assert early.generate(2, window=window).states == [*words[:5], "generated", "pending"], "a forced span cut by a fork"
    assert late.force([9]).states == [*words[:7], "forced"] and branch.states == words
    assert branch.rollback(5).states == words[:5] and branch.generate(2).states == [*words[:5], "generated", "pending"]
    assert branch.rollback(3).force([9]).rollback(3).generate(1).states == [*words[:3], "pending"], "nothing is left of a force"


def test_a_fork_of_a_rejected_draft_was_asked_for() -> None:
    subject = engine()
    branch = subject.prompt([1, 2]).generate(4, drafter="forced", drafts={3: [[50, 51]]}, keep_pages=True)
    (cut,) = branch.rejected
    assert cut.states == ["prompt", "prompt", "generated", "rejected", "rejected"]
    assert cut.fork()[0].states == ["prompt", "prompt", "generated", "forced", "forced"]
