"""Splits: the rows to fit a probe on and the rows to test it on, always by root prompt.

A root's fold is its rank, by a hash of its id and the seed, among the roots with rows at a position. So a root has the same
fold at every site, layer and label, and at every position with the same roots. At a position that only some roots have
(`step:3`), they are ranked among themselves, and a root's fold can differ. Branches of one root are never on both sides; a
split that would separate them is rejected, not repaired.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from replaylens.probes.errors import BadRows, ProbeError, RootOnBothSides, TooFewRoots
from replaylens.probes.paths import row_paths
from replaylens.probes.rows import ProbeRows


@dataclass(frozen=True, eq=False)
class Split:
    """Pairs of masks over rows. Raises RootOnBothSides if a pair shares a root."""

    name: str
    train: np.ndarray
    """[folds, rows] bool"""
    test: np.ndarray
    """[folds, rows] bool"""
    roots: np.ndarray
    """[rows]"""

    def __post_init__(self) -> None:
        if (self.test.sum(0) > 1).any():
            raise ProbeError(f"Split {self.name!r} tests a row in several folds. Test each row at most once.")
        for number, (train, test) in enumerate(self):
            both = np.intersect1d(self.roots[train], self.roots[test])
            if len(both):
                raise RootOnBothSides(
                    f"Split {self.name!r}, fold {number}: root {both[0]} and {len(both) - 1} more are on both sides. "
                    f"Branches of a prompt share its tokens: split by root, as by_root and by_length do."
                )
            if not train.any() or not test.any():
                raise TooFewRoots(
                    f"Split {self.name!r}, fold {number}: {train.sum()} rows to fit on, {test.sum()} to test. Give more roots."
                )

    def __len__(self) -> int:
        return len(self.train)

    @property
    def digest(self) -> str:
        """Hash of the masks, whatever the split's name."""
        return hashlib.sha256(repr(self.train.shape).encode() + self.train.tobytes() + self.test.tobytes()).hexdigest()

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from zip(self.train, self.test, strict=True)

    def __getitem__(self, chosen: np.ndarray) -> "Split":
        """The same split of some of the rows, selected by a mask or by numbers."""
        return Split(self.name, self.train[:, chosen], self.test[:, chosen], self.roots[chosen])


def fold_of_roots(roots: np.ndarray, folds: int, seed: int = 0) -> np.ndarray:
    """The fold of each row, by its root; sizes differ by at most one root. Raises TooFewRoots if a fold would be empty."""
    different, place = np.unique(roots, return_inverse=True)
    if folds < 2 or len(different) < folds:
        raise TooFewRoots(f"{len(different)} root prompts for {folds} folds. Give at least 2 folds, and one root for each.")
    keys = [hashlib.sha256(f"{seed}:{root}".encode()).hexdigest() for root in different]
    rank = np.empty(len(different), dtype=np.int64)
    rank[np.argsort(keys, kind="stable")] = np.arange(len(different))
    return rank[place] % folds


def by_root(rows: ProbeRows, folds: int = 5, seed: int = 0) -> Split:
    """Cross-validation over roots: every row is tested once, by a probe that never saw its prompt."""
    return _crossed("root", rows, np.ones(len(rows), bool), np.ones(len(rows), bool), folds, seed)


def _crossed(name: str, rows: ProbeRows, fit: np.ndarray, test: np.ndarray, folds: int, seed: int) -> Split:
    """Fit on some rows of the other folds' roots, test on some rows of this fold's."""
    fold = fold_of_roots(rows.roots, folds, seed)
    inside = np.arange(folds)[:, None] == fold  # [folds, rows]
    return Split(name, ~inside & fit, inside & test, rows.roots)


def by_acceptance(rows: ProbeRows, fit_on: str = "accepted", folds: int = 5, seed: int = 0) -> Split:
    """Fit on accepted rows, test on rejected rows of other roots, or the reverse."""
    accepted = rows.frame["accepted"].to_numpy(dtype=bool)
    if fit_on not in ("accepted", "rejected"):
        raise ProbeError(f"Unknown fit_on {fit_on!r}. Use accepted or rejected.")
    fit = accepted if fit_on == "accepted" else ~accepted
    return _crossed(f"fitted on {fit_on}", rows, fit, ~fit, folds, seed)


