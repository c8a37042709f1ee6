"""`python -m bench.calibrate` (`make calibrate-all`): error rates, coverage and power of the probes' verdicts, by simulation.

Everything goes through the functions that users call. A setting of pure noise shows how often a sweep finds something where
there is nothing (family-wise error, nominal 5 %), one of known truth how often an interval holds it (nominal 95 %), one of a
planted label how often it is shown, with all controls on. The table is part of docs/probes.md.
"""

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from replaylens.probes.areas import area, area_gains, balanced_accuracy
from replaylens.probes.errors import BadRows
from replaylens.probes.groups import near_duplicates
from replaylens.probes.intervals import mean_over_groups
from replaylens.probes.questions.transfer import transfer, transfer_across
from replaylens.probes.rows import ProbeRows
from replaylens.probes.sweeps import sweep
from replaylens.probes.verdicts import shown
from tests.probes.synthetic import labelled_rows

RESULT = Path("bench/results/calibration.json")
CELLS = 6
"""cells of noise in a family"""


@dataclass(frozen=True)
class Rate:
    """One line of the table: a share of simulations."""

    kind: str
    """error, coverage or power"""
    setting: str
    rate: float
    simulations: int
    aim: tuple[float, float]
    """what the rate should be, at least and at most"""

    @property
    def error(self) -> float:
        """Standard error of the rate."""
        return float(np.sqrt(self.rate * (1 - self.rate) / self.simulations))

    @property
    def held(self) -> bool:
        """Whether the aim holds, or misses by less than two standard errors."""
        return self.aim[0] - 2 * self.error <= self.rate <= self.aim[1] + 2 * self.error


# ---- error: nothing is there --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """Rows that hold nothing about their labels."""

    name: str
    groups: int = 100
    rows: int = 1
    """of each group"""
    width: int = 32
    estimator: str = "logistic"
    label: str = "row"
    """a fair coin per row, or per root; classes:k; rare (15 %); number; path: a coin per path, which several roots share"""
    split: str = "root"
    permutations: int = 99
    sizes: str = "equal"
    """of the groups: equal, unequal (lognormal), or by label (3 rows for one class, 1 for the other)"""

    def found(self, seed: int) -> bool:
        """Whether a sweep over cells of noise shows any of them. A label too rare to split is refused: not shown."""
        generator = np.random.default_rng([seed, 1])
        rows = noise(generator, self)
        how: dict[str, Any] = dict(controls=False, permutations=self.permutations, seed=seed)
        try:
            found = sweep(rows, "label", sites="S", positions="all", estimators=self.estimator, split=self.split, **how)
        except BadRows:
            return False
        return bool(shown(found.table).any())


NULLS = (
    Noise("ridge, 50 groups, d = 16", groups=50, width=16, estimator="ridge"),
    Noise("ridge", estimator="ridge"),
    Noise("ridge, 2 rows a group, label of the row", rows=2, estimator="ridge"),
    Noise("ridge, 2 rows a group, label of the group", rows=2, estimator="ridge", label="root"),
    Noise("logistic, 60 groups, d = 16", groups=60, width=16),
    Noise("ridge, 4 classes", estimator="ridge", label="classes:4"),
    Noise("logistic, 60 groups, d = 16, 15 % of one class", groups=60, width=16, label="rare"),
    Noise("mass-mean", estimator="mass-mean"),
    Noise("ridge regression (r2)", estimator="ridge", label="number"),
    Noise("logistic, one split", split="length:1"),
    Noise("ridge, 200 roots that share 40 paths", groups=200, estimator="ridge", label="path"),
    Noise("ridge, groups of 1 to 20 rows, label of the row", groups=60, width=8, estimator="ridge", sizes="unequal"),
    Noise(
        "ridge, groups of 1 to 20 rows, label of the group",
        groups=60,
        width=8,
        estimator="ridge",
        label="root",
        sizes="unequal",
    ),
    Noise("ridge, groups of one class are longer", groups=60, width=4, estimator="ridge", label="root", sizes="by label"),
)


