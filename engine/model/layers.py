"""The parts of a decoder that hold weights: products and norms. How they are computed is for `Ops` to say."""

import torch
from torch import Tensor, nn

from replaylens.engine.model.config import NormKind


class Linear(nn.Module):
    """A product with a weight stored [inputs, outputs], the fastest layout for CPU libraries at few rows."""

    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=torch.float32)) if bias else None


class HeadLinear(nn.Module):
    """A product for each head, with weights stored [heads, inputs, outputs]."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, inputs, outputs, dtype=torch.float32))


class Norm(nn.Module):
    """The weights of an RMSNorm or LayerNorm over the last dimension."""

    bias: Tensor | None

    def __init__(self, shape: int | tuple[int, int], kind: NormKind, eps: float, bias: bool = True) -> None:
        """shape  the width, or (heads, width): each head is normed on its own and has its own weights
        bias   whether a LayerNorm has one"""
        super().__init__()
        self.kind = kind
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(shape, dtype=torch.float32)) if kind == "layer" and bias else None

    @property
    def by_head(self) -> bool:
        """Whether each head has its own weights."""
        return self.weight.dim() > 1
