"""Edges of attention (query, key, head) that edits cut, for the attention of a CPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.passes.batch import Batch
from replaylens.engine.request.placed import PATTERN


@dataclass(frozen=True, eq=False)
class Cut:
    """The edges that are cut in one attention group. An edge of one query changes nothing for another."""

    mask: Tensor
    """[pieces, query rows, heads, keys] bool: hidden from the softmax"""
    zero: Tensor
    """likewise: weights that become zero after it"""

    def masked(self, kv_heads: int) -> Tensor:
        """`mask` by key heads: [kv_heads, pieces, query rows, heads per key head, keys]"""
        return self.mask.unflatten(2, (kv_heads, -1)).permute(2, 0, 1, 3, 4)

    def zeroed(self, kv_heads: int) -> Tensor:
        """`zero` by key heads."""
        return self.zero.unflatten(2, (kv_heads, -1)).permute(2, 0, 1, 3, 4)


def cuts(batch: Batch, layer: int, heads: int) -> list[Cut]:
    """The cut edges of every attention group of a layer; an empty list if no edit cuts any."""
    site = f"blocks.{layer}.{PATTERN}"
    if not any(edit.site == site for segment in batch.segments for edit in segment.edits):
        return []
    most = max(group.num_keys for group in batch.groups)
    edges = {op: torch.zeros(batch.padded + 1, heads, most, dtype=torch.bool) for op in ("mask", "zero")}
    for index, segment in enumerate(batch.segments):
        for edit in segment.edits:
            if edit.site == site:
                rows = [batch.row(index, position) for position in edit.positions(segment.start, segment.end)]
                keys = [key for key in edit.keys if key < most]
                chosen = list(edit.heads) or list(range(heads))
                edges[edit.op][torch.tensor(rows, dtype=torch.int64)[:, None, None], torch.tensor(chosen)[:, None], keys] = True
    return [Cut(*(edges[op][group.rows][..., : group.num_keys] for op in ("mask", "zero"))) for group in batch.groups]
