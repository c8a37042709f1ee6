"""Branches that nobody holds are released: at the end of a `with` block, and when their last handle is gone."""

import gc
import threading
import warnings

import pytest
import torch

from replaylens.engine.errors import ClosedBranch, EqualDraws
from replaylens.engine.memory.tree import BranchStatus
from replaylens.engine.request.sampling import Sampling
from tests.toy_model import continuation, engine, toy

DRAWN = Sampling(temperature=1.0, ignore_eos=True)


def seeds(n: int, first: int = 0) -> list[Sampling]:
    return [Sampling(temperature=1.0, seed=first + i, ignore_eos=True) for i in range(n)]


def test_with_releases_on_exit() -> None:
    subject = engine()
    with subject.prompt([1, 2, 3]) as root, root.fork()[0] as fork:
        assert len(subject.loop.lanes) == 2
    assert root.status is fork.status is BranchStatus.RELEASED and not subject.loop.lanes
    with subject.prompt([1, 2, 3]) as early:
        early.release()  # a second release is an error; leaving the block is not
    with pytest.raises(ZeroDivisionError), subject.prompt([1]) as failed:
        raise ZeroDivisionError
    assert failed.status is BranchStatus.RELEASED
    with pytest.raises(ClosedBranch):
        failed.release()


def test_dropped_forks_are_released_before_the_next_call() -> None:
    """Nothing runs when a handle is dropped; the engine releases the branch before its next call."""
    subject = engine()
    root = subject.prompt([1, 2, 3])
    forks = root.fork(5)
    kept = forks[2]
    del forks
    assert len(subject.loop.lanes) == 6, "a finalizer only leaves a note"
    assert root.length == 3
    assert sorted(subject.loop.lanes) == [root.id, kept.id]
    assert kept.generate(2).length == 5  # negative control: what is held stays open
    subject.check_integrity()


def test_a_thousand_branches_dropped_at_once_are_freed() -> None:
    """Releasing one must not begin the release of the next within it."""
    subject = engine(cache_tokens=4096)
    root = subject.prompt([1, 2, 3, 4, 5])
    forks = root.fork(1000)
    del forks
    gc.collect()
    assert root.generate(3).generated == continuation(toy(), [1, 2, 3, 4, 5], 3)
    assert list(subject.loop.lanes) == [root.id]
    subject.check_integrity()


def test_rounds_of_dropped_forks_leave_nothing_behind() -> None:
    """Rounds of forks, which together take more pages than there are. No branch of a round is left to the next."""
    subject = engine(cache_tokens=256)
    root = subject.prompt(list(range(40)))
    for number in range(6):
        subject.generate(root.fork(8), 12, sampling=seeds(8, 100 * number))
        gc.collect()
        assert root.length == 40 and list(subject.loop.lanes) == [root.id]
    assert root.lane.computed == 40, "the root kept its pages"
    subject.check_integrity()


def test_the_root_of_held_forks_keeps_its_shared_pages() -> None:
    """Idle branches give up their own pages before those they share, or else each new fork computes the prompt again."""
    subject = engine(cache_tokens=512)
    root, held = subject.prompt(list(range(40))), []
    for number in range(8):
        held += subject.generate(root.fork(10), 12, sampling=seeds(10, 10 * number))
        assert root.lane.computed >= 32, "its two whole pages"
    subject.check_integrity()
    alone = engine().prompt(list(range(40))).generate(12, sampling=seeds(1, 3)[0])
    assert held[3].tokens == alone.tokens and torch.equal(held[3].kv(), alone.kv())


def test_rejected_branches_hold_the_branch_they_were_cut_from() -> None:
    subject = engine(record=True)
    cut = subject.prompt([1, 2, 3], sites="S", keep_rejected=True).generate(6, drafter="tree", window=3).rejected
    assert cut and subject.loop.lanes
    rows = cut[0].activations["blocks.0.hook_in"]
    assert len(rows) and cut[0].status is BranchStatus.REJECTED
    count = len(subject.trace.events)
    del cut
    subject.check_integrity()
    assert not subject.loop.lanes
    assert len(subject.trace.events) == count, "when Python frees a handle is not part of the trace"


def test_a_stream_holds_its_branch() -> None:
    subject = engine()
    stream = subject.prompt([1, 2, 3]).stream(5)
    gc.collect()
    tokens = list(stream)
    assert tokens == subject.prompt([1, 2, 3]).generate(5).generated
    del stream
    assert subject.prompt([1]).length == 1 and not any(lane.streamed for lane in subject.loop.lanes.values())


def test_handles_dropped_by_other_threads() -> None:
    """Threads fork, generate and drop while others do the same. Their tokens are those of a quiet engine."""
    subject, found = engine(cache_tokens=1024), {}
    root = subject.prompt([5, 6, 7])

    def work(number: int) -> None:
        for round_ in range(6):
            (fork,) = root.fork()
            found[number, round_] = fork.generate(4, sampling=seeds(1, 10 * number + round_)[0]).tokens

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert root.length == 3 and list(subject.loop.lanes) == [root.id]
    subject.check_integrity()
    for (number, round_), tokens in found.items():
        assert tokens == root.fork()[0].generate(4, sampling=seeds(1, 10 * number + round_)[0]).tokens


# ---- equal draws -----------------------------------------------------------------------------------------------------


def test_forks_with_one_seed_warn() -> None:
    subject = engine()
    root = subject.prompt([1, 2, 3])
    with pytest.warns(EqualDraws, match="same seed, 0"):
        forks = subject.generate(root.fork(3), 6, sampling=DRAWN)
    assert len({tuple(fork.tokens) for fork in forks}) == 1
    with pytest.warns(EqualDraws, match="same seed, 7"):  # one after another, too
        forks = [fork.generate(6, sampling=seeds(1, 7)[0]) for fork in root.fork(3)]


def test_other_draws_do_not_warn() -> None:
    """Negative control: other seeds, positions, edits or parents, greedy forks, and a branch that goes on."""
    subject = engine()
    root, other = subject.prompts([[1, 2, 3], [1, 2, 3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", EqualDraws)
        subject.generate(root.fork(3), 4, sampling=seeds(3))
        subject.generate([*other.fork(), *root.fork(at=2)], 4, sampling=DRAWN)
        subject.generate(root.fork(3), 4)
        root.generate(2, sampling=DRAWN).generate(2, sampling=DRAWN)
