"""The decoder computes what Hugging Face computes, and the comparison detects any deviation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import VERIFIED, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadConfig, BadEdit
from replaylens.engine.model.config import (
    BARRED,
    Latent,
    MixtureConfig,
    ModelConfig,
    Rope,
    Routing,
    choice_scores,
    choose,
    ordered_sum,
    weigh,
    without_barred,
)
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Experts, by_expert
from replaylens.engine.model.ops import SequenceOps, TorchOps
from replaylens.engine.passes.cpu import CpuRowOps, Products
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from replaylens.replay.run import Run
from replaylens.tasks import WordTokenizer, get
from replaylens.training.score import generate
from replaylens.weights.families.moe import deepseek_v2_mixture, deepseek_v3_mixture
from replaylens.weights.loading import build, load
from tests.engine.passes.packed import RAGGED, alone, logits, pack, relative, sequences, worst
from tests.engine.reference import decoder, random_decoder
from tests.families import LATENT_NAMES, NAMES, core, hugging_face
from tests.replay.bridges import bridge
from tests.weights.models_page import NO_BRIDGE

TOLERANCE = 2e-5
"""relative tolerance of float32 logits against Hugging Face"""
families = pytest.mark.parametrize("name", core(NAMES))


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
def test_batches_give_hugging_face_logits(name: str) -> None:
    """Sequences of all lengths in one packed pass, or of equal ones, each get the logits that Hugging Face gives them alone."""
    for tokens in (sequences(), sequences((17, 17, 17))):
        ours, theirs = logits(load(hugging_face(name)), tokens), alone(hugging_face(name), tokens)
        assert worst(ours, theirs) < TOLERANCE
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.argmax(-1), b.argmax(-1))


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


# ---- routing ---------------------------------------------------------------------------------------------------------
# Routing: transformers' own routers choose the same experts with the same weights; ties and order are fixed; no row depends
# on another.

OPS = TorchOps()


def logits_of_routing(rows: int = 40, experts: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed)) * 2


def spread(chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """One weight per expert, in whatever order the chosen ones come."""
    return torch.zeros(len(chosen), experts).scatter(-1, chosen, weights)


# ---- against transformers --------------------------------------------------------------------------------------------------


def _deepseek(version: int, **fields: Any) -> tuple[Any, Any]:
    """(transformers' router, the family's mixture)"""
    import transformers as tf

    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, moe_intermediate_size=6, vocab_size=50)
    if version == 2:
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter as Router

        config = tf.DeepseekV2Config(**sizes, **fields)
    else:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter as Router

        config = tf.DeepseekV3Config(**sizes, first_k_dense_replace=0, **fields)
    read = deepseek_v2_mixture if version == 2 else deepseek_v3_mixture
    return Router(config), read(config.to_dict())


DEEPSEEK = {
    "v2, greedy": (2, dict(n_routed_experts=8, num_experts_per_tok=3, routed_scaling_factor=2.5)),
    "v2, in groups": (
        2,
        dict(n_routed_experts=12, num_experts_per_tok=3, topk_method="group_limited_greedy", n_group=4, topk_group=2),
    ),
    "v3, in groups": (3, dict(n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5)),
    "v3, not normalised": (
        3,
        dict(n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1, norm_topk_prob=False),
    ),
}


@pytest.mark.parametrize("case", DEEPSEEK)
@torch.no_grad()
def test_deepseeks_routers_are_those_of_transformers(case: str) -> None:
    router, mixture = _deepseek(DEEPSEEK[case][0], **DEEPSEEK[case][1])
    generator = torch.Generator().manual_seed(3)
    router.weight.copy_(torch.randn(router.weight.shape, generator=generator) * 0.5)
    correction = None
    if mixture.routing.correction:
        router.e_score_correction_bias.copy_(torch.randn(mixture.num_experts, generator=generator) * 0.3)
        correction = router.e_score_correction_bias
    x = torch.randn(60, 24, generator=generator)
    found, their_weights, their_chosen = router(x)
    chosen, weights = OPS.route(found, mixture.routing, correction)
    assert torch.equal(chosen, their_chosen.sort(-1).values)
    theirs = spread(their_chosen, their_weights, mixture.num_experts)
    torch.testing.assert_close(spread(chosen, weights, mixture.num_experts), theirs, rtol=2e-6, atol=1e-7)


def test_a_choice_without_groups_or_correction_would_differ() -> None:
    """The control of the test above."""
    scores, correction = logits_of_routing(60, 12), torch.linspace(-0.4, 0.4, 12)
    routing = Routing(3, "sigmoid", groups=4, chosen_groups=2, group_best=2, correction=True)
    right = choose(choice_scores(scores, routing, correction), routing)
    plain = replace(routing, groups=1, chosen_groups=1, group_best=1)
    assert not torch.equal(right, choose(choice_scores(scores, plain, correction), plain))
    assert not torch.equal(right, choose(choice_scores(scores, routing, None), routing))


# ---- order -----------------------------------------------------------------------------------------------------------------

KINDS = {
    "chosen": Routing(3),
    "all": Routing(3, normalised=False),
    "sigmoid": Routing(3, "sigmoid"),
    "groups": Routing(2, groups=4, chosen_groups=2, normalised=False, scale=1.5),
    "sparsemixer": Routing(2, "sparsemixer", normalised=False, jitter=0.2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_routed_by_itself(kind: str) -> None:
    """Alone, in any company and at any place: the same experts, ascending, and the same bits of their weights."""
    rows = logits_of_routing(37)
    chosen, weights = OPS.route(rows, KINDS[kind], None)
    assert bool((chosen.diff(dim=-1) > 0).all())
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1))
    for part in ([5], [5, 6, 30], order.tolist()):
        alone = OPS.route(rows[part], KINDS[kind], None)
        assert torch.equal(alone[0], chosen[part]) and torch.equal(alone[1], weights[part])


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_lower_index(kind: str) -> None:
    routing = KINDS[kind]
    tied = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]])
    found = choose(choice_scores(tied, routing), routing)[0].tolist()
    assert found == ([0, 2] if routing.top == 2 else [0, 2, 3])


def test_equal_logits_have_equal_weights() -> None:
    chosen, weights = OPS.route(torch.zeros(1, 6), Routing(4), None)
    assert chosen.tolist() == [[0, 1, 2, 3]] and weights.tolist() == [[0.25] * 4]


def test_one_expert_of_normalised_weights_has_weight_one() -> None:
    chosen, weights = OPS.route(logits_of_routing(), Routing(1), None)
    assert torch.equal(chosen[:, 0], logits_of_routing().argmax(-1)) and bool((weights == 1).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_barred_expert_that_is_chosen_all_the_same_weighs_nothing(kind: str) -> None:
    """Too few experts are left, so that the rest of the places go to forbidden ones."""
    routing, rows = KINDS[kind], logits_of_routing(5)
    scores = choice_scores(rows, routing)
    scores[:, 1:] += 2 * BARRED
    chosen = choose(scores, routing)
    weights = weigh(without_barred(rows, scores, chosen), chosen, routing)
    assert bool((chosen[:, 0] == 0).all()) and bool((weights[:, 1:] == 0).all()) and bool((weights[:, 0] > 0).all())


@pytest.mark.parametrize("best", [1, 2, 3])
def test_without_barred_experts_a_group_is_as_good_as_its_best(best: int) -> None:
    """The sum of its best scores, negative ones too."""
    scores, routing = logits_of_routing(200, 12), Routing(3, groups=4, chosen_groups=2, group_best=best)
    rows = scores.view(200, 4, 3)
    worth = ordered_sum(rows.sort(dim=-1, descending=True).values[..., :best]).squeeze(-1)
    groups = worth.sort(dim=-1, descending=True, stable=True).indices[:, :2]
    outside = torch.ones(200, 4, dtype=torch.bool).scatter(-1, groups, False)
    left = rows.masked_fill(outside[..., None], float("-inf")).view(200, 12)
    want = left.sort(dim=-1, descending=True, stable=True).indices[:, :3].sort(dim=-1).values
    assert torch.equal(choose(scores, routing), want)


# ---- products and sums -----------------------------------------------------------------------------------------------------


def test_rows_meet_their_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(5, 6, 4, gated=True, bias=True)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x, (chosen, weights) = torch.randn(9, 6, generator=generator), OPS.route(logits_of_routing(9, 5), Routing(2), None)
    with torch.no_grad():
        hidden = OPS.experts_hidden(x, chosen, experts, "silu")
        outs = OPS.experts_out(hidden, chosen, experts)
        mixed = OPS.combine(outs, weights)
        for row in range(9):
            for slot, expert in enumerate(chosen[row].tolist()):
                pre = x[row] @ experts.up[expert] + experts.up_bias[expert]  # type: ignore[index]
                own = torch.nn.functional.silu(pre[:4]) * pre[4:]
                torch.testing.assert_close(hidden[row, slot], own)
                torch.testing.assert_close(outs[row, slot], own @ experts.down[expert] + experts.down_bias[expert])  # type: ignore[index]
    assert torch.equal(mixed, outs[:, 0] * weights[:, :1] + outs[:, 1] * weights[:, 1:])


def test_experts_come_in_order_with_their_places() -> None:
    chosen = torch.tensor([[0, 3], [1, 3], [0, 1]])
    assert [(expert, places.tolist()) for expert, places in by_expert(chosen)] == [(0, [0, 4]), (1, [2, 5]), (3, [1, 3])]


def test_narrow_sums_are_rounded_one_by_one() -> None:
    outs, weights = torch.randn(3, 3, 8).bfloat16(), torch.rand(3, 3)
    mixed = OPS.combine(outs, weights)
    parts = (outs.float() * weights[..., None]).bfloat16()
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, (parts[:, 0] + parts[:, 1]) + parts[:, 2])


# ---- configs ---------------------------------------------------------------------------------------------------------------


def _config(mixture: MixtureConfig, **changes: Any) -> ModelConfig:
    return ModelConfig(2, 32, 4, 2, 8, 48, 61, 64, mixture=mixture, **changes)


def test_a_config_with_a_mixture_round_trips() -> None:
    routing = Routing(2, "sigmoid", groups=3, chosen_groups=2, group_best=2, correction=True, scale=2.5)
    config = _config(MixtureConfig(6, 16, routing, layers=(False, True), bias=True, d_shared=12), sinks=True)
    assert ModelConfig.from_json(config.to_json()) == config and [config.sparse(layer) for layer in (0, 1)] == [False, True]
    dense = ModelConfig(2, 32, 4, 2, 8, 48, 61, 64).to_json()
    assert "mixture" not in dense and "sinks" not in dense  # the fingerprints of dense models stay as they are


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: Routing(0), r"^A row goes to 0 experts \(num_experts_per_tok\)\. It must go to at least 1\.$"),
        (lambda: Routing(2, groups=0), r"^A row goes to 1 of 0 groups \(topk_group, n_group\)\. It must go to at least 1"),
        (lambda: Routing(2, groups=2, chosen_groups=3), r"^A row goes to 3 of 2 groups .* and to at most all of them\.$"),
        (lambda: Routing(2, group_best=0), "group_best is 0. It must be at least 1"),
        (lambda: Routing(3, "sparsemixer"), "chooses two experts"),
        (lambda: MixtureConfig(0, 8, Routing(1)), "needs experts"),
        (lambda: MixtureConfig(6, 8, Routing(2, groups=4)), "do not divide"),
        (lambda: MixtureConfig(6, 8, Routing(5, groups=3, chosen_groups=2)), "cannot be chosen"),
        (lambda: MixtureConfig(6, 8, Routing(2), shared_gate=True), "shared_gate needs"),
        (lambda: _config(MixtureConfig(6, 8, Routing(2), layers=(True,))), "mixture.layers has 1 entries"),
        (lambda: _config(MixtureConfig(6, 8, Routing(2)), activation="clamped_swiglu", gated_mlp=False), "needs a gated"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(make: Any, text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        make()


@pytest.mark.parametrize("ops", [TorchOps(), CpuRowOps(Products())])
def test_the_clamped_activation_is_transformers(ops: TorchOps) -> None:
    """On both sides of its limits, which tiny models do not reach."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(num_local_experts=1, hidden_size=4, intermediate_size=4)
    x = torch.linspace(-12, 12, 97)
    gate, up = (each.flatten() for each in torch.meshgrid(x, x, indexing="ij"))
    theirs = GptOssExperts(config)._apply_gate(torch.stack([gate, up], dim=-1).flatten()[None])[0]
    ours = ops.activate(torch.cat([gate, up])[None], "clamped_swiglu", gated=True)[0]
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
    assert float(ours[(gate == 12) & (up == 12)]) == float(ours[(gate == 8) & (up == 8)]) > 50


