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
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, InternalError
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import page_matrix
from replaylens.engine.model.config import Activation
from replaylens.engine.model.layers import Linear, Norm, Rotary
from replaylens.engine.model.ops import MASKED, AttentionSpec, Heads, Observer, TorchOps, clamped_swiglu, position_bias, softcap
from replaylens.engine.passes.batch import KV_BLOCK, AttentionGroup, Batch, SharedRun, shared_runs
from replaylens.engine.passes.products import BatchedProduct, Products, by_torch
from replaylens.engine.request.placed import PATTERN, PlacedEdit

# ---- edges -----------------------------------------------------------------------------------------------------------
# Edges of attention (query, key, head) that edits cut or set, for the attention of a CPU.


@dataclass(frozen=True, eq=False)
class Cut:
    """The edges that are cut or set in one attention group. An edge of one query changes nothing for another."""

    site: str
    mask: Tensor
    """[pieces, query rows, heads, keys] bool: hidden from the softmax"""
    zero: Tensor
    """likewise: weights that become zero after it"""
    put: Tensor | None = None
    """likewise, in float: weights that edges are set to after it; NaN where they are not"""

    def hide_(self, scores: Tensor) -> None:
        """Mutates scores [kv_heads, pieces, query rows, heads per key head, keys]: masks; BadEdit if a query sees no key."""
        scores.masked_fill_(_by_key_heads(self.mask, len(scores)), -math.inf)
        if bool((scores.amax(-1) == -math.inf).any()):
            raise BadEdit(
                f"Edits of {self.site} hide every key that a position sees, within its sliding window if it has one. Leave at "
                "least one, or use the op 'zero'."
            )

    def weigh_(self, weights: Tensor, total: Tensor, seen: Tensor | None) -> None:
        """Mutates weights and their total, in the shape of scores: zeroes and sets weights.

        A row with a weight that is set is normalised first, so that its total is 1 and every weight is as it is shown.

        seen  if weights are set, where a query sees the key: elsewhere it has no edge
        """
        weights.masked_fill_(_by_key_heads(self.zero, len(weights)), 0.0)
        if self.put is None or seen is None:
            return
        put = _by_key_heads(self.put, len(weights)).to(weights)
        given = ~put.isnan() & seen
        rows = given.any(-1, keepdim=True)
        torch.where(rows, weights / total, weights, out=weights)
        total.masked_fill_(rows, 1.0)
        torch.where(given, put, weights, out=weights)


def _by_key_heads(edges: Tensor, kv_heads: int) -> Tensor:
    """[pieces, query rows, heads, keys] -> [kv_heads, pieces, query rows, heads per key head, keys]"""
    return edges.unflatten(2, (kv_heads, -1)).permute(2, 0, 1, 3, 4)


def cuts(batch: Batch, layer: int, heads: int) -> list[Cut]:
    """The cut edges of every attention group of a layer; an empty list if no edit cuts any."""
    site = f"blocks.{layer}.{PATTERN}"
    if not any(edit.site == site for segment in batch.segments for edit in segment.edits):
        return []
    most = max(group.num_keys for group in batch.groups)
    edges = {op: torch.zeros(batch.padded + 1, heads, most, dtype=torch.bool) for op in ("mask", "zero")}
    sets = any(edit.site == site and edit.op == "set" for segment in batch.segments for edit in segment.edits)
    put = torch.full((batch.padded + 1, heads, most), math.nan, dtype=torch.float32) if sets else None
    for index, segment in enumerate(batch.segments):
        for edit in segment.edits:
            if edit.site == site:
                positions = edit.edited(segment.start, segment.tokens)
                rows = torch.tensor([batch.row(index, position) for position in positions], dtype=torch.int64)
                at = rows[:, None, None], torch.tensor(list(edit.heads) or list(range(heads)))[:, None]
                keys = [key for key in edit.keys if key < most]
                if edit.op != "set":
                    edges[edit.op][(*at, keys)] = True
                if put is not None and edit.op != "mask":  # the later of two edits of an edge counts
                    put[(*at, keys)] = _weights(edit, positions, most) if edit.op == "set" else torch.tensor(math.nan)
                    edges["zero"][(*at, keys)] = edit.op == "zero"
    of_group = lambda edges, group: edges[group.rows][..., : group.num_keys]  # noqa: E731
    mask, zero = edges["mask"], edges["zero"]
    return [Cut(site, of_group(mask, g), of_group(zero, g), None if put is None else of_group(put, g)) for g in batch.groups]


