"""`Routing`: how a router's logits become chosen experts and their weights, and the plain form of that arithmetic.

Everything here computes a row from that row alone. Ties go to the lower index, and sums run in the order of the index.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from replaylens.engine.errors import BadConfig

RoutingKind = Literal["softmax", "sigmoid", "sparsemixer"]
BARRED = -5e29
"""an expert with a lower score for the choice is forbidden: if it is chosen all the same, because too few are left, it gets the
weight of a logit of minus infinity, which is 0"""


@dataclass(frozen=True)
class Routing:
    """Which experts a row goes to, and with what weights."""

    top: int
    """number of chosen experts"""
    kind: RoutingKind = "softmax"
    """"sparsemixer": each of two weights is a softmax over the logits close to the chosen one (PhiMoE)"""
    normalised: bool = True
    """the weights of the chosen experts add up to 1. For a softmax, it then runs over the chosen logits alone"""
    scale: float = 1.0
    """factor on the weights (DeepSeek)"""
    groups: int = 1
    """experts are chosen within the best groups of neighbours only (DeepSeek); 1: among all"""
    chosen_groups: int = 1
    group_best: int = 1
    """a group's score is the sum of this many of its best experts"""
    correction: bool = False
    """a trained bias per expert, added to the scores for the choice alone (DeepSeek-V3)"""
    jitter: float = 0.0
    """sparsemixer: logits further below the chosen one than twice this part of it are left out"""

    def __post_init__(self) -> None:
        if self.top < 1:
            raise BadConfig(f"A row goes to {self.top} experts (num_experts_per_tok). It must go to at least 1.")
        if not 1 <= self.chosen_groups <= self.groups:
            raise BadConfig(
                f"A row goes to {self.chosen_groups} of {self.groups} groups (topk_group, n_group). It must go to at least 1, "
                "and to at most all of them."
            )
        if self.group_best < 1:
            raise BadConfig(f"group_best is {self.group_best}. It must be at least 1.")
        if self.kind == "sparsemixer" and self.top != 2:
            raise BadConfig(f"sparsemixer chooses two experts, not {self.top}.")


def choice_scores(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Tensor:
    """What experts are chosen by: [rows, experts]. A softmax keeps the order of logits, so it is left out here."""
    scores = sigmoid(logits) if routing.kind == "sigmoid" else logits
    return scores if correction is None else scores + correction


def choose(scores: Tensor, routing: Routing) -> Tensor:
    """The experts with the highest scores, by index: [rows, top] int64, ascending. Scores that are equal: the lower index."""
    if routing.groups > 1:
        scores = _best_groups(scores, routing)
    return _highest(scores, routing.top).sort(dim=-1).values


def barred(scores: Tensor, chosen: Tensor) -> Tensor:
    """Which chosen experts the scores for the choice forbid: [rows, top] bool."""
    return scores.gather(-1, chosen) < BARRED


def without_barred(logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """The logits [rows, experts], minus infinity for chosen experts that the scores for the choice forbid."""
    own = logits.gather(-1, chosen).masked_fill(barred(scores, chosen), float("-inf"))
    return logits.scatter(-1, chosen, own)


def weigh(logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
    """The weights of the chosen experts: [rows, top] float32, from logits [rows, experts]."""
    if routing.kind == "sparsemixer":
        return _sparsemixer(logits, chosen, routing)
    if routing.kind == "sigmoid":
        weights = sigmoid(logits.gather(-1, chosen))
        if routing.normalised:
            weights = weights / (ordered_sum(weights) + 1e-20)
    elif routing.normalised:
        exponents = _exponents(logits.gather(-1, chosen))
        weights = exponents / ordered_sum(exponents)
    else:
        weights = softmax(logits).gather(-1, chosen)
    return weights if routing.scale == 1.0 else weights * routing.scale


def ordered_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, from its first element to its last: [..., 1]. This order defines the bits."""
    total = x[..., :1]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i : i + 1]
    return total


def softmax(x: Tensor) -> Tensor:
    """Over the experts, which are too many to be added one by one. The doctor compares the library's sum of a row."""
    exponents = _exponents(x)
    return exponents / exponents.sum(-1, keepdim=True)


def _exponents(x: Tensor) -> Tensor:
    return (x - x.amax(-1, keepdim=True)).exp()


def sigmoid(x: Tensor) -> Tensor:
    """From exp, which gives an element the same bits at any index; the library's sigmoid need not."""
    return 1 / ((-x).exp() + 1)


def _highest(scores: Tensor, count: int) -> Tensor:
    """The indices of the highest scores [..., n], highest first; ties go to the lower index: [..., count]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """The scores, -inf outside the best groups. A barred expert adds nothing to its group; one without others comes last."""
    rows = scores.view(len(scores), routing.groups, -1)
    best = rows.sort(dim=-1, descending=True).values[..., : routing.group_best]
    absent = best < BARRED
    worth = ordered_sum(best.masked_fill(absent, 0.0)).masked_fill(absent[..., :1], float("-inf"))
    groups = _highest(worth.squeeze(-1), routing.chosen_groups)
    kept = torch.zeros(rows.shape[:2], dtype=torch.bool, device=scores.device).scatter(-1, groups, True)
    return rows.masked_fill(~kept[..., None], float("-inf")).view(scores.shape)


def _sparsemixer(logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
    """The better of two experts first, then the other without it. Each weight: a softmax over the logits close to it."""
    own = logits.gather(-1, chosen)  # [rows, 2], by index
    first = own[:, 1:] > own[:, :1]  # whether the second is the better one
    places = torch.where(first, chosen.flip(-1), chosen)
    weights, left = [], logits
    for place in (places[:, :1], places[:, 1:]):
        top = logits.gather(-1, place)
        far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * routing.jitter
        weights.append(softmax(left.masked_fill(far, float("-inf"))).gather(-1, place))
        left = left.scatter(-1, place, float("-inf"))
    mixed = torch.cat(weights, dim=-1)
    return torch.where(first, mixed.flip(-1), mixed)
