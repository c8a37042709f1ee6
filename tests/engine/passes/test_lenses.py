"""Unregistered tuned lenses raise the same error on plain models and on Thinking-States models."""

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadFile, BadRequest, BadWeights, FingerprintMismatch
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.passes import lens
from replaylens.engine.passes import lens as readout
from replaylens.engine.passes import lens as tuned
from replaylens.engine.passes import lens as tuned_lens
from replaylens.engine.passes.lens import TunedLens
from replaylens.engine.records import LensSpec
from replaylens.weights import loading
from tests.families import hugging_face
from tests.toy_model import engine, random_model
from tests.toy_model import engine as toy_engine

TEXT = "A coin's state is heads. Alice flips. What's the state? A:"
models = pytest.mark.parametrize("name", ["coin-plain", "coin-thinking"])


def lens_for(subject: Engine) -> TunedLens:
    c = subject.config
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(c.num_layers, c.d_model, c.d_model, generator=generator) * 0.02
    return TunedLens(weight, torch.zeros(c.num_layers, c.d_model), tuned.unembed_hash(subject.model))


@models
def test_a_lens_that_was_not_made_known_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before anything is computed. Nothing of the prompt remains, and the engine stays usable."""
    knows, subject = Engine.load(name), Engine.load(name, record=True)
    capture = knows.capture_spec("Z", lens=lens_for(knows))
    free, events = subject.runner.pool.num_free, len(subject.trace.events)
    monkeypatch.setattr(subject, "capture_spec", lambda *given, **stored: capture)
    with pytest.raises(BadRequest, match=r"does not have the tuned lens .*\. Add it with engine\.capture_spec"):
        subject.prompts([TEXT], sites="Z")
    monkeypatch.undo()
    assert subject.loop.lanes == {} and subject.tree.roots() == [] and subject.loop.jobs == []
    assert (subject.runner.pool.num_free, len(subject.trace.events)) == (free, events)
    subject.check_integrity()
    assert subject.prompt(TEXT, sites="Z", lens=lens_for(subject)).activations["Z.kl"].shape[1] == subject.config.num_layers + 1


@models
def test_a_trace_through_a_lens_that_was_not_made_known_is_named(name: str) -> None:
    recorded, other, knows = Engine.load(name, record=True), Engine.load(name), Engine.load(name)
    branch = recorded.prompt(TEXT, sites="Z", lens=lens_for(recorded))
    with pytest.raises(BadFile, match="Add it with"):
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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_in_the_callers_mode(mode: type[torch.no_grad]) -> None:
    model, rows = random_model(), torch.randn(8, 3, 32, generator=torch.Generator().manual_seed(2))
    plain = tuned_lens.train(model, rows, steps=2)
    with mode():
        within = tuned_lens.train(model, rows, steps=2)
    assert torch.equal(plain.weight, within.weight) and plain.weight.any()


def test_training_minimises_the_divergence_from_the_final_distribution() -> None:
    """One step against plain float64 code: the loss that is told, and Adam's first step, lr against the gradient's sign.
    Later steps draw other rows and go on from there."""
    model = random_model(num_layers=2, d_model=16, vocab_size=23)
    rows = torch.randn(9, 3, 16, generator=torch.Generator().manual_seed(0))
    chosen = rows[torch.randint(9, (4,), generator=torch.Generator().manual_seed(5))].double()
    weight, bias = (torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 16, 16), (2, 16)))
    reference, ops = deepcopy(model).double(), SequenceOps([4])
    final, losses = reference.logits(chosen[:, 2], ops).log_softmax(-1).detach(), []
    for layer in range(2):
        moved = chosen[:, layer] + chosen[:, layer] @ weight[layer].T + bias[layer]
        log_p = reference.logits(moved, ops).log_softmax(-1)
        losses.append(torch.nn.functional.kl_div(log_p, final, log_target=True, reduction="batchmean"))
    loss = (losses[0] + losses[1]) / 2
    loss.backward()
    told: list[tuple[int, float]] = []
    lens = tuned_lens.train(model, rows, steps=1, batch=4, lr=0.5, seed=5, tell=lambda *news: told.append(news))
    assert [step for step, _ in told] == [0] and told[0][1] == pytest.approx(loss.item(), rel=1e-5)
    for found, wanted in ((lens.weight, weight), (lens.bias, bias)):
        assert wanted.grad is not None
        clear = wanted.grad.abs() > 0.02 * wanted.grad.abs().max()  # Adam adds 1e-8 to the size
        assert torch.allclose(found[clear], -0.5 * wanted.grad[clear].sign().float(), rtol=1e-2) and clear.float().mean() > 0.5
    more: list[float] = []
    lens = tuned_lens.train(model, rows, steps=60, batch=9, lr=0.01, tell=lambda step, loss: more.append(loss))
    assert len(more) == 60 and sum(more[-9:]) < 0.5 * sum(more[:9])


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


def test_a_foreign_or_truncated_lens_is_named(tmp_path: Path) -> None:
    lens, file = lens_for(engine()), tmp_path / "lens.safetensors"
    lens.save(file)
    good, about = file.read_bytes(), (tmp_path / "lens.json").read_text()
    for content in (b"", good[: len(good) // 2], good[:-1], b"\x80\x04.", (1 << 62).to_bytes(8, "little") + b"{}"):
        file.write_bytes(content)
        with pytest.raises(BadWeights, match="is not a tuned lens"):
            TunedLens.load(file)
    file.write_bytes(good)
    for text in ("", "[]", "null", "[" * 100_000, '{"unembed": 5, "digest": "x"}', about.replace('"format": 1', '"format": 2')):
        (tmp_path / "lens.json").write_text(text)
        with pytest.raises(BadWeights, match=r"lens\.json is"):
            TunedLens.load(file)
    flat, whole = lens.weight[0], lens.weight.long()
    for name, value in (("weight", flat), ("weight", whole), ("bias", lens.bias[:, 1:]), ("bias", lens.bias * torch.nan)):
        replace(lens, **{name: value}).save(file)
        with pytest.raises(BadWeights, match="needs finite weights"):
            TunedLens.load(file)
    with pytest.raises(BadRequest, match="Invalid path=5"):
        TunedLens.load(5)  # type: ignore[arg-type]


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
    for make_known in (subject.lenses.add, lambda lens: subject.capture_spec("Z", lens=lens)):
        with pytest.raises(FingerprintMismatch, match="another unembedding"):
            make_known(lens_for(other))
    with pytest.raises(BadRequest, match="Add it with"):
        subject.lenses.of(other.capture_spec("Z", lens=lens_for(other)).lens)
    assert subject.lenses.add(lens_for(subject)) == lens_for(subject).digest


# ---- readout ---------------------------------------------------------------------------------------------------------
# Z against float64 code in this file: the engine's reference computes Z with the same code and cannot catch its faults.

TOKENS = torch.randint(3, 97, (20,), generator=torch.Generator().manual_seed(1)).tolist()


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(math.fsum(math.exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


def test_statistics_of_single_distributions() -> None:
    """Each number follows its definition, one distribution at a time."""
    logits = torch.randn(5, 3, 11, generator=torch.Generator().manual_seed(0)) * 2
    emitted = [4, 0, 10, -1, 7]
    read = lens.statistics(LensSpec((), top_k=3, targets=(2, 9), full=True), logits.log_softmax(-1), emitted)
    for row in range(5):
        final = log_softmax(logits[row, -1].tolist())
        for layer in range(3):
            log_p = log_softmax(logits[row, layer].tolist())
            order = sorted(range(11), key=lambda token: -log_p[token])[:3]
            # KL(final || layer): the final layer is the true distribution
            divergence = math.fsum(math.exp(q) * (q - p) for p, q in zip(log_p, final, strict=True))
            assert float(read["Z.kl"][row, layer]) == pytest.approx(divergence, abs=1e-5)
            assert float(read["Z.entropy"][row, layer]) == pytest.approx(-math.fsum(math.exp(p) * p for p in log_p), abs=1e-5)
            assert read["Z.top_ids"][row, layer].tolist() == order
            assert read["Z.top_logprobs"][row, layer].tolist() == pytest.approx([log_p[t] for t in order], abs=1e-5)
            assert read["Z.targets"][row, layer].tolist() == pytest.approx([log_p[2], log_p[9]], abs=1e-5)
            assert read["Z.full"][row, layer].tolist() == pytest.approx(log_p, abs=1e-5)
            said = float(read["Z.emitted"][row, layer])
            assert math.isnan(said) if emitted[row] < 0 else said == pytest.approx(log_p[emitted[row]], abs=1e-5)


def test_ranks_count_likelier_tokens_and_ties_go_to_the_lowest_id() -> None:
    """One row at a time against a stable sort; every token of every row, with ties of two, three and all."""
    rows = torch.tensor([[3.0, 1.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 3.0, 3.0]])
    for token in range(5):
        ranks = lens._ranks(torch.stack([rows, rows.flip(-1)], dim=1), [token] * 3)
        for row in range(3):
            for layer, logits in enumerate((rows[row].tolist(), rows[row].flip(-1).tolist())):
                order = sorted(range(5), key=lambda each: (-logits[each], each))
                assert ranks[row, layer] == order.index(token), (row, layer, token)
    assert lens._ranks(rows[:, None], [-1, 0, -1])[:, 0].isnan().tolist() == [True, False, True]


def test_ranks_do_not_depend_on_how_many_rows_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its own token, in the first chunk and after it."""
    served = toy_engine()
    path = [(7 * i + i * i) % served.config.vocab_size for i in range(23)]
    rows = {site: served.prompt(path, sites="S").activations[site] for site in served.sites.letter("S")}
    tokens = [*path[1:-1], -1, 5]
    logits = served.prompt(path, sites=["unembed.hook_out"]).activations["unembed.hook_out"]
    spec = LensSpec(tuple(rows), top_k=1)
    whole = lens.read_ranked(spec, served.runner, rows, tokens)
    for i, token in enumerate(tokens):
        expected = math.nan if token < 0 else float((logits[i] > logits[i, token]).sum())
        assert math.isnan(whole["Z.rank"][i, -1]) if token < 0 else whole["Z.rank"][i, -1] == expected
    for together in (1, 4, 9):
        monkeypatch.setattr(lens, "_TOGETHER", together * len(rows))
        some = lens.read_ranked(spec, served.runner, rows, tokens)
        assert [name for name in whole if not torch.equal(some[name].nan_to_num(-1), whole[name].nan_to_num(-1))] == []


