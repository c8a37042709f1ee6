"""The decoder computes what Hugging Face computes, and the comparison detects any deviation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.loading import build, load
from replaylens.engine.model.ops import SequenceOps
from tests.engine.passes.packed import RAGGED, alone, logits, pack, sequences, worst
from tests.families import NAMES, hugging_face

TOLERANCE = 2e-5
"""relative tolerance of float32 logits against Hugging Face"""
families = pytest.mark.parametrize("name", NAMES)


@contextmanager
def float32_means_float64(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets Hugging Face compute norms, softmax and rotary angles, which are float32 in a model of any dtype, in float64."""
    with patch.context() as inside:
        inside.setattr(torch, "float32", torch.float64)
        inside.setattr(torch, "float", torch.float64)
        inside.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def in_float64(name: str) -> Any:
    """The family's Hugging Face model rebuilt in float64, including its rotary tables."""
    model = hugging_face(name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        rebuilt = type(model)(model.config)
    finally:
        torch.set_default_dtype(before)
    rebuilt.load_state_dict(model.state_dict())
    return rebuilt.eval()


@families
def test_ragged_batch_gives_hugging_face_logits(name: str) -> None:
    """Sequences of all lengths in one packed pass each get the logits that Hugging Face gives them alone."""
    tokens = sequences()
    ours, theirs = logits(load(hugging_face(name)), tokens), alone(hugging_face(name), tokens)
    assert worst(ours, theirs) < TOLERANCE
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.argmax(-1), b.argmax(-1))


@families
def test_equal_lengths_give_hugging_face_logits(name: str) -> None:
    """The batched code path, used when all lengths are equal, computes the same as the ragged one."""
    tokens = sequences((17, 17, 17))
    assert worst(logits(load(hugging_face(name)), tokens), alone(hugging_face(name), tokens)) < TOLERANCE


@families
def test_float64_agrees_to_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With float32 rounding lifted on both sides, only float64 rounding is left: the formulas are the same."""
    tokens = sequences()
    with float32_means_float64(monkeypatch):
        model = in_float64(name)
        error = worst(logits(load(model, torch.float64), tokens), alone(model, tokens))
    assert error < 1e-13


def test_float64_control_without_lifting() -> None:
    """Negative control: by default, Hugging Face's float64 model is not float64 throughout."""
    model, tokens = in_float64("llama"), sequences()
    assert worst(logits(load(model, torch.float64), tokens), alone(model, tokens)) > 1e-10


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral window": ("mistral", dict(windows=())),
    "mistral window off by one": ("mistral", dict(windows=(8, 8, 8))),
    "gemma2 windows": ("gemma2", dict(windows=())),
    "gemma2 windows on the wrong layers": ("gemma2", dict(windows=(0, 7, 0))),
    "gemma2 attention softcap": ("gemma2", dict(attn_softcap=0.0)),
    "gemma2 logit softcap": ("gemma2", dict(logit_softcap=0.0)),
    "gemma2 attention scale": ("gemma2", dict(attn_scale=0.0)),
    "gemma2 embedding scale": ("gemma2", dict(embed_scale=1.0)),
    "gemma3 windows": ("gemma3", dict(windows=())),
    "gemma3 local rotary": ("gemma3", dict(local_rope=None)),
    "llama3 rotary scaling": ("llama3", dict(rope=Rope(theta=5000.0))),
    "llama rotary base": ("llama", dict(rope=Rope(theta=10100.0))),
    "llama norm": ("llama", dict(norm_eps=1e-4)),
    "neox parallel residual": ("neox", dict(parallel_residual=False)),
    "neox sequential residual": ("neox-sequential", dict(parallel_residual=True)),
    "neox partial rotary": ("neox", dict(rotary_dim=8)),
    "gpt2 activation": ("gpt2", dict(activation="gelu")),
    "neox activation": ("neox", dict(activation="gelu_tanh")),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_oracle_notices_a_feature_left_out(feature: str) -> None:
    """Negative control: with one feature off or wrong, the logits are far outside the tolerance."""
    name, change = FEATURES[feature]
    right = load(hugging_face(name))
    assert any(getattr(right.config, field) != value for field, value in change.items())
    wrong = build(replace(right.config, **change), dict(right.state_dict()), torch.float32)
    tokens = sequences()
    assert worst(logits(wrong, tokens), alone(hugging_face(name), tokens)) > 3 * TOLERANCE


