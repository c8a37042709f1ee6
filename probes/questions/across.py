"""`transfer_across`: does a probe of one task, prompt style or run read another's rows?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from replaylens.probes.checks import folds_and_seed
from replaylens.probes.data.groups import groups_of, independent
from replaylens.probes.data.rows import Cell, ProbeRows
from replaylens.probes.design.controls import token_identity
from replaylens.probes.design.goals import Goal, make_goal
from replaylens.probes.design.splits import Split, fold_of_groups
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.fitting.heldout import held_out
from replaylens.probes.questions.sizes import sizes
from replaylens.probes.reports.report import Report, about_rows, percent, score_line
from replaylens.probes.scoring.balanced import balanced_accuracy
from replaylens.probes.scoring.permutations import group_permutations
from replaylens.probes.scoring.statistics import means_over_groups

CONTROLS = (SHUFFLED, TOKEN) = ("shuffled labels", "token alone")
_DRAWS = 4
"""shuffled fits per cell"""


def transfer_across(
    rows: ProbeRows,
    label: str,
    *,
    fit_on: str,
    test_on: str,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    position: str = "query",
    estimator: str = "logistic",
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Balanced accuracy of probes from one part of joined rows on another, on prompts that they were not fitted on.

    The parts may be of different tasks (`ProbeRows.join(coin=a, coins=b)`) that share the label. Controls: the same way with
    labels exchanged between prompts of the first part, and the row's token alone; ceilings: each part on itself. A direction
    counts as common if, at some cell, the transfer is above chance and above both controls; the intervals of the differences
    hold for all cells jointly.
    """
    folds, seed = folds_and_seed(folds, seed)
    here, goal, part, notes = _labelled(rows, label, position, fit_on, test_on)
    groups = groups_of(here)
    inside = np.arange(folds)[:, None] == fold_of_groups(groups, folds, seed)
    ways = {(a, b): (~inside & (part == a), inside & (part == b)) for a in (fit_on, test_on) for b in (fit_on, test_on)}
    splits = {way: Split(f"{way[0]} to {way[1]}", *masks, here.roots).check(here) for way, masks in ways.items()}
    main = splits[fit_on, test_on]
    for split in splits.values():
        goal.check(split.train)
    tested = part == test_on
    lines: list[dict[str, Any]] = []
    gains: dict[str, list[np.ndarray]] = {name: [] for name in CONTROLS if name != TOKEN or here.has_tokens}
    if here.has_tokens:
        token = token_identity(goal.codes, here.frame["token"].to_numpy(), main.train, main.test) == goal.codes
        lines.append(_line(f"{TOKEN}, {fit_on} to {test_on}", None, here, goal, token, tested, folds))
    else:
        notes.append(f"Skipped the control {TOKEN!r}: these rows have no tokens.")
    cells = here.cells(sites, layers)
    for cell in cells:
        x = torch.from_numpy(here.matrix(cell.site, cell.layer)).double()[None]
        for (a, b), split in splits.items():
            right, own = _right(estimator, x, [goal], split, groups)[0], part == b
            lines.append(_line(f"{cell}: {a} to {b}", cell, here, goal, right, own, folds))
            if (a, b) == (fit_on, test_on):
                mixed = _right(estimator, x, _shuffled(goal, groups, tested, seed), split, groups).mean(0)
                gains[SHUFFLED].append((right - mixed)[tested])
                if here.has_tokens:
                    gains[TOKEN].append((right.astype(float) - token)[tested])
    for name, each in gains.items():
        for cell, gain in zip(cells, means_over_groups(np.stack(each), groups[tested], seed=seed, folds=folds), strict=True):
            what = f"{cell}: {fit_on} to {test_on} minus {name}"
            lines.append(score_line(what, "difference", gain, int(tested.sum()), cell, **sizes(here, tested)))
    settings = dict(label=label, fit_on=fit_on, test_on=test_on, position=position, estimator=estimator, folds=folds, seed=seed)
    return Report("transfer_across", lines, about_rows(here), settings, notes, _say(lines, f"{fit_on} to {test_on}", label))


