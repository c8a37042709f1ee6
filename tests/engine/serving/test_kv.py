"""`Branch.kv()` is the KV of every committed token, even if other requests have taken the branch's pages."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import OutOfPages
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from tests.toy_model import Reference, engine, toy

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def crowd_out(subject: Engine, branch: Branch) -> None:
    """Fill the cache until the idle branch loses its pages."""
    for first in range(10, 40, 10):
        subject.prompt([(first + i) % 50 for i in range(24)]).release()
    subject.prompt([(3 * i) % 50 for i in range(subject.runner.pool.num_pages * 4 - 1)]).release()
    assert branch.lane.computed == 0, "it was preempted"


def test_kv_of_a_preempted_branch_is_computed_again() -> None:
    subject = engine(cache_tokens=32, canary=True)
    branch = subject.prompt(PROMPT)
    truth = branch.kv()
    crowd_out(subject, branch)
    assert torch.equal(branch.kv(), truth) and len(truth) == 9
    assert branch.lane.computed == 9, "and it has its pages again"
    subject.check_integrity()
    assert branch.generate(4).tokens == engine().prompt(PROMPT).generate(4).tokens
    subject.check_integrity()


def test_a_pending_token_stays_pending() -> None:
    """The number of rows stays the same: the last generated token has none until another one follows."""
    subject = engine(cache_tokens=32)
    branch = subject.prompt(PROMPT, sites="SZ").generate(5)
    truth, states = branch.kv(), branch.states
    rows = {site: branch.activations[site] for site in branch.activations}
    assert len(truth) == branch.length - 1
    crowd_out(subject, branch)
    assert torch.equal(branch.kv(), truth) and branch.states == states
    assert all(torch.equal(branch.activations[site], x) for site, x in rows.items())
    assert torch.equal(truth, Reference(toy(), branch.tokens).kv[:-1])


def test_kv_of_a_preempted_rejected_draft() -> None:
    subject = engine(cache_tokens=64)
    branch = subject.prompt(PROMPT).generate(8, drafter="tree", window=4, keep_pages=True)
    rejected = branch.rejected[0]
    truth, tokens = rejected.kv(), rejected.tokens
    crowd_out(subject, rejected)
    assert torch.equal(rejected.kv(), truth) and rejected.tokens == tokens and len(truth) == len(tokens)
    assert torch.equal(truth, Reference(toy(), tokens).kv)
    subject.check_integrity()


def test_kv_of_a_fork_that_computed_nothing_yet() -> None:
    """An edited fork shares the KV before the edit. The rest is computed on demand."""
    subject = engine()
    branch = subject.prompt(PROMPT)
    edit = Edit("blocks.0.hook_in", "add", torch.linspace(-1, 1, 32), positions=4)
    (fork,) = branch.fork(edits=[edit])
    fresh = engine().prompt(PROMPT, edits=[edit])
    assert torch.equal(fork.kv(), fresh.kv()) and not torch.equal(fork.kv(), branch.kv())
    subject.check_integrity()


def test_kv_of_a_preempted_branch_that_is_streamed() -> None:
    subject = engine(cache_tokens=32)
    branch = subject.prompt(PROMPT)
    stream = branch.stream(6, window=1)
    first = next(stream)
    subject.loop.reservations.drop_pages(branch.lane)
    length = branch.length
    kv = branch.kv()
    assert torch.equal(kv, Reference(toy(), branch.tokens).kv[: length - 1])
    assert [first, *stream] == engine().prompt(PROMPT).generate(6).generated
    subject.check_integrity()


def test_kv_that_cannot_be_computed_again_says_so() -> None:
    subject = engine(cache_tokens=32)
    branch = subject.prompt(PROMPT)
    subject.loop.reservations.drop_pages(branch.lane)
    subject.prefix.clear()
    taken = [subject.runner.pool.share([], 0) for _ in range(1)]
    subject.runner.reserve(taken[0], 0, 30)
    with pytest.raises(OutOfPages, match="3 pages"):
        branch.kv()
    subject.runner.pool.release(taken[0])
    assert len(branch.kv()) == 9
    assert subject.loop.jobs == [] and list(subject.loop.lanes) == [branch.id]
