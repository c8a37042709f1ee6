"""`RolloutTexts`: the texts and outcomes of rollouts from forks along one path."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from replaylens.engine.pictures.rollout_tree import RolloutTree
from replaylens.engine.resampling.counts import OutcomeCounts
from replaylens.engine.resampling.rollouts import Rollouts
from replaylens.engine.resampling.sentences import sentence_spans
from replaylens.probes.checks import mask_of
from replaylens.probes.errors import BadRows

_NO_ANSWER = "no answer"


@dataclass(frozen=True, eq=False)
class RolloutTexts:
    """One entry per rollout. Raises BadRows for lengths or outcomes that do not fit."""

    positions: list[int]
    """token positions of the forks, ascending"""
    texts: list[str]
    """the unit of the path that starts at each position"""
    outcomes: list[str]
    """all outcomes, in the order of columns and colours"""
    fork: np.ndarray
    """int64 [rollouts]: the number of the position that a rollout starts from"""
    units: list[tuple[str, ...]]
    """[rollouts]: the units of its text; the first takes the place of the path's"""
    outcome: list[str]
    """[rollouts]"""

    def __post_init__(self) -> None:
        lengths = {len(self.fork), len(self.units), len(self.outcome)}
        if len(lengths) > 1 or len(self.positions) != len(self.texts):
            raise BadRows(
                f"{len(self.fork)} forks, {len(self.units)} units and {len(self.outcome)} outcomes of rollouts, "
                f"{len(self.positions)} positions and {len(self.texts)} texts. Give one of each per rollout and per position."
            )
        unknown = sorted(set(self.outcome) - set(self.outcomes))
        if unknown:
            raise BadRows(f"Outcome {unknown[0]!r} is not among {', '.join(self.outcomes)}. List it in `outcomes`.")
        if len(self.fork) and (self.fork.min() < 0 or self.fork.max() >= len(self.positions)):
            raise BadRows(f"Forks go from 0 to {len(self.positions) - 1}; given: {self.fork.min()} to {self.fork.max()}.")

    def __len__(self) -> int:
        return len(self.fork)

    def __repr__(self) -> str:
        return f"RolloutTexts({len(self)} from {len(self.positions)} forks, {', '.join(self.outcomes)})"

    @classmethod
    def of(cls, rollouts: Rollouts) -> "RolloutTexts":
        """Of what `branch.resample` returns; units are sentences (docs/resampling.md)."""
        split = lambda text: [text[start:end] for start, end in sentence_spans(text)]  # noqa: E731
        return cls.of_frame(rollouts.frame, rollouts.outcomes().texts, split=split)

    @classmethod
    def of_frame(
        cls,
        frame: pd.DataFrame,
        texts: Sequence[str],
        *,
        outcomes: Sequence[str] | None = None,
        split: Callable[[str], Sequence[str]] | None = None,
    ) -> "RolloutTexts":
        """From a frame with the columns `position`, `outcome` (None: no answer) and `units`, one line per rollout.

        texts     the path's unit at each position that occurs, in ascending order
        outcomes  their order; default: by frequency
        split     makes units of the column `text`, in place of the column `units`
        """
        wanted = "units" if split is None else "text"
        missing = [name for name in ("position", "outcome", wanted) if name not in frame]
        if missing:
            raise BadRows(f"The frame has no column {missing[0]!r}. It has {', '.join(map(str, frame.columns))}.")
        positions, fork = np.unique(frame["position"].to_numpy(), return_inverse=True)
        names = [_NO_ANSWER if pd.isna(name) else str(name) for name in frame["outcome"]]
        order = list(outcomes) if outcomes is not None else list(pd.Series(names, dtype=object).value_counts().index)
        units = [tuple(each if split is None else split(each)) for each in frame[wanted]]
        return cls(positions.tolist(), list(texts), order, fork.astype(np.int64), units, names)

    def counts(self) -> OutcomeCounts:
        """The outcomes counted at each position."""
        place = {name: k for k, name in enumerate(self.outcomes)}
        table = np.zeros((len(self.positions), len(self.outcomes)), dtype=np.int64)
        np.add.at(table, (self.fork, np.array([place[name] for name in self.outcome], dtype=np.int64)), 1)
        return OutcomeCounts(self.positions, self.outcomes, table, self.texts)

    def where(self, mask: np.ndarray) -> "RolloutTexts":
        """Some of the rollouts; positions and outcomes stay."""
        at = np.flatnonzero(mask_of("mask of rollouts", mask, len(self)))
        units, outcome = [self.units[i] for i in at], [self.outcome[i] for i in at]
        return RolloutTexts(self.positions, self.texts, self.outcomes, self.fork[at], units, outcome)

    def tree(self, title: str = "", prompt: str = "") -> RolloutTree:
        """The picture of all rollouts, folded where they say the same; `prompt` is shown before the path."""
        number = {name: k for k, name in enumerate(self.outcomes)}
        return RolloutTree(
            tuple(self.texts),
            tuple(self.outcomes),
            tuple(self.fork.tolist()),
            tuple(self.units),
            tuple(number[name] for name in self.outcome),
            title or f"{len(self)} rollouts from {len(self.positions)} forks",
            prompt,
        )
