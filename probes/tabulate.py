"""From held-out predictions to the lines of a report: scores, intervals, tests, controls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from replaylens.probes import controls, information, statistics
from replaylens.probes.goals import CONTROL, LABEL, SHUFFLED, ZERO, Goal
from replaylens.probes.heldout import Held, held_out
from replaylens.probes.report import Report, about_rows
from replaylens.probes.rows import Cell, ProbeRows
from replaylens.probes.settings import SweepSettings
from replaylens.probes.splits import Split


@dataclass
class SweepPosition:
    """One position of a sweep with its predictions, filled batch by batch."""

    position: str
    rows: ProbeRows
    split: Split
    goals: list[Goal]
    cells: list[Cell]
    skipped: list[tuple[str, str]]
    """controls that are skipped: name and reason"""
    paths: list[np.ndarray] | None
    """tokens of each row's path; None if some are missing"""
    held: dict[str, dict[Cell, Held]] = field(default_factory=dict)
    untrained: dict[str, dict[Cell, Held]] = field(default_factory=dict)
    codes: dict[tuple[Cell, str], tuple[float, float]] = field(default_factory=dict)
    """(cell, label) -> (bits per row, compression)"""

    def add(self, estimator: str, batch: Sequence[Cell], held: Held) -> None:
        """Mutates: adds the predictions of a batch of cells."""
        self.held.setdefault(estimator, {}).update(_by_cell(batch, held))

    def add_untrained(self, estimator: str, batch: Sequence[Cell], held: Held) -> None:
        """Mutates: adds those on the untrained model."""
        self.untrained.setdefault(estimator, {}).update(_by_cell(batch, held))

    def add_code(self, goals: list[Goal], batch: Sequence[Cell], held: Held, coded: np.ndarray) -> None:
        """Mutates: adds the code lengths."""
        for c, cell in enumerate(batch):
            for g, goal in enumerate(goals):
                there = goal.present
                length = information.code_length(held.log_loss[c, g][there], coded[there], len(goal.classes))
                self.codes[cell, goal.label] = length

    def stack(self, estimator: str, goal: int) -> np.ndarray:
        """Predictions [cells, rows] of one goal."""
        return np.stack([self.held[estimator][cell].predicted[0, goal] for cell in self.cells])

    @cached_property
    def bags(self) -> torch.Tensor | None:
        """[1, rows, tokens]: token counts of the rows' paths, shared by all labels."""
        return None if self.paths is None else torch.from_numpy(controls.bags(self.paths)).double()[None]

    def tested(self, goal: Goal) -> np.ndarray:
        """[rows] bool: tested, and with a value of the goal."""
        return self.split.test.any(0) & goal.present


def _by_cell(batch: Sequence[Cell], held: Held) -> dict[Cell, Held]:
    return {cell: held.cell(i) for i, cell in enumerate(batch)}


def tabulate(places: list[SweepPosition], rows: ProbeRows, settings: SweepSettings) -> Report:
    """The whole report. Corrections cover all lines of labels, not those of controls."""
    lines: list[dict[str, Any]] = []
    nulls: list[tuple[list[dict[str, Any]], statistics.Null]] = []
    for place in places:
        for number, goal in enumerate(place.goals):
            if goal.role in (LABEL, ZERO):
                shared: dict[str, Any] = dict.fromkeys(("majority", "token_identity", "bag_of_tokens"))
                if goal.role == LABEL and settings.controls:
                    shared |= _shared_controls(place, goal)
                for estimator in settings.estimators:
                    own, null = _lines(place, number, estimator, shared, settings)
                    lines += own
                    if goal.role == LABEL:
                        nulls.append((own, null))
    family = statistics.max_statistic([null for _, null in nulls])
    for (own, _), corrected in zip(nulls, family, strict=True):
        for line, p in zip(own, corrected, strict=True):
            line["p_family"] = float(p)
    main = [line for line in lines if not line["known_zero"]]
    for line, q in zip(main, statistics.false_discovery(np.array([line["p"] for line in main])), strict=True):
        line["q"] = float(q)
    notes = [f"Skipped {what} at position {place.position!r}: {why}." for place in places for what, why in place.skipped]
    return Report("sweep", lines, about_rows(rows), settings.to_json(), notes)


