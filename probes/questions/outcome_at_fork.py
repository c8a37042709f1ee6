"""`outcome_at_fork`: is the exact distribution of the outcome linearly there, before the next token is drawn?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from replaylens.engine.dump import Dump
from replaylens.engine.run import Run
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.goals import make_goal
from replaylens.probes.heldout import held_out
from replaylens.probes.paths import row_paths
from replaylens.probes.report import Report, about_rows
from replaylens.probes.rows import Cell, ProbeRows, Target, make_target
from replaylens.probes.splits import by_root
from replaylens.probes.statistics import Estimate, bootstrap, mean_over_roots, permuted_product, root_permutations


def outcome_at_fork(
    given: Dump | Run | ProbeRows,
    *,
    sites: str | Sequence[str] = "S",
    layers: Sequence[int] | None = None,
    position: str = "step",
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Ridge regression from rows to the probability of the first outcome, exact by the task, on held-out roots.

    Held against what simpler knowledge explains: the state alone, and state and number of steps side by side (without their
    product). Only a score above these says that the distribution itself is there.
    """
    every = ProbeRows.of(given).accepted()
    task = every.about.make_task()
    if not hasattr(task, "outcomes"):
        raise ProbeError(f"task {task.name!r} cannot compute the probabilities of its outcomes; coin can")
    target = outcome_target(every, position)
    rows = every.at(position)
    rows, target = rows.where(target.present), target[target.present]
    split, goal = by_root(rows, folds, seed), make_goal(target)
    state = (rows.target("state").values == rows.target("state").classes[0]).astype(float)
    steps = pd.get_dummies(rows.frame["step"]).to_numpy(dtype=float)
    simple = {"state alone": state[:, None], "state and steps": np.column_stack([state, steps])}
    total = (goal.codes - goal.codes.mean()) ** 2
    errors: dict[str, np.ndarray] = {}
    lines: list[dict[str, Any]] = []
    cells: dict[str, Cell | None] = dict.fromkeys(simple)
    cells |= {str(cell): cell for cell in rows.cells(sites, layers)}
    orders = root_permutations(goal.codes, rows.roots, 199, seed)
    for name, cell in cells.items():
        X = simple[name] if cell is None else rows.matrix(cell.site, cell.layer)
        predicted = held_out("ridge", torch.from_numpy(X).double()[None], [goal], split.train, split.test).predicted[0, 0]
        errors[name] = (goal.codes - predicted) ** 2
        score = bootstrap((total - errors[name])[None], total, rows.roots, seed=seed, folds=folds)[0]
        p = float(permuted_product(predicted[None], goal.codes, orders).p[0])
        lines.append(_fields(name, cell, "r2", score, p, rows))
    for name, cell in cells.items():
        if cell is not None:
            gain = mean_over_roots((errors["state and steps"] - errors[name]) / total.mean(), rows.roots, seed=seed)
            lines.append(_fields(f"{name} minus state and steps", cell, "difference of r2", gain, None, rows))
    settings = dict(position=position, folds=folds, seed=seed)
    return Report("outcome_at_fork", lines, about_rows(rows), settings, [], _say(lines))


def outcome_target(every: ProbeRows, position: str) -> Target:
    """The exact probability of the task's first outcome at each row of a position, from the path's text up to it."""
    task: Any = every.about.make_task()
    wanted, words = set(every.at(position).numbers), every.frame["text"].to_numpy()
    found: dict[int, float] = {}
    for path in row_paths(every.frame):
        for end, number in enumerate(every.numbers[path.rows]):
            if number in wanted:
                if not path.whole[end]:
                    raise BadRows("outcomes are computed from whole texts: dump all positions, and give all rows")
                found[int(number)] = next(iter(task.outcomes("".join(words[path.rows[: end + 1]])).values()))
    return make_target("outcome", [found[int(n)] for n in every.at(position).numbers], "number")


def _fields(what: str, cell: Cell | None, metric: str, score: Estimate, p: float | None, rows: ProbeRows) -> dict[str, Any]:
    place = {"site": cell.site if cell else None, "layer": cell.layer if cell else None}
    size = {"rows": len(rows), "roots": rows.frame["root"].nunique()}
    return {
        "what": what,
        **place,
        "metric": metric,
        "accuracy": score.value,
        "low": score.low,
        "high": score.high,
        "p": p,
        **size,
    }


def _say(lines: list[dict[str, Any]]) -> list[str]:
    scores = [line for line in lines if line["metric"] == "r2"]
    said = [f"{line['what']}: r2 {line['accuracy']:.3f} [{line['low']:.3f}, {line['high']:.3f}]." for line in scores]
    gains = [line for line in lines if line["metric"] != "r2"]
    best = max(gains, key=lambda line: line["accuracy"])
    verdict = "Shown" if best["low"] > 0 else "Not shown"
    more = f"{best['accuracy']:+.3f} [{best['low']:+.3f}, {best['high']:+.3f}]"
    return [*said, f"{verdict}: more than state and number of steps explain side by side; best {best['what']}: {more}."]
