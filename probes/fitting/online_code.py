"""`OnlineCode`: the description length of a label beside that of its control task.

Online code: Voita & Titov, arXiv 2003.12298. Control task: Hewitt & Liang, arXiv 1909.03368. A probe that reads a property
codes the labels in few bits, but one that memorises codes a random class per type of context just as well. So the length of
the label's code means something only beside that of the control task, in the same blocks and with the same probe. See
`information` for the blocks, and for classes that no earlier block has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from replaylens.probes.design.goals import Goal
from replaylens.probes.errors import ProbeError
from replaylens.probes.fitting.heldout import held_out
from replaylens.probes.fitting.information import code_blocks, code_length


@dataclass(frozen=True)
class OnlineCode:
    """Code lengths of one cell."""

    FIELDS: ClassVar = ("bits", "compression", "control_bits", "control_compression")

    bits: float
    """bits per row of the label"""
    compression: float
    """uniform code / online code of the label; above 1 is shorter than uniform"""
    control_bits: float
    """bits per row of the control task, mean over its draws; NaN without one"""
    control_compression: float
    """NaN without a control task"""

    @property
    def selectivity(self) -> float:
        """Share of the uniform code that the label saves beyond what the control task saves."""
        return 1 / self.control_compression - 1 / self.compression


def online_codes(
    x: Tensor,
    label: Goal,
    controls: Sequence[Goal],
    groups: np.ndarray,
    *,
    seed: int = 0,
    nuisance: np.ndarray | None = None,
) -> list[OnlineCode]:
    """The online code of a label and of draws of its control task, in every cell.

    x         [cells, rows, d]
    controls  goals with the classes of the label, as `controls.control_labels` draws them; each is coded on its own, so that
              the label's length does not depend on them
    groups    [rows]: blocks are made of whole groups (roots), in an order that `seed` sets
    nuisance  as for `held_out`
    """
    if label.kind != "class":
        raise ProbeError(f"Label {label.label!r} is a number. The online code is one of classes.")
    own = _lengths(x, label, groups, seed, nuisance)
    drawn = [_lengths(x, goal, groups, seed, nuisance) for goal in controls]
    found = []
    for cell, (bits, compression) in enumerate(own):
        control = float(np.mean([lengths[cell][0] for lengths in drawn])) if drawn else np.nan
        found.append(OnlineCode(bits, compression, control, bits * compression / control))  # their uniform code is the same
    return found


def _lengths(x: Tensor, goal: Goal, groups: np.ndarray, seed: int, nuisance: np.ndarray | None) -> list[tuple[float, float]]:
    """(bits per row, compression) of each cell. A block with fewer than two classes before it is coded uniformly."""
    train, test = code_blocks(groups, seed)
    fine = [len(np.unique(goal.codes[mask & goal.present])) > 1 for mask in train]
    train, test, there = train[fine], test[fine], goal.present
    if not len(train):
        return [code_length(np.zeros(int(there.sum())), np.zeros(int(there.sum()), dtype=bool), len(goal.classes))] * len(x)
    held = held_out("logistic", x, [goal], train, test, nuisance=nuisance)
    coded = np.asarray(test.any(0))[there]
    return [code_length(held.log_loss[cell, 0][there].astype(np.float64), coded, len(goal.classes)) for cell in range(len(x))]
