"""`python -m benchmarks.probes`: a grid of logistic probes solved together, against a loop over scikit-learn.

The grid: 30 layers x 3 sites x 8 positions, 5,000 rows each, d = 576, five folds by root. The rows of a position share their
labels, as in a sweep. Data is made batch by batch, so that memory does not grow with the grid; it has the spectrum of a
residual stream and a label that is stronger in deeper layers. Both sides are timed on a sample of the cells and scaled; on a
CPU by processor time.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import replaylens as rl
from benchmarks.table import Table
from replaylens.probes.controls import Goal
from replaylens.probes.heldout import held_out
from replaylens.probes.probe import cross_validate, fit_probe
from replaylens.probes.registry import ChosenProbe
from replaylens.probes.rows import ProbeRows
from replaylens.probes.solvers import one_hot, solve
from replaylens.probes.sweeps import sweep

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


def main(sample: int = 24, batch: int = 6, device: str = "cpu") -> None:
    about = f"{LAYERS} layers x {SITES} sites x {POSITIONS} positions, {ROWS} rows, d = {WIDTH}, {FOLDS} folds"
    table = Table(f"probes-{device}", f"{about}; {sample} cells timed, {batch} together, scaled to {CELLS}")
    print(table.about, f"{torch.get_num_threads()} threads")
    warm = rows(0, 1, 0)[None]
    with_replaylens(warm, [labels(0)], device), with_scikit_learn(warm, labels(0))
    clock = (
        time.process_time if device == "cpu" else time.perf_counter
    )  # so that other processes on a shared machine do not count
    ours = theirs = five = gap = 0.0
    for position, x in batches(sample, batch):
        y = labels(position)
        others = [np.random.default_rng([position, i]).permutation(y) for i in range(4)]
        begin = clock()
        scores = with_replaylens(x, [y], device)
        ours, begin = ours + clock() - begin, clock()
        with_replaylens(x, [y, *others], device)
        five, begin = five + clock() - begin, clock()
        reference = with_scikit_learn(x, y)
        theirs += clock() - begin
        gap = max(gap, *(abs(a - b) for a, b in zip(scores, reference, strict=True)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    aim, scale, ratio = 3 if device == "cpu" else 50, CELLS / sample, theirs / ours
    numbers = dict(ours_s=ours * scale, scikit_learn_s=theirs * scale, largest_accuracy_gap=gap, peak_mb=peak)
    if device != "cpu":
        numbers["peak_device_mb"] = torch.cuda.max_memory_allocated() / 2**20
    table.add("grid of logistic probes", ratio=ratio, aim=f">= {aim}", met=ratio >= aim and gap <= 0.005, **numbers)
    loop = 5 * theirs  # a loop over five labels takes five times as long
    table.add("with four control labels besides", ratio=loop / five, ours_s=five * scale, scikit_learn_s=loop * scale)
    table.save()


def solvers(turns: int = 3) -> None:
    """One logistic fit against scikit-learn's on standardised columns, and `logistic-cv` of few rows; CPU seconds, in turns."""
    table = Table("probes-solvers", f"logistic regression against scikit-learn; CPU seconds, median of {turns} turns")
    for count, width in ((5000, 2048), (5000, 576), (2000, 576)):
        generator = np.random.default_rng([count, width])
        x = generator.standard_normal((count, width)) / np.sqrt(np.arange(1, width + 1))
        x = x @ np.linalg.qr(generator.standard_normal((width, width)))[0] * 5 + 1
        way = generator.standard_normal(width) / np.sqrt(width)
        read, coin = (x @ way + 2 * generator.standard_normal(count) > 0).astype(int), generator.integers(2, size=count)
        data = {"planted label": (x + np.outer(coin - 0.5, 1.5 * way), coin), "label read off the rows": (x, read)}
        for label, (given, y) in data.items():
            loose, own, theirs = _cpu_seconds(_fits(given, y), turns)
            for name, took, aim in (("scikit-learn's tolerance (1e-4)", loose, "<= 1"), ("our default (1e-6)", own, "")):
                what, met = f"{count:,} x {width:,}, {label}, at {name}", took / theirs <= 1 if aim else None
                table.add(what, ratio=took / theirs, aim=aim, met=met, ours_s=took, scikit_learn_s=theirs)
    x, y = np.random.default_rng(0).standard_normal((40, 576)), np.arange(40) % 2
    one = partial(ChosenProbe().fit, x, y)
    fit, took = _cpu_seconds([one, lambda: cross_validate(x, y, np.arange(40), estimator="logistic-cv")], turns)
    table.add("logistic-cv, one fit, 40 x 576", ours_s=fit)
    table.add("logistic-cv, cross_validate, 40 x 576", ours_s=took)
    table.save()