def _labelled(
    rows: ProbeRows, label: str, position: str, fit_on: str, test_on: str
) -> tuple[ProbeRows, Goal, np.ndarray, list[str]]:
    """Accepted rows of both parts with a class that both have, their goal, the part of each, and notes."""
    known = sorted(set(rows.frame.get("part", [])))
    if fit_on not in known or test_on not in known or fit_on == test_on:
        there = ", ".join(known) or "none; see ProbeRows.join"
        raise ProbeError(f"No transfer from {fit_on!r} to {test_on!r}. Give two of the parts of these rows: {there}.")
    chosen = independent(rows.accepted().at(position))
    here, notes = chosen.rows, [chosen.note] if chosen.note else []
    target, part = here.target(label), here.frame["part"].to_numpy()
    if target.kind != "class":
        raise BadRows(f"Label {label!r} is a number, and a transfer needs classes. Give another label, or cut it into classes.")
    sides = [set(target.values[target.present & (part == name)]) for name in (fit_on, test_on)]
    if len(sides[0] & sides[1]) < 2:
        there = ", ".join(sorted(map(str, sides[0] & sides[1]))) or "none"
        raise BadRows(f"Label {label!r} at {position} has the common classes {there} in both parts. It needs at least two.")
    keep = target.present & np.isin(target.values, sorted(sides[0] & sides[1])) & np.isin(part, [fit_on, test_on])
    return here.where(keep), make_goal(target[keep]), part[keep], notes


def _shuffled(goal: Goal, roots: np.ndarray, tested: np.ndarray, seed: int) -> list[Goal]:
    """The goal with labels of the fitted part exchanged between its roots, several times. Tested rows keep theirs."""
    fitted = np.flatnonzero(~tested)
    found = []
    for order in group_permutations(goal.codes[fitted], roots[fitted], _DRAWS, seed + 1):
        codes = goal.codes.copy()
        codes[fitted] = goal.codes[fitted][order]
        found.append(replace(goal, codes=codes))
    return found


def _right(estimator: str, x: torch.Tensor, goals: list[Goal], split: Split, groups: np.ndarray) -> np.ndarray:
    """[goals, rows]: whether each row is predicted correctly; rows that are not tested count for nothing."""
    predicted = held_out(estimator, x, goals, split.train, split.test, groups=groups).predicted[0]
    return np.stack([said == goal.codes for said, goal in zip(predicted, goals, strict=True)])


def _line(
    what: str, cell: Cell | None, rows: ProbeRows, goal: Goal, right: np.ndarray, side: np.ndarray, folds: int
) -> dict[str, Any]:
    """Balanced accuracy on the rows of a side [rows] bool."""
    codes = goal.codes[side]
    score = balanced_accuracy(right[side], codes, groups_of(rows)[side], folds=folds)
    more: dict[str, Any] = dict(chance=1 / len(np.unique(codes)), **sizes(rows, side))
    return score_line(what, "balanced accuracy", score, len(codes), cell, **more)


def _say(lines: list[dict[str, Any]], way: str, label: str) -> list[str]:
    named = {line["what"]: line for line in lines}
    cells = [what.removesuffix(f": {way}") for what in named if what.endswith(f": {way}")]
    gains = [(cell, named.get(f"{cell}: {way} minus {name}")) for cell in cells for name in CONTROLS]
    lead = {cell: min(gain["low"] for of, gain in gains if gain is not None and of == cell) for cell in cells}
    best = max(cells, key=lambda cell: lead[cell])
    said = [
        f"{what}: {percent(line['accuracy'], line['low'], line['high'])}."
        for what, line in named.items()
        if what.startswith((f"{best}: ", "token alone"))
    ]
    score = named[f"{best}: {way}"]
    verdict = "Shown" if lead[best] > 0 and score["low"] > score["chance"] else "Not shown"
    return [*said, f"{verdict}: a probe of {label!r} reads {way}, best at {best} (chance {100 * score['chance']:.1f} %)."]
