"""Probes: a grid of logistic probes solved together against a loop over scikit-learn, and single fits.

The grid: 30 layers x 3 sites x 8 positions, 5,000 rows each, d = 576, five folds by root. The rows of a position share their
labels, as in a sweep. Data is made batch by batch, so that memory does not grow with the grid; it has the spectrum of a
residual stream and a label that is stronger in deeper layers. Both sides are timed on a sample of the cells and scaled.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bench.harness import Clock, Line, Lines, case, meets, memory_mb, seconds
from replaylens.probes.controls import Goal
from replaylens.probes.heldout import held_out
from replaylens.probes.probe import cross_validate
from replaylens.probes.registry import ChosenProbe
from replaylens.probes.solvers import one_hot, solve

LAYERS, SITES, POSITIONS, ROWS, WIDTH, FOLDS = 30, 3, 8, 5000, 576, 5
CELLS = LAYERS * SITES * POSITIONS


def labels(position: int) -> np.ndarray:
    return np.random.default_rng([position]).integers(2, size=ROWS)


def rows(position: int, layer: int, site: int) -> np.ndarray:
    """[rows, d] float32."""
    generator = np.random.default_rng([position, layer, site])
    x = generator.standard_normal((ROWS, WIDTH), dtype=np.float32) / np.sqrt(np.arange(1, WIDTH + 1, dtype=np.float32))
    turn = np.linalg.qr(generator.standard_normal((WIDTH, WIDTH)))[0].astype(np.float32)
    way = generator.standard_normal(WIDTH).astype(np.float32) / np.sqrt(WIDTH)
    planted = np.outer(labels(position) - 0.5, way * 0.6 * layer / LAYERS)
    return ((x + planted.astype(np.float32)) @ turn * 5 + 1).astype(np.float32)


def folds() -> tuple[np.ndarray, np.ndarray]:
    """(train, test) [folds, rows]: rows come in roots of five."""
    test = np.arange(FOLDS)[:, None] == (np.arange(ROWS) // 5) % FOLDS
    return ~test, test


def with_scikit_learn(x: np.ndarray, y: np.ndarray) -> list[float]:
    """Accuracy of each cell by the usual loop."""
    train, test = folds()
    scores = []
    for cell in x:
        right = 0
        for fit, held in zip(train, test, strict=True):
            probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(cell[fit], y[fit])
            right += int((probe.predict(cell[held]) == y[held]).sum())
        scores.append(right / ROWS)
    return scores


def with_replaylens(x: np.ndarray, codes: list[np.ndarray], device: str) -> list[float]:
    """Accuracy of each cell on the first label; all cells and labels are solved together, in single precision."""
    goals = [Goal("y", "label", "class", ("0", "1"), y, np.ones(ROWS, dtype=bool)) for y in codes]
    said = held_out("logistic", torch.from_numpy(x).to(device), goals, *folds()).predicted[:, 0]
    return [float(score) for score in (said == codes[0]).mean(1)]


def batches(sample: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """(position, x [cells, rows, d]) until `sample` cells are made, spread over layers and positions."""
    for number in range(0, sample, size):
        position = number // size % POSITIONS
        layers = np.linspace(0, LAYERS - 1, size).astype(int)
        yield position, np.stack([rows(position, int(layer), number % SITES) for layer in layers])


def grid(sample: int, batch: int, device: str, aim: str) -> Lines:
    """Ours, ours with four control labels besides, and scikit-learn's loop, batch by batch."""
    clock: Clock = "cpu" if device == "cpu" else "wall"  # so that other processes on a shared machine do not count
    warm = rows(0, 1, 0)[None]
    with_replaylens(warm, [labels(0)], device), with_scikit_learn(warm, labels(0))
    times: dict[str, list[float]] = {"ours": [], "scikit-learn": [], "five labels": []}
    gap = 0.0
    for position, x in batches(sample, batch):
        y = labels(position)
        others = [np.random.default_rng([position, i]).permutation(y) for i in range(4)]
        works: dict[str, Callable[[], list[float]]] = {
            "ours": lambda: with_replaylens(x, [y], device),
            "five labels": lambda: with_replaylens(x, [y, *others], device),
            "scikit-learn": lambda: with_scikit_learn(x, y),
        }
        scores = {}
        for arm, work in works.items():
            taken, scores[arm] = seconds(work, clock)
            times[arm].append(taken)
        gap = max(gap, *(abs(a - b) for a, b in zip(scores["ours"], scores["scikit-learn"], strict=True)))
    ours, theirs, five = (sum(times[arm]) for arm in ("ours", "scikit-learn", "five labels"))
    scale, ratio = CELLS / sample, theirs / ours
    numbers: dict[str, Any] = dict(ours_s=ours * scale, scikit_learn_s=theirs * scale, largest_accuracy_gap=gap, times_s=times)
    numbers["peak_mb"] = memory_mb("VmHWM")
    if device != "cpu":
        numbers["peak_device_mb"] = torch.cuda.max_memory_allocated() / 2**20
    met = bool(meets(ratio, aim)) and gap <= 0.005
    yield Line("grid of logistic probes", ratio=ratio, aim=aim, met=met, numbers=numbers)
    loop = 5 * theirs  # a loop over five labels takes five times as long
    numbers = {"ours_s": five * scale, "scikit_learn_s": loop * scale}
    yield Line("with four control labels besides", ratio=loop / five, numbers=numbers)