def _fits(x: np.ndarray, y: np.ndarray) -> list[Callable[[], object]]:
    """Our fit at scikit-learn's tolerance, our fit at our own, and scikit-learn's."""
    ours = partial(solve, "logistic", torch.from_numpy(x)[None], one_hot(y, 2)[None], np.ones((1, 1, len(y)), dtype=bool))
    plain = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return [partial(ours, tolerance=1e-4), ours, partial(plain.fit, x, y)]


def _cpu_seconds(calls: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """The median of each call, in turns after a first one."""
    took = []
    for _ in range(turns + 1):
        marks = [time.process_time()]
        for call in calls:
            call()
            marks.append(time.process_time())
        took.append(np.diff(marks))
    return [float(each) for each in np.median(took[1:], axis=0)]


def of_run(model: str = "smollm2", texts: int = 200, turns: int = 5) -> None:
    """`fit_probe` and `sweep` of a run against the same calls on its activations as arrays, in turns, in CPU seconds."""
    engine, generator = rl.Engine.load(model), np.random.default_rng(0)
    words = ["the", "a", "red", "blue", "big", "cat", "dog", "house", "tree", "sat", "ran", "is", "in", "on", "Paris", "London"]
    given, label = [" ".join(generator.choice(words, size=24)) for _ in range(texts)], generator.integers(2, size=texts)
    layer = len(engine.sites.per_layer("S")) // 2
    site = engine.sites.per_layer("S")[layer]
    run = engine.replay(given, labels={"coin": label.tolist()}, sites=[site])

    def arrays() -> ProbeRows:
        counts = [len(result.tokens) for result in run]
        prompt, place = np.repeat(np.arange(texts), counts), np.concatenate([np.arange(count) for count in counts])
        tokens = np.concatenate([result.tokens for result in run])
        x = {("S", layer): torch.cat([result.activations[site] for result in run])}
        return ProbeRows.of_arrays(x, {"coin": label[prompt]}, prompt, positions=place, tokens=tokens)

    how: dict[str, Any] = dict(site="S", layer=layer, position="last")
    calls: dict[str, Callable[[Any], object]] = {
        "fit_probe": lambda rows: fit_probe(rows, "coin", **how),
        "sweep": lambda rows: sweep(rows, "coin", sites="S", layers=[layer], positions="last", permutations=19),
    }
    table = Table("probes-run", f"{model}, {texts} texts, one site, last token; CPU seconds, median of {turns} turns")
    for name, call in calls.items():
        took = []
        for _ in range(turns + 1):
            begin = time.process_time()
            call(run)
            middle = time.process_time()
            call(arrays())
            took.append((middle - begin, time.process_time() - middle))
        ours, plain = np.median(took[1:], axis=0)  # the first turn warms up
        ratio = float(np.median([a / b for a, b in took[1:]]))
        table.add(f"{name} of a run", ratio=ratio, aim="<= 1.2", met=ratio <= 1.2, run_s=float(ours), arrays_s=float(plain))
    table.save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", action="store_true", help="time probes of a run against probes of arrays")
    parser.add_argument("--solvers", action="store_true", help="time one fit against scikit-learn's")
    parser.add_argument("--sample", type=int, default=24)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    of_run() if given.run else solvers() if given.solvers else main(given.sample, given.batch, given.device)
