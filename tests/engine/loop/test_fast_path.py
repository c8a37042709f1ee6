"""The fast path may compute anything: none of it reaches a deterministic request.

Here the fast path is wrong on purpose, so that the tests do not depend on whether this machine's library rounds both paths
alike.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.engine.reference import wrong_fast_path
from tests.toy_model import Reference, engine, toy

PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture(autouse=True)
def visibly_different() -> Iterator[None]:
    with wrong_fast_path():
        yield


def test_the_fast_path_is_different_here() -> None:
    """Negative control: KV of the fast path is not canonical."""
    fast = engine().prompt(PROMPT).generate(20, deterministic=False)
    assert not torch.equal(fast.kv(), Reference(toy(), fast.tokens).kv[: fast.lane.computed])


def test_kv_of_the_fast_path_is_not_shared() -> None:
    """A prompt that repeats tokens of the fast path is computed from the first non-canonical position on."""
    subject = engine()
    fast = subject.prompt(PROMPT).generate(20, deterministic=False)
    assert not fast.certified
    shared = subject.prefix.match(fast.tokens)
    assert shared == fast.lane.table.pages[: len(PROMPT) // 4], "of the prompt alone, which was computed canonically"
    again = subject.prompt(fast.tokens)
    assert again.certified and torch.equal(again.kv(), Reference(toy(), fast.tokens).kv)


def test_once_on_the_fast_path_a_branch_stays_uncertified() -> None:
    """Canonical tokens after fast ones read non-canonical KV: neither the branch nor its forks are certified or shared."""
    subject = engine()
    branch = subject.prompt(PROMPT).generate(6, deterministic=False).generate(10)
    (fork,) = branch.fork()
    fork.generate(8)
    for each in (branch, fork):
        assert not each.certified
        assert len(subject.prefix.match(each.tokens)) == len(PROMPT) // 4
