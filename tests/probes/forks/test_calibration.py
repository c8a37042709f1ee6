"""Error rates of the verdicts: some by few simulations, with room for their spread; all of them in the slow test."""

import numpy as np
import pytest

from tests.calibrate_forks import BIASES, SETTINGS, Setting, rate_of

QUICK = 30
"""simulations; an error rate of 5 % shows more than 5 errors in 1 of 300 runs, and the seeds are fixed"""
MISSED = {
    "outcome curve, p = 0.98, 100 rollouts",  # holds too often: .985
    "sibling divergence, effect 1.5 at the last depth",  # found in 57 %
}
"""settings whose aim is missed, as docs/forks.md says"""
BY_NAME = {setting.name: setting for setting in SETTINGS}
CHOSEN = (
    "importance, tv, 10 units, 30 rollouts, 2 outcomes, rarest 0.5",
    "importance, kl, 10 units, 100 rollouts, 4 outcomes, rarest 0.1",
    "counterfactual importance, 5 units, 60 rollouts",
    "change points, 20 forks, 30 rollouts, 2 outcomes",
    "forking tokens, 20 of 3, all at the threshold, 50 rollouts",
    "kl, (1.0, 0.0) from (0.95, 0.05), 100 rollouts",
    "sibling divergence, 4 depths, 20 forks of 6",
    "draft agreement, 60 forks of 30 roots",
    "tv, equal, 30 rollouts",
    "tv, 4 outcomes, near, 100 rollouts",
    "place of a change of .2, 100 rollouts",
    "importance, tv, one of 10 units by .3, 100 rollouts",
    "change points, one change of .2, 100 rollouts",
    "draft agreement, half of the drafts",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_quick(name: str) -> None:
    found = BY_NAME[name].rate(QUICK)
    room = 3 * np.sqrt(0.05 * 0.95 / found.simulations)
    assert found.aim[0] - room <= found.rate <= found.aim[1] + room, found


def test_quick_control() -> None:
    """Negative control: a test that always finds something misses its aim."""
    found = Setting("error", "always", lambda generator: 1.0, (0.0, 0.05)).rate(QUICK)
    assert not found.held


def test_estimates_lose_the_bias_of_counting() -> None:
    """At equal distributions the corrected distance is nearer to 0 than the plug-in one, at far ones no farther off."""
    found = {setting.name: setting.mean(60) for setting in BIASES if "100 rollouts" in setting.name}
    for measure in ("tv", "kl"):
        for about in ("equal", "4 outcomes, equal"):
            assert abs(found[f"{measure}, {about}, 100 rollouts"]) < 0.6 * found[f"{measure} (plug-in), {about}, 100 rollouts"]
        assert abs(found[f"{measure}, far, 100 rollouts"]) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_every_aim_is_met(number: int) -> None:
    """What `python -m tests.calibrate_forks` tabulates."""
    found = rate_of(number, 300)
    assert found.held != (found.setting in MISSED), found
