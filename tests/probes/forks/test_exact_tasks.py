"""Estimates against outcome distributions that are known exactly: the tasks `coin` and `fork` have them at every prefix.

Rollouts come from the tasks themselves: of many examples, those that begin with a prefix are what a perfect model says after
it. `Coin.outcomes` computes the distribution from the knobs, without sampling; at a fork it is one half until the target
is told, and certain from there on.
"""

import re
from dataclasses import dataclass

import numpy as np
import pytest

from replaylens import tasks
from replaylens.engine.engine import Engine
from replaylens.engine.resampling.rollouts import OutcomeCounts
from replaylens.probes.forks.change_points import change_points
from replaylens.probes.forks.distributions import outcome_curve
from replaylens.probes.forks.importance import importance
from replaylens.probes.forks.outcome_probe import Key, outcome_probe
from replaylens.probes.groups import histories, independent
from replaylens.probes.questions.forced import outcome_target
from replaylens.probes.rows import ProbeRows

FACES = ["heads", "tails"]
EXAMPLES = 600


@dataclass(frozen=True)
class Path:
    """A path with the counts of its rollouts and the exact distributions [forks, outcomes]."""

    counts: OutcomeCounts
    truth: np.ndarray


def test_the_curve_covers_the_truth_of_coin(coin_paths: list[Path]) -> None:
    """Pointwise intervals hold about 95 % of the exact probabilities; joint ones hold whole paths."""
    held = np.concatenate([_inside(path, joint=False) for path in coin_paths])
    assert len(held) > 100 and 0.9 <= held.mean() <= 1
    whole = [bool(_inside(path, joint=True).all()) for path in coin_paths]
    assert np.mean(whole) >= 0.9
    shifted = [Path(path.counts, (path.truth + 0.25) % 1) for path in coin_paths]
    assert np.concatenate([_inside(path, joint=False) for path in shifted]).mean() < 0.6, "negative control"


@pytest.mark.slow
def test_the_curve_covers_the_truth_of_many_coins() -> None:
    """The same on 300 texts, whose mean docs/forks.md gives."""
    paths = _coin_paths(range(100, 200))
    held = np.concatenate([_inside(path, joint=False) for path in paths])
    assert len(held) > 1800 and 0.94 <= held.mean() <= 0.96
    assert np.mean([_inside(path, joint=True).all() for path in paths]) >= 0.95


def test_importance_covers_the_truth_of_coin(coin_paths: list[Path]) -> None:
    """The interval of each unit holds the exact total variation between before and after; a shown unit has one above 0."""
    held, shown = [], []
    for path in coin_paths:
        found = importance(path.counts, permutations=199, resamples=199)
        truth = 0.5 * np.abs(np.diff(path.truth, axis=0)).sum(1)
        known = ~np.isnan(found.distances.value)
        held += ((found.distances.low - 1e-9 <= truth) & (truth <= found.distances.high + 1e-9))[known].tolist()
        shown += [bool(truth[i] > 0) for i in np.flatnonzero(found.shown)]
    assert np.mean(held) >= 0.93 and len(shown) > 10 and np.mean(shown) >= 0.95


def test_change_points_of_fork(fork_path: Path) -> None:
    """Nothing decides before the target, and the target decides all."""
    found = change_points(fork_path.counts)
    target = int(np.flatnonzero(fork_path.truth.max(1) == 1)[0])
    (point,) = found.points
    assert found.shown and (point.index, point.low, point.high) == (target, target, target)
    assert "Go to" in point.text and point.size == pytest.approx(0.5, abs=0.1)
    assert _inside(fork_path, joint=True).all()
    counts = fork_path.counts
    before = OutcomeCounts(counts.positions[:target], counts.outcomes, counts.counts[:target], counts.texts[:target])
    assert not change_points(before).shown, "negative control: until the target, nothing changes"


def test_outcome_probe_on_a_real_model() -> None:
    """Rollouts drawn from the exact distribution at each step: the third layer of coin-plain tells of it, its embedding and
    the text as a bag do not."""
    run = Engine.load("coin-plain").replay(tasks.get("coin")(flips=(2, 4), p=0.3).examples(60), sites="S")
    every = ProbeRows.of(run).accepted()
    here, target = every.at("step"), outcome_target(every, "step")
    chosen = independent(here)
    p = target.values[np.isin(here.numbers, chosen.rows.numbers)]
    heads = np.random.default_rng(0).binomial(60, p)
    states: dict[Key, np.ndarray] = {("S", layer): chosen.rows.matrix("S", layer) for layer in (0, 3)}
    paths = histories(chosen.rows)
    assert paths is not None
    report = outcome_probe(states, np.stack([heads, 60 - heads], 1), chosen.groups, tokens=paths, estimator="logistic")
    assert [line.partition(" tells")[0] for line in report.findings] == ["Not shown: S0", "Shown: S3"]
    explained = {line["what"]: line.get("share_explained") for line in report.lines}
    assert explained["S3"] > 0.5 > 0.1 > max(explained["S0"], explained["whole text"], explained["shuffled at S3"])


# ---- the paths --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coin_paths() -> list[Path]:
    """Coin texts as symbols, one word an action; the rollouts of a path are all examples of its own seed that begin alike."""
    return _coin_paths(range(12))


def _coin_paths(seeds: range) -> list[Path]:
    return [_coin_path(p, start, seed) for p, start in ((0.5, "random"), (0.3, "heads"), (0.2, "random")) for seed in seeds]


def _coin_path(p: float, start: str, seed: int) -> Path:
    task = tasks.get("coin")(flips=(1, 5), p=p, start=start, rendering="symbols", seed=seed)
    first, *examples = task.examples(EXAMPLES)
    words = first.prompt.split(" ")
    table, truth = [], []
    for count in range(1, len(words) + 1):
        before = " ".join(words[:count])
        own = [example.answer for example in examples if f"{example.prompt} ".startswith(f"{before} ")]
        table.append([own.count(" H"), own.count(" T")])
        truth.append([task.outcomes(before)[face] for face in FACES])
    texts = [*(f" {word}" for word in words[1:]), first.answer]
    return Path(OutcomeCounts(list(range(1, len(words) + 1)), FACES, np.array(table), texts), np.array(truth))


@pytest.fixture(scope="module")
def fork_path() -> Path:
    """One fork, unit by unit. The names of places are exchangeable: every example is, with other names, a rollout from before
    the target, and one with the same viable branch is a rollout from after it."""
    task = tasks.get("fork")(depth=1)
    first, *examples = task.examples(1 + 100 * 8)
    units = [unit for unit in re.split(r"(?<=[.:,])(?= )", f"{first.prompt}{first.answer}.") if unit]
    branch, target = first.events[0].action, next(i for i, unit in enumerate(units) if unit.startswith(" Go to"))
    table = []
    for fork in range(len(units)):
        drawn = [example.events[0].action for example in examples[100 * fork : 100 * (fork + 1)]]
        own = drawn if fork <= target else [each for each in drawn if each == branch]
        table.append([own.count(branch), len(own) - own.count(branch)])
    truth = np.array([[0.5, 0.5] if fork <= target else [1.0, 0.0] for fork in range(len(units))])
    return Path(OutcomeCounts(list(range(len(units))), [branch, "other"], np.array(table), units), truth)


def _inside(path: Path, joint: bool) -> np.ndarray:
    curve = outcome_curve(path.counts, joint=joint)
    rolled = path.counts.counts.sum(1) > 0
    held: np.ndarray = ((curve.low <= path.truth + 1e-9) & (path.truth - 1e-9 <= curve.high))[rolled, 0]
    return held