# ---- latent ----------------------------------------------------------------------------------------------------------
# Latent attention: what it holds, shows and refuses. `test_families.py` compares its logits with Hugging Face's.

LAYER = "blocks.1.attn."
INNER = ("hook_kv_latent", "hook_rot_q", "hook_rot_k", "hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern")
TOKENS = sequences((29,), seed=5)[0].tolist()
WIDE = ModelConfig(
    num_layers=2,
    d_model=128,
    num_heads=4,
    num_kv_heads=4,
    d_head=48,
    d_mlp=160,
    vocab_size=97,
    max_positions=128,
    rotary_dim=16,
    latent=Latent(rank=96, d_value=40, query_rank=64),
)
"""products that are long enough to round differently in another order"""

each = pytest.mark.parametrize(
    "name", [n if n in ("deepseek-v2", "deepseek-v3") else pytest.param(n, marks=pytest.mark.slow) for n in LATENT_NAMES]
)


def captured(name: str, *sites: str) -> Branch:
    return Engine(decoder(name)).prompt(TOKENS, sites=[LAYER + site for site in sites])


# ---- the cache -----------------------------------------------------------------------------------------------------------


@each
def test_the_cache_holds_the_latent_and_the_rotated_part_of_the_keys(name: str) -> None:
    branch = captured(name, "hook_kv_latent", "hook_rot_k")
    config, kv = branch.engine.config, branch.kv()
    assert config.latent is not None
    width = config.latent.rank + config.rotary_dim
    assert kv.shape == (len(TOKENS), 2, *config.kv_shape) == (len(TOKENS), 2, 1, 1, width)
    rows = branch.activations
    both = torch.cat([rows[LAYER + "hook_kv_latent"], rows[LAYER + "hook_rot_k"][:, 0]], dim=-1)
    assert torch.equal(kv[:, 1, 0, 0], both)