def test_the_divergence_is_not_symmetric() -> None:
    """Final: half and half. Layer: nearly certain. One direction is several times the other, so swapping them shows."""
    layer, final = [0.99, 0.01], [0.5, 0.5]
    read = lens.statistics(LensSpec((), top_k=1), torch.tensor([[layer, final]]).log(), [0])
    forward = 0.5 * math.log(0.5 / 0.99) + 0.5 * math.log(0.5 / 0.01)
    assert read["Z.kl"][0].tolist() == pytest.approx([forward, 0.0], abs=1e-6)
    assert forward > 2 * (0.99 * math.log(0.99 / 0.5) + 0.01 * math.log(0.01 / 0.5))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_every_layer_of_a_branch_against_hugging_face(name: str) -> None:
    """The residual streams through Hugging Face's own final norm and unembedding, in float64."""
    model = hugging_face(name)
    served = Engine(loading.load(model, torch.float32))
    branch = served.prompt(TOKENS, sites="SZ", full=True, targets=[5, 6]).generate(6, final=True)
    rows, tokens = branch.activations, branch.tokens
    layers = served.sites.letter("S")
    truth = torch.stack([_lens(model, rows[site]) for site in layers], 1)  # [positions, layers, vocab]
    p, final = truth.exp(), truth[:, -1:]
    assert torch.allclose(rows["Z.full"].double(), truth, atol=1e-4)
    assert torch.allclose(rows["Z.entropy"].double(), -(p * truth).sum(-1), atol=1e-4)
    assert torch.allclose(rows["Z.kl"].double(), (final.exp() * (final - truth)).sum(-1), atol=1e-4)
    assert torch.allclose(rows["Z.targets"].double(), truth[..., [5, 6]], atol=1e-4)
    follows = torch.tensor(tokens[1:])[:, None, None].expand(-1, len(layers), 1)
    assert torch.allclose(rows["Z.emitted"][:-1].double(), truth[:-1].gather(-1, follows)[..., 0], atol=1e-4)
    assert bool(rows["Z.emitted"][-1].isnan().all()), "nothing follows the last token yet"
    assert not torch.allclose((p * (truth - final)).sum(-1), rows["Z.kl"].double(), atol=1e-2), "the control: reversed"


