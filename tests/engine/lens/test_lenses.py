"""Unregistered tuned lenses raise the same error on plain models and on Thinking-States models."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, BadTrace, BadWeights, FingerprintMismatch
from replaylens.engine.lens import lens as readout
from replaylens.engine.lens import lens as tuned
from replaylens.engine.lens import lens as tuned_lens
from replaylens.engine.lens.lens import TunedLens
from replaylens.engine.model import loading
from replaylens.engine.records import LensSpec
from tests.families import hugging_face
from tests.toy_model import engine, random_model

TEXT = "A coin's state is heads. Alice flips. What's the state? A:"
models = pytest.mark.parametrize("name", ["coin-plain", "coin-thinking"])


def lens_for(subject: Engine) -> TunedLens:
    c = subject.config
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(c.num_layers, c.d_model, c.d_model, generator=generator) * 0.02
    return TunedLens(weight, torch.zeros(c.num_layers, c.d_model), tuned.unembed_hash(subject.model))


@models
def test_a_lens_that_was_not_made_known_is_named(name: str) -> None:
    """The error comes before anything is computed. Nothing of the prompt remains, and the engine stays usable."""
    knows, subject = Engine.load(name), Engine.load(name, record=True)
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
    recorded, other, knows = Engine.load(name, record=True), Engine.load(name), Engine.load(name)
    branch = recorded.prompt(TEXT, sites="Z", lens=lens_for(recorded))
    with pytest.raises(BadTrace, match="Add it with"):
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
    with pytest.raises(FingerprintMismatch, match="another unembedding"):
        subject.capture_spec("Z", lens=lens)
    with pytest.raises(BadRequest, match="Add it with"):
        subject.lenses.of(other.capture_spec("Z", lens=lens).lens)


def test_a_single_row_has_the_statistics_that_it_has_among_others() -> None:
    """On two threads the library would split the sum of a single row, and round it differently."""
    log_p = (torch.randn(24, 1, 49152, generator=torch.Generator().manual_seed(0)) * 3).log_softmax(-1)
    spec, threads = LensSpec((), top_k=1), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = readout.statistics(spec, log_p, [3] * 24)
        for i in range(24):
            alone = readout.statistics(spec, log_p[i : i + 1], [3])
            assert all(torch.equal(alone[name], whole[name][i : i + 1]) for name in whole)
        p = log_p.exp()
        split = [torch.equal((p[i : i + 1] * log_p[i : i + 1]).sum(-1), (p * log_p).sum(-1)[i : i + 1]) for i in range(24)]
        assert not all(split), "the control: summed alone, rows do differ"
    finally:
        torch.set_num_threads(threads)


def test_a_tuned_lens_of_a_model_in_bfloat16() -> None:
    model = loading.load(hugging_face("llama"), torch.bfloat16)
    rows = torch.randn(40, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    lens = tuned_lens.train(model, rows, steps=3)
    assert lens.weight.dtype == torch.float32 and lens.require(model) is lens
    assert lens.translate(rows).dtype == torch.bfloat16


def test_the_digest_of_a_lens_covers_all_of_it() -> None:
    subject = engine()
    lens = lens_for(subject)
    digests = [lens.digest]
    for name in ("weight", "bias"):
        changed = getattr(lens, name).clone()
        changed.view(-1)[-1] += 1e-3
        digests.append(replace(lens, **{name: changed}).digest)
    digests.append(replace(lens, unembed="0" * 64).digest)
    assert len(set(digests)) == 4


def test_a_changed_bias_of_a_saved_lens_is_noticed(tmp_path: Path) -> None:
    lens = lens_for(engine())
    lens.save(tmp_path / "lens.safetensors")
    about = (tmp_path / "lens.json").read_text()
    assert TunedLens.load(tmp_path / "lens.safetensors").digest == lens.digest
    replace(lens, bias=lens.bias + 1).save(tmp_path / "lens.safetensors")
    (tmp_path / "lens.json").write_text(about)
    with pytest.raises(BadWeights, match="do not match the digest"):
        TunedLens.load(tmp_path / "lens.safetensors")


@pytest.mark.parametrize("part", ["ln_final.weight", "ln_final.bias", "unembed.weight", "embed"])
def test_a_lens_reads_through_the_final_norm_and_the_unembedding(part: str) -> None:
    """A change of any tensor that it reads through is refused; a change elsewhere is not."""
    model = random_model(norm="layer", tied_embeddings=part == "embed")
    with torch.no_grad():
        model.ln_final.bias.zero_()
    subject = Engine(model)
    lens, other = lens_for(subject), deepcopy(model)
    assert lens.require(other) is lens
    with torch.no_grad():
        other.blocks[0].mlp.down.weight[0, 0] += 1
        assert lens.require(other) is lens
        other.get_parameter(part).view(-1)[-1] += 1e-3
    with pytest.raises(FingerprintMismatch, match="another unembedding"):
        lens.require(other)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 70])
def test_translators_are_added_to_the_identity_with_their_bias(rows: int) -> None:
    """Each layer by its own weight and bias against float64; the last entry, the model's own output, is not translated."""
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(2, 8, 8, generator=generator), torch.randn(2, 8, generator=generator)
    stacked = torch.randn(rows, 3, 8, generator=generator)
    found, x = TunedLens(weight, bias, "").translate(stacked), stacked.double()
    for layer in range(2):
        expected = x[:, layer] + x[:, layer] @ weight[layer].double().T + bias[layer].double()
        assert torch.allclose(found[:, layer].double(), expected, atol=1e-5)
    assert torch.equal(found[:, 2], stacked[:, 2])


def test_only_lenses_of_the_engines_unembedding_are_made_known() -> None:
    subject, other = engine(), Engine(random_model(seed=5))
    with pytest.raises(FingerprintMismatch, match="another unembedding"):
        subject.lenses.add(lens_for(other))
    assert subject.lenses.add(lens_for(subject)) == lens_for(subject).digest
