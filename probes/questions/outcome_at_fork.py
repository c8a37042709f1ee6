"""`outcome_at_fork`: is the exact outcome distribution linear in the rows before the next token is drawn?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from replaylens.engine.dump.reader import Dump
from replaylens.engine.run import Run
from replaylens.probes.data.groups import groups_of, independent
from replaylens.probes.data.paths import row_paths
from replaylens.probes.data.rows import Cell, ProbeRows
from replaylens.probes.data.target import Target, make_target
from replaylens.probes.design.goals import make_goal
from replaylens.probes.design.splits import by_root
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.fitting.heldout import held_out
from replaylens.probes.fitting.refit import label_orders, refitted
from replaylens.probes.questions.sizes import sizes
from replaylens.probes.reports.report import Report, about_rows, score_line
from replaylens.probes.scoring.permutations import PERMUTATIONS
from replaylens.probes.scoring.statistics import means_over_groups, ratio_over_groups


def outcome_at_fork(
    given: Dump | Run | ProbeRows,
    *,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    position: str = "step",
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Ridge regression from rows to the task's exact probability of the first outcome, on held-out roots.

    The baselines are the state alone, and state and number of steps side by side (without their product). Only a score above
    these shows that the rows hold the distribution itself. The intervals of the differences hold for all cells jointly, so
    the best cell decides.
    """
    every = ProbeRows.of(given).accepted()
    task = every.about.make_task()
    if not hasattr(task, "outcomes"):
        raise ProbeError(f"Task {task.name!r} cannot compute outcome probabilities. Use coin.")
    target = outcome_target(every, position)
    rows = every.at(position)
    rows, target = rows.where(target.present), target[target.present]
    chosen = independent(rows)
    target, rows = target[np.isin(rows.numbers, chosen.rows.numbers)], chosen.rows
    if np.ptp(target.values) == 0:
        raise BadRows(
            f"The outcome has probability {target.values[0]:g} at all {len(rows)} rows. Choose a position where it varies."
        )
    groups, size = groups_of(rows), sizes(rows)
    split, goal = by_root(rows, folds, seed), make_goal(target)
    state = (rows.target("state").values == rows.target("state").classes[0]).astype(float)
    steps = pd.get_dummies(rows.frame["step"]).to_numpy(dtype=float)
    simple = {"state alone": state[:, None], "state and steps": np.column_stack([state, steps])}
    total = (goal.codes - goal.codes.mean()) ** 2
    errors: dict[str, np.ndarray] = {}
    lines: list[dict[str, Any]] = []
    cells: dict[str, Cell | None] = dict.fromkeys(simple)
    cells |= {str(cell): cell for cell in rows.cells(sites, layers)}
    orders = label_orders(goal, rows.roots, groups, PERMUTATIONS, seed)
    for name, cell in cells.items():
        X = simple[name] if cell is None else rows.matrix(cell.site, cell.layer)
        predicted = held_out("ridge", torch.from_numpy(X).double()[None], [goal], split.train, split.test).predicted[0, 0]
        errors[name] = (goal.codes - predicted) ** 2
        score = ratio_over_groups((total - errors[name])[None], total, groups, folds=folds, least=-np.inf)[0]
        p = float(refitted("ridge", torch.from_numpy(X).float()[None], goal, orders, split).p[0])
        lines.append(score_line(name, "r2", score, len(rows), cell, p=p, **size))
    own = {name: cell for name, cell in cells.items() if cell is not None}
    gains = np.stack([errors["state and steps"] - errors[name] for name in own]) / total.mean()
    for (name, cell), gain in zip(own.items(), means_over_groups(gains, groups, seed=seed, folds=folds), strict=True):
        lines.append(score_line(f"{name} minus state and steps", "difference of r2", gain, len(rows), cell, **size))
    settings = dict(position=position, folds=folds, seed=seed)
    return Report("outcome_at_fork", lines, about_rows(rows), settings, [chosen.note] if chosen.note else [], _say(lines))


def outcome_target(every: ProbeRows, position: str) -> Target:
    """The exact probability of the task's first outcome at each row of a position, given the text of its path."""
    task: Any = every.about.make_task()
    here, every = every.at(position), every.whole
    wanted, words = set(here.numbers), every.frame["text"].to_numpy()
    found: dict[int, float] = {}
    for path in row_paths(every.frame):
        for end, number in enumerate(every.numbers[path.own], len(path.rows) - path.num_own):
            if number in wanted:
                if not path.whole[end]:
                    raise BadRows("Outcomes are computed from whole texts, but these have holes. Dump all positions.")
                found[int(number)] = next(iter(task.outcomes("".join(words[path.rows[: end + 1]])).values()))
    return make_target("outcome", [found[int(n)] for n in here.numbers], "number")


def _say(lines: list[dict[str, Any]]) -> list[str]:
    scores = [line for line in lines if line["metric"] == "r2"]
    said = [f"{line['what']}: r2 {line['accuracy']:.3f} [{line['low']:.3f}, {line['high']:.3f}]." for line in scores]
    gains = [line for line in lines if line["metric"] != "r2"]
    best = max(gains, key=lambda line: line["low"])
    verdict = "Shown" if best["low"] > 0 else "Not shown"
    more = f"{best['accuracy']:+.3f} [{best['low']:+.3f}, {best['high']:+.3f}]"
    return [*said, f"{verdict}: rows explain more than state and number of steps side by side; best {best['what']}: {more}."]
