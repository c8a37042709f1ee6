"""`resilience`: how often the content of a unit comes back when it is resampled."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from replaylens.probes.errors import BadRows
from replaylens.probes.forks.distributions import interval
from replaylens.probes.forks.multinomials import LEVEL
from replaylens.probes.forks.rollout_texts import RolloutTexts
from replaylens.probes.forks.similarity import Similar, overlap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Resilience:
    """Shares of rollouts from before each unit, with intervals. NaN, with [0, 1], where there are no rollouts."""

    positions: list[int]
    texts: list[str]
    rollouts: np.ndarray
    """[units]: rollouts from before the unit"""
    at_once: np.ndarray
    """[units]: share of rollouts whose first unit says the same"""
    ever: np.ndarray
    ever_low: np.ndarray
    ever_high: np.ndarray
    """[units]: share of rollouts with a unit that says the same, anywhere; ends of its interval"""
    control: np.ndarray
    """[units]: the same share for the other units of the path, on average: what similarity finds without resilience.
    NaN for a path of one unit"""

    def __repr__(self) -> str:
        return f"Resilience({len(self.texts)} units, {int(self.rollouts.sum())} rollouts)"

    @property
    def frame(self) -> pd.DataFrame:
        """One line per unit. `rounds`: how many times it must be removed until it stays away, on average."""
        with np.errstate(divide="ignore"):
            rounds = 1 / (1 - self.ever)
        names = ("rollouts", "at_once", "ever", "ever_low", "ever_high", "control")
        columns = {name: getattr(self, name) for name in names}
        return pd.DataFrame({"position": self.positions, "text": self.texts, **columns, "rounds": rounds})

    def plot(self) -> "Figure":
        """Resilience by unit with intervals, and its control."""
        from replaylens.engine.pictures.figure import picture

        figure = picture(min(0.3 * len(self.texts), 18) + 3, 3.2)
        axes = figure.subplots()
        x = np.arange(len(self.texts))
        axes.vlines(x, self.ever_low, self.ever_high, color="#8a949e")
        axes.scatter(x, self.ever, s=24, color="#0b4f8f", zorder=3, label="comes back")
        axes.scatter(x, self.control, s=24, marker="_", color="#14171a", zorder=3, label="other units")
        axes.set(xlabel="unit", ylabel="share of rollouts", ylim=(-0.02, 1.02), xticks=x)
        figure.legend(loc="outside right upper", fontsize=8)
        return figure

    def _repr_html_(self) -> str:
        table: str = self.frame.round(3).to_html(index=False)
        return table


def resilience(rollouts: RolloutTexts, *, similar: Similar | None = None, level: float = LEVEL) -> Resilience:
    """How often each unit's content comes back in rollouts from before it.

    similar  whether two units say the same; default: `overlap()`, at least six of ten words in common
    """
    if not len(rollouts):
        raise BadRows("There are no rollouts. Resample at the units whose resilience is asked for.")
    same, texts, memory = similar or overlap(), rollouts.texts, {}

    def says(unit: str, number: int) -> bool:
        key = (unit, number)
        if key not in memory:  # rollouts repeat each other, and `similar` may be slow
            memory[key] = same(texts[number], unit)
        return memory[key]

    forks = len(texts)
    total, first, found = np.zeros(forks, dtype=np.int64), np.zeros(forks), np.zeros((forks, forks))
    for fork, units in zip(rollouts.fork.tolist(), rollouts.units, strict=True):
        total[fork] += 1
        first[fork] += bool(units) and says(units[0], fork)
        found[fork] += [any(says(unit, number) for unit in units) for number in range(forks)]
    with np.errstate(invalid="ignore", divide="ignore"):
        every = found / total[:, None]
        at_once, ever = first / total, np.diag(every).copy()
        control = (every.sum(1) - ever) / (forks - 1) if forks > 1 else np.full(forks, np.nan)
    low, high = interval(ever, total, level)
    return Resilience(rollouts.positions, texts, total, at_once, ever, low, high, control)
