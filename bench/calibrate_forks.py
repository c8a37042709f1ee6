"""`python -m bench.calibrate_forks` (part of `make calibrate-all`): error rates, coverage, power and bias of what forks decide.

Everything goes through the functions that users call. `error`: how often something is shown where nothing is (nominal: at most
5 %, over the whole family of a call); `coverage`: how often an interval holds the truth (nominal: at least 95 %); `power`: how
often what is planted is shown; `bias`: mean error of an estimate. The table is part of docs/branches.md.
"""

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
import torch

from bench.calibrate import Rate, table
from replaylens.probes.forks.change_points import change_points
from replaylens.probes.forks.distributions import DistanceKind, RolloutTexts, distances, divergence, outcome_curve, variation
from replaylens.probes.forks.importance import counterfactual_importance, importance, resilience
from replaylens.probes.forks.outcome_probe import outcome_probe
from replaylens.probes.forks.tokens import TokenFork, draft_agreement, forking_tokens, sibling_divergence
from replaylens.rollouts.plan import OutcomeCounts

RESULT = Path("bench/results/calibration_forks.json")
Draw = Callable[[np.random.Generator], float]
"""one simulation: 1 or 0 for a share, any number for a bias"""
FAIR, SPLIT, TENTH, RARE, FOUR = (0.5, 0.5), (0.8, 0.2), (0.9, 0.1), (0.98, 0.02), (0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    kind: str
    name: str
    draw: Draw
    aim: tuple[float, float]
    cost: float = 1.0
    """simulations are divided by it"""

    def rate(self, simulations: int) -> Rate:
        count = max(20, int(simulations / self.cost))
        return Rate(self.kind, self.name, self.mean(count), count, self.aim)

    def mean(self, simulations: int) -> float:
        torch.set_num_threads(1)
        return float(np.mean([self.draw(np.random.default_rng([i, 0xCA1])) for i in range(simulations)]))


def counts_of(table: np.ndarray) -> OutcomeCounts:
    names = [f"outcome {k}" for k in range(table.shape[1])]
    return OutcomeCounts(list(range(len(table))), names, table.astype(np.int64), [f"unit {i}." for i in range(len(table))])


def path(generator: np.random.Generator, rollouts: int, *stretches: tuple[int, tuple[float, ...]]) -> OutcomeCounts:
    """Counts along a path of stretches, each of so many forks with one distribution."""
    return counts_of(np.concatenate([generator.multinomial(rollouts, p, size=length) for length, p in stretches]))


# ---- the curve, distances, importance ---------------------------------------------------------------------------------


def curve_covers(p: float, rollouts: int) -> Draw:
    def draw(generator: np.random.Generator) -> float:
        curve = outcome_curve(path(generator, rollouts, (1, (p, 1 - p))))
        return float(curve.low[0, 0] <= p <= curve.high[0, 0])

    return draw


def joint_curve_covers(p: tuple[float, ...], rollouts: int, forks: int) -> Draw:
    def draw(generator: np.random.Generator) -> float:
        curve = outcome_curve(path(generator, rollouts, (forks, p)), joint=True)
        return float(((curve.low <= p) & (p <= curve.high)).all())

    return draw


def truth_of(measure: DistanceKind, p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return float((variation if measure == "tv" else divergence)(np.array(p), np.array(q)))


def distance_covers(measure: DistanceKind, p: tuple[float, ...], q: tuple[float, ...], rollouts: int) -> Draw:
    truth = truth_of(measure, p, q)

    def draw(generator: np.random.Generator) -> float:
        one, two = (generator.multinomial(rollouts, side)[None] for side in (p, q))
        found = distances(one, two, measure, permutations=199, resamples=499)
        return float(found.low[0] - 1e-9 <= truth <= found.high[0] + 1e-9)

    return draw


def distance_bias(measure: DistanceKind, p: tuple[float, ...], q: tuple[float, ...], rollouts: int, plug_in: bool) -> Draw:
    truth = truth_of(measure, p, q)

    def draw(generator: np.random.Generator) -> float:
        one, two = (generator.multinomial(rollouts, side)[None] for side in (p, q))
        found = distances(one, two, measure, permutations=99, resamples=199)
        return float((found.plug_in if plug_in else found.value)[0] - truth)

    return draw


def importance_found(
    measure: DistanceKind, rollouts: int, *stretches: tuple[int, tuple[float, ...]], at: int | None = None
) -> Draw:
    """Whether any unit is shown or, with `at`, whether that one is."""

    def draw(generator: np.random.Generator) -> float:
        counts, seed = path(generator, rollouts, *stretches), int(generator.integers(2**31))  # else all share their exchanges
        shown = importance(counts, measure=measure, permutations=499, resamples=99, seed=seed).shown
        return float(shown.any() if at is None else shown[at])

    return draw


def walks_found(measure: DistanceKind, units: int) -> Draw:
    """Whether any unit is shown where rollouts are random walks of the standard library: up, down or back at the start, 20 to
    60 from before each unit, and none of them sees the unit."""

    def draw(generator: np.random.Generator) -> float:
        chance = Random(int(generator.integers(2**31)))
        table = np.zeros((units + 1, 3), dtype=int)
        for fork in range(units + 1):
            for _ in range(chance.randint(20, 60)):
                end = sum(chance.choice((-1, 1)) for _ in range(6))
                table[fork, 0 if end > 0 else 1 if end < 0 else 2] += 1
        found = importance(counts_of(table), measure=measure, permutations=499, resamples=99, seed=chance.randrange(2**31))
        return float(found.shown.any())

    return draw


def rollouts_of(generator: np.random.Generator, same: float, effect: float, forks: int = 5, each: int = 60) -> RolloutTexts:
    """Rollouts whose first unit is the path's with probability `same`, and another one otherwise, which moves unit 2."""
    fork = np.repeat(np.arange(forks), each)
    kept = generator.random(len(fork)) < same
    p = np.where((fork == 2) & ~kept, 0.5 - effect / 2, 0.5 + effect / 2 * (fork >= 2))
    outcome = np.where(generator.random(len(fork)) < p, "yes", "no").tolist()
    texts = [f"unit number {i} of the path." for i in range(forks)]
    units = [(texts[f] if k else "Something else altogether here.", "end.") for f, k in zip(fork, kept, strict=True)]
    return RolloutTexts(list(range(forks)), texts, ["yes", "no"], fork, units, outcome)


def counterfactual_found(effect: float, at: int | None = None) -> Draw:
    def draw(generator: np.random.Generator) -> float:
        rollouts, seed = rollouts_of(generator, 0.4, effect), int(generator.integers(2**31))
        shown = counterfactual_importance(rollouts, permutations=499, resamples=99, seed=seed).shown
        return float(shown.any() if at is None else shown[at])

    return draw


def resilience_covers(same: float) -> Draw:
    def draw(generator: np.random.Generator) -> float:
        found = resilience(rollouts_of(generator, same, 0.0, forks=2, each=50))
        return float(found.ever_low[0] <= same <= found.ever_high[0])

    return draw


# ---- change points, forking tokens ------------------------------------------------------------------------------------


def change_found(rollouts: int, *stretches: tuple[int, tuple[float, ...]]) -> Draw:
    def draw(generator: np.random.Generator) -> float:
        return float(change_points(path(generator, rollouts, *stretches)).shown)

    return draw


def change_covers(rollouts: int, before: int, after: int, p: tuple[float, ...], q: tuple[float, ...]) -> Draw:
    """Whether one change point is found whose interval holds the true place, or none is found, which has no interval."""

    def draw(generator: np.random.Generator) -> float:
        found = change_points(path(generator, rollouts, (before, p), (after, q)))
        return float(not found.points or any(point.low <= before <= point.high for point in found.points))

    return draw


def change_number(rollouts: int, *stretches: tuple[int, tuple[float, ...]]) -> Draw:
    """Whether the number of changes is right."""

    def draw(generator: np.random.Generator) -> float:
        return float(len(change_points(path(generator, rollouts, *stretches)).points) == len(stretches) - 1)

    return draw


def token_forks(generator: np.random.Generator, rollouts: int, far: float, tokens: int = 20) -> list[TokenFork]:
    """Tokens with two alternatives of weight .3 and .1, whose outcomes are `far` from those of the token taken."""
    p, q = np.array([0.8, 0.2]), np.array([0.8 - far, 0.2 + far])
    made = []
    for position in range(tokens):
        table = np.stack([generator.multinomial(rollouts, side) for side in (p, q, p)])
        made.append(TokenFork(position, ["taken", "other", "alike"], np.array([0.6, 0.3, 0.1]), table))
    return made


def token_found(rollouts: int, far: float, every: bool = False) -> Draw:
    def draw(generator: np.random.Generator) -> float:
        forks = forking_tokens(token_forks(generator, rollouts, far), threshold=0.3, resamples=499).forks
        return float(forks.mean() if every else forks.any())

    return draw


def boundary_found(rollouts: int, tokens: int, taken: tuple[float, ...], other: tuple[float, ...]) -> Draw:
    """Two alternatives at each token, both just at the threshold of .3."""
    weights = np.array([0.5, 0.3, 0.2])

    def draw(generator: np.random.Generator) -> float:
        tables = [np.stack([generator.multinomial(rollouts, side) for side in (taken, other, other)]) for _ in range(tokens)]
        forks = [TokenFork(at, ["taken", "one", "two"], weights, table) for at, table in enumerate(tables)]
        return float(forking_tokens(forks, threshold=0.3, resamples=99).forks.any())

    return draw


def survival_covers(rollouts: int, far: float) -> Draw:
    def draw(generator: np.random.Generator) -> float:
        found = forking_tokens(token_forks(generator, rollouts, far), threshold=0.3, resamples=499)
        truth = np.cumprod(np.full(20, 0.7 if far > 0.3 else 1.0))
        return float(((found.survival_low - 1e-9 <= truth) & (truth <= found.survival_high + 1e-9)).all())

    return draw


# ---- states -----------------------------------------------------------------------------------------------------------


def probe_found(effect: float, outcomes: int, any_cell: bool, groups: int = 60) -> Draw:
    """Two cells at two forks of each root: the first holds the logits of the outcomes, the second nothing."""

    def draw(generator: np.random.Generator) -> float:
        forks, width = 2 * groups, 6
        x = generator.normal(size=(2, forks, width)) + np.repeat(generator.normal(size=(2, groups, width)), 2, 1)
        shared = np.repeat(generator.normal(size=(groups, outcomes)), 2, 0)
        logits = effect * x[0, :, :outcomes] + 0.7 * generator.normal(size=(forks, outcomes)) + 0.5 * shared
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        counts = np.stack([generator.multinomial(20, each) for each in p])
        tokens = [generator.integers(12, size=9 + generator.integers(5)) for _ in range(forks)]
        how = dict(tokens=tokens, estimator="logistic")
        report = outcome_probe({("S", 0): x[0], ("S", 1): x[1]}, counts, np.repeat(np.arange(groups), 2), **how)  # type: ignore[arg-type]
        shown = [line.startswith("Shown:") for line in report.findings]
        return float(any(shown) if any_cell else shown[0])

    return draw


def siblings_found(effect: float) -> Draw:
    def draw(generator: np.random.Generator) -> float:
        forks, siblings, depths, width = 20, 6, 4, 8
        outcome = generator.integers(2, size=(forks, siblings))
        x = generator.normal(size=(forks, siblings, depths, width)) + generator.normal(size=(forks, 1, 1, width))
        x[..., 0] += effect * outcome[:, :, None] * np.arange(depths) / depths
        at = np.indices((forks, siblings, depths)).reshape(3, -1)
        found = sibling_divergence(x.reshape(-1, width), at[0], at[2], outcome[at[0], at[1]])
        return float(found.shown.any())

    return draw


def drafts_found(share: float) -> Draw:
    """Drafts that are drawn from the resamples of their fork with probability `share`, else from those of any fork."""

    def draw(generator: np.random.Generator) -> float:
        forks, groups = 60, np.repeat(np.arange(30), 2)
        likely = generator.dirichlet(np.full(8, 0.3), size=forks)
        resamples = [generator.choice(8, size=20, p=p).tolist() for p in likely]
        own, other = ([int(generator.choice(8, p=p)) for p in table] for table in (likely, generator.permutation(likely)))
        drafts = [a if generator.random() < share else b for a, b in zip(own, other, strict=True)]
        return float(draft_agreement(drafts, resamples, [-1] * forks, groups).shown)

    return draw


POWERS: tuple[tuple[str, Draw, float], ...] = (
    ("importance, tv, one of 10 units by .3, 100 rollouts", importance_found("tv", 100, (6, FAIR), (5, SPLIT), at=5), 1),
    ("importance, kl, one of 10 units by .3, 100 rollouts", importance_found("kl", 100, (6, FAIR), (5, SPLIT), at=5), 1),
    (
        "importance, tv, one of 100 units by .4, 100 rollouts",
        importance_found("tv", 100, (50, FAIR), (51, TENTH), at=49),
        2,
    ),
    ("counterfactual importance, one of 5 units by .5, 60 rollouts", counterfactual_found(0.5, 2), 1),
    ("change points, one change of .2, 100 rollouts", change_found(100, (8, FAIR), (12, (0.7, 0.3))), 1),
    ("two changes are two, by .3 and .2, 100 rollouts", change_number(100, (7, FAIR), (7, SPLIT), (7, (1.0, 0.0))), 1),
    ("forking tokens, share found, .6 at threshold .3, 100 rollouts", token_found(100, 0.6, True), 2),
    ("outcome probe, 2 outcomes, effect 1, 60 roots of 2", probe_found(1.0, 2, False), 4),
    ("sibling divergence, effect 1.5 at the last depth", siblings_found(2.0), 1),
    ("sibling divergence, effect 2.25 at the last depth", siblings_found(3.0), 1),
    ("draft agreement, half of the drafts", drafts_found(0.5), 1),
)
CERTAIN: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = (
    ((1.0, 0.0), FAIR),
    ((1.0, 0.0), SPLIT),
    ((1.0, 0.0), (0.95, 0.05)),
    ((0.6, 0.4, 0.0), (0.3, 0.3, 0.4)),
    ((0.4, 0.3, 0.3), (0.96, 0.02, 0.02)),
)
"""distributions one of which is certain, or nearly so, of some outcome"""
ERROR, HOLDS, FAIR_HOLDS = (0.0, 0.05), (0.95, 1.0), (0.93, 0.97)
SETTINGS: tuple[Setting, ...] = (
    *(
        Setting("error", f"importance, {measure}, 10 units, {n} rollouts, {len(p)} outcomes, rarest {min(p)}", draw, ERROR)
        for measure in ("tv", "kl")
        for n, p in ((30, FAIR), (100, FAIR), (100, RARE), (100, FOUR))
        if (draw := importance_found(measure, n, (11, p)))  # type: ignore[arg-type]
    ),
    Setting("error", "importance, kl, random walks, 20 units, 20 to 60 rollouts", walks_found("kl", 20), ERROR, 1 / 3),
    Setting("error", "importance, tv, random walks, 20 units, 20 to 60 rollouts", walks_found("tv", 20), ERROR, 1 / 3),
    Setting("error", "importance, tv, 100 units, 100 rollouts", importance_found("tv", 100, (101, FAIR)), ERROR, 2),
    Setting("error", "counterfactual importance, 5 units, 60 rollouts", counterfactual_found(0.0), ERROR),
    Setting("error", "change points, 20 forks, 30 rollouts, 2 outcomes", change_found(30, (20, FAIR)), ERROR),
    Setting("error", "change points, 20 forks, 100 rollouts, 4 outcomes", change_found(100, (20, FOUR)), ERROR),
    Setting("error", "change points, 50 forks, 100 rollouts, rarest .02", change_found(100, (50, RARE)), ERROR, 2),
    Setting("error", "forking tokens, 20 of 3, all at the threshold, 50 rollouts", token_found(50, 0.3), ERROR, 2),
    Setting("error", "forking tokens, 20 of 3, all at the threshold, 200 rollouts", token_found(200, 0.3), ERROR, 2),
    *(
        Setting("error", f"forking tokens, 40 of 3, {p} and {q} at the threshold, {n} rollouts", draw, ERROR, cost)
        for n, p, q, cost in (
            (30, FAIR, SPLIT, 1),
            (30, TENTH, (0.6, 0.4), 2),
            (100, FAIR, SPLIT, 2),
            (50, FOUR, (0.7, 0.2, 0.1, 0.0), 2),
        )
        if (draw := boundary_found(n, 40, p, q))
    ),
    Setting("error", "outcome probe, 2 outcomes, 2 empty cells, 60 roots of 2", probe_found(0.0, 2, True), ERROR, 4),
    Setting("error", "outcome probe, 3 outcomes, 2 empty cells, 60 roots of 2", probe_found(0.0, 3, True), ERROR, 4),
    Setting("error", "sibling divergence, 4 depths, 20 forks of 6", siblings_found(0.0), ERROR),
    Setting("error", "draft agreement, 60 forks of 30 roots", drafts_found(0.0), ERROR),
    *(
        Setting("coverage", f"outcome curve, p = {p}, {n} rollouts", curve_covers(p, n), FAIR_HOLDS, 0.2)
        for p in (0.5, 0.9, 0.98)
        for n in (20, 100)
    ),
    Setting("coverage", "outcome curve, joint, 20 forks, 4 outcomes", joint_curve_covers(FOUR, 50, 20), HOLDS),
    *(
        Setting("coverage", f"{measure}, {about}, {n} rollouts", distance_covers(measure, p, q, n), HOLDS)  # type: ignore[arg-type]
        for measure in ("tv", "kl")
        for about, p, q in (
            ("equal", FAIR, FAIR),
            ("equal, rarest .02", RARE, RARE),
            ("near", FAIR, (0.35, 0.65)),
            ("far", SPLIT, (0.2, 0.8)),
            ("4 outcomes, near", FOUR, (0.3, 0.3, 0.3, 0.1)),
            ("4 outcomes, far", FOUR, (0.1, 0.1, 0.1, 0.7)),
        )
        for n in (30, 100)
    ),
    *(
        Setting("coverage", f"kl, {p} from {q}, {n} rollouts", distance_covers("kl", p, q, n), (0.93, 1.0), 0.5)
        for p, q in CERTAIN
        for n in (30, 100)
    ),
    Setting("coverage", "resilience of .4, 50 rollouts", resilience_covers(0.4), FAIR_HOLDS),
    Setting("coverage", "place of a change of .2, 100 rollouts", change_covers(100, 8, 12, FAIR, (0.7, 0.3)), HOLDS),
    Setting("coverage", "place of a change of .4, 30 rollouts", change_covers(30, 8, 12, FAIR, (0.9, 0.1)), HOLDS),
    Setting("coverage", "survival, no token decides, 50 rollouts", survival_covers(50, 0.1), HOLDS, 2),
    Setting("coverage", "survival, every token decides, 100 rollouts", survival_covers(100, 0.6), HOLDS, 2),
    *(Setting("power", name, draw, (0.8, 1.0), cost) for name, draw, cost in POWERS),
)
BIASES: tuple[Setting, ...] = tuple(
    Setting("bias", f"{measure}{' (plug-in)' if plug_in else ''}, {about}, {n} rollouts", draw, (0.0, 0.0))
    for measure in ("tv", "kl")
    for about, p, q in (("equal", FAIR, FAIR), ("4 outcomes, equal", FOUR, FOUR), ("far", SPLIT, (0.2, 0.8)))
    for n in (30, 100)
    for plug_in in (True, False)
    if (draw := distance_bias(measure, p, q, n, plug_in))  # type: ignore[arg-type]
)
"""mean errors of estimates with and without the bias of counting; they have no aim"""


def rate_of(number: int, simulations: int) -> Rate:
    return SETTINGS[number].rate(simulations)


def bias_of(number: int, simulations: int) -> float:
    return BIASES[number].mean(simulations)


def bias_table(found: dict[str, float]) -> str:
    """Estimates beside plug-in ones."""
    lines = ["| truth | plug-in | corrected |", "|---|---|---|"]
    for name in (name for name in found if "(plug-in)" not in name):
        measure, _, about = name.partition(", ")
        lines.append(f"| {name} | {found[f'{measure} (plug-in), {about}']:+.3f} | {found[name]:+.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=300, help="of each setting; slow ones get fewer (default: 300)")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    started, found = time.monotonic(), []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for each in pool.map(rate_of, range(len(SETTINGS)), repeat(options.simulations)):
            found.append(each)
            print(f"{each.kind:9} {each.setting:70} {each.rate:.3f} {'' if each.held else 'missed'}", flush=True)
        means = pool.map(bias_of, range(len(BIASES)), repeat(options.simulations))
        biases = {setting.name: bias for setting, bias in zip(BIASES, means, strict=True)}
    about = {"seconds": round(time.monotonic() - started), "jobs": options.jobs, "simulations": options.simulations}
    lines = [asdict(each) | {"held": each.held} for each in found]
    options.out.write_text(json.dumps(about | {"rates": lines, "biases": biases}, indent=1) + "\n")
    print(table(found), bias_table(biases), f"{about['seconds']} seconds", sep="\n\n")


if __name__ == "__main__":
    main()