def test_the_cache_is_smaller_than_one_of_keys_and_values() -> None:
    cache = Engine(decoder("deepseek-v3"), cache_tokens=256).runner.cache
    slots = cache.data.shape[3]
    assert cache.num_bytes == 2 * slots * (13 + 6) * 4
    expanded = 2 * slots * 6 * (13 + 5) * 4  # six heads, keys of 13 dimensions, values of 5
    assert cache.num_bytes < expanded / 5


# ---- sites ---------------------------------------------------------------------------------------------------------------


@each
def test_keys_and_values_give_the_pattern_and_the_output(name: str) -> None:
    """What is shown of each head, put together as the plain form of attention, is what the absorbed form computes."""
    branch = captured(name, *INNER, "o.hook_in")
    q, k, v, scores, pattern, z = (
        branch.activations[LAYER + site]
        for site in ("hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern", "o.hook_in")
    )
    config = branch.engine.config
    assert q.shape == k.shape == (len(TOKENS), 6, config.d_head) and v.shape == z.shape == (len(TOKENS), 6, 5)
    plain = torch.einsum("ihd,jhd->ihj", q, k) * config.scale
    hidden = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).triu(1)[:, None]
    assert relative(plain.masked_fill(hidden, 0), scores.masked_fill(hidden, 0)) < 2e-6
    weights = plain.masked_fill(hidden, float("-inf")).softmax(-1)
    assert relative(weights, pattern) < 2e-6
    assert relative(torch.einsum("ihj,jhd->ihd", weights, v), z) < 2e-6
    shared = branch.activations[LAYER + "hook_rot_k"]
    assert torch.equal(k[..., -config.rotary_dim :], shared.expand(-1, 6, -1))
    assert torch.equal(q[..., -config.rotary_dim :], branch.activations[LAYER + "hook_rot_q"])


