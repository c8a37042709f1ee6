"""Splits: every fold is checked for roots on both sides; held-out names and words are held out everywhere."""

import numpy as np
import pytest

from replaylens.probes import splits
from replaylens.probes.errors import ProbeError, RootOnBothSides, TooFewGroups
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import Split
from tests.probes.synthetic import rows_of

FOLDS = 3


def masks(roots: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Three folds over six roots of two rows each, with two roots tested per fold: (train, test)."""
    fold = np.array([int(root) // 2 for root in roots])
    test = np.arange(FOLDS)[:, None] == fold
    return ~test, test


@pytest.mark.parametrize("fold", range(FOLDS))
def test_a_root_on_both_sides_is_found_in_every_fold(fold: int) -> None:
    """One row of one tested root is in the training set of a single fold."""
    roots = [str(i // 2) for i in range(12)]
    train, test = masks(roots)
    assert len(Split("sound", train, test, np.array(roots))) == FOLDS
    leaked = int(np.flatnonzero(test[fold])[-1])
    train[fold, leaked] = True
    test[fold, leaked] = False
    with pytest.raises(RootOnBothSides, match=f"fold {fold}: root {roots[leaked]} and 0 more"):
        Split("leaky", train, test, np.array(roots))


@pytest.mark.parametrize("fold", range(FOLDS))
@pytest.mark.parametrize("side", [0, 1])
def test_an_empty_side_is_found_in_every_fold(fold: int, side: int) -> None:
    roots = [str(i // 2) for i in range(12)]
    both = masks(roots)
    both[side][fold] = False
    with pytest.raises(TooFewGroups, match=f"fold {fold}: "):
        Split("empty", *both, np.array(roots))


def test_a_row_is_tested_once() -> None:
    roots = [str(i // 2) for i in range(12)]
    train, test = masks(roots)
    test[2, 0], train[2, :2] = True, False
    with pytest.raises(ProbeError, match="several folds"):
        Split("twice", train, test, np.array(roots))


# Names


NAMES = [("Ann", "Bob"), ("Cid", "Cid"), ("Ann", "Cid"), ("Cid", "Dan"), ("Dan", "Cid"), ("Bob", "Bob")] * 3


def test_prompts_with_held_out_and_other_names_are_on_neither_side() -> None:
    """Held-out names are tested only on prompts without other names: elsewhere the probe could read a known name."""
    rows = rows_of(roots=len(NAMES), name=np.array(NAMES).ravel())
    split = splits.by_names(rows, {"Cid", "Dan"})
    held = {"Cid", "Dan"}
    by_root = dict(zip(rows.roots[::2], NAMES, strict=True))
    fitted, tested = set(rows.roots[split.train[0]]), set(rows.roots[split.test[0]])
    assert fitted == {root for root, names in by_root.items() if not set(names) & held}
    assert tested == {root for root, names in by_root.items() if set(names) <= held}
    left_out = set(by_root) - fitted - tested
    assert {by_root[root] for root in left_out} == {("Ann", "Cid")}, "the control: there are mixed prompts"


# Words


WORD = " not"


def branching(accepted_has: list[bool], rejected_has: list[bool]) -> ProbeRows:
    """Prompts of two tokens, the second with a rejected draft. The flags say whether the accepted or rejected one is WORD."""
    texts = [
        [" x", WORD if accepted else " x", WORD if rejected else " y"]
        for accepted, rejected in zip(accepted_has, rejected_has, strict=True)
    ]
    roots = len(texts)
    return rows_of(
        roots=roots,
        per_root=3,
        text=np.array(texts).ravel(),
        branch=np.tile([0, 0, 1], roots),
        position=np.tile([0, 1, 1], roots),
        fork_position=np.tile([0, 0, 1], roots),
        depth=np.tile([0, 0, 1], roots),
        accepted=np.tile([True, True, False], roots),
    )


def test_a_word_on_a_rejected_branch_keeps_its_prompt_out_of_the_fit() -> None:
    """The probe is also fitted on rows of rejected branches, so it has seen a word there."""
    kinds = [(False, False), (True, False), (False, True), (True, True)] * 3
    rows = branching(*map(list, zip(*kinds, strict=True)))
    by_root = dict(zip(rows.roots[::3], kinds, strict=True))
    for here in (rows, rows.accepted()):
        split = splits.by_phrase(here, WORD)
        fitted, tested = set(here.roots[split.train[0]]), set(here.roots[split.test[0]])
        assert fitted == {root for root, kind in by_root.items() if kind == (False, False)}
        assert tested == {root for root, (accepted, _) in by_root.items() if accepted}
