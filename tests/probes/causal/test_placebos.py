"""Placebos move rows exactly as far as the probe does: otherwise a smaller effect could just mean a smaller step."""

from collections.abc import Sequence

import numpy as np
import pytest

from replaylens import Engine, tasks
from replaylens.engine.dump.reader import Dump
from replaylens.probes.causal import Effect, InterventionRunner, Variant, interchange, steer
from replaylens.probes.probe import LinearProbe, fit_probe, placebo_probes
from replaylens.tasks import Example


@pytest.fixture(scope="module")
def probe(coin_dump: Dump) -> LinearProbe:
    return fit_probe(coin_dump, "face", layer=3, position="query", estimator="mass-mean")


@pytest.fixture(scope="module")
def fresh(coin_dump: Dump) -> list[Example]:
    seen = set(coin_dump.index["root"])
    return [e for e in tasks.get("coin")(flips=(2, 5)).examples(range(80, 200)) if e.root not in seen][:4]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Collects, for each variant played, how far it moves the last row of every subject."""
    found: list[np.ndarray] = []
    play = InterventionRunner.play

    def watched(self: InterventionRunner, variants: Sequence[Variant]) -> list[Effect]:
        found.extend(np.array([np.linalg.norm(v(subject)[-1]) for subject in self.subjects]) for v in variants)
        return play(self, variants)

    monkeypatch.setattr(InterventionRunner, "play", watched)
    return found


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_every_direction_is_steered_equally_far(
    engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh: list[Example], steps: list[np.ndarray], factor: float
) -> None:
    untrained = placebo_probes(coin_dump, probe, 2)
    wanted = factor * probe.gap("heads", "tails")
    assert all(other.gap("heads", "tails") < 0.9 * probe.gap("heads", "tails") for other in untrained), "the control"
    steer(engine, probe, fresh, untrained=untrained, placebos=2, factor=factor)
    assert len(steps) == 1 + 2 + 2
    for far in steps:
        assert far == pytest.approx(np.full(len(fresh), wanted), rel=1e-6)


def test_every_direction_is_exchanged_equally_far(
    engine: Engine, coin_dump: Dump, probe: LinearProbe, fresh: list[Example], steps: list[np.ndarray]
) -> None:
    """Placebos exchange as much as the probe's own component differs. The whole row, the ceiling, moves farther."""
    interchange(engine, probe, fresh, untrained=placebo_probes(coin_dump, probe, 2), placebos=2)
    own, *placebos, ceiling = steps
    assert len(placebos) == 4 and (own > 0).all() and (ceiling > own).all()
    for far in placebos:
        assert far == pytest.approx(own, rel=1e-6)
