"""From held-out predictions to the lines of a report: scores, intervals, tests, controls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch

from replaylens.probes import controls, intervals, registry
from replaylens.probes.controls import CONTROL, LABEL, SHUFFLED, ZERO, Goal
from replaylens.probes.groups import path_keys
from replaylens.probes.heldout import (
    HeldOutPredictions,
    OnlineCode,
    Said,
    areas_of,
    constant_score,
    estimates,
    gains,
    held_out_again,
    score,
)
from replaylens.probes.intervals import Estimate
from replaylens.probes.permutations import Null, max_statistic
from replaylens.probes.report import Report, about_rows
from replaylens.probes.rows import Cell, ProbeRows
from replaylens.probes.settings import SweepSettings
from replaylens.probes.splits import Split, fold_of_groups
from replaylens.probes.verdicts import ERROR, joint_level, verdict_of

# ---- sweep position --------------------------------------------------------------------------------------------------
# `SweepPosition`: the rows, groups and goals of one position of a sweep, with the predictions of its probes.


@dataclass
class SweepPosition:
    """One position of a sweep, filled batch by batch."""

    position: str
    rows: ProbeRows
    """every observation once"""
    groups: np.ndarray
    """[rows]: see `groups`"""
    split: Split
    goals: list[Goal]
    cells: list[Cell]
    skipped: list[tuple[str, str]]
    """what is skipped: name and reason"""
    paths: list[np.ndarray] | None
    """tokens of each row's path; None if some are missing"""
    copies: np.ndarray
    """[rows]: how many of the given rows are this observation"""
    rule: str = ""
    """which rows are one group, in words"""
    held: dict[str, dict[Cell, HeldOutPredictions]] = field(default_factory=dict)
    untrained: dict[str, dict[Cell, HeldOutPredictions]] = field(default_factory=dict)
    nulls: dict[tuple[str, str], dict[Cell, Null]] = field(default_factory=dict)
    """(estimator, label) -> scores of each cell on permuted labels"""
    codes: dict[tuple[Cell, str], OnlineCode] = field(default_factory=dict)
    """by cell and label"""

    @classmethod
    def nothing(cls, position: str, rows: ProbeRows, why: str) -> "SweepPosition":
        """A position that cannot be probed."""
        masks = np.zeros((0, len(rows)), dtype=bool)
        none = Split("none", masks, masks, rows.roots)
        return cls(position, rows, rows.roots, none, [], [], [("everything", why)], None, np.ones(len(rows)))

    # ---- filling ------------------------------------------------------------------------------------------------

    def add(self, estimator: str, batch: Sequence[Cell], held: HeldOutPredictions) -> None:
        """Mutates: adds the predictions of a batch of cells."""
        self.held.setdefault(estimator, {}).update(_by_cell(batch, held))

    def add_untrained(self, estimator: str, batch: Sequence[Cell], held: HeldOutPredictions) -> None:
        """Mutates: adds those on the untrained model."""
        self.untrained.setdefault(estimator, {}).update(_by_cell(batch, held))

    def add_null(self, estimator: str, goal: Goal, batch: Sequence[Cell], null: Null) -> None:
        """Mutates: adds the permutation test of a batch of cells."""
        apart = {c: Null(null.observed[i : i + 1], null.drawn[:, i : i + 1], null.constant) for i, c in enumerate(batch)}
        self.nulls.setdefault((estimator, goal.label), {}).update(apart)

    def add_code(self, goal: Goal, batch: Sequence[Cell], lengths: dict[str, np.ndarray]) -> None:
        """Mutates: adds the code lengths of a label, each an array over cells."""
        for c, cell in enumerate(batch):
            self.codes[cell, goal.label] = OnlineCode(**{name: float(values[c]) for name, values in lengths.items()})

    # ---- reading ------------------------------------------------------------------------------------------------

    def tested(self, goal: Goal) -> np.ndarray:
        """[rows] bool: tested, and with a value of the goal."""
        return self.split.test.any(0) & goal.present

    def said(self, estimator: str, goal: int, *, untrained: bool = False) -> Said:
        """What the probes of all cells say of the tested rows about one goal."""
        held, own = self.untrained[estimator] if untrained else self.held[estimator], self.goals[goal]
        parts = [held[cell].of(goal, own, self.tested(own)) for cell in self.cells]
        return Said(np.concatenate([part.predicted for part in parts]), np.concatenate([part.score for part in parts]))

    def null(self, estimator: str, goal: Goal) -> Null | None:
        """The permutation test of all cells; None if the estimator is not refitted."""
        apart = self.nulls.get((estimator, goal.label))
        if apart is None:
            return None
        nulls = [apart[cell] for cell in self.cells]
        observed, drawn = np.concatenate([each.observed for each in nulls]), np.hstack([each.drawn for each in nulls])
        return Null(observed, drawn, nulls[0].constant)

    @cached_property
    def fold(self) -> np.ndarray:
        """[rows]: the fold that tests each row; 0 for rows that none tests."""
        return np.asarray(self.split.test.argmax(0))

    @cached_property
    def bags(self) -> torch.Tensor | None:
        """[1, rows, tokens]: token counts of the rows' paths, shared by all labels."""
        return None if self.paths is None else torch.from_numpy(controls.bags(self.paths)).double()[None]


