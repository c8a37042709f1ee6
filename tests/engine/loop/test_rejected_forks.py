"""A fork of a rejected draft has the rows of its own path and none of the main path's."""

import pytest
import torch

from replaylens.engine.serving.branch import Branch
from tests.toy_model import VOCAB, Reference, continuation, engine, toy

PROMPT = [1, 2, 3, 4, 5]
SITES = ["blocks.0.hook_in", "blocks.1.hook_out", "blocks.1.mlp.hook_out"]


def assert_own_rows(branch: Branch) -> None:
    alone = Reference(toy(), branch.tokens, SITES)
    assert branch.activations.positions() == list(range(branch.length))
    for site in SITES:
        assert torch.equal(branch.activations[site], alone.rows[site]), site
    assert torch.equal(branch.kv(), alone.kv)


@pytest.mark.parametrize("stood", [0, 1, 3])
@pytest.mark.parametrize("keeps_pages", [False, True])
def test_rows_after_the_fork_are_not_the_main_paths(stood: int, keeps_pages: bool) -> None:
    """The main path is captured well beyond the position where the draft forks."""
    truth = continuation(toy(), PROMPT, 12)
    wrong = [*truth[:stood], *((token + 1) % VOCAB for token in truth[stood : stood + 4])]
    subject = engine()
    branch = subject.prompt(PROMPT, sites=SITES, keep_rejected=True)
    branch.generate(12, drafter="forced", drafts={len(PROMPT): [wrong]}, keep_pages=keeps_pages, final=True)
    (rejected,) = branch.rejected
    assert rejected.tokens == [*PROMPT, *wrong] and branch.activations.end > rejected.length
    (child,) = rejected.fork()
    subject.forest.compute([child.lane])
    assert_own_rows(child)
    assert_own_rows(child.generate(3, final=True))
    assert_own_rows(branch)
    main = branch.activations[SITES[1]][len(PROMPT) + stood : rejected.length]
    mine = child.activations[SITES[1]][len(PROMPT) + stood : rejected.length]
    assert not any(torch.equal(a, b) for a, b in zip(main, mine, strict=True)), "the control: the two paths differ there"


def test_a_fork_before_the_draft_and_one_within_it() -> None:
    truth = continuation(toy(), PROMPT, 12)
    wrong = [truth[0], *((token + 1) % VOCAB for token in truth[1:5])]
    branch = engine().prompt(PROMPT, sites=SITES, keep_rejected=True)
    branch.generate(12, drafter="forced", drafts={len(PROMPT): [wrong]}, final=True)
    (rejected,) = branch.rejected
    for at in (len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 2, rejected.length):
        (child,) = rejected.fork(at=at)
        assert_own_rows(child.generate(2, final=True))
