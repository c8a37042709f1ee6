"""Gradients through mixtures of experts: transformers' autograd, edits of routing, and wrong derivatives that are detected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.gradients import derivatives as mixture
from replaylens.engine.model.config import MixtureConfig, Routing
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placing import place_all
from tests.engine.gradients.reference import difference, of_decoder
from tests.engine.gradients.test_autograd import errors_against_hugging_face, metric
from tests.engine.reference import random_decoder
from tests.toy_model import VOCAB, random_model

TOKENS = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(6)).tolist()
GATE = "blocks.0.mlp.gate.hook_out"
NAMES = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe-clipped", "phimoe", "flex-olmo", "glm4-moe", "deepseek-v3-groups"]


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_hugging_face(name: str) -> None:
    """S, T, C and the patterns of every layer. The promise is 1e-4."""
    assert max(errors_against_hugging_face(name).values()) < 1e-5


def decoder(**routing: Any) -> Any:
    """Two layers, the first with experts and a shared one: every row matters."""
    config = random_model(gain=4.0).config
    mixed = MixtureConfig(6, 24, Routing(2, **routing), layers=(True, False), d_shared=16, shared_gate=True)
    return random_decoder(type(config)(**{**vars(config), "mixture": mixed}))


EDITS: dict[str, list[Edit]] = {
    "reweighted": [Edit(GATE, "reweight", experts=[1, 4], factor=0.3)],
    "forced": [Edit(GATE, "force", experts=[5], positions=slice(4, None))],
    "forbidden": [Edit(GATE, "forbid", experts=[0, 2])],
    "forbidden and forced": [Edit(GATE, "forbid", experts=[0]), Edit(GATE, "force", experts=[3, 5], positions=[2, 7])],
    "other logits": [Edit(GATE, "add", torch.linspace(-1, 1, 6), positions=[1, 3])],
    "a row of weights": [Edit("blocks.0.mlp.gate.hook_expert_weights", "set", torch.full((6,), 0.25), positions=[3])],
    "an output": [Edit("blocks.0.mlp.experts.hook_out", "zero", positions=[5])],
}


@pytest.mark.parametrize("what", EDITS)
def test_agrees_with_autograd_under_edits(what: str) -> None:
    model, edits = decoder(), EDITS[what]
    subject = Engine(model.requires_grad_(False))
    sites = [site for site in subject.sites.in_order() if site not in subject.sites.read_only and "choice" not in site]
    sites = [site for site in sites if not site.endswith("hook_pattern")]
    ours = subject.prompt(TOKENS, edits=edits).gradients(metric, sites)
    truth = of_decoder(decoder().double(), TOKENS, metric, place_all(edits, subject.sites, len(TOKENS)))
    assert ours.certified is False and set(sites) <= set(truth)
    assert max(difference(ours[site], truth[site]) for site in sites if truth[site].any()) < 1e-5
    plain = subject.prompt(TOKENS).gradients(metric, sites)
    assert difference(plain[GATE], truth[GATE]) > 1e-3, "the control: the edits matter"


@pytest.mark.parametrize(
    "routing",
    [
        dict(normalised=False, scale=2.5),
        dict(kind="sigmoid", scale=0.5),
        dict(kind="sigmoid", normalised=False),
        dict(kind="sparsemixer", jitter=0.3),
    ],
)
def test_every_kind_of_weights_agrees_with_autograd(routing: dict[str, Any]) -> None:
    """Also with experts that are forbidden."""
    subject = Engine(decoder(**routing).requires_grad_(False))
    for edits in ([], EDITS["forbidden"]):
        ours = subject.prompt(TOKENS, edits=edits).gradients(metric, [GATE, "blocks.0.hook_in"])
        placed = place_all(edits, subject.sites, len(TOKENS))
        truth = of_decoder(decoder(**routing).double(), TOKENS, metric, placed)
        assert max(difference(ours[site], truth[site]) for site in ours) < 1e-5


def test_in_company_and_after_a_fork_the_bits_are_the_same() -> None:
    subject = Engine(decoder().requires_grad_(False))
    sites = [GATE, "blocks.0.mlp.experts.hook_expert_out", "blocks.0.hook_in"]
    alone = subject.prompt(TOKENS).gradients((3, 8), sites)
    (fork,) = subject.prompts([[5, 6], [*TOKENS, 7]])[1].fork(at=len(TOKENS))
    again = fork.gradients((3, 8), sites)
    assert alone.certified and again.value == alone.value
    assert all(torch.equal(again[site], alone[site]) and alone[site].any() for site in sites)


def _unrouted(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda g, logits, scores, chosen, routing, products: torch.zeros_like(logits)


def _unweighted(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda mixture, g, x, *more: real(mixture, g * 2, x, *more)


WRONG = {"constant weights": ("_weights", _unrouted), "experts that count twice": ("_experts", _unweighted)}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_derivative_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, wrong = WRONG[what]
    monkeypatch.setattr(mixture, function, wrong(getattr(mixture, function)))
    assert max(errors_against_hugging_face("qwen3-moe").values()) > 1e-3
