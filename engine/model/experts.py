"""`Experts`: the weights of one layer's experts, and the product of rows with the experts that they are routed to."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor], Tensor]
"""x [any number of rows, inputs] times a weight [inputs, outputs] -> [rows, outputs]"""


class Experts(nn.Module):
    """One layer's experts, stacked. Weights are stored [inputs, outputs], as those of `Linear`."""

    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(self, count: int, d_model: int, d_expert: int, gated: bool, bias: bool) -> None:
        """gated  `up` holds gate | up, as that of an MLP"""
        super().__init__()
        self.gated = gated
        wide = d_expert * (2 if gated else 1)
        self.up = nn.Parameter(torch.empty(count, d_model, wide, dtype=torch.float32))
        self.down = nn.Parameter(torch.empty(count, d_expert, d_model, dtype=torch.float32))
        self.up_bias = nn.Parameter(torch.empty(count, wide, dtype=torch.float32)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, d_model, dtype=torch.float32)) if bias else None


def by_expert(chosen: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The chosen experts [rows, top] in order: (expert, its places among rows * top, ascending)."""
    experts, counts = chosen.unique(return_counts=True)
    places = chosen.flatten().argsort(stable=True)
    yield from zip(experts.tolist(), places.split(counts.tolist()), strict=True)


def expert_products(
    x: Tensor, chosen: Tensor, weight: Tensor, bias: Tensor | None, product: Product, real: int | None = None
) -> Tensor:
    """Every row times the weights of its chosen experts: [rows, top, outputs].

    x       [rows, inputs], or [rows, top, inputs] with inputs of their own for each expert
    chosen  [rows, top]
    weight  [experts, inputs, outputs], bias [experts, outputs]
    real    the first rows that are computed; the others are padding and become zero. None: all
    """
    rows, top = chosen.shape
    pairs = x.flatten(0, 1) if x.dim() == 3 else None
    out = x.new_zeros(rows * top, weight.shape[-1])
    for expert, places in by_expert(chosen if real is None else chosen[:real]):
        own = x[places // top] if pairs is None else pairs[places]
        found = product(own, weight[expert])
        out[places] = found if bias is None else found + bias[expert]
    return out.view(rows, top, -1)
