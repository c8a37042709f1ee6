"""`SweepPosition`: the rows, groups and goals of one position of a sweep, with the predictions of its probes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from replaylens.probes.data.rows import Cell, ProbeRows
from replaylens.probes.design import controls
from replaylens.probes.design.goals import Goal
from replaylens.probes.design.splits import Split
from replaylens.probes.fitting.heldout import Held, Said
from replaylens.probes.fitting.online_code import OnlineCode
from replaylens.probes.scoring.permutations import Null


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
    held: dict[str, dict[Cell, Held]] = field(default_factory=dict)
    untrained: dict[str, dict[Cell, Held]] = field(default_factory=dict)
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

    def add(self, estimator: str, batch: Sequence[Cell], held: Held) -> None:
        """Mutates: adds the predictions of a batch of cells."""
        self.held.setdefault(estimator, {}).update(_by_cell(batch, held))

    def add_untrained(self, estimator: str, batch: Sequence[Cell], held: Held) -> None:
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


def _by_cell(batch: Sequence[Cell], held: Held) -> dict[Cell, Held]:
    return {cell: held.cell(i) for i, cell in enumerate(batch)}