@each
@torch.no_grad()
def test_latents_and_pattern_are_hugging_faces(name: str) -> None:
    model, seen = hugging_face(name), dict[str, Tensor]()
    attention = model.model.layers[1].self_attn
    keep = lambda site: lambda _, __, out: seen.__setitem__(site, out[0])  # noqa: E731
    norms = {"hook_kv_latent": attention.kv_a_layernorm, "hook_q_latent": attention.q_a_layernorm}
    hooks = [module.register_forward_hook(keep(site)) for site, module in norms.items() if module is not None]
    seen["hook_pattern"] = model(torch.tensor([TOKENS]), output_attentions=True).attentions[1][0].transpose(0, 1)
    for hook in hooks:
        hook.remove()
    branch = captured(name, *seen)
    assert ("hook_q_latent" in seen) == (branch.engine.config.latent.query_rank > 0)  # type: ignore[union-attr]
    assert {site: relative(branch.activations[LAYER + site], value) < 2e-6 for site, value in seen.items()} == {
        site: True for site in seen
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LATENT_NAMES if name not in NO_BRIDGE])
@torch.no_grad()
def test_names_and_values_are_the_bridges(name: str) -> None:
    """By TransformerLens' verb, in its layout. Its hook_z takes the width of values for the number of heads, and DeepSeek-V2's
    bridge has the pairs of rotated dimensions side by side, V3's and ours apart."""
    names = [LAYER + site for site in INNER]
    names += [LAYER + "kv_a_layernorm.hook_out", LAYER + "kv_b_proj.hook_in", LAYER + "hook_z", LAYER + "hook_out"]
    theirs = bridge(name).run_with_cache(torch.tensor([TOKENS]))[1]
    ours = Engine(decoder(name)).run_with_cache(TOKENS, names_filter=names, return_cache_object=False)[1]
    for site in names:
        if name.startswith("deepseek-v2") and site.endswith(("rot_q", "rot_k", "hook_q", "hook_k")):
            continue
        other = theirs[site].reshape(ours[site].shape) if site.endswith("hook_z") else theirs[site]
        seen = ours[site] > torch.finfo(torch.float32).min
        assert ours[site].shape == other.shape and relative(ours[site][seen], other[seen]) < 3e-6, site


