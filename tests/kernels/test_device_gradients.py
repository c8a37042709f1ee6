"""Gradients of an engine whose passes run by the kernels: the CPU's numbers, and the same bits in any company."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import NoGradient
from replaylens.engine.model.config import MixtureConfig, Routing
from replaylens.engine.request.edits import Edit
from replaylens.gradients import cuda
from tests.engine.reference import random_decoder
from tests.kernels.interpreted import DEVICES, served
from tests.toy_model import random_model

PATH, OTHER = [3, 1, 4, 1, 5], [8, 2]
SITES = ["S", "T", "C", "blocks.0.attn.hook_q", "blocks.0.attn.hook_k", "blocks.0.mlp.hook_post", "ln_final.hook_out"]
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(1))
EDITS = [
    Edit("S", "add", VECTOR, positions=[1, 3], layers=[0], keep_norm=True),
    Edit("T", "zero", positions=2, when=VECTOR),
    Edit("C", "project_out", VECTOR, positions=slice(1, None)),
]


@pytest.fixture(scope="module", params=DEVICES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return served(request.param, random_model(num_layers=1))


@pytest.fixture(scope="module")
def host() -> Engine:
    return Engine(random_model(num_layers=1), cache_tokens=1024)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest gradient."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


@pytest.mark.slow
@pytest.mark.parametrize("edits", [[], EDITS], ids=["plain", "edited"])
def test_the_numbers_of_the_cpu_and_the_same_bits_in_company(engine: Engine, host: Engine, edits: list[Edit]) -> None:
    found = engine.prompt(PATH, edits=edits).gradients((3, 8), SITES)
    truth = host.prompt(PATH, edits=edits).gradients((3, 8), SITES)
    assert found.certified and abs(found.value - truth.value) < 1e-4 * max(1.0, abs(truth.value))
    assert {site: apart(found[site], truth[site]) for site in truth if apart(found[site], truth[site]) > 1e-4} == {}
    assert all(not gradient.is_cuda for gradient in found.values())
    (fork,) = engine.prompts([OTHER, [*PATH, 7]])[1].fork(at=len(PATH), edits=edits)
    again = fork.gradients((3, 8), SITES)
    assert again.value == found.value and all(torch.equal(again[site], found[site]) for site in found)
    assert not torch.equal(found["blocks.0.hook_in"], truth["blocks.0.hook_in"]), "control: bits are those of the kernels"
    if edits:
        plain = host.prompt(PATH).gradients((3, 8), SITES)
        assert apart(plain["blocks.0.hook_in"], found["blocks.0.hook_in"]) > 1e-2, "control: the edits matter"


@pytest.mark.slow
def test_the_divergence_from_another_branch(engine: Engine, host: Engine) -> None:
    found, truth = (e.prompt(PATH).gradients(e.prompt(OTHER), ["blocks.0.hook_in"]) for e in (engine, host))
    assert found.certified and apart(found["blocks.0.hook_in"], truth["blocks.0.hook_in"]) < 1e-4


def test_a_product_that_depends_on_company_is_not_certified(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the product of single rows has other bits."""
    honest = cuda.matmul
    monkeypatch.setattr(cuda, "_known", {})
    monkeypatch.setattr(cuda, "matmul", lambda g, w, **more: honest(g, w, **more) * (1 + 1e-6 * (len(g) == 1)))
    branch = engine.prompt(PATH)
    assert not branch.gradients((3, 8), ["blocks.0.hook_in"]).certified
    assert not branch.gradients((3, 8), ["blocks.0.hook_in"]).certified, "nor at its second use"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_mixtures_of_experts(device: str) -> None:
    """The numbers of the CPU through experts, their weights and the router; the same bits in company."""
    mixture = MixtureConfig(5, 24, Routing(2), d_shared=16, shared_gate=True)
    model = lambda: random_decoder(replace(random_model(num_layers=1).config, mixture=mixture)).requires_grad_(False)  # noqa: E731
    subject, host = served(device, model()), Engine(model(), cache_tokens=1024)
    sites = ["blocks.0.mlp.gate.hook_out", "blocks.0.mlp.experts.hook_expert_post", "blocks.0.mlp.hook_out", "blocks.0.hook_in"]
    edits = [Edit("blocks.0.mlp.gate.hook_out", "reweight", experts=[0, 1, 2], factor=0.5)]
    found, truth = (each.prompt(PATH, edits=edits).gradients((3, 8), sites) for each in (subject, host))
    assert found.certified and max(apart(found[site], truth[site]) for site in sites) < 1e-4
    (fork,) = subject.prompts([OTHER, [*PATH, 7]])[1].fork(at=len(PATH), edits=edits)
    again = fork.gradients((3, 8), sites)
    assert all(torch.equal(again[site], found[site]) and found[site].any() for site in sites)


def test_the_inside_of_attention_is_refused(engine: Engine) -> None:
    with pytest.raises(NoGradient, match="never store it"):
        engine.prompt(PATH).gradients((3, 8), ["blocks.0.attn.hook_pattern"])
