"""The online code of a label beside that of its control task."""

import numpy as np
import pytest
import torch

from replaylens.probes.controls import CONTROL, LABEL, Goal, control_labels
from replaylens.probes.errors import ProbeError
from replaylens.probes.heldout import online_codes

ROWS = 600


def goal_of(codes: np.ndarray, role: str) -> Goal:
    return Goal("y", role, "class", ("0", "1"), codes, codes >= 0)


def problem(memorable: bool) -> tuple[torch.Tensor, Goal, list[Goal], np.ndarray]:
    """Two cells, the first with the label along one direction. `memorable`: each of 20 types of context has its own column."""
    generator = np.random.default_rng(0)
    codes, types = generator.integers(2, size=ROWS), generator.integers(20, size=ROWS)
    codes[:30] = -1
    x = generator.normal(size=(2, ROWS, 24))
    x[0, :, 20] += 6 * codes
    if memorable:
        x[..., :20] += 6 * np.eye(20)[types]
    draws = [goal_of(control_labels(types, codes, seed), CONTROL) for seed in range(3)]
    return torch.from_numpy(x), goal_of(codes, LABEL), draws, np.repeat(np.arange(ROWS // 2).astype(str), 2)


@pytest.mark.parametrize("memorable", [False, True])
def test_label_against_control_task(memorable: bool) -> None:
    """Where contexts can be told apart the control task is coded as well as the label, and selectivity shrinks."""
    x, label, draws, roots = problem(memorable)
    read, noise = online_codes(x, label, draws, roots)
    assert read.compression > 4 > 1.2 > noise.compression
    assert read.control_bits * read.control_compression == pytest.approx(1)
    if memorable:
        assert read.control_bits < 0.6 and read.selectivity < 0.5 and noise.selectivity < 0, (
            "the control is easier there than the label"
        )
    else:
        assert read.control_bits > 0.9 and read.selectivity > 0.7


def test_controls_do_not_change_the_label() -> None:
    x, label, draws, roots = problem(True)
    alone, beside = online_codes(x, label, [], roots)[0], online_codes(x, label, draws, roots)[0]
    assert (alone.bits, alone.compression) == (beside.bits, beside.compression)
    assert np.isnan([alone.control_bits, alone.control_compression, alone.selectivity]).all()
    with pytest.raises(ProbeError, match="number"):
        online_codes(x, Goal("y", LABEL, "number", (), np.zeros(ROWS), np.ones(ROWS, bool)), [], roots)
