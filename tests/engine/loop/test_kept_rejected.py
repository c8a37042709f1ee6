"""Forks of rejected drafts: tokens, KV and captured rows equal those of the same path forced on a fresh engine."""

from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.serving.branch import Branch
from tests.toy_model import engine

PROMPT = [1, 2, 3, 4, 5]


def rejected_of(subject: Engine, rows: bool, **options: Any) -> tuple[Branch, list[Branch]]:
    branch = subject.prompt(PROMPT, keep_rejected=rows, **options)
    branch.generate(10, drafter="tree", window=4, keep_pages=True)
    assert len(branch.rejected) > 2
    return branch, branch.rejected


def assert_like_forced(fork: Branch, at: int, sites: str) -> None:
    """Everything equals a branch on which the path up to `at` is forced and then continued."""
    fresh = engine().prompt(PROMPT, sites=sites)
    fresh.force(fork.tokens[len(PROMPT) : at]).generate(fork.length - at)
    assert fork.tokens == fresh.tokens and fork.certified
    assert torch.equal(fork.kv(), fresh.kv())
    assert fork.activations.positions() == fresh.activations.positions()
    for site in fresh.activations:
        assert torch.equal(fork.activations[site], fresh.activations[site]), site


@pytest.mark.parametrize("sites", ["STC", "SZ"])
@pytest.mark.parametrize("rows", [False, True])
def test_a_fork_of_a_kept_rejected_draft_keeps_its_capture(sites: str, rows: bool) -> None:
    subject = engine(canary=True)
    _, rejected = rejected_of(subject, rows, sites=sites)
    for other in rejected:
        (whole,), (part,) = other.fork(), other.fork(at=other.length - 1)
        assert_like_forced(whole.generate(3), other.length, sites)
        assert_like_forced(part.generate(3), other.length - 1, sites)
    subject.check_integrity()


def test_also_after_the_path_it_was_cut_from_went_elsewhere() -> None:
    subject = engine()
    branch, rejected = rejected_of(subject, False, sites="STC")
    (fork,) = rejected[-1].fork()
    length = rejected[-1].length
    branch.rollback(len(PROMPT)).force([9, 9, 9])
    (later,) = rejected[-1].fork()
    assert_like_forced(fork.generate(2), length, "STC")
    assert_like_forced(later.generate(2), length, "STC")


def test_rows_that_nobody_asked_for_are_not_there() -> None:
    """Without keep_rejected at the prompt, the rejected branch has no rows, and the error says how to get them."""
    _, rejected = rejected_of(engine(), False, sites="S")
    with pytest.raises(BadRequest, match="Nothing was captured"):
        _ = rejected[0].activations


def test_without_a_capture_a_fork_has_none() -> None:
    _, rejected = rejected_of(engine(), False)
    (fork,) = rejected[0].fork()
    with pytest.raises(BadRequest, match="Nothing was captured"):
        _ = fork.generate(2).activations
