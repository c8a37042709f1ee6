"""What a score is held against: baselines and control labels, and `Goal`: what a probe predicts at a position."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.model.decoder import Decoder
from replaylens.probes.errors import BadRows, OneClass, ProbeError
from replaylens.probes.groups import why_no_histories
from replaylens.probes.permutations import exchanged_share, shuffled_order
from replaylens.probes.positions import row_paths
from replaylens.probes.rows import ProbeRows, Target
from replaylens.probes.sources import MemorySource

# ---- controls --------------------------------------------------------------------------------------------------------
# Controls: the baselines that a score must beat before it says anything about the model.
#
# majority        always the most frequent class, of the training rows or of the test rows, whichever scores higher
# token identity  the most frequent class of the row's own token
# position only   the most frequent class of the row's place in its prompt
# bag of tokens   logistic regression on token counts of the path up to the row
# shuffled        the same probe, fitted and tested on labels exchanged between groups
# control task    the same probe on a random class per type of context (Hewitt & Liang, arXiv 1909.03368), drawn `DRAWS` times;
#                 selectivity is the accuracy minus the mean over these control tasks
# untrained       the same probe on a model of the same shape with random weights
# known zeros     labels of the task that the text does not determine

POSITION_BINS = 20
"""limit of the control by position alone"""
DRAWS = 5
"""control tasks per label"""
MIN_TYPES, MAX_CONTEXT = 10, 16
"""types of context that a control task needs; tokens that a context may grow to in order to have them"""


def majority(codes: np.ndarray, train: np.ndarray, test: np.ndarray) -> float:
    """Accuracy of always guessing one class on the test rows. Masks [folds, rows]; rows without a class (-1) do not count.

    A class that is frequent in the training folds is rarer in the test fold, so the training rows alone can give less than
    chance. The control is therefore at least the best constant guess on the test rows.
    """
    tested = test.any(0) & (codes >= 0)
    said = token_identity(codes, np.zeros(len(codes), dtype=np.int64), train & (codes >= 0), test)
    best = np.bincount(codes[tested]).max() / tested.sum()
    return max(float((said == codes)[tested].mean()), float(best))


def token_identity(codes: np.ndarray, tokens: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The most frequent class of each token among the training rows; for an unseen token, of all training rows."""
    places = np.unique(tokens, return_inverse=True)[1]
    out = np.full(len(codes), -1)
    for fit, held in zip(train, test, strict=True):
        counts = np.zeros((places.max() + 1, codes.max() + 1))
        np.add.at(counts, (places[fit], codes[fit]), 1)
        best = np.where(counts.sum(1) > 0, counts.argmax(1), counts.sum(0).argmax())
        out[held] = best[places[held]]
    return out


def shares_of(codes: np.ndarray, values: np.ndarray, train: np.ndarray, test: np.ndarray, classes: int) -> np.ndarray:
    """[rows, classes]: the share of each class among the training rows with the row's value, drawn towards that of all rows."""
    places = np.unique(values, return_inverse=True)[1]
    out = np.full((len(codes), classes), np.nan)
    for fit, held in zip(train, test, strict=True):
        counts = np.zeros((places.max() + 1, classes))
        np.add.at(counts, (places[fit], codes[fit]), 1)
        of_all = counts.sum(0) / max(counts.sum(), 1)
        out[held] = ((counts + of_all) / (counts.sum(1, keepdims=True) + 1))[places[held]]
    return out


def position_bins(position: pd.Series, present: np.ndarray) -> np.ndarray | None:
    """[rows]: the place of each row in its prompt, in at most `POSITION_BINS` bins with about equally many rows.

    None if positions are unknown, or the same in all rows: then they tell nothing.
    """
    if position.isna().any() or position[present].nunique() < 2:
        return None
    values = position.to_numpy(dtype=np.float64)
    if len(np.unique(values)) <= POSITION_BINS:
        return values
    return np.searchsorted(np.unique(np.quantile(values, np.linspace(0, 1, POSITION_BINS + 1)[1:-1])), values, side="right")


def bags(paths: Sequence[np.ndarray]) -> np.ndarray:
    """[rows, distinct tokens]: token counts of each row's path, as given by `groups.histories`."""
    tokens = np.unique(np.concatenate(paths))
    return np.stack([np.bincount(np.searchsorted(tokens, path), minlength=len(tokens)) for path in paths]).astype(np.float32)


def contexts(paths: Sequence[np.ndarray]) -> tuple[np.ndarray, int] | None:
    """(type of each row, suffix length) for the shortest suffix of the paths with enough types; None if there is none."""
    table = np.full((len(paths), MAX_CONTEXT), -1, dtype=np.int64)  # -1: before the path's start
    for line, path in zip(table, paths, strict=True):
        last = path[::-1][:MAX_CONTEXT]
        line[: len(last)] = last
    for length in range(1, MAX_CONTEXT + 1):
        types = np.unique(table[:, :length], axis=0, return_inverse=True)[1].reshape(-1)
        if types.max(initial=0) + 1 >= MIN_TYPES:
            return types, length
    return None


