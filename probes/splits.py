"""Splits: which rows a probe is fitted on and which it is tested on. Always by root prompt.

A root's fold is the rank of a hash of its id and the seed among the roots that have rows there: the same root has the same fold
at every site, layer and label of a position, and at every position that the same roots have rows of. Where only some have
(`step:3`), ranks are theirs, and a root's fold can be another one. Two branches of a root are never on both sides; a split that
would have them there is refused, not repaired.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from replaylens.probes.errors import BadRows, ProbeError, RootOnBothSides, TooFewRoots
from replaylens.probes.paths import row_paths
from replaylens.probes.rows import ProbeRows
from replaylens.tasks.splits import is_test_root


@dataclass(frozen=True, eq=False)
class Split:
    """Pairs of masks over the rows it was made for. RootOnBothSides where a pair shares a root."""

    name: str
    train: np.ndarray
    """[folds, rows] bool"""
    test: np.ndarray
    """[folds, rows] bool"""
    roots: np.ndarray
    """[rows]"""

    def __post_init__(self) -> None:
        if (self.test.sum(0) > 1).any():
            raise ProbeError(f"split {self.name!r} tests a row in several folds: a row has one held-out prediction")
        for number, (train, test) in enumerate(self):
            both = np.intersect1d(self.roots[train], self.roots[test])
            if len(both):
                raise RootOnBothSides(
                    f"split {self.name!r}, fold {number}: root {both[0]} and {len(both) - 1} more are on both sides. "
                    f"Branches of a prompt share its tokens: split by root, as by_root, length and the others do"
                )
            if not train.any() or not test.any():
                raise TooFewRoots(f"split {self.name!r}, fold {number}: {train.sum()} rows to fit, {test.sum()} to test")

    def __len__(self) -> int:
        return len(self.train)

    @property
    def digest(self) -> str:
        """Of which rows are fitted on and tested in which fold, whatever the split is called."""
        return hashlib.sha256(repr(self.train.shape).encode() + self.train.tobytes() + self.test.tobytes()).hexdigest()

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from zip(self.train, self.test, strict=True)

    def __getitem__(self, chosen: np.ndarray) -> "Split":
        """The same split of some of the rows, by a mask or by numbers."""
        return Split(self.name, self.train[:, chosen], self.test[:, chosen], self.roots[chosen])


def fold_of_roots(roots: np.ndarray, folds: int, seed: int = 0) -> np.ndarray:
    """The fold of each row, by its root; folds differ by one root at most. TooFewRoots where some would be empty."""
    different, place = np.unique(roots, return_inverse=True)
    if folds < 2 or len(different) < folds:
        raise TooFewRoots(f"{len(different)} root prompts for {folds} folds: give at least 2 folds, and a root for each")
    keys = [hashlib.sha256(f"{seed}:{root}".encode()).hexdigest() for root in different]
    rank = np.empty(len(different), dtype=np.int64)
    rank[np.argsort(keys, kind="stable")] = np.arange(len(different))
    return rank[place] % folds


def by_root(rows: ProbeRows, folds: int = 5, seed: int = 0) -> Split:
    """Cross-validation over roots: every row is tested once, by a probe that saw nothing of its prompt."""
    return _crossed("root", rows, np.ones(len(rows), bool), np.ones(len(rows), bool), folds, seed)


def _crossed(name: str, rows: ProbeRows, fit: np.ndarray, test: np.ndarray, folds: int, seed: int) -> Split:
    """Fit on some rows of the other folds' roots, test on some rows of this fold's."""
    fold = fold_of_roots(rows.roots, folds, seed)
    inside = np.arange(folds)[:, None] == fold  # [folds, rows]
    return Split(name, ~inside & fit, inside & test, rows.roots)


def by_acceptance(rows: ProbeRows, fit_on: str = "accepted", folds: int = 5, seed: int = 0) -> Split:
    """Fit on accepted rows, test on rejected ones of other roots; or the other way round."""
    accepted = rows.frame["accepted"].to_numpy(dtype=bool)
    if fit_on not in ("accepted", "rejected"):
        raise ProbeError(f"fit_on {fit_on!r}: choose accepted or rejected")
    fit = accepted if fit_on == "accepted" else ~accepted
    return _crossed(f"fitted on {fit_on}", rows, fit, ~fit, folds, seed)


def by_depth(rows: ProbeRows, deepest: int, folds: int = 5, seed: int = 0) -> Split:
    """Fit where a branch is at most `deepest` tokens away from the accepted path, test beyond, on other roots."""
    shallow = (rows.frame["depth"] <= deepest).to_numpy()
    return _crossed(f"depth above {deepest}", rows, shallow, ~shallow, folds, seed)


def by_answer(rows: ProbeRows, folds: int = 5, seed: int = 0) -> Split:
    """Fit where the answer was right, test right and wrong answers of other roots."""
    right = rows.frame["correct"].to_numpy(dtype=bool)
    return _crossed("right answers", rows, right, np.ones(len(rows), bool), folds, seed)


def by_length(rows: ProbeRows, longest: int) -> Split:
    """Fit on prompts of at most `longest` steps, test on longer ones."""
    short = (rows.frame["steps"] <= longest).to_numpy()
    return _once(f"length above {longest}", rows, short, (rows.frame["steps"] > longest).to_numpy())


def by_part(rows: ProbeRows, fit_on: str, test_on: str) -> Split:
    """Fit on one part of joined rows, test on another; each keeps its own side of the tasks' roots.

    For shifts that need two dumps: other names, phrasing, p, rendering. Roots are told apart as `tasks.splits` does, so
    that a prompt that both parts have is on one side only.
    """
    known = sorted(set(rows.frame.get("part", [])))
    if fit_on not in known or test_on not in known:
        raise ProbeError(f"parts {fit_on!r} and {test_on!r}: these rows have {', '.join(known) or 'none; see ProbeRows.join'}")
    part = rows.frame["part"].to_numpy()
    held_out = np.array([is_test_root(root) for root in rows.roots])
    return _once(f"{fit_on} to {test_on}", rows, (part == fit_on) & ~held_out, (part == test_on) & held_out)


def by_names(rows: ProbeRows, held_out: set[str]) -> Split:
    """Fit on prompts without these names, test on prompts with none but these; mixed prompts are left out.

    Names are looked for in the whole paths of a prompt, whichever rows of them are given.
    """
    if "name" not in rows.frame:
        raise ProbeError("the task has no label 'name': names cannot be held out")
    whole = _whole_paths(rows)
    named = whole.loc[whole["name"].notna(), ["root", "name"]]
    inside = named["name"].isin(held_out)
    some, others = set(named.loc[inside, "root"]), set(named.loc[~inside, "root"])
    return _once("names", rows, ~np.isin(rows.roots, list(some)), np.isin(rows.roots, list(some - others)))


def by_phrase(rows: ProbeRows, word: str) -> Split:
    """Fit on prompts without this token (" not", say) on any of their branches, test on those with it on the accepted one.

    The token is looked for in the whole paths of a prompt, whichever rows of them are given.
    """
    whole = _whole_paths(rows)
    found = whole[whole["text"] == word]
    accepted = found.loc[found["accepted"].astype(bool), "root"]
    fit, test = (np.isin(rows.roots, roots.unique().tolist()) for roots in (found["root"], accepted))
    return _once(f"phrasing with {word.strip()!r}", rows, ~fit, test)


def _whole_paths(rows: ProbeRows) -> pd.DataFrame:
    """All rows that these were narrowed from. BadRows where they have holes: a word might be hidden there."""
    if not all(path.whole.all() for path in row_paths(rows.whole.frame)):
        raise BadRows("what a prompt holds is read off whole paths: dump all positions, and narrow the rows of the whole dump")
    return rows.whole.frame


def by_mask(rows: ProbeRows, name: str, fit: np.ndarray, test: np.ndarray) -> Split:
    """Any split of your own; refused where a root would be on both sides."""
    return _once(name, rows, fit, test)


def _once(name: str, rows: ProbeRows, fit: np.ndarray, test: np.ndarray) -> Split:
    return Split(name, np.asarray(fit, bool)[None], np.asarray(test, bool)[None], rows.roots)
