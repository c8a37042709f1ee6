"""`PathHistory`: what it knows about a path after any history is what the path itself says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens.engine.memory.path import PathHistory
from replaylens.engine.memory.tree import BranchTree, TokenState
from replaylens.engine.request.sampling import Sampling

VOCAB = 7
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=5)
STEPS = st.lists(st.tuples(st.sampled_from(["append", "roll back", "draft", "ask", "mark"]), TOKENS, st.integers(0, 30)))


def continued(path: list[int], size: int, count: int) -> list[int] | None:
    """What followed the latest earlier occurrence of the last `size` tokens, by search."""
    for at in range(len(path) - size - 1, -1, -1):
        if path[at : at + size] == path[-size:]:
            return path[at + size : at + size + count]
    return None


@settings(max_examples=150, deadline=None)
@given(prompt=TOKENS.filter(bool), steps=STEPS, tail=TOKENS)
def test_facts_after_any_history(prompt: list[int], steps: list[tuple[str, list[int], int]], tail: list[int]) -> None:
    tree = BranchTree()
    branch = tree.plant(prompt)
    record = tree.branch(branch)
    marks = []
    for what, tokens, number in [*steps, ("ask", [], 0)]:
        match what:
            case "append":
                tree.append(branch, tokens, TokenState.DRAFT)
            case "roll back":
                tree.rollback(branch, max(len(prompt), len(record.tokens) - number))
            case "draft":  # as a verification does: drafts are written, judged, and cut off
                tree.append(branch, tokens, TokenState.DRAFT)
                tree.rollback(branch, len(record.tokens) - len(tokens))
            case "mark":
                length = min(number, len(record.tokens))
                marks.append((record.past.mark(length), record.tokens[:length]))
            case "ask":
                path, plain = record.past.path(len(record.tokens), tail), [*record.tokens, *tail]
                for start in (0, len(prompt), len(plain)):
                    assert set(path.distinct(start).tolist()) == set(plain[start:])
                bare = record.past.path(len(record.tokens))
                for size in range(1, min(4, len(bare))):
                    assert bare.continuation(size, 3) == continued(record.tokens, size, 3)
        for mark, tokens_then in marks:
            assert record.tokens[: mark.length] == tokens_then[: mark.length], "a mark never covers a changed token"


@settings(max_examples=60, deadline=None)
@given(own=TOKENS, tail=TOKENS, first=st.integers(-9, 9), last=st.integers(-9, 9), step=st.sampled_from([None, 1, 2, -1]))
def test_a_path_reads_as_a_list(own: list[int], tail: list[int], first: int, last: int, step: int | None) -> None:
    plain = [*own, *tail]
    path = PathHistory([*own, 5, 5]).path(len(own), tail)  # later tokens of the branch do not belong to it
    assert len(path) == len(plain) and list(path) == plain and path == plain
    assert path[first:last:step] == plain[first:last:step] and path[first:] == plain[first:]
    assert [path[i] for i in range(-len(plain), len(plain))] == plain + plain
    with pytest.raises(IndexError):
        path[len(plain)]


@settings(max_examples=60, deadline=None)
@given(own=TOKENS.filter(bool), tail=TOKENS, num_prompt=st.integers(0, 4), seed=st.integers(0, 3))
def test_sampling_chooses_as_from_a_list(own: list[int], tail: list[int], num_prompt: int, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
    for temperature in (0.0, 0.9):
        sampling = Sampling(temperature=temperature, seed=seed, repetition_penalty=1.7, presence_penalty=0.8)
        path, num = PathHistory(own).path(len(own), tail), min(num_prompt, len(own))
        assert sampling.choose(logits, path, num) == sampling.choose(logits, [*own, *tail], num)


def test_a_mark_of_another_branch_compares_tokens() -> None:
    mark = PathHistory([1, 2, 3, 4]).mark(3)
    other = PathHistory([1, 2, 9, 4])
    assert mark.common(other.path(4)) == 2 and mark.common(PathHistory([1, 2, 3, 4]).path(4)) == 3


def test_what_was_removed_is_not_continued() -> None:
    """A branch was asked, rolled back, and grew as long as before, with other tokens."""
    tree = BranchTree()
    record = tree.branch(branch := tree.plant([1]))
    tree.append(branch, [2, 3, 1, 5, 9], TokenState.DRAFT)
    assert record.past.path(6).continuation(1, 2) is None and set(record.past.path(6).distinct().tolist()) == {1, 2, 3, 5, 9}
    tree.rollback(branch, 1)
    tree.append(branch, [4, 4, 4, 4, 1], TokenState.DRAFT)
    assert record.past.path(6).continuation(1, 2) == [4, 4], "after the 1 that is there, not after the one that was"
    assert set(record.past.path(6).distinct().tolist()) == {1, 4}