def _by_cell(batch: Sequence[Cell], held: HeldOutPredictions) -> dict[Cell, HeldOutPredictions]:
    return {cell: held.cell(i) for i, cell in enumerate(batch)}


# ---- tabulate --------------------------------------------------------------------------------------------------------

_ENDS = {"": "value", "_low": "low", "_high": "high"}


@dataclass(frozen=True, eq=False)
class SweepBlock:
    """The cells of one position, label and estimator, which are tested together."""

    place: SweepPosition
    number: int
    """of the goal"""
    estimator: str

    @property
    def goal(self) -> Goal:
        return self.place.goals[self.number]

    @property
    def tested(self) -> np.ndarray:
        return self.place.tested(self.goal)

    @property
    def groups(self) -> np.ndarray:
        return np.asarray(self.place.groups[self.tested])

    @property
    def folds(self) -> int:
        return len(self.place.split)

    def said(self, number: int | None = None, *, untrained: bool = False) -> Said:
        """Of the tested rows, about this goal or the control with that number."""
        return self.place.said(self.estimator, self.number if number is None else number, untrained=untrained)

    def gains(self, said: Said, goal: Goal | None = None, fold: np.ndarray | None = None) -> np.ndarray:
        """[cells, tested rows], whose means are the scores."""
        return gains(said, goal or self.goal, self.tested, self.place.fold if fold is None else fold)

    def controls(self, role: str) -> list[int]:
        """The numbers of this label's controls of a role."""
        goals = self.place.goals
        return [i for i, other in enumerate(goals) if other.role == role and other.label == self.goal.label]


def tabulate(places: list[SweepPosition], rows: ProbeRows, settings: SweepSettings, notes: list[str]) -> Report:
    """The whole report. Corrections cover all lines of labels, not those of controls."""
    blocks = [
        SweepBlock(place, number, estimator)
        for place in places
        for number, goal in enumerate(place.goals)
        if goal.role in (LABEL, ZERO)
        for estimator in settings.estimators
        if goal.role == LABEL or goal.kind in registry.get(estimator).kinds
    ]
    main = [block for block in blocks if block.goal.role == LABEL]
    shared: dict[tuple[str, int], Shared] = {}
    for block in blocks:
        if (where := (block.place.position, block.number)) not in shared:
            shared[where] = _shared(block, settings)
    level = (
        joint_level([(block.gains(block.said()), block.groups) for block in main], settings.seed) if main else intervals.LEVEL
    )
    made = [(b, list(_lines(b, shared[b.place.position, b.number], ERROR / len(main), level, settings))) for b in blocks]
    _correct([(block, lines) for block, lines in made if block.goal.role == LABEL and not _refused(block, settings)])
    for block, own in made:
        if block.goal.role == ZERO:
            for line, p in zip(own, _corrected(block), strict=True):
                line["p"] = float(p)
    lines, cells = [line for _, own in made for line in own], sum(len(block.place.cells) for block in main)
    for line in lines:
        line["cells"] = cells
        found = verdict_of(line)
        line |= found.columns if found else dict.fromkeys(("verdict", "bound", "needed", "decided_by"))
    source = about_rows(rows) | {"grouping": {place.position: place.rule for place in places}}
    return Report("sweep", lines, source, settings.to_json(), notes)


def _refused(block: SweepBlock, settings: SweepSettings) -> bool:
    """Whether there is no p: the estimator is not fitted again for each permutation, or no permutations are asked for. A t test
    on fits that were made once would be off: too strict by half for some estimators, too lax for others."""
    there = block.place.null(block.estimator, block.goal) is not None
    return not there and (not settings.permutations or not registry.get(block.estimator).refits)


