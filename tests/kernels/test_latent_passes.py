"""Passes with latent attention and with sinks in a CUDA device's arithmetic: company, edits, keys that are shown."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.proof import doctor_cuda
from replaylens.engine.proof import doctor_cuda as comparison
from replaylens.engine.proof.doctor import Finding
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from tests.engine.reference import decoder
from tests.kernels.interpreted import DEVICES, served

ATTN = "blocks.1.attn."
PATH = [3, 14, 15, 92]
SHOWN = {"deepseek-v3": [ATTN + "hook_k", ATTN + "hook_v", ATTN + "hook_kv_latent"], "gpt-oss": []}
EDITS = {
    "deepseek-v3": [
        Edit(ATTN + "hook_kv_latent", "add", torch.ones(13), [1]),
        Edit(ATTN + "hook_rot_k", "zero", positions=[2]),
        Edit(ATTN + "hook_pattern", "mask", positions=[3], keys=[0, 2], heads=[1, 4]),
    ],
    "gpt-oss": [Edit(ATTN + "hook_pattern", "zero", positions=[3], keys=[0, 2], heads=[1, 4])],
}


def agree(a: Branch, b: Branch) -> bool:
    """Whether tokens, KV and captured rows have the same bits."""
    rows = (torch.equal(a.activations[site], b.activations[site]) for site in a.activations.sites())
    return a.tokens == b.tokens and torch.equal(a.kv(), b.kv()) and all(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss"])
def test_edits_and_company(name: str, device: str) -> None:
    """Edits of latents, rotated keys and edges: what a CPU computes, with the same bits beside other requests."""
    sites, edits = ["S", *SHOWN[name]], EDITS[name]
    engine = served(device, decoder(name))
    alone = engine.prompt(PATH, sites=sites, edits=edits)
    engine.prefix.clear()
    beside = engine.prompts([PATH[::-1], PATH], sites=sites, edits=edits)[1]
    assert agree(alone, beside)
    meant = Engine(decoder(name)).prompt(PATH, sites=sites, edits=edits)
    plain = Engine(decoder(name)).prompt(PATH, sites=sites)
    for site in meant.activations.sites():
        torch.testing.assert_close(alone.activations[site], meant.activations[site], rtol=1e-4, atol=2e-5)
    last = "blocks.1.hook_out"
    assert not torch.allclose(meant.activations[last], plain.activations[last], atol=1e-3), "control: the edits matter"
    assert torch.equal(alone.kv().cpu()[1, 1, 0, 0, :13], alone.activations[SHOWN[name][2]][1]) if SHOWN[name] else True


@torch.no_grad()
def test_the_doctor_examines_products_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways round, with a control that differs. A product that depends on the rows fails."""
    for module in (comparison, doctor_cuda):
        monkeypatch.setattr(module, "ROWS", (1, 3))
    model = decoder("deepseek-v3")
    random = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0))  # noqa: E731
    found: list[Finding] = []
    doctor_cuda._by_head(model, random, found)
    assert all(f.passed for f in found) and len({f.shape for f in found if not f.control}) == 3
    assert any(f.control and not f.equal for f in found), "the control has no teeth"
    honest = doctor_cuda.HeadOps.by_head
    monkeypatch.setattr(doctor_cuda.HeadOps, "by_head", lambda self, x, weight: honest(self, x, weight) * (1 + 1e-6 * len(x)))
    found.clear()
    doctor_cuda._by_head(model, random, found)
    assert any(not f.passed for f in found)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_through_latents(device: str) -> None:
    """The CPU's numbers, through the keys and values that products by head show."""
    sites = ["S", "blocks.0.attn.hook_kv_latent"]
    engine = served(device, decoder("deepseek-v3"))
    found, truth = (each.prompt(PATH).gradients((3, 8), sites) for each in (engine, Engine(decoder("deepseek-v3"))))
    assert found.certified
    for site in truth:
        torch.testing.assert_close(found[site], truth[site], rtol=1e-3, atol=1e-4 * float(truth[site].abs().max()))
