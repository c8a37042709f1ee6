"""`viable_branch`: when the model takes the wrong branch, is the right one still readable?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replaylens.engine.dump.reader import Dump
from replaylens.engine.run import Run
from replaylens.probes.errors import BadRows
from replaylens.probes.goals import make_goal
from replaylens.probes.heldout import held_out
from replaylens.probes.report import Report, about_rows, percent, score_line
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import by_answer
from replaylens.probes.statistics import Estimate, bootstrap


def viable_branch(
    given: Dump | Run | ProbeRows,
    *,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    positions: Sequence[str] = ("query", "query+1"),
    estimator: str = "logistic",
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Fit probes for the task's truth on prompts that the model answers correctly; read those that it answers wrongly.

    The truth is the first of the task's `claims`: the face of a coin, the viable branch of a fork. Accuracy is the mean over
    classes, since a model may err on one class more often. With two classes, a score below one half on wrong answers means
    that the rows hold the wrong branch instead. Every prompt is read by a probe that was fitted on other roots, even if
    greedy and sampled runs of the same prompts are joined.
    """
    rows = ProbeRows.of(given).accepted()
    truth = rows.about.make_task().claims[0]
    lines: list[dict[str, Any]] = []
    for position in positions:
        here = rows.at(position)
        here = here.where(here.target(truth).present)
        right = here.frame["correct"].to_numpy(dtype=bool)
        if right.all() or not right.any():
            raise BadRows(f"All {len(right)} answers are {'right' if right.any() else 'wrong'}. Join prompts of both kinds.")
        goal, split = make_goal(here.target(truth)), by_answer(here, folds, seed)
        goal.check(split.train)
        for cell in here.cells(sites, layers):
            x = torch.from_numpy(here.matrix(cell.site, cell.layer)).double()[None]
            hit = held_out(estimator, x, [goal], split.train, split.test).predicted[0, 0] == goal.codes
            for name, side in (("right answers", right), ("wrong answers", ~right)):
                score = _balanced(hit[side], goal.codes[side], here.roots[side], folds, seed)
                size: dict[str, Any] = dict(position=position, roots=len(np.unique(here.roots[side])))
                what = f"{cell} at {position}: {name}"
                lines.append(score_line(what, "balanced accuracy", score, int(side.sum()), cell, **size))
    settings = dict(positions=list(positions), estimator=estimator, folds=folds, seed=seed, label=truth)
    return Report("viable_branch", lines, about_rows(rows), settings, [], _say(lines))


def _balanced(hit: np.ndarray, codes: np.ndarray, roots: np.ndarray, folds: int, seed: int) -> Estimate:
    """The mean over classes of the share of rows that are predicted correctly."""
    weight = 1 / np.bincount(codes)[codes]  # every class has the same weight
    return bootstrap((weight * hit)[None], weight, roots, folds=folds)[0]


def _say(lines: list[dict[str, Any]]) -> list[str]:
    said = []
    for right, wrong in zip(lines[::2], lines[1::2], strict=True):
        verdict = "the truth is still readable" if wrong["low"] > 0.5 else "the truth is not readable"
        if wrong["high"] < 0.5:
            verdict = "the wrong branch is held instead"
        place = right["what"].split(":")[0]
        scores = [percent(line["accuracy"], line["low"], line["high"]) for line in (right, wrong)]
        said.append(f"{place}: {scores[0]} on right answers, {scores[1]} on wrong ones: {verdict}.")
    return said
