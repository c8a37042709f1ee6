"""Edits of an engine whose passes run by the kernels: the CPU's numbers, and the same bits alone and in company."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from tests.kernels.interpreted import DEVICES, served
from tests.toy_model import random_model

PATH = [3, 1, 4, 1, 5]
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(1))
PLANE = torch.randn(32, generator=torch.Generator().manual_seed(3))
EDITS = {
    "keep_norm of a head": [
        Edit("blocks.0.attn.hook_z", "add", VECTOR[:8].expand(1, 8), heads=[2], positions=slice(2, None), keep_norm=True)
    ],
    "when": [Edit("S", "add", VECTOR, layers=[0], factor=3.0, when=PLANE)],
    "edges": [
        Edit("blocks.0.attn.hook_pattern", "mask", positions=slice(2, None), keys=[0, 1], heads=[1, 3]),
        Edit("blocks.0.attn.hook_pattern", "zero", positions=[1, 4], keys=slice(0, 2)),
        Edit("S", "add", VECTOR, layers=[0], positions=0),
    ],
    "weights, and chosen tokens": [
        Edit("blocks.0.attn.hook_pattern", "set", torch.tensor([0.5, 0.0, 2.0]), positions=4, keys=[0, 2, 4], heads=[2]),
        Edit("blocks.0.attn.hook_pattern", "mask", positions=slice(1, None), keys=[0], tokens=[4]),
        Edit("S", "add", VECTOR, layers=[0], tokens=[1]),
    ],
    "several": [
        Edit("S", "add", VECTOR, layers=[0], factor=3.0, keep_norm=True, when=PLANE),
        Edit("S", "zero", layers=[0], positions=[2, 3], when=VECTOR),
        Edit("S", "project_out", PLANE, layers=[0], when=-VECTOR),
    ],
}


@pytest.fixture(scope="module", params=DEVICES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return served(request.param, random_model(num_layers=1))


@pytest.fixture(scope="module")
def host() -> Engine:
    return Engine(random_model(num_layers=1), cache_tokens=1024)


def rows(branch: Branch) -> dict[str, torch.Tensor]:
    return {site: branch.activations[site].cpu() for site in branch.activations.sites()}


def test_edited_branches(engine: Engine, host: Engine) -> None:
    """Alone: the CPU's rows and tokens. As forks, beside each other and a branch without edits: the same bits."""
    alone = [engine.prompt(PATH, sites="S", edits=edits) for edits in EDITS.values()]
    for branch, edits in zip(alone, EDITS.values(), strict=True):
        truth = host.prompt(PATH, sites="S", edits=edits)
        assert branch.certified
        for site, found in rows(branch).items():
            torch.testing.assert_close(found, truth.activations[site], rtol=1e-4, atol=1e-4)
    plain = engine.prompt(PATH, sites="S")
    forks = [plain.fork(edits=edits)[0] for edits in EDITS.values()]
    engine.generate([plain, *forks], 1)
    for fork, branch, edits in zip(forks, alone, EDITS.values(), strict=True):
        assert fork.tokens == host.prompt(PATH, edits=edits).generate(1).tokens
        assert torch.equal(fork.kv(), branch.kv())
        assert all(torch.equal(found, rows(fork)[site]) for site, found in rows(branch).items())
        last = "blocks.0.hook_out"
        assert not torch.equal(rows(plain)[last], rows(branch)[last]), "control: the edit changes something"
    engine.check_integrity()
