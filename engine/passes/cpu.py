"""Portable arithmetic on a CPU, as a decoder asks for it, and the fast path.

Every committed row is computed by `kernels/cpu.py`, whose bits depend neither on the other rows nor on threads or machine. What
is left to torch moves bits, or adds, multiplies and divides single numbers, which IEEE 754 rounds alike everywhere. The fast
path sums every product as one chain: its last bits differ now and then.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.model.config import BARRED, Activation, Functions, Routing, choice_scores
from replaylens.engine.model.layers import Conv, Experts, Linear, Norm, Packable, Rotary
from replaylens.engine.model.ops import MASKED, AttentionSpec, Heads, Observer, Recurrence, TorchOps
from replaylens.engine.passes.batch import Batch, not_finite
from replaylens.engine.request.placed import PATTERN, PlacedEdit
from replaylens.engine.terminal import Later
from replaylens.kernels import cpu as portable
from replaylens.kernels.cpu import PARTS, Panels, product
from replaylens.kernels.cpu_attention import HostRows, attend, store
from replaylens.kernels.threads import GRAIN

if TYPE_CHECKING:
    from replaylens.engine.passes.recurrent import MixedRows
    from replaylens.kernels import cpu_experts as mixtures
else:  # its kernels are compiled for mixtures only
    mixtures = Later("replaylens.kernels.cpu_experts")

FUNCTIONS = Functions(lambda x: portable.apply("exp", x), lambda x: portable.apply("sigmoid", x))
"""exp and sigmoid, for routing"""

# ---- products --------------------------------------------------------------------------------------------------------
# The matrix products of one model. A product has the same bits at any number of rows, on any number of threads and on any
# machine (`kernels/cpu.py`), so nothing is padded and nothing has to be tried out.


class Products:
    """The products of one model. Packs each weight at its first use: weights must not change afterwards."""

    def __init__(self, parts: int = PARTS) -> None:
        self.parts = parts
        self._of_modules: dict[tuple[Packable, str, bool], Panels] = {}
        self._panels: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Tensor, Panels]] = {}

    def linear(self, x: Tensor, linear: Linear, residual: Tensor | None = None) -> Tensor:
        """x [rows, inputs] -> [rows, outputs], plus the residual stream, if given"""
        more = None if residual is None else rows_of(residual)
        return product(rows_of(x), self.of(linear), linear.bias, more, self.parts)

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, heads, inputs] times weight [heads, inputs, outputs], head by head: [rows, heads, outputs]"""
        out = x.new_empty(*x.shape[:2], weight.shape[2])
        for head, each in enumerate(weight):
            out[:, head] = self.product(x[:, head], each)
        return out

    def product(self, x: Tensor, weight: Tensor | Panels) -> Tensor:
        """x [rows, inputs] times weight [inputs, outputs], of any strides -> [rows, outputs]"""
        return product(rows_of(x), weight if isinstance(weight, Panels) else self.panels(weight), parts=self.parts)

    def of(self, module: Packable, name: str = "weight", turned: bool = False) -> Panels:
        """A module's weight as products read it; turned: transposed, for gradients."""
        held = module.panels.get(name)
        if not turned and isinstance(held, Panels):
            return held
        key = module, name, turned
        if key not in self._of_modules:
            weight = module.as_multiplied(name, getattr(module, name))
            self._of_modules[key] = Panels.of(weight.mT if turned else weight)
        return self._of_modules[key]

    def in_one_chain(self) -> "Products":
        """The same weights, each product summed as one chain: the fast path."""
        other = Products(parts=1)
        other._panels, other._of_modules = self._panels, self._of_modules
        return other

    def panels(self, weight: Tensor) -> Panels:
        """The weight as products read it."""
        where = weight.data_ptr(), weight.stride(), tuple(weight.shape)
        if where not in self._panels:
            self._panels[where] = (weight, Panels.of(weight))  # the weight stays alive, so that its address is not reused
        return self._panels[where][1]


