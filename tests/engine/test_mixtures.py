"""Mixtures of experts in the engine: certified products of experts, sites of routers in captures, dumps and probes."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens import ablate, lens, patch, probes, tasks
from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadRequest, Caveat, UnsupportedModel
from replaylens.engine.model.config import Latent, MixtureConfig, ModelConfig, Routing
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import expert_products
from replaylens.engine.passes import cpu
from replaylens.engine.request.edits import Edit
from replaylens.kernels import cpu_experts
from replaylens.kernels.gpus import KNOWN
from replaylens.replay.run import Run
from replaylens.tasks import WordTokenizer
from tests.engine.reference import random_decoder
from tests.toy_model import random_model

WIDE = ModelConfig(
    num_layers=2,
    d_model=128,
    num_heads=4,
    num_kv_heads=2,
    d_head=32,
    d_mlp=256,
    vocab_size=97,
    max_positions=128,
    rotary_dim=32,
    mixture=MixtureConfig(6, 160, Routing(2), layers=(False, True), d_shared=64, shared_gate=True),
)
"""long enough products for a library to round few rows differently from many"""
PROMPT = [(7 * i * i + 3) % 97 for i in range(23)]
SITES = ["blocks.1.mlp.gate.hook_out", "blocks.1.mlp.hook_expert_indices", "blocks.1.mlp.hook_expert_weights"]
OUTS = ["blocks.1.mlp.experts.hook_expert_post", "blocks.1.mlp.experts.hook_expert_out"]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_decoder(WIDE).requires_grad_(False)


# ---- products and routing --------------------------------------------------------------------------------------------------


def test_experts_in_library_products_are_found(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with a library's products of an expert's rows, a row has other bits in company."""
    assert same_by_row(model)
    library: Any = lambda x, chosen, panels, bias, parts: expert_products(x, chosen, panels.weight(), bias, torch.matmul)  # noqa: E731
    monkeypatch.setattr(cpu_experts, "expert_products", library)
    assert not same_by_row(model)


def same_by_row(model: Decoder) -> bool:
    site = "blocks.1.hook_out"
    return torch.equal(Engine(model).prompt(PROMPT, sites=[site]).activations[site], by_row(Engine(model), site))


def by_row(engine: Engine, site: str) -> Tensor:
    """A site, captured row by row."""
    branch = engine.prompt(PROMPT[:1], sites=[site])
    for token in PROMPT[1:]:
        branch.force([token])
    return branch.activations[site]