def _weights(edit: PlacedEdit, positions: list[int], most: int) -> Tensor:
    """The weights that the edit's heads set at the positions, of the keys below `most`; NaN for keys that come later."""
    columns = [i for i, key in enumerate(edit.keys) if key < most]
    value = edit.vectors[..., list(edit.heads), :] if edit.heads else edit.vectors
    rows = value[[edit.place(p) for p in positions]] if value.dim() == 3 else value.expand(len(positions), *value.shape)
    later = torch.tensor([edit.keys[i] for i in columns]) > torch.tensor(positions, dtype=torch.int64)[:, None]
    return rows[..., columns].masked_fill(later[:, None], math.nan)


# ---- prefixes --------------------------------------------------------------------------------------------------------
# Attention on a CPU over keys that many rows share: gathered and multiplied once for all of them.
#
# Rows of different branches stand in one product, in numbers of rows that the certificate allows, so each keeps its bits. The
# order of a row's sum is that of `attend_blocks` (`engine/passes/cpu.py`): its maximum over all keys, then block after block
# from position 0. The blocks of the shared keys come first and leave their sums; the row's own keys are added to them.

Gather = Callable[[Tensor], tuple[Tensor, Tensor]]
"""slots -> keys and values, [kv_heads, slots, d_head] each"""


@dataclass(frozen=True, eq=False)
class PrefixRows:
    """Rows that read the same first keys, as many as one product takes."""

    rows: Tensor
    """[rows]: packed rows; padding points past the last one"""
    slots: Tensor
    """[keys], a multiple of KV_BLOCK"""


@dataclass(frozen=True, eq=False)
class Prefixes:
    """How the rows of a batch are divided: shared keys, the keys after them, and rows that share nothing."""

    shared: list[PrefixRows]
    tails: list[AttentionGroup]
    """their keys begin where the shared ones end"""
    rest: list[AttentionGroup]
    query_of_row: Tensor
    """of every padded row, its place among the queries of rest and tails; padding rows take the first. [padded rows]"""


def find_prefixes(batch: Batch, worth: int) -> Prefixes | None:
    """The division of a batch that saves most, or None if no run of keys saves `worth` of them."""
    size, segments = batch.pool.page_size, batch.segments
    small, large = sorted((size, KV_BLOCK))
    if len(segments) < 2 or large % small:
        return None
    pages = page_matrix([segment.table for segment in segments])
    runs = [run for run in shared_runs(pages, [s.start for s in segments], large, size) if run.saved >= worth]
    if not runs:
        return None
    members = {index for run in runs for index in run.sequences}
    shared = [rows for run in runs for rows in _shared_rows(batch, run)]
    tails = [group for run in runs for group in batch.groups_of(list(run.sequences), run.end)]
    rest = batch.groups_of([i for i in range(len(segments)) if i not in members], 0)
    return Prefixes(shared, tails, rest, batch.places([*rest, *tails]))


def _shared_rows(batch: Batch, run: SharedRun) -> list[PrefixRows]:
    counts = sorted(batch.query_rows)
    rows = [row for i in run.sequences for row in range(batch.offsets[i], batch.offsets[i + 1])]
    table = batch.segments[run.sequences[0]].table
    slots = torch.tensor(batch.pool.slots(table, run.begin, run.end))
    found = []
    for first in range(0, len(rows), counts[-1]):
        some = rows[first : first + counts[-1]]
        room = counts[bisect_left(counts, len(some))]
        found.append(PrefixRows(torch.tensor(some + [batch.padded] * (room - len(some))), slots))
    return found


class RowSums:
    """What a row's attention has come to: maximum, sum of weights, weighted values, for each query head."""

    def __init__(self, rows: int, q: Tensor) -> None:
        heads, d = q.shape[1:]
        self.top = q.new_full((rows, heads), -torch.inf)
        self.total = q.new_empty(rows, heads)
        self.out = q.new_empty(rows, heads, d)
        self.sink: Tensor | None = None
        """[rows, heads]: the weight of a sink, which is added to the total last; None: the heads have none"""


