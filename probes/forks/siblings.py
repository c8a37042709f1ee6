"""`sibling_divergence`: how far the states of siblings are apart, depth by depth, and whether the outcome shows in it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from replaylens.engine.request.values import whole
from replaylens.probes.checks import same_length
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.scoring.permutations import PERMUTATIONS, Null, max_statistic
from replaylens.probes.scoring.statistics import LEVEL, Estimate, difference_over_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class SiblingDivergence:
    """Distances of siblings' states at each depth, relative to the mean norm there; intervals over groups of forks."""

    depths: list[int]
    """tokens after the fork"""
    distance: list[Estimate]
    """mean over pairs of siblings"""
    gap: list[Estimate]
    """mean of pairs with different outcomes minus that of pairs with the same, within each fork"""
    p: np.ndarray
    """[depths]: one-sided; siblings of a fork exchange their outcomes"""
    p_family: np.ndarray
    """[depths]: of the largest gap over all depths"""
    pairs: list[int]
    """pairs of siblings at each depth"""

    def __repr__(self) -> str:
        return f"SiblingDivergence({len(self.depths)} depths, {int(self.shown.sum())} with a gap between outcomes)"

    @property
    def shown(self) -> np.ndarray:
        """[depths] bool: siblings with different outcomes are farther apart; 5 % family-wise."""
        return self.p_family <= 1 - LEVEL

    @property
    def frame(self) -> pd.DataFrame:
        """One line per depth."""
        ends = {
            f"{name}{end}": [getattr(each, end or "value") for each in found] for name, found in self._each() for end in _ENDS
        }
        renamed = {name.replace("low", "_low").replace("high", "_high"): values for name, values in ends.items()}
        return pd.DataFrame(
            {"depth": self.depths, "pairs": self.pairs, **renamed, "p": self.p, "p_family": self.p_family, "shown": self.shown}
        )

    def _each(self) -> list[tuple[str, list[Estimate]]]:
        return [("distance", self.distance), ("gap", self.gap)]

    def plot(self) -> "Figure":
        """Distance and gap by depth, with intervals."""
        from replaylens.engine.pictures.figure import picture

        figure = picture(6, 3.4)
        axes = figure.subplots()
        for (name, found), colour in zip(self._each(), ("#59636e", "#0b4f8f"), strict=True):
            axes.plot(self.depths, [each.value for each in found], marker="o", markersize=3, color=colour, label=name)
            axes.fill_between(
                self.depths, [e.low for e in found], [e.high for e in found], color=colour, alpha=0.2, linewidth=0
            )
        axes.axhline(0, color="#8a949e", linewidth=0.8)
        axes.set(xlabel="tokens after the fork", ylabel="relative distance of states")
        figure.legend(loc="outside right upper", fontsize=8)
        return figure

    def _repr_html_(self) -> str:
        table: str = self.frame.round(4).to_html(index=False)
        return table


_ENDS = ("", "low", "high")


def sibling_divergence(
    states: np.ndarray,
    forks: np.ndarray,
    depths: np.ndarray,
    outcomes: np.ndarray,
    *,
    groups: np.ndarray | None = None,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> SiblingDivergence:
    """Compare the states of siblings, which share a fork, at equal depths.

    states    [rows, d]
    forks     [rows]: what siblings share
    depths    [rows]: tokens after the fork; at most one row per sibling and depth
    outcomes  [rows]: the outcome of the sibling that the row belongs to
    groups    [rows]: forks that are not independent, such as those of one root; default: each fork is its own group
    """
    permutations = whole("permutations", permutations, 19, error=ProbeError)
    same_length(states=states.T, forks=forks, depths=depths, outcomes=outcomes)
    groups = forks if groups is None else groups
    generator = np.random.default_rng([seed, 0x51B5])
    kept, distance, gap, pairs, nulls = [], [], [], [], []
    for depth in np.unique(depths).tolist():
        rows = np.flatnonzero(depths == depth)
        found = _Depth.of(states[rows], forks[rows], outcomes[rows], groups[rows])
        if len(found.mixed) < 2 or len(np.unique(found.groups)) < 2:
            continue
        kept.append(depth)
        pairs.append(found.pairs)
        distance.append(difference_over_groups(found.mean, found.groups, bounded=False))
        gap.append(difference_over_groups(found.gaps()[0], found.groups[found.mixed], bounded=False))
        drawn = found.gaps(generator, permutations).mean(1, keepdims=True)
        nulls.append(Null(np.array([gap[-1].value]), drawn))
    if not kept:
        raise BadRows("No depth has two forks with siblings of different outcomes. Give more forks, or more siblings of each.")
    family = np.concatenate(max_statistic(nulls))
    return SiblingDivergence(kept, distance, gap, np.concatenate([null.p for null in nulls]), family, pairs)


@dataclass(frozen=True, eq=False)
class _Depth:
    """Distances within each fork at one depth."""

    tables: list[np.ndarray]
    """[siblings, siblings] of each fork with at least two"""
    outcomes: list[np.ndarray]
    mean: np.ndarray
    """[forks]: over pairs"""
    groups: np.ndarray
    mixed: np.ndarray
    """forks with pairs of equal and of different outcomes"""

    @property
    def pairs(self) -> int:
        return sum(len(table) * (len(table) - 1) // 2 for table in self.tables)

    @classmethod
    def of(cls, states: np.ndarray, forks: np.ndarray, outcomes: np.ndarray, groups: np.ndarray) -> "_Depth":
        states = np.asarray(states, dtype=np.float64)
        scale = np.linalg.norm(states, axis=1).mean()
        tables, names, mean, group = [], [], [], []
        for fork in np.unique(forks):
            rows = np.flatnonzero(forks == fork)
            if len(rows) < 2:
                continue
            apart = np.linalg.norm(states[rows][:, None] - states[rows][None], axis=-1) / (scale or 1.0)
            tables.append(apart)
            names.append(np.unique(outcomes[rows], return_inverse=True)[1])
            mean.append(apart[np.triu_indices(len(rows), 1)].mean())
            group.append(groups[rows[0]])
        mixed = [i for i, own in enumerate(names) if 1 < len(np.unique(own)) < len(own)]
        return cls(tables, names, np.array(mean), np.array(group), np.array(mixed, dtype=np.int64))

    def gaps(self, generator: np.random.Generator | None = None, draws: int = 1) -> np.ndarray:
        """[draws, mixed forks]: different minus equal outcomes; a generator exchanges outcomes between siblings first."""
        out = np.empty((draws, len(self.mixed)))
        for i, fork in enumerate(self.mixed):
            own = np.tile(self.outcomes[fork], (draws, 1))
            own = own if generator is None else generator.permuted(own, axis=1)
            upper = np.triu_indices(own.shape[1], 1)
            apart = self.tables[fork][upper]
            same = own[:, upper[0]] == own[:, upper[1]]  # [draws, pairs]
            out[:, i] = (~same @ apart) / (~same).sum(1) - (same @ apart) / same.sum(1)
        return out