def test_a_row_whose_successor_changed_is_read_again() -> None:
    """After a rollback a path continues with another token. Z of the row before gives that token's log-prob."""
    branch = toy_engine().prompt([1, 2, 3, 4], sites="SZ").generate(6)
    first = branch.activations["Z.emitted"].clone()
    branch.rollback(7).force([(branch.tokens[6] + 1) % 61, 9]).generate(2)
    whole = toy_engine().prompt(branch.tokens, sites="SZ").activations
    for site in whole.sites():
        assert torch.equal(branch.activations[site][: whole.end], whole[site][: branch.activations.end]), site
    assert torch.equal(first[:6], whole["Z.emitted"][:6]) and not torch.equal(first[6], whole["Z.emitted"][6])


@pytest.mark.parametrize("count", [1, 2, 255, 257, 600])
def test_next_token_has_the_bits_of_z(count: int) -> None:
    """Log-probability and entropy without the rest of Z, in any number of rows; a changed row has other bits."""
    runner = toy_engine().runner
    generator = torch.Generator().manual_seed(count)
    residual = torch.randn(count, runner.model.config.d_model, generator=generator)
    emitted = torch.randint(-1, runner.model.config.vocab_size, (count,), generator=generator).tolist()
    emitted[-1] = 3
    kept = residual.clone()
    logprob, entropy = lens.next_token(runner, residual, emitted)
    z = lens.read(LensSpec(("S",), top_k=1), runner, {"S": residual}, emitted)
    assert torch.equal(residual, kept), "the rows themselves are left alone"
    assert torch.equal(logprob.nan_to_num(7), z["Z.emitted"][:, 0].nan_to_num(7)) and logprob.shape == (count,)
    assert torch.equal(entropy, z["Z.entropy"][:, 0]) and entropy.shape == (count,)
    assert logprob.isnan().tolist() == [token < 0 for token in emitted]
    residual[-1, 0] += 0.5
    other = lens.next_token(runner, residual, emitted)
    assert torch.equal(other[1][:-1], entropy[:-1]) and not torch.equal(other[1], entropy)
    assert not torch.equal(other[0][-1:], logprob[-1:])


def _lens(model: object, residual: Tensor) -> Tensor:
    """Log-probabilities [rows, vocab] of a residual stream, from the modules of a Hugging Face model."""
    from copy import deepcopy

    whole = deepcopy(model).double()
    inner = whole.base_model  # type: ignore[attr-defined]
    norm = inner.ln_f if hasattr(inner, "ln_f") else inner.norm
    with torch.no_grad():
        logits = whole.lm_head(norm(residual.double()))  # type: ignore[attr-defined]
    cap = getattr(whole.config, "final_logit_softcapping", None)  # type: ignore[attr-defined]
    return (torch.tanh(logits / cap) * cap if cap else logits).log_softmax(-1)
