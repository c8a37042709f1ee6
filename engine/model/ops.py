"""`Ops`: the arithmetic behind the decoder.

The decoder is wiring only. Its `Ops` decide how a product, a norm or an attention is computed: differentiably over whole
sequences (`torch_ops.py`), canonically over pages, or fast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from replaylens.engine.model.config import Activation, ModelConfig
from replaylens.engine.model.experts import Experts
from replaylens.engine.model.layers import Linear, Norm
from replaylens.engine.model.rotary import Rotary
from replaylens.engine.model.routing import Routing


@dataclass(frozen=True)
class AttentionSpec:
    """The settings of one layer's attention."""

    layer: int
    scale: float
    softcap: float
    """0: none"""
    window: int
    """positions that a row sees, including its own; 0: all"""
    slopes: tuple[float, ...] = ()
    """per head, what is added to a score for each position of its key; empty: nothing"""

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> "AttentionSpec":
        scale = config.scale / (layer + 1) if config.scale_by_layer else config.scale
        return cls(layer, scale, config.attn_softcap, config.window(layer), config.slopes)


@dataclass(frozen=True)
class Observer:
    """Who is shown the inside of an attention. None: nobody asks for it."""

    pattern: Callable[[Tensor], object] | None = None
    """called with the attention pattern: [rows, heads, keys]"""
    scores: Callable[[Tensor], object] | None = None
    """called with what the pattern is the softmax of: [rows, heads, keys]; MASKED where a row does not see the key"""


MASKED = torch.finfo(torch.float32).min
"""the score of a key that a row does not see, as in Hugging Face's models. Its softmax is 0"""


@dataclass(frozen=True, eq=False)
class Heads:
    """The inputs of an attention."""

    q: Tensor
    """[rows, heads, d_head]"""
    k: Tensor
    """[rows, kv_heads, d_head]"""
    v: Tensor
    """[rows, kv_heads, d_head]. The very tensor `k` if keys are also the values, which a cache then holds once"""
    rotary: Rotary | None = None
    """the rotation to apply to queries and keys; None: none, or already applied"""
    joined: Tensor | None = None
    """[rows, heads + 2 kv_heads, d_head], whose parts q, k and v are, if nobody else holds it: attention may change it in
    place. None: they are tensors of their own"""
    sinks: Tensor | None = None
    """[heads]: scores that take part in the softmax and belong to no key; None: none"""
    norms: tuple[Norm, Norm] | None = None
    """of each head of q and k, to apply before the rotation; only if the ops `norm_heads`. None: none, or already applied"""


class RowOps(Protocol):
    """Arithmetic on single rows: products, norms, activations. `rows` is the first dimension."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """[rows, inputs] -> [rows, outputs]"""
        ...

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        """[rows, d] with a table [vocab, d], the embedding or a separate one -> [rows, vocab]"""
        ...

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """over the last dimension; any leading shape"""
        ...

    def norm_pair(self, q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm) -> tuple[Tensor, Tensor]:
        """norm(q, q_norm) and norm(k, k_norm), to the bit: [rows, heads, d_head] each"""
        ...

    def norm_parts(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """(what a norm divides by: [..., 1], its result before weight and bias)"""
        ...

    def activate(self, x: Tensor, kind: Activation, gated: bool) -> Tensor:
        """gated: [rows, gate | up] -> [rows, d_mlp]"""
        ...

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        """residual + linear(x), to the bit"""
        ...

    def linear_activate(self, x: Tensor, linear: Linear, kind: Activation, gated: bool) -> Tensor:
        """activate(linear(x)), to the bit"""
        ...

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """A router's logits [rows, experts] -> (chosen experts [rows, top] int64, ascending; weights, float32).

        Computes in float32, whatever the dtype of the logits.
        To the bit: choose(choice_scores(logits, routing, correction)), and weigh(logits, chosen, routing).
        """
        ...

    def choice_scores(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Tensor:
        """What experts are chosen by: [rows, experts] float32"""
        ...

    def choose(self, scores: Tensor, routing: Routing) -> Tensor:
        """[rows, experts] -> the chosen experts [rows, top] int64, ascending. Equal scores: the lower index"""
        ...

    def weigh(self, logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        """The weights of any chosen experts [rows, top]: [rows, top], float32"""
        ...

    def spread(self, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
        """The weights of all experts [rows, experts], 0 for those that are not chosen"""
        ...

    def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
        """x [rows, d_model], chosen [rows, top] -> the hidden layer of each chosen expert, activated: [rows, top, d_expert]"""
        ...

    def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        """hidden [rows, top, d_expert] -> each chosen expert's output, before its weight: [rows, top, d_model]"""
        ...

    def combine(self, outs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """outs [rows, top, d_model], weights [rows, top] -> [rows, d_model].

        The sum in order of the index: each product is rounded to the dtype of `outs`, and so is each sum. The residual stream,
        if given, is added to the rounded sum.
        """
        ...


class Ops(RowOps, Protocol):
    """The arithmetic of one pass over packed rows with known sequences and positions."""

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        """x [rows, heads, d_head], its first rotary_dim dimensions rotated by the angles of the rows' positions"""
        ...

    def norm_heads(self, q_norm: Norm, k_norm: Norm, rotary: Rotary) -> bool:
        """Whether `attend` can norm q and k itself. It moves no bit."""
        ...

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, heads, inputs], each head times its own weight of [heads, inputs, outputs]: [rows, heads, outputs]"""
        ...

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        """The heads' outputs: [rows, heads, d_head].

        Ops with a cache keep keys and values for later passes. `observe`, if given, is shown pattern and scores.
        """
        ...
