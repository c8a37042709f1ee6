"""`viable_branch`: when the model takes the wrong branch, is the right one still readable?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from replaylens.engine.dump import Dump
from replaylens.engine.run import Run
from replaylens.probes.errors import BadRows
from replaylens.probes.goals import make_goal
from replaylens.probes.registry import get
from replaylens.probes.report import Report, about_rows, percent
from replaylens.probes.rows import Cell, ProbeRows
from replaylens.probes.splits import fold_of_roots
from replaylens.probes.statistics import bootstrap


def viable_branch(
    given: Dump | Run | ProbeRows,
    *,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    positions: Sequence[str] = ("query", "query+1"),
    estimator: str = "logistic",
    seed: int = 0,
) -> Report:
    """Fit probes for the task's truth on prompts that the model answers rightly; read prompts that it answers wrongly.

    The truth is the first of the task's `claims`: the face of a coin, the viable branch of a fork. Accuracy is the mean over
    classes, since a model may err on one class more often. With two classes, a score below one half on wrong answers means
    that the rows hold the wrong branch instead. One fifth of the right prompts is held out.
    """
    rows = ProbeRows.of(given).accepted()
    truth = rows.about.make_task().claims[0]
    lines: list[dict[str, Any]] = []
    for position in positions:
        here = rows.at(position)
        here = here.where(here.target(truth).present)
        right = here.frame["correct"].to_numpy(dtype=bool)
        if right.all() or not right.any():
            raise BadRows(f"all {len(right)} answers are {'right' if right.any() else 'wrong'}: join prompts of both kinds")
        held = fold_of_roots(here.roots, 5, seed) == 0
        make_goal(here.target(truth)).check((right & ~held)[None])
        sides = {"right answers, held out": here.where(right & held), "wrong answers": here.where(~right)}
        for cell in here.cells(sites, layers):
            lines += _lines(cell, position, truth, here.where(right & ~held), sides, estimator, seed)
    settings = dict(positions=list(positions), estimator=estimator, seed=seed, label=truth)
    return Report("viable_branch", lines, about_rows(rows), settings, [], _say(lines))


def _lines(
    cell: Cell, position: str, truth: str, fit: ProbeRows, sides: dict[str, ProbeRows], estimator: str, seed: int
) -> list[dict[str, Any]]:
    probe = get(estimator).make().fit(fit.matrix(cell.site, cell.layer), fit.target(truth).values)
    found = []
    for name, rows in sides.items():
        values = rows.target(truth).values
        correct = probe.predict(rows.matrix(cell.site, cell.layer)) == values
        weight = 1 / np.array([(values == value).sum() for value in values])  # every class counts alike
        score = bootstrap((weight * correct)[None], weight, rows.roots, seed=seed)[0]
        place = {"what": f"{cell} at {position}: {name}", "site": cell.site, "layer": cell.layer, "position": position}
        numbers = {"accuracy": score.value, "low": score.low, "high": score.high}
        size = {"rows": len(rows), "roots": rows.frame["root"].nunique()}
        found.append({**place, "metric": "balanced accuracy", **numbers, **size})
    return found


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
