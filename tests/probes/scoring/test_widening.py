"""Every report widens the intervals of cross-validated scores. `statistics.cross_validation` gives the reason."""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from replaylens import Engine, tasks
from replaylens.engine.dump.reader import Dump
from replaylens.probes import intervals
from replaylens.probes.causal import ablate
from replaylens.probes.intervals import mean_over_groups, ratio_over_groups
from replaylens.probes.probe import fit_probe
from replaylens.probes.questions.forced import outcome_at_fork, viable_branch
from replaylens.probes.questions.judge import judge
from replaylens.probes.questions.transfer import transfer
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows
from replaylens.probes.sweeps import sweep
from tests.probes.synthetic import rows_of


@pytest.mark.parametrize("folds, factor", [(1, 1.0), (2, math.sqrt(2)), (5, math.sqrt(1.625)), (10, math.sqrt(1 + 5 / 9))])
def test_intervals_by_their_definition(folds: int, factor: float) -> None:
    """Means have a t interval over groups, shares that of Korn and Graubard; standard errors carry the factor of the folds."""
    generator = np.random.default_rng(3)
    roots = np.repeat(np.arange(40).astype(str), 2)
    values = generator.normal(size=80)
    sums = np.array([(values[roots == root] - values.mean()).sum() for root in np.unique(roots)])
    error = factor * math.sqrt(40 / 39 * (sums**2).sum()) / 80
    found = mean_over_groups(values, roots, folds=folds)
    assert found.high - found.value == pytest.approx(stats.t.ppf(0.975, 39) * error)
    right = generator.random(80) < 0.6
    sums = np.array([(right[roots == root] - right.mean()).sum() for root in np.unique(roots)])
    error = math.sqrt(40 / 39 * (sums**2).sum()) / 80
    half = 0.4 + 8 / min(right.mean() * (1 - right.mean()) / error**2, 80)
    error *= math.sqrt(1 + half * folds / (folds - 1)) if folds > 1 else 1
    size = min(right.mean() * (1 - right.mean()) / error**2, 80) * (stats.t.ppf(0.975, 79) / stats.t.ppf(0.975, 39)) ** 2
    share = ratio_over_groups(right[None], np.ones(80), roots, folds=folds)[0]
    wanted = stats.beta.ppf([0.025, 0.975], right.mean() * size + 0.5, (1 - right.mean()) * size + 0.5)
    assert (share.low, share.high) == pytest.approx(tuple(wanted))


def both_answers() -> ProbeRows:
    """A right and a wrong run of the same prompts."""
    right = rows_of(roots=40, per_root=1)
    return ProbeRows.join(greedy=right, sampled=ProbeRows(right.frame.assign(correct=False), right.source, right.numbers))


def ablated(engine: Engine, coin: Dump) -> Report:
    probe = fit_probe(coin, "face", layer=3, position="query", estimator="mass-mean")
    return ablate(engine, probe, tasks.get("coin")(flips=(2, 5)).examples(range(80, 100)), placebos=1)


PLANTED = dict(sites="S", layers=[0, 1], positions="all", controls=False)
REPORTS: dict[str, tuple[Callable[[Engine, Dump, Dump], Report], Callable[[list[str]], set[int]]]] = {
    "sweep": (
        lambda engine, coin, steps: sweep(rows_of(roots=40), ["face", "shuffled"], folds=4, **PLANTED),
        lambda lines: {1, 4},  # the variance of the fits is the difference of both
    ),
    "outcome_at_fork": (
        lambda engine, coin, steps: outcome_at_fork(coin, layers=[3], folds=4),
        lambda lines: {4},
    ),
    "transfer": (
        lambda engine, coin, steps: transfer(steps, "implied", layers=[1], folds=4),
        lambda lines: {4},
    ),
    "viable_branch": (
        lambda engine, coin, steps: viable_branch(both_answers(), layers=[1], positions=["all"], folds=4),
        lambda lines: {4},
    ),
    "judge": (
        lambda engine, coin, steps: judge(coin, draft_layer=2, layers=[3], folds=4),
        lambda lines: {1 if what.endswith("alone") else 4 for what in lines},  # a single number needs no fit
    ),
    "ablate": (
        lambda engine, coin, steps: ablated(engine, coin),
        lambda lines: {5 for what in lines if what.startswith("refit")},
    ),
}
"""how each report is made, and for how many folds its intervals must be widened"""


@pytest.mark.parametrize("name", REPORTS)
def test_reports_widen_what_was_cross_validated(
    engine: Engine, coin_dump: Dump, steps_dump: Dump, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[int] = Counter()
    factor = intervals.cross_validation

    def watched(folds: int, *answers: float) -> float:
        asked[folds] += 1
        return factor(folds, *answers)

    monkeypatch.setattr(intervals, "cross_validation", watched)
    make, wanted = REPORTS[name]
    report = make(engine, coin_dump, steps_dump)
    if name == "ablate":  # flip rates involve no fitted predictions
        asked.pop(1, None)
    assert set(asked) == wanted([line.get("what", "") for line in report.lines])


def test_the_line_of_a_sweep_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own folds: the count above does not tell a line's interval from the variance of the fits."""
    factor, widths = intervals.cross_validation, []
    for times in (1, 2):

        def wider(folds: int, answers: float | None = None, k: int = times) -> float:
            return factor(folds) if answers is None else factor(folds, answers) * (k if folds == 4 else 1)

        monkeypatch.setattr(intervals, "cross_validation", wider)
        (line,) = sweep(
            rows_of(roots=40), "face", sites="S", layers=[0], positions="all", controls=False, folds=4, permutations=0
        ).lines
        widths.append(line["high"] - line["low"])
    assert widths[1] > 1.5 * widths[0]


def test_intervals_of_few_groups_cover() -> None:
    """Twelve groups with one label each, ridge by plain numpy: the interval holds the mean score in 92 % or more."""
    found, plain = [], []
    for seed in range(250):
        random = np.random.default_rng([seed, 5])
        group = np.repeat(np.arange(12), 5)
        y = random.permutation(np.arange(12) % 2)[group]
        x = (
            0.84 * random.normal(size=(60, 4))
            + 0.55 * random.normal(size=(12, 4))[group]
            + 0.8 * np.eye(1, 4) * (y[:, None] - 0.5)
        )
        fold, right = (random.permutation(12) % 5)[group], np.zeros(60)
        for each in range(5):
            fit = fold != each
            aim = 2.0 * y[fit] - 1
            a = x[fit] - x[fit].mean(0)
            w = np.linalg.solve(a.T @ a + np.eye(4), a.T @ (aim - aim.mean()))
            right[~fit] = ((x[~fit] - x[fit].mean(0)) @ w + aim.mean() > 0) == (y[~fit] == 1)
        found.append((right.mean(), ratio_over_groups(right[None], np.ones(60), group.astype(str), folds=5)[0]))
        plain.append(ratio_over_groups(right[None], np.ones(60), group.astype(str), folds=1)[0])
    truth = float(np.mean([value for value, _ in found]))
    assert np.mean([truth in each for _, each in found]) >= 0.92
    assert np.mean([truth in each for each in plain]) < 0.88, "negative control: without the factor they do not"