@families
def test_oracle_notices_every_tensor(name: str) -> None:
    """Negative control: changing any tensor of the model by a tenth moves the logits outside the tolerance."""
    model, tokens = load(hugging_face(name)), sequences((5, 16))
    right = logits(model, tokens)
    generator = torch.Generator().manual_seed(1)
    unnoticed = []
    for parameter_name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        if worst(logits(model, tokens), right) < TOLERANCE:
            unnoticed.append(parameter_name)
        parameter.copy_(kept)
    assert unnoticed == []


@families
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    """Replacing one sequence of a pack leaves the bits of all others. Its own rows change from the changed token on."""
    model, tokens = load(hugging_face(name)), sequences()
    changed = [x.clone() for x in tokens]
    changed[1][5] = (changed[1][5] + 1) % 97
    before, after = logits(model, tokens), logits(model, changed)
    for i in range(len(tokens)):
        assert torch.equal(before[i], after[i]) == (i != 1)
    assert torch.equal(before[1][:5], after[1][:5])
    assert not torch.equal(before[1][5], after[1][5])


@families
@torch.no_grad()
def test_stop_at_layer_is_a_cut(name: str) -> None:
    """Stopping at layer l and continuing from there gives the bits of the whole pass, for every l."""
    model = load(hugging_face(name))
    rows, positions = pack(sequences())
    ops = SequenceOps(RAGGED)
    whole = model(rows, positions, ops)
    layers = model.config.num_layers
    assert torch.equal(model(rows, positions, ops, stop_at_layer=0), model.embedding(rows, positions))
    for layer in range(layers + 1):
        part = model(rows, positions, ops, stop_at_layer=layer)
        assert torch.equal(model.run_blocks(part, positions, ops, None, layer, layers), whole)
        assert torch.equal(part, whole) == (layer == layers)


@torch.no_grad()
@pytest.mark.parametrize("layer", [-1, 4])
def test_stop_at_layer_outside_is_an_error(layer: int) -> None:
    """A layer that the model does not have is refused, never clipped."""
    model = load(hugging_face("llama"))
    rows, positions = pack(sequences())
    with pytest.raises(ValueError, match="between 0 and 3"):
        model(rows, positions, SequenceOps(RAGGED), stop_at_layer=layer)


def plain(**changes: Any) -> ModelConfig:
    """A small config with every kind of parameter."""
    shape = dict(num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, d_head=8, d_mlp=24, vocab_size=31)
    parts = dict(max_positions=64, norm="layer", post_norms=True, learned_positions=True, qk_norm=True, rotary_dim=8)
    biases = dict(qkv_bias=True, out_bias=True, mlp_bias=True, tied_embeddings=False)
    return ModelConfig(**{**shape, **parts, **biases, **changes})  # type: ignore[arg-type]


def test_initialize_is_a_function_of_the_seed() -> None:
    """The same seed gives the same bits, whatever the memory and the global generator held. The generator is not used."""
    first = Decoder(plain()).initialize(3)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = Decoder(plain())
    for parameter in second.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    assert second.initialize(3) is second
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.isfinite(b).all(), name
    other = Decoder(plain()).initialize(4)
    assert not torch.equal(first.embed, other.embed)


def test_initialized_model_predicts_the_uniform_distribution_nearly() -> None:
    """The loss of fresh weights is close to that of a uniform guess, so training starts sanely."""
    config = plain()
    model = Decoder(config).initialize(0).requires_grad_(False)
    out = torch.cat(logits(model, sequences((64,) * 4, config.vocab_size)))
    entropy = -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean()
    assert abs(entropy - torch.tensor(config.vocab_size).log()) < 0.05
