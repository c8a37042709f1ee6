"""Edges of attention (query, key, head) that edits cut: by attention group on a CPU, by (row, head) pair for the kernels."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.model.ops import AttentionSpec
from replaylens.engine.passes.batch import Batch
from replaylens.engine.request.placed import PATTERN

if TYPE_CHECKING:  # it needs triton
    from replaylens.kernels.edges import CutPairs


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


def cuts_any(batch: Batch) -> bool:
    """Whether an edit cuts an edge of any row of the batch."""
    return any(edit.on_pattern and edit.touches(s.start, s.end) for s in batch.segments for edit in s.edits)


def cut_pairs(batch: Batch, spec: AttentionSpec, heads: int) -> "CutPairs | None":
    """The (row, head) pairs of a layer that lose an edge to a key they see, on the batch's device; None if there are none."""
    from replaylens.kernels.edges import HIDDEN, ZEROED, CutPairs

    site, most = f"blocks.{spec.layer}.{PATTERN}", max(s.end for s in batch.segments)
    found: dict[tuple[int, int], np.ndarray] = {}
    for index, segment in enumerate(batch.segments):
        for edit in segment.edits:
            if edit.site != site:
                continue
            for position in edit.positions(segment.start, segment.end):
                first = max(0, position + 1 - spec.window) if spec.window else 0
                if keys := [key for key in edit.keys if first <= key <= position]:
                    for head in edit.heads or range(heads):
                        edges = found.setdefault((batch.row(index, position), head), np.zeros(most, dtype=np.uint8))
                        if edit.op == "mask":
                            edges[keys] = HIDDEN
                        else:
                            edges[keys] = np.where(edges[keys] == HIDDEN, HIDDEN, ZEROED)
    if not found:
        return None
    there = lambda x: torch.from_numpy(x).to(batch.tokens.device, non_blocking=True)  # noqa: E731
    row, head = np.array(list(found), dtype=np.int32).T
    return CutPairs(there(row.copy()), there(head.copy()), there(np.stack(list(found.values()))))