@case("probes-cpu", quick={"sample": 1, "batch": 1})
def probes_cpu(sample: int = 24, batch: int = 6) -> Lines:
    """The grid of logistic probes, `batch` cells together, against a loop of scikit-learn's LogisticRegression: CPU time."""
    yield from grid(sample, batch, "cpu", ">= 3")


@case("probes-cuda", needs="gpu", clock="wall")
def probes_cuda(sample: int = 90, batch: int = 90) -> Lines:
    """The grid of logistic probes on a GPU, transfers included, against scikit-learn's loop on the host's threads."""
    yield from grid(sample, batch, "cuda", ">= 50")


@case("probes-solvers", ours="ours", baseline="scikit-learn", aim="<= 1", cost=True, unit="s", quick={"rows": 200})
def probes_solvers(rows: int = 5000) -> Lines:
    """One logistic fit on standardised columns against scikit-learn's, at its tolerance and at our own: CPU seconds."""
    for count, width in ((rows, 2048), (rows, 576), (rows * 2 // 5, 576)):
        generator = np.random.default_rng([count, width])
        x = generator.standard_normal((count, width)) / np.sqrt(np.arange(1, width + 1))
        x = x @ np.linalg.qr(generator.standard_normal((width, width)))[0] * 5 + 1
        way = generator.standard_normal(width) / np.sqrt(width)
        read, coin = (x @ way + 2 * generator.standard_normal(count) > 0).astype(int), generator.integers(2, size=count)
        data = {"planted label": (x + np.outer(coin - 0.5, 1.5 * way), coin), "label read off the rows": (x, read)}
        for label, (given, y) in data.items():
            every = np.ones((1, 1, count), dtype=bool)
            fit = partial(solve, "logistic", torch.from_numpy(given)[None], one_hot(y, 2)[None], every)
            theirs = partial(make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit, given, y)
            what = f"{count:,} x {width:,}, {label}, at"
            yield Line(f"{what} scikit-learn's tolerance", {"ours": partial(fit, tolerance=1e-4), "scikit-learn": theirs})
            yield Line(f"{what} our default", {"ours": fit, "scikit-learn": theirs})
    x, y = np.random.default_rng(0).standard_normal((40, 576)), np.arange(40) % 2
    once, _ = seconds(partial(ChosenProbe().fit, x, y), "cpu")
    folded, _ = seconds(lambda: cross_validate(x, y, np.arange(40), estimator="logistic-cv"), "cpu")
    yield Line("logistic-cv, 40 x 576", numbers={"one_fit_s": once, "cross_validate_s": folded})
