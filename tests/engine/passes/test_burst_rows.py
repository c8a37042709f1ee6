"""Rows of bursts: whole, picked, and after the burst has let go of them."""

import torch

from replaylens.engine.passes.burst_rows import BurstRows
from replaylens.engine.passes.shipment import Shipment
from replaylens.engine.request.recording import Chunk, Recording

SITES = ("blocks.0.hook_out", "blocks.1.hook_out")
STEPS = 5


def burst_of_three() -> tuple[BurstRows, torch.Tensor]:
    """Three requests in five steps; the last two steps hold the second and third only."""
    values = torch.arange(2.0 * 3 * STEPS * 4).view(2, 3, STEPS, 4)  # [sites, requests, steps, width]
    burst = BurstRows(3, lambda rows: None)
    for step in range(STEPS):
        held = range(3) if step < 3 else [1, 2]
        burst.steps["host"].append((Shipment([(SITES, values[:, list(held), step])], 0), held))
    return burst, values


def test_picked_rows_are_those_of_the_whole() -> None:
    burst, values = burst_of_three()
    view = burst.view(2, "host", {site: site for site in SITES})
    for _ in range(2):  # out of the burst, then out of the view's own copy
        for number, site in enumerate(SITES):
            assert torch.equal(view.picked([4, 0, 4])[site], values[number, 2, [4, 0, 4]])
        assert torch.equal(view[SITES[1]], values[1, 2])
    assert torch.equal(burst.view(0, "host", {SITES[0]: SITES[0]}).picked([2])[SITES[0]], values[0, 0, 2:3])


def test_a_recording_picks_positions_out_of_all_kinds_of_chunks() -> None:
    burst, values = burst_of_three()
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
