"""Attention on a CPU over keys that many rows share: gathered and multiplied once for all of them.

Rows of different branches stand in one product, in numbers of rows that the certificate allows, so each keeps its bits. The
order of a row's sum is that of `attend_blocks` (`engine/passes/cpu.py`): its maximum over all keys, then block after block
from position 0. The blocks of the shared keys come first and leave their sums; the row's own keys are added to them.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.memory.pages import page_matrix
from replaylens.engine.model.torch_ops import softcap
from replaylens.engine.passes.batch import KV_BLOCK, AttentionGroup, Batch
from replaylens.engine.passes.batched import BatchedProduct
from replaylens.engine.passes.runs import SharedRun, shared_runs

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