def _correct(made: list[tuple[SweepBlock, list[dict[str, Any]]]]) -> None:
    """Mutates the lines: p-values of each cell, corrected for the grid, and false discovery rates.

    Cells with permutation tests are corrected by their largest score under permutation, those where labels cannot change
    places, which have a t test, by their number (Bonferroni). If a grid has both kinds, each gets half of the error.
    """
    permuted = [(own, null) for block, own in made if (null := block.place.null(block.estimator, block.goal)) is not None]
    others = [(block, own) for block, own in made if block.place.null(block.estimator, block.goal) is None]
    kinds = 2 if permuted and others else 1
    for (own, null), family in zip(permuted, max_statistic([null for _, null in permuted]), strict=True):
        for i, line in enumerate(own):
            line["p"], line["p_family"] = float(null.p[i]), min(1.0, kinds * float(family[i]))
    count = kinds * sum(len(own) for _, own in others)
    for block, own in others:
        for line, p in zip(own, _corrected(block), strict=True):
            line["p"], line["p_family"] = float(p), min(1.0, count * float(p))
    lines = [line for _, own in made for line in own]
    for line, q in zip(lines, intervals.false_discovery(np.array([line["p"] for line in lines])), strict=True):
        line["q"] = float(q)


def _corrected(block: SweepBlock) -> np.ndarray:
    """[cells]: p-values of a t test that the score is above that of the most frequent class, or above r2 = 0."""
    return intervals.corrected_p(block.gains(block.said()) - _constant(block), block.groups, block.folds)


def _constant(block: SweepBlock) -> np.ndarray:
    """[tested rows]: whether the most frequent class is right; for known zeros, the chance of a guess; for numbers, 0."""
    goal, codes = block.goal, block.goal.codes[block.tested]
    if goal.chance is not None or goal.metric != "accuracy":
        return np.full(len(codes), constant_score(goal, block.tested) if goal.chance is None else goal.chance)
    return np.asarray(codes == np.bincount(codes).argmax(), dtype=float)


def _lines(
    block: SweepBlock, shared: "Shared", error: float, level: float, settings: SweepSettings
) -> Iterator[dict[str, Any]]:
    """One line per cell.

    error  that the bounds of the margins of all cells together may have
    level  of an interval at which those of the whole grid hold jointly
    """
    place, goal = block.place, block.goal
    how: dict[str, Any] = dict(fold=place.fold, groups=block.groups, folds=block.folds)
    scores, areas = estimates(block.said(), goal, block.tested, **how), areas_of(block.said(), goal, block.tested, **how)
    jointly = estimates(block.said(), goal, block.tested, **how, level=level) if goal.role == LABEL else scores
    chance = constant_score(goal, block.tested) if goal.chance is None else goal.chance
    beyond = _controls(block, shared, error) if goal.role == LABEL else [{} for _ in scores]
    more = _metrics(block, areas)
    null = place.null(block.estimator, goal)
    for c, (cell, found, wide) in enumerate(zip(place.cells, scores, jointly, strict=True)):
        yield {
            "site": cell.site,
            "layer": cell.layer,
            "position": place.position,
            "label": goal.label,
            "estimator": block.estimator,
            "metric": goal.metric,
            "accuracy": found.value,
            "low": found.low,
            "high": found.high,
            "low_family": wide.low if goal.role == LABEL else None,
            "high_family": wide.high if goal.role == LABEL else None,
            **{name: values[c] for name, values in more.items()},
            "p": None,
            "p_family": None,
            "q": None,
            "test": None if _refused(block, settings) else _test_name(block, null),
            "rows": int(place.copies[block.tested].sum()),
            "distinct": len(np.unique(path_keys(place.rows)[block.tested])),
            "roots": len(np.unique(place.rows.roots[block.tested])),
            "groups": len(np.unique(block.groups)),
            "known_zero": goal.role == ZERO,
            "chance": chance,
            **{name: values and values[1] for name, values in shared.items()},
            "shuffled": _shuffled(block, null, c),
            **(_NO_CONTROLS | beyond[c]),
            **_information(block, c),
        }


def _test_name(block: SweepBlock, null: Null | None) -> str | None:
    if block.goal.role != LABEL:
        return None
    if null is None:
        return "corrected t"
    return "permutation" if block.folds == 1 else "refitted permutation"


