"""`python -m bench.calibrate_verbs` (part of `make calibrate`): error, coverage and power of every verb with a verdict.

One table, of docs/results.md. *Error*: the share of calls that show anything (or call it inverted) where nothing is, over the
whole family of the call; nominal 5 %. *Coverage*: how often the interval of the planted cell, which holds jointly for all cells
of its call, holds the mean of its scores (nominal 95 % at least). *Power*: how often the planted cell is shown, next to a plain
test of that cell alone. The same simulations give coverage and power. Verbs that need a model are called from where their
numbers are compared; the others as users call them. `--rows FILE` takes real activations, an npz of arrays [rows, width];
`--rows coin-plain` makes those of 170 prompts.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats

from bench import calibrate_forks as forks
from replaylens.probes.causal import Effect, EffectDifference, differences
from replaylens.probes.controls import make_goal
from replaylens.probes.questions import forced, judge
from replaylens.probes.questions.transfer import transfer, transfer_across
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import by_root
from replaylens.probes.sweeps import sweep
from replaylens.probes.verdicts import INVERTED, SHOWN
from tests.probes.synthetic import labelled_rows

RESULT, PAGE = Path("bench/results/calibration_verbs.json"), Path("docs/results.md")
MARK, END = "<!-- verdicts: written by python -m bench.calibrate_verbs --page -->", "<!-- verdicts end -->"
AIM, COVERS = (0.03, 0.065), (0.93, 1.0)
CHUNK = 50
"""simulations of a task; equal whatever the number of processes, so that equal calls give equal tables"""


class Told(NamedTuple):
    """What one call says."""

    any: bool
    """whether anything is shown, or inverted"""
    planted: bool = False
    """whether the planted cell is"""
    value: float = np.nan
    low: float = np.nan
    high: float = np.nan
    plain: bool = False
    """whether a plain test of the planted cell alone finds it"""


Draw = Callable[[np.random.Generator, float], Told]
"""one simulation, of an effect of so many units; 0: nothing is there"""


@dataclass(frozen=True)
class Verb:
    name: str
    family: str
    draw: Draw
    effect: float
    """planted for the power"""
    aim: tuple[float, float] = AIM
    """of the error"""
    share: float = 1.0
    """of the simulations: slow ones take fewer"""
    plain: str = ""
    """the plain test that the power is next to"""
    covered: bool = True
    """whether intervals are looked at"""


def of_lines(lines: list[dict[str, Any]], plain: bool = False) -> Told:
    """Of the lines with a verdict, of which the first is the planted cell."""
    told = [line for line in lines if line.get("verdict")]
    found, first = [line["verdict"] in (SHOWN, INVERTED) for line in told], told[0]
    ends = ("low", "high") if first.get("low_family") is None else ("low_family", "high_family")
    return Told(any(found), first["verdict"] == SHOWN, first["accuracy"], first[ends[0]], first[ends[1]], plain)


# ---- rows ------------------------------------------------------------------------------------------------------------

REAL: dict[str, str] = {}
"""`file`: where real activations are"""


@cache
def real_rows(file: str) -> np.ndarray:
    """[cells, rows, width] in float64."""
    with np.load(file, allow_pickle=False) as kept:
        return np.stack([kept[name] for name in sorted(kept.files)]).astype(np.float64)


def made_rows(folder: Path, model: str = "coin-plain", count: int = 170, width: int = 64) -> str:
    """A file of real activations: the residual stream of a packaged model at the query of as many prompts, by layer."""
    from replaylens import Engine, tasks
    from replaylens.probes.groups import distinct

    run = Engine.load(model).replay(tasks.get("coin")(flips=(2, 5)).examples(300), sites="S", rejected=False)
    rows = distinct(ProbeRows.of(run).accepted().at("query"))
    rows = rows.where(np.arange(len(rows)) < count)
    arrays: dict[str, Any] = {f"S{layer}": rows.matrix("S", layer)[:, :width] for layer in range(1, 5)}
    np.savez_compressed(folder / "rows.npz", allow_pickle=False, **arrays)
    return str(folder / "rows.npz")


def activations(random: np.random.Generator, cells: int, rows: int, width: int, real: bool = False) -> np.ndarray:
    """[cells, rows, width]: noise, or real activations of different texts in any order."""
    if not real:
        return random.normal(size=(cells, rows, width))
    every = real_rows(REAL["file"])
    return every[np.resize(np.arange(len(every)), cells)][:, random.permutation(every.shape[1])[:rows]]


def plain_t(values: np.ndarray) -> bool:
    """A one-sided t test over groups that a mean is above 0."""
    spread = values.std(ddof=1)
    return bool(values.mean() > 0 if spread == 0 else stats.ttest_1samp(values, 0, alternative="greater").pvalue <= 0.05)


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def swept(
    random: np.random.Generator, effect: float, *, estimator: str = "ridge", groups: int = 60, width: int = 8, cells: int = 3,
    real: bool = False, metric: str = "auto", permutations: int = 39,
) -> Told:  # fmt: skip
    x, y = activations(random, cells, groups, width, real), random.permutation(np.arange(groups) % 2)
    x[0, :, 0] += effect * y
    rows = ProbeRows.of_arrays({("S", layer): each for layer, each in enumerate(x)}, y, np.arange(groups))
    how: dict[str, Any] = dict(estimators=estimator, permutations=permutations, seed=int(random.integers(1000)), metric=metric)
    report = sweep(rows, "label", positions="all", controls=False, **how)
    return of_lines(report.lines, effect > 0 and plain_permutation(random, x, y))


def plain_permutation(random: np.random.Generator, cells: np.ndarray, y: np.ndarray) -> bool:
    """A permutation test by hand: cross-validated accuracy of a ridge in the first of the cells [cells, rows, width], against
    the largest of all cells, with a new fit for each of 39 exchanges."""
    labels = np.stack([y, *(random.permutation(y) for _ in range(39))], 1) * 2.0 - 1
    fold, said = random.permutation(len(y)) % 5, np.empty((len(cells), len(y), 40))
    for each in range(5):
        fit, held = fold != each, fold == each
        mean = labels[fit].mean(0)
        for x, out in zip(cells, said, strict=True):
            centre, scale = x[fit].mean(0), x[fit].std(0) + 1e-12
            a, b = (x[fit] - centre) / scale, (x[held] - centre) / scale
            out[held] = b @ np.linalg.solve(a.T @ a + np.eye(x.shape[1]), a.T @ (labels[fit] - mean)) + mean
    right = ((said > 0) == (labels > 0)).mean(1)
    return bool((right.max(0) >= right[0, 0]).mean() <= 0.05)


def alike(random: np.random.Generator, effect: float, groups: str | None = None) -> Told:
    """24 beginnings with 4 endings each; a coin per beginning, which rows hold in part. Tokens tell which texts are alike."""
    begin, ends = np.repeat(np.arange(24), 4), random.integers(100, size=(96, 2))
    starts, length = random.integers(100, size=(24, 4)), 7
    tokens = np.concatenate([np.full((96, 1), 7), starts[begin], ends], 1)
    coin = random.integers(2, size=24)
    x = np.zeros((2, 96, length, 12))
    x[:, :, -1] = random.normal(size=(2, 24, 12))[:, begin] + 0.5 * random.normal(size=(2, 96, 12))
    x[0, :, -1, 0] += effect * coin[begin]
    cache = {f"blocks.{layer}.hook_in": torch.from_numpy(each) for layer, each in enumerate(x)}
    rows = ProbeRows.of_cache(cache, tokens, {"label": coin[begin]})
    how: dict[str, Any] = dict(estimators="ridge", permutations=39, controls=False, seed=int(random.integers(1000)))
    report = sweep(rows, "label", positions="last", groups=groups, **how)
    firsts = np.arange(0, 96, 4)
    return of_lines(report.lines, effect > 0 and plain_permutation(random, x[:, firsts, -1], coin))


# ---- questions about branches ------------------------------------------------------------------------------------------


def drafted(random: np.random.Generator, effect: float, real: bool = False) -> Told:
    """Probes of accepted rows read rejected ones, at two cells."""
    root, count = np.repeat(np.arange(40), 4), 160
    token, label = random.integers(20, size=count), random.integers(2, size=count)
    x = activations(random, 2, count, 8, real)
    x[0, :, 0] += effect * (label - 0.5)
    rows = labelled_rows(x, root, label, token=token, accepted=np.arange(count) % 4 < 2)
    rows = replace(rows, frame=rows.frame.assign(since_query=1))
    return of_lines(transfer(rows, "label", position="all", estimator="ridge", seed=int(random.integers(1000))).lines)


def crossed(random: np.random.Generator, effect: float, real: bool = False) -> Told:
    """Probes of one part read another, at two cells."""
    tokens, label = random.integers(20, 50, size=(120, 1)), random.integers(2, size=120)
    x = activations(random, 2, 120, 8, real)[:, :, None]
    x[0, :, 0, 0] += effect * (label - 0.5)

    def part(chosen: np.ndarray) -> ProbeRows:
        cache = {f"blocks.{layer}.hook_in": torch.from_numpy(each[chosen]) for layer, each in enumerate(x)}
        return ProbeRows.of_cache(cache, tokens[chosen], {"toss": label[chosen]}, groups=chosen)

    joined = ProbeRows.join(a=part(np.arange(60)), b=part(np.arange(60, 120)))
    how: dict[str, Any] = dict(fit_on="a", test_on="b", position="last", estimator="ridge", seed=int(random.integers(1000)))
    return of_lines(transfer_across(joined, "toss", **how).lines)


def sided(random: np.random.Generator, effect: float, real: bool = False, cells: int = 16) -> Told:
    """After a lie, rows of every cell follow text or truth; 30 prompts with two rows each that their prompt makes alike."""
    face, groups = random.integers(2, size=60), np.repeat(np.arange(30), 2)
    honest, truth = activations(random, cells, 120, 8, real), random.integers(2, size=60)
    fitted, after = honest[:, :60], honest[:, 60:]
    if effect:  # nothing is readable where nothing is: then every probe guesses, by its own noise
        fitted[0, :, 0] += 3 * face
        after[0, :, 0] += 3 * np.where(random.random(60) < 0.5 + effect, 1 - truth, truth)
    words = np.array(["heads", "tails"])
    known = labelled_rows(fitted, np.arange(60), face, face=words[face], implied=words[face])
    lied = labelled_rows(after, groups, truth, face=words[truth], implied=words[1 - truth])
    lines = forced._side_lines(known, known, lied, lied.cells("S"), "ridge", int(random.integers(1000)))
    first = next(line for line in lines if line.get("verdict"))
    right = np.zeros(30) if not effect else np.add.reduceat(_follows(known, lied), np.arange(0, 60, 2)) / 2 - 0.5
    return of_lines([first, *lines], bool(effect) and plain_t(right))


def _follows(known: ProbeRows, lied: ProbeRows) -> np.ndarray:
    probe = forced.get("ridge").make().fit(known.matrix("S", 0), known.target("face").values)
    return np.asarray(probe.predict(lied.matrix("S", 0)) == lied.target("implied").values, dtype=float)


def answered(random: np.random.Generator, effect: float, real: bool = False) -> Told:
    """40 right and 60 wrong answers of one token each, at four cells of which one holds the truth."""
    count, right = 100, np.arange(100) < 40
    truth = random.integers(2, size=count)
    x, word = activations(random, 4, count, 8, real), np.array(["heads", "tails"])
    x[0, :, 0] += np.where(right, 3.0, effect) * truth if effect else 0.0
    claimed = np.where(right, truth, 1 - truth)
    columns: dict[str, Any] = dict(face=word[truth], claimed=word[claimed], correct=right, token=random.integers(9, size=count))
    rows = labelled_rows(x, np.arange(count), truth, **columns)
    rows = replace(rows, frame=rows.frame.assign(since_query=0.0))
    report = forced.viable_branch(rows, estimator="ridge", seed=int(random.integers(1000)))
    return of_lines(report.lines)


def told_by(random: np.random.Generator, effect: float, real: bool = False) -> Told:
    """A number that two columns explain in part, and one of four cells beyond them."""
    x, simple = activations(random, 4, 80, 8, real), random.normal(size=(80, 2))
    y = 0.5 * simple[:, 0] + effect * x[0, :, 0] / x[0, :, 0].std() + random.normal(size=80)
    rows = labelled_rows(x, np.repeat(np.arange(40), 2), y)
    lines = forced.explained(rows, rows.target("label"), {"known": simple}, rows.cells("S"), 5, int(random.integers(1000)))
    return of_lines(lines)


def judged(random: np.random.Generator, effect: float, real: bool = False) -> Told:
    """Draft tokens whose three numbers tell something; a judge at one of four cells knows more."""
    count = 120
    good, simple = random.permutation(np.arange(count) % 2).astype(bool), random.normal(size=(count, 4))
    simple[:, 0] += good
    x = activations(random, 4, count, 8, real)
    x[0, :, 0] += effect * good
    rows = labelled_rows(x, np.repeat(np.arange(60), 2), good)
    split, goal = by_root(rows, 5, int(random.integers(1000))), make_goal(rows.target("label", "class"))
    scores = {judge.FOUR: judge._held_scores(simple, goal, split)}
    for layer, each in enumerate(x):
        scores[f"judge at S{layer} and the three"] = judge._held_scores(np.column_stack([each, simple]), goal, split)
    return of_lines(judge._lines(scores, good, rows, split, 0))


# ---- causal tests ----------------------------------------------------------------------------------------------------


def steered(random: np.random.Generator, effect: float, tests: int = 1, nats: bool = False) -> Told:
    """40 prompts; a direction flips answers as 8 random ones do, prompts and directions differing, or by the effect more than
    their mean."""
    roots = np.array([f"r{number}" for number in range(40)])
    ease = random.normal(size=40)

    def play(more: float) -> Effect:
        of_direction = 0.0 if more else 0.5 * random.normal()  # the planted one is given: its interval is of it alone
        pull = 0.3 * (ease + of_direction + random.normal(size=40)) + more
        return Effect((pull > 0.3).astype(float), pull)

    asked = [EffectDifference(f"{i}", play(effect * (i == 0)), [play(0.0) for _ in range(8)], roots) for i in range(tests)]
    lines = differences(asked, int(random.integers(1000)), nats=nats)
    told, first = of_lines(lines), asked[0]
    more = any(line.get("nats_verdict") in (SHOWN, INVERTED) for line in lines)
    return told._replace(any=told.any or more, plain=plain_t(first.gains("flipped")[0]))


# ---- forks -----------------------------------------------------------------------------------------------------------


def forked(null: forks.Draw, planted: forks.Draw) -> Draw:
    """Of the simulations of `calibrate_forks`."""

    def draw(random: np.random.Generator, effect: float) -> Told:
        found = bool((planted if effect else null)(random))
        return Told(found, found)

    return draw


def wobbling(forks_: int, rollouts: int) -> forks.Draw:
    """No change, but each fork has its own distribution: more spread than counts of one have."""

    def draw(random: np.random.Generator) -> float:
        rates = random.beta(20, 20, size=forks_)
        counts = random.binomial(rollouts, rates)
        return float(forks.change_points(forks.counts_of(np.stack([counts, rollouts - counts], 1))).shown)

    return draw


FAIR, SPLIT = forks.FAIR, forks.SPLIT
FORKED: dict[str, tuple[str, forks.Draw, forks.Draw]] = {
    "importance": (
        "units, exact test, maximum statistic",
        forks.importance_found("tv", 100, (11, FAIR)),
        forks.importance_found("tv", 100, (6, FAIR), (5, SPLIT), at=5),
    ),
    "counterfactual_importance": ("units", forks.counterfactual_found(0.0), forks.counterfactual_found(0.5, 2)),
    "change_points": (
        "the whole path",
        forks.change_found(100, (20, FAIR)),
        forks.change_found(100, (8, FAIR), (12, (0.7, 0.3))),
    ),
    "change_points, forks that wobble": (
        "the whole path",
        wobbling(20, 100),
        forks.change_found(100, (8, FAIR), (12, (0.7, 0.3))),
    ),
    "forking_tokens": (
        "all alternatives of all tokens, exact test, Bonferroni",
        forks.token_found(50, 0.3),
        forks.token_found(100, 0.6, True),
    ),
    "outcome_probe": (
        "cells; every baseline",
        forks.probe_found(0.0, 2, True),
        forks.probe_found(1.0, 2, False),
    ),
    "sibling_divergence": ("depths, exchange, maximum statistic", forks.siblings_found(0.0), forks.siblings_found(2.0)),
    "draft_agreement": ("one test", forks.drafts_found(0.0), forks.drafts_found(0.5)),
}

# ---- the table ---------------------------------------------------------------------------------------------------------

SIGNS, EXCHANGE = "signs of groups, largest of", "exchange of labels with a new fit, largest of"
BELOW = (0.0, 0.065)
"""an aim of verbs that ask for more than one test at a time: every control, or a prior on nothing"""


LDA: dict[str, Any] = dict(cells=2, permutations=19)
"""of an estimator that takes eight milliseconds a fit"""


def verbs() -> tuple[Verb, ...]:
    found = [
        Verb("sweep, ridge", f"{EXCHANGE} 3 cells", swept, 1.1, plain="permutation"),
        Verb("sweep, lda", f"{EXCHANGE} 2 cells", partial(swept, estimator="lda", **LDA), 1.1, share=0.05, plain="permutation"),
        Verb("sweep, AUROC", f"{EXCHANGE} 3 cells", partial(swept, metric="auroc"), 1.1, share=0.5),
        Verb("sweep, 24 beginnings with 4 endings", f"{EXCHANGE} 2 cells, 24 groups", alike, 2.2, plain="permutation, 24 rows"),
        Verb("transfer", f"{SIGNS} 2 cells, for each of 6 controls", drafted, 2.0, BELOW),
        Verb("transfer_across", f"{SIGNS} 2 cells, for each of 3 controls", crossed, 3.0, BELOW),
        Verb("text_or_truth", f"{SIGNS} 16 cells, two-sided", sided, 0.3, share=0.5, plain="t"),
        Verb("viable_branch", f"{SIGNS} 4 cells and 2 sides", answered, 1.4),
        Verb("outcome_at_fork", f"{SIGNS} 4 cells", told_by, 1.2, BELOW, share=0.5),
        Verb("judge", f"{SIGNS} 4 cells", judged, 1.8, BELOW, share=0.5),
        Verb("steer, ablate, interchange", f"{SIGNS} 1, and 8 random directions", steered, 0.4, plain="t"),
        Verb("steering_reach", f"{SIGNS} 8 places", partial(steered, tests=8), 0.5, plain="t"),
        Verb("amnesic", f"{SIGNS} 4 erasers, answers and nats", partial(steered, tests=4, nats=True), 0.5, plain="t"),
    ]
    if REAL:
        real: list[tuple[str, str, Draw, float, tuple[float, float]]] = [
            ("sweep, ridge", f"{EXCHANGE} 3 cells", swept, 1.5, AIM),
            ("transfer", f"{SIGNS} 2 cells, for each of 6 controls", drafted, 2.5, BELOW),
            ("transfer_across", f"{SIGNS} 2 cells, for each of 3 controls", crossed, 3.0, BELOW),
            ("text_or_truth", f"{SIGNS} 16 cells, two-sided", sided, 0.3, AIM),
            ("viable_branch", f"{SIGNS} 4 cells and 2 sides", answered, 1.5, AIM),
            ("outcome_at_fork", f"{SIGNS} 4 cells", told_by, 1.2, BELOW),
            ("judge", f"{SIGNS} 4 cells", judged, 1.8, BELOW),
        ]
        found += [Verb(f"{n}, real activations", f, partial(d, real=True), e, a, share=0.25) for n, f, d, e, a in real]  # type: ignore[call-arg]
    for n, (f, null, planted) in FORKED.items():
        share = CHANGES if n.startswith(("change", "importance")) else 0.5
        found.append(Verb(n, f, forked(null, planted), 1.0, BELOW, share=share, covered=False))
    return tuple(found)


@dataclass
class Line:
    """A verb's line of the table."""

    verb: str
    family: str
    simulations: int
    error: float
    aim: tuple[float, float]
    coverage: float | None
    power: float
    plain: float | None
    plain_test: str
    seconds: float
    """of one core"""
    held: bool = field(init=False)

    def __post_init__(self) -> None:
        self.held = self.aim[0] <= self.error <= self.aim[1] and (self.coverage is None or self.coverage >= COVERS[0])


