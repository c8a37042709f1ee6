"""Canonical arithmetic on a CPU, and the fast path.

What makes an op canonical:
* Products run on zero-padded tiles of 16 rows and on one thread. Larger row counts and more threads are used only if the
  certificate shows that they give the same bits (`Products`: the library may split K between threads at some sizes).
* Attention sums over fixed blocks of 64 keys from absolute position 0, one after the other. The maximum is exact, so it is
  taken over all keys at once.
* Transcendental functions are built from exp, tanh and erf, which give an element the same bits at any index. The library's
  silu and tanh-gelu do not: their vector body and scalar tail round differently.
"""

import math
from functools import cached_property, partial

import torch
from torch import Tensor

from replaylens.engine.errors import EngineBug
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.model.config import Activation
from replaylens.engine.model.layers import Linear, Norm
from replaylens.engine.model.ops import MASKED, AttentionSpec, Heads, Observer
from replaylens.engine.model.rotary import Rotary
from replaylens.engine.model.torch_ops import TorchOps, clamped_swiglu, position_bias, softcap
from replaylens.engine.passes.batch import KV_BLOCK, Batch
from replaylens.engine.passes.batched import BatchedProduct, by_torch
from replaylens.engine.passes.edges import Cut, cuts
from replaylens.engine.passes.prefixes import Prefixes, attend_prefixes, find_prefixes
from replaylens.engine.passes.products import Products


class CpuOps(TorchOps):
    """Row-wise ops on a CPU: the same functions as `TorchOps`, with fewer copies and calls."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The library's steps, to the bit, without its dispatch."""
        if norm.kind == "layer":
            return super().norm(x, norm)
        scale = x.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
        return (x * scale).mul_(norm.weight)

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        return rotate_(x.clone(memory_format=torch.contiguous_format), rotary)

    def activate(self, x: Tensor, kind: Activation, gated: bool) -> Tensor:
        if not gated:
            return activate(x, kind)
        gate, up = x.chunk(2, dim=-1)
        return clamped_swiglu(gate, up) if kind == "clamped_swiglu" else activate(gate, kind).mul_(up)

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        return self.linear(x, linear).add_(residual)