def attend_prefixes(
    q: Tensor,
    prefixes: Prefixes,
    gather: Gather,
    kv_heads: int,
    scale: float,
    cap: float,
    product: BatchedProduct,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Attention of the rows that share keys: one tensor [queries, heads, d] per group of `prefixes.tails`.

    q [padded rows, heads, d]

    sinks  [heads]: scores that belong to no key
    """
    padded = torch.cat([q, q.new_zeros(1, *q.shape[1:])])  # the padding of groups points to the last row
    sums = RowSums(len(padded), q)
    shared = [_Scores(padded, some.rows[None], gather(some.slots), kv_heads, scale, cap, product) for some in prefixes.shared]
    for part in shared:
        part.raise_top(sums)
    tails = [_Scores(padded, group.rows, gather(group.slots), kv_heads, scale, cap, product) for group in prefixes.tails]
    for part, group in zip(tails, prefixes.tails, strict=True):
        part.hide(group.ceiling(0))
        part.raise_top(sums)
    if sinks is not None:
        torch.maximum(sums.top, sinks, out=sums.top)
        sums.sink = (sinks - sums.top).exp_()
    for part in shared:
        part.begin(sums, product)
    return [part.end(sums, product) for part in tails]


class _Scores:
    """Scores of some rows over some keys: [kv_heads * pieces, rows * group, keys]."""

    def __init__(
        self,
        q: Tensor,
        rows: Tensor,
        kv: tuple[Tensor, Tensor],
        kv_heads: int,
        scale: float,
        cap: float,
        product: BatchedProduct,
    ) -> None:
        """rows [pieces, rows]; kv: keys and values [kv_heads, pieces * keys, d]"""
        self.rows, self.kv_heads, self.pieces = rows, kv_heads, len(rows)
        d = q.shape[-1]
        keys, self.values = (x.view(kv_heads * self.pieces, -1, d) for x in kv)
        folded = self._folded(q) * scale
        self.scores = softcap(product(folded, keys.transpose(1, 2)), cap)

    def hide(self, ceiling: Tensor) -> None:
        """Mutates: keys that a row does not see get minus infinity. ceiling [pieces, rows, 1, the last keys]"""
        n = self.scores.shape[-1]
        last = self.scores.view(self.kv_heads, self.pieces, self.rows.shape[1], -1, n)[..., n - ceiling.shape[-1] :]
        torch.minimum(last, ceiling, out=last)

    def raise_top(self, sums: RowSums) -> None:
        """Mutates `sums.top`."""
        flat = self.rows.view(-1)
        top = self._unfolded(self.scores.amax(-1, keepdim=True))[..., 0]
        sums.top.index_copy_(0, flat, torch.maximum(sums.top.index_select(0, flat), top))

    def begin(self, sums: RowSums, product: BatchedProduct) -> None:
        """Mutates: sums of the first keys of the rows."""
        weights = self._weights(sums)
        total = weights[..., :KV_BLOCK].sum(-1, keepdim=True)
        out = product(weights[..., :KV_BLOCK], self.values[:, :KV_BLOCK])
        total, out = self._added(weights, total, out, KV_BLOCK, product)
        flat = self.rows.view(-1)
        sums.total.index_copy_(0, flat, self._unfolded(total)[..., 0])
        sums.out.index_copy_(0, flat, self._unfolded(out))

    def end(self, sums: RowSums, product: BatchedProduct) -> Tensor:
        """The attention of the rows, whose last keys these are: [queries, heads, d]"""
        total, out = self._folded(sums.total[..., None]), self._folded(sums.out)
        total, out = self._added(self._weights(sums), total, out, 0, product)
        if sums.sink is not None:
            total = total + self._folded(sums.sink[..., None])
        return self._unfolded(out) / self._unfolded(total)

    def _weights(self, sums: RowSums) -> Tensor:
        return self.scores.sub_(self._folded(sums.top[..., None])).exp_()

    def _added(self, weights: Tensor, total: Tensor, out: Tensor, start: int, product: BatchedProduct) -> tuple[Tensor, Tensor]:
        """The sums with the blocks from `start` on; this order defines the bits."""
        for first in range(start, weights.shape[-1], KV_BLOCK):
            total = total + weights[..., first : first + KV_BLOCK].sum(-1, keepdim=True)
            out = out + product(weights[..., first : first + KV_BLOCK], self.values[:, first : first + KV_BLOCK])
        return total, out

    def _folded(self, x: Tensor) -> Tensor:
        """Of all rows [rows, heads, n], these rows by key head: [kv_heads * pieces, rows * group, n]"""
        mine = x.index_select(0, self.rows.view(-1)).view(*self.rows.shape, self.kv_heads, -1, x.shape[-1])
        return mine.permute(2, 0, 1, 3, 4).reshape(self.kv_heads * self.pieces, -1, x.shape[-1])

    def _unfolded(self, x: Tensor) -> Tensor:
        """The inverse, for these rows alone: [queries, heads, n]"""
        mine = x.view(self.kv_heads, self.pieces, self.rows.shape[1], -1, x.shape[-1]).permute(1, 2, 0, 3, 4)
        return mine.reshape(self.rows.numel(), -1, x.shape[-1])


# ---- cpu -------------------------------------------------------------------------------------------------------------


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
            raise InternalError("clamped_swiglu has no form without a gate.")
