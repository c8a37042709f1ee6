"""Splits: the rows to fit a probe on and the rows to test it on. Nothing that is tested has been seen.

Folds are made of groups: roots that share a row, since prompts that begin alike have the same rows up to where they part (see
`groups`). A group's fold is its rank, by a hash of its name and the seed, among the groups with rows at a position. So a group
has the same fold at every site, layer and label, and at every position with the same groups.

Branches of one root are never on both sides, nor are two rows with the same path. A split that would separate them is
rejected, not repaired.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from replaylens.engine.engine import Engine
from replaylens.probes.checks import folds_and_seed, mask_of
from replaylens.probes.errors import BadRows, ProbeError, SharedRows, TooFewGroups
from replaylens.probes.groups import groups_of, histories, path_keys
from replaylens.probes.positions import row_paths
from replaylens.probes.rows import ProbeRows
from replaylens.tasks.task import Example

# ---- splits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Split:
    """Pairs of masks over rows. Raises SharedRows if a pair shares a root; `check` compares it with its rows."""

    name: str
    train: np.ndarray
    """[folds, rows] bool"""
    test: np.ndarray
    """[folds, rows] bool"""
    roots: np.ndarray
    """[rows]"""

    def __post_init__(self) -> None:
        masks = (self.train, self.test)
        shapes = [list(np.shape(mask)) for mask in masks]
        boolean = all(isinstance(mask, np.ndarray) and mask.dtype.kind == "b" and mask.ndim == 2 for mask in masks)
        if not boolean or shapes[0] != shapes[1]:
            raise ProbeError(
                f"Split {self.name!r} has masks of shapes {shapes[0]} and {shapes[1]}. Give two boolean arrays [folds, rows]."
            )
        if shapes[0][1] != len(self.roots):
            raise ProbeError(f"Split {self.name!r} has masks {shapes[0]} for {len(self.roots)} roots. Give one root per row.")
        if (self.test.sum(0) > 1).any():
            raise ProbeError(f"Split {self.name!r} tests a row in several folds. Test each row at most once.")
        for number, (train, test) in enumerate(self):
            both = np.intersect1d(self.roots[train], self.roots[test])
            if len(both):
                raise SharedRows(
                    f"Split {self.name!r}, fold {number}: root {both[0]} and {len(both) - 1} more are on both sides. "
                    f"Branches of a prompt share its tokens: split by root, as by_root and by_length do."
                )
            if not train.any() or not test.any():
                raise TooFewGroups(
                    f"Split {self.name!r}, fold {number}: {train.sum()} rows to fit on, {test.sum()} to test. Give more roots."
                )

    def __len__(self) -> int:
        return len(self.train)

    def check(self, rows: ProbeRows, keys: np.ndarray | None = None) -> "Split":
        """The split itself, if it is one of these rows. Raises SharedRows, which names two rows.

        The roots and paths are those of the rows, whatever the split says of them.

        keys  of the rows, as given by `path_keys`, if they are known already
        """
        if self.train.shape[1:] != (len(rows),) or self.train.shape != self.test.shape:
            raise ProbeError(
                f"Split {self.name!r} has masks {self.train.shape}, but there are {len(rows)} rows. Give [folds, rows]."
            )
        Split(self.name, self.train, self.test, rows.roots)
        keys = path_keys(rows) if keys is None else keys
        for fold, (train, test) in enumerate(self):
            both = np.intersect1d(keys[train], keys[test])
            if len(both):
                fitted, tested = (int(np.flatnonzero(side & (keys == both[0]))[0]) for side in (train, test))
                raise SharedRows(
                    f"Split {self.name!r}, fold {fold}: row {fitted} (root {rows.roots[fitted]}) is fitted and row "
                    f"{tested} (root {rows.roots[tested]}) is tested, but they have the same path and so the same "
                    f"activation; {len(both) - 1} more are like them. Split by group (by_root), or keep one of each with "
                    f"groups.distinct."
                )
        return self

    @property
    def digest(self) -> str:
        """Hash of the masks, whatever the split's name."""
        return hashlib.sha256(repr(self.train.shape).encode() + self.train.tobytes() + self.test.tobytes()).hexdigest()

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from zip(self.train, self.test, strict=True)

    def __getitem__(self, chosen: np.ndarray) -> "Split":
        """The same split of some of the rows, selected by a mask or by numbers."""
        return Split(self.name, self.train[:, chosen], self.test[:, chosen], self.roots[chosen])