# ---- edits ---------------------------------------------------------------------------------------------------------------

WIDTHS = {
    "q_a_layernorm.hook_in": (11,),
    "q_b_proj.hook_in": (11,),
    "hook_q_latent": (11,),
    "kv_a_layernorm.hook_in": (13,),
    "hook_kv_latent": (13,),
    "hook_rot_q": (6, 6),
    "hook_rot_k": (1, 6),
    "hook_q": (6, 13),
}


@pytest.mark.parametrize("site", [*WIDTHS, "hook_z"])
def test_edits_reach_what_follows_and_have_the_same_bits_in_a_fork(site: str) -> None:
    engine = Engine(decoder("deepseek-v3"))
    value = torch.randn(WIDTHS.get(site, (6, 5)), generator=torch.Generator().manual_seed(1))
    edit = Edit(LAYER.replace("1", "0") + site, "add", value, positions=slice(17, 18))
    plain, edited = engine.prompt(TOKENS, sites="STC"), engine.prompt(TOKENS, sites="STC", edits=[edit])
    (fork,) = plain.fork(at=17, edits=[edit])
    fork.force(TOKENS[17:])
    assert torch.equal(fork.kv(), edited.kv())
    changed = (edited.kv() != plain.kv()).flatten(2).any(-1)  # [positions, layers]
    assert not changed[:17].any() and changed[17, 1]
    assert bool(changed[17, 0]) == (site in ("kv_a_layernorm.hook_in", "hook_kv_latent", "hook_rot_k"))
    for name in edited.activations.sites():
        assert torch.equal(fork.activations[name], edited.activations[name])


@pytest.mark.parametrize("site", ["hook_k", "hook_v"])
def test_keys_and_values_of_heads_are_shown_and_not_edited(site: str) -> None:
    """Attention computes with neither, so that an edit would change nothing."""
    with pytest.raises(BadEdit, match=f"{site} can be captured but not edited. It is computed outside the pass"):
        Engine(decoder("deepseek-v3")).prompt(TOKENS, edits=[Edit(LAYER + site, "zero")])


