"""`Ops`: the arithmetic behind the decoder.

The decoder is wiring only. Its `Ops` decide how a product, a norm or an attention is computed: differentiably over whole
sequences (`TorchOps`), canonically over pages, or fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from replaylens.engine.model.config import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Activation,
    ModelConfig,
    Routing,
    choice_scores,
    choose,
    sigmoid,
    weigh,
)
from replaylens.engine.model.layers import Conv, Experts, Linear, Norm, Rotary, expert_products

if TYPE_CHECKING:
    from replaylens.kernels.cpu import Panels

# ---- ops -------------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, eq=False)
class Recurrence:
    """The inputs of a recurrence with a state per head: S_t = exp(decay_t) S_(t-1) + k_t u_t^T, read by q_t.

    u_t is strength_t (v_t - (exp(decay_t) S_(t-1))^T k_t) with strengths, the delta rule, and v_t without them.
    """

    q: Tensor
    """[rows, key_heads, d_key]"""
    k: Tensor
    """likewise"""
    v: Tensor
    """[rows, heads, d_value]"""
    decay: Tensor
    """[rows, heads]: its logarithm"""
    strength: Tensor | None = None
    """[rows, heads]"""


class RowOps(Protocol):
    """Arithmetic on single rows: products, norms, activations. `rows` is the first dimension."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """[rows, inputs] -> [rows, outputs]"""
        ...

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        """[rows, d] with a table [vocab, d], the embedding or a separate one, or its packed form -> [rows, vocab]"""
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

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Squash into (-cap, cap); 0: unchanged."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """of every number"""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """of equal shape"""
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

    def exp(self, x: Tensor) -> Tensor:
        """of every number"""
        ...

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + exp(x)) of every number"""
        ...

    def short_conv(self, x: Tensor, conv: Conv, layer: int, silu: bool = False) -> Tensor:
        """The convolution of x [rows, channels] with the inputs of the positions before each row, which a cache keeps."""
        ...

    def scaled_norms(self, q: Tensor, k: Tensor, norm: Norm, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """The norms of q and k, [rows, heads, width] each, times a number each."""
        ...

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
        """silu(gate) times the norm of x, both [rows, heads, width]"""
        ...

    def rates(self, x: Tensor, a_log: Tensor, step_bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """x [rows, strengths | steps] -> scale sigmoid(strength), and -exp(a_log) softplus(step + step_bias) in float32"""
        ...

    def recur(self, given: Recurrence, layer: int, observe: Callable[[Tensor], object] | None = None) -> Tensor:
        """What each row reads from the state after it: [rows, heads, d_value].

        Ops with a cache keep what later rows need. `observe`, if given, is shown the states: [rows, heads, d_key, d_value].
        """
        ...


# ---- tap -------------------------------------------------------------------------------------------------------------
# `Tap`: who sees, and may replace, the values at the sites of a pass.


class Tap(Protocol):
    """Sees, and may replace, the values at the named sites."""

    def wants(self, site: str) -> bool:
        """Whether to call `__call__` at this site; called once per site and pass."""
        ...

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """The value to continue with: [rows, ...]. Must not change `value` in place."""
        ...


def wanted(tap: Tap | None, *sites: str) -> bool:
    """Whether the tap wants any of the sites."""
    return tap is not None and any(tap.wants(site) for site in sites)


def tapped(tap: Tap | None, site: str, value: Tensor) -> Tensor:
    return tap(site, value) if tap is not None and tap.wants(site) else value


def observer(tap: Tap | None, pattern_site: str, scores_site: str) -> Observer | None:
    """Shows the inside of an attention to the tap. None: it wants neither pattern nor scores."""
    pattern, scores = wanted(tap, pattern_site), wanted(tap, scores_site)
    if tap is None or not (pattern or scores):
        return None
    return Observer(partial(tap, pattern_site) if pattern else None, partial(tap, scores_site) if scores else None)


# ---- torch ops -------------------------------------------------------------------------------------------------------
# `TorchOps` and `SequenceOps`: the arithmetic of a decoder in plain PyTorch, differentiable, over whole sequences.


class TorchOps:
    """Everything except attention, in plain PyTorch: any device, any dtype, differentiable."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return x @ linear.weight if linear.bias is None else torch.addmm(linear.bias, x, linear.weight)

    def unembed(self, x: Tensor, table: "Tensor | Panels") -> Tensor:
        return F.linear(x, table) if isinstance(table, Tensor) else x @ table.weight()

    def norm_heads(self, q_norm: Norm, k_norm: Norm, rotary: Rotary) -> bool:
        return False

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        width, weight = (x.shape[-1],), None if norm.by_head else norm.weight
        if norm.kind == "layer":
            out = F.layer_norm(x, width, weight, None if norm.by_head else norm.bias, norm.eps)
        else:
            out = F.rms_norm(x, width, weight, norm.eps)
        return weighted(out, norm) if norm.by_head else out

    def norm_pair(self, q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm) -> tuple[Tensor, Tensor]:
        return self.norm(q, q_norm), self.norm(k, k_norm)

    def norm_parts(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        scale = (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return scale, x / scale

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        angles, half = rotary.rows, rotary.table.shape[-1]
        cos, sin = angles[:, None, 0].to(x.dtype), angles[:, None, 1].to(x.dtype)  # [rows, 1, half]
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], dim=-1)

    def turned(self, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, with the pending rotation applied."""
        if heads.rotary is None:
            return heads.q, heads.k, heads.v
        return self.rotate(heads.q, heads.rotary), self.rotate(heads.k, heads.rotary), heads.v

    def activate(self, x: Tensor, kind: Activation, gated: bool) -> Tensor:
        if not gated:
            return _ACTIVATIONS[kind](x)
        gate, up = x.chunk(2, dim=-1)
        return clamped_swiglu(gate, up) if kind == "clamped_swiglu" else _ACTIVATIONS[kind](gate) * up

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return softcap(x, cap)

    def sigmoid(self, x: Tensor) -> Tensor:
        return sigmoid(x)

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x)

    def scaled_norms(self, q: Tensor, k: Tensor, norm: Norm, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
        return self.norm(q, norm) * scales[0], self.norm(k, norm) * scales[1]

    def gated_norm(self, x: Tensor, gate: Tensor, norm: Norm) -> Tensor:
        return self.activate(torch.cat([gate, self.norm(x, norm)], dim=-1), "silu", gated=True)

    def rates(self, x: Tensor, a_log: Tensor, step_bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        strength, step = x.chunk(2, dim=-1)
        strength = self.sigmoid(strength)
        decay = -self.exp(a_log) * self.softplus(step + step_bias)
        return strength if scale == 1.0 else strength * scale, decay

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        return residual + self.linear(x, linear)

    def linear_activate(self, x: Tensor, linear: Linear, kind: Activation, gated: bool) -> Tensor:
        return self.activate(self.linear(x, linear), kind, gated)

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        chosen = self.choose(self.choice_scores(logits, routing, correction), routing)
        return chosen, self.weigh(logits, chosen, routing)

    def choice_scores(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Tensor:
        return choice_scores(logits.float(), routing, correction)

    def choose(self, scores: Tensor, routing: Routing) -> Tensor:
        return choose(scores, routing)

    def weigh(self, logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        return weigh(logits.float(), chosen, routing)

    def spread(self, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
        return weights.new_zeros(len(weights), experts).scatter(-1, chosen, weights)

    def expert_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The rows of one expert, any number of them [rows, inputs], times its weight [inputs, outputs]."""
        return x @ weight

    def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
        pre = expert_products(x, chosen, experts.up, experts.up_bias, self.expert_product)
        return self.activate(pre, kind, experts.gated)

    def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        return expert_products(hidden, chosen, experts.down, experts.down_bias, self.expert_product)

    def combine(self, outs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        total: Tensor | None = None
        for out, weight in zip(outs.unbind(1), weights.unbind(1), strict=True):
            part = (out * weight[:, None]).to(outs.dtype)  # in float32, then rounded
            total = part if total is None else total + part
        assert total is not None  # at least one expert is chosen
        return total if residual is None else residual + total


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """GPT-OSS's gated activation, built like the other ones from exp."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * sigmoid(gate * SWIGLU_ALPHA))


def weighted(x: Tensor, norm: Norm) -> Tensor:
    """x [..., heads, width], normed, times each head's weights, plus their biases. Elementwise, hence canonical anywhere."""
    return x * norm.weight if norm.bias is None else x * norm.weight + norm.bias


class SequenceOps(TorchOps):
    """Whole sequences packed one after the other, without a cache: for training, and as the reference of the other ops."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        q, k, v = self.turned(heads)
        if len(set(self.lengths)) == 1:
            return self._attend_batch(q, k, v, spec, observe, self.lengths[0], heads.sinks)
        if observe is not None:
            raise ValueError("The attention pattern of ragged sequences is not one tensor. Give sequences of equal length.")
        pieces = zip(q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True)
        return torch.cat([self._attend_batch(*piece, spec, None, len(piece[0]), heads.sinks) for piece in pieces])

    def _attend_batch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        observe: Observer | None,
        length: int,
        sinks: Tensor | None,
    ) -> Tensor:
        rows, heads, d_head = q.shape
        fold = lambda x: x.view(rows // length, length, x.shape[1], d_head).transpose(1, 2)  # noqa: E731
        q, k, v = fold(q), fold(k), fold(v)  # [sequences, heads, length, d_head]
        group = heads // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mask = visible(torch.arange(length, device=q.device), length, spec.window)
        if spec.softcap or spec.slopes or sinks is not None or observe is not None:
            scores = softcap(q @ k.transpose(-1, -2) * spec.scale, spec.softcap)
            if spec.slopes:
                scores = scores + position_bias(spec.slopes, length, scores)[:, None]
            hidden = scores.masked_fill(~mask, float("-inf"))
            if sinks is not None:
                hidden = torch.cat([hidden, sinks.view(-1, 1, 1).expand(*hidden.shape[:-1], 1)], dim=-1)
            pattern = hidden.softmax(-1)[..., :length]
            shown = lambda x: x.transpose(1, 2).reshape(rows, heads, length)  # noqa: E731
            if observe is not None and observe.scores is not None:
                observe.scores(shown(scores.masked_fill(~mask, MASKED)))
            if observe is not None and observe.pattern is not None:
                observe.pattern(shown(pattern))
            out = pattern @ v
        elif spec.window:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
        return out.transpose(1, 2).reshape(rows, heads, d_head)

    def short_conv(self, x: Tensor, conv: Conv, layer: int, silu: bool = False) -> Tensor:
        taps = len(conv.weight)
        seen = [F.pad(each, (0, 0, taps - 1, 0)).unfold(0, taps, 1) for each in x.split(self.lengths)]  # [rows, channels, taps]
        out = (torch.cat(seen) * conv.weight.t()).sum(-1)
        out = out if conv.bias is None else out + conv.bias
        return self.activate(out, "silu", gated=False) if silu else out

    def recur(self, given: Recurrence, layer: int, observe: Callable[[Tensor], object] | None = None) -> Tensor:
        group = given.v.shape[1] // given.q.shape[1]
        q, k = given.q.repeat_interleave(group, dim=1), given.k.repeat_interleave(group, dim=1)
        starts = {sum(self.lengths[:i]) for i in range(len(self.lengths))}
        states: list[Tensor] = []
        for t in range(len(q)):
            before = q.new_zeros(*k.shape[1:], given.v.shape[2]) if t in starts else states[-1]  # [heads, d_key, d_value]
            left, u = given.decay[t].exp()[:, None, None] * before, given.v[t]
            if given.strength is not None:
                u = given.strength[t][:, None] * (u - (k[t][..., None] * left).sum(1))
            states.append(left + k[t][..., None] * u[:, None])
        if observe is not None:
            observe(torch.stack(states))
        return torch.stack([(q[t][..., None] * state).sum(1) for t, state in enumerate(states)])


def visible(positions: Tensor, num_keys: int, window: int) -> Tensor:
    """Which keys each row sees: [rows, num_keys], key j at position j."""
    keys = torch.arange(num_keys, device=positions.device)
    seen = keys[None, :] <= positions[:, None]
    return seen & (keys[None, :] > positions[:, None] - window) if window else seen


def position_bias(slopes: Sequence[float], num_keys: int, like: Tensor) -> Tensor:
    """What ALiBi adds to the scores of keys 0, 1, ...: [heads, num_keys].

    It depends on the key alone: a row's distance to it differs by a constant, which a softmax does not see. So the sums of a
    row do not depend on which rows are computed with it.
    """
    keys = torch.arange(num_keys, device=like.device, dtype=like.dtype)
    return torch.tensor(slopes, device=like.device, dtype=like.dtype)[:, None] * keys


def softcap(x: Tensor, cap: float) -> Tensor:
    """Squash into (-cap, cap); 0: unchanged."""
    return torch.tanh(x / cap) * cap if cap else x