def chunk(number: int, first: int, count: int, effect: float, file: str | None) -> tuple[np.ndarray, float]:
    """([simulations, fields of `Told`], seconds of one core)."""
    torch.set_num_threads(1)
    if file is not None:
        REAL["file"] = file
    verb, started = verbs()[number], time.process_time()
    told = [
        verb.draw(np.random.default_rng([seed, number, int(effect > 0), 59]), effect) for seed in range(first, first + count)
    ]
    return np.array(told, dtype=float), time.process_time() - started


def table(lines: list[Line]) -> str:
    """The table of docs/results.md."""
    rows = [
        "| verb | null error | coverage | power | plain test | family, correction | simulations |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        said = [f"{line.error:.3f}{'' if line.held else ' (missed)'}", "" if line.coverage is None else f"{line.coverage:.3f}"]
        plain = "" if line.plain is None else f"{line.plain:.2f} ({line.plain_test})"
        rows.append(f"| {line.verb} | {' | '.join(said)} | {line.power:.2f} | {plain} | {line.family} | {line.simulations:,} |")
    return "\n".join(rows)


CHANGES = 0.2
"""share of the simulations of change points, whose hundred orders take a quarter of a second"""


def paged(page: str, found: dict[str, Any]) -> str:
    """The page with the table of a run."""
    lines = []
    for each in found["verbs"]:
        held = each.pop("held")
        lines.append(Line(**each | {"aim": tuple(each["aim"])}))
        assert lines[-1].held == held
    before, rest = page.split(MARK + "\n")
    return f"{before}{MARK}\n{table(lines)}\n{END}{rest.split(END)[1]}"


def measure(simulations: int, jobs: int, file: str | None = None, only: str = "") -> Iterator[Line]:
    """The lines, as they are done."""
    if file is not None:
        REAL["file"] = file
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        asked = []
        for number, verb in enumerate(verbs()):
            if only not in verb.name:
                continue
            count = max(20, int(simulations * verb.share))
            starts = [(first, min(CHUNK, count - first)) for first in range(0, count, CHUNK)]
            sides = [[pool.submit(chunk, number, *start, effect, file) for start in starts] for effect in (0.0, verb.effect)]
            asked.append((verb, count, sides))
        for verb, count, sides in asked:
            (null, planted), seconds = zip(*(_joined(side) for side in sides), strict=True)
            value, low, high = (planted[:, Told._fields.index(name)] for name in ("value", "low", "high"))
            covered = float(((low <= value.mean()) & (value.mean() <= high)).mean()) if verb.covered else None
            plain = float(planted[:, Told._fields.index("plain")].mean()) if verb.plain else None
            power = float(planted[:, Told._fields.index("planted")].mean())
            yield Line(
                verb.name,
                verb.family,
                count,
                float(null[:, 0].mean()),
                verb.aim,
                covered,
                power,
                plain,
                verb.plain,
                sum(seconds),
            )


def _joined(side: list[Any]) -> tuple[np.ndarray, float]:
    parts = [each.result() for each in side]
    return np.concatenate([told for told, _ in parts]), sum(seconds for _, seconds in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=2000, help="of each verb; slow ones get fewer (default: 2000)")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--rows", help="an npz of real activations, arrays [rows, width], one for each cell")
    parser.add_argument("--only", default="", help="verbs whose name holds this")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--page", action="store_true", help="only write the table of the last run into docs/results.md")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(paged(PAGE.read_text(encoding="utf-8"), json.loads(RESULT.read_text())), encoding="utf-8")
        return
    started, lines = time.monotonic(), []
    folder = TemporaryDirectory()
    file = made_rows(Path(folder.name)) if options.rows == "coin-plain" else options.rows
    for line in measure(options.simulations, options.jobs, file, options.only):
        lines.append(line)
        cover = "" if line.coverage is None else f"{line.coverage:.3f}"
        numbers = f"{line.error:.3f} {cover:5} {line.power:.2f} {line.plain or 0:.2f} {line.simulations:5} {line.seconds:.0f} s"
        print(f"{line.verb:45} {numbers}", flush=True)
        about = {"seconds": round(time.monotonic() - started), "jobs": options.jobs, "simulations": options.simulations}
        options.out.write_text(json.dumps(about | {"verbs": [asdict(each) for each in lines]}, indent=1) + "\n")
    folder.cleanup()
    print(table(lines), f"\n{round(time.monotonic() - started)} seconds")


if __name__ == "__main__":
    main()