def test_what_is_shown_changes_no_bit() -> None:
    shown, plain = captured("deepseek-v3", *INNER), Engine(decoder("deepseek-v3")).prompt(TOKENS)
    assert torch.equal(shown.generate(4).kv(), plain.generate(4).kv())


def test_an_edge_can_be_cut() -> None:
    engine = Engine(decoder("deepseek-v2"))
    cut = [Edit(LAYER + "hook_pattern", "zero", positions=[20], keys=[3, 4], heads=[2])]
    branch = engine.prompt(TOKENS, edits=cut, sites=[LAYER + "hook_pattern"])
    pattern = branch.activations[LAYER + "hook_pattern"]
    assert not pattern[20, 2, 3:5].any() and pattern[20, 1, 3:5].all() and pattern[19, 2, 3:5].all()


def test_plain_decoding_for_training_writes_the_same_tokens() -> None:
    model = decoder("deepseek-v3")
    assert generate(model, [TOKENS, TOKENS[:7]], 6)[0] == Engine(model).prompt(TOKENS).generate(6).generated


# ---- dumps ---------------------------------------------------------------------------------------------------------------


def test_a_dump_with_latents_is_verified(tmp_path: Path) -> None:
    tokenizer = WordTokenizer(get("coin").vocabulary())
    model = random_decoder(replace(WIDE, vocab_size=len(tokenizer)))
    engine = Engine(model, tokenizer)
    run = engine.replay(get("coin")(flips=(1, 2)).examples(3), sites=["S", LAYER + "hook_kv_latent"], max_new=3)
    assert isinstance(run, Run)
    dump = run.save(tmp_path / "dump")
    assert Dump.open(dump.url).manifest.sites[LAYER + "hook_kv_latent"]
    assert verify(dump.url, Engine(model, tokenizer, page_size=4), sample="all").status == VERIFIED


# ---- products by head ------------------------------------------------------------------------------------------------


def test_another_order_of_sums_by_head_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: KV shows it if the products of a single row differ from those of many."""
    model, right = random_decoder(WIDE), Products.by_head

    def in_halves(self: Products, x: Tensor, weight: Tensor) -> Tensor:
        if len(x) > 1:
            return right(self, x, weight)
        half = weight.shape[1] // 2
        return right(self, x[..., :half], weight[:, :half]) + right(self, x[..., half:], weight[:, half:])

    kv = lambda cuts: _in_pieces(Engine(model), TOKENS, cuts).kv()  # noqa: E731
    assert torch.equal(kv([29]), kv([1] * 29))
    monkeypatch.setattr(Products, "by_head", in_halves)
    assert not torch.equal(kv([29]), kv([1] * 29))


def _in_pieces(engine: Engine, tokens: list[int], cuts: list[int]) -> Branch:
    branch, done = engine.prompt(tokens[: cuts[0]]), cuts[0]
    for count in cuts[1:]:
        branch.force(tokens[done : done + count])
        done += count
    return branch


def test_a_weight_and_its_transpose_are_packed_apart() -> None:
    """Both lie at one address."""
    weight, products = torch.arange(9.0).view(3, 3), Products()
    for each in (weight, weight.t(), weight[:2, :2]):
        assert torch.equal(products.product(torch.eye(len(each)), each), each)


# ---- configs -------------------------------------------------------------------------------------------------------------


def test_the_config_survives_its_text() -> None:
    assert ModelConfig.from_json(WIDE.to_json()) == WIDE
    assert '"latent"' not in replace(WIDE, latent=None).to_json()


def test_shared_parts_are_read_from_one_tensor() -> None:
    """Keys and values of `kv_b_proj` are stored apart, by head."""
    theirs = hugging_face("deepseek-v3").model.layers[0].self_attn.kv_b_proj.weight.view(6, 7 + 5, 13)
    state = load(hugging_face("deepseek-v3")).state_dict()
    assert torch.equal(state["blocks.0.attn.k.weight"], theirs[:, :7].transpose(1, 2))
    assert torch.equal(state["blocks.0.attn.v.weight"], theirs[:, 7:].transpose(1, 2))
