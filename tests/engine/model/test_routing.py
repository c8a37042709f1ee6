"""Routing: transformers' own routers choose the same experts with the same weights; ties and order are fixed; no row depends on
another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.errors import BadConfig
from replaylens.engine.model.config import (
    BARRED,
    MixtureConfig,
    ModelConfig,
    Routing,
    choice_scores,
    choose,
    ordered_sum,
    weigh,
    without_barred,
)
from replaylens.engine.model.families.moe import deepseek_v2_mixture, deepseek_v3_mixture
from replaylens.engine.model.layers import Experts, by_expert
from replaylens.engine.model.ops import TorchOps
from replaylens.engine.passes.cpu import CpuRowOps
from replaylens.engine.passes.products import Products

OPS = TorchOps()


def logits(rows: int = 40, experts: int = 8, seed: int = 0) -> Tensor:
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
    scores, correction = logits(60, 12), torch.linspace(-0.4, 0.4, 12)
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
    rows = logits(37)
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
    chosen, weights = OPS.route(logits(), Routing(1), None)
    assert torch.equal(chosen[:, 0], logits().argmax(-1)) and bool((weights == 1).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_barred_expert_that_is_chosen_all_the_same_weighs_nothing(kind: str) -> None:
    """Too few experts are left, so that the rest of the places go to forbidden ones."""
    routing, rows = KINDS[kind], logits(5)
    scores = choice_scores(rows, routing)
    scores[:, 1:] += 2 * BARRED
    chosen = choose(scores, routing)
    weights = weigh(without_barred(rows, scores, chosen), chosen, routing)
    assert bool((chosen[:, 0] == 0).all()) and bool((weights[:, 1:] == 0).all()) and bool((weights[:, 0] > 0).all())


@pytest.mark.parametrize("best", [1, 2, 3])
def test_without_barred_experts_a_group_is_as_good_as_its_best(best: int) -> None:
    """The sum of its best scores, negative ones too."""
    scores, routing = logits(200, 12), Routing(3, groups=4, chosen_groups=2, group_best=best)
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
    x, (chosen, weights) = torch.randn(9, 6, generator=generator), OPS.route(logits(9, 5), Routing(2), None)
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