def test_a_routing_that_looks_at_its_neighbours_is_found(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.CpuRowOps.weigh

    def wrong(self: cpu.CpuRowOps, logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        return right(self, logits - logits.mean(), chosen, routing)

    monkeypatch.setattr(cpu.CpuRowOps, "weigh", wrong)
    assert not same_by_row(model)


def test_which_models_the_kernels_have_room_for() -> None:
    from replaylens.engine.passes.cuda import require_supported  # imports triton: see tests/kernels/conftest.py

    given = torch.float32, KNOWN["H200"]
    require_supported(WIDE, *given)
    require_supported(ModelConfig(2, 32, 4, 2, 8, 48, 61, 64, sinks=True), *given)
    wide = replace(ModelConfig(2, 32, 4, 4, 8, 48, 61, 64, rotary_dim=4), latent=Latent(rank=513, d_value=8, query_rank=0))
    latents = replace(wide, latent=Latent(rank=512, d_value=8, query_rank=0))
    require_supported(latents, *given)
    with pytest.raises(UnsupportedModel, match="Latents of 513 and rotated keys of 4 dimensions are not supported on CUDA"):
        require_supported(wide, *given)
    require_supported(ModelConfig(2, 32, 4, 2, 8, 48, 61, 64, slopes=(0.5,) * 4), *given)
    require_supported(latents, torch.bfloat16, KNOWN["4090"])
    with pytest.raises(UnsupportedModel, match=r"512 per KV head in float32 takes [\d,]+ bytes .* block of 4090 has 101,376"):
        require_supported(latents, torch.float32, KNOWN["4090"])


# ---- sites -----------------------------------------------------------------------------------------------------------------


def test_sites_of_a_router_fit_together(model: Decoder) -> None:
    """The weighted outputs of the chosen experts, in order of their index, and the shared expert are the MLP's output."""
    engine = Engine(model)
    names = [*SITES, *OUTS, "blocks.1.mlp.experts.hook_out", "blocks.1.mlp.shared_expert.hook_out"]
    branch = engine.prompt(PROMPT, sites=[*names, "blocks.1.mlp.shared_expert_gate.hook_out", "C"])
    logits, chosen, weights, post, each, mixed, shared = (branch.activations[name] for name in names)
    assert chosen.dtype == torch.int64 and chosen.shape == (23, 2) and post.shape == (23, 2, 160) and each.shape == (23, 2, 128)
    assert torch.equal(chosen, logits.topk(2).indices.sort(-1).values)
    own = weights.gather(-1, chosen)
    assert torch.equal(weights.sum(-1), own.sum(-1)) and torch.allclose(own.sum(-1), torch.ones(23))
    assert torch.equal(mixed, each[:, 0] * own[:, :1] + each[:, 1] * own[:, 1:])
    gate = branch.activations["blocks.1.mlp.shared_expert_gate.hook_out"]
    torch.testing.assert_close(branch.activations["blocks.1.mlp.hook_out"], mixed + shared * torch.sigmoid(gate))
    dense = engine.sites.sites
    assert "blocks.0.mlp.dense_gate.hook_out" in dense and "blocks.0.mlp.gate.hook_out" not in dense


@pytest.mark.parametrize("site", ["gate", "experts", "shared_expert", "shared_expert_gate"])
def test_edits_after_the_last_attention_are_made_where_few_rows_are_read(model: Decoder, site: str) -> None:
    edit = Edit(f"blocks.1.mlp.{site}.hook_out", "zero", positions=slice(2, None))
    found = Engine(model).logits_under(PROMPT, [[], [edit]], positions=[-1])
    alone = Engine(model).prompt(PROMPT, sites=["unembed.hook_out"], edits=[edit]).activations["unembed.hook_out"]
    assert torch.equal(found[1], alone[-1:]) and not torch.equal(*found)


@pytest.mark.parametrize("name", ["blocks.1.mlp.hook_expert_indices", "blocks.1.mlp.gate.hook_expert_indices"])
def test_a_hook_that_changes_the_chosen_experts_is_refused(model: Decoder, name: str) -> None:
    """Under any name of the site: changing them has no effect, and must not seem to."""
    engine, seen = Engine(model), list[Tensor]()
    engine.run_with_hooks(PROMPT, fwd_hooks=[(name, lambda value, hook: seen.append(value))])  # reading is fine
    assert seen[0].shape == (1, 23, 2)
    with pytest.raises(BadEdit, match="can be read but not changed"):
        engine.run_with_hooks(PROMPT, fwd_hooks=[(name, lambda value, hook: value * 0)])


def test_the_verbs_of_the_workbench_take_mixtures(model: Decoder) -> None:
    engine, other = Engine(model), [*PROMPT[:5], 50, *PROMPT[6:]]
    _, cache = engine.run_with_cache(PROMPT, return_cache_object=False)
    assert cache["blocks.1.mlp.hook_expert_indices"].dtype == torch.int64
    assert "blocks.1.mlp.hook_pre" not in cache and "blocks.0.mlp.hook_pre" in cache
    assert len(lens(engine, PROMPT).frame) and len(patch(engine, PROMPT, other, metric=(5, 6)).frame)
    result = ablate(engine, [PROMPT, other], metric=(5, 6), heads=True, experts=[(1, e) for e in range(6)])
    gone = Edit("blocks.1.mlp.gate.hook_out", "reweight", experts=[2], factor=0.0)
    alone = engine.logits(PROMPT, edits=[gone])
    assert float(result.ablated[result.units.index("L1E2"), 0]) == float(alone[5] - alone[6])
    with pytest.raises(BadRequest, match="layer 0 has no experts"):
        ablate(engine, [PROMPT], metric=(5, 6), experts=[(0, 1)])
    with pytest.raises(BadRequest, match="not for experts"):
        ablate(engine, [PROMPT], metric=(5, 6), experts=[(1, 1)], how="mean")
    with pytest.raises(BadRequest, match=r"Invalid experts=True\. Give \(layer, expert\) pairs"):
        ablate(engine, [PROMPT], metric=(5, 6), experts=True)  # type: ignore[arg-type]


def test_several_edits_that_force_too_many_experts_are_refused(model: Decoder) -> None:
    """A row of this model goes to two experts. Edits count together where they meet: by position, token and order."""
    engine, gate = Engine(model), "blocks.1.mlp.gate.hook_out"
    force = lambda experts, **more: Edit(gate, "force", experts=experts, **more)  # noqa: E731
    text = r"together force the experts \[0, 1, 2\] at blocks.1, position 4: 3 experts are forced, but a row goes to 2"
    with pytest.raises(BadEdit, match=text):
        engine.logits(PROMPT, edits=[force([0, 1], positions=slice(0, 6)), force([2], positions=[4])])
    with pytest.raises(BadEdit, match=r"at blocks\.1, position 0"):
        engine.logits_under(PROMPT, [[], [force([2])]], edits=[force([0, 1])])
    branch = engine.prompt(PROMPT, edits=[force([0, 1])])
    with pytest.raises(BadEdit, match="together force the experts"):
        branch.fork(edits=[force([2])])
    for fine in (
        [force([0, 1], positions=slice(0, 4)), force([2], positions=[4])],  # they never meet
        [force([0, 1]), force([1])],
        [force([0, 1]), Edit(gate, "forbid", experts=[0]), force([2])],  # the last edit of an expert counts
        [force([0, 1], tokens=[PROMPT[1]]), force([2], tokens=[PROMPT[2]])],
    ):
        assert bool(engine.logits(PROMPT, edits=fine).isfinite().all())


def test_rejected_drafts_keep_the_routing_of_their_own_path(model: Decoder) -> None:
    engine = Engine(model)
    branch = engine.prompt(PROMPT, sites=SITES, keep_rejected=True)
    wrong = {len(PROMPT): [[5, 6, 7]], len(PROMPT) + 1: [[8, 9]]}
    branch.generate(4, drafter="forced", drafts=wrong)
    assert len(branch.rejected) > 1
    for rejected in branch.rejected:
        alone, kept = Engine(model).prompt(list(rejected.tokens), sites=SITES), rejected.activations
        for site in SITES:
            assert torch.equal(kept[site], alone.activations[site][-len(kept[site]) :])


# ---- dumps and probes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dumps_hold_router_sites_and_probes_read_them(tmp_path: Path) -> None:
    words = WordTokenizer(tasks.get("coin").vocabulary())
    mixture = MixtureConfig(5, 24, Routing(2, normalised=False))
    engine = Engine(random_model(vocab_size=words.vocab_size, mixture=mixture), words)
    run = engine.replay(tasks.get("coin")(flips=(1, 3)).examples(24), sites=[*SITES, *OUTS])
    dump = run.save(tmp_path / "dump")
    assert verify(tmp_path / "dump", engine, sample="all")
    indices, weights = dump.to_torch(SITES[1]), dump.to_torch(SITES[2])
    assert indices.dtype == torch.int64 and indices.shape == (len(dump), 2) and weights.shape == (len(dump), 5)
    assert bool((weights.gather(-1, indices) > 0).all()) and bool(((weights > 0).sum(-1) == 2).all())
    with warnings.catch_warnings():
        warnings.simplefilter("error", Caveat)
        report = probes.sweep(dump, "face", sites=SITES[0], positions="query", estimators="ridge")
        dump.matrix(SITES[2])
    assert set(report.table["site"]) == {SITES[0]}
    _warned_of_slots(dump, run)


def _warned_of_slots(dump: Dump, run: Run) -> None:
    """The columns of such a site belong to another expert in each row. One expert's rows, chosen by hand, are fine."""
    chosen, out = SITES[1], OUTS[1]
    for given, site in ((dump, out), (run, OUTS[0]), (dump, chosen)):
        with pytest.warns(Caveat, match=site.split(".")[-1]):
            probes.sweep(given, "face", sites=site, positions="query", estimators="ridge", permutations=19)
    with pytest.warns(Caveat, match="Choose the rows of one expert by hook_expert_indices"):
        assert dump.matrix(out).X.shape == (len(dump), 2 * 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Caveat)
        slots = torch.from_numpy(dump.matrix(chosen).X) == int(dump.to_torch(chosen)[0, 0])
        index = dump.index[slots.any(1).numpy()]
        rows = probes.ProbeRows.of_arrays({out: dump.to_torch(out)[slots]}, index["face"], groups=index["root"])
        assert rows.matrix(out).shape == (len(index), 32)
