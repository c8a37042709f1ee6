"""`Goal`: what a probe predicts at the rows of one position: a label, or a control of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from replaylens.probes.data.groups import why_no_histories
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.data.target import Target
from replaylens.probes.design import controls
from replaylens.probes.errors import BadRows, OneClass, ProbeError
from replaylens.probes.scoring.permutations import exchanged_share, shuffled_order

LABEL, SHUFFLED, CONTROL, ZERO = "label", "shuffled", "control", "zero"
METRICS = ("auto", "accuracy", "balanced_accuracy", "auroc")
CLASS_METRICS = METRICS[2:]
"""those that are never a default, so that they are refused for numbers"""
"""of classes; numbers have r2"""
UNEQUAL = 1.4
"""share of the most frequent class, in units of an equal share, from which on classes are unequal: 70 % of two classes"""
_SHUFFLED = 0.2
"""share of labels that a shuffled control must change, against a free exchange; it is no test: less than `EXCHANGED` will do"""


@dataclass(frozen=True, eq=False)
class Goal:
    """Values to predict at every row of a position."""

    label: str
    role: str
    """label, shuffled (between groups), control (random class per context, several draws), or zero (a known zero)"""
    kind: str
    """class or number"""
    classes: tuple[str, ...]
    codes: np.ndarray
    """[rows]: class numbers, -1 if missing; for numbers, the values"""
    present: np.ndarray
    """[rows] bool"""
    chance: float | None = None
    """for known zeros: the exact accuracy of guessing"""
    metric: str = "accuracy"
    """what its predictions are scored by: accuracy, balanced_accuracy or auroc; for numbers, r2"""

    @property
    def outputs(self) -> int:
        """Number of target and score columns; goals with the same number are fitted together."""
        return 1 if self.kind == "number" or len(self.classes) == 2 else len(self.classes)

    def check(self, train: np.ndarray) -> None:
        """Raise OneClass if a fold [folds, rows] has fewer than two classes to fit on."""
        for fold, mask in enumerate(train & self.present):
            if self.kind == "class" and len(np.unique(self.codes[mask])) < 2:
                found = f"only {self.classes[self.codes[mask][0]]!r}" if mask.any() else "no rows"
                raise OneClass(
                    f"Label {self.label!r} has {found} to fit on in fold {fold}. Choose a position where the label varies, "
                    f"or give more prompts."
                )


def make_goal(target: Target, role: str = LABEL, chance: float | None = None, metric: str = "accuracy") -> Goal:
    """A goal from a target. Raises BadRows if no row has a value.

    metric  of classes, one of `METRICS`; auto: AUROC if the most frequent class has at least `UNEQUAL` times the rows that an
            equal share would give it. Accuracy then hardly differs from a constant guess, whatever is readable
    """
    if not target.present.any():
        raise BadRows(f"Label {target.name!r} has no value at any row there. Choose another label or position.")
    if target.kind == "number":
        if metric in CLASS_METRICS:
            raise ProbeError(
                f"metric={metric!r} is for classes, and label {target.name!r} holds numbers, which have r2. Leave metric out, "
                "or make classes of the numbers."
            )
        return Goal(target.name, role, "number", (), np.where(target.present, target.values, 0.0), target.present, metric="r2")
    classes = target.classes
    codes = np.where(target.present, np.searchsorted(classes, target.values), -1)
    if metric == "auto":
        most = np.bincount(codes[target.present]).max() / target.present.sum()
        metric = "auroc" if len(classes) > 1 and most * len(classes) >= UNEQUAL else "accuracy"
    return Goal(target.name, role, "class", tuple(map(str, classes)), codes, target.present, chance, metric)


def goals_at(
    here: ProbeRows,
    groups: np.ndarray,
    paths: Sequence[np.ndarray] | None,
    labels: Sequence[str],
    train: np.ndarray,
    *,
    with_controls: bool,
    seed: int,
    metric: str = "accuracy",
) -> tuple[list[Goal], list[tuple[str, str]]]:
    """(goals at one position, what is skipped there: name and reason). Empty if no label can be probed there.

    groups of the rows, as given by `groups.groups_of`
    paths  of the rows, as given by `groups.histories`
    train  [folds, rows]
    """
    goals: list[Goal] = []
    skipped: list[tuple[str, str]] = []
    context = controls.contexts(paths) if with_controls and paths is not None else None
    if with_controls and paths is None:
        skipped.append(("bag of tokens and control task", why_no_histories(here)))
    elif with_controls and context is None:
        skipped.append(("control task", "the contexts have too few types"))
    for label in labels:
        target = here.target(label)
        try:
            if target.kind == "number" and metric in CLASS_METRICS and target.present.any():
                skipped.append((f"metric {metric} of {label!r}", "the label holds numbers, which have r2"))
            goal = make_goal(target, metric="auto" if target.kind == "number" else metric)
            goal.check(train)
        except (BadRows, OneClass) as error:
            skipped.append((f"label {label!r}", str(error)))
            continue
        goals.append(goal)
        if with_controls:
            goals += _shuffled(goal, here.roots, groups, seed)
            if context is not None and goal.kind == "class":
                for draw in range(controls.DRAWS):
                    codes = controls.control_labels(context[0], goal.codes, seed + draw)
                    goals.append(replace(goal, role=CONTROL, codes=codes))
    if not goals:
        return [], skipped
    if with_controls and here.about.task is None:
        skipped.append(("known zeros", "rows from arrays have no task"))
    elif with_controls and here.about.several:
        skipped.append(("known zeros", "the rows come from several tasks"))
    elif with_controls:
        for zero in here.about.make_task().known_zero:
            if zero.label in labels or zero.label not in here.frame:
                continue
            try:
                goal = make_goal(here.target(zero.label), ZERO, zero.chance)
                goal.check(train)
                goals.append(goal)
            except (BadRows, OneClass):
                skipped.append((f"known zero {zero.label!r}", "the label has fewer than two values there"))
    return _solvable(goals, train, skipped), skipped


def _shuffled(goal: Goal, roots: np.ndarray, groups: np.ndarray, seed: int) -> list[Goal]:
    """The control with labels exchanged between groups; none if that changes next to nothing."""
    rows = np.flatnonzero(goal.present)
    order = shuffled_order(goal.codes[rows], roots[rows], seed + 1, groups[rows])
    if exchanged_share(goal.codes[rows], order[None]) < _SHUFFLED:
        return []
    codes = goal.codes.copy()
    codes[rows] = goal.codes[rows][order]
    return [replace(goal, role=SHUFFLED, codes=codes)]


def _solvable(goals: list[Goal], train: np.ndarray, skipped: list[tuple[str, str]]) -> list[Goal]:
    """Leave out controls with one class in a fold and add them to `skipped`. Labels are checked before."""
    kept = []
    for goal in goals:
        try:
            goal.check(train)
            kept.append(goal)
        except OneClass:
            skipped.append((f"{goal.role} control of {goal.label!r}", "a fold has only one class"))
    return kept