def _lines(
    place: SweepPosition, number: int, estimator: str, shared: dict[str, Any], settings: SweepSettings
) -> tuple[list[dict[str, Any]], statistics.Null]:
    """One line per cell for one goal and estimator, and the cells' scores on permuted labels."""
    goal = place.goals[number]
    tested = place.tested(goal)
    roots, codes = place.rows.roots[tested], goal.codes[tested]
    predicted = place.stack(estimator, number)[:, tested]
    top, bottom = _ratio(goal, predicted, codes)
    how: dict[str, Any] = dict(folds=len(place.split), least=0.0 if goal.kind == "class" else -np.inf)
    scores = statistics.bootstrap(top, bottom, roots, resamples=settings.resamples, seed=settings.seed, **how)
    orders = statistics.root_permutations(codes, roots, settings.permutations, settings.seed)
    permuted = statistics.permuted_accuracy if goal.kind == "class" else statistics.permuted_product
    null = permuted(predicted, codes, orders)
    lines = []
    for c, (cell, score) in enumerate(zip(place.cells, scores, strict=True)):
        line: dict[str, Any] = {
            "site": cell.site,
            "layer": cell.layer,
            "position": place.position,
            "label": goal.label,
            "estimator": estimator,
            "metric": "accuracy" if goal.kind == "class" else "r2",
            "accuracy": score.value,
            "low": score.low,
            "high": score.high,
            "p": float(null.p[c]),
            "p_family": None,
            "q": None,
            "rows": int(tested.sum()),
            "roots": len(np.unique(roots)),
            "known_zero": goal.role == ZERO,
            "chance": goal.chance,
            **shared,
            **_cell_controls(place, goal, estimator, c, score.value),
            **_information(place, number, estimator, c, tested),
        }
        lines.append(line)
    return lines, null


def _ratio(goal: Goal, predicted: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(top, bottom): the score is the ratio of their sums."""
    if goal.kind == "class":
        return predicted == codes, np.ones(len(codes))
    total = (codes - codes.mean()) ** 2
    return total - (codes - predicted) ** 2, total


def _score(goal: Goal, predicted: np.ndarray, tested: np.ndarray) -> float:
    top, bottom = _ratio(goal, predicted[tested], goal.codes[tested])
    return float(top.sum() / bottom.sum())


def _shared_controls(place: SweepPosition, goal: Goal) -> dict[str, Any]:
    """Controls that do not depend on the model: the same for every cell."""
    if goal.kind == "number":
        return {"majority": 0.0}  # the mean explains nothing
    train, test, tested = place.split.train & goal.present, place.split.test, place.tested(goal)
    tokens = place.rows.frame["token"].to_numpy()
    found = {
        "majority": controls.majority(goal.codes, train, test),
        "token_identity": _score(goal, controls.token_identity(goal.codes, tokens, train, test), tested),
    }
    if place.bags is not None:
        said = held_out("logistic", place.bags, [goal], place.split.train, test).predicted[0, 0]
        found["bag_of_tokens"] = _score(goal, said, tested)
    return found


def _cell_controls(place: SweepPosition, goal: Goal, estimator: str, c: int, score: float) -> dict[str, Any]:
    """Controls of one cell: shuffled labels, control task with selectivity, untrained model."""
    found: dict[str, Any] = dict.fromkeys(("shuffled", "control_task", "selectivity", "untrained"))
    if goal.role != LABEL:
        return found
    for number, other in enumerate(place.goals):
        if other.label != goal.label or other.role not in (SHUFFLED, CONTROL):
            continue
        value = _score(other, place.held[estimator][place.cells[c]].predicted[0, number], place.tested(other))
        found["shuffled" if other.role == SHUFFLED else "control_task"] = value
    if found["control_task"] is not None:
        found["selectivity"] = score - found["control_task"]
    if estimator in place.untrained:
        said = place.untrained[estimator][place.cells[c]].predicted[0, place.goals.index(goal)]
        found["untrained"] = _score(goal, said, place.tested(goal))
    return found


def _information(place: SweepPosition, number: int, estimator: str, c: int, tested: np.ndarray) -> dict[str, Any]:
    """Bits and calibration, for estimators that give probabilities."""
    goal = place.goals[number]
    found: dict[str, Any] = dict.fromkeys(("v_information", "calibration_error", "code_bits", "compression"))
    held = place.held[estimator][place.cells[c]]
    loss = held.log_loss[0, number][tested]
    if goal.kind == "class" and not np.isnan(loss).any():
        null = information.null_log_loss(goal.codes, place.split.train, place.split.test, len(goal.classes))[tested]
        correct = held.predicted[0, number][tested] == goal.codes[tested]
        confidence = held.confidence[0, number][tested].astype(np.float64)
        found["v_information"] = information.v_information(loss.astype(np.float64), null)
        found["calibration_error"] = information.calibration_error(confidence, correct)
    if (place.cells[c], goal.label) in place.codes and estimator == "logistic":
        found["code_bits"], found["compression"] = place.codes[place.cells[c], goal.label]
    return found
