"""`Mixture`: a mixture of experts in the place of an MLP, with its router and its shared expert."""

import torch
from torch import Tensor, nn

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.experts import Experts
from replaylens.engine.model.layers import Linear
from replaylens.engine.model.ops import RowOps
from replaylens.engine.model.routing import barred, sigmoid, without_barred
from replaylens.engine.model.tap import Tap, tapped, wanted


class SharedExpert(nn.Module):
    """An MLP that every row goes to, beside its chosen experts."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.gated, self.kind = config.gated_mlp, config.activation
        self.up = Linear(config.d_model, width * (2 if config.gated_mlp else 1), config.mlp_bias)
        self.down = Linear(width, config.d_model, config.mlp_bias)

    def forward(self, x: Tensor, ops: RowOps) -> Tensor:
        """x [rows, d_model] -> [rows, d_model]"""
        return ops.linear(ops.linear_activate(x, self.up, self.kind, self.gated), self.down)


class Mixture(nn.Module):
    """Router, experts and shared expert: each row goes to a few experts, whose weighted outputs are added."""

    correction: Tensor | None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        mixture = config.mixture
        assert mixture is not None  # `config.sparse(layer)` holds
        self.routing, self.kind, self.num_experts = mixture.routing, config.activation, mixture.num_experts
        site = f"blocks.{layer}.mlp."
        self.logits_site, self.choice_site = site + "gate.hook_out", site + "gate.hook_choice"
        self.chosen_site, self.weights_site = site + "gate.hook_expert_indices", site + "gate.hook_expert_weights"
        self.post_site, self.each_site = site + "experts.hook_expert_post", site + "experts.hook_expert_out"
        self.experts_site = site + "experts.hook_out"
        self.shared_site, self.shared_gate_site = site + "shared_expert.hook_out", site + "shared_expert_gate.hook_out"
        self.router = Linear(config.d_model, mixture.num_experts, mixture.router_bias)
        self.correction = (
            nn.Parameter(torch.empty(mixture.num_experts, dtype=torch.float32)) if mixture.routing.correction else None
        )
        self.experts = Experts(mixture.num_experts, config.d_model, mixture.d_expert, config.gated_mlp, mixture.bias)
        self.shared = SharedExpert(config, mixture.d_shared) if mixture.d_shared else None
        self.shared_gate = Linear(config.d_model, 1, bias=False) if mixture.shared_gate else None

    @property
    def own_sites(self) -> tuple[str, ...]:
        """All sites within it."""
        router = (self.logits_site, self.choice_site, self.chosen_site, self.weights_site)
        return (*router, self.post_site, self.each_site, self.experts_site, self.shared_site, self.shared_gate_site)

    def adds(self, tap: Tap | None) -> bool:
        """Whether `forward` can add the residual stream itself: nobody wants the sum of the experts without it."""
        return self.shared is None and not wanted(tap, self.experts_site)

    def forward(self, x: Tensor, ops: RowOps, tap: Tap | None, residual: Tensor | None = None) -> Tensor:
        """x [rows, d_model], normed -> [rows, d_model]

        residual  the residual stream, to add; only if `adds`
        """
        chosen, weights = self._route(x, ops, tap)
        hidden = tapped(tap, self.post_site, ops.experts_hidden(x, chosen, self.experts, self.kind))
        outs = tapped(tap, self.each_site, ops.experts_out(hidden, chosen, self.experts))
        mixed = tapped(tap, self.experts_site, ops.combine(outs, weights, residual))
        if self.shared is None:
            return mixed
        shared = tapped(tap, self.shared_site, self.shared(x, ops))
        if self.shared_gate is not None:
            shared = shared * sigmoid(tapped(tap, self.shared_gate_site, ops.linear(x, self.shared_gate)))
        return mixed + shared

    def _route(self, x: Tensor, ops: RowOps, tap: Tap | None) -> tuple[Tensor, Tensor]:
        """The chosen experts and their weights: [rows, top] each."""
        logits = tapped(tap, self.logits_site, ops.linear(x, self.router))
        if not wanted(tap, self.choice_site):
            chosen, weights = ops.route(logits, self.routing, self.correction)
        else:
            scores = tapped(tap, self.choice_site, ops.choice_scores(logits, self.routing, self.correction))
            chosen = ops.choose(scores, self.routing)
            weights = ops.weigh(without_barred(logits, scores, chosen), chosen, self.routing)
            weights = weights.masked_fill(barred(scores, chosen), 0.0)  # a softmax over nothing else is not a number
        tapped(tap, self.chosen_site, chosen)
        if wanted(tap, self.weights_site):
            spread = ops.spread(weights, chosen, self.num_experts)
            edited = tapped(tap, self.weights_site, spread)
            weights = weights if edited is spread else edited.gather(-1, chosen)
        return chosen, weights