def control_labels(types: np.ndarray, codes: np.ndarray, seed: int = 0) -> np.ndarray:
    """[rows]: one class per type of context, at random, with the frequencies of the real classes.

    Types are drawn in random order, and each takes the class that most rows are still missing of. Independent draws would give
    a few types unequal classes by chance, and a control task that is easier than the label.
    """
    left = np.bincount(codes[codes >= 0]).astype(np.float64)
    sizes = np.bincount(types[codes >= 0], minlength=types.max() + 1)
    order = np.random.default_rng([seed, 0xC0]).permutation(len(sizes))
    of_type = np.zeros(len(sizes), dtype=np.int64)
    for each in order:
        of_type[each] = left.argmax()
        left[of_type[each]] -= sizes[each]
    return np.where(codes >= 0, of_type[types], -1)


def require_same_rows(rows: ProbeRows, blank: ProbeRows) -> None:
    """Raise BadRows unless the rows of an untrained model are the same rows in the same order."""
    same = np.array_equal(rows.numbers, blank.numbers) and len(rows.whole) == len(blank.whole)
    columns = ["root", "example", "position", "token"]
    if not same or not rows.frame[columns].equals(blank.frame[columns]):
        raise BadRows(
            f"The {len(blank)} rows of the untrained model are not the {len(rows)} rows to probe. Make both in the same order, "
            f"with the same groups, positions and tokens."
        )


def untrained_rows(rows: ProbeRows, engine: Engine, sites: Sequence[str], seed: int = 0, batch: int = 32) -> ProbeRows:
    """The same paths through a model of the same shape with random weights; rows in the same order.

    The rows must include all positions of their paths, since every token is computed again.
    """
    model = Decoder(engine.config).initialize(seed).requires_grad_(False).to(engine.model.device)
    for parameter in model.parameters():  # tables of angles stay in float32
        parameter.data = parameter.data.to(engine.model.dtype)
    blank = Engine(model, engine.text)
    frame = rows.frame
    paths = list(row_paths(frame))
    if not all(path.whole.all() for path in paths):
        raise ProbeError("The untrained model needs whole paths. Dump all positions, and give all rows.")
    token = frame["token"].to_numpy()
    names, _ = engine.sites.select(list(sites))
    tensors = {name: torch.zeros(len(frame), *engine.sites.sites[name].shape, dtype=torch.float32) for name in names}
    for start in range(0, len(paths), batch):
        some = paths[start : start + batch]
        branches = blank.prompts([token[path.rows].tolist() for path in some], sites=list(names))
        for path, made in zip(some, branches, strict=True):
            for name in names:
                tensors[name][torch.from_numpy(path.own)] = made.activations[name][len(path.rows) - path.num_own :].float()
            made.release()
    letters = {letter: engine.sites.per_layer(letter) for letter in "STC"}
    return ProbeRows(frame, MemorySource(tensors, letters, rows.about), np.arange(len(frame)))


# ---- goals -----------------------------------------------------------------------------------------------------------
# `Goal`: what a probe predicts at the rows of one position: a label, or a control of it.

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
        if self.kind == "number" and np.ptp(self.codes[self.present]) == 0:
            raise OneClass(f"Label {self.label!r} is {self.codes[self.present][0]:g} at every row. Give rows where it varies.")
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
    tested: np.ndarray | None = None,
    with_controls: bool,
    seed: int,
    metric: str = "accuracy",
) -> tuple[list[Goal], list[tuple[str, str]]]:
    """(goals at one position, what is skipped there: name and reason). Empty if no label can be probed there.

    groups of the rows, as given by `groups.groups_of`
    paths  of the rows, as given by `groups.histories`
    train  [folds, rows]
    tested [rows]: whether any fold tests the row; default: all
    """
    goals: list[Goal] = []
    skipped: list[tuple[str, str]] = []
    tested = np.ones(len(here), dtype=bool) if tested is None else tested
    context = contexts(paths) if with_controls and paths is not None else None
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
            if not (goal.present & tested).any():
                raise BadRows(f"Label {label!r} has no value at any tested row. Choose another position or split.")
        except (BadRows, OneClass) as error:
            skipped.append((f"label {label!r}", str(error)))
            continue
        goals.append(goal)
        if with_controls:
            goals += _shuffled(goal, here.roots, groups, seed)
            if context is not None and goal.kind == "class":
                for draw in range(DRAWS):
                    codes = control_labels(context[0], goal.codes, seed + draw)
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
            except (BadRows, OneClass):
                skipped.append((f"known zero {zero.label!r}", "the label has fewer than two values there"))
                continue
            if (goal.present & tested).any():
                goals.append(goal)
            else:
                skipped.append((f"known zero {zero.label!r}", "no tested row has a value"))
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