def fold_of_groups(groups: np.ndarray, folds: int, seed: int = 0) -> np.ndarray:
    """The fold of each row, by its group; sizes differ by at most one group. Raises TooFewGroups if a fold would be empty."""
    folds, seed = folds_and_seed(folds, seed)
    different, place = np.unique(groups, return_inverse=True)
    if folds < 2 or len(different) < folds:
        raise TooFewGroups(
            f"{len(different)} independent groups of prompts for {folds} folds. Prompts that share a row are one group, and so "
            f"are texts that begin alike (groups.taken_as_independent takes them apart). Give at least 2 folds and as many "
            f"groups: more prompts, or a later position."
        )
    keys = [hashlib.sha256(f"{seed}:{group}".encode()).hexdigest() for group in different]
    rank = np.empty(len(different), dtype=np.int64)
    rank[np.argsort(keys, kind="stable")] = np.arange(len(different))
    return rank[place] % folds


def by_root(rows: ProbeRows, folds: int = 5, seed: int = 0) -> Split:
    """Cross-validation over groups: every row is tested once, by a probe that saw neither its prompt nor its path."""
    return _crossed("root", rows, np.ones(len(rows), bool), np.ones(len(rows), bool), folds, seed)


def _crossed(name: str, rows: ProbeRows, fit: np.ndarray, test: np.ndarray, folds: int, seed: int) -> Split:
    """Fit on some rows of the other folds' groups, test on some rows of this fold's."""
    keys = path_keys(rows)
    fold = fold_of_groups(groups_of(rows, keys), folds, seed)
    inside = np.arange(folds)[:, None] == fold  # [folds, rows]
    return Split(name, ~inside & fit, inside & test, rows.roots).check(rows, keys)


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
    """A custom split. Raises SharedRows if a root or a path would be on both sides."""
    return _once(name, rows, fit, test)


def _once(name: str, rows: ProbeRows, fit: np.ndarray, test: np.ndarray) -> Split:
    fit, test = (mask_of(f"mask of rows to {what}", mask, len(rows)) for what, mask in (("fit on", fit), ("test", test)))
    return Split(name, fit[None], test[None], rows.roots).check(rows)


# ---- unseen ----------------------------------------------------------------------------------------------------------
# Rows that say nothing about given prompts: what to fit on before the prompts are changed or read.


def unseen(rows: ProbeRows, engine: Engine, examples: Sequence[Example]) -> tuple[ProbeRows, list[str]]:
    """(the rows whose path begins none of the prompts, notes on what was left out).

    A row depends on its path alone, so a row of another prompt with the same beginning is the same row. Raises BadRows if
    nothing is left.
    """
    mine = {example.root for example in examples}
    keep = ~np.isin(rows.roots, list(mine))
    paths = histories(rows)
    if paths is None:
        notes = [
            "Cannot check that rows share no beginning with the prompts: the paths have holes. Whole prompts are kept apart."
        ]
    else:
        begun = {
            tuple(tokens[: n + 1]) for e in examples for tokens in [engine.text.encode(e.prompt)] for n in range(len(tokens))
        }
        keep &= np.array([tuple(path.tolist()) not in begun for path in paths], dtype=bool)
        notes = []
    if not keep.all():
        notes.append(f"Left out {int((~keep).sum())} of {len(rows)} rows to fit on: their paths begin one of the prompts.")
    if not keep.any():
        raise BadRows(f"All {len(rows)} rows to fit on begin one of the prompts. Give other prompts, or more rows.")
    return rows.where(keep), notes


def apart(fitted: ProbeRows, tested: ProbeRows) -> None:
    """Raise SharedRows, which names two rows, if a tested row is one that was fitted on."""
    keys = path_keys(fitted), path_keys(tested)
    both = np.intersect1d(*keys)
    if len(both):
        ends = [
            f"row {int(np.flatnonzero(each == both[0])[0])} (root {rows.roots[each == both[0]][0]})"
            for each, rows in zip(keys, (fitted, tested), strict=True)
        ]
        raise SharedRows(
            f"{ends[0]} is fitted on and {ends[1]} is read, but they have the same path and so the same activation; "
            f"{len(both) - 1} more are like them. Give other prompts to read."
        )
