"""Lines of a report about what changes of rows do to prompts, compared with placebos on the same prompts."""

from typing import Any

import numpy as np

from replaylens.probes.causal.stage import Effect
from replaylens.probes.reports.report import score_line
from replaylens.probes.scoring.statistics import Estimate, difference_over_groups, mean_over_placebos, ratio_over_groups


def line_of(what: str, effect: Effect, roots: np.ndarray, metric: str = "flip rate") -> dict[str, Any]:
    """The share of prompts that an effect flips, and its pull in nats."""
    pull = difference_over_groups(effect.pull, roots, bounded=False)
    return score_line(what, metric, _rate(effect, roots), len(roots), **_nats(pull))


def line_of_placebos(
    what: str, placebos: list[Effect], roots: np.ndarray, seed: int, metric: str = "flip rate"
) -> dict[str, Any]:
    """The same for several placebos together."""
    pull = mean_over_placebos(np.stack([each.pull for each in placebos]), roots, seed=seed)
    return score_line(what, metric, _rate_of_placebos(placebos, roots, seed), len(roots), **_nats(pull))


def difference(
    what: str, own: Effect, placebos: list[Effect], roots: np.ndarray, seed: int, metric: str = "difference of flip rates"
) -> dict[str, Any]:
    """How much more an effect does than placebos.

    If one side flips all answers or none, resampling shows no spread there; the interval then adds both sides' ends.
    """
    flipped = np.stack([each.flipped for each in placebos])
    if np.ptp(own.flipped) == 0 or np.ptp(flipped) == 0:
        mine, other = _rate(own, roots), _rate_of_placebos(placebos, roots, seed)
        rate = Estimate(mine.value - other.value, mine.low - other.high, mine.high - other.low)
    else:
        rate = mean_over_placebos(own.flipped - flipped, roots, seed=seed)
    pull = mean_over_placebos(own.pull - np.stack([each.pull for each in placebos]), roots, seed=seed)
    return score_line(what, metric, rate, len(roots), **_nats(pull))


def _rate(effect: Effect, roots: np.ndarray) -> Estimate:
    return ratio_over_groups(effect.flipped[None], np.ones(len(roots)), roots)[0]


def _rate_of_placebos(placebos: list[Effect], roots: np.ndarray, seed: int) -> Estimate:
    return mean_over_placebos(np.stack([each.flipped for each in placebos]), roots, seed=seed, share=True)


def _nats(pull: Estimate) -> dict[str, Any]:
    return {"nats": pull.value, "nats_low": pull.low, "nats_high": pull.high}
