"""What a verdict says and when it is said: three outcomes, one family of tests, one correction. All verbs take it from here.

shown      the effect is above 0: p <= 0.05, corrected for all cells and questions of the call
below      it is not, and the call can tell: the upper bound, which holds for all cells jointly, is below `BOUND`. Lack of power
           is no absence, so this takes as much evidence as the opposite (an equivalence test; Schuirmann 1987)
undecided  neither; with the number of independent groups that would decide, if the estimate stayed
inverted   the effect is below 0 as surely as a shown one is above: a probe that reads the opposite

One family is all that a call tests. Each group's sum keeps its size and takes a random sign, the same in every cell: where
there is no effect, sums are as likely as their opposites. p is the share of signs for which the largest of all cells'
statistics reaches a cell's own (Westfall and Young 1993): exact for symmetric sums, whatever cells have in common. Sweeps,
which can fit again, exchange labels instead (`permutations`). Intervals of several cells take the level at which they hold
jointly, by the same signs, so the best cell may be picked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from replaylens.probes.intervals import LEVEL, Estimate, cross_validation, group_sums

# ---- words -----------------------------------------------------------------------------------------------------------

SHOWN, BELOW, UNDECIDED, INVERTED = "shown", "below", "undecided", "inverted"
LOOKS = {SHOWN: ("o", "white"), BELOW: ("x", "white"), UNDECIDED: ("$?$", "0.9"), INVERTED: ("v", "tab:red")}
"""marker and colour of an outcome in figures; a page colours by the same outcomes"""
ERROR = 0.05
"""share of calls without any effect that may still show one"""
BOUND = 0.1
"""an effect below this is as good as none, in the units of the score: ten points of accuracy, AUROC, r2 or flipped answers,
a tenth of a nat"""
POWER = 0.8
"""with which the number of groups of an undecided verdict would decide"""


@dataclass(frozen=True)
class Conclusion:
    """An outcome with what it rests on."""

    outcome: str
    bound: float = BOUND
    """what the effect is shown to be below, or would have to be"""
    needed: int | None = None
    """independent groups that would decide, if it is undecided; None if that cannot be told"""
    decided_by: str | None = None
    """the test or control that decided"""

    @property
    def head(self) -> str:
        """The outcome as a sentence begins with it: the same words in every text."""
        match self.outcome:
            case "below":
                return f"Shown to be below {self.bound:g}"
            case "undecided" if self.needed is not None:
                return f"Undecided: n would have to be about {self.needed}"
        return self.outcome.capitalize()

    def __str__(self) -> str:
        return self.head

    @property
    def columns(self) -> dict[str, Any]:
        """As a line of a report holds it."""
        return {"verdict": self.outcome, "bound": self.bound, "needed": self.needed, "decided_by": self.decided_by}


def of_line(line: Mapping[str, Any]) -> Conclusion:
    """The verdict that a line of a report holds; undecided if it holds none."""
    needed: Any = line.get("needed")
    bound: Any = line.get("bound")
    outcome = line.get("verdict")
    known = outcome if outcome in LOOKS else UNDECIDED  # of earlier versions: "readable", "not shown"
    return Conclusion(
        str(known),
        BOUND if _missing(bound) else float(bound),
        None if _missing(needed) else int(needed),
        None if _missing(by := line.get("decided_by")) else by,
    )


def decide(
    p: float,
    value: float,
    upper: float,
    error: float,
    groups: float,
    *,
    cells: int = 1,
    bound: float = BOUND,
    decided_by: str | None = None,
    inverted: float = 1.0,
) -> Conclusion:
    """The verdict on an effect.

    p         corrected for the family
    upper     its upper bound, which holds for all cells jointly
    error     its standard error, from so many groups
    inverted  p of the opposite effect
    """
    if p <= ERROR:
        return Conclusion(SHOWN, bound, None, decided_by)
    if inverted <= ERROR:
        return Conclusion(INVERTED, bound, None, decided_by)
    if upper < bound:
        return Conclusion(BELOW, bound, None, decided_by)
    return Conclusion(UNDECIDED, bound, needed(value, error, groups, cells, bound), decided_by)


def needed(value: float, error: float, groups: float, cells: int = 1, bound: float = BOUND) -> int | None:
    """How many groups tell an effect of this size from 0, or from the bound, whichever is farther: its error falls as one over
    the root of their number. To two digits."""
    away = max(value, bound - value)
    if not np.isfinite([error, away, groups]).all() or error <= 0 or away <= 0:
        return None
    reach = stats.norm.isf(ERROR / max(cells, 1)) + stats.norm.ppf(POWER)
    count = max(groups * (reach * error / away) ** 2, groups + 1)
    digits = 10 ** max(int(np.floor(np.log10(count))) - 1, 0)
    return int(np.ceil(count / digits) * digits)


# ---- families --------------------------------------------------------------------------------------------------------

SIGNS = 1999
"""random signs of a test; all of them where there are as few"""
Gains = tuple[np.ndarray, np.ndarray]
"""(values of cells [cells, rows] or of one cell [rows], group of each row), whose mean is 0 where there is no effect"""


@dataclass(frozen=True, eq=False)
class TestFamily:
    """All effects of a call, tested together."""

    p: np.ndarray
    """[cells]: that an effect is at most 0, corrected for all cells"""
    inverted: np.ndarray
    """[cells]: that it is at least 0, likewise; for two-sided questions, `p` and this share the error"""
    level: float
    """of an interval for one cell that makes the intervals of all cells hold jointly at 95 %"""
    cells: int
    sides: int = 1
    """2: either sign would be a finding"""


def family(gains: Sequence[Gains], *, folds: int = 1, sides: int = 1, seed: int = 0) -> TestFamily:
    """The tests of all gains together.

    folds  of the cross-validation that they come from; 1: one held-out side
    sides  2: either sign would be a finding
    """
    x = normalised(gains)
    signs = _signs(x.shape[1], seed)
    drawn = signs @ x.T  # [signs, cells]; the first line is the observed one
    own = drawn[0] / cross_validation(folds)
    high, low = drawn.max(1), drawn.min(1)
    high[0], low[0] = own.max(initial=-np.inf), own.min(initial=np.inf)
    above = (high[:, None] >= own - 1e-9).mean(0)
    below = (low[:, None] <= own + 1e-9).mean(0)
    level = _level(np.abs(drawn[1:]), x.shape[1])
    return TestFamily(np.minimum(1, sides * above), np.minimum(1, sides * below), level, len(x), sides)


def joint_level(gains: Sequence[Gains], seed: int = 0) -> float:
    """The level of one cell's interval at which those of all cells hold jointly, from each cell's deviations from its mean."""
    x = normalised([(values - np.mean(values, axis=-1, keepdims=True), groups) for values, groups in gains])
    return _level(np.abs(_signs(x.shape[1], seed)[1:] @ x.T), x.shape[1])


def normalised(gains: Sequence[Gains]) -> np.ndarray:
    """[cells, groups]: sums over groups, of length 1 in each cell; 0 for groups that a cell has no rows of."""
    names = np.unique(np.concatenate([np.unique(groups) for _, groups in gains]).astype(str))
    found = []
    for values, groups in gains:
        own = np.zeros((len(np.atleast_2d(values)), len(names)))
        own[:, np.searchsorted(names, np.unique(groups.astype(str)))] = group_sums(np.atleast_2d(values), groups.astype(str))
        found.append(own)
    every = np.concatenate(found)
    size = np.sqrt((every**2).sum(1, keepdims=True))
    return np.asarray(np.divide(every, size, out=np.zeros_like(every), where=size > 0))


def _signs(groups: int, seed: int) -> np.ndarray:
    """[signs, groups], the first line of ones: all signs if they are at most twice `SIGNS`, or else random ones."""
    if groups <= 12:
        numbers = np.arange(2**groups)[:, None]
        return np.where(numbers >> np.arange(groups) & 1, -1.0, 1.0)
    drawn = np.random.default_rng([seed, 0x51C5]).integers(2, size=(SIGNS + 1, groups)) * 2.0 - 1
    drawn[0] = 1
    return drawn


def _level(drawn: np.ndarray, groups: int) -> float:
    """From the sizes [signs, cells] of statistics: the largest of all cells as the t quantile of one."""
    cells = drawn.shape[1]
    most = float(np.quantile(drawn.max(1), LEVEL)) if drawn.size else 0.0
    bonferroni = 1 - (1 - LEVEL) / max(cells, 1)
    if cells == 1 or groups < 3 or most**2 >= groups - 1e-6:
        return bonferroni
    t = most * np.sqrt((groups - 1) / (groups - most**2))
    return float(np.clip(1 - 2 * stats.t.sf(t, groups - 1), LEVEL, bonferroni))


def error_of(estimate: Estimate, groups: float) -> float:
    """The standard error that an interval shows."""
    reach = float(stats.t.ppf((1 + estimate.level) / 2, max(groups - 1, 1)))
    return (estimate.high - estimate.low) / 2 / reach


# ---- lines of a sweep ------------------------------------------------------------------------------------------------


def verdict_of(line: Mapping[str, Any]) -> Conclusion | None:
    """The verdict on one line of a sweep; None for known zeros. Without p, nothing is shown.

    A label is shown if it scores more than chance over the whole grid, and more than every control that was run. Chance is
    tested by permutation (`p_family`), which keeps the frequencies of the classes, so that the majority needs no further test.
    Other controls are tested as paired differences: `margin` is the smallest lower bound over them, at an error that holds for
    the whole grid. It is below the bound if the upper bound of its lead over chance or over any of the controls is.
    """
    p: Any = line.get("p_family")
    margin: Any = line.get("margin")
    if line.get("known_zero"):
        return None
    guess: Any = line.get("majority") if not _missing(line.get("majority")) else line.get("chance")
    beyond_chance, beyond = p is not None and p <= ERROR, _missing(margin) or margin > 0
    bound = BOUND if _missing(line.get("bound")) else float(line["bound"])
    decided = line.get("margin_over")
    if beyond_chance and (_missing(guess) or line["accuracy"] > guess):
        if beyond:
            return Conclusion(SHOWN, bound, None, "p_family" if _missing(margin) else decided)
        which = str(decided)
    else:
        which = "majority" if beyond_chance else "no test" if _missing(p) else "p_family"
    groups = float(line.get("groups") or np.nan)
    ends: list[Any] = [line.get("margin_high")] if not _missing(line.get("margin_high")) else []
    if "permutation" in str(line.get("test")) and not _missing(line.get("shuffled")):
        guess = line["shuffled"]  # the majority is the best of several guesses, so few rows give it a lead of its own
    if not (_missing(line.get("high_family")) or _missing(guess)):
        ends.append(line["high_family"] - guess)
    upper = min(ends, default=np.inf)
    if which in ("p_family", "majority", "no test"):
        value: Any = np.nan if _missing(guess) else line["accuracy"] - guess
        high: Any = line.get("high")
        low: Any = line.get("low")
        error = np.nan if _missing(high) or _missing(low) else (high - low) / 2 / stats.norm.ppf((1 + LEVEL) / 2)
    else:
        value, error = (np.nan if _missing(line.get(name)) else line[name] for name in ("margin_value", "margin_error"))
    cells = 1 if _missing(line.get("cells")) else int(line["cells"])
    return decide(1.0, value, upper, error, groups, cells=cells, bound=bound, decided_by=which)


def verdicts(table: pd.DataFrame) -> pd.Series:
    """The outcome on each line; see `verdict_of`."""
    found = [verdict_of(line) for line in table.to_dict("records")]
    return pd.Series([each and each.outcome for each in found], index=table.index, dtype=object)


def shown(table: pd.DataFrame) -> pd.Series:
    """Which lines count as shown; see `verdict_of`."""
    return verdicts(table) == SHOWN


def best_of(table: pd.DataFrame) -> pd.Series:
    """The line with the highest score among those that are shown; if none is, among all."""
    if (found := shown(table)).any():
        table = table[found]
    return table.loc[table["accuracy"].astype(float).fillna(-np.inf).idxmax()]


def _missing(value: Any) -> bool:
    return value is None or value != value


# ---- findings --------------------------------------------------------------------------------------------------------


def tested(lines: Sequence[dict[str, Any]], found: TestFamily, *, null: float = 0.0, bound: float = BOUND) -> list[Conclusion]:
    """Mutates the lines of a family's cells: adds their verdicts, and returns them. Their intervals are of the family's level.

    null  the score where there is no effect; of a line with `chance`, that
    """
    said = []
    for i, line in enumerate(lines):
        groups, own = float(line.get("groups") or line.get("roots") or line["rows"]), line.get("chance") or null
        error = error_of(Estimate(line["accuracy"], line["low"], line["high"], found.level), groups)
        value, upper = line["accuracy"] - own, line["high"] - own
        if found.sides == 2:
            value, upper = abs(value), max(upper, own - line["low"])
        how: dict[str, Any] = dict(cells=found.cells * found.sides, bound=bound, decided_by="p_family")
        opposite = float(found.inverted[i]) if found.sides == 2 else 1.0
        verdict = decide(float(found.p[i]), value, upper, error, groups, inverted=opposite, **how)
        line |= {"p_family": min(float(found.p[i]), opposite), **verdict.columns}
        said.append(verdict)
    return said


def with_controls(each: Sequence[tuple[float, float, float, float, str]], groups: float, cells: int) -> Conclusion:
    """The verdict on a cell that has to be above every one of its controls.

    each  (p corrected for all cells, lead, its upper bound, its error, name) of each control: all have to be shown (an
          intersection-union test, Berger 1982, which needs no correction for their number), and one that is below the bound is
          enough for the whole to be
    """
    p, value, _, error, name = max(each, key=lambda one: (one[0], -one[1]))
    upper = min(one[2] for one in each)
    return decide(p, value, upper, error, groups, cells=cells, decided_by=name)


def p_over(line: Mapping[str, Any], cells: int) -> str:
    """The corrected p of a line, and what it is corrected for."""
    p = float(line["p_family"])
    return f"p {'< 0.001' if p < 0.001 else f'= {p:.3f}'} over {cells} test{'s' * (cells != 1)}"