def _metrics(block: SweepBlock, areas: list[Estimate | None]) -> dict[str, list[float | None]]:
    """Metrics of classes whatever the goal's own, one value per cell."""
    goal, none = block.goal, [None] * len(areas)
    ends: dict[str, Any] = {f"auroc{end}": [each and getattr(each, name) for each in areas] for end, name in _ENDS.items()}
    if goal.kind == "number":
        return ends | {"balanced_accuracy": none, "f1": none}
    codes, predicted = goal.codes[block.tested], block.said().predicted
    found = (intervals.balanced_accuracy(predicted, codes), intervals.f1(predicted, codes, len(goal.classes)))
    return ends | {name: values.tolist() for name, values in zip(("balanced_accuracy", "f1"), found, strict=True)}


# ---- controls ---------------------------------------------------------------------------------------------------------

_NO_CONTROLS = dict.fromkeys(
    (
        "control_task",
        "selectivity",
        "selectivity_low",
        "selectivity_high",
        "untrained",
        "margin",
        "margin_over",
        "margin_without_task",
        "margin_value",
        "margin_error",
        "margin_high",
    )
)


class _How(TypedDict):
    level: float
    extra: np.ndarray


_REPEATS = 5
"""cross-validations of cheap controls: their mean varies less, so that the lead of a probe over them is seen sooner"""
_FEW = 1000
"""rows up to which they are repeated; more rows vary little"""
Shared = dict[str, tuple[np.ndarray | None, float] | None]
"""control -> (gain of each tested row, score)"""


def _shared(block: SweepBlock, settings: SweepSettings) -> Shared:
    """Controls that do not depend on the model: the same for every cell."""
    place, goal, frame = block.place, block.goal, block.place.rows.frame
    found: Shared = dict.fromkeys(("majority", "token_identity", "position_only", "bag_of_tokens"))
    if goal.role != LABEL or not settings.controls:
        return found
    repeats = _REPEATS if block.folds > 1 and len(place.rows) <= _FEW else 1
    again = [place.split, *(_refolded(place, settings.seed + n) for n in range(1, repeats))]
    guess = constant_score(goal, block.tested)
    if goal.metric == "accuracy":
        guess = controls.majority(goal.codes, place.split.train & goal.present, place.split.test)
    found["majority"] = (None, guess)
    if goal.kind == "class" and place.rows.has_tokens:
        found["token_identity"] = _by_value(block, frame["token"].to_numpy(), again)
    if goal.kind == "class" and (bins := controls.position_bins(frame["position"], goal.present)) is not None:
        found["position_only"] = _by_value(block, bins, again)
    if place.bags is not None:
        simple = "logistic" if goal.kind == "class" else "ridge"
        held = held_out_again(simple, place.bags, goal, again)
        found["bag_of_tokens"] = _scored(block, [each.of(0, goal, block.tested) for each in held], again)
    return found


def _by_value(block: SweepBlock, values: np.ndarray, again: list[Split]) -> tuple[np.ndarray, float] | None:
    """A control that knows one value of each row, such as its token."""
    goal = block.goal
    how = [(each.train & goal.present, each.test) for each in again]
    shares = [controls.shares_of(goal.codes, values, *masks, len(goal.classes))[block.tested] for masks in how]
    said = [controls.token_identity(goal.codes, values, *masks)[block.tested] for masks in how]
    scores = [each[:, 1:] if goal.outputs == 1 else each for each in shares]
    return _scored(block, [Said(one[None], own[None]) for one, own in zip(said, scores, strict=True)], again)


def _refolded(place: SweepPosition, seed: int) -> Split:
    """The split with its groups dealt out to folds anew."""
    split, fold = place.split, fold_of_groups(place.groups, len(place.split), seed)
    inside = np.arange(len(split))[:, None] == fold
    return Split(split.name, ~inside & split.train.any(0), inside & split.test.any(0), split.roots)


def _scored(block: SweepBlock, said: list[Said], again: list[Split]) -> tuple[np.ndarray, float] | None:
    """(gains [tested rows], score), as means over repeated cross-validations; None for an area if none has a fold with two
    classes."""
    every = [block.gains(each, fold=split.test.argmax(0))[0] for each, split in zip(said, again, strict=True)]
    known = [gains for gains in every if not np.isnan(gains).any()]
    if not known:
        return None
    mean = np.mean(known, axis=0)
    return mean, float(mean.mean())