def by_depth(rows: ProbeRows, deepest: int, folds: int = 5, seed: int = 0) -> Split:
    """Fit on rows at most `deepest` tokens away from the accepted path, test on rows beyond, of other roots."""
    shallow = (rows.frame["depth"] <= deepest).to_numpy()
    return _crossed(f"depth above {deepest}", rows, shallow, ~shallow, folds, seed)


def by_answer(rows: ProbeRows, folds: int = 5, seed: int = 0) -> Split:
    """Fit on rows of right answers, test on right and wrong answers of other roots."""
    right = rows.known("correct").to_numpy(dtype=bool)
    return _crossed("right answers", rows, right, np.ones(len(rows), bool), folds, seed)


def by_length(rows: ProbeRows, longest: int) -> Split:
    """Fit on prompts of at most `longest` steps, test on longer ones."""
    short = (rows.known("steps") <= longest).to_numpy()
    return _once(f"length above {longest}", rows, short, (rows.frame["steps"] > longest).to_numpy())


def by_part(rows: ProbeRows, fit_on: str, test_on: str) -> Split:
    """Fit on the train roots of one part of joined rows, test on the test roots of another.

    For shifts that need two dumps: other names, phrasing, p, rendering. Sides are those of `tasks.splits`, so a prompt in
    both parts is on one side only.
    """
    known = sorted(set(rows.frame.get("part", [])))
    if fit_on not in known or test_on not in known:
        there = ", ".join(known) or "none; see ProbeRows.join"
        raise ProbeError(f"No parts {fit_on!r} and {test_on!r}. These rows have {there}.")
    part = rows.frame["part"].to_numpy()
    held_out = rows.in_test_side
    return _once(f"{fit_on} to {test_on}", rows, (part == fit_on) & ~held_out, (part == test_on) & held_out)


def by_names(rows: ProbeRows, held_out: set[str]) -> Split:
    """Fit on prompts without these names, test on prompts with only these; mixed prompts are left out.

    Names are searched in the whole paths of a prompt, whichever of their rows are given.
    """
    if "name" not in rows.frame:
        raise ProbeError("The task has no label 'name', so names cannot be held out. Use another split.")
    whole = _whole_paths(rows)
    named = whole.loc[whole["name"].notna(), ["root", "name"]]
    inside = named["name"].isin(held_out)
    some, others = set(named.loc[inside, "root"]), set(named.loc[~inside, "root"])
    return _once("names", rows, ~np.isin(rows.roots, list(some)), np.isin(rows.roots, list(some - others)))


def by_phrase(rows: ProbeRows, word: str) -> Split:
    """Fit on prompts without this token (such as " not") on any branch, test on prompts with it on the accepted branch.

    The token is searched in the whole paths of a prompt, whichever of their rows are given.
    """
    whole = _whole_paths(rows)
    rows.whole.known("text")
    found = whole[whole["text"] == word]
    accepted = found.loc[found["accepted"].astype(bool), "root"]
    fit, test = (np.isin(rows.roots, roots.unique().tolist()) for roots in (found["root"], accepted))
    return _once(f"phrasing with {word.strip()!r}", rows, ~fit, test)


def _whole_paths(rows: ProbeRows) -> pd.DataFrame:
    """All rows that these were narrowed from. Raises BadRows if paths have holes, where a word could be missed."""
    if not all(path.whole.all() for path in row_paths(rows.whole.frame)):
        raise BadRows("Words are searched in whole paths, but these have holes. Dump all positions, and give the whole dump.")
    return rows.whole.frame


def by_mask(rows: ProbeRows, name: str, fit: np.ndarray, test: np.ndarray) -> Split:
    """A custom split. Raises RootOnBothSides if a root would be on both sides."""
    return _once(name, rows, fit, test)


def _once(name: str, rows: ProbeRows, fit: np.ndarray, test: np.ndarray) -> Split:
    return Split(name, np.asarray(fit, bool)[None], np.asarray(test, bool)[None], rows.roots)
