"""Gradients agree with PyTorch's autograd for every family, at every site, and a wrong derivative is detected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.gradients import backward, derivatives
from replaylens.engine.model.config import Activation
from replaylens.engine.model.loading import load
from replaylens.engine.model.ops import AttentionSpec
from tests.engine.gradients.reference import difference, of_decoder, of_hugging_face
from tests.families import NAMES, hugging_face
from tests.toy_model import VOCAB, engine, random_model

TOLERANCE = 1e-5
"""relative, of a site's whole gradient in float32; the promise is 1e-4"""
TOKENS = torch.randint(0, 97, (23,), generator=torch.Generator().manual_seed(3)).tolist()
families = pytest.mark.parametrize("name", NAMES)


def metric(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[5] - 0.3 * logits[7]


def errors_against_hugging_face(name: str) -> dict[str, float]:
    """The relative error at S, T, C and the pattern of every layer."""
    subject = Engine.load(hugging_face(name), check=False)
    layers = subject.config.num_layers
    of_letter = {letter: subject.sites.per_layer(letter) for letter in "STC"}
    of_letter["P"] = [f"blocks.{layer}.attn.hook_pattern" for layer in range(layers)]
    ours = subject.prompt(TOKENS).gradients(metric, [site for sites in of_letter.values() for site in sites])
    theirs = of_hugging_face(hugging_face(name), TOKENS, metric)
    return {key: difference(ours[of_letter[key[0]][int(key[1:])]], value) for key, value in theirs.items()}


@families
def test_agrees_with_hugging_face(name: str) -> None:
    found = errors_against_hugging_face(name)
    assert len(found) == 4 * 3 + 1 and max(found.values()) < TOLERANCE


@families
def test_agrees_with_float64_at_every_site(name: str) -> None:
    """Against autograd through our decoder in float64: all sites but the patterns, which the test above covers."""
    subject = Engine.load(hugging_face(name), check=False)
    read_only = subject.sites.read_only
    sites = [site for site in subject.sites.in_order() if site not in read_only and not site.endswith("hook_pattern")]
    ours = subject.prompt(TOKENS).gradients(metric, sites)
    truth = of_decoder(load(hugging_face(name)).double(), TOKENS, metric)
    assert set(ours) == set(truth) == set(sites)
    assert max(difference(ours[site], truth[site]) for site in sites) < TOLERANCE


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_every_activation(kind: Activation, gated: bool) -> None:
    """Also for combinations that no family has. Without rotation, with partial rotation and with one key head."""
    changes: dict[str, Any] = dict(activation=kind, gated_mlp=gated, rotary_dim=4 if gated else 0, num_kv_heads=1)
    model, path = random_model(gain=4.0, **changes), [t % VOCAB for t in TOKENS]
    ours = engine(model).prompt(path).gradients(metric, "STC")
    truth = of_decoder(random_model(gain=4.0, **changes).double(), path, metric)
    assert max(difference(ours[site], truth[site]) for site in ours) < TOLERANCE


@pytest.mark.parametrize("window", [0, 5, 70])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 130])
def test_every_length(length: int, window: int) -> None:
    """One row; the border between the two orders of a product; several blocks of rows, with and without a window."""
    path = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    ours = engine(random_model(windows=(window, 0))).prompt(path).gradients(metric, "STC")
    truth = of_decoder(random_model(windows=(window, 0)).double(), path, metric)
    assert max(difference(ours[site], truth[site]) for site in ours if truth[site].any()) < TOLERANCE


def _uncapped(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda g, x, cap: g


def _unturned(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda g, rotary: g


def _unwindowed(real: Callable[..., Any]) -> Callable[..., Any]:
    def changed(g: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, want: bool, products: Any) -> Any:
        return real(g, q, k, v, AttentionSpec(spec.layer, spec.scale, spec.softcap, 0), want, products)

    return changed


WRONG = {
    "no soft cap": ("gemma2", derivatives, "through_softcap", _uncapped),
    "rotation not undone": ("llama", backward, "through_rotary", _unturned),
    "no window": ("mistral", backward, "through_attention", _unwindowed),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_derivative_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one derivative is wrong, and the comparison with Hugging Face says so."""
    name, module, function, wrong = WRONG[what]
    monkeypatch.setattr(module, function, wrong(getattr(module, function)))
    assert max(errors_against_hugging_face(name).values()) > 1e-3