def rows_of(x: Tensor) -> Tensor:
    """Rows [rows, width] that lie in memory as kernels read them: each of them contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


# ---- edges -----------------------------------------------------------------------------------------------------------
# Edges of attention (query, key, head) that edits cut or set.


@dataclass(frozen=True, eq=False)
class Cut:
    """The edges of a layer that are cut or set. An edge of one query changes nothing for another."""

    site: str
    mask: Tensor
    """[rows, heads, keys] uint16: 1 where an edge is hidden from the softmax"""
    put: Tensor
    """likewise, in float: weights that edges have after it; NaN where they keep their own"""

    @property
    def hides(self) -> bool:
        return bool(self.mask.any())


def cut_of(batch: Batch, layer: int, heads: int) -> Cut | None:
    """The cut edges of a layer; None if no edit cuts any."""
    site = f"blocks.{layer}.{PATTERN}"
    if not any(edit.site == site and edit.touches(s.start, s.end) for s in batch.segments for edit in s.edits):
        return None
    most = max(segment.end for segment in batch.segments)
    mask = torch.zeros(batch.num_rows, heads, most, dtype=torch.int16)
    put = torch.full((batch.num_rows, heads, most), math.nan, dtype=torch.float32)
    for index, segment in enumerate(batch.segments):
        for edit in segment.edits:
            if edit.site != site:
                continue
            for position in edit.edited(segment.start, segment.tokens):
                keys = [key for key in edit.keys if key <= position]
                at = batch.row(index, position), torch.tensor(list(edit.heads) or list(range(heads)))[:, None], keys
                if edit.op == "mask":
                    mask[at] = 1
                else:  # the later of two edits of an edge counts
                    put[at] = _weights(edit, position, len(keys)) if edit.op == "set" else torch.zeros((), dtype=put.dtype)
    return Cut(site, mask, put)


def _weights(edit: PlacedEdit, position: int, known: int) -> Tensor:
    """The weights that the edit's heads set at a position, of its keys up to the position: [heads, keys]"""
    value = edit.vectors[..., list(edit.heads), :] if edit.heads else edit.vectors
    rows = value[edit.place(position)] if value.dim() == 3 else value
    columns = [i for i, key in enumerate(edit.keys) if key <= position]
    assert len(columns) == known
    return rows[..., columns]


# ---- ops -------------------------------------------------------------------------------------------------------------


