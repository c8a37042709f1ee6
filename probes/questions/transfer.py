"""`transfer`: do probes fitted on accepted branches read rejected ones, and how much is due to shared prefixes?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replaylens.engine.dump.reader import Dump
from replaylens.engine.run import Run
from replaylens.probes.checks import folds_and_seed
from replaylens.probes.data.groups import groups_of, independent
from replaylens.probes.data.rows import Cell, ProbeRows
from replaylens.probes.design.controls import majority
from replaylens.probes.design.goals import Goal, make_goal
from replaylens.probes.design.splits import Split, fold_of_groups
from replaylens.probes.errors import BadRows, NoTask
from replaylens.probes.fitting.heldout import held_out
from replaylens.probes.questions.sizes import sizes
from replaylens.probes.reports.report import Report, about_rows, percent, score_line
from replaylens.probes.scoring.statistics import difference_over_groups, ratio_over_groups

WAYS = (("accepted", "accepted"), ("accepted", "rejected"), ("rejected", "rejected"), ("rejected", "accepted"))


def transfer(
    given: Dump | Run | ProbeRows,
    label: str = "state",
    *,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    position: str = "step",
    estimator: str = "logistic",
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Accuracy of probes from accepted to rejected rows and back, on roots that they were not fitted on.

    The line `same roots` of each cell also fits on accepted rows of the SAME roots. Its gain is leakage through shared
    prefixes, not transfer. Only rows after the prompt count, since prompts have no rejected rows.
    """
    rows = ProbeRows.of(given)
    if rows.about.task is None:
        raise NoTask("Transfer compares branches, and rows from arrays have none. Give a dump or a run with rejected drafts.")
    here = rows.at(position)
    here = here.where(here.frame["since_query"] > 0)
    _require_both(here.frame["accepted"].to_numpy(dtype=bool), position)
    chosen = independent(here)
    rows, notes = chosen.rows, [chosen.note] if chosen.note else []
    target = rows.target(label)
    rows, target = rows.where(target.present), target[target.present]
    accepted = rows.frame["accepted"].to_numpy(dtype=bool)
    _require_both(accepted, position)
    folds, seed = folds_and_seed(folds, seed)
    goal, groups = make_goal(target), groups_of(rows)
    inside = np.arange(folds)[:, None] == fold_of_groups(groups, folds, seed)
    ways = {(fit, test): (~inside & _side(accepted, fit), inside & _side(accepted, test)) for fit, test in WAYS}
    for (fit, test), masks in ways.items():
        Split(f"{fit} to {test}", *masks, rows.roots).check(rows)
    lines: list[dict[str, Any]] = []
    for cell in rows.cells(sites, layers):
        x = torch.from_numpy(rows.matrix(cell.site, cell.layer)).double()[None]
        said = {way: _right(estimator, x, goal, groups, *masks) for way, masks in ways.items()}
        for (fit, test), masks in ways.items():
            lines.append(_line(f"{cell}: {fit} to {test}", cell, goal, rows, said[fit, test], masks))
        leaky = np.repeat(accepted[None], folds, 0), inside & ~accepted
        same = _right(estimator, x, goal, groups, *leaky)
        lines.append(_line(f"{cell}: accepted to rejected, same roots", cell, goal, rows, same, leaky))
        gain = same.astype(float) - said["accepted", "rejected"]
        leaked = difference_over_groups(gain[~accepted], groups[~accepted], folds=folds)
        size: dict[str, Any] = dict(majority=None, **sizes(rows, ~accepted))
        lines.append(score_line(f"{cell}: leakage", "difference", leaked, int((~accepted).sum()), cell, **size))
    settings = dict(label=label, position=position, estimator=estimator, folds=folds, seed=seed)
    return Report("transfer", lines, about_rows(rows), settings, notes, _say(lines))


def _require_both(accepted: np.ndarray, position: str) -> None:
    if accepted.all() or not accepted.any():
        raise BadRows(
            f"Transfer needs labelled rows of accepted and of rejected branches, but after the prompt, at {position!r}, "
            f"{accepted.sum()} are accepted and {(~accepted).sum()} rejected. Dump with a drafter that makes readable errors."
        )


def _side(accepted: np.ndarray, name: str) -> np.ndarray:
    return accepted if name == "accepted" else ~accepted


def _right(estimator: str, x: torch.Tensor, goal: Goal, groups: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """[rows] bool: whether each tested row is predicted correctly."""
    goal.check(train)
    right: np.ndarray = held_out(estimator, x, [goal], train, test, groups=groups).predicted[0, 0] == goal.codes
    return right


def _line(
    what: str, cell: Cell, goal: Goal, rows: ProbeRows, right: np.ndarray, masks: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    tested = np.asarray(masks[1].any(0))
    score = ratio_over_groups(right[tested][None], np.ones(tested.sum()), groups_of(rows)[tested], folds=len(masks[1]))[0]
    size: dict[str, Any] = dict(majority=majority(goal.codes, *masks), **sizes(rows, tested))
    return score_line(what, "accuracy", score, int(tested.sum()), cell, **size)


def _say(lines: list[dict[str, Any]]) -> list[str]:
    """The lines of the cell that is best on accepted rows: both directions and the leakage."""
    ways = [line for line in lines if line["what"].endswith("accepted to accepted")]
    best = max(ways, key=lambda line: line["accuracy"])["what"].split(":")[0]
    said = []
    for line in lines:
        if line["what"].split(":")[0] != best:
            continue
        score = percent(line["accuracy"], line["low"], line["high"])
        extra = "" if line["majority"] is None else f", majority {100 * line['majority']:.1f} %, {line['rows']} rows"
        said.append(f"{line['what']}: {score}{extra}.")
    return said
