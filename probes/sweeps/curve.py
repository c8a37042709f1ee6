"""`complexity_curve`: how complex a probe has to be to read a label, after Pareto probing (Pimentel et al., arXiv 2010.02180).

One cell is probed at many strengths of regularisation. Each probe has an accuracy on held-out rows and a complexity: the share
of labels that it fits on its own training rows once they are exchanged between groups, where there is nothing to learn. A probe
that reads a property is accurate while it can memorise little; one that needs to memorise is accurate only late on the curve.
All strengths, folds and draws are solved together, on folds that keep groups apart.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replaylens.engine.dump.reader import Dump
from replaylens.engine.run import Run
from replaylens.probes.checks import folds_and_seed
from replaylens.probes.data.groups import independent
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.design.controls import majority
from replaylens.probes.design.goals import make_goal
from replaylens.probes.design.splits import Split, by_root
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.estimators.solvers import Solution, one_hot, solve_path
from replaylens.probes.fitting.refit import label_orders
from replaylens.probes.reports.report import Report, about_rows, percent, score_line
from replaylens.probes.scoring import metrics
from replaylens.probes.scoring.statistics import LEVEL, corrected_p, mean_over_groups

PATH = tuple(10.0**power for power in range(-6, 3))
"""values of C"""
DRAWS = 5
"""exchanged labels that the complexity is a mean of"""
KIND = "complexity_curve"


def complexity_curve(
    given: Dump | Run | ProbeRows,
    label: str = "state",
    *,
    site: str = "S",
    layer: int | None = None,
    position: str = "step",
    estimator: str = "logistic",
    C: Sequence[float] = PATH,
    folds: int = 5,
    seed: int = 0,
) -> Report:
    """Accuracy against complexity for one cell: one line per C, from the strongest regularisation to the weakest.

    estimator  logistic or ridge (alpha = 1 / C)

    Each accuracy has its interval over groups, and these columns beside it: `complexity`; `train`, the accuracy on the training
    rows; `auroc`, which needs no threshold (at the strong end a probe may rank the rows well and yet call them all by the
    majority class); `norm` of the weights on standardised columns; `p_worse` of a paired test against the best C; and `pareto`,
    whether no other C is both simpler and more accurate.
    """
    if estimator not in ("logistic", "ridge"):
        raise ProbeError(f"{estimator} has no regularisation to vary. Use logistic or ridge.")
    path = sorted(set(map(float, C)))
    if not path or path[0] <= 0:
        raise ProbeError(f"C is {list(C)}. Give at least one value, all above 0.")
    folds, seed = folds_and_seed(folds, seed)
    rows = ProbeRows.of(given)
    cell = rows.cell(site, layer)
    here = independent(rows.accepted().at(position))
    if here.rows.target(label).kind != "class":
        raise BadRows(f"Label {label!r} is a number, and the curve needs classes. Give another label, or cut it into classes.")
    target = here.rows.target(label, "class")
    chosen, groups = here.rows.where(target.present), here.groups[target.present]
    goal, split = make_goal(target[target.present]), by_root(chosen, folds, seed)
    goal.check(split.train)
    x = torch.from_numpy(chosen.matrix(site, layer)).double()[None]
    orders = label_orders(goal, chosen.roots, groups, DRAWS, seed)
    codes = np.stack([goal.codes, *(goal.codes[order] for order in orders)])
    targets = one_hot(codes, len(goal.classes))
    probes = solve_path(estimator, x, targets, np.repeat(split.train[None], len(codes), 0), path)
    lines, right = [], []
    for value, probe in zip(path, probes, strict=True):
        line, correct = _point(probe, x, codes, split)
        accuracy = mean_over_groups(correct, groups, folds=folds)
        lines.append(score_line(f"C = {value:g}", "accuracy", accuracy, len(correct), cell, C=value, **line))
        right.append(correct)
    shared = dict(
        position=str(position), majority=majority(goal.codes, split.train, split.test), roots=len(np.unique(chosen.roots))
    )
    lines = [line | shared for line in lines]
    _compare(lines, np.stack(right), groups, folds)
    settings = dict(label=label, position=str(position), estimator=estimator, C=path, folds=folds, seed=seed)
    notes = [here.note] if here.note else []
    return Report(KIND, lines, about_rows(chosen), settings, notes, _say(lines, f"{label} at {cell}, {position} ({estimator})"))


def _point(probe: Solution, x: torch.Tensor, codes: np.ndarray, split: Split) -> tuple[dict[str, Any], np.ndarray]:
    """(columns of one C, whether each row is read correctly by the probe that was not fitted on it)"""
    scores = probe.scores(x)[0].numpy()  # [1 + draws, folds, rows, k]
    said = (scores[..., 0] > 0).astype(int) if scores.shape[-1] == 1 else scores.argmax(-1)
    fold = split.test.argmax(0)
    rows = np.arange(codes.shape[1])
    fitted = [[(said[t, f] == codes[t])[train].mean() for f, train in enumerate(split.train)] for t in range(len(codes))]
    spread = torch.stack([x[0, torch.from_numpy(train)].std(0, correction=0) for train in split.train])  # [folds, d]
    found = {
        "complexity": float(np.mean(fitted[1:])),
        "train": float(np.mean(fitted[0])),
        "auroc": float(metrics.auroc(scores[None, 0, fold, rows], codes[0], fold)[0]),
        "norm": float((probe.weight[0, 0] * spread[:, None]).norm(dim=(1, 2)).mean()),
    }
    return found, said[0, fold, rows] == codes[0]


def _compare(lines: list[dict[str, Any]], right: np.ndarray, groups: np.ndarray, folds: int) -> None:
    """Mutates `lines`: adds how each C compares with the best one, and whether it is on the Pareto front."""
    best = max(range(len(lines)), key=lambda i: (lines[i]["accuracy"], -i))
    worse = corrected_p(right[best].astype(float) - right, groups, folds)
    for line, p in zip(lines, worse, strict=True):
        line["p_worse"] = float(p)
        line["pareto"] = not any(_dominates(other, line) for other in lines)


def _dominates(other: dict[str, Any], line: dict[str, Any]) -> bool:
    at_least = other["accuracy"] >= line["accuracy"] and other["complexity"] <= line["complexity"]
    return bool(at_least and (other["accuracy"] > line["accuracy"] or other["complexity"] < line["complexity"]))


def _say(lines: list[dict[str, Any]], what: str) -> list[str]:
    best = max(lines, key=lambda line: line["accuracy"])
    simple = next(line for line in lines if line["p_worse"] > 1 - LEVEL)
    first = f"{what}: best accuracy {percent(best['accuracy'], best['low'], best['high'])} at {best['what']}"
    second = (
        f"The strongest regularisation that is not worse (p > {1 - LEVEL:.2f}) is {simple['what']}: accuracy "
        f"{percent(simple['accuracy'], simple['low'], simple['high'])}, complexity {100 * simple['complexity']:.1f} % "
        f"(share of exchanged labels that it fits; the majority class is {100 * simple['majority']:.1f} %)."
    )
    return [f"{first}, complexity {100 * best['complexity']:.1f} %.", second]