class CpuRowOps(TorchOps):
    """Ops of single rows, inside or outside a pass."""

    def __init__(self, products: Products) -> None:
        self.products = products

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return self.products.linear(x, linear)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if x.numel() < GRAIN:  # torch has one thread within a pass, and less to do before it
            return x + y
        return portable.pointwise("add", rows_of(x), rows_of(y), x.new_empty(x.shape))

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        return self.products.linear(x, linear, residual)

    def unembed(self, x: Tensor, table: Tensor | portable.Panels) -> Tensor:
        return self.products.product(x, table.t() if isinstance(table, Tensor) else table)

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.products.by_head(x, weight)

    def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
        up = self.products.of(experts, "up")
        found = mixtures.expert_products(rows_of(x), chosen, up, experts.up_bias, self.products.parts)
        return self.activate(found, kind, experts.gated)

    def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        down = self.products.of(experts, "down")
        return mixtures.expert_products(rows_of(hidden), chosen, down, experts.down_bias, self.products.parts)

    def combine(self, outs: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = None if residual is None else rows_of(residual)
        return mixtures.combine(outs.contiguous(), weights.contiguous(), rows)

    def spread(self, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
        return mixtures.spread(weights.contiguous(), chosen, experts)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return portable.norm(rows_of(x), norm.weight, norm.bias, norm.eps, norm.kind)

    def norm_parts(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        scale = x.new_empty(*x.shape[:-1], 1)
        return scale, portable.norm(rows_of(x), None, None, norm.eps, norm.kind, scale)

    def activate(self, x: Tensor, kind: Activation, gated: bool) -> Tensor:
        return portable.activate(rows_of(x), kind, gated)

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        return portable.rotate_(x.clone(memory_format=torch.contiguous_format), rotary.table, rotary.positions)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return portable.apply("tanh", x / cap).mul_(cap) if cap else x

    def sigmoid(self, x: Tensor) -> Tensor:
        return portable.apply("sigmoid", x)

    def exp(self, x: Tensor) -> Tensor:
        return portable.apply("exp", x)

    def softplus(self, x: Tensor) -> Tensor:
        return portable.apply("softplus", x)

    def choice_scores(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Tensor:
        return choice_scores(logits, routing, correction, FUNCTIONS)

    def choose(self, scores: Tensor, routing: Routing) -> Tensor:
        groups = routing.groups, routing.chosen_groups, routing.group_best
        return mixtures.choose(rows_of(scores), routing.top, *groups, BARRED)

    def weigh(self, logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        r = routing
        return mixtures.weigh(rows_of(logits), chosen, r.kind, r.normalised, r.scale, r.floor, r.jitter)


class CpuOps(CpuRowOps):
    """The arithmetic of a pass, with attention through the paged cache."""

    def __init__(self, batch: Batch, cache: KVCache, products: Products, told: Tensor | None = None) -> None:
        """told  see `store`"""
        super().__init__(products)
        self.batch, self.cache, self.told = batch, cache, told

    @cached_property
    def mixed(self) -> "MixedRows":
        from replaylens.engine.passes.recurrent import MixedRows  # its kernels are compiled for hybrids only

        return MixedRows(self.batch, self.cache, self.told)

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        q, kv = self._queries_and_kv(heads)
        held = self.cache.data[self.cache.index[spec.layer]]
        if not store(rows_of(kv), held.flatten(0, 1), self.batch.write_slots, self.told):
            raise not_finite("keys or values")
        keys, values = held[0], held[-1, ..., : self.cache.value_width]
        cut = cut_of(self.batch, spec.layer, q.shape[1])
        if cut is not None or observe is not None:
            return edged(q, keys, values, self.batch.paged, spec, heads.sinks, cut, observe)
        return attend(q, keys, values, self.batch.paged, *_settings(spec, heads.sinks))

    def _queries_and_kv(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Queries [rows, heads, d_head], and keys and values [rows, 2 kv_heads, d_head], with the pending rotation applied.
        Keys that are also the values come once."""
        if heads.joined is None:
            if heads.v is heads.k:
                return rows_of(heads.q), heads.k
            q, k, v = self.turned(heads)
            return rows_of(q), torch.cat([k, v], dim=1)
        num_queries = heads.q.shape[1]
        if heads.rotary is not None:
            turned = heads.joined[:, : num_queries + heads.k.shape[1]]
            portable.rotate_(turned, heads.rotary.table, heads.rotary.positions)
        return heads.q, heads.joined[:, num_queries:]

    def short_conv(self, x: Tensor, conv: Conv, layer: int, silu: bool = False) -> Tensor:
        from replaylens.engine.passes.recurrent import convolve

        out = convolve(x, conv, layer, self.cache, self.mixed)
        return self.activate(out, "silu", gated=False) if silu else out

    def recur(self, given: Recurrence, layer: int, observe: Callable[[Tensor], object] | None = None) -> Tensor:
        from replaylens.engine.passes.recurrent import Walk

        walk = Walk(given, layer, self.batch, self.cache, self.mixed)
        if observe is not None:
            observe(walk.states())
        return walk.out


def _settings(spec: AttentionSpec, sinks: Tensor | None) -> tuple[float, float, int, Tensor | None, Tensor | None]:
    return spec.scale, spec.softcap, spec.window, _slopes(spec.slopes) if spec.slopes else None, sinks


@cache
def _slopes(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def edged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    paged: HostRows,
    spec: AttentionSpec,
    sinks: Tensor | None,
    cut: Cut | None,
    observe: Observer | None = None,
) -> Tensor:
    """Attention with edges that edits cut or set, or whose inside somebody is shown. Arguments as `attend`'s."""
    most = int(paged.position.max()) + 1
    scores = torch.full((len(q), q.shape[1], most), -math.inf, dtype=torch.float32)
    hidden = cut.mask[..., :most].contiguous() if cut is not None and cut.hides else None
    z = attend(q, keys, values, paged, *_settings(spec, sinks), scores, hidden)
    if cut is not None and hidden is not None and bool((scores.amax(-1) == -math.inf).any()):
        raise BadEdit(
            f"Edits of {cut.site} hide every key that a position sees, within its sliding window if it has one. Leave at "
            "least one, or use the op 'zero'."
        )
    if observe is not None and observe.scores is not None:
        observe.scores(scores.clamp(min=MASKED))
    pattern = _pattern(scores, sinks)
    if cut is not None:
        _set(z, pattern, scores, cut.put[..., :most], values, paged)
    if observe is not None and observe.pattern is not None:
        observe.pattern(pattern)
    return z


def _set(z: Tensor, pattern: Tensor, scores: Tensor, put: Tensor, values: Tensor, paged: HostRows) -> None:
    """Mutates outputs and patterns of the pairs with a weight that is set: the sum over all keys with the new weights."""
    given = ~put.isnan() & (scores > -math.inf)
    torch.where(given, put, pattern, out=pattern)
    group = z.shape[1] // len(values)
    for row, head in given.any(-1).nonzero().tolist():
        num = int(paged.position[row]) + 1
        pages = paged.pages[paged.sequence[row]]
        at = torch.arange(num)
        own = values[head // group, pages[at // paged.page_size] * paged.page_size + at % paged.page_size]
        z[row, head] = portable.product(pattern[row, head : head + 1, :num], portable.Panels.of(own))[0]


def _pattern(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [rows, heads, keys], with a sink's share left out."""
    top = scores.amax(-1, keepdim=True)
    top = top if sinks is None else torch.maximum(top, sinks[:, None])
    weights = portable.apply("exp", scores - top)
    total = portable.row_sums(weights)
    total = total if sinks is None else total + portable.apply("exp", sinks[:, None] - top)
    return weights.div_(total)
