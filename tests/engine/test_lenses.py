"""Tuned lenses have one home: a lens that was not made known has one error, on plain models and on models that think."""

import pytest
import torch

from replaylens import Engine
from replaylens.engine.errors import BadRequest, BadTrace, OtherFingerprint
from replaylens.engine.lens import tuned
from replaylens.engine.lens.tuned import TunedLens
from tests.toy_model import engine

TEXT = "A coin's state is heads. Alice flips. What's the state? A:"
models = pytest.mark.parametrize("name", ["coin-plain", "coin-thinking"])


def lens_for(subject: Engine) -> TunedLens:
    c = subject.config
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(c.num_layers, c.d_model, c.d_model, generator=generator) * 0.02
    return TunedLens(weight, torch.zeros(c.num_layers, c.d_model), tuned.unembed_hash(subject.model))


@models
def test_a_lens_that_was_not_made_known_is_named(name: str) -> None:
    """Before anything is computed; nothing is left of the prompt, and the engine goes on."""
    knows, subject = Engine.load(name), Engine.load(name)
    capture = knows.capture_spec("Z", lens=lens_for(knows))
    free, events = subject.runner.pool.num_free, len(subject.trace.events)
    plant = getattr(subject, "_thought_along", subject._planted)
    extra = (None, None) if name == "coin-thinking" else ()
    with pytest.raises(BadRequest, match=r"does not have the tuned lens .*\. Add it with engine\.capture_spec"):
        plant([TEXT], capture, (), (), *extra)
    assert subject.loop.lanes == {} and subject.tree.roots() == [] and subject.loop.jobs == []
    assert (subject.runner.pool.num_free, len(subject.trace.events)) == (free, events)
    subject.check_integrity()
    assert subject.prompt(TEXT, sites="Z", lens=lens_for(subject)).activations["Z.kl"].shape[1] == subject.config.num_layers + 1


@models
def test_a_trace_through_a_lens_that_was_not_made_known_is_named(name: str) -> None:
    recorded, other, knows = Engine.load(name), Engine.load(name), Engine.load(name)
    branch = recorded.prompt(TEXT, sites="Z", lens=lens_for(recorded))
    with pytest.raises(BadTrace, match="make it known"):
        other.replay_trace(recorded.trace)
    knows.capture_spec("Z", lens=lens_for(knows))
    again = knows.replay_trace(recorded.trace)[branch.id]
    assert torch.equal(again.activations["Z.kl"], branch.activations["Z.kl"])


@models
def test_a_lens_changes_what_is_read_and_not_the_path(name: str) -> None:
    subject = Engine.load(name)
    plain, read = subject.prompt(TEXT, sites="Z"), subject.prompt(TEXT, sites="Z", lens=lens_for(subject))
    assert torch.equal(plain.kv(), read.kv()) and plain.tokens == read.tokens
    assert not torch.equal(plain.activations["Z.kl"], read.activations["Z.kl"])
    assert torch.equal(plain.activations["Z.entropy"][:, -1], read.activations["Z.entropy"][:, -1])


def test_a_lens_of_another_model_is_refused_and_not_kept() -> None:
    subject, other = engine(), Engine.load("coin-plain")
    lens = lens_for(other)
    with pytest.raises(OtherFingerprint, match="another unembedding"):
        subject.capture_spec("Z", lens=lens)
    with pytest.raises(BadRequest, match="make it known"):
        subject.lenses.of(other.capture_spec("Z", lens=lens).lens)