class CachedOps(CpuOps):
    """Attention through the paged cache. Subclasses define the products."""

    def __init__(self, batch: Batch, cache: KVCache, product: BatchedProduct) -> None:
        """product  gives the bits of `by_torch`"""
        self.batch, self.cache, self.product = batch, cache, product

    @cached_property
    def prefixes(self) -> Prefixes | None:
        """Which rows share keys; None: no sharing is worth it."""
        _, planes, kv_heads, _, width = self.cache.data.shape
        key_bytes = planes * kv_heads * width * self.cache.data.element_size()
        return find_prefixes(self.batch, -(-self.cache.worth_sharing // key_bytes))

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        q, kv = self._queries_and_kv(heads)
        batch = self.batch
        self.cache.write(spec.layer, batch.write_slots, kv[: batch.num_rows])
        cut = cuts(batch, spec.layer, q.shape[1])
        alike = not cut and not spec.window and not spec.slopes  # shared keys have neither edges, windows nor a bias
        if observe is None and alike and self.prefixes is not None:
            return self._attend_prefixes(q, self.prefixes, spec, heads.sinks)
        outs, patterns, scores = [], [], list[Tensor]()
        for number, (group, rows) in enumerate(zip(batch.groups, batch.queries, strict=True)):
            keys, values = self.cache.gather(spec.layer, group.slots)
            queries = q.index_select(0, rows).view(*group.rows.shape, *q.shape[1:])
            z, pattern = attend_blocks(
                queries,
                keys,
                values,
                group.ceiling(spec.window),
                spec.softcap,
                observe is not None and observe.pattern is not None,
                spec.scale,
                self.product,
                cut[number] if cut else None,
                scores if observe is not None and observe.scores is not None else None,
                spec.slopes,
                heads.sinks,
            )
            outs.append(z.flatten(0, 1))
            patterns.append(pattern)
        if observe is not None and observe.scores is not None:
            observe.scores(self._assemble(scores, q.shape[1], MASKED))
        if observe is not None and observe.pattern is not None:
            observe.pattern(self._assemble(patterns, q.shape[1], 0.0))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).index_select(0, batch.query_of_row)

    def _attend_prefixes(self, q: Tensor, prefixes: Prefixes, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        """The same bits; keys that rows share are gathered and multiplied once."""
        gather, kv_heads = partial(self.cache.gather, spec.layer), self.cache.data.shape[2]
        outs = []
        for group in prefixes.rest:
            keys, values = gather(group.slots)
            rows = group.rows.view(-1) * (group.rows.view(-1) < self.batch.padded)
            queries = q.index_select(0, rows).view(*group.rows.shape, *q.shape[1:])
            settings = (group.ceiling(0), spec.softcap, False, spec.scale, self.product)
            outs.append(attend_blocks(queries, keys, values, *settings, sinks=sinks)[0].flatten(0, 1))
        outs += attend_prefixes(q, prefixes, gather, kv_heads, spec.scale, spec.softcap, self.product, sinks)
        return torch.cat(outs).index_select(0, prefixes.query_of_row)

    def _queries_and_kv(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Queries [rows, heads, d_head], and keys and values [rows, 2 kv_heads, d_head], with the pending rotation applied.
        Keys that are also the values come once."""
        if heads.joined is None:
            if heads.v is heads.k:
                return heads.q, heads.k
            q, k, v = self.turned(heads)
            return q, torch.cat([k, v], dim=1)
        num_queries = heads.q.shape[1]
        if heads.rotary is not None:
            rotate_(heads.joined[:, : num_queries + heads.k.shape[1]], heads.rotary)
        return heads.q, heads.joined[:, num_queries:]

    def _assemble(self, patterns: list[Tensor], heads: int, rest: float) -> Tensor:
        """One tensor [padded rows, heads, largest number of keys] from the groups' pieces; `rest` where a group has no key."""
        groups = self.batch.groups
        out = torch.full((self.batch.padded + 1, heads, max(g.num_keys for g in groups)), rest, dtype=patterns[0].dtype)
        for group, pattern in zip(groups, patterns, strict=True):
            out[group.rows, :, : group.num_keys] = pattern
        return out[:-1]


def rotate_(x: Tensor, rotary: Rotary) -> Tensor:
    """Mutates and returns x [rows, heads, d_head]: pairs (a, b) of its dimensions become (a cos - b sin, b cos + a sin)."""
    cos, sin = rotary.turns  # sin with the sign of its term: a cos + b (-sin) has the bits of a cos - b sin
    pairs = x[..., : cos.shape[-1]]
    swapped = pairs.roll(cos.shape[-1] // 2, -1).mul_(sin)
    pairs.mul_(cos).add_(swapped)
    return x


def attend_blocks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ceiling: Tensor,
    cap: float,
    want_pattern: bool,
    scale: float = 1.0,
    product: BatchedProduct = by_torch,
    cut: Cut | None = None,
    seen_scores: list[Tensor] | None = None,
    slopes: tuple[float, ...] = (),
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of queries, times `scale`, over gathered keys, without the edges of `cut`.

    q [pieces, rows, heads, d], keys and values [kv_heads, pieces * n, d], ceiling [pieces, rows, 1, the last keys]
    -> ([pieces, rows, heads, d], pattern [pieces, rows, heads, n] or an empty tensor)

    seen_scores  if given, the scores are appended to it, in the shape of the pattern
    slopes       per head, what is added to a score for each position of its key
    sinks        per head, a score that belongs to no key: its weight is added to the sum of weights last
    """
    pieces, rows, heads, d = q.shape
    kv_heads = keys.shape[0]
    group, n = heads // kv_heads, keys.shape[1] // pieces
    by_head = q.view(pieces, rows, kv_heads, group, d).permute(2, 0, 1, 3, 4)
    folded = torch.mul(by_head, scale, out=q.new_empty(by_head.shape)).view(kv_heads * pieces, rows * group, d)
    keys, values = keys.view(kv_heads * pieces, n, d), values.view(kv_heads * pieces, n, d)
    scores = softcap(product(folded, keys.transpose(1, 2)), cap)
    if slopes:  # keys are those of positions 0, 1, ...
        scores.view(kv_heads, pieces, rows, group, n).add_(position_bias(slopes, n, q).view(kv_heads, 1, 1, group, n))
    last = scores.view(kv_heads, pieces, rows, group, n)[..., n - ceiling.shape[-1] :]
    torch.minimum(last, ceiling, out=last)
    shape = (kv_heads, pieces, rows, group, -1)
    seen = scores.view(shape) > -math.inf if cut is not None and cut.put is not None else None
    if cut is not None:
        cut.hide_(scores.view(shape))
    back = lambda x: x.view(kv_heads, pieces, rows, group, -1).permute(1, 2, 0, 3, 4)  # noqa: E731
    if seen_scores is not None:  # a copy: the weights take their place
        seen_scores.append(back(scores.clamp(min=MASKED)).reshape(pieces, rows, heads, n))
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.view(kv_heads, 1, 1, group, 1)
        top = torch.maximum(top.view(shape), sink).view(top.shape)
    weights = scores.sub_(top).exp_()
    total = weights[..., :KV_BLOCK].sum(-1, keepdim=True)
    for first in range(KV_BLOCK, n, KV_BLOCK):  # this order defines the bits
        total += weights[..., first : first + KV_BLOCK].sum(-1, keepdim=True)
    if sinks is not None:
        total += (sink - top.view(shape)).exp_().view(total.shape)
    if cut is not None:
        cut.weigh_(weights.view(shape), total.view(shape), seen)
    out = product(weights[..., :KV_BLOCK], values[:, :KV_BLOCK])
    for first in range(KV_BLOCK, n, KV_BLOCK):
        out += product(weights[..., first : first + KV_BLOCK], values[:, first : first + KV_BLOCK])
    z = torch.div(back(out), back(total), out=out.new_empty(pieces, rows, kv_heads, group, d)).view(q.shape)
    pattern = back(weights / total).reshape(pieces, rows, heads, n) if want_pattern else out.new_empty(0)
    return z, pattern


class CanonicalRowOps(CpuOps):
    """Row-wise ops of committed rows, inside or outside a pass, with certified products."""

    def __init__(self, products: Products) -> None:
        self.products = products

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return self.products.linear(x, linear)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        return self.products.unembed(x, table)

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.products.by_head(x, weight)

    def expert_product(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.products.few(x, weight)


class CanonicalCpuOps(CanonicalRowOps, CachedOps):
    """The arithmetic of committed rows."""

    def __init__(self, batch: Batch, cache: KVCache, products: Products, product: BatchedProduct) -> None:
        CanonicalRowOps.__init__(self, products)
        CachedOps.__init__(self, batch, cache, product)
        self._real = {batch.padded: batch.num_rows}

    def read_only_last(self, rows: int, real: int) -> None:
        """Mutates: the last block continues with `rows` rows, of which the first `real` are not padding."""
        self._real[rows] = max(real, self._real.get(rows, 0))  # of two numbers of rows that are equal, more are computed

    def real_rows(self, rows: int) -> int:
        return self._real.get(rows, rows)


class FastCpuOps(CachedOps):
    """The fast path: the library's products at any row count."""


def activate(x: Tensor, kind: Activation) -> Tensor:
    """Activations that give an element the same bits at any index; see the module docstring."""
    match kind:
        case "silu":
            below = torch.neg(x).exp_().add_(1)
            return torch.div(x, below, out=below)
        case "gelu_tanh":
            inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi))
            return inner.tanh_().add_(1).mul_(x).mul_(0.5)
        case "gelu":
            return (x * math.sqrt(0.5)).erf_().add_(1).mul_(x).mul_(0.5)
        case "relu":
            return x.relu()
        case "relu2":
            return x.relu().square_()
        case "clamped_swiglu":
            raise EngineBug("clamped_swiglu has no form without a gate.")
