"""The arithmetic of mixtures of experts on a CUDA device: routing, and products of each row with its experts.

Every kernel gives a row the same bits at any number of rows, whatever the other rows choose. The host never learns which
experts are chosen, so that passes with experts run inside CUDA graphs.
"""

from functools import lru_cache

import torch
from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import Activation, ModelConfig
from replaylens.engine.model.experts import Experts
from replaylens.engine.model.routing import Routing
from replaylens.kernels import grouped, route
from replaylens.kernels.activation import activation
from replaylens.kernels.attention import MAX_REST, MAX_VALUES
from replaylens.kernels.launch import grouped_rows
from replaylens.kernels.plan import Plan, plan, sorted_plan


def require_supported(config: ModelConfig) -> None:
    """UnsupportedModel if the kernels cannot compute a model of this config."""
    if config.slopes:
        raise UnsupportedModel("ALiBi is not supported on CUDA: the kernel adds nothing to scores. Use device='cpu'.")
    if config.latent is not None and (config.latent.rank > MAX_VALUES or config.rotary_dim > MAX_REST):
        raise UnsupportedModel(
            f"Latents of {config.latent.rank} and rotated keys of {config.rotary_dim} dimensions are not supported on CUDA: "
            f"the kernel has room for {MAX_VALUES} and {MAX_REST}. Use device='cpu'."
        )


@lru_cache(maxsize=64)
def _spec(routing: Routing) -> route.RouteSpec:
    return route.RouteSpec(
        routing.top,
        routing.kind,
        routing.normalised,
        routing.scale,
        routing.groups,
        routing.chosen_groups,
        routing.group_best,
        routing.jitter,
    )


class ExpertOps:
    """The part of `RowOps` that belongs to experts."""

    _planned: tuple[Tensor, Plan] | None = None
    """the last plan and what it was made for: both products of a layer use it"""

    _routed: tuple[Tensor, Tensor] | None = None
    """the last weights of chosen experts, and those of all: the kernel stores both"""

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        chosen, weights, spread = route.route(logits, _spec(routing), correction)
        self._routed = weights, spread
        return chosen, weights

    def spread(self, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
        known = self._routed
        if known is not None and known[0] is weights:
            return known[1]
        return weights.new_zeros(len(weights), experts).scatter(-1, chosen, weights)

    def choice_scores(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Tensor:
        return route.choice_scores(logits, _spec(routing), correction)

    def choose(self, scores: Tensor, routing: Routing) -> Tensor:
        return route.choose(scores.contiguous(), _spec(routing))

    def weigh(self, logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        return route.weigh(logits, chosen.contiguous(), _spec(routing))

    def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
        made = self._plan(chosen, experts)
        hidden = grouped.grouped_matmul(x, experts.up, experts.up_bias, made, chosen.shape[1], kind, experts.gated)
        return hidden.unflatten(0, chosen.shape)

    def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        made = self._plan(chosen, experts)
        pairs = hidden.flatten(0, 1)
        return grouped.grouped_matmul(pairs, experts.down, experts.down_bias, made, 1).unflatten(0, chosen.shape)

    def combine(self, outs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        return grouped.combine(outs.contiguous(), weights.contiguous(), residual)

    def _plan(self, chosen: Tensor, experts: Experts) -> Plan:
        known = self._planned
        if known is None or known[0] is not chosen:
            count = len(experts.up)
            made = plan(chosen.contiguous(), count, grouped_rows(chosen.numel(), count, experts.up.dtype))
            known = self._planned = chosen, made
        return known[1]


class LibraryExpertOps(ExpertOps):
    """The library's grouped product, over rows that are sorted by expert first. Slower than ours on an H200 at every size that
    was measured, so the fast path does not use it: it is what benchmarks and the doctor's controls compare with."""

    def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
        made = _sorted(chosen, experts)
        rows = x[made.order // chosen.shape[1]]
        wide = _library(rows, experts.up, experts.up_bias, made, chosen)
        return _unsorted(activation(wide, kind, experts.gated), made, chosen)

    def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        made = _sorted(chosen, experts)
        rows = hidden.flatten(0, 1)[made.order]
        return _unsorted(_library(rows, experts.down, experts.down_bias, made, chosen), made, chosen)


def _sorted(chosen: Tensor, experts: Experts) -> Plan:
    return sorted_plan(chosen.contiguous(), len(experts.up), tile_rows=chosen.numel(), capacity=len(experts.up))


def _library(rows: Tensor, weight: Tensor, bias: Tensor | None, made: Plan, chosen: Tensor) -> Tensor:
    out: Tensor = torch._grouped_mm(rows, weight, offs=made.ends)
    return out if bias is None else out + bias[chosen.flatten()[made.order]]


def _unsorted(x: Tensor, made: Plan, chosen: Tensor) -> Tensor:
    return torch.empty_like(x).index_copy_(0, made.order.long(), x).unflatten(0, chosen.shape)