def _controls(block: SweepBlock, shared: Shared, error: float) -> list[dict[str, Any]]:
    """For each cell: controls of its own, and how far the score is above all controls at least.

    error  that the lower bounds of all cells together may have
    """
    own = block.gains(block.said())
    fits = intervals.variance_of_fits(own, block.groups, block.folds)  # of the probe; the control's own is small in comparison
    how = _How(level=1 - error, extra=fits)
    found: list[dict[str, Any]] = [{} for _ in own]
    bounds = {
        name: intervals.one_sided_bounds(own - values[0], block.groups, **how)
        for name, values in shared.items()
        if values is not None and values[0] is not None
    }
    if numbers := block.controls(CONTROL):
        bounds["control_task"] = _selectivity(block, own, numbers, found, error)
    if block.estimator in block.place.untrained:
        blank = block.gains(block.said(untrained=True))
        bounds["untrained"] = intervals.one_sided_bounds(own - blank, block.groups, **how)
        for line, value in zip(found, blank.mean(1), strict=True):
            line["untrained"] = float(value)
    for c, line in enumerate(found):
        if bounds:
            line["margin_over"] = min(bounds, key=lambda name: bounds[name].low[c])
            least = bounds[line["margin_over"]]
            line |= {
                "margin": float(least.low[c]),
                "margin_value": float(least.value[c]),
                "margin_error": float(least.error[c]),
            }
            line["margin_high"] = float(min(bound.high[c] for bound in bounds.values()))
        if others := [bound.low[c] for name, bound in bounds.items() if name != "control_task"]:
            line["margin_without_task"] = float(min(others))
    return found


def _selectivity(
    block: SweepBlock, own: np.ndarray, numbers: list[int], found: list[dict[str, Any]], error: float
) -> intervals.Bounds:
    """Bounds [cells] of the selectivity. Mutates `found`: adds it with its interval.

    The control tasks are a sample of all random ones, so their spread counts as well.
    """
    goals = block.place.goals
    drawn = np.stack([block.gains(block.said(number), goals[number]) for number in numbers])  # [draws, cells, rows]
    spread = drawn.mean(2).var(0, ddof=1) / len(numbers) if len(numbers) > 1 else np.zeros(len(own))
    how: dict[str, Any] = dict(folds=block.folds, extra=spread)
    bounds = intervals.one_sided_bounds(own - drawn.mean(0), block.groups, level=1 - error, **how)
    for c, line in enumerate(found):
        alone = intervals.difference_over_groups((own - drawn.mean(0))[c], block.groups, folds=block.folds, extra=spread[c])
        line["control_task"] = float(drawn[:, c].mean())
        line |= {"selectivity": float(bounds.value[c]), "selectivity_low": alone.low, "selectivity_high": alone.high}
    return bounds


def _shuffled(block: SweepBlock, null: Null | None, c: int) -> float | None:
    """The mean score on permuted labels, or that of one shuffled control if no permutation was fitted."""
    if block.goal.role != LABEL:
        return None
    if null is not None and block.folds > 1:
        return float(null.drawn[:, c].mean())
    numbers = block.controls(SHUFFLED)
    if not numbers:
        return None
    return float(score(block.said(numbers[0]), block.place.goals[numbers[0]], block.tested, block.place.fold)[c])


# ---- information ------------------------------------------------------------------------------------------------------


def _information(block: SweepBlock, c: int) -> dict[str, Any]:
    """Bits and calibration, for estimators that give probabilities."""
    place, goal, tested = block.place, block.goal, block.tested
    names = ("v_information", "calibration_error", "code_bits", "compression", "control_code_bits", "control_compression")
    found: dict[str, Any] = dict.fromkeys(names)
    held = place.held[block.estimator][place.cells[c]]
    loss = held.log_loss[0, block.number][tested]
    if goal.kind == "class" and not np.isnan(loss).any():
        null = registry.null_log_loss(goal.codes, place.split.train, place.split.test, len(goal.classes))[tested]
        correct = held.predicted[0, block.number][tested] == goal.codes[tested]
        confidence = held.confidence[0, block.number][tested].astype(np.float64)
        found["v_information"] = registry.v_information(loss.astype(np.float64), null)
        found["calibration_error"] = registry.calibration_error(confidence, correct)
    if (place.cells[c], goal.label) in place.codes and block.estimator == "logistic":
        code = place.codes[place.cells[c], goal.label]
        found |= {"code_bits": code.bits, "compression": code.compression}
        found |= {"control_code_bits": code.control_bits, "control_compression": code.control_compression}
    return found
