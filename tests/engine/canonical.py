"""What every committed row must equal, whatever happened before."""

import torch

from replaylens.engine.loop.lane import Job
from replaylens.engine.serving.branch import Branch
from tests.toy_model import Reference

SITES = ("blocks.0.attn.hook_out", "blocks.1.hook_in", "blocks.1.hook_out")


def assert_canonical(branch: Branch) -> None:
    """Every committed row, cached or captured, equals that of the path computed alone."""
    model, lane = branch.engine.model, branch.lane
    truth = Reference(model, branch.tokens, SITES if lane.recording else ())
    assert torch.equal(branch.kv(), truth.kv[: lane.computed])
    if lane.recording:
        captured = lane.recording.positions()
        assert captured == list(range(len(captured)))
        assert all(torch.equal(lane.recording[site], truth.rows[site][: len(captured)]) for site in SITES)
    branch.engine.check_integrity()


def submit(branch: Branch, n: int, **options: object) -> Job:
    job = Job(branch.lane, n, **options)
    branch.engine.loop.submit(job)
    return job