def noise(generator: np.random.Generator, how: Noise) -> ProbeRows:
    """Rows of `CELLS` layers without any signal."""
    if how.sizes != "equal":
        return unequal(generator, how)
    count = how.groups * how.rows
    shared = np.repeat(generator.normal(size=(CELLS, how.groups, how.width)), how.rows, 1)
    x = generator.normal(size=(CELLS, count, how.width)) + shared
    root, steps = np.repeat(np.arange(how.groups), how.rows), np.ones(count, dtype=int)
    match how.label.split(":"):
        case ["row"]:
            label = generator.integers(2, size=count)
        case ["root"]:
            label = np.repeat(generator.integers(2, size=how.groups), how.rows)
        case ["classes", number]:
            label = generator.integers(int(number), size=count)
        case ["rare"]:
            label = (generator.random(count) < 0.15).astype(int)
        case ["number"]:
            label = generator.normal(size=count)
        case ["path"]:
            path = generator.integers(40, size=how.groups)  # 40 beginnings: prompts that begin alike have the same row
            x, label = x[:, path], generator.integers(2, size=40)[path]
            return labelled_rows(x, root, label, token=path)
    if how.split != "root":
        steps = 1 + (root >= how.groups // 2)
    return labelled_rows(x, root, label, steps=steps)


def unequal(generator: np.random.Generator, how: Noise) -> ProbeRows:
    """The same with groups of different sizes, whose rows have something in common."""
    kind = generator.integers(2, size=how.groups)
    sizes = np.clip(np.round(4 * np.exp(generator.normal(size=how.groups))), 1, 20).astype(int)
    sizes = np.where(kind == 1, 3, 1) if how.sizes == "by label" else sizes
    root = np.repeat(np.arange(how.groups), sizes)
    x = generator.normal(size=(CELLS, len(root), how.width)) + generator.normal(size=(CELLS, how.groups, how.width))[:, root]
    return labelled_rows(x, root, kind[root] if how.label == "root" else generator.integers(2, size=len(root)))


# ---- coverage: the truth is known -----------------------------------------------------------------------------------------

Simulation = Callable[[np.random.Generator], tuple[float, float, float]]
"""(truth, low, high); a truth of NaN is the mean of the values, given in its place by `crossed`"""


def share(groups: int, rows: int, rate: float, spread: float) -> Simulation:
    """The mean of zeros and ones whose rate varies between groups."""

    def draw(generator: np.random.Generator) -> tuple[float, float, float]:
        rates = generator.beta(rate * spread, (1 - rate) * spread, size=groups)
        values = generator.random((groups, rows)) < rates[:, None]
        found = mean_over_groups(values.ravel().astype(float), names(groups, rows))
        return rate, found.low, found.high

    return draw


def uneven(groups: int, rate: float) -> Simulation:
    """The same with groups of lognormal sizes."""

    def draw(generator: np.random.Generator) -> tuple[float, float, float]:
        sizes = np.maximum(1, np.round(4 * np.exp(generator.normal(size=groups)))).astype(int)
        rates = generator.beta(rate * 4, (1 - rate) * 4, size=groups)
        values = generator.random(sizes.sum()) < np.repeat(rates, sizes)
        found = mean_over_groups(values.astype(float), np.repeat(np.arange(groups), sizes).astype(str))
        return rate, found.low, found.high

    return draw


def difference(groups: int, rows: int) -> Simulation:
    """The mean of normal values with a mean of each group."""

    def draw(generator: np.random.Generator) -> tuple[float, float, float]:
        values = generator.normal(size=(groups, rows)) + generator.normal(size=(groups, 1))
        found = mean_over_groups(values.ravel(), names(groups, rows))
        return 0.0, found.low, found.high

    return draw


def roc(groups: int, shift: float, rows: int = 1) -> Simulation:
    """The area of normal scores; rows of a group are of one kind and share half of their variance."""

    def draw(generator: np.random.Generator) -> tuple[float, float, float]:
        good = np.repeat(np.arange(groups) % 2 == 0, rows)
        found = area(scores(generator, groups, rows) + shift * good, good, names(groups, rows))
        truth = float(torch.special.ndtr(torch.tensor(shift / np.sqrt(2))))
        return truth, found.low, found.high

    return draw


def roc_uneven(groups: int, shift: float) -> Simulation:
    """The same with groups of lognormal sizes."""

    def draw(generator: np.random.Generator) -> tuple[float, float, float]:
        sizes = np.maximum(1, np.round(4 * np.exp(generator.normal(size=groups)))).astype(int)
        group = np.repeat(np.arange(groups), sizes)
        score = np.sqrt(0.5) * (generator.normal(size=len(group)) + generator.normal(size=groups)[group])
        good = group % 2 == 0
        found = area(score + shift * good, good, group.astype(str))
        truth = float(torch.special.ndtr(torch.tensor(shift / np.sqrt(2))))
        return truth, found.low, found.high

    return draw


def roc_gain(groups: int, shift: float) -> Simulation:
    """The difference of two equal areas whose scores have most in common, two rows a group."""

    def draw(generator: np.random.Generator) -> tuple[float, float, float]:
        good = np.tile([True, False], groups)
        common = 3 * scores(generator, groups, 2)
        one, two = ((common + scores(generator, groups, 2)) / np.sqrt(10) + shift * good for _ in range(2))
        (found,) = area_gains([one], two, good, names(groups, 2))
        return 0.0, found.low, found.high

    return draw


def scores(generator: np.random.Generator, groups: int, rows: int) -> np.ndarray:
    """Normal numbers of variance 1 with correlation 1/2 within a group."""
    own = generator.normal(size=groups * rows)
    return own if rows == 1 else np.sqrt(0.5) * (own + np.repeat(generator.normal(size=groups), rows))


def balanced_classes(groups: int, classes: int, rate: float) -> Simulation:
    """Balanced accuracy of equally frequent classes with one rate, one row a group."""

    def draw(generator: np.random.Generator) -> tuple[float, float, float]:
        found = balanced_accuracy(generator.random(groups) < rate, np.arange(groups) % classes, names(groups, 1))
        return rate, found.low, found.high

    return draw


def balanced(groups: int) -> Simulation:
    """Balanced accuracy of a class with rate .9 and a rare one with rate .5."""

    def draw(generator: np.random.Generator) -> tuple[float, float, float]:
        codes = (np.arange(groups) % 4 == 0).astype(int)
        right = generator.random(groups) < np.where(codes == 0, 0.9, 0.5)
        found = balanced_accuracy(right, codes, names(groups, 1))
        return 0.7, found.low, found.high

    return draw


def names(groups: int, rows: int) -> np.ndarray:
    return np.repeat(np.arange(groups), rows).astype(str)


INTERVALS: dict[str, Simulation] = {
    "share of .98, 10 groups": share(10, 1, 0.98, 50),
    "share of .98, 20 groups": share(20, 1, 0.98, 50),
    "share of .98, 50 groups": share(50, 1, 0.98, 50),
    "share of .7, 5 groups of 5": share(5, 5, 0.7, 4),
    "share of .7, 10 groups of 5": share(10, 5, 0.7, 4),
    "share of .7, 20 groups of 5": share(20, 5, 0.7, 4),
    "share of .7, 100 groups of 5": share(100, 5, 0.7, 4),
    "share of .7, 20 groups of unequal sizes": uneven(20, 0.7),
    "share of .95, 50 groups of unequal sizes": uneven(50, 0.95),
    "mean, 10 groups of 3": difference(10, 3),
    "mean, 50 groups of 3": difference(50, 3),
    "AUROC .64, 20 groups": roc(20, 0.5),
    "AUROC .92, 20 groups": roc(20, 2.0),
    "AUROC .92, 50 groups": roc(50, 2.0),
    "AUROC .98, 10 groups of 3": roc(10, 3.0, 3),
    "AUROC .98, 20 groups of 3": roc(20, 3.0, 3),
    "AUROC .98, 50 groups of 3": roc(50, 3.0, 3),
    "AUROC .64, 20 groups of unequal sizes": roc_uneven(20, 0.5),
    "AUROC .92, 50 groups of unequal sizes": roc_uneven(50, 2.0),
    "difference of two AUROC of .76, 20 groups of 2": roc_gain(20, 1.0),
    "difference of two AUROC of .98, 50 groups of 2": roc_gain(50, 3.0),
    "balanced accuracy, 20 groups": balanced(20),
    "balanced accuracy, 50 groups": balanced(50),
    "balanced accuracy of .125, 8 classes, 40 groups": balanced_classes(40, 8, 0.125),
    "balanced accuracy of .9, 8 classes, 40 groups": balanced_classes(40, 8, 0.9),
}


@dataclass(frozen=True)
class Crossed:
    """The interval of a cross-validated score, whose truth is its mean over simulations."""

    name: str
    groups: int
    width: int
    effect: float
    estimator: str = "logistic"
    number: bool = False

    def coverage(self, simulations: int) -> float:
        found = []
        for seed in range(simulations):
            rows = planted(np.random.default_rng([seed, 2]), self.groups, self.width, self.effect, self.number)
            how: dict[str, Any] = dict(estimators=self.estimator, controls=False, permutations=0)
            line = sweep(rows, "label", sites="S", positions="all", **how).lines[0]
            found.append((line["accuracy"], line["low"], line["high"]))
        values, low, high = np.array(found).T
        return float(((low <= values.mean()) & (values.mean() <= high)).mean())


CROSSED = tuple(
    Crossed(f"{estimator}, {groups} groups, d = {width}, effect {effect}", groups, width, effect, estimator)
    for estimator in ("ridge", "logistic")
    for groups, width in ((20, 8), (50, 16), (100, 32), (100, 128))
    for effect in (0.0, 1.5)
) + tuple(
    Crossed(f"r2, {groups} groups, d = {width}", groups, width, 1.5, "ridge", True) for groups, width in ((50, 8), (100, 32))
)


def planted(
    generator: np.random.Generator, groups: int, width: int, effect: float, number: bool = False, cells: int = 1, rows: int = 1
) -> ProbeRows:
    """Rows whose first layer holds the label along one direction; further layers are noise."""
    count = groups * rows
    x = generator.normal(size=(cells, count, width))
    if number:
        label = effect * x[0, :, 0] + generator.normal(size=count)
    else:
        label = generator.integers(2, size=count)
        x[0, :, 0] += effect * (label - 0.5)
    tokens = generator.integers(30, size=count)
    return labelled_rows(x, np.repeat(np.arange(groups), rows), label, token=tokens)


# ---- power: something is there --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """A label planted in one of several cells of 100 groups."""

    effect: float
    aim: float
    rows: int = 2

    def one(self, seed: int) -> tuple[bool, bool, float]:
        """(whether the planted cell is shown, whether any other is, accuracy of the planted cell)"""
        rows = planted(np.random.default_rng([seed, 3]), 100, 32, self.effect, cells=3, rows=self.rows)
        table = sweep(rows, "label", sites="S", positions="all", permutations=99, seed=seed).table
        there = shown(table).to_numpy()
        return bool(there[0]), bool(there[1:].any()), float(table["accuracy"][0])


EFFECTS = (
    Effect(0.85, 0.25),
    Effect(1.3, 0.70),
    Effect(1.75, 0.95),
    Effect(0.98, 0.25, 1),
    Effect(1.4, 0.70, 1),
    Effect(1.9, 0.95, 1),
)


# ---- plain arrays: generators and a baseline that share no code with the probes --------------------------------------------


@dataclass(frozen=True)
class Plain:
    """Arrays made by numpy alone, judged by a sweep over three cells and by a plain permutation test of the first."""

    name: str
    groups: int
    rows: int = 1
    """of each group; 0: lognormal sizes"""
    width: int = 8
    effect: float = 1.0
    label: str = "row"
    """of the row or of the group; of the row also classes:k, number, or rare (10 %)"""
    estimator: str = "ridge"
    tokens: int = 0
    """different tokens, which the rows hold as well; 0: none"""
    positions: bool = False
    """whether rows are places of a prompt, which they hold as well"""
    cells: int = 3
    baseline_by: str = "ridge"
    """by hand; or logistic: scikit-learn's"""
    confounder: str = ""
    """group, token or position: what the plain test cannot tell from the label, so that a careful one is the baseline"""

    def arrays(self, seed: int, effect: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """(x [cells, rows, d], labels, groups, further arguments of `of_arrays`); only the first cell holds the label."""
        random = np.random.default_rng([seed, 77, int(effect > 0)])
        sizes = np.full(self.groups, self.rows)
        if not self.rows:
            sizes = np.maximum(1, np.round(4 * np.exp(0.8 * random.normal(size=self.groups)))).astype(int)
        group = np.repeat(np.arange(self.groups), sizes)
        count = len(group)
        shape = (self.cells, self.groups, self.width)
        x = random.normal(size=(self.cells, count, self.width)) + 0.5 * random.normal(size=shape)[:, group]
        more: dict[str, Any] = {}
        if self.positions:
            more["positions"] = np.concatenate([np.arange(size) for size in sizes])
            x[:, :, 1] += more["positions"]
        if self.tokens:
            more |= {"tokens": random.integers(self.tokens, size=count), "keys": np.arange(count).astype(str)}
            x[:, :, 2:4] += random.normal(size=(self.tokens, 2))[more["tokens"]]
        if self.label == "number":
            y = effect * x[0, :, 0] + random.normal(size=count)
            return x, y, group, more
        if self.label.startswith("classes:"):
            classes = int(self.label.removeprefix("classes:"))
            y = random.integers(classes, size=count)
            x[0, :, :classes] += effect * np.eye(classes)[y]
            return x, y, group, more
        if self.label == "group":
            y = random.permutation(np.arange(self.groups) % 2)[group]
        else:
            y = (random.permutation(count) < (0.1 if self.label == "rare" else 0.5) * count).astype(int)
        x[0, :, 0] += effect * y
        return x, y, group, more

    def confounded(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """As `arrays`, but all that rows tell of the label is what the confounder tells."""
        x, y, group, more = self.arrays(seed, 0.0)
        random = np.random.default_rng([seed, 81])
        match self.confounder:
            case "group":  # rows of a group resemble each other, and so do their labels; groups tell nothing of other groups
                rate = random.beta(0.5, 0.5, size=self.groups)[group]
                x = x + 1.5 * random.normal(size=(self.cells, self.groups, self.width))[:, group]
            case "token":  # rows hold which token it is, in enough columns for a class of its own
                rate = (0.1 + 0.8 * (random.permutation(self.tokens) % 2))[more["tokens"]]
                x = random.normal(size=(self.cells, len(y), self.tokens)) + 4 * np.eye(self.tokens)[more["tokens"]]
            case _:
                rate = (0.15 + 0.35 * np.arange(self.rows))[more["positions"]]
                x[:, :, 1] += 3 * more["positions"]
        return x, (random.random(len(y)) < rate).astype(int), group, more

    def sweep(self, seed: int, x: np.ndarray, y: np.ndarray, group: np.ndarray, more: dict[str, Any]) -> Any:
        rows = ProbeRows.of_arrays({("S", layer): each for layer, each in enumerate(x)}, y, group, **more)
        how: dict[str, Any] = dict(estimators=self.estimator, permutations=PLAIN_PERMUTATIONS, seed=seed)
        return sweep(rows, "label", positions="all", **how)

    def baseline(self, seed: int, x: np.ndarray, y: np.ndarray, group: np.ndarray, more: dict[str, Any]) -> np.ndarray:
        """[2, cells]: what a plain permutation test with the maximum over all cells finds, and what a careful one does.

        The careful one exchanges whole sequences of labels among groups of equal size; or it asks for more right answers than a
        table by token or position gives as well, in a paired t test over groups with Bonferroni's correction for the cells.
        """
        random = np.random.default_rng([seed, 78])
        fold = (random.permutation(self.groups) % 5)[group]
        plain = self._permuted(random, x, y, group, fold, self.label)
        if not self.confounder:
            return np.stack([plain, plain])
        if self.confounder == "group":
            return np.stack([plain, self._permuted(random, x, y, group, fold, "sequence")])
        known = more[f"{self.confounder}s"]
        table = _ridge_right(np.eye(known.max() + 1)[known], y, fold)
        lead = [np.bincount(group, weights=_ridge_right(each, y, fold) - table) for each in x]
        return np.stack([plain, plain & (stats.ttest_1samp(lead, 0, axis=1, alternative="greater").pvalue * len(x) <= 0.05)])

    def _permuted(
        self, random: np.random.Generator, x: np.ndarray, y: np.ndarray, group: np.ndarray, fold: np.ndarray, label: str
    ) -> np.ndarray:
        """[cells] bool: what a permutation test finds."""
        labels = [y] + [_exchanged(random, y, group, label) for _ in range(PLAIN_PERMUTATIONS)]
        score = _ridge_scores if self.baseline_by == "ridge" else _scikit_learn_scores
        scores = np.stack([score(each, np.stack(labels, 1), fold) for each in x])  # [cells, 1 + permutations]
        return np.asarray((1 + (scores[:, 1:].max(0) >= scores[:, :1]).sum(1)) / scores.shape[1] <= 0.05)

    def rates(self, simulations: int) -> list[Rate]:
        """Error on noise and beside a confounder, coverage and power on the planted label, and the power of the baseline."""
        error = np.mean([shown(self.sweep(seed, *self.arrays(seed, 0.0)).table).any() for seed in range(simulations)])
        lines = [self.sweep(seed, *self.arrays(seed, self.effect)).lines[0] for seed in range(simulations)]
        value, low, high = np.array([(line["accuracy"], line["low"], line["high"]) for line in lines]).T
        power = np.mean([line["verdict"] == "shown" for line in lines])
        base = np.mean([self.baseline(seed, *self.arrays(seed, self.effect))[:, 0] for seed in range(simulations)], 0)
        name = f"plain arrays: {self.name} ({lines[0]['metric']} {value.mean():.2f})"
        covered = ((low <= value.mean()) & (value.mean() <= high)).mean()
        told = f"a plain permutation test: {base[0]:.2f}" + (f", a careful test: {base[1]:.2f}" if self.confounder else "")
        return [
            Rate("error", name, float(error), simulations, (0.03, 0.065)),
            *(self.confounded_rates(simulations) if self.confounder else ()),
            Rate("coverage", name, float(covered), simulations, (0.93, 0.97)),
            Rate("power", f"{name}; {told}", float(power), simulations, (float(base[1]), 1.0)),
        ]

    def confounded_rates(self, simulations: int) -> list[Rate]:
        """The error where rows tell of the label what the confounder tells, beside that of the baselines."""
        given = [(seed, *self.confounded(seed)) for seed in range(simulations)]
        error = np.mean([shown(self.sweep(*each).table).any() for each in given])
        base = np.mean([self.baseline(*each).any(1) for each in given], 0)
        told = f"a plain permutation test: {base[0]:.2f}, a careful test: {base[1]:.2f}"
        name = f"plain arrays: {self.name}, a label by {self.confounder}; {told}"
        return [Rate("error", name, float(error), simulations, (0.0, 0.065))]


PLAIN_PERMUTATIONS = 39


def _exchanged(random: np.random.Generator, y: np.ndarray, group: np.ndarray, label: str) -> np.ndarray:
    """Labels exchanged between groups that have one each, whole sequences between groups of equal size, otherwise rows."""
    if label == "sequence":
        out, sizes = y.copy(), np.bincount(group)
        for size in np.unique(sizes):
            rows = np.stack([np.flatnonzero(group == each) for each in np.flatnonzero(sizes == size)])
            out[rows] = y[random.permutation(rows)]
        return out
    if label != "group":
        return random.permutation(y)
    first = np.unique(group, return_index=True)[1]
    return np.asarray(random.permutation(y[first])[group])


def _ridge_scores(x: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """Cross-validated scores of labels [rows, permutations]: r2, accuracy, or AUROC if one of two classes is rare."""
    kinds = np.unique(labels[:, 0])
    number = len(kinds) > 10
    targets = labels[:, None].astype(float) if number else (labels[:, None] == kinds[:, None]).astype(float)
    said = np.empty(targets.shape)  # [rows, classes, permutations]
    for each in np.unique(fold):
        fit, held = fold != each, fold == each
        centre, scale = x[fit].mean(0), x[fit].std(0) + 1e-12
        a, b = (x[fit] - centre) / scale, (x[held] - centre) / scale
        aim = targets[fit].reshape(fit.sum(), -1)
        inner = np.linalg.solve(a.T @ a + np.eye(a.shape[1]), a.T @ (aim - aim.mean(0)))
        said[held] = (b @ inner + aim.mean(0)).reshape(held.sum(), *targets.shape[1:])
    if number:
        return np.asarray(1 - ((said - targets) ** 2).sum((0, 1)) / ((targets - targets.mean(0)) ** 2).sum((0, 1)))
    if len(kinds) == 2 and targets[:, 0, 0].mean() > 0.7:
        return np.array([roc_auc_score(targets[:, 1, i], said[:, 1, i]) for i in range(labels.shape[1])])
    return np.asarray((said.argmax(1) == targets.argmax(1)).mean(0))


def _ridge_right(x: np.ndarray, y: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """[rows]: whether a ridge of the other folds is right."""
    right = np.empty(len(y))
    for each in np.unique(fold):
        fit, held = fold != each, fold == each
        centre, scale, aim = x[fit].mean(0), x[fit].std(0) + 1e-12, y[fit] - y[fit].mean()
        a, b = (x[fit] - centre) / scale, (x[held] - centre) / scale
        said = b @ np.linalg.solve(a.T @ a + np.eye(a.shape[1]), a.T @ aim) + y[fit].mean()
        right[held] = (said > 0.5) == y[held]
    return right


def _scikit_learn_scores(x: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """AUROC of scikit-learn's logistic regression for labels [rows, permutations]: mean over folds with both classes."""
    found = np.full((fold.max() + 1, labels.shape[1]), np.nan)
    for each in np.unique(fold):
        scaler = StandardScaler().fit(x[fold != each])
        a, b = scaler.transform(x[fold != each]), scaler.transform(x[fold == each])
        for number, y in enumerate(labels.T):
            if len(np.unique(y[fold == each])) == 2:
                said = LogisticRegression().fit(a, y[fold != each]).decision_function(b)
                found[each, number] = roc_auc_score(y[fold == each], said)
    return np.asarray(np.nanmean(found, 0))


PLAINS = (
    Plain("40 groups", 40, effect=1.2),
    Plain("200 groups", 200, effect=0.7),
    Plain("10 % of one class, 120 groups", 120, width=4, effect=1.8, label="rare", estimator="logistic"),
    Plain("10 % of one class, 80 groups, one cell", 80, 1, 8, 2.7, "rare", "logistic", cells=1, baseline_by="logistic"),
    Plain("10 % of one class, unequal groups", 60, 0, 4, 1.4, "rare"),
    Plain("12 groups of 5, label of the row", 12, 5, 4, 1.2),
    Plain("12 groups of 5, label of the group", 12, 5, 4, 2.5, "group"),
    Plain("40 unequal groups, label of the row", 40, 0, 8, 0.9, confounder="group"),
    Plain("40 unequal groups, label of the group", 40, 0, 8, 1.5, "group"),
    Plain("40 rows of 200 columns", 40, width=200, effect=5.0),
    Plain("3 classes, 80 groups", 80, effect=1.2, label="classes:3"),
    Plain("numbers, 60 groups", 60, effect=0.8, label="number"),
    Plain("tokens that the rows hold, 100 groups", 100, effect=1.6, tokens=20, confounder="token"),
    Plain("positions that the rows hold, 50 groups of 3", 50, 3, 8, 1.2, positions=True, confounder="position"),
)


# ---- leaks: texts that come twice, under several names; generators by numpy alone ------------------------------------------


def repeated(seed: int, keyed: bool) -> bool:
    """Whether a sweep reads coin tosses of 50 texts that come twice, with noise as of another batch."""
    random = np.random.default_rng([seed, 79])
    x, toss = random.normal(size=(50, 64)), random.permutation(np.arange(50) % 2)
    twice = np.vstack([x, x + 1e-6 * random.normal(size=x.shape)]).astype(np.float32)
    keys = near_duplicates(twice) if keyed else None
    rows = ProbeRows.of_arrays(twice, np.tile(toss, 2), np.arange(100), keys=keys)
    how: dict[str, Any] = dict(estimators="ridge", permutations=PLAIN_PERMUTATIONS, seed=seed)
    return bool(shown(sweep(rows, "label", positions="all", **how).table).any())


def across(seed: int, same: bool) -> bool:
    """Whether a probe of one part reads coin tosses of another, at any of two layers: of the same prompts, or of others."""
    random = np.random.default_rng([seed, 80])
    tokens, x = random.integers(20, 50, size=(160, 4)), random.normal(size=(2, 160, 4, 16))
    toss, order = random.integers(2, size=160), random.permutation(80) + (0 if same else 80)

    def part(chosen: np.ndarray) -> ProbeRows:
        cache = {f"blocks.{layer}.hook_in": each[chosen] for layer, each in enumerate(x)}
        return ProbeRows.of_cache(cache, tokens[chosen], {"toss": toss[chosen]})

    joined = ProbeRows.join(a=part(np.arange(80)), b=part(order))
    report = transfer_across(joined, "toss", fit_on="a", test_on="b", position="last", seed=seed)
    return report.findings[-1].startswith("Shown:")


def drafted(seed: int, effect: float, by_token: bool = False) -> bool:
    """Whether a probe of accepted rows is shown to read rejected ones at any of two layers: labels of rows, planted or not, or
    the parity of the row's token, which the rows hold."""
    random = np.random.default_rng([seed, 81])
    root, count = np.repeat(np.arange(60), 4), 240
    token, label = random.integers(20, size=count), random.integers(2, size=count)
    label = token % 2 if by_token else label
    x = random.normal(size=(2, count, 16)) + np.repeat(random.normal(size=(2, 60, 16)), 4, 1)
    x[1, :, 0] += effect * (label - 0.5)
    rows = labelled_rows(x, root, label, token=token, accepted=np.arange(count) % 4 < 2)
    rows = replace(rows, frame=rows.frame.assign(since_query=1))
    return transfer(rows, "label", position="all", estimator="ridge", seed=seed).findings[-1].startswith("Shown:")


@dataclass(frozen=True)
class Leak:
    """Coin tosses that nothing but a leak can tell."""

    name: str
    found: Callable[[int], bool]
    aim: tuple[float, float]


LEAKS = (
    Leak("texts that come twice, with keys of near_duplicates", partial(repeated, keyed=True), (0.03, 0.065)),
    Leak("texts that come twice, without keys (the leak itself)", partial(repeated, keyed=False), (0.9, 1.0)),
    Leak("transfer_across, the same prompts in another order", partial(across, same=True), (0.0, 0.05)),
    Leak("transfer_across, other prompts", partial(across, same=False), (0.0, 0.05)),
    Leak("transfer to rejected rows, nothing is there", partial(drafted, effect=0.0), (0.0, 0.05)),
    Leak("transfer to rejected rows, the token tells", partial(drafted, effect=2.0, by_token=True), (0.0, 0.05)),
    Leak("transfer to rejected rows, a planted label", partial(drafted, effect=3.0), (0.9, 1.0)),
)


# ---- the table ------------------------------------------------------------------------------------------------------------


Setting = Noise | str | Crossed | Effect | Plain | Leak
SETTINGS: tuple[Setting, ...] = (*NULLS, *INTERVALS, *CROSSED, *EFFECTS, *PLAINS, *LEAKS)
"""in the order of the table; intervals by name"""


def rates_of(setting: Setting, simulations: int) -> list[Rate]:
    """The lines of one setting."""
    torch.set_num_threads(1)
    match setting:
        case Noise():
            found = float(np.mean([setting.found(seed) for seed in range(simulations)]))
            return [Rate("error", setting.name, found, simulations, (0.03, 0.06))]
        case str():
            return [interval_rate(setting, 20 * simulations)]
        case Crossed():
            name = f"cross-validated: {setting.name}"
            return [Rate("coverage", name, setting.coverage(simulations), simulations, (0.93, 0.97))]
        case Effect():
            return effect_rates(setting, simulations)
        case Plain():
            return setting.rates(simulations)
        case Leak():
            found = float(np.mean([setting.found(seed) for seed in range(simulations)]))
            return [Rate("error", f"coin tosses: {setting.name}", found, simulations, setting.aim)]


def interval_rate(name: str, simulations: int) -> Rate:
    drawn = [INTERVALS[name](np.random.default_rng([seed, 4])) for seed in range(simulations)]
    few = any(f", {n} groups" in name for n in (5, 10))
    held = float(np.mean([low <= truth <= high for truth, low, high in drawn]))
    return Rate("coverage", name, held, simulations, (0.90, 1.0) if few else (0.93, 0.97))


def effect_rates(effect: Effect, simulations: int) -> list[Rate]:
    """Power, and the error in the empty cells beside the planted one."""
    there, elsewhere, accuracies = np.mean([effect.one(seed) for seed in range(simulations)], axis=0).tolist()
    name = f"planted, mean accuracy {accuracies:.2f}, 100 groups of {effect.rows}, d = 32, controls on"
    return [
        Rate("power", name, there, simulations, (effect.aim, 1.0)),
        Rate("error", f"the two empty cells beside it ({accuracies:.2f})", elsewhere, simulations, (0.0, 0.05)),
    ]


def table(found: list[Rate]) -> str:
    """The table of docs/probes.md."""
    lines = ["| | setting | rate | s.e. | aim |", "|---|---|---|---|---|"]
    for each in found:
        aim = f"{each.aim[0]:.2f} to {each.aim[1]:.2f}"
        lines.append(
            f"| {each.kind} | {each.setting} | {each.rate:.3f} | {each.error:.3f} | {aim}{'' if each.held else ', missed'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=300, help="of each setting (default: 300)")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--plain", action="store_true", help="only the settings of plain arrays and of leaks")
    options = parser.parse_args()
    started, found, faults = time.monotonic(), list[Rate](), list[BaseException]()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        settings = (*PLAINS, *LEAKS) if options.plain else SETTINGS
        for job in [pool.submit(rates_of, setting, options.simulations) for setting in settings]:
            if failed := job.exception():  # the others still count; the run fails at its end
                faults.append(failed)
                continue
            for each in job.result():
                found.append(each)
                said = f"{each.rate:.3f} ({each.error:.3f}) {'' if each.held else 'missed'}"
                print(f"{each.kind:9} {each.setting:70} {said}", flush=True)
            about = {"seconds": round(time.monotonic() - started), "jobs": options.jobs, "simulations": options.simulations}
            rates = [asdict(each) | {"error": each.error, "held": each.held} for each in found]
            options.out.write_text(json.dumps(about | {"rates": rates}, indent=1) + "\n")  # a killed run leaves what it has
    print(table(found), f"\n{round(time.monotonic() - started)} seconds")
    if faults:
        raise ExceptionGroup(f"{len(faults)} settings failed", [each for each in faults if isinstance(each, Exception)])


if __name__ == "__main__":
    main()
