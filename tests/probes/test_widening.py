"""Every report widens the intervals of cross-validated scores. `statistics.interval` gives the reason."""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from replaylens import Engine, tasks
from replaylens.engine.dump.reader import Dump
from replaylens.probes import statistics
from replaylens.probes.causal import ablate
from replaylens.probes.probe import fit_probe
from replaylens.probes.questions.judge import judge
from replaylens.probes.questions.outcome_at_fork import outcome_at_fork
from replaylens.probes.questions.transfer import transfer
from replaylens.probes.questions.viable_branch import viable_branch
from replaylens.probes.report import Report
from replaylens.probes.rows import ProbeRows
from replaylens.probes.statistics import bootstrap, means_over_roots, root_weights
from replaylens.probes.sweeping import sweep
from tests.probes.synthetic import rows_of


@pytest.mark.parametrize("folds, factor", [(1, 1.0), (2, math.sqrt(3)), (5, 1.5), (10, math.sqrt(1 + 10 / 9))])
def test_intervals_by_their_definition(folds: int, factor: float) -> None:
    """Intervals are percentiles over resampled roots, with distances from the value scaled by sqrt(1 + folds / (folds - 1))."""
    generator = np.random.default_rng(3)
    right, roots = generator.random(80) < 0.6, np.repeat(np.arange(40).astype(str), 2)
    sums = np.array([right[roots == root].sum() for root in np.unique(roots)])
    draws = np.sort([(weights @ sums) / 80 for weights in root_weights(40, 1000, seed=7)])
    value = right.mean()
    low, high = (value + factor * (np.quantile(draws, tail) - value) for tail in (0.025, 0.975))
    found = bootstrap(right[None], np.ones(80), roots, seed=7, folds=folds)[0]
    assert (found.value, found.low, found.high) == pytest.approx((value, low, min(high, 1.0)))
    values = generator.normal(size=(3, 80))
    for wide, plain in zip(means_over_roots(values, roots, folds=folds), means_over_roots(values, roots), strict=True):
        assert wide.high - wide.low == pytest.approx(factor * (plain.high - plain.low))


def both_answers() -> ProbeRows:
    """A right and a wrong run of the same prompts."""
    right = rows_of(roots=40, per_root=1)
    return ProbeRows.join(greedy=right, sampled=ProbeRows(right.frame.assign(correct=False), right.source, right.numbers))


def ablated(engine: Engine, coin: Dump) -> Report:
    probe = fit_probe(coin, "face", layer=3, position="query", estimator="mass-mean")
    return ablate(engine, probe, tasks.get("coin")(flips=(2, 5)).examples(range(80, 100)), placebos=1)


PLANTED = dict(sites="S", layers=[0, 1], positions="all", controls=False)
REPORTS: dict[str, tuple[Callable[[Engine, Dump, Dump], Report], Callable[[list[str]], Counter[int]]]] = {
    "sweep": (
        lambda engine, coin, steps: sweep(rows_of(roots=40), ["face", "shuffled"], folds=4, **PLANTED),
        lambda lines: Counter({4: 2}),  # all cells of a label together
    ),
    "outcome_at_fork": (
        lambda engine, coin, steps: outcome_at_fork(coin, layers=[3], folds=4),
        lambda lines: Counter({4: len(lines)}),
    ),
    "transfer": (
        lambda engine, coin, steps: transfer(steps, "implied", layers=[1], folds=4),
        lambda lines: Counter({4: len(lines)}),
    ),
    "viable_branch": (
        lambda engine, coin, steps: viable_branch(both_answers(), layers=[1], positions=["all"], folds=4),
        lambda lines: Counter({4: len(lines)}),
    ),
    "judge": (
        lambda engine, coin, steps: judge(coin, draft_layer=2, layers=[3], folds=4),
        lambda lines: Counter(1 if what.endswith("alone") else 4 for what in lines),  # a single number needs no fit
    ),
    "ablate": (
        lambda engine, coin, steps: ablated(engine, coin),
        lambda lines: Counter({5: sum(what.startswith("refit") for what in lines)}),
    ),
}
"""how each report is made, and how many intervals it must widen for how many folds"""


@pytest.mark.parametrize("name", REPORTS)
def test_reports_widen_what_was_cross_validated(
    engine: Engine, coin_dump: Dump, steps_dump: Dump, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[int] = Counter()
    widening = statistics._widening

    def watched(folds: int) -> float:
        asked[folds] += 1
        return widening(folds)

    monkeypatch.setattr(statistics, "_widening", watched)
    make, wanted = REPORTS[name]
    report = make(engine, coin_dump, steps_dump)
    if name == "ablate":  # flip rates involve no fitted predictions
        asked.pop(1, None)
    assert asked == wanted([line.get("what", "") for line in report.lines])
