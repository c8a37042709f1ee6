"""Groups: which rows are the same observation, and which are independent of each other.

A row is a function of its path: the tokens up to and including it. Two prompts that begin alike therefore have the same rows
up to where they part, bit for bit, although their roots differ. A probe that is fitted on one of them and tested on the other
is tested on rows that it has seen.

    key    identifies an observation: rows with equal keys are one activation
    group  roots that share an observation, or much of their text, directly or through other roots; the unit that folds,
           resampling and permutation treat as independent

Prompts of a task are independent draws, which meet by chance: there a group is what shares an observation. Given texts are
whatever their author made of them, such as a few beginnings with many endings, and a label of the beginning is then one
observation for all its endings. So texts that begin alike are one group (`shared_beginnings`), unless the caller says
otherwise.

`independent` prepares rows for a probe: every observation once, in at least `MIN_GROUPS` groups where possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from replaylens.engine.errors import no_such
from replaylens.probes.checks import as_matrix
from replaylens.probes.errors import BadRows
from replaylens.probes.positions import row_paths
from replaylens.probes.rows import Cell, ProbeRows, Target

MIN_GROUPS = 20
"""groups that intervals need to hold what they promise; see docs/probes.md"""


def histories(rows: ProbeRows) -> list[np.ndarray] | None:
    """For each row, the tokens of its path up to and including it. None if they are unknown: see `why_no_histories`."""
    every = rows.whole
    if not every.has_tokens:
        return None
    token, place = every.frame["token"].to_numpy(), {number: i for i, number in enumerate(rows.numbers)}
    found: dict[int, np.ndarray] = {}
    for path in row_paths(every.frame):
        tokens, before = token[path.rows], len(path.rows) - path.num_own
        for end, number in enumerate(every.numbers[path.own], before):
            if number in place:
                if not path.whole[end]:
                    return None
                found[place[number]] = tokens[: end + 1]
    return [found[i] for i in range(len(rows))]


def why_no_histories(rows: ProbeRows) -> str:
    """The reason why `histories` gives none, with what to do."""
    if rows.about.task is not None:
        return "the paths have holes; dump all positions"
    if not rows.whole.has_tokens:
        return "these rows have no tokens; give tokens= and positions="
    return "not every token of the prompts is there; give the rows of all positions, with positions="


def path_keys(rows: ProbeRows) -> np.ndarray:
    """[rows] str: a hash of each row's path, or of its stored bits where the path has holes.

    The bits of the deepest stored site are hashed along with the path, so that rows of one path with different edits count as
    different. Rows from arrays may bring keys of their own, in the column `key`; otherwise a known path is their key alone,
    in whichever part it is, since elsewhere rows of one path may differ in their last bits from batch to batch.
    """
    if "key" in rows.frame:
        return rows.frame["key"].to_numpy(dtype=str)
    paths = histories(rows)
    if paths is not None and rows.about.task is None:
        parts = (path.tobytes() for path in paths)
    else:
        bits = _deepest(rows)
        parts = (bits[i].tobytes() + (b"" if paths is None else paths[i].tobytes()) for i in range(len(rows)))
    return np.array([blake2b(part, digest_size=12).hexdigest() for part in parts], dtype="U24")


def _deepest(rows: ProbeRows) -> np.ndarray:
    """[rows, bytes]: the deepest stored site of each letter, side by side. Of rows from arrays, the deepest of all letters
    alone, since their sites may come from different passes; or else all sites."""
    there = ((letter, rows.source.letters(letter)) for letter in ("C", "T", "S"))
    cells = [Cell(letter, max(stored)) for letter, stored in there if stored]
    if rows.about.task is None:  # of one layer, the first: the MLP comes after attention, and attention after the stream
        cells = [max(cells, key=lambda cell: cell.layer or 0)] if cells else rows.cells(rows.default_sites)
    taken = (rows.source.take(cell.site, cell.layer, rows.numbers) for cell in cells)
    found = [x.contiguous().view(torch.uint8).numpy() for x in taken]
    return np.hstack([np.empty((len(rows), 0), dtype=np.uint8), *found])


def groups_of(rows: ProbeRows, keys: np.ndarray | None = None, texts: np.ndarray | None = None) -> np.ndarray:
    """[rows] str: the group of each row, named after the first of its roots.

    Rows of `independent` keep the groups that they had before repeated rows were left out, in the column `group`.

    keys   of the rows, as given by `path_keys`, if they are known already
    texts  [rows]: rows with equal values are of one group besides; default: `alike`
    """
    if "group" in rows.frame:
        return rows.frame["group"].to_numpy(dtype=str)
    keys, texts = path_keys(rows) if keys is None else keys, alike(rows) if texts is None else texts
    names, root = np.unique(rows.roots, return_inverse=True)
    found, key = np.unique(keys, return_inverse=True)
    kinds, kind = np.unique(texts, return_inverse=True)
    size = len(names) + len(found) + len(kinds)
    ends = np.concatenate([len(names) + key, len(names) + len(found) + kind])
    links = coo_array((np.ones(len(ends), dtype=bool), (np.tile(root, 2), ends)), shape=(size, size))
    component = connected_components(links, directed=False)[1][: len(names)]
    first = np.unique(component, return_index=True)[1]  # names are sorted, so this is the smallest root of each component
    return np.asarray(names[first[component]][root])


# ---- texts that begin alike -------------------------------------------------------------------------------------------

SHARED = 1 / 3
"""of the shorter of two texts, after what all texts begin with: texts that share as much from their beginning are one group"""
INDEPENDENT = "independent"
"""value of `groups` that takes every text as independent of the others"""


APART = "taken as independent"
"""column of the index of rows whose texts are"""


def taken_as_independent(rows: ProbeRows) -> ProbeRows:
    """The rows with every text as an observation of its own, whatever it shares with others from its beginning. The verdicts of
    `sweep` say so; `sweep(groups="independent")` does the same."""
    wider = None if rows.wider is None else replace(rows.wider, frame=rows.wider.frame.assign(**{APART: True}))
    return replace(rows, frame=rows.frame.assign(**{APART: True}), wider=wider)


def alike(rows: ProbeRows) -> np.ndarray:
    """[rows]: a value for each row, equal for rows of texts that begin alike. Of tasks, whose prompts are independent draws,
    of rows whose caller gave keys, and of rows without tokens, rows of one root alone."""
    if APART in rows.frame or "key" in rows.frame or (rows.about.task is not None and not rows.about.of_texts):
        return rows.roots
    paths = histories(rows)
    if paths is None:
        return rows.roots
    names, root = np.unique(rows.roots, return_inverse=True)
    longest = [max((paths[i] for i in np.flatnonzero(root == number)), key=len) for number in range(len(names))]
    return np.asarray(names[shared_beginnings(longest)][root])


def shared_beginnings(paths: Sequence[np.ndarray], share: float = SHARED) -> np.ndarray:
    """[texts]: the number of the first text that each is one group with.

    Two texts are linked if, after what all texts begin with, they have the first `share` of the shorter one in common; groups
    are what links connect. In alphabetical order, the texts that share a beginning are neighbours: a text is linked with all
    from the first to the last that have enough of it.
    """
    order = sorted(range(len(paths)), key=lambda i: paths[i].tolist())
    common = np.array([_common(paths[a], paths[b]) for a, b in pairwise(order)])  # of each text with the one after it
    root = common.min(initial=min(map(len, paths)))
    enough = np.array([root + max(share * (len(paths[i]) - root), 1) for i in order])
    joined = _reached(common, enough[:-1]) | _reached(common[::-1], enough[:0:-1])[::-1]
    number = np.concatenate([[0], np.cumsum(~joined)])
    found = np.empty(len(paths), dtype=np.int64)
    for each in np.unique(number):
        members = np.array(order)[number == each]
        found[members] = members.min()
    return found


def _reached(common: np.ndarray, enough: np.ndarray) -> np.ndarray:
    """[texts - 1] bool: whether any text at or before each place shares enough with the text after it."""
    joined, least = np.zeros(len(common), dtype=bool), np.inf
    for place, (shared, own) in enumerate(zip(common, enough, strict=True)):
        least = min(least, own)
        joined[place] = shared >= least
        least = least if joined[place] else np.inf
    return joined


def _common(one: np.ndarray, two: np.ndarray) -> int:
    """The number of tokens that both begin with."""
    size = min(len(one), len(two))
    different = np.flatnonzero(one[:size] != two[:size])
    return int(different[0]) if len(different) else size


def near_duplicates(X: Any, tolerance: float = 1e-2) -> np.ndarray:
    """[rows]: a number for each row [rows, d], the same for rows that are nearly equal, as `keys` of `ProbeRows.of_arrays`.

    tolerance  distance up to which two rows count as one observation, as a share of the rows' median distance from their mean.
               Rows are also one if a chain of such rows links them

    Texts that come twice have the same rows up to rounding, which other batches, dtypes and devices change.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(4, 16))
    >>> near_duplicates(np.vstack([X, X + 1e-6])).tolist()
    [0, 1, 2, 3, 0, 1, 2, 3]
    """
    rows = as_matrix(X).astype(np.float64)
    if not 0 <= tolerance < 1:
        raise BadRows(f"tolerance={tolerance} is no share of a distance. Give a number from 0 to below 1, such as 0.01.")
    rows = rows - rows.mean(0)
    reach = tolerance * float(np.median(np.linalg.norm(rows, axis=1)))
    way = np.random.default_rng(0).normal(size=rows.shape[1])
    line = rows @ (way / np.linalg.norm(way))  # rows within reach of each other are so along any direction
    order = np.argsort(line, kind="stable")
    ends = np.searchsorted(line[order], line[order] + reach, side="right")
    pairs = [
        np.stack([np.full(end - i - 1, order[i]), order[i + 1 : end]])[
            :, np.linalg.norm(rows[order[i + 1 : end]] - rows[order[i]], axis=1) <= reach
        ]
        for i, end in enumerate(ends)
        if end > i + 1
    ]
    one, two = np.hstack([np.empty((2, 0), dtype=int), *pairs])
    links = coo_array((np.ones(len(one), dtype=bool), (one, two)), shape=(len(rows), len(rows)))
    return np.asarray(connected_components(links, directed=False)[1])


GIVEN = "given group"
"""column of the index: groups that the caller gave"""


def with_groups(rows: ProbeRows, given: Sequence[Any]) -> ProbeRows:
    """The rows with the column `GIVEN`, from one value per row, or one per example in the order of the rows."""
    frame = rows.frame
    number = pd.factorize(frame["example"])[0]
    values = pd.Series(list(given), dtype=object)
    if len(values) not in (len(frame), number.max() + 1):
        raise BadRows(
            f"groups has {len(values)} values for {len(frame)} rows of {number.max() + 1} examples. Give one per example, one "
            f"per row, or the name of a column."
        )
    return replace(rows, frame=frame.assign(**{GIVEN: values if len(values) == len(frame) else values.to_numpy()[number]}))


def grouped(rows: ProbeRows, column: str) -> ProbeRows:
    """The rows with larger roots: prompts that share a value of the column at these rows, also through others, become one.

    A missing value shares nothing.
    """
    if column not in rows.frame:
        raise BadRows(no_such("column of groups", column, rows.frame.columns))
    values = rows.frame[column]
    known = zip(values, values.notna(), rows.roots, strict=True)
    keys = np.array([f"value:{value}" if there else f"root:{root}" for value, there, root in known], dtype=str)
    names = dict(zip(rows.roots, groups_of(rows, keys, rows.roots), strict=True))
    return replace(_renamed(rows, names), wider=None if rows.wider is None else _renamed(rows.wider, names))


def _renamed(rows: ProbeRows, names: dict[str, str]) -> ProbeRows:
    return replace(rows, frame=rows.frame.assign(root=[names.get(root, root) for root in rows.roots]))


def distinct(rows: ProbeRows) -> ProbeRows:
    """One row of each observation: an accepted row if there is one, then the first."""
    return rows.where(_first(rows, _observations(rows, path_keys(rows))))


def _observations(rows: ProbeRows, keys: np.ndarray) -> np.ndarray:
    """[rows] str: the observation of each row. Parts of rows from arrays may come from different models: there, rows of one
    key are an observation in every part. They stay one group."""
    if rows.about.task is not None or "part" not in rows.frame:
        return keys
    return np.char.add(np.char.add(rows.frame["part"].to_numpy(dtype=str), ":"), keys)


def _first(rows: ProbeRows, keys: np.ndarray) -> np.ndarray:
    """[rows] bool: the row that stands for its observation."""
    order = np.argsort(~rows.frame["accepted"].to_numpy(dtype=bool), kind="stable")
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[order[np.unique(keys[order], return_index=True)[1]]] = True
    return chosen


@dataclass(frozen=True, eq=False)
class Independent:
    """Rows for a probe: every observation once, with its group."""

    rows: ProbeRows
    """with the columns `key` and `group`"""
    copies: np.ndarray
    """[rows]: how many rows of the given ones are this observation"""
    begins_at: int
    """token position before which rows are left out, because too many prompts share them; 0: none are"""
    num_torn: int
    """rows whose observation has several values of a label"""
    rule: str
    """which rows are one group, in words"""

    @property
    def keys(self) -> np.ndarray:
        return path_keys(self.rows)

    @property
    def groups(self) -> np.ndarray:
        return groups_of(self.rows)

    @property
    def note(self) -> str | None:
        """What was left out, for a report."""
        if not self.begins_at:
            return None
        return (
            f"prompts share the rows before token {self.begins_at}, with which there are fewer than {MIN_GROUPS} independent "
            f"groups; {len(np.unique(self.groups))} groups remain"
        )


def independent(given: ProbeRows, labels: Sequence[Target] = (), groups: str | None = None) -> Independent:
    """Every observation once, and as many groups as statistics need.

    groups  what makes rows alike besides: None, what their texts share (`alike`); `INDEPENDENT`, nothing; otherwise the name of
            what the roots already are (`grouped`)
    labels  where rows of one observation differ in a label, all of them are kept: none of them stands for the others. They are
            in one group, so they are never on both sides

    All prompts may begin with the same words, which makes one group of them. Then rows at the first tokens are left out, as
    few as possible for `MIN_GROUPS` groups, or for as many groups as there can be.
    """
    keys, roots = path_keys(given), len(np.unique(given.roots))
    texts = alike(given) if groups is None else given.roots
    rule = _rule(given, groups, roots, len(np.unique(texts)))
    found, begin = groups_of(given, keys, texts), 0
    most, enough = len(np.unique(found)), min(MIN_GROUPS, len(np.unique(texts)))
    chosen_groups = found
    position = given.frame["position"].to_numpy()
    for start in np.unique(position)[1:]:
        if most >= enough:
            break
        later = position >= start
        found = groups_of(given.where(later), keys[later], texts[later])
        if len(np.unique(found)) > most:
            begin, most = int(start), len(np.unique(found))
            chosen_groups = np.full(len(given), "", dtype=found.dtype)
            chosen_groups[later] = found
    named = replace(given, frame=given.frame.assign(key=keys, group=chosen_groups))
    observed = _observations(given, keys)
    torn = _torn(observed, labels)
    chosen = (_first(given, observed) | torn) & ~(position < begin)  # rows from arrays may have no position
    _, place, copies = np.unique(observed, return_inverse=True, return_counts=True)
    return Independent(named.where(chosen), np.where(torn, 1, copies[place])[chosen], begin, int((torn & chosen).sum()), rule)


def _rule(rows: ProbeRows, groups: str | None, roots: int, texts: int) -> str:
    """Which of so many roots are one group, in words; `texts` groups of them begin alike."""
    same = "prompts that share a row are one"
    if groups == INDEPENDENT or APART in rows.frame:
        return f"{same}; all others were taken as independent on request, whatever their texts share"
    if groups is not None:
        return f"{same}, and so are those of one {groups!r}"
    if rows.about.task is None and "key" in rows.frame:
        return "prompts that share a given key are one"
    if rows.about.task is not None and not rows.about.of_texts:
        return f"{same}; prompts of a task are independent draws"
    if histories(rows) is None:
        return f"{same}; what the texts share is unknown ({why_no_histories(rows)})"
    if texts == roots:
        return f"{same}, and so are texts that share a third of the shorter one from its beginning: none do"
    return f"{same}, and so are texts that share a third of the shorter one from its beginning: {roots} texts in {texts} groups"


def _torn(keys: np.ndarray, labels: Sequence[Target]) -> np.ndarray:
    """[rows] bool: rows whose observation has several values of a label."""
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    several = np.zeros(len(first), dtype=bool)
    for label in labels:
        other = first[place]
        same = (label.values == label.values[other]) | ~(label.present | label.present[other])
        np.logical_or.at(several, place, ~same | (label.present != label.present[other]))
    return np.asarray(several[place])
