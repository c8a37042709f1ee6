"""Rows of bursts: whole, picked, and after the burst has let go of them."""

from collections.abc import Sequence

import pytest
import torch

from replaylens.engine.passes import bursts
from replaylens.engine.passes.bursts import ENOUGH, BurstRows, StepBlock, step_buffers
from replaylens.engine.passes.transfer import PendingRows
from replaylens.engine.request.capture import Chunk, Recording

SITES = ("blocks.0.hook_out", "blocks.1.hook_out")
STEPS = 5


HELD: list[Sequence[int]] = [range(3), range(3), range(3), [1, 2], [1, 2]]
"""three requests in five steps; the last two steps hold the second and third only"""


def burst_of_three(enough: int) -> tuple[BurstRows, torch.Tensor]:
    """A burst whose blocks have at most `enough` bytes, and what is in it: [sites, requests, steps, width]."""
    values = torch.arange(2.0 * 3 * STEPS * 4).view(2, 3, STEPS, 4)
    burst = BurstRows(3, lambda rows: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bursts, "ENOUGH", enough)
        found = step_buffers(HELD, row_bytes=2 * 4 * 4)
    for each in found:
        for step in each.steps:
            assert each.add(step, [(SITES, values[:, :, step])]) == (step == each.steps[-1])
        burst.blocks["host"].append(StepBlock(PendingRows(each.groups, 0), each.held, len(each.steps)))
    return burst, values


def test_steps_with_the_same_requests_travel_together() -> None:
    assert [(p.steps, p.held) for p in step_buffers(HELD, 1)] == [(range(3), range(3)), (range(3, 5), [1, 2])]
    one_by_one = step_buffers(HELD, ENOUGH)
    assert [p.steps for p in one_by_one] == [range(i, i + 1) for i in range(STEPS)]
    assert [p.steps for p in step_buffers([[], [0], [], [0], [0]], 1)] == [range(1, 2), range(3, 5)]
    assert [(p.steps, p.held) for p in step_buffers([[0], [1], [1]], 1)] == [(range(1), [0]), (range(1, 3), [1])]
    assert max(len(p.steps) for p in step_buffers([range(1)] * 99, ENOUGH // 7)) == 7


@pytest.mark.parametrize("enough", [1, 200, ENOUGH])
def test_picked_rows_are_those_of_the_whole(enough: int) -> None:
    burst, values = burst_of_three(enough)
    view = burst.view(2, "host", {site: site for site in SITES})
    for _ in range(2):  # out of the burst, then out of the view's own copy
        for number, site in enumerate(SITES):
            assert torch.equal(view.picked([4, 0, 4])[site], values[number, 2, [4, 0, 4]])
        assert torch.equal(view[SITES[1]], values[1, 2])
    assert burst.view(1, "host", {SITES[0]: SITES[0]}).picked([])[SITES[0]].shape == (0, 4)
    assert torch.equal(burst.view(0, "host", {SITES[0]: SITES[0]}).picked([2])[SITES[0]], values[0, 0, 2:3])


def test_a_recording_picks_positions_out_of_all_kinds_of_chunks() -> None:
    burst, values = burst_of_three(ENOUGH)
    recording = Recording(10)
    recording.append(10, {site: values[i, 1, :2] + 1000 for i, site in enumerate(SITES)})
    view = burst.view(1, "host", {site: site for site in SITES})
    recording.add(Chunk(11, 11 + STEPS, range(11, 11 + STEPS), view))  # replaces position 11
    recording.truncate(15)
    for positions in ([10], [14, 10, 12], [12, 12], list(range(10, 15)), []):
        picked = recording.picked(positions)
        assert set(picked) == (set(SITES) if positions else set())
        for site, rows in picked.items():
            assert torch.equal(rows, recording.peek(site)[[position - 10 for position in positions]])


def test_keys_are_padded_as_in_the_whole() -> None:
    site = "blocks.0.attn.hook_pattern"
    recording = Recording(0)
    recording.append(0, {site: torch.rand(2, 3, 2)})
    recording.append(2, {site: torch.rand(1, 3, 16)})
    assert torch.equal(recording.picked([2, 1])[site], recording.peek(site)[[2, 1]])
    assert recording.picked([0])[site].shape == (1, 3, 3)


def test_lost_rows_stay_with_their_burst() -> None:
    """When few views are left, the others move out before the next burst; what was lost must not end that one."""
    burst, _ = burst_of_three(ENOUGH)
    lost = PendingRows([(SITES, torch.zeros(2, 2, 4))], 1)
    lost.landed(MemoryError("no room for rows"))
    burst.blocks["host"].append(StepBlock(lost, [1, 2], 1))
    view = burst.view(1, "host", {site: site for site in SITES})
    burst.compact()
    with pytest.raises(MemoryError, match="no room for rows"):
        view.own()
